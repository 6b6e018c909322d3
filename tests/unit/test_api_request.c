// tests/unit/test_api_request.c - requests of the OpenAI protocol: what is taken, what is refused.
// CTest: no-tsan
#include <float.h>
#include <stdlib.h>

#include "api/dialects/dialect.h"
#include "api_request_testing.h"

typedef struct {
  const char *body, *param;
} bad_body;

static void refuse_each(bool chat, const bad_body *list, size_t n) {
  for (size_t i = 0; i < n; i++) {
    td_api_request r;
    td_api_error error;
    td_status st = parse(&r, chat, list[i].body, &error);
    td_api_request_free(&r);
    if (st == TD_OK) fail_msg("accepted: %s", list[i].body);
    if (error.status != 400 || strcmp(error.param, list[i].param) != 0 || !error.message[0]) {
      fail_msg("%s\nstatus %d, param '%s', wanted '%s': %s", list[i].body, error.status,
               error.param, list[i].param, error.message);
    }
  }
}

#define D30  "012345678901234567890123456789"
#define D109 D30 D30 D30 "0123456789012345678" // with another of them all the room for breakers
#define TEN  "\"0\",\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\","
static const bad_body bad_chats[] = {
    {"", ""},
    {"{", ""},
    {"[]", ""},
    {"null", ""},
    {"{" HELLO "} x", ""},
    {"{" HELLO "}{}", ""},
    {"{\"messages\":[{\"role\":\"user\",\"content\":\"\\u0000\\q\"}]}", ""},
    {"{\"messages\":[{\"role\":\"user\",\"content\":\"\xff\"}]}", ""},
    {WITH("\"temperature\":1e999"), ""},
    {WITH("\"temperature\":NaN"), ""},
    {"{}", "messages"},
    {"{\"messages\":null}", "messages"},
    {"{\"messages\":\"hi\"}", "messages"},
    {"{\"messages\":[]}", "messages"},
    {"{\"messages\":{}}", "messages"},
    {"{\"messages\":[123]}", "messages[0]"},
    {"{\"messages\":[{}]}", "messages[0].role"},
    {"{\"messages\":[null]}", "messages[0]"},
    {"{\"messages\":[{\"role\":1,\"content\":\"x\"}]}", "messages[0].role"},
    {"{\"messages\":[{\"role\":\"robot\",\"content\":\"x\"}]}", "messages[0].role"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":1}]}", "messages[0].content"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":{}}]}", "messages[0].content"},
    {"{\"messages\":[{\"role\":\"user\"}]}", "messages[0].content"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":null}]}", "messages[0].content"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":[1]}]}", "messages[0].content[0]"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
     "{\"type\":\"text\"}]}]}",
     "messages[0].content[1].text"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\","
     "\"image_url\":{\"url\":\"x\"}}]}]}",
     "messages[0].content[0].type"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},"
     "{\"role\":\"assistant\",\"tool_calls\":{}}]}",
     "messages[1].tool_calls"},
    {"{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{}]}]}",
     "messages[0].tool_calls[0].function"},
    {"{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[5]}]}", "messages[0].tool_calls[0]"},
    {"{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"id\":5}]}]}",
     "messages[0].tool_calls[0].id"},
    {"{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\"}},"
     "{\"function\":{\"name\":\"f\",\"arguments\":[1]}}]}]}",
     "messages[0].tool_calls[1].function.arguments"},
    {"{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{}}]}]}",
     "messages[0].tool_calls[0].function.name"},
    {"{\"messages\":[{\"role\":\"assistant\",\"reasoning_content\":5}]}",
     "messages[0].reasoning_content"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":\"\",\"name\":5}]}", "messages[0].name"},
    {"{\"messages\":[{\"role\":\"tool\",\"content\":\"\",\"tool_call_id\":5}]}",
     "messages[0].tool_call_id"},
    {WITH("\"model\":5"), "model"},
    {WITH("\"temperature\":-0.1"), "temperature"},
    {WITH("\"temperature\":\"1\""), "temperature"},
    {WITH("\"top_p\":1.5"), "top_p"},
    {WITH("\"top_p\":-1"), "top_p"},
    {WITH("\"top_k\":-2"), "top_k"},
    {WITH("\"top_k\":1.5"), "top_k"},
    {WITH("\"min_p\":2"), "min_p"},
    {WITH("\"presence_penalty\":2.5"), "presence_penalty"},
    {WITH("\"frequency_penalty\":-3"), "frequency_penalty"},
    {WITH("\"repetition_penalty\":0"), "repetition_penalty"},
    {WITH("\"seed\":1.5"), "seed"},
    {WITH("\"seed\":\"1\""), "seed"},
    {WITH("\"seed\":9223372036854775808"), "seed"},
    {WITH("\"seed\":-9223372036854775809"), "seed"},
    {WITH("\"seed\":1e30"), "seed"},
    {WITH("\"n\":0"), "n"},
    {WITH("\"n\":-1"), "n"},
    {WITH("\"n\":129"), "n"},
    {WITH("\"n\":true"), "n"},
    {WITH("\"max_tokens\":0"), "max_tokens"},
    {WITH("\"max_tokens\":-2"), "max_tokens"},
    {WITH("\"max_tokens\":1.5"), "max_tokens"},
    {WITH("\"max_completion_tokens\":0"), "max_completion_tokens"},
    {WITH("\"stop\":5"), "stop"},
    {WITH("\"stop\":\"\""), "stop"},
    {WITH("\"stop\":[\"a\",5]"), "stop[1]"},
    {WITH("\"stop\":[" TEN TEN TEN "\"a\",\"b\",\"c\"]"), "stop"},
    {WITH("\"stop_token_ids\":5"), "stop_token_ids"},
    {WITH("\"stop_token_ids\":[1000]"), "stop_token_ids"},
    {WITH("\"stop_token_ids\":[\"a\"]"), "stop_token_ids"},
    {WITH("\"min_tokens\":-1"), "min_tokens"},
    {WITH("\"min_tokens\":6,\"max_tokens\":5"), "min_tokens"},
    {WITH("\"skip_special_tokens\":1"), "skip_special_tokens"},
    {WITH("\"logprobs\":1"), "logprobs"},
    {WITH("\"top_logprobs\":3"), "top_logprobs"},
    {WITH("\"logprobs\":false,\"top_logprobs\":0"), "top_logprobs"},
    {WITH("\"logprobs\":true,\"top_logprobs\":21"), "top_logprobs"},
    {WITH("\"logprobs\":true,\"top_logprobs\":-1"), "top_logprobs"},
    {WITH("\"typical_p\":1.1"), "typical_p"},
    {WITH("\"top_n_sigma\":-2"), "top_n_sigma"},
    {WITH("\"xtc_probability\":2"), "xtc_probability"},
    {WITH("\"dry_multiplier\":-0.1"), "dry_multiplier"},
    {WITH("\"dry_base\":0.5"), "dry_base"},
    {WITH("\"dry_allowed_length\":0"), "dry_allowed_length"},
    {WITH("\"dry_penalty_last_n\":-2"), "dry_penalty_last_n"},
    {WITH("\"dry_sequence_breakers\":{}"), "dry_sequence_breakers"},
    {WITH("\"dry_sequence_breakers\":\"a, b\""), "dry_sequence_breakers"},
    {WITH("\"dry_sequence_breakers\":\"[\\\"a\\\", 1]\""), "dry_sequence_breakers[1]"},
    {WITH("\"dry_sequence_breakers\":[\"a\",\"\"]"), "dry_sequence_breakers[1]"},
    {WITH("\"dry_sequence_breakers\":[\"" D109 "\",\"" D109 "\",\"a\"]"),
     "dry_sequence_breakers[2]"},
    {WITH("\"mirostat\":2"), "mirostat"},
    {WITH("\"tfs_z\":0.5"), "tfs_z"},
    {WITH("\"no_repeat_ngram_size\":3"), "no_repeat_ngram_size"},
    {WITH("\"logit_bias\":[]"), "logit_bias"},
    {WITH("\"logit_bias\":{\"\":1}"), "logit_bias"},
    {WITH("\"logit_bias\":{\"1000\":1}"), "logit_bias"},
    {WITH("\"logit_bias\":{\"99999999999999999999\":1}"), "logit_bias"},
    {WITH("\"truncation\":\"middle\""), "truncation"},
    {WITH("\"truncation\":1"), "truncation"},
    {WITH("\"logit_bias\":{\"1\":101}"), "logit_bias"},
    {WITH("\"logit_bias\":{\"1\":\"x\"}"), "logit_bias"},
    {WITH("\"stream\":1"), "stream"},
    {WITH("\"stream_options\":{\"include_usage\":true}"), "stream_options"},
    {WITH("\"stream\":false,\"stream_options\":{}"), "stream_options"},
    {WITH("\"stream\":true,\"stream_options\":5"), "stream_options"},
    {WITH("\"stream\":true,\"stream_options\":{\"include_usage\":1}"),
     "stream_options.include_usage"},
    {WITH("\"stream\":true,\"stream_options\":{\"continuous_usage_stats\":1}"),
     "stream_options.continuous_usage_stats"},
    {WITH("\"ignore_eos\":1"), "ignore_eos"},
    {WITH("\"tools\":{}"), "tools"},
    {WITH("\"tools\":[1]"), "tools[0].type"},
    {WITH("\"tools\":[{\"type\":\"function\"}]"), "tools[0].function.name"},
    {WITH("\"tools\":[{\"type\":\"web\",\"function\":{\"name\":\"f\"}}]"), "tools[0].type"},
    {WITH("\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}},"
          "{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":5}}]"),
     "tools[1].function.parameters"},
    {WITH("\"tool_choice\":\"auto\""), "tool_choice"},
    {WITH("\"tool_choice\":\"required\",\"tools\":[]"), "tool_choice"},
    {WITH("\"tool_choice\":\"maybe\""), "tool_choice"},
    {WITH("\"tool_choice\":5"), "tool_choice"},
    {WITH("\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}],"
          "\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"g\"}}"),
     "tool_choice.function.name"},
    {WITH("\"parallel_tool_calls\":\"yes\""), "parallel_tool_calls"},
    {WITH("\"response_format\":\"text\""), "response_format"},
    {WITH("\"response_format\":{}"), "response_format.type"},
    {WITH("\"response_format\":{\"type\":\"yaml\"}"), "response_format.type"},
    {WITH("\"response_format\":{\"type\":\"json_schema\"}"), "response_format.json_schema.schema"},
    {WITH("\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"schema\":5}}"),
     "response_format.json_schema.schema"},
    {WITH("\"chat_template_kwargs\":5"), "chat_template_kwargs"},
    {WITH("\"reasoning_effort\":5"), "reasoning_effort"},
    {WITH("\"add_generation_prompt\":\"no\""), "add_generation_prompt"},
};

TEST(refuses_bad_chats) {
  refuse_each(true, bad_chats, TD_COUNT(bad_chats));
}

TEST(refuses_deep_nesting) {
  char body[400] = "{" HELLO ",\"x\":";
  for (int i = 0; i < 70; i++)
    strcat(body, "[");
  for (int i = 0; i < 70; i++)
    strcat(body, "]");
  strcat(body, "}");
  refuse_each(true, &(bad_body){body, ""}, 1);
}

TEST(refuses_bad_completions) {
  static const bad_body list[] = {
      {"{}", "prompt"},
      {"{\"prompt\":null}", "prompt"},
      {"{\"prompt\":5}", "prompt"},
      {"{\"prompt\":{}}", "prompt"},
      {"{\"prompt\":[]}", "prompt"},
      {"{\"prompt\":[[]]}", "prompt"},
      {"{\"prompt\":[true]}", "prompt"},
      {"{\"prompt\":[1,\"a\"]}", "prompt"},
      {"{\"prompt\":[\"a\",1]}", "prompt"},
      {"{\"prompt\":[1000]}", "prompt"},
      {"{\"prompt\":[-1]}", "prompt"},
      {"{\"prompt\":[1.5]}", "prompt"},
      {"{\"prompt\":[[1],[1000]]}", "prompt"},
      {"{\"prompt\":\"a\",\"echo\":1}", "echo"},
      {"{\"prompt\":[1],\"suffix\":\"b\"}", "suffix"},
      {"{\"prompt\":\"a\",\"suffix\":1}", "suffix"},
      {"{\"prompt\":\"a\",\"suffix\":\"b\",\"echo\":true}", "suffix"},
      {"{\"prompt\":\"a\",\"n\":3,\"best_of\":2}", "best_of"},
      {"{\"prompt\":\"a\",\"stream\":true,\"best_of\":2}", "best_of"},
      {"{\"prompt\":[\"a\",\"b\"],\"best_of\":100}", "prompt"},
      {"{\"prompt\":\"a\",\"logprobs\":21}", "logprobs"},
      {"{\"prompt\":\"a\",\"logprobs\":true}", "logprobs"},
      {"{\"prompt\":[\"1\",\"2\",\"3\",\"4\",\"5\"],\"n\":26}", "prompt"},
  };
  refuse_each(false, list, TD_COUNT(list));
}

TEST(says_what_is_not_supported) {
  td_api_request r;
  td_api_error error;
  parse(&r, true, WITH("\"functions\":[{\"name\":\"f\"}]"), &error);
  td_api_request_free(&r);
  assert_string_equal(error.code, "unsupported_parameter");
  td_buf text = TD_BUF_INIT;
  td_api_error_write(&text, &error);
  assert_string_equal(text.data,
                      "{\"error\":{\"message\":\"functions is not supported; use tools\","
                      "\"type\":\"invalid_request_error\",\"param\":\"functions\","
                      "\"code\":\"unsupported_parameter\"}}");
  td_buf_free(&text);
}

// What others obey is refused by its name rather than ignored, unless it asks for nothing.
TEST(refuses_what_it_does_not_obey) {
  static const bad_body list[] = {
      {WITH("\"functions\":[{\"name\":\"f\"}]"), "functions"},
      {WITH("\"function_call\":{\"name\":\"f\"}"), "function_call"},
      {WITH("\"bad_words\":[\"a\"]"), "bad_words"},
  };
  refuse_each(true, list, TD_COUNT(list));
  for (size_t i = 0; i < TD_COUNT(list); i++) {
    td_api_request r;
    td_api_error error;
    parse(&r, true, list[i].body, &error);
    td_api_request_free(&r);
    assert_string_equal(error.code, "unsupported_parameter");
    assert_non_null(strstr(error.message, "not supported"));
    assert_non_null(strstr(error.message, list[i].param));
  }
  td_api_request r = good(true, WITH("\"continue_final_message\":false,\"grammar\":\"\","
                                     "\"functions\":[],\"prompt_logprobs\":null,"
                                     "\"structured_outputs\":{}," TOOL
                                     ",\"parallel_tool_calls\":false,\"tool_choice\":\"auto\""));
  assert_true(r.one_call && r.has_tools);
  td_api_request_free(&r);
}

// What has no text is noted in its place, but for what the user has just sent.
TEST(takes_every_spelling_of_thinking) {
  static const char *const spellings[][2] = {
      {"\"reasoning_effort\":\"high\"", "\"reasoning_effort\":\"high\",+"},
      {"\"reasoning\":{\"effort\":\"low\"}", "\"reasoning_effort\":\"low\",+"},
      {"\"reasoning\":{\"enabled\":false}", "-"},
      {"\"enable_thinking\":false", "-"},
      {"\"think\":true", "+"},
      {"\"think\":\"none\"", "\"reasoning_effort\":\"none\",-"},
      {"\"thinking\":{\"type\":\"disabled\"}", "-"},
      {"\"thinking\":{\"type\":\"adaptive\"}", "+"},
      {"\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":4096}",
       "\"reasoning_effort\":\"medium\",+,\"thinking_budget\":4096"},
      {"\"thinking_budget\":0", "-,\"thinking_budget\":0"},
      {"\"chat_template_kwargs\":{\"reasoning_effort\":\"low\"}", "\"reasoning_effort\":\"low\",+"},
      {"\"chat_template_kwargs\":{\"thinking\":false}",
       "\"enable_thinking\":false,\"thinking\":false"}};
  for (size_t i = 0; i < TD_COUNT(spellings); i++) {
    td_buf body = TD_BUF_INIT, expected = TD_BUF_INIT;
    td_buf_printf(&body, "{" HELLO ",%s}", spellings[i][0]);
    td_buf_str(&expected, "\"add_generation_prompt\":true,");
    for (const char *c = spellings[i][1]; *c; c++) {
      const char *flag = *c == '+' ? "true" : "false";
      if (*c == '+' || *c == '-') {
        td_buf_printf(&expected, "\"enable_thinking\":%s,\"thinking\":%s", flag, flag);
      } else {
        td_buf_char(&expected, *c);
      }
    }
    td_buf_char(&expected, '}');
    td_api_request r = good(true, body.data);
    if (!strstr(r.vars.data, expected.data)) fail_msg("%s: %s", body.data, r.vars.data);
    td_api_request_free(&r);
    td_buf_free(&body);
    td_buf_free(&expected);
  }
}

// A model that sees is shown what users and tools send, in its place, whichever protocol's it is.
TEST(images_are_kept) {
#define HEX(first) "{\"type\":\"image\",\"image\":\"" first
  static const char body[] =
      "{\"messages\":[{\"role\":\"system\",\"content\":[{\"type\":\"text\",\"text\":\"s\"}]},"
      "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},{\"type\":\"text\","
      "\"text\":\"b\"},{\"type\":\"image_url\",\"image_url\":{\"url\":"
      "\"data:image/png;base64,YQ==\"}},{\"type\":\"input_image\",\"image_url\":"
      "\"data:image/png;base64,YWI=\"},{\"type\":\"text\",\"text\":\"c\"}]},"
      "{\"role\":\"assistant\",\"content\":[{\"type\":\"image\",\"data\":\"YQ==\"}],"
      "\"tool_calls\":[{\"id\":\"1\",\"function\":{\"name\":\"f\",\"arguments\":\"{}\"}}]},"
      "{\"role\":\"tool\",\"content\":[{\"type\":\"image\",\"source\":{\"type\":\"base64\","
      "\"data\":\"YWJj\"}},{\"type\":\"image_url\",\"image_url\":{\"url\":\"https://a/b\"}}]},"
      "{\"role\":\"user\",\"content\":\"d\"}]}";
  td_api_defaults sees = defaults;
  td_api_request r;
  td_api_error error;
  sees.sees = true;
  assert_int_equal(td_api_parse_chat(&r, body, strlen(body), &sees, &error), TD_OK);
  assert_int_equal(r.n_images, 3);
  assert_string_equal(r.images[0].bytes.data, "a");
  assert_string_equal(r.images[2].bytes.data, "abc");
  assert_string_equal(r.images[1].where, "messages[1].content[3]");
  const td_buf *both[] = {&r.vars, &r.plain_vars};
  for (size_t i = 0; i < TD_COUNT(both); i++) {
    const char *vars = both[i]->data;
    assert_non_null(strstr(vars, "[{\"type\":\"text\",\"text\":\"a\\nb\"}," HEX("ca978112ca1b")));
    assert_non_null(strstr(vars, HEX("fb8e20fc2e4c")));
    assert_non_null(strstr(vars, "[" HEX("ba7816bf8f01")));
    assert_non_null(strstr(vars, "{\"type\":\"text\",\"text\":\"c\"}]"));
    assert_non_null(strstr(vars, "\"content\":\"[image omitted")); // the assistant's
    assert_non_null(strstr(vars, "\"text\":\"[image omitted"));    // at an address
    assert_non_null(strstr(vars, "\"content\":\"s\""));
  }
  td_api_request_free(&r);
}

// The same file within other limits is another image.
TEST(limits_of_images_count) {
  static const char *const limits[] = {"", ",\"max_pixels\":9", ",\"min_pixels\":9",
                                       ",\"detail\":\"low\"", ",\"detail\":\"high\""};
  td_digest digests[TD_COUNT(limits)];
  td_api_defaults sees = defaults;
  td_api_error error;
  sees.sees = true;
  for (size_t i = 0; i < TD_COUNT(limits); i++) {
    char body[256];
    td_api_request r;
    snprintf(body, sizeof body,
             "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\","
             "\"image_url\":{\"url\":\"data:image/png;base64,YQ==\"%s}}]}]}",
             limits[i]);
    assert_int_equal(td_api_parse_chat(&r, body, strlen(body), &sees, &error), TD_OK);
    digests[i] = r.images[0].file;
    td_api_request_free(&r);
    for (size_t k = 0; k < i; k++)
      assert_true((memcmp(&digests[k], &digests[i], sizeof *digests) == 0) == (k == 0 && i == 4));
  }
}

TEST(notes_what_is_no_text) {
#define IMAGE "{\"type\":\"image_url\",\"image_url\":{\"url\":\"x\"}}"
  static const char body[] =
      "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"see\"}," IMAGE
      "]},{\"role\":\"assistant\",\"content\":[{\"type\":\"strange\"}]},"
      "{\"role\":\"user\",\"content\":[" IMAGE "]},"
      "{\"role\":\"user\",\"content\":[{\"type\":\"document\",\"source\":{\"type\":\"text\","
      "\"data\":"
      "\"of text\"}}]},{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[{\"id\":\"1\","
      "\"function\":{\"name\":\"f\"}}]},{\"role\":\"tool\",\"content\":[" IMAGE
      ",{\"type\":\"file\",\"file\":{\"filename\":\"a.pdf\"}},{\"type\":\"search_result\","
      "\"content\":"
      "[{\"type\":\"text\",\"text\":\"found\"}]},{\"type\":\"resource\",\"resource\":{\"text\":"
      "\"res\"}}]}"
      "%s]}";
  td_buf all = TD_BUF_INIT;
  td_buf_printf(&all, body, "");
  td_api_request r = good(true, all.data);
  assert_non_null(strstr(
      r.vars.data, "\"see\\n[image omitted: it cannot be shown as text]\"},"
                   "{\"role\":\"assistant\",\"content\":\"[strange omitted: it cannot be shown "
                   "as text]\"},{\"role\":\"user\",\"content\":\"[image omitted: it cannot be "
                   "shown as text]\"},{\"role\":\"user\",\"content\":\"of text\"}"));
  assert_non_null(strstr(r.vars.data, "\"content\":\"[image omitted: it cannot be shown as text]\\n"
                                      "[document a.pdf omitted: it cannot be shown as text]\\n"
                                      "found\\nres\"}"));
  td_api_request_free(&r);
  td_buf_clear(&all);
  td_buf_printf(&all, body,
                ",{\"role\":\"user\",\"content\":[" IMAGE "]},"
                "{\"role\":\"system\",\"content\":\"a\"}");
  td_api_error error;
  assert_int_not_equal(td_api_parse_chat(&r, all.data, all.len, &defaults, &error), TD_OK);
  assert_string_equal(error.param, "messages[6].content[0].type");
  td_api_request_free(&r);
  td_buf_free(&all);
#undef IMAGE
}

TEST(is_as_lenient_as_its_peers) {
  td_api_request r = good(true, "{\"model\":\"\",\"max_tokens\":-1,\"messages\":["
                                "{\"role\":\"assistant\",\"content\":\"a\\u0000b\",\"tool_calls\":["
                                "{\"id\":\"1\",\"function\":{\"name\":\"f\",\"arguments\":"
                                "{\"x\":1.0,\"y\":\"\\udc00\"}}},{\"function\":{\"name\":\"g\"}},"
                                "{\"function\":{\"name\":\"h\",\"arguments\":"
                                "\"{\\\"z\\\":\\\"\\\\u0000\\\"}\"}}]},"
                                "{\"role\":\"tool\",\"content\":null},{\"role\":\"tool\"}]}");
  assert_null(r.model);
  assert_int_equal(r.max_tokens, -1);
  assert_string_equal(
      r.vars.data,
      "{\"messages\":[{\"role\":\"assistant\",\"content\":\"a\xEF\xBF\xBD"
      "b\",\"tool_calls\":["
      "{\"id\":\"1\",\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":"
      "{\"x\":1.0,\"y\":\"\xEF\xBF\xBD\"}}},"
      "{\"type\":\"function\",\"function\":{\"name\":\"g\",\"arguments\":{}}},"
      "{\"type\":\"function\",\"function\":{\"name\":\"h\",\"arguments\":{\"z\":\"\\ufffd\"}}}]},"
      "{\"role\":\"tool\",\"content\":\"\"},{\"role\":\"tool\",\"content\":\"\"}],"
      "\"add_generation_prompt\":true}");
  assert_non_null(strstr(r.plain_vars.data, "\"arguments\":\"{\\\"x\\\":1.0,"));
  td_api_request_free(&r);
  r = good(false, "{\"prompt\":\"a\\ud83d\",\"max_tokens\":-1,\"n\":128}");
  assert_string_equal(r.prompts[0].text, "a\xEF\xBF\xBD");
  assert_int_equal(r.max_tokens, -1);
  assert_int_equal(r.n, 128);
  td_api_request_free(&r);
}

TEST(takes_what_ends_an_answer) {
  td_api_request r = good(true, WITH("\"stop\":[" TEN TEN TEN "\"a\",\"b\"],\"min_tokens\":7,"
                                     "\"stop_token_ids\":[0,999],\"skip_special_tokens\":false"));
  assert_int_equal(r.stops.n, 32);
  assert_int_equal(r.n_stop_ids, 2);
  assert_int_equal(r.stop_ids[1], 999);
  assert_int_equal(r.min_tokens, 7);
  assert_true(r.shows_special);
  td_api_request_free(&r);
}

TEST(takes_defaults) {
  // null is absent, unknown members are let pass.
  td_api_request r = good(true, WITH("\"temperature\":null,\"seed\":null,\"stop\":null,\"n\":null,"
                                     "\"stream\":null,\"stream_options\":null,\"tools\":null,"
                                     "\"tool_choice\":null,\"response_format\":null,"
                                     "\"logit_bias\":null,\"max_tokens\":null,\"model\":null,"
                                     "\"what\":{\"is\":[\"this\"]}"));
  assert_true(r.sampling.temperature == 0.5f && r.sampling.top_p == 0.75f);
  assert_int_equal(r.sampling.top_k, 20);
  assert_true(r.sampling.repetition_penalty == 1);
  assert_int_equal(r.max_tokens, -1);
  assert_int_equal(r.n, 1);
  assert_false(r.has_seed || r.stream || r.logprobs || r.ignore_eos);
  assert_null(r.model);
  td_api_request_free(&r);
  r = good(false, "{\"prompt\":\"\"}");
  assert_int_equal(r.max_tokens, 16);
  td_api_request_free(&r);
}

TEST(takes_parameters) {
  td_api_request r = good(
      true,
      "{\"model\":\"m\",\"temperature\":0,\"temperature\":2,\"top_p\":0,\"top_k\":-1,"
      "\"min_p\":1,\"typical_p\":0.5,\"top_n_sigma\":-1,\"xtc_probability\":0.25,"
      "\"dry_multiplier\":0,\"mirostat\":0,\"tfs_z\":1,\"presence_penalty\":-2,\"frequency_"
      "penalty\":2,\"max_tokens\":5,"
      "\"max_completion_tokens\":7,\"n\":8,\"stop\":[\"a\",\"b\",\"c\",\"d\"],"
      "\"logprobs\":true,\"top_logprobs\":20,\"logit_bias\":{\"0\":-100,\"a b\":2,\"999\":1.5},"
      "\"stream\":true,\"ignore_eos\":true,"
      "\"stream_options\":{\"include_usage\":true,\"continuous_usage_stats\":true},"
      "\"response_format\":{\"type\":\"text\"}," HELLO "}");
  assert_string_equal(r.model, "m");
  assert_true(r.sampling.temperature == 0); // of two, the first
  assert_true(r.sampling.top_p > 0 && r.sampling.top_p < 1e-9f);
  assert_int_equal(r.sampling.top_k, 0);
  assert_true(r.sampling.min_p < 1 && r.sampling.min_p > 0.99f);
  assert_true(r.sampling.typical_p == 0.5f && r.sampling.top_n_sigma == 0);
  assert_true(r.sampling.xtc_probability == 0.25f && r.sampling.xtc_threshold == 0.1f);
  assert_true(r.sampling.presence_penalty == -2 && r.sampling.frequency_penalty == 2);
  assert_int_equal(r.max_tokens, 7);
  assert_int_equal(r.n, 8);
  assert_int_equal(r.stops.n, 4);
  assert_int_equal(r.sampling.n_top_logprobs, 20);
  assert_int_equal(r.n_bias, 2);
  assert_int_equal(r.bias[1].id, 999);
  assert_true(r.bias[1].value == 1.5f);
  assert_int_equal(r.n_text_bias, 1);
  assert_string_equal(r.text_bias[0].text, "a b");
  assert_true(r.stream && r.include_usage && r.include_usage_so_far && r.ignore_eos && r.logprobs);
  td_api_request_free(&r);
}

TEST(takes_dry) {
  static const struct {
    const char *body;
    td_wire_dry dry;
  } list[] = {
      {WITH("\"dry_multiplier\":0.5"), {0.5f, 1.75f, 2, UINT32_MAX, 8, "\n\0:\0\"\0*"}},
      {WITH("\"dry_multiplier\":0,\"dry_base\":2"), {0, 2, 2, 0, 8, "\n\0:\0\"\0*"}},
      {WITH("\"dry_multiplier\":1,\"dry_base\":1,\"dry_allowed_length\":3,"
            "\"dry_penalty_last_n\":0,\"dry_sequence_breakers\":[]"),
       {1, 1, 3, 0, 0, ""}},
      {WITH("\"dry_multiplier\":1,\"dry_penalty_last_n\":64,"
            "\"dry_sequence_breakers\":[\"ab\",\"\\n\"]"),
       {1, 1.75f, 2, 64, 5, "ab\0\n"}},
      {WITH("\"dry_multiplier\":1,\"dry_sequence_breakers\":\"\\\"ab\\\", \\\"\\\\n\\\"\""),
       {1, 1.75f, 2, UINT32_MAX, 5, "ab\0\n"}},
      {WITH("\"dry_multiplier\":1,\"dry_sequence_breakers\":\"[\\\"ab\\\", \\\"\\\\n\\\"]\""),
       {1, 1.75f, 2, UINT32_MAX, 5, "ab\0\n"}},
      {WITH("\"dry_sequence_breakers\":[\"" D109 "\",\"" D109 "\"]"),
       {0, 1.75f, 2, 0, 220, D109 "\0" D109}},
  };
  for (size_t i = 0; i < TD_COUNT(list); i++) {
    td_api_request r = good(true, list[i].body);
    assert_memory_equal(&r.dry, &list[i].dry, sizeof r.dry);
    td_api_request_free(&r);
  }
}

TEST(takes_whole_seeds) {
  static const struct {
    const char *body;
    int64_t seed;
  } list[] = {
      {WITH("\"seed\":9223372036854775807"), INT64_MAX},
      {WITH("\"seed\":-9223372036854775808"), INT64_MIN},
      {WITH("\"seed\" : 9007199254740993"), 9007199254740993},
      {WITH("\"seed\":-1"), -1},
      {WITH("\"seed\":1e3"), 1000},
      {WITH("\"seed\":7.0"), 7},
      {WITH("\"s\\u0065ed\":12"), 12},
      {"{\"x\":{\"seed\":5},\"y\":\"\\\"seed\\\":6\",\"seed\":7," HELLO "}", 7},
      {"{\"seed\":8,\"seed\":9," HELLO "}", 8},
  };
  for (size_t i = 0; i < TD_COUNT(list); i++) {
    td_api_request r = good(true, list[i].body);
    assert_true(r.has_seed);
    if ((int64_t)r.sampling.seed != list[i].seed) fail_msg("%s", list[i].body);
    td_api_request_free(&r);
  }
}

TEST(writes_template_variables) {
  td_api_request r = good(
      true, "{\"messages\":["
            "{\"role\":\"developer\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
            "{\"type\":\"text\",\"text\":\"b\"}]},"
            "{\"role\":\"assistant\",\"content\":null,\"reasoning_content\":\"hm\",\"tool_calls\":["
            "{\"id\":\"c1\",\"type\":\"function\",\"function\":{\"name\":\"f\","
            "\"arguments\":\"{\\\"x\\\": 1.0}\"}}]},"
            "{\"role\":\"tool\",\"tool_call_id\":\"c1\",\"content\":\"42\",\"unknown\":1},"
            "{\"role\":\"user\",\"name\":\"eve\",\"content\":\"\"}],"
            "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{}}}],"
            "\"tool_choice\":\"auto\","
            "\"reasoning_effort\":\"low\",\"chat_template_kwargs\":{\"enable_thinking\":false,"
            "\"messages\":[],\"enable_thinking\":true,\"k\":null,\"x\":[1.0,1e2]}}");
  assert_string_equal(
      r.vars.data,
      "{\"messages\":[{\"role\":\"system\",\"content\":\"a\\nb\"},"
      "{\"role\":\"assistant\",\"content\":null,\"reasoning_content\":\"hm\",\"tool_calls\":["
      "{\"id\":\"c1\",\"type\":\"function\",\"function\":{\"name\":\"f\","
      "\"arguments\":{\"x\": 1.0}}}]},"
      "{\"role\":\"tool\",\"content\":\"42\",\"tool_call_id\":\"c1\"},"
      "{\"role\":\"user\",\"content\":\"\",\"name\":\"eve\"}],"
      "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{}}}],"
      "\"add_generation_prompt\":true,\"reasoning_effort\":\"low\",\"thinking\":false,\"enable_"
      "thinking\":false,"
      "\"k\":null,\"x\":[1.0,1e2]}");
  assert_non_null(strstr(r.plain_vars.data, "\"arguments\":\"{\\\"x\\\": 1.0}\""));
  td_api_request_free(&r);
  r = good(true, WITH("\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}],"
                      "\"tool_choice\":\"none\""));
  assert_null(strstr(r.vars.data, "tools"));
  assert_int_equal(r.plain_vars.len, 0);
  td_api_request_free(&r);
  r = good(true, WITH("\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"schema\":{"
                      "\"type\":\"object\"}}}"));
  assert_non_null(strstr(r.vars.data, "\"response_format\":{\"type\":\"object\"}"));
  td_api_request_free(&r);
  r = good(true, WITH("\"response_format\":{\"type\":\"json_object\"}"));
  assert_null(strstr(r.vars.data, "response_format"));
  td_api_request_free(&r);
  r = good(true, WITH("\"reasoning_effort\":\"none\""));
  assert_non_null(strstr(r.vars.data, "\"none\",\"enable_thinking\":false,\"thinking\":false}"));
  td_api_request_free(&r);
  r = good(true,
           WITH("\"reasoning_effort\":\"none\",\"chat_template_kwargs\":{\"thinking\":true}"));
  assert_non_null(strstr(r.vars.data, "\"none\",\"enable_thinking\":true,\"thinking\":true}"));
  td_api_request_free(&r);
}

TEST(takes_every_kind_of_prompt) {
  td_api_request r = good(false, "{\"prompt\":\"a b\",\"echo\":false,\"suffix\":\"\"}");
  assert_int_equal(r.n_prompts, 1);
  assert_string_equal(r.prompts[0].text, "a b");
  td_api_request_free(&r);
  r = good(false, "{\"prompt\":[\"a\",\"b\"],\"n\":2,\"best_of\":2,\"logprobs\":0}");
  assert_int_equal(r.n_prompts, 2);
  assert_string_equal(r.prompts[1].text, "b");
  assert_true(r.logprobs);
  td_api_request_free(&r);
  r = good(false, "{\"prompt\":[1,2,999]}");
  assert_int_equal(r.n_prompts, 1);
  assert_int_equal(r.prompts[0].n_ids, 3);
  assert_int_equal(r.prompts[0].ids[2], 999);
  td_api_request_free(&r);
  r = good(false, "{\"prompt\":[[1,2],[3]]}");
  assert_int_equal(r.n_prompts, 2);
  assert_int_equal(r.prompts[1].ids[0], 3);
  td_api_request_free(&r);
}

TEST(renames_what_is_wrong) {
  static const struct {
    const char *param, *message, *name, *wanted;
  } cases[] = {
      {"stop", "stop must be a string", "options.stop", "options.stop must be a string"},
      {"a", "b.a, a_b, ba and \"a\" stay; a, a.b and a[1] do not", "c.a",
       "b.a, a_b, ba and \"a\" stay; c.a, c.a.b and c.a[1] do not"},
      {"messages", "shorten the messages", "input", "shorten the input"},
      {"", "no name", "x", "no name"},
  };
  td_api_error error;
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    td_api_bad(&error, cases[i].param, "%s", cases[i].message);
    td_api_error_rename(&error, cases[i].name);
    assert_string_equal(error.param, cases[i].name);
    assert_string_equal(error.message, cases[i].wanted);
  }
  char many[TD_ERR_BYTES];
  for (size_t i = 0; i < sizeof many; i++)
    many[i] = i % 2 ? ' ' : 'a';
  td_api_bad(&error, "a", "%.*s", (int)sizeof many - 1, many);
  td_api_error_rename(&error, "a_long_one");
  assert_int_equal(strlen(error.message), TD_ERR_BYTES - 1);
}

// ---- items of stored responses
// --------------------------------------------------------------------

static uint64_t n_allocated;

static void *count_alloc(size_t n_bytes) {
  n_allocated++;
  return malloc(n_bytes);
}

// A store with a response of one message of n characters; 5000 numbers stand beside it.
static td_response_store *store_one(size_t n) {
  td_response_store *store = td_response_store_open();
  td_buf json = TD_BUF_INIT, none = TD_BUF_INIT;
  td_buf_str(&json, "{\"numbers\":[0");
  for (int i = 1; i < 5000; i++)
    td_buf_str(&json, ",0");
  td_buf_str(&json, "],\"output\":[{\"id\":\"msg_1_0\",\"type\":\"message\",\"role\":\"assistant\","
                    "\"content\":\"");
  for (size_t i = 0; i < n; i++)
    td_buf_char(&json, 'a');
  td_buf_str(&json, "\"}]}");
  td_response_store_put(store, 0, "resp_1", (const td_buf *const[]){&none, &none, &json});
  td_buf_free(&json);
  return store;
}

static td_status refer(td_response_store *store, uint32_t n, td_api_error *error) {
  td_dialect_state state = {.store = store};
  td_buf body = TD_BUF_INIT, out = TD_BUF_INIT;
  td_buf_str(&body, "{\"input\":[{\"role\":\"user\",\"content\":\"a\"}");
  for (uint32_t i = 0; i < n; i++)
    td_buf_str(&body, ",{\"type\":\"item_reference\",\"id\":\"msg_1_0\"}");
  td_buf_str(&body, "]}");
  td_status st = td_dialect_translate(&td_dialect_responses, &state, td_buf_text(&body), body.len,
                                      &out, error);
  td_dialect_state_free(&state);
  td_buf_free(&body);
  td_buf_free(&out);
  return st;
}

// A stored response is parsed once, however often a request refers to it.
TEST(stored_responses_are_parsed_once) {
  uint64_t n[2];
  td_api_error error;
  td_response_store *store = store_one(10);
  cJSON_InitHooks(&(cJSON_Hooks){.malloc_fn = count_alloc, .free_fn = free});
  for (int i = 0; i < 2; i++) {
    const uint64_t before = n_allocated;
    assert_int_equal(refer(store, i ? 101 : 1, &error), TD_OK);
    n[i] = n_allocated - before;
  }
  cJSON_InitHooks(NULL);
  assert_true(n[0] > 5000 && n[1] > n[0]);
  assert_true(n[1] - n[0] < 5000);
  assert_int_equal(refer(store, 1025, &error), TD_EINVAL);
  assert_int_equal(error.status, 404);
  td_response_store_close(store);
}

// Neither what is parsed for references nor what is written for them is without bound.
TEST(references_are_bounded) {
  for (int is_whole = 0; is_whole < 2; is_whole++) {
    td_api_error error;
    td_response_store *store = store_one(is_whole ? 33u << 20 : 1u << 20);
    assert_int_equal(refer(store, is_whole ? 1 : 40, &error), TD_EINVAL);
    assert_int_equal(error.status, 400);
    assert_non_null(strstr(error.message, "32 MiB"));
    if (!is_whole) assert_int_equal(refer(store, 20, &error), TD_OK);
    td_response_store_close(store);
  }
}
