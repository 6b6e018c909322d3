// src/base/cgroup.h - limits that control groups (v1 and v2) impose on this process, by its own
// groups and all their visible ancestors.
#pragma once

#include <stdint.h>

// Files to read; NULL: the system's. Tests substitute others.
typedef struct {
  const char *groups; // instead of /proc/self/cgroup
  const char *mounts; // instead of /proc/self/mountinfo
  const char *root;   // prefix for mount points
} td_cgroup_view;

// Bytes that may still be allocated before reaching a limit; page cache counts as free. UINT64_MAX:
// no limit.
uint64_t td_cgroup_memory_left(const td_cgroup_view *view);
// Total bytes that may be allocated. UINT64_MAX: no limit.
uint64_t td_cgroup_memory_limit(const td_cgroup_view *view);
// Number of CPUs that the quota amounts to, rounded up. UINT32_MAX: no quota.
uint32_t td_cgroup_cpus(const td_cgroup_view *view);
