// A template and, after a zero byte, the JSON object of its variables.
#include <stdint.h>
#include <string.h>

#include "base/json_parse.h"
#include "text/template.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char usual_vars[] =
    "{\"messages\":[{\"role\":\"system\",\"content\":\"s\"},{\"role\":\"user\",\"content\":"
    "\"h\\u00e9 "
    "<x>\"},{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"function\":{\"name\":\"f\","
    "\"arguments\":{\"a\":1.0}}}]}],\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}"
    "}],"
    "\"add_generation_prompt\":true,\"bos_token\":\"<s>\",\"n\":5}";

static void check_spans(const td_buf *text, const td_spans *typed) {
  size_t end = 0;
  for (size_t i = 0; i < typed->n; i++) {
    td_span s = typed->spans[i];
    TD_CHECK(s.begin < s.end && s.end <= text->len && (i == 0 || s.begin > end));
    end = s.end;
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const char *source = (const char *)data;
  const uint8_t *zero = size ? memchr(data, 0, size) : NULL;
  size_t len = zero ? (size_t)(zero - data) : size;
  const char *json = zero ? (const char *)zero + 1 : usual_vars;
  size_t json_len = zero ? size - len - 1 : strlen(usual_vars);
  td_template_opts opts = {.max_output_bytes = 1 << 18,
                           .max_memory_bytes = 8 << 20,
                           .max_steps = 50000,
                           .now_us = 1741356309123456};
  td_err err;
  cJSON *vars;
  if (td_json_parse(&vars, json, json_len, TD_JSON_MAX_DEPTH, &err) != TD_OK) return 0;
  td_template *tmpl;
  if (td_template_open(&tmpl, source, len, &err) == TD_OK) {
    td_buf text = TD_BUF_INIT;
    td_spans typed = {0};
    if (td_template_render(tmpl, vars, &opts, &text, &typed, &err) == TD_OK) {
      check_spans(&text, &typed);
    }
    td_buf_free(&text);
    td_spans_free(&typed);
    td_template_close(tmpl);
  }
  cJSON_Delete(vars);
  return 0;
}
