// tests/unit/test_isas.c - a program without the kernels of this CPU's best instruction set, as one
// built elsewhere with -DTD_ISAS=native: it takes the next best, and refuses a CPU that has less
// than it was built for. CTest: no-tsan
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static int is_bare; // a CPU without vectors

#define __builtin_cpu_supports(name) (!is_bare && __builtin_cpu_supports(name))
#include "kernels/registry.c" // in place of the library's, with the rows that CMakeLists.txt keeps

#include "device/device.h"

static void test_lesser_cpu_is_refused(void **state) {
  (void)state;
  if (strcmp(TD_NEXT_ISA, "scalar") == 0) skip(); // none is
  is_bare = 1;
  assert_int_equal(td_kernels_init(NULL), TD_KERNELS_FOREIGN);
  assert_null(td_kernels()->isa);
  td_dev *dev = NULL;
  td_err err;
  const td_status st = td_dev_open(&dev, &(td_dev_opts){.kind = "cpu", .n_threads = 1}, &err);
  if (st != TD_EUNSUPPORTED) fail_msg("%s", err.msg);
  assert_non_null(strstr(err.msg, "built for a CPU with " TD_NEXT_ISA));
  assert_non_null(strstr(err.msg, "-DTD_ISAS=all"));
  td_kernels_init_any(); // for loops that need no speed
  assert_string_equal(td_kernels()->isa, "scalar");
  assert_int_equal(td_kernels_init(TD_NEXT_ISA), TD_KERNELS_ISA_ABSENT);
  assert_int_equal(td_kernels_init(TD_BEST_ISA), TD_KERNELS_UNKNOWN_ISA);
  is_bare = 0;
}

static void test_next_best(void **state) {
  (void)state;
  if (strcmp(TD_NEXT_ISA, TD_BEST_ISA) == 0) skip();
  assert_int_equal(td_kernels_init(NULL), TD_KERNELS_OK);
  td_dev *dev;
  td_err err;
  assert_int_equal(td_dev_open(&dev, &(td_dev_opts){.kind = "cpu", .n_threads = 1}, &err), TD_OK);
  assert_string_equal(td_kernels()->isa, TD_NEXT_ISA);
  assert_string_equal(td_kernels_isas()[0], TD_NEXT_ISA);
#define X(family, args_type) assert_non_null(td_kernels()->family);
  TD_KERNEL_FAMILIES(X)
#undef X
  size_t n;
  const td_kernel_variant *variants = td_kernel_variants(&n);
  for (size_t i = 0; i < n; i++)
    assert_string_not_equal(variants[i].isa, TD_BEST_ISA);
  td_dev_close(dev);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_lesser_cpu_is_refused), // first: nothing is chosen yet
      cmocka_unit_test(test_next_best),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
