// tests/unit/test_api_answer.c - a response grows from tokens, and is written whole and in chunks.
// CTest: no-tsan
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/response.h"
#include "base/json_parse.h"
#include "base/utf8.h"
#include "unit/testing.h"

// Byte-level tokens: Ċ is a line feed, Ġ a space; ð Ł Į į are the four bytes of U+1F30D.
static const char tokenizer_json[] =
    "{\"version\":\"1.0\",\"added_tokens\":[{\"id\":9,\"content\":\"<eos>\",\"single_word\":false,"
    "\"lstrip\":false,\"rstrip\":false,\"normalized\":false,\"special\":true}],"
    "\"normalizer\":null,\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
    "\"trim_offsets\":true,\"use_regex\":true},\"post_processor\":null,"
    "\"decoder\":{\"type\":\"ByteLevel\",\"add_prefix_space\":true,\"trim_offsets\":true,"
    "\"use_regex\":true},\"model\":{\"type\":\"BPE\",\"dropout\":null,\"unk_token\":null,"
    "\"continuing_subword_prefix\":null,\"end_of_word_suffix\":null,\"fuse_unk\":false,"
    "\"byte_fallback\":false,\"vocab\":{\"a\":0,\"b\":1,\"c\":2,\"\\u0120\":3,\"\\u00f0\":4,"
    "\"\\u0141\":5,\"\\u012e\":6,\"\\u012f\":7,\"ab\":8},\"merges\":[\"a b\"]}}";
enum { A, B, C, SPACE, BYTE0, BYTE1, BYTE2, BYTE3, AB, EOS };
#define GLOBE "\xF0\x9F\x8C\x8D"
#define BAD   "\xEF\xBF\xBD"

static td_tokenizer *tok;

int before_all(void **state) {
  (void)state;
  td_err err;
  td_status st = td_tokenizer_open_json(&tok, "tokenizer.json", tokenizer_json,
                                        strlen(tokenizer_json), NULL, 0, &err);
  if (st != TD_OK) fprintf(stderr, "%s\n", err.msg);
  return st == TD_OK ? 0 : -1;
}

int after_all(void **state) {
  (void)state;
  td_tokenizer_close(tok);
  return 0;
}

static td_stops one_stop(const char *text) {
  td_stops stops = {0};
  if (!text) return stops;
  stops.n = 1;
  stops.strings[0] = (td_stop_string){strdup(text), strlen(text)};
  return stops;
}

typedef struct {
  td_stops stops;
  td_answer answer;
  td_buf shown; // pieces one after the other
  size_t n_tokens_shown;
} growth;

static void take(growth *g) {
  td_answer_piece piece;
  while (td_answer_take(&g->answer, &piece)) {
    const char *text = td_buf_text(&g->answer.text) + piece.begin;
    assert_true(td_utf8_valid(text, piece.end - piece.begin));
    td_buf_add(&g->shown, text, piece.end - piece.begin);
    // The tokens of a piece spell the piece.
    size_t at = piece.begin;
    for (size_t i = piece.first; i < piece.last; i++) {
      const td_answer_token *t = &g->answer.tokens[i];
      assert_int_equal(t->begin, at);
      at = t->end < g->answer.n_sure ? t->end : g->answer.n_sure;
    }
    assert_int_equal(at, piece.end);
    g->n_tokens_shown += piece.last - piece.first;
  }
}

static growth grow(const char *stop, const int *ids, size_t n) {
  growth g = {.stops = one_stop(stop)};
  td_err err;
  td_answer_init(&g.answer, tok, &(td_answer_opts){.stops = &g.stops, .keep_tokens = true});
  g.answer.stops = &g.stops;
  for (size_t i = 0; i < n && !g.answer.stopped; i++) {
    td_wire_token token = {.id = ids[i], .is_eos = ids[i] == EOS, .logprob = -0.5f};
    assert_int_equal(td_answer_add(&g.answer, &token, &err), TD_OK);
    take(&g);
  }
  assert_int_equal(td_answer_finish(&g.answer, false, &err), TD_OK);
  take(&g);
  return g;
}

static void check(const char *stop, const int *ids, size_t n, const char *wanted, bool stopped,
                  size_t n_tokens_shown) {
  growth g = grow(stop, ids, n);
  assert_string_equal(td_buf_text(&g.shown), wanted);
  assert_int_equal(g.answer.stopped, stopped);
  assert_int_equal(g.n_tokens_shown, n_tokens_shown);
  td_answer_free(&g.answer);
  td_stops_free(&g.stops);
  td_buf_free(&g.shown);
}
#define IDS(...) (const int[]){__VA_ARGS__}, sizeof((const int[]){__VA_ARGS__}) / sizeof(int)

TEST(shows_text) {
  check(NULL, IDS(A, SPACE, AB, C), "a abc", false, 4);
  check(NULL, IDS(EOS), "", false, 0);
  check(NULL, IDS(A, EOS), "a", false, 1);
}

TEST(holds_back_split_characters) {
  check(NULL, IDS(A, BYTE0, BYTE1, BYTE2, BYTE3, B), "a" GLOBE "b", false, 6);
  check(NULL, IDS(A, BYTE0, BYTE1), "a" BAD, false, 3);
  check(NULL, IDS(BYTE0, BYTE1, EOS), BAD, false, 2);
}

TEST(stops) {
  check("bc", IDS(A, AB, C, A), "aa", true, 2); // the second token is cut in its middle
  check("a", IDS(A, B), "", true, 0);
  check(GLOBE, IDS(A, BYTE0, BYTE1, BYTE2, BYTE3, B), "a", true, 1);
  check("bb", IDS(A, B, EOS), "ab", false, 2);
  check("abc ", IDS(AB, C), "abc", false, 2);
}

TEST(stops_no_sooner_than_asked) {
  td_stops b = one_stop("b");
  td_answer answer;
  td_err err;
  td_answer_init(&answer, tok, &(td_answer_opts){.stops = &b, .min_tokens = 3});
  for (int i = 0; i < 5; i++)
    td_answer_add(&answer, &(td_wire_token){.id = AB}, &err);
  assert_true(answer.stopped);
  assert_int_equal(answer.n_tokens, 3);
  assert_int_equal(answer.n_sure, strlen("ababa"));
  td_answer_free(&answer);
  td_stops_free(&b);
}

TEST(shows_control_tokens_where_asked) {
  td_stops none = {0};
  for (int shows = 0; shows < 2; shows++) {
    td_answer answer;
    td_err err;
    td_answer_init(&answer, tok, &(td_answer_opts){.stops = &none, .shows_special = shows});
    td_answer_add(&answer, &(td_wire_token){.id = A}, &err);
    td_answer_add(&answer, &(td_wire_token){.id = EOS}, &err);
    assert_string_equal(td_buf_text(&answer.text), shows ? "a<eos>" : "a");
    td_answer_free(&answer);
  }
}

TEST(shows_nothing_of_a_stop_string_early) {
  growth g = {.stops = one_stop("abab")};
  td_err err;
  td_answer_init(&g.answer, tok, &(td_answer_opts){.stops = &g.stops, .keep_tokens = true});
  td_wire_token ab = {.id = AB}, c = {.id = C};
  td_answer_add(&g.answer, &ab, &err);
  take(&g);
  assert_int_equal(g.shown.len, 0);
  td_answer_add(&g.answer, &c, &err);
  take(&g);
  assert_string_equal(td_buf_text(&g.shown), "abc");
  td_answer_free(&g.answer);
  td_stops_free(&g.stops);
  td_buf_free(&g.shown);
}

static cJSON *parse(const td_buf *text) {
  cJSON *root;
  td_err err;
  if (td_json_parse(&root, text->data, text->len, 20, &err) != TD_OK) fail_msg("%s", err.msg);
  return root;
}

// What a streamed message's blocks are, in their order, where its text comes in two pieces: R, T,
// or a call's index, and its text.
static void write_blocks(td_buf *out, const char *text, size_t first, td_text_end end) {
  const size_t lens[] = {first, strlen(text)};
  td_output_parser parts = {.parse_tool_calls = true, .id = 7};
  td_delta delta = {.in_order = true};
  td_err err;
  char block = 0;
  for (int i = 0; i < 2; i++) {
    do {
      assert_int_equal(td_delta_parse(&delta, &parts, text, lens[i], i ? end : TD_TEXT_GROWS, &err),
                       TD_OK);
      const td_buf *texts[] = {&delta.reasoning, &delta.content};
      for (int k = 0; k < 2; k++) {
        if (texts[k]->len && block != "RT"[k]) td_buf_printf(out, "|%c ", block = "RT"[k]);
        td_buf_add(out, td_buf_text(texts[k]), texts[k]->len);
      }
      for (uint32_t c = delta.first_call; c < delta.last_call; c++) {
        if (block != (char)('0' + c)) td_buf_printf(out, "|%c ", block = (char)('0' + c));
        td_buf_str(out, td_buf_text(&parts.calls[c].arguments) + parts.calls[c].n_sent);
      }
      td_delta_clear(&delta, &parts);
    } while (delta.has_held);
  }
  td_delta_free(&delta);
  td_output_parser_free(&parts);
}

TEST(blocks_are_told_in_order) {
  static const char text[] =
      "<think>Hm.</think>Words. <tool_call>\n{\"name\": \"f\", \"arguments\": "
      "{\"q\": 1}}\n</tool_call>More.<tool_call>{\"name\": \"g\", "
      "\"arguments\": {}}</tool_call>\nThe end.";
  for (size_t first = 0; first <= strlen(text); first++) {
    td_buf out = TD_BUF_INIT;
    write_blocks(&out, text, first, TD_TEXT_ENDED);
    assert_string_equal(td_buf_text(&out),
                        "|R Hm.|T Words.|0 {\"q\": 1}|T \nMore.|1 {}|T \nThe end.");
    td_buf_free(&out);
  }
}

TEST(calls_that_the_model_left_are_text) {
  static const char text[] = "So: <tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>"
                             "<tool_call>{\"name\": \"f\", \"arguments\": {\"q\": ";
  static const td_text_end ends[] = {TD_TEXT_ENDED, TD_TEXT_CUT};
  for (int i = 0; i < 2; i++) {
    td_output_parser parts = {.parse_tool_calls = true, .id = 7};
    td_delta delta = {0};
    td_err err;
    assert_int_equal(td_delta_parse(&delta, &parts, text, strlen(text) - 9, TD_TEXT_GROWS, &err),
                     TD_OK);
    assert_int_equal(td_delta_parse(&delta, &parts, text, strlen(text), ends[i], &err), TD_OK);
    assert_int_equal(delta.last_call, i ? 2 : 1);
    assert_int_equal(td_output_parser_is_cut(&parts), i);
    assert_string_equal(td_buf_text(&delta.content),
                        i ? "So:" : "So:\n<tool_call>{\"name\": \"f\", \"arguments\": {\"q\": ");
    td_delta_free(&delta);
    td_output_parser_free(&parts);
  }
}

TEST(writes_logprobs) {
  td_stops none = {0};
  td_answer answer;
  td_err err;
  td_api_head head;
  td_api_head_init(&head, true, "m", tok, 5, (const unsigned char[16]){0xab});
  td_answer_init(&answer, tok, &(td_answer_opts){.stops = &none, .keep_tokens = true});
  td_wire_token token = {.id = BYTE0, .logprob = -INFINITY, .n_top = 2};
  token.top[0] = (td_token_value){.id = A, .value = -0.25f};
  token.top[1] = (td_token_value){.id = BYTE0, .value = NAN};
  td_answer_add(&answer, &token, &err);
  td_answer_finish(&answer, false, &err);
  td_answer_piece piece;
  td_output_parser parts = {0};
  td_delta message = {0};
  assert_true(td_answer_take(&answer, &piece));
  assert_int_equal(td_delta_gather(&message, &parts, &answer, &err), TD_OK);
  td_api_choice choice = {
      .answer = &answer, .message = &message, .parts = &parts, .finish_reason = "length"};
  td_buf text = TD_BUF_INIT;
  td_api_write_response(
      &text, &head, &choice, 1,
      &(td_api_usage){
          .n_prompt = 3, .n_output = 1, .n_cached = 2, .n_accepted = 1, .n_rejected = 4},
      &(td_api_timings){1, 2, 500000, 1, 0, 0});
  assert_string_equal(
      text.data,
      "{\"id\":\"chatcmpl-ab000000000000000000000000000000\",\"object\":\"chat.completion\","
      "\"created\":5,\"model\":\"m\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\","
      "\"content\":\"" BAD "\",\"refusal\":null},\"logprobs\":{\"content\":[{\"token\":\"" BAD "\","
      "\"logprob\":-9999,\"bytes\":[240],\"top_logprobs\":[{\"token\":\"a\",\"logprob\":-0.25,"
      "\"bytes\":[97]},{\"token\":\"bytes:\\\\xf0\",\"logprob\":-9999,\"bytes\":[240]}]}],"
      "\"refusal\":null},\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":3,"
      "\"completion_tokens\":1,\"total_tokens\":4,\"prompt_tokens_details\":{\"cached_tokens\":2},"
      "\"completion_tokens_details\":{\"accepted_prediction_tokens\":1,"
      "\"rejected_prediction_tokens\":4}},"
      "\"timings\":{\"cache_n\":2,\"prompt_n\":1,\"prompt_ms\":0.5,\"prompt_per_token_ms\":0.5,"
      "\"prompt_per_second\":2000,\"predicted_n\":1,\"predicted_ms\":0,"
      "\"predicted_per_token_ms\":0,\"predicted_per_second\":0}}");
  cJSON_Delete(parse(&text));
  td_buf_free(&text);
  td_delta_free(&message);
  td_answer_free(&answer);
}

TEST(writes_chunks) {
  td_stops none = {0};
  td_answer answer;
  td_answer_piece piece;
  td_err err;
  td_api_head head;
  td_buf text = TD_BUF_INIT;
  td_api_head_init(&head, false, "m", tok, 5, (const unsigned char[16]){0});
  td_answer_init(&answer, tok, &(td_answer_opts){.stops = &none, .keep_tokens = true});
  td_answer_add(&answer, &(td_wire_token){.id = A, .logprob = -1}, &err);
  td_answer_take(&answer, &piece);
  td_answer_add(&answer, &(td_wire_token){.id = AB, .logprob = -2}, &err);
  assert_true(td_answer_take(&answer, &piece));
  td_api_write_piece(&text, &head, 1, &answer, &piece, NULL);
  cJSON *root = parse(&text);
  const cJSON *choice = td_json_get(root, "choices")->child;
  assert_string_equal(td_json_get(choice, "text")->valuestring, "ab");
  assert_int_equal(td_json_get(choice, "index")->valueint, 1);
  const cJSON *logprobs = td_json_get(choice, "logprobs");
  assert_int_equal(td_json_get(logprobs, "text_offset")->child->valueint, 1);
  assert_string_equal(td_json_get(logprobs, "tokens")->child->valuestring, "ab");
  assert_null(td_json_get(root, "usage"));
  cJSON_Delete(root);
  td_buf_clear(&text);
  td_api_write_piece(&text, &head, 1, &answer, &piece,
                     &(td_api_usage){.n_prompt = 3, .n_output = 2});
  assert_non_null(strstr(text.data, "\"finish_reason\":null}],\"usage\":{\"prompt_tokens\":3,"
                                    "\"completion_tokens\":2,\"total_tokens\":5,"));
  td_buf_clear(&text);
  head.is_chat = true;
  td_api_write_finish(&text, &head, 0, "stop", NULL,
                      &(td_api_timings){8, 0, 2000000, 5, 4, 8000000}, NULL);
  assert_non_null(strstr(
      text.data,
      "\"delta\":{},\"logprobs\":null,\"finish_reason\":\"stop\"}],\"timings\":{\"cache_n\":0,"
      "\"prompt_n\":8,\"prompt_ms\":2,\"prompt_per_token_ms\":0.25,\"prompt_per_second\":4000,"
      "\"predicted_n\":5,\"predicted_ms\":8,\"predicted_per_token_ms\":2,"
      "\"predicted_per_second\":500}"));
  td_buf_free(&text);
  td_answer_free(&answer);
}
