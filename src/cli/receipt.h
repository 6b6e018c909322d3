// src/cli/receipt.h - receipts: a prompt, the answer, and all that its bits depend on.
#pragma once

#include "base/token_ids.h"
#include "options/options.h"
#include "runtime/session.h"

typedef struct {
  const td_options *options; // those that round are written
  const td_session *session;
  td_sampling sampling;
  // has_tokenizer: its end tokens end answers, too. is_ended: one, which is in no list, followed.
  bool ignore_eos, has_tokenizer, is_ended;
  td_token_ids prompt, answer;
  td_buf logprobs; // f32 of each token of the answer
} td_receipt;

// Writes it as JSON to a file. TD_EIO, or what td_model_digest says.
td_status td_receipt_write(const td_receipt *receipt, const char *path, td_err *err);
void td_receipt_free(td_receipt *receipt); // what the lists hold
