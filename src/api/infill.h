// src/api/infill.h - filling in the middle of a text, by the control tokens that a model's own
// tokenizer has for it.
#pragma once

#include "text/chat.h"

// How one family of models spells them.
typedef struct {
  const char *before, *after, *fill; // in front of the text before, the text after, the middle
  const char *repo, *file;           // in front of a repository's and a file's name; NULL: none
} td_infill_tokens;

// The spelling that the model's tokenizer has. NULL: none of a known spelling, or no model.
const td_infill_tokens *td_infill_find(const td_chat *chat);

// A text of another file. Borrowed.
typedef struct {
  const char *name, *text;
} td_infill_file;

typedef struct {
  const char *before, *after; // borrowed
  size_t n_before, n_after;   // bytes
  const td_infill_file *files;
  uint32_t n_files;
  bool is_bare; // without BOS
} td_infill;

// Appends the prompt's tokens: the files, then what is around the cursor. Texts are plain: control
// tokens are not parsed in them. The first files are left out where the prompt would have more than
// max_tokens.
td_status td_infill_encode(const td_chat *chat, const td_infill_tokens *tokens,
                           const td_infill *infill, size_t max_tokens, td_token_ids *out,
                           td_err *err);

#define TD_INFILL_NONE                                                                             \
  "the model's tokenizer has no tokens for filling in, such as <|fim_prefix|>; choose a model "    \
  "trained for it"
