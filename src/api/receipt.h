// src/api/receipt.h - receipts: a prompt, the answer, and all that its bits depend on, from which
// `tandem verify` (cli/verify.c) computes it again.
#pragma once

#include "base/json_write.h"
#include "base/sha256.h"
#include "options/options.h"
#include "tandem/wire.h"

typedef struct {
  const td_options *options; // of which those that bits depend on are written
  const char *model, *computed_by;
  td_digest weights;
  td_sampling sampling;
  // has_tokenizer: its end tokens end answers, too. is_ended: one, which is in no list, followed;
  // not said where a request named further ones.
  bool ignore_eos, has_tokenizer, is_ended;
  const int32_t *prompt;
  const td_token_value *answer; // ids with log-probabilities
  size_t n_prompt, n_answer;
} td_receipt;

// Appends an object; key as for td_jw_begin_object.
void td_receipt_add(td_json_writer *w, const char *key, const td_receipt *receipt);
// Appends what computes here: results are rounded alike by what has the same text. gpu: its name;
// NULL or "": none.
void td_receipt_add_place(td_buf *out, const char *gpu, const char *isa);

// The options that bits depend on, or that ways of computing are chosen by; NULL-terminated.
extern const char *const td_receipt_options[];
// Members of td_sampling that are written by name, but for the seed, a text, and top_k.
#define TD_RECEIPT_SAMPLING(X)                                                                     \
  X(temperature)                                                                                   \
  X(top_p)                                                                                         \
  X(min_p)                                                                                         \
  X(repetition_penalty)                                                                            \
  X(presence_penalty)                                                                              \
  X(frequency_penalty)                                                                             \
  X(top_n_sigma)                                                                                   \
  X(typical_p)                                                                                     \
  X(xtc_probability)                                                                               \
  X(xtc_threshold)
