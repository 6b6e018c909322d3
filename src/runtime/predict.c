// src/runtime/predict.c - the division of a card's memory, and the time of every layer of a prompt.
#include "runtime/predict.h"

#include <math.h>
#include <string.h>

#include "base/numa.h"
#include "comm/exchange.h"
#include "engine/attn/kind.h"
#include "engine/engine.h"
#include "kv/plan.h"
#include "model/a8.h"
#include "runtime/weights.h"

#define DRIVER_BYTES ((uint64_t)600 << 20) // of a card's memory: the context and the kernels

// KV pages, as a worker sizes them beside held_bytes.
static void plan_kv(td_card_plan *out, const td_plan_load *load, uint64_t free_bytes,
                    uint64_t held_bytes) {
  const td_model_config *c = load->config;
  const td_dtype kv_dtype = td_gpu_kv_dtype(load->kv_dtype);
  const td_kv_layout layout = td_kv_layout_of(c, kv_dtype, 0);
  td_kv_need need = {.max_position = c->max_position,
                     .weight_bytes = held_bytes,
                     .available_bytes = free_bytes,
                     .ctx_size = load->ctx_size,
                     .max_batch = load->n_seqs ? load->n_seqs : TD_PLAN_SEQS,
                     .is_device = true};
  td_kv_layout_to_need(&layout, &need);
  td_kv_plan plan;
  td_err ignored; // nothing is left
  if (td_kv_plan_make(&plan, &need, &ignored) != TD_OK) return;
  out->kv_tokens = plan.n_pages * layout.page_tokens;
  out->kv_bytes = td_engine_kv_bytes(c, kv_dtype, out->kv_tokens);
}

// Beside the engine for streamed experts, or for prompts that have the card alone, the one that
// decodes has its own.
static uint64_t ngram_bytes(const td_card_plan *plan, const td_model_config *c) {
  uint64_t n_tokens = plan->memory.prefill_chunk;
  if (plan->long_steps.prefill_chunk > n_tokens) n_tokens = plan->long_steps.prefill_chunk;
  if (plan->experts_stream) n_tokens += td_engine_prefill_chunk(c);
  return n_tokens * td_engine_ngram_bytes_per_token(c);
}

// More often than the share says, since some experts are used far more than others. Reported of
// DeepSeek-V4-Flash: 52 % where 16 % are in memory, 80 % where 46 to 71 % are.
double td_drive_hit_rate(double share) {
  return pow(share, 0.35);
}

uint32_t td_plan_load_ctx(const td_plan_load *load) {
  const uint32_t most = load->config->max_position;
  if (load->ctx_size) return load->ctx_size;
  return most < TD_KV_DEFAULT_CTX ? most : TD_KV_DEFAULT_CTX;
}

td_drive_plan td_drive_plan_of(const td_plan_load *load, const td_rig *rig, uint32_t n_cards) {
  const td_model_config *c = load->config;
  const uint64_t experts = td_plan_load_expert_bytes(load);
  const double needed = (double)experts + (n_cards ? 0 : (double)load->other_bytes);
  td_drive_plan d = {.is_needed = experts > 0 && 1.1 * needed > (double)rig->memory_bytes,
                     .prefill_chunk = td_engine_prefill_chunk(c)};
  if (!d.is_needed || rig->drive_gbps <= 0) return d;
  const uint32_t n_ctx = td_plan_load_ctx(load);
  td_weights_need need = {.mode = TD_WEIGHTS_STREAM,
                          .placement = {.is_discrete = n_cards > 0, .experts_on_cpu = n_cards > 0},
                          .file_bytes = load->other_bytes + experts,
                          .resident_bytes = load->other_bytes + experts,
                          .streamed_bytes = experts,
                          .kv_bytes = n_cards ? 0 : td_engine_kv_bytes(c, load->kv_dtype, n_ctx),
                          .available_bytes = rig->memory_bytes,
                          .limit_bytes = rig->memory_bytes,
                          .n_ctx = n_ctx};
  td_weights_need_to_stream(&need, c);
  for (uint32_t i = 0; i < c->n_layers; i++) {
    const uint64_t slot_bytes = load->layer_bytes[i] / c->n_experts;
    if (slot_bytes > need.slot_bytes) need.slot_bytes = slot_bytes;
    need.n_slots += load->layer_bytes[i] ? c->n_experts : 0;
  }
  td_weights_choice choice;
  td_err ignored; // too little memory for that, too
  d.does_stream = td_weights_choose(&choice, &need, &ignored) == TD_OK;
  if (!d.does_stream) return d;
  d.share = fmin(1, (double)choice.arena_bytes / (double)experts);
  d.hit_rate = td_drive_hit_rate(d.share);
  if (choice.prefill_chunk) d.prefill_chunk = choice.prefill_chunk;
  return d;
}

td_card_plan td_card_plan_of(const td_plan_load *load, const td_rig *rig,
                             const td_expert_cache_size *cache) {
  const td_model_config *c = load->config;
  const bool has_drive = td_drive_plan_of(load, rig, 1).does_stream; // then all experts are there
  const uint64_t memory_bytes = rig->gpu.memory_bytes;
  const uint64_t expert_bytes = td_plan_load_expert_bytes(load);
  // Each of several cards has a process of its own.
  td_card_wish wish = {.free_bytes = memory_bytes < DRIVER_BYTES ? 0 : memory_bytes - DRIVER_BYTES,
                       .n_gpus = 1,
                       .act_dtype = TD_BF16,
                       .adds_f16 = rig->gpu.f16.tflops > 0,
                       .ctx_size = load->ctx_size,
                       .n_seqs = load->n_seqs ? load->n_seqs : TD_PLAN_SEQS,
                       .role = rig->n_gpus == 1 ? TD_ROLE_BOTH : TD_ROLE_PREFILL,
                       .keeps_layers = true,
                       .has_drive = has_drive,
                       .drafts = true};
  if (!has_drive) wish.cache = *cache;
  td_card_plan plan = {.fits = wish.free_bytes >= load->other_bytes + TD_KV_DEVICE_SPARE};
  plan.experts_stream = expert_bytes &&
                        !td_gpu_holds_all(wish.free_bytes, load->other_bytes + expert_bytes,
                                          load->ctx_size, load->kv_dtype, c);
  wish.streams_experts = plan.experts_stream;
  const td_division d = td_divide(load, &wish);
  plan.drafts = d.drafts;
  plan.memory = d.memory;
  plan.weight_bytes = load->other_bytes;
  plan.own_bytes = plan.experts_stream ? d.own.layers_bytes : expert_bytes;
  plan.n_gpu_expert_layers = d.own.n_layers;
  plan.cache_bytes = d.own.cache_bytes;
  if (plan.experts_stream) {
    plan.n_cached = td_expert_cache_slots(d.own.cache_bytes, d.layer_bytes / c->n_experts, c,
                                          TD_PLAN_SEQS, TD_BF16);
  }
  plan.pair = d.pair;
  plan.long_steps = d.long_steps;
  plan.ngram_bytes = ngram_bytes(&plan, c);
  plan_kv(&plan, load, wish.free_bytes, d.held_bytes);
  return plan;
}

// Of a card alone, for a prompt that has its dense weights' memory.
static td_card_plan plan_for_long(const td_card_plan *plan) {
  td_card_plan long_plan = *plan;
  long_plan.memory.stream_bytes = plan->long_steps.stream_bytes;
  long_plan.memory.prefill_chunk = plan->long_steps.prefill_chunk;
  long_plan.n_streamed_dense = plan->long_steps.n_streamed_dense;
  return long_plan;
}

// Of one token's routed experts in a layer.
static double routed_flops(const td_model_config *c) {
  return 2.0 * 3 * c->top_k * c->dim * c->expert_dim;
}

// Of one token's other matrices in a layer, on average over the layers. The output matrix is none
// of a layer's.
static double other_flops(const td_plan_load *load) {
  const td_model_config *c = load->config;
  double routed = 0;
  for (uint32_t i = 0; i < c->n_layers; i++)
    routed += load->layer_bytes[i] ? routed_flops(c) : 0;
  const double rest = 2.0 * (double)(load->active_params - load->head_params) - routed;
  return rest > 0 ? rest / c->n_layers : 0;
}

// What an operation with such activations comes to at the card's BF16 rate; a8: those that its
// matrix takes. E4M3 with other activations is added up in F16.
static double a8_share(const td_plan_load *load, const td_rig *rig, td_activations a8) {
  if (a8 == TD_ACTIVATIONS_AUTO) return 1;
  const double tflops = a8 == load->activations    ? rig->gpu.a8[a8].tflops
                        : a8 == TD_ACTIVATIONS_FP8 ? rig->gpu.f16.tflops
                                                   : 0;
  return tflops > 0 ? rig->gpu.tflops / tflops : 1;
}

// Of a layer's chunk of n tokens behind `done` others, without routed experts, on a card;
// operations that are faster than in BF16 count as a8_share.
static double card_flops(const td_plan_load *load, const td_rig *rig, uint32_t layer_idx, double n,
                         double done) {
  const td_model_config *c = load->config;
  double flops = n * other_flops(load), attn = td_attn_of(c, layer_idx)->flops(c, n, done);
  for (td_activations a8 = 0; a8 < TD_N_ACTIVATIONS; a8++)
    flops -= n * (1 - a8_share(load, rig, a8)) * 2 * (double)load->a8[a8].params / c->n_layers;
  if (td_model_attn(c, layer_idx) == TD_ATTN_MLA) {
    const double expand = td_attn_expand_flops(c, done);
    flops += a8_share(load, rig, load->a8_latents[layer_idx]) * expand;
    attn -= expand;
  }
  const bool adds_f16 = rig->gpu.f16.tflops > 0 && td_attn_is_tiled(c, layer_idx);
  return flops + attn * (adds_f16 ? rig->gpu.tflops / rig->gpu.f16.tflops : 1);
}

static double head_flops(const td_plan_load *load) {
  return 2.0 * (double)load->head_params;
}

const char *td_limit_name(td_limit limit) {
  static const char *const names[] = {
#define X(id, name) name,
      TD_LIMITS(X)
#undef X
  };
  return names[limit];
}

td_limit td_plan_time_limit(const td_plan_time *t) {
  td_limit most = 0;
  for (td_limit i = 0; i < TD_N_LIMITS; i++)
    if (t->busy_s[i] > t->busy_s[most]) most = i;
  return most;
}

// The experts of a layer that n tokens choose, as a share, if all are as likely.
static double share_chosen(const td_model_config *c, double n) {
  return c->n_experts ? 1 - pow(1 - (double)c->top_k / c->n_experts, n) : 0;
}

static double longer(double a, double b) {
  return a > b ? a : b;
}

// ---- NUMA nodes ---------------------------------------------------------------------------------

#define STRIPE_BYTES ((double)(2 << 20)) // huge pages, as a server has

// Of [0, bytes), what is on the first node.
static double on_first(double bytes, uint32_t n_nodes) {
  const double period = STRIPE_BYTES * n_nodes, n = floor(bytes / period);
  return n * STRIPE_BYTES + fmin(bytes - n * period, STRIPE_BYTES);
}

double td_plan_remote_share(double n_regions, double region_bytes, uint32_t n_nodes) {
  enum { PHASES = 64 };
  if (n_nodes < 2 || n_regions <= 0 || region_bytes <= 0) return 0;
  double squares = 0; // of what a node has more than its part of a region
  for (int i = 0; i < PHASES; i++) {
    const double begin = (i + 0.5) / PHASES * STRIPE_BYTES * n_nodes;
    const double more = on_first(begin + region_bytes, n_nodes) - on_first(begin, n_nodes) -
                        region_bytes / n_nodes;
    squares += more * more / PHASES;
  }
  // The sum over regions is much like a normal distribution, whose positive part has a mean of 0.4
  // deviations.
  const double left = 0.4 * n_nodes * sqrt(squares * n_regions) / (n_regions * region_bytes);
  // A tile over a border lies on both sides of it, a quarter of it on average on the lesser.
  const double share = left + 0.25 / TD_STRIPE_TILES, most = 1 - 1.0 / n_nodes;
  return share < most ? share : most;
}

// What the CPU reads and computes.
typedef struct {
  double bytes, remote_bytes; // remote_bytes: of bytes
  double ops;
} host_load;

static void add_regions(host_load *l, const td_rig *rig, double n_regions, double region_bytes) {
  const double bytes = n_regions * region_bytes;
  l->bytes += bytes;
  l->remote_bytes += bytes * td_plan_remote_share(n_regions, region_bytes, rig->n_nodes);
}

// The share of a layer's experts that is read: gate and up beside each other, then down.
static void add_experts(host_load *l, const td_rig *rig, const td_model_config *c,
                        double layer_bytes, double share) {
  if (layer_bytes <= 0) return;
  const double n = c->n_experts * share, matrix_bytes = layer_bytes / c->n_experts / 3;
  add_regions(l, rig, n, 2 * matrix_bytes);
  add_regions(l, rig, n, matrix_bytes);
}

// Work of the CPU, which reads while it computes. Returns its time.
static double host_s(td_plan_time *out, const td_rig *rig, const host_load *l) {
  const double read = l->bytes / rig->read_gbps * 1e-9, compute = l->ops / rig->gflops * 1e-9;
  const double link = rig->n_nodes > 1 ? l->remote_bytes / rig->remote_gbps * 1e-9 : 0;
  out->host_bytes += l->bytes;
  out->remote_bytes += l->remote_bytes;
  out->busy_s[TD_LIMIT_HOST_READ] += read;
  out->busy_s[TD_LIMIT_NODES] += link;
  out->busy_s[TD_LIMIT_HOST_OPS] += compute;
  return longer(longer(read, link), compute);
}

static double gpu_s(td_plan_time *out, const td_rig *rig, double bytes, double ops) {
  const double read = bytes / rig->gpu.read_gbps * 1e-9, compute = ops / rig->gpu.tflops * 1e-12;
  out->busy_s[TD_LIMIT_GPU_READ] += read;
  out->busy_s[TD_LIMIT_GPU_OPS] += compute;
  return longer(read, compute);
}

static double wait_s(td_plan_time *out, double us) {
  out->busy_s[TD_LIMIT_WAITS] += us * 1e-6;
  return us * 1e-6;
}

// Seconds of the drive.
static double drive_s(td_plan_time *out, const td_rig *rig, double n_bytes) {
  const double seconds = n_bytes / rig->drive_gbps * 1e-9;
  out->busy_s[TD_LIMIT_DRIVE] += seconds;
  return seconds;
}

// Bytes of a layer's experts that n_tokens of decode, drafts included, need and memory lacks. The
// more tokens, the rarer the experts among them: in the end all that are not in memory.
static double missing_bytes(const td_drive_plan *drive, const td_model_config *c,
                            double layer_bytes, double n_tokens) {
  const double n_absent = (1 - drive->share) * c->n_experts;
  const double n_missed = c->top_k * (1 - drive->hit_rate); // of a token
  if (!drive->does_stream || n_absent <= 0) return 0;
  return layer_bytes * (1 - drive->share) * (1 - pow(1 - fmin(1, n_missed / n_absent), n_tokens));
}

static td_drive_plan drive_of(const td_plan_load *load, const td_rig *rig,
                              const td_card_plan *plan) {
  td_drive_plan drive = td_drive_plan_of(load, rig, plan ? rig->n_gpus : 0);
  drive.does_stream &= !plan || plan->experts_stream;
  return drive;
}

// ---- prompts ------------------------------------------------------------------------------------

// A layer of a chunk.
typedef struct {
  double attention, routed; // operations: of all but routed experts; of those
  double bytes;             // of all routed experts
  double streamed;          // to the card: of those, and of dense weights
  uint32_t n_tokens;
  bool is_offloaded; // the CPU computes the experts
} layer_load;

// Cards that compute a prompt together.
static uint32_t ranks_of(const td_plan_load *load, const td_rig *rig) {
  return td_may_share_prompts(load->config) ? rig->n_gpus : 1;
}

// Seconds that the links to the cards are busy with a layer, each.
static double link_s(const td_plan_load *load, const td_rig *rig, const layer_load *l) {
  const td_exchange_layer layer = {.n_tokens = l->n_tokens,
                                   .n_ranks = ranks_of(load, rig),
                                   .dim = load->config->dim,
                                   .kv_elements = (uint32_t)td_kv_entry_elements(load->config),
                                   .expert_bytes = (uint64_t)l->streamed};
  const td_exchange_bytes bytes = td_exchange_bytes_of(&layer);
  return td_exchange_time_of(&bytes, &(td_exchange_links){rig->gpu.link_gbps, rig->gpu.link_gbps,
                                                          .is_same_link = true})
      .layer_s;
}

// Experts are copied while the layer's attention is computed as far as the ring holds them, then
// while they are computed.
static void add_layer(td_plan_time *out, const td_plan_load *load, const td_rig *rig,
                      const td_card_plan *plan, const layer_load *l) {
  const uint32_t n = ranks_of(load, rig);
  const double attention_s = gpu_s(out, rig, 0, l->attention / n);
  if (l->is_offloaded) {
    host_load experts = {.ops = l->routed};
    add_experts(&experts, rig, load->config, l->bytes, share_chosen(load->config, l->n_tokens));
    out->seconds += attention_s + host_s(out, rig, &experts);
    return;
  }
  const double compute_s = attention_s + gpu_s(out, rig, 0, l->routed / n);
  const double copies_s = l->streamed > 0 || n > 1 ? link_s(load, rig, l) : 0;
  const double ring_s = (double)plan->memory.stream_bytes / rig->gpu.link_gbps * 1e-9;
  const double idle_s = copies_s > 0 && attention_s > ring_s ? attention_s - ring_s : 0;
  out->busy_s[TD_LIMIT_LINK] += copies_s;
  out->seconds += longer(copies_s + idle_s, compute_s);
}

static uint64_t dense_bytes_of(const td_plan_load *load, const td_card_plan *plan, uint32_t i) {
  const uint64_t *bytes = load->dense[i].bytes;
  const bool is_streamed = i + plan->n_streamed_dense >= load->config->n_layers;
  return is_streamed ? bytes[TD_DENSE_ATTN] + bytes[TD_DENSE_MLP] : 0;
}

static uint32_t stream_from(const td_plan_load *load, const td_rig *rig) {
  uint64_t most = 0;
  for (uint32_t i = 0; i < load->config->n_layers; i++)
    if (load->layer_bytes[i] > most) most = load->layer_bytes[i];
  return td_stream_from_bytes(load->config, most, rig->n_cores > 1 ? rig->n_cores - 1 : 1,
                              rig->gpu.link_gbps > 25 ? rig->gpu.link_gbps : 25);
}

static void plan_chunk(td_step_plan *out, const td_plan_load *load, const td_rig *rig,
                       const td_card_plan *plan, uint32_t n) {
  bool may_stream[TD_MAX_LAYERS];
  uint64_t dense_bytes[TD_MAX_LAYERS];
  for (uint32_t i = 0; i < load->config->n_layers; i++) {
    may_stream[i] = plan && plan->memory.stream_bytes > 0;
    dense_bytes[i] = plan ? dense_bytes_of(load, plan, i) : 0;
  }
  const td_step_shape shape = {.n_tokens = n,
                               .n_prompt = n,
                               .n_ranks = plan ? ranks_of(load, rig) : 1,
                               .n_gpu_expert_layers = plan ? plan->n_gpu_expert_layers : 0,
                               .has_expert_dev = plan && plan->experts_stream,
                               .break_even_tokens = stream_from(load, rig),
                               .may_stream = may_stream,
                               .dense_bytes = plan && plan->n_streamed_dense ? dense_bytes : NULL};
  td_step_plan_make(out, load->config, &shape);
}

// A chunk of n tokens on the CPU alone, behind `done` tokens.
static void add_host_chunk(td_plan_time *out, const td_plan_load *load, const td_rig *rig,
                           uint32_t n, uint32_t done) {
  const td_model_config *c = load->config;
  for (uint32_t i = 0; i < c->n_layers; i++) {
    host_load l = {.ops = n * (other_flops(load) + (load->layer_bytes[i] ? routed_flops(c) : 0)) +
                          td_attn_of(c, i)->flops(c, n, done)};
    add_regions(&l, rig, 1, (double)(load->step_bytes - load->head_bytes) / c->n_layers);
    add_experts(&l, rig, c, (double)load->layer_bytes[i], share_chosen(c, n));
    out->seconds += host_s(out, rig, &l) + wait_s(out, rig->layer_us);
  }
}

td_plan_time td_prefill_time_of(const td_plan_load *load, const td_rig *rig,
                                const td_card_plan *plan, uint32_t n_tokens) {
  td_plan_time out = {.n_steps = 0};
  const td_model_config *c = load->config;
  td_card_plan long_plan;
  if (plan && rig->n_gpus == 1 &&
      td_long_steps_pay(&plan->long_steps, c, stream_from(load, rig), n_tokens)) {
    long_plan = plan_for_long(plan);
    plan = &long_plan;
    const double once_s = (double)plan->long_steps.work.resident_bytes / rig->gpu.link_gbps * 1e-9;
    out.seconds = out.busy_s[TD_LIMIT_LINK] = once_s;
  }
  const td_drive_plan drive = drive_of(load, rig, plan);
  const uint32_t most = plan ? plan->memory.prefill_chunk : drive.prefill_chunk;
  for (uint32_t done = 0, n; done < n_tokens; done += n, out.n_steps++) {
    n = n_tokens - done < most ? n_tokens - done : most;
    td_step_plan step;
    const double before_s = out.seconds;
    plan_chunk(&step, load, rig, plan, n);
    if (!done) out.step = step;
    if (!plan) add_host_chunk(&out, load, rig, n, done);
    for (uint32_t i = 0; plan && i < c->n_layers; i++) {
      const bool is_streamed = step.way[i] == TD_LAYER_STREAMED;
      const bool is_offloaded = step.way[i] == TD_LAYER_OFFLOADED;
      const double share = is_offloaded ? 1 : a8_share(load, rig, load->a8_experts[i]);
      const layer_load layer = {.attention = card_flops(load, rig, i, n, done),
                                .routed = load->layer_bytes[i] ? share * n * routed_flops(c) : 0,
                                .bytes = (double)load->layer_bytes[i],
                                .streamed = (is_streamed ? (double)load->layer_bytes[i] : 0) +
                                            (double)dense_bytes_of(load, plan, i),
                                .n_tokens = n,
                                .is_offloaded = is_offloaded};
      add_layer(&out, load, rig, plan, &layer);
    }
    if (!drive.does_stream) continue; // experts are read a layer ahead, each once a step
    const double bytes = (double)td_plan_load_expert_bytes(load) * share_chosen(c, n);
    out.seconds = before_s +
                  longer(out.seconds - before_s, drive_s(&out, rig, bytes * (1 - drive.share)));
  }
  // Logits of the last token.
  host_load head = {.ops = head_flops(load)};
  add_regions(&head, rig, 1, (double)load->head_bytes);
  out.seconds += plan ? gpu_s(&out, rig, head.bytes, head.ops) : host_s(&out, rig, &head);
  return out;
}

// ---- decode -------------------------------------------------------------------------------------

static void plan_decode(td_plan_time *out, const td_plan_load *load, const td_card_plan *plan,
                        const td_drive_plan *drive, const td_decode_work *work,
                        uint32_t n_microbatches) {
  bool may_cache[TD_MAX_LAYERS];
  for (uint32_t i = 0; i < load->config->n_layers; i++)
    may_cache[i] = plan && plan->n_cached > 0;
  const td_step_shape shape = {.n_tokens = work->n_seqs * work->n_each,
                               .n_seqs = work->n_seqs,
                               .n_gpu_expert_layers = plan ? plan->n_gpu_expert_layers : 0,
                               .has_expert_dev = plan && plan->experts_stream,
                               .may_replay = true,
                               .has_drive = drive->does_stream,
                               .may_cache = plan && plan->n_cached ? may_cache : NULL,
                               .n_microbatches = n_microbatches};
  td_step_plan_make(&out->step, load->config, &shape);
}

// Operations of a token's attention to depth others. With latents they stay latents, unlike in a
// prompt.
static double token_attn_ops(const td_model_config *c, uint32_t layer_idx, double depth) {
  if (!c->kv_lora_rank) return td_attn_of(c, layer_idx)->flops(c, 1, depth);
  const double most = (double)td_most_selected(c->index_top_k, c->index_group);
  if (c->index_top_k && depth > most) depth = most;
  return 2.0 * depth * c->n_heads * (2.0 * c->kv_lora_rank + c->rope_dim);
}

// What a layer's states of a sequence move, on average over the layers: read, written, and kept
// between a step's n_each tokens.
static double state_bytes(const td_plan_load *load, uint32_t n_each) {
  const td_model_config *c = load->config;
  if (!td_attn_has_states(c)) return 0;
  const double trail = (double)td_kv_trail_bytes(c, n_each - 1);
  double n_bytes = 0;
  for (uint32_t i = 0; i < c->n_layers; i++)
    n_bytes += 2 * (double)td_kv_undo_bytes(c, i);
  return (n_bytes + trail) / c->n_layers;
}

// A layer of decode with the experts' share that is on a card.
static void add_decode_layer(td_plan_time *out, const td_plan_load *load, const td_rig *rig,
                             const td_card_plan *plan, const td_drive_plan *drive,
                             const td_decode_work *work, uint32_t i) {
  const td_model_config *c = load->config;
  const uint32_t n_parts = out->step.n_microbatches;
  const double n = (double)work->n_seqs * work->n_each / n_parts;
  const td_dtype kv_dtype = plan ? td_gpu_kv_dtype(load->kv_dtype) : load->kv_dtype;
  const td_kv_layout kv = td_kv_layout_of(c, kv_dtype, 0);
  const double n_seqs = (double)work->n_seqs / n_parts;
  const double kv_bytes = (double)td_kv_layout_token_bytes(&kv) / c->n_layers * work->depth *
                          n_seqs;
  const double other = (double)(load->step_bytes - load->head_bytes) / c->n_layers + kv_bytes +
                       state_bytes(load, work->n_each) * n_seqs;
  const double other_ops = n * (other_flops(load) + token_attn_ops(c, i, work->depth));
  const double share = share_chosen(c, n), experts = (double)load->layer_bytes[i] * share;
  const double ops = load->layer_bytes[i] ? n * routed_flops(c) : 0;
  host_load dense = {.ops = other_ops}, routed = {.ops = ops};
  add_regions(&dense, rig, 1, other);
  add_experts(&routed, rig, c, (double)load->layer_bytes[i], share);
  const double missing = missing_bytes(drive, c, (double)load->layer_bytes[i], n);
  const double missing_s = missing > 0 ? drive_s(out, rig, missing) : 0;
  for (uint32_t k = 0; !plan && k < n_parts; k++) {
    out->seconds += host_s(out, rig, &dense) + longer(host_s(out, rig, &routed), missing_s) +
                    wait_s(out, rig->layer_us);
  }
  if (!plan) return;
  const bool is_peers = i < plan->n_gpu_expert_layers * rig->n_gpus; // or the first card's
  const double hits = !td_layer_way_has_expert_dev(out->step.way[i]) || is_peers ? 1
                      : out->step.way[i] == TD_LAYER_CACHED                      ? work->hit_rate
                                                                                 : 0;
  host_load rest = {.ops = ops * (1 - hits)};
  add_experts(&rest, rig, c, (double)load->layer_bytes[i], share * (1 - hits));
  double here = 0, there = 0, before = 0;
  for (uint32_t k = 0; k < n_parts; k++) {
    before += gpu_s(out, rig, other, other_ops) + wait_s(out, rig->gpu.layer_us);
    here += gpu_s(out, rig, experts * hits, ops * hits);
    there += longer(host_s(out, rig, &rest), missing_s);
  }
  // In two microbatches the cards' and the CPU's parts overlap; in one they follow.
  out->seconds += n_parts > 1 ? longer(before + here, there) : before + longer(here, there);
}

td_plan_time td_decode_time_of(const td_plan_load *load, const td_rig *rig,
                               const td_card_plan *plan, const td_decode_work *work) {
  td_plan_time best = {.seconds = 0};
  const td_drive_plan drive = drive_of(load, rig, plan);
  for (uint32_t n = 1; n <= TD_MAX_MICROBATCHES; n++) {
    td_plan_time t = {.n_steps = 1};
    plan_decode(&t, load, plan, &drive, work, n);
    if (t.step.n_microbatches != n) break;
    for (uint32_t i = 0; i < load->config->n_layers; i++)
      add_decode_layer(&t, load, rig, plan, &drive, work, i);
    host_load head = {.ops = work->n_seqs * work->n_each * head_flops(load)};
    add_regions(&head, rig, 1, (double)load->head_bytes);
    t.seconds += plan ? gpu_s(&t, rig, head.bytes, head.ops) : host_s(&t, rig, &head);
    if (n == 1 || t.seconds < best.seconds) best = t;
  }
  return best;
}

double td_draft_time_of(const td_plan_load *load, const td_rig *rig, const td_card_plan *plan,
                        double n_tokens, double n_seqs) {
  const td_model_config *c = load->config;
  const double expert_bytes = (double)load->draft_expert_bytes, others = (double)load->draft_bytes;
  const double experts_ops = expert_bytes > 0 ? n_tokens * routed_flops(c) : 0;
  const double others_ops = n_tokens * other_flops(load), head_ops = n_seqs * head_flops(load);
  const double share = share_chosen(c, n_tokens);
  td_plan_time t = {.n_steps = 0};
  if (others <= 0 || (plan && !plan->drafts.has_layer)) return 0;
  host_load experts = {.ops = experts_ops}, rest = {.ops = others_ops}, head = {.ops = head_ops};
  add_experts(&experts, rig, c, expert_bytes, share);
  add_regions(&rest, rig, 1, others);
  add_regions(&head, rig, 1, (double)load->draft_head_bytes);
  const td_drive_plan drive = drive_of(load, rig, plan);
  const double missing = missing_bytes(&drive, c, expert_bytes, n_tokens);
  const double missing_s = missing > 0 ? drive_s(&t, rig, missing) : 0;
  if (!plan)
    return longer(host_s(&t, rig, &experts), missing_s) + host_s(&t, rig, &rest) +
           host_s(&t, rig, &head) + wait_s(&t, rig->layer_us);
  const double routed_s = plan->experts_stream ? longer(host_s(&t, rig, &experts), missing_s)
                                               : gpu_s(&t, rig, expert_bytes * share, experts_ops);
  return routed_s + gpu_s(&t, rig, others, others_ops) +
         gpu_s(&t, rig, (double)load->head_bytes, head_ops) + wait_s(&t, rig->gpu.layer_us);
}
