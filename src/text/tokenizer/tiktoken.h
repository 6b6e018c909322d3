// src/text/tokenizer/tiktoken.h - "tiktoken.model", the vocabulary format of Kimi K2 and Moonlight:
// one base64 token and its rank per line. Private to text/.
#pragma once

#include <cjson/cJSON.h>
#include <stddef.h>

#include "base/status.h"

// Builds the equivalent tokenizer.json, except for model.merges, which follow from the ranks
// (td_bpe_opts.by_rank). What the file does not contain follows the publishers' code: the word
// pattern, and control tokens after the ranks, i.e. those in added_tokens_decoder of config
// (tokenizer_config.json, may be NULL) and reserved ones. On success the caller owns *root.
td_status td_tiktoken_read(cJSON **root, const char *text, size_t len, const cJSON *config,
                           td_err *err);
