// src/text/grammar/build.h - a grammar being put together: nodes in one arena, which may be used
// any number of times, and rules, which may refer to each other.
// Every call takes from a budget. When that or memory is exhausted, building has failed: calls do
// nothing and return TD_NODE_NEVER, and td_grammar_finish says why. Thread: one at a time.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/budget.h"
#include "base/buf.h"

typedef uint32_t td_node;
typedef uint32_t td_rule;
typedef struct td_grammar_build td_grammar_build;

#define TD_NODE_NEVER 0u         // nothing matches
#define TD_NODE_EMPTY 1u         // the empty text
#define TD_G_MANY     UINT32_MAX // no upper bound of a repetition

typedef struct {
  uint32_t low, high; // code points, inclusive
} td_char_range;

typedef struct {
  const char *text;
  size_t len;
} td_g_word;

// budget is borrowed. NULL: out of memory.
td_grammar_build *td_grammar_build_open(td_budget *budget);
void td_grammar_build_close(td_grammar_build *b);
td_budget *td_grammar_build_budget(td_grammar_build *b);
// TD_OK, or why building has failed: TD_ELIMIT, TD_ECANCELED, TD_ENOMEM.
td_status td_grammar_build_status(const td_grammar_build *b, td_err *err);

td_node td_g_text(td_grammar_build *b, const char *text, size_t len);
td_node td_g_str(td_grammar_build *b, const char *text);
// One character of the ranges, which may overlap; or of none of them.
td_node td_g_chars(td_grammar_build *b, const td_char_range *ranges, size_t n);
td_node td_g_chars_but(td_grammar_build *b, const td_char_range *ranges, size_t n);
td_node td_g_range(td_grammar_build *b, uint32_t low, uint32_t high);
// All in order; one of them.
td_node td_g_seq(td_grammar_build *b, const td_node *of, size_t n);
td_node td_g_any(td_grammar_build *b, const td_node *of, size_t n);
#define TD_G_N(...)      (sizeof((td_node[]){__VA_ARGS__}) / sizeof(td_node))
#define TD_G_SEQ(b, ...) td_g_seq(b, (td_node[]){__VA_ARGS__}, TD_G_N(__VA_ARGS__))
#define TD_G_ANY(b, ...) td_g_any(b, (td_node[]){__VA_ARGS__}, TD_G_N(__VA_ARGS__))
// min to max times; max < min: never.
td_node td_g_repeat(td_grammar_build *b, td_node of, uint32_t min, uint32_t max);
td_node td_g_maybe(td_grammar_build *b, td_node of);
td_node td_g_star(td_grammar_build *b, td_node of);
// One of n texts, of whole characters, which are sorted here.
td_node td_g_words(td_grammar_build *b, td_g_word *words, size_t n);

// Lists of nodes that are not counted before: begin, add, and the end makes one node of what was
// added since. Lists nest.
size_t td_g_begin(td_grammar_build *b);
void td_g_add(td_grammar_build *b, td_node node);
td_node td_g_end_seq(td_grammar_build *b, size_t begin);
td_node td_g_end_any(td_grammar_build *b, size_t begin);

td_rule td_g_rule(td_grammar_build *b); // TD_NODE_NEVER until it is defined
void td_g_define(td_grammar_build *b, td_rule rule, td_node body);
td_node td_g_call(td_grammar_build *b, td_rule rule);
td_node td_g_new_rule(td_grammar_build *b, td_node body); // a call of a new rule

// A fixed GBNF expression (gbnf.c) without names, in which $0 to $9 are nodes.
td_node td_g_gbnf(td_grammar_build *b, const char *expression, const td_node *args);
// The rules of a GBNF text, whose names are its own; *root is its rule `root`. TD_EFORMAT names the
// line; TD_ELIMIT: nested or repeated too much, or as td_grammar_build_status.
td_status td_g_parse(td_node *root, td_grammar_build *b, const char *text, size_t len, td_err *err);

// Everything that was made since the mark is forgotten; nothing made before may refer to it.
typedef struct {
  size_t n_nodes, n_kids, n_ranges, n_rules, n_text;
} td_grammar_mark;
td_grammar_mark td_g_mark(const td_grammar_build *b);
void td_g_reset(td_grammar_build *b, const td_grammar_mark *mark);

// Compiles what root needs to the bytes of a grammar (grammar.h), appended to out. TD_EFORMAT: no
// text matches it; TD_EUNSUPPORTED: a rule begins with itself; or as td_grammar_build_status.
td_status td_grammar_finish(td_buf *out, td_grammar_build *b, td_node root, td_err *err);
