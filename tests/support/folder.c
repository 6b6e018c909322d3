#include "support/folder.h"

#include <ftw.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"

static int remove_one(const char *path, const struct stat *info, int kind, struct FTW *ftw) {
  (void)info;
  (void)kind;
  (void)ftw;
  return remove(path);
}

void td_test_remove_folder(const char *path) {
  nftw(path, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

const char *td_test_golden(const char *name) {
  static _Thread_local char path[PATH_MAX];
  const ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
  TD_CHECK(n > 0);
  path[n] = '\0';
  for (int i = 0; i < 2; i++)
    *strrchr(path, '/') = '\0'; // BUILD/bin/PROGRAM
  const size_t root = strlen(path);
  snprintf(path + root, sizeof path - root, "/golden/%s", name);
  if (access(path, R_OK) == 0) return path;
  fprintf(stderr, "%s is not there: ninja golden_models makes it\n", path);
  abort();
}
