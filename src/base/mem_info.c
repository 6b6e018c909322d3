// src/base/mem_info.c - reads /proc and /sys for memory sizes and huge-page settings.
#include "base/mem_info.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cgroup.h"
#include "base/fs.h"

#define MAX_PROC_BYTES (1u << 20)

// The number after key at the start of a line; UINT64_MAX if there is none ("max" counts as none).
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
  if (td_file_read(&text, path, MAX_PROC_BYTES, &err) == TD_OK)
    value = number_after(td_buf_text(&text), key);
  td_buf_free(&text);
  return value;
}

static uint64_t machine_bytes(const char *key) {
  uint64_t kib = number_in("/proc/meminfo", key);
  return kib == UINT64_MAX ? kib : kib * 1024;
}

uint64_t td_memory_available_bytes(void) {
  uint64_t machine = machine_bytes("MemAvailable:"), groups = td_cgroup_memory_left(NULL);
  return machine < groups ? machine : groups;
}

uint64_t td_memory_limit_bytes(void) {
  uint64_t machine = machine_bytes("MemTotal:"), groups = td_cgroup_memory_limit(NULL);
  return machine < groups ? machine : groups;
}

#define HUGETLB_DIR "/sys/kernel/mm/hugepages/hugepages-2048kB"
#define THP_DIR     "/sys/kernel/mm/transparent_hugepage"

static uint64_t reserved_bytes(void) {
  uint64_t n_free = number_in(HUGETLB_DIR "/free_hugepages", "");
  uint64_t n_promised = number_in(HUGETLB_DIR "/resv_hugepages", "");
  if (n_free == UINT64_MAX || n_promised == UINT64_MAX || n_promised > n_free) return 0;
  return (n_free - n_promised) * TD_HUGE_PAGE_BYTES;
}

// The bracketed word of "always [madvise] never"; "" if there is none.
static void chosen_word(char word[32], const char *path) {
  td_buf text = TD_BUF_INIT;
  td_err err;
  word[0] = '\0';
  if (td_file_read(&text, path, MAX_PROC_BYTES, &err) == TD_OK) {
    const char *open = strchr(td_buf_text(&text), '[');
    if (open) snprintf(word, 32, "%.*s", (int)strcspn(open + 1, "]"), open + 1);
  }
  td_buf_free(&text);
}

static bool has_transparent(void) {
  char word[32];
  chosen_word(word, THP_DIR "/hugepages-2048kB/shmem_enabled"); // since Linux 6.12
  if (!word[0] || !strcmp(word, "inherit")) chosen_word(word, THP_DIR "/shmem_enabled");
  return word[0] && strcmp(word, "never") != 0 && strcmp(word, "deny") != 0;
}

td_page_kind td_memory_shared_pages(uint64_t n_bytes) {
  if (reserved_bytes() >= n_bytes) return TD_PAGES_RESERVED;
  return has_transparent() ? TD_PAGES_TRANSPARENT : TD_PAGES_PLAIN;
}

uint64_t td_memory_shared_huge_bytes(void) {
  uint64_t kib = number_in("/proc/self/smaps_rollup", "ShmemPmdMapped:");
  return kib == UINT64_MAX ? 0 : kib * 1024;
}
