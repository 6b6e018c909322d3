// tests/unit/test_tokenizer.c - what tests/e2e/test_tokenizer.py does not see: broken files,
// literal spans, the streaming detokenizer, look-ups, threads. Sameness with the library is tested
// there.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <pthread.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/json_write.h"
#include "text/tokenizer/bytelevel.h"
#include "text/tokenizer/tokenizer.h"
#include "unit/testing.h"

// Ids 0 to 255 are the bytes; 256 "ab" 257 "abc"; 258 and on the added tokens.
enum { AB = 256, ABC, START, END, THINK, WIDE };

#define BYTE_LEVEL "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}"

static void put_vocab(td_buf *out) {
  td_json_writer w = TD_JSON_WRITER(out);
  td_jw_begin_object(&w, NULL);
  for (int b = 0; b < 256; b++) {
    td_buf spelled = TD_BUF_INIT;
    char byte = (char)b;
    td_bytelevel_spell(&spelled, &byte, 1);
    td_jw_int(&w, spelled.data, b);
    td_buf_free(&spelled);
  }
  td_jw_int(&w, "ab", AB);
  td_jw_int(&w, "abc", ABC);
  td_jw_end_object(&w);
}

// A byte-level tokenizer; the arguments are JSON.
static td_buf make_json(const char *normalizer, const char *merges, const char *added) {
  td_buf out = TD_BUF_INIT;
  td_buf_printf(&out, "{\"normalizer\":%s,\"pre_tokenizer\":" BYTE_LEVEL ",", normalizer);
  td_buf_printf(&out, "\"decoder\":{\"type\":\"ByteLevel\"},\"added_tokens\":%s,", added);
  td_buf_printf(&out, "\"model\":{\"type\":\"BPE\",\"merges\":%s,\"vocab\":", merges);
  put_vocab(&out);
  td_buf_str(&out, "}}");
  return out;
}

static const char merges[] = "[\"a b\",[\"ab\",\"c\"]]";
static const char added[] =
    "[{\"id\":258,\"content\":\"<start>\",\"special\":true,\"normalized\":false},"
    "{\"id\":259,\"content\":\"<end>\",\"special\":true,\"normalized\":false,\"rstrip\":true},"
    "{\"id\":260,\"content\":\"<think>\",\"special\":false,\"normalized\":true},"
    "{\"id\":261,\"content\":\"<th\",\"special\":true,\"normalized\":true}]";

static td_tokenizer *open_text(const td_buf *json, const char *config) {
  td_tokenizer *tok;
  td_err err = {.msg = ""};
  td_status st = td_tokenizer_open_json(&tok, "test", json->data, json->len, config,
                                        config ? strlen(config) : 0, &err);
  if (st != TD_OK) fail_msg("%s", err.msg);
  return tok;
}

static td_tokenizer *open_test(const char *normalizer) {
  td_buf json = make_json(normalizer, merges, added);
  td_tokenizer *tok = open_text(&json, NULL);
  td_buf_free(&json);
  return tok;
}

// Checks ids against a text of decimal numbers.
static void assert_ids(const td_token_ids *ids, const char *want) {
  td_buf got = TD_BUF_INIT;
  for (size_t i = 0; i < ids->n; i++)
    td_buf_printf(&got, "%s%d", i ? " " : "", ids->ids[i]);
  assert_string_equal(td_buf_text(&got), want);
  td_buf_free(&got);
}

static void assert_encodes(const td_tokenizer *tok, const char *text, const td_spans *literal,
                           unsigned flags, const char *want) {
  td_token_ids ids = {0};
  td_err err = {.msg = ""};
  td_status st = td_tokenizer_encode_spans(tok, text, strlen(text), literal, flags, &ids, &err);
  if (st != TD_OK) fail_msg("%s", err.msg);
  assert_ids(&ids, want);
  td_token_ids_free(&ids);
}

TEST(control_tokens_only_when_asked) {
  td_tokenizer *tok = open_test("null");
  assert_encodes(tok, "", NULL, TD_TOK_PARSE_SPECIAL, "");
  assert_encodes(tok, "abcab", NULL, 0, "257 256");
  assert_encodes(tok, "<start>abc", NULL, TD_TOK_PARSE_SPECIAL, "258 257");
  assert_encodes(tok, "<start>", NULL, 0, "60 115 116 97 114 116 62");
  assert_encodes(tok, "<end> \n a", NULL, TD_TOK_PARSE_SPECIAL, "259 97");
  assert_encodes(tok, "<think><thx", NULL, TD_TOK_PARSE_SPECIAL, "260 261 120");
  td_tokenizer_close(tok);
}

TEST(literal_spans_hold_no_token) {
  td_tokenizer *tok = open_test("null");
  td_span spans[2] = {{7, 14}};
  td_spans literal = {.spans = spans, .n = 1, .cap = 2};
  unsigned parse = TD_TOK_PARSE_SPECIAL;
  assert_encodes(tok, "<start><start><start>", &literal, parse, "258 60 115 116 97 114 116 62 258");
  // One byte typed is enough, at either end and in the middle.
  for (size_t at = 0; at < 7; at++) {
    spans[0] = (td_span){at, at + 1};
    assert_encodes(tok, "<start>", &literal, parse, "60 115 116 97 114 116 62");
  }
  // A shorter token that ends where the user's text begins is the template's own.
  spans[0] = (td_span){3, 7};
  assert_encodes(tok, "<think>", &literal, parse, "261 105 110 107 62");
  spans[0] = (td_span){0, 7};
  spans[1] = (td_span){14, 21};
  literal.n = 2;
  assert_encodes(tok, "<start><start><start>", &literal, parse,
                 "60 115 116 97 114 116 62 258 60 115 116 97 114 116 62");
  // Merges do not care where text comes from.
  spans[0] = (td_span){1, 2};
  literal.n = 1;
  assert_encodes(tok, "abc", &literal, parse, "257");
  td_tokenizer_close(tok);
}

TEST(spans_out_of_order_are_refused) {
  td_tokenizer *tok = open_test("null");
  td_span bad[][2] = {{{2, 3}, {1, 2}}, {{0, 2}, {1, 3}}, {{0, 1}, {2, 2}}, {{0, 1}, {2, 9}}};
  for (size_t i = 0; i < TD_COUNT(bad); i++) {
    td_spans literal = {.spans = bad[i], .n = 2, .cap = 2};
    td_token_ids ids = {0};
    td_err err;
    assert_int_equal(td_tokenizer_encode_spans(tok, "abc", 3, &literal, 0, &ids, &err), TD_EINVAL);
    assert_int_equal(ids.n, 0);
  }
  td_tokenizer_close(tok);
}

// Spans stay with their characters when normalization moves the text around them.
TEST(literal_spans_survive_normalization) {
  td_tokenizer *tok = open_test("{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"},"
                                "{\"type\":\"Replace\","
                                "\"pattern\":{\"Regex\":\"x+\"},\"content\":\"<\"},{\"type\":"
                                "\"Replace\",\"pattern\":{\"String\":\"yy\"},\"content\":\"<\"}]}");
  // e + combining acute, then <think>: once the template's, once typed.
  const char *text = "e\xCC\x81<think>e\xCC\x81<think>";
  td_span spans[1] = {{13, 20}};
  td_spans literal = {.spans = spans, .n = 1, .cap = 1};
  assert_encodes(tok, text, &literal, TD_TOK_PARSE_SPECIAL,
                 "195 169 260 195 169 60 116 104 105 110 107 62");
  // A "<" that a replacement makes of typed characters is as typed as they were.
  spans[0] = (td_span){1, 3};
  assert_encodes(tok, "axxthink>", &literal, TD_TOK_PARSE_SPECIAL, "97 60 116 104 105 110 107 62");
  assert_encodes(tok, "ayythink>", &literal, TD_TOK_PARSE_SPECIAL, "97 60 116 104 105 110 107 62");
  spans[0] = (td_span){0, 1};
  assert_encodes(tok, "axxthink>", &literal, TD_TOK_PARSE_SPECIAL, "97 260");
  td_tokenizer_close(tok);
}

TEST(spans_survive_repair_of_utf8) {
  td_tokenizer *tok = open_test("null");
  const char *text = "\xFF<start>\xFF<start>";
  td_span spans[1] = {{9, 16}};
  td_spans literal = {.spans = spans, .n = 1, .cap = 1};
  assert_encodes(tok, text, &literal, TD_TOK_PARSE_SPECIAL,
                 "239 191 189 258 239 191 189 60 115 116 97 114 116 62");
  td_tokenizer_close(tok);
}

TEST(looks_tokens_up) {
  td_buf json = make_json("null", merges, added);
  td_tokenizer *tok = open_text(
      &json,
      "{\"bos_token\":{\"content\":\"<start>\"},\"eos_token\":\"<end>\",\"add_bos_token\":true}");
  size_t len;
  assert_int_equal(td_tokenizer_size(tok), 262);
  assert_string_equal(td_tokenizer_bytes(tok, ABC, &len), "abc");
  assert_int_equal(len, 3);
  assert_int_equal((uint8_t)td_tokenizer_bytes(tok, 0xE2, &len)[0], 0xE2);
  assert_int_equal(len, 1);
  assert_string_equal(td_tokenizer_bytes(tok, START, &len), "<start>");
  td_tokenizer_bytes(tok, 0, &len);
  assert_int_equal(len, 1); // the byte 0
  for (int i = 0; i < 4; i++) {
    static const int32_t outside[] = {-1, 262, INT32_MIN, INT32_MAX};
    assert_string_equal(td_tokenizer_bytes(tok, outside[i], &len), "");
    assert_int_equal(len, 0);
    assert_false(td_tokenizer_is_special(tok, outside[i]));
  }
  assert_true(td_tokenizer_is_special(tok, START));
  assert_false(td_tokenizer_is_special(tok, THINK));
  assert_false(td_tokenizer_is_special(tok, AB));
  assert_int_equal(td_tokenizer_find(tok, "<end>", 5), END);
  assert_int_equal(td_tokenizer_find(tok, "<end", 4), -1);
  assert_int_equal(td_tokenizer_bos(tok), START);
  assert_int_equal(td_tokenizer_eos(tok), END);
  assert_true(td_tokenizer_wants_bos(tok));
  td_tokenizer_close(tok);
  tok = open_text(&json, NULL);
  assert_int_equal(td_tokenizer_bos(tok), -1);
  assert_false(td_tokenizer_wants_bos(tok));
  td_tokenizer_close(tok);
  td_tokenizer_close(NULL);
  td_buf_free(&json);
}

static void feed(td_detok *detok, int32_t id, const char *want) {
  td_buf out = TD_BUF_INIT;
  td_err err;
  assert_int_equal(td_detok_feed(detok, id, &out, &err), TD_OK);
  assert_string_equal(td_buf_text(&out), want);
  td_buf_free(&out);
}

static void flush(td_detok *detok, const char *want) {
  td_buf out = TD_BUF_INIT;
  td_err err;
  assert_int_equal(td_detok_flush(detok, &out, &err), TD_OK);
  assert_string_equal(td_buf_text(&out), want);
  td_buf_free(&out);
}

TEST(characters_are_held_until_whole) {
  td_tokenizer *tok = open_test("null");
  td_detok detok;
  td_detok_init(&detok, tok, true);
  feed(&detok, 0xF0, "");
  feed(&detok, 0x9F, "");
  feed(&detok, 0x98, "");
  feed(&detok, START, ""); // a control token in between is left out
  feed(&detok, 0x80, "\xF0\x9F\x98\x80");
  feed(&detok, 0xE2, "");
  feed(&detok, 'x', "\xEF\xBF\xBDx"); // cut off by what follows
  feed(&detok, 0xFF, "\xEF\xBF\xBD"); // never begins a character
  feed(&detok, THINK, "<think>");
  feed(&detok, 9999, "");
  feed(&detok, 0xF0, "");
  feed(&detok, 0x9F, "");
  flush(&detok, "\xEF\xBF\xBD");
  feed(&detok, ABC, "abc");
  flush(&detok, "");
  td_detok_free(&detok);
  td_tokenizer_close(tok);
}

static const char sentencepiece[] =
    "{\"normalizer\":null,\"pre_tokenizer\":null,\"added_tokens\":[],"
    "\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Replace\",\"pattern\":{"
    "\"String\":"
    "\"\xE2\x96\x81\"},\"content\":\" "
    "\"},{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"},{\"type\":"
    "\"Strip\",\"content\":\" \",\"start\":1,\"stop\":0}]},"
    "\"model\":{\"byte_fallback\":true,\"vocab\":{\"\xE2\x96\x81\":0,\"\xE2\x96\x81"
    "a\":1,\"<0xC3>\":2,\"<0xA9>\":3,\"b\":4},\"merges\":[]}}";

// Byte tokens in a row are a text only if all of them together are UTF-8: so decodes the library.
TEST(byte_tokens_wait_for_their_run) {
  td_tokenizer *tok;
  td_err err;
  assert_int_equal(
      td_tokenizer_open_json(&tok, "test", sentencepiece, sizeof sentencepiece - 1, NULL, 0, &err),
      TD_OK);
  td_detok detok;
  td_detok_init(&detok, tok, false);
  feed(&detok, 1, "a"); // the first space is cut
  feed(&detok, 0, " ");
  feed(&detok, 2, "");
  feed(&detok, 3, "");
  feed(&detok, 4,
       "\xC3\xA9"
       "b");
  feed(&detok, 2, "");
  feed(&detok, 3, "");
  feed(&detok, 3, "");
  feed(&detok, 1, "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD a");
  feed(&detok, 2, "");
  flush(&detok, "\xEF\xBF\xBD");
  feed(&detok, 0, ""); // a new text: cut again
  td_detok_free(&detok);
  size_t len;
  assert_int_equal((uint8_t)td_tokenizer_bytes(tok, 2, &len)[0], 0xC3);
  assert_string_equal(td_tokenizer_bytes(tok, 1, &len), " a");
  assert_encodes(tok,
                 "\xC3\xA9"
                 "b",
                 NULL, 0, "2 3 4");
  td_tokenizer_close(tok);
}

// A control token in the model's own vocabulary that merges or a whole word could make.
TEST(text_never_becomes_a_control_token) {
  const char *added_ab = "[{\"id\":256,\"content\":\"ab\",\"special\":true},"
                         "{\"id\":97,\"content\":\"a\",\"special\":true}]";
  td_buf json = make_json("null", "[[\"a\",\"b\"]]", added_ab);
  td_tokenizer *tok = open_text(&json, NULL);
  td_token_ids ids = {0};
  assert_int_equal(td_tokenizer_encode(tok, "ab", 2, 0, &ids, NULL), TD_OK);
  assert_ids(&ids, "98");
  td_token_ids_free(&ids);
  assert_encodes(tok, "ab", NULL, TD_TOK_PARSE_SPECIAL, "256");
  td_tokenizer_close(tok);
  td_buf_free(&json);
}

// ---- broken files

static void refuse(const char *json, td_status code, const char *part) {
  td_tokenizer *tok;
  td_err err = {.msg = ""};
  td_status st = td_tokenizer_open_json(&tok, "x/tokenizer.json", json, strlen(json), NULL, 0,
                                        &err);
  if (st != code) fail_msg("%s: %d (%s)", json, (int)st, err.msg);
  assert_null(tok);
  bool named = strncmp(err.msg, "x/tokenizer.json: ", 18) == 0 && strstr(err.msg, part);
  if (!named) fail_msg("%s: %s, not %s", json, err.msg, part);
}

#define MODEL "\"model\":{\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[]}"
#define VOCAB "\"vocab\":{\"a\":0,\"b\":1,\"ab\":2}"
#define E     TD_EFORMAT
#define U     TD_EUNSUPPORTED
#define RE(p)                                                                                      \
  "{\"pre_tokenizer\":{\"type\":\"Split\",\"behavior\":\"Isolated\",\"pattern\":" p "}," MODEL "}"
#define ADD(t) "{\"added_tokens\":[" t "]," MODEL "}"

TEST(broken_models_are_refused) {
  static const struct {
    const char *json;
    td_status code;
    const char *part;
  } cases[] = {
      {"", E, "byte 0"},
      {"[]", E, "model must be an object"},
      {"{\"model\":3}", E, "model must be an object"},
      {"{\"model\":{\"type\":\"Unigram\"}}", U, "model.type \"Unigram\""},
      {"{\"model\":{\"type\":7}}", TD_EINVAL, "model: type must be a string"},
      {"{\"model\":{\"merges\":[]}}", E, "model.vocab must be an object"},
      {"{\"model\":{\"vocab\":{\"a\":\"0\"},\"merges\":[]}}", E, "model.vocab: \"a\""},
      {"{\"model\":{\"vocab\":{\"a\":-1},\"merges\":[]}}", E, "model.vocab: \"a\""},
      {"{\"model\":{\"vocab\":{\"a\":1.5},\"merges\":[]}}", E, "model.vocab: \"a\""},
      {"{\"model\":{\"vocab\":{\"a\":99999999999},\"merges\":[]}}", E, "model.vocab: \"a\""},
      {"{\"model\":{\"vocab\":{\"a\":0,\"b\":0},\"merges\":[]}}", E, "id 0 stands for both"},
      {"{\"model\":{\"vocab\":{\"a\":0,\"a\":1},\"merges\":[]}}", E, "\"a\" is listed twice"},
      {"{\"model\":{" VOCAB "}}", E, "model.merges must be an array"},
      {"{\"model\":{" VOCAB ",\"merges\":{}}}", E, "model.merges must be an array"},
      {"{\"model\":{" VOCAB ",\"merges\":[\"ab\"]}}", E, "model.merges[0]: must be"},
      {"{\"model\":{" VOCAB ",\"merges\":[\"a b\",\"a b c\"]}}", E, "model.merges[1]: must be"},
      {"{\"model\":{" VOCAB ",\"merges\":[[\"a\"]]}}", E, "model.merges[0]: must be"},
      {"{\"model\":{" VOCAB ",\"merges\":[[\"a\",1]]}}", E, "model.merges[0]: must be"},
      {"{\"model\":{" VOCAB ",\"merges\":[\"a x\"]}}", E, "model.merges[0]: \"x\" is not in"},
      {"{\"model\":{" VOCAB ",\"merges\":[\"b a\"]}}", E, "model.merges[0]: \"ba\" is not in"},
      {"{\"model\":{" VOCAB ",\"scores\":3}}", E, "model.scores must be"},
      {"{\"model\":{" VOCAB ",\"scores\":[0,1]}}", E, "model.scores must be"},
      {"{\"model\":{" VOCAB ",\"scores\":[0,1,null]}}", E, "model.scores must be"},
      {"{\"model\":{" VOCAB ",\"merges\":[],\"unk_token\":\"?\"}}", E, "model.unk_token: \"?\""},
      {"{\"model\":{" VOCAB ",\"merges\":[],\"dropout\":0.1}}", U, "model.dropout"},
      {"{\"model\":{" VOCAB ",\"merges\":[],\"byte_fallback\":1}}", TD_EINVAL, "byte_fallback"},
      {"{\"model\":{" VOCAB ",\"continuing_subword_prefix\":\"####\",\"merges\":[\"a b\"]}}", E,
       "continuing_subword_prefix"},
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++)
    refuse(cases[i].json, cases[i].code, cases[i].part);
}

TEST(broken_steps_are_refused) {
  static const struct {
    const char *json;
    td_status code;
    const char *part;
  } cases[] = {
      {"{\"normalizer\":{\"type\":\"Lowercase\"}," MODEL "}", U, "normalizer: Lowercase"},
      {"{\"normalizer\":{}," MODEL "}", E, "normalizer: type is missing"},
      {"{\"normalizer\":[]," MODEL "}", E, "normalizer: type is missing"},
      {"{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"},{\"type\":\"X\"}"
       "]}," MODEL "}",
       U, "normalizer: normalizers[1]: X"},
      {"{\"normalizer\":{\"type\":\"Prepend\"}," MODEL "}", E, "prepend is missing"},
      {"{\"pre_tokenizer\":{\"type\":\"Bert\"}," MODEL "}", U, "pre_tokenizer: Bert"},
      {"{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[" BYTE_LEVEL "," BYTE_LEVEL
       "]}," MODEL "}",
       U, "pretokenizers[1]: ByteLevel: a step after ByteLevel"},
      {"{\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"ab\"}," MODEL "}", E,
       "replacement must be one character"},
      {RE("{\"Regex\":\"a(b\"}"), U, "pre_tokenizer: Split: pattern: at byte 3"},
      {RE("{\"Regex\":\"a)\"}"), U, "at byte 1"},
      {RE("{\"Regex\":\"[a\"}"), U, "']' was expected"},
      {RE("{\"Regex\":\"(a)\\\\1\"}"), U, "an escape"},
      {RE("{\"Regex\":\"*\"}"), U, "nothing to repeat"},
      {RE("{\"Regex\":\"\\\\p{Nope}\"}"), U, "pattern"},
      {RE("{\"Regex\":\"\\\\p{Lu\"}"), U, "'}' was expected"},
      {RE("{\"Regex\":\"(?<=a*)b\"}"), U, "lookbehind"},
      {RE("{\"Regex\":\"a{2,1}\"}"), U, "out of bounds"},
      {RE("{\"Regex\":\"a{99999}\"}"), U, "out of bounds"},
      {RE("{\"Regex\":\"\\\\x{110000}\"}"), U, "not a code point"},
      {RE("{}"), E, "pattern"},
      {RE("{\"Regex\":7}"), TD_EINVAL, "pattern: Regex must be a string"},
      {ADD("7"), E, "added_tokens[0]: must be an object"},
      {ADD("{\"id\":3}"), E, "added_tokens[0]: content is missing"},
      {ADD("{\"content\":\"x\"}"), E, "added_tokens[0]: \"x\""},
      {ADD("{\"id\":1e9,\"content\":\"x\"}"), E, "added_tokens[0]: \"x\""},
      {ADD("{\"id\":1,\"content\":\"x\"}"), E, "added_tokens[0]: id 1 stands for both"},
      {ADD("{\"id\":3,\"content\":\"a\"}"), E, "added_tokens[0]: \"a\" has two ids, 0 and 3"},
      {"{\"added_tokens\":{}," MODEL "}", E, "added_tokens must be an array"},
      {"{\"decoder\":{\"type\":\"WordPiece\"}," MODEL "}", U, "decoder: WordPiece"},
      {"{\"decoder\":{\"type\":\"Strip\",\"content\":\"\"}," MODEL "}", E, "content is empty"},
      {"{\"post_processor\":{\"type\":\"X\"}," MODEL "}", U, "post_processor: X"},
      {"{\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[]}," MODEL "}", U,
       "leaves the text out"},
      {"{\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":"
       "\"s\"}}]}," MODEL "}",
       E, "no ids for \"s\""},
      {"{\"post_processor\":{\"type\":\"BertProcessing\",\"cls\":[\"a\",9],\"sep\":[\"a\",0]}"
       "," MODEL "}",
       E, "no token 9"},
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++)
    refuse(cases[i].json, cases[i].code, cases[i].part);
}

TEST(broken_folders_are_refused) {
  char dir[] = "/tmp/td_tokenizer_XXXXXX";
  assert_non_null(mkdtemp(dir));
  td_buf path = TD_BUF_INIT, config = TD_BUF_INIT;
  td_buf_printf(&path, "%s/tokenizer.json", dir);
  td_buf_printf(&config, "%s/tokenizer_config.json", dir);
  td_tokenizer *tok;
  td_err err;
  assert_int_equal(td_tokenizer_open(&tok, dir, &err), TD_ENOENT);
  assert_non_null(strstr(err.msg, path.data));
  td_buf json = make_json("null", merges, added);
  assert_int_equal(td_file_write(path.data, json.data, json.len, &err), TD_OK);
  assert_int_equal(td_tokenizer_open(&tok, dir, &err), TD_OK);
  td_tokenizer_close(tok);
  assert_int_equal(td_file_write(config.data, "{", 1, &err), TD_OK);
  assert_int_equal(td_tokenizer_open(&tok, dir, &err), TD_EFORMAT);
  assert_non_null(strstr(err.msg, config.data));
  unlink(path.data);
  unlink(config.data);
  rmdir(dir);
  td_buf_free(&path);
  td_buf_free(&config);
  td_buf_free(&json);
}

// Replacements that double a text with each step end in an error, not in all of memory.
TEST(endless_growth_is_refused) {
  td_buf steps = TD_BUF_INIT, json = TD_BUF_INIT;
  for (int i = 0; i < 60; i++) {
    td_buf_printf(&steps,
                  "%s{\"type\":\"Replace\",\"pattern\":{\"String\":\"a\"},"
                  "\"content\":\"aa\"}",
                  i ? "," : "");
  }
  td_buf_printf(&json, "{\"decoder\":{\"type\":\"Sequence\",\"decoders\":[%s]}," MODEL "}",
                td_buf_text(&steps));
  refuse(td_buf_text(&json), TD_ELIMIT, "decoder: its steps make more than 65536 bytes");

  td_buf_clear(&json);
  td_buf_printf(&json, "{\"type\":\"Sequence\",\"normalizers\":[%s]}", td_buf_text(&steps));
  td_tokenizer *tok = open_test(td_buf_text(&json));
  td_token_ids ids = {0};
  td_err err;
  assert_int_equal(td_tokenizer_encode(tok, "xya", 3, 0, &ids, &err), TD_ELIMIT);
  assert_non_null(strstr(err.msg, "normalizer: its steps make a text"));
  assert_encodes(tok, "xyz", NULL, 0, "120 121 122");
  td_tokenizer_close(tok);
  td_token_ids_free(&ids);
  td_buf_free(&steps);
  td_buf_free(&json);
}

// A pattern that backtracks without end is an error, not a hang.
TEST(runaway_patterns_are_an_error) {
  const char *json = RE("{\"Regex\":\"(?:a|a|aa)+(?!a|\\\\z)\"}");
  td_tokenizer *tok;
  td_err err = {.msg = ""};
  assert_int_equal(td_tokenizer_open_json(&tok, "x", json, strlen(json), NULL, 0, &err), TD_OK);
  char text[200];
  memset(text, 'a', sizeof text);
  td_token_ids ids = {0};
  assert_int_equal(td_tokenizer_encode(tok, text, sizeof text, 0, &ids, &err), TD_ELIMIT);
  assert_non_null(strstr(err.msg, "match limit"));
  assert_int_equal(ids.n, 0);
  td_token_ids_free(&ids);
  td_tokenizer_close(tok);
}

static void *encode_often(void *owner) {
  const td_tokenizer *tok = owner;
  for (int i = 0; i < 2000; i++) {
    char text[64];
    int len = snprintf(text, sizeof text, "<start>abc%dab<end>", i % 100);
    td_token_ids ids = {0};
    if (td_tokenizer_encode(tok, text, (size_t)len, TD_TOK_PARSE_SPECIAL, &ids, NULL) != TD_OK ||
        ids.ids[0] != START || ids.ids[1] != ABC || ids.ids[ids.n - 1] != END) {
      return "wrong";
    }
    td_token_ids_free(&ids);
  }
  return NULL;
}

TEST(threads_share_a_tokenizer) {
  td_tokenizer *tok = open_test("null");
  pthread_t threads[4];
  for (size_t i = 0; i < TD_COUNT(threads); i++)
    assert_int_equal(pthread_create(&threads[i], NULL, encode_often, tok), 0);
  for (size_t i = 0; i < TD_COUNT(threads); i++) {
    void *wrong;
    pthread_join(threads[i], &wrong);
    assert_null(wrong);
  }
  td_tokenizer_close(tok);
}

// With a limit, ids beyond it are counted, not kept: words as well as added tokens, and a word of
// more than a part, however its tokens lie.
TEST(what_is_too_much_is_counted) {
  enum { N = 1 << 20 };
  static const char *const texts[] = {"abc", "ab", "xab", "abcabxc", "<start>abc ", "a"};
  td_tokenizer *tok = open_test("null");
  td_err err;
  char *text = malloc(N);
  for (size_t k = 0; k < TD_COUNT(texts); k++) {
    for (size_t i = 0, n = strlen(texts[k]); i < N; i++)
      text[i] = texts[k][i % n];
    td_token_ids all = {0}, cut = {.most = 1000};
    assert_int_equal(td_tokenizer_encode(tok, text, N, TD_TOK_PARSE_SPECIAL, &all, &err), TD_OK);
    assert_int_equal(td_tokenizer_encode(tok, text, N, TD_TOK_PARSE_SPECIAL, &cut, &err), TD_OK);
    assert_int_equal(cut.n + cut.n_cut, all.n);
    assert_true(cut.cap <= 4096);
    const size_t n_kept = cut.n < cut.most ? cut.n : cut.most;
    if (n_kept) assert_memory_equal(cut.ids, all.ids, n_kept * sizeof *all.ids);
    td_token_ids_free(&all);
    td_token_ids_free(&cut);
  }
  free(text);
  td_tokenizer_close(tok);
}

TEST(a_canceled_encoding_ends) {
  td_tokenizer *tok = open_test("null");
  td_err err;
  const atomic_bool is_canceled = true;
  td_token_ids ids = {.is_canceled = &is_canceled};
  const td_status st = td_tokenizer_encode(tok, "<start>abc", 10, TD_TOK_PARSE_SPECIAL, &ids, &err);
  assert_int_equal(st, TD_ECANCELED);
  assert_int_equal(ids.n, 0);
  td_token_ids_free(&ids);
  td_tokenizer_close(tok);
}
