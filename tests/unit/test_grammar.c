// Grammars: GBNF, regular expressions, masks over a vocabulary.
// CTest: no-tsan
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/json_write.h"
#include "text/tokenizer/bytelevel.h"
#include "unit/grammars.h"
#include "unit/testing.h"

static int matches_as(grammar_kind kind, const char *grammar, const char *text) {
  test_grammar t;
  td_err err;
  if (open_grammar(&t, kind, grammar, &err) != TD_OK) fail_msg("%s: %s", grammar, err.msg);
  int matches = td_grammar_matches(t.g, text, strlen(text));
  close_grammar(&t);
  return matches;
}

static int generates(const char *gbnf, const char *text) {
  return matches_as(GBNF, gbnf, text);
}

static int regex_matches(const char *regex, const char *text) {
  return matches_as(PATTERN, regex, text);
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

TEST(gbnf) {
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
      {"root ::= \"x\" .a-1\n.a-1 ::= \"y\"", {"xy"}, {"y"}},
      {"root ::= (((\"\"){1048576}){1048576}){1048576} \"a\"", {"a"}, {""}},
      {"root ::= (\"\" | [] | (\"\"))* \"a\"", {"a"}, {""}},
      {"root ::= \"a\" | [] \"b\"", {"a"}, {"b", ""}},
      {"root ::= x \"a\"\nx ::= \"\" | \"b\" x", {"a", "bba"}, {"b"}},
  };
  check_languages(cases, TD_COUNT(cases), generates);
}

TEST(bad_gbnf) {
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
      {"root ::= x{1000} y\nx ::= \"a\"\n\ny ::= ((\"a\"{1000}){1000}){1000}", "too large"},
      {"root ::= x\nx ::= y{1048576}\ny ::= \"\" | (\"\" | \"a\"){1048576}", "too large"},
      {"start: \"a\"", "::="},
      {"root ::= \"\\q\"", "escape"},
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    test_grammar t;
    td_err err;
    assert_int_not_equal(open_grammar(&t, GBNF, cases[i][0], &err), TD_OK);
    assert_int_equal(t.bytes.len, 0);
    if (!strstr(err.msg, cases[i][1])) fail_msg("%s: %s", cases[i][0], err.msg);
  }
}

TEST(regex) {
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
    test_grammar t;
    td_err err;
    if (open_grammar(&t, PATTERN, bad[i], &err) == TD_OK) fail_msg("%s passes", bad[i]);
  }
}

// ---- masks -------------------------------------------------------------------------------------

// Tokens: every byte, then pieces that cross the borders of a grammar's parts and of characters.
static const char *const pieces[] = {"{\"", "\":",  "\": ",         "\",",      "\"}",      "ab",
                                     "abc", " a",   "\xC3\xA4\xE2", "\xE2\x82", "\x82\xAC", "true",
                                     "tru", "12",   "]}",           "  ",       "\n ",      "\\u0",
                                     "0e9", "\"\"", "{}",           "abcdefgh"};
enum { N_PIECES = TD_COUNT(pieces), END = 256 + N_PIECES, N_VOCAB = END + 3 };

// added: more added tokens, each with a comma before it.
static td_token_index *open_index_with(const char *decoder, const char *added) {
  td_buf json = TD_BUF_INIT;
  td_err err;
  td_tokenizer *tok;
  td_token_index *index;
  td_buf_printf(&json, "{\"added_tokens\":[{\"id\":%d,\"content\":\"<end>\",\"special\":true}%s],",
                END, added);
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

static td_token_index *open_index(const char *decoder) {
  return open_index_with(decoder, "");
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
  test_grammar t;
  td_err err;
  td_buf text = TD_BUF_INIT;
  assert_int_equal(open_matcher(&m, grammars, gbnf, &err), TD_OK);
  assert_int_equal(open_matcher(&follower, plain, gbnf, &err), TD_OK);
  assert_int_equal(open_grammar(&t, GBNF, gbnf, &err), TD_OK);
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
    assert_int_equal(td_matcher_may_end(m), td_grammar_matches(t.g, td_buf_text(&text), text.len));
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
  close_grammar(&t);
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

TEST(random_grammars) {
  td_token_index *index = open_index("{\"type\":\"ByteLevel\"}");
  td_grammars *grammars, *plain;
  td_err err;
  assert_int_equal(td_grammars_open(&grammars, index, &err), TD_OK);
  assert_int_equal(td_grammars_open(&plain, index, &err), TD_OK);
  for (unsigned seed = 0; seed < 60; seed++) {
    td_buf gbnf = TD_BUF_INIT;
    test_grammar t;
    srand(seed);
    td_buf_str(&gbnf, "root ::= ");
    add_expression(&gbnf, 2);
    td_buf_str(&gbnf, " \"!\"\nx ::= \"<\" ");
    add_expression(&gbnf, 1);
    td_buf_str(&gbnf, " x? \">\"\n");
    const char *text = td_buf_text(&gbnf);
    const bool is_one = open_grammar(&t, GBNF, text, &err) == TD_OK;
    close_grammar(&t);
    if (is_one) walk(grammars, plain, text, seed);
    td_buf_free(&gbnf);
  }
  td_grammars_close(grammars);
  td_grammars_close(plain);
  td_token_index_close(index);
}

TEST(masks) {
  static const char *const grammars_of[] = {
      "JSON",
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
}

// Two generations under one grammar share masks, not positions.
TEST(shared_grammar) {
  static const char gbnf[] = "root ::= \"ab\" \"12\"";
  td_token_index *index = open_index("{\"type\":\"ByteLevel\"}");
  td_grammars *grammars;
  td_matcher *a, *b;
  td_err err;
  assert_int_equal(td_grammars_open(&grammars, index, &err), TD_OK);
  assert_int_equal(open_matcher(&a, grammars, gbnf, &err), TD_OK);
  assert_int_equal(open_matcher(&b, grammars, gbnf, &err), TD_OK);
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
    snprintf(text, sizeof text, "root ::= \"a\"{%d}", i + 1);
    assert_int_equal(open_matcher(&a, grammars, text, &err), TD_OK);
    td_matcher_close(a);
  }
  td_grammars_close(grammars);
  td_token_index_close(index);
}

// A decoder that drops the first space: the mask of the first token takes that into account.
TEST(first_space) {
  static const char gbnf[] = "root ::= \"ab\"";
  td_token_index *index = open_index(
      "{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"ByteLevel\"},"
      "{\"type\":\"Strip\",\"content\":\" \",\"start\":1,\"stop\":0}]}");
  td_grammars *grammars;
  td_matcher *m;
  td_err err;
  assert_true(index->strips_space);
  assert_int_equal(td_grammars_open(&grammars, index, &err), TD_OK);
  assert_int_equal(open_matcher(&m, grammars, gbnf, &err), TD_OK);
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

// A marker that must come is one token; where other text may come as well, its letters stay.
TEST(markers_are_whole) {
  static const struct {
    const char *gbnf;
    bool is_forced;
  } cases[] = {{"root ::= \"<mark>\" [a-z]*", true},
               {"root ::= [a-z]* \"<mark>\"", true},
               {"root ::= \"<mark>\" | \"<more>\"", false},
               {"root ::= [^x]*", false}};
  char added[80];
  snprintf(added, sizeof added, ",{\"id\":%d,\"content\":\"<mark>\",\"special\":false}", END + 1);
  td_token_index *index = open_index_with("{\"type\":\"ByteLevel\"}", added);
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    for (int has_mask = 0; has_mask < 2; has_mask++) {
      td_grammars *grammars;
      td_matcher *m;
      td_err err;
      assert_int_equal(td_grammars_open(&grammars, index, &err), TD_OK);
      assert_int_equal(open_matcher(&m, grammars, cases[i].gbnf, &err), TD_OK);
      if (has_mask) assert_non_null(td_matcher_mask(m));
      assert_true(td_matcher_accepts(m, END + 1));
      assert_int_equal(td_matcher_accepts(m, '<'), !cases[i].is_forced);
      assert_true(td_matcher_advance(m, END + 1));
      assert_true(td_matcher_may_end(m));
      td_matcher_close(m);
      td_grammars_close(grammars);
    }
  }
  td_token_index_close(index);
}

// Every text has exponentially many derivations: the request fails, the process does not.
TEST(ambiguous) {
  static const char gbnf[] = "root ::= \"a\" root \"b\" | \"a\" root \"c\" | \"d\"";
  td_token_index *index = open_index("{\"type\":\"ByteLevel\"}");
  td_grammars *grammars;
  td_matcher *m;
  td_err err;
  assert_int_equal(td_grammars_open(&grammars, index, &err), TD_OK);
  assert_int_equal(open_matcher(&m, grammars, gbnf, &err), TD_OK);
  for (int i = 0; i < 64 && td_matcher_status(m, &err) == TD_OK; i++)
    td_matcher_advance(m, 'a');
  assert_int_equal(td_matcher_status(m, &err), TD_ELIMIT);
  td_matcher_close(m);
  assert_int_equal(open_matcher(&m, grammars, gbnf, &err), TD_OK);
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
TEST(thread) {
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
      assert_int_equal(open_matcher(&m[j], grammars, text, &err), TD_OK);
    assert_int_equal(open_matcher(&same, plain, text, &err), TD_OK);
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
    assert_int_equal(open_matcher(&m[2], grammars, text, &err), TD_OK);
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
TEST(thread_is_held) {
  static const char gbnf[] = "root ::= [a-z]* \"!\"";
  td_token_index *index = open_index("{\"type\":\"ByteLevel\"}");
  td_grammars *grammars;
  td_matcher *a, *b;
  td_err err;
  const int fd = eventfd(0, EFD_CLOEXEC);
  assert_int_equal(td_grammars_open(&grammars, index, &err), TD_OK);
  assert_int_equal(td_grammars_start(grammars, fd, &err), TD_OK);
  td_grammars_hold(grammars, true);
  assert_int_equal(open_matcher(&a, grammars, gbnf, &err), TD_OK);
  td_matcher_prepare(a);
  assert_int_equal(open_matcher(&b, grammars, gbnf, &err), TD_OK);
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
TEST(memory_is_bounded) {
  enum { N = 16, BOUND = (40 + N * 8 + 8) << 20 };
  td_token_index *index = open_index("{\"type\":\"ByteLevel\"}");
  td_grammars *grammars;
  td_matcher *m[N];
  td_err err;
  bool has_shrunk = false;
  size_t before = 0;
  assert_int_equal(td_grammars_open(&grammars, index, &err), TD_OK);
  for (int i = 0; i < N; i++) {
    char text[64];
    snprintf(text, sizeof text, "root ::= (.* [a-m] .{%d}){20}", 100 + i);
    assert_int_equal(open_matcher(&m[i], grammars, text, &err), TD_OK);
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
  assert_int_equal(open_matcher(&m[0], grammars, "root ::= \"a\"", &err), TD_OK);
  assert_true(td_grammars_n_bytes(grammars) <= 40u << 20);
  td_matcher_close(m[0]);
  td_grammars_close(grammars);
  td_token_index_close(index);
}

// ---- budgets -----------------------------------------------------------------------------------

// Bytes that are no grammar, and every byte of one changed: refused, or followed without harm.
TEST(malformed) {
  td_buf bytes = TD_BUF_INIT;
  td_grammar *g;
  td_err err;
  assert_int_equal(compile(&bytes, GBNF, "root ::= \"ab\" x* \nx ::= [a-z] | \"(\" x \")\"", &err),
                   TD_OK);
  for (size_t n = 0; n < bytes.len; n++)
    assert_int_equal(td_grammar_open(&g, bytes.data, n, &err), TD_EFORMAT);
  unsigned n_taken = 0;
  for (size_t i = 0; i < 8 * bytes.len; i++) {
    bytes.data[i / 8] = (char)(bytes.data[i / 8] ^ 1 << i % 8);
    if (td_grammar_open(&g, bytes.data, bytes.len, &err) == TD_OK) {
      n_taken++;
      td_grammar_matches(g, "ab(c)", 5);
      td_grammar_close(g);
    }
    bytes.data[i / 8] = (char)(bytes.data[i / 8] ^ 1 << i % 8);
  }
  assert_true(n_taken > 0);
  td_buf_free(&bytes);
}

// With any budget that is too small, and where the client has left, a grammar is refused; what a
// larger budget leaves over does not change its bytes.
TEST(budgets) {
  static const struct {
    grammar_kind kind;
    const char *text;
  } list[] = {
      {GBNF, "root ::= x{3,9} y\nx ::= [a-z\xC3\xA4] | \"(\" x \")\"\ny ::= \"\\x41\"+"},
      {PATTERN, "^(a|[^b]{2,5})+\\d$"},
      {SCHEMA, "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"},\"b\":{\"enum\":"
               "[1,[2]]}},\"required\":[\"b\"],\"additionalProperties\":true}"},
  };
  atomic_bool has_left = true;
  for (size_t i = 0; i < TD_COUNT(list); i++) {
    const uint64_t enough = 1u << 24;
    td_budget budget = {.steps = enough, .bytes = enough};
    td_buf whole = TD_BUF_INIT, bytes = TD_BUF_INIT;
    td_err err;
    assert_int_equal(compile_within(&whole, list[i].kind, list[i].text, &budget, &err), TD_OK);
    const uint64_t n = enough - budget.steps, n_bytes = enough - budget.bytes;
    for (uint64_t steps = 0; steps < n; steps += 1 + n / 300) {
      budget = (td_budget){.steps = steps, .bytes = enough};
      assert_int_equal(compile_within(&bytes, list[i].kind, list[i].text, &budget, &err),
                       TD_ELIMIT);
    }
    budget = (td_budget){.steps = enough, .bytes = n_bytes / 2};
    assert_int_equal(compile_within(&bytes, list[i].kind, list[i].text, &budget, &err), TD_ELIMIT);
    budget = (td_budget){.steps = enough, .bytes = enough, .is_canceled = &has_left};
    assert_int_equal(compile_within(&bytes, list[i].kind, list[i].text, &budget, &err),
                     TD_ECANCELED);
    assert_int_equal(bytes.len, 0);
    budget = (td_budget){.steps = n, .bytes = n_bytes};
    assert_int_equal(compile_within(&bytes, list[i].kind, list[i].text, &budget, &err), TD_OK);
    assert_int_equal(bytes.len, whole.len);
    assert_memory_equal(bytes.data, whole.data, whole.len);
    td_buf_free(&bytes);
    td_buf_free(&whole);
  }
}

// Appends text with i for % and i + 1 for @.
static void add_part(td_buf *out, const char *text, unsigned i) {
  for (const char *c = text; *c; c++) {
    if (*c == '%' || *c == '@') {
      td_buf_printf(out, "%u", i + (*c == '@'));
    } else {
      td_buf_char(out, *c);
    }
  }
}

// Text whose middle is a part n times.
static td_buf repeated(const char *begin, const char *part, unsigned n, const char *end) {
  td_buf out = TD_BUF_INIT;
  td_buf_str(&out, begin);
  for (unsigned i = 0; i < n; i++)
    add_part(&out, part, i);
  add_part(&out, end, n);
  return out;
}

// Twice the text takes at most 2.5 times the steps, or both are refused.
TEST(steps) {
  static const struct {
    grammar_kind kind;
    const char *begin, *part, *end;
    unsigned n;
  } list[] = {
      {GBNF, "root ::= r0\n", "r% ::= r@\n", "r% ::= \"a\"", 4000},
      {GBNF, "root ::= r0\n", "r% ::= \"a\" | \"b\" r% | r@\n", "r% ::= \"a\"", 4000},
      {GBNF, "root ::= ", "\"a% \" | ", "[]", 4000},
      {GBNF, "root ::= ", "((", "", 60},
      {GBNF, "root ::= [", "a-b", "]", 4000},
      {GBNF, "root ::= [^", "\\U0000a%", "]", 900},
      {PATTERN, "", "(a%|[^b]+)?", "", 2000},
      {PATTERN, "", "a{0,9}", "", 2000},
      {SCHEMA, "{\"properties\":{", "\"p%\":{},", "\"z\":{}}}", 2000},
      {SCHEMA, "{\"additionalProperties\":true,\"properties\":{", "\"p%\":{},", "\"z\":{}}}", 2000},
      {SCHEMA, "{\"required\":[", "\"p%\",", "\"z\"]}", 2000},
      {SCHEMA, "{\"enum\":[", "\"p%\",", "1]}", 2000},
      {SCHEMA, "{\"anyOf\":[", "{\"type\":\"string\"},", "{}]}", 200},
      {SCHEMA, "{\"properties\":{", "\"p%\":{\"$ref\":\"#/properties/p@\"},", "\"p%\":{}}}", 1000},
      {SCHEMA, "{\"allOf\":[", "{\"properties\":{\"p%\":{}}},", "{}]}", 16},
  };
  for (size_t i = 0; i < TD_COUNT(list); i++) {
    uint64_t steps[2];
    td_status st[2];
    td_err err;
    for (unsigned k = 0; k < 2; k++) {
      td_budget budget = {.steps = 1u << 26, .bytes = 256u << 20};
      td_buf bytes = TD_BUF_INIT;
      td_buf text = repeated(list[i].begin, list[i].part, list[i].n << k, list[i].end);
      st[k] = compile_within(&bytes, list[i].kind, td_buf_text(&text), &budget, &err);
      steps[k] = (1u << 26) - budget.steps;
      td_buf_free(&bytes);
      td_buf_free(&text);
    }
    if (steps[1] > steps[0] * 5 / 2) {
      fail_msg("%s%s: %llu steps, twice that text %llu", list[i].begin, list[i].part,
               (unsigned long long)steps[0], (unsigned long long)steps[1]);
    }
    if (st[0] == TD_OK && st[1] != TD_OK && st[1] != TD_ELIMIT) fail_msg("%s", err.msg);
  }
}

// What would be worse than linear ends with the budget of a request, whose memory is bounded too.
TEST(exhaustion) {
  td_buf deep = repeated("{\"additionalProperties\":true,\"properties\":{\"", "aaaaaaaaaa", 10000,
                         "\":{}}}");
  td_buf wide = repeated("{\"properties\":{", "\"p%\":{},", 200000, "\"z\":{}}}");
  td_buf product = repeated("{\"anyOf\":[", "{\"required\":[\"a%\"]},", 500,
                            "{}],\"properties\":{");
  td_buf rest = repeated("", "\"p%\":{},", 20000, "\"z\":{}}}");
  td_buf branches = repeated("{\"$ref\":\"#/d0\",",
                             "\"d%\":{\"allOf\":[{\"$ref\":\"#/d@\"},"
                             "{\"$ref\":\"#/d@\"}]},",
                             15, "\"d%\":{}}");
  td_buf_add(&product, rest.data, rest.len);
  const td_buf *all[] = {&deep, &wide, &product, &branches};
  const td_status expected[] = {TD_OK, TD_ELIMIT, TD_ELIMIT, TD_OK};
  for (size_t i = 0; i < TD_COUNT(all); i++) {
    td_buf bytes = TD_BUF_INIT;
    td_err err;
    if (compile(&bytes, SCHEMA, all[i]->data, &err) != expected[i])
      fail_msg("%.60s: %s", all[i]->data, err.msg);
    td_buf_free(&bytes);
  }
  td_buf_free(&deep);
  td_buf_free(&wide);
  td_buf_free(&product);
  td_buf_free(&rest);
  td_buf_free(&branches);
}
