// tests/unit/arena_test.h - weights whose experts are not in memory, and a drive that is odd.
#pragma once

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "model/checkpoint/resident.h"
#include "model/convert.h"
#include "model/drive/arena.h"
#include "unit/testing.h"

// Of reads: whether any is delayed, cut short, interrupted or fails once in a while; and a range of
// offsets that always fails.
static _Atomic unsigned drive_seed;
static _Atomic uint64_t bad_from = UINT64_MAX, bad_to;
static _Atomic unsigned n_reads;
// Reads wait while this is so.
static atomic_bool is_drive_stuck;

static inline unsigned next_random(void) {
  unsigned x = atomic_load(&drive_seed) + atomic_fetch_add(&n_reads, 1) * 2654435769u;
  x ^= x >> 15;
  x *= 2246822519u;
  x ^= x >> 13;
  x *= 3266489917u;
  return x ^ x >> 16;
}

static inline ssize_t odd_pread(int fd, void *to, size_t n_bytes, off_t offset) {
  const unsigned r = next_random();
  while (atomic_load(&is_drive_stuck))
    usleep(100);
  if (offset + (off_t)n_bytes > (off_t)atomic_load(&bad_from) &&
      offset < (off_t)atomic_load(&bad_to)) {
    errno = EIO;
    return -1;
  }
  if (!atomic_load(&drive_seed)) return pread(fd, to, n_bytes, offset);
  if (r % 4 == 0) usleep(r >> 8 & 1023);
  static _Thread_local unsigned n_well; // never twice in a row: a read is tried three times
  n_well++;
  if (r % 31 == 1 || (r % 37 == 2 && n_well > 40)) {
    errno = r % 31 == 1 ? EINTR : EIO;
    if (errno == EIO) n_well = 0;
    return -1;
  }
  if (r % 7 == 3 && n_bytes > 4096) n_bytes = 4096;
  if (r % 11 == 4 && n_bytes > 1000) n_bytes = 1000 + r % 512;
  return pread(fd, to, n_bytes, offset);
}

static td_expert_arena_opts odd_drive = {.n_threads = 4, .pread = odd_pread};

static inline void arena_poison(int fd, const td_expert_places *places, const td_store *store) {
  td_resident r;
  td_err err;
  assert_int_equal(td_resident_attach(&r, fd, &err), TD_OK);
  char *all = mmap(NULL, r.n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  assert_true(all != MAP_FAILED);
  const size_t n = (size_t)places->n_layers * places->n_experts * TD_EXPERT_PARTS;
  for (size_t i = 0; i < n; i++) {
    const td_expert_part *p = &places->parts[i];
    size_t n_shard;
    const char *shard = td_resident_find(&r, td_store_shard(store, p->shard).name, &n_shard);
    char *at = all + (shard - r.base) + p->offset;
    const char *stored = (const char *)td_store_shard(store, p->shard).bytes + p->offset;
    if (p->n_bytes < TD_DRIVE_ALIGN) assert_memory_equal(at, stored, p->n_bytes); // not turned
    memset(at, 0xff, p->n_bytes);
  }
  munmap(all, r.n_bytes);
  td_resident_detach(&r);
}

static inline int arena_by_begin(const void *a, const void *b) {
  const td_shard_range *x = a, *y = b;
  if (x->shard != y->shard) return x->shard < y->shard ? -1 : 1;
  return (x->begin > y->begin) - (x->begin < y->begin);
}

static inline size_t arena_ranges(td_shard_range **out, const td_expert_places *places) {
  const size_t n = (size_t)places->n_layers * places->n_experts * TD_EXPERT_PARTS;
  size_t n_ranges = 0;
  *out = calloc(n, sizeof **out);
  for (size_t i = 0; i < n; i++) {
    const td_expert_part *p = &places->parts[i];
    if (p->n_bytes)
      (*out)[n_ranges++] = (td_shard_range){p->shard, p->offset, p->offset + p->n_bytes};
  }
  qsort(*out, n_ranges, sizeof **out, arena_by_begin);
  return n_ranges;
}

// Resident weights without experts, which come from an arena of n_slots; 0: a token's.
static inline int load_weights(const char *dir, uint32_t n_slots) {
  td_model *model;
  td_store *store;
  td_expert_places places;
  td_resident_stats stats;
  td_err err;
  int fd;
  if (td_model_open_shapes(&model, dir, &err) != TD_OK) fail_msg("%s", err.msg);
  if (td_expert_places_open(&places, model, &err) != TD_OK) fail_msg("%s", err.msg);
  assert_int_equal(td_store_open(&store, dir, &err), TD_OK);
  if (!n_slots) n_slots = td_model_config_of(model)->top_k;
  td_quant *quant;
  td_conversion *conversion;
  td_shard_range *ranges;
  const size_t n_ranges = arena_ranges(&ranges, &places);
  assert_int_equal(td_quant_open_dir(&quant, dir, &err), TD_OK);
  assert_int_equal(td_conversion_open(&conversion, store, quant, &err), TD_OK);
  const td_resident_opts opts = {.arena_bytes = td_expert_arena_bytes(&places, store, n_slots),
                                 .conversion = conversion,
                                 .left_out = ranges,
                                 .n_left_out = n_ranges};
  if (td_resident_load(&fd, &stats, store, &opts, &err) != TD_OK) fail_msg("%s", err.msg);
  if (td_expert_arena_create(fd, &places, store, n_slots, &err) != TD_OK) fail_msg("%s", err.msg);
  arena_poison(fd, &places, store);
  td_conversion_close(conversion);
  td_quant_close(quant);
  free(ranges);
  td_expert_places_close(&places);
  td_store_close(store);
  td_model_close(model);
  return fd;
}
