// src/base/pci.c - links of PCI devices; see pci.h.
#include "base/pci.h"

#include <stdio.h>

#include "base/buf.h"
#include "base/fs.h"

// A file's first number; 0: none.
static double number_in(const char *folder, const char *file) {
  char path[512];
  td_buf text = TD_BUF_INIT;
  td_err err;
  double n = 0;
  snprintf(path, sizeof path, "%s/%s", folder, file);
  if (td_file_read(&text, path, 64, &err) == TD_OK && sscanf(td_buf_text(&text), "%lf", &n) != 1)
    n = 0;
  td_buf_free(&text);
  return n;
}

// 128 bits of 130 are data from generation 3 (8 GT/s) on, 8 of 10 before. Lanes are at most 32.
static double side_gbps(const char *folder) {
  const double gts = number_in(folder, "max_link_speed"),
               lanes = number_in(folder, "max_link_width");
  if (!(gts > 0 && gts < 1000 && lanes >= 1 && lanes <= 32)) return 0;
  return gts * lanes / 8 * (gts < 8 ? 0.8 : 128. / 130);
}

double td_pci_link_gbps(const char *devices, const char *pci_id) {
  char folder[256];
  snprintf(folder, sizeof folder, "%s/%s", devices, pci_id);
  const double own = side_gbps(folder);
  snprintf(folder, sizeof folder, "%s/%s/..", devices, pci_id); // the links are followed first
  const double port = side_gbps(folder);
  return port > 0 && port < own ? port : own;
}
