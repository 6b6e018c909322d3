// src/api/answer.h - the generated text of one choice while it grows: detokenizes, applies stop
// strings, and releases only text that can no longer change.
// A token's text is the piece that the decoder emits for it, so the pieces always concatenate to
// the content. A character split over several tokens belongs to the last of them.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "api/stop.h"
#include "base/buf.h"
#include "tandem/wire.h"
#include "text/tokenizer/tokenizer.h"

// A generated token and its piece of the text, bytes [begin, end).
typedef struct {
  td_wire_token token;
  size_t begin, end;
  size_t n_chars_before; // characters of the text before this token
} td_answer_token;

// Callers may read the members but not write them.
typedef struct {
  const td_stops *stops; // borrowed
  td_detok detok;
  bool keep_tokens;
  uint32_t min_tokens;
  td_buf text;             // everything decoded so far
  size_t n_sure;           // bytes of text that may be sent
  size_t n_taken;          // bytes of text already sent
  size_t n_chars;          // characters in text
  bool stopped;            // a stop string matched; text ends at n_sure
  bool finished;           // no more tokens will come
  bool is_cut;             // finished, and more would have come
  uint32_t n_tokens;       // generated, including the end-of-sequence token
  td_answer_token *tokens; // owned; filled only with keep_tokens
  size_t n_kept, cap;
  size_t n_tokens_taken, n_seen; // kept tokens: sent; sent, or without text and waiting for more
} td_answer;

typedef struct {
  const td_stops *stops; // borrowed
  bool keep_tokens;      // for log-probabilities
  bool shows_special;    // include control tokens in the text
  uint32_t min_tokens;   // stop strings apply only after this many tokens
} td_answer_opts;

// tok is borrowed.
void td_answer_init(td_answer *answer, const td_tokenizer *tok, const td_answer_opts *opts);
void td_answer_free(td_answer *answer);

// Adds the next generated token. Once answer->stopped is set, further tokens are ignored.
td_status td_answer_add(td_answer *answer, const td_wire_token *token, td_err *err);
// Adds a token of the prompt (echo), before any generated one. It is not counted, and stop strings
// do not apply to it.
td_status td_answer_echo(td_answer *answer, const td_wire_token *token, td_err *err);
// No more tokens will come: releases text that was held back. is_cut: by a limit, not by the model.
td_status td_answer_finish(td_answer *answer, bool is_cut, td_err *err);

// The next piece to send: bytes [begin, end) of the text and tokens [first, last). td_answer_take
// returns false when both ranges are empty.
typedef struct {
  size_t begin, end;
  size_t first, last;
} td_answer_piece;
bool td_answer_take(td_answer *answer, td_answer_piece *piece);
