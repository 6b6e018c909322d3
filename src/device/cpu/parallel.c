// src/device/cpu/parallel.c - an operator's items, handed out to the members of the pool.
#include <sched.h>
#include <stdatomic.h>
#include <string.h>

#include "device/cpu/cpu.h"

// Only member 0 (the stream's thread) counts, so that the counter's cache line does not move
// between cores.
static void show_pulse(_Atomic uint32_t *pulse, unsigned member) {
  if (member == 0) atomic_fetch_add_explicit(pulse, 1, memory_order_relaxed);
}

void td_cpu_wait_turn(unsigned n_waits) {
  enum { SPINS = 2000 };
  if (n_waits >= SPINS) {
    sched_yield();
    return;
  }
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// ---- items one by one ---------------------------------------------------------------------------

typedef struct {
  void (*fn)(void *ctx, size_t item, unsigned member);
  void *ctx;
  size_t n_items;
  _Atomic uint32_t *pulse;
  _Atomic size_t next;
} item_run;

static void take_items(void *ctx, unsigned member, unsigned n_members) {
  (void)n_members;
  item_run *run = ctx;
  for (;;) {
    size_t item = atomic_fetch_add_explicit(&run->next, 1, memory_order_relaxed);
    if (item >= run->n_items) return;
    show_pulse(run->pulse, member);
    run->fn(run->ctx, item, member);
  }
}

void td_cpu_for(td_cpu_stream *stream, size_t n_items,
                void (*fn)(void *ctx, size_t item, unsigned member), void *ctx) {
  const td_cpu_dev *dev = td_cpu_dev_of(stream);
  if (n_items == 1) {
    show_pulse(dev->pulse, 0);
    fn(ctx, 0, 0);
  } else if (n_items > 1) {
    item_run run = {.fn = fn, .ctx = ctx, .n_items = n_items, .pulse = dev->pulse};
    td_pool_run(dev->pool, take_items, &run);
  }
}

// ---- tiles in shares, with stealing -------------------------------------------------------------

typedef struct {
  void (*fn)(void *ctx, size_t item, size_t next, unsigned member);
  void *ctx;
  const td_cpu_part *parts;
  size_t n_parts;
  const td_pool *pool;
  unsigned n_nodes;
  _Atomic uint32_t *pulse;
  td_cpu_tile_range *shares; // [n_parts][members of the pool]
} tile_run;

// Members that take part, by NUMA node. If some node has none, all are treated as on one node.
typedef struct {
  unsigned n_nodes;
  unsigned on_node[TD_MAX_NODES];
} seats;

static seats seats_of(const tile_run *run, unsigned n_members) {
  seats s = {.n_nodes = run->n_nodes};
  for (unsigned i = 0; s.n_nodes > 1 && i < n_members; i++)
    s.on_node[td_pool_node(run->pool, i)]++;
  for (unsigned k = 0; k < s.n_nodes; k++) {
    if (s.on_node[k] == 0) s.n_nodes = 1;
  }
  if (s.n_nodes == 1) s.on_node[0] = n_members;
  return s;
}

// A member's tiles of a part.
typedef struct {
  size_t first, n_tiles; // of the part: its first item, and tiles per matrix
  size_t begin, width;   // of the node: its first tile in each matrix, and their number
  size_t at, n; // of the member: its first of the node's tiles, matrix by matrix, and their number
} stretch;

static stretch stretch_of(const tile_run *run, const seats *s, size_t part, unsigned member) {
  unsigned node = s->n_nodes == 1 ? 0 : td_pool_node(run->pool, member);
  unsigned rank = s->n_nodes == 1 ? member : td_pool_rank(run->pool, member);
  stretch t = {.n_tiles = run->parts[part].n_tiles};
  for (size_t i = 0; i < part; i++)
    t.first += run->parts[i].n_matrices * run->parts[i].n_tiles;
  t.begin = td_node_begin(t.n_tiles, s->n_nodes, node);
  t.width = td_node_begin(t.n_tiles, s->n_nodes, node + 1) - t.begin;
  size_t n = run->parts[part].n_matrices * t.width;
  t.at = n * rank / s->on_node[node];
  t.n = n * (rank + 1) / s->on_node[node] - t.at;
  return t;
}

static size_t item_of(const stretch *t, size_t i) {
  i += t->at;
  return t->first + i / t->width * t->n_tiles + t->begin + i % t->width;
}

// Takes the rest of a share. An owner's last item is followed by item `then`.
static void take_share(const tile_run *run, td_cpu_tile_range *share, const stretch *t,
                       unsigned member, bool is_own, size_t then) {
  const uint64_t from_back = (uint64_t)1 << 32;
  for (;;) {
    uint64_t taken = atomic_fetch_add_explicit(&share->taken, is_own ? 1 : from_back,
                                               memory_order_relaxed);
    size_t front = taken % from_back, back = taken / from_back;
    if (front + back >= t->n) return;
    size_t i = is_own ? front : t->n - 1 - back, next = then;
    if (front + back + 1 < t->n) next = item_of(t, is_own ? i + 1 : i - 1);
    show_pulse(run->pulse, member);
    run->fn(run->ctx, item_of(t, i), next, member);
  }
}

// A member moves to the next part when nothing of this one is left to take. All its items are then
// done or running, so waiting for them ends.
static void take_tiles(void *ctx, unsigned member, unsigned n_members) {
  const tile_run *run = ctx;
  const seats s = seats_of(run, n_members);
  td_cpu_tile_range *shares = run->shares;
  stretch own = stretch_of(run, &s, 0, member);
  for (size_t part = 0; part < run->n_parts; part++, shares += td_pool_size(run->pool)) {
    stretch then = part + 1 < run->n_parts ? stretch_of(run, &s, part + 1, member) : (stretch){0};
    take_share(run, &shares[member], &own, member, true,
               then.n ? item_of(&then, 0) : TD_CPU_NO_ITEM);
    for (unsigned k = 1; k < n_members; k++) {
      unsigned other = (member + k) % n_members;
      stretch left = stretch_of(run, &s, part, other);
      take_share(run, &shares[other], &left, member, false, TD_CPU_NO_ITEM);
    }
    own = then;
  }
}

void td_cpu_parallel_tiles(td_cpu_stream *stream, const td_cpu_part *parts, size_t n_parts,
                           void (*fn)(void *ctx, size_t item, size_t next, unsigned member),
                           void *ctx) {
  const td_cpu_dev *dev = td_cpu_dev_of(stream);
  TD_CHECK(n_parts <= TD_CPU_MAX_PARTS);
  size_t n_items = 0;
  for (size_t i = 0; i < n_parts; i++)
    n_items += parts[i].n_matrices * parts[i].n_tiles;
  if (n_items == 0) return;
  if (n_items == 1) {
    show_pulse(dev->pulse, 0);
    fn(ctx, 0, TD_CPU_NO_ITEM, 0);
    return;
  }
  memset(stream->shares, 0, n_parts * td_pool_size(dev->pool) * sizeof *stream->shares);
  tile_run run = {.fn = fn,
                  .ctx = ctx,
                  .parts = parts,
                  .n_parts = n_parts,
                  .pool = dev->pool,
                  .n_nodes = dev->nodes.n,
                  .pulse = dev->pulse,
                  .shares = stream->shares};
  td_pool_run(dev->pool, take_tiles, &run);
}
