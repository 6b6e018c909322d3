// src/api/error.c - builds and writes error objects of the OpenAI protocol.
#include "api/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/json_write.h"

td_status td_api_fail(td_api_error *error, int status, const char *param, const char *code,
                      const char *fmt, ...) {
  *error = (td_api_error){.status = status, .code = code};
  if (param) snprintf(error->param, sizeof error->param, "%s", param);
  va_list args;
  va_start(args, fmt);
  vsnprintf(error->message, sizeof error->message, fmt, args);
  va_end(args);
  return status >= 500 ? TD_EINTERNAL : TD_EINVAL;
}

td_status td_api_wrong(td_api_error *error, const char *param, const char *fmt, ...) {
  char text[TD_ERR_BYTES];
  va_list args;
  va_start(args, fmt);
  vsnprintf(text, sizeof text, fmt, args);
  va_end(args);
  return td_api_bad(error, param, "%s%s%s", param, text[0] == ':' ? "" : " ", text);
}

td_status td_api_fail_err(td_api_error *error, const char *param, const td_err *err) {
  bool client = err->code == TD_EINVAL || err->code == TD_EFORMAT || err->code == TD_EUNSUPPORTED ||
                err->code == TD_ENOENT || err->code == TD_ELIMIT;
  int status = client ? 400 : err->code == TD_ENOMEM ? 503 : 500;
  return td_api_fail(error, status, param, NULL, "%s", err->msg);
}

void td_api_error_rename(td_api_error *error, const char *param) {
  if (error->param[0]) td_msg_rename(error->message, 0, error->param, param);
  snprintf(error->param, sizeof error->param, "%s", param);
}

static const char *type_of(int status) {
  switch (status) {
  case 401: return "authentication_error";
  case 403: return "permission_error";
  case 404: return "not_found_error";
  case 429: return "rate_limit_error";
  default: return status >= 500 ? "server_error" : "invalid_request_error";
  }
}

static const char *code_of(int status) {
  switch (status) {
  case 401: return "invalid_api_key";
  case 403: return "forbidden";
  case 404: return "not_found";
  case 405: return "method_not_allowed";
  case 408: return "timeout";
  case 413: return "request_too_large";
  case 429: return "rate_limit_exceeded";
  case 500: return "internal_error";
  case 503: return "unavailable";
  default: return "invalid_request";
  }
}

void td_api_error_write(td_buf *out, const td_api_error *error) {
  td_json_writer w = TD_JSON_WRITER(out);
  td_jw_add(&w, "{'error': {'message': %s, 'type': %s, 'param': %s, 'code': %s", error->message,
            type_of(error->status), error->param[0] ? error->param : NULL,
            error->code ? error->code : code_of(error->status));
  if (error->n_ctx)
    td_jw_add(&w, "'n_prompt_tokens': %ld, 'n_ctx': %ld", error->n_prompt_tokens, error->n_ctx);
  td_jw_add(&w, "}}");
}
