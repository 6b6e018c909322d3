#include "worker/devices.h"

#include <sched.h>
#include <string.h>

#include "base/cpus.h"
#include "base/log.h"
#include "engine/engine.h"
#include "worker/kv_plan.h"

#define GIB ((double)(1 << 30))

// Of what the weights leave of a GPU's memory beside the CPU's experts, an eighth is for those of
// prompts to pass through, and a quarter for the activations of a longer prefill_chunk: as much of
// either as is of use.
enum { STREAM_PART = 8, CHUNK_PART = 4, CHUNK_ROUND = 64 };
enum { MOST_STREAM_BYTES = 1536 << 20, MOST_CHUNK = 32768 };
enum { LEAST_CTX = 8192 }; // tokens for which a model is not said to fit without

static td_status open_dev(td_devices *d, const td_devices_opts *opts, const td_model_stats *stats,
                          td_err *err) {
  td_dev_opts dev = opts->dev;
  if (opts->experts == TD_EXPERTS_GPU && strcmp(dev.kind, "cpu") == 0) {
    return td_fail(err, TD_EINVAL, "--expert-device gpu: give --device cuda, too, or leave it out");
  }
  dev.need_bytes = stats->bytes;
  if (opts->experts != TD_EXPERTS_GPU) dev.need_bytes -= stats->expert_bytes;
  td_status st = td_dev_open(&d->dev, &dev, err);
  return st == TD_ENOMEM && opts->experts == TD_EXPERTS_GPU
             ? td_err_prefix(err, "--expert-device gpu")
             : st;
}

static uint64_t at_most(uint64_t n, uint64_t most) {
  return n < most ? n : most;
}

// Bytes of a GPU's memory for the keys and values of a context as it is asked for, else of at most
// n_tokens.
static uint64_t context_bytes(const td_devices_opts *opts, const td_model_config *c,
                              uint32_t n_tokens) {
  uint64_t n = opts->ctx_size ? opts->ctx_size : at_most(c->max_position, n_tokens);
  return n * td_engine_kv_bytes_per_token(c, TD_BF16);
}

// The experts' place beside a GPU. Operators and a context need memory, too.
static bool is_for_cpu(const td_devices_opts *opts, const td_model *model, uint64_t n_free) {
  const td_model_stats stats = td_model_stats_of(model);
  if (!stats.expert_bytes || opts->experts == TD_EXPERTS_GPU) return false;
  if (opts->experts == TD_EXPERTS_CPU) return true;
  uint64_t kv_bytes = context_bytes(opts, td_model_config_of(model), LEAST_CTX);
  return n_free < stats.bytes + TD_KV_DEVICE_SPARE + kv_bytes;
}

// Shares out what the weights leave of the GPU's memory; what is left is for the KV cache.
static void plan_streaming(td_devices *d, const td_devices_opts *opts, const td_model *model,
                           uint64_t n_free) {
  const td_model_config *c = td_model_config_of(model);
  const uint64_t held = d->held_bytes + TD_KV_DEVICE_SPARE;
  const uint64_t left = n_free > held ? n_free - held : 0;
  const uint64_t of_token = td_engine_step_bytes_per_token(c, td_dev_act_dtype(d->dev));
  const uint32_t usual = td_engine_prefill_chunk(c);
  uint32_t n = (uint32_t)at_most(left / CHUNK_PART / of_token, MOST_CHUNK);
  n -= n % CHUNK_ROUND;
  if (opts->prefill_chunk) n = opts->prefill_chunk;
  d->prefill_chunk = n > usual || opts->prefill_chunk ? n : usual;
  d->stream_bytes = at_most(left / STREAM_PART, MOST_STREAM_BYTES);
  d->held_bytes += d->stream_bytes;
  if (n > usual) d->held_bytes += (n - usual) * of_token;
}

// Layers of experts that fit beside it all and two contexts, into half of what those leave.
static void plan_own_layers(td_devices *d, const td_devices_opts *opts, const td_model *model,
                            uint64_t n_free) {
  const td_model_config *c = td_model_config_of(model);
  uint64_t kv_bytes = 2 * context_bytes(opts, c, TD_KV_DEFAULT_CTX);
  uint64_t held = d->held_bytes + TD_KV_DEVICE_SPARE + kv_bytes;
  uint64_t left = n_free > held ? (n_free - held) / 2 : 0;
  for (; d->n_own_layers < c->n_layers; d->n_own_layers++) {
    uint64_t n = td_model_expert_bytes(model, d->n_own_layers);
    if (n > left) break;
    left -= n;
    d->held_bytes += n;
  }
}

// Beside a GPU, one CPU next to it is left to the thread that drives it, and else waits asleep: if
// that took turns with a member of the team, the others would wait for both.
static td_status open_cpu(td_devices *d, const td_devices_opts *opts, td_err *err) {
  td_dev_opts cpu = opts->dev;
  cpu_set_t before;
  cpu.kind = "cpu";
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
  d->held_bytes -= td_model_stats_of(model).expert_bytes;
  plan_streaming(d, opts, model, n_free);
  if (opts->experts == TD_EXPERTS_AUTO) plan_own_layers(d, opts, model, n_free);
  uint64_t n_bytes = 0;
  uint32_t n_layers = 0;
  for (uint32_t i = d->n_own_layers; i < td_model_config_of(model)->n_layers; i++) {
    n_bytes += td_model_expert_bytes(model, i);
    n_layers += td_model_expert_bytes(model, i) > 0;
  }
  td_info("%s computes the experts of %u layers, %.2f GiB", td_dev_name(d->expert_dev), n_layers,
          (double)n_bytes / GIB);
  return TD_OK;
}

td_status td_devices_open(td_devices *out, const td_devices_opts *opts, const td_model *model,
                          td_err *err) {
  *out = (td_devices){.n_threads = opts->dev.n_threads ? opts->dev.n_threads : td_cpu_count()};
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
  return is_for_cpu(opts, model, n_free) ? open_experts(out, opts, model, n_free, err) : TD_OK;
}

void td_devices_close(td_devices *devices) {
  td_dev_close(devices->expert_dev);
  td_dev_close(devices->dev);
}
