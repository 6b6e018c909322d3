// tests/cuda_emu/hooks.h - what tests call in the emulator's library to steer it, by dlsym.
#pragma once

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#define EMU_HOOK __attribute__((visibility("default")))
#else
#define EMU_HOOK
#endif

// Holds a device's copies to it, or to the host, as one that takes long would, until it is
// released. Returns when those that streams have got to are done.
EMU_HOOK void emu_hold_copies(int device, bool to_host);
EMU_HOOK void emu_release_copies(int device, bool to_host);

// Copies from pageable memory so far, which their callers waited for.
EMU_HOOK unsigned long emu_pageable_copies(void);

// Kernels launched so far, on all devices: on streams of green contexts, or on others.
EMU_HOOK unsigned long emu_launches(bool in_share);
// SMs of the green contexts that are open, on all devices.
EMU_HOOK unsigned emu_share_sms(void);

// A rank's group of transfers with this number, from 0, fails on the fake NCCL; group -1: the next
// one, -2: opening a communicator does; rank -1: none. In this process.
EMU_HOOK void emu_nccl_fail(int rank, int group);

#ifdef __cplusplus
}
#endif
