// src/worker/args.h - how the front passes options to a worker: `tandem worker key=value ...`, a
// hidden command, formatted and parsed from this one list. Descriptors are inherited at fixed
// numbers.
#ifndef TD_WORKER_ARGS_H
#define TD_WORKER_ARGS_H

#include <stdint.h>

#include "base/log.h"
#include "base/status.h"
#include "runtime/devices.h"
#include "tandem/types.h"

// Descriptor 0 is the read end of a pipe whose write end only the front holds: hang-up means that
// the front is gone. 1 and 2 are output. 3 is the weights in shared memory
// (model/checkpoint/resident.h), present if weights_fd is not 0. 4 is the memory that --trace
// records to, present if trace_fd is not 0. The KV pool (kv/pool.h) and the channel follow.
#define TD_WORKER_LIFE_FD       0
#define TD_WORKER_WEIGHTS_FD    3
#define TD_WORKER_TRACE_FD      4
#define TD_WORKER_KV_FD         5
#define TD_WORKER_FIRST_CHANNEL 6

// Worker roles. A hint for CPU placement and naming only: the front decides what each worker is
// sent.
#define TD_WORKER_ROLES(X)                                                                         \
  X(BOTH, "worker")                                                                                \
  X(PREFILL, "prefill")                                                                            \
  X(DECODE, "decode")

typedef enum {
#define X(id, name) TD_ROLE_##id,
  TD_WORKER_ROLES(X)
#undef X
      TD_N_ROLES
} td_worker_role;

const char *td_worker_role_name(uint32_t role);

// All keys; each is required. Texts: field, key; numbers: field, key, minimum, maximum.
#define TD_WORKER_TEXTS(X)                                                                         \
  X(model_dir, "model")                                                                            \
  X(device, "device")

#define TD_WORKER_NUMBERS(X)                                                                       \
  X(role, "role", 0, TD_N_ROLES - 1)                                                               \
  X(ctx_size, "ctx", 0, 1 << 24)                                                                   \
  X(max_batch, "batch", 1, 4096)                                                                   \
  X(n_threads, "threads", 0, 4096)                                                                 \
  X(kv_tokens, "kv", 0, 1 << 30)                                                                   \
  X(kv_dtype, "kv-dtype", TD_F32, TD_F16)                                                          \
  X(activations, "activations", 0, TD_N_ACTIVATIONS - 1)                                           \
  X(experts, "experts", 0, TD_N_EXPERT_PLACES - 1)                                                 \
  X(prefill_chunk, "chunk", 0, 1 << 20)                                                            \
  X(log_level, "log-level", TD_LOG_ERROR, TD_LOG_DEBUG)                                            \
  X(log_json, "log-json", 0, 1)                                                                    \
  X(weights_fd, "weights", 0, INT32_MAX)                                                           \
  X(trace_fd, "trace", 0, INT32_MAX)                                                               \
  X(parent_pid, "parent", 1, INT32_MAX)

typedef struct {
  const char *model_dir;  // borrowed
  const char *device;     // borrowed; device kind, see td_dev_opts
  uint32_t role;          // a td_worker_role
  uint32_t ctx_size;      // tokens; 0: the model's maximum, limited by memory
  uint32_t max_batch;     // sequences decoded together
  uint32_t n_threads;     // 0: one per CPU
  uint32_t kv_tokens;     // size of the KV pool in tokens; 0: chosen
  uint32_t kv_dtype;      // a td_dtype
  uint32_t activations;   // a td_activations
  uint32_t experts;       // a td_expert_place
  uint32_t prefill_chunk; // tokens per step; 0: chosen by runtime/devices.h
  uint32_t log_level;     // a td_log_level
  uint32_t log_json;
  // the front's descriptor of the weights in shared memory; 0: none, map the files
  uint32_t weights_fd;
  uint32_t trace_fd;   // the front's descriptor of the memory for --trace; 0: none
  uint32_t parent_pid; // the front's
} td_worker_opts;

// argv[0] is the program, argv[1] "worker". TD_EINVAL: the message names the argument. Texts point
// into argv.
td_status td_worker_args_parse(td_worker_opts *out, int argc, char **argv, td_err *err);

typedef struct {
  char **argv; // NULL-terminated
  int argc;
} td_worker_argv;

// The arguments that parse to opts. Call td_worker_argv_free in every case.
td_status td_worker_args_format(td_worker_argv *out, const td_worker_opts *opts, td_err *err);
void td_worker_argv_free(td_worker_argv *args);

#endif
