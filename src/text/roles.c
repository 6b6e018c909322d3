// src/text/roles.c - probes of a template's orders of roles, and folding.
#include "text/roles.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json_parse.h"

#define SHORT_ID 9 // characters of a call's id that Mistral's templates insist on

static bool has_role(const cJSON *message, const char *role) {
  return td_json_is(message, "role", role);
}

// ---- probes -------------------------------------------------------------------------------------

// A conversation, a letter a message: s(ystem), u(ser), a(ssistant), e(mpty assistant), c(all),
// t(ool). Message i says "Mark<i>", but for e and c.
typedef struct {
  const char *order;
  bool has_text_arguments, has_long_ids;
} probe;

static void write_message(td_buf *out, const probe *p, size_t i) {
  static const struct {
    char letter;
    const char *role;
  } roles[] = {{'s', "system"},    {'u', "user"},      {'a', "assistant"},
               {'e', "assistant"}, {'c', "assistant"}, {'t', "tool"}};
  const char c = p->order[i];
  const char *role = "", *id = p->has_long_ids ? "call_0123456789abcdef" : "abcdefgh1";
  for (size_t k = 0; k < TD_COUNT(roles); k++)
    if (roles[k].letter == c) role = roles[k].role;
  td_buf_printf(out, "%s{\"role\":\"%s\",\"content\":\"", i ? "," : "", role);
  if (c != 'e' && c != 'c') td_buf_printf(out, "Mark%zu", i);
  td_buf_char(out, '"');
  if (c == 't') td_buf_printf(out, ",\"name\":\"probe\",\"tool_call_id\":\"%s\"", id);
  if (c == 'c') {
    td_buf_printf(out,
                  ",\"tool_calls\":[{\"id\":\"%s\",\"type\":\"function\",\"function\":{\"name\":"
                  "\"probe\",\"arguments\":%s}}]",
                  id, p->has_text_arguments ? "\"{\\\"x\\\": 1}\"" : "{\"x\":1}");
  }
  td_buf_char(out, '}');
}

// Whether what the messages say is there, in their order.
static bool shows_all(const td_buf *text, const char *order) {
  const char *at = td_buf_text(text);
  for (size_t i = 0; order[i]; i++) {
    char mark[32];
    if (order[i] == 'e' || order[i] == 'c') continue;
    snprintf(mark, sizeof mark, "Mark%zu", i);
    at = strstr(at, mark);
    if (!at) return false;
    at += strlen(mark);
  }
  return true;
}

// What is probed, and whether memory ran out meanwhile.
typedef struct {
  const td_template *tmpl;
  const cJSON *vars;
  bool failed;
} prober;

static bool takes_probe(prober *p, const probe *what) {
  static const td_template_opts opts = {.max_cpu_ms = 200, .max_output_bytes = 1 << 20};
  td_buf json = TD_BUF_INIT, text = TD_BUF_INIT;
  td_err ignored;
  td_buf_char(&json, '[');
  for (size_t i = 0; what->order[i]; i++)
    write_message(&json, what, i);
  td_buf_char(&json, ']');
  cJSON *all = cJSON_Duplicate(p->vars, true), *messages = cJSON_Parse(td_buf_text(&json));
  const bool is_made = !json.failed && all && messages;
  td_status st = is_made && cJSON_AddItemToObject(all, "messages", messages) ? TD_OK : TD_ENOMEM;
  if (st != TD_OK) cJSON_Delete(messages);
  if (st == TD_OK) st = td_template_render(p->tmpl, all, &opts, &text, NULL, &ignored);
  p->failed |= st == TD_ENOMEM || text.failed;
  const bool ok = st == TD_OK && shows_all(&text, what->order);
  cJSON_Delete(all);
  td_buf_free(&json);
  td_buf_free(&text);
  return ok;
}

static bool takes(prober *p, const char *order) {
  return takes_probe(p, &(probe){.order = order});
}

// Orders with calls: arguments are objects to most templates, and text to some.
static bool takes_calls(prober *p, const char *order) {
  return takes(p, order) || takes_probe(p, &(probe){.order = order, .has_text_arguments = true});
}

td_status td_roles_probe(td_roles *out, const td_template *tmpl, const cJSON *vars, td_err *err) {
  prober p = {.tmpl = tmpl, .vars = vars};
  *out = (td_roles){true, true, true, true, true, true, true, true, true, true, true, true};
  if (takes(&p, "u") && takes(&p, "uau")) {
    out->system = takes(&p, "su") && takes(&p, "suau");
    out->systems = out->system && takes(&p, "ssu");
    out->no_user = takes(&p, "s") && takes(&p, "a");
    out->users = takes(&p, "uu") && takes(&p, "uauu");
    out->assistants = takes(&p, "uaau");
    out->first_assistant = takes(&p, "au");
    out->last_assistant = takes(&p, "ua");
    out->empty_assistant = takes(&p, "ueu");
    out->tools = takes_calls(&p, "uct");
    out->user_after_tool = out->tools && takes_calls(&p, "uctu");
    out->late_system = out->system && takes(&p, "sus") && takes(&p, "suas") && takes(&p, "suasu") &&
                       (!out->tools || takes_calls(&p, "sucts"));
    out->long_ids = !out->tools ||
                    takes_probe(&p, &(probe){.order = "uct", .has_long_ids = true}) ||
                    takes_probe(&p, &(probe){"uct", true, true});
  }
  return p.failed ? td_fail(err, TD_ENOMEM, "out of memory") : TD_OK;
}

// ---- folding ------------------------------------------------------------------------------------

static const char *const joined_keys[] = {"content", "reasoning_content"};

typedef struct {
  const td_roles *roles;
  cJSON *messages;
  const cJSON **known;
  bool failed; // out of memory
  // A message that others are being joined with, whose texts these will be: end_joining.
  cJSON *joined;
  td_buf texts[TD_COUNT(joined_keys)];
} folder;

static void set_text(folder *f, cJSON *message, const char *key, const char *text) {
  cJSON *value = cJSON_GetObjectItemCaseSensitive(message, key);
  if (cJSON_IsString(value)) {
    f->failed |= !cJSON_SetValuestring(value, text);
    return;
  }
  cJSON_DeleteItemFromObjectCaseSensitive(message, key);
  f->failed |= !cJSON_AddStringToObject(message, key, text);
}

static const char *text_of(const cJSON *message, const char *key) {
  const char *text = td_json_text(message, key);
  return text ? text : "";
}

// Whether the content is text, or none.
static bool is_plain(const cJSON *message) {
  const cJSON *content = td_json_get(message, "content");
  return !content || cJSON_IsString(content);
}

// Gives the message that was joined with others the texts of all.
static void end_joining(folder *f) {
  for (size_t i = 0; i < TD_COUNT(joined_keys) && f->joined; i++) {
    td_buf *text = &f->texts[i];
    f->failed |= text->failed;
    if (text->len) set_text(f, f->joined, joined_keys[i], td_buf_text(text));
    td_buf_free(text);
  }
  f->joined = NULL;
}

// Appends the texts of `from` to those of `to`, as paragraphs of their own.
static void append_texts(folder *f, cJSON *to, const cJSON *from) {
  const bool is_first = f->joined != to;
  if (is_first) end_joining(f);
  f->joined = to;
  for (size_t i = 0; i < TD_COUNT(joined_keys); i++) {
    td_buf *text = &f->texts[i];
    const char *more = text_of(from, joined_keys[i]);
    if (is_first) td_buf_str(text, text_of(to, joined_keys[i]));
    if (text->len && more[0]) td_buf_str(text, "\n\n");
    td_buf_str(text, more);
  }
}

static void append_calls(folder *f, cJSON *to, cJSON *from) {
  cJSON *more = cJSON_DetachItemFromObjectCaseSensitive(from, "tool_calls");
  cJSON *calls = cJSON_GetObjectItemCaseSensitive(to, "tool_calls");
  if (!more) return;
  if (!cJSON_IsArray(calls)) {
    cJSON_DeleteItemFromObjectCaseSensitive(to, "tool_calls");
    if (!cJSON_AddItemToObject(to, "tool_calls", more)) f->failed = true;
    return;
  }
  while (more->child)
    cJSON_AddItemToArray(calls, cJSON_DetachItemViaPointer(more, more->child));
  cJSON_Delete(more);
}

static void remove_message(folder *f, cJSON *message) {
  if (f->known && *f->known == message) *f->known = NULL;
  cJSON_Delete(cJSON_DetachItemViaPointer(f->messages, message));
}

// Joins a message with the one behind it, which goes. Returns false if one has content that is no
// text.
static bool join_next(folder *f, cJSON *message) {
  cJSON *next = message->next;
  if (!is_plain(message) || !is_plain(next)) return false;
  append_texts(f, message, next);
  append_calls(f, message, next);
  if (f->known && *f->known == message) *f->known = NULL;
  remove_message(f, next);
  return true;
}

// Puts a user who says nothing in front of a message; NULL: at the end.
static void add_user(folder *f, cJSON *before) {
  cJSON *user = cJSON_CreateObject();
  if (!user || !cJSON_AddItemToArray(f->messages, user) ||
      !cJSON_AddStringToObject(user, "role", "user") ||
      !cJSON_AddStringToObject(user, "content", "")) {
    f->failed = true;
    return;
  }
  for (cJSON *m = before, *next; m && m != user; m = next) { // the rest goes behind it
    next = m->next;
    cJSON_AddItemToArray(f->messages, cJSON_DetachItemViaPointer(f->messages, m));
  }
}

static void fold_systems(folder *f) {
  cJSON *m = f->messages->child;
  if (!f->roles->system) return;
  while (m && has_role(m, "system")) {
    const bool is_double = !f->roles->systems && m->next && has_role(m->next, "system");
    if (!is_double || !join_next(f, m)) m = m->next;
  }
  end_joining(f);
}

// What the template has no role for becomes the user's, and joins what the user says beside it.
static void become_users(folder *f) {
  bool is_leading = true;
  for (cJSON *m = f->messages->child; m && !f->failed; m = m->next) {
    const bool is_system = has_role(m, "system"), is_tool = has_role(m, "tool");
    is_leading &= is_system;
    const bool is_refused = is_system ? !(is_leading ? f->roles->system : f->roles->late_system)
                                      : is_tool && !f->roles->tools;
    if (!is_refused) continue;
    set_text(f, m, "role", "user");
    cJSON_DeleteItemFromObjectCaseSensitive(m, "tool_call_id");
    cJSON_DeleteItemFromObjectCaseSensitive(m, "name");
    if (m != f->messages->child && has_role(m->prev, "user")) {
      cJSON *before = m->prev;
      if (join_next(f, before)) m = before;
    }
    if (m->next && has_role(m->next, "user")) join_next(f, m);
  }
  end_joining(f);
}

static void drop_empty(folder *f, bool is_continued) {
  for (cJSON *m = f->messages->child, *next; m && !f->roles->empty_assistant; m = next) {
    next = m->next;
    const cJSON *calls = td_json_get(m, "tool_calls");
    const bool is_empty = has_role(m, "assistant") && is_plain(m) && !text_of(m, "content")[0] &&
                          !text_of(m, "reasoning_content")[0] && (!calls || !calls->child);
    if (is_empty && (next || !is_continued)) remove_message(f, m);
  }
}

static void join_rows(folder *f) {
  for (cJSON *m = f->messages->child; m && m->next && !f->failed;) {
    const cJSON *next = m->next;
    const bool is_user = has_role(next, "user");
    const bool is_refused = (!f->roles->users && is_user && has_role(m, "user")) ||
                            (!f->roles->user_after_tool && is_user && has_role(m, "tool")) ||
                            (!f->roles->assistants && has_role(next, "assistant") &&
                             has_role(m, "assistant"));
    if (!is_refused || !join_next(f, m)) m = m->next;
  }
  end_joining(f);
}

static bool has_user(const cJSON *messages) {
  for (const cJSON *m = messages->child; m; m = m->next)
    if (has_role(m, "user")) return true;
  return false;
}

// Adds users where the template wants one to speak.
static void add_users(folder *f, bool is_continued) {
  cJSON *first = f->messages->child, *last = first;
  while (first && has_role(first, "system"))
    first = first->next;
  while (last && last->next)
    last = last->next;
  const bool is_alone = !f->roles->no_user && !has_user(f->messages);
  if (is_alone && last && !first)
    set_text(f, last, "role", "user"); // the system alone has spoken
  else if (first && !has_role(first, "user") &&
           (is_alone || (!f->roles->first_assistant && has_role(first, "assistant"))))
    add_user(f, first);
  if (last && has_role(last, "assistant") && !f->roles->last_assistant && !is_continued)
    add_user(f, NULL);
}

// An id of SHORT_ID letters and digits, the same for the same id.
static void shorten_id(folder *f, cJSON *object, const char *key) {
  static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
  const char *id = text_of(object, key);
  char fresh[SHORT_ID + 1] = "";
  uint64_t hash = 0xcbf29ce484222325u; // FNV-1a
  if (!id[0] || (strlen(id) == SHORT_ID && !id[strspn(id, letters)])) return;
  for (const char *c = id; *c; c++)
    hash = (hash ^ (uint8_t)*c) * 0x100000001b3u;
  for (size_t i = 0; i < SHORT_ID; i++, hash /= sizeof letters - 1)
    fresh[i] = letters[hash % (sizeof letters - 1)];
  set_text(f, object, key, fresh);
}

static void shorten_ids(folder *f) {
  for (cJSON *m = f->messages->child; m; m = m->next) {
    const cJSON *calls = td_json_get(m, "tool_calls");
    for (cJSON *call = calls ? calls->child : NULL; call; call = call->next)
      shorten_id(f, call, "id");
    shorten_id(f, m, "tool_call_id");
  }
}

bool td_roles_fold(const td_roles *roles, cJSON *vars, const cJSON **known) {
  folder f = {.roles = roles,
              .messages = cJSON_GetObjectItemCaseSensitive(vars, "messages"),
              .known = known};
  const bool is_continued = cJSON_IsTrue(td_json_get(vars, "continue_final_message"));
  if (!cJSON_IsArray(f.messages)) return true;
  fold_systems(&f);
  become_users(&f);
  drop_empty(&f, is_continued);
  join_rows(&f);
  add_users(&f, is_continued);
  if (!roles->long_ids) shorten_ids(&f);
  return !f.failed;
}
