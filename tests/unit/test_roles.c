// tests/unit/test_roles.c - conversations of every order of roles are folded into what templates
// take: all that was said is shown, in its order, and a longer conversation begins as the shorter
// one did.
// CTest: no-tsan
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/json_parse.h"
#include "text/roles.h"
#include "text/template.h"
#include "unit/testing.h"

// The checks of published templates, and how little they need to write a prompt.
static const char plain[] = "{%- for m in messages %}{{ '<' + m.role + '>' + m.content + '</>' }}"
                            "{%- endfor %}";
// Qwen3.5
static const char leading_only[] =
    "{%- set ns = namespace(found=false) %}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{%- set ns.found = true %}{%- endif %}{%- endfor %}"
    "{%- if not ns.found %}{{ raise_exception('No user query found in messages.') }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{%- endif %}"
    "{{ '<' + m.role + '>' + m.content|trim + '</>' }}{%- endfor %}";
// Mistral: calls and their results do not count, everything else alternates.
static const char alternating[] =
    "{%- if messages[0]['role'] == 'system' %}{{ '[SYSTEM]' + messages[0]['content'] }}"
    "{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}"
    "{%- set ns = namespace(index=0) %}{%- for m in rest %}"
    "{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{%- if (m['role'] == 'user') != (ns.index % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user and assistant') }}{%- endif %}"
    "{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}"
    "{%- for m in rest %}{%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'assistant' %}{%- if not m.content and not m.tool_calls %}"
    "{{ raise_exception('content or tool calls') }}{%- endif %}{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}{%- if c.id|length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{%- endif %}{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments|tojson }}"
    "{%- endfor %}{{ '</s>' }}{%- elif m.role == 'tool' %}{%- if m.tool_call_id|length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{%- endif %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}{%- else %}"
    "{{ raise_exception('Only user, assistant and tool roles') }}{%- endif %}{%- endfor %}";
// Gemma 2: no system, no tools.
static const char two_roles[] =
    "{%- for m in messages %}{%- if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('role not supported') }}{%- endif %}"
    "{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{%- endif %}"
    "{{ '<' + m.role + '>' + m.content + '</>' }}{%- endfor %}";
// DeepSeek: system messages are gathered at the front, wherever they stand.
static const char gathering[] =
    "{%- set ns = namespace(system='') %}{%- for m in messages %}{%- if m.role == 'system' %}"
    "{%- set ns.system = ns.system + m.content %}{%- endif %}{%- endfor %}{{ ns.system }}"
    "{%- for m in messages %}{%- if m.role != 'system' %}{{ '<' + m.role + '>' + m.content + '</>' "
    "}}{%- endif %}{%- endfor %}";
// The last message asks, and system messages behind the first are left out without a word.
static const char asking[] =
    "{%- if messages[-1].role == 'assistant' %}{{ raise_exception('last') }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role != 'system' or loop.first %}"
    "{{ '<' + m.role + '>' + m.content + '</>' }}{%- endif %}{%- endfor %}";

static const char *tools = "null";

// A letter a message: s(ystem), u(ser), a(ssistant), e(mpty assistant), t: a call and its result.
static cJSON *conversation(const char *order) {
  td_buf json = TD_BUF_INIT;
  td_buf_printf(&json, "{\"tools\":%s,\"add_generation_prompt\":true,\"messages\":[", tools);
  for (size_t i = 0; order[i]; i++) {
    const char *role = order[i] == 's' ? "system" : order[i] == 'u' ? "user" : "assistant";
    if (i) td_buf_char(&json, ',');
    if (order[i] == 't') {
      td_buf_printf(&json,
                    "{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[{\"id\":\"call_%zu\","
                    "\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":{}}}]},"
                    "{\"role\":\"tool\",\"tool_call_id\":\"call_%zu\",\"content\":\"said%zu\"}",
                    i, i, i);
    } else if (order[i] == 'e') {
      td_buf_str(&json, "{\"role\":\"assistant\",\"content\":\"\"}");
    } else {
      td_buf_printf(&json, "{\"role\":\"%s\",\"content\":\"said%zu\"}", role, i);
    }
  }
  td_buf_str(&json, "]}");
  cJSON *vars = cJSON_Parse(td_buf_text(&json));
  assert_non_null(vars);
  td_buf_free(&json);
  return vars;
}

static td_template *open_source(const char *source) {
  td_template *tmpl;
  td_err err;
  if (td_template_open(&tmpl, source, strlen(source), &err) != TD_OK) fail_msg("%s", err.msg);
  return tmpl;
}

static td_roles probe(const td_template *tmpl) {
  td_roles roles;
  cJSON *vars = conversation("");
  cJSON_DeleteItemFromObject(vars, "messages");
  cJSON_AddStringToObject(vars, "bos_token", "");
  cJSON_AddStringToObject(vars, "eos_token", "</s>");
  td_err err;
  assert_int_equal(td_roles_probe(&roles, tmpl, vars, &err), TD_OK);
  cJSON_Delete(vars);
  return roles;
}

static void render(td_buf *out, const td_template *tmpl, const td_roles *roles, const char *order) {
  td_err err;
  cJSON *vars = conversation(order);
  cJSON_AddStringToObject(vars, "bos_token", "");
  cJSON_AddStringToObject(vars, "eos_token", "</s>");
  if (!td_roles_fold(roles, vars, NULL)) fail_msg("%s: out of memory", order);
  if (td_template_render(tmpl, vars, NULL, out, NULL, &err) != TD_OK)
    fail_msg("%s: %s", order, err.msg);
  cJSON_Delete(vars);
}

static void expect_all_shown(const char *text, const char *order) {
  const char *at = text;
  for (size_t i = 0; order[i]; i++) {
    char said[32];
    snprintf(said, sizeof said, "said%zu", i);
    if (order[i] == 'e') continue;
    at = strstr(at, said);
    if (!at) fail_msg("%s: %s is not where it was said: %s", order, said, text);
  }
}

#define MOST 5

// Every order of up to MOST messages.
static void try_all_orders(const char *source) {
  static const char letters[] = "suaet";
  td_template *tmpl = open_source(source);
  const td_roles roles = probe(tmpl);
  size_t n = 1;
  for (size_t len = 1; len <= MOST; len++) {
    n *= strlen(letters);
    for (size_t k = 0; k < n; k++) {
      char order[MOST + 1] = "";
      td_buf text = TD_BUF_INIT;
      for (size_t i = 0, rest = k; i < len; i++, rest /= strlen(letters))
        order[i] = letters[rest % strlen(letters)];
      if (!order[strspn(order, "e")]) continue; // nobody speaks
      render(&text, tmpl, &roles, order);
      expect_all_shown(td_buf_text(&text), order);
      td_buf_free(&text);
    }
  }
  td_template_close(tmpl);
}

TEST(every_order_is_taken) {
  const char *const sources[] = {plain, leading_only, alternating, two_roles, gathering, asking};
  for (size_t i = 0; i < TD_COUNT(sources); i++)
    try_all_orders(sources[i]);
}

// What an agent's next request adds leaves the prompt as it was, up to the marks that end it.
TEST(prompts_grow) {
  static const char *const sources[] = {plain,     leading_only, alternating,
                                        two_roles, gathering,    asking};
  static const char *const turns[][2] = {
      {"sus", "susa"}, {"ssu", "ssuasu"},  {"sust", "sustsa"},  {"sutu", "sutua"},
      {"uua", "uuau"}, {"susa", "susasu"}, {"ssut", "ssuttsu"}, {"sutsa", "sutsas"}};
  for (size_t i = 0; i < TD_COUNT(sources); i++) {
    td_template *tmpl = open_source(sources[i]);
    const td_roles roles = probe(tmpl);
    for (size_t k = 0; k < TD_COUNT(turns); k++) {
      td_buf first = TD_BUF_INIT, second = TD_BUF_INIT;
      char last[32];
      render(&first, tmpl, &roles, turns[k][0]);
      render(&second, tmpl, &roles, turns[k][1]);
      snprintf(last, sizeof last, "said%zu", strlen(turns[k][0]) - 1);
      const size_t n = (size_t)(strstr(td_buf_text(&first), last) - td_buf_text(&first));
      if (strncmp(td_buf_text(&first), td_buf_text(&second), n + strlen(last)) != 0)
        fail_msg("%s and %s: %s\n%s", turns[k][0], turns[k][1], first.data, second.data);
      td_buf_free(&first);
      td_buf_free(&second);
    }
    td_template_close(tmpl);
  }
}

static void expect_prompt(const char *source, const char *order, const char *expected) {
  td_template *tmpl = open_source(source);
  const td_roles roles = probe(tmpl);
  td_buf text = TD_BUF_INIT;
  render(&text, tmpl, &roles, order);
  assert_string_equal(td_buf_text(&text), expected);
  td_buf_free(&text);
  td_template_close(tmpl);
}

TEST(folds_at_the_place) {
  expect_prompt(plain, "ssusu",
                "<system>said0</><system>said1</><user>said2</><system>said3</><user>said4</>");
  expect_prompt(leading_only, "ssuasu",
                "<system>said0\n\nsaid1</><user>said2</><assistant>said3</>"
                "<user>said4\n\nsaid5</>");
  expect_prompt(leading_only, "sus", "<system>said0</><user>said1\n\nsaid2</>");
  expect_prompt(leading_only, "s", "<user>said0</>");
  expect_prompt(leading_only, "sa", "<system>said0</><user></><assistant>said1</>");
  expect_prompt(leading_only, "utsa",
                "<user>said0</><assistant></><tool>said1</><user>said2</><assistant>said3</>");
  expect_prompt(alternating, "sutu",
                "[SYSTEM]said0[INST]said1[/INST][TOOL_CALLS]f[ARGS]{}</s>"
                "[TOOL_RESULTS]said2\n\nsaid3[/TOOL_RESULTS]");
  expect_prompt(alternating, "uaau", "[INST]said0[/INST]said1\n\nsaid2</s>[INST]said3[/INST]");
  expect_prompt(two_roles, "su", "<user>said0\n\nsaid1</>");
  expect_prompt(two_roles, "ut", "<user>said0</><assistant></><user>said1</>");
  expect_prompt(asking, "ua", "<user>said0</><assistant>said1</><user></>");
}

static size_t n_allocated;

static void *count_malloc(size_t n_bytes) {
  n_allocated += n_bytes;
  return malloc(n_bytes);
}

static cJSON *many_messages(unsigned n, const char *const roles[2]) {
  cJSON *vars = cJSON_CreateObject(), *messages = cJSON_AddArrayToObject(vars, "messages");
  for (unsigned i = 0; i < n; i++) {
    cJSON *m = cJSON_CreateObject();
    cJSON_AddItemToArray(messages, m);
    cJSON_AddStringToObject(m, "role", roles[i % 2]);
    cJSON_AddStringToObject(m, "content", "what is said in a message");
  }
  return vars;
}

// A row of messages becomes one, which is not copied for each of them.
TEST(long_rows_are_copied_a_few_times) {
  enum { N = 4000 };
  static const td_roles no_rows = {.system = true};
  static const char *const roles[][2] = {
      {"user", "user"}, {"user", "system"}, {"tool", "user"}, {"assistant", "assistant"}};
  for (size_t i = 0; i < TD_COUNT(roles); i++) {
    cJSON *vars = many_messages(N, roles[i]);
    n_allocated = 0;
    cJSON_InitHooks(&(cJSON_Hooks){.malloc_fn = count_malloc, .free_fn = free});
    assert_true(td_roles_fold(&no_rows, vars, NULL));
    cJSON_InitHooks(NULL);
    const cJSON *messages = td_json_get(vars, "messages"), *last = messages->child->prev;
    const size_t n_bytes = strlen(td_json_get(last, "content")->valuestring);
    assert_true(cJSON_GetArraySize(messages) <= 3);
    if (i < 3) assert_int_equal(n_bytes, N * strlen("what is said in a message\n\n") - 2);
    assert_true(n_allocated < 8 * N * sizeof "what is said in a message");
    cJSON_Delete(vars);
  }
}

// A template that shows something else than the conversation is left alone.
TEST(odd_templates_get_what_was_sent) {
  td_template *tmpl = open_source("{{ messages|length }}");
  const td_roles roles = probe(tmpl);
  assert_true(roles.system && roles.late_system && roles.users && roles.tools && roles.long_ids);
  td_template_close(tmpl);
}

TEST(built_in_templates_take_every_order) {
  for (const td_builtin_template *t = td_builtin_templates; t->model_type; t++) {
    td_buf source = TD_BUF_INIT;
    td_buf_add(&source, t->text, t->len);
    try_all_orders(td_buf_text(&source));
    td_buf_free(&source);
  }
}

// Published templates, where they are at hand.
TEST(published_templates_take_every_order) {
  static const char folder[] = TD_TEST_DIR "/../../../shared/data/chat-templates";
  DIR *dir = opendir(folder);
  if (!dir) skip();
  static const char tool[] = "[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"description"
                             "\":\"\",\"parameters\":{\"type\":\"object\",\"properties\":{}}}}]";
  const struct dirent *entry;
  while ((entry = readdir(dir))) {
    char path[1024];
    td_buf source = TD_BUF_INIT;
    td_err err;
    if (!strstr(entry->d_name, ".jinja")) continue;
    snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
    assert_int_equal(td_file_read(&source, path, 1 << 20, &err), TD_OK);
    print_message("%s\n", entry->d_name);
    tools = strstr(entry->d_name, "tool_use") ? tool : "null";
    try_all_orders(td_buf_text(&source));
    td_buf_free(&source);
  }
  tools = "null";
  closedir(dir);
}
