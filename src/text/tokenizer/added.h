// src/text/tokenizer/added.h - "added_tokens" of tokenizer.json, which are cut out of a text before
// all other steps. Private to text/.
#pragma once

#include <cjson/cJSON.h>

#include "text/tokenizer/normalizer.h"
#include "text/tokenizer/vocab.h"

typedef struct td_added td_added;

// Adds the tokens to vocab. norm computes the spelling of tokens marked as normalized.
td_status td_added_open(td_added **out, const cJSON *json, td_vocab *vocab, const td_norm *norm,
                        td_err *err);
void td_added_close(td_added *added);

// A piece of a text: an added token, or the text between two of them if id is -1.
typedef struct {
  size_t begin, end;
  int32_t id;
} td_piece;

typedef td_status (*td_added_piece)(void *owner, const td_piece *piece, td_err *err);

// A text to split, and the callback that receives its pieces.
typedef struct {
  const char *text; // valid UTF-8
  size_t len;
  const td_spans *literal; // no token may overlap one of these; may be NULL
  bool normalized;         // search tokens marked as normalized; else the others
  td_added_piece piece;
  void *owner;
  td_regex_scratch *regex;
} td_added_text;

// Passes the pieces of text on in order, none of them empty. Tokens are found from left to right,
// the longest first. Tokens marked lstrip or rstrip include the white space on that side.
td_status td_added_split(const td_added *added, const td_added_text *text, td_err *err);

size_t td_added_count(const td_added *added);
// The normalized spelling of the i-th token, which is the one used for decoding. NULL if it equals
// the token's own spelling.
const char *td_added_normal_text(const td_added *added, size_t i, int32_t *id, size_t *len);
