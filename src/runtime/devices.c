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
                       .cpus_from_end = opts->role == TD_ROLE_PREFILL,
                       .ends_with_process = opts->ends_with_process};
}

// The devices that compute prompts together; one: dev alone.
static td_device_list devices_of(const td_devices_opts *opts, const td_model_config *config) {
  td_device_list list = {.index = {0}, .n = 1};
  td_device_list_parse(&list, opts->runtime->devices, NULL); // was checked
  if (opts->is_alone || opts->role == TD_ROLE_DECODE || !td_shares_prompts(opts->runtime, config))
    list.n = 1;
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

static void place_longer(td_devices *d, const td_long_steps *steps) {
  d->long_steps = *steps;
  const char *tokens = td_test_var_get(TD_ENV_LONGER);
  if (tokens && d->stream_bytes) {
    d->long_steps.prefill_chunk = (uint32_t)strtoul(tokens, NULL, 10);
    d->long_steps.stream_bytes = d->stream_bytes;
    d->long_steps.work.expert_bytes = (uint64_t)1 << 40; // as if copies were all
  }
  if (!d->long_steps.prefill_chunk) return;
  td_info("%s: while nothing decodes, long prompts have steps of %u tokens instead of %u: dense "
          "weights stream as experts do then, which have %s",
          td_dev_name(d->dev), d->long_steps.prefill_chunk, d->prefill_chunk,
          td_size(d->long_steps.stream_bytes).text);
}

static void place_experts(td_devices *d, const td_devices_opts *opts, const td_division *division,
                          const td_card_wish *wish) {
  d->n_gpu_expert_layers = division->own.n_layers;
  d->cache_bytes = division->own.cache_bytes;
  d->peer_cache_bytes = division->peer_cache_bytes;
  d->is_cache_fixed = division->is_cache_fixed;
  switch (opts->role) {
  case TD_ROLE_PREFILL: place_for_prefill(d, &division->pair); return;
  case TD_ROLE_DECODE:
    d->stream_bytes = 0;
    if (wish->keeps_layers && !wish->has_drive && wish->cache.is_auto)
      d->cache_bytes = division->pair.cache_bytes;
    return;
  default:
    if (!d->n_peers && !opts->is_alone) place_longer(d, &division->long_steps);
  }
}

static void place_drafts(td_devices *d, const td_model *model, const td_gpu_drafts *drafts) {
  if (drafts->lacking) {
    td_info("%s: no tokens are drafted, which would take %s", td_dev_name(d->dev),
            td_size(drafts->lacking).text);
  }
  if (!drafts->are_verified) return;
  d->max_drafts = td_draft_max(td_attn_has_states(td_model_config_of(model)));
  d->has_draft_layer = drafts->has_layer;
  d->draft_bytes = drafts->bytes;
}

// Divides the GPU memory left after the weights; the KV cache gets the rest. Of two GPUs drafts
// take as much of both, since as many pages are to fit.
static void divide_memory(td_devices *d, const td_devices_opts *opts, const td_model *model,
                          uint64_t n_free) {
  const td_runtime_opts *runtime = opts->runtime;
  td_plan_load load = td_plan_load_of(model);
  load.kv_dtype = runtime->kv_dtype;
  load.activations = runtime->activations;
  if (opts->drafts) load.drafts = td_gpu_draft_bytes_of(model, opts->max_seqs);
  td_card_wish wish = {.free_bytes = n_free,
                       .n_gpus = d->n_peers + 1,
                       .act_dtype = td_dev_act_dtype(d->dev),
                       .adds_f16 = td_dev_adds_f16(d->dev),
                       .role = opts->role,
                       .ctx_size = runtime->ctx_size,
                       .n_seqs = opts->max_seqs,
                       .kv_tokens = opts->kv_tokens,
                       .prefill_chunk = runtime->prefill_chunk,
                       .streams_experts = d->placement.experts_on_cpu,
                       .keeps_layers = runtime->experts == TD_EXPERTS_AUTO,
                       .has_drive = opts->has_drive,
                       .drafts = opts->drafts};
  td_expert_cache_parse(&wish.cache, runtime->expert_cache, NULL); // was checked
  const td_division division = td_divide(&load, &wish);
  place_drafts(d, model, &division.drafts);
  d->held_bytes = division.held_bytes;
  d->prefill_chunk = division.memory.prefill_chunk;
  d->stream_bytes = division.memory.stream_bytes;
  td_debug("%s: %s for weights, %s for experts that stream, %s for prefill steps "
           "of %u tokens, of %s",
           td_dev_name(d->dev), td_size(division.weight_bytes).text,
           td_size(division.memory.stream_bytes).text, td_size(division.memory.chunk_bytes).text,
           division.memory.prefill_chunk, td_size(n_free).text);
  if (d->expert_dev) place_experts(d, opts, &division, &wish);
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
  if (!d->stream_from)
    d->stream_from = td_stream_from(model, opts->runtime->n_threads, td_dev_link_gbps(d->dev));
  divide_memory(d, opts, model, n_free);
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
  const td_dev_opts cpu = dev_opts(opts, "cpu");
  if (st == TD_OK && !out->placement.experts_on_cpu && td_model_vision(model))
    st = td_dev_open(&out->vision_dev, &cpu, err);
  if (st != TD_OK) return st;
  if (out->placement.experts_on_cpu) return open_experts(out, opts, model, n_free, err);
  divide_memory(out, opts, model, n_free);
  return TD_OK;
}

void td_devices_close(td_devices *devices) {
  td_vision_close(devices->vision);
  td_dev_close(devices->vision_dev);
  td_dev_close(devices->expert_dev);
  for (uint32_t i = 0; i < devices->n_peers; i++)
    td_dev_close(devices->peers[i]);
  td_dev_close(devices->dev);
}

td_status td_devices_open_vision(td_devices *d, const td_model *model, td_err *err) {
  td_dev *cpu = d->vision_dev;
  if (!td_model_vision(model)) return TD_OK;
  if (!cpu) cpu = d->expert_dev ? d->expert_dev : d->dev;
  return td_vision_open(&d->vision, model, cpu, d->dev, err);
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
