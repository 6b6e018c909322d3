// src/base/cpus.h - the CPUs this process may use, and which of them a pool's members are pinned
// to.
#pragma once

#include <stdbool.h>

#include "base/numa.h"

// One hardware thread.
typedef struct {
  int id;        // kernel's CPU number
  int core;      // CPU number of the core's first hardware thread
  unsigned node; // index into td_nodes
} td_cpu;

enum { TD_MAX_CPUS = 1024 };

// Number of threads that can run at once: CPUs in the calling thread's affinity mask, or fewer if a
// control group's quota is smaller.
unsigned td_cpu_count(void);

// Removes one CPU from the calling thread's affinity mask: the last one of that NUMA node (kernel's
// number), or of any node if that one has none. *before receives the previous mask, for
// sched_setaffinity. False: the mask has only one CPU; nothing changed.
bool td_cpus_leave_one(int node, cpu_set_t *before);

// Fills cpus with the CPUs of the calling thread's affinity mask. Returns their number.
unsigned td_cpus_get(td_cpu cpus[TD_MAX_CPUS], const td_nodes *nodes);

// Assigns a CPU to each of n_members. One hardware thread of every core is used before the second
// of any. Nodes alternate, and within a node the hardware threads of a core are adjacent. So the
// first k members and the remaining n_members - k are each spread evenly over nodes and share at
// most one core. from_end reverses the order. Sorts cpus. False, with out unchanged: there are more
// members than CPUs, or fewer than cores. A pool with fewer members than cores is left to the
// kernel, which sees the other processes' load.
bool td_cpus_place(td_cpu *out, unsigned n_members, td_cpu *cpus, unsigned n_cpus, unsigned n_nodes,
                   bool from_end);
