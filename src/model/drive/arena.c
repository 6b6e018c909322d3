// src/model/drive/arena.c - the table, the slots and who makes room.
#include "model/drive/arena.h"

#include <assert.h>
#include <errno.h>
#include <linux/futex.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/units.h"
#include "model/checkpoint/resident.h"

#define ARENA_MAGIC 0x45414454u // "TDAE"
#define PIECE_BYTES ((uint64_t)1 << 20)
#define CHUNK_BYTES ((uint64_t)64 << 20) // of memory that is allocated at once
#define WAIT_NS     50000000
#define HAS_ENDED   UINT64_MAX

enum {
  VERSION = 2,
  MAX_OWNERS = 8,
  NO_OWNER = 255,
  BYPASS_PART = 8, // prompts displace others in one of so many slots
};

enum { SLOT_EMPTY, SLOT_LOADING, SLOT_READY, SLOT_FAILED };

// A process that uses the arena; pid 0: free.
typedef struct {
  int32_t pid;
  uint32_t reserved;
  uint64_t started; // by /proc: a pid may be given again
} arena_owner;

typedef struct {
  uint32_t key; // layer * n_experts + expert, unless EMPTY
  uint32_t generation;
  uint32_t pinned_by; // bit i: owner i
  _Atomic uint8_t state;
  uint8_t loader;
  bool is_bypass;     // it was read by a prompt, and not used in decode since
  uint8_t error_part; // FAILED: of which part, and its errno
  int32_t error;
} arena_slot;
static_assert(sizeof(arena_slot) == 20, "shared layout");

// Followed by ids [n_shards], scores f64 [n_layers * n_experts], as much of a table i32, slots
// [n_slots] and, at slots_at, their content.
typedef struct {
  uint32_t magic, version, n_layers, n_experts, n_slots, n_shards;
  uint64_t slot_bytes, scores_at, table_at, entries_at, slots_at;
  pthread_mutex_t lock;
  _Atomic uint32_t n_events, n_waiters;
  arena_owner owners[MAX_OWNERS];
  uint64_t n_uses;   // in decode
  uint32_t n_bypass; // slots that hold an expert and have is_bypass
  _Atomic uint32_t n_loading;
} arena_head;

struct td_expert_arena {
  arena_head *head;
  size_t n_bytes;
  double *scores; // td_expert_score of all experts
  int32_t *table;
  arena_slot *slots;
  td_expert_places places;
  const td_store *store;
  td_drive_reader *reader;
  uint32_t owner;
  _Atomic uint32_t *pieces; // [n_slots]: reads of this process that have not ended
  uint32_t *n_pins;         // [n_slots]: this process's, by several engines
  uint32_t *victims;        // [n_slots]
  uint64_t hits, misses, prefetches_used, prefetches_unused;
  uint64_t adopted_ns; // when adopt ran last
};

static uint64_t round_up(uint64_t n, uint64_t unit) {
  return (n + unit - 1) / unit * unit;
}

// ---- layout -------------------------------------------------------------------------------------

static arena_head layout_of(const td_expert_places *places, size_t n_shards, uint32_t n_slots) {
  arena_head h = {.magic = ARENA_MAGIC,
                  .version = VERSION,
                  .n_layers = places->n_layers,
                  .n_experts = places->n_experts,
                  .n_slots = n_slots,
                  .n_shards = (uint32_t)n_shards,
                  .slot_bytes = places->slot_bytes};
  h.scores_at = round_up(sizeof h, 64) + n_shards * sizeof(td_file_id);
  const uint64_t n = (uint64_t)places->n_layers * places->n_experts;
  h.table_at = h.scores_at + n * sizeof(double);
  h.entries_at = round_up(h.table_at + n * sizeof(int32_t), 64);
  h.slots_at = round_up(h.entries_at + n_slots * sizeof(arena_slot), TD_DRIVE_ALIGN);
  return h;
}

static td_file_id *ids_of(arena_head *h) {
  return (td_file_id *)((char *)h + round_up(sizeof *h, 64));
}

uint64_t td_expert_arena_bytes(const td_expert_places *places, const td_store *store,
                               uint32_t n_slots) {
  const arena_head h = layout_of(places, td_store_n_shards(store), n_slots);
  return h.slots_at + n_slots * h.slot_bytes;
}

uint32_t td_expert_arena_slots(const td_expert_places *places, const td_store *store,
                               uint64_t n_bytes) {
  const uint64_t fixed = td_expert_arena_bytes(places, store, 0);
  const uint64_t all = (uint64_t)places->n_layers * places->n_experts;
  if (n_bytes <= fixed) return 0;
  uint64_t n = (n_bytes - fixed) / places->slot_bytes;
  if (n > all) n = all;
  while (n && td_expert_arena_bytes(places, store, (uint32_t)n) > n_bytes)
    n--;
  return (uint32_t)n;
}

// ---- creating -----------------------------------------------------------------------------------

// Maps the arena's part of the weights for writing. *n_bytes 0: there is none.
static td_status map_arena(int fd, void **out, size_t *n_bytes, td_err *err) {
  td_resident r;
  td_status st = td_resident_attach(&r, fd, err);
  if (st != TD_OK) return st;
  const char *at = td_resident_find(&r, TD_RESIDENT_EXPERTS, n_bytes);
  const off_t offset = at ? at - r.base : 0;
  td_resident_detach(&r);
  if (!at) return TD_OK;
  void *map = mmap(NULL, *n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, offset);
  if (map == MAP_FAILED) {
    return td_fail(err, TD_ENOMEM, "cannot map %zu bytes for experts: %s", *n_bytes,
                   strerror(errno));
  }
  madvise(map, *n_bytes, MADV_HUGEPAGE); // subject to the kernel's THP settings
  *out = map;
  return TD_OK;
}

// Allocates all pages: a lack of memory is found here, not by a signal later.
static td_status populate(char *base, size_t n_bytes, td_err *err) {
#ifndef MADV_POPULATE_WRITE
  enum { MADV_POPULATE_WRITE = 23 };
#endif
  for (size_t at = 0, n; at < n_bytes; at += n) {
    n = n_bytes - at < CHUNK_BYTES ? n_bytes - at : CHUNK_BYTES;
    if (madvise(base + at, n, MADV_POPULATE_WRITE) == 0 || errno == EINVAL) continue;
    return td_fail(err, TD_ENOMEM,
                   "no memory for %s of experts beside the other weights: %s; give --weights "
                   "stream=GIB with less",
                   td_size(n_bytes).text, strerror(errno));
  }
  return TD_OK;
}

static td_status format(arena_head *h, const td_expert_places *places, const td_store *store,
                        uint32_t n_slots, td_err *err) {
  pthread_mutexattr_t attr;
  td_status st = TD_OK;
  *h = layout_of(places, td_store_n_shards(store), n_slots);
  pthread_mutexattr_init(&attr);
  pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
  if (pthread_mutex_init(&h->lock, &attr) != 0)
    st = td_fail(err, TD_EINTERNAL, "the system has no locks that processes share");
  pthread_mutexattr_destroy(&attr);
  for (uint32_t i = 0; i < h->n_shards && st == TD_OK; i++)
    st = td_file_id_of(&ids_of(h)[i], td_store_shard(store, i).path, err);
  const size_t n = (size_t)h->n_layers * h->n_experts;
  memset((char *)h + h->table_at, 0xff, n * sizeof(int32_t));
  return st;
}

td_status td_expert_arena_create(int fd, const td_expert_places *places, const td_store *store,
                                 uint32_t n_slots, td_err *err) {
  void *map = NULL;
  size_t n_bytes = 0;
  td_status st = map_arena(fd, &map, &n_bytes, err);
  if (st != TD_OK) return st;
  TD_CHECK(n_bytes >= td_expert_arena_bytes(places, store, n_slots));
  st = populate(map, n_bytes, err);
  if (st == TD_OK) st = format(map, places, store, n_slots, err);
  munmap(map, n_bytes);
  return st;
}

// ---- owners -------------------------------------------------------------------------------------

// Start of a process in clock ticks since boot; HAS_ENDED: its parent has not waited for it yet;
// 0: there is no such process.
static uint64_t started_at(int32_t pid) {
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
  FILE *f = fopen(path, "re");
  if (!f) return 0;
  const size_t n = fread(text, 1, sizeof text - 1, f);
  fclose(f);
  text[n] = '\0';
  // Behind the name, which may have spaces, field 3 is the state, and 22 the start.
  const char *at = strrchr(text, ')');
  if (at && (strncmp(at, ") Z", 3) == 0 || strncmp(at, ") X", 3) == 0)) return HAS_ENDED;
  for (int field = 2; at && field < 22; field++)
    at = strchr(at + 1, ' ');
  return at ? strtoull(at, NULL, 10) : 0;
}

static bool is_alive(const arena_owner *o) {
  const uint64_t started = started_at(o->pid);
  if (started) return started == o->started;
  return kill(o->pid, 0) == 0; // without /proc
}

// Below, the lock is held.

static void wake(arena_head *h) {
  atomic_fetch_add(&h->n_events, 1);
  if (atomic_load(&h->n_waiters))
    syscall(SYS_futex, &h->n_events, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static uint8_t state_of(const arena_slot *s) {
  return atomic_load_explicit(&s->state, memory_order_acquire);
}

// What stands before it in the code is done before it, and what follows after it, so that another
// process can go on from wherever this one is killed.
static void set_state(arena_head *h, arena_slot *s, uint8_t state) {
  h->n_loading += (state == SLOT_LOADING) - (state_of(s) == SLOT_LOADING);
  atomic_store_explicit(&s->state, state, memory_order_release);
  atomic_signal_fence(memory_order_seq_cst);
}

// The slot gives up its expert.
static void empty(td_expert_arena *a, arena_slot *s) {
  arena_head *h = a->head;
  if (state_of(s) == SLOT_EMPTY) return;
  set_state(h, s, SLOT_EMPTY);
  a->table[s->key] = -1;
  h->n_bypass -= s->is_bypass;
}

static void forget_owner(td_expert_arena *a, uint32_t owner) {
  arena_head *h = a->head;
  for (uint32_t i = 0; i < h->n_slots; i++) {
    arena_slot *s = &a->slots[i];
    s->pinned_by &= ~(1u << owner);
    if (state_of(s) == SLOT_LOADING && s->loader == owner) s->loader = NO_OWNER;
    const bool is_lost = state_of(s) == SLOT_LOADING && s->loader == NO_OWNER;
    if (!s->pinned_by && (is_lost || state_of(s) == SLOT_FAILED)) empty(a, s);
  }
  h->owners[owner] = (arena_owner){.pid = 0};
  wake(h);
}

static void forget_dead_owners(td_expert_arena *a) {
  for (uint32_t i = 0; i < MAX_OWNERS; i++) {
    const arena_owner *o = &a->head->owners[i];
    if (o->pid && !is_alive(o)) forget_owner(a, i);
  }
}

// After a process died in the middle of a change: what is in the slots is true, the rest follows.
static void repair(td_expert_arena *a) {
  arena_head *h = a->head;
  const uint32_t n_keys = h->n_layers * h->n_experts;
  memset(a->table, 0xff, n_keys * sizeof *a->table);
  h->n_bypass = h->n_loading = 0;
  for (uint32_t i = 0; i < h->n_slots; i++) {
    arena_slot *s = &a->slots[i];
    if (state_of(s) == SLOT_EMPTY) continue;
    h->n_loading += state_of(s) == SLOT_LOADING;
    if (s->key >= n_keys || a->table[s->key] >= 0) {
      set_state(h, s, SLOT_EMPTY);
      continue;
    }
    a->table[s->key] = (int32_t)i;
    h->n_bypass += s->is_bypass;
  }
}

// ---- the lock -----------------------------------------------------------------------------------

// Never sleeps for long: if the waiter that an unlock wakes is killed before it has the lock, and a
// third one takes and leaves the lock in between, nobody wakes those that still wait.
static void lock(td_expert_arena *a) {
  pthread_mutex_t *m = &a->head->lock;
  int code = pthread_mutex_trylock(m);
  while (code == EBUSY || code == ETIMEDOUT) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += WAIT_NS;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    code = pthread_mutex_timedlock(m, &until);
  }
  TD_CHECK(code == 0 || code == EOWNERDEAD);
  if (code == 0) return;
  repair(a);
  pthread_mutex_consistent(&a->head->lock);
  forget_dead_owners(a);
}

static void unlock(td_expert_arena *a) {
  pthread_mutex_unlock(&a->head->lock);
}

// ---- reading ------------------------------------------------------------------------------------

static char *content(const td_expert_arena *a, uint32_t slot) {
  return (char *)a->head + a->head->slots_at + slot * a->head->slot_bytes;
}

static void queue_reads(td_expert_arena *a, uint32_t slot, uint32_t key, uint32_t generation);

// With the lock held, which it leaves meanwhile: the slot is pinned.
static void read_again(td_expert_arena *a, uint32_t slot) {
  arena_slot *s = &a->slots[slot];
  s->loader = (uint8_t)a->owner;
  s->error = 0;
  const uint32_t key = s->key, generation = ++s->generation;
  unlock(a);
  queue_reads(a, slot, key, generation);
  lock(a);
}

// Turns an expert that was read into rows. False: out of memory.
static bool turn(td_expert_arena *a, const td_drive_read *read) {
  lock(a);
  const arena_slot *s = &a->slots[read->slot];
  const bool is_ours = s->generation == read->generation && s->loader == a->owner && !s->error;
  const td_expert_part *p = a->places.parts + (size_t)s->key * TD_EXPERT_PARTS;
  unlock(a);
  if (!is_ours) return true;
  for (int i = 0; i < TD_EXPERT_PARTS; i++)
    if (p[i].n_rows && !td_expert_part_turn(&p[i], content(a, read->slot) + p[i].at)) return false;
  return true;
}

// All reads of a slot have ended. What was dropped may have been taken since.
static void end_loading(td_expert_arena *a, uint32_t slot) {
  arena_slot *s = &a->slots[slot];
  if (s->error == ECANCELED && s->pinned_by) {
    read_again(a, slot);
    return;
  }
  set_state(a->head, s, s->error ? SLOT_FAILED : SLOT_READY);
  if (s->error && !s->pinned_by) empty(a, s);
  wake(a->head);
}

// A read has ended, on a reader's thread, or was dropped. generation: the slot may have been taken
// from a process that was thought to be dead.
static void on_read(void *ctx, const td_drive_read *read, int error) {
  td_expert_arena *a = ctx;
  arena_slot *s = &a->slots[read->slot];
  const bool is_last = atomic_fetch_sub(&a->pieces[read->slot], 1) == 1;
  if (!is_last && !error) return;
  if (is_last && !error && a->places.has_turned && !turn(a, read)) error = ENOMEM;
  lock(a);
  if (s->generation == read->generation && s->loader == a->owner) {
    if (error && !s->error) {
      s->error = error;
      s->error_part = (uint8_t)read->part;
    }
    if (is_last) end_loading(a, read->slot);
  }
  unlock(a);
}

// Queues the reads of an expert, in pieces that threads share.
static void queue_reads(td_expert_arena *a, uint32_t slot, uint32_t key, uint32_t generation) {
  const td_expert_part *parts = a->places.parts + (size_t)key * TD_EXPERT_PARTS;
  uint32_t n = 0;
  for (int i = 0; i < TD_EXPERT_PARTS; i++)
    if (parts[i].n_bytes)
      n += (uint32_t)((td_expert_part_span(&parts[i]) + PIECE_BYTES - 1) / PIECE_BYTES);
  atomic_store(&a->pieces[slot], n);
  for (uint32_t i = 0; i < TD_EXPERT_PARTS; i++) {
    const td_expert_part *p = &parts[i];
    if (!p->n_bytes) continue;
    const uint64_t begin = td_expert_part_begin(p), span = td_expert_part_span(p);
    const uint64_t needed = p->offset + p->n_bytes - begin;
    char *to = content(a, slot) + p->at - p->offset % TD_DRIVE_ALIGN;
    for (uint64_t at = 0; at < span; at += PIECE_BYTES) {
      const uint64_t len = span - at < PIECE_BYTES ? span - at : PIECE_BYTES;
      const td_drive_read read = {.to = to + at,
                                  .offset = begin + at,
                                  .n_bytes = len,
                                  .n_needed = needed - at < len ? needed - at : len,
                                  .shard = p->shard,
                                  .slot = slot,
                                  .generation = generation,
                                  .part = i};
      if (!td_drive_reader_queue(a->reader, &read)) on_read(a, &read, ENOMEM);
    }
  }
}

// ---- opening ------------------------------------------------------------------------------------

static td_status claim_owner(td_expert_arena *a, td_err *err) {
  arena_head *h = a->head;
  td_status st = TD_OK;
  uint32_t i = 0;
  lock(a);
  forget_dead_owners(a);
  while (i < MAX_OWNERS && h->owners[i].pid)
    i++;
  if (i < MAX_OWNERS) {
    const int32_t pid = (int32_t)getpid();
    h->owners[i] = (arena_owner){.pid = pid, .started = started_at(pid)};
    a->owner = i;
  } else {
    st = td_fail(err, TD_ELIMIT, "%d processes read experts of these weights already", MAX_OWNERS);
  }
  unlock(a);
  return st;
}

static td_status open_arena(td_expert_arena *a, const td_model *model,
                            const td_expert_arena_opts *opts, td_err *err) {
  arena_head *h = a->head;
  td_status st = td_expert_places_open(&a->places, model, err);
  if (st != TD_OK) return st;
  a->store = td_model_store(model);
  if (h->magic != ARENA_MAGIC || h->version != VERSION || h->n_experts != a->places.n_experts ||
      h->n_layers != a->places.n_layers || h->n_shards != td_store_n_shards(a->store) ||
      h->slot_bytes != a->places.slot_bytes)
    return td_fail(err, TD_EFORMAT, "the weights' memory for experts is not for this model");
  a->scores = (double *)((char *)h + h->scores_at);
  a->table = (int32_t *)((char *)h + h->table_at);
  a->slots = (arena_slot *)((char *)h + h->entries_at);
  a->pieces = calloc(h->n_slots, sizeof *a->pieces);
  a->n_pins = calloc(h->n_slots, sizeof *a->n_pins);
  a->victims = calloc(h->n_slots, sizeof *a->victims);
  if (!a->pieces || !a->n_pins || !a->victims)
    return td_fail(err, TD_ENOMEM, "out of memory: slots of experts");
  const td_drive_reader_opts how = {.store = a->store,
                                    .ids = ids_of(h),
                                    .n_threads = opts ? opts->n_threads : 0,
                                    .mirror = opts ? opts->mirror : NULL,
                                    .pread = opts ? opts->pread : NULL,
                                    .done = on_read,
                                    .ctx = a};
  st = claim_owner(a, err);
  return st == TD_OK ? td_drive_reader_open(&a->reader, &how, err) : st;
}

td_status td_expert_arena_open(td_expert_arena **out, const td_model *model, int weights_fd,
                               const td_expert_arena_opts *opts, td_err *err) {
  void *map = NULL;
  size_t n_bytes = 0;
  *out = NULL;
  td_status st = map_arena(weights_fd, &map, &n_bytes, err);
  if (st != TD_OK || !map) return st;
  td_expert_arena *a = calloc(1, sizeof *a);
  if (!a) {
    munmap(map, n_bytes);
    return td_fail(err, TD_ENOMEM, "out of memory: slots of experts");
  }
  a->head = map;
  a->n_bytes = n_bytes;
  a->owner = NO_OWNER;
  st = open_arena(a, model, opts, err);
  if (st == TD_OK)
    *out = a;
  else
    td_expert_arena_close(a);
  return st;
}

static void say_stats(td_expert_arena *a) {
  const td_expert_arena_stats s = td_expert_arena_stats_of(a);
  const uint64_t n = s.hits + s.misses;
  if (!n) return;
  td_info("experts: %.1f %% of %llu were found in memory, %s were read from the drive, %.2f GB/s",
          100.0 * (double)s.hits / (double)n, (unsigned long long)n, td_size(s.drive.n_bytes).text,
          s.drive.busy_ns ? (double)s.drive.n_bytes / (double)s.drive.busy_ns : 0);
  const uint64_t n_prefetched = s.prefetches_used + s.prefetches_unused;
  if (n_prefetched)
    td_info("experts: of %llu that were prefetched, %.1f %% were needed",
            (unsigned long long)n_prefetched,
            100.0 * (double)s.prefetches_used / (double)n_prefetched);
}

void td_expert_arena_close(td_expert_arena *a) {
  if (!a) return;
  if (a->reader) say_stats(a);
  td_drive_reader_close(a->reader);
  if (a->owner < MAX_OWNERS) {
    lock(a);
    forget_owner(a, a->owner);
    unlock(a);
  }
  td_expert_places_close(&a->places);
  free(a->pieces);
  free(a->n_pins);
  free(a->victims);
  munmap(a->head, a->n_bytes);
  free(a);
}

// ---- taking -------------------------------------------------------------------------------------

double td_expert_score(double score, uint64_t n_uses, uint32_t n_experts) {
  const double now = (double)n_uses / ((double)TD_ARENA_HALF_LIFE * n_experts);
  return fmax(score, now) + log2(1 + exp2(-fabs(score - now)));
}

// How soon a slot makes room; HUGE_VAL: not now.
static double rank_of(const td_expert_arena *a, const arena_slot *s, bool bypass) {
  const arena_head *h = a->head;
  const uint8_t state = state_of(s);
  if (s->pinned_by || state == SLOT_LOADING) return HUGE_VAL;
  if (state == SLOT_EMPTY) return -1;
  if (s->is_bypass) return 0;
  if (bypass && h->n_bypass > h->n_slots / BYPASS_PART) return HUGE_VAL;
  return a->scores[s->key];
}

// The first n slots to make room, or as many as there are.
static uint32_t find_victims(td_expert_arena *a, uint32_t n, bool bypass) {
  uint32_t n_found = 0;
  double worst = HUGE_VAL;
  for (uint32_t i = 0; i < a->head->n_slots; i++) {
    const double rank = rank_of(a, &a->slots[i], bypass);
    if (rank == HUGE_VAL || (n_found == n && rank >= worst)) continue;
    uint32_t k = n_found < n ? n_found++ : n - 1;
    for (; k > 0 && rank_of(a, &a->slots[a->victims[k - 1]], bypass) > rank; k--)
      a->victims[k] = a->victims[k - 1];
    a->victims[k] = i;
    worst = rank_of(a, &a->slots[a->victims[n_found - 1]], bypass);
    if (n_found == n && worst < 0) break;
  }
  return n_found;
}

static void note_use(td_expert_arena *a, arena_slot *s) {
  arena_head *h = a->head;
  h->n_bypass -= s->is_bypass;
  s->is_bypass = false;
  a->scores[s->key] = td_expert_score(a->scores[s->key], ++h->n_uses, h->n_layers * h->n_experts);
}

static void pin(td_expert_arena *a, uint32_t slot) {
  a->n_pins[slot]++;
  a->slots[slot].pinned_by |= 1u << a->owner;
}

// Finds the expert in its slot. False: it is in none.
static bool take_present(td_expert_arena *a, uint32_t key, int32_t *slot, bool bypass) {
  *slot = a->table[key];
  if (*slot < 0) return false;
  arena_slot *s = &a->slots[*slot];
  if (state_of(s) == SLOT_FAILED && !s->pinned_by) { // it is tried again
    empty(a, s);
    *slot = -1;
    return false;
  }
  pin(a, (uint32_t)*slot);
  if (!bypass) note_use(a, s);
  return true;
}

// The slot's expert makes room for another one, which is being read from now on.
static void give_slot(td_expert_arena *a, uint32_t slot, uint32_t key, bool bypass) {
  arena_head *h = a->head;
  arena_slot *s = &a->slots[slot];
  empty(a, s);
  s->key = key;
  s->generation++;
  pin(a, slot);
  s->loader = (uint8_t)a->owner;
  s->error = 0;
  s->is_bypass = true;
  h->n_bypass++;
  if (!bypass) note_use(a, s);
  set_state(h, s, SLOT_LOADING);
  a->table[key] = (int32_t)slot;
}

uint32_t td_expert_arena_take(td_expert_arena *a, uint32_t layer_idx, td_taken_expert *experts,
                              uint32_t n, bool bypass) {
  uint32_t n_missing = 0, n_given = 0;
  const uint32_t first_key = layer_idx * a->head->n_experts;
  lock(a);
  for (uint32_t i = 0; i < n; i++)
    n_missing += !take_present(a, first_key + experts[i].expert, &experts[i].slot, bypass);
  const uint32_t n_victims = n_missing ? find_victims(a, n_missing, bypass) : 0;
  for (uint32_t i = 0; i < n && n_given < n_victims; i++) {
    if (experts[i].slot >= 0) continue;
    experts[i].slot = (int32_t)a->victims[n_given++];
    give_slot(a, (uint32_t)experts[i].slot, first_key + experts[i].expert, bypass);
  }
  unlock(a);
  a->hits += n - n_missing;
  a->misses += n_given;
  for (uint32_t k = 0, i = 0; k < n_given; i++) { // victims[k] went to the kth of those without
    if ((uint32_t)experts[i].slot != a->victims[k]) continue;
    const arena_slot *s = &a->slots[a->victims[k++]];
    queue_reads(a, (uint32_t)experts[i].slot, s->key, s->generation);
  }
  return n - n_missing + n_given;
}

// With the lock held.
static void unpin(td_expert_arena *a, uint32_t slot) {
  arena_slot *s = &a->slots[slot];
  if (--a->n_pins[slot]) return;
  s->pinned_by &= ~(1u << a->owner);
  if (!s->pinned_by && state_of(s) == SLOT_FAILED) empty(a, s);
}

void td_expert_arena_release(td_expert_arena *a, const td_taken_expert *experts, uint32_t n) {
  if (!n) return;
  lock(a);
  for (uint32_t i = 0; i < n; i++)
    if (experts[i].slot >= 0) unpin(a, (uint32_t)experts[i].slot);
  wake(a->head);
  unlock(a);
}

// ---- prefetching --------------------------------------------------------------------------------

void td_expert_arena_prefetch(td_expert_arena *a, uint32_t layer_idx, td_taken_expert *experts,
                              uint32_t n) {
  const uint32_t first_key = layer_idx * a->head->n_experts;
  uint32_t n_missing = 0, n_given = 0;
  for (uint32_t i = 0; i < n; i++)
    experts[i].slot = -1;
  lock(a);
  if (a->head->n_loading) n = 0;
  for (uint32_t i = 0; i < n; i++) // those that are there do not make room
    n_missing += !take_present(a, first_key + experts[i].expert, &experts[i].slot, true);
  const uint32_t n_victims = n_missing ? find_victims(a, n_missing, true) : 0;
  for (uint32_t i = 0; i < n; i++) {
    if (experts[i].slot >= 0) {
      unpin(a, (uint32_t)experts[i].slot);
      experts[i].slot = -1;
    } else if (n_given < n_victims) {
      experts[i].slot = (int32_t)a->victims[n_given++];
      give_slot(a, (uint32_t)experts[i].slot, first_key + experts[i].expert, true);
    }
  }
  unlock(a);
  for (uint32_t i = 0; i < n; i++) {
    if (experts[i].slot < 0) continue;
    const arena_slot *s = &a->slots[experts[i].slot];
    queue_reads(a, (uint32_t)experts[i].slot, s->key, s->generation);
  }
}

void td_expert_arena_end_prefetch(td_expert_arena *a, const td_taken_expert *experts, uint32_t n,
                                  const uint8_t *is_wanted) {
  td_expert_arena_release(a, experts, n);
  for (uint32_t i = 0; i < n; i++) {
    if (experts[i].slot < 0) continue;
    const bool is_used = is_wanted && is_wanted[experts[i].expert];
    a->prefetches_used += is_used;
    a->prefetches_unused += !is_used;
    if (!is_used) td_drive_reader_drop(a->reader, (uint32_t)experts[i].slot);
  }
}

// ---- pinned slots -------------------------------------------------------------------------------

td_slot_state td_expert_arena_state(const td_expert_arena *a, int32_t slot) {
  switch (state_of(&a->slots[slot])) {
  case SLOT_READY: return TD_SLOT_READY;
  case SLOT_FAILED: return TD_SLOT_FAILED;
  default: return TD_SLOT_LOADING;
  }
}

td_status td_expert_arena_failure(const td_expert_arena *a, int32_t slot, td_err *err) {
  const arena_slot *s = &a->slots[slot];
  const td_expert_part *p = a->places.parts + (size_t)s->key * TD_EXPERT_PARTS + s->error_part;
  const char *why = s->error == ENODATA  ? "the file was cut short"
                    : s->error == ESTALE ? "the file has changed since the server was started"
                                         : strerror(s->error);
  return td_fail(err, TD_EIO, "%s: expert %u of layer %u cannot be read, %llu bytes at %llu: %s",
                 td_store_shard(a->store, p->shard).name, s->key % a->head->n_experts,
                 s->key / a->head->n_experts, (unsigned long long)p->n_bytes,
                 (unsigned long long)p->offset, why);
}

uint32_t td_expert_arena_events(const td_expert_arena *a) {
  return atomic_load(&a->head->n_events);
}

// Reads what nobody reads any more.
static void adopt(td_expert_arena *a) {
  arena_head *h = a->head;
  a->adopted_ns = td_clock_ns();
  lock(a);
  forget_dead_owners(a);
  for (uint32_t i = 0; i < h->n_slots; i++) {
    arena_slot *s = &a->slots[i];
    const bool is_lost = state_of(s) == SLOT_LOADING && s->loader == NO_OWNER;
    if (is_lost && s->pinned_by >> a->owner & 1) read_again(a, i);
  }
  unlock(a);
}

void td_expert_arena_wait(td_expert_arena *a, uint32_t n_events) {
  arena_head *h = a->head;
  const struct timespec most = {.tv_nsec = WAIT_NS};
  atomic_fetch_add(&h->n_waiters, 1);
  const bool is_late = atomic_load(&h->n_events) == n_events &&
                       syscall(SYS_futex, &h->n_events, FUTEX_WAIT, n_events, &most, NULL, 0) < 0 &&
                       errno == ETIMEDOUT;
  atomic_fetch_sub(&h->n_waiters, 1);
  // Others' events may go on for ever while what this process waits for has been lost.
  if (is_late || td_clock_ns() - a->adopted_ns > 4 * WAIT_NS) adopt(a);
}

const void *td_expert_arena_data(const td_expert_arena *a, uint32_t layer_idx,
                                 const td_taken_expert *expert, int part) {
  const td_expert_part *p = td_expert_parts(&a->places, layer_idx, expert->expert) + part;
  return p->n_bytes ? content(a, (uint32_t)expert->slot) + p->at : NULL;
}

const td_expert_places *td_expert_arena_places(const td_expert_arena *a) {
  return &a->places;
}

const void *td_expert_arena_memory(const td_expert_arena *a, size_t *n_bytes) {
  *n_bytes = a->n_bytes;
  return a->head;
}

// ---- who watches --------------------------------------------------------------------------------

static bool is_on(const char *path, dev_t dev) {
  struct stat s;
  return path && path[0] && stat(path, &s) == 0 && s.st_dev == dev;
}

td_status td_expert_watch_open(td_expert_watch *out, int weights_fd, const char *mirror,
                               const char *dir, td_err *err) {
  void *map = NULL;
  size_t n_bytes = 0;
  struct stat s;
  *out = (td_expert_watch){.arena = NULL};
  if (stat(dir, &s) != 0) return td_fail(err, TD_EIO, "%s: %s", dir, strerror(errno));
  td_status st = map_arena(weights_fd, &map, &n_bytes, err);
  if (st != TD_OK || !map) return st;
  arena_head *h = map;
  bool is_same = is_on(mirror, s.st_dev);
  for (uint32_t i = 0; i < h->n_shards; i++)
    is_same |= ids_of(h)[i].dev == s.st_dev;
  if (is_same)
    *out = (td_expert_watch){.arena = map, .n_bytes = n_bytes};
  else
    munmap(map, n_bytes);
  return TD_OK;
}

bool td_expert_watch_is_busy(const td_expert_watch *watch) {
  const arena_head *h = watch->arena;
  return h && atomic_load_explicit(&h->n_loading, memory_order_relaxed);
}

void td_expert_watch_close(td_expert_watch *watch) {
  if (watch->arena) munmap(watch->arena, watch->n_bytes);
  watch->arena = NULL;
}

td_expert_arena_stats td_expert_arena_stats_of(td_expert_arena *a) {
  td_expert_arena_stats stats = {.hits = a->hits,
                                 .misses = a->misses,
                                 .prefetches_used = a->prefetches_used,
                                 .prefetches_unused = a->prefetches_unused,
                                 .n_slots = a->head->n_slots,
                                 .slot_bytes = a->head->slot_bytes,
                                 .drive = td_drive_reader_stats(a->reader)};
  for (uint32_t i = 0; i < a->head->n_slots; i++)
    stats.n_ready += state_of(&a->slots[i]) == SLOT_READY;
  return stats;
}
