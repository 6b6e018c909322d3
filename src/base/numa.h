// src/base/numa.h - NUMA nodes this process may compute on, and how a matrix's rows are split over
// them.
//
// Rows are split into one contiguous range per node, in node order. The pages of a node's rows are
// allocated in its memory (model/checkpoint/numa_layout.c), and its threads take these rows first
// (device/cpu), so that cores mostly read local memory.
#ifndef TD_BASE_NUMA_H
#define TD_BASE_NUMA_H

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
// where the thread runs.
void td_nodes_prefer(int id);

// First row of the idx-th of n_nodes; its rows end where the next node's begin.
static inline size_t td_node_begin(size_t n_rows, unsigned n_nodes, unsigned idx) {
  return n_rows * idx / n_nodes;
}

// Sets the node from which the pages [at, at + n_bytes) of shared memory will be allocated, while
// it has free memory. They must not be allocated yet; both numbers are multiples of the page size.
// False: the kernel refused.
bool td_nodes_place(const td_nodes *nodes, unsigned idx, int fd, uint64_t at, uint64_t n_bytes);

#endif
