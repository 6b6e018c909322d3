// tests/unit/test_cgroup.c - limits of control groups, on hierarchies made up in a folder.
// CTest: no-tsan
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/cgroup.h"
#include "base/fs.h"
#include "base/units.h"
#include "unit/testing.h"

typedef struct {
  char root[64], groups[96], mounts[96];
  td_cgroup_view view;
} machine;

static void put(const machine *m, const char *path, const char *text) {
  char full[512];
  td_err err;
  snprintf(full, sizeof full, "%s/%s", m->root, path);
  for (char *slash = full + strlen(m->root) + 1; (slash = strchr(slash, '/')); slash++) {
    *slash = '\0';
    mkdir(full, 0700);
    *slash = '/';
  }
  assert_int_equal(td_file_write(full, text, strlen(text), &err), TD_OK);
}

static void make(machine *m, const char *groups, const char *mounts) {
  strcpy(m->root, "/tmp/test_cgroup.XXXXXX");
  assert_non_null(mkdtemp(m->root));
  snprintf(m->groups, sizeof m->groups, "%s/groups", m->root);
  snprintf(m->mounts, sizeof m->mounts, "%s/mounts", m->root);
  put(m, "groups", groups);
  put(m, "mounts", mounts);
  m->view = (td_cgroup_view){.groups = m->groups, .mounts = m->mounts, .root = m->root};
}

static void discard(const machine *m) {
  char command[128];
  snprintf(command, sizeof command, "rm -r %s", m->root);
  assert_int_equal(system(command), 0);
}

#define V1_MOUNTS                                                                                  \
  "30 25 0:26 / /cg rw - tmpfs tmpfs rw,mode=755\n"                                                \
  "31 30 0:27 / /cg/cpu,cpuacct rw,relatime shared:5 - cgroup cgroup rw,cpu,cpuacct\n"             \
  "32 30 0:28 / /cg/memory rw,relatime - cgroup cgroup rw,memory\n"                                \
  "33 30 0:29 / /cg/unified rw,relatime - cgroup2 cgroup2 rw\n"

TEST(v1) {
  machine m;
  make(&m, "9:name=systemd:/\n4:memory:/outer/inner\n2:cpu,cpuacct:/half\n0::/\n", V1_MOUNTS);
  put(&m, "cg/memory/outer/inner/memory.limit_in_bytes", "9223372036854771712\n");
  put(&m, "cg/memory/outer/inner/memory.usage_in_bytes", "1048576\n");
  put(&m, "cg/cpu,cpuacct/half/cpu.cfs_quota_us", "-1\n");
  put(&m, "cg/cpu,cpuacct/half/cpu.cfs_period_us", "100000\n");
  assert_int_equal(td_cgroup_memory_left(&m.view), UINT64_MAX);
  assert_int_equal(td_cgroup_cpus(&m.view), UINT32_MAX);
  put(&m, "cg/cpu,cpuacct/half/cpu.cfs_quota_us", "50000\n");
  assert_int_equal(td_cgroup_cpus(&m.view), 1);
  put(&m, "cg/cpu,cpuacct/half/cpu.cfs_quota_us", "250000\n");
  assert_int_equal(td_cgroup_cpus(&m.view), 3);
  // A limit of the group around it, of which 60 MiB are cache that is not shared memory.
  put(&m, "cg/memory/outer/memory.limit_in_bytes", "314572800\n");
  put(&m, "cg/memory/outer/memory.usage_in_bytes", "104857600\n");
  put(&m, "cg/memory/outer/memory.stat", "cache 7\ntotal_cache 73400320\ntotal_shmem 10485760\n");
  assert_int_equal(td_cgroup_memory_left(&m.view), 260 * TD_MIB);
  discard(&m);
}

// Of groups above what a container sees only the sum is known.
TEST(v1_limit_out_of_sight) {
  machine m;
  make(&m, "4:memory:/docker/abc\n2:cpu:/docker/abc\n",
       "32 30 0:28 /docker/abc /cg/memory ro - cgroup cgroup rw,memory\n"
       "31 30 0:27 /docker/abc /cg/cpu ro - cgroup cgroup rw,cpu\n");
  put(&m, "cg/memory/memory.limit_in_bytes", "9223372036854771712\n");
  put(&m, "cg/memory/memory.usage_in_bytes", "52428800\n");
  put(&m, "cg/memory/memory.stat", "hierarchical_memory_limit 209715200\n");
  put(&m, "cg/cpu/cpu.cfs_quota_us", "200000\n");
  put(&m, "cg/cpu/cpu.cfs_period_us", "100000\n");
  assert_int_equal(td_cgroup_memory_left(&m.view), 150 * TD_MIB);
  assert_int_equal(td_cgroup_memory_limit(&m.view), 200 * TD_MIB);
  assert_int_equal(td_cgroup_cpus(&m.view), 2);
  discard(&m);
}

TEST(v2) {
  machine m;
  make(&m, "0::/slice/unit\n", "30 25 0:26 / /cg rw - cgroup2 cgroup2 rw,nsdelegate\n");
  put(&m, "cg/slice/unit/memory.max", "max\n");
  put(&m, "cg/slice/unit/memory.current", "1048576\n");
  put(&m, "cg/slice/unit/cpu.max", "max 100000\n");
  assert_int_equal(td_cgroup_memory_left(&m.view), UINT64_MAX);
  assert_int_equal(td_cgroup_cpus(&m.view), UINT32_MAX);
  put(&m, "cg/slice/memory.max", "314572800\n");
  put(&m, "cg/slice/memory.current", "104857600\n");
  put(&m, "cg/slice/memory.stat", "anon 1\nfile 73400320\nshmem 10485760\n");
  put(&m, "cg/slice/cpu.max", "150000 100000\n");
  assert_int_equal(td_cgroup_memory_left(&m.view), 260 * TD_MIB);
  assert_int_equal(td_cgroup_cpus(&m.view), 2);
  put(&m, "cg/slice/unit/memory.high", "104857600\n");
  assert_int_equal(td_cgroup_memory_left(&m.view), 99 * TD_MIB);
  assert_int_equal(td_cgroup_memory_limit(&m.view), 100 * TD_MIB);
  discard(&m);
}

TEST(no_groups) {
  machine m;
  make(&m, "", "");
  assert_int_equal(td_cgroup_memory_left(&m.view), UINT64_MAX);
  assert_int_equal(td_cgroup_cpus(&m.view), UINT32_MAX);
  put(&m, "mounts", "nothing of use\n1 2 3 - cgroup2\n32 30 0:28 / /cg rw - cgroup c rw,memory\n");
  put(&m, "groups", "4\n4:memory\n4:memory:\n");
  assert_int_equal(td_cgroup_memory_left(&m.view), UINT64_MAX);
  discard(&m);
}
