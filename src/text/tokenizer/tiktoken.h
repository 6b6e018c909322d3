// src/text/tokenizer/tiktoken.h - "tiktoken.model", a vocabulary as Kimi K2 and Moonlight are
// published with: base64 tokens and their ranks, a pair a line. Private to text/.
#ifndef TD_TEXT_TOKENIZER_TIKTOKEN_H
#define TD_TEXT_TOKENIZER_TIKTOKEN_H

#include <cjson/cJSON.h>
#include <stddef.h>

#include "base/status.h"

// The tokenizer.json that stands for the file's text, but for model.merges, which follow from the
// ranks (td_bpe_opts.by_rank). What the file does not say is as in the publishers' code: the
// pattern of words, and control tokens behind the ranks, those that config (tokenizer_config.json,
// may be NULL) lists in added_tokens_decoder and reserved ones. On success the caller owns *root.
td_status td_tiktoken_read(cJSON **root, const char *text, size_t len, const cJSON *config,
                           td_err *err);

#endif
