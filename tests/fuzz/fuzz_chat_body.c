// tests/fuzz/fuzz_chat_body.c - bodies of chat, completions and the other protocols through
// parsing and checking.
// The first byte chooses the endpoint. What is accepted must hold its own bounds, and the variables
// made for the template must be valid JSON; what is refused must be the client's fault.
#include <stdint.h>
#include <string.h>

#include "api/dialects/dialect.h"
#include "api/request.h"
#include "base/json_parse.h"

static void check_accepted(const td_api_request *r, uint32_t n_vocab) {
  TD_CHECK(r->n >= 1 && r->n <= TD_API_MAX_N);
  TD_CHECK(r->max_tokens >= (r->is_chat ? 1 : 0) || r->max_tokens == -1);
  TD_CHECK(r->sampling.temperature >= 0 && r->sampling.top_p > 0 && r->sampling.top_p <= 1);
  TD_CHECK(r->sampling.min_p >= 0 && r->sampling.min_p < 1);
  TD_CHECK(r->sampling.n_top_logprobs <= TD_WIRE_MAX_TOP);
  for (uint32_t i = 0; i < r->n_bias; i++)
    TD_CHECK(r->bias[i].id >= 0 && (uint32_t)r->bias[i].id < n_vocab);
  for (uint32_t i = 0; i < r->n_prompts; i++) {
    TD_CHECK((r->prompts[i].text == NULL) != (r->prompts[i].ids == NULL));
  }
  if (!r->is_chat) return;
  td_err err;
  TD_CHECK(td_json_check(r->vars.data, r->vars.len, 2 * TD_JSON_MAX_DEPTH, &err) == TD_OK);
}

// A body that a dialect accepts becomes JSON, which chat or completions then judges. True: the
// latter.
static bool translate(unsigned which, td_buf *body) {
  static const td_dialect *const dialects[] = {&td_dialect_responses,   &td_dialect_messages,
                                               &td_dialect_ollama_chat, &td_dialect_ollama_generate,
                                               &td_dialect_completion,  &td_dialect_infill};
  td_dialect_state state = {.store = td_response_store_open()};
  td_buf out = TD_BUF_INIT;
  td_api_error error;
  td_err err;
  td_status st = td_dialect_translate(dialects[which], &state, td_buf_text(body), body->len, &out,
                                      &error);
  if (st == TD_OK) {
    TD_CHECK(td_json_check(td_buf_text(&out), out.len, 2 * TD_JSON_MAX_DEPTH, &err) == TD_OK);
  } else {
    TD_CHECK((error.status < 500 || error.status == 501) && error.message[0]);
    td_buf_clear(&out);
    dialects[which]->error(&out, &error, false);
    TD_CHECK(td_json_check(td_buf_text(&out), out.len, 4, &err) == TD_OK);
    td_buf_clear(&out);
  }
  td_dialect_load load = {0};
  if (dialects[which]->peek) {
    st = td_dialect_peek(dialects[which], &load, td_buf_text(body), body->len, &error);
    TD_CHECK(st == TD_OK ? load.keep_ms >= -1 : error.status == 400);
  }
  const bool is_text = state.is_text;
  td_response_store_close(state.store);
  td_dialect_state_free(&state);
  td_buf_free(body);
  *body = out;
  return is_text;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const td_api_defaults defaults = {.temperature = 1, .top_p = 1, .n_vocab = 100};
  static td_status (*const parsers[])(td_api_request *, const char *, size_t,
                                      const td_api_defaults *, td_api_error *) = {
      td_api_parse_chat, td_api_parse_completion, td_api_parse_tokenize, td_api_parse_detokenize};
  if (size == 0) return 0;
  unsigned which = data[0] % 4;
  td_api_request request;
  td_api_error error;
  td_buf body = TD_BUF_INIT;
  td_buf_add(&body, data + 1, size - 1);
  if (data[0] & 4) {
    which = translate((which + (data[0] & 8 ? 4 : 0)) % 6, &body);
  }
  td_status st = parsers[which](&request, td_buf_text(&body), body.len, &defaults, &error);
  if (st == TD_OK && which < 2) check_accepted(&request, defaults.n_vocab);
  if (st != TD_OK) {
    TD_CHECK(error.status == 400 && error.message[0]);
    td_buf text = TD_BUF_INIT;
    td_err err;
    td_api_error_write(&text, &error);
    TD_CHECK(td_json_check(text.data, text.len, 4, &err) == TD_OK);
    td_buf_free(&text);
  }
  td_api_request_free(&request);
  td_buf_free(&body);
  return 0;
}
