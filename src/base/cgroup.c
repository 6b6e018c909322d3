#include "base/cgroup.h"

#include <stdio.h>
#include <string.h>

#include "base/fs.h"

void td_cgroup_get(char group[TD_CGROUP_MAX]) {
  td_buf text = TD_BUF_INIT;
  td_err err;
  group[0] = '\0';
  if (td_file_read(&text, "/proc/self/cgroup", 1 << 20, &err) == TD_OK) {
    const char *line = strstr(td_buf_text(&text), "0::/");
    if (line) snprintf(group, TD_CGROUP_MAX, "%.*s", (int)strcspn(line + 3, "\n"), line + 3);
  }
  td_buf_free(&text);
}

bool td_cgroup_up(char group[TD_CGROUP_MAX]) {
  char *slash = strrchr(group, '/');
  if (slash) *slash = '\0';
  return slash != NULL;
}
