// src/text/jinja/parse.h - declarations shared by the statement parser and the expression parser.
#pragma once

#include "text/jinja/jinja.h"

typedef struct {
  jj *j;
  const jj_token *t; // current token; the array ends with TOK_EOF, which is never passed over
  int depth;         // nesting depth of expressions and statements
  int n_loops;       // enclosing for loops within the innermost macro or block
} jj_parser;

// What ends a tuple, besides closing brackets and tag ends, and what it may contain.
typedef struct {
  const char *end_word; // a name, or NULL
  bool targets_only;    // names and literals only, for assignments
  bool no_conditional;
  bool parenthesized; // may be empty
  bool namespaces;    // may contain ns.attr targets
} jj_tuple_opts;

bool jj_at_op(const jj_parser *p, const char *op);
bool jj_at_word(const jj_parser *p, const char *word);
bool jj_skip_op(jj_parser *p, const char *op);
bool jj_skip_word(jj_parser *p, const char *word);
void jj_expect_op(jj_parser *p, const char *op);
void jj_expect_word(jj_parser *p, const char *word);
void jj_expect(jj_parser *p, jj_token_kind kind);
const jj_str *jj_expect_name(jj_parser *p);
// Moves to the next token and returns the previous one.
const jj_token *jj_advance(jj_parser *p);
// Raises "expected token X, got Y" at the current token.
_Noreturn void jj_unexpected(jj_parser *p, const char *expected);
void jj_parser_enter(jj_parser *p);

jj_node *jj_node_new(jj_parser *p, jj_node_kind kind, uint32_t line);
void jj_nodes_push(jj_parser *p, jj_nodes *nodes, jj_node *node);

jj_node *jj_parse_expr(jj_parser *p);
jj_node *jj_parse_tuple(jj_parser *p, const jj_tuple_opts *opts);
// Wraps node in the filters "|a|b(c)". bare: the first filter has no pipe. node may be NULL.
jj_node *jj_parse_filters(jj_parser *p, jj_node *node, bool bare);
