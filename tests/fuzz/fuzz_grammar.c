// tests/fuzz/fuzz_grammar.c - GBNF, regular expressions and JSON Schema from a client.
// The first byte says which, the second seeds a walk through the texts of what was accepted: there
// is always a next byte or an end, and what a schema generates is JSON. Of a schema that is made of
// the bytes, a value is let through.
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/json_parse.h"
#include "text/grammar/automaton.h"
#include "text/grammar/json_schema.h"
#include "text/grammar/regex.h"

#include "schema_maker.h"

enum { GBNF, REGEX, PATTERN, SCHEMA, MADE };

static td_status translate(td_node *out, td_grammar_build *b, unsigned kind, const char *text,
                           size_t len, td_err *err) {
  if (kind == GBNF) return td_g_parse(out, b, text, len, err);
  if (kind != SCHEMA) return td_g_regex(out, b, text, len, (td_regex_place)(kind == PATTERN), err);
  cJSON *schema;
  td_status st = td_json_parse_at_most(&schema, text, len, TD_JSON_MAX_DEPTH, 1 << 14, err);
  if (st != TD_OK) return st;
  const td_json_schema_opts opts = {.is_free = len % 2};
  st = td_json_schema_build(out, b, schema, &opts, err);
  cJSON_Delete(schema);
  return st;
}

// The next byte of a text, chosen by seed; -1: there is none.
static int next_byte(td_automaton *a, uint32_t config, unsigned seed) {
  for (unsigned i = 0; i < 256; i++) {
    uint8_t byte = (uint8_t)(i + seed);
    if (td_automaton_step(a, config, byte) != TD_AUTOMATON_DEAD) return byte;
  }
  return -1;
}

static void walk(const td_grammar *grammar, unsigned kind, unsigned seed) {
  td_automaton a;
  td_err err;
  td_buf text = TD_BUF_INIT;
  TD_CHECK(td_automaton_open(&a, grammar, &err) == TD_OK);
  uint32_t config = td_automaton_start(&a);
  for (int i = 0; i < 200 && a.status == TD_OK; i++) {
    bool may_end = a.configs[config].may_end;
    int byte = next_byte(&a, config, seed = seed * 1103515245u + 12345u);
    if (a.status != TD_OK) break;
    TD_CHECK(byte >= 0 || may_end);
    if (may_end) TD_CHECK(td_grammar_matches(grammar, td_buf_text(&text), text.len));
    if (may_end && kind == SCHEMA) {
      td_status st = td_json_check(td_buf_text(&text), text.len, 1 << 10, &err);
      TD_CHECK(st == TD_OK || strstr(err.msg, "finite"));
    }
    if (byte < 0) break;
    td_buf_char(&text, (char)byte);
    config = td_automaton_step(&a, config, (uint8_t)byte);
  }
  td_buf_free(&text);
  td_automaton_close(&a);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

// Compiles what a client may send, within the budget of a request.
static td_status compile(td_buf *out, unsigned kind, const char *text, size_t len, td_err *err) {
  td_budget budget = {.steps = 1u << 24, .bytes = 16u << 20};
  td_grammar_build *b = td_grammar_build_open(&budget);
  td_node root;
  td_status st = translate(&root, b, kind, text, len, err);
  if (st == TD_OK) {
    st = td_grammar_finish(out, b, root, err);
    TD_CHECK(st != TD_EFORMAT || strstr(err->msg, "no text"));
  }
  td_grammar_build_close(b);
  return st;
}

// A schema and a value of it.
static void check_made(const uint8_t *data, size_t size, unsigned seed) {
  td_buf schema = TD_BUF_INIT, value = TD_BUF_INIT, bytes = TD_BUF_INIT;
  td_err err = {.code = TD_OK};
  td_grammar *grammar;
  make_root(&schema, &value, data, size);
  td_status st = compile(&bytes, SCHEMA, td_buf_text(&schema), schema.len, &err);
  if (st == TD_OK) {
    TD_CHECK(td_grammar_open(&grammar, bytes.data, bytes.len, &err) == TD_OK);
    const bool is_let = td_grammar_matches(grammar, td_buf_text(&value), value.len);
    if (!is_let) fprintf(stderr, "%s\n%s\n", td_buf_text(&schema), td_buf_text(&value));
    TD_CHECK(is_let);
    walk(grammar, SCHEMA, seed);
    td_grammar_close(grammar);
  } else {
    fprintf(stderr, "%s\n%s\n", td_buf_text(&schema), err.msg);
    TD_CHECK(st == TD_ELIMIT);
  }
  td_buf_free(&schema);
  td_buf_free(&value);
  td_buf_free(&bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size < 2) return 0;
  unsigned kind = data[0] % 5;
  if (kind == MADE) {
    check_made(data + 2, size - 2, data[1]);
    return 0;
  }
  td_buf bytes = TD_BUF_INIT;
  td_err err = {.code = TD_OK};
  td_grammar *grammar;
  td_status st = compile(&bytes, kind, (const char *)data + 2, size - 2, &err);
  if (st == TD_OK) {
    TD_CHECK(td_grammar_open(&grammar, bytes.data, bytes.len, &err) == TD_OK);
    walk(grammar, kind, data[1]);
    td_grammar_close(grammar);
  }
  TD_CHECK(st == TD_OK || err.msg[0]);
  td_buf_free(&bytes);
  return 0;
}
