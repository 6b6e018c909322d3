// tests/unit/comm_process_test.h - ranks in processes of their own, and what the others say when
// one of them fails. Forks: call it before the test has threads.
#ifndef TESTS_UNIT_COMM_PROCESS_TEST_H
#define TESTS_UNIT_COMM_PROCESS_TEST_H

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "unit/comm_test.h"

enum { N_PROCESSES = 3, SAID_OTHER = 1, SAID_DEAD = 2 };

typedef struct {
  const char *kind, *backend, *expected; // of devices; asked for; what becomes of it
  bool kills;                            // rank 1, after all collectives
  const char *says;                      // where rank 1 fails instead: what all ranks say then
  void (*before_failing)(void);          // called by it before
} process_case;

static inline void gather_4k(rank_end *end) {
  static const size_t sizes[TD_COMM_MAX_RANKS] = {4096, 4096, 4096};
  char *all = rank_alloc(end, 3 * 4096);
  const td_all_gather_args args = {
      .mine = all + end->rank * (size_t)4096, .all = all, .n_bytes = sizes};
  end->status = td_comm_all_gather(end->comm, end->stream, &args, &end->err);
  if (end->status == TD_OK) rank_sync(end);
  td_stream_sync(end->stream, NULL);
  td_dev_free(end->dev, all);
}

// Rank 1 goes on when the others are after the collectives before.
static inline void wait_for_others(uint32_t rank, const int behind[2]) {
  char byte = 0;
  for (int i = 1; rank == 1 && i < N_PROCESSES; i++)
    TD_CHECK(read(behind[0], &byte, 1) == 1);
  if (rank != 1) TD_CHECK(write(behind[1], &byte, 1) == 1);
}

// A rank in a process of its own.
static inline int process_main(int fd, uint32_t rank, const process_case *c, const int behind[2]) {
  ranks all = {.n = N_PROCESSES};
  rank_end end = {.all = &all, .rank = rank};
  size_t unit = 100;
  all.ctx = &unit;
  td_err err;
  if (td_dev_open(&end.dev, &(td_dev_opts){.kind = c->kind, .index = rank, .n_threads = 1}, &err) !=
          TD_OK ||
      td_stream_open(&end.stream, end.dev, &err) != TD_OK ||
      td_comm_join(&end.comm, end.dev, fd, rank, &err) != TD_OK)
    return SAID_OTHER;
  if (strcmp(td_comm_backend(end.comm), c->expected) != 0) return SAID_OTHER;
  check_all_collectives(&end);
  if (c->kills || c->says) {
    wait_for_others(rank, behind);
    if (rank == 1 && c->kills) kill(getpid(), SIGKILL);
    if (rank == 1) c->before_failing();
    gather_4k(&end);
    const char *says = c->says ? c->says : "process of rank 1";
    const bool is_told = end.status == TD_ECANCELED && strstr(end.err.msg, says);
    if (end.status != TD_OK) return is_told ? SAID_DEAD : SAID_OTHER;
  }
  td_stream_close(end.stream);
  td_comm_close(end.comm);
  td_dev_close(end.dev);
  return 0;
}

static inline void run_processes(const process_case *c, int (*statuses)[N_PROCESSES]) {
  td_err err;
  int fd, behind[2];
  pid_t pids[N_PROCESSES];
  assert_int_equal(pipe(behind), 0);
  const td_comm_opts opts = {.backend = c->backend, .n_ranks = N_PROCESSES, .piece_bytes = 512};
  if (td_comm_group_create(&fd, &opts, &err) != TD_OK) fail_msg("%s", err.msg);
  for (uint32_t r = 0; r < N_PROCESSES; r++) {
    pids[r] = fork();
    assert_true(pids[r] >= 0);
    if (pids[r] == 0) _exit(process_main(fd, r, c, behind));
  }
  for (uint32_t r = 0; r < N_PROCESSES; r++)
    assert_int_equal(waitpid(pids[r], &(*statuses)[r], 0), pids[r]);
  close(fd);
  close(behind[0]);
  close(behind[1]);
}

static inline void check_processes(const process_case *c) {
  int statuses[N_PROCESSES];
  run_processes(c, &statuses);
  for (int r = 0; r < N_PROCESSES; r++) {
    if (r == 1 && c->kills) {
      assert_true(WIFSIGNALED(statuses[r]) && WTERMSIG(statuses[r]) == SIGKILL);
      continue;
    }
    assert_true(WIFEXITED(statuses[r]));
    assert_int_equal(WEXITSTATUS(statuses[r]), c->kills || c->says ? SAID_DEAD : 0);
  }
}

#endif
