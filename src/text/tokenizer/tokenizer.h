// src/text/tokenizer/tokenizer.h - text to token ids and back, as a model's tokenizer.json says.
// The reference is the `tokenizers` library: for every text it and td_tokenizer_encode give the
// same ids; of a tiktoken.model, the `tiktoken` library. Text that is not UTF-8 is read with U+FFFD
// for each maximal invalid part. Thread: an open tokenizer may be used from several threads at
// once; a td_detok from one.
#ifndef TD_TEXT_TOKENIZER_TOKENIZER_H
#define TD_TEXT_TOKENIZER_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"
#include "base/token_ids.h"
#include "text/span.h"

typedef struct td_tokenizer td_tokenizer;

// Reads model_dir/tokenizer.json, or else tiktoken.model, and, where it exists,
// model_dir/tokenizer_config.json (bos and eos). TD_EFORMAT and TD_EUNSUPPORTED name file and key.
// On error *out is NULL.
td_status td_tokenizer_open(td_tokenizer **out, const char *model_dir, td_err *err);
// The same from memory; config may be NULL. name stands for the file in messages.
td_status td_tokenizer_open_json(td_tokenizer **out, const char *name, const char *json, size_t len,
                                 const char *config, size_t config_len, td_err *err);
// The same of a tiktoken.model's text.
td_status td_tokenizer_open_ranks(td_tokenizer **out, const char *name, const char *text,
                                  size_t len, const char *config, size_t config_len, td_err *err);
void td_tokenizer_close(td_tokenizer *tok);

enum {
  // What the post-processor puts around a text, such as the bos token.
  TD_TOK_ADD_SPECIAL = 1 << 0,
  // Added tokens (control tokens and others) written in the text become their ids. Without it the
  // whole text is plain text, "<|im_end|>" too.
  TD_TOK_PARSE_SPECIAL = 1 << 1,
};

// Appends the ids of text to out.
td_status td_tokenizer_encode(const td_tokenizer *tok, const char *text, size_t len, unsigned flags,
                              td_token_ids *out, td_err *err);
// The same, but no added token is ever read from a range of text that overlaps one in literal:
// what users type stays text while the chat template's own control tokens are parsed. (White space
// beside a control token still goes with it where the token is marked lstrip or rstrip.)
td_status td_tokenizer_encode_spans(const td_tokenizer *tok, const char *text, size_t len,
                                    const td_spans *literal, unsigned flags, td_token_ids *out,
                                    td_err *err);

// One more than the largest id. Ids in between may be unused.
int32_t td_tokenizer_size(const td_tokenizer *tok);
// The bytes a token stands for inside a text, not always whole UTF-8. Borrowed, NUL-terminated;
// "" with *len 0 for ids out of range or unused.
const char *td_tokenizer_bytes(const td_tokenizer *tok, int32_t id, size_t *len);
// A control token: an added token marked special.
bool td_tokenizer_is_special(const td_tokenizer *tok, int32_t id);
// The id of a token as tokenizer.json spells it, "<|im_end|>" or "\u0120the"; -1 where absent.
int32_t td_tokenizer_find(const td_tokenizer *tok, const char *token, size_t len);
// From tokenizer_config.json; -1 where it names none.
int32_t td_tokenizer_bos(const td_tokenizer *tok);
int32_t td_tokenizer_eos(const td_tokenizer *tok);
// tokenizer_config.json asks for bos in front of plain prompts ("add_bos_token": true). Some models
// (DeepSeek) say so only there, and TD_TOK_ADD_SPECIAL then adds nothing.
bool td_tokenizer_wants_bos(const td_tokenizer *tok);

// Appends the text of ids to out: always UTF-8. skip_special leaves control tokens out; ids out of
// range are skipped.
td_status td_tokenizer_decode(const td_tokenizer *tok, const int32_t *ids, size_t n,
                              bool skip_special, td_buf *out, td_err *err);

// Decodes a stream of ids: all td_detok_feed calls and the flush together append what
// td_tokenizer_decode gives for all ids, and every piece is whole UTF-8.
typedef struct {
  const td_tokenizer *tok; // borrowed
  td_buf held;             // bytes not yet known to be a character
  bool skip_special;
  bool started;          // a token was fed
  unsigned n_strip_left; // characters the decoder may still cut from the beginning
} td_detok;

void td_detok_init(td_detok *detok, const td_tokenizer *tok, bool skip_special);
td_status td_detok_feed(td_detok *detok, int32_t id, td_buf *out, td_err *err);
// What stays incomplete becomes U+FFFD. The detokenizer may then be fed a new text.
td_status td_detok_flush(td_detok *detok, td_buf *out, td_err *err);
void td_detok_free(td_detok *detok);

#endif
