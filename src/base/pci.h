// src/base/pci.h - what the kernel says of a PCI device.
#pragma once

// Bandwidth of the link to a PCI device in each direction, in 10^9 bytes/s after encoding: the
// lesser of the generation and lanes of the device and of its port. At full speed, even if the link
// has slowed down to save power. devices: /sys/bus/pci/devices. 0: unknown.
double td_pci_link_gbps(const char *devices, const char *pci_id);
