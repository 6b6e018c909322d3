// tests/unit/grammars.h - grammars of GBNF text, patterns and schemas, compiled for tests.
#pragma once

#include <stdlib.h>
#include <string.h>

#include "base/json_parse.h"
#include "text/grammar/grammar.h"
#include "text/grammar/json_rules.h"
#include "text/grammar/json_schema.h"
#include "text/grammar/matcher.h"
#include "text/grammar/regex.h"

typedef struct {
  td_buf bytes;
  td_grammar *g;
} test_grammar;

typedef enum { GBNF, PATTERN, SCHEMA, FREE_SCHEMA } grammar_kind;

static inline td_status build_schema(td_node *out, td_grammar_build *b, const char *text,
                                     bool is_free, td_err *err) {
  cJSON *schema;
  td_status st = td_json_parse(&schema, text, strlen(text), TD_JSON_MAX_DEPTH, err);
  if (st != TD_OK) return st;
  const td_json_schema_opts opts = {.is_free = is_free};
  st = td_json_schema_build(out, b, schema, &opts, err);
  cJSON_Delete(schema);
  return st;
}

// Compiles within a budget. The GBNF "JSON" is any JSON object.
static inline td_status compile_within(td_buf *out, grammar_kind kind, const char *text,
                                       td_budget *budget, td_err *err) {
  td_grammar_build *b = td_grammar_build_open(budget);
  td_node root = TD_NODE_NEVER;
  td_status st = TD_OK;
  if (!b) return td_fail(err, TD_ENOMEM, "out of memory");
  if (kind == GBNF && strcmp(text, "JSON") == 0) {
    root = td_g_json_object(b, false);
  } else if (kind == GBNF) {
    st = td_g_parse(&root, b, text, strlen(text), err);
  } else if (kind == PATTERN) {
    st = td_g_regex(&root, b, text, strlen(text), TD_REGEX_WHOLE, err);
  } else {
    st = build_schema(&root, b, text, kind == FREE_SCHEMA, err);
  }
  if (st == TD_OK) st = td_grammar_finish(out, b, root, err);
  td_grammar_build_close(b);
  return st;
}

static inline td_status compile(td_buf *out, grammar_kind kind, const char *text, td_err *err) {
  td_budget budget = {.steps = 1u << 24, .bytes = 16u << 20};
  return compile_within(out, kind, text, &budget, err);
}

static inline td_status open_grammar(test_grammar *t, grammar_kind kind, const char *text,
                                     td_err *err) {
  *t = (test_grammar){0};
  td_status st = compile(&t->bytes, kind, text, err);
  if (st == TD_OK) st = td_grammar_open(&t->g, t->bytes.data, t->bytes.len, err);
  return st;
}

static inline void close_grammar(test_grammar *t) {
  td_grammar_close(t->g);
  td_buf_free(&t->bytes);
}

static inline td_status open_matcher(td_matcher **out, td_grammars *grammars, const char *gbnf,
                                     td_err *err) {
  td_buf bytes = TD_BUF_INIT;
  *out = NULL;
  td_status st = compile(&bytes, GBNF, gbnf, err);
  if (st == TD_OK) st = td_matcher_open(out, grammars, bytes.data, bytes.len, err);
  td_buf_free(&bytes);
  return st;
}
