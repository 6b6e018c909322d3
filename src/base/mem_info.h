// src/base/mem_info.h - how much memory this process may still take, and in what pages.
#ifndef TD_BASE_MEM_INFO_H
#define TD_BASE_MEM_INFO_H

#include <stdint.h>

// The smaller of what the machine has available and what the process's control groups (v2) leave;
// page cache counts as available in both, shared memory (memfd, tmpfs) in neither. UINT64_MAX when
// neither can be read.
uint64_t td_memory_available_bytes(void);

// The most that can ever be available: all of the machine's memory, or a control group's limit.
// UINT64_MAX when neither can be read.
uint64_t td_memory_limit_bytes(void);

// How shared memory (memfd) can be backed.
typedef enum {
  TD_PAGES_PLAIN,
  TD_PAGES_TRANSPARENT, // 2 MB pages where the kernel finds them, after madvise(MADV_HUGEPAGE)
  TD_PAGES_RESERVED,    // 2 MB pages set aside by the administrator (hugetlb)
} td_page_kind;

#define TD_HUGE_PAGE_BYTES ((uint64_t)2 << 20)

// The largest pages that n_bytes of shared memory can have here.
td_page_kind td_memory_shared_pages(uint64_t n_bytes);
// Bytes of shared memory that this process has mapped in transparent 2 MB pages.
uint64_t td_memory_shared_huge_bytes(void);

#endif
