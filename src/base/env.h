// src/base/env.h - environment variables, and the list that tests and debugging use.
// The program calls getenv only here; scripts/check_includes.py checks it.
#pragma once

#include <stdlib.h>

// The value of any variable, also one of other programs (HOME, PATH); NULL: not set, or empty.
static inline const char *td_env(const char *name) {
  const char *value = getenv(name);
  return value && *value ? value : NULL;
}

// X(id, variable)
#define TD_TEST_VARS(X)                                                                            \
  X(FORCE_ISA, "TANDEM_FORCE_ISA")           /* CPU kernels of that instruction set */             \
  X(FAKE_NODES, "TANDEM_FAKE_NODES")         /* number of NUMA nodes, all of them node 0 */        \
  X(CUDA_LIB, "TANDEM_CUDA_LIB")             /* path of the CUDA kernels' library */               \
  X(CUDA_WITHOUT, "TANDEM_CUDA_WITHOUT")     /* kernels not to use, td_cuda_kernels */             \
  X(NCCL_LIB, "TANDEM_NCCL_LIB")             /* path of NCCL */                                    \
  X(ZMQ_LIB, "TANDEM_ZMQ_LIB")               /* path of ZeroMQ */                                  \
  X(JITTER, "TANDEM_JITTER")                 /* seed of delays, base/jitter.h */                   \
  X(TIMES, "TANDEM_TIMES")                   /* seed of measured times, base/jitter.h */           \
  X(LONGER, "TANDEM_LONGER")                 /* tokens of td_devices.long_steps's steps, if any */ \
  X(HUB_STALLED_S, "TANDEM_HUB_STALLED_S")   /* a download without data for so long is retried */  \
  X(HUB_BACKOFF_MS, "TANDEM_HUB_BACKOFF_MS") /* wait before the first retry of a download */

#define TD_TEST_VAR_ID(id, variable) TD_ENV_##id,
typedef enum { TD_TEST_VARS(TD_TEST_VAR_ID) } td_test_var;
#undef TD_TEST_VAR_ID

static inline const char *td_test_var_get(td_test_var var) {
#define TD_TEST_VAR_NAME(id, variable) variable,
  static const char *const names[] = {TD_TEST_VARS(TD_TEST_VAR_NAME)};
#undef TD_TEST_VAR_NAME
  return td_env(names[var]);
}
