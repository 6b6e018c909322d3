// tests/unit/test_parts.c - answers told apart into thoughts, content and tool calls. What comes
// out must not depend on how the text arrives, and nothing of a call's markers may be shown.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "api/parts.h"
#include "base/buf.h"

#define DS_CALLS "<｜tool▁calls▁begin｜>"
#define DS_CALL  "<｜tool▁call▁begin｜>"
#define DS_SEP   "<｜tool▁sep｜>"
#define DS_END   "<｜tool▁call▁end｜>"
#define DS_LAST  "<｜tool▁calls▁end｜>"

typedef struct {
  td_buf reasoning, content, calls;
} outcome;

// text in steps of so many bytes; what was not sure is asked for again at the end.
static outcome tell_apart(const char *text, size_t step, bool thinks, bool with_calls) {
  td_parts parts = {.begins_in_reasoning = thinks, .with_calls = with_calls, .id = 7};
  outcome out = {0};
  size_t n = strlen(text);
  for (size_t len = 0, last = 0; !last; len += step) {
    last = len >= n;
    td_part part;
    bool found;
    td_err err;
    for (;;) {
      // What lies behind the text so far must not be read.
      size_t now = last ? n : len;
      char *copy = malloc(now + 1);
      memcpy(copy, text, now);
      td_status st = td_parts_next(&parts, copy, now, last, &part, &found, &err);
      assert_int_equal(st, TD_OK);
      if (found && part.kind == TD_PART_CALL) {
        const td_tool_call *call = &parts.calls[part.call];
        td_buf_printf(&out.calls, "[%s %s %s]", call->id, call->name, call->arguments);
      } else if (found) {
        td_buf *to = part.kind == TD_PART_CONTENT ? &out.content : &out.reasoning;
        td_buf_add(to, copy + part.begin, part.end - part.begin);
      }
      free(copy);
      if (!found) break;
    }
  }
  td_parts_free(&parts);
  return out;
}

static void check_parts(const char *text, bool thinks, bool with_calls, const char *reasoning,
                        const char *content, const char *calls) {
  for (size_t step = 1; step <= strlen(text) + 1; step += 1 + step / 4) {
    outcome out = tell_apart(text, step, thinks, with_calls);
    assert_string_equal(td_buf_text(&out.reasoning), reasoning);
    assert_string_equal(td_buf_text(&out.content), content);
    assert_string_equal(td_buf_text(&out.calls), calls);
    td_buf_free(&out.reasoning);
    td_buf_free(&out.content);
    td_buf_free(&out.calls);
  }
}

static void plain_text_is_content(void **state) {
  (void)state;
  check_parts("", false, true, "", "", "");
  check_parts(" Hello,\n 1 < 2 <b> ", false, true, "", " Hello,\n 1 < 2 <b> ", "");
  check_parts(" Hello ", false, false, "", " Hello ", "");
  check_parts("ends in <tool_", false, true, "", "ends in <tool_", "");
  check_parts("<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>", false, false, "",
              "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>", "");
}

static void thoughts_are_told_apart(void **state) {
  (void)state;
  check_parts("<think>\nso\n it \n</think>\n\nHi <think> there", false, false, "so\n it",
              "Hi <think> there", "");
  check_parts("so it</think> Hi", true, false, "so it", "Hi", "");
  check_parts("\n\n<think>cut < off </thi", false, true, "cut < off </thi", "", "");
  check_parts("<thinking aloud", false, true, "", "<thinking aloud", "");
  check_parts("<think></think>Hi", false, true, "", "Hi", "");
  check_parts("a</think><tool_call>{\"name\": \"f\"}</tool_call>", true, true, "a", "",
              "[call_000000000000000700 f {}]");
}

static void calls_of_each_form_are_found(void **state) {
  (void)state;
  check_parts("Look:\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"}\\\"<\", \"b\": "
              "[12345678901234567890]}}\n</tool_call>\n<tool_call>{\"name\": \"g\", "
              "\"parameters\": {}}</tool_call> ",
              false, true, "", "Look:",
              "[call_000000000000000700 f {\"a\":\"}\\\"<\",\"b\":[12345678901234567890]}]"
              "[call_000000000000000701 g {}]");
  check_parts("Yes." DS_CALLS DS_CALL "f" DS_SEP "{\"a\": 1}" DS_END DS_CALL "g" DS_SEP
              "{}" DS_END DS_LAST,
              false, true, "", "Yes.",
              "[call_000000000000000700 f {\"a\": 1}][call_000000000000000701 g {}]");
  check_parts(DS_CALLS DS_CALL "function" DS_SEP "f\n```json\n{\"a\": 1}\n```" DS_END "\n" DS_CALL
                               "function" DS_SEP "g\n```json\n{}\n```" DS_END DS_LAST,
              false, true, "", "",
              "[call_000000000000000700 f {\"a\": 1}][call_000000000000000701 g {}]");
  check_parts("<|tool_calls_section_begin|><|tool_call_begin|>functions.f:3"
              "<|tool_call_argument_begin|>{\"a\": {}}<|tool_call_end|><|tool_calls_section_end|>",
              false, true, "", "", "[functions.f:3 f {\"a\": {}}]");
}

static void text_may_follow_a_call(void **state) {
  (void)state;
  check_parts("<tool_call>{\"name\": \"f\"}</tool_call>\n\nDone. ", false, true, "", "Done. ",
              "[call_000000000000000700 f {}]");
  check_parts("<tool_call>{\"name\": \"f\"}", false, true, "", "",
              "[call_000000000000000700 f {}]");
}

static void what_is_no_call_is_text(void **state) {
  (void)state;
  static const char *const texts[] = {
      "<tool_call>no</tool_call>",
      "<tool_call>{\"name\": 1}</tool_call> after",
      "<tool_call>{\"name\": \"f\", \"arguments\": \"x\"}</tool_call>",
      "<tool_call>{\"name\": \"f\", }</tool_call>",
      "<tool_call>{\"name\": \"f\", \"arguments\": {",
      "<tool_call>",
      DS_CALLS DS_CALL "f" DS_SEP "{\"a\": ",
      DS_CALLS DS_CALL DS_SEP "{}" DS_END,
  };
  for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
    check_parts(texts[i], false, true, "", texts[i], "");
}

static void prompts_that_end_in_a_thought(void **state) {
  (void)state;
  assert_true(td_parts_prompt_thinks("x<think>\n", 9));
  assert_false(td_parts_prompt_thinks("x<think>y", 9));
  assert_false(td_parts_prompt_thinks("think>", 6));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(plain_text_is_content),
      cmocka_unit_test(thoughts_are_told_apart),
      cmocka_unit_test(calls_of_each_form_are_found),
      cmocka_unit_test(text_may_follow_a_call),
      cmocka_unit_test(what_is_no_call_is_text),
      cmocka_unit_test(prompts_that_end_in_a_thought),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
