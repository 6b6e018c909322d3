// tests/unit/test_api_compose.c - grammars that requests of the OpenAI protocol ask for: choices,
// schemas, and calls in each model's form.
// CTest: no-tsan
#include <stdlib.h>

#include "api/calls/call_syntax.h"
#include "api/output_parser.h"
#include "api_request_testing.h"
#include "text/grammar/grammar.h"

// What is asked of the answer becomes one grammar, with what comes before the answer.
TEST(composes_a_grammar) {
  static const struct {
    const char *body;
    td_reasoning reasoning;
    const char *yes, *no;
  } list[] = {
      {WITH("\"guided_choice\":[\"a\",\"b\\\"\"]"), TD_REASONING_NONE, "b\"", "c"},
      {WITH("\"guided_regex\":\"x+\""), TD_REASONING_MAYBE, "<think>\xE2\x82\xAC <</think>\n\nxx",
       "<think>xx"},
      {WITH("\"guided_regex\":\"x+\""), TD_REASONING_BEGUN, "x</thin</think>x", "x"},
      {WITH("\"response_format\":{\"type\":\"json_object\"}"), TD_REASONING_NONE, "{\"a\": [1]}",
       "[1]"},
      {WITH("\"guided_json\":{\"type\":\"object\",\"properties\":{\"a\":{}}}"), TD_REASONING_NONE,
       "{\"a\": 1}", "{\"a\": 1, \"b\": 2}"},
      {WITH("\"guided_json\":{\"type\":\"object\",\"properties\":{\"a\":{}}},"
            "\"structured_outputs\":{\"disable_any_whitespace\":false}"),
       TD_REASONING_NONE, "{\"a\":1,\n\"b\" : 2}", "{\"a\"}"},
      {WITH(TOOL ",\"tool_choice\":\"required\""), TD_REASONING_NONE,
       "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>", "text"},
      {WITH(TOOL ",\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"f\"}}"),
       TD_REASONING_MAYBE,
       "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>",
       "<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>"},
      {WITH("\"parallel_tool_calls\":false," TOOL ",\"guided_choice\":[\"a\"]"), TD_REASONING_NONE,
       "a", "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call> "},
  };
  for (size_t i = 0; i < TD_COUNT(list); i++) {
    td_api_request r;
    td_api_error error;
    td_grammar *g;
    td_err err;
    if (parse(&r, true, list[i].body, &error) != TD_OK ||
        td_api_compose_grammar(&r, td_call_syntax_of_form(TD_CALL_HERMES), list[i].reasoning,
                               &error) != TD_OK) {
      fail_msg("%s: %s", list[i].body, error.message);
    }
    assert_int_equal(td_grammar_open(&g, r.grammar.data, r.grammar.len, &err), TD_OK);
    assert_true(td_grammar_matches(g, list[i].yes, strlen(list[i].yes)));
    assert_false(td_grammar_matches(g, list[i].no, strlen(list[i].no)));
    td_grammar_close(g);
    td_api_request_free(&r);
  }
}

// Text in which calls are checked holds no call but those: what the output parser takes for the
// beginning of one begins a checked call of the model's form, or cannot be written.
TEST(checked_text_holds_no_other_calls) {
  static const struct {
    td_call_form form;
    const char *text;
    bool is_in;
  } list[] = {
      {TD_CALL_HERMES, "a <tool_cal [TOOL_CALL <function> <<tool_calls> b", false},
      {TD_CALL_HERMES, "a <tool_cal [TOOL_CALL <function> <<tool_calls b", true},
      {TD_CALL_HERMES, "So:<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>", true},
      {TD_CALL_HERMES, "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>", false},
      {TD_CALL_HERMES, "<<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>", false},
      {TD_CALL_HERMES, "[TOOL_CALLS]f[ARGS]{}", false},
      {TD_CALL_HERMES, "<function=f>\n</function>", false},
      {TD_CALL_FUNCTION, "a<function=f>\n</function>\n</tool_call>", true},
      {TD_CALL_FUNCTION, "a<tool_call>\n<function=f>\n</function>\n</tool_call>", true},
      {TD_CALL_FUNCTION, "<function=g>\n</function>\n</tool_call>", false},
      {TD_CALL_FUNCTION, "<tool_call>\n{\"name\": \"f\"}\n</tool_call>", false},
      {TD_CALL_DEEPSEEK,
       "a<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
       "<｜tool▁calls▁end｜>",
       true},
      {TD_CALL_DEEPSEEK, "a<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}", false},
      {TD_CALL_DEEPSEEK, "a<tool_call>", false},
  };
  for (size_t i = 0; i < TD_COUNT(list); i++) {
    td_api_request r;
    td_api_error error;
    td_grammar *g;
    td_err err;
    parse(&r, true,
          WITH("\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"strict\":true}}]"),
          &error);
    assert_null(strstr(r.vars.data, "strict"));
    assert_int_equal(
        td_api_compose_grammar(&r, td_call_syntax_of_form(list[i].form), TD_REASONING_NONE, &error),
        TD_OK);
    assert_int_equal(td_grammar_open(&g, r.grammar.data, r.grammar.len, &err), TD_OK);
    if (td_grammar_matches(g, list[i].text, strlen(list[i].text)) != list[i].is_in) {
      fail_msg("%s", list[i].text);
    }
    td_grammar_close(g);
    td_api_request_free(&r);
  }
}

// The calls of each model family are those that its output parser reads.
TEST(composes_calls_in_each_form) {
  static const char *const calls[] = {
      [TD_CALL_HERMES] = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>\n"
                         "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>",
      [TD_CALL_DEEPSEEK] = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"x\": 1}"
                           "<｜tool▁call▁end｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}"
                           "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
      [TD_CALL_DEEPSEEK_V3] =
          "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"x\": 1}"
          "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}"
          "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
      [TD_CALL_KIMI] = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
                       "<|tool_call_argument_begin|>{\"x\": 1}<|tool_call_end|><|tool_call_begin|>"
                       "functions.f:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
                       "<|tool_calls_section_end|>",
      [TD_CALL_FUNCTION] =
          "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>\n"
          "<tool_call>\n<function=f>\n</function>\n</tool_call>",
      [TD_CALL_ARG_KEYS] = "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n"
                           "</tool_call>\n<tool_call>f\n</tool_call>",
      [TD_CALL_ARG_KEYS_TIGHT] = "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value>"
                                 "</tool_call><tool_call>f</tool_call>",
      [TD_CALL_INVOKE] = "<minimax:tool_call>\n<invoke name=\"f\">\n"
                         "<parameter name=\"x\">1</parameter>\n</invoke>\n<invoke name=\"f\">\n"
                         "</invoke>\n</minimax:tool_call>",
      [TD_CALL_DSML] = "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n"
                       "<｜DSML｜parameter name=\"x\" string=\"false\">1</｜DSML｜parameter>\n"
                       "</｜DSML｜invoke>\n<｜DSML｜invoke name=\"f\">\n</｜DSML｜invoke>\n"
                       "</｜DSML｜function_calls>",
      [TD_CALL_DSML_V4] = "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n"
                          "<｜DSML｜parameter name=\"x\" string=\"false\">1</｜DSML｜parameter>\n"
                          "</｜DSML｜invoke>\n<｜DSML｜invoke name=\"f\">\n</｜DSML｜invoke>\n"
                          "</｜DSML｜tool_calls>",
#define NS "]<]minimax[>["
      [TD_CALL_ELEMENTS] = NS "<tool_call>\n" NS "<invoke name=\"f\">" NS "<x>1" NS "</x>" NS
                              "</invoke>\n" NS "<invoke name=\"f\">" NS "</invoke>\n" NS
                              "</tool_call>",
#undef NS
      [TD_CALL_HY] = "<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>x</arg_key>\n"
                     "<arg_value>1</arg_value>\n</tool_call>\n<tool_call>f<tool_sep>\n"
                     "</tool_call>\n</tool_calls>",
      [TD_CALL_HY_SUFFIXED] =
          "<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>\n"
          "<arg_key:opensource>x</arg_key:opensource>\n<arg_value:opensource>1"
          "</arg_value:opensource>\n</tool_call:opensource>\n<tool_call:opensource>f"
          "<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
      [TD_CALL_MISTRAL] = "[TOOL_CALLS]f[ARGS]{\"x\": 1}[TOOL_CALLS]f[ARGS]{}",
      [TD_CALL_MISTRAL_OBJECTS] = "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"x\": 1}}, "
                                  "{\"name\": \"f\", \"arguments\": {}}]",
      [TD_CALL_GEMMA] = "<|tool_call>call:f{\"x\": 1}<tool_call|><|tool_call>call:f{}<tool_call|>",
      [TD_CALL_HARMONY] = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
                          "{\"x\": 1}",
  };
  for (unsigned form = 0; form < TD_COUNT(calls); form++) {
    td_api_request r;
    td_api_error error;
    td_grammar *g;
    td_err err;
    parse(&r, true, WITH(TOOL ",\"tool_choice\":\"required\""), &error);
    assert_int_equal(
        td_api_compose_grammar(&r, td_call_syntax_of_form(form), TD_REASONING_NONE, &error), TD_OK);
    assert_int_equal(td_grammar_open(&g, r.grammar.data, r.grammar.len, &err), TD_OK);
    assert_true(td_grammar_matches(g, calls[form], strlen(calls[form])));
    td_grammar_close(g);
    td_output_parser parts = {.parse_tool_calls = true, .id = 1, .params = &r.params};
    td_output_part part;
    bool found = true;
    parts.is_harmony = form == TD_CALL_HARMONY;
    while (found) {
      assert_int_equal(td_output_parser_next(&parts, calls[form], strlen(calls[form]), true, &part,
                                             &found, &err),
                       TD_OK);
      assert_true(!found || part.kind == TD_OUTPUT_CALL);
    }
    assert_int_equal(parts.n_calls, parts.is_harmony ? 1 : 2);
    assert_string_equal(parts.calls[0].name, "f");
    const bool is_tagged = form >= TD_CALL_FUNCTION && form <= TD_CALL_HY_SUFFIXED;
    assert_string_equal(td_buf_text(&parts.calls[0].arguments),
                        is_tagged ? "{\"x\": 1}" : "{\"x\": 1}");
    td_output_parser_free(&parts);
    td_api_request_free(&r);
  }
}

// Reasoning is a message by itself; an answer is one of the channel final.
TEST(composes_messages_of_harmony) {
#define THOUGHT "<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
#define CALL    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
#define FINAL   "<|channel|>final<|message|>"
  static const char *const bodies[] = {
      WITH(TOOL ",\"tool_choice\":\"required\""),
      WITH("\"response_format\":{\"type\":\"json_object\"}"),
      WITH(TOOL ",\"response_format\":{\"type\":\"json_object\"}"),
      WITH("\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"strict\":true,"
           "\"parameters\":{\"type\":\"object\",\"properties\":{},\"additionalProperties\":"
           "false}}}]"),
  };
  static const struct {
    const char *text;
    unsigned right; // bit i: for bodies[i]
  } list[] = {
      {CALL, 13},
      {THOUGHT CALL, 13},
      {THOUGHT THOUGHT CALL, 0},
      {FINAL "{}", 14},
      {THOUGHT FINAL "{\"a\": 1}", 14},
      {FINAL "Hello.", 8},
      {"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" CALL, 8},
      {"{}", 0},
      {THOUGHT, 0},
  };
  for (size_t i = 0; i < TD_COUNT(bodies); i++) {
    td_api_request r;
    td_api_error error;
    td_grammar *g;
    td_err err;
    assert_int_equal(parse(&r, true, bodies[i], &error), TD_OK);
    assert_int_equal(td_api_compose_grammar(&r, td_call_syntax_of_form(TD_CALL_HARMONY),
                                            TD_REASONING_NONE, &error),
                     TD_OK);
    assert_int_equal(td_grammar_open(&g, r.grammar.data, r.grammar.len, &err), TD_OK);
    for (size_t k = 0; k < TD_COUNT(list); k++) {
      const bool is_right = list[k].right >> i & 1;
      if (td_grammar_matches(g, list[k].text, strlen(list[k].text)) != is_right)
        fail_msg("%zu: %s", i, list[k].text);
    }
    td_grammar_close(g);
    td_api_request_free(&r);
  }
}

// Text may hold the beginning of a call's marker, and nothing that another form's calls begin with.
TEST(composes_text_before_elements) {
#define NS    "]<]minimax[>["
#define BEGIN NS "<tool_call>\n" NS "<invoke name=\"f\">"
#define END   NS "</invoke>\n" NS "</tool_call>"
  static const char *const right[] = {"", "a [1] ]<]minimax[>[<tool", "Hi" BEGIN END,
                                      BEGIN NS "<any>x" NS "</any>" END};
  static const char *const wrong[] = {
      "<tool_call>\n" NS "<invoke name=\"f\">" END,
      "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>",
      BEGIN NS "<any>" NS "<b>" NS "</any>" END, BEGIN, NS "<tool_call>"};
  td_api_request r;
  td_api_error error;
  td_grammar *g;
  td_err err;
  static const char body[] = WITH(
      "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"strict\":true}}]");
  assert_int_equal(parse(&r, true, body, &error), TD_OK);
  assert_int_equal(td_api_compose_grammar(&r, td_call_syntax_of_form(TD_CALL_ELEMENTS),
                                          TD_REASONING_NONE, &error),
                   TD_OK);
  assert_int_equal(td_grammar_open(&g, r.grammar.data, r.grammar.len, &err), TD_OK);
  for (size_t i = 0; i < TD_COUNT(right); i++)
    if (!td_grammar_matches(g, right[i], strlen(right[i]))) fail_msg("not %s", right[i]);
  for (size_t i = 0; i < TD_COUNT(wrong); i++)
    if (td_grammar_matches(g, wrong[i], strlen(wrong[i]))) fail_msg("%s", wrong[i]);
  td_grammar_close(g);
  td_api_request_free(&r);
#undef NS
#undef BEGIN
#undef END
}

// Each argument by itself: strings without quotes, other values as the schema says.
TEST(composes_values_without_quotes) {
  static const char tools[] =
      "\"tool_choice\":\"required\",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\","
      "\"parameters\":{\"type\":\"object\",\"required\":[\"s\"],\"properties\":{\"s\":{\"type\":"
      "\"string\"},\"n\":{\"$ref\":\"#/$defs/n\"},\"e\":{\"enum\":[\"a b\",2]}},\"$defs\":{\"n\":"
      "{\"type\":\"integer\",\"maximum\":9}}}}}]";
  static const struct {
    const char *elements;
    bool is_right;
  } list[] = {{"<parameter=s>\na\n\"<b>\n</parameter>\n", true},
              {"<parameter=s>\n\n</parameter>\n<parameter=e>\na b\n</parameter>\n", true},
              {"<parameter=s>\n\n</parameter>\n<parameter=n>\n7\n</parameter>\n"
               "<parameter=e>\n2\n</parameter>\n",
               true},
              {"", false},
              {"<parameter=s>\na</parameter>\n", false},
              {"<parameter=s>\n\n</parameter>\n<parameter=n>\nx\n</parameter>\n", false},
              {"<parameter=s>\n\n</parameter>\n<parameter=n>\n10\n</parameter>\n", false},
              {"<parameter=s>\n\n</parameter>\n<parameter=e>\n\"a b\"\n</parameter>\n", false},
              {"<parameter=s>\n\n</parameter>\n<parameter=x>\n1\n</parameter>\n", false}};
  td_buf body = TD_BUF_INIT;
  td_buf_printf(&body, "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],%s}", tools);
  td_api_request r;
  td_api_error error;
  td_grammar *g;
  td_err err;
  assert_int_equal(parse(&r, true, td_buf_text(&body), &error), TD_OK);
  assert_int_equal(td_api_compose_grammar(&r, td_call_syntax_of_form(TD_CALL_FUNCTION),
                                          TD_REASONING_NONE, &error),
                   TD_OK);
  assert_int_equal(td_grammar_open(&g, r.grammar.data, r.grammar.len, &err), TD_OK);
  for (size_t i = 0; i < TD_COUNT(list); i++) {
    td_buf call = TD_BUF_INIT;
    td_buf_printf(&call, "<tool_call>\n<function=f>\n%s</function>\n</tool_call>",
                  list[i].elements);
    if (td_grammar_matches(g, call.data, call.len) != list[i].is_right) {
      fail_msg("%s", list[i].elements);
    }
    td_buf_free(&call);
  }
  td_grammar_close(g);
  td_api_request_free(&r);
  td_buf_free(&body);
}

// Whether the grammar of a call in the form takes the value for a parameter with this schema.
static bool takes_value(const char *schema, unsigned form, const char *value) {
  static const char *const calls[] = {
      [TD_CALL_FUNCTION] = "<tool_call>\n<function=f>\n<parameter=s>\n%s\n</parameter>\n"
                           "</function>\n</tool_call>",
      [TD_CALL_ARG_KEYS] = "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>%s</arg_value>\n"
                           "</tool_call>",
      [TD_CALL_ARG_KEYS_TIGHT] = "<tool_call>f<arg_key>s</arg_key><arg_value>%s</arg_value>"
                                 "</tool_call>",
      [TD_CALL_INVOKE] = "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"s\">%s"
                         "</parameter>\n</invoke>\n</minimax:tool_call>",
      [TD_CALL_DSML] = "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n"
                       "<｜DSML｜parameter name=\"s\" string=\"%s</｜DSML｜parameter>\n"
                       "</｜DSML｜invoke>\n</｜DSML｜function_calls>"};
  td_buf body = TD_BUF_INIT, call = TD_BUF_INIT;
  td_buf_printf(
      &body,
      "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"tool_choice\":\"required\","
      "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{"
      "\"type\":\"object\",\"required\":[\"s\"],\"properties\":{\"s\":%s},\"$defs\":{"
      "\"color\":{\"enum\":[\"red\",\"light red\"]}}}}}]}",
      schema);
  const char *sep = strstr(calls[form], "%s");
  td_buf_add(&call, calls[form], (size_t)(sep - calls[form]));
  td_buf_printf(&call, "%s%s", value, sep + 2);
  td_api_request r;
  td_api_error error;
  td_grammar *g;
  td_err err;
  assert_int_equal(parse(&r, true, td_buf_text(&body), &error), TD_OK);
  assert_int_equal(
      td_api_compose_grammar(&r, td_call_syntax_of_form(form), TD_REASONING_NONE, &error), TD_OK);
  assert_int_equal(td_grammar_open(&g, r.grammar.data, r.grammar.len, &err), TD_OK);
  const bool is_taken = td_grammar_matches(g, call.data, call.len);
  td_grammar_close(g);
  td_api_request_free(&r);
  td_buf_free(&body);
  td_buf_free(&call);
  return is_taken;
}

TEST(composes_strings_without_quotes) {
#define STRING "{\"type\":\"string\","
  static const struct {
    const char *schema;
    const char *right[4], *wrong[6];
  } list[] = {
      {STRING "\"pattern\":\"^[a-z]+\\\\.py$\"}", {"a.py"}, {"", ".py", "a.pyc", "<.py", "a.py\n"}},
      {STRING "\"pattern\":\"b.\"}", {"abc", "b\303\244"}, {"ab", "b<", "<bc", "</bc"}},
      {STRING "\"pattern\":\"^<b[^>]*>$\"}", {"<b>", "<b id=1>"}, {"b", "<b<>", "<b"}},
      {STRING "\"pattern\":\"^[ -~]$\"}", {"a"}, {"<", "ab", ""}},
      {STRING "\"pattern\":\"^[<=]{1,2}$\"}", {"<", "<="}, {"", "a"}},
      {STRING "\"pattern\":\"(?=a)\"}", {"", "anything </b>"}, {NULL}},
      {STRING "\"format\":\"date\"}", {"2024-02-28"}, {"", "2024-02-30", "today"}},
      {STRING "\"format\":\"hue\"}", {"", "red"}, {NULL}},
      {STRING "\"maxLength\":3}", {"", "<\303\244<", "abc"}, {"abcd", "</b", "a</"}},
      {STRING "\"minLength\":2,\"maxLength\":3}", {"<b", "abc"}, {"", "a", "abcd"}},
      {STRING "\"maxLength\":300}", {"", "<b", "a\n<b>"}, {"</b"}},
      {STRING "\"minLength\":1}", {"a", "</parameter", "\n", "<"}, {""}},
      {STRING "\"minLength\":3}", {"abc", "\n\n<", "</arg_value"}, {"", "a", "\n\n", "<<"}},
      {"{\"$ref\":\"#/$defs/color\"}", {"red", "light red"}, {"", "blue", "\"red\""}},
      {"{\"allOf\":[{\"$ref\":\"#/$defs/color\"}]}", {"red"}, {"blue"}},
      {"{\"anyOf\":[{\"$ref\":\"#/$defs/color\"},{\"type\":\"null\"},{\"type\":\"array\","
       "\"items\":{\"$ref\":\"#/$defs/color\"}}]}",
       {"red", "null", "[\"red\"]"},
       {"blue", "", "[red]"}},
      {"{\"type\":[\"string\",\"null\"],\"maxLength\":2}", {"ab", "null"}, {"abc", "nul"}},
      {"{\"anyOf\":[{\"type\":\"string\"},{\"type\":\"null\"}]}", {"", "null", "abc"}, {NULL}},
  };
  for (size_t i = 0; i < TD_COUNT(list); i++) {
    for (unsigned form = TD_CALL_FUNCTION; form <= TD_CALL_INVOKE; form++) {
      for (size_t k = 0; k < TD_COUNT(list[i].right) && list[i].right[k]; k++) {
        if (!takes_value(list[i].schema, form, list[i].right[k]))
          fail_msg("form %u: %s does not take %s", form, list[i].schema, list[i].right[k]);
      }
      for (size_t k = 0; k < TD_COUNT(list[i].wrong) && list[i].wrong[k]; k++) {
        if (takes_value(list[i].schema, form, list[i].wrong[k]))
          fail_msg("form %u: %s takes %s", form, list[i].schema, list[i].wrong[k]);
      }
    }
  }
#undef STRING
}

// Where a key's tag says whether the value is a string, the tag agrees with the schema.
TEST(composes_types_beside_keys) {
  static const struct {
    const char *schema, *type, *value;
    bool is_right;
  } list[] = {
      {"{\"type\":\"string\"}", "true", "a", true},
      {"{\"type\":\"string\"}", "false", "a", false},
      {"{\"type\":\"integer\"}", "false", "12", true},
      {"{\"type\":\"integer\"}", "true", "12", false},
      {"{\"type\":\"array\"}", "false", "[1]", true},
      {"{\"type\":[\"string\",\"null\"]}", "false", "null", true},
      {"{\"type\":[\"string\",\"null\"]}", "true", "a", true},
      {"{}", "true", "a", true},
      {"{}", "false", "1", true},
      {"{\"enum\":[\"red\",\"blue\"]}", "true", "blue", true},
      {"{\"enum\":[\"red\",\"blue\"]}", "true", "green", false},
  };
  for (size_t i = 0; i < TD_COUNT(list); i++) {
    char value[128];
    snprintf(value, sizeof value, "%s\">%s", list[i].type, list[i].value);
    if (takes_value(list[i].schema, TD_CALL_DSML, value) != list[i].is_right)
      fail_msg("%s: string=\"%s", list[i].schema, value);
  }
}
