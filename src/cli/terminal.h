// src/cli/terminal.h - what a terminal can show, by its name in TERM and the wish in NO_COLOR, and
// how it treats what is typed.
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <termios.h>

// Whether fd is a terminal that understands the escape sequences all terminals of today share.
bool td_terminal_moves_cursor(int fd);
// Also whether colours and dimmed text are wanted: NO_COLOR is unset or empty (no-color.org).
bool td_terminal_has_colors(int fd);
// Its columns; 0: fd is no terminal, or has none.
uint32_t td_terminal_width(int fd);

// What is typed while something else is shown.
typedef struct {
  bool is_quiet;
  struct termios before;
} td_terminal_input;

// From now on the terminal on standard input, if it is one, does not show what is typed, and keeps
// it for the next reader. Ctrl-C still is a signal.
void td_terminal_hush(td_terminal_input *input);
// Puts back what td_terminal_hush changed.
void td_terminal_unhush(td_terminal_input *input);
