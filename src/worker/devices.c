#include "worker/devices.h"

#include <string.h>

#include "base/log.h"
#include "engine/engine.h"
#include "worker/kv_plan.h"

#define GIB ((double)(1 << 30))

// Of what the weights leave of a GPU's memory beside the CPU's experts, the parts of 8 that experts
// of prompts pass through, and that activations of a longer prefill_chunk have, and how much of
// either is enough.
enum { PART = 8, MOST_STREAM_BYTES = 1536 << 20, MOST_CHUNK = 8192, CHUNK_ROUND = 64 };

static td_status open_dev(td_devices *d, const td_devices_opts *opts, const td_model_stats *stats,
                          td_err *err) {
  td_dev_opts dev = opts->dev;
  if (opts->experts == TD_EXPERTS_GPU && strcmp(dev.kind, "cpu") == 0) {
    return td_fail(err, TD_EINVAL, "--experts gpu: give --device cuda, too, or leave it out");
  }
  dev.need_bytes = stats->bytes;
  if (opts->experts != TD_EXPERTS_GPU) dev.need_bytes -= stats->expert_bytes;
  td_status st = td_dev_open(&d->dev, &dev, err);
  return st == TD_ENOMEM && opts->experts == TD_EXPERTS_GPU ? td_err_prefix(err, "--experts gpu")
                                                            : st;
}

// The experts' place beside a GPU. Operators and a context need memory, too.
static bool is_for_cpu(td_expert_place place, const td_model_stats *stats, uint64_t n_free) {
  if (place != TD_EXPERTS_AUTO) return place == TD_EXPERTS_CPU && stats->expert_bytes;
  return stats->expert_bytes && n_free < stats->bytes + TD_KV_DEVICE_SPARE;
}

static uint64_t at_most(uint64_t n, uint64_t most) {
  return n < most ? n : most;
}

// Shares out what the weights leave of the GPU's memory; what is left is for the KV cache.
static void plan_streaming(td_devices *d, const td_devices_opts *opts, const td_model *model,
                           uint64_t n_free) {
  const td_model_config *c = td_model_config_of(model);
  const uint64_t held = d->held_bytes + TD_KV_DEVICE_SPARE;
  const uint64_t part = n_free > held ? (n_free - held) / PART : 0;
  const uint64_t of_token = td_engine_step_bytes_per_token(c, td_dev_act_dtype(d->dev));
  const uint32_t usual = td_engine_prefill_chunk(c);
  uint32_t n = (uint32_t)at_most(part / of_token, MOST_CHUNK) / CHUNK_ROUND * CHUNK_ROUND;
  if (opts->prefill_chunk) n = opts->prefill_chunk;
  d->prefill_chunk = n > usual || opts->prefill_chunk ? n : usual;
  d->stream_bytes = at_most(part, MOST_STREAM_BYTES);
  d->held_bytes += d->stream_bytes;
  if (n > usual) d->held_bytes += (n - usual) * of_token;
}

static td_status open_experts(td_devices *d, const td_devices_opts *opts, const td_model *model,
                              uint64_t n_free, td_err *err) {
  const uint64_t expert_bytes = td_model_stats_of(model).expert_bytes;
  td_dev_opts cpu = opts->dev;
  cpu.kind = "cpu";
  td_status st = td_dev_open(&d->expert_dev, &cpu, err);
  if (st != TD_OK) return st;
  d->held_bytes -= expert_bytes;
  plan_streaming(d, opts, model, n_free);
  td_info("%s computes the experts, %.2f GiB", td_dev_name(d->expert_dev),
          (double)expert_bytes / GIB);
  return TD_OK;
}

td_status td_devices_open(td_devices *out, const td_devices_opts *opts, const td_model *model,
                          td_err *err) {
  *out = (td_devices){.dev = NULL};
  const td_model_stats stats = td_model_stats_of(model);
  td_status st = open_dev(out, opts, &stats, err);
  if (st != TD_OK) return st;
  const uint64_t n_free = td_dev_own_free_bytes(out->dev);
  out->has_own_memory = n_free != 0;
  out->held_bytes = stats.bytes;
  out->prefill_chunk = opts->prefill_chunk ? opts->prefill_chunk
                                           : td_engine_prefill_chunk(td_model_config_of(model));
  if (!out->has_own_memory) return TD_OK;
  td_info("%s computes, %.1f GiB of its memory are free", td_dev_name(out->dev),
          (double)n_free / GIB);
  return is_for_cpu(opts->experts, &stats, n_free) ? open_experts(out, opts, model, n_free, err)
                                                   : TD_OK;
}

void td_devices_close(td_devices *devices) {
  td_dev_close(devices->expert_dev);
  td_dev_close(devices->dev);
}
