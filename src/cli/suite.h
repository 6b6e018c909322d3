// src/cli/suite.h - a suite of questions with expected responses, one JSON object per line:
//   {"id": "...", "kind": "...", "messages": [...], "tools": [...], "match": "exact" | "contains",
//    "expect": "text" or ["any", "of", "these"]}
// Optional: id, tools, and other members of the conversation (e.g. chat_template_kwargs). match
// defaults to "exact". White space at the ends of texts is ignored.
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

typedef struct {
  char *kind;
  char *vars; // the conversation as a JSON object, for td_chat_encode
  bool contains;
  char **expect; // [n_expect]
  size_t n_expect;
} td_question;

typedef struct {
  td_question *questions;
  size_t n, cap;
} td_suite;

// Reads the file at path. Errors name the line. Call td_suite_free in every case.
td_status td_suite_read(td_suite *out, const char *path, td_err *err);
void td_suite_free(td_suite *suite);

// Whether the response is correct.
bool td_question_matches(const td_question *question, const char *answer);
