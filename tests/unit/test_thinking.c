// tests/unit/test_thinking.c - what is said of thinking reaches each variable that a template
// reads, as a level that it knows.
// CTest: no-tsan
#include <string.h>

#include "base/json_parse.h"
#include "text/template.h"
#include "text/thinking.h"
#include "unit/testing.h"

// How templates read it.
static const char free_words[] = // gpt-oss
    "{%- if reasoning_effort is not defined %}{%- set reasoning_effort = \"medium\" %}{%- endif %}"
    "{{ 'Reasoning: ' + reasoning_effort }}";
static const char three_words[] = // Hy3
    "{%- set e = reasoning_effort|default('no_think') %}{%- if e not in ['no_think','low','high'] "
    "%}"
    "{{ raise_exception('reasoning_effort') }}{%- endif %}{{ e }}";
static const char silent[] = "{%- if think_level == 'low' %}L{%- elif think_level == 'max' %}M"
                             "{%- else %}-{%- endif %}";
static const char off_switch[] = "{{ 'on' if thinking is defined and thinking else 'off' }}";
static const char both[] =
    "{{ 'on' if enable_thinking is not defined or enable_thinking else 'off' }}"
    "{%- if reasoning_effort in ['high'] %}{{ ' ' + reasoning_effort }}"
    "{%- endif %}";
static const char budget[] = "{%- if thinking_budget is defined %}{{ thinking_budget|int }}"
                             "{%- else %}-{%- endif %}";

static void expect(const char *source, const char *said, const char *expected) {
  td_template *tmpl;
  td_thinking thinking;
  td_err err;
  td_buf text = TD_BUF_INIT;
  cJSON *none = cJSON_CreateObject(), *vars = cJSON_Parse(said);
  assert_int_equal(td_template_open(&tmpl, source, strlen(source), &err), TD_OK);
  assert_int_equal(td_thinking_probe(&thinking, tmpl, none, &err), TD_OK);
  assert_true(td_thinking_fit(&thinking, vars));
  if (td_template_render(tmpl, vars, NULL, &text, NULL, &err) != TD_OK)
    fail_msg("%s: %s", said, err.msg);
  if (strcmp(td_buf_text(&text), expected) != 0)
    fail_msg("%s: %s, not %s", said, td_buf_text(&text), expected);
  td_buf_free(&text);
  td_template_close(tmpl);
  cJSON_Delete(none);
  cJSON_Delete(vars);
}

#define EFFORT(word)   "{\"reasoning_effort\":\"" word "\"}"
#define SWITCHES(flag) "{\"enable_thinking\":" flag ",\"thinking\":" flag "}"

TEST(efforts_become_levels_that_are_known) {
  expect(free_words, "{}", "Reasoning: medium");
  expect(free_words, EFFORT("minimal"), "Reasoning: low");
  expect(free_words, EFFORT("xhigh"), "Reasoning: high");
  expect(free_words, EFFORT("none"), "Reasoning: low");
  expect(three_words, "{}", "no_think");
  expect(three_words, EFFORT("minimal"), "low");
  expect(three_words, EFFORT("medium"), "high");
  expect(three_words, EFFORT("max"), "high");
  expect(three_words, EFFORT("none"), "no_think");
  expect(three_words, EFFORT("off"), "no_think");
  expect(silent, EFFORT("medium"), "L");
  expect(silent, EFFORT("xhigh"), "M");
  expect(silent, "{\"think_level\":\"max\",\"reasoning_effort\":\"low\"}", "M");
  expect(budget, EFFORT("low"), "1024");
  expect(budget, EFFORT("none"), "0");
  expect(budget, "{\"reasoning_effort\":\"low\",\"thinking_budget\":77}", "77");
  expect(budget, "{}", "-");
}

TEST(switches_reach_levels) {
  expect(free_words, SWITCHES("true"), "Reasoning: medium");
  expect(free_words, SWITCHES("false"), "Reasoning: low");
  expect(three_words, SWITCHES("true"), "high");
  expect(three_words, SWITCHES("false"), "no_think");
  expect(off_switch, SWITCHES("true"), "on");
  expect(off_switch, SWITCHES("false"), "off");
  expect(both, SWITCHES("true"), "on");
  expect(both, "{\"reasoning_effort\":\"low\",\"enable_thinking\":true}", "on high");
  expect(both, "{\"reasoning_effort\":\"high\",\"enable_thinking\":false}", "off");
}

// Levels between those of DeepSeek-V4 become the higher one, and any level turns it on.
TEST(efforts_of_deepseek) {
  static const struct {
    const char *said, *begin;
  } list[] = {{EFFORT("minimal"), ""},
              {EFFORT("low"), ""},
              {EFFORT("medium"), "Reasoning Effort: Absolute maximum"},
              {EFFORT("high"), "Reasoning Effort: Absolute maximum"},
              {EFFORT("xhigh"), "Reasoning Effort: Beyond maximum"},
              {EFFORT("max"), "Reasoning Effort: Beyond maximum"},
              {"{\"reasoning_effort\":\"max\",\"thinking\":false}", ""}};
  const td_builtin_template *v4 = td_builtin_templates;
  while (strcmp(v4->model_type, "deepseek_v4") != 0)
    v4++;
  td_buf source = TD_BUF_INIT, text = TD_BUF_INIT;
  td_template *tmpl;
  td_thinking thinking;
  td_err err;
  td_buf_add(&source, v4->text, v4->len);
  cJSON *asked = cJSON_Parse("{\"add_generation_prompt\":true}");
  assert_int_equal(td_template_open(&tmpl, source.data, source.len, &err), TD_OK);
  assert_int_equal(td_thinking_probe(&thinking, tmpl, asked, &err), TD_OK);
  assert_true(thinking.has_switch);
  for (size_t i = 0; i < TD_COUNT(list); i++) {
    cJSON *vars = cJSON_Parse(list[i].said);
    assert_true(td_thinking_fit(&thinking, vars));
    td_buf_clear(&text);
    assert_int_equal(td_template_render(tmpl, vars, NULL, &text, NULL, &err), TD_OK);
    if (strncmp(td_buf_text(&text), list[i].begin, strlen(list[i].begin)) != 0 ||
        !list[i].begin[0] != !text.len) {
      fail_msg("%s: %s", list[i].said, td_buf_text(&text));
    }
    cJSON_Delete(vars);
  }
  td_template_close(tmpl);
  cJSON_Delete(asked);
  td_buf_free(&source);
  td_buf_free(&text);
}
