// tests/fuzz/fuzz_output_parser.c - what a model may write through the parser of its output.
// The first byte holds the parser's options, the second how the text is cut into pieces. Whole
// and in pieces the outcome must be the same; names and ids are never empty; of a response in one
// piece arguments are JSON, and no byte of text is shown twice.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "api/output_parser.h"
#include "base/json_parse.h"

typedef struct {
  td_output_parser parts;
  td_buf reasoning, content;
} outcome;

// A tool whose parameters take strings, and strings or numbers.
static const td_tool_params params = {
    .items =
        (td_tool_param[]){{.tool = "t"},
                          {.tool = "t", .key = "i", .types = TD_PARAM_STRING | TD_PARAM_NUMBER},
                          {.tool = "t", .key = "s", .types = TD_PARAM_STRING, .at = 1}},
    .n = 3};

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

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size < 2 || size > 1 << 14) return 0;
  const char *text = (const char *)data + 2;
  const size_t len = size - 2, steps[] = {1, 1 + data[1] % 16};
  outcome whole = tell_apart(data[0], text, len, 0);
  check_calls(&whole);
  for (size_t i = 0; i < TD_COUNT(steps); i++) {
    outcome cut = tell_apart(data[0], text, len, steps[i]);
    check_same(&whole, &cut);
    outcome_free(&cut);
  }
  outcome_free(&whole);
  return 0;
}
