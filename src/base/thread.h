// src/base/thread.h - starts threads whose stack size does not depend on the process's limits.
#pragma once

#include <pthread.h>

#include "base/status.h"

// Enough for any of our threads: linear kernels keep 1.1 MB of products on the stack, and rendering
// a chat template takes 4 MiB.
#define TD_STACK_BYTES (8u << 20)
// Below the stack. Kernels, which do not probe the pages of their frames, cannot reach past it:
// CMakeLists.txt limits the frames.
#define TD_STACK_GUARD_BYTES (2u << 20)

// pthread_create with a stack of TD_STACK_BYTES above a guard area, and the same return value.
int td_thread_start(pthread_t *thread, void *(*fn)(void *arg), void *arg);

// Call in main before threads start: lets the calling thread's stack grow to TD_STACK_BYTES.
// TD_ELIMIT: the hard limit is lower.
td_status td_thread_raise_limit(td_err *err);
