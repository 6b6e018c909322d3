// tests/unit/test_output_parser.c - output split into reasoning, content and tool calls. The result
// must not depend on how the text arrives, and nothing of a call's markers may be shown.
// CTest: no-tsan
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/output_parser.h"
#include "base/buf.h"
#include "base/json_parse.h"
#include "unit/testing.h"

#define DS_CALLS "<｜tool▁calls▁begin｜>"
#define DS_CALL  "<｜tool▁call▁begin｜>"
#define DS_SEP   "<｜tool▁sep｜>"
#define DS_END   "<｜tool▁call▁end｜>"
#define DS_LAST  "<｜tool▁calls▁end｜>"

#define KM_CALLS "<|tool_calls_section_begin|>"
#define KM_CALL  "<|tool_call_begin|>"
#define KM_ARGS  "<|tool_call_argument_begin|>"
#define KM_END   "<|tool_call_end|>"
#define KM_LAST  "<|tool_calls_section_end|>"
#define BAD      "\xEF\xBF\xBD"

typedef struct {
  bool thinks, parse_tool_calls, one_call, is_harmony, is_cut;
} how;

typedef struct {
  td_buf reasoning, content, calls;
} outcome;

// Of every test: "t" takes a parameter of each type.
static td_tool_params params;

static void outcome_free(outcome *out) {
  td_buf_free(&out->reasoning);
  td_buf_free(&out->content);
  td_buf_free(&out->calls);
}

// Ids are left out where they are made up; of a call that broke off, "..." stands after it.
static void write_calls(outcome *out, const td_output_parser *parts) {
  for (uint32_t i = 0; i < parts->n_calls; i++) {
    const td_tool_call *call = &parts->calls[i];
    bool is_own = strncmp(call->id, "call_", 5) != 0;
    assert_true(call->name && call->name[0] && call->id[0]);
    td_buf_printf(&out->calls, "[%s%s%s %s]%s", is_own ? call->id : "", is_own ? " " : "",
                  call->name, td_buf_text(&call->arguments), call->is_whole ? "" : "...");
  }
}

// text in steps of so many bytes; what was not sure is asked for again at the end.
static outcome tell_apart(const char *text, size_t step, how h) {
  td_output_parser parts = {.begins_in_reasoning = h.thinks,
                            .parse_tool_calls = h.parse_tool_calls,
                            .one_call = h.one_call,
                            .is_harmony = h.is_harmony,
                            .id = 7,
                            .params = &params};
  outcome out = {0};
  size_t n = strlen(text), n_given = 0;
  uint32_t n_calls = 0;
  for (size_t len = 0, last = 0; !last; len += step) {
    last = len >= n;
    td_output_part part;
    bool found;
    td_err err;
    for (;;) {
      // What lies after the text so far must not be read.
      size_t now = last ? n : len;
      char *copy = malloc(now + 1);
      memcpy(copy, text, now);
      const td_text_end end = !last ? TD_TEXT_GROWS : h.is_cut ? TD_TEXT_CUT : TD_TEXT_ENDED;
      td_status st = td_output_parser_next(&parts, copy, now, end, &part, &found, &err);
      assert_int_equal(st, TD_OK);
      if (found && part.kind == TD_OUTPUT_CALL) {
        bool is_new = part.call == n_calls;
        assert_true(is_new || part.call + 1 == n_calls);
        assert_true(is_new || parts.calls[part.call].arguments.len > n_given);
        n_given = parts.calls[part.call].arguments.len;
        n_calls += is_new;
      } else if (found) {
        td_buf *to = part.kind == TD_OUTPUT_CONTENT ? &out.content : &out.reasoning;
        assert_true(part.end > part.begin);
        td_buf_add(to, copy + part.begin, part.end - part.begin);
      }
      free(copy);
      if (!found) break;
    }
  }
  assert_int_equal(n_calls, parts.n_calls);
  assert_true(n_calls == 0 || n_given == parts.calls[n_calls - 1].arguments.len);
  write_calls(&out, &parts);
  td_output_parser_free(&parts);
  return out;
}

static void check_how(const char *text, how h, const char *reasoning, const char *content,
                      const char *calls) {
  for (size_t step = 1; step <= strlen(text) + 1; step += 1 + step / 4) {
    outcome out = tell_apart(text, step, h);
    assert_string_equal(td_buf_text(&out.reasoning), reasoning);
    assert_string_equal(td_buf_text(&out.content), content);
    assert_string_equal(td_buf_text(&out.calls), calls);
    outcome_free(&out);
  }
}

static void check_parts(const char *text, bool thinks, bool parse_tool_calls, const char *reasoning,
                        const char *content, const char *calls) {
  const how h = {.thinks = thinks, .parse_tool_calls = parse_tool_calls};
  check_how(text, h, reasoning, content, calls);
}

static void check_calls(const char *text, const char *content, const char *calls) {
  check_parts(text, false, true, "", content, calls);
}

// The text is cut off by a limit.
static void check_cut(const char *text, const char *content, const char *calls) {
  check_how(text, (how){.parse_tool_calls = true, .is_cut = true}, "", content, calls);
}

#define H_THINK "<|channel|>analysis<|message|>"
#define H_SAY   "<|channel|>final<|message|>"
#define H_NEXT  "<|end|><|start|>assistant"

static void check_harmony(const char *text, const char *reasoning, const char *content,
                          const char *calls) {
  const how h = {.parse_tool_calls = true, .is_harmony = true};
  check_how(text, h, reasoning, content, calls);
}

TEST(messages_of_harmony_are_told_apart) {
  check_harmony(H_THINK "So <|it is.\n" H_NEXT H_SAY "1 < 2 ", "So <|it is.\n", "1 < 2 ", "");
  check_harmony(H_THINK
                "so" H_NEXT "<|channel|>commentary<|message|>I look." H_NEXT
                " to=functions.f<|channel|>commentary <|constrain|>json<|message|>{\"a\": 1}",
                "so", "I look.", "[f {\"a\": 1}]");
  check_harmony("<|channel|>commentary to=functions.get_it <|constrain|>json<|message|>{}<|call|>"
                "<|start|>assistant<|channel|>commentary to=python<|message|>[1]<|call|>",
                "", "", "[get_it {}][python [1]]");
  check_harmony("<|start|>assistant" H_SAY "a<|return|>", "", "a", "");
  check_harmony(" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", "", "", "[f {}]");
  check_harmony(H_THINK "a" H_SAY "b", "a", "b", "");
  check_harmony("Hi <b>", "", "Hi <b>", "");
  check_harmony("<b>Hi", "", "<b>Hi", "");
  check_harmony("<|channel|>fin", "", "", "");
  check_harmony("<|channel|>commentary to=functions.f<|message|><|call|>", "", "", "[f {}]");
  const how no_calls = {.is_harmony = true};
  check_how("<|channel|>commentary to=functions.f<|message|>{}<|call|>", no_calls, "", "{}", "");
  const how whole = {.parse_tool_calls = true, .is_harmony = true};
  check_how("<|channel|>commentary to=functions.f<|message|>{\"a<|call|>", whole, "", "",
            "[f {\"a]...");
  const how cut = {.parse_tool_calls = true, .is_harmony = true, .is_cut = true};
  check_how("<|channel|>commentary to=functions.f<|message|>{}", cut, "", "", "[f {}]...");
  check_how(H_THINK "a" H_NEXT "<|channel|>comm", cut, "a", "", "");
  const how one = {.parse_tool_calls = true, .is_harmony = true, .one_call = true};
  check_how("<|channel|>commentary to=functions.f<|message|>{}<|call|>" H_SAY "b", one, "", "",
            "[f {}]");
}

// What gpt-oss does to headers.
TEST(headers_that_models_garble) {
#define H_CALL   "<|channel|>commentary to=functions.t <|constrain|>json<|message|>"
#define H_ARGS   "{\"i\": 1}"
#define ONE_CALL "[t " H_ARGS "]"
  static const char *const calls[] = {
      "<|channel|>commentary to=functions.t<|channel|>commentary to=functions.t "
      "<|constrain|>json<|message|>" H_ARGS "<|call|>",
      "<|channel|>commentary to=functions.t<|message|>" H_CALL H_ARGS "<|call|>",
      H_CALL "<|message|>" H_ARGS "<|call|>",
      H_CALL "\n" H_ARGS "<|call|><|call|>",
      "<|channel|>commentary to=functions.t json<|message|>" H_ARGS,
      "<|channel|>commentary to=functions.t <|constrain|>json" H_ARGS "<|call|>",
      "<|channel|>commentary to=t<|message|>" H_ARGS,
      "<|channel|>commentary to= functions.t<|message|>" H_ARGS,
      "<|channel|>commentary functions.t <|message|>" H_ARGS,
      "<|channel|>commentaryto=functions.t<|message|>" H_ARGS,
      "<|channel|>commentary to=functions.functions.t code<|message|>" H_ARGS,
      "<|channel|>commentary to=functions.<|channel|>commentary to=functions.t<|message|>" H_ARGS,
      "<|channel|>thoughts to=functions.t<|message|>" H_ARGS,
      "<|channel|>analysis to=functions.t code<|message|>" H_ARGS "<|call|>",
      "<|start|>assistant to=functions.t<|channel|>commentary<|message|>" H_ARGS,
      "<|start|><|start|>assistant<|start|>assistant" H_CALL H_ARGS "<|call|>",
      "assistant" H_CALL H_ARGS "<|call|>",
      "assistant to=functions.t<|channel|>commentary json<|message|>" H_ARGS,
      "commentary to=functions.t <|constrain|>json<|message|>" H_ARGS,
      " to=t<|channel|>commentary<|message|>" H_ARGS,
      "to=functions.t" H_ARGS,
      "<|constrain|>json<|message|>" H_CALL H_ARGS,
  };
  for (size_t i = 0; i < TD_COUNT(calls); i++)
    check_harmony(calls[i], "", "", ONE_CALL);
  check_harmony(H_THINK "so<|end|>assistant" H_CALL H_ARGS "<|call|>", "so", "", ONE_CALL);
  check_harmony(H_THINK "so<|end|>" H_CALL H_ARGS "<|call|>assistant" H_CALL "{}", "so", "",
                ONE_CALL "[t {}]");
  check_harmony("<|channel|>commentary to=functions.t<|call|>", "", "", "[t {}]");
  check_harmony("<|channel|>commentary to=functions.t", "", "", "[t {}]");
  check_harmony("<|channel|>commentary to=functions.t<|message|>" H_SAY "b", "", "b", "[t {}]");
  // An unknown channel, and text where the message's marker is missing, are text.
  check_harmony("<|channel|>thoughts<|message|>a<|end|>", "", "a", "");
  check_harmony("<|channel|>commentary to=functions.t<|message|>{\"a\":\"<|message|>\"}", "", "",
                "[t {\"a\":\"<|message|>\"}]");
  check_harmony("<|channel|>final Hi {a} <b><|return|>", "", "Hi {a} <b>", "");
  check_harmony("<|channel|>analysis so it" H_NEXT H_SAY "b", "so it", "b", "");
  check_harmony("<|channel|>analysis so<|channel|>final<|message|>b", "so", "b", "");
  check_harmony("<|channel|>commentary to=functions.t oh<|end|>", "", "oh", "");
  check_harmony("<|channel|>analysis<|channel|>final<|message|>b", "", "b", "");
  check_harmony("<|channel|> analysis<|message|>so" H_NEXT H_SAY "b", "so", "b", "");
  check_harmony("final words to=functions", "", "final words to=functions", "");
  check_harmony("assistant", "", "assistant", "");
  check_harmony("<", "", "<", "");
  // A tool's answer that the model makes up is no call.
  check_harmony("<|start|>functions.t to=assistant<|channel|>commentary<|message|>" H_ARGS, "",
                H_ARGS, "");
  const how cut = {.parse_tool_calls = true, .is_harmony = true, .is_cut = true};
  check_how("<|channel|>commentary to=functions.t", cut, "", "", "");
  check_how("<|channel|>final Hi", cut, "", "Hi", "");
}

// Every part of a header left out, and one written twice: a whole call or text, never neither.
TEST(parts_of_headers_that_are_left_out) {
  static const char *const orders[][8] = {
      {"<|start|>", "assistant", " to=", "functions.", "t", "<|channel|>commentary",
       " <|constrain|>json", "<|message|>"},
      {"<|start|>assistant", "<|channel|>", "commentary", " to=", "functions.t", "<|constrain|>",
       "json", "<|message|>"}};
  for (unsigned i = 0; i < 2 * 256 * 9; i++) {
    const unsigned left = i % 256, twice = i / 256 % 9;
    td_buf text = TD_BUF_INIT;
    for (unsigned k = 0; k < 8; k++)
      for (unsigned n = (left >> k & 1) * (1 + (k == twice)); n > 0; n--)
        td_buf_str(&text, orders[i / (256 * 9)][k]);
    td_buf_str(&text, H_ARGS "<|call|>");
    const how h = {.parse_tool_calls = true, .is_harmony = true};
    outcome whole = tell_apart(td_buf_text(&text), text.len + 1, h);
    const char *calls = td_buf_text(&whole.calls);
    const bool is_text = strstr(td_buf_text(&whole.content), H_ARGS) != NULL;
    const bool is_call = strstr(calls, H_ARGS "]") && !strstr(calls, "...");
    if (is_text == is_call) fprintf(stderr, "%s\n", td_buf_text(&text));
    assert_true(is_text ? !calls[0] : is_call);
    // One part that is missing or doubled leaves no doubt, but for what says that it is a call.
    const bool is_one = (left == 255) != (twice == 8 && !(~left & (~left - 1)) && left != 255);
    const bool says_so = i / (256 * 9) ? (left & 24) == 24 : (left & 20) == 20;
    if (is_one && says_so) assert_true(is_call);
    check_how(td_buf_text(&text), h, td_buf_text(&whole.reasoning), td_buf_text(&whole.content),
              calls);
    outcome_free(&whole);
    td_buf_free(&text);
  }
}

TEST(plain_text_is_content) {
  check_parts("", false, true, "", "", "");
  check_parts(" Hello,\n 1 < 2 <b> ", false, true, "", " Hello,\n 1 < 2 <b> ", "");
  check_parts(" Hello ", false, false, "", " Hello ", "");
  check_parts("ends in <tool_", false, true, "", "ends in <tool_", "");
  check_parts("<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>", false, false, "",
              "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>", "");
}

TEST(thoughts_are_told_apart) {
  check_parts("<think>\nso\n it \n</think>\n\nHi <think> there", false, false, "so\n it",
              "Hi <think> there", "");
  check_parts("so it</think> Hi", true, false, "so it", "Hi", "");
  check_parts("\n\n<think>cut < off </thi", false, true, "cut < off </thi", "", "");
  check_parts("<thinking aloud", false, true, "", "<thinking aloud", "");
  check_parts("<think></think>Hi", false, true, "", "Hi", "");
  check_parts("a</think><tool_call>{\"name\": \"f\"}</tool_call>", true, true, "a", "", "[f {}]");
}

TEST(calls_of_each_form_are_found) {
  check_parts("Look:\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"}\\\"<\", \"b\": "
              "[12345678901234567890]}}\n</tool_call>\n<tool_call>{\"name\": \"g\", "
              "\"parameters\": {}}</tool_call> ",
              false, true, "", "Look:",
              "[f {\"a\": \"}\\\"<\", \"b\": [12345678901234567890]}]"
              "[g {}]");
  check_parts("Yes." DS_CALLS DS_CALL "f" DS_SEP "{\"a\": 1}" DS_END DS_CALL "g" DS_SEP
              "{}" DS_END DS_LAST,
              false, true, "", "Yes.", "[f {\"a\": 1}][g {}]");
  check_parts(DS_CALLS DS_CALL "function" DS_SEP "f\n```json\n{\"a\": 1}\n```" DS_END "\n" DS_CALL
                               "function" DS_SEP "g\n```json\n{}\n```" DS_END DS_LAST,
              false, true, "", "", "[f {\"a\": 1}][g {}]");
  check_parts("<|tool_calls_section_begin|><|tool_call_begin|>functions.f:3"
              "<|tool_call_argument_begin|>{\"a\": {}}<|tool_call_end|><|tool_calls_section_end|>",
              false, true, "", "", "[functions.f:3 f {\"a\": {}}]");
}

#define BARE(args) "<|tool_call>call:f{" args "}<tool_call|>"
#define T(text)    "<|\"|>" text "<|\"|>"

// Keys without quotes, and strings between the model's own, in which nothing is escaped.
TEST(bare_keys_and_quotes_of_tokens) {
  check_parts("<|channel>thought\nso <|tool it<channel|>Look:" BARE("a:" T("b")), false, true,
              "so <|tool it", "Look:", "[f {\"a\":\"b\"}]");
  check_calls(BARE("") "<|tool_call>call:g{n:-1.5e3,t:true}<tool_call|>", "",
              "[f {}][g {\"n\":-1.5e3,\"t\":true}]");
  check_calls(BARE("a_b:[" T("x") "," T("") ",{c:[[1], null]}], d-e : {" T("f g") ":{}}"), "",
              "[f {\"a_b\":[\"x\",\"\",{\"c\":[[1], null]}], \"d-e \": {\"f g\":{}}}]");
  check_calls(BARE("a:" T("{b:\\n,\"c\"}<|\n<tool_call|") ",b:1"), "",
              "[f {\"a\":\"{b:\\\\n,\\\"c\\\"}<|\\n<tool_call|\",\"b\":1}]");
  check_calls(BARE("\"a\": \"b\\n<|\", \"c\": {\"d\": 1}"), "",
              "[f {\"a\": \"b\\n<|\", \"c\": {\"d\": 1}}]");
  check_calls("<|tool_call>call:f{a:" T("b") "}", "", "[f {\"a\":\"b\"}]");
  check_cut("<|tool_call>call:f{a:<|\"|>b", "", "[f {\"a\":\"b]...");
  check_calls("<|tool_call>call:f{a:1,b}<tool_call|>x", "x", "[f {\"a\":1,\"b]...");
  check_calls("<|tool_call> it is called", "<|tool_call> it is called", "");
}
#undef T

#define FN(args)      "<tool_call>\n<function=t>\n" args "</function>\n</tool_call>"
#define P(key, value) "<parameter=" key ">\n" value "\n</parameter>\n"

// Arguments without quotes become what the tool's schema says.
TEST(elements_are_typed_by_the_schema) {
  check_calls(FN(P("s", "12") P("i", "12") P("o", " {\"a\": [1,\n2]}\n")), "",
              "[t {\"s\": \"12\", \"i\": 12, \"o\": {\"a\": [1,\n2]}}]");
  check_calls(FN(P("s", "\n a\t<b> \"c\\ </param\n")), "",
              "[t {\"s\": \"\\n a\\t<b> \\\"c\\\\ </param\\n\"}]");
  check_calls(FN(P("n", "null") P("n", "nul")), "", "[t {\"n\": null, \"n\": \"nul\"}]");
  check_calls(FN(P("b", "True") P("b", "false") P("b", "maybe")), "",
              "[t {\"b\": true, \"b\": false, \"b\": \"maybe\"}]");
  check_calls(FN(P("r", "7") P("e", "1") P("u", "[1]") P("a", "x")), "",
              "[t {\"r\": 7, \"e\": \"1\", \"u\": \"[1]\", \"a\": \"x\"}]");
  check_calls(
      FN(P("other", "1.5") P("other", "True") P("other", "\"q\"") P("other", "")), "",
      "[t {\"other\": 1.5, \"other\": \"True\", \"other\": \"\\\"q\\\"\", \"other\": \"\"}]");
  check_calls(FN("<parameter=s>x</parameter><parameter=s></parameter>"), "",
              "[t {\"s\": \"x\", \"s\": \"\"}]");
  check_calls(FN(""), "", "[t {}]");
}

TEST(elements_of_each_family) {
  check_calls("So:\n" FN(P("i", "1")) "\n" FN(P("i", "2")) "\nb", "So:b",
              "[t {\"i\": 1}][t {\"i\": 2}]");
  check_calls("<function=g>\n" P("x", "1") "</function>\n</tool_call>", "", "[g {\"x\": 1}]");
  check_calls("<function=g>" P("x", "1") "</tool_call>", "", "[g {\"x\": 1}]");
  check_calls("<tool_call><function=g></function><function=h></function></tool_call>", "",
              "[g {}][h {}]");
  check_calls(
      "\n<tool_call>t\n<arg_key>s</arg_key>\n<arg_value> 1\n</arg_value>\n<arg_key>i</arg_key>"
      "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>g<arg_key>k</arg_key>"
      "<arg_value>{}</arg_value></tool_call>",
      "", "[t {\"s\": \" 1\\n\", \"i\": 2}][g {\"k\": {}}]");
  check_calls("<tool_call>t\n</tool_call><tool_call>t</tool_call>", "", "[t {}][t {}]");
  check_calls("Look.<tool_calls>\n<tool_call>t<tool_sep>\n<arg_key>s</arg_key>\n<arg_value>1"
              "</arg_value>\n<arg_key>i</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n"
              "<tool_call>g<tool_sep><arg_key>k</arg_key><arg_value>{}</arg_value></tool_call>\n"
              "<tool_call>t<tool_sep>\n</tool_call>\n</tool_calls>",
              "Look.", "[t {\"s\": \"1\", \"i\": 2}][g {\"k\": {}}][t {}]");
#define O ":opensource>"
  check_parts("so <think></think" O "Look.<tool_calls" O "\n<tool_call" O "t<tool_sep" O
              "\n<arg_key" O "s</arg_key" O "\n<arg_value" O "<arg_value></arg_value" O
              "\n</tool_call" O "\n<tool_call" O "\nt<tool_sep" O "</tool_call" O "\n</tool_calls" O
              "So",
              true, true, "so <think>", "Look.So", "[t {\"s\": \"<arg_value>\"}][t {}]");
  check_parts("<think" O "a</think>b</think" O "c", false, true, "a</think>b", "c", "");
#undef O
  check_calls("a <tool_calls> and <tool_call>t<tool_sep",
              "a <tool_calls> and <tool_call>t<tool_sep", "");
  check_calls(
      "Look.\n<minimax:tool_call>\n<invoke name=\"t\">\n<parameter name=\"s\">1\n</parameter>\n"
      "<parameter name=\"i\">1</parameter>\n</invoke>\n<invoke name=\"g\">\n</invoke>\n"
      "</minimax:tool_call>\nSo",
      "Look.So", "[t {\"s\": \"1\\n\", \"i\": 1}][g {}]");
  // Without the run's marker, of tools that are offered.
  check_calls("Look.\n<invoke name=\"t\">\n<parameter name=\"i\">1</parameter>\n</invoke>\n"
              "<invoke name=\"t\">\n</invoke>\nSo",
              "Look.So", "[t {\"i\": 1}][t {}]");
  check_calls("Write <invoke name=\"other\">\n</invoke>\nthere.",
              "Write <invoke name=\"other\">\n</invoke>\nthere.", "");
  check_calls(
      "<minimax:tool_call>\n<invoke name=\"t\">\n</invoke>\n<invoke name=\"other\">\n</invoke>\n"
      "</minimax:tool_call>",
      "", "[t {}][other {}]");
#define NS        "]<]minimax[>["
#define M3(calls) NS "<tool_call>\n" calls NS "</tool_call>"
  check_calls("Look [1].\n" M3(NS "<invoke name=\"t\">" NS "<s>1 <b>\n" NS "</s>" NS "<i>1" NS
                                  "</i>" NS "</invoke>\n" NS "<invoke name=\"g\">" NS
                                  "</invoke>\n") "\nSo]",
              "Look [1].So]", "[t {\"s\": \"1 <b>\\n\", \"i\": 1}][g {}]");
  // Values of elements, one with a member of its own name; what is left open ends with the call.
  check_calls(M3(NS "<invoke name=\"g\">" NS "<a>" NS "<item>x" NS "</item>" NS "<item>" NS
                    "<a>2" NS "</a>" NS "<b>" NS "</b>" NS "</item>" NS "</a>" NS "<o>" NS
                    "<o>true" NS "</o>" NS "</o>" NS "</invoke>\n"),
              "", "[g {\"a\": [\"x\", {\"a\": 2, \"b\": \"\"}], \"o\": {\"o\": true}}]");
  check_calls(M3(NS "<invoke name=\"t\">" NS "<s>a" NS "</invoke>\n" NS "<invoke name=\"t\">" NS
                    "<s>b" NS "</s>"),
              "", "[t {\"s\": \"a\"}][t {\"s\": \"b\"}]");
  check_calls(
      M3(NS "<invoke name=\"g\">" NS "<a>" NS "<item>x" NS "</b>" NS "</a>" NS "</invoke>\n"), "",
      "[g {\"a\": \"" NS "<item>x" NS "</b>\"}]");
  // Types are the schema's at every depth; the wrapper may be missing.
  check_calls(M3(NS "<invoke name=\"t\">" NS "<st>" NS "<item>1" NS "</item>" NS "</st>" NS "<d>" NS
                    "<item>" NS "<old>1" NS "</old>" NS "<item>2" NS "</item>" NS "</item>" NS
                    "</d>" NS "</invoke>\n"),
              "", "[t {\"st\": [\"1\"], \"d\": [{\"old\": \"1\", \"item\": 2}]}]");
  check_calls(M3(NS "<invoke name=\"t\">" NS "<st>" NS "</st>" NS "<o>" NS "</o>" NS "</invoke>\n"),
              "", "[t {\"st\": [], \"o\": {}}]");
  check_calls(
      M3(NS "<invoke name=\"t\">1" NS "</s>" NS "<i>2" NS "</i><b>true" NS "</b>" NS "</invoke>\n"),
      "", "[t {\"s\": \"1\", \"i\": 2, \"b\": true}]");
  check_calls("So " NS "<invoke name=\"t\">" NS "<s>1" NS "</s>" NS "</invoke>" NS
              "<invoke name=\"g\">" NS "</invoke>",
              "So", "[t {\"s\": \"1\"}][g {}]");
#undef M3
#define DSML(key, type, value)                                                                     \
  "<｜DSML｜parameter name=\"" key "\" string=\"" type "\">" value "</｜DSML｜parameter>\n"
  check_calls("Look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"t\">\n" DSML("s", "true",
                                                                                      "1 <b>\n")
                  DSML("i", "false",
                       "1") "</｜DSML｜invoke>\n"
                            "<｜DSML｜invoke name=\"g\">\n" DSML("a", "true", "[1]") DSML(
                                "b", "false", "[1]") "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
              "Look.", "[t {\"s\": \"1 <b>\\n\", \"i\": 1}][g {\"a\": \"[1]\", \"b\": [1]}]");
  check_calls("Look.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"t\">\n" DSML("s", "true", "1")
                  DSML("i", "false", "1") "</｜DSML｜invoke>\n<｜DSML｜invoke name=\"g\">\n\n"
                                          "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
              "Look.", "[t {\"s\": \"1\", \"i\": 1}][g {}]");
  // The schema goes before the tag.
  check_calls("<｜DSML｜function_calls><｜DSML｜invoke name=\"t\">" DSML("s", "false", "1")
                  DSML("i", "true", "2") "</｜DSML｜invoke></｜DSML｜function_calls>",
              "", "[t {\"s\": \"1\", \"i\": 2}]");
  // Tags without types, and one that ends no value.
  check_calls(
      "<｜DSML｜function_calls><｜DSML｜invoke name=\"t\"><｜DSML｜parameter name=\"s\">a\n" DSML(
          "i", "false", "1") "</｜DSML｜invoke></｜DSML｜function_calls>",
      "", "[t {\"s\": \"a\", \"i\": 1}]");
#undef DSML
  check_calls("[TOOL_CALLS]f[ARGS]{\"a\": [1]}[TOOL_CALLS]g[CALL_ID]abcDEF123[ARGS]{}", "",
              "[f {\"a\": [1]}][abcDEF123 g {}]");
  check_calls(
      "a [1] [TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": 1}}, {\"name\": \"g\"}]",
      "a [1]", "[f {\"a\": 1}][g {}]");
  check_calls("[TOOL_CALLS]{\"name\": \"f\"}", "", "[f {}]");
  check_calls("[TOOL_CALLS]f{\"a\": 1} [", "[", "[f {\"a\": 1}]");
  check_parts("[THINK]a [b] </think>[/THINK]c", false, true, "a [b] </think>", "c", "");
  check_parts("[THIN", false, true, "", "[THIN", "");
  check_parts("<mm:think>a </think></mm:think>b", false, true, "a </think>", "b", "");
  check_parts("a</mm:think>b", true, true, "a", "b", "");
}

// A string comes as it is written, anything else when it is complete.
TEST(elements_come_in_pieces) {
  check_cut("<tool_call><function=t><parameter=s>\nab\n", "", "[t {\"s\": \"ab]...");
  check_cut("<tool_call><function=t><parameter=i>\n1", "", "[t {\"i\": ]...");
  check_cut("<tool_call><function=t><parameter=i>\n1</parameter>\n", "", "[t {\"i\": ]...");
  check_cut("a<tool_call><function=t>", "a", "");
  check_cut("<tool_call>t<arg_key>i</arg_key><arg_value>1</arg_value>\n", "", "[t {\"i\": ]...");
  check_calls("<tool_call><function=t><parameter=i>1</parameter></function>oh", "oh",
              "[t {\"i\": 1}]");
}

// A model that ends its answer itself has written what it wanted.
TEST(elements_that_the_answer_ends) {
  check_calls("<tool_call><function=t><parameter=s>\nab\n", "", "[t {\"s\": \"ab\"}]");
  check_calls("<tool_call><function=t><parameter=i>1</parameter>\n", "", "[t {\"i\": 1}]");
  check_calls("<tool_call><function=t><parameter=s>a</par", "", "[t {\"s\": \"a\"}]");
  check_calls("<tool_call>t<arg_key>i</arg_key><arg_value>1</arg_value>", "", "[t {\"i\": 1}]");
}

// Where the tag that ends a value is missing, garbled, or part of the value.
TEST(values_end_at_tags) {
  check_calls("<tool_call>\n<function=t>\n<parameter=s>\na\n<parameter=i>\n1\n</function>\n"
              "</tool_call>",
              "", "[t {\"s\": \"a\", \"i\": 1}]");
  check_calls("<function=t><parameter=s>a<parameter=i>1</function></tool_call>", "",
              "[t {\"s\": \"a\", \"i\": 1}]");
  check_calls("<function=t>\n<parameter=s>\na\n</tool_call>\n", "", "[t {\"s\": \"a\"}]");
  check_calls(FN("<parameter=s>\na\n</parameter_function>\n"), "", "[t {\"s\": \"a\"}]");
  check_calls(FN(P("s", "<parameter=z>b</parameter>' <c> </function> d\n<parameter=s>\n")), "",
              "[t {\"s\": \"<parameter=z>b</parameter>' <c> </function> d\\n<parameter=s>\\n\"}]");
  check_calls(FN(P("\"s\"", "a") P(" i ", "2")), "", "[t {\"s\": \"a\", \"i\": 2}]");
  check_calls("<tool_call><function='t'>\n" P("'s'", "a") "</function></tool_call>", "",
              "[t {\"s\": \"a\"}]");
  check_calls("<tool_call>t<arg_key>s</arg_key><arg_value><arg_value>1</arg_value>\n</arg_value>2"
              "</arg_value></tool_call>",
              "", "[t {\"s\": \"<arg_value>1</arg_value>\\n</arg_value>2\"}]");
  check_calls("<tool_call>t\n<arg_key>s</arg_key>\n<arg_value>a\n<arg_key>i</arg_key>\n"
              "<arg_value>1</tool_call>\n<tool_call>t<arg_key>s</arg_key><arg_value>"
              "</arg_value>b</arg_value></tool_call>",
              "", "[t {\"s\": \"a\", \"i\": 1}][t {\"s\": \"</arg_value>b\"}]");
  check_calls("<minimax:tool_call>\n<invoke name='t'>\n<parameter name=s>a\n</invoke>\n"
              "<invoke name=\"t\">\n<parameter name=\"s\">b</parameter>\n</minimax:tool_call>",
              "", "[t {\"s\": \"a\"}][t {\"s\": \"b\"}]");
}

TEST(python_is_read) {
  check_calls(FN(P("a", "['x', \"y's\", True, None, 1.5e3,]")), "",
              "[t {\"a\": [\"x\", \"y's\", true, null, 1.5e3]}]");
  check_calls(FN(P("o", "{'k': {'l': False}, }")), "", "[t {\"o\": {\"k\": {\"l\": false}}}]");
  check_calls(FN(P("a", "['x' 'y']") P("a", "[01]") P("s", "['x']")), "",
              "[t {\"a\": \"['x' 'y']\", \"a\": \"[01]\", \"s\": \"['x']\"}]");
  check_calls("<tool_call>{'name': 'f', 'arguments': {'a': 'it\\'s \"', \"b\": None}}</tool_call>",
              "", "[f {\"a\": \"it's \\\"\", \"b\": null}]");
}

// The types are those that the grammar of the schema allows.
TEST(types_behind_references) {
  check_calls(FN(P("deep", "103") P("all", "103") P("any", "103") P("both", "103")), "",
              "[t {\"deep\": \"103\", \"all\": \"103\", \"any\": 103, \"both\": \"103\"}]");
}

int before_all(void **state) {
  (void)state;
  static const char text[] =
      "[{\"function\": {\"name\": \"t\", \"parameters\": {\"properties\": {\"s\": {\"type\": "
      "\"string\"}, "
      "\"i\": {\"type\": \"integer\"}, \"o\": {\"type\": [\"object\"]}, \"n\": {\"anyOf\": "
      "[{\"type\": "
      "\"string\"}, {\"type\": \"null\"}]}, \"b\": {\"const\": true}, \"r\": {\"$ref\": "
      "\"#/$defs/r\"}, "
      "\"e\": {\"enum\": [\"a\", \"1\"]}, \"u\": {\"allOf\": [{\"$ref\": \"#/$defs/s\"}]}, \"a\": "
      "{\"type\": "
      "\"array\"}, \"deep\": {\"$ref\": \"#/properties/x/properties/id\"}, \"x\": {\"properties\": "
      "{\"id\": {\"type\": \"string\"}}}, \"all\": {\"allOf\": [{\"minLength\": 1}, {\"$ref\": "
      "\"#/$defs/s\"}]}, \"any\": {\"anyOf\": [{\"$ref\": \"#/$defs/s\"}, {\"type\": "
      "\"integer\"}]}, \"both\": {\"type\": [\"string\", \"integer\"], \"anyOf\": [{\"$ref\": "
      "\"#/$defs/s\"}]}, \"st\": {\"type\": \"array\", \"items\": {\"type\": \"string\"}}, "
      "\"d\": {\"type\": \"array\", \"items\": {\"anyOf\": [{\"type\": \"object\", "
      "\"properties\": {\"old\": {\"type\": \"string\"}, \"item\": {\"type\": "
      "\"integer\"}}}]}}}, \"$defs\": {\"r\": {\"$ref\": \"#/$defs/q\"}, \"q\": {\"type\": "
      "\"number\"}, "
      "\"s\": {\"type\": \"string\"}}}}}]";
  cJSON *tools;
  td_err err;
  assert_int_equal(td_json_parse(&tools, text, strlen(text), TD_JSON_MAX_DEPTH, &err), TD_OK);
  td_budget budget = {.steps = 1u << 20, .bytes = 1u << 20};
  assert_int_equal(td_tool_params_add(&params, tools->child, &budget, &err), TD_OK);
  td_tool_params_sort(&params);
  cJSON_Delete(tools);
  return 0;
}

int after_all(void **state) {
  (void)state;
  td_tool_params_free(&params);
  return 0;
}

TEST(text_may_follow_a_call) {
  check_parts("<tool_call>{\"name\": \"f\"}</tool_call>\n\nDone. ", false, true, "", "Done. ",
              "[f {}]");
  check_parts("<tool_call>{\"name\": \"f\"}", false, true, "", "", "[f {}]");
}

TEST(what_is_no_call_is_text) {
  static const char *const texts[] = {
      "<tool_call>no</tool_call>",
      "So: \n<tool_call>\n no</tool_call> ",
      "<tool_call>{\"name\": 1}</tool_call> after",
      "<tool_call>{\"name\": \"\", \"arguments\": {}}</tool_call>",
      "<tool_call>{\"name\": \"functions.\", \"arguments\": {}}</tool_call>",
      "<tool_call>{\"arguments\": {}}</tool_call>",
      "<tool_call>{\"name\": \"f\", \"arguments\": \"x\"}</tool_call>",
      "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>",
      "<tool_call>{\"name\": \"f\", \"arguments\": 5}</tool_call>",
      "<tool_call>{\"name\": \"f\", \"arguments\": {x}}</tool_call>",
      "<tool_call>{\"name\": \"f\", }</tool_call>",
      "<tool_call>{\"name\": \"f\" \"arguments\": {}}</tool_call>",
      "<tool_call>{\"name\": \"f\"",
      "<tool_call>\n<function=f>\nno</function>\n</tool_call>",
      "<tool_call><function></function></tool_call>",
      "<tool_call><function=f\n></function></tool_call>",
      "<function=",
      "<function=f>",
      "<tool_call>unknown</tool_call>",
      "<tool_call>f\n<arg_key>a</arg_key>\n<arg>1</arg_value>\n</tool_call>",
      "<tool_call>f\n<arg_key></arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
      "<minimax:tool_call>\n<invoke name=\"f\">",
      "<minimax:tool_call>\n<invoke>",
      "<invoke name=\"f\"></invoke>",
      "[TOOL_CALLS]",
      "[TOOL_CALLS]f",
      "[TOOL_CALLS]f[ARGS]",
      "[TOOL_CALLS]f[0]",
      "[TOOL_CALLS][ARGS]{}",
      "[TOOL_CALLS][1]",
      "[TOOL_CALLS] [{\"arguments\": {}}]",
      "<tool_call>",
      "<tool_call>{",
      DS_CALLS DS_CALL "f" DS_SEP,
      DS_CALLS DS_CALL "f" DS_SEP "nul",
      DS_CALLS DS_CALL DS_SEP "{}" DS_END,
      DS_CALLS DS_CALL "f" DS_SEP "5" DS_END,
      DS_CALLS DS_CALL "f" DS_SEP "<b>" DS_END,
      KM_CALLS KM_CALL "functions.:0" KM_ARGS "{}" KM_END,
      KM_CALLS KM_CALL ":0" KM_ARGS "{}" KM_END,
      KM_CALLS KM_CALL KM_END,
      KM_CALLS " no call",
      KM_CALLS,
  };
  for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
    check_calls(texts[i], texts[i], "");
}

#define HERMES(object) "<tool_call>\n" object "\n</tool_call>"

// Whatever models write where there are none, and every search ends where its call ends.
TEST(calls_without_arguments) {
  check_calls(HERMES("{\"name\": \"f\"}") HERMES("{\"name\": \"g\", \"arguments\": {\"a\": 1}}"),
              "", "[f {}][g {\"a\": 1}]");
  check_calls(HERMES("{\"name\": \"f\", \"arguments\": }")
                  HERMES("{\"arguments\":, \"name\": \"g\"}"),
              "", "[f {}][g {}]");
  static const char *const none[] = {"null", "\"\"",   "\"null\"", "[]",
                                     "[ ]",  "\"{}\"", "\" \"",    "{}"};
  for (size_t i = 0; i < sizeof none / sizeof none[0]; i++) {
    char text[200];
    snprintf(text, sizeof text, HERMES("{\"name\": \"f\", \"arguments\": %s}"), none[i]);
    check_calls(text, "", "[f {}]");
    snprintf(text, sizeof text, DS_CALLS DS_CALL "f" DS_SEP "%s" DS_END DS_LAST, none[i]);
    check_calls(text, "", "[f {}]");
  }
  check_calls(DS_CALLS DS_CALL "f" DS_SEP DS_END DS_CALL "g" DS_SEP "{\"a\": 1}" DS_END DS_LAST, "",
              "[f {}][g {\"a\": 1}]");
  check_calls(DS_CALLS DS_CALL "f" DS_END DS_CALL "g" DS_SEP "{\"a\": 1}" DS_END DS_LAST, "",
              "[f {}][g {\"a\": 1}]");
  check_calls(DS_CALLS DS_CALL "function" DS_SEP "f" DS_END DS_CALL "function" DS_SEP
                               "g\n```json\n```" DS_END DS_LAST,
              "", "[f {}][g {}]");
  check_calls(DS_CALLS DS_CALL "function" DS_SEP "null_it\n```json\n{\"a\": 1}\n```" DS_END DS_LAST,
              "", "[null_it {\"a\": 1}]");
  check_calls(KM_CALLS KM_CALL "functions.f:0" KM_ARGS KM_END KM_CALL "functions.g:1" KM_ARGS
                               "{\"a\": 1}" KM_END KM_LAST,
              "", "[functions.f:0 f {}][functions.g:1 g {\"a\": 1}]");
  check_calls(KM_CALLS KM_CALL "functions.f:0" KM_END KM_CALL "functions.g:1" KM_ARGS
                               " null " KM_END KM_LAST,
              "", "[functions.f:0 f {}][functions.g:1 g {}]");
  check_calls(KM_CALLS KM_CALL "functions.f:0" KM_CALL "functions.g:1" KM_ARGS KM_LAST, "",
              "[functions.f:0 f {}][functions.g:1 g {}]");
}

TEST(arguments_in_any_shape) {
  check_calls(HERMES("{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": \\\"x\\\\ny\\\"}\"}"), "",
              "[f {\"a\": \"x\\ny\"}]");
  check_calls(HERMES("{\"arguments\": {\"a\": 1}, \"name\": \"f\"}"), "", "[f {\"a\": 1}]");
  check_calls(
      HERMES("{\"id\": \"1\", \"x\": [{\"name\": \"g\"}], \"type\": \"function\", \"function\": "
             "{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}, \"n\": -1.5}"),
      "", "[f {\"a\": 1}]");
  check_calls(HERMES("{\"function\": \"f\", \"parameters\": {\"name\": \"x\"}}"), "",
              "[f {\"name\": \"x\"}]");
  check_calls(HERMES("{\"name\": \"f\", \"arguments\": {\"a\": 1}"), "", "[f {\"a\": 1}]");
  check_calls(HERMES("{\"name\": \"f\", \"arguments\": {\"a\": 1}}}"), "", "[f {\"a\": 1}]");
  check_calls(KM_CALLS KM_CALL "functions.f:0 {\"a\": 1}" KM_END KM_LAST, "",
              "[functions.f:0 f {\"a\": 1}]");
  check_calls(KM_CALLS KM_CALL "functions.f:0" KM_ARGS "\"{\\\"a\\\": 1}\"" KM_END KM_LAST, "",
              "[functions.f:0 f {\"a\": 1}]");
  check_calls(DS_CALLS DS_CALL "f" DS_SEP "```json\n{\"a\": 1}\n```" DS_END DS_LAST, "",
              "[f {\"a\": 1}]");
  check_calls(DS_CALLS DS_CALL "function" DS_SEP "f\n{\"a\": 1}" DS_END DS_LAST, "",
              "[f {\"a\": 1}]");
}

TEST(names_and_ids_in_every_spelling) {
  check_calls(KM_CALL "functions.a.b-c:12" KM_ARGS "{}" KM_END, "",
              "[functions.a.b-c:12 a.b-c {}]");
  check_calls(KM_CALL " f:0\n" KM_ARGS "{}" KM_END, "", "[f:0 f {}]");
  check_calls(KM_CALL "functions.f" KM_ARGS "{}" KM_END KM_CALL "g" KM_ARGS "{}" KM_END, "",
              "[f {}][g {}]");
  // An id that was there is not given twice.
  check_calls(KM_CALL "functions.f:0" KM_ARGS "{}" KM_END KM_CALL "functions.f:0" KM_ARGS
                      "{}" KM_END,
              "", "[functions.f:0 f {}][f {}]");
  check_calls(DS_CALL "ns:f" DS_SEP "{}" DS_END, "", "[ns:f {}]");
  check_calls(HERMES("{\"name\": \"functions.f\"}") HERMES("{\"name\": \" \\u0066\"}"), "",
              "[f {}][f {}]");
}

TEST(markers_that_are_forgotten) {
  check_calls(KM_CALL "functions.f:0" KM_ARGS "{}" KM_CALL "functions.g:1" KM_ARGS "{}", "",
              "[functions.f:0 f {}][functions.g:1 g {}]");
  check_calls(KM_CALLS "functions.f:0" KM_ARGS "{}" KM_END KM_LAST, "", "[functions.f:0 f {}]");
  check_calls("a " DS_CALL "f" DS_SEP "{}" DS_CALL "g" DS_SEP "{}" DS_LAST, "a", "[f {}][g {}]");
  check_calls("<tool_call>{\"name\": \"f\"}<tool_call>{\"name\": \"g\"}</tool_call></tool_call>",
              "", "[f {}][g {}]");
  check_calls("<tool_call>{\"name\": \"f\"}</tool_", "", "[f {}]");
}

TEST(several_calls_between_two_markers) {
  check_calls(HERMES("{\"name\": \"f\"}\n{\"name\": \"g\", \"arguments\": {}}"), "",
              "[f {}][g {}]");
  check_calls(HERMES("[{\"name\": \"f\"}, {\"name\": \"g\"}]") " so", "so", "[f {}][g {}]");
  check_calls("<tool_call>{\"name\": \"f\"}, he said {", ", he said {", "[f {}]");
  check_calls("<tool_call>{\"name\": \"f\"} {\"no\": 1}", "{\"no\": 1}", "[f {}]");
}

TEST(text_between_calls) {
  check_calls("One:\n" HERMES("{\"name\": \"f\"}") "\n\nTwo: \n" HERMES("{\"name\": \"g\"}"),
              "One:Two:", "[f {}][g {}]");
  check_calls(KM_CALLS KM_CALL "f:0" KM_ARGS "{}" KM_END "and" KM_CALL "g:1" KM_ARGS
                               "{}" KM_END KM_LAST " so",
              "andso", "[f:0 f {}][g:1 g {}]");
  check_calls(KM_CALLS KM_CALL "f:0" KM_ARGS "{}" KM_END " and " KM_LAST " so " KM_LAST, "andso",
              "[f:0 f {}]");
  check_calls("a " KM_LAST, "a " KM_LAST, "");
  check_calls("<tool_call>{\"name\": \"f\" oh, <tool_call>{\"name\": \"g\"}</tool_call>",
              "<tool_call>{\"name\": \"f\" oh,", "[g {}]");
}

// What JSON does not allow inside strings, and its own spelling of what is no character.
TEST(strings_are_mended) {
  check_calls(HERMES("{\"name\": \"f\", \"arguments\": {\"a\": \"1\n\t2\r\x01\"}}"), "",
              "[f {\"a\": \"1\\n\\t2\\r\\u0001\"}]");
  check_calls(KM_CALL "f" KM_ARGS
                      "{\"a\": \"\\u0000\\ud83d\\ud83d\\ude00\\udc00 \\d\\'\\u12\"}" KM_END,
              "", "[f {\"a\": \"" BAD BAD "\xF0\x9F\x98\x80" BAD " \\\\d'\\\\u12\"}]");
  check_calls(HERMES("{\"name\": \"f\", \"arguments\": {\"a\": \"</tool_call>}\\\"\\\\\"}}"), "",
              "[f {\"a\": \"</tool_call>}\\\"\\\\\"}]");
}

TEST(a_comma_too_many_is_left_out) {
  check_calls(HERMES("{\"name\": \"f\", \"arguments\": {\"a\": [1, 2,], \"b\": {},\n}}"), "",
              "[f {\"a\": [1, 2], \"b\": {}}]");
  char text[300], call[200];
  snprintf(call, sizeof call, "{\"a\": 1,%90s\"b\": 2}", "");
  snprintf(text, sizeof text, HERMES("{\"name\": \"f\", \"arguments\": %s}"), call);
  snprintf(call, sizeof call, "[f {\"a\": 1,%90s\"b\": 2}]", "");
  check_calls(text, "", call);
}

// What was told cannot be taken back: arguments that break off or go wrong stay unfinished.
TEST(calls_that_break_off) {
  static const struct {
    const char *text, *calls;
  } cases[] = {
      {"<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": ", "[f {\"a\": ]..."},
      {"<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"b", "[f {\"a\": \"b]..."},
      {"<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": ", "[f {\"a\": ]..."},
      {DS_CALLS DS_CALL "f" DS_SEP "{\"a\": ", "[f {\"a\": ]..."},
      {"<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1]}</tool_call>", "[f {\"a\": 1]..."},
      {"<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": no \"b\"}}</tool_call>",
       "[f {\"a\": ]..."},
      {"<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1 2}}", "[f {\"a\": 1 ]..."},
      {KM_CALL "f:0" KM_ARGS "{\"a\": (1)}" KM_END, "[f:0 f {\"a\": ]..."},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    check_calls(cases[i].text, "", cases[i].calls);
    check_cut(cases[i].text, "", cases[i].calls);
  }
  check_calls("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": x}}</tool_call> so", "so",
              "[f {\"a\": ]...");
}

// Where a limit cuts the text, the beginning of a call is no text.
TEST(beginnings_are_not_shown) {
  static const char *const texts[] = {"<tool_ca",
                                      "<tool_call>",
                                      "<tool_call>\n{\"name\": \"f",
                                      "<tool_call>\n{\"name\": \"f\", \"arguments\": ",
                                      DS_CALLS,
                                      DS_CALLS DS_CALL "f",
                                      KM_CALLS KM_CALL "functions.f:0" KM_ARGS,
                                      "<minimax:tool_call>\n<invoke name=\"f\">\n",
                                      "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n",
                                      "<｜DSML｜tool_calls>\n<｜DSML｜inv",
                                      NS "<tool_call>\n" NS "<invoke name=\"f\">" NS,
                                      NS "<tool",
                                      "[TOOL_CALLS]f",
                                      "[TOOL_C"};
  for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
    char text[200];
    snprintf(text, sizeof text, "So: %s", texts[i]);
    check_cut(text, "So:", "");
  }
  check_cut("1 <", "1 <", "");
  check_cut("<tool_call>{\"name\": \"f\", \"arguments\": {}", "", "[f {}]");
  check_cut("<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}", "", "[f {\"a\": 1}]");
  check_cut("<tool_call>{\"name\": \"f\", \"arguments\": '{\"a\": 1", "", "[f {\"a\": 1]...");
  // what follows arguments that are whole does not make them less so
  check_calls("<tool_call>{\"name\": \"f\", \"arguments\": '{\"a\": 1}}\n</tool_call>", "",
              "[f {\"a\": 1}]");
}

// A thought that has no end is over where a call begins.
TEST(calls_within_thoughts) {
#define CALL "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>"
  check_parts("<think>so\n" CALL, false, true, "so", "", "[f {}]");
  check_parts("so\n" CALL "\n" CALL, true, true, "so", "", "[f {}][f {}]");
  check_parts("so " CALL " it</think>Hi", true, true, "so " CALL " it", "Hi", "");
  check_parts("so " CALL " it</think>" CALL, true, true, "so " CALL " it", "", "[f {}]");
  check_parts("a <tool_call> b", true, true, "a <tool_call> b", "", "");
  check_parts("so\n" CALL, true, false, "so\n" CALL, "", "");
  check_parts("so\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n</｜DSML｜invoke>\n"
              "</｜DSML｜tool_calls>",
              true, true, "so", "", "[f {}]");
  check_parts("so" KM_CALLS KM_CALL "functions.f:0" KM_ARGS "{}" KM_END KM_LAST, true, true, "so",
              "", "[functions.f:0 f {}]");
  check_parts("so" DS_CALLS DS_CALL "f" DS_SEP "{}" DS_END DS_LAST, true, true,
              "so" DS_CALLS DS_CALL "f" DS_SEP "{}" DS_END DS_LAST, "", "");
#undef CALL
}

// Names that are not offered as they are written, and calls that may not be made.
TEST(names_are_those_offered) {
  static const char *const names[] = {"t",           "functions.t:0", "t:0",  "functions.t",
                                      "functions_t", "t_0",           "t#12", "\\\"t\\\"",
                                      "functions:t", "t:call_1"};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    char text[200];
    snprintf(text, sizeof text, "<tool_call>{\"name\": \"%s\"}</tool_call>", names[i]);
    check_calls(text, "", "[t {}]");
  }
  check_calls("<tool_call>{\"name\": \"t_x\"}</tool_call>", "", "[t_x {}]");
  params.is_closed = true;
  check_calls("<tool_call>{\"name\": \"f\"}</tool_call>",
              "<tool_call>{\"name\": \"f\"}</tool_call>", "");
  check_calls("<tool_call>{\"name\": \"t\"}</tool_call>", "", "[t {}]");
  params.is_closed = false;
}

// What models do to tags: leave one out, write it twice, cut it short or in other letters.
TEST(tags_that_models_garble) {
#define TWO "[t {\"s\": \"a\"}][t {\"s\": \"b\"}]"
  static const char *const cases[][2] = {
      {"<tool_call>t</arg_value>\n<arg_key>s</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
       "[t {\"s\": \"a\"}]"},
      {"<tool_call>t\n<arg_key>s\n<arg_value>a</arg_value>\n</tool_call>\n<tool_call>t\n<arg_key>s"
       "</arg_key>\nb</arg_value>\n</tool_call>",
       TWO},
      {"<tool_call>t\n<arg_key>s</arg_key>\n<arg_value>a</arg_value>\n<tool_call>t\n<arg_key>s"
       "</arg_key>\n<arg_value>b</arg_value>\n</tool_call>",
       TWO},
      {"<tool_call>t\n<arg_key>s</arg_key>\n<arg_value>a\n<tool_call>t\n<arg_key>s</arg_key>\n"
       "<arg_value>b</arg_value>\n</tool_call>",
       TWO},
      {"<tool_call>\n<function=t>\n<parameter=s>\na\n</parameter>\n<tool_call>\n<function=t>\n"
       "<parameter=s>\nb\n</parameter>\n</function>\n</tool_call>",
       TWO},
      {"<tool_call>\n<function=t>\n<parameter=s>\na\n</parameter\n<parameter=i>\n5\n</parameter>\n"
       "</function>\n</tool_call>",
       "[t {\"s\": \"a\", \"i\": 5}]"},
      {"<tool_call>\n<tool_call>\n<function=t>\n<parameter=s>\na\n</parameter>\n</parameter>\n"
       "</function>\n</tool_call>\n</tool_call>",
       "[t {\"s\": \"a\"}]"},
      {"<tool_call>\n<function=t>\n<parameter=s>\n<parameter=zz>\n</parameter>\n</parameter>\n"
       "</function>\n</tool_call>",
       "[t {\"s\": \"<parameter=zz>\\n</parameter>\"}]"},
      {"<tool_call>\n<function=t>\n<parameter=s>\na\n<tool_call>\nno call\n</parameter>\n"
       "</function>\n</tool_call>",
       "[t {\"s\": \"a\\n<tool_call>\\nno call\"}]"},
      {"<minimax:tool_call>\n<invoke name=\"t\">\n<parameter name=\"s\">a</parameter>\n<invoke "
       "name=\"t\">\n<parameter name=\"s\">b</parameter>\n</invoke>\n</minimax:tool_call>",
       TWO},
      {"<|DSML|tool_calls>\n<|DSML|invoke name=\"t\">\n<|DSML|parameter name=\"s\" "
       "string=\"true\">a"
       "</|DSML|parameter>\n</|DSML|invoke>\n</|DSML|tool_calls>",
       "[t {\"s\": \"a\"}]"},
      {"<｜DSML｜invoke name=\"t\">\n<｜DSML｜parameter name=\"i\" string=\"false\">1"
       "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
       "[t {\"i\": 1}]"},
      {KM_CALLS KM_CALL "functions.t0" KM_ARGS "{}" KM_END KM_LAST, "[t {}]"},
      {KM_CALLS KM_CALL "functionst:0" KM_ARGS "{}" KM_END KM_LAST, "[functionst:0 t {}]"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
    check_calls(cases[i][0], "", cases[i][1]);
  check_calls("<tool_call>{\"name\": \"a <b>\", \"arguments\": {}}</tool_call>",
              "<tool_call>{\"name\": \"a <b>\", \"arguments\": {}}</tool_call>", "");
#undef TWO
}

TEST(one_call_is_all) {
  const how h = {.parse_tool_calls = true, .one_call = true};
  check_how("a <tool_call>{\"name\": \"f\"}</tool_call> b <tool_call>{\"name\": \"g\"}</tool_call>",
            h, "", "a", "[f {}]");
}

// A call is told as soon as it can be one, and its arguments as they come.
TEST(arguments_come_in_pieces) {
  static const char text[] = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"bcd\"}}\n";
  td_output_parser parts = {.parse_tool_calls = true};
  size_t n_parts = 0;
  for (size_t len = 0; len < sizeof text; len++) {
    td_output_part part;
    td_err err;
    bool found;
    do {
      assert_int_equal(td_output_parser_next(&parts, text, len, TD_TEXT_GROWS, &part, &found, &err),
                       TD_OK);
      n_parts += found;
    } while (found);
  }
  assert_int_equal(n_parts, strlen("{\"a\": \"bcd\"}") - 1);
  td_output_parser_free(&parts);
}

// A byte at a time: where all of it were looked at again for each, this would not end.
TEST(long_answers_are_looked_at_once) {
  static const char *const beginnings[] = {"",
                                           "<think>",
                                           "a ",
                                           "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"",
                                           "<tool_call>{\"name\": \"f\", \"arguments\": {}}",
                                           "<tool_call>{\"name\": \"f\"",
                                           KM_CALL "f:0" KM_ARGS "{} ",
                                           KM_CALLS,
                                           "<tool_call>t",
                                           "<function=t>",
                                           "<function=t><parameter=s>",
                                           "<function=t><parameter=i>",
                                           "[TOOL_CALLS]f",
                                           "[TOOL_CALLS][{\"name\": \"f\"}"};
  enum { N_BYTES = 1 << 20 };
  char *text = malloc(N_BYTES);
  for (size_t i = 0; i < sizeof beginnings / sizeof beginnings[0]; i++) {
    size_t n = strlen(beginnings[i]);
    memcpy(text, beginnings[i], n);
    memset(text + n, ' ', N_BYTES - n);
    td_output_parser parts = {.parse_tool_calls = true};
    for (size_t len = 0; len < N_BYTES; len++) {
      td_output_part part;
      td_err err;
      bool found;
      do {
        assert_int_equal(
            td_output_parser_next(&parts, text, len, TD_TEXT_GROWS, &part, &found, &err), TD_OK);
      } while (found);
    }
    td_output_parser_free(&parts);
  }
  free(text);
}

TEST(prompts_that_end_in_a_thought) {
  static const struct {
    const char *prompt;
    td_reasoning after;
  } ends[] = {{"x<think>\n", TD_REASONING_BEGUN},
              {"x<think>y", TD_REASONING_MAYBE},
              {"x<think:opensource>", TD_REASONING_BEGUN},
              {"think>", TD_REASONING_MAYBE},
              {"", TD_REASONING_MAYBE},
              {"x<think>\n\n</think>\n\n", TD_REASONING_NONE},
              {"x</mm:think>", TD_REASONING_NONE},
              {"x<|channel>thought\n<channel|>", TD_REASONING_NONE},
              {"</think>x", TD_REASONING_MAYBE}};
  for (size_t i = 0; i < TD_COUNT(ends); i++)
    assert_int_equal(td_output_parser_after(ends[i].prompt, strlen(ends[i].prompt)), ends[i].after);
}
