// src/text/tokenizer/bpe.h - byte-pair encoding of one word. Private to text/.
#pragma once

#include <cjson/cJSON.h>
#include <stdbool.h>

#include "base/token_ids.h"
#include "text/tokenizer/vocab.h"

typedef struct td_bpe td_bpe;
typedef struct td_bpe_scratch td_bpe_scratch;

typedef struct {
  bool byte_level; // words are bytes; tokens use the alphabet of bytelevel.h
  // Any two tokens that concatenate to a third may be merged, lowest id first; the model then has
  // no merges.
  bool by_rank;
} td_bpe_opts;

// model: the "model" object of tokenizer.json, whose vocabulary was read into vocab. vocab must
// outlive *out and have all its flags set. In place of merges it may have scores, a number for each
// id, as SentencePiece's models do: any two tokens that concatenate to a third may be merged, best
// score of the third first.
td_status td_bpe_open(td_bpe **out, const cJSON *model, const td_vocab *vocab,
                      const td_bpe_opts *opts, td_err *err);
void td_bpe_close(td_bpe *bpe);

// Working memory for one encoding at a time, with a cache of this bpe's words.
td_bpe_scratch *td_bpe_scratch_new(void);
void td_bpe_scratch_free(td_bpe_scratch *scratch);

// Appends the ids of a word, merged as in the `tokenizers` library: the pair of lowest rank first,
// the leftmost among equals. O(n log n).
td_status td_bpe_encode(const td_bpe *bpe, td_bpe_scratch *scratch, const char *word, size_t len,
                        td_token_ids *out, td_err *err);

// The most bytes of a word that one token covers; 0: not known, td_bpe_count is not to be called.
size_t td_bpe_longest(const td_bpe *bpe);
// The number of ids of a word of any length, in bounded memory. A word of more than a few hundred
// KiB is encoded in parts that begin at a token of the part before, far from its end: exact unless
// a boundary depends on text tens of KiB behind it.
td_status td_bpe_count(const td_bpe *bpe, td_bpe_scratch *scratch, const char *word, size_t len,
                       size_t *n_ids, td_err *err);
