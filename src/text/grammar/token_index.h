// src/text/grammar/token_index.h - a vocabulary in the order of its tokens' bytes, so that tokens
// with a common beginning are neighbours. Immutable once open; any thread.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "text/tokenizer/tokenizer.h"

// ASCII characters by their codes; bit TD_CHARS_OTHER: all others.
#define TD_CHARS_OTHER 127
typedef struct {
  uint64_t bits[2];
} td_char_set;

#define TD_CHARS_NONE 255

typedef struct {
  uint32_t n;       // tokens: all that stand for text; control tokens do not
  uint32_t n_vocab; // ids are below
  int32_t *ids;     // [n]
  uint32_t *begin;  // [n + 1] where each token's bytes begin
  uint8_t *bytes;
  uint16_t *shared;   // [n] bytes shared with the token before
  td_char_set *chars; // [n] the characters that a token consists of
  uint8_t *n_chars;   // [n] how many; TD_CHARS_NONE: not whole characters, or too many
  uint32_t *added;    // [n_added] places of added tokens
  uint32_t n_added;
  uint32_t *place_of;       // [n_vocab] an id's place in ids; UINT32_MAX: none
  uint32_t bucket_end[256]; // end of the tokens that begin with each byte
  uint32_t max_bytes;       // of a token
  bool strips_space;        // a text's first token loses the space it begins with
} td_token_index;

// The tokens of tok with ids below n_vocab. tok may be closed afterwards. On error *out is NULL.
td_status td_token_index_open(td_token_index **out, const td_tokenizer *tok, uint32_t n_vocab,
                              td_err *err);
void td_token_index_close(td_token_index *index);
