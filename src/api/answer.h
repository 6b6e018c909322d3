// src/api/answer.h - one choice of a response while it grows: tokens become text, stop strings end
// it, and only text that is sure to stay may be shown.
// Token texts are the pieces in which the decoder gives the answer, so they always concatenate to
// its content: a character split over tokens belongs to the last of them.
#ifndef TD_API_ANSWER_H
#define TD_API_ANSWER_H

#include <stdbool.h>
#include <stdint.h>

#include "api/stop.h"
#include "base/buf.h"
#include "tandem/wire.h"
#include "text/tokenizer/tokenizer.h"

// A token of the answer and its piece of text, bytes [begin, end).
typedef struct {
  td_wire_token token;
  size_t begin, end;
  size_t n_chars_before; // characters of the answer in front of it
} td_answer_token;

// Members are for reading.
typedef struct {
  const td_stops *stops; // borrowed
  td_detok detok;
  bool keep_tokens;
  uint32_t min_tokens;
  td_buf text;             // all that is decoded
  size_t n_sure;           // bytes of it that may be shown
  size_t n_taken;          // bytes of it that were
  size_t n_chars;          // characters of it
  bool stopped;            // a stop string matched; text ends at n_sure
  bool finished;           // no token will come
  uint32_t n_tokens;       // drawn, the end-of-sequence token too
  td_answer_token *tokens; // owned; only with keep_tokens
  size_t n_kept, cap;
  size_t n_tokens_taken;
} td_answer;

typedef struct {
  const td_stops *stops; // borrowed
  bool keep_tokens;      // for log-probabilities
  bool shows_special;    // control tokens are text, too
  uint32_t min_tokens;   // stop strings count behind so many
} td_answer_opts;

// tok is borrowed.
void td_answer_init(td_answer *answer, const td_tokenizer *tok, const td_answer_opts *opts);
void td_answer_free(td_answer *answer);

// Takes the next token. After answer->stopped is set, further tokens are ignored.
td_status td_answer_add(td_answer *answer, const td_wire_token *token, td_err *err);
// No token follows: what was held back becomes sure.
td_status td_answer_finish(td_answer *answer, td_err *err);

// The next piece to show: bytes [*begin, *end) of the text and its tokens [*first, *last). False
// when there is neither.
typedef struct {
  size_t begin, end;
  size_t first, last;
} td_answer_piece;
bool td_answer_take(td_answer *answer, td_answer_piece *piece);

#endif
