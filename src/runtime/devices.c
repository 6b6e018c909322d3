// src/runtime/devices.c - opening devices and dividing a GPU's memory.
#include "runtime/devices.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "base/cpus.h"
#include "base/env.h"
#include "base/log.h"
#include "base/units.h"
#include "engine/attn/kind.h"
#include "engine/draft.h"
#include "kv/plan.h"

static td_dev_opts dev_opts(const td_devices_opts *opts, const char *kind) {
  return (td_dev_opts){.kind = kind,
                       .n_threads = opts->runtime->n_threads,
                       .activations = opts->runtime->activations,
                       .cpus_from_end = opts->cpus_from_end,
                       .ends_with_process = opts->ends_with_process};
}

// The devices that compute prompts together; one: dev alone.
static td_device_list devices_of(const td_devices_opts *opts, const td_model_config *config) {
  td_device_list list = {.index = {0}, .n = 1};
  td_device_list_parse(&list, opts->runtime->devices, NULL); // was checked
  if (opts->is_alone || !td_shares_prompts(opts->runtime, config)) list.n = 1;
  return list;
}

// CPU devices share the threads.
static unsigned threads_of_each(unsigned n_threads, uint32_t n_devices) {
  if (n_devices < 2) return n_threads;
  if (!n_threads) n_threads = td_cpu_count();
  return n_threads / n_devices ? n_threads / n_devices : 1;
}

// Devices like the first one, which is open.
static td_status open_peers(td_devices *d, const td_devices_opts *opts,
                            const td_model_config *config, td_err *err) {
  enum { ON = 1 };
  const td_device_list list = devices_of(opts, config);
  const bool is_gpu = td_dev_gpu_index(d->dev) >= 0;
  td_dev_opts peer = dev_opts(opts, is_gpu ? "cuda" : "cpu");
  peer.n_threads = threads_of_each(peer.n_threads, list.n);
  td_status st = TD_OK;
  for (uint32_t i = 1; i < list.n && st == TD_OK; i++) {
    peer.index = list.index[i];
    st = td_dev_open(&d->peers[d->n_peers], &peer, err);
    d->n_peers += st == TD_OK;
  }
  d->parallel_tokens = opts->runtime->expert_parallel == ON ? 1 : 0;
  return st;
}

static td_status open_dev(td_devices *d, const td_devices_opts *opts, const td_model_config *config,
                          const td_model_stats *stats, td_err *err) {
  td_status st = td_placement_check(opts->runtime, err);
  if (st == TD_OK) st = td_placement_check_model(opts->runtime, config, err);
  if (st != TD_OK) return st;
  const bool may_use_gpu = td_placement_may_use_gpu(opts->runtime, config);
  td_dev_opts dev = dev_opts(opts, may_use_gpu ? opts->runtime->device : "cpu");
  dev.need_bytes = td_placement_need_bytes(opts->runtime, stats);
  const td_device_list list = devices_of(opts, config);
  dev.index = list.index[0];
  const bool is_cpu = strcmp(dev.kind, "cpu") == 0;
  if (is_cpu) dev.n_threads = threads_of_each(dev.n_threads, list.n);
  st = td_dev_open(&d->dev, &dev, err);
  if (st == TD_OK) st = open_peers(d, opts, config, err);
  return st == TD_ENOMEM && opts->runtime->experts == TD_EXPERTS_GPU
             ? td_err_prefix(err, "--expert-device gpu")
             : st;
}

static td_gpu_need need_of(const td_devices *d, const td_devices_opts *opts, const td_model *model,
                           uint64_t n_free) {
  const td_model_config *c = td_model_config_of(model);
  td_gpu_need need = {
      .free_bytes = n_free,
      .weight_bytes = d->held_bytes,
      .kv_bytes = td_placement_kv_bytes(opts->runtime->ctx_size, opts->runtime->kv_dtype, c,
                                        TD_KV_DEFAULT_CTX),
      .is_ctx_given = opts->runtime->ctx_size != 0,
      .step_token_bytes = td_engine_step_bytes_per_token(c, td_dev_act_dtype(d->dev)) +
                          (d->n_peers ? td_engine_rank_bytes_per_token(c, td_dev_act_dtype(d->dev))
                                      : 0),
      .usual_chunk = td_engine_prefill_chunk(c),
      .prefill_chunk = opts->runtime->prefill_chunk,
  };
  for (uint32_t i = 0; d->expert_dev && i < c->n_layers; i++) {
    const uint64_t n = td_model_expert_bytes(model, i);
    if (n > need.layer_bytes) need.layer_bytes = n;
  }
  // Beside experts that stream, the engine that drafts has steps of usual_chunk.
  if (d->has_draft_layer && !d->expert_dev)
    need.step_token_bytes += td_engine_draft_token_bytes(c, td_dev_act_dtype(d->dev));
  return need;
}

static void place_for_prefill(td_devices *d, const td_gpu_pair *pair) {
  d->stream_bytes = pair->stream_bytes;
  d->cache_bytes = 0;
  d->prefill_chunk = pair->prefill_chunk;
  d->n_streamed_dense = pair->n_streamed_dense;
  if (!pair->n_streamed_dense) return;
  td_info("%s: dense weights of the last %u layers stream as experts do, which leaves %s for "
          "experts and steps of %u tokens",
          td_dev_name(d->dev), pair->n_streamed_dense, td_size(pair->stream_bytes).text,
          pair->prefill_chunk);
}

static void plan_longer(td_devices *d, const td_devices_opts *opts, const td_model *model,
                        const td_gpu_need *need, const td_gpu_plan *plan,
                        const td_dense_size *dense) {
  if (d->n_peers || opts->is_for_prefill || opts->is_for_decode || opts->is_alone) return;
  const uint32_t n_layers = td_model_config_of(model)->n_layers;
  const td_model_stats stats = td_model_stats_of(model);
  td_gpu_work work = {.active_params = stats.active_params,
                      .a8_params = stats.a8[opts->runtime->activations].active_params,
                      .f8_params = stats.a8[TD_ACTIVATIONS_FP8].active_params,
                      .adds_f16 = td_dev_adds_f16(d->dev),
                      .resident_bytes = need->weight_bytes};
  for (uint32_t i = 0; i < n_layers; i++) {
    const uint64_t n_bytes = td_model_expert_bytes(model, i);
    if (i < d->n_gpu_expert_layers) work.resident_bytes += n_bytes;
    if (i >= d->n_gpu_expert_layers) work.expert_bytes += n_bytes;
  }
  d->long_steps = td_long_steps_plan(need, plan, &work, dense, n_layers);
  const char *tokens = td_test_var_get(TD_ENV_LONGER);
  if (tokens && plan->stream_bytes) {
    d->long_steps.prefill_chunk = (uint32_t)strtoul(tokens, NULL, 10);
    d->long_steps.stream_bytes = plan->stream_bytes;
    d->long_steps.work.expert_bytes = (uint64_t)1 << 40; // as if copies were all
  }
  if (!d->long_steps.prefill_chunk) return;
  td_info("%s: while nothing decodes, long prompts have steps of %u tokens instead of %u: dense "
          "weights stream as experts do then, which have %s",
          td_dev_name(d->dev), d->long_steps.prefill_chunk, plan->prefill_chunk,
          td_size(d->long_steps.stream_bytes).text);
}

// Which experts go to the GPU: whole layers, and a cache. With --expert-device cpu no layers, and a
// cache only if its size is given.
static void place_experts(td_devices *d, const td_devices_opts *opts, const td_model *model,
                          const td_gpu_need *need, const td_gpu_plan *plan) {
  const uint32_t n_layers = td_model_config_of(model)->n_layers;
  uint64_t layer_bytes[TD_MAX_LAYERS];
  for (uint32_t i = 0; i < n_layers; i++)
    layer_bytes[i] = td_model_expert_bytes(model, i);
  td_expert_cache_size size;
  td_expert_cache_parse(&size, opts->runtime->expert_cache, NULL); // was checked
  if (opts->has_drive) size = (td_expert_cache_size){.bytes = 0};
  const bool has_layers = opts->runtime->experts == TD_EXPERTS_AUTO && !opts->has_drive;
  td_gpu_experts own = {.n_layers = 0};
  if (has_layers || !size.is_auto) {
    own = td_gpu_experts_plan(need, d->held_bytes, layer_bytes, n_layers, has_layers, &size);
  }
  if (d->n_peers && !opts->is_for_prefill && !opts->is_for_decode) {
    const td_gpu_shared_experts shared = td_gpu_share_experts(&own, layer_bytes, n_layers,
                                                              d->n_peers + 1);
    own = shared.first;
    d->peer_cache_bytes = shared.peer_bytes;
    d->is_cache_fixed = shared.is_fixed;
  }
  d->n_gpu_expert_layers = own.n_layers;
  d->cache_bytes = own.cache_bytes;
  d->held_bytes += own.layers_bytes + own.cache_bytes;
  td_dense_size dense[TD_MAX_LAYERS];
  for (uint32_t i = 0; i < n_layers; i++)
    dense[i] = td_dense_size_of(td_model_layer(model, i));
  plan_longer(d, opts, model, need, plan, dense);
  const td_gpu_pair pair = td_gpu_pair_plan(need, plan, own.cache_bytes, dense, n_layers);
  if (opts->is_for_prefill) place_for_prefill(d, &pair);
  if (opts->is_for_decode) d->stream_bytes = 0;
  if (opts->is_for_decode && has_layers && size.is_auto) d->cache_bytes = pair.cache_bytes;
}

// Divides the GPU memory left after the weights; the KV cache gets the rest.
static void plan_memory(td_devices *d, const td_devices_opts *opts, const td_model *model,
                        uint64_t n_free) {
  const td_gpu_need need = need_of(d, opts, model, n_free);
  const td_gpu_plan plan = td_gpu_plan_make(&need);
  d->prefill_chunk = plan.prefill_chunk;
  d->stream_bytes = plan.stream_bytes;
  d->held_bytes += plan.chunk_bytes + plan.decode_bytes + plan.stream_bytes;
  td_debug("%s: %s for weights, %s for experts that stream, %s for prefill steps "
           "of %u tokens, of %s",
           td_dev_name(d->dev), td_size(need.weight_bytes).text, td_size(plan.stream_bytes).text,
           td_size(plan.chunk_bytes).text, plan.prefill_chunk, td_size(n_free).text);
  if (d->expert_dev) place_experts(d, opts, model, &need, &plan);
}

// With a GPU, one CPU next to it is left free for the thread that drives the GPU. Sharing that CPU
// with a member of the thread pool would delay all other members.
static td_status open_cpu(td_devices *d, const td_devices_opts *opts, td_err *err) {
  td_dev_opts cpu = dev_opts(opts, "cpu");
  cpu_set_t before;
  const bool is_chosen = cpu.n_threads == 0 && td_cpu_count() > 1;
  if (is_chosen) cpu.n_threads = td_cpu_count() - 1;
  const bool is_less = is_chosen && td_cpus_leave_one(td_dev_node(d->dev), &before);
  td_status st = td_dev_open(&d->expert_dev, &cpu, err);
  if (is_less) sched_setaffinity(0, sizeof before, &before);
  if (cpu.n_threads) d->n_threads = cpu.n_threads;
  return st;
}

static td_status open_experts(td_devices *d, const td_devices_opts *opts, const td_model *model,
                              uint64_t n_free, td_err *err) {
  td_status st = open_cpu(d, opts, err);
  if (st != TD_OK) return st;
  d->stream_from = opts->runtime->stream_from;
  if (!d->stream_from) {
    d->stream_from = td_stream_from(model, opts->runtime->n_threads, td_dev_link_gbps(d->dev));
  }
  d->held_bytes -= td_model_stats_of(model).expert_bytes;
  plan_memory(d, opts, model, n_free);
  uint64_t n_bytes = 0;
  uint32_t n_layers = 0;
  for (uint32_t i = d->n_gpu_expert_layers; i < td_model_config_of(model)->n_layers; i++) {
    n_bytes += td_model_expert_bytes(model, i);
    n_layers += td_model_expert_bytes(model, i) > 0;
  }
  td_info("%s computes the experts of %u layers, %s", td_dev_name(d->expert_dev), n_layers,
          td_size(n_bytes).text);
  return TD_OK;
}

// TD_EINVAL: the GPU rounds activations for nothing. INT8 may be for 4-bit experts on the CPU.
static td_status check_a8(const td_devices *d, const td_devices_opts *opts,
                          const td_model_stats *stats, td_err *err) {
  const td_activations a8 = opts->runtime->activations;
  const bool is_int8 = a8 == TD_ACTIVATIONS_INT8;
  if (a8 != TD_ACTIVATIONS_FP8 && !is_int8) return TD_OK;
  const uint32_t n = stats->a8[a8].n_matrices;
  if (!n && !(is_int8 && d->placement.experts_on_cpu)) {
    return td_fail(err, TD_EINVAL,
                   "--activations %s: the model has no %s matrices with scales of rows or of 128 "
                   "columns, which is what a GPU multiplies so: give --activations auto%s",
                   is_int8 ? "int8" : "fp8", is_int8 ? "INT8" : "FP8",
                   is_int8 ? ", or --device cpu" : "");
  }
  td_info("%s: --activations %s: prompts are rounded to %s for %u of the model's %u matrices",
          td_dev_name(d->dev), is_int8 ? "int8" : "fp8", is_int8 ? "INT8" : "E4M3", n,
          stats->n_matrices);
  return TD_OK;
}

// What drafts take of the GPU's memory: of two GPUs on both alike, since as many pages are to fit.
static void plan_drafts(td_devices *d, const td_devices_opts *opts, const td_model *model,
                        uint64_t n_free) {
  const td_model_config *c = td_model_config_of(model);
  const td_model_stats stats = td_model_stats_of(model);
  const bool has_experts = !d->placement.experts_on_cpu;
  td_expert_cache_size cache;
  td_expert_cache_parse(&cache, opts->runtime->expert_cache, NULL); // was checked
  td_gpu_draft_need need = {
      .drafts = td_gpu_draft_bytes_of(model, opts->max_seqs),
      .free_bytes = n_free,
      .weight_bytes = has_experts ? stats.bytes : stats.bytes - stats.expert_bytes,
      .ctx_size = opts->runtime->ctx_size,
      .kv_dtype = opts->runtime->kv_dtype,
      .has_cache = !has_experts && (cache.is_auto || cache.bytes),
      .is_alone = !opts->is_for_prefill && !opts->is_for_decode && !d->n_peers,
  };
  if (!opts->drafts) return;
  if (has_experts && need.drafts.layer_bytes)
    need.expert_bytes = td_model_expert_bytes(model, c->n_layers);
  const td_gpu_drafts drafts = td_gpu_drafts_plan(&need, c);
  if (drafts.lacking) {
    td_info("%s: no tokens are drafted, which would take %s", td_dev_name(d->dev),
            td_size(drafts.lacking).text);
  }
  if (!drafts.are_verified) return;
  d->max_drafts = td_draft_max(td_attn_has_states(c));
  d->has_draft_layer = drafts.has_layer;
  d->draft_bytes = drafts.bytes;
}

td_status td_devices_open(td_devices *out, const td_devices_opts *opts, const td_model *model,
                          td_err *err) {
  const td_runtime_opts *runtime = opts->runtime;
  *out = (td_devices){.n_threads = runtime->n_threads ? runtime->n_threads : td_cpu_count()};
  const td_model_stats stats = td_model_stats_of(model);
  td_status st = open_dev(out, opts, td_model_config_of(model), &stats, err);
  if (st != TD_OK) return st;
  uint64_t n_free = td_dev_free_vram_bytes(out->dev);
  for (uint32_t i = 0; i < out->n_peers; i++) { // all hold as much
    const uint64_t n = td_dev_free_vram_bytes(out->peers[i]);
    if (n < n_free) n_free = n;
  }
  if (opts->gpu_bytes > n_free && n_free) {
    td_info("%s: %s of its memory are free, of %s that the server divides", td_dev_name(out->dev),
            td_size(n_free).text, td_size(opts->gpu_bytes).text);
  }
  if (opts->gpu_bytes && n_free) n_free = opts->gpu_bytes;
  out->placement = td_placement_of(runtime, model, n_free);
  out->held_bytes = stats.bytes;
  out->prefill_chunk = runtime->prefill_chunk ? runtime->prefill_chunk
                                              : td_engine_prefill_chunk(td_model_config_of(model));
  out->max_drafts = opts->drafts ? td_draft_max(td_attn_has_states(td_model_config_of(model))) : 0;
  if (!out->placement.is_discrete) return TD_OK;
  out->max_drafts = 0;
  td_info("%s computes, %.1f GiB of its memory are free", td_dev_name(out->dev), td_gib(n_free));
  st = check_a8(out, opts, &stats, err);
  if (st != TD_OK) return st;
  plan_drafts(out, opts, model, n_free);
  out->held_bytes += out->draft_bytes;
  if (out->placement.experts_on_cpu) return open_experts(out, opts, model, n_free, err);
  plan_memory(out, opts, model, n_free);
  return TD_OK;
}

void td_devices_close(td_devices *devices) {
  td_dev_close(devices->expert_dev);
  for (uint32_t i = 0; i < devices->n_peers; i++)
    td_dev_close(devices->peers[i]);
  td_dev_close(devices->dev);
}

void td_devices_use_peers(const td_devices *devices, td_engine_opts *out) {
  out->peer_devs = devices->peers;
  out->n_peers = devices->n_peers;
  out->parallel_tokens = devices->parallel_tokens;
}

void td_devices_open_long_engine(td_engine **out, td_devices *d, const td_model *model,
                                 const td_engine_opts *opts) {
  td_engine_opts long_opts = *opts;
  td_err err;
  long_opts.max_step_tokens = d->long_steps.prefill_chunk;
  long_opts.stream_bytes = d->long_steps.stream_bytes;
  long_opts.n_streamed_dense = d->long_steps.n_streamed_dense;
  long_opts.break_even_tokens = d->stream_from;
  long_opts.is_confinable = false; // nothing runs beside it
  td_dev_drop_weights(d->dev);
  if (td_engine_open(out, model, d->dev, &long_opts, &err) == TD_OK) {
    td_debug("%s: steps of %u tokens in the memory of dense weights", td_dev_name(d->dev),
             d->long_steps.prefill_chunk);
    return;
  }
  td_warn("%s: long prompts take several steps: %s", td_dev_name(d->dev), err.msg);
  d->long_steps.prefill_chunk = 0;
}

static void pin_first(td_dev *dev, const td_weight *w) {
  if (w->data) td_dev_is_pinning(dev, w->data, td_weight_data_bytes(w));
}

// What streams: a system may let a driver pin only a part of its memory.
static void pin_streamed_first(const td_devices *d, const td_model *model) {
  const td_model_config *c = td_model_config_of(model);
  for (uint32_t i = 0; i < c->n_layers; i++) {
    td_layer layer = *td_model_layer(model, i);
    const uint32_t n = layer.is_moe && i >= d->n_gpu_expert_layers ? c->n_experts : 0;
    for (uint32_t k = 0; k < n; k++) {
      pin_first(d->dev, &layer.gate[k]);
      if (layer.up) pin_first(d->dev, &layer.up[k]);
      pin_first(d->dev, &layer.down[k]);
    }
    const bool is_streamed = i + d->n_streamed_dense >= c->n_layers;
    for (int part = 0; is_streamed && part < TD_N_DENSE_PARTS; part++) {
      td_weight *matrices[TD_DENSE_MAX_MATRICES];
      const uint32_t n_matrices = td_dense_matrices(&layer, (td_dense_part)part, matrices);
      for (uint32_t k = 0; k < n_matrices; k++)
        pin_first(d->dev, matrices[k]);
    }
  }
}

void td_devices_use_memory(const td_devices *devices, const td_model *model,
                           const td_expert_arena *arena) {
  const td_stripes stripes = td_model_stripes(model);
  size_t n_bytes;
  const void *memory = arena ? td_expert_arena_memory(arena, &n_bytes)
                             : td_model_memory(model, &n_bytes);
  td_dev_use_stripes(devices->dev, &stripes);
  if (devices->expert_dev) td_dev_use_stripes(devices->expert_dev, &stripes);
  for (uint32_t i = 0; i < devices->n_peers; i++)
    td_dev_use_stripes(devices->peers[i], &stripes);
  if (!devices->stream_bytes && !devices->cache_bytes && !devices->peer_cache_bytes) return;
  for (uint32_t i = 0; i < devices->n_peers; i++)
    td_dev_follow_pins(devices->peers[i], devices->dev);
  td_dev_pin(devices->dev, memory, n_bytes, arena != NULL);
  if (!arena) pin_streamed_first(devices, model);
}

void td_devices_use_cache(const td_devices *devices, const td_model *model, td_engine_opts *out) {
  size_t n_bytes;
  if (!devices->cache_bytes && !devices->peer_cache_bytes) return;
  if (!devices->is_cache_fixed && !td_model_memory(model, &n_bytes)) {
    td_info(
        "no experts are cached on the GPU: they are mapped from files; give --weights resident");
    return;
  }
  out->cache_bytes = devices->cache_bytes;
  out->is_cache_fixed = devices->is_cache_fixed;
  if (!devices->peer_cache_bytes) return;
  out->cache_peer = devices->peers[0];
  out->peer_cache_bytes = devices->peer_cache_bytes;
  out->peer_always = devices->parallel_tokens > 0;
}
