// src/text/tokenizer/vocab.h - the tokens of a tokenizer: spelling to id and back. Private to
// text/.
#pragma once

#include <cjson/cJSON.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"

// Maximum id: a file with larger ones is corrupt or hostile.
#define TD_VOCAB_MAX_ID (1 << 22)

enum {
  TD_VOCAB_MODEL = 1 << 0,   // listed in model.vocab
  TD_VOCAB_ADDED = 1 << 1,   // listed in added_tokens
  TD_VOCAB_SPECIAL = 1 << 2, // an added token marked special
};

typedef struct {
  uint32_t begin, len; // in td_vocab.text
  uint32_t flags;      // 0: no token has this id
} td_vocab_entry;

typedef struct {
  td_buf text;             // all spellings, concatenated
  td_vocab_entry *entries; // [n_ids]
  int32_t n_ids;           // largest id + 1
  int32_t cap;
  int32_t *slots; // hash table of ids, -1 where free
  uint32_t n_slots, n_tokens;
} td_vocab;

void td_vocab_free(td_vocab *vocab);
// Reads model.vocab. Duplicate ids or spellings are errors.
td_status td_vocab_read(td_vocab *vocab, const cJSON *model_vocab, td_err *err);
// Adds flags to the token with that id and spelling, creating it if needed. TD_EFORMAT if the id or
// the spelling belongs to another token.
td_status td_vocab_add(td_vocab *vocab, double id, const char *text, size_t len, uint32_t flags,
                       td_err *err);
// -1 if absent.
int32_t td_vocab_find(const td_vocab *vocab, const char *text, size_t len);
// Finds only tokens of the model that plain text can become, never control tokens.
int32_t td_vocab_find_plain(const td_vocab *vocab, const char *text, size_t len);
// 0 if id is out of range.
uint32_t td_vocab_flags(const td_vocab *vocab, int32_t id);
// id must be in range.
const char *td_vocab_text(const td_vocab *vocab, int32_t id, size_t *len);
