#include "support/folder.h"

#include <ftw.h>
#include <stdio.h>
#include <sys/stat.h>

static int remove_one(const char *path, const struct stat *info, int kind, struct FTW *ftw) {
  (void)info;
  (void)kind;
  (void)ftw;
  return remove(path);
}

void td_test_remove_folder(const char *path) {
  nftw(path, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}
