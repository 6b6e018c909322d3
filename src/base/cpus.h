// src/base/cpus.h - the CPUs this process may use, and which of them the members of a pool get.
#ifndef TD_BASE_CPUS_H
#define TD_BASE_CPUS_H

#include <stdbool.h>

#include "base/numa.h"

// One hardware thread.
typedef struct {
  int id;        // the kernel's number
  int core;      // that of the core's first hardware thread
  unsigned node; // which of a td_nodes
} td_cpu;

enum { TD_MAX_CPUS = 1024 };

// How many threads can compute at once: CPUs of the calling thread's affinity mask, or fewer where
// a control group (v2) is not given the time of as many.
unsigned td_cpu_count(void);

// Takes one CPU out of the calling thread's affinity mask: the last one of that NUMA node (the
// kernel's number), or of any where the node has none. *before is the mask as it was, for
// sched_setaffinity. False: the mask has no other CPU, and nothing is changed.
bool td_cpus_leave_one(int node, cpu_set_t *before);

// The CPUs of the calling thread's affinity mask. Returns their number.
unsigned td_cpus_get(td_cpu cpus[TD_MAX_CPUS], const td_nodes *nodes);

// Which CPU each of n_members gets. They are for one hardware thread of every core before the
// second of any. Nodes take turns, and within a node a core's hardware threads lie together: so the
// first k members and the last n_members - k are spread evenly over nodes and share one core at
// most. from_end turns the order round. Sorts cpus.
// False, and nothing in out: members are more than CPUs, or fewer than cores. Such a pool leaves
// room for others, and where that is best the kernel knows, who sees them all.
bool td_cpus_place(td_cpu *out, unsigned n_members, td_cpu *cpus, unsigned n_cpus, unsigned n_nodes,
                   bool from_end);

#endif
