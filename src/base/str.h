// src/base/str.h - what string.h and ctype.h lack, whatever the locale.
#pragma once

#include <stdbool.h>
#include <string.h>

// JSON's white space.
static inline bool td_is_space(char c) {
  return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

// The value of a hexadecimal digit; -1: it is none.
static inline int td_hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  c |= 0x20;
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static inline bool td_ends_with(const char *text, const char *suffix) {
  size_t n = strlen(text), m = strlen(suffix);
  return n >= m && strcmp(text + n - m, suffix) == 0;
}

// Whether word is one of the words, which blanks separate.
static inline bool td_is_word(const char *words, const char *word) {
  const size_t n = strlen(word);
  if (!n || strchr(word, ' ')) return false;
  for (const char *at = strstr(words, word); at; at = strstr(at + n, word))
    if ((at == words || at[-1] == ' ') && (at[n] == ' ' || !at[n])) return true;
  return false;
}
