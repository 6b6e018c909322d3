#include "worker/devices.h"

#include <string.h>

#include "base/log.h"
#include "worker/kv_plan.h"

#define GIB ((double)(1 << 30))

static td_status open_dev(td_devices *d, const td_dev_opts *opts, td_expert_place place,
                          const td_model_stats *stats, td_err *err) {
  if (place == TD_EXPERTS_GPU && strcmp(opts->kind, "cpu") == 0) {
    return td_fail(err, TD_EINVAL, "--experts gpu: give --device cuda, too, or leave it out");
  }
  td_dev_opts dev = *opts;
  dev.need_bytes = stats->bytes;
  if (place != TD_EXPERTS_GPU) dev.need_bytes -= stats->expert_bytes;
  td_status st = td_dev_open(&d->dev, &dev, err);
  return st == TD_ENOMEM && place == TD_EXPERTS_GPU ? td_err_prefix(err, "--experts gpu") : st;
}

// The experts' place beside a GPU. Operators and a context need memory, too.
static bool is_for_cpu(td_expert_place place, const td_model_stats *stats, uint64_t n_free) {
  if (place != TD_EXPERTS_AUTO) return place == TD_EXPERTS_CPU && stats->expert_bytes;
  return stats->expert_bytes && n_free < stats->bytes + TD_KV_DEVICE_SPARE;
}

td_status td_devices_open(td_devices *out, const td_dev_opts *opts, td_expert_place place,
                          const td_model *model, td_err *err) {
  *out = (td_devices){.dev = NULL};
  const td_model_stats stats = td_model_stats_of(model);
  td_status st = open_dev(out, opts, place, &stats, err);
  if (st != TD_OK) return st;
  const uint64_t n_free = td_dev_own_free_bytes(out->dev);
  out->has_own_memory = n_free != 0;
  out->weight_bytes = stats.bytes;
  if (!out->has_own_memory) return TD_OK;
  if (is_for_cpu(place, &stats, n_free)) {
    td_dev_opts cpu = *opts;
    cpu.kind = "cpu";
    st = td_dev_open(&out->expert_dev, &cpu, err);
    if (st != TD_OK) return st;
    out->weight_bytes -= stats.expert_bytes;
  }
  td_info("%s computes with %.1f GiB of weights, %.1f GiB of its memory are free",
          td_dev_name(out->dev), (double)out->weight_bytes / GIB, (double)n_free / GIB);
  if (out->expert_dev) {
    td_info("%s computes the experts, %.1f GiB", td_dev_name(out->expert_dev),
            (double)stats.expert_bytes / GIB);
  }
  return TD_OK;
}

void td_devices_close(td_devices *devices) {
  td_dev_close(devices->expert_dev);
  td_dev_close(devices->dev);
}
