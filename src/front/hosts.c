// src/front/hosts.c - the list of the server's models, and who of them is loaded.
#include "front/hosts.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "front/serve_impl.h"
#include "gguf/files.h"

// ---- decisions --------------------------------------------------------------------------------

// The host that is asleep and has been waited for longest; NULL: none.
static td_host *most_wanted(const td_hosts *hosts) {
  td_host *found = NULL;
  for (uint32_t i = 0; i < hosts->n; i++) {
    td_host *h = &hosts->all[i];
    bool is_wanted = h->first && !td_host_is_loaded(h);
    if (is_wanted && (!found || h->wanted_ns < found->wanted_ns)) found = h;
  }
  return found;
}

// The host that gives its place to another: an idle one if there is any, and of those the least
// recently used. NULL: none can.
static td_host *most_dispensable(const td_hosts *hosts) {
  td_host *found = NULL;
  for (uint32_t i = 0; i < hosts->n; i++) {
    td_host *h = &hosts->all[i];
    if (td_host_state_of(h) != TD_HOST_READY || h->is_leaving) continue;
    bool is_better = !found || (!h->n_inside && found->n_inside) ||
                     (!h->n_inside == !found->n_inside && h->used_ns < found->used_ns);
    if (is_better) found = h;
  }
  return found;
}

// Loads what is waited for, as far as there are places, and chooses who leaves for the others.
static void share_places(td_hosts *hosts) {
  uint32_t n_loaded = 0, n_going = 0, n_wanted = 0;
  for (uint32_t i = 0; i < hosts->n; i++) {
    td_host *h = &hosts->all[i];
    h->is_leaving = false;
    n_loaded += td_host_is_loaded(h);
    n_going += h->is_unloading;
  }
  for (td_host *h; n_loaded < hosts->max_loaded && (h = most_wanted(hosts)); n_loaded++)
    td_host_load(h);
  for (uint32_t i = 0; i < hosts->n; i++)
    n_wanted += hosts->all[i].first && !td_host_is_loaded(&hosts->all[i]);
  for (td_host *h; n_going < n_wanted && (h = most_dispensable(hosts)); n_going++) {
    h->is_leaving = true;
    if (!h->n_inside) td_host_unload(h);
  }
}

// Unloads what has been idle for long enough. Returns the time until the next is, 0: none.
static uint64_t unload_idle(td_hosts *hosts) {
  uint64_t next_ns = 0, now = td_clock_ns();
  for (uint32_t i = 0; hosts->is_on_demand && i < hosts->n; i++) {
    td_host *h = &hosts->all[i];
    if (td_host_state_of(h) != TD_HOST_READY || h->n_inside || h->first) continue;
    if (h->keep_ns == UINT64_MAX) continue;
    uint64_t idle_ns = now - h->used_ns;
    if (idle_ns >= h->keep_ns) {
      td_info("%s: idle for %.0f s, unloading", h->name, (double)idle_ns * 1e-9);
      td_host_unload(h);
    } else if (!next_ns || h->keep_ns - idle_ns < next_ns) {
      next_ns = h->keep_ns - idle_ns;
    }
  }
  return next_ns;
}

// Tells those who wait about a failure; later requests are another attempt. False: the server ends.
static bool end_failed(td_hosts *hosts, td_host *h) {
  // A server that cannot load its only model at start ends, and so does one that would not load it
  // again.
  if (h->has_just_failed && (!hosts->is_on_demand || (hosts->n == 1 && !h->was_ready))) {
    td_serve_stop(hosts->serve, 1);
    return false;
  }
  if (h->has_just_failed) td_host_refuse(h);
  if (h->backend && td_host_state_of(h) == TD_HOST_FAILED && !h->n_inside) td_host_unload(h);
  return true;
}

static void on_timer(uv_timer_t *timer) {
  td_hosts *hosts = timer->data;
  if (hosts->serve->stopping) return;
  for (uint32_t i = 0; i < hosts->n; i++) {
    if (!end_failed(hosts, &hosts->all[i])) return;
    td_host_admit(&hosts->all[i]); // a model that was just loaded serves who waited, then may leave
  }
  if (hosts->is_on_demand) share_places(hosts);
  for (uint32_t i = 0; i < hosts->n; i++)
    td_host_admit(&hosts->all[i]);
  uint64_t next_ns = unload_idle(hosts);
  // An update that came meanwhile has started the timer for now.
  if (next_ns && !uv_is_active((uv_handle_t *)timer))
    uv_timer_start(timer, on_timer, next_ns / 1000000 + 1, 0);
}

void td_hosts_update(td_hosts *hosts) {
  if (hosts->is_open) uv_timer_start(&hosts->timer, on_timer, 0, 0);
}

// ---- open and close ---------------------------------------------------------------------------

static td_status add(td_hosts *hosts, const char *name, const char *dir, td_err *err) {
  td_host *h = &hosts->all[hosts->n];
  td_status st = td_host_open(h, hosts->serve, name, dir, err);
  if (st == TD_OK) hosts->n++;
  if (st == TD_OK) td_host_keep(h, NULL);
  return st;
}

// The model of --model. Its faults end the server before anything is started.
static td_status open_one(td_hosts *hosts, td_err *err) {
  const td_options *o = hosts->serve->options;
  hosts->all = calloc(1, sizeof *hosts->all);
  char *name = o->model_names.n ? strdup(o->model_names.values[0]) : td_dir_model_name(o->model);
  td_status st = hosts->all && name ? add(hosts, name, o->model, err)
                                    : td_fail(err, TD_ENOMEM, "out of memory");
  free(name);
  if (st == TD_OK) st = td_host_chat(&hosts->all[0], err) ? TD_OK : err->code;
  return st == TD_OK ? td_host_place(&hosts->all[0], err) : st;
}

// A model is called as its entry; a GGUF file without its ending, where no other is called so.
static char *name_of(const td_hosts *hosts, const char *path, const char *entry) {
  char *name = td_gguf_is(path) ? td_gguf_model_name(entry) : strdup(entry);
  for (uint32_t i = 0; name && i < hosts->n; i++) {
    if (strcmp(hosts->all[i].name, name) != 0) continue;
    free(name);
    return strdup(entry);
  }
  return name;
}

static void add_entry(td_hosts *hosts, const char *parent, const char *entry) {
  td_err err;
  td_buf dir = TD_BUF_INIT;
  if (!td_checkpoint_is(parent, entry)) return;
  td_buf_printf(&dir, "%s/%s", parent, entry);
  char *name = name_of(hosts, td_buf_text(&dir), entry), *file = NULL;
  td_status st = name ? td_gguf_in(&file, td_buf_text(&dir), &err)
                      : td_fail(&err, TD_ENOMEM, "out of memory");
  if (st == TD_OK) st = add(hosts, name, file ? file : td_buf_text(&dir), &err);
  if (st != TD_OK) td_warn("--models: %s is not served: %s", entry, err.msg);
  free(name);
  free(file);
  td_buf_free(&dir);
}

static td_status open_folder(td_hosts *hosts, td_err *err) {
  const char *path = hosts->serve->options->models;
  struct dirent **entries;
  int n = scandir(path, &entries, NULL, alphasort);
  if (n < 0) return td_fail(err, TD_ENOENT, "--models %s: %s", path, strerror(errno));
  hosts->all = calloc((size_t)n + 1, sizeof *hosts->all);
  for (int i = 0; i < n; i++) {
    if (hosts->all) add_entry(hosts, path, entries[i]->d_name);
    free(entries[i]);
  }
  free(entries);
  if (!hosts->all) return td_fail(err, TD_ENOMEM, "out of memory");
  if (!hosts->n) {
    return td_fail(err, TD_ENOENT, "--models %s: no folder in it holds a model that can be served",
                   path);
  }
  return TD_OK;
}

static td_status check_options(const td_options *o, td_err *err) {
  if (!o->model && !o->models) {
    return td_fail(
        err, TD_EINVAL,
        "tandem serve needs a model: --model DIR, a checkpoint's directory, a GGUF file, or "
        "ORG/NAME of the hub (`tandem recommend` lists some); or --models DIR, a directory "
        "of them");
  }
  if (o->models && (o->model || o->model_names.n)) {
    return td_fail(err, TD_EINVAL, "--models names its models by their folders: leave out %s",
                   o->model ? "--model" : "--served-model-name");
  }
  if (o->models && o->kv_events) {
    return td_fail(err, TD_EINVAL,
                   "--kv-events tells of one model's pages: give --model instead of --models");
  }
  if (!o->kv_events && (o->kv_events_replay || o->kv_events_topic)) {
    return td_fail(err, TD_EINVAL, "--%s needs --kv-events",
                   o->kv_events_replay ? "kv-events-replay" : "kv-events-topic");
  }
  return TD_OK;
}

td_status td_hosts_open(td_hosts *hosts, td_serve *serve, td_err *err) {
  const td_options *o = serve->options;
  *hosts = (td_hosts){.serve = serve,
                      .max_loaded = o->models ? (uint32_t)o->max_models : 1,
                      .sleep_ns = (uint64_t)(o->sleep_after_s * 1e9),
                      .is_on_demand = o->models || o->sleep_after_s > 0};
  TD_CHECK(pthread_mutex_init(&hosts->kv_dir_lock, NULL) == 0);
  td_status st = check_options(o, err);
  if (st == TD_OK && o->kv_events) {
    const td_kv_events_opts events = {
        .endpoint = o->kv_events, .replay = o->kv_events_replay, .topic = o->kv_events_topic};
    st = td_kv_events_open(&hosts->kv_events, &events, err);
  }
  if (st != TD_OK) return st;
  return o->models ? open_folder(hosts, err) : open_one(hosts, err);
}

void td_hosts_close(td_hosts *hosts) {
  for (uint32_t i = 0; i < hosts->n; i++)
    td_host_close(&hosts->all[i]);
  free(hosts->all);
  td_kv_events_close(hosts->kv_events);
  td_kv_dir_close(hosts->kv_dir);
  if (hosts->serve) pthread_mutex_destroy(&hosts->kv_dir_lock);
}

void td_hosts_start(td_hosts *hosts, uv_loop_t *loop) {
  uv_timer_init(loop, &hosts->timer);
  hosts->timer.data = hosts;
  hosts->is_open = true;
  td_kv_events_start(hosts->kv_events, loop);
  if (!hosts->serve->options->models) td_host_load(&hosts->all[0]);
}

void td_hosts_shut_down(td_hosts *hosts) {
  if (!hosts->is_open) return;
  hosts->is_open = false;
  uv_close((uv_handle_t *)&hosts->timer, NULL);
  td_kv_events_stop(hosts->kv_events);
  for (uint32_t i = 0; i < hosts->n; i++)
    td_host_shut_down(&hosts->all[i]);
}

// ---- names ------------------------------------------------------------------------------------

static bool is_named(const td_host *h, const char *name) {
  const td_options *o = h->serve->options;
  for (uint32_t i = 0; i < o->model_names.n; i++)
    if (strcmp(o->model_names.values[i], name) == 0) return true;
  return strcmp(name, h->name) == 0 || (o->model && strcmp(name, o->model) == 0);
}

td_host *td_hosts_find(const td_hosts *hosts, const char *name, const char *suffix) {
  for (uint32_t i = 0; i < hosts->n; i++)
    if (is_named(&hosts->all[i], name)) return &hosts->all[i];
  size_t len = strlen(name), n_suffix = suffix ? strlen(suffix) : 0;
  if (!suffix || len <= n_suffix || strcmp(name + len - n_suffix, suffix) != 0) return NULL;
  char *shorter = strndup(name, len - n_suffix);
  td_host *found = shorter ? td_hosts_find(hosts, shorter, NULL) : NULL;
  free(shorter);
  return found;
}

void td_hosts_list(const td_hosts *hosts, char *out, size_t n_bytes) {
  size_t n = 0;
  out[0] = '\0';
  for (uint32_t i = 0; i < hosts->n && n + 1 < n_bytes; i++)
    n += (size_t)snprintf(out + n, n_bytes - n, "%s%s", i ? ", " : "", hosts->all[i].name);
}
