// src/cli/terminal.h - what a terminal can show, by its name in TERM and the wish in NO_COLOR;
// Ctrl-C and other signals that a program on a terminal lives through.
#pragma once

#include <stdbool.h>
#include <stdint.h>

// Whether fd is a terminal that understands the escape sequences all terminals of today share.
bool td_terminal_moves_cursor(int fd);
// Also whether colours and dimmed text are wanted: NO_COLOR is unset or empty (no-color.org).
bool td_terminal_has_colors(int fd);
// Its columns; 0: fd is not a terminal, or has none.
uint32_t td_terminal_width(int fd);

// From now on SIGINT is noted and does not end the process.
void td_interrupt_catch(void);
// Also notes SIGWINCH and SIGCONT. Returns a descriptor that becomes readable when a signal
// arrives: polled beside the input, it loses no signal that comes just before the wait. -1: there
// is none.
int td_interrupt_open_fd(void);

// Whether SIGINT came since td_interrupt_clear. May be called between tokens.
bool td_interrupted(void);
void td_interrupt_clear(void);
// Whether SIGWINCH or SIGCONT came since the last call.
bool td_interrupt_take_redraw(void);
