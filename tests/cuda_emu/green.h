// tests/cuda_emu/green.h - green contexts, and what they need of the emulated devices.
#pragma once

#include "cuda.h"

#include <atomic>

struct emu_green {
  const int device;
  const unsigned n_sms;
  std::atomic<long> n_streams{0};
};

// green.cpp: a function of the driver of this version or later, or null.
void *emu_driver_function(const char *symbol, unsigned version);

// runtime.cpp
int emu_capability();
int emu_n_devices();
int emu_n_sms();
CUstream emu_stream_in(emu_green *context);
