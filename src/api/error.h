// src/api/error.h - errors as the OpenAI protocol writes them.
#ifndef TD_API_ERROR_H
#define TD_API_ERROR_H

#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"

#define TD_API_PARAM_BYTES 128

typedef struct {
  int status;       // HTTP
  const char *code; // "context_length_exceeded" and so on; static; NULL: the status's own
  char param[TD_API_PARAM_BYTES]; // the member at fault, with its whole path; "" where none is
  char message[TD_ERR_BYTES];
  int64_t n_prompt_tokens, n_ctx; // of an over-long prompt; 0: not told
  uint32_t retry_s;               // of 429 and 503: when to ask again; 0: soon
} td_api_error;

// Fills error and returns TD_EINVAL (TD_EINTERNAL for status 500 and above). param and code may be
// NULL.
td_status td_api_fail(td_api_error *error, int status, const char *param, const char *code,
                      const char *fmt, ...) __attribute__((format(printf, 5, 6)));
// Status 400 without a code.
#define td_api_bad(error, param, ...) td_api_fail((error), 400, (param), NULL, __VA_ARGS__)
// Takes over a td_err: TD_EINVAL and TD_EFORMAT are the client's fault, the rest is ours.
td_status td_api_fail_err(td_api_error *error, const char *param, const td_err *err);

// Appends {"error":{"message","type","param","code"}}.
void td_api_error_write(td_buf *out, const td_api_error *error);

#endif
