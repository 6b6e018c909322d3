// tests/unit/test_engine.c - the engine with the routed experts on a device of their own.
#include <setjmp.h>

#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "engine/engine.h"
#include "unit/ref.h"

enum { PAGE_TOKENS = 16, N_PAGES = 8, SEQ_PAGES = 3, N_SEQS = 2, PROMPT = 37, ANSWER = 4 };

// A model, and one engine or another over it.
typedef struct {
  td_model *model;
  td_dev *dev, *expert_dev;
  td_engine *engine;
  size_t n_vocab;
} fixture;

static td_dev *open_cpu(unsigned n_threads) {
  td_dev *dev;
  td_err err;
  const td_dev_opts opts = {.kind = "cpu", .n_threads = n_threads};
  if (td_dev_open(&dev, &opts, &err) != TD_OK) fail_msg("%s", err.msg);
  return dev;
}

static void open_fixture(fixture *f, const char *dir, bool is_apart) {
  td_err err;
  *f = (fixture){.dev = open_cpu(2)};
  if (td_model_open(&f->model, dir, &err) != TD_OK) fail_msg("%s", err.msg);
  if (is_apart) f->expert_dev = open_cpu(3);
  const td_engine_opts opts = {.n_pages = N_PAGES,
                               .page_tokens = PAGE_TOKENS,
                               .max_step_tokens = PROMPT,
                               .max_step_seqs = N_SEQS,
                               .max_seq_tokens = SEQ_PAGES * PAGE_TOKENS,
                               .record_routing = true,
                               .expert_dev = f->expert_dev};
  if (td_engine_open(&f->engine, f->model, f->dev, &opts, &err) != TD_OK) fail_msg("%s", err.msg);
  f->n_vocab = td_model_config_of(f->model)->n_vocab;
}

static void close_fixture(fixture *f) {
  td_engine_close(f->engine);
  td_dev_close(f->expert_dev);
  td_dev_close(f->dev);
  td_model_close(f->model);
}

static void keep_step(fixture *f, const td_step_seq *seqs, uint32_t n_seqs, uint32_t n_rows,
                      float **out) {
  td_err err;
  if (td_engine_step(f->engine, seqs, n_seqs, &err) != TD_OK) fail_msg("%s", err.msg);
  memcpy(*out, td_engine_logits(f->engine), n_rows * f->n_vocab * sizeof **out);
  *out += n_rows * f->n_vocab;
}

// All logits of two prompts, one behind the other, and of answers to both, side by side.
static void run(fixture *f, float *out) {
  static const int32_t pages[N_SEQS][SEQ_PAGES] = {{0, 2, 4}, {1, 3, 5}};
  int32_t tokens[N_SEQS][PROMPT + ANSWER];
  for (int32_t s = 0; s < N_SEQS; s++) {
    for (int32_t i = 0; i < PROMPT + ANSWER; i++)
      tokens[s][i] = 3 + (7 * s + 5 * i) % 200;
  }
  td_step_seq seqs[N_SEQS];
  for (uint32_t s = 0; s < N_SEQS; s++) {
    seqs[s] = (td_step_seq){.tokens = tokens[s],
                            .n_tokens = PROMPT,
                            .pages = pages[s],
                            .n_pages = SEQ_PAGES,
                            .want = TD_WANT_ALL};
    keep_step(f, &seqs[s], 1, PROMPT, &out);
  }
  for (uint32_t i = 0; i < ANSWER; i++) {
    for (uint32_t s = 0; s < N_SEQS; s++) {
      seqs[s].tokens = tokens[s] + PROMPT + i;
      seqs[s].n_tokens = 1;
      seqs[s].n_past = PROMPT + i;
      seqs[s].is_decode = true;
    }
    keep_step(f, seqs, N_SEQS, N_SEQS, &out);
  }
}

// With and without shared experts and dense layers.
static void test_experts_apart_change_no_bit(void **state) {
  (void)state;
  static const char *const dirs[] = {TD_TEST_DIR "/golden/data/qwen3_moe",
                                     TD_TEST_DIR "/golden/data/deepseek_fp8"};
  for (size_t i = 0; i < TD_COUNT(dirs); i++) {
    fixture f;
    open_fixture(&f, dirs[i], false);
    const size_t n = (size_t)N_SEQS * (PROMPT + ANSWER) * f.n_vocab;
    float *together = malloc(n * sizeof *together), *apart = malloc(n * sizeof *apart);
    run(&f, together);
    close_fixture(&f);
    open_fixture(&f, dirs[i], true);
    run(&f, apart);
    close_fixture(&f);
    assert_memory_equal(apart, together, n * sizeof *apart);
    free(together);
    free(apart);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_experts_apart_change_no_bit)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
