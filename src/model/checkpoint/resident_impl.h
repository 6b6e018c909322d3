// src/model/checkpoint/resident_impl.h - layout of the shared memory: a table of shards, then each
// shard at a multiple of RESIDENT_ALIGN, as O_DIRECT needs. The total is a multiple of 2 MB.
#pragma once

#include <assert.h>
#include <fcntl.h>
#include <stdint.h>

#define RESIDENT_MAGIC   0x57524454u // "TDRW"
#define RESIDENT_VERSION 2u
#define RESIDENT_SEALS   (F_SEAL_SHRINK | F_SEAL_GROW) // required at least
#define RESIDENT_NAME    256
#define RESIDENT_ALIGN   4096u // of offset, length and address; sufficient for any O_DIRECT

typedef struct {
  uint64_t offset, n_bytes;
  char name[RESIDENT_NAME]; // file name, NUL-terminated
} resident_shard;
static_assert(sizeof(resident_shard) == 272, "shared layout");

typedef struct {
  uint32_t magic, version, n_shards;
  uint32_t n_nodes;      // NUMA nodes that stripes lie on in turn; 1: wherever
  uint64_t stripe_bytes; // counted from the beginning of the memory
  resident_shard shards[];
} resident_head;
static_assert(sizeof(resident_head) == 24, "shared layout");

static inline uint64_t resident_head_bytes(uint64_t n_shards) {
  return sizeof(resident_head) + n_shards * sizeof(resident_shard);
}
