// src/worker/args.h - how the front passes options to a worker: `tandem worker key=value ...`, a
// hidden command, formatted and parsed from this one list. Descriptors are inherited at fixed
// numbers.
#pragma once

#include <stdint.h>

#include "base/log.h"
#include "base/status.h"
#include "runtime/placement.h"

// Descriptor 0 is the read end of a pipe whose write end only the front holds: hang-up means that
// the front is gone. 1 and 2 are output. 3 is the weights in shared memory
// (model/checkpoint/resident.h), present if weights_fd is not 0. 4 is the memory that --trace
// records to, present if trace_fd is not 0. The KV pool (kv/pool.h), the pixels of images, present
// if images_fd is not 0, and the channel follow.
#define TD_WORKER_LIFE_FD       0
#define TD_WORKER_WEIGHTS_FD    3
#define TD_WORKER_TRACE_FD      4
#define TD_WORKER_KV_FD         5
#define TD_WORKER_IMAGES_FD     6
#define TD_WORKER_FIRST_CHANNEL 7

const char *td_worker_role_name(uint32_t role);

// All keys, each required, are the options of td_runtime_opts, followed by these: field, key,
// minimum, maximum.
//   max_batch   sequences decoded together
//   kv_tokens   size of the KV pool in tokens; 0: chosen
//   decode_slowdown  by streamed prefill, in percent
//   gpu_mib     free MiB of GPU memory to divide (td_devices_opts.gpu_bytes); 0: what is free
//   weights_fd  the front's descriptor of the weights in shared memory; 0: none, map the files
//   trace_fd    the front's descriptor of the memory for --trace; 0: none
//   images_fd   the front's descriptor of the pixels of images; 0: none, the model does not see
//   parent_pid  the front's
#define TD_WORKER_NUMBERS(X)                                                                       \
  X(role, "role", 0, TD_N_ROLES - 1)                                                               \
  X(max_batch, "batch", 1, 4096)                                                                   \
  X(kv_tokens, "kv", 0, 1 << 30)                                                                   \
  X(decode_slowdown, "decode-slowdown", 0, 1000)                                                   \
  X(gpu_mib, "gpu-mib", 0, 1 << 30)                                                                \
  X(log_level, "log-level", TD_LOG_ERROR, TD_LOG_DEBUG)                                            \
  X(log_json, "log-json", 0, 1)                                                                    \
  X(weights_fd, "weights-fd", 0, INT32_MAX)                                                        \
  X(trace_fd, "trace-fd", 0, INT32_MAX)                                                            \
  X(images_fd, "images-fd", 0, INT32_MAX)                                                          \
  X(parent_pid, "parent", 1, INT32_MAX)

typedef struct {
  td_runtime_opts runtime; // texts are borrowed
#define X(field, key, least, most) uint32_t field;
  TD_WORKER_NUMBERS(X)
#undef X
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
