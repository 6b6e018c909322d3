// src/front/prompt.c - renders and tokenizes the prompts of a request, and composes the grammar of
// its output. Any thread.
#include <stdlib.h>
#include <string.h>

#include "api/infill.h"
#include "api/turn.h"
#include "front/serve_impl.h"

#define MAX_TRIES 3 // turns that a prompt is rendered for

// What a chat's prompt is made of.
typedef struct {
  const td_chat *chat;
  const td_api_request *request;
  td_picture_list *pictures; // NULL: none
  bool is_cut;               // the first turns may be missing
} prompt_of;

// ---- turns of the server's own ------------------------------------------------------------------

// Whether the user speaks behind the first n messages.
static bool is_asked_after(const td_api_request *r, uint32_t n) {
  for (uint32_t i = n; i < r->n_marks; i++)
    if (r->marks[i].is_question) return true;
  return false;
}

// Encodes the prompt behind message k, the assistant's, if that was generated here. A template that
// fails on arguments as objects may take them as text.
static bool encode_behind(const prompt_of *p, td_turns *turns, uint32_t k, const td_digest *place,
                          bool *found, td_token_ids *out, td_buf *text) {
  const td_api_request *r = p->request;
  td_digest key;
  td_chat_known known = {.n_messages = k + 1};
  td_token_ids ids = {0};
  char *reasoning;
  bool used = false;
  td_err ignored;
  td_api_turn_key(place, &r->marks[k].said, &key);
  *found = td_turns_find(turns, &key, &ids, &known.end, &reasoning);
  if (!*found) return false;
  known.ids = ids.ids;
  known.n_ids = ids.n;
  known.reasoning = reasoning[0] && is_asked_after(r, k + 1) ? reasoning : NULL;
  const td_buf *vars[] = {&r->vars, &r->plain_vars};
  for (size_t i = 0; i < TD_COUNT(vars) && !used && vars[i]->len; i++) {
    td_status st = td_chat_encode_known(p->chat, vars[i]->data, vars[i]->len, &known, out, text,
                                        &used, &ignored);
    if (st == TD_OK && used && p->pictures)
      st = td_pictures_expand(p->pictures, out, known.n_ids, false, &ignored);
    if (st == TD_OK) break;
    used = false;
    out->n = 0;
    out->n_cut = 0;
    if (text) td_buf_clear(text);
  }
  td_token_ids_free(&ids);
  free(reasoning);
  return used;
}

// Encodes the prompt with the tokens that were generated for the last of the server's own messages
// that it holds.
static bool encode_known(const prompt_of *p, td_turns *turns, td_token_ids *out, td_buf *text) {
  const td_api_request *r = p->request;
  unsigned n_tries = 0;
  bool used = false;
  if (!turns || r->is_continued) return false;
  td_digest *places = malloc((r->n_marks + (size_t)1) * sizeof *places);
  if (!places) return false;
  td_api_turn_places(r, places);
  for (uint32_t k = r->n_marks; k-- > 1 && n_tries < MAX_TRIES && !used;) {
    bool found = false;
    if (!r->marks[k].is_answer) continue;
    used = encode_behind(p, turns, k, &places[k], &found, out, text);
    n_tries += td_token_ids_is_canceled(out) ? MAX_TRIES : found;
  }
  free(places);
  return used;
}

void td_serve_keep_turn(td_turns *turns, const td_generated *g) {
  td_token_ids ids = {0};
  td_buf reasoning = TD_BUF_INIT;
  td_digest said;
  td_err ignored;
  const size_t n = g->ids->n - g->has_end;
  td_status st = td_api_said_by(g->how, td_buf_text(g->text), g->text->len,
                                g->has_end ? TD_TEXT_ENDED : TD_TEXT_CUT, &said, &reasoning,
                                &ignored);
  if (st == TD_OK) st = td_token_ids_add(&ids, g->prompt->ids, g->prompt->n, &ignored);
  if (st == TD_OK) st = td_token_ids_add(&ids, g->ids->ids, n, &ignored);
  if (st == TD_OK) {
    td_turn turn = {.ids = ids.ids,
                    .n_ids = ids.n,
                    .end = g->has_end ? g->ids->ids[n] : -1,
                    .reasoning = td_buf_text(&reasoning)};
    td_api_turn_key(g->place, &said, &turn.key);
    td_turns_keep(turns, &turn);
  }
  td_buf_free(&reasoning);
  td_token_ids_free(&ids);
}

// ---- prompts ------------------------------------------------------------------------------------

// Most templates expect the arguments of earlier tool calls as objects, some as the original text.
// A template given the wrong kind fails, so the other is tried; except after TD_ELIMIT, as the
// template would exceed its limits again.
static td_status encode_chat(const prompt_of *p, td_turns *turns, td_token_ids *out, td_buf *text,
                             td_api_error *error) {
  const td_api_request *r = p->request;
  td_err err;
  if (encode_known(p, turns, out, text)) return TD_OK;
  td_status st = td_chat_encode(p->chat, r->vars.data, r->vars.len, out, text, &err);
  if (st != TD_OK && st != TD_ELIMIT && st != TD_ECANCELED && r->plain_vars.len > 0) {
    td_err second;
    out->n = out->n_cut = 0;
    if (text) td_buf_clear(text);
    if (td_chat_encode(p->chat, r->plain_vars.data, r->plain_vars.len, out, text, &second) == TD_OK)
      st = TD_OK;
  }
  if (st == TD_OK && p->pictures) st = td_pictures_expand(p->pictures, out, 0, p->is_cut, &err);
  return st == TD_OK ? st : td_api_fail_err(error, "messages", &err);
}

// The same without the first turns of the conversation.
static td_status encode_without(const prompt_of *p, uint32_t n, td_token_ids *out, td_buf *text,
                                td_api_error *error) {
  const td_api_request *request = p->request;
  td_api_request rest = *request;
  rest.vars = rest.plain_vars = (td_buf)TD_BUF_INIT;
  td_api_leave_out(&rest.vars, &request->vars, n);
  if (request->plain_vars.len) td_api_leave_out(&rest.plain_vars, &request->plain_vars, n);
  out->n = out->n_cut = 0;
  if (text) td_buf_clear(text);
  td_status st = rest.vars.failed || rest.plain_vars.failed
                     ? td_api_fail(error, 503, NULL, NULL, "out of memory")
                     : encode_chat(&(prompt_of){p->chat, &rest, p->pictures, true}, NULL, out, text,
                                   error);
  td_buf_free(&rest.vars);
  td_buf_free(&rest.plain_vars);
  return st;
}

// `truncation: auto`: leaves out as few of the first turns as let the prompt, and an answer of
// max_tokens or a quarter of the context, fit. If even the last turn does not, the prompt stays too
// long.
static td_status cut_to_fit(const prompt_of *p, td_token_ids *out, td_buf *text,
                            td_api_error *error) {
  const td_api_request *request = p->request;
  const size_t n_ctx = out->most, quarter = n_ctx / 4;
  const bool is_short = request->max_tokens >= 0 && (size_t)request->max_tokens < quarter;
  const size_t room = n_ctx - 1 - (is_short ? (size_t)request->max_tokens : quarter);
  if (!n_ctx || out->n + out->n_cut <= room) return TD_OK;
  uint32_t low = 1, high = td_api_n_turns(&request->vars);
  td_status st = TD_OK;
  while (low < high && st == TD_OK) {
    const uint32_t middle = (low + high) / 2;
    st = encode_without(p, middle, out, text, error);
    if (out->n + out->n_cut <= room)
      high = middle;
    else
      low = middle + 1;
  }
  return st == TD_OK && high ? encode_without(p, high, out, text, error) : st;
}

static td_status encode_around(const td_chat *chat, const td_api_request *request,
                               const td_api_prompt *prompt, td_token_ids *out,
                               td_api_error *error) {
  const td_infill_tokens *tokens = td_infill_find(chat);
  const td_infill around = {.before = prompt->text,
                            .n_before = prompt->len,
                            .after = request->suffix,
                            .n_after = strlen(request->suffix),
                            .is_bare = request->is_bare};
  td_err err;
  if (!tokens) {
    return td_api_fail(error, 400, "suffix", "unsupported_parameter",
                       "suffix is not supported: " TD_INFILL_NONE);
  }
  td_status st = td_infill_encode(chat, tokens, &around, 0, out, &err);
  return st == TD_OK ? st : td_api_fail_err(error, "prompt", &err);
}

static td_status encode_prompt(const td_chat *chat, const td_api_request *request, uint32_t i,
                               td_token_ids *out, td_api_error *error) {
  const td_api_prompt *prompt = &request->prompts[i];
  td_err err;
  if (request->suffix) return encode_around(chat, request, prompt, out, error);
  td_status st = prompt->ids ? td_token_ids_add(out, prompt->ids, prompt->n_ids, &err)
                             : td_chat_encode_plain(chat, prompt->text, prompt->len,
                                                    !request->is_bare, out, &err);
  return st == TD_OK ? st : td_api_fail_err(error, "prompt", &err);
}

td_status td_serve_encode(const td_chat *chat, td_turns *turns, const td_api_request *request,
                          td_picture_list *pictures, td_token_ids *prompts, td_buf *text,
                          td_api_error *error) {
  if (request->is_chat) {
    const prompt_of p = {chat, request, pictures, false};
    td_status st = encode_chat(&p, turns, prompts, text, error);
    return st == TD_OK && request->is_cut_to_fit ? cut_to_fit(&p, prompts, text, error) : st;
  }
  for (uint32_t i = 0; i < request->n_prompts; i++) {
    td_status st = encode_prompt(chat, request, i, &prompts[i], error);
    if (st != TD_OK) return st;
  }
  return TD_OK;
}

uint32_t td_serve_n_lasting(const td_chat *chat, const td_token_ids *prompt) {
  enum { TAIL = 8 }; // tokens in which the block begins
  for (size_t k = 0; k < TD_OUTPUT_FORMS; k++) {
    const char *begin = td_output_forms[k].think_begin;
    if (!td_output_forms[k].ends_prompts) continue;
    const int32_t id = td_tokenizer_find(td_chat_tokenizer(chat), begin, strlen(begin));
    for (size_t i = prompt->n; id >= 0 && i > 1 && i + TAIL > prompt->n; i--)
      if (prompt->ids[i - 1] == id) return (uint32_t)(i - 1);
  }
  return (uint32_t)prompt->n;
}

// ---- model, context, owner ----------------------------------------------------------------------

td_status td_serve_check_model(const td_serve *serve, const char *asked, const char *suffix,
                               td_api_error *error) {
  if (!asked || td_hosts_find(&serve->hosts, asked, suffix)) return TD_OK;
  return td_serve_unknown_model(serve, asked, error);
}

td_status td_serve_check_context(const td_token_ids *prompts, uint32_t n_prompts, bool is_chat,
                                 uint32_t n_ctx, td_api_error *error) {
  const char *param = is_chat ? "messages" : "prompt";
  for (uint32_t i = 0; i < n_prompts; i++) {
    size_t n = prompts[i].n + prompts[i].n_cut;
    if (n == 0) return td_api_bad(error, param, "the prompt has no tokens");
    if (n < n_ctx) continue;
    td_api_fail(error, 400, param, "context_length_exceeded",
                "This model's maximum context length is %u tokens. However, the prompt has %zu "
                "tokens, and the output needs room for at least one: shorten the %s, or start the "
                "server with a larger --ctx-size.",
                n_ctx, n, param);
    error->n_prompt_tokens = (int64_t)n;
    error->n_ctx = n_ctx;
    return TD_EINVAL;
  }
  return TD_OK;
}

uint64_t td_serve_cache_owner(const td_api_caller *caller, const char *cache_salt, bool is_apart) {
  if (!cache_salt && !is_apart) return 0;
  td_sha256 sha;
  td_digest digest;
  uint64_t owner;
  td_sha256_begin(&sha);
  if (is_apart) td_sha256_add(&sha, &caller->tenant, sizeof caller->tenant);
  if (cache_salt) td_sha256_add(&sha, cache_salt, strlen(cache_salt) + 1);
  td_sha256_end(&sha, &digest);
  memcpy(&owner, digest.bytes, sizeof owner);
  return owner | 1; // never 0
}

uint64_t td_serve_turn_owner(const td_serve *serve, const td_api_caller *caller,
                             const td_api_request *request) {
  const bool is_apart = serve->options->cache_per_key || serve->keys.n;
  return td_serve_cache_owner(caller, request->cache_salt, is_apart);
}

// ---- grammar ------------------------------------------------------------------------------------

td_status td_serve_compose(const td_chat *chat, const td_call_syntax *calls,
                           td_api_request *request, td_reasoning reasoning, td_api_error *error) {
  const bool may_think = reasoning != TD_REASONING_MAYBE || td_output_form_of(chat);
  if (!may_think) reasoning = TD_REASONING_NONE;
  return td_api_compose_grammar(request, calls, reasoning, error);
}
