// tests/unit/kernel_test.h - runs a check for every registered version of a family that this
// machine supports. None is a failure.
#ifndef TESTS_UNIT_KERNEL_TEST_H
#define TESTS_UNIT_KERNEL_TEST_H

#include <stdio.h>

#include "tandem/kernels.h"
#include "unit/ref.h"

// A check returns false and says why; the tests of the tests expect just that.
typedef struct {
  char text[256];
} why;

#define KERNEL_FAIL(w, ...) (snprintf((w)->text, sizeof(w)->text, __VA_ARGS__), false)

typedef bool (*kernel_check)(void (*fn)(void), const void *arg, why *w);

static inline void for_versions(const char *family, kernel_check check, const void *arg) {
  size_t n, n_run = 0;
  const td_kernel_variant *v = td_kernel_variants(&n);
  for (size_t i = 0; i < n; i++) {
    if (strcmp(v[i].family, family) != 0 || !td_kernel_variant_runs(&v[i])) continue;
    why w = {""};
    if (!check(v[i].fn, arg, &w)) fail_msg("%s__%s: %s", family, v[i].isa, w.text);
    n_run++;
  }
  if (n_run == 0) fail_msg("no version of %s runs on this machine", family);
}

#endif
