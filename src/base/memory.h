// src/base/memory.h - how much memory this process may still take.
#ifndef TD_BASE_MEMORY_H
#define TD_BASE_MEMORY_H

#include <stdint.h>

// The smaller of what the machine has available and what the process's control groups (v2) leave;
// page cache counts as available in both. UINT64_MAX when neither can be read.
uint64_t td_memory_available_bytes(void);

#endif
