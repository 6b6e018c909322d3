// tests/fuzz/fuzz_output_parser.c - what a model may write through the parser of its output.
// The first byte holds the parser's options, the second how the text is cut into pieces. Whole
// and in pieces the outcome must be the same; names and ids are never empty; of a response in one
// piece arguments are JSON, and no byte of text is shown twice. Or the bytes make calls, which must
// be read as they were written.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/output_parser.h"
#include "base/json_parse.h"

#include "call_maker.h"

typedef struct {
  td_output_parser parts;
  td_buf reasoning, content;
} outcome;

// A tool whose parameters take strings, strings or numbers, and one kind of JSON.
static const td_tool_params params = {
    .items =
        (td_tool_param[]){{.tool = "t"},
                          {.tool = "t", .key = "i", .types = TD_PARAM_STRING | TD_PARAM_NUMBER},
                          {.tool = "t", .key = "n", .types = TD_PARAM_NUMBER, .at = 1},
                          {.tool = "t", .key = "o", .types = TD_PARAM_OBJECT, .at = 2},
                          {.tool = "t", .key = "s", .types = TD_PARAM_STRING, .at = 3}},
    .n = 5};

static void take(outcome *o, const char *text, size_t len, td_text_end end, size_t *shown) {
  td_output_part part;
  td_err err;
  for (;;) {
    bool found;
    TD_CHECK(td_output_parser_next(&o->parts, text, len, end, &part, &found, &err) == TD_OK);
    if (!found) return;
    if (part.kind == TD_OUTPUT_CALL) {
      TD_CHECK(part.call + 1 == o->parts.n_calls);
      continue;
    }
    TD_CHECK(part.begin >= *shown && part.end > part.begin && part.end <= len);
    *shown = part.end;
    td_buf *to = part.kind == TD_OUTPUT_CONTENT ? &o->content : &o->reasoning;
    td_buf_add(to, text + part.begin, part.end - part.begin);
  }
}

// step 0: all at once. Each piece is a copy of its own, so that reading beyond it is found.
static outcome tell_apart(unsigned how, const char *text, size_t len, size_t step) {
  outcome o = {.parts = {.begins_in_reasoning = how & 1,
                         .parse_tool_calls = !(how & 2),
                         .one_call = how & 8,
                         .is_harmony = how & 16,
                         .id = 7,
                         .params = &params}};
  size_t shown = 0;
  for (size_t at = step; step && at < len; at += step) {
    char *copy = malloc(at);
    memcpy(copy, text, at);
    take(&o, copy, at, TD_TEXT_GROWS, &shown);
    free(copy);
  }
  take(&o, text, len, how & 4 ? TD_TEXT_CUT : TD_TEXT_ENDED, &shown);
  return o;
}

static void check_calls(const outcome *o) {
  for (uint32_t i = 0; i < o->parts.n_calls; i++) {
    const td_tool_call *call = &o->parts.calls[i];
    td_err err;
    TD_CHECK(call->name && call->name[0] && call->id[0]);
    for (uint32_t k = 0; k < i; k++)
      TD_CHECK(strcmp(call->id, o->parts.calls[k].id) != 0);
    const char *json = td_buf_text(&call->arguments);
    const bool is_json = td_json_check(json, call->arguments.len, TD_JSON_MAX_DEPTH, &err) == TD_OK;
    TD_CHECK(o->parts.is_harmony || !call->is_whole || json[0] == '{');
    TD_CHECK(call->is_whole ? is_json : !is_json || o->parts.is_harmony);
  }
}

static bool is_same(const td_buf *a, const td_buf *b) {
  return a->len == b->len && memcmp(td_buf_text(a), td_buf_text(b), a->len) == 0;
}

static void check_same(const outcome *a, const outcome *b) {
  TD_CHECK(is_same(&a->content, &b->content) && is_same(&a->reasoning, &b->reasoning));
  TD_CHECK(a->parts.n_calls == b->parts.n_calls);
  for (uint32_t i = 0; i < a->parts.n_calls; i++) {
    const td_tool_call *x = &a->parts.calls[i], *y = &b->parts.calls[i];
    TD_CHECK(strcmp(x->name, y->name) == 0 && strcmp(x->id, y->id) == 0);
    TD_CHECK(is_same(&x->arguments, &y->arguments) && x->is_whole == y->is_whole);
  }
}

static void outcome_free(outcome *o) {
  td_output_parser_free(&o->parts);
  td_buf_free(&o->reasoning);
  td_buf_free(&o->content);
}

// The outcome of the text; that of each way to cut it is the same. Pieces of a long text are
// larger.
static outcome tell_all(unsigned how, unsigned cuts, const char *text, size_t len) {
  const size_t least = 1 + len / 1024, steps[] = {least, least + cuts % 16};
  outcome whole = tell_apart(how, text, len, 0);
  check_calls(&whole);
  for (size_t i = 0; i < TD_COUNT(steps); i++) {
    outcome cut = tell_apart(how, text, len, steps[i]);
    check_same(&whole, &cut);
    outcome_free(&cut);
  }
  return whole;
}

static void check_made(const call_maker *m, const outcome *o) {
  bool is_read = o->parts.n_calls == m->n_calls && !o->content.len && !o->reasoning.len;
  for (unsigned i = 0; i < m->n_calls && is_read; i++) {
    const td_tool_call *call = &o->parts.calls[i];
    cJSON *made = cJSON_Parse(td_buf_text(&m->made[i]));
    cJSON *read = cJSON_Parse(td_buf_text(&call->arguments));
    is_read = call->is_whole && !strcmp(call->name, "t") && cJSON_Compare(made, read, true);
    if (!is_read)
      fprintf(stderr, "%s\n%s\n", td_buf_text(&m->made[i]), td_buf_text(&call->arguments));
    cJSON_Delete(made);
    cJSON_Delete(read);
  }
  if (!is_read) fprintf(stderr, "%s\n", td_buf_text(&m->text));
  TD_CHECK(is_read);
}

// Calls of the bytes, in a form of their own.
static void tell_made(unsigned cuts, const uint8_t *data, size_t size) {
  call_maker m = {.data = data, .n = size};
  const unsigned how = make_calls(&m) == TD_CALL_HARMONY ? 16 : 0;
  outcome whole = tell_all(how, cuts, td_buf_text(&m.text), m.text.len);
  check_made(&m, &whole);
  outcome_free(&whole);
  td_buf_free(&m.text);
  for (unsigned i = 0; i < m.n_calls; i++)
    td_buf_free(&m.made[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size < 2) return 0;
  if (data[0] & 32) {
    tell_made(data[1], data + 2, size - 2);
    return 0;
  }
  outcome whole = tell_all(data[0], data[1], (const char *)data + 2, size - 2);
  outcome_free(&whole);
  return 0;
}
