#include "base/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"

#define MAX_PROC_BYTES (1u << 20)

// The number behind key at the start of a line; UINT64_MAX without one ("max" is none).
static uint64_t number_after(const char *text, const char *key) {
  size_t len = strlen(key);
  for (const char *line = text; line; line = strchr(line, '\n')) {
    if (*line == '\n') line++;
    if (strncmp(line, key, len)) continue;
    char *end;
    unsigned long long value = strtoull(line + len, &end, 10);
    return end == line + len ? UINT64_MAX : value;
  }
  return UINT64_MAX;
}

static uint64_t number_in(const char *path, const char *key) {
  td_buf text = TD_BUF_INIT;
  td_err err;
  uint64_t value = UINT64_MAX;
  if (td_file_read(&text, path, MAX_PROC_BYTES, &err) == TD_OK) {
    value = number_after(td_buf_text(&text), key);
  }
  td_buf_free(&text);
  return value;
}

static uint64_t machine_available(void) {
  uint64_t kib = number_in("/proc/meminfo", "MemAvailable:");
  return kib == UINT64_MAX ? kib : kib * 1024;
}

static uint64_t group_available(const char *group) {
  char path[4096 + 64];
  snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.max", group);
  uint64_t max = number_in(path, "");
  snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.current", group);
  uint64_t current = number_in(path, "");
  if (max == UINT64_MAX || current == UINT64_MAX) return UINT64_MAX;
  snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.stat", group);
  uint64_t cache = number_in(path, "file ");
  uint64_t used = cache < current ? current - cache : cache == UINT64_MAX ? current : 0;
  return used < max ? max - used : 0;
}

uint64_t td_memory_available_bytes(void) {
  uint64_t available = machine_available();
  td_buf text = TD_BUF_INIT;
  td_err err;
  char group[4096] = "";
  if (td_file_read(&text, "/proc/self/cgroup", MAX_PROC_BYTES, &err) == TD_OK) {
    const char *line = strstr(td_buf_text(&text), "0::/");
    if (line) snprintf(group, sizeof group, "%.*s", (int)strcspn(line + 3, "\n"), line + 3);
  }
  td_buf_free(&text);
  for (;;) { // a limit of any ancestor holds, too
    uint64_t left = group_available(group);
    if (left < available) available = left;
    char *slash = strrchr(group, '/');
    if (!slash) return available;
    *slash = '\0';
  }
}
