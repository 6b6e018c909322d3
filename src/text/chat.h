// src/text/chat.h - turns a conversation into the token ids that a model expects.
// Combines a model's chat template with its tokenizer: control tokens written by the template are
// parsed, control tokens in the conversation are plain text.
#pragma once

#include "base/buf.h"
#include "base/status.h"
#include "base/token_ids.h"
#include "text/tokenizer/tokenizer.h"

typedef struct td_chat td_chat;

// Opens the template and the tokenizer of model_dir. A model without a template can be opened as
// well; td_chat_encode then returns an error. On error *out is NULL.
td_status td_chat_open(td_chat **out, const char *model_dir, td_err *err);
void td_chat_close(td_chat *chat);
const td_tokenizer *td_chat_tokenizer(const td_chat *chat);
// Appends the source of the model's template, if it has one.
void td_chat_template_source(const td_chat *chat, td_buf *out);
// Whether the source of the model's template contains the text.
bool td_chat_template_mentions(const td_chat *chat, const char *text);

// Appends the token ids of a conversation. vars is a JSON object with messages and other variables
// of the template. Added if absent: bos_token and eos_token from the tokenizer, tools and documents
// as null, add_generation_prompt as true. text, if not NULL, receives the rendered prompt.
// continue_final_message true: the prompt ends behind the last message's content, which the model
// continues. TD_EINVAL: the template rejected the conversation (raise_exception).
td_status td_chat_encode(const td_chat *chat, const char *vars, size_t len, td_token_ids *out,
                         td_buf *text, td_err *err);

// The tokens of a conversation's first messages, the last of which was generated.
typedef struct {
  uint32_t n_messages;
  const int32_t *ids; // [n_ids], without the end token
  size_t n_ids;
  int32_t end;           // the end token; -1: the tokenizer's
  const char *reasoning; // the last message's that the template has to show; NULL: any
} td_chat_known;

// Like td_chat_encode, but the prompt begins with known tokens. *used is false, and nothing else
// happens, if the template renders these messages differently now that others follow, as templates
// do that drop earlier reasoning.
td_status td_chat_encode_known(const td_chat *chat, const char *vars, size_t len,
                               const td_chat_known *known, td_token_ids *out, td_buf *text,
                               bool *used, td_err *err);

// Appends the token ids of a plain prompt, with BOS if the model wants it. Control tokens in the
// text are parsed, because a prompt written by hand may need them (fill-in-the-middle, a
// hand-made template). add_special false: without BOS and other tokens that the tokenizer adds.
td_status td_chat_encode_plain(const td_chat *chat, const char *text, size_t len, bool add_special,
                               td_token_ids *out, td_err *err);

// Appends the text that a template renders from vars and nothing else. The template is the file at
// path or, if path is NULL, that of model_dir.
td_status td_chat_render(const char *path, const char *model_dir, const char *vars, size_t len,
                         td_buf *out, td_err *err);
