// src/runtime/division.c - the division of a GPU's memory; see division.h.
#include "runtime/division.h"

#include <string.h>

#include "engine/attn/kind.h"
#include "engine/engine.h"
#include "kv/plan.h"

td_plan_load td_plan_load_of(const td_model *model) {
  const td_model_stats stats = td_model_stats_of(model);
  td_plan_load load = {.config = td_model_config_of(model),
                       .active_params = stats.active_params,
                       .activations = TD_ACTIVATIONS_AUTO,
                       .vision_bytes = stats.vision_bytes,
                       .other_bytes = stats.bytes - stats.expert_bytes};
  memcpy(load.a8, stats.a8, sizeof load.a8);
  double routed = 0;
  for (uint32_t i = 0; i < load.config->n_layers; i++) {
    load.layer_bytes[i] = td_model_expert_bytes(model, i);
    const td_layer *layer = td_model_layer(model, i);
    load.dense[i] = td_dense_size_of(layer);
    load.a8_latents[i] = td_weight_a8(&layer->kv_b);
    load.a8_experts[i] = TD_ACTIVATIONS_AUTO;
    if (layer->is_moe && td_weight_a8(&layer->gate[0]) == td_weight_a8(&layer->down[0]))
      load.a8_experts[i] = td_weight_a8(&layer->gate[0]);
    if (load.layer_bytes[i])
      routed += (double)load.layer_bytes[i] * load.config->top_k / load.config->n_experts;
  }
  load.step_bytes = stats.active_bytes - (uint64_t)routed;
  const td_weight *head = td_model_lm_head(model);
  load.head_params = (uint64_t)head->rows * head->cols;
  load.head_bytes = td_weight_bytes(head);
  const td_activations of_head = td_weight_a8(head);
  if (of_head != TD_ACTIVATIONS_AUTO) load.a8[of_head].params -= load.head_params;
  load.drafts = td_gpu_draft_bytes_of(model, TD_PLAN_SEQS);
  if (td_model_mtp(model)) {
    load.draft_expert_bytes = td_model_expert_bytes(model, load.config->n_layers);
    load.draft_bytes = td_model_mtp_bytes(model, false);
    load.draft_head_bytes = td_engine_draft_head_bytes(model);
  }
  return load;
}

uint64_t td_plan_load_expert_bytes(const td_plan_load *load) {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < load->config->n_layers; i++)
    bytes += load->layer_bytes[i];
  return bytes;
}

// Drafts as far as they fit beside weights, workspaces and a context. With a cache of experts steps
// have one token a request: the layer does not draft, and with recurrent states nothing does. Nor
// does the layer beside a second GPU or process.
static td_gpu_drafts divide_drafts(const td_plan_load *load, const td_card_wish *wish,
                                   uint64_t weight_bytes) {
  const td_model_config *c = load->config;
  const bool has_cache = wish->streams_experts && (wish->cache.is_auto || wish->cache.bytes);
  const bool is_alone = wish->role == TD_ROLE_BOTH && wish->n_gpus == 1;
  const uint64_t of_layer = load->drafts.layer_bytes +
                            (wish->streams_experts ? 0 : load->draft_expert_bytes);
  const td_gpu_drafts ways[] = {{.are_verified = true, .has_layer = true, .bytes = of_layer},
                                {.are_verified = true, .bytes = load->drafts.bytes}};
  if (has_cache && td_attn_has_states(c)) return (td_gpu_drafts){.bytes = 0};
  const bool may_have_layer = load->drafts.layer_bytes && is_alone && !has_cache;
  for (size_t i = may_have_layer ? 0 : 1; i < TD_COUNT(ways); i++)
    if (td_gpu_holds_all(wish->free_bytes, weight_bytes + ways[i].bytes, wish->ctx_size,
                         load->kv_dtype, c))
      return ways[i];
  return (td_gpu_drafts){.lacking = load->drafts.bytes};
}

// Which experts go to the GPU: whole layers, and a cache. Without keeps_layers no layers, and a
// cache only if its size is given.
static void divide_experts(td_division *out, const td_gpu_need *need, const td_plan_load *load,
                           const td_card_wish *wish) {
  const uint32_t n_layers = load->config->n_layers;
  const bool keeps_layers = wish->keeps_layers && !wish->has_drive;
  if (!wish->has_drive && (keeps_layers || !wish->cache.is_auto)) {
    out->own = td_gpu_experts_plan(need, out->held_bytes, load->layer_bytes, n_layers, keeps_layers,
                                   &wish->cache);
  }
  if (wish->n_gpus > 1 && wish->role == TD_ROLE_BOTH) {
    const td_gpu_shared_experts shared = td_gpu_share_experts(&out->own, load->layer_bytes,
                                                              n_layers, wish->n_gpus);
    out->own = shared.first;
    out->peer_cache_bytes = shared.peer_bytes;
    out->is_cache_fixed = shared.is_fixed;
  }
  out->held_bytes += out->own.layers_bytes + out->own.cache_bytes;
  out->pair = td_gpu_pair_plan(need, &out->memory, out->own.cache_bytes, load->dense, n_layers);
  const td_gpu_work work = {.expert_bytes = td_plan_load_expert_bytes(load) - out->own.layers_bytes,
                            .resident_bytes = need->weight_bytes + out->own.layers_bytes,
                            .active_params = load->active_params,
                            .a8_params = load->a8[load->activations].active_params,
                            .f8_params = load->a8[TD_ACTIVATIONS_FP8].active_params,
                            .adds_f16 = wish->adds_f16};
  out->long_steps = td_long_steps_plan(need, &out->memory, &work, load->dense, n_layers);
}

// Keys and values of all requests' contexts; 0: of any number.
static uint64_t pool_bytes(const td_plan_load *load, const td_card_wish *wish) {
  const uint32_t most = load->config->max_position;
  const uint64_t n_ctx = wish->ctx_size             ? wish->ctx_size
                         : most < TD_KV_DEFAULT_CTX ? most
                                                    : TD_KV_DEFAULT_CTX;
  const uint64_t n_tokens = wish->kv_tokens ? wish->kv_tokens : wish->n_seqs * n_ctx;
  return td_engine_kv_bytes(load->config, td_gpu_kv_dtype(load->kv_dtype), n_tokens);
}

td_division td_divide(const td_plan_load *load, const td_card_wish *wish) {
  const td_model_config *c = load->config;
  td_division out = {.layer_bytes = 0};
  for (uint32_t i = 0; i < c->n_layers && wish->streams_experts; i++)
    if (load->layer_bytes[i] > out.layer_bytes) out.layer_bytes = load->layer_bytes[i];
  td_gpu_need need = {
      .free_bytes = wish->free_bytes,
      .weight_bytes = load->other_bytes +
                      (wish->streams_experts ? 0 : td_plan_load_expert_bytes(load)),
      .layer_bytes = out.layer_bytes,
      .kv_bytes = td_placement_kv_bytes(wish->ctx_size, load->kv_dtype, c, TD_KV_DEFAULT_CTX),
      .is_ctx_given = wish->ctx_size != 0,
      .pool_bytes = pool_bytes(load, wish),
      .step_token_bytes = td_engine_step_bytes_per_token(c, wish->act_dtype),
      .usual_chunk = td_engine_prefill_chunk(c),
      .prefill_chunk = wish->prefill_chunk,
  };
  if (wish->n_gpus > 1) need.step_token_bytes += td_engine_rank_bytes_per_token(c, wish->act_dtype);
  if (wish->drafts) out.drafts = divide_drafts(load, wish, need.weight_bytes);
  need.weight_bytes += out.drafts.bytes;
  // Beside experts that stream, the engine that drafts has steps of usual_chunk.
  if (out.drafts.has_layer && !wish->streams_experts)
    need.step_token_bytes += td_engine_draft_token_bytes(c, wish->act_dtype);
  out.weight_bytes = need.weight_bytes;
  out.memory = td_gpu_plan_make(&need);
  out.held_bytes = need.weight_bytes + out.memory.chunk_bytes + out.memory.decode_bytes +
                   out.memory.stream_bytes;
  if (wish->streams_experts) divide_experts(&out, &need, load, wish);
  return out;
}
