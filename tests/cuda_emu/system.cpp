// tests/cuda_emu/system.cpp - what kernels and the host's threads read and write at the same time.
// ThreadSanitizer is to see it, though not the rest of the emulator.
#include "emu.h"

#include <chrono>
#include <thread>

void emu_store_for_all(uint32_t *signal, uint32_t value) {
  __atomic_store_n(signal, value, __ATOMIC_RELEASE);
}

uint32_t emu_load_from_all(const uint32_t *signal) {
  std::this_thread::yield(); // who is waited for may need this processor
  return __atomic_load_n(signal, __ATOMIC_ACQUIRE);
}

uint64_t emu_now_ns() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::nanoseconds(now).count());
}

void __nanosleep(unsigned) {
  std::this_thread::yield();
}
