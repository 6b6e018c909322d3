// tests/unit/test_cpus.c - which CPU each member of a pool gets, on machines made up here.
#include <pthread.h>
#include <sched.h>
#include <string.h>

#include "base/cpus.h"
#include "base/thread_pool.h"
#include "unit/testing.h"

// CPU t * n_cores + c is hardware thread t of core c, as Linux numbers them; cores are dealt out to
// nodes in runs. They are given in no order.
static unsigned machine(td_cpu *cpus, unsigned n_nodes, unsigned cores_a_node, unsigned n_smt) {
  unsigned n_cores = n_nodes * cores_a_node, n = n_cores * n_smt;
  for (unsigned i = 0; i < n; i++) {
    unsigned id = i * 7919 % n;
    cpus[i] = (td_cpu){
        .id = (int)id, .core = (int)(id % n_cores), .node = id % n_cores / cores_a_node};
  }
  return n;
}

static void check_order(const td_cpu *places, const int *ids, unsigned n) {
  for (unsigned i = 0; i < n; i++)
    assert_int_equal(places[i].id, ids[i]);
}

TEST(plain_cores) {
  td_cpu cpus[8], places[8];
  unsigned n = machine(cpus, 1, 8, 1);
  assert_true(td_cpus_place(places, 8, cpus, n, 1, false));
  check_order(places, (const int[]){0, 1, 2, 3, 4, 5, 6, 7}, 8);
  assert_true(td_cpus_place(places, 8, cpus, n, 1, true));
  check_order(places, (const int[]){7, 6, 5, 4, 3, 2, 1, 0}, 8);
}

// 0 and 4, 1 and 5, ... share a core.
TEST(cores_before_their_second_threads) {
  td_cpu cpus[8], places[8];
  unsigned n = machine(cpus, 1, 4, 2);
  assert_true(td_cpus_place(places, 4, cpus, n, 1, false));
  check_order(places, (const int[]){0, 1, 2, 3}, 4);
  n = machine(cpus, 1, 4, 2);
  assert_true(td_cpus_place(places, 6, cpus, n, 1, false));
  check_order(places, (const int[]){0, 4, 1, 5, 2, 3}, 6);
  n = machine(cpus, 1, 4, 2);
  assert_true(td_cpus_place(places, 8, cpus, n, 1, false));
  check_order(places, (const int[]){0, 4, 1, 5, 2, 6, 3, 7}, 8);
}

TEST(nodes_take_turns) {
  td_cpu cpus[16], places[16];
  unsigned n = machine(cpus, 2, 4, 2); // 0-3 and 8-11 are on one node
  assert_true(td_cpus_place(places, 16, cpus, n, 2, false));
  check_order(places, (const int[]){0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15}, 16);
  for (unsigned i = 0; i < 16; i++)
    assert_int_equal(places[i].node, i % 2);
}

// A mask that leaves two cores of one node and one of the other, as taskset does.
TEST(what_a_mask_leaves) {
  const td_cpu left[] = {{9, 9, 1}, {2, 2, 0}, {3, 3, 0}};
  td_cpu cpus[3], places[3];
  memcpy(cpus, left, sizeof left);
  assert_true(td_cpus_place(places, 3, cpus, 3, 2, false));
  check_order(places, (const int[]){2, 9, 3}, 3);
  const td_cpu siblings[] = {{40, 8, 0}, {8, 8, 0}}; // of one core, both left
  memcpy(cpus, siblings, sizeof siblings);
  assert_true(td_cpus_place(places, 1, cpus, 2, 1, false));
  check_order(places, (const int[]){8}, 1);
}

TEST(teams_that_are_not_placed) {
  td_cpu cpus[16], places[17];
  unsigned n = machine(cpus, 1, 8, 2);
  assert_false(td_cpus_place(places, 17, cpus, n, 1, false)); // members would share CPUs
  assert_false(td_cpus_place(places, 7, cpus, n, 1, false));  // a core is left to others
  assert_true(td_cpus_place(places, 8, cpus, n, 1, false));
}

static unsigned n_shared_cores(const td_cpu *a, unsigned n_a, const td_cpu *b, unsigned n_b) {
  unsigned n = 0;
  for (unsigned i = 0; i < n_a; i++) {
    for (unsigned j = 0; j < n_b; j++) {
      assert_int_not_equal(a[i].id, b[j].id);
      n += a[i].core == b[j].core;
    }
  }
  return n;
}

static unsigned max_on_a_node(const td_cpu *places, unsigned n, unsigned n_nodes) {
  unsigned count[TD_MAX_NODES] = {0}, most = 0;
  for (unsigned i = 0; i < n; i++) {
    if (++count[places[i].node] > most) most = count[places[i].node];
  }
  assert_true(most <= n / n_nodes + 2);
  return most;
}

// However many cores the prefill worker is leased: its members and decode's that are left share no
// CPU, and no core but one where a core's threads are divided; both are spread over the nodes.
static void check_leases(unsigned n_nodes, unsigned cores_a_node, unsigned n_smt, unsigned n) {
  td_cpu cpus[256], decode[256], prefill[256];
  unsigned n_cpus = machine(cpus, n_nodes, cores_a_node, n_smt);
  assert_true(td_cpus_place(decode, n, cpus, n_cpus, n_nodes, false));
  n_cpus = machine(cpus, n_nodes, cores_a_node, n_smt);
  assert_true(td_cpus_place(prefill, n, cpus, n_cpus, n_nodes, true));
  for (unsigned k = 1; k < n; k++) {
    unsigned n_shared = n_shared_cores(decode, n - k, prefill, k);
    assert_true(n_shared <= n_nodes * (n_smt - 1));
    max_on_a_node(decode, n - k, n_nodes);
    max_on_a_node(prefill, k, n_nodes);
  }
}

TEST(leases_do_not_collide) {
  check_leases(1, 2, 1, 2);
  check_leases(1, 8, 2, 16);
  check_leases(2, 8, 2, 32);
  check_leases(2, 8, 2, 16);
  check_leases(2, 8, 2, 19);
  check_leases(4, 16, 1, 64);
}

TEST(one_is_left) {
  cpu_set_t whole, before, left, seen;
  sched_getaffinity(0, sizeof whole, &whole);
  const int n = CPU_COUNT(&whole);
  const td_nodes nodes = td_nodes_get();
  const int asked[] = {-1, nodes.ids[0], 1023}; // any, one that is there, one that is not
  for (size_t i = 0; i < TD_COUNT(asked); i++) {
    assert_int_equal(td_cpus_leave_one(asked[i], &before), n > 1);
    assert_true(CPU_EQUAL(&before, &whole));
    sched_getaffinity(0, sizeof left, &left);
    assert_int_equal(CPU_COUNT(&left), n > 1 ? n - 1 : 1);
    CPU_XOR(&seen, &left, &whole);
    assert_int_equal(sched_setaffinity(0, sizeof before, &before), 0);
    if (n == 1 || i != 1 || nodes.is_fake) continue;
    cpu_set_t own;
    assert_true(td_nodes_cpus(&nodes, 0, &own));
    CPU_AND(&seen, &seen, &own);
    assert_int_equal(CPU_COUNT(&seen), 1);
  }
}

TEST(this_machine) {
  td_nodes nodes = td_nodes_get();
  td_cpu cpus[TD_MAX_CPUS];
  cpu_set_t mask;
  assert_int_equal(sched_getaffinity(0, sizeof mask, &mask), 0);
  unsigned n = td_cpus_get(cpus, &nodes);
  assert_int_equal(n, CPU_COUNT(&mask));
  assert_in_range(td_cpu_count(), 1, n);
  for (unsigned i = 0; i < n; i++) {
    assert_true(CPU_ISSET((size_t)cpus[i].id, &mask));
    assert_true(cpus[i].node < nodes.n);
  }
}

typedef struct {
  int cpu[TD_MAX_CPUS], n_allowed[TD_MAX_CPUS];
} seen;

static void look(void *ctx, unsigned member, unsigned n_members) {
  (void)n_members;
  seen *s = ctx;
  cpu_set_t mask;
  pthread_getaffinity_np(pthread_self(), sizeof mask, &mask);
  s->cpu[member] = sched_getcpu();
  s->n_allowed[member] = CPU_COUNT(&mask);
}

// With a thread for every CPU of the mask each member is alone on one, the caller once it sits; the
// caller's own mask is what it was when it has stood up.
TEST(a_pinned_team) {
  td_thread_pool *pool;
  td_err err;
  cpu_set_t mask, before, after;
  sched_getaffinity(0, sizeof mask, &mask);
  unsigned n = (unsigned)CPU_COUNT(&mask);
  assert_int_equal(
      td_thread_pool_open(&pool, &(td_thread_pool_opts){.n_threads = n, .pin = true}, &err), TD_OK);
  seen s;
  td_thread_pool_pin_caller(pool, &before);
  td_thread_pool_run(pool, look, &s);
  td_thread_pool_unpin_caller(&before);
  for (unsigned i = 0; i < n; i++) {
    assert_int_equal(s.n_allowed[i], 1);
    for (unsigned j = 0; j < i; j++)
      assert_int_not_equal(s.cpu[i], s.cpu[j]);
  }
  sched_getaffinity(0, sizeof after, &after);
  assert_true(CPU_EQUAL(&mask, &before) && CPU_EQUAL(&mask, &after));
  td_thread_pool_close(pool);
  // One member too many: nobody is kept anywhere.
  assert_int_equal(
      td_thread_pool_open(&pool, &(td_thread_pool_opts){.n_threads = n + 1, .pin = true}, &err),
      TD_OK);
  td_thread_pool_run(pool, look, &s);
  for (unsigned i = 0; i <= n; i++)
    assert_int_equal(s.n_allowed[i], n);
  td_thread_pool_close(pool);
}
