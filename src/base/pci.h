// src/base/pci.h - what the kernel says of a PCI device.
#ifndef TD_BASE_PCI_H
#define TD_BASE_PCI_H

// Bandwidth each way of the link to a PCI device, in 10^9 bytes/s: what its generation and lanes,
// and those of the port it is plugged into, allow after encoding. It is that of the fastest state,
// whichever the link is in now to save power. devices: /sys/bus/pci/devices. 0: unknown.
double td_pci_link_gbps(const char *devices, const char *pci_id);

#endif
