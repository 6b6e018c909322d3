// tests/cuda_emu/mistakes.h - what tests/unit/test_cuda_emu.c calls in the emulator's library.
#pragma once

enum {
  EMU_FINE,
  EMU_NO_BARRIER,         // between what a warp writes and another one reads
  EMU_NO_WARP_BARRIER,    // the same of lanes
  EMU_OVERWRITTEN,        // a lane reads what another one writes next
  EMU_BYTE,               // a lane reads the byte that another one has written beside its own
  EMU_BYTE_OF_PAIR,       // or writes its own of two that another one reads at once
  EMU_DYNAMIC,            // two threads write the same dynamic shared memory
  EMU_COPIED,             // what another thread has copied is read without a barrier
  EMU_NO_PUBLISH,         // wgmma reads what threads have written without a fence between the two
  EMU_LATE_PUBLISH,       // or with one, but behind the barrier
  EMU_NOT_FILLED,         // a warp reads what another one fills and does not wait for its arrival
  EMU_NOT_FREE,           // or fills it again while another one reads
  EMU_NOT_FREE_OF_ONE,    // of several, one of which has arrived
  EMU_LATE_ARRIVAL,       // or that one writes behind its arrival
  EMU_FILLED_UNPUBLISHED, // wgmma reads what has arrived without a fence
  EMU_LEFT_LANE,          // a lane has returned when the others shuffle
  EMU_NO_WAIT,            // a thread ends before the copy that it asked for
  EMU_MISALIGNED,         // eight bytes are loaded at once where four are aligned
  EMU_NO_BEGIN,           // wgmma without a fence before the first one
  EMU_NO_BEGIN_SUMS,      // or where its sums were written
  EMU_NO_BEGIN_ROWS,      // or the rows that it takes from registers
  EMU_N_MISTAKES
};

#ifdef __cplusplus
#include "emu.h"
extern "C"
    __attribute__((visibility("default")))
#endif
    // Returns whether races are looked for: not where another sanitizer is at work.
    bool
    emu_make_mistake(int which);
