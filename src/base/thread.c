// src/base/thread.c - thread stacks of a fixed size above a guard area.
#include "base/thread.h"

#include <sys/resource.h>

int td_thread_start(pthread_t *thread, void *(*fn)(void *arg), void *arg) {
  pthread_attr_t attr;
  int code = pthread_attr_init(&attr);
  if (code) return code;
  code = pthread_attr_setstacksize(&attr, TD_STACK_BYTES);
  if (!code) code = pthread_attr_setguardsize(&attr, TD_STACK_GUARD_BYTES);
  if (!code) code = pthread_create(thread, &attr, fn, arg);
  pthread_attr_destroy(&attr);
  return code;
}

td_status td_thread_raise_limit(td_err *err) {
  struct rlimit limit;
  if (getrlimit(RLIMIT_STACK, &limit) != 0 || limit.rlim_cur >= TD_STACK_BYTES) return TD_OK;
  rlim_t before = limit.rlim_cur;
  limit.rlim_cur = TD_STACK_BYTES;
  if (limit.rlim_max < TD_STACK_BYTES) limit.rlim_max = TD_STACK_BYTES; // only root may raise it
  if (setrlimit(RLIMIT_STACK, &limit) == 0) return TD_OK;
  return td_fail(err, TD_ELIMIT,
                 "the stack is limited to %llu KiB, and %u are needed: raise the hard limit "
                 "(ulimit -Hs %u)",
                 (unsigned long long)(before / 1024), TD_STACK_BYTES / 1024, TD_STACK_BYTES / 1024);
}
