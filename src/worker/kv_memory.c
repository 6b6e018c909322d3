// src/worker/kv_memory.c - sizing the KV pool, and the device's copy of it.
#include "worker/kv_memory.h"

#include "base/mem_info.h"

static td_status attach(td_kv_memory *m, const td_worker_opts *opts, const td_devices *devices,
                        const td_model *model, uint64_t draft_bytes, td_err *err) {
  const td_model_config *config = td_model_config_of(model);
  // weights are uploaded later, so they still count against free memory
  const bool is_own = devices->placement.is_discrete;
  const bool is_shared = is_own && opts->role != TD_ROLE_BOTH;
  const uint64_t host = td_memory_available_bytes();
  td_kv_need need = {
      .max_position = config->max_position,
      // Weights in shared memory are already excluded from the available memory.
      .weight_bytes = opts->weights_fd && !is_own ? 0 : devices->held_bytes,
      .available_bytes = is_own ? td_dev_free_vram_bytes(devices->dev)
                                : host - (draft_bytes < host ? draft_bytes : host),
      .is_device = is_own,
      .host_bytes = is_shared ? host : 0,
      .ctx_size = opts->runtime.ctx_size,
      .kv_tokens = opts->kv_tokens,
      .max_batch = opts->max_batch,
  };
  td_kv_layout_to_need(&m->layout, &need);
  return td_kv_pool_attach(&m->pool, TD_WORKER_KV_FD, &need, err);
}

static td_status open_transfer(td_kv_memory *m, size_t n_bytes, td_err *err) {
  td_status st = td_dev_register(m->dev, m->pool.pages, n_bytes, err);
  if (st != TD_OK)
    return td_err_prefix(err, "KV pages that two GPUs share; --disaggregate off does without");
  m->is_registered = true;
  const td_kv_transfer_opts opts = {.dev = m->dev,
                                    .dev_pages = m->dev_pages,
                                    .host_pages = m->pool.pages,
                                    .versions = m->pool.versions,
                                    .n_pages = m->pool.plan.n_pages,
                                    .layout = m->layout};
  return td_kv_transfer_open(&m->transfer, &opts, err);
}

td_status td_kv_memory_open(td_kv_memory *out, const td_worker_opts *opts,
                            const td_devices *devices, const td_model *model, uint64_t draft_bytes,
                            td_err *err) {
  *out = (td_kv_memory){
      .dev = devices->dev,
      .layout = td_kv_layout_of(td_model_config_of(model), opts->runtime.kv_dtype, 0)};
  td_status st = attach(out, opts, devices, model, draft_bytes, err);
  out->pages = out->pool.pages;
  if (st != TD_OK || !devices->placement.is_discrete) return st;
  const size_t n_bytes = out->pool.plan.n_pages * td_kv_layout_page_bytes(&out->layout);
  st = td_dev_alloc(out->dev, &out->dev_pages, n_bytes, err);
  if (st != TD_OK) {
    return td_err_prefix(err, "a KV cache of %u tokens; make --ctx-size smaller",
                         out->pool.plan.n_pages * out->layout.page_tokens);
  }
  out->pages = out->dev_pages;
  return out->pool.pages ? open_transfer(out, n_bytes, err) : TD_OK;
}

void td_kv_memory_close(td_kv_memory *m) {
  td_kv_transfer_close(m->transfer);
  if (m->is_registered) td_dev_unregister(m->dev, m->pool.pages);
  if (m->dev_pages) td_dev_free(m->dev, m->dev_pages);
  td_kv_pool_close(&m->pool);
  *m = (td_kv_memory){.pages = NULL};
}
