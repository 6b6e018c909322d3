// src/cli/markdown.h - shows Markdown that arrives in pieces on a terminal: emphasis, headings,
// lists, quotes and code by colours instead of marks, lines broken between words, code never.
// Where a piece ends changes nothing. Emphasis and code are held back until they end; what never
// does within its paragraph, or within TD_MARKDOWN_HELD bytes, is text with its marks.
#pragma once

#include "cli/word_wrap.h"

#define TD_MARKDOWN_HELD 1000

// To start, zero it, and set wrap.width and is_start.
typedef struct {
  td_word_wrap wrap;
  uint32_t style, shown; // of the next character, and of the last
  char part[4];          // of a character
  size_t n_part;
  char mark[64]; // the beginning of a line, until it is known what it marks
  size_t n_mark;
  char run, before;        // `, * or _; the byte before
  uint32_t n_run, n_ticks; // of it so far; that began the code
  // Characters not shown yet, of which the first n_held may be styled by n_opener times opener.
  char ahead[TD_MARKDOWN_HELD + 80], opener;
  uint32_t n_ahead, n_held, n_opener; // n_opener 0: nothing is held
  uint32_t n_in_line;                 // characters since a line began in what is held
  char fence;                         // 0: not in a block of code
  uint32_t n_fence;
  bool is_start, is_blank, is_escaped; // of a line; no more than blanks in it; behind a backslash
} td_markdown;

// Appends to out what can be shown. The text holds no control characters but \n and \t.
void td_markdown_add(td_markdown *m, const char *text, size_t len, td_buf *out);
// Appends the rest, and starts again.
void td_markdown_end(td_markdown *m, td_buf *out);
void td_markdown_free(td_markdown *m);
