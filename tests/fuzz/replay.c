// tests/fuzz/replay.c - runs a fuzz target over every file of a corpus folder, in name order.
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/fs.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int is_file(const struct dirent *entry) {
  return entry->d_name[0] != '.';
}

int main(int argc, char **argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: %s CORPUS_DIR\n", argv[0]);
    return 2;
  }
  struct dirent **entries;
  int n = scandir(argv[1], &entries, is_file, alphasort);
  if (n <= 0) {
    fprintf(stderr, "%s: no corpus files\n", argv[1]);
    return 1;
  }
  for (int i = 0; i < n; i++) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", argv[1], entries[i]->d_name);
    td_buf bytes = TD_BUF_INIT;
    td_err err;
    if (td_file_read(&bytes, path, 1 << 26, &err) != TD_OK) {
      fprintf(stderr, "%s\n", err.msg);
      return 1;
    }
    LLVMFuzzerTestOneInput((const uint8_t *)td_buf_text(&bytes), bytes.len);
    td_buf_free(&bytes);
    free(entries[i]);
  }
  free(entries);
  printf("%d corpus files replayed\n", n);
  return 0;
}
