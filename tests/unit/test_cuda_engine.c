// tests/unit/test_cuda_engine.c - decode steps on the CUDA device, which are launched as
// graphs: what one stands for must be all that changes from step to step.
// CTest: gpu slow no-asan

#include <dlfcn.h>
#include <sched.h>

#include "base/cpus.h"
#include "cuda_emu/hooks.h"
#include "device/cuda/cuda.h"
#include "engine/sampler.h"
#include "runtime/session.h"
#include "unit/arena_test.h"
#include "unit/engine_test.h"
#include "unit/peer_test.h"
#include "unit/sanitized.h"

enum {
  N_SCHEDULES = IS_TSAN ? 2 : 8,
  N_FEW_SCHEDULES = N_SCHEDULES > 4 ? 2 : 1
};                                              // of either model
enum { N_SEQS = 3, N_TOKENS = 18, N_ROWS = 2 }; // of a step in all

static td_session *open_model(td_expert_place experts) {
  td_session *s;
  td_err err;
  const td_session_opts opts = {.runtime = {.model_dir = golden_dir("qwen3_moe"),
                                            .device = "cuda",
                                            .experts = experts,
                                            .ctx_size = 64,
                                            .prefill_chunk = 64},
                                .max_seqs = N_SEQS + 1}; // beside the session's own
  td_status st = td_session_open(&s, &opts, &err);
  if (st == TD_OK) return s;
  if (getenv("TANDEM_CUDA_LIB")) fail_msg("%s", err.msg);
  print_message("skipped: %s\n", err.msg);
  skip();
  return NULL;
}

// N_TOKENS generated tokens that n sequences share, all from the beginning; the best token after
// each of the last N_ROWS, and its log-probability.
static void run_answers(td_session *s, uint32_t n, td_wire_token *out) {
  td_step_seq seqs[N_SEQS];
  int32_t tokens[N_TOKENS];
  td_err err;
  for (int32_t i = 0; i < N_TOKENS; i++)
    tokens[i] = 3 + 5 * i;
  uint32_t ids[N_SEQS], length = N_TOKENS / n;
  for (uint32_t i = 0; i < n; i++) {
    assert_int_equal(td_kv_seq_open(s->kv, &ids[i], &err), TD_OK);
    assert_int_equal(td_kv_reserve(s->kv, ids[i], length, &err), TD_OK);
    seqs[i] = (td_step_seq){.tokens = tokens + i * length,
                            .n_tokens = length,
                            .want = i + N_ROWS < n ? TD_WANT_NONE : TD_WANT_LAST,
                            .is_decode = true};
    seqs[i].pages = td_kv_pages(s->kv, ids[i], &seqs[i].n_pages);
  }
  if (td_engine_step(s->engine, seqs, n, &err) != TD_OK) fail_msg("%s", err.msg);
  td_sampler *greedy;
  const td_sampling params = {.n_top_logprobs = 1};
  assert_int_equal(td_sampler_open(&greedy, &params, NULL, 0, s->config->n_vocab, &err), TD_OK);
  for (uint32_t i = 0; i < N_ROWS; i++)
    assert_int_equal(td_engine_draw(s->engine, i, greedy, 1, &out[i], &err), TD_OK);
  td_sampler_close(greedy);
  for (uint32_t i = 0; i < n; i++)
    td_kv_seq_close(s->kv, ids[i]);
}

// Answers computed again come several tokens a sequence: as many tokens, but of more sequences.
TEST(steps_of_as_many_tokens) {
  td_session *fresh = open_model(TD_EXPERTS_GPU), *used = open_model(TD_EXPERTS_GPU);
  td_wire_token want[N_ROWS], got[N_ROWS];
  run_answers(fresh, 3, want);
  for (int i = 0; i < 3; i++)
    run_answers(used, 2, got);
  run_answers(used, 3, got);
  for (int i = 0; i < N_ROWS; i++) {
    assert_int_equal(got[i].id, want[i].id);
    assert_memory_equal(&got[i].logprob, &want[i].logprob, sizeof(float));
  }
  td_session_close(fresh);
  td_session_close(used);
}

// A token drawn beside a sequence that wants that much.
static td_wire_token draw_beside(td_session *s, td_want want, int32_t first) {
  enum { LENGTH = 4 };
  const int32_t tokens[2][LENGTH] = {{first, 40, 41, 42}, {3, 4, first, 6}};
  td_step_seq seqs[2];
  uint32_t ids[2];
  td_err err;
  for (uint32_t i = 0; i < 2; i++) {
    assert_int_equal(td_kv_seq_open(s->kv, &ids[i], &err), TD_OK);
    assert_int_equal(td_kv_reserve(s->kv, ids[i], LENGTH, &err), TD_OK);
    seqs[i] = (td_step_seq){
        .tokens = tokens[i], .n_tokens = LENGTH, .want = i ? TD_WANT_LAST : want};
    seqs[i].pages = td_kv_pages(s->kv, ids[i], &seqs[i].n_pages);
  }
  if (td_engine_step(s->engine, seqs, 2, &err) != TD_OK) fail_msg("%s", err.msg);
  td_sampler *greedy;
  td_wire_token out;
  const float *logits;
  const td_top_logits *top;
  const td_sampling params = {.n_top_logprobs = 5};
  const uint32_t row = want == TD_WANT_ALL ? LENGTH : 0;
  assert_int_equal(td_sampler_open(&greedy, &params, NULL, 0, s->config->n_vocab, &err), TD_OK);
  assert_int_equal(td_engine_draw(s->engine, row, greedy, 1, &out, &err), TD_OK);
  assert_int_equal(td_engine_fetch_logits(s->engine, row, &logits, &top, &err), TD_OK);
  assert_true(logits[out.id] == top->value[0] && top->id[0] == out.id);
  td_sampler_close(greedy);
  for (uint32_t i = 0; i < 2; i++)
    td_kv_seq_close(s->kv, ids[i]);
  return out;
}

// A draw has the same bits beside a prompt that is scored, of which the host gets all logits.
TEST(draws_beside_a_scored_prompt) {
  td_session *s = open_model(TD_EXPERTS_GPU);
  for (int32_t first = 2; first < (IS_TSAN ? 4 : 18); first++) {
    const td_wire_token want = draw_beside(s, TD_WANT_NONE, first);
    const td_wire_token got = draw_beside(s, TD_WANT_ALL, first);
    assert_memory_equal(&got, &want, sizeof got);
  }
  td_session_close(s);
}

// A CPU is left to the thread that drives the GPU, unless it is said how many compute.
TEST(threads_beside_a_gpu) {
  cpu_set_t before, after;
  const unsigned n_cpus = td_cpu_count(), want = n_cpus > 1 ? n_cpus - 1 : 1;
  char name[32];
  sched_getaffinity(0, sizeof before, &before);
  td_session *s = open_model(TD_EXPERTS_CPU);
  snprintf(name, sizeof name, "cpu, %u threads", want);
  assert_non_null(strstr(td_dev_name(s->devices.expert_dev), name));
  assert_int_equal(s->devices.n_threads, want);
  sched_getaffinity(0, sizeof after, &after);
  assert_true(CPU_EQUAL(&before, &after));
  td_devices devices;
  td_err err;
  const td_runtime_opts runtime = {
      .device = "cuda", .n_threads = n_cpus, .experts = TD_EXPERTS_CPU};
  const td_devices_opts opts = {.runtime = &runtime};
  assert_int_equal(td_devices_open(&devices, &opts, s->model, &err), TD_OK);
  assert_int_equal(devices.n_threads, n_cpus);
  td_devices_close(&devices);
  td_session_close(s);
}

// A GPU that fails hands nothing over any more: who waits for that is told.
static void check_failure(bool is_answer) {
  const char *library = getenv("TANDEM_CUDA_LIB");
  td_session *s = open_model(TD_EXPERTS_CPU);
  assert_non_null(s->devices.expert_dev);
  td_wire_token token[N_ROWS];
  run_answers(s, 3, token);
  if (library && strstr(library, "_emu")) {
    const int32_t id = 3, page = 0;
    td_step_seq seq = {.tokens = &id, .n_tokens = 1, .pages = &page, .n_pages = 1};
    td_err err;
    seq.is_decode = is_answer;
    setenv("TANDEM_EMU_BREAK", "1", 1);
    assert_int_equal(td_engine_step(s->engine, &seq, 1, &err), TD_EINTERNAL);
    assert_non_null(strstr(err.msg, "illegal memory access"));
    unsetenv("TANDEM_EMU_BREAK");
    assert_int_equal(td_engine_step(s->engine, &seq, 1, &err), TD_EINTERNAL); // for good
  }
  td_session_close(s);
}

TEST(a_failure_is_not_waited_for) {
  check_failure(false);
  check_failure(true);
}

// Rows with ||a - b|| / ||b|| of more than that.
static uint32_t rows_beyond(double most, const float *a, const float *b, size_t n_rows,
                            size_t n_vocab) {
  uint32_t n = 0;
  for (size_t r = 0; r < n_rows; r++) {
    double difference = 0, size = 0;
    for (size_t i = r * n_vocab; i < (r + 1) * n_vocab; i++) {
      difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
      size += (double)b[i] * b[i];
    }
    n += !(sqrt(difference / size) <= most);
  }
  return n;
}

// Wherever experts are computed, logits differ by what is rounded elsewhere, a little: the bounds
// are test_golden_cuda.py's.
// On a device of its own: copies of weights are found by address, which another model may get.
static float *logits_where(const small_model *m, placement where, size_t *n_vocab) {
  td_dev *dev;
  td_err err;
  assert_int_equal(td_dev_open(&dev, &(td_dev_opts){.kind = "cuda"}, &err), TD_OK);
  float *out = engine_logits(m, dev, where, false, n_vocab);
  td_dev_close(dev);
  return out;
}

static void check_where(const small_model *m) {
  static const placement others[] = {APART, IN_HALVES, PARTED, STREAMED};
  size_t n_vocab;
  float *together = logits_where(m, TOGETHER, &n_vocab);
  for (size_t k = 0; k < TD_COUNT(others); k++) {
    float *other = logits_where(m, others[k], &n_vocab);
    assert_true(rows_beyond(0, other, together, ENGINE_ROWS, n_vocab) > 0);
    assert_true(rows_beyond(0.03, other, together, ENGINE_ROWS, n_vocab) <= ENGINE_ROWS / 2);
    assert_true(rows_beyond(0.06, other, together, ENGINE_ROWS, n_vocab) <= ENGINE_ROWS / 20);
    free(other);
  }
  free(together);
}

// Skips the test on a machine without one; a library that is named has to work.
static void need_gpu(void) {
  td_dev *dev;
  td_err err;
  if (td_dev_open(&dev, &(td_dev_opts){.kind = "cuda"}, &err) != TD_OK) {
    if (getenv("TANDEM_CUDA_LIB")) fail_msg("%s", err.msg);
    skip();
  }
  td_dev_close(dev);
}

TEST(where_experts_are) {
  need_gpu();
  for (size_t i = 0; i < N_SMALL_MODELS; i++)
    check_where(&small_models[i]);
  checkpoint ck;
  ck_gpt_oss(&ck);
  ck_write(&ck);
  check_where(&(small_model){ck.dir, PAIRED_RING});
  ck_free(&ck);
}

// A cache of experts changes logits by what is rounded elsewhere, as whole layers on the GPU do,
// and only as far as it holds some: the bounds are those above. Steps are replayed while it
// changes.
static void check_cached(const small_model *m, const cache_case *cache) {
  static const cache_case plain = {.n_microbatches = 1, .n_steps = CACHE_FEW_STEPS};
  const cache_result want = cached_logits(m, "cuda", &plain, 0);
  const cache_result got = cached_logits(m, "cuda", cache, 1);
  assert_int_equal(got.n_rows, want.n_rows);
  const size_t n = got.n_rows, n_vocab = got.n_vocab;
  assert_true(rows_beyond(0, got.out, want.out, n, n_vocab) > 0);
  assert_true(rows_beyond(0.03, got.out, want.out, n, n_vocab) <= n / 2);
  assert_true(rows_beyond(0.06, got.out, want.out, n, n_vocab) <= n / 20);
  assert_true(got.stats.hits > 0 && got.stats.moves > 0);
  free(got.out);
  free(want.out);
}

TEST(cached_experts) {
  static const cache_case of_model[] = {{5, 2, 1, CACHE_FEW_STEPS}, {4, 1, 0, CACHE_FEW_STEPS}};
  need_gpu();
  setenv("TANDEM_EMU_PIN", "2", 1);
  for (size_t i = 0; i < N_SMALL_MODELS; i++)
    check_cached(&small_models[i], &of_model[i]);
  checkpoint ck;
  ck_gpt_oss(&ck);
  ck_write(&ck);
  check_cached(&(small_model){ck.dir, PAIRED_RING}, &of_model[0]);
  ck_free(&ck);
  unsetenv("TANDEM_EMU_PIN");
}

// Two GPUs give the bits of one that has all these experts: by each other's memory and through the
// host's. On a machine with one GPU, both are that one.
TEST(a_peer) {
  const char *library = getenv("TANDEM_CUDA_LIB");
  const bool is_emulator = library && strstr(library, "_emu");
  td_dev *dev;
  td_err err;
  if (td_dev_open(&dev, &(td_dev_opts){.kind = "cuda"}, &err) != TD_OK) {
    if (library) fail_msg("%s", err.msg);
    skip();
  }
  td_dev_close(dev);
  if (is_emulator) setenv("TANDEM_EMU_DEVICES", "2", 1);
  static const peer_case one[] = {{99, 0, true, 1}, {13, 0, true, 1}};
  static const peer_case two[] = {{99, 99, true, 2}, {4, 9, true, 1}};
  peer_is_brief = true;
  peer_is_first_gpu = !is_emulator;
  for (size_t i = 0; i < N_SMALL_MODELS; i++) {
    for (size_t k = i; k < TD_COUNT(one); k++) {
      const peer_result want = peer_logits(&small_models[i], "cuda", &one[k], 0);
      for (unsigned seed = 0; seed < 2; seed++) {
        if (is_emulator) setenv("TANDEM_EMU_PEER", seed ? "1" : "0", 1);
        const peer_result got = peer_logits(&small_models[i], "cuda", &two[k], seed);
        assert_memory_equal(got.out, want.out, want.n_rows * want.n_vocab * sizeof *want.out);
        assert_true(got.plan.n_ways[TD_LAYER_PAIRED] + got.plan.n_ways[TD_LAYER_SPREAD] > 0);
        free(got.out);
      }
      free(want.out);
    }
  }
  unsetenv("TANDEM_EMU_DEVICES");
  unsetenv("TANDEM_EMU_PEER");
}

// Experts stream before their memory is registered as they do after it, to the bit: when that is, a
// clock says.
TEST(streaming_before_registering) {
  const char *library = getenv("TANDEM_CUDA_LIB");
  if (!library || !strstr(library, "_emu")) skip();
  char gate[] = "/tmp/tandem-gate-XXXXXX";
  const int fd = mkstemp(gate);
  assert_true(fd >= 0);
  close(fd);
  setenv("TANDEM_EMU_PIN_GATE", gate, 1);
  setenv("TANDEM_EMU_PIN", "2", 1);
  td_dev *dev;
  td_err err;
  assert_int_equal(td_dev_open(&dev, &(td_dev_opts){.kind = "cuda"}, &err), TD_OK);
  const small_model *m = &small_models[0];
  size_t n_vocab, n_memory;
  float *apart = engine_logits(m, dev, APART, false, &n_vocab);
  const size_t n_bytes = ENGINE_ROWS * n_vocab * sizeof *apart;
  float *before = malloc(n_bytes), *after = malloc(n_bytes);
  engine_fixture f;
  open_engine(&f, m, dev, STREAMED, LONG_PROMPT + 1);
  const char *memory = experts_memory(f.model, &n_memory);
  td_dev_pin(dev, memory, n_memory, false);
  keep_steps(&f, before);
  assert_memory_not_equal(before, apart, n_bytes);
  unlink(gate);
  td_dev_wait_pinned(dev, memory, n_memory);
  keep_steps(&f, after);
  assert_memory_equal(after, before, n_bytes);
  close_engine(&f);
  td_dev_close(dev);
  unsetenv("TANDEM_EMU_PIN_GATE");
  unsetenv("TANDEM_EMU_PIN");
  free(apart);
  free(before);
  free(after);
}

// Experts that come from a drive: no copy of a prompt's step holds the caller, though their scales
// are in memory that is not pinned. Same logits as with all in memory.
TEST(copies_of_read_experts_hold_nobody) {
  need_gpu();
  void *library = getenv("TANDEM_CUDA_LIB") ? dlopen(getenv("TANDEM_CUDA_LIB"), RTLD_NOW) : NULL;
  unsigned long (*n_pageable)(void) = NULL;
  if (library) *(void **)&n_pageable = dlsym(library, "emu_pageable_copies");
  if (!n_pageable) skip();
  const small_model *m = &small_models[N_SMALL_MODELS - 1];
  td_dev *dev;
  td_err err;
  size_t n_vocab, n_memory;
  engine_fixture f = {.n_vocab = 0};
  assert_int_equal(td_dev_open(&dev, &(td_dev_opts){.kind = "cuda"}, &err), TD_OK);
  float *want = engine_logits(m, dev, STREAMED, false, &n_vocab);
  float *got = malloc(ENGINE_ROWS * n_vocab * sizeof *got);
  td_expert_arena *arena;
  const int fd = load_weights(golden_dir(m->name), 1000);
  assert_int_equal(td_model_open_weights(&f.model, golden_dir(m->name), fd, &err), TD_OK);
  assert_int_equal(td_expert_arena_open(&arena, f.model, fd, &odd_drive, &err), TD_OK);
  const void *memory = td_expert_arena_memory(arena, &n_memory);
  td_dev_pin(dev, memory, n_memory, true);
  td_dev_wait_pinned(dev, memory, n_memory);
  open_engine_from(&f, m, dev, STREAMED, PROMPT, arena);
  keep_steps(&f, got);
  assert_memory_equal(got, want, ENGINE_ROWS * n_vocab * sizeof *got);
  const unsigned long n_before = n_pageable();
  keep_steps(&f, got); // the dense weights are there
  assert_int_equal(n_pageable(), n_before);
  assert_memory_equal(got, want, ENGINE_ROWS * n_vocab * sizeof *got);
  td_engine_close(f.engine);
  td_dev_close(f.expert_dev);
  td_expert_arena_close(arena);
  td_model_close(f.model);
  td_dev_close(dev);
  close(fd);
  free(want);
  free(got);
}

// Whatever runs first on either device, or of the copies between them, which the caller does not
// wait for: experts are registered.
TEST(schedules) {
  need_gpu();
  setenv("TANDEM_EMU_PIN", "2", 1);
  for (size_t i = 0; i < N_SMALL_MODELS; i++)
    check_schedules(&small_models[i], "cuda", ALL_WAYS, ALL_WAYS, N_SCHEDULES);
  unsetenv("TANDEM_EMU_PIN");
}

TEST(dense_weights_that_stream) {
  need_gpu();
  setenv("TANDEM_EMU_PIN", "2", 1);
  for (size_t i = 0; i < N_SMALL_MODELS; i++) {
    check_dense_schedules(&small_models[i], "cuda", TOGETHER, 1);
    check_dense_schedules(&small_models[i], "cuda", ALL_WAYS, N_FEW_SCHEDULES);
  }
  unsetenv("TANDEM_EMU_PIN");
}

TEST(prefill_beside_decode) {
  need_gpu();
  setenv("TANDEM_EMU_PIN", "2", 1);
  setenv("TANDEM_EMU_SMS", "16", 1); // enough for a share
  for (size_t i = 0; i < N_SMALL_MODELS; i++)
    check_lanes(&small_models[i], "cuda", N_FEW_SCHEDULES);
  unsetenv("TANDEM_EMU_PIN");
  unsetenv("TANDEM_EMU_SMS");
}

// ---- steps with drafts --------------------------------------------------------------------------

enum { DRAFT_STEPS = 8, DRAFT_TOKENS = 4, DRAFT_ROWS = 15 };

// Tokens of each sequence: always DRAFT_TOKENS, of two or of three.
static const uint32_t drafted[DRAFT_STEPS][ENGINE_SEQS] = {
    {3, 1, 0}, {2, 1, 1}, {2, 2, 0}, {1, 2, 1}, {1, 3, 0}, {1, 1, 2}, {3, 1, 0}, {2, 1, 1}};

static td_step_seq drafted_seq(uint32_t s, uint32_t n_past, uint32_t n, int32_t *tokens) {
  static const int32_t pages[ENGINE_SEQS] = {2, 0, 1};
  for (uint32_t i = 0; i < n; i++)
    tokens[i] = (int32_t)(3 + (7 * s + 5 * (n_past + i)) % 200);
  return (td_step_seq){.tokens = tokens,
                       .n_tokens = n,
                       .n_past = n_past,
                       .pages = &pages[s],
                       .n_pages = 1,
                       .want = TD_WANT_ALL,
                       .is_decode = true};
}

// rows: [ENGINE_SEQS][DRAFT_ROWS] logits. alone: a token a step, of one sequence.
static void run_drafted(engine_fixture *f, bool alone, float *rows) {
  uint32_t n_past[ENGINE_SEQS] = {0};
  int32_t tokens[ENGINE_SEQS][DRAFT_TOKENS];
  for (uint32_t i = 0; i < DRAFT_STEPS; i++) {
    td_step_seq seqs[ENGINE_SEQS];
    float *to[ENGINE_SEQS], *logits = malloc(DRAFT_TOKENS * f->n_vocab * sizeof *logits);
    uint32_t n = 0;
    for (uint32_t s = 0; s < ENGINE_SEQS; s++) {
      to[n] = rows + (s * DRAFT_ROWS + n_past[s]) * f->n_vocab;
      if (drafted[i][s]) seqs[n++] = drafted_seq(s, n_past[s], drafted[i][s], tokens[s]);
      for (uint32_t j = 0; alone && j < drafted[i][s]; j++) {
        const td_step_seq one = drafted_seq(s, n_past[s] + j, 1, tokens[s]);
        float *out = to[n - 1] + j * f->n_vocab;
        keep_step(f, &one, 1, 1, &out);
      }
      n_past[s] += drafted[i][s];
    }
    float *at = logits;
    if (!alone) keep_step(f, seqs, n, DRAFT_TOKENS, &at);
    at = logits;
    for (uint32_t s = 0; !alone && s < n; at += seqs[s++].n_tokens * f->n_vocab)
      memcpy(to[s], at, seqs[s].n_tokens * f->n_vocab * sizeof *at);
    free(logits);
  }
}

static void check_drafted(const small_model *m, placement where) {
  td_dev *dev;
  td_err err;
  engine_fixture f;
  float *rows[2];
  assert_int_equal(td_dev_open(&dev, &(td_dev_opts){.kind = "cuda"}, &err), TD_OK);
  for (int i = 0; i < 2; i++) {
    open_engine(&f, m, dev, where, ENGINE_PAGE);
    const size_t n = ENGINE_SEQS * DRAFT_ROWS * f.n_vocab;
    rows[i] = calloc(n, sizeof **rows);
    run_drafted(&f, i == 0, rows[i]);
    if (i) assert_memory_equal(rows[1], rows[0], n * sizeof **rows);
    const td_step_plan *plan = &f.engine->step.plan;
    const bool is_apart = where == APART;
    assert_int_equal(plan->is_replayed, i == 0 || engine_drafts > 0);
    if (is_apart) assert_int_equal(plan->handover == TD_HANDOVER_SIGNALS, plan->is_replayed);
    uint32_t n_graphs = 0;
    for (uint32_t g = 0; g < N_CUDA_GRAPHS; g++)
      n_graphs += ((td_cuda_stream *)f.engine->stream)->graphs[g].graph != NULL;
    if (i) assert_int_equal(n_graphs, engine_drafts ? 2 : 0);
    close_engine(&f);
  }
  free(rows[0]);
  free(rows[1]);
  td_dev_close(dev);
}

// Several tokens of a sequence, drafted ones, have the bits of tokens one by one, and are replayed
// and handed over by signals as those are. Steps of as many tokens differ in whose they are.
TEST(drafted_steps) {
  need_gpu();
  for (size_t i = 0; i < N_SMALL_MODELS; i++) {
    engine_drafts = DRAFT_TOKENS;
    check_drafted(&small_models[i], TOGETHER);
    check_drafted(&small_models[i], APART);
    engine_drafts = 0;
    check_drafted(&small_models[i], APART);
  }
}

// What drafts take of the GPU's memory is what is planned for them.
TEST(memory_of_drafts) {
  need_gpu();
  enum { PAGES = 2, DRAFTS = 5 };
  td_engine_opts opts = {.n_pages = PAGES,
                         .page_tokens = TD_KV_PAGE_TOKENS,
                         .max_step_tokens = 40,
                         .max_step_seqs = 3,
                         .max_seq_tokens = PAGES * TD_KV_PAGE_TOKENS,
                         .kv_dtype = TD_F16};
  td_model *model;
  td_dev *dev;
  td_engine *engine;
  td_err err;
  assert_int_equal(td_model_open(&model, golden_dir("deepseek_yarn_mscale"), &err), TD_OK);
  assert_true(td_model_use_mtp(model));
  assert_int_equal(td_dev_open(&dev, &(td_dev_opts){.kind = "cuda"}, &err), TD_OK);
  size_t left[3];
  for (int i = 0; i < 3; i++) { // without, from the text, and by the layer, too
    opts.max_drafts = i ? DRAFTS : 0;
    opts.has_draft_layer = i == 2;
    assert_int_equal(td_engine_open(&engine, model, dev, &opts, &err), TD_OK);
    left[i] = td_dev_free_vram_bytes(dev);
    td_engine_close(engine);
    assert_int_equal(left[0] - left[i], td_engine_draft_bytes(model, false, &opts));
    assert_true(!i || left[i] < left[i - 1]);
  }
  td_dev_close(dev);
  td_model_close(model);
}
