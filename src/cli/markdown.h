// src/cli/markdown.h - shows Markdown that arrives in pieces on a terminal: emphasis, headings,
// lists, quotes and code by colours instead of marks, lines broken between words, code never.
// Where a piece ends changes nothing. What was begun and never ended ends with its paragraph.
#pragma once

#include "cli/word_wrap.h"

// To start, zero it, and set wrap.width and is_start.
typedef struct {
  td_word_wrap wrap;
  uint32_t style, shown; // of the next character, and of the last
  char part[4];          // of a character
  size_t n_part;
  char mark[64]; // the beginning of a line, until it is known what it marks
  size_t n_mark;
  char run, before, opened_by[4]; // `, * or _; the byte before; that which began emphasis
  uint32_t n_run, n_ticks;        // of it so far; that began the code
  char fence;                     // 0: not in a block of code
  uint32_t n_fence;
  bool is_start, is_blank, is_escaped; // of a line; no more than blanks in it; behind a backslash
} td_markdown;

// Appends to out what can be shown. The text holds no control characters but \n and \t.
void td_markdown_add(td_markdown *m, const char *text, size_t len, td_buf *out);
// Appends the rest, and starts again.
void td_markdown_end(td_markdown *m, td_buf *out);
void td_markdown_free(td_markdown *m);
