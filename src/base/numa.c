// src/base/numa.c - finds NUMA nodes, binds threads and memory to them, asks where memory lies.
#include "base/numa.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/buf.h"
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

td_nodes td_nodes_get(void) {
  static const td_nodes one = {.n = 1};
  const char *fake = td_test_var_get(TD_ENV_FAKE_NODES);
  const long n_fake = fake ? atol(fake) : 0;
  if (n_fake > 1) // all entries are node 0
    return (td_nodes){.n = n_fake > TD_MAX_NODES ? TD_MAX_NODES : (unsigned)n_fake,
                      .is_fake = true};
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

bool td_nodes_prefer(int id) {
  unsigned long mask[(MAX_NODE_ID + 1) / (8 * sizeof(unsigned long))] = {0};
  const size_t word = 8 * sizeof mask[0];
  if (id >= 0) mask[(size_t)id / word] |= 1ul << (size_t)id % word;
  return syscall(SYS_set_mempolicy, id < 0 ? DEFAULT : PREFERRED, id < 0 ? NULL : mask,
                 id < 0 ? 0 : MAX_NODE_ID + 2ul) == 0;
}

// ---- stripes ------------------------------------------------------------------------------------

uint64_t td_stripes_bytes(const td_stripes *s, unsigned idx) {
  const uint64_t n = s->n_bytes / s->stripe_bytes, rest = s->n_bytes % s->stripe_bytes;
  const uint64_t whole = n / s->n_nodes + (idx < n % s->n_nodes);
  return whole * s->stripe_bytes + (idx == n % s->n_nodes ? rest : 0);
}

bool td_stripes_touch(const td_stripes *s, const td_nodes *nodes) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  bool is_placed = true;
  for (size_t at = 0; at < s->n_bytes; at += s->stripe_bytes) {
    const size_t left = s->n_bytes - at, n = left < s->stripe_bytes ? left : s->stripe_bytes;
    is_placed &= nodes->is_fake || td_nodes_prefer(nodes->ids[td_stripes_node(s, s->base + at)]);
    for (size_t i = 0; i < n; i += page)
      ((volatile char *)s->base)[at + i] = 0;
  }
  return nodes->is_fake || (td_nodes_prefer(-1) && is_placed);
}

static uint8_t idx_of(const td_nodes *nodes, int id) {
  unsigned idx = 0;
  while (idx < nodes->n && nodes->ids[idx] != id)
    idx++;
  return (uint8_t)(idx < nodes->n ? idx : TD_MAX_NODES);
}

bool td_stripes_where(const td_stripes *s, const td_nodes *nodes, size_t page_bytes, uint8_t *out) {
  enum { AT_ONCE = 512 };
  const size_t n_pages = (s->n_bytes + page_bytes - 1) / page_bytes;
  for (size_t done = 0; done < n_pages; done += AT_ONCE) {
    const size_t n = n_pages - done < AT_ONCE ? n_pages - done : AT_ONCE;
    void *pages[AT_ONCE];
    int ids[AT_ONCE];
    for (size_t i = 0; i < n; i++) {
      pages[i] = (void *)(uintptr_t)(s->base + (done + i) * page_bytes);
      out[done + i] = (uint8_t)td_stripes_node(s, pages[i]);
    }
    if (nodes->is_fake) continue;
    // Without nodes to move to, it only asks.
    if (syscall(SYS_move_pages, 0, n, pages, NULL, ids, 0) != 0) return false;
    for (size_t i = 0; i < n; i++)
      out[done + i] = idx_of(nodes, ids[i]);
  }
  return true;
}

// ---- PCI devices --------------------------------------------------------------------------------

// A file's first number; 0: none.
static double number_in(const char *folder, const char *file) {
  char path[512];
  td_buf text = TD_BUF_INIT;
  td_err err;
  double n = 0;
  snprintf(path, sizeof path, "%s/%s", folder, file);
  if (td_file_read(&text, path, 64, &err) == TD_OK && sscanf(td_buf_text(&text), "%lf", &n) != 1)
    n = 0;
  td_buf_free(&text);
  return n;
}

// 128 bits of 130 are data from generation 3 (8 GT/s) on, 8 of 10 before. Lanes are at most 32.
static double side_gbps(const char *folder) {
  const double gts = number_in(folder, "max_link_speed"),
               lanes = number_in(folder, "max_link_width");
  if (!(gts > 0 && gts < 1000 && lanes >= 1 && lanes <= 32)) return 0;
  return gts * lanes / 8 * (gts < 8 ? 0.8 : 128. / 130);
}

double td_pci_link_gbps(const char *devices, const char *pci_id) {
  char folder[256];
  snprintf(folder, sizeof folder, "%s/%s", devices, pci_id);
  const double own = side_gbps(folder);
  snprintf(folder, sizeof folder, "%s/%s/..", devices, pci_id); // the links are followed first
  const double port = side_gbps(folder);
  return port > 0 && port < own ? port : own;
}
