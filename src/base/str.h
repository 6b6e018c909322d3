// src/base/str.h - comparisons of strings that string.h lacks.
#ifndef TD_BASE_STR_H
#define TD_BASE_STR_H

#include <stdbool.h>
#include <string.h>

static inline bool td_ends_with(const char *text, const char *suffix) {
  size_t n = strlen(text), m = strlen(suffix);
  return n >= m && strcmp(text + n - m, suffix) == 0;
}

#endif
