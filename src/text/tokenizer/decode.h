// src/text/tokenizer/decode.h - the "decoder" of tokenizer.json: decodes tokens to text. Private to
// text/.
#pragma once

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#include "text/tokenizer/added.h"
#include "text/tokenizer/vocab.h"

typedef struct td_decoder td_decoder;

// Supports ByteLevel, Replace of a string, Strip, Metaspace, ByteFallback, Fuse, and Sequences of
// them. json may be NULL: tokens are joined with spaces. Precomputes the text of every token.
td_status td_decoder_open(td_decoder **out, const cJSON *json, const td_vocab *vocab,
                          const td_added *added, td_err *err);
void td_decoder_close(td_decoder *decoder);

// The bytes of a token that is not the first; id must be in range. NUL-terminated.
const char *td_decoder_bytes(const td_decoder *decoder, int32_t id, size_t *len);

// State of decoding a text token by token; td_detok in tokenizer.h wraps it.
typedef struct {
  td_buf *held;
  bool *started;
  unsigned *n_strip_left;
} td_decoding;

unsigned td_decoder_strip_left(const td_decoder *decoder);
// Whether a text loses the space it begins with.
bool td_decoder_strips_space(const td_decoder *decoder);
td_status td_decoder_feed(const td_decoder *decoder, const td_decoding *text, int32_t id,
                          td_buf *out, td_err *err);
td_status td_decoder_flush(const td_decoder *decoder, const td_decoding *text, td_buf *out,
                           td_err *err);
