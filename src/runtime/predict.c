// src/runtime/predict.c - the division of a card's memory, and the time of every layer of a prompt.
#include "runtime/predict.h"

#include "engine/engine.h"
#include "kv/plan.h"

enum { SEQS = 16 }; // of a decode step; the default of --max-batch

#define DRIVER_BYTES ((uint64_t)600 << 20) // of a card's memory: the context and the kernels

td_prefill_load td_prefill_load_of(const td_model *model) {
  const td_model_stats stats = td_model_stats_of(model);
  td_prefill_load load = {.config = td_model_config_of(model),
                          .active_params = stats.active_params,
                          .other_bytes = stats.bytes - stats.expert_bytes};
  for (uint32_t i = 0; i < load.config->n_layers; i++) {
    load.layer_bytes[i] = td_model_expert_bytes(model, i);
    load.dense[i] = td_dense_size_of(td_model_layer(model, i));
  }
  return load;
}

// KV pages, as a worker sizes them beside held_bytes.
static void plan_kv(td_card_plan *out, const td_model_config *c, uint64_t free_bytes,
                    uint64_t held_bytes) {
  enum { MAX_BATCH = 16 };
  const td_kv_layout layout = td_kv_layout_of(c, TD_BF16, 0);
  td_kv_need need = {.max_position = c->max_position,
                     .weight_bytes = held_bytes,
                     .available_bytes = free_bytes,
                     .max_batch = MAX_BATCH,
                     .is_device = true};
  td_kv_layout_to_need(&layout, &need);
  td_kv_plan plan;
  td_err ignored; // nothing is left
  if (td_kv_plan_make(&plan, &need, &ignored) != TD_OK) return;
  out->kv_tokens = plan.n_pages * layout.page_tokens;
  out->kv_bytes = td_engine_kv_bytes(c, TD_BF16, out->kv_tokens);
}

td_card_plan td_card_plan_of(const td_prefill_load *load, const td_gpu_card *card) {
  const td_model_config *c = load->config;
  const uint64_t used = DRIVER_BYTES < card->memory_bytes ? DRIVER_BYTES : card->memory_bytes;
  td_gpu_need need = {.free_bytes = card->memory_bytes - used,
                      .weight_bytes = load->other_bytes,
                      .kv_bytes = td_placement_kv_bytes(0, c, TD_KV_DEFAULT_CTX),
                      .step_token_bytes = td_engine_step_bytes_per_token(c, TD_BF16),
                      .usual_chunk = td_engine_prefill_chunk(c)};
  uint64_t expert_bytes = 0;
  for (uint32_t i = 0; i < c->n_layers; i++) {
    expert_bytes += load->layer_bytes[i];
    if (load->layer_bytes[i] > need.layer_bytes) need.layer_bytes = load->layer_bytes[i];
  }
  td_card_plan plan = {.fits = need.free_bytes >= load->other_bytes + TD_KV_DEVICE_SPARE};
  plan.experts_stream = expert_bytes &&
                        !td_gpu_holds_all(need.free_bytes, load->other_bytes + expert_bytes, 0, c);
  if (!plan.experts_stream) {
    need.weight_bytes += expert_bytes;
    need.layer_bytes = 0;
  }
  plan.memory = td_gpu_plan_make(&need);
  plan.weight_bytes = load->other_bytes;
  plan.own_bytes = plan.experts_stream ? 0 : expert_bytes;
  const uint64_t held = need.weight_bytes + plan.memory.chunk_bytes + plan.memory.decode_bytes +
                        plan.memory.stream_bytes;
  if (plan.experts_stream) {
    const td_gpu_experts own = td_gpu_experts_plan(&need, held, load->layer_bytes, c->n_layers,
                                                   true, &(td_expert_cache_size){.is_auto = true});
    plan.n_gpu_expert_layers = own.n_layers;
    plan.own_bytes = own.layers_bytes;
    plan.cache_bytes = own.cache_bytes;
    plan.n_cached = td_expert_cache_slots(own.cache_bytes, need.layer_bytes / c->n_experts, c, SEQS,
                                          TD_BF16);
    plan.pair = td_gpu_pair_plan(&need, &plan.memory, own.cache_bytes, load->dense, c->n_layers);
  }
  plan_kv(&plan, c, need.free_bytes,
          held + (plan.experts_stream ? plan.own_bytes + plan.cache_bytes : 0));
  return plan;
}

td_card_plan td_card_plan_for_prefill(const td_card_plan *plan) {
  td_card_plan first = *plan;
  first.memory.stream_bytes = plan->pair.stream_bytes;
  first.memory.prefill_chunk = plan->pair.prefill_chunk;
  first.n_streamed_dense = plan->pair.n_streamed_dense;
  return first;
}

// Operations of a layer's attention for n tokens after n_past: scores and sums of every query with
// the keys up to its own, and for MLA the expansion of all keys and values from their latents. A
// delta net takes 7 for each element of its states instead.
static double attention_flops(const td_model_config *c, uint32_t layer_idx, double n,
                              double n_past) {
  if (td_model_is_delta(c, layer_idx))
    return 7.0 * n * c->delta_v_heads * c->delta_k_dim * c->delta_v_dim;
  const bool is_mla = c->attn == TD_ATTN_MLA;
  const double k_dim = is_mla ? c->nope_dim + c->rope_dim : c->head_dim;
  const double v_dim = is_mla ? c->v_dim : c->head_dim;
  const double pairs = n * (n_past + n / 2);
  const double expansion =
      is_mla ? 2.0 * (n_past + n) * c->kv_lora_rank * c->n_heads * (c->nope_dim + c->v_dim) : 0;
  return 2 * pairs * c->n_heads * (k_dim + v_dim) + expansion;
}

// Of one token's routed experts in a layer.
static double routed_flops(const td_model_config *c) {
  return 2.0 * 3 * c->top_k * c->dim * c->expert_dim;
}

// Of one token's other matrices in a layer, on average over the layers.
static double other_flops(const td_prefill_load *load) {
  const td_model_config *c = load->config;
  double routed = 0;
  for (uint32_t i = 0; i < c->n_layers; i++)
    routed += load->layer_bytes[i] ? routed_flops(c) : 0;
  const double rest = 2.0 * (double)load->active_params - routed;
  return rest > 0 ? rest / c->n_layers : 0;
}

typedef struct {
  double attention, routed; // operations: of all but routed experts; of those
  double bytes;             // streamed; 0: none are
} layer_load;

// Experts are copied while the layer's attention is computed as far as the ring holds them, then
// while they are computed.
static void add_layer(td_prefill_time *out, const layer_load *l, const td_card_plan *plan,
                      const td_gpu_card *card) {
  const double attention_s = l->attention / card->tflops * 1e-12;
  const double compute_s = attention_s + l->routed / card->tflops * 1e-12;
  const double link_s = l->bytes / card->link_gbps * 1e-9;
  const double ring_s = (double)plan->memory.stream_bytes / card->link_gbps * 1e-9;
  const double idle_s = link_s > 0 && attention_s > ring_s ? attention_s - ring_s : 0;
  out->link_s += link_s;
  out->compute_s += compute_s;
  out->seconds += link_s + idle_s > compute_s ? link_s + idle_s : compute_s;
}

static uint64_t dense_bytes_of(const td_prefill_load *load, const td_card_plan *plan, uint32_t i) {
  const uint64_t *bytes = load->dense[i].bytes;
  const bool is_streamed = i + plan->n_streamed_dense >= load->config->n_layers;
  return is_streamed ? bytes[TD_DENSE_ATTN] + bytes[TD_DENSE_MLP] : 0;
}

static void plan_chunk(td_prefill_time *out, const td_prefill_load *load, const td_card_plan *plan,
                       uint32_t n) {
  bool may_stream[TD_MAX_LAYERS];
  uint64_t dense_bytes[TD_MAX_LAYERS];
  for (uint32_t i = 0; i < load->config->n_layers; i++) {
    may_stream[i] = plan->memory.stream_bytes > 0;
    dense_bytes[i] = dense_bytes_of(load, plan, i);
  }
  const td_step_shape shape = {.n_tokens = n,
                               .n_prompt = n,
                               .n_gpu_expert_layers = plan->n_gpu_expert_layers,
                               .has_expert_dev = plan->experts_stream,
                               .break_even_tokens = 1,
                               .may_stream = may_stream,
                               .dense_bytes = plan->n_streamed_dense ? dense_bytes : NULL};
  td_step_plan_make(&out->step, load->config, &shape);
}

td_prefill_time td_prefill_time_of(const td_prefill_load *load, const td_card_plan *plan,
                                   const td_gpu_card *card, uint32_t n_tokens) {
  td_prefill_time out = {.n_steps = 0};
  const td_model_config *c = load->config;
  const uint32_t most = plan->memory.prefill_chunk;
  plan_chunk(&out, load, plan, n_tokens < most ? n_tokens : most);
  for (uint32_t done = 0, n; done < n_tokens; done += n, out.n_steps++) {
    n = n_tokens - done < most ? n_tokens - done : most;
    for (uint32_t i = 0; i < c->n_layers; i++) {
      const layer_load layer = {
          .attention = n * other_flops(load) + attention_flops(c, i, n, done),
          .routed = load->layer_bytes[i] ? n * routed_flops(c) : 0,
          .bytes = (out.step.way[i] == TD_LAYER_STREAMED ? (double)load->layer_bytes[i] : 0) +
                   (double)dense_bytes_of(load, plan, i)};
      add_layer(&out, &layer, plan, card);
    }
  }
  return out;
}

static void plan_decode(td_decode_time *out, const td_prefill_load *load,
                        const td_card_plan *plan) {
  bool may_cache[TD_MAX_LAYERS];
  for (uint32_t i = 0; i < load->config->n_layers; i++)
    may_cache[i] = plan->n_cached > 0;
  const td_step_shape shape = {.n_tokens = 1,
                               .n_seqs = 1,
                               .n_gpu_expert_layers = plan->n_gpu_expert_layers,
                               .has_expert_dev = plan->experts_stream,
                               .may_replay = true,
                               .may_cache = plan->n_cached ? may_cache : NULL,
                               .n_microbatches = 1};
  td_step_plan_make(&out->step, load->config, &shape);
}

td_decode_time td_decode_time_of(const td_prefill_load *load, const td_card_plan *plan,
                                 const td_decode_rates *rates) {
  td_decode_time out = {.seconds = 0};
  const td_model_config *c = load->config;
  const double gpu_s = 1e-9 / rates->gpu_gbps, host_s = 1e-9 / rates->host_gbps; // per byte
  plan_decode(&out, load, plan);
  for (uint32_t i = 0; i < c->n_layers; i++) {
    const double other = (double)load->other_bytes / c->n_layers * gpu_s;
    const double bytes = load->layer_bytes[i]
                             ? (double)load->layer_bytes[i] / c->n_experts * c->top_k
                             : 0;
    const double hits = out.step.way[i] == TD_LAYER_RESIDENT ? 1
                        : out.step.way[i] == TD_LAYER_CACHED ? rates->hit_rate
                                                             : 0;
    const double here = bytes * hits * gpu_s, there = bytes * (1 - hits) * host_s;
    out.host_s += there;
    out.gpu_s += other + here;
    out.seconds += other + (here > there ? here : there);
  }
  return out;
}
