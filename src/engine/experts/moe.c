// src/engine/experts/moe.c - the second half of a layer: a dense MLP, or a router and its experts.
// Routed experts can be offloaded to a second device (the CPU) when they do not fit on the first.
// Per layer: copy hidden states and routing to pinned host memory, run the experts there while the
// first device runs the shared expert, add the weighted sum (in decode the next norm does, from
// where it is). The first device's processors move these bytes: its copy engines may be busy with
// streamed experts for a long time. Decode steps are queued up front on both devices, which wait
// for each other's signals. For prefill the calling thread waits in between, because a GPU that
// waits for long may be taken for a hung one.
#include <stdatomic.h>
#include <string.h>

#include "engine/engine_impl.h"
#include "engine/experts/expert_drive.h"
#include "engine/experts/expert_peer.h"
#include "engine/experts/ranks.h"
#include "engine/rows.h"

static size_t align_64(size_t n) {
  return (n + 63) & ~(size_t)63;
}

static size_t row_bytes(const td_engine *e) {
  return e->config->dim * e->act_bytes;
}

// Input of the experts, contiguous so that one copy moves all of it.
typedef struct {
  char *x;      // [n_tokens][dim]
  int32_t *ids; // [n_tokens][top_k]
  float *weights;
} given;

static given offload_input_at(const td_engine *e, void *at, size_t n_tokens) {
  given g = {.x = at};
  g.ids = (int32_t *)(g.x + align_64(n_tokens * row_bytes(e)));
  g.weights = (float *)(g.ids + n_tokens * e->config->top_k);
  return g;
}

static size_t offload_input_bytes_of(const td_engine *e, size_t n_tokens) {
  size_t n = n_tokens * e->config->top_k;
  return align_64(n_tokens * row_bytes(e)) + n * (sizeof(int32_t) + sizeof(float));
}

size_t td_engine_offload_input_at(const td_engine *e, uint32_t n_before) {
  return align_64(offload_input_bytes_of(e, n_before));
}

size_t td_engine_offload_input_bytes(const td_engine *e, size_t n_tokens) {
  enum { ROUNDING = TD_MAX_MICROBATCHES * 2 * 64 };
  return offload_input_bytes_of(e, n_tokens) + ROUNDING;
}

td_status td_moe_offload_open(td_engine *e, td_err *err) {
  td_moe_offload *offload = &e->offload;
  offload->dev = e->opts.expert_dev;
  if (!offload->dev) return TD_OK;
  const uint32_t usual = td_engine_prefill_chunk(e->config);
  const uint32_t of_decode = e->opts.max_step_seqs + e->opts.max_drafts; // in one piece
  offload->max_tokens = usual > of_decode ? usual : of_decode;
  if (offload->max_tokens > e->opts.max_step_tokens) offload->max_tokens = e->opts.max_step_tokens;
  const size_t offload_input_bytes = td_engine_offload_input_bytes(e, offload->max_tokens);
  const size_t n_signals = (size_t)e->config->n_layers * TD_MAX_MICROBATCHES;
  const size_t sum_bytes = offload->max_tokens * row_bytes(e);
  td_status st = td_stream_open(&offload->stream, offload->dev, err);
  if (st == TD_OK) st = td_event_open(&offload->given, e->dev, err);
  if (st == TD_OK) st = td_event_open(&offload->done, offload->dev, err);
  if (st == TD_OK) st = td_dev_alloc_host(e->dev, (void **)&offload->in, offload_input_bytes, err);
  if (st == TD_OK) st = td_dev_alloc_host(e->dev, &offload->out, sum_bytes, err);
  size_t signal_bytes = 2 * n_signals * sizeof *offload->input_signals;
  void *signals = NULL;
  if (st == TD_OK) st = td_dev_alloc_host(e->dev, &signals, signal_bytes, err);
  // If the first device fails before writing the input, the experts still run on it: zeros are
  // valid ids.
  if (st == TD_OK) memset(offload->in, 0, offload_input_bytes);
  if (st == TD_OK) memset(signals, 0, signal_bytes);
  offload->input_signals = signals;
  offload->done_signals = st == TD_OK ? offload->input_signals + n_signals : NULL;
  return st;
}

void td_moe_offload_close(td_engine *e) {
  td_moe_offload *offload = &e->offload;
  td_stream_close(offload->stream);
  td_event_close(offload->given);
  td_event_close(offload->done);
  td_dev_free_host(e->dev, offload->in);
  td_dev_free_host(e->dev, offload->out);
  td_dev_free_host(e->dev, offload->input_signals);
}

// Multiplies the shared expert's output by its gate.
static void gate_shared(td_engine *e, const td_microbatch *p, const td_layer *layer, void *out) {
  const td_model_config *c = e->config;
  td_rows_linear_exact(e, p, &layer->shared_gate, td_rows_at(e, p, e->h, c->dim), e->router_logits);
  td_op_gate_rows(e->stream, &(td_gate_rows_args){.x = out,
                                                  .gate = e->router_logits,
                                                  .gate_stride = 1,
                                                  .n_tokens = p->n_tokens,
                                                  .n_groups = 1,
                                                  .dim = c->dim,
                                                  .scalar = true});
}

void td_engine_mlp(td_engine *e, const td_microbatch *p, const td_layer *layer, bool accumulate) {
  if (!p->n_tokens) return;
  const bool is_gated = layer->shared_gate.data != NULL;
  void *out = is_gated && accumulate ? e->shared : p->delta;
  td_op_moe(e->stream,
            &(td_moe_args){.gate = &layer->mlp_gate,
                           .up = &layer->mlp_up,
                           .down = &layer->mlp_down,
                           .x = td_rows_at(e, p, e->h, e->config->dim),
                           .out = out,
                           .n_tokens = p->n_tokens,
                           .n_prompt = p->groups[GROUP_PREFILL].view.n_tokens,
                           .n_experts = 1,
                           .top_k = 1,
                           .limit = e->config->swiglu_limit,
                           .alpha = e->config->swiglu_alpha,
                           .plain = e->config->swiglu_plain,
                           .gelu = e->config->is_gelu,
                           .accumulate = accumulate && !is_gated,
                           .weights_on_device = td_engine_is_in_slot(e, &layer->mlp_gate)});
  if (!is_gated) return;
  gate_shared(e, p, layer, out);
  if (accumulate) td_op_add(e->stream, p->delta, out, (size_t)p->n_tokens * e->config->dim);
}

// Routes n_tokens tokens with hidden states x. ids: the tokens themselves, for layers with a table.
static void route(td_engine *e, const void *x, const int32_t *ids, uint32_t n_tokens,
                  uint32_t layer_idx, const given *to) {
  const td_layer *layer = td_engine_layer(e, layer_idx);
  const td_model_config *c = e->config;
  td_op_linear(e->stream,
               &(td_linear_op_args){.w = &layer->router,
                                    .bias = layer->logit_bias,
                                    .x = x,
                                    .y = e->router_logits,
                                    .x_stride = c->dim,
                                    .y_stride = c->n_experts,
                                    .n_tokens = n_tokens,
                                    .out_f32 = true,
                                    .exact = true,
                                    .weights_on_device = td_engine_is_in_slot(e, &layer->router)});
  td_op_router(e->stream, &(td_router_args){.logits = e->router_logits,
                                            .bias = layer->router_bias,
                                            .ids = to->ids,
                                            .weights = to->weights,
                                            .table = layer->expert_table,
                                            .tokens = ids,
                                            .kind = c->router_sigmoid    ? TD_ROUTER_SIGMOID
                                                    : c->router_softplus ? TD_ROUTER_SOFTPLUS
                                                                         : TD_ROUTER_SOFTMAX,
                                            .n_tokens = n_tokens,
                                            .n_experts = c->n_experts,
                                            .top_k = c->top_k,
                                            .n_groups = c->n_groups,
                                            .topk_groups = c->topk_groups,
                                            .n_vocab = c->n_vocab,
                                            .norm_topk = c->norm_topk,
                                            .scaling = c->routed_scaling,
                                            .min_sum = c->router_min_sum,
                                            .expert_scale = layer->expert_scale});
}

static void record_routing(td_engine *e, const td_microbatch *p, uint32_t layer_idx,
                           const given *from) {
  if (!e->dev_routing) return;
  const uint32_t top_k = e->config->top_k;
  td_op_copy(e->stream, e->dev_routing + td_engine_routing_at(e, layer_idx) + p->begin * top_k,
             from->ids, (size_t)p->n_tokens * top_k * sizeof *from->ids);
}

// Arguments for the routed experts' sum of n_tokens tokens, the last n_prompt of which are prompt
// tokens.
static td_moe_args routed(const td_engine *e, const td_layer *layer, const given *from,
                          uint32_t n_tokens, uint32_t n_prompt, void *out) {
  return (td_moe_args){.gate = layer->gate,
                       .up = layer->up,
                       .down = layer->down,
                       .gate_bias = layer->gate_bias,
                       .down_bias = layer->down_bias,
                       .limit = e->config->swiglu_limit,
                       .alpha = e->config->swiglu_alpha,
                       .plain = e->config->swiglu_plain,
                       .gelu = e->config->is_gelu,
                       .pairs = !layer->up,
                       .x = from->x,
                       .ids = from->ids,
                       .weights = from->weights,
                       .out = out,
                       .n_tokens = n_tokens,
                       .n_prompt = n_prompt,
                       .n_experts = e->config->n_experts,
                       .top_k = e->config->top_k,
                       .is_bf16 = td_dev_act_dtype(e->dev) == TD_BF16};
}

td_moe_args td_engine_moe_args(const td_engine *e, uint32_t layer_idx, void *input,
                               uint32_t n_tokens) {
  const given from = offload_input_at(e, input, n_tokens);
  return routed(e, td_model_layer(e->model, layer_idx), &from, n_tokens, 0, NULL);
}

// ---- offload to another device ------------------------------------------------------------------

// A piece of a microbatch: as many tokens as one transfer holds.
typedef struct {
  uint32_t begin, n, n_prompt;
} piece;

static piece piece_at(const td_engine *e, const td_microbatch *p, uint32_t begin) {
  const uint32_t left = p->n_tokens - begin;
  const uint32_t n_left = p->groups[GROUP_PREFILL].view.n_tokens; // prompt tokens come last
  piece c = {.begin = begin, .n = left < e->offload.max_tokens ? left : e->offload.max_tokens};
  const uint32_t n_others = left > n_left ? left - n_left : 0;
  c.n_prompt = c.n > n_others ? c.n - n_others : 0;
  return c;
}

// Where the microbatch's input and its sum are in host memory.
static given offload_input_of(const td_engine *e, const td_microbatch *p, uint32_t n) {
  return offload_input_at(e, e->offload.in + td_engine_offload_input_at(e, p->begin), n);
}

static char *sum_of(const td_engine *e, const td_microbatch *p) {
  return (char *)e->offload.out + p->begin * row_bytes(e);
}

// Arguments of the expert device for n tokens whose input was copied.
static td_moe_args offload_args(const td_engine *e, const td_microbatch *p, uint32_t layer_idx,
                                uint32_t n, uint32_t n_prompt) {
  const given from = offload_input_of(e, p, n);
  return routed(e, td_model_layer(e->model, layer_idx), &from, n, n_prompt, sum_of(e, p));
}

static size_t signal_at(const td_microbatch *p, uint32_t layer_idx) {
  return (size_t)layer_idx * TD_MAX_MICROBATCHES + p->idx;
}

// Whether the expert device computes experts of the layer.
static bool uses_expert_dev(const td_engine *e, uint32_t layer_idx) {
  return td_layer_way_has_expert_dev(e->step.plan.way[layer_idx]);
}

void td_moe_offload_enqueue(td_engine *e) {
  td_moe_offload *offload = &e->offload;
  const uint32_t n_microbatches = e->step.plan.n_microbatches;
  for (uint32_t i = 0; i < e->config->n_layers * n_microbatches; i++) {
    const td_microbatch *p = &e->step.microbatches[i % n_microbatches];
    const uint32_t layer_idx = i / n_microbatches;
    if (!uses_expert_dev(e, layer_idx)) continue;
    const td_moe_args args = offload_args(e, p, layer_idx, p->n_tokens, 0);
    td_op_await(offload->stream, &offload->input_signals[signal_at(p, layer_idx)].step,
                e->step.number);
    if (td_layer_way_joins(e->step.plan.way[layer_idx]))
      td_expert_cache_compute_rest(e, p, layer_idx, &args);
    else
      td_op_moe(offload->stream, &args);
    td_op_signal(offload->stream, &offload->done_signals[signal_at(p, layer_idx)].step,
                 e->step.number);
  }
}

void td_moe_offload_release(td_engine *e) {
  if (e->step.plan.handover != TD_HANDOVER_SIGNALS) return;
  for (uint32_t i = 0; i < e->config->n_layers * TD_MAX_MICROBATCHES; i++)
    atomic_store(&e->offload.input_signals[i].step, *e->step.number);
}

static void send_hidden(td_engine *e, const td_microbatch *p, const given *from, const piece *c) {
  const size_t n_pairs = (size_t)c->n * e->config->top_k,
               pair = (size_t)c->begin * e->config->top_k;
  const given to = offload_input_of(e, p, c->n);
  if (c->n == p->n_tokens) {
    td_op_copy_direct(e->stream, to.x, from->x, offload_input_bytes_of(e, c->n));
    return;
  }
  td_op_copy_direct(e->stream, to.x, from->x + c->begin * row_bytes(e), c->n * row_bytes(e));
  td_op_copy_direct(e->stream, to.ids, from->ids + pair, n_pairs * sizeof *to.ids);
  td_op_copy_direct(e->stream, to.weights, from->weights + pair, n_pairs * sizeof *to.weights);
}

// The same of all tokens, and then the expert device's signal: in one operator where they are few,
// since one block of a GPU's threads copies for it.
static void send_and_signal(td_engine *e, const td_microbatch *p, uint32_t layer_idx,
                            const given *from, const piece *c) {
  enum { FEW_BYTES = 64 << 10 };
  _Atomic uint32_t *signal = &e->offload.input_signals[signal_at(p, layer_idx)].step;
  const size_t n_bytes = offload_input_bytes_of(e, c->n);
  if (c->n == p->n_tokens && n_bytes <= FEW_BYTES) {
    td_op_post(e->stream, &(td_post_args){.dst = offload_input_of(e, p, c->n).x,
                                          .src = from->x,
                                          .n_bytes = n_bytes,
                                          .signal = signal,
                                          .value = e->step.dev_number});
    return;
  }
  send_hidden(e, p, from, c);
  td_op_signal(e->stream, signal, e->step.dev_number);
}

static bool has_shared(const td_engine *e, uint32_t layer_idx) {
  return td_model_layer(e->model, layer_idx)->mlp_gate.data != NULL;
}

// delta = the sum of a piece; += for a layer with shared experts.
static void receive_sum(td_engine *e, const td_microbatch *p, uint32_t layer_idx, const piece *c) {
  char *delta = p->delta + c->begin * row_bytes(e);
  if (has_shared(e, layer_idx))
    td_op_add(e->stream, delta, sum_of(e, p), (size_t)c->n * e->config->dim);
  else
    td_op_copy_direct(e->stream, delta, sum_of(e, p), c->n * row_bytes(e));
}

// Runs a piece on the expert device without signals: the host waits for its input, and for its sum.
static void compute_piece(td_engine *e, const td_microbatch *p, uint32_t layer_idx,
                          const piece *c) {
  td_moe_offload *offload = &e->offload;
  const td_moe_args args = offload_args(e, p, layer_idx, c->n, c->n_prompt);
  td_event_sync(offload->given);
  if (e->drive)
    td_expert_drive_compute(e, p->begin + c->begin, layer_idx, &args);
  else
    td_op_moe(offload->stream, &args);
  td_event_record(offload->done, offload->stream);
  td_event_sync(offload->done);
  receive_sum(e, p, layer_idx, c);
}

// Sends h piece by piece; delta = the shared expert. With signals, td_engine_moe_end has the sum.
static void begin_offload(td_engine *e, const td_microbatch *p, uint32_t layer_idx,
                          const given *from) {
  td_moe_offload *offload = &e->offload;
  const td_layer *layer = td_engine_layer(e, layer_idx);
  const bool has_signals = e->step.plan.handover == TD_HANDOVER_SIGNALS;
  for (uint32_t begin = 0; begin < p->n_tokens; begin += offload->max_tokens) {
    const piece c = piece_at(e, p, begin);
    if (has_signals) {
      send_and_signal(e, p, layer_idx, from, &c);
    } else {
      send_hidden(e, p, from, &c);
      td_event_record(offload->given, e->stream);
    }
    if (layer->mlp_gate.data && begin == 0) td_engine_mlp(e, p, layer, false);
    td_dense_stream_leave(e, TD_DENSE_MLP); // before this thread waits for the experts
    td_dense_stream_fetch_ahead(e, layer_idx);
    if (!has_signals) compute_piece(e, p, layer_idx, &c);
  }
}

// Experts on the engine's device and on its peer.
static void begin_cached(td_engine *e, const td_microbatch *p, uint32_t layer_idx,
                         const given *from) {
  const td_layer *layer = td_engine_layer(e, layer_idx);
  const bool is_paired = e->step.plan.way[layer_idx] == TD_LAYER_PAIRED;
  const piece all = piece_at(e, p, 0);
  if (is_paired) send_hidden(e, p, from, &all); // ids and weights for the join
  if (is_paired && layer->mlp_gate.data) td_engine_mlp(e, p, layer, false);
  const td_moe_args args = routed(e, layer, from, p->n_tokens, 0, NULL);
  td_expert_cache_compute(e, p, layer_idx, &args);
}

const void *td_engine_moe_end(td_engine *e, const td_microbatch *p, uint32_t layer_idx) {
  if (e->step.plan.handover != TD_HANDOVER_SIGNALS) return NULL;
  const uint8_t way = e->step.plan.way[layer_idx];
  if (uses_expert_dev(e, layer_idx))
    td_op_await(e->stream, &e->offload.done_signals[signal_at(p, layer_idx)].step,
                e->step.dev_number);
  if (td_layer_way_joins(way)) {
    const td_moe_args args = offload_args(e, p, layer_idx, p->n_tokens, 0);
    return td_expert_cache_join(e, p, layer_idx, &args);
  }
  if (!uses_expert_dev(e, layer_idx)) return NULL;
  if (has_shared(e, layer_idx)) return sum_of(e, p);
  const piece all = piece_at(e, p, 0);
  receive_sum(e, p, layer_idx, &all);
  return NULL;
}

// ---- the whole MoE block ------------------------------------------------------------------------

// Arguments for all of the layer's routed experts on the engine's device; in a step of several
// ranks, for the tokens of all.
static td_moe_args all_routed(const td_engine *e, const td_microbatch *p, uint32_t layer_idx) {
  if (td_rank_is_active(e)) {
    const td_rank *r = e->rank;
    const given all = offload_input_at(e, r->h, r->n_all);
    return routed(e, td_model_layer(e->model, layer_idx), &all, r->n_all, r->n_all, r->part);
  }
  const given from = offload_input_at(e, e->h, p->n_tokens);
  return routed(e, td_model_layer(e->model, layer_idx), &from, p->n_tokens,
                p->groups[GROUP_PREFILL].view.n_tokens, p->delta);
}

// delta = the shared expert, before the streamed experts' sum is added.
static void begin_streamed(td_engine *e, const td_microbatch *p, const td_layer *layer) {
  if (layer->mlp_gate.data)
    td_engine_mlp(e, p, layer, false);
  else
    td_op_fill_zero(e->stream, p->delta, p->n_tokens * row_bytes(e));
}

void td_engine_moe_group(td_engine *e, const td_microbatch *p, uint32_t layer_idx, uint32_t group) {
  const td_moe_args args = all_routed(e, p, layer_idx);
  td_engine_stream_group(e, p, layer_idx, group, &args);
}

static void compute_here(td_engine *e, const td_microbatch *p, uint32_t layer_idx) {
  const td_layer *layer = td_engine_layer(e, layer_idx);
  const td_moe_args args = all_routed(e, p, layer_idx);
  td_op_moe(e->stream, &args);
  if (layer->mlp_gate.data) td_engine_mlp(e, p, layer, true);
}

// With the shared expert computed while experts are read. Sums of two are the same either way
// round.
static void compute_read(td_engine *e, const td_microbatch *p, uint32_t layer_idx) {
  const td_layer *layer = td_engine_layer(e, layer_idx);
  const bool has_shared = layer->mlp_gate.data != NULL;
  td_moe_args args = all_routed(e, p, layer_idx);
  td_expert_drive_note_routed(e);
  if (has_shared) {
    td_engine_mlp(e, p, layer, false);
    args.out = td_expert_drive_sum(e);
  }
  td_expert_drive_compute(e, p->begin, layer_idx, &args);
  if (has_shared) td_op_add(e->stream, p->delta, args.out, (size_t)p->n_tokens * e->config->dim);
}

// ---- experts of several ranks -------------------------------------------------------------------

// For the half's tokens, of all that `all` is for.
static td_moe_args of_half(const td_engine *e, const td_moe_args *all, const td_rank_half *half) {
  const size_t pair = (size_t)half->begin * all->top_k;
  td_moe_args args = *all;
  args.x = (const char *)all->x + half->begin * row_bytes(e);
  args.ids += pair;
  args.weights += pair;
  args.out = (float *)all->out + (size_t)half->begin * e->config->dim;
  args.n_tokens = args.n_prompt = half->n;
  args.same_ids = all->same_ids && e->rank->n_halves == 1;
  return args;
}

static void compute_half(td_engine *e, const td_moe_args *args) {
  if (!args->n_tokens) return;
  if (args->n_experts)
    td_op_moe(e->stream, args);
  else // more ranks than experts
    td_op_fill_zero(e->stream, args->out, (size_t)args->n_tokens * e->config->dim * sizeof(float));
}

void td_engine_moe_ranks_group(td_engine *e, uint32_t layer_idx, const td_moe_args *group,
                               bool is_first, bool is_last) {
  td_rank *r = e->rank;
  if (!is_first && !is_last) {
    td_moe_args args = *group;
    args.same_ids = r->is_sorted;
    td_op_moe(e->stream, &args);
    r->is_sorted = true;
    return;
  }
  for (uint32_t h = 0; h < r->n_halves; h++) {
    td_rank_half *half = &r->halves[h];
    const td_moe_args args = of_half(e, group, half);
    const given to = {.ids = (int32_t *)args.ids, .weights = (float *)args.weights};
    if (is_first) td_rank_await(e, half);
    if (is_first && half->n) route(e, args.x, NULL, half->n, layer_idx, &to);
    compute_half(e, &args);
    if (is_last) td_rank_reduce(e, half, group->out);
  }
  r->is_sorted = r->n_halves == 1;
}

void td_engine_moe_ranks_begin(td_engine *e, uint32_t layer_idx) {
  const td_rank *r = e->rank;
  if (e->step.plan.way[layer_idx] == TD_LAYER_STREAMED && r->n_experts) return;
  td_moe_args args = all_routed(e, &e->step.whole, layer_idx);
  args.n_routed = args.n_experts;
  args.first_expert = r->first_expert;
  args.n_experts = r->n_experts;
  args.gate += r->first_expert;
  if (args.up) args.up += r->first_expert;
  args.down += r->first_expert;
  args.out_f32 = true;
  td_engine_moe_ranks_group(e, layer_idx, &args, true, true);
}

void td_engine_moe_ranks_end(td_engine *e, uint32_t half, uint32_t layer_idx) {
  const td_layer *layer = td_model_layer(e->model, layer_idx);
  const td_rank_half *of = &e->rank->halves[half];
  td_rank_await(e, of);
  if (layer->mlp_gate.data) td_engine_mlp(e, &of->own, layer, true);
}

void td_engine_moe_guess(td_engine *e, const td_microbatch *p, uint32_t layer_idx) {
  const td_layer *layer = td_engine_layer(e, layer_idx);
  const td_vec norm = e->config->has_out_norms ? layer->router_norm : layer->mlp_norm;
  const uint32_t dim = e->config->dim;
  given to = {.x = p->delta};
  to.ids = td_expert_drive_guess(e, layer_idx, &to.weights);
  if (!to.ids) return;
  td_op_rmsnorm(e->stream, &(td_rmsnorm_args){.x = p->x,
                                              .w = norm,
                                              .out = to.x,
                                              .x_stride = dim,
                                              .out_stride = dim,
                                              .n_rows = p->n_tokens,
                                              .dim = dim,
                                              .eps = e->config->rms_eps});
  route(e, to.x, e->step.tokens + p->begin, p->n_tokens, layer_idx, &to);
  td_expert_drive_note_guessed(e);
}

// delta = the norms of the dense MLP's output and of the experts' sum, all of which read x by norms
// of their own; h is that of the dense MLP.
static void compute_beside(td_engine *e, const td_microbatch *p, uint32_t layer_idx) {
  const td_layer *layer = td_engine_layer(e, layer_idx);
  const uint32_t dim = e->config->dim;
  const float eps = e->config->rms_eps;
  const td_rows_left none = {.pending = false};
  const given from = offload_input_at(e, e->h, p->n_tokens);
  td_engine_mlp(e, p, layer, false);
  td_rows_norm(e, p->delta, layer->dense_out_norm, dim, p->n_tokens, eps);
  td_rows_enter(e, p, layer->router_norm, NULL, none);
  route(e, e->h, NULL, p->n_tokens, layer_idx, &from);
  record_routing(e, p, layer_idx, &from);
  td_rows_enter(e, p, layer->experts_norm, NULL, none);
  td_moe_args args = all_routed(e, p, layer_idx);
  args.out = e->shared;
  if (e->drive) {
    td_expert_drive_note_routed(e);
    td_expert_drive_compute(e, p->begin, layer_idx, &args);
  } else {
    td_op_moe(e->stream, &args);
  }
  td_rows_norm(e, e->shared, layer->experts_out_norm, dim, p->n_tokens, eps);
  td_op_add(e->stream, p->delta, e->shared, (size_t)p->n_tokens * dim);
}

void td_engine_moe_begin(td_engine *e, const td_microbatch *p, uint32_t layer_idx) {
  if (e->config->has_out_norms) {
    compute_beside(e, p, layer_idx);
    return;
  }
  const given from = offload_input_at(e, e->h, p->n_tokens);
  route(e, e->h, e->step.tokens + p->begin, p->n_tokens, layer_idx, &from);
  record_routing(e, p, layer_idx, &from);
  if (td_layer_way_has_peer(e->step.plan.way[layer_idx]))
    td_expert_peer_post(e, p, layer_idx, from.x, offload_input_bytes_of(e, p->n_tokens));
  switch ((td_layer_way)e->step.plan.way[layer_idx]) {
  case TD_LAYER_STREAMED: begin_streamed(e, p, td_engine_layer(e, layer_idx)); break;
  case TD_LAYER_OFFLOADED: begin_offload(e, p, layer_idx, &from); break;
  case TD_LAYER_CACHED:
  case TD_LAYER_SPREAD:
    begin_offload(e, p, layer_idx, &from);
    begin_cached(e, p, layer_idx, &from);
    break;
  case TD_LAYER_PAIRED: begin_cached(e, p, layer_idx, &from); break;
  case TD_LAYER_RESIDENT: compute_here(e, p, layer_idx); break;
  case TD_LAYER_READ: compute_read(e, p, layer_idx); break;
  case TD_LAYER_DENSE:
  case TD_N_LAYER_WAYS: TD_CHECK(!"a layer with experts");
  }
}
