// src/text/grammar/gbnf.h - GBNF text to a syntax tree. Private to text/grammar.
// GBNF is llama.cpp's notation: rules `name ::= alternatives`, literals "..", classes [..], `.`,
// groups, and the repetitions * + ? {n} {n,} {n,m}. `[]` is the empty class, which nothing matches.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

#define TD_GBNF_MANY UINT32_MAX // no upper bound of a repetition

typedef enum {
  TD_GBNF_CHARS, // one character of the ranges [first, first + n)
  TD_GBNF_RULE,  // the rule `first`
  TD_GBNF_SEQ,   // children in order; none: the empty text
  TD_GBNF_ALT,   // one of the children
  TD_GBNF_REPEAT // the child, min to max times
} td_gbnf_kind;

typedef struct {
  td_gbnf_kind kind;
  uint32_t first, n;    // ranges, or the rule
  uint32_t min, max;    // of a repetition
  uint32_t child, next; // first child and next sibling; 0: none
} td_gbnf_node;

typedef struct {
  uint32_t low, high; // code points, inclusive
} td_gbnf_range;

typedef struct {
  char *name; // owned
  uint32_t hash;
  uint32_t body; // node; 0: used but not defined
} td_gbnf_rule;

// Zeroed is empty. Node 0 is unused.
typedef struct {
  td_gbnf_node *nodes;
  td_gbnf_range *ranges;
  td_gbnf_rule *rules;
  uint32_t n_nodes, n_ranges, n_rules;
  size_t cap_nodes, cap_ranges, cap_rules;
} td_gbnf;

// TD_EFORMAT names the line; TD_ELIMIT: nested or repeated too much. Call td_gbnf_free in every
// case.
td_status td_gbnf_parse(td_gbnf *out, const char *text, size_t len, td_err *err);
void td_gbnf_free(td_gbnf *gbnf);
