// src/engine/experts/expert_peer.c - what the engine's device and its peer send each other in
// decode.
#include "engine/experts/expert_peer.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "base/log.h"

// An inbox: signals of the layers and microbatches, [n_layers][TD_MAX_MICROBATCHES], then data.
struct td_expert_peer {
  td_dev *dev;
  td_stream *stream;
  td_peer_experts experts;
  td_inbox given, done;       // of the peer: inputs; of the engine's device: results
  int32_t *meta, *dev_meta;   // the step's number, then the table; host memory, the peer's
  _Atomic uint32_t *canceled; // host memory
};

static size_t signals_bytes(const td_engine *e) {
  return (size_t)e->config->n_layers * TD_MAX_MICROBATCHES * sizeof(td_engine_signal);
}

static _Atomic uint32_t *signal_of(const td_inbox *inbox, const td_microbatch *p,
                                   uint32_t layer_idx) {
  td_engine_signal *signals = inbox->memory;
  return &signals[(size_t)layer_idx * TD_MAX_MICROBATCHES + p->idx].step;
}

static size_t given_bytes(const td_engine *e) {
  return signals_bytes(e) + td_engine_offload_input_bytes(e, e->opts.max_step_seqs);
}

static char *input_of(const td_engine *e, const td_microbatch *p) {
  return (char *)e->peer->given.memory + signals_bytes(e) + td_engine_offload_input_at(e, p->begin);
}

static size_t row_bytes(const td_engine *e) {
  return (size_t)e->config->top_k * e->config->dim * sizeof(float);
}

static float *results_of(const td_engine *e, const td_microbatch *p) {
  char *results = (char *)e->peer->done.memory + signals_bytes(e);
  return (float *)(results + p->begin * row_bytes(e));
}

static size_t meta_bytes(const td_engine *e) {
  return (1 + (size_t)e->config->n_layers * e->config->n_experts) * sizeof(int32_t);
}

size_t td_expert_peer_bytes(const td_engine *e) {
  return given_bytes(e) + meta_bytes(e);
}

td_status td_expert_peer_open(td_engine *e, const td_peer_experts *experts, td_err *err) {
  td_expert_peer *peer = e->peer = calloc(1, sizeof *peer);
  if (!peer) return td_fail(err, TD_ENOMEM, "out of memory");
  peer->dev = e->opts.cache_peer;
  peer->experts = *experts;
  const size_t done_bytes = signals_bytes(e) + e->opts.max_step_seqs * row_bytes(e);
  void *canceled = NULL;
  td_status st = td_stream_open_urgent(&peer->stream, peer->dev, err);
  if (st == TD_OK) st = td_inbox_open(&peer->given, peer->dev, e->dev, given_bytes(e), err);
  if (st == TD_OK) st = td_inbox_open(&peer->done, e->dev, peer->dev, done_bytes, err);
  if (st == TD_OK) st = td_dev_alloc_host(peer->dev, (void **)&peer->meta, meta_bytes(e), err);
  if (st == TD_OK) st = td_dev_alloc(peer->dev, (void **)&peer->dev_meta, meta_bytes(e), err);
  if (st == TD_OK) st = td_dev_alloc_host(peer->dev, &canceled, sizeof *peer->canceled, err);
  peer->canceled = canceled;
  if (st == TD_OK) atomic_init(peer->canceled, 0);
  if (st == TD_OK)
    td_info("%s and %s compute experts of decode together, %s", td_dev_name(e->dev),
            td_dev_name(peer->dev),
            peer->given.is_host ? "through host memory" : "by each other's memory");
  return st;
}

void td_expert_peer_close(td_engine *e) {
  td_expert_peer *peer = e->peer;
  if (!peer) return;
  td_stream_close(peer->stream);
  td_inbox_close(&peer->given, peer->dev);
  td_inbox_close(&peer->done, e->dev);
  td_dev_free_host(peer->dev, peer->meta);
  td_dev_free(peer->dev, peer->dev_meta);
  td_dev_free_host(peer->dev, peer->canceled);
  free(peer);
  e->peer = NULL;
}

int32_t *td_expert_peer_table(td_engine *e) {
  return e->peer->meta + 1;
}

static void compute(td_engine *e, const td_microbatch *p, uint32_t layer_idx) {
  const td_expert_peer *peer = e->peer;
  const uint32_t *step = (const uint32_t *)peer->dev_meta;
  td_moe_args args = td_engine_moe_args(e, layer_idx, input_of(e, p), p->n_tokens);
  args.gate = peer->experts.gate;
  args.up = peer->experts.up;
  args.down = peer->experts.down;
  args.slots = peer->dev_meta + 1 + (size_t)layer_idx * e->config->n_experts;
  args.n_slots = peer->experts.n_slots;
  args.out = results_of(e, p);
  args.out_f32 = args.by_pair = args.weights_on_device = true;
  td_op_await_or_cancel(peer->stream, signal_of(&peer->given, p, layer_idx), step, peer->canceled);
  td_op_moe(peer->stream, &args);
  td_op_signal(peer->stream, signal_of(&peer->done, p, layer_idx), step);
}

static void enqueue(void *ctx) {
  td_engine *e = ctx;
  const td_expert_peer *peer = e->peer;
  td_op_copy_direct(peer->stream, peer->dev_meta, peer->meta, meta_bytes(e));
  for (uint32_t i = 0; i < e->config->n_layers; i++) {
    if (!td_layer_way_has_peer(e->step.plan.way[i])) continue;
    for (uint32_t k = 0; k < e->step.plan.n_microbatches; k++)
      compute(e, &e->step.microbatches[k], i);
  }
}

void td_expert_peer_enqueue(td_engine *e) {
  const td_work_key key = {.n_tokens = e->step.n_tokens,
                           .n_microbatches = e->step.plan.n_microbatches};
  e->peer->meta[0] = (int32_t)*e->step.number;
  td_stream_run(e->peer->stream, &key, enqueue, e);
}

void td_expert_peer_post(td_engine *e, const td_microbatch *p, uint32_t layer_idx,
                         const void *input, size_t n_bytes) {
  td_op_post(e->stream, &(td_post_args){.dst = input_of(e, p),
                                        .src = input,
                                        .n_bytes = n_bytes,
                                        .signal = signal_of(&e->peer->given, p, layer_idx),
                                        .value = e->step.dev_number});
}

const float *td_expert_peer_await(td_engine *e, const td_microbatch *p, uint32_t layer_idx) {
  td_op_await(e->stream, signal_of(&e->peer->done, p, layer_idx), e->step.dev_number);
  return results_of(e, p);
}

void td_expert_peer_release(td_engine *e) {
  if (e->peer) atomic_store(e->peer->canceled, 1);
}

td_status td_expert_peer_sync(td_engine *e, td_err *err) {
  return e->peer ? td_stream_sync(e->peer->stream, err) : TD_OK;
}
