// src/api/calls/json_pieces.h - reads model-generated JSON byte by byte, as it is generated.
// Repairs what strict JSON rejects inside strings: raw line feeds, tabs and other control
// characters, unknown escapes (kept as a literal backslash), \u0000 and lone surrogates (replaced
// by U+FFFD). Python's spelling becomes JSON: strings in single quotes, True, False and None, a
// comma behind the last item. Inside src/api only.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"

#define TD_STRING_PIECE 16 // most bytes that one input byte of a string can decode to

// A zeroed reader is positioned after the opening quote.
typedef struct {
  char held[12]; // an incomplete escape, or a pair of them
  uint8_t n_held;
  char quote; // ends the string; 0: "
} td_string_reader;

// Takes the next byte of a string and writes the text that became final to out. Returns its length
// in bytes. Sets *ended if the byte was the closing quote.
size_t td_string_feed(td_string_reader *reader, char c, char out[TD_STRING_PIECE], bool *ended);

// Appends a byte of a string's text, escaped as JSON. NUL becomes U+FFFD.
void td_json_quote_byte(td_buf *out, char c);

typedef enum { TD_OBJECT_OPEN, TD_OBJECT_WHOLE, TD_OBJECT_BAD } td_object_state;

// A zeroed reader is positioned before the opening brace.
typedef struct {
  td_string_reader string;
  uint32_t depth;
  uint64_t arrays; // bit i: the i-th open bracket is an array's
  uint8_t at;      // what may come next: 0 is the beginning, TD_OBJECT_FIRST follows a bracket
  uint8_t word;    // of a number or a literal: how far it is
  uint8_t n_word;
  uint8_t n_gap; // bytes of a comma and what follows it, held: before a bracket it is one too many
  char gap[60];
  bool in_string;
  bool may_be_array; // the value may also be an array
  bool has_member;   // the first brace was followed by a quote or a closing brace: looks like an
                     // object
} td_object_reader;

#define TD_OBJECT_FIRST 1

// Takes the next byte of an object and appends it, repaired, to out, which may be NULL. WHOLE: the
// object is complete, and JSON. BAD: the byte is not allowed there and was not appended; out is the
// beginning of an object, but no JSON. Brackets nest at most 64 deep.
td_object_state td_object_feed(td_object_reader *reader, char c, td_buf *out);
