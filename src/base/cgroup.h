// src/base/cgroup.h - what control groups, v1 and v2, leave this process: its own groups and all
// those they lie in, as far as they can be seen from here.
#ifndef TD_BASE_CGROUP_H
#define TD_BASE_CGROUP_H

#include <stdint.h>

// Where to look; NULL: the system's own. Tests make up others.
typedef struct {
  const char *groups; // instead of /proc/self/cgroup
  const char *mounts; // instead of /proc/self/mountinfo
  const char *root;   // put before mount points
} td_cgroup_view;

// Bytes that may still be allocated before a limit is met; page cache does not count as used.
// UINT64_MAX: there is no limit.
uint64_t td_cgroup_memory_left(const td_cgroup_view *view);
// Bytes that may be allocated in all. UINT64_MAX: there is no limit.
uint64_t td_cgroup_memory_limit(const td_cgroup_view *view);
// CPUs' worth of time that the quotas allow, rounded up. UINT32_MAX: there is no quota.
uint32_t td_cgroup_cpus(const td_cgroup_view *view);

#endif
