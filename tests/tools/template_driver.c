// tests/tools/template_driver.c - renders many templates in one process, for tests/e2e.
// Each line of standard input is {"template": TEXT, "vars": {...}, "now_us": N}; each line of
// standard output {"text": TEXT, "typed": [[begin, end], ...]} or {"error": TEXT, "status": N}.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json_parse.h"
#include "base/json_write.h"
#include "text/template.h"

static void write_result(td_buf *line, const td_buf *text, const td_spans *typed) {
  td_json_writer w = TD_JSON_WRITER(line);
  td_jw_begin_object(&w, NULL);
  td_jw_str_len(&w, "text", td_buf_text(text), text->len);
  td_jw_begin_array(&w, "typed");
  for (size_t i = 0; i < typed->n; i++) {
    td_jw_begin_array(&w, NULL);
    td_jw_int(&w, NULL, (int64_t)typed->spans[i].begin);
    td_jw_int(&w, NULL, (int64_t)typed->spans[i].end);
    td_jw_end_array(&w);
  }
  td_jw_end_array(&w);
  td_jw_end_object(&w);
}

static void write_error(td_buf *line, const td_err *err) {
  td_json_writer w = TD_JSON_WRITER(line);
  td_jw_begin_object(&w, NULL);
  td_jw_str(&w, "error", err->msg);
  td_jw_int(&w, "status", err->code);
  td_jw_end_object(&w);
}

static td_status render(const cJSON *request, td_buf *text, td_spans *typed, td_err *err) {
  const cJSON *source = cJSON_GetObjectItemCaseSensitive(request, "template");
  if (!cJSON_IsString(source)) return td_fail(err, TD_EINVAL, "template must be a string");
  td_template_opts opts = {0};
  double now_us = 0;
  td_status st = td_json_get_double(request, "now_us", &now_us, err);
  opts.now_us = (int64_t)now_us;
  td_template *tmpl = NULL;
  if (st == TD_OK) {
    st = td_template_open(&tmpl, source->valuestring, strlen(source->valuestring), err);
  }
  if (st == TD_OK) {
    const cJSON *vars = cJSON_GetObjectItemCaseSensitive(request, "vars");
    st = td_template_render(tmpl, vars, &opts, text, typed, err);
  }
  td_template_close(tmpl);
  return st;
}

static void answer(const char *line, size_t len) {
  td_err err = {0};
  cJSON *request;
  td_buf text = TD_BUF_INIT, out = TD_BUF_INIT;
  td_spans typed = {0};
  td_status st = td_json_parse(&request, line, len, TD_JSON_MAX_DEPTH, &err);
  if (st == TD_OK) st = render(request, &text, &typed, &err);
  if (st == TD_OK) {
    write_result(&out, &text, &typed);
  } else {
    write_error(&out, &err);
  }
  puts(td_buf_text(&out));
  cJSON_Delete(request);
  td_buf_free(&text);
  td_buf_free(&out);
  td_spans_free(&typed);
}

int main(void) {
  char *line = NULL;
  size_t cap = 0;
  ssize_t len;
  while ((len = getline(&line, &cap, stdin)) > 0)
    answer(line, (size_t)len);
  free(line);
  return 0;
}
