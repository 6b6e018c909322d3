// Grammars: GBNF, regular expressions, masks over a vocabulary.
// CTest: no-tsan
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/json_write.h"
#include "text/grammar/grammar.h"
#include "text/grammar/json_schema.h"
#include "text/grammar/matcher.h"
#include "text/grammar/regex.h"
#include "text/tokenizer/bytelevel.h"

static int generates(const char *gbnf, const char *text) {
  td_grammar *g;
  td_err err;
  if (td_grammar_open(&g, gbnf, strlen(gbnf), &err) != TD_OK) {
    fail_msg("%s: %s", gbnf, err.msg);
    return 0;
  }
  int matches = td_grammar_matches(g, text, strlen(text));
  td_grammar_close(g);
  return matches;
}

typedef struct {
  const char *grammar, *yes[6], *no[6];
} language;

static void check_languages(const language *cases, size_t n,
                            int (*matches)(const char *, const char *)) {
  for (size_t i = 0; i < n; i++) {
    for (int k = 0; k < 6 && cases[i].yes[k]; k++) {
      if (!matches(cases[i].grammar, cases[i].yes[k]))
        fail_msg("%s rejects %s", cases[i].grammar, cases[i].yes[k]);
    }
    for (int k = 0; k < 6 && cases[i].no[k]; k++) {
      if (matches(cases[i].grammar, cases[i].no[k]))
        fail_msg("%s accepts %s", cases[i].grammar, cases[i].no[k]);
    }
  }
}

static void test_gbnf(void **state) {
  (void)state;
  static const language cases[] = {
      {"root ::= \"a\" | \"bc\"", {"a", "bc"}, {"", "b", "abc", "aa"}},
      {"root ::= [a-c]+ \"!\"?", {"a", "abcab", "a!"}, {"", "!", "d", "a!!"}},
      {"root ::= x{2,3}\nx ::= [^x]", {"ab", "abc", "\xC3\xA4\xE2\x82\xAC"}, {"a", "abcd", "ax"}},
      {"root ::= (\"a\" root \"b\")?", {"", "ab", "aaabbb"}, {"a", "aab", "ba"}},
      {"root ::= e\n# a comment\ne ::= t (\"+\" t)*\n  | \"-\" e\nt ::= [0-9]+ | \"(\" e \")\"",
       {"1", "1+23", "(1+(2))+3", "-1"},
       {"", "+", "1+", "(1"}},
      {"root ::= .{2}", {"ab", "\xF0\x9F\x98\x80z"}, {"a", "abc", "\x80\x80", "\xED\xA0\x80"}},
      {"root ::= \"\\x41\\u00e9\\n\"", {"A\xC3\xA9\n"}, {"A"}},
      {"root ::= (\"a\"* \"b\"*)* \"c\"", {"c", "abbac"}, {"", "ab"}},
      {".root ::= \"x\" root\nroot ::= \"y\"", {"xy"}, {"y"}},
      {"root ::= \"a\" | [] \"b\"", {"a"}, {"b", ""}},
      {"root ::= x \"a\"\nx ::= \"\" | \"b\" x", {"a", "bba"}, {"b"}},
  };
  check_languages(cases, TD_COUNT(cases), generates);
}

static void test_bad_gbnf(void **state) {
  (void)state;
  static const char *const cases[][2] = {
      {"", "root"},
      {"root", "::="},
      {"root ::= \"a", "ends inside"},
      {"root ::= [a", "ends inside"},
      {"root ::= (\"a\"", ") is missing"},
      {"root ::= x", "x is used"},
      {"root ::= \"a\"\nroot ::= \"b\"", "twice"},
      {"root ::= root \"a\" | \"b\"", "left recursion"},
      {"root ::= x root \"a\" | \"b\"\nx ::= \"y\"?", "left recursion"},
      {"root ::= a\na ::= b\nb ::= a | \"x\"", "left recursion"},
      {"root ::= \"a\" root", "no text"},
      {"root ::= []", "no text"},
      {"root ::= \"a\"{3,2}", "reversed"},
      {"root ::= [z-a]", "reversed"},
      {"root ::= \"a\"{9999999}", "too large"},
      {"root ::= x{1000}\nx ::= \"a\"\n\nroot2 ::= ((\"a\"{1000}){1000}){1000}", "too large"},
      {"start: \"a\"", "::="},
      {"root ::= \"\\q\"", "escape"},
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    td_grammar *g;
    td_err err;
    assert_int_not_equal(td_grammar_open(&g, cases[i][0], strlen(cases[i][0]), &err), TD_OK);
    assert_null(g);
    if (!strstr(err.msg, cases[i][1])) fail_msg("%s: %s", cases[i][0], err.msg);
  }
}

static int regex_matches(const char *regex, const char *text) {
  td_buf gbnf = TD_BUF_INIT;
  td_err err;
  td_buf_str(&gbnf, "root ::= ");
  if (td_regex_to_gbnf(&gbnf, regex, strlen(regex), TD_REGEX_WHOLE, &err) != TD_OK)
    fail_msg("%s", err.msg);
  int matches = generates(td_buf_text(&gbnf), text);
  td_buf_free(&gbnf);
  return matches;
}

static void test_regex(void **state) {
  (void)state;
  static const language cases[] = {
      {"a|bc", {"a", "bc"}, {"", "ab"}},
      {"^\\d{3}-\\d{4}$", {"555-1234"}, {"5555-123", "555-12345"}},
      {"[^abc]+", {"xyz", "\xC3\xA4"}, {"", "xa"}},
      {"(?:ab)*c?", {"", "ababc", "c"}, {"aba"}},
      {"(?<year>\\d+)\\.(\\w+?)", {"12.ab_"}, {"12."}},
      {"\\u0041\\x42\\n\\/", {"AB\n/"}, {"AB"}},
      {".", {"a", "\xE2\x82\xAC"}, {"", "\n", "ab"}},
      {"a{,3}", {"a{,3}"}, {"aaa"}},
      {"[\\]\\-a]", {"]", "-", "a"}, {"\\"}},
      {"[a-]", {"a", "-"}, {"b"}},
      {"\\S\\W", {"a!"}, {" a", "ab"}},
  };
  check_languages(cases, TD_COUNT(cases), regex_matches);
  static const char *const bad[] = {"(a",     "a)",      "[a",     "*a",       "a**",  "(?=a)",
                                    "(?!a)",  "(?<=a)b", "(a)\\1", "\\bx",     "a^b",  "a$b",
                                    "\\p{L}", "\\",      "a{3,2}", "a{70000}", "\\u12"};
  for (size_t i = 0; i < TD_COUNT(bad); i++) {
    td_buf out = TD_BUF_INIT;
    td_err err;
    if (td_regex_to_gbnf(&out, bad[i], strlen(bad[i]), TD_REGEX_WHOLE, &err) == TD_OK)
      fail_msg("%s passes", bad[i]);
    td_buf_free(&out);
  }
}

// ---- masks -------------------------------------------------------------------------------------

// Tokens: every byte, then pieces that cross the borders of a grammar's parts and of characters.
static const char *const pieces[] = {"{\"", "\":",  "\": ",         "\",",      "\"}",      "ab",
                                     "abc", " a",   "\xC3\xA4\xE2", "\xE2\x82", "\x82\xAC", "true",
                                     "tru", "12",   "]}",           "  ",       "\n ",      "\\u0",
                                     "0e9", "\"\"", "{}",           "abcdefgh"};
enum { N_PIECES = TD_COUNT(pieces), END = 256 + N_PIECES, N_VOCAB = END + 3 };

static td_token_index *open_index(const char *decoder) {
  td_buf json = TD_BUF_INIT;
  td_err err;
  td_tokenizer *tok;
  td_token_index *index;
  td_buf_printf(&json, "{\"added_tokens\":[{\"id\":%d,\"content\":\"<end>\",\"special\":true}],",
                END);
  td_buf_printf(&json, "\"pre_tokenizer\":null,\"decoder\":%s,", decoder);
  td_buf_str(&json, "\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":");
  td_json_writer w = TD_JSON_WRITER(&json);
  td_jw_begin_object(&w, NULL);
  for (int id = 0; id < END; id++) {
    td_buf spelled = TD_BUF_INIT;
    char byte = (char)id;
    const char *text = id < 256 ? &byte : pieces[id - 256];
    td_bytelevel_spell(&spelled, text, id < 256 ? 1 : strlen(text));
    td_jw_int(&w, td_buf_text(&spelled), id);
    td_buf_free(&spelled);
  }
  td_jw_end_object(&w);
  td_buf_str(&json, "}}");
  if (td_tokenizer_open_json(&tok, "tokenizer.json", json.data, json.len, NULL, 0, &err) != TD_OK) {
    fail_msg("%s", err.msg);
  }
  assert_int_equal(td_token_index_open(&index, tok, N_VOCAB, &err), TD_OK);
  td_tokenizer_close(tok);
  td_buf_free(&json);
  return index;
}

static void add_bytes(td_buf *text, int32_t id) {
  char byte = (char)id;
  td_buf_add(text, id < 256 ? &byte : pieces[id - 256], id < 256 ? 1 : strlen(pieces[id - 256]));
}

// Takes random tokens of the masks. At each step the mask must hold exactly the tokens that a
// matcher without masks accepts, which follows their bytes, and at the end the text must be one of
// the grammar's.
static void walk(td_grammars *grammars, td_grammars *plain, const char *gbnf, unsigned seed) {
  td_matcher *m, *follower;
  td_grammar *g;
  td_err err;
  td_buf text = TD_BUF_INIT;
  assert_int_equal(td_matcher_open(&m, grammars, gbnf, strlen(gbnf), &err), TD_OK);
  assert_int_equal(td_matcher_open(&follower, plain, gbnf, strlen(gbnf), &err), TD_OK);
  assert_int_equal(td_grammar_open(&g, gbnf, strlen(gbnf), &err), TD_OK);
  srand(seed);
  for (int i = 0; i < 100 && !td_matcher_must_end(m); i++) {
    const uint64_t *mask = td_matcher_mask(m);
    if (td_matcher_status(m, &err) != TD_OK || td_matcher_status(follower, &err) != TD_OK) break;
    int32_t allowed[N_VOCAB];
    int n = 0;
    assert_non_null(mask);
    for (int32_t id = 0; id < N_VOCAB; id++) {
      bool is_set = mask[id / 64] >> (id % 64) & 1;
      if (is_set != td_matcher_accepts(follower, id) && td_matcher_status(follower, &err) == TD_OK)
        fail_msg("%s: token %d after \"%s\"", gbnf, id, td_buf_text(&text));
      if (is_set) allowed[n++] = id;
    }
    assert_true(n > 0);
    assert_int_equal(td_matcher_may_end(m), td_grammar_matches(g, td_buf_text(&text), text.len));
    if (td_matcher_may_end(m) && rand() % 4 == 0) break;
    int32_t id = allowed[rand() % n];
    add_bytes(&text, id);
    if (!td_matcher_advance(m, id) || !td_matcher_advance(follower, id)) break;
  }
  // Random grammars can be too ambiguous.
  for (int k = 0; k < 2; k++) {
    td_matcher *of = k ? follower : m;
    assert_true(td_matcher_status(of, &err) == TD_OK || err.code == TD_ELIMIT);
  }
  assert_false(td_matcher_accepts(m, END));
  assert_false(td_matcher_advance(m, END));
  assert_false(td_matcher_advance(m, N_VOCAB));
  assert_false(td_matcher_advance(m, -1));
  td_grammar_close(g);
  td_matcher_close(m);
  td_matcher_close(follower);
  td_buf_free(&text);
}

// A random expression of classes, literals, repetitions, alternatives and calls.
static void add_expression(td_buf *out, int depth) {
  static const char *const leaves[] = {
      "[a-c]", "[^\"]",     "[ -~]",  "\"ab\"",   "[^\\n]", "[a-z ]", "[\xC3\xA4\xE2\x82\xAC]",
      ".",     "[0-9\"{}]", "[^a-m]", "\"true\"", "x"};
  static const char *const suffixes[] = {"", "", "*", "+", "?", "{2,5}", "{0,9}"};
  const int n = depth ? 1 + rand() % 3 : 0;
  if (!n) td_buf_str(out, leaves[rand() % TD_COUNT(leaves)]);
  if (n) td_buf_str(out, "(");
  for (int i = 0; i < n; i++) {
    if (i) td_buf_str(out, rand() % 3 ? " " : " | ");
    add_expression(out, depth - 1);
  }
  if (n) td_buf_str(out, ")");
  td_buf_str(out, suffixes[rand() % TD_COUNT(suffixes)]);
}

static void test_random_grammars(void **state) {
  (void)state;
  td_token_index *index = open_index("{\"type\":\"ByteLevel\"}");
  td_grammars *grammars, *plain;
  td_err err;
  assert_int_equal(td_grammars_open(&grammars, index, &err), TD_OK);
  assert_int_equal(td_grammars_open(&plain, index, &err), TD_OK);
  for (unsigned seed = 0; seed < 60; seed++) {
    td_buf gbnf = TD_BUF_INIT;
    td_grammar *g;
    srand(seed);
    td_buf_str(&gbnf, "root ::= ");
    add_expression(&gbnf, 2);
    td_buf_str(&gbnf, " \"!\"\nx ::= \"<\" ");
    add_expression(&gbnf, 1);
    td_buf_str(&gbnf, " x? \">\"\n");
    const char *text = td_buf_text(&gbnf);
    if (td_grammar_open(&g, text, strlen(text), &err) == TD_OK) {
      td_grammar_close(g);
      walk(grammars, plain, text, seed);
    }
    td_buf_free(&gbnf);
  }
  td_grammars_close(grammars);
  td_grammars_close(plain);
  td_token_index_close(index);
}

static void test_masks(void **state) {
  (void)state;
  td_buf json = TD_BUF_INIT;
  td_json_schema_write_common(&json, false);
  td_buf_str(&json, "root ::= json-object\n");
  const char *const grammars_of[] = {
      td_buf_text(&json),
      "root ::= \"{\" (\"\\\"\" [^\"{}]{0,12} \"\\\"\")? \"}\"",
      "root ::= \"abc\" root \"12\" | \"true\"",
      "root ::= [a-c\xC3\xA4\xE2\x82\xAC]{1,20}",
      "root ::= (\"a\" | \"ab\" | \"abc\" | \"bc\"){3,9}",
      "root ::= ([^\\n]* [a-m] [^\\n]{5}){3}",
      "root ::= \"\\\"\" ([^\"\\\\\\x00-\\x1F] | \"\\\\\" [nu])* \"\\\"\" [a-z]{3,40}",
  };
  td_token_index *index = open_index("{\"type\":\"ByteLevel\"}");
  td_grammars *grammars, *plain;
  td_err err;
  assert_int_equal(td_grammars_open(&grammars, index, &err), TD_OK);
  assert_int_equal(td_grammars_open(&plain, index, &err), TD_OK);
  for (unsigned seed = 0; seed < 8; seed++) {
    for (size_t i = 0; i < TD_COUNT(grammars_of); i++)
      walk(grammars, plain, grammars_of[i], seed);
  }
  td_grammars_close(grammars);
  td_grammars_close(plain);
  td_token_index_close(index);
  td_buf_free(&json);
}

// Two generations under one grammar share masks, not positions.
static void test_shared_grammar(void **state) {
  (void)state;
  static const char gbnf[] = "root ::= \"ab\" \"12\"";
  td_token_index *index = open_index("{\"type\":\"ByteLevel\"}");
  td_grammars *grammars;
  td_matcher *a, *b;
  td_err err;
  assert_int_equal(td_grammars_open(&grammars, index, &err), TD_OK);
  assert_int_equal(td_matcher_open(&a, grammars, gbnf, strlen(gbnf), &err), TD_OK);
  assert_int_equal(td_matcher_open(&b, grammars, gbnf, strlen(gbnf), &err), TD_OK);
  assert_true(td_matcher_advance(a, 256 + 5));  // ab
  assert_true(td_matcher_accepts(a, 256 + 13)); // 12
  assert_false(td_matcher_accepts(b, 256 + 13));
  assert_true(td_matcher_advance(a, 256 + 13));
  assert_true(td_matcher_must_end(a) && td_matcher_may_end(a));
  assert_false(td_matcher_may_end(b));
  td_matcher_close(a);
  assert_true(td_matcher_advance(b, 'a'));
  td_matcher_close(b);
  // More grammars than are kept.
  for (int i = 0; i < 40; i++) {
    char text[64];
    int len = snprintf(text, sizeof text, "root ::= \"a\"{%d}", i + 1);
    assert_int_equal(td_matcher_open(&a, grammars, text, (size_t)len, &err), TD_OK);
    td_matcher_close(a);
  }
  td_grammars_close(grammars);
  td_token_index_close(index);
}

// A decoder that drops the first space: the mask of the first token takes that into account.
static void test_first_space(void **state) {
  (void)state;
  static const char gbnf[] = "root ::= \"ab\"";
  td_token_index *index = open_index(
      "{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"ByteLevel\"},"
      "{\"type\":\"Strip\",\"content\":\" \",\"start\":1,\"stop\":0}]}");
  td_grammars *grammars;
  td_matcher *m;
  td_err err;
  assert_true(index->strips_space);
  assert_int_equal(td_grammars_open(&grammars, index, &err), TD_OK);
  assert_int_equal(td_matcher_open(&m, grammars, gbnf, strlen(gbnf), &err), TD_OK);
  const uint64_t *mask = td_matcher_mask(m);
  for (int32_t id = 0; id < N_VOCAB; id++)
    assert_int_equal(mask[id / 64] >> (id % 64) & 1, td_matcher_accepts(m, id));
  assert_true(td_matcher_accepts(m, ' ') && td_matcher_accepts(m, 256 + 7)); // " a"
  assert_true(td_matcher_advance(m, 256 + 7));
  assert_false(td_matcher_accepts(m, ' '));
  assert_true(td_matcher_advance(m, 'b'));
  assert_true(td_matcher_must_end(m));
  td_matcher_close(m);
  td_grammars_close(grammars);
  td_token_index_close(index);
}

// Every text has exponentially many derivations: the request fails, the process does not.
static void test_ambiguous(void **state) {
  (void)state;
  static const char gbnf[] = "root ::= \"a\" root \"b\" | \"a\" root \"c\" | \"d\"";
  td_token_index *index = open_index("{\"type\":\"ByteLevel\"}");
  td_grammars *grammars;
  td_matcher *m;
  td_err err;
  assert_int_equal(td_grammars_open(&grammars, index, &err), TD_OK);
  assert_int_equal(td_matcher_open(&m, grammars, gbnf, strlen(gbnf), &err), TD_OK);
  for (int i = 0; i < 64 && td_matcher_status(m, &err) == TD_OK; i++)
    td_matcher_advance(m, 'a');
  assert_int_equal(td_matcher_status(m, &err), TD_ELIMIT);
  td_matcher_close(m);
  assert_int_equal(td_matcher_open(&m, grammars, gbnf, strlen(gbnf), &err), TD_OK);
  assert_true(td_matcher_advance(m, 'a'));
  td_matcher_close(m);
  td_grammars_close(grammars);
  td_token_index_close(index);
}

// ---- the thread --------------------------------------------------------------------------------

static void wait_for(int fd, td_matcher *m) {
  while (!td_matcher_is_ready(m)) {
    uint64_t n;
    assert_int_equal(read(fd, &n, sizeof n), sizeof n);
  }
}

// Masks made by the thread are those made at once, also of configurations that are too wide to
// advance at once, of matchers that share a grammar, and after a replay.
static void test_thread(void **state) {
  (void)state;
  static const char *const grammars_of[] = {
      "root ::= [a-c{]{3,40} \"12\" | \"{\\\"\" [^\"]* \"\\\"}\"",
      "root ::= ([^\\n]* [a-m] [^\\n]{9}){4}"};
  td_token_index *index = open_index("{\"type\":\"ByteLevel\"}");
  td_grammars *grammars, *plain;
  td_err err;
  const int fd = eventfd(0, EFD_CLOEXEC);
  assert_int_equal(td_grammars_open(&grammars, index, &err), TD_OK);
  assert_int_equal(td_grammars_open(&plain, index, &err), TD_OK);
  assert_int_equal(td_grammars_start(grammars, fd, &err), TD_OK);
  for (size_t k = 0; k < TD_COUNT(grammars_of); k++) {
    const char *text = grammars_of[k];
    td_matcher *m[3], *same;
    int32_t ids[40];
    int n = 0;
    for (int j = 0; j < 2; j++)
      assert_int_equal(td_matcher_open(&m[j], grammars, text, strlen(text), &err), TD_OK);
    assert_int_equal(td_matcher_open(&same, plain, text, strlen(text), &err), TD_OK);
    srand(3);
    for (; n < 40 && !td_matcher_must_end(same); n++) {
      for (int j = 0; j < 2; j++)
        td_matcher_prepare(m[j]);
      const uint64_t *mask = td_matcher_mask(same);
      for (int j = 0; j < 2; j++) {
        wait_for(fd, m[j]);
        assert_memory_equal(td_matcher_mask(m[j]), mask, (N_VOCAB + 63) / 64 * sizeof *mask);
        assert_int_equal(td_matcher_may_end(m[j]), td_matcher_may_end(same));
      }
      do {
        ids[n] = rand() % N_VOCAB;
      } while (!td_matcher_accepts(same, ids[n]));
      for (int j = 0; j < 2; j++)
        assert_true(td_matcher_advance(m[j], ids[n]));
      assert_true(td_matcher_advance(same, ids[n]));
    }
    assert_int_equal(td_matcher_open(&m[2], grammars, text, strlen(text), &err), TD_OK);
    for (int i = 0; i < n; i++)
      assert_true(td_matcher_advance(m[2], ids[i]));
    td_matcher_prepare(m[2]);
    wait_for(fd, m[2]);
    assert_memory_equal(td_matcher_mask(m[2]), td_matcher_mask(same),
                        (N_VOCAB + 63) / 64 * sizeof(uint64_t));
    for (int j = 0; j < 3; j++) {
      assert_int_equal(td_matcher_status(m[j], &err), TD_OK);
      td_matcher_close(m[j]);
    }
    td_matcher_close(same);
  }
  td_grammars_close(grammars);
  td_grammars_close(plain);
  td_token_index_close(index);
  close(fd);
}

// While the thread makes no masks a matcher is not ready, and can be closed.
static void test_thread_is_held(void **state) {
  (void)state;
  static const char gbnf[] = "root ::= [a-z]* \"!\"";
  td_token_index *index = open_index("{\"type\":\"ByteLevel\"}");
  td_grammars *grammars;
  td_matcher *a, *b;
  td_err err;
  const int fd = eventfd(0, EFD_CLOEXEC);
  assert_int_equal(td_grammars_open(&grammars, index, &err), TD_OK);
  assert_int_equal(td_grammars_start(grammars, fd, &err), TD_OK);
  td_grammars_hold(grammars, true);
  assert_int_equal(td_matcher_open(&a, grammars, gbnf, strlen(gbnf), &err), TD_OK);
  td_matcher_prepare(a);
  assert_int_equal(td_matcher_open(&b, grammars, gbnf, strlen(gbnf), &err), TD_OK);
  assert_true(td_matcher_advance(b, 'q')); // a replay
  td_matcher_prepare(b);
  assert_false(td_matcher_is_ready(a) || td_matcher_is_ready(b));
  td_matcher_close(a);
  td_grammars_hold(grammars, false);
  wait_for(fd, b);
  assert_true(td_matcher_accepts(b, '!') && !td_matcher_accepts(b, '?'));
  assert_false(td_matcher_advance(b, END));
  assert_true(td_matcher_advance(b, '!'));
  td_matcher_prepare(b);
  wait_for(fd, b);
  assert_true(td_matcher_may_end(b) && td_matcher_must_end(b));
  td_matcher_close(b);
  td_grammars_close(grammars);
  td_token_index_close(index);
  close(fd);
}

// Sixteen generations whose configurations are all different: what is kept stays bounded, and comes
// back.
static void test_memory_is_bounded(void **state) {
  (void)state;
  enum { N = 16, BOUND = (64 + N * 8 + 8) << 20 };
  td_token_index *index = open_index("{\"type\":\"ByteLevel\"}");
  td_grammars *grammars;
  td_matcher *m[N];
  td_err err;
  bool has_shrunk = false;
  size_t before = 0;
  assert_int_equal(td_grammars_open(&grammars, index, &err), TD_OK);
  for (int i = 0; i < N; i++) {
    char text[64];
    int len = snprintf(text, sizeof text, "root ::= (.* [a-m] .{%d}){20}", 100 + i);
    assert_int_equal(td_matcher_open(&m[i], grammars, text, (size_t)len, &err), TD_OK);
  }
  srand(1);
  for (int k = 0; k < 1500; k++) {
    for (int i = 0; i < N; i++) {
      assert_true(td_matcher_advance(m[i], 'a' + rand() % 26));
      has_shrunk |= td_grammars_n_bytes(grammars) < before;
      before = td_grammars_n_bytes(grammars);
      assert_true(before < BOUND);
    }
    if (has_shrunk && k > 100) break;
  }
  assert_true(has_shrunk);
  for (int i = 0; i < N; i++) {
    assert_non_null(td_matcher_mask(m[i]));
    td_matcher_close(m[i]);
  }
  assert_int_equal(td_matcher_open(&m[0], grammars, "root ::= \"a\"", 12, &err), TD_OK);
  assert_true(td_grammars_n_bytes(grammars) <= 64u << 20);
  td_matcher_close(m[0]);
  td_grammars_close(grammars);
  td_token_index_close(index);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_gbnf),
      cmocka_unit_test(test_bad_gbnf),
      cmocka_unit_test(test_regex),
      cmocka_unit_test(test_masks),
      cmocka_unit_test(test_shared_grammar),
      cmocka_unit_test(test_first_space),
      cmocka_unit_test(test_ambiguous),
      cmocka_unit_test(test_random_grammars),
      cmocka_unit_test(test_thread),
      cmocka_unit_test(test_thread_is_held),
      cmocka_unit_test(test_memory_is_bounded),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
