// src/text/chat.c - renders a conversation with the model's template and tokenizes it.
#include "text/chat.h"

#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/json_parse.h"
#include "base/str.h"
#include "text/roles.h"
#include "text/template.h"
#include "text/thinking.h"

#define MAX_TEMPLATE_BYTES (1u << 24)

struct td_chat {
  td_tokenizer *tok;
  td_template *tmpl;  // NULL: the model has none
  td_err no_template; // the reason
  td_roles roles[2];  // that the template takes, without tools and with some
  td_thinking thinking;
};

// cJSON's own function leaves an object with a nameless member when memory runs out.
// Puts value (NULL: out of memory) in the place of an object's member, which must be there. Takes
// value, also on error. False: out of memory.
static bool replace_member(cJSON *object, const char *key, cJSON *value) {
  cJSON *old = cJSON_GetObjectItemCaseSensitive(object, key);
  char *name = value && old ? cJSON_malloc(strlen(key) + 1) : NULL;
  if (!name) {
    cJSON_Delete(value);
    return false;
  }
  memcpy(name, key, strlen(key) + 1);
  if (!(value->type & cJSON_StringIsConst)) cJSON_free(value->string); // a copied member's
  value->type &= ~cJSON_StringIsConst;
  value->string = name;
  return cJSON_ReplaceItemViaPointer(object, old, value);
}

// The functions that add variables return false if memory ran out.
static bool add_token_var(cJSON *vars, const char *key, const td_tokenizer *tok, int32_t id) {
  size_t len;
  return id < 0 || cJSON_GetObjectItemCaseSensitive(vars, key) ||
         cJSON_AddStringToObject(vars, key, td_tokenizer_bytes(tok, id, &len));
}

static bool add_default(cJSON *vars, const char *key,
                        cJSON *(*add)(cJSON *object, const char *name)) {
  return cJSON_HasObjectItem(vars, key) || add(vars, key);
}

// Adds the variables that transformers passes to every template, unless vars has them.
static bool add_defaults(cJSON *vars, const td_tokenizer *tok) {
  return add_token_var(vars, "bos_token", tok, td_tokenizer_bos(tok)) &&
         add_token_var(vars, "eos_token", tok, td_tokenizer_eos(tok)) &&
         add_default(vars, "tools", cJSON_AddNullToObject) &&
         add_default(vars, "documents", cJSON_AddNullToObject) &&
         add_default(vars, "add_generation_prompt", cJSON_AddTrueToObject);
}

// Finds out what the template takes with tools, a JSON array, or without any (NULL).
static td_status probe_with(td_chat *chat, const char *tools, td_err *err) {
  cJSON *vars = cJSON_CreateObject(), *list = tools ? cJSON_Parse(tools) : cJSON_CreateNull();
  const bool has_list = vars && list && cJSON_AddItemToObject(vars, "tools", list);
  if (!has_list) cJSON_Delete(list);
  td_status st = has_list && add_defaults(vars, chat->tok)
                     ? td_roles_probe(&chat->roles[tools != NULL], chat->tmpl, vars, err)
                     : td_fail(err, TD_ENOMEM, "out of memory");
  if (st == TD_OK && !tools) st = td_thinking_probe(&chat->thinking, chat->tmpl, vars, err);
  cJSON_Delete(vars);
  return st;
}

static td_status probe_template(td_chat *chat, td_err *err) {
  static const char tools[] = "[{\"type\":\"function\",\"function\":{\"name\":\"probe\","
                              "\"description\":\"\",\"parameters\":{\"type\":\"object\","
                              "\"properties\":{\"x\":{\"type\":\"integer\"}}}}}]";
  td_status st = probe_with(chat, NULL, err);
  return st == TD_OK ? probe_with(chat, tools, err) : st;
}

td_status td_chat_open(td_chat **out, const char *model_dir, td_err *err) {
  *out = NULL;
  td_chat *chat = calloc(1, sizeof *chat);
  if (!chat) return td_fail(err, TD_ENOMEM, "out of memory");
  td_status st = td_tokenizer_open(&chat->tok, model_dir, err);
  if (st == TD_OK) {
    // A missing template is not an error, because base models continue plain text; a broken one is.
    td_status found = td_template_open_model(&chat->tmpl, model_dir, &chat->no_template);
    if (found != TD_OK && found != TD_ENOENT) {
      st = found;
      if (err) *err = chat->no_template;
    }
  }
  if (st == TD_OK && chat->tmpl) st = probe_template(chat, err);
  if (st != TD_OK) {
    td_chat_close(chat);
    return st;
  }
  *out = chat;
  return TD_OK;
}

void td_chat_close(td_chat *chat) {
  if (!chat) return;
  td_template_close(chat->tmpl);
  td_tokenizer_close(chat->tok);
  free(chat);
}

const td_tokenizer *td_chat_tokenizer(const td_chat *chat) {
  return chat->tok;
}

void td_chat_template_source(const td_chat *chat, td_buf *out) {
  if (chat->tmpl) td_template_source(chat->tmpl, out);
}

bool td_chat_template_mentions(const td_chat *chat, const char *text) {
  return chat->tmpl && td_template_mentions(chat->tmpl, text);
}

// Whether the template asks somewhere whether a message's content is none.
static bool knows_null(const td_template *tmpl) {
  static const char *const spellings[] = {".content is none",   ".content is not none",
                                          "content'] is none",  "content'] is not none",
                                          "content\"] is none", "content\"] is not none"};
  for (size_t i = 0; i < TD_COUNT(spellings); i++)
    if (td_template_mentions(tmpl, spellings[i])) return true;
  return false;
}

// Makes a message's content a block of thinking and, unless it is empty, one of text.
static bool split_content(cJSON *message, const char *reasoning, const char *text) {
  cJSON *blocks = cJSON_CreateArray();
  const char *const types[] = {"thinking", "text"}, *const values[] = {reasoning, text};
  bool ok = blocks != NULL;
  for (size_t i = 0; i < TD_COUNT(types) && ok; i++) {
    if (!values[i][0]) continue;
    cJSON *block = cJSON_CreateObject();
    ok = block && cJSON_AddItemToArray(blocks, block) &&
         cJSON_AddStringToObject(block, "type", types[i]) &&
         cJSON_AddStringToObject(block, types[i], values[i]);
  }
  if (ok) return replace_member(message, "content", blocks);
  cJSON_Delete(blocks);
  return false;
}

// Adapts messages of the assistant to templates that differ from most: a content of null, which
// clients send beside tool calls, becomes empty where the template would write "None" or fail; the
// reasoning of a message with tool calls is also its `thinking` where the template shows that;
// where it shows blocks of thinking (Mistral), reasoning and content become blocks.
static bool adapt_messages(cJSON *vars, const td_template *tmpl) {
  cJSON *messages = cJSON_GetObjectItemCaseSensitive(vars, "messages");
  const bool keeps_null = knows_null(tmpl);
  const bool shows_thinking = td_template_mentions(tmpl, "message.thinking");
  const bool shows_blocks = td_template_mentions(tmpl, "'type'] == 'thinking'") &&
                            !cJSON_IsTrue(td_json_get(vars, "continue_final_message"));
  for (cJSON *m = cJSON_IsArray(messages) ? messages->child : NULL; m; m = m->next) {
    const cJSON *content = cJSON_GetObjectItemCaseSensitive(m, "content");
    if (cJSON_IsNull(content) && !keeps_null) {
      cJSON *empty = cJSON_CreateString("");
      if (!replace_member(m, "content", empty)) return false;
      content = empty;
    }
    const cJSON *reasoning = td_json_get(m, "reasoning_content");
    const bool has_content = cJSON_IsString(content) && content->valuestring[0];
    if (shows_blocks && cJSON_IsString(reasoning) && reasoning->valuestring[0] &&
        !split_content(m, reasoning->valuestring, has_content ? content->valuestring : ""))
      return false;
    if (!shows_thinking || !cJSON_IsString(reasoning) || has_content) continue;
    if (!td_json_get(m, "tool_calls") || td_json_get(m, "thinking")) continue;
    if (!cJSON_AddStringToObject(m, "thinking", reasoning->valuestring)) return false;
  }
  return true;
}

// Makes vars what the template takes. known: see td_roles_fold.
static td_status adapt_vars(cJSON *vars, const td_chat *chat, const cJSON **known, td_err *err) {
  const td_roles *roles = &chat->roles[td_json_get(vars, "tools") != NULL];
  const bool ok = add_defaults(vars, chat->tok) && td_roles_fold(roles, vars, known) &&
                  td_thinking_fit(&chat->thinking, vars) && adapt_messages(vars, chat->tmpl);
  return ok ? TD_OK : td_fail(err, TD_ENOMEM, "out of memory");
}

static td_status parse_vars(cJSON **out, const char *vars, size_t len, td_err *err) {
  td_status st = td_json_parse(out, vars, len, TD_JSON_MAX_DEPTH, err);
  if (st != TD_OK) return st;
  if (cJSON_IsObject(*out)) return TD_OK;
  cJSON_Delete(*out);
  return td_fail(err, TD_EINVAL, "template variables must be a JSON object");
}

// The text of the last message, if the variables ask to continue it; NULL otherwise. Removes the
// request, which is not for the template.
static td_status take_continued(cJSON *vars, const char **out, td_err *err) {
  static const char key[] = "continue_final_message";
  const cJSON *messages = td_json_get(vars, "messages");
  bool is_wanted = cJSON_IsTrue(td_json_get(vars, key));
  *out = NULL;
  cJSON_DeleteItemFromObjectCaseSensitive(vars, key);
  if (!is_wanted) return TD_OK;
  const cJSON *last = messages ? messages->child : NULL;
  while (last && last->next)
    last = last->next;
  const cJSON *content = td_json_get(last, "content");
  const char *text = cJSON_IsString(content) ? content->valuestring : "";
  if (!text[strspn(text, " \t\r\n")])
    return td_fail(err, TD_EINVAL, "the last message has no content to continue");
  *out = text;
  return TD_OK;
}

// Where the word last ends in text[0..len): SIZE_MAX: it is not there. Both are read backwards,
// where that is the first place, and a search is linear.
static td_status find_last_end(const char *text, size_t len, const char *word, size_t n,
                               size_t *out, td_err *err) {
  char *back = malloc(len + n + 1);
  if (!back) return td_fail(err, TD_ENOMEM, "out of memory");
  for (size_t i = 0; i < len; i++)
    back[i] = text[len - 1 - i];
  for (size_t i = 0; i < n; i++)
    back[len + i] = word[n - 1 - i];
  const char *found = memmem(back, len, back + len, n);
  *out = found ? len - (size_t)(found - back) : SIZE_MAX;
  free(back);
  return TD_OK;
}

// Cuts the prompt behind the last message's text, which the template may have stripped. What users
// wrote is in typed, so that the template's own words are not taken for it.
static td_status cut_behind(td_buf *prompt, td_spans *typed, const char *text, td_err *err) {
  size_t n = strlen(text), end = typed->n ? typed->spans[typed->n - 1].end : 0;
  while (td_is_space(*text))
    text++, n--;
  while (n && td_is_space(text[n - 1]))
    n--;
  const char *rest = text + n;
  td_status st = find_last_end(td_buf_text(prompt), end, text, n, &end, err);
  if (st != TD_OK) return st;
  if (end == SIZE_MAX || !typed->n) {
    return td_fail(err, TD_EINVAL,
                   "the chat template does not show the last message, which is to be continued");
  }
  for (; *rest && end < prompt->len && prompt->data[end] == *rest; rest++)
    end++;
  prompt->len = end;
  prompt->data[end] = '\0';
  while (typed->n && typed->spans[typed->n - 1].begin >= end)
    typed->n--;
  if (typed->n && typed->spans[typed->n - 1].end > end) typed->spans[typed->n - 1].end = end;
  return TD_OK;
}

// Renders what becomes the tokens of `out`.
static td_status render(const td_chat *chat, const cJSON *vars, const td_token_ids *out,
                        td_buf *text, td_spans *typed, td_err *err) {
  const td_template_opts opts = {.is_canceled = out->is_canceled};
  return td_template_render(chat->tmpl, vars, &opts, text, typed, err);
}

td_status td_chat_encode(const td_chat *chat, const char *vars, size_t len, td_token_ids *out,
                         td_buf *text, td_err *err) {
  if (!chat->tmpl) {
    if (err) *err = chat->no_template;
    return TD_ENOENT;
  }
  if (td_token_ids_is_canceled(out)) return td_fail(err, TD_ECANCELED, "canceled");
  cJSON *root;
  td_status st = parse_vars(&root, vars, len, err);
  if (st != TD_OK) return st;
  td_buf prompt = TD_BUF_INIT;
  td_spans typed = {0};
  const char *continued;
  st = adapt_vars(root, chat, NULL, err);
  if (st == TD_OK) st = take_continued(root, &continued, err);
  if (st == TD_OK) st = render(chat, root, out, &prompt, &typed, err);
  if (st == TD_OK && continued) st = cut_behind(&prompt, &typed, continued, err);
  cJSON_Delete(root);
  if (st == TD_OK) {
    st = td_tokenizer_encode_spans(chat->tok, td_buf_text(&prompt), prompt.len, &typed,
                                   TD_TOK_PARSE_SPECIAL, out, err);
  }
  if (st == TD_OK && text) {
    td_buf_free(text);
    *text = prompt;
    prompt = (td_buf)TD_BUF_INIT;
  }
  td_spans_free(&typed);
  td_buf_free(&prompt);
  return st;
}

// ---- known tokens -------------------------------------------------------------------------------

// Leaves the messages up to `last`, and no prompt for another.
static bool keep_messages(cJSON *vars, const cJSON *last) {
  cJSON *messages = cJSON_GetObjectItemCaseSensitive(vars, "messages");
  while (last->next)
    cJSON_Delete(cJSON_DetachItemViaPointer(messages, last->next));
  return replace_member(vars, "add_generation_prompt", cJSON_CreateFalse());
}

// Where the prompt continues behind the known tokens, of which `first` is the rendering; SIZE_MAX:
// they do not fit.
static size_t find_rest(const td_chat *chat, const td_chat_known *known, const td_buf *prompt,
                        const td_buf *first) {
  size_t n_end, n = first->len;
  if (n > prompt->len || memcmp(td_buf_text(prompt), td_buf_text(first), n) != 0) return SIZE_MAX;
  const char *reasoning = known->reasoning;
  if (reasoning && !memmem(td_buf_text(first), n, reasoning, strlen(reasoning))) return SIZE_MAX;
  const int32_t id = known->end >= 0 ? known->end : td_tokenizer_eos(chat->tok);
  const char *end = id >= 0 ? td_tokenizer_bytes(chat->tok, id, &n_end) : NULL;
  while (n && td_is_space(first->data[n - 1]))
    n--;
  const bool has_end = end && n_end && n >= n_end &&
                       memcmp(first->data + n - n_end, end, n_end) == 0;
  return has_end ? n - n_end : first->len;
}

// Drops the first n bytes of a text.
static void drop_spans(td_spans *typed, size_t n) {
  size_t kept = 0;
  for (size_t i = 0; i < typed->n; i++) {
    td_span span = typed->spans[i];
    if (span.end <= n) continue;
    span.begin = span.begin > n ? span.begin - n : 0;
    typed->spans[kept++] = (td_span){span.begin, span.end - n};
  }
  typed->n = kept;
}

static td_status encode_rest(const td_chat *chat, const td_chat_known *known, const td_buf *prompt,
                             td_spans *typed, size_t rest, td_token_ids *out, td_err *err) {
  td_status st = td_token_ids_add(out, known->ids, known->n_ids, err);
  if (st != TD_OK) return st;
  drop_spans(typed, rest);
  return td_tokenizer_encode_spans(chat->tok, prompt->data + rest, prompt->len - rest, typed,
                                   TD_TOK_PARSE_SPECIAL, out, err);
}

td_status td_chat_encode_known(const td_chat *chat, const char *vars, size_t len,
                               const td_chat_known *known, td_token_ids *out, td_buf *text,
                               bool *used, td_err *err) {
  cJSON *root;
  *used = false;
  if (!chat->tmpl) return TD_OK;
  td_status st = parse_vars(&root, vars, len, err);
  if (st != TD_OK) return st;
  td_buf prompt = TD_BUF_INIT, first = TD_BUF_INIT;
  td_spans typed = {0};
  size_t rest = SIZE_MAX;
  td_err ignored;
  const cJSON *last = cJSON_GetArrayItem(td_json_get(root, "messages"), (int)known->n_messages - 1);
  st = adapt_vars(root, chat, &last, err);
  if (st == TD_OK && last) st = render(chat, root, out, &prompt, &typed, err);
  // A template may refuse a conversation that ends here.
  if (st == TD_OK && last && keep_messages(root, last) &&
      render(chat, root, out, &first, NULL, &ignored) == TD_OK)
    rest = find_rest(chat, known, &prompt, &first);
  if (st == TD_OK && rest != SIZE_MAX) {
    *used = true;
    st = encode_rest(chat, known, &prompt, &typed, rest, out, err);
    if (text) td_buf_add(text, td_buf_text(&prompt), prompt.len);
  }
  td_spans_free(&typed);
  td_buf_free(&prompt);
  td_buf_free(&first);
  cJSON_Delete(root);
  return st;
}

// ---- plain prompts ------------------------------------------------------------------------------

td_status td_chat_encode_plain(const td_chat *chat, const char *text, size_t len, bool add_special,
                               td_token_ids *out, td_err *err) {
  size_t start = out->n;
  unsigned flags = TD_TOK_PARSE_SPECIAL | (add_special ? TD_TOK_ADD_SPECIAL : 0u);
  td_status st = td_tokenizer_encode(chat->tok, text, len, flags, out, err);
  int32_t bos = td_tokenizer_bos(chat->tok);
  bool lacks_bos = add_special && td_tokenizer_wants_bos(chat->tok) && bos >= 0 &&
                   (out->n == start || out->ids[start] != bos);
  if (st != TD_OK || !lacks_bos) return st;
  st = td_token_ids_push(out, bos, err);
  for (size_t i = out->n - 1; st == TD_OK && i > start; i--) {
    out->ids[i] = out->ids[i - 1];
    out->ids[i - 1] = bos;
  }
  return st;
}

static td_status open_template(td_template **out, const char *path, const char *model_dir,
                               td_err *err) {
  if (!path) return td_template_open_model(out, model_dir, err);
  td_buf source = TD_BUF_INIT;
  td_status st = td_file_read(&source, path, MAX_TEMPLATE_BYTES, err);
  if (st == TD_OK) {
    st = td_template_open(out, td_buf_text(&source), source.len, err);
    if (st != TD_OK) td_err_prefix(err, "%s", path);
  }
  td_buf_free(&source);
  return st;
}

td_status td_chat_render(const char *path, const char *model_dir, const char *vars, size_t len,
                         td_buf *out, td_err *err) {
  td_template *tmpl = NULL;
  cJSON *root = NULL;
  td_status st = open_template(&tmpl, path, model_dir, err);
  if (st == TD_OK) st = parse_vars(&root, vars, len, err);
  if (st == TD_OK) {
    st = td_template_render(tmpl, root, NULL, out, NULL, err);
    cJSON_Delete(root);
  }
  td_template_close(tmpl);
  return st;
}
