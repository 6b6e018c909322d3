// src/base/cgroup.h - the process's control group (v2) and those it lies in. Paths are behind
// /sys/fs/cgroup; the root's is "".
#ifndef TD_BASE_CGROUP_H
#define TD_BASE_CGROUP_H

#include <stdbool.h>

enum { TD_CGROUP_MAX = 4096 };

void td_cgroup_get(char group[TD_CGROUP_MAX]);
// The group that this one lies in, in its place. False: it is the root.
bool td_cgroup_up(char group[TD_CGROUP_MAX]);

#endif
