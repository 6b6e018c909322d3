// src/model/drive/arena.h - memory for some of a model's routed experts, in the segment of the
// resident weights, so that all workers and a restarted one find there what was read before.
//
// A table says for each expert which slot it is in. A slot is EMPTY, LOADING by one of the
// processes, READY, or FAILED. Whoever computes with slots pins them: pinned slots are not given to
// another expert. Of others, the one that was used least makes room: an expert's uses count half
// after each TD_ARENA_HALF_LIFE uses an expert, and all count, whether or not it was in a slot.
// Prompts, which use nearly all experts of each layer once, bypass it: their experts go first, and
// displace others only in a small part of the slots.
//
// A process that dies leaves its pins and what it was loading; the next one to open the arena, or
// who waits for such a slot, frees them. Everything in shared memory is under one robust lock, but
// the slots' content. Thread: one at a time for each td_expert_arena.
#pragma once

#include "model/drive/places.h"
#include "model/drive/reader.h"

enum { TD_ARENA_HALF_LIFE = 4 };

// The score of an expert that is used now, of n_experts in all layers, for the n_uses-th use of any
// of them: log2 of the sum of 2^(time of a use / half-life), so that scores keep their order while
// time goes by. score: after its last use, or 0. Experts with lower ones make room first.
double td_expert_score(double score, uint64_t n_uses, uint32_t n_experts);

typedef struct td_expert_arena td_expert_arena;

// Bytes of memory for an arena of n_slots.
uint64_t td_expert_arena_bytes(const td_expert_places *places, const td_store *store,
                               uint32_t n_slots);
// The slots that n_bytes hold.
uint32_t td_expert_arena_slots(const td_expert_places *places, const td_store *store,
                               uint64_t n_bytes);
// Makes an arena of n_slots in the memory that the resident weights at weights_fd have for it,
// whose pages it allocates. store: of the files. TD_ENOMEM, TD_EIO.
td_status td_expert_arena_create(int weights_fd, const td_expert_places *places,
                                 const td_store *store, uint32_t n_slots, td_err *err);

typedef struct {
  unsigned n_threads; // see td_drive_reader_opts
  const char *mirror; // likewise
  ssize_t (*pread)(int fd, void *to, size_t n_bytes, off_t offset);
} td_expert_arena_opts;

// Opens the arena of the weights that model was opened from; *out is NULL if they have none. model
// is borrowed.
td_status td_expert_arena_open(td_expert_arena **out, const td_model *model, int weights_fd,
                               const td_expert_arena_opts *opts, td_err *err);
// Pins are released.
void td_expert_arena_close(td_expert_arena *arena);

// An expert that was taken: its slot is pinned.
typedef struct {
  uint32_t expert;
  int32_t slot; // -1: not taken
} td_taken_expert;

// Sets slot of each: the one where the expert is or is being read to, or where reading it begins
// now. -1: all other slots are pinned. bypass: a prompt's. Returns how many were taken.
uint32_t td_expert_arena_take(td_expert_arena *arena, uint32_t layer_idx, td_taken_expert *experts,
                              uint32_t n, bool bypass);
void td_expert_arena_release(td_expert_arena *arena, const td_taken_expert *experts, uint32_t n);

// Begins to read those of the n experts that are in no slot, which will perhaps be taken: where
// prompts displace others, and only while nothing is being read. Sets slot of each as
// td_expert_arena_take does; -1 also for those that are in a slot already.
void td_expert_arena_prefetch(td_expert_arena *arena, uint32_t layer_idx, td_taken_expert *experts,
                              uint32_t n);
// Releases what was prefetched, when it is known what is wanted and before that is taken. Reads of
// the others that have not begun are dropped. is_wanted [n_experts]: by expert; NULL: none is.
void td_expert_arena_end_prefetch(td_expert_arena *arena, const td_taken_expert *experts,
                                  uint32_t n, const uint8_t *is_wanted);

typedef enum { TD_SLOT_LOADING, TD_SLOT_READY, TD_SLOT_FAILED } td_slot_state;
// Of a pinned slot.
td_slot_state td_expert_arena_state(const td_expert_arena *arena, int32_t slot);
// Why a pinned slot has failed: file, offset, expert. Returns TD_EIO.
td_status td_expert_arena_failure(const td_expert_arena *arena, int32_t slot, td_err *err);
// A number that changes whenever a slot's state does, or a pin is released.
uint32_t td_expert_arena_events(const td_expert_arena *arena);
// Waits until it is no longer n_events, a short time at most. Takes over what a process that died
// was reading to pinned slots.
void td_expert_arena_wait(td_expert_arena *arena, uint32_t n_events);

// The matrix's data in a READY slot.
const void *td_expert_arena_data(const td_expert_arena *arena, uint32_t layer_idx,
                                 const td_taken_expert *expert, int part);
const td_expert_places *td_expert_arena_places(const td_expert_arena *arena);
// Where all slots are.
const void *td_expert_arena_memory(const td_expert_arena *arena, size_t *n_bytes);

// hits, misses: experts that td_expert_arena_take found in a slot, read or being read, or not;
// since this process opened the arena. What was prefetched and wanted is a hit as well.
typedef struct {
  uint64_t hits, misses, prefetches_used, prefetches_unused;
  uint32_t n_slots, n_ready;
  uint64_t slot_bytes;
  td_drive_stats drive;
} td_expert_arena_stats;
td_expert_arena_stats td_expert_arena_stats_of(td_expert_arena *arena);

// For a process that computes with no experts and shares their drive. Any thread.
typedef struct {
  void *arena; // NULL: none is read from that drive
  size_t n_bytes;
} td_expert_watch;
// The weights' arena, if its files, or those of the folder mirror, are where the folder dir is.
td_status td_expert_watch_open(td_expert_watch *out, int weights_fd, const char *mirror,
                               const char *dir, td_err *err);
// Whether experts are being read, by any process.
bool td_expert_watch_is_busy(const td_expert_watch *watch);
void td_expert_watch_close(td_expert_watch *watch);
