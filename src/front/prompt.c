// src/front/prompt.c - renders and tokenizes the prompts of a request. Any thread.
#include "front/serve_impl.h"

// Most templates expect the arguments of earlier tool calls as objects, some as the original text.
// A template given the wrong kind fails, so the other is tried; except after TD_ELIMIT, as the
// template would exceed its limits again.
static td_status encode_chat(const td_chat *chat, const td_api_request *request, td_token_ids *out,
                             td_buf *text, td_api_error *error) {
  td_err err;
  td_status st = td_chat_encode(chat, request->vars.data, request->vars.len, out, text, &err);
  if (st == TD_OK) return st;
  if (st != TD_ELIMIT && request->plain_vars.len > 0) {
    td_err second;
    out->n = 0;
    if (text) td_buf_clear(text);
    st = td_chat_encode(chat, request->plain_vars.data, request->plain_vars.len, out, text,
                        &second);
    if (st == TD_OK) return st;
  }
  return td_api_fail_err(error, "messages", &err);
}

static td_status encode_prompt(const td_chat *chat, const td_api_request *request, uint32_t i,
                               td_token_ids *out, td_api_error *error) {
  const td_api_prompt *prompt = &request->prompts[i];
  td_err err;
  td_status st = prompt->ids ? td_token_ids_add(out, prompt->ids, prompt->n_ids, &err)
                             : td_chat_encode_plain(chat, prompt->text, prompt->len,
                                                    !request->is_bare, out, &err);
  return st == TD_OK ? st : td_api_fail_err(error, "prompt", &err);
}

td_status td_serve_encode(const td_chat *chat, const td_api_request *request, td_token_ids *prompts,
                          td_buf *text, td_api_error *error) {
  if (request->is_chat) return encode_chat(chat, request, prompts, text, error);
  for (uint32_t i = 0; i < request->n_prompts; i++) {
    td_status st = encode_prompt(chat, request, i, &prompts[i], error);
    if (st != TD_OK) return st;
  }
  return TD_OK;
}
