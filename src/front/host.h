// src/front/host.h - a model that the server offers: whether it is loaded, the workers that compute
// it, and the requests that use it or wait for it.
//
// A host is asleep (it holds neither weights nor workers, only its tokenizer) or loaded. Loading
// reads the weights, then starts the workers; unloading ends them, writes the KV pages that memory
// caches to --kv-dir, and frees weights and pool. hosts.h decides when either happens. Thread: the
// loop's, except where noted.
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <uv.h>

#include "api/calls/call_syntax.h"
#include "api/request.h"
#include "base/sha256.h"
#include "front/backend.h"
#include "front/metrics.h"
#include "front/pictures.h"
#include "front/turns.h"
#include "options/options.h"
#include "runtime/placement.h"
#include "text/chat.h"

typedef struct td_host td_host;
typedef struct td_host_use td_host_use;
struct td_serve;

// What the files of a model's folder say of it.
typedef struct {
  uint64_t n_bytes;   // of all weights and configuration files
  int64_t modified_s; // the newest of them, seconds since 1970
  td_digest digest;   // SHA-256 of config.json and of the names and sizes of the weights
} td_model_files;

// One request's use of a model, embedded in the request. Zeroed before it begins.
struct td_host_use {
  td_host *host; // NULL: it neither waits nor uses
  bool waits;
  td_host_use *prev, *next; // while it waits
  // The model is ready (why NULL), or cannot be: the use has ended, and why may be sent to clients.
  // Never called from inside td_host_enter.
  void (*on_turn)(td_host_use *use, const char *why);
};

struct td_host {
  struct td_serve *serve;
  char *name, *dir;     // owned
  td_options options;   // the server's, with dir as the model; texts are borrowed
  td_runtime_opts wish; // as requested; the next three are the result
  td_runtime_opts runtime;
  td_placement placement;
  uint32_t gpu_mib;     // free GPU memory that placement and workers divide; 0: no GPU yet
  char fingerprint[16]; // "fp_", then hex: of what results are rounded by; empty until ready
  bool is_split;        // prefill and decode are two workers
  bool is_placed;       // these hold for the load to come
  td_api_defaults defaults;
  char arch_name[64]; // model_type as published
  // Of the weights, once it was loaded for the first time; 0 and NULL before. dtype is the name of
  // the format of most of them.
  _Atomic uint64_t n_params;
  const char *dtype;
  // Tokens; the workers', or before they were ready what options and model say.
  _Atomic uint32_t n_ctx;
  pthread_mutex_t chat_lock;
  td_chat *_Atomic chat; // NULL until td_host_chat has opened it
  td_call_syntax calls;  // of its template, once it is open
  td_model_files files;  // as they were when the server began
  td_turns *turns;       // what was generated, for when it comes back
  td_pictures pictures;  // zeroed: it does not see
  atomic_bool sees;      // its checkpoint has a tower, as far as is known
  td_metrics metrics;

  td_backend *backend; // NULL: no workers
  uv_work_t load_work;
  atomic_bool is_canceled; // loading is of no use any more
  bool is_reading, is_unloading, has_failed;
  bool has_just_failed; // and its waiters have not been told
  bool was_ready;
  td_err load_err;
  int weights_fd;        // of weights in shared memory; -1: none
  td_digest kv_model;    // fingerprint of the KV content
  td_digest weights;     // of the checkpoint's content, with --receipts
  char computed_by[128]; // see td_receipt_add_place; empty until ready
  uint64_t n_loads;      // times it became ready after having been asleep
  uint64_t load_ns;      // when loading began

  td_host_use *first, *last; // waiting
  uint32_t n_inside;         // uses that do not wait
  bool is_leaving;           // another model needs its place: new requests wait
  uint64_t keep_ns;          // time without a use after which it is unloaded; UINT64_MAX: never
  uint64_t used_ns;          // when a use last began or ended
  uint64_t wanted_ns;        // when the first that waits came
};

// Reads and checks the configuration in dir; opens nothing else. name is copied. On error the host
// need not be closed.
td_status td_host_open(td_host *host, struct td_serve *serve, const char *name, const char *dir,
                       td_err *err);
// None of its handles may be left on the loop. Zeroed hosts are legal.
void td_host_close(td_host *host);
// Chooses the device, where experts run, and one worker or two. Any thread, one at a time.
td_status td_host_place(td_host *host, td_err *err);
// Notes n_params, dtype and whether it sees. Once a worker has loaded the model: opening it may
// wait for its files.
void td_host_note_weights(td_host *host);
// The model's tokenizer and template, opened by the first call. NULL: err says why. Any thread.
const td_chat *td_host_chat(td_host *host, td_err *err);

td_host_state td_host_state_of(const td_host *host);
// Whether it holds, or is about to hold, weights and workers.
bool td_host_is_loaded(const td_host *host);
// Whether requests can be submitted to its workers.
bool td_host_accepts(const td_host *host);
// Requests at its workers; those that wait for the model or in its queue.
uint32_t td_host_n_running(const td_host *host);
uint32_t td_host_n_waiting(const td_host *host);

// Begins a use. True: the model is ready. False: on_turn will be called.
bool td_host_enter(td_host *host, td_host_use *use);
// Ends a use or a wait; does nothing if it has neither.
void td_host_leave(td_host_use *use);
// How long the model stays in memory without a use from now on, in milliseconds; negative: for
// ever; NULL: as --sleep-after says. Without --sleep-after and --models a model always stays.
void td_host_keep(td_host *host, const int64_t *ms);
// Lets waiters in while the host accepts requests and is not leaving.
void td_host_admit(td_host *host);

// Starts loading a model that is asleep; its state shows the outcome.
void td_host_load(td_host *host);
// Its workers have been started, and nobody is inside.
void td_host_unload(td_host *host);
// Tells waiters that the model could not be loaded.
void td_host_refuse(td_host *host);
// The server ends: stops everything. No waiter is left.
void td_host_shut_down(td_host *host);

// Reads the folder; what cannot be read is left out.
void td_model_files_read(td_model_files *out, const char *dir);
