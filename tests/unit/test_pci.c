// tests/unit/test_pci.c - the link of a PCI device, from what the kernel says of it and its port.
// CTest: no-tsan
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/numa.h"
#include "base/status.h"
#include "unit/testing.h"

#define ID "0000:65:00.0"

static void put(const char *folder, const char *file, const char *text) {
  char path[256];
  snprintf(path, sizeof path, "%s/%s", folder, file);
  unlink(path);
  if (!text) return;
  FILE *f = fopen(path, "w");
  assert_non_null(f);
  fputs(text, f);
  fclose(f);
}

TEST(links) {
  static const struct {
    const char *speed, *width, *port_speed, *port_width;
    double gbps;
  } cases[] = {
      {"32.0 GT/s PCIe\n", "16\n", "32.0 GT/s PCIe\n", "16\n", 63.02},
      {"32.0 GT/s PCIe\n", "16\n", "16.0 GT/s PCIe\n", "16\n", 31.51}, // a new card in an old slot
      {"16.0 GT/s PCIe\n", "16\n", "32.0 GT/s PCIe\n", "16\n", 31.51},
      {"16.0 GT/s PCIe\n", "16\n", "16.0 GT/s PCIe\n", "4\n", 7.88}, // behind a riser
      {"5.0 GT/s PCIe\n", "16\n", NULL, NULL, 8},
      {"32.0 GT/s PCIe\n", "16\n", "Unknown\n", "0\n", 63.02},
      {"Unknown\n", "63\n", "32.0 GT/s PCIe\n", "16\n", 0},
      {"32.0 GT/s PCIe\n", "255\n", NULL, NULL, 0},
      {NULL, NULL, NULL, NULL, 0},
      {"", "", "", "", 0},
  };
  char root[] = "/tmp/tandem-pci-XXXXXX", port[64], device[80], devices[64], link_path[96];
  assert_non_null(mkdtemp(root));
  snprintf(port, sizeof port, "%s/port", root);
  snprintf(device, sizeof device, "%s/" ID, port);
  snprintf(devices, sizeof devices, "%s/devices", root);
  snprintf(link_path, sizeof link_path, "%s/" ID, devices);
  assert_true(mkdir(port, 0700) == 0 && mkdir(device, 0700) == 0 && mkdir(devices, 0700) == 0);
  assert_int_equal(symlink("../port/" ID, link_path), 0);
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    put(device, "max_link_speed", cases[i].speed);
    put(device, "max_link_width", cases[i].width);
    put(port, "max_link_speed", cases[i].port_speed);
    put(port, "max_link_width", cases[i].port_width);
    const double gbps = td_pci_link_gbps(devices, ID);
    if (gbps < cases[i].gbps - 0.01 || gbps > cases[i].gbps + 0.01) {
      fail_msg("case %zu: %f instead of %f", i, gbps, cases[i].gbps);
    }
  }
  for (int i = 0; i < 2; i++) {
    put(i ? port : device, "max_link_speed", NULL);
    put(i ? port : device, "max_link_width", NULL);
  }
  unlink(link_path);
  rmdir(devices);
  rmdir(device);
  rmdir(port);
  assert_int_equal(rmdir(root), 0);
}
