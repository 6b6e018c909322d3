// src/text/thinking.c - probes of a template's variables about thinking, and what they get.
#include "text/thinking.h"

#include <stdio.h>
#include <string.h>

#include "base/json_parse.h"

static const char *const names[TD_THINKING_N_VARS] = {
    "reasoning_effort", "thinking_effort", "think_level", "thinking_level", "reasoning_level"};
static const char *const levels[TD_N_EFFORTS] = {"minimal", "low",   "medium",
                                                 "high",    "xhigh", "max"};
static const char *const off_words[] = {"none",     "no_think", "nothink", "no_thinking",
                                        "disabled", "off",      "false"};
#define NONSENSE "qzxj" // no template knows it
static const char *const switches[] = {"enable_thinking", "thinking"};

bool td_thinking_is_off(const char *effort) {
  for (size_t i = 0; i < TD_COUNT(off_words); i++)
    if (strcmp(effort, off_words[i]) == 0) return true;
  return false;
}

// ---- probes -------------------------------------------------------------------------------------

typedef struct {
  const td_template *tmpl;
  const cJSON *vars;
  bool failed; // out of memory
} prober;

// Renders a question with a variable (NULL: without). Returns false if the template fails.
static bool render(prober *p, const char *name, const char *value, bool is_on, td_buf *out) {
  static const td_template_opts opts = {.max_cpu_ms = 200, .max_output_bytes = 1 << 20};
  cJSON *all = cJSON_Duplicate(p->vars, true);
  cJSON *messages = cJSON_Parse("[{\"role\":\"user\",\"content\":\"Hi\"}]");
  td_err ignored;
  td_buf_clear(out);
  const bool has_messages = all && messages && cJSON_AddItemToObject(all, "messages", messages);
  if (!has_messages) cJSON_Delete(messages);
  bool is_made = has_messages;
  for (size_t i = 0; i < TD_COUNT(switches); i++)
    is_made = is_made && cJSON_AddBoolToObject(all, switches[i], is_on);
  if (name) is_made = is_made && cJSON_AddStringToObject(all, name, value);
  const td_status st = is_made ? td_template_render(p->tmpl, all, &opts, out, NULL, &ignored)
                               : TD_ENOMEM;
  p->failed |= st == TD_ENOMEM || out->failed;
  cJSON_Delete(all);
  return st == TD_OK;
}

static bool is_same(const td_buf *a, const td_buf *b) {
  return a->len == b->len && memcmp(td_buf_text(a), td_buf_text(b), a->len) == 0;
}

static bool is_quoted(const td_template *tmpl, const char *word) {
  char quoted[2][24];
  snprintf(quoted[0], sizeof quoted[0], "'%s'", word);
  snprintf(quoted[1], sizeof quoted[1], "\"%s\"", word);
  return td_template_mentions(tmpl, quoted[0]) || td_template_mentions(tmpl, quoted[1]);
}

// What a variable does to a template: a word is known if it does something else than nonsense does.
// Templates that write any word into the prompt are of models that know low, medium and high.
static void probe_var(td_effort_var *out, prober *p, const char *name) {
  td_buf without = TD_BUF_INIT, nonsense = TD_BUF_INIT, text = TD_BUF_INIT;
  const bool takes_none = render(p, NULL, NULL, true, &without);
  const bool takes_any = render(p, name, NONSENSE, true, &nonsense);
  const bool is_free = takes_any && strstr(td_buf_text(&nonsense), NONSENSE);
  for (size_t i = 0; i < TD_N_EFFORTS; i++) {
    const bool is_usual = i >= TD_EFFORT_LOW && i <= TD_EFFORT_HIGH;
    out->knows[i] = render(p, name, levels[i], true, &text) &&
                    (!takes_any || (is_free ? is_usual : !is_same(&text, &nonsense)) ||
                     is_quoted(p->tmpl, levels[i]));
    out->is_read |= out->knows[i];
  }
  for (size_t i = 0; i < TD_COUNT(off_words) && !out->off; i++) {
    const bool is_known = render(p, name, off_words[i], true, &text) &&
                          (!takes_any ||
                           (is_quoted(p->tmpl, off_words[i]) && !is_same(&text, &nonsense)));
    if (!is_known) continue;
    out->off = off_words[i];
    out->is_off_without = takes_none && is_same(&text, &without);
  }
  td_buf_free(&without);
  td_buf_free(&nonsense);
  td_buf_free(&text);
}

td_status td_thinking_probe(td_thinking *out, const td_template *tmpl, const cJSON *vars,
                            td_err *err) {
  prober p = {.tmpl = tmpl, .vars = vars};
  td_buf on = TD_BUF_INIT, off = TD_BUF_INIT;
  *out = (td_thinking){.has_budget = td_template_mentions(tmpl, "thinking_budget")};
  for (size_t i = 0; i < TD_THINKING_N_VARS; i++)
    if (td_template_mentions(tmpl, names[i])) probe_var(&out->vars[i], &p, names[i]);
  out->has_switch = render(&p, NULL, NULL, true, &on) && render(&p, NULL, NULL, false, &off) &&
                    !is_same(&on, &off);
  td_buf_free(&on);
  td_buf_free(&off);
  return p.failed ? td_fail(err, TD_ENOMEM, "out of memory") : TD_OK;
}

// ---- fitting ------------------------------------------------------------------------------------

// The nearest level that a variable knows, the higher of two as near.
static const char *nearest(const td_effort_var *var, td_effort wanted) {
  for (int far = 0; far < TD_N_EFFORTS; far++) {
    const int up = (int)wanted + far, down = (int)wanted - far;
    if (up < TD_N_EFFORTS && var->knows[up]) return levels[up];
    if (down >= 0 && var->knows[down]) return levels[down];
  }
  return NULL;
}

// The word for a variable; NULL: it is better not set.
static const char *word_for(const td_thinking *t, const td_effort_var *var, const char *effort,
                            bool is_off, bool is_on) {
  if (is_off) return var->off || t->has_switch ? var->off : nearest(var, TD_EFFORT_MINIMAL);
  for (int i = 0; effort && i < TD_N_EFFORTS; i++)
    if (strcmp(effort, levels[i]) == 0) return nearest(var, (td_effort)i);
  if (effort && !td_thinking_is_off(effort)) return effort; // a word of the model's own
  return is_on && var->is_off_without ? nearest(var, TD_EFFORT_MEDIUM) : NULL;
}

static bool set_word(cJSON *vars, const char *name, const char *word) {
  cJSON_DeleteItemFromObjectCaseSensitive(vars, name);
  return !word || cJSON_AddStringToObject(vars, name, word);
}

// Tokens of thought for a level; 0: no limit is said.
static int budget_of(const char *effort) {
  static const int tokens[TD_N_EFFORTS] = {512, 1024, 4096, 16384};
  for (size_t i = 0; effort && i < TD_N_EFFORTS; i++)
    if (strcmp(effort, levels[i]) == 0) return tokens[i];
  return 0;
}

static bool set_budget(cJSON *vars, const char *effort, bool is_off) {
  const int n = is_off ? 0 : budget_of(effort);
  if (td_json_get(vars, "thinking_budget") || (!n && !is_off)) return true;
  return cJSON_AddNumberToObject(vars, "thinking_budget", n);
}

bool td_thinking_fit(const td_thinking *thinking, cJSON *vars) {
  const cJSON *given = td_json_get(vars, names[0]);
  char effort[32] = "";
  if (cJSON_IsString(given)) snprintf(effort, sizeof effort, "%s", given->valuestring);
  const char *said = effort[0] ? effort : NULL;
  bool is_on = said && !td_thinking_is_off(said), is_off = said && !is_on;
  for (size_t i = TD_COUNT(switches); i-- > 0;) {
    const cJSON *item = td_json_get(vars, switches[i]);
    if (!cJSON_IsBool(item)) continue;
    is_on = cJSON_IsTrue(item);
    is_off = !is_on;
  }
  if (!is_on && !is_off) return true;
  bool ok = true;
  for (size_t i = 0; i < TD_THINKING_N_VARS && ok; i++) {
    const td_effort_var *var = &thinking->vars[i];
    const bool is_given = i > 0 && td_json_get(vars, names[i]); // by its own name
    if (var->is_read && !is_given)
      ok = set_word(vars, names[i], word_for(thinking, var, said, is_off, is_on));
  }
  return ok && (!thinking->has_budget || set_budget(vars, said, is_off));
}
