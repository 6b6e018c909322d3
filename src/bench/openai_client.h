// src/bench/openai_client.h - the client's side of the OpenAI protocol, as far as a load generator
// needs it.
#ifndef TD_BENCH_OPENAI_CLIENT_H
#define TD_BENCH_OPENAI_CLIENT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"

// Appends the body of a streaming chat request: one user message, greedy, max_tokens tokens, with
// usage asked for, with every token too. ignore_eos is sent along; servers pass over what they do
// not know.
void td_client_body(td_buf *out, const char *model, const char *prompt, uint32_t max_tokens);

// What one streamed event says.
typedef struct {
  bool has_text;    // content or reasoning, not empty
  bool is_error;    // an error object; message tells what
  int64_t n_prompt; // from usage; -1 where absent
  int64_t n_output; // likewise
  bool is_so_far;   // more of the answer may follow: n_output counts what has come
  char message[160];
} td_client_event;

// Reads the JSON of one event. TD_EFORMAT when it is none.
td_status td_client_parse_event(td_client_event *out, const char *json, size_t len, td_err *err);

// Appends the first model's id of a GET /v1/models answer. TD_EFORMAT without one.
td_status td_client_parse_models(td_buf *out, const char *json, size_t len, td_err *err);

#endif
