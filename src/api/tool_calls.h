// src/api/tool_calls.h - one tool call in an answer's text, in any of the forms of parts.h, read as
// it is written: each byte is looked at once. Inside src/api only.
#ifndef TD_API_TOOL_CALLS_H
#define TD_API_TOOL_CALLS_H

#include "api/json_pieces.h"
#include "base/buf.h"
#include "base/status.h"

#define TD_CALL_ID_BYTES 96

typedef struct {
  char id[TD_CALL_ID_BYTES];
  char *name;       // owned, never empty
  td_buf arguments; // JSON text as far as it is written: an object, mended (json_pieces.h)
  bool is_whole;    // the model wrote it to its end
  // of a response in pieces: what earlier ones told
  bool is_told;
  size_t n_told; // bytes of arguments
} td_tool_call;

void td_tool_call_free(td_tool_call *call);

typedef enum { TD_MARKER_NONE, TD_MARKER_CUT, TD_MARKER_WHOLE } td_marker_match;

// Whether marker stands at text[at..len), whole or cut off by the end; nothing is not a beginning.
td_marker_match td_marker_at(const char *marker, const char *text, size_t at, size_t len);
bool td_is_space(char c);

// What a marker of any form is for.
typedef enum { TD_MARK_OPEN, TD_MARK_CALL, TD_MARK_CLOSE } td_mark;

// The marker at text[at..len), which is of bytes *n and of form *form. n_marks: only marks up to
// there are looked for, in the order above.
td_marker_match td_call_marker_at(td_mark last, const char *text, size_t at, size_t len,
                                  td_mark *mark, size_t *n, unsigned *form);

typedef enum {
  TD_CALL_OPEN, // the text ends within it
  TD_CALL_WHOLE,
  TD_CALL_NONE, // it is no call: text, up to where the reader stands
} td_call_state;

// How far a call is read. Members are for reading.
typedef struct {
  unsigned form;
  int step;
  size_t at;          // read up to here
  size_t begin;       // of the header; of what may be the closing marker
  bool is_array;      // the object stands in one
  bool is_nested;     // within the object that OpenAI's "function" holds
  bool has_value;     // of an object: a member stands in front
  bool has_comma;     // and a comma behind it
  bool is_fenced;     // arguments stand in a block of ```
  bool has_type;      // the header was DeepSeek V3's type; the name stands behind it
  bool has_arguments; // to their end
  bool is_open;       // its closing marker has not come
  bool in_pieces;     // what was certain enough to be told stays a call whatever follows
  td_buf word;        // owned: a key, a name or a literal that is being read
  td_string_reader string;
  td_object_reader object;
} td_call_reader;

// Whether another call may follow one of that form within the same markers: objects in a row, or in
// an array.
bool td_call_may_repeat(unsigned form);
// The reader begins behind the call's marker of that form.
void td_call_begin(td_call_reader *reader, unsigned form, size_t at, bool in_pieces);
void td_call_reader_free(td_call_reader *reader);
// Reads text[reader->at..len) and adds to call, whose id is empty where the text gives none.
// is_final: no text will come any more. TD_ENOMEM.
td_status td_call_read(td_call_reader *reader, td_tool_call *call, const char *text, size_t len,
                       bool is_final, td_call_state *state, td_err *err);
// Whether it is certain enough to be told: there is a name, and arguments have begun.
bool td_call_is_sure(const td_call_reader *reader, const td_tool_call *call);

#endif
