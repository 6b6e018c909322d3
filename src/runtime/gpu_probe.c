// src/runtime/gpu_probe.c - both sides of the GPU probe: the child process and its caller.
#include "runtime/gpu_probe.h"

#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/log.h"
#include "device/device.h"

// Written by the process to its stdout. Both ends are the same program.
typedef struct {
  td_gpu_facts facts;
  td_err err; // code TD_OK: facts is valid
} probe_reply;

// ---- the probe process ------------------------------------------------------------------------

int td_gpu_probe_main(int argc, char **argv) {
  static probe_reply reply; // static, so padding is zeroed too: all of it is written
  td_log_set(&(td_log_opts){.max_level = TD_LOG_ERROR, .role = "probe"});
  const char *need = argc == 5 && strncmp(argv[3], "need=", 5) == 0 ? argv[3] + 5 : "0";
  const char *index = argc == 5 && strncmp(argv[4], "index=", 6) == 0 ? argv[4] + 6 : "0";
  td_dev *dev;
  const td_dev_opts opts = {.kind = "cuda",
                            .index = (unsigned)strtoul(index, NULL, 10),
                            .need_bytes = strtoull(need, NULL, 10)};
  if (td_dev_open(&dev, &opts, &reply.err) == TD_OK) {
    reply.err.code = TD_OK;
    reply.facts.free_bytes = td_dev_free_vram_bytes(dev);
    reply.facts.link_gbps = td_dev_link_gbps(dev);
    snprintf(reply.facts.name, sizeof reply.facts.name, "%s", td_dev_name(dev));
    td_dev_close(dev);
  }
  return write(STDOUT_FILENO, &reply, sizeof reply) == sizeof reply ? 0 : 1;
}

// ---- the caller -------------------------------------------------------------------------------

static td_status spawn(pid_t *pid, int out, uint32_t index, uint64_t need_bytes, td_err *err) {
  extern char **environ;
  char need[32], which[32];
  snprintf(need, sizeof need, "need=%llu", (unsigned long long)need_bytes);
  snprintf(which, sizeof which, "index=%u", index);
  char *const argv[] = {"tandem", "worker", "probe", need, which, NULL};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, out, STDOUT_FILENO);
  int code = posix_spawn(pid, "/proc/self/exe", &actions, NULL, argv, environ);
  posix_spawn_file_actions_destroy(&actions);
  return code ? td_fail(err, TD_EIO, "cannot start a process that looks for a GPU: %s",
                        strerror(code))
              : TD_OK;
}

// Reads until EOF or n_bytes; returns the bytes read.
static size_t read_all(int fd, void *out, size_t n_bytes) {
  size_t have = 0;
  while (have < n_bytes) {
    ssize_t n = read(fd, (char *)out + have, n_bytes - have);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    have += (size_t)n;
  }
  return have;
}

static td_status died(int status, td_err *err) {
  if (WIFSIGNALED(status)) {
    return td_fail(err, TD_EUNSUPPORTED,
                   "the process that looks for a GPU died (signal %d): the driver may be broken",
                   WTERMSIG(status));
  }
  return td_fail(err, TD_EUNSUPPORTED,
                 "the process that looks for a GPU ended with status %d and no result",
                 WEXITSTATUS(status));
}

td_status td_gpu_probe(td_gpu_facts *out, uint32_t index, uint64_t need_bytes, td_err *err) {
  *out = (td_gpu_facts){0};
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return td_fail(err, TD_EIO, "pipe: %s", strerror(errno));
  pid_t pid;
  td_status st = spawn(&pid, ends[1], index, need_bytes, err);
  close(ends[1]);
  probe_reply reply;
  bool is_whole = st == TD_OK && read_all(ends[0], &reply, sizeof reply) == sizeof reply;
  close(ends[0]);
  if (st != TD_OK) return st;
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (!is_whole) return died(status, err);
  reply.err.msg[sizeof reply.err.msg - 1] = '\0';
  *out = reply.facts;
  if (reply.err.code != TD_OK) *err = reply.err;
  return reply.err.code;
}
