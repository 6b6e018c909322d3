// src/base/numa.h - the NUMA nodes this process may compute on, and who has which rows of a
// matrix.
//
// Rows are cut into one run for each node, in order. The pages that hold a node's rows are put into
// its memory (model/checkpoint/numa_layout.c), its threads take them first (device/cpu), so most of
// what a core reads is near it.
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
  int ids[TD_MAX_NODES]; // the kernel's numbers
  bool is_fake;          // one node that passes for several
} td_nodes;

// Those with CPUs that the calling thread may use; one when they are more than TD_MAX_NODES, or
// cannot be told. TANDEM_FAKE_NODES=N, for tests, makes N of any machine's first, and is read here.
td_nodes td_nodes_get(void);
// CPUs of the idx-th node that the calling thread may use. False: there are none, or they cannot be
// told.
bool td_nodes_cpus(const td_nodes *nodes, unsigned idx, cpu_set_t *out);
// Keeps the thread on the idx-th node. Does nothing where there is one, or they are fake.
void td_nodes_bind(const td_nodes *nodes, unsigned idx, pthread_t thread);

// The node, by the kernel's number, that a PCI device is next to, as its folder in devices says
// (/sys/bus/pci/devices). -1: any, or it cannot be told.
int td_nodes_of_pci(const char *devices, const char *pci_id);
// New memory of the calling thread is on that node, as long as it has any; -1: where it runs.
void td_nodes_prefer(int id);

// Where the rows of the idx-th of n_nodes begin; those of the next one are where they end.
static inline size_t td_node_begin(size_t n_rows, unsigned n_nodes, unsigned idx) {
  return n_rows * idx / n_nodes;
}

// Puts pages [at, at + n_bytes) of shared memory, not yet there, on a node when they are made, as
// long as it has any; a page's bytes divide both numbers. False: the kernel will not.
bool td_nodes_place(const td_nodes *nodes, unsigned idx, int fd, uint64_t at, uint64_t n_bytes);

#endif
