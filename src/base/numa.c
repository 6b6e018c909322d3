// src/base/numa.c - finds NUMA nodes, binds threads and memory to them.
#include "base/numa.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/env.h"
#include "base/fs.h"

#define MAX_NODE_ID 1023
// From linux/mempolicy.h: MPOL_DEFAULT and MPOL_PREFERRED, which falls back to other nodes.
#define DEFAULT   0
#define PREFERRED 1

// Parses a kernel list such as "0-3,8,10-11" into a set.
static void parse_list(cpu_set_t *out, const char *text) {
  CPU_ZERO(out);
  for (const char *p = text; *p && *p != '\n';) {
    char *end;
    long first = strtol(p, &end, 10), last = first;
    if (end == p) return;
    if (*end == '-') last = strtol(end + 1, &end, 10);
    for (long cpu = first; cpu >= 0 && cpu <= last && cpu < CPU_SETSIZE; cpu++)
      CPU_SET((size_t)cpu, out);
    p = *end == ',' ? end + 1 : end;
  }
}

static bool read_list(cpu_set_t *out, const char *path) {
  td_buf text = TD_BUF_INIT;
  td_err err;
  bool is_there = td_file_read(&text, path, 1 << 16, &err) == TD_OK;
  parse_list(out, td_buf_text(&text));
  td_buf_free(&text);
  return is_there;
}

// CPUs of the node that this thread may use.
static bool cpus_of(cpu_set_t *out, int id) {
  char path[64];
  cpu_set_t allowed;
  snprintf(path, sizeof path, "/sys/devices/system/node/node%d/cpulist", id);
  if (!read_list(out, path) || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;
  CPU_AND(out, out, &allowed);
  return CPU_COUNT(out) > 0;
}

static td_nodes fake_nodes(long n) {
  td_nodes nodes = {.n = n > TD_MAX_NODES ? TD_MAX_NODES : (unsigned)n, .is_fake = true};
  return nodes; // all entries are node 0
}

td_nodes td_nodes_get(void) {
  static const td_nodes one = {.n = 1};
  const char *fake = td_test_var_get(TD_ENV_FAKE_NODES);
  if (fake && atol(fake) > 1) return fake_nodes(atol(fake));
  cpu_set_t online, cpus;
  if (!read_list(&online, "/sys/devices/system/node/online")) return one;
  td_nodes nodes = {0};
  for (int id = 0; id <= MAX_NODE_ID; id++) {
    if (!CPU_ISSET((size_t)id, &online) || !cpus_of(&cpus, id)) continue;
    if (nodes.n == TD_MAX_NODES) return one;
    nodes.ids[nodes.n++] = id;
  }
  return nodes.n ? nodes : one;
}

bool td_nodes_cpus(const td_nodes *nodes, unsigned idx, cpu_set_t *out) {
  return cpus_of(out, nodes->ids[idx]);
}

void td_nodes_bind(const td_nodes *nodes, unsigned idx, pthread_t thread) {
  cpu_set_t cpus;
  if (nodes->n < 2 || nodes->is_fake || !cpus_of(&cpus, nodes->ids[idx])) return;
  pthread_setaffinity_np(thread, sizeof cpus, &cpus); // a failure only costs speed
}

int td_nodes_of_pci(const char *devices, const char *pci_id) {
  char path[256];
  td_buf text = TD_BUF_INIT;
  td_err err;
  int id = -1;
  snprintf(path, sizeof path, "%s/%s/numa_node", devices, pci_id);
  if (td_file_read(&text, path, 64, &err) == TD_OK) sscanf(td_buf_text(&text), "%d", &id);
  td_buf_free(&text);
  return id >= 0 && id <= MAX_NODE_ID ? id : -1;
}

void td_nodes_prefer(int id) {
  unsigned long mask[(MAX_NODE_ID + 1) / (8 * sizeof(unsigned long))] = {0};
  const size_t word = 8 * sizeof mask[0];
  if (id >= 0) mask[(size_t)id / word] |= 1ul << (size_t)id % word;
  // A failure only costs speed.
  syscall(SYS_set_mempolicy, id < 0 ? DEFAULT : PREFERRED, id < 0 ? NULL : mask,
          id < 0 ? 0 : MAX_NODE_ID + 2ul);
}

// The policy belongs to the memory: it outlives this mapping and applies to every process.
bool td_nodes_place(const td_nodes *nodes, unsigned idx, int fd, uint64_t at, uint64_t n_bytes) {
  unsigned long mask[(MAX_NODE_ID + 1) / (8 * sizeof(unsigned long))] = {0};
  size_t word = 8 * sizeof mask[0], id = (size_t)nodes->ids[idx];
  void *base = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)at);
  if (base == MAP_FAILED) return false;
  mask[id / word] |= 1ul << id % word;
  long rc = syscall(SYS_mbind, base, n_bytes, PREFERRED, mask, MAX_NODE_ID + 2ul, 0u);
  munmap(base, n_bytes);
  return rc == 0;
}
