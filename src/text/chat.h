// src/text/chat.h - from a conversation to the token ids a model is given.
// Ties a model's chat template to its tokenizer: the template's control tokens are parsed, what the
// conversation holds is not.
#ifndef TD_TEXT_CHAT_H
#define TD_TEXT_CHAT_H

#include "base/buf.h"
#include "base/status.h"
#include "base/token_ids.h"
#include "text/tokenizer/tokenizer.h"

typedef struct td_chat td_chat;

// Opens the template and the tokenizer of model_dir. A model without a template opens too;
// td_chat_encode then says so. On error *out is NULL.
td_status td_chat_open(td_chat **out, const char *model_dir, td_err *err);
void td_chat_close(td_chat *chat);
const td_tokenizer *td_chat_tokenizer(const td_chat *chat);

// Appends the ids of a conversation. vars is a JSON object with messages and whatever else the
// template knows; where it lacks them, bos_token and eos_token are added from the tokenizer, tools
// and documents as null, add_generation_prompt as true. text, when not NULL, gets the rendered
// prompt. TD_EINVAL: the template refused (raise_exception).
td_status td_chat_encode(const td_chat *chat, const char *vars, size_t len, td_token_ids *out,
                         td_buf *text, td_err *err);

// Appends the ids of a plain prompt, with bos where the model wants one. Control tokens written in
// it are parsed: whoever makes a prompt by hand writes them (fill-in-the-middle, a template's
// work).
// add_special false: without bos, or whatever else the tokenizer puts around a text.
td_status td_chat_encode_plain(const td_chat *chat, const char *text, size_t len, bool add_special,
                               td_token_ids *out, td_err *err);

// Appends what a template makes of vars, as text: the template file path, or, with path NULL, that
// of model_dir. Variables are those of vars alone.
td_status td_chat_render(const char *path, const char *model_dir, const char *vars, size_t len,
                         td_buf *out, td_err *err);

#endif
