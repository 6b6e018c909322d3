// tests/unit/kv_transfer_test.h - two engines on two devices, whose KV pages meet in host memory,
// beside one engine that does everything.
#pragma once

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "engine/kv_transfer.h"
#include "unit/engine_test.h"

// XFER_STREAM: prompt tokens from which experts stream, if they do.
enum { XFER_PAGES = 8, XFER_TOKENS = 64, XFER_CHUNK = 24, XFER_STREAM = 6 };

static td_dtype xfer_kv_dtype = TD_F32;
static const small_model f8_models[] = {{"deepseek_v3", 0}, {"qwen3_dense_layers", 0}};

typedef struct {
  td_dev *dev, *expert_dev;
  char *dev_pages, *host_pages;
  td_kv_transfer *transfer; // NULL: the one that does everything
  td_engine *engine;
} xfer_worker;

typedef struct {
  td_model *model;
  const small_model *small;
  bool streams;                   // experts, for prompts; the CPU computes the others
  size_t pages_bytes, page_bytes; // of all pages; of one over all layers
  size_t state_bytes;             // of it, recurrent states
  int fd;                         // of host memory, which each worker maps for itself
  _Atomic uint32_t versions[XFER_PAGES];
  xfer_worker prefill, decode, all;
  size_t n_vocab;
  uint32_t n_rows; // compared
} xfer_world;

static inline void open_xfer_worker(xfer_world *w, xfer_worker *out, const char *kind,
                                    unsigned index, bool shares) {
  const td_dev_opts dev = {
      .kind = kind, .index = index, .n_threads = 2, .activations = engine_activations};
  td_err err;
  if (td_dev_open(&out->dev, &dev, &err) != TD_OK) fail_msg("%s", err.msg);
  const td_model_config *c = td_model_config_of(w->model);
  td_engine_opts opts = {.n_pages = XFER_PAGES,
                         .page_tokens = ENGINE_PAGE,
                         .max_step_tokens = XFER_CHUNK,
                         .max_step_seqs = 2,
                         .max_seq_tokens = XFER_TOKENS,
                         .kv_dtype = td_dev_kv_dtype(out->dev, xfer_kv_dtype)};
  const td_kv_layout kv = td_kv_layout_of(c, opts.kv_dtype, ENGINE_PAGE);
  w->state_bytes = td_kv_layout_states_bytes(&kv);
  w->page_bytes = td_kv_layout_page_bytes(&kv);
  w->pages_bytes = XFER_PAGES * w->page_bytes;
  if (shares) {
    assert_int_equal(ftruncate(w->fd, (off_t)w->pages_bytes), 0);
    out->host_pages = mmap(NULL, w->pages_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, w->fd, 0);
    assert_true(out->host_pages != MAP_FAILED);
    assert_int_equal(td_dev_alloc(out->dev, (void **)&out->dev_pages, w->pages_bytes, &err), TD_OK);
    if (td_dev_register(out->dev, out->host_pages, w->pages_bytes, &err) != TD_OK)
      fail_msg("%s", err.msg);
    const td_kv_transfer_opts transfer = {.dev = out->dev,
                                          .dev_pages = out->dev_pages,
                                          .host_pages = out->host_pages,
                                          .versions = w->versions,
                                          .n_pages = XFER_PAGES,
                                          .layout = kv};
    assert_int_equal(td_kv_transfer_open(&out->transfer, &transfer, &err), TD_OK);
    opts.kv_pages = out->dev_pages;
    opts.transfer = out->transfer;
  }
  if (w->streams) {
    const td_dev_opts cpu = {.kind = "cpu", .n_threads = 2, .activations = engine_activations};
    assert_int_equal(td_dev_open(&out->expert_dev, &cpu, &err), TD_OK);
    opts.expert_dev = out->expert_dev;
    opts.stream_bytes = w->small->ring_bytes;
    opts.break_even_tokens = XFER_STREAM;
  }
  if (td_engine_open(&out->engine, w->model, out->dev, &opts, &err) != TD_OK)
    fail_msg("%s", err.msg);
}

static inline void close_xfer_worker(xfer_world *w, xfer_worker *x) {
  td_engine_close(x->engine);
  td_kv_transfer_close(x->transfer);
  if (x->host_pages) {
    td_dev_unregister(x->dev, x->host_pages);
    munmap(x->host_pages, w->pages_bytes);
  }
  td_dev_free(x->dev, x->dev_pages);
  td_dev_close(x->expert_dev);
  td_dev_close(x->dev);
  *x = (xfer_worker){0};
}

static inline td_wire_token xfer_row(xfer_world *w, xfer_worker *x, const td_step_seq *seq,
                                     bool has_row) {
  td_err err;
  td_wire_token token = {0};
  if (td_engine_step(x->engine, seq, 1, &err) != TD_OK) fail_msg("%s", err.msg);
  if (!has_row) return token;
  td_sampler *greedy;
  const td_sampling params = {.n_top_logprobs = 5};
  assert_int_equal(td_sampler_open(&greedy, &params, NULL, 0, w->n_vocab, &err), TD_OK);
  assert_int_equal(td_engine_draw(x->engine, 0, greedy, 1, &token, &err), TD_OK);
  td_sampler_close(greedy);
  return token;
}

// Tokens [n_past, n_past + n) of the sequence, by x and by the engine that does everything: with
// the same logits after them.
static inline void xfer_step(xfer_world *w, xfer_worker *x, const int32_t *tokens,
                             const int32_t *pages, uint32_t n_past, uint32_t n, bool is_decode) {
  const td_step_seq seq = {.tokens = tokens + n_past,
                           .n_tokens = n,
                           .n_past = n_past,
                           .pages = pages,
                           .n_pages = (n_past + n + ENGINE_PAGE - 1) / ENGINE_PAGE,
                           .is_decode = is_decode,
                           .want = TD_WANT_LAST};
  const td_wire_token want = xfer_row(w, &w->all, &seq, true), got = xfer_row(w, x, &seq, true);
  if (memcmp(&got, &want, sizeof got) != 0)
    fail_msg("tokens %u to %u: %d at %.9g instead of %d at %.9g", n_past, n_past + n, got.id,
             (double)got.logprob, want.id, (double)want.logprob);
  w->n_rows++;
}

static inline uint64_t xfer_in_bytes(const xfer_worker *x) {
  return td_kv_transfer_stats_of(x->transfer).in_bytes;
}

// Prompts on one device, generated tokens on the other, with whatever may happen to workers and
// pages in between.
static inline void run_xfer(xfer_world *w, const char *kind, unsigned decode_index) {
  enum { N = 37, LONG_N = 52, OTHER_N = 9 };
  static const int32_t pages[] = {2, 3, 0, 7}, other_pages[] = {0}, shared_pages[] = {2, 3, 5};
  int32_t a[XFER_TOKENS], b[XFER_TOKENS];
  for (int32_t i = 0; i < XFER_TOKENS; i++)
    a[i] = 3 + 7 * i % 200, b[i] = i < 2 * ENGINE_PAGE ? a[i] : 5 + 11 * i % 190;
  const uint32_t page = (uint32_t)w->page_bytes;
  xfer_step(w, &w->prefill, a, pages, 0, 20, false); // cut in the middle of a page
  xfer_step(w, &w->prefill, a, pages, 20, N - 20, false);
  assert_int_equal(xfer_in_bytes(&w->prefill), 0);
  for (uint32_t i = N; i < N + 6; i++)
    xfer_step(w, &w->decode, a, pages, i, 1, true);
  assert_int_equal(xfer_in_bytes(&w->decode), 3 * page); // once
  // Both workers die; what they computed does not.
  close_xfer_worker(w, &w->decode);
  open_xfer_worker(w, &w->decode, kind, decode_index, true);
  for (uint32_t i = N + 6; i < LONG_N; i++)
    xfer_step(w, &w->decode, a, pages, i, 1, true);
  assert_int_equal(xfer_in_bytes(&w->decode), 3 * page);
  close_xfer_worker(w, &w->prefill);
  open_xfer_worker(w, &w->prefill, kind, 0, true);
  // Generated tokens computed again, together, where prompts are.
  xfer_step(w, &w->prefill, a, pages, N, LONG_N - N, true);
  assert_int_equal(xfer_in_bytes(&w->prefill), 3 * page);
  xfer_step(w, &w->decode, a, pages, LONG_N, 1, true);
  assert_int_equal(xfer_in_bytes(&w->decode), 3 * page + 2 * page); // those with generated tokens
  // A prompt with the same beginning, short enough for the other device.
  xfer_step(w, &w->decode, b, shared_pages, 2 * ENGINE_PAGE, 5, false);
  assert_int_equal(xfer_in_bytes(&w->decode), 5 * page);
  xfer_step(w, &w->decode, b, shared_pages, 2 * ENGINE_PAGE + 5, 1, true);
  // A page goes to another sequence.
  xfer_step(w, &w->prefill, b + 7, other_pages, 0, OTHER_N, false);
  xfer_step(w, &w->decode, b + 7, other_pages, OTHER_N, 1, true);
  assert_int_equal(xfer_in_bytes(&w->decode), 6 * page);
  // A page is copied while it is being filled, and both copies are filled further.
  td_err err;
  static const int32_t copied_pages[] = {2, 3, 6};
  xfer_step(w, &w->prefill, a, pages, 2 * ENGINE_PAGE, 5, false);
  assert_int_equal(td_engine_copy_page(w->prefill.engine, 6, pages[2], &err), TD_OK);
  assert_int_equal(td_engine_copy_page(w->all.engine, 6, pages[2], &err), TD_OK);
  xfer_step(w, &w->decode, a, pages, 2 * ENGINE_PAGE + 5, 1, true);
  xfer_step(w, &w->decode, b, copied_pages, 2 * ENGINE_PAGE + 5, 1, true);
  // Steps for warming up leave nothing where others look.
  char *before = malloc(w->pages_bytes);
  memcpy(before, w->prefill.host_pages, w->pages_bytes);
  td_kv_transfer_pause(w->prefill.transfer, true);
  const td_step_seq warm = {.tokens = a, .n_tokens = 20, .pages = pages, .n_pages = 2};
  xfer_row(w, &w->prefill, &warm, false);
  td_kv_transfer_pause(w->prefill.transfer, false);
  assert_memory_equal(before, w->prefill.host_pages, w->pages_bytes);
  free(before);
}

static inline uint64_t xfer_out_bytes(const xfer_worker *x) {
  return td_kv_transfer_stats_of(x->transfer).out_bytes;
}

static inline void xfer_save(const xfer_worker *x, int32_t page) {
  td_err err;
  if (td_engine_save_state(x->engine, page, &err) != TD_OK) fail_msg("%s", err.msg);
}

enum { XFER_PROMPT = 37, XFER_LAST = 52, XFER_END = 60 }; // tokens; three pages and parts

// A prompt's states leave where a page is full, and at its end; so do those of generated tokens,
// and no step in between copies any.
static inline void run_states_out(xfer_world *w, const int32_t *a, const int32_t *pages) {
  const uint64_t state = w->state_bytes, keys = w->page_bytes - state;
  xfer_step(w, &w->prefill, a, pages, 0, 20, false); // cut in the middle of a page
  assert_int_equal(xfer_out_bytes(&w->prefill), 2 * keys + state);
  xfer_step(w, &w->prefill, a, pages, 20, XFER_PROMPT - 20, false);
  assert_int_equal(xfer_out_bytes(&w->prefill), 4 * keys + 2 * state);
  for (int i = 0; i < 2; i++) { // the second time it is there
    xfer_save(&w->prefill, pages[2]);
    assert_int_equal(xfer_out_bytes(&w->prefill), 4 * keys + 3 * state);
  }
  for (uint32_t i = XFER_PROMPT; i < XFER_LAST; i++) {
    xfer_step(w, &w->decode, a, pages, i, 1, true);
    assert_int_equal(xfer_out_bytes(&w->decode), i + 1 < 3 * ENGINE_PAGE ? 0 : state);
  }
  assert_int_equal(xfer_in_bytes(&w->decode), 3 * w->page_bytes); // once
}

// Preempted, and resumed on the other device and back; then a worker dies with a state that nobody
// else has, and its sequence goes on from the last full page.
static inline void run_states_over(xfer_world *w, const int32_t *a, const int32_t *pages,
                                   const char *kind, unsigned decode_index) {
  const uint64_t state = w->state_bytes, page = w->page_bytes;
  xfer_save(&w->decode, pages[3]);
  assert_int_equal(xfer_out_bytes(&w->decode), 2 * state);
  uint64_t in = xfer_in_bytes(&w->prefill), out = xfer_out_bytes(&w->prefill);
  xfer_step(w, &w->prefill, a, pages, XFER_LAST, 3, true);
  assert_int_equal(xfer_in_bytes(&w->prefill), in + 2 * page);
  assert_int_equal(xfer_out_bytes(&w->prefill), out);
  xfer_save(&w->prefill, pages[3]);
  xfer_step(w, &w->decode, a, pages, XFER_LAST + 3, 1, true);
  assert_int_equal(xfer_in_bytes(&w->decode), 4 * page);
  assert_int_equal(xfer_out_bytes(&w->decode), 2 * state);
  close_xfer_worker(w, &w->decode);
  open_xfer_worker(w, &w->decode, kind, decode_index, true);
  xfer_step(w, &w->decode, a, pages, 3 * ENGINE_PAGE, XFER_LAST - 3 * ENGINE_PAGE, true);
  for (uint32_t i = XFER_LAST; i < XFER_END; i++)
    xfer_step(w, &w->decode, a, pages, i, 1, true);
  assert_int_equal(xfer_in_bytes(&w->decode), 3 * page);
  assert_int_equal(xfer_out_bytes(&w->decode), 0);
}

// A page whose state is on the device alone is copied, and goes to another sequence.
static inline void run_states_copied(xfer_world *w, const int32_t *a, const int32_t *pages) {
  const int32_t copied[] = {pages[0], pages[1], pages[2], 6}, other[] = {pages[3]};
  td_err err;
  assert_int_equal(td_engine_copy_page(w->decode.engine, 6, pages[3], &err), TD_OK);
  assert_int_equal(td_engine_copy_page(w->all.engine, 6, pages[3], &err), TD_OK);
  assert_int_equal(xfer_out_bytes(&w->decode), w->page_bytes);
  xfer_save(&w->decode, 6);
  assert_int_equal(xfer_out_bytes(&w->decode), w->page_bytes);
  xfer_step(w, &w->prefill, a, copied, XFER_END, 1, true);
  // The decode device's copy of the other is out of date then, and leaves no more.
  xfer_step(w, &w->prefill, a + 7, other, 0, 9, false);
  xfer_save(&w->prefill, other[0]);
  xfer_save(&w->decode, other[0]);
  assert_int_equal(xfer_out_bytes(&w->decode), w->page_bytes);
  xfer_step(w, &w->decode, a + 7, other, 9, 1, true);
}

// Recurrent states beside keys and values.
static inline void run_states(xfer_world *w, const char *kind, unsigned decode_index) {
  static const int32_t pages[] = {2, 3, 0, 7};
  int32_t a[XFER_TOKENS];
  for (int32_t i = 0; i < XFER_TOKENS; i++)
    a[i] = 3 + 7 * i % 200;
  run_states_out(w, a, pages);
  run_states_over(w, a, pages, kind, decode_index);
  run_states_copied(w, a, pages);
}

// kind "cuda": on the first two GPUs. streams: experts do, for prompts.
static inline void open_xfer_world(xfer_world *w, const small_model *m, const char *kind,
                                   bool streams) {
  td_err err;
  *w = (xfer_world){.small = m, .streams = streams, .fd = memfd_create("kv", MFD_CLOEXEC)};
  assert_true(w->fd >= 0);
  if (td_model_open(&w->model, golden_dir(m->name), &err) != TD_OK) fail_msg("%s", err.msg);
  w->n_vocab = td_model_config_of(w->model)->n_vocab;
  open_xfer_worker(w, &w->prefill, kind, 0, true);
  open_xfer_worker(w, &w->decode, kind, strcmp(kind, "cuda") == 0, true);
  open_xfer_worker(w, &w->all, kind, 0, false);
}

static inline void close_xfer_world(xfer_world *w) {
  close_xfer_worker(w, &w->prefill);
  close_xfer_worker(w, &w->decode);
  close_xfer_worker(w, &w->all);
  td_model_close(w->model);
  close(w->fd);
}

static inline void check_xfer(const small_model *m, const char *kind, bool streams) {
  xfer_world w;
  open_xfer_world(&w, m, kind, streams);
  if (w.state_bytes) {
    run_states(&w, kind, strcmp(kind, "cuda") == 0);
  } else {
    run_xfer(&w, kind, strcmp(kind, "cuda") == 0);
  }
  assert_true(w.n_rows > 20);
  if (streams) assert_true(td_engine_stream_progress(w.all.engine).copied_bytes > 0);
  close_xfer_world(&w);
}

// The same with pages in E4M3: of latents, of heads.
static inline void check_f8_xfer(const char *kind) {
  xfer_kv_dtype = TD_F8E4M3;
  for (size_t i = 0; i < TD_COUNT(f8_models); i++)
    check_xfer(&f8_models[i], kind, false);
  xfer_kv_dtype = TD_F32;
}
