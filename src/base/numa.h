// src/base/numa.h - NUMA nodes this process may compute on, and memory that lies on them in turn.
//
// Weights are read into stripes that lie on the nodes in turn (model/checkpoint/resident_load.c).
// Threads on a node take the rows in its stripes first (device/cpu/tile_map.h), so that cores
// mostly read local memory, whatever the size of a matrix: a stripe is no smaller than a page, and
// matrices begin anywhere in one, so that their shares of the nodes even out.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TD_MAX_NODES 8

typedef struct {
  unsigned n;            // at least 1
  int ids[TD_MAX_NODES]; // kernel's node numbers
  bool is_fake;          // one node posing as several
} td_nodes;

// Nodes with CPUs that the calling thread may use; a single one if there are more than TD_MAX_NODES
// or they cannot be determined. For tests, TANDEM_FAKE_NODES=N splits the machine's first node into
// N; it is read here.
td_nodes td_nodes_get(void);
// CPUs of the idx-th node that the calling thread may use. False: none, or unknown.
bool td_nodes_cpus(const td_nodes *nodes, unsigned idx, cpu_set_t *out);
// Restricts the thread to the idx-th node's CPUs. No effect if there is one node or they are fake.
void td_nodes_bind(const td_nodes *nodes, unsigned idx, pthread_t thread);

// Node (kernel's number) that a PCI device is attached to, read from its directory below `devices`
// (/sys/bus/pci/devices). -1: any, or unknown.
int td_nodes_of_pci(const char *devices, const char *pci_id);
// The calling thread's new memory comes from that node while it has any free. -1: from the node
// where the thread runs. False: the kernel refused, and nothing changed.
bool td_nodes_prefer(int id);

// First row of the idx-th of n_nodes; its rows end where the next node's begin.
static inline size_t td_node_begin(size_t n_rows, unsigned n_nodes, unsigned idx) {
  return n_rows * idx / n_nodes;
}

// Tiles of a matrix, at least, in a stripe: a tile over a border is read from two nodes.
enum { TD_STRIPE_TILES = 16 };

// Memory in stripes of which the i-th, counted from base, is on node i % n_nodes.
typedef struct {
  const char *base; // NULL: no such memory
  size_t n_bytes, stripe_bytes;
  unsigned n_nodes;
} td_stripes;

static inline bool td_stripes_hold(const td_stripes *s, const void *at, size_t n_bytes) {
  const size_t offset = (size_t)((uintptr_t)at - (uintptr_t)s->base);
  return s->base && (uintptr_t)at >= (uintptr_t)s->base && offset <= s->n_bytes &&
         n_bytes <= s->n_bytes - offset;
}
// Node of an address in it.
static inline unsigned td_stripes_node(const td_stripes *s, const void *at) {
  return (unsigned)((size_t)((const char *)at - s->base) / s->stripe_bytes % s->n_nodes);
}
// Bytes on the idx-th node.
uint64_t td_stripes_bytes(const td_stripes *stripes, unsigned idx);
// Allocates the pages of memory that nothing has touched yet, each on its stripe's node. False: the
// kernel refused, and pages are where this thread runs.
bool td_stripes_touch(const td_stripes *stripes, const td_nodes *nodes);
// Sets out[i] to the index of the node that the i-th page of page_bytes really lies on, as the
// kernel says; TD_MAX_NODES: none of them. On fake nodes pages lie where they should. False: the
// kernel refused.
bool td_stripes_where(const td_stripes *stripes, const td_nodes *nodes, size_t page_bytes,
                      uint8_t *out);

// Bandwidth of the link to a PCI device in each direction, in 10^9 bytes/s after encoding: the
// lesser of the generation and lanes of the device and of its port. At full speed, even if the link
// has slowed down to save power. devices: /sys/bus/pci/devices. 0: unknown.
double td_pci_link_gbps(const char *devices, const char *pci_id);
