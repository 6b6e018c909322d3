// src/text/tokenizer/tokenizer.h - converts text to token ids and back, according to a model's
// tokenizer.json.
// Token ids are identical to those of the `tokenizers` library for every text, or of the `tiktoken`
// library for a tiktoken.model. In text that is not valid UTF-8, each maximal invalid part is
// replaced by U+FFFD. Thread: an open tokenizer may be used by several threads at once; a td_detok
// by one.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"
#include "base/token_ids.h"
#include "text/span.h"

typedef struct td_tokenizer td_tokenizer;

// Opens model_dir/tokenizer.json, or else tiktoken.model, and if present
// model_dir/tokenizer_config.json (for BOS and EOS). TD_EFORMAT and TD_EUNSUPPORTED name file and
// key. On error *out is NULL.
td_status td_tokenizer_open(td_tokenizer **out, const char *model_dir, td_err *err);
// Like td_tokenizer_open, from memory. config may be NULL. name stands for the file in messages.
td_status td_tokenizer_open_json(td_tokenizer **out, const char *name, const char *json, size_t len,
                                 const char *config, size_t config_len, td_err *err);
// Like td_tokenizer_open_json, from the text of a tiktoken.model.
td_status td_tokenizer_open_ranks(td_tokenizer **out, const char *name, const char *text,
                                  size_t len, const char *config, size_t config_len, td_err *err);
void td_tokenizer_close(td_tokenizer *tok);

enum {
  // Add the tokens that the post-processor puts around a text, such as BOS.
  TD_TOK_ADD_SPECIAL = 1 << 0,
  // Parse added tokens (control tokens and others) in the text. Otherwise all of it is plain text,
  // including "<|im_end|>".
  TD_TOK_PARSE_SPECIAL = 1 << 1,
};

// Appends the ids of text to out.
td_status td_tokenizer_encode(const td_tokenizer *tok, const char *text, size_t len, unsigned flags,
                              td_token_ids *out, td_err *err);
// Like td_tokenizer_encode, but no added token is parsed where it would overlap a range in literal:
// user input stays text while the chat template's control tokens are parsed. (A control token
// marked lstrip or rstrip still absorbs adjacent white space.)
td_status td_tokenizer_encode_spans(const td_tokenizer *tok, const char *text, size_t len,
                                    const td_spans *literal, unsigned flags, td_token_ids *out,
                                    td_err *err);

// Largest id + 1. Some smaller ids may be unused.
int32_t td_tokenizer_size(const td_tokenizer *tok);
// The bytes a token represents inside a text, not necessarily valid UTF-8. Borrowed,
// NUL-terminated; "" with *len 0 if id is unused or out of range.
const char *td_tokenizer_bytes(const td_tokenizer *tok, int32_t id, size_t *len);
// Whether the token is a control token: an added token marked special.
bool td_tokenizer_is_special(const td_tokenizer *tok, int32_t id);
bool td_tokenizer_is_added(const td_tokenizer *tok, int32_t id);
// The id of a token spelled as in tokenizer.json, e.g. "<|im_end|>" or "\u0120the"; -1 if absent.
int32_t td_tokenizer_find(const td_tokenizer *tok, const char *token, size_t len);
// From tokenizer_config.json; -1 if it does not define one.
int32_t td_tokenizer_bos(const td_tokenizer *tok);
int32_t td_tokenizer_eos(const td_tokenizer *tok);
// The tokens that end what a model generates: the one above, and control tokens that do so in every
// family that has them. At most TD_TOKENIZER_MAX_ENDS.
#define TD_TOKENIZER_MAX_ENDS 16
const int32_t *td_tokenizer_ends(const td_tokenizer *tok, uint32_t *n);
// Whether tokenizer_config.json requires BOS before plain prompts ("add_bos_token": true). For some
// models (DeepSeek) this is the only place, and TD_TOK_ADD_SPECIAL adds nothing.
bool td_tokenizer_wants_bos(const td_tokenizer *tok);
// Whether the first token of a decoded text loses the space it begins with.
bool td_tokenizer_strips_space(const td_tokenizer *tok);

// Appends the text of ids, always valid UTF-8. skip_special omits control tokens. Ids out of range
// are skipped.
td_status td_tokenizer_decode(const td_tokenizer *tok, const int32_t *ids, size_t n,
                              bool skip_special, td_buf *out, td_err *err);

// Decodes a stream of ids. All calls of td_detok_feed and the flush together append the result of
// td_tokenizer_decode; every piece is valid UTF-8.
typedef struct {
  const td_tokenizer *tok; // borrowed
  td_buf held;             // bytes of an incomplete character
  bool skip_special;
  bool started;          // at least one token was fed
  unsigned n_strip_left; // characters that may still be stripped from the beginning
} td_detok;

void td_detok_init(td_detok *detok, const td_tokenizer *tok, bool skip_special);
td_status td_detok_feed(td_detok *detok, int32_t id, td_buf *out, td_err *err);
// Replaces incomplete bytes by U+FFFD. The detokenizer may then be used for a new text.
td_status td_detok_flush(td_detok *detok, td_buf *out, td_err *err);
void td_detok_free(td_detok *detok);
