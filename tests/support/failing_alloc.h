// tests/support/failing_alloc.h - makes one chosen allocation of a program fail, and finds what is
// never freed. The program links with the --wrap options of tests/CMakeLists.txt, which cover the
// calls made by tandem's code and, after fa_begin, cJSON's; not those inside libc and other
// libraries.
#pragma once

#include <stddef.h>
#include <stdint.h>

// Where an allocation is made, the same in every process forked from one.
typedef struct {
  const void *caller; // of malloc; NULL: nowhere
  uint64_t hash;      // of the return addresses on the stack
} fa_site;

// Starts tracking. From now on the idx-th allocation (from 0) at site fails, and no other: malloc
// returns NULL, mmap MAP_FAILED, with errno ENOMEM. Without a caller none fails, and sites are
// listed. The calls that led to the failure are written to fd, for addr2line.
void fa_begin(fa_site site, uint32_t idx, int fd);
// Stops; allocations made from now on succeed and are not tracked, but frees still are.
void fa_end(void);

// Sites reached since fa_begin, in order of first appearance, without those whose calls others
// have, too, three in a row. Returns their number; *out is borrowed.
size_t fa_sites(const fa_site **out);
// Whether the chosen allocation was reached.
int fa_has_failed(void);
// Number of allocations since fa_begin that are not freed. Prints where each was made.
size_t fa_print_leaks(void);
