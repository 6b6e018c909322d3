// src/cli/word_wrap.h - breaks text that arrives in pieces between words, at a terminal's width.
// Fenced code (``` to ```) stays as it is, so that it can be copied.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"

// To start, set width and zero the rest.
typedef struct {
  uint32_t width;    // columns; 0: nothing is wrapped. May change between calls
  uint32_t column;   // where the next character goes
  uint32_t n_spaces; // held before the word
  uint32_t word_width;
  td_buf word;      // held until it is known where it ends
  uint32_t n_ticks; // at the beginning of the line
  bool is_in_line, is_fenced;
  bool is_code;   // set by the caller: blanks and ideographs do not end a word
  bool is_escape; // in a sequence ESC [ ... m, which has no width
  bool is_split;  // the word is too long for a line, and its beginning is out
} td_word_wrap;

// Appends to out what of the text can be shown: all but a word at its end that may continue. The
// text is whole UTF-8 characters. Widths are wcwidth's, so the thread's locale must be a UTF-8 one.
void td_word_wrap_add(td_word_wrap *wrap, const char *text, size_t len, td_buf *out);
// Appends the held word, and starts again at column 0.
void td_word_wrap_end(td_word_wrap *wrap, td_buf *out);
void td_word_wrap_free(td_word_wrap *wrap);
