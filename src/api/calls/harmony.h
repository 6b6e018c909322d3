// src/api/calls/harmony.h - headers of the messages that gpt-oss writes, also as it garbles them:
//   <|start|>assistant to=R<|channel|>CHANNEL to=R <|constrain|>TYPE<|message|>
// Inside src/api only.
#pragma once

#include "api/calls/tool_calls.h"

typedef enum {
  TD_HARMONY_START,
  TD_HARMONY_CHANNEL,
  TD_HARMONY_CONSTRAIN,
  TD_HARMONY_MESSAGE,
  TD_HARMONY_END, // any that ends a message; the last
} td_harmony_mark;

// The marker at text[at..len): which in *mark, its length in *n.
td_marker_match td_harmony_mark_at(const char *text, size_t at, size_t len, td_harmony_mark *mark,
                                   size_t *n);
// Whether a header begins at text[at..len), its first markers left out or not. Looks at a bounded
// number of bytes.
td_marker_match td_harmony_begins_at(const char *text, size_t at, size_t len);

typedef struct {
  bool is_thought;                 // by the last channel named
  char name[TD_CALL_MAX_NAME + 1]; // of the tool that is called; empty: none
  size_t text;                     // the first byte that is of no field; else the header's end
  size_t next; // a channel without recipient behind an empty message with one; else the end
} td_harmony_header;

// Reads text[at..end) as a header. Of several recipients one that is offered counts, else the
// first.
td_harmony_header td_harmony_header_read(const char *text, size_t at, size_t end,
                                         const td_tool_params *params);
