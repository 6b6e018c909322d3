// tests/tools/grammar_driver.c - what a schema's grammar lets through, for tests that compare it
// with other validators. Each line of the input is {"schema": S, "is_free": B, "texts": [T, ...],
// "walks": N}; its answer says of each text whether it is let through, and has texts of N random
// walks that came to an end.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json_parse.h"
#include "base/json_write.h"
#include "text/grammar/automaton.h"
#include "text/grammar/json_schema.h"

enum { MAX_WALK = 2000 };

static uint64_t seed = 1;

static unsigned draw(unsigned n) {
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return (unsigned)(seed >> 33) % n;
}

// One of the bytes that may follow; what ends strings and lists more often. -1: there is none.
static int next_byte(td_automaton *a, uint32_t config) {
  static const char ends[] = "\"]}";
  int bytes[256], n = 0;
  for (size_t i = 0; i < 3 && draw(3) == 0; i++)
    if (td_automaton_step(a, config, (uint8_t)ends[i]) != TD_AUTOMATON_DEAD) return ends[i];
  for (int byte = 0; byte < 256; byte++)
    if (td_automaton_step(a, config, (uint8_t)byte) != TD_AUTOMATON_DEAD) bytes[n++] = byte;
  return n ? bytes[draw((unsigned)n)] : -1;
}

// False: the text would be too long.
static bool walk(td_buf *text, const td_grammar *grammar) {
  td_automaton a;
  td_err err;
  bool ended = false;
  if (td_automaton_open(&a, grammar, &err) != TD_OK) return false;
  uint32_t config = td_automaton_start(&a);
  td_buf_clear(text);
  while (!ended && text->len < MAX_WALK && a.status == TD_OK) {
    const int byte = next_byte(&a, config);
    ended = a.configs[config].may_end && (byte < 0 || draw(2));
    if (ended || byte < 0) break;
    td_buf_char(text, (char)byte);
    config = td_automaton_step(&a, config, (uint8_t)byte);
  }
  td_automaton_close(&a);
  return ended;
}

// bytes holds the grammar.
static td_status open_schema(td_grammar **out, td_buf *bytes, const cJSON *request, td_err *err) {
  td_budget budget = {.steps = 1u << 24, .bytes = 16u << 20};
  td_grammar_build *b = td_grammar_build_open(&budget);
  const td_json_schema_opts opts = {.is_free = cJSON_IsTrue(td_json_get(request, "is_free"))};
  td_node root;
  td_status st = td_json_schema_build(&root, b, td_json_get(request, "schema"), &opts, err);
  if (st == TD_OK) st = td_grammar_finish(bytes, b, root, err);
  if (st == TD_OK) st = td_grammar_open(out, bytes->data, bytes->len, err);
  td_grammar_build_close(b);
  return st;
}

static void answer(td_json_writer *w, const td_grammar *grammar, const cJSON *request) {
  const cJSON *texts = td_json_get(request, "texts"), *walks = td_json_get(request, "walks");
  td_buf text = TD_BUF_INIT;
  td_jw_begin_array(w, "lets");
  for (const cJSON *t = texts ? texts->child : NULL; t; t = t->next)
    td_jw_bool(w, NULL, td_grammar_matches(grammar, t->valuestring, strlen(t->valuestring)));
  td_jw_end_array(w);
  td_jw_begin_array(w, "walks");
  for (int i = 0; walks && i < walks->valueint; i++)
    if (walk(&text, grammar)) td_jw_str_len(w, NULL, td_buf_text(&text), text.len);
  td_jw_end_array(w);
  td_buf_free(&text);
}

int main(void) {
  char *line = NULL;
  size_t cap = 0;
  ssize_t n;
  while ((n = getline(&line, &cap, stdin)) > 0) {
    cJSON *request;
    td_grammar *grammar = NULL;
    td_err err;
    td_buf out = TD_BUF_INIT, bytes = TD_BUF_INIT;
    td_json_writer w = TD_JSON_WRITER(&out);
    td_status st = td_json_parse(&request, line, (size_t)n, TD_JSON_MAX_DEPTH, &err);
    if (st == TD_OK) st = open_schema(&grammar, &bytes, request, &err);
    td_jw_begin_object(&w, NULL);
    if (st != TD_OK) td_jw_str(&w, "error", err.msg);
    if (st == TD_OK) answer(&w, grammar, request);
    td_jw_end_object(&w);
    puts(td_buf_text(&out));
    td_grammar_close(grammar);
    cJSON_Delete(request);
    td_buf_free(&bytes);
    td_buf_free(&out);
  }
  free(line);
  return 0;
}
