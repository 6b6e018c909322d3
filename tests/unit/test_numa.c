// tests/unit/test_numa.c - which rows, and which bytes, belong to which NUMA node, and where pages
// lie.
// CTest: no-tsan
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/numa.h"
#include "base/status.h"
#include "unit/testing.h"

TEST(node_of_a_device) {
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

TEST(rows) {
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

TEST(fake_nodes) {
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

// Every byte is one node's, and each node has its share of them.
TEST(stripes) {
  static const size_t sizes[] = {1, 999, 1000, 1001, 6000, 7500, 123456};
  for (unsigned n_nodes = 1; n_nodes <= TD_MAX_NODES; n_nodes++) {
    for (size_t i = 0; i < TD_COUNT(sizes); i++) {
      const td_stripes s = {(const char *)4096, sizes[i], 1000, n_nodes};
      uint64_t n_bytes[TD_MAX_NODES] = {0};
      for (size_t at = 0; at < s.n_bytes; at++)
        n_bytes[td_stripes_node(&s, s.base + at)]++;
      for (unsigned k = 0; k < n_nodes; k++)
        assert_int_equal(td_stripes_bytes(&s, k), n_bytes[k]);
      assert_true(td_stripes_hold(&s, s.base, s.n_bytes));
      assert_false(td_stripes_hold(&s, s.base, s.n_bytes + 1));
      assert_false(td_stripes_hold(&s, s.base - 1, 1));
      assert_true(td_stripes_hold(&s, s.base + s.n_bytes - 1, 1));
      assert_false(td_stripes_hold(&s, s.base + s.n_bytes, 1));
    }
  }
  assert_false(td_stripes_hold(&(td_stripes){.base = NULL}, "a", 1));
}

// The kernel says of pages that are there on which node they are, and nothing of others.
TEST(where_memory_lies) {
  enum { STRIPE = 16384, PAGE = 4096, N = 40 * STRIPE };
  char *base = mmap(NULL, N, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  assert_true(base != MAP_FAILED);
  const td_nodes nodes = td_nodes_get(), fake = {.n = 3, .is_fake = true};
  const td_stripes s = {base, N, STRIPE, nodes.n}, fakes = {base, N, STRIPE, 3};
  static uint8_t where[N / PAGE];
  if (td_stripes_where(&s, &nodes, PAGE, where)) {
    for (size_t i = 0; i < N / PAGE; i++)
      assert_int_equal(where[i], TD_MAX_NODES);
    const bool is_placed = td_stripes_touch(&s, &nodes);
    assert_true(td_stripes_where(&s, &nodes, PAGE, where));
    for (size_t i = 0; i < N / PAGE; i++) {
      if (is_placed) assert_int_equal(where[i], i * PAGE / STRIPE % nodes.n);
      assert_true(where[i] < nodes.n);
    }
  } else {
    print_message("move_pages is refused here\n");
  }
  assert_true(td_stripes_where(&fakes, &fake, PAGE, where));
  for (size_t i = 0; i < N / PAGE; i++)
    assert_int_equal(where[i], i * PAGE / STRIPE % 3);
  munmap(base, N);
}
