// src/front/hosts.h - which of the server's models are loaded. With --models at most --max-models
// at a time: a request for another one unloads the least recently used, once its running requests
// have ended; requests that arrive for it meanwhile wait for their turn. With --sleep-after an idle
// model is unloaded. Thread: the loop's.
#pragma once

#include <uv.h>

#include "front/host.h"

typedef struct {
  struct td_serve *serve;
  td_host *all; // [n], owned
  uint32_t n, max_loaded;
  uint64_t sleep_ns; // 0: never
  bool is_on_demand; // requests wait while their model is loaded, rather than being refused
  bool is_open;      // started and not shut down
  td_kv_dir *kv_dir; // NULL without --kv-dir, and until a model was loaded
  pthread_mutex_t kv_dir_lock; // held while kv_dir is opened
  td_kv_events *kv_events;     // NULL without --kv-events
  uv_timer_t timer;            // makes decisions apart from the call that made them necessary
} td_hosts;

// One host for --model, or one for each sub-folder of --models with a config.json. The log names
// models that cannot be served. Call td_hosts_close in every case.
td_status td_hosts_open(td_hosts *hosts, struct td_serve *serve, td_err *err);
void td_hosts_close(td_hosts *hosts);
// Begins to decide. Without --models, loads the model.
void td_hosts_start(td_hosts *hosts, uv_loop_t *loop);
// Stops, if it was started; the loop ends when nothing is left of the hosts.
void td_hosts_shut_down(td_hosts *hosts);
// Call when what the decisions depend on has changed.
void td_hosts_update(td_hosts *hosts);

// The host that serves requests for a model of that name, which may end with suffix (NULL: none).
// NULL: there is none.
td_host *td_hosts_find(const td_hosts *hosts, const char *name, const char *suffix);
// The names of all, comma-separated, cut to fit.
void td_hosts_list(const td_hosts *hosts, char *out, size_t n_bytes);
