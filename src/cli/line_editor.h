// src/cli/line_editor.h - messages typed on a terminal: line editing, history, several lines,
// pasting. Prompts and what is typed go to stderr. One at a time; thread: the one that opened it.
#ifndef TD_CLI_LINE_EDITOR_H
#define TD_CLI_LINE_EDITOR_H

#include "base/buf.h"
#include "base/status.h"

typedef struct td_line_editor td_line_editor;

typedef enum {
  TD_LINE_READ,
  TD_LINE_INTERRUPTED, // Ctrl-C: what was typed is discarded
  TD_LINE_END,         // Ctrl-D on an empty line, or the terminal is gone
} td_line_result;

// The standard input must be a terminal. On error *out is NULL.
td_status td_line_editor_open(td_line_editor **out, td_err *err);
void td_line_editor_close(td_line_editor *editor);

// Reads a message into out and adds it to the history. It goes on in the next line after a trailing
// backslash, and from three double quotes to the next three; a pasted text may have any number of
// lines. out is valid UTF-8 unless it failed.
td_line_result td_line_editor_read(td_line_editor *editor, td_buf *out);

#endif
