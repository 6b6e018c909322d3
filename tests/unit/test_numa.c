// tests/unit/test_numa.c - which rows, and which pages, belong to which NUMA node.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/numa.h"
#include "base/status.h"
#include "model/checkpoint/numa_layout.h"

static uint64_t distance(uint64_t a, uint64_t b) {
  return a > b ? a - b : b - a;
}

// Every whole page of the matrix is somebody's, in order, and a border between two nodes' pages is
// as near to that between their rows as pages allow.
static void check_plan(unsigned n_nodes, uint64_t at, uint64_t n_rows, uint64_t row_bytes,
                       uint64_t page_bytes) {
  td_page_range parts[TD_MAX_NODES];
  uint64_t n_bytes = n_rows * row_bytes;
  td_place_rows(parts, n_nodes, at, n_bytes, n_rows, page_bytes);
  assert_int_equal(parts[0].begin, (at + page_bytes - 1) / page_bytes * page_bytes);
  assert_int_equal(parts[n_nodes - 1].end, (at + n_bytes) / page_bytes * page_bytes);
  for (unsigned k = 0; k < n_nodes; k++) {
    assert_true(parts[k].begin <= parts[k].end);
    assert_int_equal(parts[k].begin % page_bytes + parts[k].end % page_bytes, 0);
    if (k + 1 == n_nodes) break;
    assert_int_equal(parts[k].end, parts[k + 1].begin);
    uint64_t border = at + td_node_begin(n_rows, n_nodes, k + 1) * row_bytes;
    assert_true(distance(parts[k].end, border) <= page_bytes / 2);
  }
}

static void test_plan(void **state) {
  (void)state;
  for (unsigned n_nodes = 1; n_nodes <= TD_MAX_NODES; n_nodes++) {
    check_plan(n_nodes, 0, 2048, 7168, 4096);
    check_plan(n_nodes, 12345, 1408, 2048, 4096);
    check_plan(n_nodes, 5 << 20, 7168, 18432, 2 << 20);
    check_plan(n_nodes, (3 << 20) + 777, 99991, 1001, 2 << 20);
  }
}

static void test_node_of_a_device(void **state) {
  (void)state;
  static const struct {
    const char *text;
    int node;
  } cases[] = {{"1\n", 1}, {"-1\n", -1}, {"", -1}, {"99999\n", -1}, {NULL, -1}};
  char root[] = "/tmp/tandem-pci-XXXXXX", folder[64], path[128];
  assert_non_null(mkdtemp(root));
  snprintf(folder, sizeof folder, "%s/0000:65:00.0", root);
  snprintf(path, sizeof path, "%s/numa_node", folder);
  assert_int_equal(mkdir(folder, 0700), 0);
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    FILE *file = cases[i].text ? fopen(path, "w") : NULL;
    if (file) {
      fputs(cases[i].text, file);
      fclose(file);
    } else {
      unlink(path);
    }
    assert_int_equal(td_nodes_of_pci(root, "0000:65:00.0"), cases[i].node);
  }
  rmdir(folder);
  rmdir(root);
  td_nodes_prefer(0); // as far as the kernel allows it
  td_nodes_prefer(-1);
}

static void test_rows(void **state) {
  (void)state;
  for (unsigned n_nodes = 1; n_nodes <= TD_MAX_NODES; n_nodes++) {
    for (size_t n_rows = 0; n_rows < 50; n_rows++) {
      assert_int_equal(td_node_begin(n_rows, n_nodes, 0), 0);
      assert_int_equal(td_node_begin(n_rows, n_nodes, n_nodes), n_rows);
      for (unsigned k = 0; k < n_nodes; k++) {
        size_t n = td_node_begin(n_rows, n_nodes, k + 1) - td_node_begin(n_rows, n_nodes, k);
        assert_in_range(n, n_rows / n_nodes, n_rows / n_nodes + 1);
      }
    }
  }
}

static void test_what_is_cut(void **state) {
  (void)state;
  td_tensor t = {.name = "a.weight", .n_bytes = 1 << 20, .shape = {512, 1024}, .n_dims = 2};
  assert_true(td_place_is_cut(&t, 2, 4096));
  assert_false(td_place_is_cut(&t, 1, 4096));
  assert_false(td_place_is_cut(&t, 2, 2 << 20)); // one page
  t.name = "a.qweight";                          // columns lie together
  assert_false(td_place_is_cut(&t, 2, 4096));
  t.name = "a.norm";
  t.n_dims = 1;
  assert_false(td_place_is_cut(&t, 2, 4096));
}

static void test_fake_nodes(void **state) {
  (void)state;
  setenv("TANDEM_FAKE_NODES", "3", 1);
  td_nodes nodes = td_nodes_get();
  assert_int_equal(nodes.n, 3);
  assert_true(nodes.is_fake);
  td_nodes_bind(&nodes, 2, pthread_self()); // goes nowhere
  static const char *const none[] = {"1", "0", "-2", "two"};
  for (size_t i = 0; i < TD_COUNT(none); i++) {
    setenv("TANDEM_FAKE_NODES", none[i], 1);
    assert_false(td_nodes_get().is_fake);
  }
  unsetenv("TANDEM_FAKE_NODES");
  assert_true(td_nodes_get().n >= 1);
}

// The kernel takes the placement, or has none; the memory is whole in either case.
static void test_placed_memory(void **state) {
  (void)state;
  enum { N = 1 << 20 };
  td_nodes nodes = td_nodes_get();
  int fd = memfd_create("test", MFD_CLOEXEC);
  assert_int_equal(ftruncate(fd, N), 0);
  if (!td_nodes_place(&nodes, 0, fd, 4096, N - 8192)) print_message("mbind is refused here\n");
  char *base = mmap(NULL, N, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  assert_true(base != MAP_FAILED);
  memset(base, 7, N);
  assert_int_equal(base[N - 1] + base[5000], 14);
  munmap(base, N);
  close(fd);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_plan),       cmocka_unit_test(test_node_of_a_device),
      cmocka_unit_test(test_rows),       cmocka_unit_test(test_what_is_cut),
      cmocka_unit_test(test_fake_nodes), cmocka_unit_test(test_placed_memory),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
