// src/api/error.h - errors in the form of the OpenAI protocol.
#pragma once

#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"

#define TD_API_PARAM_BYTES 128

// A message that names the offending member names it as param does.
typedef struct {
  int status;       // HTTP status code
  const char *code; // e.g. "context_length_exceeded"; static; NULL: the default of the status
  char param[TD_API_PARAM_BYTES]; // full path of the offending member; "" if there is none
  char message[TD_ERR_BYTES];
  int64_t n_prompt_tokens, n_ctx; // set when the prompt is too long; 0: not reported
  const char *request_id;         // borrowed; NULL: none
  uint32_t retry_s;               // for 429 and 503: Retry-After in seconds; 0: shortly
} td_api_error;

// Fills error and returns TD_EINVAL (TD_EINTERNAL for status 500 and above). param and code may be
// NULL.
td_status td_api_fail(td_api_error *error, int status, const char *param, const char *code,
                      const char *fmt, ...) __attribute__((format(printf, 5, 6)));
// Status 400 without a code.
#define td_api_bad(error, param, ...) td_api_fail((error), 400, (param), NULL, __VA_ARGS__)
// The same, of param: the message is that, a blank unless fmt begins with a colon, and the text.
td_status td_api_wrong(td_api_error *error, const char *param, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
// Converts a td_err: TD_EINVAL and TD_EFORMAT are client errors (4xx), all others server errors.
td_status td_api_fail_err(td_api_error *error, const char *param, const td_err *err);

// Sets param, also where the message names the one that error has.
void td_api_error_rename(td_api_error *error, const char *param);

// Appends {"error":{"message","type","param","code"}}.
void td_api_error_write(td_buf *out, const td_api_error *error);
