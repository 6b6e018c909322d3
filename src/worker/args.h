// src/worker/args.h - how the front tells a worker what to do: `tandem worker key=value ...`, a
// hidden command, written and read by this one list. Descriptors are inherited at fixed numbers.
#ifndef TD_WORKER_ARGS_H
#define TD_WORKER_ARGS_H

#include <stdint.h>

#include "base/log.h"
#include "base/status.h"
#include "runtime/devices.h"
#include "tandem/types.h"

// The worker's descriptor 0 is the reading end of a pipe that only the front holds open: hang-up
// means that the front is gone. 1 and 2 are for what it has to say; the weights in memory
// (model/checkpoint/resident.h) are at 3 when weights_fd says that there are any, the memory that
// --trace records to is at 4 when trace_fd does; the KV pool's (kv_pool.h) and the channel's
// follow.
#define TD_WORKER_LIFE_FD       0
#define TD_WORKER_WEIGHTS_FD    3
#define TD_WORKER_TRACE_FD      4
#define TD_WORKER_KV_FD         5
#define TD_WORKER_FIRST_CHANNEL 6

// What a worker is for. It can do anything it is asked; what it is asked decides the front.
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

// Every key, all of them required. Texts: field, key; numbers: field, key, least, most.
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
  const char *device;     // borrowed; a kind of td_dev_opts
  uint32_t role;          // a td_worker_role
  uint32_t ctx_size;      // tokens; 0: what the model allows, within memory
  uint32_t max_batch;     // sequences decoded together
  uint32_t n_threads;     // 0: one for each CPU
  uint32_t kv_tokens;     // tokens the KV pool holds; 0: chosen
  uint32_t kv_dtype;      // a td_dtype
  uint32_t activations;   // a td_activations
  uint32_t experts;       // a td_expert_place
  uint32_t prefill_chunk; // tokens a step; 0: chosen by devices.h
  uint32_t log_level;     // a td_log_level
  uint32_t log_json;
  uint32_t weights_fd; // the front's descriptor of the weights in memory; 0: none, map the files
  uint32_t trace_fd;   // the front's descriptor of the memory for --trace; 0: none
  uint32_t parent_pid; // the front's
} td_worker_opts;

// argv[0] is the program, argv[1] "worker". TD_EINVAL names the argument. Texts point into argv.
td_status td_worker_args_parse(td_worker_opts *out, int argc, char **argv, td_err *err);

typedef struct {
  char **argv; // NULL-terminated
  int argc;
} td_worker_argv;

// The arguments that parse to opts. Call td_worker_argv_free in every case.
td_status td_worker_args_format(td_worker_argv *out, const td_worker_opts *opts, td_err *err);
void td_worker_argv_free(td_worker_argv *args);

#endif
