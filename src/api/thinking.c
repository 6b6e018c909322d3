// src/api/thinking.c - whether, and how hard, a request wants the model to think. Each protocol and
// server spells it its own way; the template's variables get all of it (text/thinking.h).
#include <string.h>

#include "api/api_impl.h"
#include "text/thinking.h"

typedef enum { UNSAID, OFF, ON } wish;

// The first of several wishes counts.
static void say(wish *w, bool is_on) {
  if (*w == UNSAID) *w = is_on ? ON : OFF;
}

static void say_bool(wish *w, const cJSON *item) {
  if (cJSON_IsBool(item)) say(w, cJSON_IsTrue(item));
}

// thinking: true, or an object with a type: enabled, disabled, adaptive.
static void say_type(wish *w, const cJSON *item) {
  const cJSON *type = td_json_get(item, "type");
  say_bool(w, item);
  if (cJSON_IsString(type)) say(w, strcmp(type->valuestring, "disabled") != 0);
}

static const cJSON *find_budget(const cJSON *root) {
  static const char *const names[] = {"thinking_budget", "thinking_token_budget",
                                      "thinking_budget_tokens", "reasoning_budget"};
  const cJSON *kwargs = td_json_get(root, "chat_template_kwargs");
  const cJSON *found[] = {td_json_get(kwargs, "thinking_budget"),
                          td_json_get(td_json_get(root, "thinking"), "budget_tokens"),
                          td_json_get(td_json_get(root, "reasoning"), "max_tokens")};
  for (size_t i = 0; i < TD_COUNT(found); i++)
    if (cJSON_IsNumber(found[i])) return found[i];
  for (size_t i = 0; i < TD_COUNT(names); i++)
    if (cJSON_IsNumber(td_json_get(root, names[i]))) return td_json_get(root, names[i]);
  return NULL;
}

static td_status find_effort(const cJSON *root, const char **out, td_api_error *error) {
  *out = NULL;
  td_status st = td_api_get_str(root, "reasoning_effort", out, error);
  if (st != TD_OK || *out) return st;
  const cJSON *others[] = {
      td_json_get(td_json_get(root, "reasoning"), "effort"), td_json_get(root, "think"),
      td_json_get(td_json_get(root, "chat_template_kwargs"), "reasoning_effort")};
  for (size_t i = 0; i < TD_COUNT(others) && !*out; i++)
    if (cJSON_IsString(others[i])) *out = others[i]->valuestring;
  return TD_OK;
}

// A level of so many tokens of thought; NULL: none is said.
static const char *effort_of(const cJSON *budget) {
  if (!budget || budget->valuedouble <= 0) return NULL;
  return budget->valuedouble <= 2048 ? "low" : budget->valuedouble <= 8192 ? "medium" : "high";
}

td_status td_api_write_thinking(td_json_writer *w, const cJSON *root, td_api_error *error) {
  static const char *const names[] = {"enable_thinking", "thinking"};
  const cJSON *kwargs = td_json_get(root, "chat_template_kwargs"), *budget = find_budget(root);
  const char *effort;
  wish wanted = UNSAID;
  td_status st = find_effort(root, &effort, error);
  if (st != TD_OK) return st;
  for (size_t i = 0; i < TD_COUNT(names); i++)
    say_bool(&wanted, td_json_get(kwargs, names[i]));
  say_bool(&wanted, td_json_get(root, "enable_thinking"));
  say_bool(&wanted, td_json_get(root, "think"));
  say_type(&wanted, td_json_get(root, "thinking"));
  say_bool(&wanted, td_json_get(td_json_get(root, "reasoning"), "enabled"));
  if (effort) say(&wanted, !td_thinking_is_off(effort));
  if (budget && budget->valuedouble >= 0) say(&wanted, budget->valuedouble > 0);
  if (!effort && wanted != OFF) effort = effort_of(budget);
  if (effort) td_jw_str(w, "reasoning_effort", effort);
  for (size_t i = 0; i < TD_COUNT(names) && wanted != UNSAID; i++)
    if (!td_json_get(kwargs, names[i])) td_jw_bool(w, names[i], wanted == ON);
  if (budget && budget->valuedouble >= 0 && !td_json_get(kwargs, "thinking_budget"))
    td_api_write_json(w, "thinking_budget", budget);
  return TD_OK;
}
