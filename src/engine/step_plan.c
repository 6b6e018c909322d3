// src/engine/step_plan.c - decides where a step computes every layer's experts.
#include "engine/step_plan.h"

#include "base/units.h"
#include "device/device.h"

bool td_step_wants_streaming(const td_step_shape *shape) {
  return shape->break_even_tokens && shape->n_prompt >= shape->break_even_tokens;
}

// Whether the step has no prompt, and one token per sequence and drafts. Other steps of decode
// compute sequences again and hardly ever have the same number of tokens.
static bool is_decode(const td_step_shape *shape) {
  return !shape->n_prompt && shape->n_seqs > 0 &&
         shape->n_tokens <= shape->n_seqs + shape->max_drafts;
}

static bool has_drafts(const td_step_shape *shape) {
  return shape->n_tokens > shape->n_seqs;
}

// Whether the expert device's operators for n_microbatches fit its stream, so that they can all be
// queued before the other device begins. Not where dense weights stream: their copies are not part
// of work that a device replays.
static bool fits_stream(const td_model_config *config, const td_step_shape *shape,
                        uint32_t n_microbatches) {
  // Await, moe and signal, per offloaded layer and microbatch; beside a cache, the routing is
  // copied.
  const uint32_t n_operators = shape->may_cache ? 4 : 3;
  if (shape->dense_bytes) return false;
  uint32_t n_layers = 0;
  for (uint32_t i = 0; i < config->n_layers; i++)
    n_layers += td_layer_is_offloaded(config, shape, i);
  return shape->has_expert_dev && n_operators * n_layers * n_microbatches <= TD_STREAM_DEPTH;
}

bool td_step_can_split(const td_model_config *config, const td_step_shape *shape) {
  return is_decode(shape) && !has_drafts(shape) && !shape->has_drive &&
         shape->n_tokens >= TD_MAX_MICROBATCHES && fits_stream(config, shape, TD_MAX_MICROBATCHES);
}

static td_layer_way way_of(const td_model_config *config, const td_step_shape *shape,
                           td_handover handover, uint32_t layer_idx) {
  if (!td_model_is_moe(config, layer_idx)) return TD_LAYER_DENSE;
  if (!td_layer_is_offloaded(config, shape, layer_idx))
    return shape->has_drive ? TD_LAYER_READ : TD_LAYER_RESIDENT;
  if (td_step_wants_streaming(shape) && shape->may_stream[layer_idx]) return TD_LAYER_STREAMED;
  const bool is_cached = handover == TD_HANDOVER_SIGNALS && !has_drafts(shape) &&
                         shape->may_cache && shape->may_cache[layer_idx];
  if (!is_cached) return TD_LAYER_OFFLOADED;
  switch (shape->pair_share ? (td_pair_share)shape->pair_share[layer_idx] : TD_PAIR_NONE) {
  case TD_PAIR_NONE: break;
  case TD_PAIR_SOME: return TD_LAYER_SPREAD;
  case TD_PAIR_ALL: return TD_LAYER_PAIRED;
  }
  return TD_LAYER_CACHED;
}

static td_handover choose_handover(const td_model_config *config, const td_step_shape *shape) {
  if (!shape->has_expert_dev) return TD_HANDOVER_NONE;
  const bool may_signal = is_decode(shape) && !shape->has_drive && fits_stream(config, shape, 1);
  return may_signal ? TD_HANDOVER_SIGNALS : TD_HANDOVER_HOST;
}

const td_pair_rates td_pair_usual = {
    .expert_dev_gbps = 400, .peer_gbps = 1500, .link_gbps = 25, .message_s = 15e-6};

td_pair_time td_pair_time_of(const td_pair_layer *l, const td_pair_rates *rates) {
  const double n = l->n_experts ? (double)l->top_k * l->n_peer / l->n_experts : 0;
  const double bytes = n * (double)l->expert_bytes;
  td_pair_time t = {.saved_s = bytes / (rates->expert_dev_gbps * 1e9),
                    .peer_s = bytes / (rates->peer_gbps * 1e9)};
  t.to_peer = l->dim * sizeof(uint16_t) + l->top_k * (sizeof(int32_t) + sizeof(float));
  t.from_peer = (uint64_t)(n * l->dim * sizeof(float));
  t.sent_s = 2 * rates->message_s + (double)(t.to_peer + t.from_peer) / (rates->link_gbps * 1e9);
  return t;
}

void td_step_plan_make(td_step_plan *out, const td_model_config *config,
                       const td_step_shape *shape) {
  *out = (td_step_plan){.n_layers = config->n_layers,
                        .n_tokens = shape->n_tokens,
                        .n_prompt = shape->n_prompt,
                        .n_ranks = shape->n_ranks ? shape->n_ranks : 1,
                        .n_microbatches = 1,
                        .handover = choose_handover(config, shape)};
  for (uint32_t i = 0; i < config->n_layers; i++) {
    out->way[i] = (uint8_t)way_of(config, shape, out->handover, i);
    out->n_ways[out->way[i]]++;
  }
  for (uint32_t i = 0; shape->dense_bytes && i < config->n_layers; i++) {
    out->streams_dense[i] = shape->dense_bytes[i] > 0;
    out->dense_bytes += shape->dense_bytes[i];
  }
  const bool is_alone = out->handover == TD_HANDOVER_NONE && shape->may_replay &&
                        !shape->dense_bytes;
  out->is_replayed = is_decode(shape) && (out->handover == TD_HANDOVER_SIGNALS || is_alone);
  if (out->handover == TD_HANDOVER_SIGNALS && td_step_can_split(config, shape))
    out->n_microbatches = shape->n_microbatches;
}

// Those of the last layers stream, from some layer on.
static void print_dense(td_buf *out, const td_step_plan *plan) {
  uint32_t first = 0;
  while (!plan->streams_dense[first])
    first++;
  td_buf_printf(out, "; dense weights of layers %u-%u streamed, %s", first, plan->n_layers - 1,
                td_size(plan->dense_bytes).text);
}

void td_step_plan_print(td_buf *out, const td_step_plan *plan) {
  static const char *const ways[] = {
#define X(id, name) name,
      TD_LAYER_WAYS(X)
#undef X
  };
  static const char *const handovers[] = {"", ", the host waits between devices",
                                          ", both devices queued up front"};
  for (uint32_t i = 0, end; i < plan->n_layers; i = end) {
    for (end = i + 1; end < plan->n_layers && plan->way[end] == plan->way[i];)
      end++;
    td_buf_printf(out, "%s%u", i ? ", " : "layers ", i);
    if (end > i + 1) td_buf_printf(out, "-%u", end - 1);
    td_buf_printf(out, " %s", ways[plan->way[i]]);
  }
  bool does_offload = false;
  for (uint32_t i = 0; i < plan->n_layers; i++)
    does_offload |= td_layer_way_has_expert_dev(plan->way[i]) ||
                    td_layer_way_has_peer(plan->way[i]);
  td_buf_printf(out, "; %u tokens, %u of prompts, in %u microbatch%s%s%s", plan->n_tokens,
                plan->n_prompt, plan->n_microbatches, plan->n_microbatches > 1 ? "es" : "",
                does_offload ? handovers[plan->handover] : "",
                plan->is_replayed ? ", replayed" : "");
  if (plan->n_ranks > 1) td_buf_printf(out, ", on %u devices", plan->n_ranks);
  if (plan->dense_bytes) print_dense(out, plan);
}
