// src/engine/experts.c - the second half of a layer: a dense MLP, or experts, chosen by a router.
// The routed experts may be another device's, one that reads them where they lie while the first
// has no room for them. Then a layer's tokens, with the router's choice, go there through host
// memory, and while the first device computes the shared expert, their sum is made and comes back.
// Steps of answers are queued as a whole on both devices, which wait for one another's signals; for
// prompts, the caller waits in between: a GPU that waits long may be taken for one that hangs.
#include <stdatomic.h>
#include <string.h>

#include "engine/engine_impl.h"

static size_t align_64(size_t n) {
  return (n + 63) & ~(size_t)63;
}

// What experts are given: h [n_tokens][dim], behind it ids and weights [n_tokens][top_k].
size_t td_engine_given_bytes(const td_engine *e, size_t n_tokens) {
  size_t n = n_tokens * e->config->top_k;
  return align_64(n_tokens * e->config->dim * e->act_bytes) + n * (sizeof(int32_t) + sizeof(float));
}

void td_engine_lay_out_given(td_engine *e) {
  size_t h_bytes = (size_t)e->n_tokens * e->config->dim * e->act_bytes;
  e->router_ids = (int32_t *)((char *)e->h + align_64(h_bytes));
  e->router_weights = (float *)(e->router_ids + (size_t)e->n_tokens * e->config->top_k);
}

td_status td_engine_open_experts(td_engine *e, td_err *err) {
  td_engine_side *side = &e->side;
  side->dev = e->opts.expert_dev;
  if (!side->dev) return TD_OK;
  size_t n = e->opts.max_step_tokens, given_bytes = td_engine_given_bytes(e, n);
  size_t sum_bytes = n * e->config->dim * e->act_bytes;
  td_status st = td_stream_open(&side->stream, side->dev, err);
  if (st == TD_OK) st = td_event_open(&side->given, e->dev, err);
  if (st == TD_OK) st = td_event_open(&side->done, side->dev, err);
  if (st == TD_OK) st = td_dev_alloc_host(e->dev, (void **)&side->in, given_bytes, err);
  if (st == TD_OK) st = td_dev_alloc_host(e->dev, &side->out, sum_bytes, err);
  if (st == TD_OK) st = td_dev_alloc(e->dev, &side->sum, sum_bytes, err);
  size_t signal_bytes = 2 * e->config->n_layers * sizeof *side->given_signals;
  void *signals = NULL;
  if (st == TD_OK) st = td_dev_alloc_host(e->dev, &signals, signal_bytes, err);
  // Where the first device fails, what it was to hand over are choices all the same.
  if (st == TD_OK) memset(side->in, 0, given_bytes);
  if (st == TD_OK) memset(signals, 0, signal_bytes);
  side->given_signals = signals;
  side->done_signals = st == TD_OK ? side->given_signals + e->config->n_layers : NULL;
  return st;
}

void td_engine_close_experts(td_engine *e) {
  td_engine_side *side = &e->side;
  td_stream_close(side->stream);
  td_event_close(side->given);
  td_event_close(side->done);
  td_dev_free_host(e->dev, side->in);
  td_dev_free_host(e->dev, side->out);
  td_dev_free_host(e->dev, side->given_signals);
  td_dev_free(e->dev, side->sum);
}

void td_engine_mlp(td_engine *e, const td_layer *layer, bool accumulate) {
  td_op_moe(e->stream, &(td_moe_args){.gate = &layer->mlp_gate,
                                      .up = &layer->mlp_up,
                                      .down = &layer->mlp_down,
                                      .x = e->h,
                                      .out = e->delta,
                                      .n_tokens = e->n_tokens,
                                      .n_prompt = e->groups[GROUP_PREFILL].view.n_tokens,
                                      .n_experts = 1,
                                      .top_k = 1,
                                      .accumulate = accumulate});
}

static void route(td_engine *e, const td_layer *layer, uint32_t layer_idx) {
  const td_model_config *c = e->config;
  td_op_linear(e->stream, &(td_linear_op_args){.w = &layer->router,
                                               .x = e->h,
                                               .y = e->router_logits,
                                               .x_stride = c->dim,
                                               .y_stride = c->n_experts,
                                               .n_tokens = e->n_tokens,
                                               .out_f32 = true,
                                               .exact = true});
  td_op_router(e->stream,
               &(td_router_args){.logits = e->router_logits,
                                 .bias = layer->router_bias,
                                 .ids = e->router_ids,
                                 .weights = e->router_weights,
                                 .kind = c->router_sigmoid ? TD_ROUTER_SIGMOID : TD_ROUTER_SOFTMAX,
                                 .n_tokens = e->n_tokens,
                                 .n_experts = c->n_experts,
                                 .top_k = c->top_k,
                                 .n_groups = c->n_groups,
                                 .topk_groups = c->topk_groups,
                                 .norm_topk = c->norm_topk,
                                 .scaling = c->routed_scaling});
  if (!e->dev_routing) return;
  td_op_copy(e->stream, e->dev_routing + td_engine_routing_at(e, layer_idx), e->router_ids,
             (size_t)e->n_tokens * c->top_k * sizeof *e->router_ids);
}

// The routed experts' sum for the tokens at x, which may be the engine's or a copy of them.
static td_moe_args routed(const td_engine *e, const td_layer *layer, void *x, void *out) {
  char *at = x; // of what was at h
  return (td_moe_args){.gate = layer->gate,
                       .up = layer->up,
                       .down = layer->down,
                       .x = x,
                       .ids = (int32_t *)(at + ((char *)e->router_ids - (char *)e->h)),
                       .weights = (float *)(at + ((char *)e->router_weights - (char *)e->h)),
                       .out = out,
                       .n_tokens = e->n_tokens,
                       .n_prompt = e->groups[GROUP_PREFILL].view.n_tokens,
                       .n_experts = e->config->n_experts,
                       .top_k = e->config->top_k,
                       .is_bf16 = td_dev_act_dtype(e->dev) == TD_BF16};
}

// What the other device computes in a trial: n tokens of a prompt, spread over all experts.
td_moe_args td_engine_trial_aside(td_engine *e, uint32_t layer_idx, uint32_t n) {
  td_engine_side *side = &e->side;
  e->n_tokens = n;
  td_engine_lay_out_given(e);
  td_moe_args args = routed(e, td_model_layer(e->model, layer_idx), side->in, side->out);
  args.n_prompt = n;
  for (uint32_t i = 0; i < n * args.top_k; i++)
    ((int32_t *)args.ids)[i] = (int32_t)(i % args.n_experts);
  return args;
}

bool td_engine_can_signal(const td_engine *e) {
  enum { OPERATORS = 3 }; // a layer
  return e->side.dev && OPERATORS * e->config->n_layers <= TD_STREAM_DEPTH;
}

static bool has_aside(const td_engine *e, uint32_t layer_idx) {
  return td_model_layer(e->model, layer_idx)->is_moe && td_engine_is_aside(e, layer_idx);
}

void td_engine_queue_aside(td_engine *e) {
  td_engine_side *side = &e->side;
  for (uint32_t i = 0; i < e->config->n_layers; i++) {
    if (!has_aside(e, i)) continue;
    const td_moe_args args = routed(e, td_model_layer(e->model, i), side->in, side->out);
    td_op_await(side->stream, &side->given_signals[i].step, e->step);
    td_op_moe(side->stream, &args);
    td_op_signal(side->stream, &side->done_signals[i].step, e->step);
  }
}

void td_engine_let_aside_go(td_engine *e) {
  for (uint32_t i = 0; e->has_signals && i < e->config->n_layers; i++)
    atomic_store(&e->side.given_signals[i].step, *e->step);
}

// side->out = what the other device makes of side->in, meanwhile delta = the shared expert.
static void exchange(td_engine *e, const td_layer *layer, uint32_t layer_idx) {
  td_engine_side *side = &e->side;
  if (e->has_signals) {
    td_op_signal(e->stream, &side->given_signals[layer_idx].step, e->dev_step);
  } else {
    td_event_record(side->given, e->stream);
  }
  if (layer->mlp_gate.data) td_engine_mlp(e, layer, false);
  if (e->has_signals) {
    td_op_await(e->stream, &side->done_signals[layer_idx].step, e->dev_step);
    return;
  }
  const td_moe_args args = routed(e, layer, side->in, side->out);
  td_stream_wait(side->stream, side->given);
  td_op_moe(side->stream, &args);
  td_event_record(side->done, side->stream);
  td_stream_wait(e->stream, side->done);
}

// delta = what the other device makes of h, and the shared expert.
static void compute_aside(td_engine *e, const td_layer *layer, uint32_t layer_idx) {
  td_engine_side *side = &e->side;
  const size_t n = (size_t)e->n_tokens * e->config->dim;
  const bool has_shared = layer->mlp_gate.data != NULL;
  void *sum = has_shared ? side->sum : e->delta;
  td_op_copy(e->stream, side->in, e->h, td_engine_given_bytes(e, e->n_tokens));
  exchange(e, layer, layer_idx);
  td_op_copy(e->stream, sum, side->out, n * e->act_bytes);
  if (has_shared) td_op_add(e->stream, e->delta, sum, n);
}

// The same with experts that come here.
static void stream(td_engine *e, const td_layer *layer, uint32_t layer_idx,
                   const td_moe_args *args) {
  if (layer->mlp_gate.data) {
    td_engine_mlp(e, layer, false);
  } else {
    td_op_fill_zero(e->stream, e->delta, (size_t)e->n_tokens * e->config->dim * e->act_bytes);
  }
  td_engine_stream_experts(e, layer_idx, args);
}

void td_engine_experts(td_engine *e, uint32_t layer_idx) {
  const td_layer *layer = td_model_layer(e->model, layer_idx);
  route(e, layer, layer_idx);
  const td_moe_args args = routed(e, layer, e->h, e->delta);
  if (td_engine_streams(e, layer_idx)) {
    stream(e, layer, layer_idx, &args);
  } else if (td_engine_is_aside(e, layer_idx)) {
    compute_aside(e, layer, layer_idx);
  } else {
    td_op_moe(e->stream, &args);
    if (layer->mlp_gate.data) td_engine_mlp(e, layer, true);
  }
}
