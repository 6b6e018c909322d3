// src/base/thread.h - starting threads whose stack does not hang on the limits of the process.
#ifndef TD_BASE_THREAD_H
#define TD_BASE_THREAD_H

#include <pthread.h>

#include "base/status.h"

// What any thread of ours may need: linear kernels keep 1.1 MB of a product on it, rendering a chat
// template takes 4 MiB.
#define TD_STACK_BYTES (8u << 20)

// pthread_create with a stack of TD_STACK_BYTES; returns what it returns.
int td_thread_start(pthread_t *thread, void *(*fn)(void *arg), void *arg);

// For a program's main, before threads start: lets the calling thread's stack grow to
// TD_STACK_BYTES. TD_ELIMIT: the hard limit is lower.
td_status td_thread_raise_limit(td_err *err);

#endif
