// src/base/mem_info.h - memory available to this process, and the page sizes it can have.
#pragma once

#include <stdint.h>

// The smaller of what the machine and this process's control groups have left, in bytes. Page cache
// counts as available, shared memory (memfd, tmpfs) does not. UINT64_MAX: unknown.
uint64_t td_memory_available_bytes(void);

// Upper bound of the available memory in bytes: the machine's total, or a control group's limit.
// UINT64_MAX: unknown.
uint64_t td_memory_limit_bytes(void);

// Page size that backs shared memory (memfd).
typedef enum {
  TD_PAGES_PLAIN,
  TD_PAGES_TRANSPARENT, // 2 MB pages if the kernel has some, after madvise(MADV_HUGEPAGE)
  TD_PAGES_RESERVED,    // 2 MB pages reserved by the administrator (hugetlb)
} td_page_kind;

#define TD_HUGE_PAGE_BYTES ((uint64_t)2 << 20)

// The largest kind of pages available for n_bytes of shared memory.
td_page_kind td_memory_shared_pages(uint64_t n_bytes);
// Bytes of shared memory that this process maps in transparent 2 MB pages.
uint64_t td_memory_shared_huge_bytes(void);
