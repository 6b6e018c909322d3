// tests/unit/test_engine.c - the engine with the routed experts on a device of their own, or
// passing through the memory of the first: two CPU devices.
// CTest: slow

#include <stdatomic.h>

#include "device/device_impl.h"
#include "engine/engine_impl.h"
#include "unit/engine_test.h"
#include "unit/kv_transfer_test.h"
#include "unit/log_of.h"
#include "unit/peer_test.h"
#include "unit/sanitized.h"

enum {
  N_CACHE_SCHEDULES = IS_TSAN || IS_ASAN ? 1 : 4,
  N_PEER_SCHEDULES = IS_TSAN || IS_ASAN ? 1 : 2
}; // of each cache
// Of either model, and either way.
enum { N_SCHEDULES = IS_TSAN || IS_ASAN ? 6 : 50, N_TRANSFERS = N_SCHEDULES > 10 ? 5 : 2 };

static td_dev *open_dev(td_activations activations) {
  engine_activations = activations;
  td_dev *dev;
  td_err err;
  const td_dev_opts opts = {.kind = "cpu", .n_threads = 2, .activations = engine_activations};
  if (td_dev_open(&dev, &opts, &err) != TD_OK) fail_msg("%s", err.msg);
  return dev;
}

static void check_apart(const small_model *m, bool is_long) {
  td_dev *dev = open_dev(TD_ACTIVATIONS_AUTO);
  size_t n_vocab;
  float *together = engine_logits(m, dev, TOGETHER, is_long, &n_vocab);
  const uint64_t routing = engine_routing;
  for (placement where = APART; where <= PARTED; where++) {
    float *apart = engine_logits(m, dev, where, is_long, &n_vocab);
    const size_t n_rows = ENGINE_ROWS + (is_long ? LONG_PROMPT + 1 : 0);
    const size_t n_bytes = n_rows * n_vocab * sizeof *apart;
    assert_memory_equal(apart, together, n_bytes);
    assert_true(engine_routing == routing);
    free(apart);
  }
  free(together);
  td_dev_close(dev);
}

TEST(experts_apart_change_no_bit) {
  for (size_t i = 0; i < N_SMALL_MODELS; i++)
    check_apart(&small_models[i], !IS_TSAN && (i == 0 || !IS_ASAN));
}

// Experts that stream are summed in another order, group by group; those of decode are not.
static void check_streamed(const small_model *m) {
  td_dev *dev = open_dev(TD_ACTIVATIONS_F32);
  size_t n_vocab;
  float *together = engine_logits(m, dev, TOGETHER, false, &n_vocab);
  assert_int_equal(engine_streamed_bytes, 0);
  float *streamed = engine_logits(m, dev, STREAMED, false, &n_vocab);
  assert_true(engine_streamed_bytes > 0);
  for (size_t k = 0; k < ENGINE_ROWS * n_vocab; k++)
    assert_float_equal(streamed[k], together[k], 1e-4);
  free(together);
  free(streamed);
  td_dev_close(dev);
}

TEST(streamed_experts) {
  for (size_t i = 0; i < N_SMALL_MODELS; i++)
    check_streamed(&small_models[i]);
}

// Experts with biases, and gate and up in one matrix.
TEST(paired_experts) {
  checkpoint ck;
  ck_gpt_oss(&ck);
  ck_write(&ck);
  const small_model m = {ck.dir, PAIRED_RING};
  check_apart(&m, !(IS_ASAN || IS_TSAN));
  check_streamed(&m);
  check_schedules(&m, "cpu", ALL_WAYS, ALL_WAYS, N_SCHEDULES);
  ck_free(&ck);
}

typedef struct {
  td_dev *dev;
  size_t ring_bytes;
  float *logits;
  size_t n_vocab;
} ring_run;

static void run_with_ring(void *ctx) {
  ring_run *r = ctx;
  const small_model m = {.name = small_models[0].name, .ring_bytes = r->ring_bytes};
  r->logits = engine_logits(&m, r->dev, STREAMED, false, &r->n_vocab);
}

// A ring that holds no two experts is said to, with numbers and a cure, and the CPU computes them.
TEST(a_ring_too_small) {
  td_dev *dev = open_dev(TD_ACTIVATIONS_F32);
  size_t n_vocab;
  float *together = engine_logits(&small_models[0], dev, TOGETHER, false, &n_vocab);
  char said[2048];
  ring_run r = {.dev = dev, .ring_bytes = 12 << 10};
  log_of(said, sizeof said, run_with_ring, &r);
  assert_memory_equal(r.logits, together, ENGINE_ROWS * n_vocab * sizeof *together);
  if (!strstr(said, "no prefill streams experts: 0 MiB")) fail_msg("%s", said);
  assert_non_null(strstr(said, "a smaller --ctx-size or --prefill-chunk"));
  free(r.logits);
  free(together);
  td_dev_close(dev);
}

TEST(schedules) {
  engine_activations = TD_ACTIVATIONS_F32;
  for (size_t i = 0; i < N_SMALL_MODELS; i++) {
    check_schedules(&small_models[i], "cpu", TOGETHER, IN_HALVES, N_SCHEDULES);
    check_schedules(&small_models[i], "cpu", ALL_WAYS, ALL_WAYS, N_SCHEDULES);
  }
}

// With experts on the device, on the other one, and streamed or in halves.
TEST(dense_weights_that_stream) {
  static const placement places[] = {TOGETHER, APART, ALL_WAYS};
  engine_activations = TD_ACTIVATIONS_F32;
  for (size_t i = 0; i < N_SMALL_MODELS; i++) {
    for (size_t k = 0; k < TD_COUNT(places); k++)
      check_dense_schedules(&small_models[i], "cpu", places[k], N_SCHEDULES / 4);
  }
}

// Formats of which some matrices can stream, or none.
TEST(dense_weights_of_other_formats) {
  static const small_model models[] = {{"deepseek_awq", 246 << 10},
                                       {"deepseek_mxfp4", 246 << 10},
                                       {"deepseek_no_q_lora", 246 << 10},
                                       {"qwen3_gptq", 132 << 10},
                                       {"qwen3_nvfp4", 132 << 10}};
  engine_activations = TD_ACTIVATIONS_F32;
  for (size_t i = 0; i < TD_COUNT(models); i++)
    check_dense_schedules(&models[i], "cpu", APART, 3);
}

// A step copies as many bytes as its plan has, and never more than the ring's; each weight once.
TEST(bytes_of_dense_weights) {
  engine_activations = TD_ACTIVATIONS_F32;
  const int32_t tokens[] = {5, 17, 4, 99, 23}, page = 0;
  for (size_t i = 0; i < N_SMALL_MODELS; i++) {
    td_dev *dev = open_dev(TD_ACTIVATIONS_F32);
    engine_fixture f;
    engine_streamed_dense = UINT32_MAX;
    open_engine(&f, &small_models[i], dev, ALL_WAYS, ENGINE_PAGE);
    engine_streamed_dense = 0;
    uint64_t want = 0;
    for (uint32_t k = 0; k < td_model_config_of(f.model)->n_layers; k++) {
      td_layer layer = *td_model_layer(f.model, k);
      for (int part = 0; part < TD_N_DENSE_PARTS; part++) {
        td_weight *w[TD_DENSE_MAX_MATRICES];
        const uint32_t n = td_dense_matrices(&layer, (td_dense_part)part, w);
        assert_true(n >= 1);
        for (uint32_t j = 0; j < n; j++)
          want += td_weight_bytes(w[j]);
      }
    }
    td_step_seq seq = {.tokens = tokens, .n_tokens = 5, .pages = &page, .n_pages = 1};
    for (uint64_t n_steps = 1; n_steps <= 3; n_steps++) {
      td_err err;
      assert_int_equal(td_engine_step(f.engine, &seq, 1, &err), TD_OK);
      assert_int_equal(f.engine->step.plan.dense_bytes, want);
      assert_int_equal(td_engine_stream_progress(f.engine).dense_bytes, n_steps * want);
      seq = (td_step_seq){.tokens = tokens, // a prompt too short for experts to stream; a token
                          .n_tokens = n_steps == 1 ? 2 : 1,
                          .n_past = n_steps == 1 ? 0 : 2,
                          .pages = &page,
                          .n_pages = 1,
                          .is_decode = n_steps == 2};
    }
    close_engine(&f);
    td_dev_close(dev);
  }
}

TEST(prefill_beside_decode) {
  engine_activations = TD_ACTIVATIONS_F32;
  for (size_t i = 0; i < N_SMALL_MODELS; i++)
    check_lanes(&small_models[i], "cpu", N_SCHEDULES / 2);
}

// Where the device stands still, as much is queued as the ring holds, and nobody waits: the other
// engine decodes on.
TEST(feeding_waits_for_nothing) {
  engine_activations = TD_ACTIVATIONS_F32;
  td_err err;
  lanes l = {.random = 0};
  open_lanes(&l, &small_models[0], "cpu");
  td_step_seq seq = lane_seq(&l, 0, false);
  assert_int_equal(td_engine_step(l.decode, &seq, 1, &err), TD_OK);
  _Atomic uint32_t signal = 0;
  const uint32_t one = 1;
  td_op_await(l.prefill->stream, &signal, &one);
  seq = lane_seq(&l, 1, false);
  assert_int_equal(td_engine_begin(l.prefill, &seq, 1, &err), TD_OK);
  assert_false(td_engine_feed(l.prefill, 0));
  assert_int_equal(td_engine_stream_progress(l.prefill).queued_bytes, 0);
  assert_false(td_engine_feed(l.prefill, 1));
  const uint64_t first_bytes = td_engine_stream_progress(l.prefill).queued_bytes;
  assert_true(first_bytes > 0); // one group, or more where copies end as fast as they are queued
  assert_false(td_engine_feed(l.prefill, 1 << 30));
  const uint64_t ring_bytes = td_engine_stream_progress(l.prefill).queued_bytes;
  assert_true(ring_bytes >= first_bytes && ring_bytes <= small_models[0].ring_bytes);
  assert_true(ring_bytes > small_models[0].ring_bytes / 2);
  for (int i = 0; i < LANE_DECODE; i++)
    decode_lanes(&l, 1);
  assert_int_equal(l.n_answered[0], LANE_DECODE);
  assert_false(td_engine_feed(l.prefill, 1 << 30));
  assert_int_equal(td_engine_stream_progress(l.prefill).queued_bytes, ring_bytes);
  atomic_store(&signal, 1);
  while (!td_engine_feed(l.prefill, 1 << 30))
    td_engine_wait(l.prefill);
  assert_int_equal(td_engine_end(l.prefill, &err), TD_OK);
  free(l.out);
  close_lanes(&l);
}

// Whatever the cache holds, and whenever experts arrive, no bit of any result depends on it: both
// devices run the same kernels, and a token's results are added in the router's order. Caches of
// most or all experts, of some, and of one; with many moves a step and with
// one.
static void check_cached(const small_model *m) {
  static const cache_case plain = {.n_microbatches = 1};
  static const cache_case cases[] = {
      {16, 1, 0, 0}, {16, 2, 1, 0}, {5, 1, 1, 0}, {5, 2, 0, 0}, {1, 1, 0, 0}};
  engine_activations = TD_ACTIVATIONS_F32;
  const cache_result want = cached_logits(m, "cpu", &plain, 0);
  for (size_t k = 0; k < TD_COUNT(cases); k++) {
    for (unsigned seed = 0; seed < N_CACHE_SCHEDULES; seed++) {
      const cache_result got = cached_logits(m, "cpu", &cases[k], seed);
      assert_int_equal(got.n_rows, want.n_rows);
      assert_memory_equal(got.out, want.out, want.n_rows * want.n_vocab * sizeof *want.out);
      assert_true(got.stats.moves > 0 && got.stats.n_cached <= cases[k].n_slots);
      assert_true(got.stats.hits > 0 && got.stats.misses > 0);
      free(got.out);
    }
  }
  free(want.out);
}

TEST(cached_experts_change_no_bit) {
  for (size_t i = 0; i < N_SMALL_MODELS; i++)
    check_cached(&small_models[i]);
  checkpoint ck;
  ck_gpt_oss(&ck);
  ck_write(&ck);
  check_cached(&(small_model){ck.dir, PAIRED_RING});
  ck_free(&ck);
}

// Nor on which of three devices, in steps of one to sixteen tokens, whatever they wait for first:
// all experts on two devices, evenly and not; all on the peer; some, so that the expert device has
// the rest; and those used last.
TEST(a_peer_changes_no_bit) {
  static const peer_case plain = {.n_microbatches = 1};
  static const peer_case cases[][5] = {
      // of 24 experts in three layers, of four in one
      {{99, 99, true, 1}, {17, 99, true, 2}, {0, 99, true, 2}, {5, 8, true, 2}, {3, 4, false, 2}},
      {{99, 99, true, 1}, {3, 99, true, 2}, {0, 99, true, 2}, {1, 2, true, 2}, {1, 1, false, 2}}};
  engine_activations = TD_ACTIVATIONS_F32;
  for (size_t i = 0; i < N_SMALL_MODELS; i++) {
    const peer_result want = peer_logits(&small_models[i], "cpu", &plain, 0);
    for (size_t k = 0; k < TD_COUNT(cases[i]); k++) {
      const peer_case *c = &cases[i][k];
      for (unsigned seed = 0; seed < N_PEER_SCHEDULES; seed++) {
        const peer_result got = peer_logits(&small_models[i], "cpu", c, seed);
        assert_memory_equal(got.out, want.out, want.n_rows * want.n_vocab * sizeof *want.out);
        const bool is_whole = c->n_peer == 99;
        assert_true(got.plan.n_ways[is_whole ? TD_LAYER_PAIRED : TD_LAYER_SPREAD] > 0);
        assert_true(got.plan.n_ways[TD_LAYER_SPREAD] == 0 || !is_whole);
        assert_true(c->is_fixed ? got.stats.n_cached == got.stats.n_slots
                                : got.stats.hits > 0 && got.stats.moves > c->n_here);
        free(got.out);
      }
    }
    free(want.out);
  }
}

static td_dev_vtable watched;
static void (*real_enqueue)(td_stream *stream, const td_op *op);
static const td_stream *not_watched;
static size_t n_copies, longest_copy;

static void watch_copy(td_stream *stream, const td_op *op) {
  if (op->kind == TD_OP_COPY && stream != not_watched) {
    n_copies++;
    if (op->copy.n_bytes > longest_copy) longest_copy = op->copy.n_bytes;
  }
  real_enqueue(stream, op);
}

// A copy becomes an operator that fails.
static void fail_copy(td_stream *stream, const td_op *op) {
  static const int32_t no_row = -1;
  td_op failing = *op;
  if (op->kind == TD_OP_COPY && stream != not_watched) {
    failing.kind = TD_OP_GATHER_ROWS;
    failing.gather_rows = (td_gather_rows_args){.rows = &no_row, .n_rows = 1};
  }
  real_enqueue(stream, &failing);
}

static void let_copies_fail(engine_fixture *f) {
  watched = *f->dev->vtable;
  real_enqueue = watched.enqueue;
  watched.enqueue = fail_copy;
  not_watched = f->engine->stream;
  f->dev->vtable = &watched;
}

// What the peer should compute fails.
static void fail_experts(td_stream *stream, const td_op *op) {
  static const int32_t no_row = -1;
  td_op failing = *op;
  if (op->kind == TD_OP_MOE) {
    failing.kind = TD_OP_GATHER_ROWS;
    failing.gather_rows = (td_gather_rows_args){.rows = &no_row, .n_rows = 1};
  }
  real_enqueue(stream, &failing);
}

// A failure of the peer is the step's, and nobody waits for what does not come.
TEST(a_peer_that_fails) {
  engine_activations = TD_ACTIVATIONS_F32;
  static const peer_case c = {99, 99, true, 1};
  static const int32_t token = 5, page = 0;
  td_dev *devs[2];
  td_err err;
  for (int i = 0; i < 2; i++)
    assert_int_equal(td_dev_open(&devs[i], &(td_dev_opts){.kind = "cpu", .n_threads = 1}, &err),
                     TD_OK);
  engine_fixture f;
  open_peer_engine(&f, &small_models[0], devs, &c);
  watched = *devs[1]->vtable;
  real_enqueue = watched.enqueue;
  watched.enqueue = fail_experts;
  devs[1]->vtable = &watched;
  const td_step_seq seq = {.tokens = &token,
                           .n_tokens = 1,
                           .pages = &page,
                           .n_pages = 1,
                           .is_decode = true,
                           .want = TD_WANT_ALL};
  assert_int_not_equal(td_engine_step(f.engine, &seq, 1, &err), TD_OK);
  assert_non_null(strstr(err.msg, "gather"));
  close_engine(&f);
  for (int i = 0; i < 2; i++)
    td_dev_close(devs[i]);
}

// Experts that did not arrive are not used: decode goes on as without a cache.
TEST(experts_that_do_not_arrive) {
  static const cache_case plain = {.n_microbatches = 1, .n_steps = CACHE_FEW_STEPS};
  static const cache_case some = {5, 1, 0, CACHE_FEW_STEPS};
  engine_activations = TD_ACTIVATIONS_F32;
  const cache_result want = cached_logits(&small_models[0], "cpu", &plain, 0);
  meddle_with = let_copies_fail;
  const cache_result got = cached_logits(&small_models[0], "cpu", &some, 0);
  meddle_with = NULL;
  assert_memory_equal(got.out, want.out, want.n_rows * want.n_vocab * sizeof *want.out);
  assert_true(got.stats.misses > 0 && got.stats.moves == 0 && got.stats.n_cached == 0);
  free(want.out);
  free(got.out);
}

// What of the model each copy to the device is for, and which experts the other device computes:
// 4 * layer + what it is.
enum { OF_ATTN = TD_DENSE_ATTN, OF_MLP = TD_DENSE_MLP, OF_EXPERTS, COMPUTES_EXPERTS };
enum { MAX_NOTED = 256 };
static engine_fixture *noted_of;
static uint32_t noted[MAX_NOTED], n_noted;

static bool is_in(const td_weight *w, const void *p) {
  const char *data = w->data, *at = p;
  return data && at >= data && at < data + td_weight_data_bytes(w);
}

static void note(uint32_t layer_idx, uint32_t what) {
  if (n_noted && noted[n_noted - 1] == 4 * layer_idx + what) return;
  assert_true(n_noted < MAX_NOTED);
  noted[n_noted++] = 4 * layer_idx + what;
}

static void note_order(td_stream *stream, const td_op *op) {
  const td_model_config *c = td_model_config_of(noted_of->model);
  for (uint32_t i = 0; i < c->n_layers; i++) {
    td_layer layer = *td_model_layer(noted_of->model, i);
    const bool is_aside = op->kind == TD_OP_MOE && stream == noted_of->engine->offload.stream;
    if (is_aside && op->moe.gate == layer.gate) note(i, COMPUTES_EXPERTS);
    if (op->kind != TD_OP_COPY) continue;
    for (int part = 0; part < TD_N_DENSE_PARTS; part++) {
      td_weight *w[TD_DENSE_MAX_MATRICES];
      for (uint32_t n = td_dense_matrices(&layer, (td_dense_part)part, w); n; n--)
        if (is_in(w[n - 1], op->copy.src)) note(i, (uint32_t)part);
    }
    for (uint32_t k = 0; layer.is_moe && k < c->n_experts; k++)
      if (is_in(&layer.gate[k], op->copy.src)) note(i, OF_EXPERTS);
  }
  real_enqueue(stream, op);
}

// Where experts stream, copies are queued in the order of use. Where the other device computes
// them, which the host waits for, the next layer's dense weights come first.
TEST(order_of_copies) {
  static const int32_t tokens[ENGINE_PAGE] = {5, 17, 4, 99}, page = 0;
  static const uint32_t streamed[] = {0, 1, 2, 4, 5, 6, 8, 9, 10};
  static const uint32_t aside[] = {0, 1, 4, 5, 3, 8, 9, 7, 11};
  engine_activations = TD_ACTIVATIONS_F32;
  td_dev *dev = open_dev(TD_ACTIVATIONS_F32);
  engine_fixture f;
  engine_streamed_dense = UINT32_MAX;
  open_engine(&f, &small_models[0], dev, ALL_WAYS, ENGINE_PAGE);
  engine_streamed_dense = 0;
  noted_of = &f;
  const td_dev_vtable *own = dev->vtable;
  watched = *own;
  real_enqueue = own->enqueue;
  watched.enqueue = note_order;
  dev->vtable = f.expert_dev->vtable = &watched;
  for (int is_short = 0; is_short < 2; is_short++) {
    const td_step_seq seq = {.tokens = tokens,
                             .n_tokens = is_short ? SHORT_PROMPT : STREAM_PROMPT,
                             .pages = &page,
                             .n_pages = 1};
    td_err err;
    n_noted = 0;
    assert_int_equal(td_engine_step(f.engine, &seq, 1, &err), TD_OK);
    assert_int_equal(n_noted, TD_COUNT(streamed));
    assert_memory_equal(noted, is_short ? aside : streamed, sizeof streamed);
  }
  dev->vtable = f.expert_dev->vtable = own;
  close_engine(&f);
  td_dev_close(dev);
}

// A prompt that is fed beside decode is copied in pieces, one that runs alone in few long copies.
TEST(copies_beside_decode_are_short) {
  engine_activations = TD_ACTIVATIONS_F32;
  td_err err;
  lanes l = {.random = 0};
  open_lanes(&l, &small_models[0], "cpu");
  const td_dev_vtable *own = l.dev->vtable;
  watched = *own;
  real_enqueue = own->enqueue;
  watched.enqueue = watch_copy;
  l.dev->vtable = &watched;
  not_watched = l.prefill->stream;
  const td_step_seq seq = lane_seq(&l, 1, false);
  assert_int_equal(td_engine_begin(l.prefill, &seq, 1, &err), TD_OK);
  while (!td_engine_feed(l.prefill, 1))
    td_engine_wait(l.prefill);
  assert_int_equal(td_engine_end(l.prefill, &err), TD_OK);
  const uint64_t n_bytes = td_engine_stream_progress(l.prefill).copied_bytes;
  const size_t n_pieces = n_copies;
  assert_int_equal(longest_copy, LANE_PIECE_BYTES);
  assert_true(n_pieces >= n_bytes / LANE_PIECE_BYTES);
  n_copies = 0;
  assert_int_equal(td_engine_step(l.prefill, &seq, 1, &err), TD_OK);
  assert_true(n_copies < n_pieces / 2);
  assert_true(longest_copy > LANE_PIECE_BYTES);
  l.dev->vtable = own;
  free(l.out);
  close_lanes(&l);
}

// Prefill on one device, decode on another, over pages in host memory.
TEST(kv_transfer) {
  engine_activations = TD_ACTIVATIONS_F32;
  for (unsigned seed = 0; seed < N_TRANSFERS; seed++) {
    char text[16];
    snprintf(text, sizeof text, "%u", seed);
    setenv("TANDEM_JITTER", text, 1);
    for (size_t i = 0; i < N_SMALL_MODELS; i++)
      check_xfer(&small_models[i], "cpu", seed % 2);
  }
  unsetenv("TANDEM_JITTER");
  check_f8_xfer("cpu");
}

// The same with states, which leave the device where others may go on from them.
static void check_states_transfer(checkpoint *ck, size_t ring_bytes) {
  ck_write(ck);
  const small_model m = {ck->dir, ring_bytes};
  for (unsigned seed = 0; seed < N_TRANSFERS; seed++) {
    char text[16];
    snprintf(text, sizeof text, "%u", seed);
    setenv("TANDEM_JITTER", text, 1);
    check_xfer(&m, "cpu", seed % 2);
  }
  unsetenv("TANDEM_JITTER");
  ck_free(ck);
}

TEST(kv_transfer_of_states) {
  engine_activations = TD_ACTIVATIONS_F32;
  checkpoint ck;
  ck_qwen3_next(&ck);
  check_states_transfer(&ck, NEXT_RING);
  ck_gpt_oss(&ck); // keys and values that a window sees
  check_states_transfer(&ck, PAIRED_RING);
}

static const char *host_pages;
static size_t host_bytes;
static uint32_t n_attended, layers_out; // layers whose attention is queued; a bit for each copied

static void watch_out(td_stream *stream, const td_op *op) {
  n_attended += op->kind == TD_OP_ATTN_GQA || op->kind == TD_OP_ATTN_MLA;
  const char *to = op->kind == TD_OP_COPY ? op->copy.dst : NULL;
  if (to >= host_pages && to < host_pages + host_bytes) layers_out |= 1u << n_attended;
  real_enqueue(stream, op);
}

// A layer's keys and values are copied out before its attention is queued, not when all is
// computed.
TEST(keys_leave_layer_by_layer) {
  enum { N = 20 };
  const int32_t pages[] = {1, 4};
  int32_t tokens[N];
  for (int32_t i = 0; i < N; i++)
    tokens[i] = 3 + 7 * i;
  xfer_world w;
  open_xfer_world(&w, &small_models[1], "cpu", false);
  const td_dev_vtable *own = w.prefill.dev->vtable;
  watched = *own;
  real_enqueue = own->enqueue;
  watched.enqueue = watch_out;
  w.prefill.dev->vtable = &watched;
  host_pages = w.prefill.host_pages;
  host_bytes = w.pages_bytes;
  n_attended = layers_out = 0;
  xfer_step(&w, &w.prefill, tokens, pages, 0, N, false);
  w.prefill.dev->vtable = own;
  const uint32_t n_layers = td_model_config_of(w.model)->n_layers;
  assert_int_equal(n_attended, n_layers);
  assert_int_equal(layers_out, (1u << n_layers) - 1);
  assert_int_equal(td_kv_transfer_stats_of(w.prefill.transfer).out_bytes, 2 * w.page_bytes);
  close_xfer_world(&w);
}
