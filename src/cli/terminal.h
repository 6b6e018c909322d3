// src/cli/terminal.h - what a terminal can show, by its name in TERM and the wish in NO_COLOR.
#pragma once

#include <stdbool.h>
#include <stdint.h>

// Whether fd is a terminal that understands the escape sequences all terminals of today share.
bool td_terminal_moves_cursor(int fd);
// Also whether colours and dimmed text are wanted: NO_COLOR is unset or empty (no-color.org).
bool td_terminal_has_colors(int fd);
// Its columns; 0: fd is not a terminal, or has none.
uint32_t td_terminal_width(int fd);
