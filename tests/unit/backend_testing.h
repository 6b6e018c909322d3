// tests/unit/backend_testing.h - a backend with real processes and a simulated engine: the test
// program stands in for tandem when it is executed again as a worker (its main calls
// td_worker_main), and defines the model, the device and the engine itself. The engine keeps the
// tokens in the KV pool and derives the next one from all of them and from the way each was
// computed, so a page lost or shared changes the answer.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "engine/engine.h"
#include "front/backend_impl.h"
#include "front/supervisor.h"
#include "kv/pool.h"
#include "unit/testing.h"
#include "worker/worker.h"

// A prompt that begins with one of these and a length makes the worker misbehave once the sequence
// is that long:
enum {
  DIE = 901, // SIGKILL
  DIE_ONCE,  // the first time only (TANDEM_TEST_FUSE names a file, removed by then)
  HANG,      // three seconds in one step
  LINGER,    // stands still and, killed, does not end before the fuse is gone
  TOIL,      // the same, in which its pulse can be seen
  FAIL,      // an error of the engine
  N_VOCAB = 1000,
  N_PLAIN = 900, // ids below have no meaning
  EOS = 999,
  DECODED = 1 << 20, // added to a token that was computed by decode
};

// ---- the simulated engine ------------------------------------------------------------------

struct td_model {
  td_model_config config;
};
struct td_dev {
  size_t own_bytes; // of memory; 0: it works in the host's
  _Atomic uint32_t *pulse;
};
struct td_engine {
  td_engine_opts opts;
  td_dev *dev;
  int32_t *pages, *own_pages;
  float *logits;
};

// Dies, or for an 's' stops, once for each byte of the file that TANDEM_TEST_FAILS names, from the
// last on.
static inline void fail_to_start(void) {
  const char *path = getenv("TANDEM_TEST_FAILS");
  if (!path) return;
  int fd = open(path, O_RDWR);
  TD_CHECK(fd >= 0);
  off_t n = lseek(fd, 0, SEEK_END);
  char how = 0;
  if (n > 0 && pread(fd, &how, 1, n - 1) == 1 && ftruncate(fd, n - 1) == 0) {
    raise(how == 's' ? SIGSTOP : SIGKILL);
  }
  close(fd);
}

td_status td_model_open_weights(td_model **out, const char *dir, int weights_fd, td_err *err) {
  (void)weights_fd;
  if (strcmp(dir, "absent") == 0) return td_fail(err, TD_ENOENT, "absent/config.json: not found");
  if (strcmp(dir, "crash") == 0) {
    fprintf(stderr, "something is\nterribly wrong\n");
    raise(SIGKILL);
  }
  fail_to_start();
  *out = calloc(1, sizeof **out);
  (*out)->config = (td_model_config){
      .n_layers = 1, .n_vocab = N_VOCAB, .max_position = 200000, .eos_ids = {EOS}, .n_eos = 1};
  return TD_OK;
}

td_status td_expert_arena_open(td_expert_arena **out, const td_model *model, int weights_fd,
                               const td_expert_arena_opts *opts, td_err *err) {
  (void)model, (void)weights_fd, (void)opts, (void)err;
  *out = NULL;
  return TD_OK;
}

void td_expert_arena_close(td_expert_arena *arena) {
  (void)arena;
}

td_expert_arena_stats td_expert_arena_stats_of(td_expert_arena *arena) {
  (void)arena;
  return (td_expert_arena_stats){.n_slots = 0};
}

bool td_engine_has_failed(const td_engine *engine, const td_step_seq *seqs, uint32_t seq_idx,
                          td_err *err) {
  (void)engine, (void)seqs, (void)seq_idx, (void)err;
  return false;
}

void td_model_close(td_model *model) {
  free(model);
}

const td_model_config *td_model_config_of(const td_model *model) {
  return &model->config;
}

td_model_stats td_model_stats_of(const td_model *model) {
  (void)model;
  return (td_model_stats){.bytes = 1};
}

uint64_t td_model_expert_bytes(const td_model *model, uint32_t layer_idx) {
  (void)model;
  (void)layer_idx;
  return 0;
}

const td_layer *td_model_layer(const td_model *model, uint32_t layer_idx) {
  static const td_layer none;
  (void)model;
  (void)layer_idx;
  return &none;
}

const td_weight *td_model_lm_head(const td_model *model) {
  static const td_weight none;
  (void)model;
  return &none;
}

const td_mtp *td_model_mtp(const td_model *model) {
  (void)model;
  return NULL;
}

uint64_t td_model_mtp_bytes(const td_model *model, bool has_experts) {
  (void)model, (void)has_experts;
  return 0;
}

const td_vision_weights *td_model_vision(const td_model *model) {
  (void)model;
  return NULL;
}

const void *td_model_memory(const td_model *model, size_t *n_bytes) {
  *n_bytes = sizeof *model;
  return model;
}

td_stripes td_model_stripes(const td_model *model) {
  (void)model;
  return (td_stripes){.base = NULL};
}

bool td_model_use_mtp(td_model *model) {
  (void)model;
  return false;
}

void td_dev_follow_pins(td_dev *dev, td_dev *of) {
  (void)dev, (void)of;
}

void td_dev_stop_pinning(td_dev *dev) {
  (void)dev;
}

bool td_dev_is_pinning(td_dev *dev, const void *host, size_t n_bytes) {
  (void)dev, (void)host, (void)n_bytes;
  return false;
}

void td_dev_drop_weights(td_dev *dev) {
  (void)dev;
}

int td_dev_gpu_index(const td_dev *dev) {
  (void)dev;
  return -1;
}

double td_dev_link_gbps(const td_dev *dev) {
  (void)dev;
  return 0;
}

int td_dev_node(const td_dev *dev) {
  (void)dev;
  return -1;
}

void td_dev_pin(td_dev *dev, const void *host, size_t n_bytes, bool is_writable) {
  TD_CHECK(dev->own_bytes && host && n_bytes && !is_writable);
}

td_status td_dev_open(td_dev **out, const td_dev_opts *opts, td_err *err) {
  (void)err;
  *out = calloc(1, sizeof **out);
  if (strcmp(opts->kind, "cuda") == 0) (*out)->own_bytes = TD_KV_DEVICE_SPARE + (4 << 20);
  return TD_OK;
}

size_t td_dev_free_vram_bytes(td_dev *dev) {
  return dev->own_bytes;
}

size_t td_dev_vram_bytes(td_dev *dev) {
  return dev->own_bytes;
}

const char *td_dev_name(const td_dev *dev) {
  (void)dev;
  return "make-believe GPU";
}

bool td_dev_adds_f16(const td_dev *dev) {
  (void)dev;
  return false;
}

td_dtype td_dev_act_dtype(const td_dev *dev) {
  (void)dev;
  return TD_F32;
}

td_dtype td_dev_kv_dtype(const td_dev *dev, td_dtype asked) {
  (void)dev;
  return asked;
}

td_status td_dev_alloc(td_dev *dev, void **out, size_t n_bytes, td_err *err) {
  (void)dev;
  *out = malloc(n_bytes);
  return *out ? TD_OK : td_fail(err, TD_ENOMEM, "out of memory");
}

void td_dev_free(td_dev *dev, void *ptr) {
  (void)dev;
  free(ptr);
}

// KV pages are in the pool alone here, so none are copied.
td_status td_dev_register(td_dev *dev, void *host, size_t n_bytes, td_err *err) {
  (void)dev;
  (void)host;
  (void)n_bytes;
  return td_fail(err, TD_EINTERNAL, "no copies of KV pages here");
}

void td_dev_unregister(td_dev *dev, void *host) {
  (void)dev;
  (void)host;
}

td_status td_kv_transfer_open(td_kv_transfer **out, const td_kv_transfer_opts *opts, td_err *err) {
  (void)opts;
  *out = NULL;
  return td_fail(err, TD_EINTERNAL, "no copies of KV pages here");
}

void td_kv_transfer_close(td_kv_transfer *transfer) {
  (void)transfer;
}

void td_kv_transfer_pause(td_kv_transfer *transfer, bool is_paused) {
  (void)transfer;
  (void)is_paused;
}

void td_kv_transfer_enter(td_kv_transfer *transfer, const int32_t *pages, uint32_t n_pages) {
  (void)transfer;
  (void)pages;
  (void)n_pages;
}

bool td_kv_transfer_has_entered(td_kv_transfer *transfer) {
  (void)transfer;
  return true;
}

void td_kv_transfer_wait(td_kv_transfer *transfer) {
  (void)transfer;
}

void td_dev_close(td_dev *dev) {
  free(dev);
}

void td_dev_set_thread_limit(td_dev *dev, const _Atomic uint32_t *n_threads) {
  (void)dev;
  TD_CHECK(n_threads);
}

void td_dev_use_stripes(td_dev *dev, const td_stripes *stripes) {
  (void)dev, (void)stripes;
}

void td_dev_set_progress_counter(td_dev *dev, _Atomic uint32_t *pulse) {
  dev->pulse = pulse;
}

uint32_t td_engine_prefill_chunk(const td_model_config *config) {
  (void)config;
  return 512;
}

uint32_t td_engine_stream_tokens(const td_engine *engine) {
  (void)engine;
  return 0;
}

size_t td_engine_step_bytes_per_token(const td_model_config *config, td_dtype act_dtype) {
  (void)config;
  (void)act_dtype;
  return 1;
}

// A layer whose keys and values of a token are the token.
td_kv_layout td_kv_layout_of(const td_model_config *config, td_dtype kv_dtype,
                             uint32_t page_tokens) {
  (void)config;
  (void)kv_dtype;
  page_tokens = page_tokens ? page_tokens : TD_KV_PAGE_TOKENS;
  return (td_kv_layout){
      .page_tokens = page_tokens, .n_layers = 1, .part_bytes = page_tokens * sizeof(int32_t)};
}

void td_kv_layout_to_need(const td_kv_layout *layout, td_kv_need *need) {
  need->kv_bytes_per_token = td_kv_layout_token_bytes(layout);
  need->n_layers = layout->n_layers;
  need->page_tokens = layout->page_tokens;
}

size_t td_engine_draft_token_bytes(const td_model_config *config, td_dtype act_dtype) {
  (void)config, (void)act_dtype;
  return 0;
}

uint64_t td_engine_draft_bytes(const td_model *model, bool is_host, const td_engine_opts *opts) {
  (void)model, (void)is_host, (void)opts;
  return 0;
}

uint64_t td_engine_kv_bytes(const td_model_config *config, td_dtype kv_dtype, uint64_t n_tokens) {
  const td_kv_layout layout = td_kv_layout_of(config, kv_dtype, 0);
  return n_tokens * td_kv_layout_token_bytes(&layout);
}

td_status td_engine_open(td_engine **out, const td_model *model, td_dev *dev,
                         const td_engine_opts *opts, td_err *err) {
  (void)model;
  (void)err;
  td_engine *e = calloc(1, sizeof *e);
  e->dev = dev;
  e->opts = *opts;
  e->pages = opts->kv_pages;
  if (!e->pages) {
    size_t n_bytes = (size_t)opts->n_pages * opts->page_tokens * sizeof *e->pages;
    e->pages = e->own_pages = malloc(n_bytes);
    memset(e->own_pages, 0x55, n_bytes); // no token: what is not written again is noticed
  }
  e->logits = malloc((size_t)(opts->max_step_seqs + opts->max_drafts) * N_VOCAB *
                     sizeof *e->logits);
  *out = e;
  return TD_OK;
}

void td_engine_close(td_engine *engine) {
  if (!engine) return;
  free(engine->logits);
  free(engine->own_pages);
  free(engine);
}

float *td_engine_logits(td_engine *engine) {
  return engine->logits;
}

td_status td_engine_fetch_logits(td_engine *engine, uint32_t row, const float **out,
                                 const td_top_logits **top, td_err *err) {
  (void)err;
  *top = NULL;
  *out = engine->logits + (size_t)row * N_VOCAB;
  return TD_OK;
}

td_status td_engine_draw(td_engine *engine, uint32_t row, td_sampler *sampler, int want_logprobs,
                         td_wire_token *out, td_err *err) {
  (void)err;
  *out = td_sampler_next(sampler, engine->logits + (size_t)row * N_VOCAB, want_logprobs);
  return TD_OK;
}

static inline int32_t *cell(td_engine *e, const td_step_seq *seq, uint32_t position) {
  uint32_t page = position / e->opts.page_tokens;
  TD_CHECK(page < seq->n_pages);
  return &e->pages[(size_t)seq->pages[page] * e->opts.page_tokens + position % e->opts.page_tokens];
}

static inline uint32_t mix(uint32_t hash, int32_t token) {
  return (hash ^ (uint32_t)token) * 16777619u;
}

// Steps of each sequence so far, by its first token, in all processes that inherit
// TANDEM_TEST_STEPS, the path of a file; NULL without.
static inline _Atomic uint32_t *steps_of(int32_t first_token) {
  static _Atomic uint32_t *steps;
  static char mapped[64]; // path
  const char *path = getenv("TANDEM_TEST_STEPS");
  if (!path) return NULL;
  if (strcmp(path, mapped) != 0) {
    snprintf(mapped, sizeof mapped, "%s", path);
    int fd = open(path, O_RDWR);
    TD_CHECK(fd >= 0 && ftruncate(fd, N_VOCAB * sizeof *steps) == 0);
    steps = mmap(NULL, N_VOCAB * sizeof *steps, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    TD_CHECK(steps != MAP_FAILED);
    close(fd);
  }
  return &steps[first_token];
}

static inline td_status misbehave(int32_t how, _Atomic uint32_t *pulse, td_err *err) {
  const char *fuse = getenv("TANDEM_TEST_FUSE");
  if (how == DIE || (how == DIE_ONCE && fuse && unlink(fuse) == 0)) raise(SIGKILL);
  if (how == LINGER && fuse && access(fuse, F_OK) == 0) {
    if (fork() == 0) { // what holds the output of a process keeps its end from being heard of
      while (access(fuse, F_OK) == 0)
        usleep(10000);
      _exit(0);
    }
    raise(SIGSTOP);
  }
  for (int i = 0; (how == HANG || how == TOIL) && i < 30; i++) {
    usleep(100000);
    if (how == TOIL) ++*pulse;
  }
  return how == FAIL ? td_fail(err, TD_EIO, "the engine is out of order") : TD_OK;
}

// The logits behind the first n tokens.
static inline void write_row(td_engine *e, const td_step_seq *seq, uint32_t n, float *row) {
  uint32_t hash = 2166136261u;
  for (uint32_t j = 0; j < n; j++)
    hash = mix(hash, *cell(e, seq, j));
  memset(row, 0, N_VOCAB * sizeof *row);
  // A prompt of one token is answered by counting up, which ends at EOS.
  int32_t first = *cell(e, seq, 0), last = *cell(e, seq, n - 1) % DECODED;
  bool counts = first > DIE + 50;
  row[counts ? last + 1 - (last == EOS) : (int32_t)(hash % N_PLAIN)] = 1;
}

td_status td_engine_step(td_engine *e, const td_step_seq *seqs, uint32_t n_seqs, td_err *err) {
  uint32_t n_rows = 0, n_tokens = 0;
  for (uint32_t i = 0; i < n_seqs; i++) {
    const td_step_seq *seq = &seqs[i];
    const uint32_t n = seq->n_past + seq->n_tokens;
    n_tokens += seq->n_tokens;
    for (uint32_t j = 0; j < seq->n_tokens; j++)
      *cell(e, seq, seq->n_past + j) = seq->tokens[j] + (seq->is_decode ? DECODED : 0);
    _Atomic uint32_t *n_steps = steps_of(*cell(e, seq, 0));
    if (n_steps) atomic_fetch_add(n_steps, 1);
    const uint32_t limit = n >= 2 ? (uint32_t)*cell(e, seq, 1) : 0;
    if (limit > seq->n_past && limit <= n && (seq->is_decode || limit == n)) {
      td_status st = misbehave(*cell(e, seq, 0), e->dev->pulse, err);
      if (st != TD_OK) return st;
    }
    for (uint32_t j = td_step_seq_rows(seq); j > 0; j--)
      write_row(e, seq, n - j + 1, e->logits + (size_t)n_rows++ * N_VOCAB);
  }
  TD_CHECK(n_tokens <= e->opts.max_step_tokens && n_seqs <= e->opts.max_step_seqs);
  const char *step_us = getenv("TANDEM_TEST_STEP_US");
  if (step_us) usleep((useconds_t)atoi(step_us));
  return TD_OK;
}

// No step streams here (td_engine_stream_tokens), so none runs in parts.
td_status td_engine_step_with(td_engine *engine, const td_step_seq *seqs, uint32_t n_seqs,
                              void (*meanwhile)(void *ctx), void *ctx, td_err *err) {
  (void)meanwhile;
  (void)ctx;
  TD_CHECK(!"a step beside one in parts");
  return td_engine_step(engine, seqs, n_seqs, err);
}

td_status td_engine_begin(td_engine *engine, const td_step_seq *seqs, uint32_t n_seqs,
                          td_err *err) {
  (void)engine;
  (void)seqs;
  (void)n_seqs;
  (void)err;
  TD_CHECK(!"a step in parts");
  return TD_OK;
}

bool td_engine_feed(td_engine *engine, uint64_t ahead_bytes) {
  (void)engine;
  (void)ahead_bytes;
  TD_CHECK(!"a step in parts");
  return true;
}

void td_engine_wait(td_engine *engine) {
  (void)engine;
  TD_CHECK(!"a step in parts");
}

td_status td_engine_end(td_engine *engine, td_err *err) {
  (void)engine;
  (void)err;
  TD_CHECK(!"a step in parts");
  return TD_OK;
}

td_status td_engine_copy_page(td_engine *engine, int32_t to, int32_t from, td_err *err) {
  (void)err;
  const size_t n = engine->opts.page_tokens;
  memcpy(engine->pages + (uint32_t)to * n, engine->pages + (uint32_t)from * n,
         n * sizeof *engine->pages);
  return TD_OK;
}

td_status td_engine_save_state(td_engine *engine, int32_t page, td_err *err) {
  (void)engine, (void)page, (void)err;
  return TD_OK;
}

td_status td_engine_roll_back(td_engine *engine, uint32_t seq_idx, uint32_t n_tokens, int32_t page,
                              td_err *err) {
  (void)engine, (void)seq_idx, (void)n_tokens, (void)page, (void)err;
  return TD_OK;
}

td_status td_engine_draft(td_engine *engine, const td_draft_step *step, td_err *err) {
  (void)engine, (void)step, (void)err;
  TD_CHECK(!"no layer drafts here");
  return TD_OK;
}

void td_engine_note_written(td_engine *engine, const td_step_seq *seqs, uint32_t n_seqs) {
  (void)engine;
  (void)seqs;
  (void)n_seqs;
}

size_t td_engine_rank_bytes_per_token(const td_model_config *config, td_dtype act_dtype) {
  (void)config;
  (void)act_dtype;
  return 0;
}

bool td_engine_streams_all(td_engine *engine) {
  (void)engine;
  return false;
}

void td_engine_confine(td_engine *engine, bool is_confined) {
  (void)engine;
  (void)is_confined;
}

td_stream_progress td_engine_stream_progress(const td_engine *engine) {
  (void)engine;
  return (td_stream_progress){0};
}

td_expert_cache_stats td_engine_cache_stats(const td_engine *engine) {
  (void)engine;
  return (td_expert_cache_stats){.n_slots = 0};
}

// ---- a client -----------------------------------------------------------------------------------

enum { MAX_ANSWER = 4096 };

typedef struct {
  td_backend *backend;
  uint64_t id;
  int32_t answer[MAX_ANSWER];
  uint32_t n, n_progress, cancel_at;
  bool is_canceled;
  int n_done;
  td_wire_done done;
  td_backend_state state_at_done;
} client;

static inline void on_progress(void *ctx, const td_wire_progress *progress) {
  client *c = ctx;
  assert_false(c->is_canceled);
  assert_true(progress->n_done <= progress->n_prompt);
  c->n_progress++;
}

static inline void on_token(void *ctx, const td_wire_token *token) {
  client *c = ctx;
  assert_false(c->is_canceled);
  assert_int_equal(c->n_done, 0);
  assert_int_equal(token->index, c->n);
  if (c->n < MAX_ANSWER) c->answer[c->n] = token->id;
  c->n++;
  assert_int_equal(token->is_eos, token->id == EOS && c->answer[0] != EOS);
  if (c->n != c->cancel_at) return;
  c->is_canceled = true;
  td_backend_cancel(c->backend, c->id);
}

static inline void on_done(void *ctx, const td_wire_done *done) {
  client *c = ctx;
  assert_false(c->is_canceled);
  c->n_done++;
  c->done = *done;
  c->state_at_done = td_backend_state_of(c->backend);
}

static inline td_status submit_flags(client *c, const int32_t *prompt, uint32_t n_prompt,
                                     uint32_t max_tokens, uint32_t flags) {
  td_err err = {0};
  const td_request request = {
      .prompt = prompt, .n_prompt = n_prompt, .max_tokens = max_tokens, .flags = flags};
  const td_request_callbacks callbacks = {
      .on_progress = on_progress, .on_token = on_token, .on_done = on_done, .ctx = c};
  td_status st = td_backend_submit(c->backend, &request, &callbacks, &c->id, &err);
  assert_int_equal(c->n + c->n_done, 0); // never called back from inside
  assert_true(st == TD_OK || err.msg[0]);
  return st;
}

static inline td_status submit(client *c, const int32_t *prompt, uint32_t n_prompt,
                               uint32_t max_tokens) {
  return submit_flags(c, prompt, n_prompt, max_tokens, 0);
}

static inline void check_answer(const client *c, const int32_t *prompt, uint32_t n_prompt,
                                uint32_t n) {
  uint32_t hash = 2166136261u;
  for (uint32_t i = 0; i < n_prompt; i++)
    hash = mix(hash, prompt[i]);
  assert_int_equal(c->n, n);
  for (uint32_t i = 0; i < n; i++) {
    assert_int_equal(c->answer[i], hash % N_PLAIN);
    hash = mix(hash, c->answer[i] + DECODED);
  }
}

// ---- the loop -----------------------------------------------------------------------------------

typedef struct {
  uv_loop_t loop;
  td_backend *backend;
  td_backend_state states[16]; // in order of appearance
  int n_states;
  bool is_closed;
} world;

static inline void on_state(void *ctx, td_backend_state state) {
  world *w = ctx;
  if (w->n_states < 16) w->states[w->n_states++] = state;
}

static inline void on_closed(void *ctx) {
  ((world *)ctx)->is_closed = true;
}

static inline void nothing(uv_timer_t *timer) {
  (void)timer;
}

// Runs the loop until is_over(ctx), at most 30 s.
static inline void run_until(world *w, bool (*is_over)(void *ctx), void *ctx) {
  uv_timer_t timer;
  uint64_t end_ns = td_clock_ns() + 30000000000u;
  uv_timer_init(&w->loop, &timer);
  uv_timer_start(&timer, nothing, 10, 10);
  while (!is_over(ctx) && td_clock_ns() < end_ns)
    uv_run(&w->loop, UV_RUN_ONCE);
  uv_close((uv_handle_t *)&timer, NULL);
  uv_run(&w->loop, UV_RUN_NOWAIT);
  assert_true(is_over(ctx));
}

static inline bool is_settled(void *ctx) {
  td_backend_state state = td_backend_state_of(((world *)ctx)->backend);
  return state == TD_BACKEND_READY || state == TD_BACKEND_FAILED;
}

static inline bool is_done(void *ctx) {
  return ((client *)ctx)->n_done > 0;
}

static inline bool has_begun(void *ctx) {
  return ((client *)ctx)->n > 0;
}

static inline bool is_idle(void *ctx) {
  const td_backend *b = ((world *)ctx)->backend;
  return td_backend_n_running(b) == 0 && td_backend_n_waiting(b) == 0;
}

// Each test runs with one worker and with two, some with one that has memory of its own.
static bool is_split;
static const char *device = "cpu";
static uint32_t kv_tokens; // 0: room for all
static td_kv_dir *kv_dir;
static uint32_t stuck_after_s; // 0: as usual

static inline void world_open(world *w, const char *model, uint32_t ctx_size, uint32_t max_batch) {
  td_err err;
  *w = (world){0};
  uv_loop_init(&w->loop);
  const td_backend_opts opts = {.runtime = {.model_dir = model,
                                            .device = device,
                                            .devices = "0",
                                            .expert_cache = "off",
                                            .ctx_size = ctx_size,
                                            .prefill_chunk = 100},
                                .max_batch = max_batch,
                                .is_split = is_split,
                                .kv_tokens = kv_tokens,
                                .kv_dir = kv_dir,
                                .kv_flush_s = 20,
                                .stuck_after_s = stuck_after_s,
                                .on_state = on_state,
                                .ctx = w};
  assert_int_equal(td_backend_open(&w->backend, &w->loop, &opts, &err), TD_OK);
  assert_int_equal(td_backend_state_of(w->backend), TD_BACKEND_LOADING);
}

static inline void world_close(world *w) {
  td_backend_close(w->backend, on_closed, w);
  assert_false(w->is_closed);
  uv_run(&w->loop, UV_RUN_DEFAULT); // returns when no handle is left
  assert_true(w->is_closed);
  assert_int_equal(uv_loop_close(&w->loop), 0);
  assert_int_equal(waitpid(-1, NULL, WNOHANG), -1); // no child left
  assert_int_equal(errno, ECHILD);
}

static inline void world_ready(world *w, uint32_t ctx_size, uint32_t max_batch) {
  world_open(w, "model", ctx_size, max_batch);
  client early = {.backend = w->backend};
  assert_int_equal(submit(&early, (int32_t[]){1}, 1, 1), TD_EAGAIN);
  run_until(w, is_settled, w);
  assert_int_equal(td_backend_state_of(w->backend), TD_BACKEND_READY);
}

static inline void make_prompt(int32_t *prompt, uint32_t n, uint32_t seed) {
  for (uint32_t i = 0; i < n; i++)
    prompt[i] = (int32_t)((seed * 7919u + i * 104729u + i * i) % N_PLAIN);
}

static inline void make_fuse(char path[32]) {
  strcpy(path, "/tmp/tandem-fuse-XXXXXX");
  int fd = mkstemp(path);
  assert_true(fd >= 0);
  close(fd);
  setenv("TANDEM_TEST_FUSE", path, 1);
}
