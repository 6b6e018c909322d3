// src/base/str.h - comparisons of strings that string.h lacks.
#pragma once

#include <stdbool.h>
#include <string.h>

static inline bool td_ends_with(const char *text, const char *suffix) {
  size_t n = strlen(text), m = strlen(suffix);
  return n >= m && strcmp(text + n - m, suffix) == 0;
}

// Whether word is one of the words, which blanks separate.
static inline bool td_is_word(const char *words, const char *word) {
  const size_t n = strlen(word);
  if (!n || strchr(word, ' ')) return false;
  for (const char *at = strstr(words, word); at; at = strstr(at + n, word)) {
    if ((at == words || at[-1] == ' ') && (at[n] == ' ' || !at[n])) return true;
  }
  return false;
}
