// tests/unit/test_spinner.c - what a prefill's spinner draws on stderr.
// CTest: no-tsan
#include <stdio.h>
#include <string.h>

#include <unistd.h>

#include "cli/spinner.h"
#include "unit/testing.h"

static char drawn[1 << 16];
static size_t n_drawn;

// Reads what is drawn until it holds text.
static void wait_for(int fd, const char *text) {
  while (!strstr(drawn, text)) {
    ssize_t n = read(fd, drawn + n_drawn, sizeof drawn - 1 - n_drawn);
    assert_true(n > 0);
    n_drawn += (size_t)n;
    drawn[n_drawn] = '\0';
  }
}

TEST(progress) {
  int ends[2], before = dup(STDERR_FILENO);
  assert_int_equal(pipe(ends), 0);
  dup2(ends[1], STDERR_FILENO);
  close(ends[1]);
  td_spinner s = {0};
  td_spinner_stop(&s); // never started
  td_spinner_start(&s);
  wait_for(ends[0], "prefill");
  td_spinner_update(&s, 100, 4100); // 100 from the KV cache
  wait_for(ends[0], "prefill: 100 of 4100 tokens");
  assert_null(strstr(drawn, "left")); // no speed yet
  td_spinner_update(&s, 2100, 4100);
  wait_for(ends[0], "2100 of 4100 tokens, ");
  wait_for(ends[0], " s left");
  td_spinner_stop(&s);
  td_spinner_stop(&s);
  dup2(before, STDERR_FILENO); // closes the pipe's last writer
  close(before);
  for (ssize_t n; (n = read(ends[0], drawn + n_drawn, sizeof drawn - 1 - n_drawn)) > 0;)
    n_drawn += (size_t)n;
  close(ends[0]);
  drawn[n_drawn] = '\0';
  assert_string_equal(drawn + n_drawn - 4, "\r\033[K"); // nothing stays
}
