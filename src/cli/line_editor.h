// src/cli/line_editor.h - messages typed on a terminal: line editing, history, several lines,
// pasting. Prompts and what is typed go to stderr. One at a time; thread: the one that opened it.
#pragma once

#include "base/buf.h"
#include "base/status.h"

typedef struct td_line_editor td_line_editor;

typedef enum {
  TD_LINE_READ,
  TD_LINE_INTERRUPTED, // Ctrl-C: what was typed is discarded
  TD_LINE_END,         // Ctrl-D on an empty line, or the terminal is gone
} td_line_result;

// Appends the ways in which the line may continue, each the whole line followed by a line break.
typedef void td_line_complete(void *ctx, const char *line, td_buf *out);

// The standard input must be a terminal. What Tab does is complete's. Messages of earlier programs
// are in the history, which is kept in $XDG_STATE_HOME/tandem/history, or under ~/.local/state. On
// error *out is NULL.
td_status td_line_editor_open(td_line_editor **out, td_line_complete *complete, void *ctx,
                              td_err *err);
void td_line_editor_close(td_line_editor *editor);

// Reads a message into out and adds it to the history. It continues in the next line after a
// trailing backslash, and from three double quotes to the next three; a pasted text may have any
// number of lines, and Alt-Enter begins another one. out is valid UTF-8 unless it failed.
td_line_result td_line_editor_read(td_line_editor *editor, td_buf *out);
