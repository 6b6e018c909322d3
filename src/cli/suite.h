// src/cli/suite.h - a suite of questions with expected answers, one JSON object a line:
//   {"id": "...", "kind": "...", "messages": [...], "tools": [...], "match": "exact" | "contains",
//    "expect": "text" or ["any", "of", "these"]}
// id, tools and further members of the conversation (chat_template_kwargs as members) are optional;
// match is "exact" when absent. Texts are compared without white space at their ends.
#ifndef TD_CLI_SUITE_H
#define TD_CLI_SUITE_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

typedef struct {
  char *kind;
  char *vars; // the conversation as a JSON object for td_chat_encode
  bool contains;
  char **expect; // [n_expect]
  size_t n_expect;
} td_question;

typedef struct {
  td_question *questions;
  size_t n, cap;
} td_suite;

// Reads path. Errors name the line. Call td_suite_free in every case.
td_status td_suite_read(td_suite *out, const char *path, td_err *err);
void td_suite_free(td_suite *suite);

// Whether an answer is right.
bool td_question_matches(const td_question *question, const char *answer);

#endif
