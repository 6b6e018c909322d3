// src/text/grammar/build_impl.h - the nodes of a grammar being built. Private to text/grammar.
#pragma once

#include "text/grammar/build.h"

#define TD_G_MAX_DEPTH 200 // of nodes within each other
#define TD_G_LAST_CHAR 0x10FFFFu

typedef enum {
  TD_G_NEVER,
  TD_G_EMPTY,
  TD_G_TEXT,   // bytes [first, first + n) of text
  TD_G_CHARS,  // ranges [first, first + n)
  TD_G_CALL,   // the rule `first`
  TD_G_SEQ,    // kids [first, first + n)
  TD_G_ANY,    // kids [first, first + n)
  TD_G_REPEAT, // the node `first`, min to max times
} td_g_kind;

typedef struct {
  uint8_t kind;  // a td_g_kind
  uint8_t depth; // 1 more than that of what it consists of
  uint32_t first, n;
  uint32_t min, max;
} td_g_node;

typedef struct {
  td_node body;
  uint32_t name, n_name; // bytes of text; n_name 0: it has none
} td_g_rule_body;

// The rules of JSON (json_rules.c).
typedef struct td_json_rules td_json_rules;

struct td_grammar_build {
  td_budget *budget;
  td_status status;
  td_g_node *nodes;
  td_node *kids, *stack;
  td_char_range *ranges;
  td_g_rule_body *rules;
  char *text;
  size_t n_nodes, n_kids, n_stack, n_ranges, n_rules, n_text;
  size_t cap_nodes, cap_kids, cap_stack, cap_ranges, cap_rules, cap_text;
  td_json_rules *json[2]; // by is_free; NULL: not made
};

// Why building cannot continue; the first reason stays.
void td_g_fail(td_grammar_build *b, td_status why);
void td_g_name(td_grammar_build *b, td_rule rule, const char *name, size_t len);
