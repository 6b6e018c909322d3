// tests/support/testing.c - main of the test programs that have none of their own (weak,
// therefore).
#include "unit/testing.h"

#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>

extern const testing_entry *const __start_testing[], *const __stop_testing[];

static int by_order(const void *a, const void *b) {
  return (*(const testing_entry *const *)a)->order - (*(const testing_entry *const *)b)->order;
}

// A pattern that matches no test must not pass for a success.
static int choose(const char *pattern, const struct CMUnitTest *tests, size_t n) {
  for (size_t i = 0; i < n; i++) {
    if (fnmatch(pattern, tests[i].name, 0) != 0) continue;
    cmocka_set_test_filter(pattern);
    return 0;
  }
  fprintf(stderr, "no test is called %s\n", pattern);
  return 2;
}

int testing_main(int argc, char **argv) {
  enum { MAX_TESTS = 256 };
  const size_t n = (size_t)(__stop_testing - __start_testing);
  const testing_entry *entries[MAX_TESTS];
  static struct CMUnitTest tests[MAX_TESTS];
  if (n > MAX_TESTS) abort();
  for (size_t i = 0; i < n; i++)
    entries[i] = __start_testing[i];
  qsort(entries, n, sizeof *entries, by_order); // compilers may place them in another order
  for (size_t i = 0; i < n; i++) {
    const testing_entry *e = entries[i];
    tests[i] = (struct CMUnitTest){e->name, e->run, e->fixture[0], e->fixture[1], NULL};
  }
  const int code = argc > 1 ? choose(argv[1], tests, n) : 0;
  return code ? code : _cmocka_run_group_tests("tests", tests, n, before_all, after_all);
}

__attribute__((weak)) int main(int argc, char **argv) {
  return testing_main(argc, argv);
}
