// src/api/json_pieces.h - JSON that a model writes, read byte by byte as it comes. What strict JSON
// refuses inside strings is mended on the way: raw line feeds, tabs and other control characters,
// unknown escapes (a backslash that stands for itself), \u0000 and lone surrogates (U+FFFD).
// Inside src/api only.
#ifndef TD_API_JSON_PIECES_H
#define TD_API_JSON_PIECES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"

#define TD_STRING_PIECE 16 // bytes that one more byte of a string may decode to, at most

// Zeroed is the place behind the opening quote.
typedef struct {
  char held[12]; // an escape, or two, not yet whole
  uint8_t n_held;
} td_string_reader;

// Takes the next byte of a string and writes the text that is sure now to out. Returns its bytes;
// *ended: the byte was the closing quote.
size_t td_string_feed(td_string_reader *reader, char c, char out[TD_STRING_PIECE], bool *ended);

typedef enum { TD_OBJECT_OPEN, TD_OBJECT_WHOLE, TD_OBJECT_BAD } td_object_state;

// Zeroed is the place in front of the opening brace.
typedef struct {
  td_string_reader string;
  uint32_t depth;
  uint64_t arrays; // bit i: the i-th bracket that is open is one of an array
  bool in_string;
  bool has_member; // behind the first brace came a quote or the end: it looks like an object
} td_object_reader;

// Takes the next byte of an object and appends it, mended, to out, which may be NULL. WHOLE: it was
// the last. BAD: it cannot stand there, and nothing was appended. Brackets must match and nest to
// 64 at most, strings are told from the rest; whether it is JSON otherwise is for a parser to say.
td_object_state td_object_feed(td_object_reader *reader, char c, td_buf *out);

#endif
