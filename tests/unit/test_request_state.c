// tests/unit/test_request_state.c - every transition of a request's life that is allowed, and every
// one that is not.
// CTest: no-tsan

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "front/request_state.h"
#include "unit/testing.h"

// A row for each state, a column for what may follow, both in the order of TD_REQUEST_STATES:
// Queued, Loading, (loading) Recalled and Canceled, Held, Sending, rUnning, reCalled, cOmplete,
// canceled, ended.
static const char *const allowed[TD_N_REQUEST_STATES] = {
    [TD_REQUEST_QUEUED] = "-L--HS----E",           //
    [TD_REQUEST_LOADING] = "--RCHS----E",          //
    [TD_REQUEST_LOADING_RECALLED] = "Q--C------E", //
    [TD_REQUEST_LOADING_CANCELED] = "----------E", //
    [TD_REQUEST_HELD] = "Q----S----E",             //
    [TD_REQUEST_SENDING] = "Q-----U---E",          //
    [TD_REQUEST_RUNNING] = "Q---HS-COXE",          //
    [TD_REQUEST_RECALLED] = "Q-------OXE",         //
    [TD_REQUEST_COMPLETE] = "---------XE",         //
    [TD_REQUEST_CANCELED] = "----------E",         //
    [TD_REQUEST_ENDED] = "-----------",
};

// What a child that makes the change prints; *status is how it ended.
static void change_in_child(td_request_state from, td_request_state to, char *said, size_t n_bytes,
                            int *status) {
  int ends[2];
  assert_int_equal(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    signal(SIGABRT, SIG_DFL);
    setrlimit(RLIMIT_CORE, &(struct rlimit){0});
    td_request_state state = from;
    td_request_become(&state, to, 42);
    _exit(state == to ? 0 : 1);
  }
  close(ends[1]);
  size_t len = 0;
  for (ssize_t n; len + 1 < n_bytes && (n = read(ends[0], said + len, n_bytes - len - 1)) > 0;)
    len += (size_t)n;
  said[len] = '\0';
  close(ends[0]);
  assert_int_equal(waitpid(child, status, 0), child);
}

TEST(every_pair_of_states) {
  for (int from = 0; from < TD_N_REQUEST_STATES; from++) {
    assert_int_equal(strlen(allowed[from]), TD_N_REQUEST_STATES);
    for (int to = 0; to < TD_N_REQUEST_STATES; to++) {
      const td_request_state a = (td_request_state)from, b = (td_request_state)to;
      const bool may = allowed[from][to] != '-';
      if (td_request_may_become(a, b) != may)
        fail_msg("%s to %s", td_request_state_name(a), td_request_state_name(b));
      td_request_state now = a;
      if (may) td_request_become(&now, b, 1);
      assert_int_equal(now, may ? b : a);
    }
    assert_false(td_request_may_become((td_request_state)from, TD_N_REQUEST_STATES));
    assert_false(td_request_may_become(TD_N_REQUEST_STATES, (td_request_state)from));
  }
}

TEST(a_forbidden_change_is_named_and_aborts) {
  for (int from = 0; from < TD_N_REQUEST_STATES; from++) {
    for (int to = 0; to < TD_N_REQUEST_STATES; to++) {
      const td_request_state a = (td_request_state)from, b = (td_request_state)to;
      if (td_request_may_become(a, b)) continue;
      char said[512], want[128];
      int status;
      change_in_child(a, b, said, sizeof said, &status);
      assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
      snprintf(want, sizeof want, "request 42 is %s and cannot become %s", td_request_state_name(a),
               td_request_state_name(b));
      if (!strstr(said, want)) fail_msg("\"%s\" where \"%s\" belongs", said, want);
    }
  }
}

// Of the states that lead to `to`, however long the way, a bit each.
static unsigned leading_to(td_request_state to) {
  unsigned found = 1u << to;
  for (int round = 0; round < TD_N_REQUEST_STATES; round++) {
    for (int a = 0; a < TD_N_REQUEST_STATES; a++) {
      for (int b = 0; b < TD_N_REQUEST_STATES; b++) {
        if (found >> b & 1 && td_request_may_become((td_request_state)a, (td_request_state)b))
          found |= 1u << a;
      }
    }
  }
  return found;
}

TEST(all_lives_begin_and_end) {
  const unsigned all = (1u << TD_N_REQUEST_STATES) - 1;
  assert_int_equal(leading_to(TD_REQUEST_ENDED), all);
  for (int s = 0; s < TD_N_REQUEST_STATES; s++) {
    const td_request_state at = (td_request_state)s;
    assert_true(leading_to(at) >> TD_REQUEST_QUEUED & 1);
    // A client's cancellation always has somewhere to go.
    assert_true(at == TD_REQUEST_ENDED || td_request_may_become(at, TD_REQUEST_ENDED));
    if (td_request_is_canceled(at)) assert_int_equal(leading_to(at) & 1u << TD_REQUEST_ENDED, 0);
    assert_false(td_request_is_loading(at) && td_request_is_at_worker(at));
  }
}
