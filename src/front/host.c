// src/front/host.c - a model's life: asleep, loaded, asleep again; and who may use it meanwhile.
#include "front/host.h"

#include <malloc.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "api/receipt.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/units.h"
#include "front/serve_impl.h"
#include "model/fingerprint.h"
#include "runtime/weights.h"

// ---- state ------------------------------------------------------------------------------------

bool td_host_is_loaded(const td_host *h) {
  return h->backend || h->is_reading;
}

uint32_t td_host_n_running(const td_host *h) {
  return h->backend ? td_backend_n_running(h->backend) : 0;
}

uint32_t td_host_n_waiting(const td_host *h) {
  uint32_t n = h->backend ? td_backend_n_waiting(h->backend) : 0;
  for (const td_host_use *use = h->first; use; use = use->next)
    n++;
  return n;
}

bool td_host_accepts(const td_host *h) {
  return h->backend && !h->is_unloading && td_backend_accepts(h->backend);
}

td_host_state td_host_state_of(const td_host *h) {
  if (h->is_unloading) return TD_HOST_UNLOADING;
  if (h->is_reading) return TD_HOST_LOADING;
  if (!h->backend) return h->has_failed ? TD_HOST_FAILED : TD_HOST_SLEEPING;
  switch (td_backend_state_of(h->backend)) {
  case TD_BACKEND_LOADING: return TD_HOST_LOADING;
  case TD_BACKEND_READY: return TD_HOST_READY;
  case TD_BACKEND_STUCK: return TD_HOST_STUCK;
  case TD_BACKEND_FAILED: break;
  }
  return TD_HOST_FAILED;
}

// ---- uses -------------------------------------------------------------------------------------

static void queue(td_host *h, td_host_use *use) {
  if (!h->first) h->wanted_ns = td_clock_ns();
  use->waits = true;
  use->prev = h->last;
  use->next = NULL;
  *(h->last ? &h->last->next : &h->first) = use;
  h->last = use;
}

static void unqueue(td_host_use *use) {
  td_host *h = use->host;
  *(use->prev ? &use->prev->next : &h->first) = use->next;
  *(use->next ? &use->next->prev : &h->last) = use->prev;
  use->prev = use->next = NULL;
  use->waits = false;
}

static void begin_use(td_host *h) {
  h->n_inside++;
  h->used_ns = td_clock_ns();
}

bool td_host_enter(td_host *h, td_host_use *use) {
  use->host = h;
  if (td_host_accepts(h) && !h->is_leaving && !h->first) {
    begin_use(h);
    return true;
  }
  queue(h, use);
  td_hosts_update(&h->serve->hosts);
  return false;
}

void td_host_leave(td_host_use *use) {
  td_host *h = use->host;
  if (!h) return;
  if (use->waits) {
    unqueue(use);
  } else {
    h->n_inside--;
    h->used_ns = td_clock_ns();
  }
  use->host = NULL;
  td_hosts_update(&h->serve->hosts);
}

void td_host_keep(td_host *h, const int64_t *ms) {
  const uint64_t usual_ns = h->serve->hosts.sleep_ns;
  h->keep_ns = !ms && !usual_ns ? UINT64_MAX
               : !ms            ? usual_ns
               : *ms < 0        ? UINT64_MAX
                                : (uint64_t)*ms * 1000000;
  td_hosts_update(&h->serve->hosts);
}

void td_host_admit(td_host *h) {
  while (h->first && td_host_accepts(h) && !h->is_leaving) {
    td_host_use *use = h->first;
    unqueue(use);
    begin_use(h);
    use->on_turn(use, NULL);
  }
}

// Only those who wait now: whoever comes later is worth another attempt.
void td_host_refuse(td_host *h) {
  td_host_use *last = h->last;
  h->has_just_failed = false;
  for (bool was_last = !last; !was_last && h->first;) {
    td_host_use *use = h->first;
    was_last = use == last;
    unqueue(use);
    use->host = NULL;
    use->on_turn(use, "the model could not be loaded; the server's log says why");
  }
}

// ---- loading ----------------------------------------------------------------------------------

// What is chosen before the workers open, of all that results are rounded by.
static void add_choices(const td_host *h, td_sha256 *sha) {
  const td_runtime_opts *r = &h->runtime;
  td_device_list list;
  td_device_list_parse(&list, r->devices, NULL); // was checked
  td_sha256_add(sha, TD_VERSION, sizeof TD_VERSION);
  td_sha256_add(sha, h->placement.device, strlen(h->placement.device) + 1);
  td_sha256_add(sha, &list.n, sizeof list.n);
  if (h->placement.is_discrete) { // two workers on CPUs compute what one does
    td_sha256_add(sha, r->expert_cache, strlen(r->expert_cache) + 1);
    td_sha256_add(sha, &h->is_split, sizeof h->is_split);
  }
#define X(type, field, option, least, most, in_kv)                                                 \
  if (in_kv) td_sha256_add(sha, &r->field, sizeof r->field);
  TD_RUNTIME_NUMBERS(X)
#undef X
}

// Fingerprint of all that determines KV content but what only READY tells: weights, KV format,
// activation precision, devices.
static td_status identify(td_host *h, td_err *err) {
  const td_runtime_opts *r = &h->runtime;
  const uint32_t page_tokens = TD_KV_PAGE_TOKENS;
  td_sha256 sha;
  td_sha256_begin(&sha);
  add_choices(h, &sha);
  td_sha256_add(&sha, &page_tokens, sizeof page_tokens);
  const bool has_drafts = r->draft != TD_DRAFT_OFF; // a layer for them has a part in pages
  td_sha256_add(&sha, &has_drafts, sizeof has_drafts);
  td_status st = td_model_fingerprint(&sha, r->model_dir, err);
  td_sha256_end(&sha, &h->kv_model);
  return st;
}

// Opens the directory that all models share, unless that is done. If another process uses it, the
// server runs without it.
static td_status open_kv_dir(td_host *h, td_err *err) {
  td_hosts *all = &h->serve->hosts;
  const td_options *o = &h->options;
  if (!o->kv_dir) return TD_OK;
  td_status st = identify(h, err);
  pthread_mutex_lock(&all->kv_dir_lock);
  if (st == TD_OK && !all->kv_dir) {
    st = td_kv_dir_open(&all->kv_dir, o->kv_dir, (uint64_t)(o->kv_dir_gib * (double)TD_GIB), err);
    if (st == TD_OK) {
      td_info("--kv-dir %s: %s of %.2f GiB are used", o->kv_dir,
              td_size(td_kv_dir_bytes(all->kv_dir)).text, o->kv_dir_gib);
    }
  }
  pthread_mutex_unlock(&all->kv_dir_lock);
  if (st != TD_EAGAIN) return st;
  td_warn("--kv-dir %s; serving without it", err->msg);
  return TD_OK;
}

// On the thread pool: reading a checkpoint may take minutes. Where the model goes is decided again
// each time, since other programs may have taken or freed memory.
static void load_weights(uv_work_t *work) {
  td_host *h = work->data;
  td_err *err = &h->load_err;
  err->code = TD_OK;
  td_status st = h->is_placed ? TD_OK : td_host_place(h, err);
  h->is_placed = false;
  if (st == TD_OK) st = open_kv_dir(h, err);
  if (st == TD_OK && h->options.receipts)
    st = td_model_digest(&h->weights, h->runtime.model_dir, err);
  const td_weights_opts opts = {.runtime = &h->runtime,
                                .canceled = &h->is_canceled,
                                .placement = h->placement,
                                .has_host_kv = h->is_split,
                                .arena_gib = h->options.weights.gib};
  uint32_t chunk = 0;
  if (st == TD_OK) st = td_weights_open(&h->weights_fd, &chunk, &opts, err);
  if (chunk && !h->wish.prefill_chunk) h->runtime.prefill_chunk = chunk;
  err->code = st;
}

// With the choices that the workers made from what the front gave them.
static void note_choices(td_host *h) {
  const td_wire_ready info = td_backend_info(h->backend);
  const bool is_first = !h->fingerprint[0];
  td_sha256 sha;
  td_digest digest;
  td_sha256_begin(&sha);
  add_choices(h, &sha);
  td_sha256_add(&sha, info.isa, strnlen(info.isa, sizeof info.isa));
  td_sha256_add(&sha, info.gpu, strnlen(info.gpu, sizeof info.gpu));
  if (h->placement.is_discrete) { // on CPUs no bit depends on it
    td_sha256_add(&sha, &info.prefill_chunk, sizeof info.prefill_chunk);
    td_sha256_add(&sha, &info.stream_tokens, sizeof info.stream_tokens);
  }
  td_sha256_end(&sha, &digest);
  td_buf place = TD_BUF_INIT;
  td_receipt_add_place(&place, info.gpu, info.isa);
  snprintf(h->computed_by, sizeof h->computed_by, "%s", td_buf_text(&place));
  td_buf_free(&place);
  char now[sizeof h->fingerprint];
  snprintf(now, sizeof now, "fp_%02x%02x%02x%02x%02x", digest.bytes[0], digest.bytes[1],
           digest.bytes[2], digest.bytes[3], digest.bytes[4]);
  if (strcmp(now, h->fingerprint) == 0) return;
  memcpy(h->fingerprint, now, sizeof now);
  char streaming[64] = "no experts stream";
  if (info.stream_tokens)
    snprintf(streaming, sizeof streaming, "experts stream from %u on", info.stream_tokens);
  td_info("%s: results are rounded %s %s: %s%s%s, prefill in steps of %u tokens, %s", h->name,
          is_first ? "as" : "otherwise from now on, as", now, info.isa, info.gpu[0] ? ", " : "",
          info.gpu, info.prefill_chunk, streaming);
}

static void on_state(void *ctx, td_backend_state state) {
  td_host *h = ctx;
  if (state == TD_BACKEND_READY) note_choices(h);
  if (state == TD_BACKEND_READY && h->load_ns) {
    td_host_note_weights(h);
    h->n_ctx = td_backend_info(h->backend).n_ctx;
    h->n_loads++;
    h->used_ns = td_clock_ns();
    td_serve_on_loaded(h->serve, h, (double)(h->used_ns - h->load_ns) * 1e-9);
    h->was_ready = true;
    h->load_ns = 0;
  } else if (state == TD_BACKEND_FAILED) {
    td_error("%s", td_backend_reason(h->backend));
    h->has_failed = h->has_just_failed = true;
  }
  td_hosts_update(&h->serve->hosts);
}

static td_status open_backend(td_host *h, td_err *err) {
  const td_options *o = &h->options;
  td_kv_dir *kv_dir = h->serve->hosts.kv_dir;
  td_backend_opts opts = {.runtime = h->runtime,
                          .max_batch = (uint32_t)o->max_batch,
                          .cache_output = o->cache_output,
                          .kv_tokens = (uint32_t)o->kv_tokens,
                          .gpu_mib = h->placement.is_discrete ? h->gpu_mib : 0,
                          .is_split = h->is_split,
                          .has_gpus = h->placement.is_discrete,
                          .prefill_threads = (uint32_t)o->prefill_threads,
                          .decode_slowdown = (uint32_t)o->decode_slowdown,
                          .weights_fd = h->weights_fd >= 0 ? h->weights_fd : 0,
                          .kv_dir = kv_dir,
                          .kv_model = h->kv_model,
                          .images_fd = h->pictures.fd,
                          .kv_flush_s = (uint32_t)o->drain_timeout_s,
                          .kv_events = h->serve->hosts.kv_events,
                          .trace_fd = td_trace_file_fd(h->serve->trace),
                          .stuck_after_s = (uint32_t)o->stuck_after_s,
                          .on_state = on_state,
                          .ctx = h};
  return td_backend_open(&h->backend, &h->serve->loop, &opts, err);
}

static void free_weights(td_host *h) {
  if (h->weights_fd >= 0) close(h->weights_fd);
  h->weights_fd = -1;
}

static void after_weights(uv_work_t *work, int status) {
  (void)status; // the work itself is never canceled
  td_host *h = work->data;
  h->is_reading = false;
  if (h->serve->stopping) return;
  td_err *err = &h->load_err;
  if (err->code != TD_OK || open_backend(h, err) != TD_OK) {
    td_error("%s", err->msg);
    h->has_failed = h->has_just_failed = true;
    free_weights(h);
  }
  td_hosts_update(&h->serve->hosts);
}

void td_host_load(td_host *h) {
  TD_CHECK(!td_host_is_loaded(h));
  h->is_reading = true;
  h->has_failed = false;
  h->load_ns = td_clock_ns();
  h->load_work.data = h;
  TD_CHECK(uv_queue_work(&h->serve->loop, &h->load_work, load_weights, after_weights) == 0);
}

// ---- unloading --------------------------------------------------------------------------------

static void on_unloaded(void *ctx) {
  td_host *h = ctx;
  h->backend = NULL;
  h->is_unloading = false;
  free_weights(h);
  malloc_trim(0);
  td_info("%s: unloaded, its memory is free", h->name);
  td_hosts_update(&h->serve->hosts);
}

void td_host_unload(td_host *h) {
  TD_CHECK(h->backend && !h->is_unloading && !h->n_inside);
  h->is_unloading = true;
  td_backend_close(h->backend, on_unloaded, h);
}

void td_host_shut_down(td_host *h) {
  atomic_store(&h->is_canceled, true);
  if (h->backend && !h->is_unloading) {
    td_backend_close(h->backend, NULL, NULL);
    h->backend = NULL;
  }
}
