// src/api/parts_call.h - one tool call in an answer's text, in any of the forms of parts.h. Inside
// src/api only.
#ifndef TD_API_PARTS_CALL_H
#define TD_API_PARTS_CALL_H

#include "api/parts.h"

typedef enum { TD_MARKER_NONE, TD_MARKER_CUT, TD_MARKER_WHOLE } td_marker_match;

// Whether marker stands at text[at..len), whole or cut off by the end; nothing is not a beginning.
td_marker_match td_marker_at(const char *marker, const char *text, size_t at, size_t len);
// Where white space that begins, or ends, there is over.
size_t td_skip_space(const char *text, size_t at, size_t len);
size_t td_trim_end(const char *text, size_t begin, size_t end);
// The markers with which calls begin.
const char *const *td_call_openers(size_t *n);

typedef enum {
  TD_CALL_NONE,      // something else stands there
  TD_CALL_OPENED,    // a marker in front of calls
  TD_CALL_CLOSED,    // a marker behind them
  TD_CALL_WHOLE,     // *call is filled
  TD_CALL_MALFORMED, // began like a call
  TD_CALL_CUT,       // the text ends within it, or before it
} td_call_result;

// Looks at text[*at..len), white space passed over, and moves *at behind what it found. The caller
// owns name and arguments of a whole call; its id is empty where the text gives none. TD_ENOMEM.
td_status td_call_take(td_call_result *result, td_tool_call *call, const char *text, size_t *at,
                       size_t len, bool is_final, td_err *err);

#endif
