// tests/tools/grammar_bench.c - what a grammar costs a decode step: the draw of a token with and
// without one, over a vocabulary of N made-up tokens (150,000).
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/json_write.h"
#include "engine/sampler.h"
#include "text/tokenizer/bytelevel.h"
#include "unit/grammars.h"

enum { STEPS = 4000 };

// Words of one to twelve letters, most with a space before them, digits and punctuation.
static size_t make_token(char *out, uint64_t i) {
  static const char marks[] = "\"{}[]:,. \n\\/-_()=+0123456789";
  size_t n = 0;
  uint64_t x = i * 0x9e3779b97f4a7c15u;
  if (i % 16 == 0) {
    for (unsigned k = 0; k < 1 + i / 16 % 3; k++, x /= 29)
      out[n++] = marks[x % (sizeof marks - 1)];
  }
  if (i % 3) out[n++] = ' ';
  for (size_t len = 2 + x % 9; len; len--, x = x * 6364136223846793005u + 1442695040888963407u)
    out[n++] = (char)('a' + (x >> 40) % 26);
  return n;
}

static td_tokenizer *make_tokenizer(uint32_t n_vocab) {
  td_buf json = TD_BUF_INIT;
  td_err err;
  td_tokenizer *tok;
  td_buf_str(&json, "{\"added_tokens\":[],\"pre_tokenizer\":null,\"decoder\":{\"type\":"
                    "\"ByteLevel\"},\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":");
  td_json_writer w = TD_JSON_WRITER(&json);
  td_jw_begin_object(&w, NULL);
  for (uint32_t i = 0; i < n_vocab; i++) {
    char text[32] = {(char)i};
    size_t len = i < 256 ? 1 : make_token(text, i);
    td_buf spelled = TD_BUF_INIT;
    td_bytelevel_spell(&spelled, text, len);
    if (i >= 256) td_buf_printf(&spelled, "%x", i); // each once
    td_jw_int(&w, td_buf_text(&spelled), i);
    td_buf_free(&spelled);
  }
  td_jw_end_object(&w);
  td_buf_str(&json, "}}");
  if (td_tokenizer_open_json(&tok, "vocabulary", json.data, json.len, NULL, 0, &err) != TD_OK) {
    fprintf(stderr, "%s\n", err.msg);
    exit(1);
  }
  td_buf_free(&json);
  return tok;
}

// CPU time of this thread: other programs do not count.
static double now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

// Mean and longest microseconds of a draw.
static void measure(const char *name, td_grammars *grammars, const td_buf *grammar,
                    const td_sampling *params, uint32_t n_vocab) {
  td_sampler *sampler;
  td_matcher *m = NULL;
  td_err err;
  float *given = malloc(n_vocab * sizeof *given), *logits = malloc(n_vocab * sizeof *logits);
  double total = 0, longest = 0;
  uint32_t n = 0;
  uint64_t x = 1;
  for (uint32_t i = 0; i < n_vocab; i++, x = x * 6364136223846793005u + 1442695040888963407u)
    given[i] = (float)(x >> 40) * 0x1p-22f;
  for (; n < STEPS; n++) {
    if (!m && grammar) td_matcher_open(&m, grammars, grammar->data, grammar->len, &err);
    if (n == 0) td_sampler_open(&sampler, params, NULL, 0, n_vocab, &err);
    td_sampler_constrain(sampler, m);
    memcpy(logits, given, n_vocab * sizeof *logits);
    double begin_us = now_us();
    td_sampler_next(sampler, logits, 0);
    double us = now_us() - begin_us;
    total += us;
    if (us > longest) longest = us;
    if (td_sampler_status(sampler, &err) != TD_OK) {
      fprintf(stderr, "%s\n", err.msg);
      exit(1);
    }
    if (m && td_matcher_must_end(m)) {
      td_matcher_close(m);
      m = NULL;
    }
  }
  printf("%-28s %8.1f us a draw, longest %8.1f us\n", name, total / n, longest);
  td_matcher_close(m);
  td_sampler_close(sampler);
  free(given);
  free(logits);
}

// Mean and longest microseconds to advance by a random allowed token and to make the next mask.
static void measure_masks(const char *name, const td_token_index *index, const td_buf *grammar) {
  enum { RUNS = 4, TOKENS = 250 };
  td_grammars *grammars;
  td_err err;
  if (td_grammars_open(&grammars, index, &err) != TD_OK) exit(1);
  uint64_t x = 1;
  for (int run = 0; run < RUNS; run++) {
    td_matcher *m;
    double total = 0, longest = 0;
    uint32_t n = 0;
    double begin_us = now_us();
    if (td_matcher_open(&m, grammars, grammar->data, grammar->len, &err) != TD_OK) {
      fprintf(stderr, "%s\n", err.msg);
      exit(1);
    }
    const double open_us = now_us() - begin_us;
    while (n < TOKENS && !td_matcher_must_end(m)) {
      begin_us = now_us();
      const uint64_t *mask = td_matcher_mask(m);
      double us = now_us() - begin_us;
      if (!mask) break;
      uint32_t id;
      do {
        x = x * 6364136223846793005u + 1442695040888963407u;
        id = (uint32_t)(x >> 33) % index->n_vocab;
        for (; x >> 62 == 0 && id < index->n_vocab && !(mask[id / 64] >> (id % 64) & 1);)
          id++;
      } while (id >= index->n_vocab || !(mask[id / 64] >> (id % 64) & 1));
      begin_us = now_us();
      td_matcher_advance(m, (int32_t)id);
      us += now_us() - begin_us;
      n++;
      total += us;
      if (us > longest) longest = us;
    }
    if (td_matcher_status(m, &err) != TD_OK) printf("%s\n", err.msg);
    if (run == 0 || run == RUNS - 1) {
      printf("%-28s %s: open %7.0f us, %3u tokens, %8.1f us a token, longest %8.1f us\n", name,
             run ? "again" : "first", open_us, n, total / (n ? n : 1), longest);
    }
    td_matcher_close(m);
  }
  td_grammars_close(grammars);
}

static td_buf compiled(grammar_kind kind, const char *text) {
  td_buf bytes = TD_BUF_INIT;
  td_err err;
  if (compile(&bytes, kind, text, &err) == TD_OK) return bytes;
  fprintf(stderr, "%s: %s\n", text, err.msg);
  exit(1);
}

int main(int argc, char **argv) {
  static const char schema[] =
      "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\",\"maxLength\":200},"
      "\"age\":{\"type\":\"integer\",\"minimum\":0,\"maximum\":150},\"tags\":{\"type\":\"array\","
      "\"items\":{\"type\":\"string\"},\"maxItems\":8},\"more\":{\"type\":\"object\"}},"
      "\"required\":[\"name\",\"age\",\"tags\",\"more\"]}";
  uint32_t n_vocab = argc > 1 ? (uint32_t)atoi(argv[1]) : 150000;
  td_err err;
  uint64_t begin_ns = td_clock_ns();
  td_tokenizer *tok = make_tokenizer(n_vocab);
  uint64_t index_ns = td_clock_ns();
  td_token_index *index;
  td_grammars *grammars;
  if (td_token_index_open(&index, tok, n_vocab, &err) != TD_OK) return 1;
  printf("tokenizer %.0f ms, index %.0f ms\n", (double)(index_ns - begin_ns) * 1e-6,
         (double)(td_clock_ns() - index_ns) * 1e-6);
  td_buf text = compiled(SCHEMA, schema);
  static const char *const regexes[] = {"[a-z]+@[a-z]+\\.[a-z]{2,4}( [a-z]+@[a-z]+\\.[a-z]{2,4})*",
                                        ".*error.{0,200}", "q1|(.*[a-m].{30}){8}",
                                        "(.*[a-m].{60}){40}", "([a-z ]{1,100}){0,100}"};
  measure_masks("schema", index, &text);
  td_buf object = compiled(GBNF, "JSON");
  measure_masks("any JSON object", index, &object);
  td_buf_free(&object);
  for (size_t i = 0; i < TD_COUNT(regexes); i++) {
    td_buf regex = compiled(PATTERN, regexes[i]);
    measure_masks(regexes[i], index, &regex);
    td_buf_free(&regex);
  }
  if (argc > 2) return 0;
  if (td_grammars_open(&grammars, index, &err) != TD_OK) return 1;
  static const td_sampling samplings[] = {
      {.temperature = 0}, {.temperature = 1}, {.temperature = 1, .top_p = 0.95f}};
  static const char *const names[] = {"greedy", "temperature 1", "top_p 0.95"};
  for (size_t i = 0; i < TD_COUNT(samplings); i++) {
    char name[64];
    measure(names[i], grammars, NULL, &samplings[i], n_vocab);
    for (int again = 0; again < 2; again++) {
      snprintf(name, sizeof name, "%s, schema%s", names[i], again ? ", again" : "");
      measure(name, grammars, &text, &samplings[i], n_vocab);
    }
  }
  td_buf_free(&text);
  td_grammars_close(grammars);
  td_token_index_close(index);
  td_tokenizer_close(tok);
  return 0;
}
