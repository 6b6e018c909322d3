// tests/unit/test_expert_drive.c - experts that come from the drive: the same bits whatever the
// arena holds, however reads end, and whoever dies.
// CTest: slow

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "unit/arena_test.h"
#include "unit/engine_test.h"
#include "unit/sanitized.h"

enum {
  N_SCHEDULES = IS_TSAN || IS_ASAN ? 10 : 200,
  N_LONG = IS_TSAN || IS_ASAN ? 1 : 6,
  N_ABANDONED = IS_TSAN || IS_ASAN ? 2 : 7,
  N_KILLS = IS_TSAN || IS_ASAN ? 4 : 20,
};

// ---- an engine ----------------------------------------------------------------------------------

typedef struct {
  engine_fixture f;
  td_expert_arena *arena;
} drive_fixture;

// ring_bytes: for experts that stream to another device; 0: there is one device.
static bool is_unwanted(void *ctx);

static void open_drive_beside(drive_fixture *d, const char *dir, int fd, size_t ring_bytes) {
  td_err err;
  const td_dev_opts cpu = {.kind = "cpu", .n_threads = 2, .activations = TD_ACTIVATIONS_AUTO};
  *d = (drive_fixture){0};
  engine_fixture *f = &d->f;
  if (td_model_open_weights(&f->model, dir, fd, &err) != TD_OK) fail_msg("%s", err.msg);
  if (td_expert_arena_open(&d->arena, f->model, fd, &odd_drive, &err) != TD_OK)
    fail_msg("%s", err.msg);
  assert_non_null(d->arena);
  assert_int_equal(td_dev_open(&f->dev, &cpu, &err), TD_OK);
  if (ring_bytes) assert_int_equal(td_dev_open(&f->expert_dev, &cpu, &err), TD_OK);
  f->n_vocab = td_model_config_of(f->model)->n_vocab;
  const uint32_t max_tokens = LONG_PROMPT + 1, n_pages = max_tokens / ENGINE_PAGE + 1;
  const td_engine_opts opts = {.n_pages = n_pages + ENGINE_SEQS * SEQ_PAGES,
                               .page_tokens = ENGINE_PAGE,
                               .max_step_tokens = max_tokens,
                               .max_step_seqs = ENGINE_SEQS,
                               .max_seq_tokens = n_pages * ENGINE_PAGE,
                               .kv_dtype = td_dev_kv_dtype(f->dev, TD_F32),
                               .record_routing = true,
                               .arena = d->arena,
                               .is_unwanted = is_unwanted,
                               .expert_dev = f->expert_dev,
                               .stream_bytes = ring_bytes,
                               .break_even_tokens = PROMPT - ENGINE_SEQS};
  if (td_engine_open(&f->engine, f->model, f->dev, &opts, &err) != TD_OK) fail_msg("%s", err.msg);
}

static void open_drive(drive_fixture *d, const char *dir, int fd) {
  open_drive_beside(d, dir, fd, 0);
}

static void close_drive(drive_fixture *d) {
  td_engine_close(d->f.engine);
  td_dev_close(d->f.dev);
  td_dev_close(d->f.expert_dev);
  td_expert_arena_close(d->arena);
  td_model_close(d->f.model);
}

static float *resident_logits(const small_model *m, placement where, bool is_long,
                              size_t *n_vocab) {
  td_dev *dev;
  td_err err;
  const td_dev_opts cpu = {.kind = "cpu", .n_threads = 2, .activations = TD_ACTIVATIONS_AUTO};
  engine_activations = TD_ACTIVATIONS_AUTO;
  assert_int_equal(td_dev_open(&dev, &cpu, &err), TD_OK);
  float *out = engine_logits(m, dev, where, is_long, n_vocab);
  td_dev_close(dev);
  return out;
}

static size_t rows_of(bool is_long) {
  return ENGINE_ROWS + (is_long ? LONG_PROMPT + 1 : 0);
}

static void check_same(drive_fixture *d, const float *want, bool is_long, const char *what) {
  const size_t n = rows_of(is_long) * d->f.n_vocab;
  float *got = malloc(n * sizeof *got);
  keep_steps(&d->f, got);
  if (is_long) keep_long_step(&d->f, got + ENGINE_ROWS * d->f.n_vocab);
  for (uint32_t s = 0; s < ENGINE_SEQS; s++) {
    const td_step_seq seq = {.n_tokens = 1};
    assert_false(td_engine_has_failed(d->f.engine, &seq, 0, NULL));
  }
  if (memcmp(got, want, n * sizeof *got)) fail_msg("%s: other logits", what);
  free(got);
}

static void await_no_reads(td_expert_arena *arena, td_taken_expert taken) {
  while (td_expert_arena_state(arena, taken.slot) == TD_SLOT_LOADING)
    td_expert_arena_wait(arena, td_expert_arena_events(arena));
}

// ---- workers ------------------------------------------------------------------------------------
// First, since it forks: before there are threads.

// What one process read, others find; and a process that is killed holds up nobody.
TEST(workers_die) {
  const small_model *m = &small_models[0];
  char *dir = strdup(golden_dir(m->name));
  const int fd = load_weights(dir, 9);
  pid_t checker = fork();
  assert_true(checker >= 0);
  atomic_store(&drive_seed, 7);
  if (!checker) {
    size_t n_vocab;
    drive_fixture d;
    float *want = resident_logits(m, TOGETHER, false, &n_vocab);
    open_drive(&d, dir, fd);
    for (unsigned i = 0; i < 3 * N_KILLS; i++)
      check_same(&d, want, false, "beside others that die");
    _exit(0);
  }
  int status = 0;
  for (unsigned i = 0; i < N_KILLS; i++) {
    const pid_t victim = fork();
    assert_true(victim >= 0);
    if (!victim) {
      drive_fixture d;
      float *got = malloc(1 << 24);
      atomic_store(&drive_seed, 100 + i);
      open_drive(&d, dir, fd);
      for (;;) {
        float *at = got;
        keep_short_steps(&d.f, at);
      }
    }
    usleep(30000 + 7919 * i % 60000);
    assert_int_equal(kill(victim, SIGKILL), 0);
    assert_int_equal(waitpid(victim, NULL, 0), victim);
  }
  assert_int_equal(waitpid(checker, &status, 0), checker);
  assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  // Nothing is left of the dead: all slots can be taken, and then the drive is idle.
  td_model *model;
  td_expert_arena *arena;
  td_err err;
  td_taken_expert all[8], ahead[2] = {{.expert = 0}, {.expert = 1}};
  assert_int_equal(td_model_open_weights(&model, dir, fd, &err), TD_OK);
  assert_int_equal(td_expert_arena_open(&arena, model, fd, &odd_drive, &err), TD_OK);
  for (uint32_t e = 0; e < 8; e++)
    all[e].expert = e;
  assert_int_equal(td_expert_arena_stats_of(arena).n_slots, 9);
  assert_int_equal(td_expert_arena_take(arena, 0, all, 8, false), 8);
  for (uint32_t e = 0; e < 8; e++)
    await_no_reads(arena, all[e]);
  td_expert_arena_release(arena, all, 8);
  td_expert_arena_prefetch(arena, 1, ahead, 2);
  assert_true(ahead[0].slot >= 0 || ahead[1].slot >= 0);
  td_expert_arena_end_prefetch(arena, ahead, 2, NULL);
  td_expert_arena_close(arena);
  td_model_close(model);
  close(fd);
  free(dir);
}

static ssize_t endless_pread(int fd, void *to, size_t n_bytes, off_t offset) {
  (void)fd, (void)to, (void)n_bytes, (void)offset;
  return pause();
}

// What a dead process was reading is read by who waits for it, whatever else goes on meanwhile.
TEST(events_do_not_hide_a_death) {
  const char *dir = golden_dir(small_models[0].name);
  const int fd = load_weights(dir, 4);
  td_model *model;
  td_expert_arena *arena;
  td_err err;
  td_taken_expert awaited = {.expert = 0}, other = {.expert = 1};
  int ends[2];
  char told;
  atomic_store(&drive_seed, 0);
  assert_int_equal(pipe(ends), 0);
  assert_int_equal(td_model_open_weights(&model, dir, fd, &err), TD_OK);
  const pid_t reader = fork();
  assert_true(reader >= 0);
  if (!reader) {
    const td_expert_arena_opts opts = {.n_threads = 1, .pread = endless_pread};
    if (td_expert_arena_open(&arena, model, fd, &opts, &err) != TD_OK) _exit(1);
    td_expert_arena_take(arena, 0, &awaited, 1, false);
    if (write(ends[1], "", 1) != 1) _exit(1);
    for (;;)
      pause();
  }
  assert_int_equal(read(ends[0], &told, 1), 1);
  assert_int_equal(td_expert_arena_open(&arena, model, fd, &odd_drive, &err), TD_OK);
  assert_int_equal(td_expert_arena_take(arena, 0, &awaited, 1, false), 1);
  assert_int_equal(td_expert_arena_state(arena, awaited.slot), TD_SLOT_LOADING);
  assert_int_equal(kill(reader, SIGKILL), 0);
  assert_int_equal(waitpid(reader, NULL, 0), reader);
  while (td_expert_arena_state(arena, awaited.slot) == TD_SLOT_LOADING) {
    const uint32_t n_events = td_expert_arena_events(arena);
    td_expert_arena_take(arena, 0, &other, 1, false);
    td_expert_arena_release(arena, &other, 1);
    td_expert_arena_wait(arena, n_events);
  }
  assert_int_equal(td_expert_arena_state(arena, awaited.slot), TD_SLOT_READY);
  td_expert_arena_release(arena, &awaited, 1);
  td_expert_arena_close(arena);
  td_model_close(model);
  close(ends[0]);
  close(ends[1]);
  close(fd);
}

// A process that sleeps for the arena's lock goes on when it is free, though nobody wakes it: so it
// is where the waiter that an unlock woke was killed.
TEST(nobody_wakes_a_waiter) {
  enum { LOCK_AT = 6 * 4 + 5 * 8 }; // in the arena's head
  const unsigned has_waiters = 0x80000000u;
  const char *dir = golden_dir(small_models[0].name);
  const int fd = load_weights(dir, 4);
  td_resident r;
  td_err err;
  size_t n_bytes;
  assert_int_equal(td_resident_attach(&r, fd, &err), TD_OK);
  const char *arena_at = td_resident_find(&r, TD_RESIDENT_EXPERTS, &n_bytes);
  char *head = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, arena_at - r.base);
  assert_true(head != MAP_FAILED);
  _Atomic unsigned *word = (void *)(head + LOCK_AT); // 0: free; else the owner's thread
  td_model *model;
  td_expert_arena *arena;
  const td_taken_expert none = {.slot = -1};
  assert_int_equal(td_model_open_weights(&model, dir, fd, &err), TD_OK);
  assert_int_equal(td_expert_arena_open(&arena, model, fd, NULL, &err), TD_OK);
  assert_int_equal(atomic_load(word), 0);
  atomic_store(word, (unsigned)getpid());
  const pid_t waiter = fork();
  assert_true(waiter >= 0);
  if (!waiter) {
    td_expert_arena_release(arena, &none, 1);
    _exit(0);
  }
  while (!(atomic_load(word) & has_waiters))
    usleep(100);
  usleep(10000);
  atomic_store(word, 0);
  int status;
  assert_int_equal(waitpid(waiter, &status, 0), waiter);
  assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  td_expert_arena_close(arena);
  td_model_close(model);
  munmap(head, 4096);
  td_resident_detach(&r);
  close(fd);
}

// ---- the same bits ------------------------------------------------------------------------------

static uint64_t n_guessed; // experts that schedules prefetched

static void check_schedules_of(const small_model *m, placement where, unsigned n_schedules) {
  const char *dir = strdup(golden_dir(m->name));
  size_t n_vocab;
  float *want = resident_logits(m, where, true, &n_vocab);
  const unsigned n_sizes = 6;
  for (unsigned i = 0; i < n_schedules; i++) {
    char what[96];
    const uint32_t n_slots = i % n_sizes == 0   ? where == STREAMED ? 8 : 0
                             : i % n_sizes == 5 ? 1000
                                                : 4 * (i % n_sizes);
    snprintf(what, sizeof what, "%s, schedule %u, %u slots", m->name, i, n_slots);
    const int fd = load_weights(dir, n_slots);
    drive_fixture d;
    atomic_store(&drive_seed, i + 1);
    set_jitter(i % 3 == 0 ? i + 1 : 0);
    odd_drive.mirror = i % 4 == 3 ? dir : "";
    open_drive_beside(&d, dir, fd, where == STREAMED ? m->ring_bytes : 0);
    check_same(&d, want, i < N_LONG * n_sizes && i % 5 == 0, what);
    const td_expert_arena_stats stats = td_expert_arena_stats_of(d.arena);
    n_guessed += stats.prefetches_used + stats.prefetches_unused;
    close_drive(&d);
    close(fd);
  }
  odd_drive.mirror = "";
  set_jitter(0);
  free(want);
  free((char *)dir);
}

TEST(no_bit_depends_on_the_drive) {
  for (size_t i = 0; i < N_SMALL_MODELS; i++)
    check_schedules_of(&small_models[i], TOGETHER, N_SCHEDULES / 2);
  assert_true(n_guessed > 0);
}

// Prompts stream to another device, group by group, as they are read; decode does not.
TEST(through_a_ring) {
  for (size_t i = 0; i < N_SMALL_MODELS; i++)
    check_schedules_of(&small_models[i], STREAMED, N_SCHEDULES / 4);
}

static uint64_t all_expert_bytes(const td_model *model) {
  const td_model_config *c = td_model_config_of(model);
  uint64_t n = 0;
  for (uint32_t i = 0; i < c->n_layers; i++) {
    const td_layer *layer = td_model_layer(model, i);
    for (uint32_t k = 0; layer->is_moe && k < c->n_experts; k++) {
      n += td_weight_bytes(&layer->gate[k]) + td_weight_bytes(&layer->down[k]);
      if (layer->up) n += td_weight_bytes(&layer->up[k]);
    }
  }
  return n;
}

static uint64_t all_read_bytes(const td_expert_places *p) {
  uint64_t n = 0;
  for (size_t i = 0; i < (size_t)p->n_layers * p->n_experts * TD_EXPERT_PARTS; i++)
    if (p->parts[i].n_bytes) n += td_expert_part_span(&p->parts[i]);
  return n;
}

// From the drive to slots, once where all fit; from there to the ring, once in each prompt's step.
TEST(a_ring_gets_experts_once) {
  for (size_t i = 0; i < N_SMALL_MODELS; i++) {
    const int fd = load_weights(golden_dir(small_models[i].name), 1000);
    drive_fixture d;
    atomic_store(&drive_seed, 0);
    open_drive_beside(&d, golden_dir(small_models[i].name), fd, small_models[i].ring_bytes);
    float *logits = malloc(ENGINE_ROWS * d.f.n_vocab * sizeof *logits);
    keep_steps(&d.f, logits);
    assert_int_equal(td_engine_stream_progress(d.f.engine).copied_bytes,
                     ENGINE_SEQS * all_expert_bytes(d.f.model));
    assert_int_equal(td_expert_arena_stats_of(d.arena).drive.n_bytes,
                     all_read_bytes(td_expert_arena_places(d.arena)));
    free(logits);
    close_drive(&d);
    close(fd);
  }
}

// Of every format, in two sizes.
TEST(formats) {
  static const char *const names[] = {"deepseek_awq",       "qwen3_gptq",       "deepseek_fp8_rows",
                                      "deepseek_int4",      "deepseek_mixed",   "deepseek_mxfp4",
                                      "qwen3_dense_layers", "qwen3_fp8",        "qwen3_int4_zeros",
                                      "qwen3_int8",         "qwen3_mixed_tied", "qwen3_nvfp4"};
  for (size_t i = 0; i < TD_COUNT(names); i += IS_TSAN ? 9 : IS_ASAN ? 3 : 1)
    check_schedules_of(&(small_model){.name = names[i]}, TOGETHER, 2);
  void (*const made[])(checkpoint *) = {ck_gpt_oss, ck_qwen3_next};
  for (size_t i = 0; i < (IS_TSAN ? 1 : TD_COUNT(made)); i++) {
    checkpoint ck = {0};
    made[i](&ck);
    ck_write(&ck);
    check_schedules_of(&(small_model){.name = ck.dir}, TOGETHER, 2);
    ck_free(&ck);
  }
}

// All slots can be taken, though at first some may be read to.
static void await_unpinned(td_expert_arena *arena) {
  const td_expert_places *places = td_expert_arena_places(arena);
  const uint32_t n_slots = td_expert_arena_stats_of(arena).n_slots;
  const uint32_t n = n_slots < places->n_experts ? n_slots : places->n_experts;
  td_taken_expert all[8];
  assert_true(n <= TD_COUNT(all));
  for (uint32_t e = 0; e < n; e++)
    all[e].expert = e;
  while (td_expert_arena_take(arena, places->n_layers - 1, all, n, false) < n) {
    td_expert_arena_release(arena, all, n);
    td_expert_arena_wait(arena, td_expert_arena_events(arena));
  }
  td_expert_arena_release(arena, all, n);
}

// ---- guesses ------------------------------------------------------------------------------------

enum { N_GUESSES = 4 };

// Of the model's layer for that, behind a prompt; all logits of the last guess.
static void guess(int32_t guesses[N_GUESSES], float *logits, td_model *model,
                  td_expert_arena *arena, bool is_apart) {
  td_err err;
  td_dev *dev, *expert_dev = NULL;
  td_engine *engine;
  const td_dev_opts cpu = {.kind = "cpu", .n_threads = 2, .activations = TD_ACTIVATIONS_AUTO};
  assert_true(td_model_use_mtp(model));
  assert_int_equal(td_dev_open(&dev, &cpu, &err), TD_OK);
  if (is_apart) assert_int_equal(td_dev_open(&expert_dev, &cpu, &err), TD_OK);
  static const int32_t pages[SEQ_PAGES] = {0, 1, 2};
  int32_t tokens[PROMPT + 1];
  for (int32_t i = 0; i <= PROMPT; i++)
    tokens[i] = 3 + 5 * i % 200;
  const td_engine_opts opts = {.n_pages = SEQ_PAGES,
                               .page_tokens = ENGINE_PAGE,
                               .max_step_tokens = PROMPT,
                               .max_step_seqs = 1,
                               .has_draft_layer = true,
                               .max_seq_tokens = SEQ_PAGES * ENGINE_PAGE,
                               .kv_dtype = td_dev_kv_dtype(dev, TD_F32),
                               .arena = arena,
                               .expert_dev = expert_dev};
  if (td_engine_open(&engine, model, dev, &opts, &err) != TD_OK) fail_msg("%s", err.msg);
  const td_step_seq seq = {.tokens = tokens,
                           .n_tokens = PROMPT,
                           .pages = pages,
                           .n_pages = SEQ_PAGES,
                           .want = TD_WANT_LAST};
  const td_draft_seq draft = {.next = tokens + 1, .n_next = PROMPT, .out = guesses};
  const td_draft_step step = {
      .of = engine, .seqs = &seq, .drafts = &draft, .n_seqs = 1, .n_drafts = N_GUESSES};
  assert_int_equal(td_engine_step(engine, &seq, 1, &err), TD_OK);
  assert_int_equal(td_engine_draft(engine, &step, &err), TD_OK);
  memcpy(logits, td_engine_logits(engine), td_model_config_of(model)->n_vocab * sizeof *logits);
  td_engine_close(engine);
  td_dev_close(expert_dev);
  td_dev_close(dev);
}

TEST(the_layer_that_drafts) {
  char *dir = strdup(golden_dir("deepseek_yarn_mscale"));
  td_model *model;
  td_expert_arena *arena;
  td_err err;
  int32_t want[N_GUESSES], got[N_GUESSES];
  atomic_store(&drive_seed, 5);
  assert_int_equal(td_model_open(&model, dir, &err), TD_OK);
  const uint32_t n_vocab = td_model_config_of(model)->n_vocab;
  float *want_logits = malloc(n_vocab * sizeof(float)), *logits = malloc(n_vocab * sizeof(float));
  guess(want, want_logits, model, NULL, false);
  td_model_close(model);
  for (uint32_t i = 0; i < 6; i++) {
    const int fd = load_weights(dir, i / 2 * 4);
    assert_int_equal(td_model_open_weights(&model, dir, fd, &err), TD_OK);
    assert_int_equal(td_expert_arena_open(&arena, model, fd, &odd_drive, &err), TD_OK);
    guess(got, logits, model, arena, i % 2);
    assert_memory_equal(got, want, sizeof want);
    assert_memory_equal(logits, want_logits, n_vocab * sizeof *logits);
    await_unpinned(arena);
    td_expert_arena_close(arena);
    td_model_close(model);
    close(fd);
  }
  free(want_logits);
  free(logits);
  free(dir);
}

// ---- steps that nobody wants
// ---------------------------------------------------------------------

static unsigned unwanted_from; // reads, begun; 0: steps are wanted

static bool is_unwanted(void *ctx) {
  (void)ctx;
  return unwanted_from && atomic_load(&n_reads) >= unwanted_from;
}

// While the drive gives nothing, and in the middle: the step ends with no more reads than were
// under way, and the next one is as if it had not been.
TEST(an_unwanted_step_is_abandoned) {
  enum { UNDER_WAY = 4 * TD_EXPERT_PARTS };
  size_t n_vocab;
  const small_model *m = &small_models[0];
  char *dir = strdup(golden_dir(m->name));
  float *want = resident_logits(m, TOGETHER, true, &n_vocab);
  float *got = malloc(rows_of(true) * n_vocab * sizeof *got);
  const int fd = load_weights(dir, 4);
  drive_fixture d;
  atomic_store(&drive_seed, 0);
  open_drive(&d, dir, fd);
  keep_steps(&d.f, got);
  atomic_store(&n_reads, 0);
  keep_long_step(&d.f, got + ENGINE_ROWS * n_vocab);
  const unsigned n_all = atomic_load(&n_reads);
  assert_true(n_all > 3 * UNDER_WAY);
  for (unsigned from = 1; from < n_all; from += 1 + n_all / N_ABANDONED) {
    atomic_store(&is_drive_stuck, from == 1);
    atomic_store(&n_reads, 0);
    unwanted_from = from;
    keep_long_step(&d.f, got + ENGINE_ROWS * n_vocab); // returns though the drive is stuck
    atomic_store(&is_drive_stuck, false);
    await_unpinned(d.arena);
    const unsigned n = atomic_load(&n_reads);
    if (n > from + 2 * UNDER_WAY) fail_msg("%u reads, unwanted from %u of %u on", n, from, n_all);
    unwanted_from = 0;
    check_same(&d, want, true, "after a step that nobody wanted");
  }
  close_drive(&d);
  close(fd);
  free(got);
  free(want);
  free(dir);
}

// ---- failures -----------------------------------------------------------------------------------

// The message names the file and an expert's offset there.
static void check_failure(const td_expert_places *places, const char *text) {
  unsigned expert, layer;
  unsigned long long n_bytes, offset;
  const char *at = strstr(text, ".safetensors: expert ");
  if (!at || sscanf(at, ".safetensors: expert %u of layer %u cannot be read, %llu bytes at %llu",
                    &expert, &layer, &n_bytes, &offset) != 4)
    fail_msg("%s", text);
  const td_expert_part *p = td_expert_parts(places, layer, expert);
  for (int i = 0; i < TD_EXPERT_PARTS; i++)
    if (p[i].offset == offset && p[i].n_bytes == n_bytes) return;
  fail_msg("%s: not there", text);
}

// An expert that cannot be read fails those who need it, and nobody else.
TEST(a_bad_sector) {
  const small_model *m = &small_models[0];
  char *dir = strdup(golden_dir(m->name));
  size_t n_vocab;
  float *want = resident_logits(m, TOGETHER, false, &n_vocab);
  const int fd = load_weights(dir, 1000);
  drive_fixture d;
  td_err err;
  atomic_store(&drive_seed, 0);
  open_drive(&d, dir, fd);
  engine_fixture *f = &d.f;
  int32_t tokens[ENGINE_SEQS];
  static const int32_t pages[ENGINE_SEQS] = {0, 1, 2};
  td_step_seq seqs[ENGINE_SEQS];
  for (uint32_t s = 0; s < ENGINE_SEQS; s++) {
    tokens[s] = 3 + 7 * (int32_t)s;
    seqs[s] = (td_step_seq){.tokens = &tokens[s],
                            .n_tokens = 1,
                            .pages = &pages[s],
                            .n_pages = 1,
                            .want = TD_WANT_ALL,
                            .is_decode = true};
  }
  const size_t n_bytes = ENGINE_SEQS * n_vocab * sizeof(float);
  float *good = malloc(n_bytes);
  assert_int_equal(td_engine_step(f->engine, seqs, ENGINE_SEQS, &err), TD_OK);
  memcpy(good, td_engine_logits(f->engine), n_bytes);
  uint32_t n_tokens;
  const uint32_t bad = (uint32_t)td_engine_routing(f->engine, 0, &n_tokens)[0];
  close_drive(&d);
  close(fd);
  // of the first sequence's first expert in layer 0: a page of its matrix down
  const int fd2 = load_weights(dir, 1000);
  open_drive(&d, dir, fd2);
  const td_expert_part *p = &td_expert_parts(td_expert_arena_places(d.arena), 0, bad)[2];
  atomic_store(&bad_to, p->offset + p->n_bytes);
  atomic_store(&bad_from, p->offset);
  assert_int_equal(td_engine_step(f->engine, seqs, ENGINE_SEQS, &err), TD_OK);
  uint32_t n_failed = 0;
  for (uint32_t s = 0; s < ENGINE_SEQS; s++) {
    const bool has_failed = td_engine_has_failed(f->engine, seqs, s, &err);
    n_failed += has_failed;
    if (!has_failed) {
      assert_memory_equal(td_engine_logits(f->engine) + s * n_vocab, good + s * n_vocab,
                          n_vocab * sizeof(float));
      continue;
    }
    check_failure(td_expert_arena_places(d.arena), err.msg);
  }
  assert_true(td_engine_has_failed(f->engine, seqs, 0, NULL));
  assert_true(n_failed > 0);
  atomic_store(&bad_from, UINT64_MAX); // the drive is well again
  atomic_store(&bad_to, 0);
  check_same(&d, want, false, "after a failure");
  close_drive(&d);
  close(fd2);
  free(good);
  free(want);
  free(dir);
}

TEST(other_files_are_refused) {
  checkpoint ck = {0};
  td_err err;
  ck_deepseek(&ck);
  ck_write(&ck);
  const int fd = load_weights(ck.dir, 4);
  ck_write(&ck); // new files
  td_model *model;
  td_expert_arena *arena;
  assert_int_equal(td_model_open_weights(&model, ck.dir, fd, &err), TD_OK);
  assert_int_equal(td_expert_arena_open(&arena, model, fd, NULL, &err), TD_EIO);
  assert_null(arena);
  if (!strstr(err.msg, "it has changed since it was loaded")) fail_msg("%s", err.msg);
  td_model_close(model);
  close(fd);
  ck_free(&ck);
}

TEST(converted_experts_are_refused) {
  checkpoint ck = {0};
  td_model *model;
  td_expert_places places;
  td_err err;
  ck_gpt_oss(&ck);
  for (int layer = 0; layer < 2; layer++) { // BF16, transposed
    static const char *const names[] = {"gate_up_proj", "down_proj"};
    for (size_t i = 0; i < TD_COUNT(names); i++) {
      char name[128], part[160];
      snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%s", layer, names[i]);
      snprintf(part, sizeof part, "%s_blocks", name);
      ck_drop(&ck, part);
      snprintf(part, sizeof part, "%s_scales", name);
      ck_drop(&ck, part);
      snprintf(part, sizeof part, "%s_bias", name);
      ck_add(&ck, name, "BF16", 8, 32, ck_find(&ck, part)->shape[1]);
    }
  }
  ck_write(&ck);
  assert_int_equal(td_model_open_shapes(&model, ck.dir, &err), TD_OK);
  assert_int_equal(td_expert_places_open(&places, model, &err), TD_EUNSUPPORTED);
  if (!strstr(err.msg, "are laid out anew when they are loaded")) fail_msg("%s", err.msg);
  if (!strstr(err.msg, "tandem quantize makes of the model's BF16")) fail_msg("%s", err.msg);
  td_model_close(model);
  ck_free(&ck);
}

// ---- who makes room -----------------------------------------------------------------------------

typedef struct {
  td_model *model;
  td_expert_arena *arena;
  int fd;
} arena_fixture;

static void open_arena(arena_fixture *a, uint32_t n_slots) {
  td_err err;
  const char *dir = golden_dir(small_models[0].name);
  atomic_store(&drive_seed, 0);
  a->fd = load_weights(dir, n_slots);
  assert_int_equal(td_model_open_weights(&a->model, dir, a->fd, &err), TD_OK);
  assert_int_equal(td_expert_arena_open(&a->arena, a->model, a->fd, &odd_drive, &err), TD_OK);
}

static void close_arena(arena_fixture *a) {
  td_expert_arena_close(a->arena);
  td_model_close(a->model);
  close(a->fd);
}

static uint32_t take(arena_fixture *a, td_taken_expert *taken, uint32_t layer, uint32_t expert,
                     bool bypass) {
  taken->expert = expert;
  const uint32_t n = td_expert_arena_take(a->arena, layer, taken, 1, bypass);
  while (n && td_expert_arena_state(a->arena, taken->slot) == TD_SLOT_LOADING)
    td_expert_arena_wait(a->arena, td_expert_arena_events(a->arena));
  return n;
}

// Who shares the files' drive, or the mirror's, knows when it is used.
TEST(others_see_reads) {
  arena_fixture a;
  td_expert_watch here, mirror, elsewhere;
  td_taken_expert taken;
  td_err err;
  const char *dir = golden_dir(small_models[0].name);
  open_arena(&a, 4);
  assert_int_equal(td_expert_watch_open(&here, a.fd, "", dir, &err), TD_OK);
  assert_int_equal(td_expert_watch_open(&elsewhere, a.fd, "", "/proc", &err), TD_OK);
  assert_int_equal(td_expert_watch_open(&mirror, a.fd, "/proc", "/proc", &err), TD_OK);
  assert_false(td_expert_watch_is_busy(&here));
  atomic_store(&is_drive_stuck, true);
  assert_int_equal(td_expert_arena_take(a.arena, 0, &(td_taken_expert){.expert = 1}, 1, false), 1);
  assert_true(td_expert_watch_is_busy(&here));
  assert_true(td_expert_watch_is_busy(&mirror));
  assert_false(td_expert_watch_is_busy(&elsewhere));
  atomic_store(&is_drive_stuck, false);
  assert_int_equal(take(&a, &taken, 0, 1, false), 1);
  assert_false(td_expert_watch_is_busy(&here));
  td_expert_watch_close(&here);
  td_expert_watch_close(&mirror);
  td_expert_watch_close(&elsewhere);
  close_arena(&a);
}

static bool use(arena_fixture *a, uint32_t layer, uint32_t expert, bool bypass) {
  td_taken_expert taken;
  const uint64_t hits = td_expert_arena_stats_of(a->arena).hits;
  assert_int_equal(take(a, &taken, layer, expert, bypass), 1);
  td_expert_arena_release(a->arena, &taken, 1);
  return td_expert_arena_stats_of(a->arena).hits > hits;
}

TEST(the_least_used_makes_room) {
  arena_fixture a;
  open_arena(&a, 4);
  for (uint32_t e = 0; e < 4; e++)
    assert_false(use(&a, 0, e, false));
  assert_true(use(&a, 0, 0, false));
  assert_false(use(&a, 1, 0, false)); // for expert 1 of layer 0
  assert_false(use(&a, 1, 1, false)); // for expert 2
  assert_false(use(&a, 1, 2, false)); // for expert 3
  assert_false(use(&a, 1, 3, false)); // for the first of layer 1, not for what was used twice
  assert_true(use(&a, 0, 0, false));
  assert_false(use(&a, 0, 1, false));
  close_arena(&a);
}

// Two experts that displace each other win over one that is used no more, before its uses age.
TEST(uses_count_though_the_expert_left) {
  arena_fixture a;
  open_arena(&a, 2);
  for (uint32_t i = 0; i < 4; i++)
    use(&a, 0, 0, false);
  for (uint32_t i = 0; i < 8; i++)
    assert_false(use(&a, 1, i % 2, false));
  use(&a, 1, 0, false);
  for (uint32_t i = 0; i < 4; i++)
    assert_true(use(&a, 1, i % 2, false));
  close_arena(&a);
}

// What was used often is not held for ever when others are.
TEST(uses_age) {
  enum { MANY = 400 };
  arena_fixture a;
  uint32_t n_misses = 0;
  open_arena(&a, 4);
  for (uint32_t i = 0; i < MANY; i++)
    use(&a, 0, i % 4, false);
  for (uint32_t i = 0; i < MANY; i++)
    n_misses += !use(&a, 1, i % 4, false);
  assert_true(n_misses < MANY / 2);
  for (uint32_t e = 0; e < 4; e++)
    assert_true(use(&a, 1, e, false));
  close_arena(&a);
}

TEST(prompts_bypass) {
  arena_fixture a;
  open_arena(&a, 9);
  for (uint32_t e = 0; e < 8; e++)
    assert_false(use(&a, 0, e, false));
  for (uint32_t e = 0; e < 8; e++)
    use(&a, 1, e, true);
  uint32_t n_left = 0;
  for (uint32_t e = 0; e < 8; e++) { // by a prompt, so that nothing changes
    td_taken_expert taken = {.expert = e};
    const uint64_t hits = td_expert_arena_stats_of(a.arena).hits;
    td_expert_arena_take(a.arena, 0, &taken, 1, true);
    n_left += td_expert_arena_stats_of(a.arena).hits > hits;
    td_expert_arena_release(a.arena, &taken, 1);
  }
  assert_true(n_left >= 6);
  close_arena(&a);
}

// ---- what will perhaps be needed ----------------------------------------------------------------

static bool is_there(arena_fixture *a, uint32_t expert) {
  td_taken_expert taken = {.expert = expert};
  const uint64_t hits = td_expert_arena_stats_of(a->arena).hits;
  td_expert_arena_take(a->arena, 0, &taken, 1, true);
  td_expert_arena_release(a->arena, &taken, 1);
  return td_expert_arena_stats_of(a->arena).hits > hits;
}

// One of two guesses is right, and a third expert is needed: the wrong one's reads are dropped but
// for those under way, and another process that took it in between gets it.
TEST(guesses_make_way) {
  enum { N_THREADS = 4, N_SLOTS = 16 };
  for (int is_shared = 0; is_shared < 2; is_shared++) {
    arena_fixture a;
    td_expert_arena *other;
    td_err err;
    open_arena(&a, N_SLOTS);
    assert_int_equal(td_expert_arena_open(&other, a.model, a.fd, &odd_drive, &err), TD_OK);
    const uint8_t is_wanted[8] = {[1] = 1};
    td_taken_expert guesses[] = {{.expert = 1}, {.expert = 2}, {.expert = 3}};
    td_taken_expert wanted[] = {{.expert = 1}, {.expert = 4}}, late = {.expert = 5};
    td_taken_expert theirs = {.expert = 3};
    atomic_store(&is_drive_stuck, true);
    atomic_store(&n_reads, 0);
    td_expert_arena_prefetch(a.arena, 0, guesses, 3);
    for (int i = 0; i < 3; i++)
      assert_true(guesses[i].slot >= 0);
    td_expert_arena_prefetch(a.arena, 0, &late, 1); // the drive is not idle
    assert_int_equal(late.slot, -1);
    if (is_shared) assert_int_equal(td_expert_arena_take(other, 0, &theirs, 1, false), 1);
    td_expert_arena_end_prefetch(a.arena, guesses, 3, is_wanted);
    assert_int_equal(td_expert_arena_take(a.arena, 0, wanted, 2, false), 2);
    assert_int_equal(td_expert_arena_stats_of(a.arena).hits, 1);
    atomic_store(&is_drive_stuck, false);
    for (int i = 0; i < 2; i++) {
      await_no_reads(a.arena, wanted[i]);
      assert_int_equal(td_expert_arena_state(a.arena, wanted[i].slot), TD_SLOT_READY);
    }
    if (is_shared) {
      await_no_reads(other, theirs);
      assert_int_equal(td_expert_arena_state(other, theirs.slot), TD_SLOT_READY);
      td_expert_arena_release(other, &theirs, 1);
    }
    const td_expert_arena_stats stats = td_expert_arena_stats_of(a.arena);
    assert_int_equal(stats.prefetches_used, 1);
    assert_int_equal(stats.prefetches_unused, 2);
    assert_true(atomic_load(&n_reads) <= (2u + (unsigned)is_shared) * TD_EXPERT_PARTS + N_THREADS);
    td_expert_arena_release(a.arena, wanted, 2);
    await_unpinned(a.arena);
    assert_int_equal(is_there(&a, 3), is_shared);
    td_expert_arena_close(other);
    close_arena(&a);
  }
}

// A guess does not displace what another one names.
TEST(guesses_spare_each_other) {
  arena_fixture a;
  open_arena(&a, 2);
  use(&a, 0, 0, false);
  use(&a, 0, 1, false);
  td_taken_expert guesses[] = {{.expert = 2}, {.expert = 0}}; // 0 was used before 1
  td_expert_arena_prefetch(a.arena, 0, guesses, 2);
  assert_true(guesses[0].slot >= 0);
  assert_int_equal(guesses[1].slot, -1);
  td_expert_arena_end_prefetch(a.arena, guesses, 2, NULL);
  assert_true(is_there(&a, 0));
  close_arena(&a);
}

TEST(pinned_slots_stay) {
  arena_fixture a;
  open_arena(&a, 2);
  td_taken_expert first, second, third;
  assert_int_equal(take(&a, &first, 0, 0, false), 1);
  assert_int_equal(take(&a, &second, 0, 1, false), 1);
  assert_int_equal(take(&a, &third, 0, 2, false), 0);
  assert_int_equal(third.slot, -1);
  const void *data = td_expert_arena_data(a.arena, 0, &first, 0);
  const td_expert_part *p = td_expert_parts(td_expert_arena_places(a.arena), 0, 0);
  td_shard_info shard = td_store_shard(td_model_store(a.model), p->shard);
  char *stored = malloc(p->n_bytes);
  const int file = open(shard.path, O_RDONLY | O_CLOEXEC);
  assert_int_equal(pread(file, stored, p->n_bytes, (off_t)p->offset), p->n_bytes);
  assert_memory_equal(data, stored, p->n_bytes);
  close(file);
  free(stored);
  td_expert_arena_release(a.arena, &second, 1);
  assert_int_equal(take(&a, &third, 0, 2, false), 1);
  td_expert_arena_release(a.arena, &third, 1);
  td_expert_arena_release(a.arena, &first, 1);
  close_arena(&a);
}
