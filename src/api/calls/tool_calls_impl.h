// src/api/calls/tool_calls_impl.h - shared by the files that read a tool call. Private to them.
#pragma once

#include "api/calls/tool_calls.h"

#define TD_CALL_MAX_KEY 64

// Markers around a call's name and arguments, each argument an element of its own. NULL: not used.
typedef struct {
  const char *name_open, *name_close; // without name_close the name ends at white space or <
  const char *after_name;             // may stand between the name and the arguments
  const char *key_open, *key_close;
  const char *value_open, *value_close;
  const char *text_mark; // behind a key, before "true" where the value is a string, else "false"
  const char *end;       // ends the arguments
  bool trims_line_feeds; // one behind value's beginning and one before its end are not its own
  // An argument's key is the name of its element, whose end tag begins with value_close; values may
  // hold elements.
  bool keys_are_tags;
} td_call_tags;

// The markers with which a model family writes calls. NULL: not used.
typedef struct {
  const char *open;      // opens a run of calls
  const char *close;     // closes it
  const char *call_open; // opens one call
  const char *middle;    // between name and arguments; NULL: one object holds both, or tags do
  bool has_bare_keys;    // the arguments are an object as bare_calls.c reads it
  const char *call_close;
  const char *id_mark;      // in the header, between the name and an id
  bool has_ids;             // the header is an id that contains the name
  bool opens_offered;       // outside of a run call_open is of tools that are offered alone
  bool ends_thought;        // its opening marker ends a thought that has no end, as in its peers
  const td_call_tags *tags; // NULL: the arguments are JSON
} td_call_form_marks;

enum {
  // for an object that holds name and arguments
  STEP_BRACE,
  STEP_KEY,
  STEP_KEY_TEXT,
  STEP_COLON,
  STEP_VALUE,
  STEP_NAME_TEXT,
  STEP_SKIP_OBJECT,
  STEP_SKIP_TEXT,
  STEP_SKIP_WORD,
  // for a header followed by arguments
  STEP_HEADER,
  STEP_BODY,
  STEP_NAME,
  STEP_FENCE,
  // for both
  STEP_OBJECT,  // arguments: an object
  STEP_BARE,    // one with keys that have no quotes
  STEP_QUOTED,  // a string that holds the object
  STEP_LITERAL, // null or []
  STEP_CLOSE,
  STEP_BROKEN, // skips the rest of a call
  // for arguments in tags
  STEP_TAG_OPEN,
  STEP_TAG_NAME,
  STEP_TAG_NEXT,
  STEP_TAG_KEY,
  STEP_TAG_VALUE_OPEN,
  STEP_TAG_VALUE,
};

typedef enum { GO, WAIT, NONE, WHOLE, BROKEN } td_call_outcome;

// State of one reading step.
typedef struct {
  td_call_reader *r;
  td_tool_call *call;
  const td_call_form_marks *form;
  const char *text;
  size_t len;
  bool is_final;
  bool is_ended; // is_final, and the model ended the text itself
} td_call_reading;

static inline td_call_outcome td_call_go(td_call_reading *x, int step) {
  x->r->step = step;
  return GO;
}

// Skips white space. False: the text ends there.
bool td_call_skip_space(td_call_reading *x);
// Sets the name without the model's prefix, and the id if the text holds one. NONE: there is no
// name.
td_call_outcome td_call_set_name(td_call_reading *x, const char *text, size_t len);

// Makes name that of the tool offered which it means, with an id before or behind it. Without one
// (false) only what the model's form puts around names is removed.
bool td_call_match_name(const td_tool_params *params, bool has_ids, char *name);

// Whether text[at..len) begins with a marker. WAIT: it may. NULL: there is none.
td_call_outcome td_call_at(const td_call_reading *x, const char *marker, size_t at);
// Whether it begins with one of the markers.
td_call_outcome td_call_any_at(const td_call_reading *x, const char *const *marks, size_t n,
                               size_t at);
// Without the white space and the quotes around it.
void td_call_strip(const char **text, size_t *len);

// bare_calls.c: GO: the arguments are whole.
td_call_outcome td_bare_call_step(td_call_reading *x);
// tagged_calls.c: the steps STEP_TAG_*.
td_call_outcome td_tagged_call_step(td_call_reading *x);
