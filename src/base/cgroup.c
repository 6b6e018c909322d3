// src/base/cgroup.c - reads the limits of control groups.
// /proc/self/cgroup names this process's group in each hierarchy. /proc/self/mountinfo tells where
// the hierarchies are mounted and which group each mount point shows. In a container without a
// cgroup namespace both contain the same path of the host, which is removed.
#include "base/cgroup.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"

#define MAX_PATH       4096
#define MAX_FILE_BYTES (16u << 20)
#define MAX_LINE       (2 * MAX_PATH + 1024)
#define NO_LIMIT       UINT64_MAX
#define V1_NO_LIMIT    ((uint64_t)1 << 62) // v1: the largest multiple of a page

// One of this process's groups, in one hierarchy.
typedef struct {
  char path[2 * MAX_PATH]; // its directory
  size_t top_len;          // length of the mount point, which path begins with
  bool is_v2;
} group;

// ---- files --------------------------------------------------------------------------------------

// out is empty if the file cannot be read.
static void read_text(td_buf *out, const char *path) {
  td_err err;
  td_buf_clear(out);
  if (td_file_read(out, path, MAX_FILE_BYTES, &err) != TD_OK) td_buf_clear(out);
}

// The number after key at the start of a line. NO_LIMIT if there is none; "max" and "-1" count as
// none.
static uint64_t number_in(const group *g, const char *file, const char *key) {
  char path[sizeof g->path + 64];
  td_buf text = TD_BUF_INIT;
  snprintf(path, sizeof path, "%s/%s", g->path, file);
  read_text(&text, path);
  uint64_t value = NO_LIMIT;
  for (const char *line = td_buf_text(&text); line; line = strchr(line, '\n')) {
    if (*line == '\n') line++;
    if (strncmp(line, key, strlen(key)) != 0) continue;
    const char *digits = line + strlen(key);
    if (*digits >= '0' && *digits <= '9') value = strtoull(digits, NULL, 10);
    break;
  }
  td_buf_free(&text);
  return value;
}

// ---- finding the groups -------------------------------------------------------------------------

static bool has_word(const char *words, const char *word) {
  size_t len = strlen(word);
  for (const char *at = words; at; at = strchr(at, ',')) {
    if (*at == ',') at++;
    if (strncmp(at, word, len) == 0 && (at[len] == '\0' || at[len] == ',')) return true;
  }
  return false;
}

// The next line of a text, truncated to fit. False: end of text.
static bool next_line(const char **text, char line[MAX_LINE]) {
  if (!**text) return false;
  size_t len = strcspn(*text, "\n");
  snprintf(line, MAX_LINE, "%.*s", (int)(len < MAX_LINE ? len : MAX_LINE - 1), *text);
  *text += len + ((*text)[len] == '\n');
  return true;
}

// Finds the group's name: "4:memory:/a/b" for a v1 controller, "0::/a/b" for v2.
static bool find_name(char out[MAX_PATH], const char *groups, const char *controller, bool is_v2) {
  char line[MAX_LINE];
  while (next_line(&groups, line)) {
    char *words = strchr(line, ':'), *name = words ? strchr(words + 1, ':') : NULL;
    if (!name) continue;
    *words++ = *name++ = '\0';
    if (is_v2 ? strcmp(line, "0") != 0 || *words : !has_word(words, controller)) continue;
    snprintf(out, MAX_PATH, "%.*s", MAX_PATH - 1, name);
    return true;
  }
  return false;
}

// "31 23 0:27 /shown /mount/point options [fields] - cgroup2 source options"
static bool parse_mount(char *line, const char *controller, char **shown, char **point,
                        bool *is_v2) {
  char *end = strstr(line, " - "), *save, *fields[5], *type, *options;
  if (!end) return false;
  *end = '\0';
  char *word = strtok_r(line, " ", &save);
  for (int i = 0; i < 5; i++, word = strtok_r(NULL, " ", &save)) {
    if (!word) return false;
    fields[i] = word;
  }
  type = strtok_r(end + 3, " ", &save);
  strtok_r(NULL, " ", &save); // skip the source
  options = strtok_r(NULL, " ", &save);
  if (!type || !options) return false;
  *shown = fields[3];
  *point = fields[4];
  *is_v2 = strcmp(type, "cgroup2") == 0;
  return *is_v2 || (strcmp(type, "cgroup") == 0 && has_word(options, controller));
}

// The part of a group's name below the group that a mount shows; "" if it is not below it.
static const char *below(const char *name, const char *shown) {
  size_t len = strcmp(shown, "/") == 0 ? 0 : strlen(shown);
  bool is_below = strncmp(name, shown, len) == 0 && (name[len] == '/' || name[len] == '\0');
  return is_below && strcmp(name + len, "/") != 0 ? name + len : "";
}

typedef uint64_t (*limit_fn)(const group *g);

// The smallest limit of this process's group and all its ancestors.
static uint64_t smallest(const td_cgroup_view *view, const char *controller, limit_fn limit) {
  const char *root = view && view->root ? view->root : "";
  char line[MAX_LINE], name[MAX_PATH], *shown, *point;
  td_buf groups = TD_BUF_INIT, mounts = TD_BUF_INIT;
  read_text(&groups, view && view->groups ? view->groups : "/proc/self/cgroup");
  read_text(&mounts, view && view->mounts ? view->mounts : "/proc/self/mountinfo");
  uint64_t least = NO_LIMIT;
  group *g = malloc(sizeof *g);
  for (const char *text = td_buf_text(&mounts); g && next_line(&text, line);) {
    if (!parse_mount(line, controller, &shown, &point, &g->is_v2)) continue;
    if (!find_name(name, td_buf_text(&groups), controller, g->is_v2)) continue;
    g->top_len = (size_t)snprintf(g->path, sizeof g->path, "%s%s", root, point);
    if (g->top_len >= sizeof g->path - MAX_PATH) continue;
    snprintf(g->path + g->top_len, sizeof g->path - g->top_len, "%s", below(name, shown));
    for (;;) {
      uint64_t value = limit(g);
      if (value < least) least = value;
      char *slash = strrchr(g->path + g->top_len, '/');
      if (!slash) break;
      *slash = '\0'; // continue with the parent group
    }
  }
  free(g);
  td_buf_free(&groups);
  td_buf_free(&mounts);
  return least;
}

// ---- memory -------------------------------------------------------------------------------------

static uint64_t min_u64(uint64_t a, uint64_t b) {
  return a < b ? a : b;
}

// "file" and "total_cache" include shared memory, which cannot be reclaimed like cache.
static uint64_t left_of(uint64_t max, uint64_t current, uint64_t file, uint64_t shmem) {
  if (max == NO_LIMIT || current == NO_LIMIT) return NO_LIMIT;
  if (file == NO_LIMIT) file = 0;
  if (shmem == NO_LIMIT) shmem = 0;
  uint64_t cache = shmem < file ? file - shmem : 0, used = cache < current ? current - cache : 0;
  return used < max ? max - used : 0;
}

static uint64_t memory_limit(const group *g) {
  if (g->is_v2) // above memory.high a process is throttled until it hardly progresses
    return min_u64(number_in(g, "memory.max", ""), number_in(g, "memory.high", ""));
  // The hierarchical limit includes groups above the mount point.
  const uint64_t max = min_u64(number_in(g, "memory.limit_in_bytes", ""),
                               number_in(g, "memory.stat", "hierarchical_memory_limit "));
  return max < V1_NO_LIMIT ? max : NO_LIMIT;
}

static uint64_t memory_left(const group *g) {
  if (g->is_v2) {
    return left_of(memory_limit(g), number_in(g, "memory.current", ""),
                   number_in(g, "memory.stat", "file "), number_in(g, "memory.stat", "shmem "));
  }
  return left_of(memory_limit(g), number_in(g, "memory.usage_in_bytes", ""),
                 number_in(g, "memory.stat", "total_cache "),
                 number_in(g, "memory.stat", "total_shmem "));
}

uint64_t td_cgroup_memory_left(const td_cgroup_view *view) {
  return smallest(view, "memory", memory_left);
}

uint64_t td_cgroup_memory_limit(const td_cgroup_view *view) {
  return smallest(view, "memory", memory_limit);
}

// ---- CPU time -----------------------------------------------------------------------------------

static uint64_t cpus_of(const group *g) {
  uint64_t quota, period;
  if (g->is_v2) { // "max 100000" means no quota
    char key[32];
    quota = number_in(g, "cpu.max", "");
    snprintf(key, sizeof key, "%llu ", (unsigned long long)quota);
    period = quota == NO_LIMIT ? NO_LIMIT : number_in(g, "cpu.max", key);
  } else {
    quota = number_in(g, "cpu.cfs_quota_us", "");
    period = number_in(g, "cpu.cfs_period_us", "");
  }
  if (quota == NO_LIMIT || period == NO_LIMIT || period == 0) return NO_LIMIT;
  uint64_t n = quota / period + (quota % period != 0);
  return n ? n : 1;
}

uint32_t td_cgroup_cpus(const td_cgroup_view *view) {
  uint64_t n = smallest(view, "cpu", cpus_of);
  return n < UINT32_MAX ? (uint32_t)n : UINT32_MAX;
}
