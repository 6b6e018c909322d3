// src/runtime/placement.c - placement rules and the division of GPU memory.
#include "runtime/placement.h"

#include <stdlib.h>
#include <string.h>

#include "base/cpus.h"
#include "base/log.h"
#include "base/units.h"
#include "engine/attn/kind.h"
#include "engine/draft.h"
#include "engine/engine.h"
#include "kv/plan.h"

enum { CHUNK_PART = 4, CHUNK_ROUND = 64 };
// Step sizes in tokens beyond which throughput hardly grows: with streamed experts, and with all
// experts on the GPU (8192 tokens are on average 256 per expert of DeepSeek-V3, 512 of Qwen3-235B).
enum { MAX_CHUNK_STREAMED = 32768, MAX_CHUNK = 8192 };
enum { MIN_CTX = 8192 }; // context in tokens that must fit too before all experts go to the GPU

static uint64_t at_most(uint64_t n, uint64_t most) {
  return n < most ? n : most;
}

// ---- where a model is computed ------------------------------------------------------------------

td_status td_device_list_parse(td_device_list *out, const char *text, td_err *err) {
  enum { MAX_INDEX = 63 };
  *out = (td_device_list){.n = 0};
  for (const char *at = text ? text : "0";; at++) {
    char *end;
    const unsigned long index = strtoul(at, &end, 10);
    bool is_new = *at >= '0' && *at <= '9' && index <= MAX_INDEX;
    for (uint32_t i = 0; i < out->n; i++)
      is_new &= out->index[i] != index;
    if (!is_new || out->n == TD_COMM_MAX_RANKS || (*end && *end != ',')) {
      return td_fail(err, TD_EINVAL, "--devices %s: give up to %d different indices, as 0,1", text,
                     TD_COMM_MAX_RANKS);
    }
    out->index[out->n++] = (uint32_t)index;
    if (!*end) return TD_OK;
    at = end;
  }
}

td_status td_expert_cache_parse(td_expert_cache_size *out, const char *text, td_err *err) {
  *out = (td_expert_cache_size){.bytes = 0};
  if (!text || strcmp(text, "off") == 0) return TD_OK;
  out->is_auto = strcmp(text, "auto") == 0;
  if (out->is_auto) return TD_OK;
  char *end;
  const double gib = strtod(text, &end);
  if (*text < '0' || *text > '9' || *end || !(gib > 0 && gib <= 1 << 20))
    return td_fail(err, TD_EINVAL, "--expert-cache %s: give GiB, as 8 or 0.5, or auto or off",
                   text);
  out->bytes = (uint64_t)(gib * (double)TD_GIB);
  return TD_OK;
}

enum { PARALLEL_ON = 1, PARALLEL_OFF };

static td_status check_devices(const td_runtime_opts *opts, td_err *err) {
  td_device_list list;
  td_status st = td_device_list_parse(&list, opts->devices, err);
  if (st == TD_OK && opts->expert_parallel == PARALLEL_ON && list.n < 2)
    st = td_fail(err, TD_EINVAL, "--expert-parallel on: name two devices or more, --devices 0,1");
  return st;
}

td_status td_placement_check(const td_runtime_opts *opts, td_err *err) {
  const bool is_cpu = strcmp(opts->device, "cpu") == 0, is_cuda = strcmp(opts->device, "cuda") == 0;
  if (!is_cpu && !is_cuda && strcmp(opts->device, "auto") != 0)
    return td_fail(err, TD_EINVAL, "--device %s: give cpu, cuda or auto", opts->device);
  if (is_cpu && opts->experts == TD_EXPERTS_GPU)
    return td_fail(err, TD_EINVAL, "--expert-device gpu needs --device cuda: give both or neither");
  if (is_cpu && opts->activations == TD_ACTIVATIONS_FP8) {
    return td_fail(err, TD_EINVAL,
                   "--activations fp8 is for GPUs: leave out --device cpu, or give --activations "
                   "auto");
  }
  td_expert_cache_size cache;
  td_status st = td_expert_cache_parse(&cache, opts->expert_cache, err);
  return st == TD_OK ? check_devices(opts, err) : st;
}

td_status td_placement_check_model(const td_runtime_opts *opts, const td_model_config *config,
                                   td_err *err) {
  td_device_list list;
  td_status st = td_device_list_parse(&list, opts->devices, err);
  if (st == TD_OK && list.n > 1 && opts->expert_parallel == PARALLEL_ON &&
      !td_may_share_prompts(config)) {
    st = td_fail(err, TD_EUNSUPPORTED,
                 "--expert-parallel on: a recurrent state (%s) passes from token to token, so "
                 "several devices cannot share a prompt: leave it out; two GPUs then prefill on "
                 "one and decode on the other",
                 config->arch_name);
  }
  if (st == TD_OK && strcmp(opts->device, "cuda") == 0 && !td_attn_has_gpu(config)) {
    st = td_fail(err, TD_EUNSUPPORTED,
                 "--device cuda: there are no GPU kernels for the attention of %s: "
                 "give --device cpu",
                 config->arch_name);
  }
  return st == TD_OK ? td_attn_check_kv(config, opts->kv_dtype, err) : st;
}

bool td_may_share_prompts(const td_model_config *config) {
  return !td_attn_has_states(config);
}

bool td_shares_prompts(const td_runtime_opts *opts, const td_model_config *config) {
  td_device_list list;
  return td_device_list_parse(&list, opts->devices, NULL) == TD_OK && list.n > 1 &&
         opts->expert_parallel != PARALLEL_OFF && td_may_share_prompts(config);
}

bool td_placement_may_use_gpu(const td_runtime_opts *opts, const td_model_config *config) {
  if (strcmp(opts->device, "cpu") == 0) return false;
  if (td_attn_has_gpu(config)) return true;
  td_info("no GPU kernels for the attention of %s; running on the CPU", config->arch_name);
  return false;
}

uint64_t td_placement_need_bytes(const td_runtime_opts *opts, const td_model_stats *stats) {
  return opts->experts == TD_EXPERTS_GPU ? stats->bytes : stats->bytes - stats->expert_bytes;
}

td_dtype td_gpu_kv_dtype(td_dtype kv_dtype) {
  return kv_dtype == TD_F32 ? TD_BF16 : kv_dtype;
}

uint64_t td_placement_kv_bytes(uint32_t ctx_size, td_dtype kv_dtype, const td_model_config *c,
                               uint32_t n_tokens) {
  const uint64_t n = ctx_size ? ctx_size : at_most(c->max_position, n_tokens);
  return td_engine_kv_bytes(c, td_gpu_kv_dtype(kv_dtype), n);
}

bool td_gpu_holds_all(uint64_t gpu_bytes, uint64_t weight_bytes, uint32_t ctx_size,
                      td_dtype kv_dtype, const td_model_config *c) {
  return gpu_bytes >=
         weight_bytes + TD_KV_DEVICE_SPARE + td_placement_kv_bytes(ctx_size, kv_dtype, c, MIN_CTX);
}

td_gpu_draft_bytes td_gpu_draft_bytes_of(const td_model *model, uint32_t max_seqs) {
  const td_model_config *c = td_model_config_of(model);
  td_engine_opts of_step = {.max_drafts = td_draft_max(td_attn_has_states(c)),
                            .max_step_seqs = max_seqs,
                            .max_step_tokens = max_seqs + TD_DRAFT_STEP +
                                               td_engine_prefill_chunk(c)};
  td_gpu_draft_bytes out = {.bytes = td_engine_draft_bytes(model, false, &of_step)};
  const uint64_t of_layer = td_model_mtp_bytes(model, false);
  of_step.has_draft_layer = of_layer > 0;
  if (of_layer) out.layer_bytes = of_layer + td_engine_draft_bytes(model, false, &of_step);
  return out;
}

// With AUTO, the GPU gets all experts only if workspaces and one context fit too.
static bool experts_are_for_cpu(const td_runtime_opts *opts, const td_model *model,
                                uint64_t gpu_bytes) {
  const td_model_stats stats = td_model_stats_of(model);
  if (!stats.expert_bytes || opts->experts == TD_EXPERTS_GPU) return false;
  if (opts->experts == TD_EXPERTS_CPU) return true;
  return !td_gpu_holds_all(gpu_bytes, stats.bytes, opts->ctx_size, opts->kv_dtype,
                           td_model_config_of(model));
}

td_placement td_placement_of(const td_runtime_opts *opts, const td_model *model,
                             uint64_t gpu_bytes) {
  if (!gpu_bytes) return (td_placement){.device = "cpu"};
  return (td_placement){.device = "cuda",
                        .is_discrete = true,
                        .experts_on_cpu = experts_are_for_cpu(opts, model, gpu_bytes)};
}

uint32_t td_stream_from_bytes(const td_model_config *c, uint64_t layer_bytes, uint32_t n_threads,
                              double copy_gbps) {
  enum { LEAST = 32 };
  static const double thread_gflops = 100; // a server's core
  if (!layer_bytes) return LEAST;
  const double copy_s = (double)layer_bytes / copy_gbps * 1e-9;
  const double token_flops = 2.0 * 3 * c->top_k * c->dim * c->expert_dim;
  const double token_s = token_flops / thread_gflops / n_threads * 1e-9, tokens = copy_s / token_s;
  return tokens < LEAST ? LEAST : tokens < 1 << 24 ? (uint32_t)tokens : 1 << 24;
}

// What copies reach of a link: an H100's 53.9 of 63 GB/s. Of a link that is unknown, or that a
// virtual machine shows as slow as none is, a PCIe 4.0 x16 link's.
static double copies_of(double link_gbps) {
  static const double share = 0.85, least = 25;
  return share * link_gbps > least ? share * link_gbps : least;
}

uint32_t td_stream_from(const td_model *model, uint32_t n_threads, double link_gbps) {
  const td_model_config *c = td_model_config_of(model);
  const uint32_t n_cpus = td_cpu_count();
  uint64_t layer_bytes = 0;
  for (uint32_t i = 0; i < c->n_layers; i++) {
    const uint64_t n_bytes = td_model_expert_bytes(model, i);
    if (n_bytes > layer_bytes) layer_bytes = n_bytes;
  }
  return td_stream_from_bytes(c, layer_bytes,
                              n_threads    ? n_threads
                              : n_cpus > 1 ? n_cpus - 1
                                           : 1,
                              copies_of(link_gbps));
}

// ---- GPU memory ---------------------------------------------------------------------------------

static uint32_t choose_chunk(const td_gpu_need *need, uint64_t left) {
  if (need->prefill_chunk) return need->prefill_chunk;
  const uint32_t most = need->layer_bytes ? MAX_CHUNK_STREAMED : MAX_CHUNK;
  uint32_t n = (uint32_t)at_most(left / CHUNK_PART / need->step_token_bytes, most);
  n -= n % CHUNK_ROUND;
  return n > need->usual_chunk ? n : need->usual_chunk;
}

// Memory to keep, besides TD_KV_DEVICE_SPARE, so that a KV cache of kv_bytes fits: kv/plan.h leaves
// a quarter or TD_KV_DEVICE_SPARE free, whichever is more.
static uint64_t room_for_kv(uint64_t kv_bytes) {
  enum { ROUNDING = 1 << 20 };
  const uint64_t whole = kv_bytes / 3 * 4;
  const uint64_t beside = whole > TD_KV_DEVICE_SPARE ? whole - TD_KV_DEVICE_SPARE : 0;
  return (beside > kv_bytes ? beside : kv_bytes) + ROUNDING;
}

static uint64_t without(uint64_t left, uint64_t taken) {
  return left > taken ? left - taken : 0;
}

td_gpu_plan td_gpu_plan_make(const td_gpu_need *need) {
  const uint64_t kv_room = room_for_kv(need->kv_bytes);
  uint64_t left = without(need->free_bytes, need->weight_bytes + TD_KV_DEVICE_SPARE);
  const uint64_t decode_bytes = need->layer_bytes ? need->usual_chunk * need->step_token_bytes : 0;
  left = without(left, decode_bytes);
  if (need->is_ctx_given) left = without(left, kv_room);
  td_gpu_plan plan = {.prefill_chunk = choose_chunk(need, left), .decode_bytes = decode_bytes};
  if (plan.prefill_chunk > need->usual_chunk)
    plan.chunk_bytes = (plan.prefill_chunk - need->usual_chunk) * need->step_token_bytes;
  left = without(left, plan.chunk_bytes);
  if (!need->is_ctx_given) left -= at_most(kv_room, left / 2);
  plan.stream_bytes = at_most(left, need->layer_bytes);
  return plan;
}

static uint64_t room_for_experts(const td_gpu_need *need, uint64_t held_bytes) {
  return without(need->free_bytes, held_bytes + TD_KV_DEVICE_SPARE + 2 * need->kv_bytes);
}

// What experts get if no size is asked for: half of that, or all that the KV pool has no use for.
static uint64_t share_for_experts(const td_gpu_need *need, uint64_t held_bytes) {
  enum { ROUNDING = 1 << 20 };
  const uint64_t half = room_for_experts(need, held_bytes) / 2;
  const uint64_t left = without(need->free_bytes, held_bytes);
  const uint64_t spare = left / 4 > TD_KV_DEVICE_SPARE ? left / 4 : TD_KV_DEVICE_SPARE;
  const uint64_t unused = without(left, spare + need->pool_bytes + ROUNDING);
  return need->pool_bytes && unused > half ? unused : half;
}

uint32_t td_gpu_own_layers(const td_gpu_need *need, uint64_t held_bytes,
                           const uint64_t *layer_bytes, uint32_t n_layers, uint64_t *bytes) {
  const uint64_t room = share_for_experts(need, held_bytes);
  uint32_t n = 0;
  for (*bytes = 0; n < n_layers && *bytes + layer_bytes[n] <= room; n++)
    *bytes += layer_bytes[n];
  return n;
}

// Whether the first n of the layers are at least half of those with experts.
static bool are_half(const uint64_t *layer_bytes, uint32_t n_layers, uint32_t n) {
  uint32_t n_all = 0, n_own = 0;
  for (uint32_t i = 0; i < n_layers; i++) {
    n_all += layer_bytes[i] > 0;
    n_own += layer_bytes[i] > 0 && i < n;
  }
  return 2 * n_own >= n_all;
}

td_gpu_experts td_gpu_experts_plan(const td_gpu_need *need, uint64_t held_bytes,
                                   const uint64_t *layer_bytes, uint32_t n_layers, bool has_layers,
                                   const td_expert_cache_size *cache) {
  const uint64_t most = room_for_experts(need, held_bytes);
  const uint64_t share = share_for_experts(need, held_bytes);
  td_gpu_experts out = {.cache_bytes = at_most(cache->bytes, most)};
  if (has_layers) {
    out.n_layers = td_gpu_own_layers(need, held_bytes + out.cache_bytes, layer_bytes, n_layers,
                                     &out.layers_bytes);
  }
  if (!cache->is_auto) return out;
  if (has_layers && are_half(layer_bytes, n_layers, out.n_layers))
    out.cache_bytes = share - out.layers_bytes;
  else
    out = (td_gpu_experts){.cache_bytes = share};
  return out;
}

td_gpu_shared_experts td_gpu_share_experts(const td_gpu_experts *own, const uint64_t *layer_bytes,
                                           uint32_t n_layers, uint32_t n_devices) {
  td_gpu_shared_experts out = {.first = *own, .is_fixed = !own->cache_bytes};
  if (out.is_fixed) {
    const uint64_t room = own->layers_bytes;
    out.first = (td_gpu_experts){.n_layers = 0};
    for (uint32_t i = 0; i < n_layers && i < own->n_layers; i++) {
      if (out.first.layers_bytes + layer_bytes[i] > room / 2) break;
      out.first.layers_bytes += layer_bytes[i];
      out.first.n_layers = i + 1;
    }
    out.first.cache_bytes = room - out.first.layers_bytes;
  }
  const uint64_t share = (out.first.layers_bytes + n_devices - 1) / n_devices;
  out.peer_bytes = out.first.layers_bytes + out.first.cache_bytes - share;
  return out;
}

// The first GPU's part where dense weights of the last n layers stream. ring_bytes: of each ring.
// False: that frees no memory.
static bool divide_with_dense(td_gpu_pair *out, const td_gpu_need *need, const td_gpu_plan *plan,
                              uint64_t freed_bytes, uint64_t ring_bytes, uint64_t cache_bytes) {
  const uint64_t taken = TD_PREFILL_ENGINES * ring_bytes;
  if (freed_bytes <= taken) return false;
  const uint64_t room = plan->stream_bytes + plan->chunk_bytes + cache_bytes + freed_bytes - taken;
  uint64_t chunk_bytes = plan->chunk_bytes;
  if (!need->prefill_chunk) {
    uint64_t n = need->usual_chunk + room / CHUNK_PART / need->step_token_bytes;
    n = at_most(n - n % CHUNK_ROUND, MAX_CHUNK_STREAMED);
    if (n > out->prefill_chunk) {
      out->prefill_chunk = (uint32_t)n;
      chunk_bytes = (n - need->usual_chunk) * need->step_token_bytes;
    }
  }
  out->stream_bytes = at_most(room - chunk_bytes, need->layer_bytes);
  out->dense_ring_bytes = ring_bytes;
  return true;
}

// Longer steps copy all experts less often; a longer ring copies them for less long.
static bool is_better(const td_gpu_pair *a, const td_gpu_pair *b) {
  if (a->prefill_chunk != b->prefill_chunk) return a->prefill_chunk > b->prefill_chunk;
  return a->stream_bytes > b->stream_bytes;
}

td_gpu_pair td_gpu_pair_plan(const td_gpu_need *need, const td_gpu_plan *plan, uint64_t cache_bytes,
                             const td_dense_size *dense, uint32_t n_layers) {
  const uint64_t ring_bytes = at_most(plan->stream_bytes + cache_bytes, need->layer_bytes);
  const uint32_t chunk = need->prefill_chunk ? need->prefill_chunk : MAX_CHUNK_STREAMED;
  const td_gpu_pair resident = {.stream_bytes = ring_bytes,
                                .cache_bytes = cache_bytes + plan->stream_bytes + plan->chunk_bytes,
                                .prefill_chunk = plan->prefill_chunk};
  td_gpu_pair pair = resident;
  uint64_t freed_bytes = 0;
  for (uint32_t n = 1; n <= n_layers; n++) {
    if (pair.stream_bytes >= need->layer_bytes / 2 && pair.prefill_chunk >= chunk) break;
    for (int part = 0; part < TD_N_DENSE_PARTS; part++)
      freed_bytes += dense[n_layers - n].bytes[part];
    td_gpu_pair next = resident;
    next.n_streamed_dense = n;
    const bool is_gain = divide_with_dense(&next, need, plan, freed_bytes,
                                           td_dense_ring_bytes(dense, n_layers, n), cache_bytes);
    if (is_gain && is_better(&next, &pair)) pair = next;
  }
  return pair;
}

td_long_steps td_long_steps_plan(const td_gpu_need *need, const td_gpu_plan *plan,
                                 const td_gpu_work *work, const td_dense_size *dense,
                                 uint32_t n_layers) {
  enum { RING_PART = 3 }; // at least, of the room
  td_long_steps out = {
      .n_streamed_dense = n_layers, .usual_chunk = plan->prefill_chunk, .work = *work};
  for (uint32_t i = 0; i < n_layers; i++)
    for (int part = 0; part < TD_N_DENSE_PARTS; part++)
      out.dense_bytes += dense[i].bytes[part];
  if (!plan->stream_bytes || need->prefill_chunk) return out;
  // TD_KV_DEVICE_SPARE: for the workspaces of one more engine.
  const uint64_t taken = TD_KV_DEVICE_SPARE + td_dense_ring_bytes(dense, n_layers, n_layers);
  const uint64_t room = without(out.dense_bytes, taken);
  uint64_t n = at_most(room / RING_PART * (RING_PART - 1) / need->step_token_bytes,
                       MAX_CHUNK_STREAMED);
  n -= n % CHUNK_ROUND;
  if (n <= plan->prefill_chunk) return out;
  out.prefill_chunk = (uint32_t)n;
  out.stream_bytes = at_most(room - n * need->step_token_bytes, need->layer_bytes);
  return out;
}

// A step's operations; those in 8 bits count as half, since tensor cores have at least twice the
// rate there, and by sums in F16 as configs/cards has them. No card's share of it was measured.
static double ops_of(const td_gpu_work *work, const td_model_config *c, double n, double n_past) {
  const double f16 = work->adds_f16 ? 0.7 : 1;
  double ops = n * (double)(2 * work->active_params - work->a8_params);
  if (work->a8_params != work->f8_params) ops -= n * (1 - f16) * 2 * (double)work->f8_params;
  for (uint32_t i = 0; i < c->n_layers; i++)
    ops += td_attn_of(c, i)->flops(c, n, n_past) * (td_attn_is_tiled(c, i) ? f16 : 1);
  return ops;
}

bool td_long_steps_pay(const td_long_steps *p, const td_model_config *c, uint32_t stream_from,
                       uint64_t n_tokens) {
  static const double link_gbps = 25, tflops = 115; // a PCIe 4.0 x16 link; an RTX 4090
  if (!p->prefill_chunk || n_tokens < stream_from) return false;
  const struct {
    uint32_t chunk;
    double bytes; // that a step copies
  } ways[] = {{p->usual_chunk, (double)p->work.expert_bytes},
              {p->prefill_chunk, (double)(p->work.expert_bytes + p->dense_bytes)}};
  double seconds[] = {0, (double)p->work.resident_bytes / link_gbps * 1e-9};
  for (int i = 0; i < 2; i++) {
    uint64_t n;
    for (uint64_t done = 0; done < n_tokens; done += n) {
      n = at_most(n_tokens - done, ways[i].chunk);
      // The CPU computes a last step of few tokens; stream_from would take as long as the copies.
      const double share = n < stream_from ? (double)n / stream_from : 1;
      const double copies_s = ways[i].bytes * share / link_gbps * 1e-9;
      const double ops_s = ops_of(&p->work, c, (double)n, (double)done) / tflops * 1e-12;
      seconds[i] += copies_s > ops_s ? copies_s : ops_s;
    }
  }
  return seconds[1] < 0.8 * seconds[0];
}
