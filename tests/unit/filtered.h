// tests/unit/filtered.h - main's part of test programs whose tests can be chosen by name, as a
// sanitizer that slows them down a hundredfold needs.
#pragma once

#include <fnmatch.h>
#include <stdio.h>

// The first argument is a pattern of test names (* and ?); without one all run. False, with a
// sentence: it means none, which would pass for a success.
static inline bool filter_tests(int argc, char **argv, const struct CMUnitTest *tests, size_t n) {
  if (argc < 2) return true;
  for (size_t i = 0; i < n; i++) {
    if (fnmatch(argv[1], tests[i].name, 0) != 0) continue;
    cmocka_set_test_filter(argv[1]);
    return true;
  }
  fprintf(stderr, "%s: no test is called %s\n", argv[0], argv[1]);
  return false;
}
