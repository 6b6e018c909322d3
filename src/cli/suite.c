// src/cli/suite.c - reads question suites and compares responses.
#include "cli/suite.h"

#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/grow.h"
#include "base/json_parse.h"

#define MAX_SUITE_BYTES (1u << 26)

static char *copy(const char *text, td_err *err, td_status *st) {
  char *out = strdup(text);
  if (!out) *st = td_fail(err, TD_ENOMEM, "out of memory");
  return out;
}

static td_status read_expect(td_question *q, const cJSON *expect, td_err *err) {
  bool is_list = cJSON_IsArray(expect);
  size_t n = is_list ? (size_t)cJSON_GetArraySize(expect) : 1;
  q->expect = calloc(n + 1, sizeof *q->expect);
  if (!q->expect) return td_fail(err, TD_ENOMEM, "out of memory");
  const cJSON *item = is_list ? expect->child : expect;
  td_status st = TD_OK;
  for (; st == TD_OK && q->n_expect < n; item = item->next) {
    if (!cJSON_IsString(item))
      return td_fail(err, TD_EFORMAT, "\"expect\" must be a string or a list of strings");
    q->expect[q->n_expect++] = copy(item->valuestring, err, &st);
  }
  if (!q->n_expect) return td_fail(err, TD_EFORMAT, "\"expect\" is empty");
  return st;
}

// The members of a line that the runner does not use itself are passed on as the conversation.
static td_status read_vars(td_question *q, cJSON *line, td_err *err) {
  static const char *const own[] = {"id", "kind", "match", "expect"};
  for (size_t i = 0; i < TD_COUNT(own); i++)
    cJSON_DeleteItemFromObjectCaseSensitive(line, own[i]);
  q->vars = cJSON_PrintUnformatted(line);
  return q->vars ? TD_OK : td_fail(err, TD_ENOMEM, "out of memory");
}

static td_status read_question(td_question *q, cJSON *line, td_err *err) {
  const char *kind = "question", *match = "exact";
  if (!cJSON_IsArray(td_json_get(line, "messages")))
    return td_fail(err, TD_EFORMAT, "\"messages\" must be a list");
  td_status st = td_json_get_str(line, "kind", &kind, err);
  if (st == TD_OK) st = td_json_get_str(line, "match", &match, err);
  if (st != TD_OK) return st;
  q->contains = !strcmp(match, "contains");
  if (!q->contains && strcmp(match, "exact"))
    return td_fail(err, TD_EFORMAT, "\"match\" must be \"exact\" or \"contains\"");
  q->kind = copy(kind, err, &st);
  const cJSON *expect = td_json_get(line, "expect");
  if (st == TD_OK && !expect) st = td_fail(err, TD_EFORMAT, "\"expect\" is missing");
  if (st == TD_OK) st = read_expect(q, expect, err);
  if (st == TD_OK) st = read_vars(q, line, err);
  return st;
}

static td_status add_line(td_suite *suite, const char *text, size_t len, td_err *err) {
  if (!TD_GROW(suite->questions, suite->n, suite->cap, 64))
    return td_fail(err, TD_ENOMEM, "out of memory");
  cJSON *line;
  td_status st = td_json_parse(&line, text, len, TD_JSON_MAX_DEPTH, err);
  if (st != TD_OK) return st;
  td_question *q = &suite->questions[suite->n++];
  *q = (td_question){0};
  st = read_question(q, line, err);
  cJSON_Delete(line);
  return st;
}

td_status td_suite_read(td_suite *out, const char *path, td_err *err) {
  *out = (td_suite){0};
  td_buf file = TD_BUF_INIT;
  td_status st = td_file_read(&file, path, MAX_SUITE_BYTES, err);
  const char *at = td_buf_text(&file), *end = at + file.len;
  for (size_t line = 1; st == TD_OK && at < end; line++) {
    const char *newline = memchr(at, '\n', (size_t)(end - at));
    size_t len = newline ? (size_t)(newline - at) : (size_t)(end - at);
    if (strspn(at, " \t\r") < len) {
      st = add_line(out, at, len, err);
      if (st != TD_OK) td_err_prefix(err, "%s: line %zu", path, line);
    }
    at += len + 1;
  }
  td_buf_free(&file);
  if (st == TD_OK && !out->n) st = td_fail(err, TD_EINVAL, "%s: no questions in it", path);
  return st;
}

void td_suite_free(td_suite *suite) {
  for (size_t i = 0; i < suite->n; i++) {
    td_question *q = &suite->questions[i];
    for (size_t j = 0; j < q->n_expect; j++)
      free(q->expect[j]);
    free(q->expect);
    free(q->kind);
    cJSON_free(q->vars);
  }
  free(suite->questions);
  *suite = (td_suite){0};
}

static const char *trim(const char *text, size_t *len) {
  static const char space[] = " \t\r\n";
  text += strspn(text, space);
  *len = strlen(text);
  while (*len && strchr(space, text[*len - 1]))
    (*len)--;
  return text;
}

bool td_question_matches(const td_question *question, const char *answer) {
  size_t len, want_len;
  answer = trim(answer, &len);
  for (size_t i = 0; i < question->n_expect; i++) {
    const char *want = trim(question->expect[i], &want_len);
    if (question->contains ? memmem(answer, len, want, want_len) != NULL
                           : len == want_len && !memcmp(answer, want, len))
      return true;
  }
  return false;
}
