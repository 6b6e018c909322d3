// src/api/calls/tool_calls.h - incremental reader of one tool call in generated text, in any of the
// forms of output_parser.h. Examines each byte once. Inside src/api only.
#pragma once

#include "api/calls/json_pieces.h"
#include "api/calls/tool_params.h"
#include "base/buf.h"
#include "base/status.h"

#define TD_CALL_ID_BYTES 96
#define TD_CALL_MAX_NAME 256 // bytes

typedef struct {
  char id[TD_CALL_ID_BYTES];
  char *name;       // owned, never empty
  td_buf arguments; // JSON text of an object so far, repaired (json_pieces.h)
  bool is_whole;    // the model completed the call: the arguments are JSON
  // streaming: what earlier chunks sent
  bool is_sent;
  size_t n_sent; // bytes of arguments sent
} td_tool_call;

void td_tool_call_free(td_tool_call *call);

typedef enum { TD_MARKER_NONE, TD_MARKER_CUT, TD_MARKER_WHOLE } td_marker_match;

// Whether marker is at text[at..len), complete or cut off by the end. Zero bytes do not count as a
// prefix.
td_marker_match td_marker_at(const char *marker, const char *text, size_t at, size_t len);

// Role of a marker, in any form.
typedef enum { TD_MARK_THOUGHT, TD_MARK_OPEN, TD_MARK_CALL, TD_MARK_CLOSE } td_mark;

// The marker at text[at..len): its length in *n, its form in *form. Only roles up to `last`, in the
// order above, are considered. TD_MARK_THOUGHT: markers that open a call within a thought that the
// model forgot to close.
td_marker_match td_call_marker_at(td_mark last, const char *text, size_t at, size_t len,
                                  td_mark *mark, size_t *n, unsigned *form);

// The i-th of the markers that open calls, of all forms; some are empty. NULL: there are no more.
const char *td_call_opening(unsigned i);

typedef enum {
  TD_CALL_OPEN, // the text ends within the call
  TD_CALL_WHOLE,
  TD_CALL_BROKEN, // a call whose arguments go wrong: they stay unfinished
  TD_CALL_NONE,   // not a call: text up to the reader's position
} td_call_state;

// Progress through a call. Callers may read the members but not write them.
typedef struct {
  unsigned form;
  int step;
  size_t at;                    // everything before this is read
  size_t begin;                 // start of the header, or of a possible closing marker
  bool is_array;                // the object is an element of an array
  bool is_nested;               // inside OpenAI's "function" object
  bool has_value;               // in an object: a member precedes
  bool has_comma;               // a comma follows it
  bool is_fenced;               // arguments are in a ``` block
  bool has_arguments;           // the arguments are complete
  bool is_open;                 // the closing marker has not been seen
  bool in_run;                  // a marker that opens a run stands before
  unsigned types;               // TD_PARAM_* of the argument being read, of a form with tags
  int is_text;                  // whether its tag says that it is a string; -1: it says nothing
  uint64_t given;               // bit i: the tool's parameter i was given, in a form with tags
  unsigned depth;               // elements open within the argument being read
  const td_tool_params *params; // borrowed; may be NULL
  td_buf word;                  // owned: the key, name or literal being read
  td_buf key;                   // owned: of the argument being read, of a form with tags
  td_string_reader string;
  td_object_reader object;
  // Of a form whose keys have no quotes: whether a key, or a string of its own quotes, is being
  // read, and the last byte of neither.
  bool in_bare_key, in_bare_text;
  char last;
} td_call_reader;

// Whether another call of that form begins at text[at..len) within the same markers: consecutive
// objects, or elements of an array.
td_marker_match td_call_repeats_at(unsigned form, const char *text, size_t at, size_t len);
// Starts reading after the opening marker of that form. params: of the request's tools, or NULL.
void td_call_begin(td_call_reader *reader, unsigned form, size_t at, const td_tool_params *params);
void td_call_reader_free(td_call_reader *reader);
typedef enum {
  TD_TEXT_GROWS,
  TD_TEXT_ENDED, // by the model
  TD_TEXT_CUT,   // by a limit or a stop string
} td_text_end;

// Reads text[reader->at..len) and adds to call. call->id stays empty if the text has none.
// Error: TD_ENOMEM.
td_status td_call_read(td_call_reader *reader, td_tool_call *call, const char *text, size_t len,
                       td_text_end end, td_call_state *state, td_err *err);
// Whether the call may be emitted: it has a name and its arguments have begun. It then stays a
// call, whatever follows.
bool td_call_is_sure(const td_call_reader *reader, const td_tool_call *call);
