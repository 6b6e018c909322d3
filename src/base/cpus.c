// src/base/cpus.c - enumerates CPUs and assigns them to the members of a pool.
#include "base/cpus.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/cgroup.h"
#include "base/fs.h"
#include "base/status.h"

// ---- enumeration ------------------------------------------------------------------------------

static cpu_set_t allowed_cpus(void) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) CPU_SET(0, &set);
  return set;
}

unsigned td_cpu_count(void) {
  cpu_set_t set = allowed_cpus();
  unsigned n = (unsigned)CPU_COUNT(&set), n_given = td_cgroup_cpus(NULL);
  if (n_given < n) n = n_given;
  return n ? n : 1;
}

// The kernel lists a core's hardware threads in ascending order: "3,19", or "6-7".
static int core_of(int cpu) {
  char path[80];
  snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
  td_buf text = TD_BUF_INIT;
  td_err err;
  int first = cpu; // unknown: treat the CPU as a core of its own
  if (td_file_read(&text, path, 1 << 16, &err) == TD_OK) sscanf(td_buf_text(&text), "%d", &first);
  td_buf_free(&text);
  return first;
}

static int by_core(const void *a, const void *b) {
  const td_cpu *x = a, *y = b;
  return x->core != y->core ? (x->core > y->core) - (x->core < y->core)
                            : (x->id > y->id) - (x->id < y->id);
}

static void set_nodes(td_cpu *cpus, unsigned n, const td_nodes *nodes) {
  if (nodes->is_fake) { // distribute the cores over the fake nodes
    unsigned n_cores = 0;
    for (unsigned i = 0; i < n; i++) {
      if (i > 0 && cpus[i].core != cpus[i - 1].core) n_cores++;
      cpus[i].node = n_cores % nodes->n;
    }
    return;
  }
  for (unsigned k = 1; k < nodes->n; k++) {
    cpu_set_t own;
    if (!td_nodes_cpus(nodes, k, &own)) continue;
    for (unsigned i = 0; i < n; i++)
      if (CPU_ISSET((size_t)cpus[i].id, &own)) cpus[i].node = k;
  }
}

bool td_cpus_leave_one(int node, cpu_set_t *before) {
  cpu_set_t set = allowed_cpus(), of_node;
  const td_nodes wanted = {.n = 1, .ids = {node}};
  *before = set;
  if (CPU_COUNT(&set) < 2) return false;
  if (node < 0 || !td_nodes_cpus(&wanted, 0, &of_node)) of_node = set;
  int last = CPU_SETSIZE - 1;
  while (!CPU_ISSET((size_t)last, &of_node))
    last--;
  CPU_CLR((size_t)last, &set);
  return sched_setaffinity(0, sizeof set, &set) == 0;
}

unsigned td_cpus_get(td_cpu cpus[TD_MAX_CPUS], const td_nodes *nodes) {
  cpu_set_t set = allowed_cpus();
  unsigned n = 0;
  for (int id = 0; id < CPU_SETSIZE && n < TD_MAX_CPUS; id++)
    if (CPU_ISSET((size_t)id, &set)) cpus[n++] = (td_cpu){.id = id, .core = core_of(id)};
  qsort(cpus, n, sizeof *cpus, by_core);
  set_nodes(cpus, n, nodes);
  return n;
}

// ---- assignment to members --------------------------------------------------------------------

// Keeps n of the CPUs, which are sorted by core: first hardware threads before second ones.
static void keep_first(td_cpu *cpus, unsigned n_cpus, unsigned n) {
  bool is_kept[TD_MAX_CPUS] = {false};
  for (unsigned nth = 0, n_kept = 0; n_kept < n; nth++) {
    for (unsigned i = 0, begin = 0; i < n_cpus && n_kept < n; i++) {
      if (cpus[i].core != cpus[begin].core) begin = i;
      if (i - begin != nth) continue;
      is_kept[i] = true;
      n_kept++;
    }
  }
  for (unsigned i = 0, to = 0; i < n_cpus; i++)
    if (is_kept[i]) cpus[to++] = cpus[i];
}

bool td_cpus_place(td_cpu *out, unsigned n_members, td_cpu *cpus, unsigned n_cpus, unsigned n_nodes,
                   bool from_end) {
  TD_CHECK(n_cpus <= TD_MAX_CPUS && n_nodes >= 1 && n_nodes <= TD_MAX_NODES);
  qsort(cpus, n_cpus, sizeof *cpus, by_core);
  unsigned n_cores = 0, at[TD_MAX_NODES] = {0};
  for (unsigned i = 0; i < n_cpus; i++)
    n_cores += i == 0 || cpus[i].core != cpus[i - 1].core;
  if (n_members > n_cpus || n_members < n_cores) return false;
  keep_first(cpus, n_cpus, n_members);
  for (unsigned i = 0, turn = 0; i < n_members; turn++) {
    const unsigned node = turn % n_nodes;
    unsigned *next = &at[node];
    while (*next < n_members && cpus[*next].node != node)
      ++*next;
    if (*next == n_members) continue; // the node has none left
    out[from_end ? n_members - 1 - i : i] = cpus[(*next)++];
    i++;
  }
  return true;
}
