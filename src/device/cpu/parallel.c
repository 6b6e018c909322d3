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
    show_pulse(dev->base.pulse, 0);
    fn(ctx, 0, 0);
  } else if (n_items > 1) {
    item_run run = {.fn = fn, .ctx = ctx, .n_items = n_items, .pulse = dev->base.pulse};
    td_thread_pool_run(dev->pool, take_items, &run);
  }
}

// ---- tiles in shares, with stealing -------------------------------------------------------------

typedef struct {
  const td_cpu_tiles *tiles;
  const td_cpu_dev *dev;
  const td_tile_map *map; // NULL: there is one node
  _Atomic uint32_t *pulse;
  td_cpu_tile_range *shares; // [n_parts][members of the pool]
} tile_run;

// Members that take part, by NUMA node. If some node has none, all are treated as on one node.
typedef struct {
  unsigned n_nodes;
  unsigned on_node[TD_MAX_NODES];
} seats;

static seats seats_of(const tile_run *run, unsigned n_members) {
  seats s = {.n_nodes = run->map ? run->dev->nodes.n : 1};
  for (unsigned i = 0; s.n_nodes > 1 && i < n_members; i++)
    s.on_node[td_thread_pool_node(run->dev->pool, i)]++;
  for (unsigned k = 0; k < s.n_nodes; k++)
    if (s.on_node[k] == 0) s.n_nodes = 1;
  if (s.n_nodes == 1) s.on_node[0] = n_members;
  return s;
}

static unsigned seat_of(const tile_run *run, const seats *s, unsigned member) {
  return s->n_nodes == 1 ? 0 : td_thread_pool_node(run->dev->pool, member);
}

// A member's tiles of a part.
typedef struct {
  const td_tile_map *map; // NULL: all tiles of the part are one node's
  size_t part, first;     // first: the part's first item
  unsigned node;
  size_t at, n; // of the node's tiles: the member's first, and their number
} stretch;

static stretch stretch_of(const tile_run *run, const seats *s, size_t part, unsigned member) {
  const td_cpu_part *parts = run->tiles->parts;
  stretch t = {.map = s->n_nodes == 1 ? NULL : run->map, .part = part};
  t.node = seat_of(run, s, member);
  for (size_t i = 0; i < part; i++)
    t.first += parts[i].n_matrices * parts[i].n_tiles;
  const unsigned rank = t.map ? td_thread_pool_rank(run->dev->pool, member) : member;
  const size_t n = t.map ? t.map->of[part][t.node].n_items
                         : parts[part].n_matrices * parts[part].n_tiles;
  t.at = n * rank / s->on_node[t.node];
  t.n = n * (rank + 1) / s->on_node[t.node] - t.at;
  return t;
}

static size_t item_of(const stretch *t, size_t i) {
  return t->map ? td_tile_map_item(t->map, t->part, t->node, t->at + i) : t->first + t->at + i;
}

// Adds what the item reads, by the nodes of the member and of the memory.
static void count_reads(const tile_run *run, const stretch *t, size_t item, unsigned member) {
  td_dev_reads *reads = run->dev->reads;
  const size_t n_tiles = run->tiles->parts[t->part].n_tiles, i = item - t->first;
  const td_cpu_rows rows = run->tiles->rows(run->tiles->ctx, t->part, i / n_tiles);
  if (!rows.base || !td_stripes_hold(&run->dev->stripes, rows.base, rows.n_bytes)) return;
  const size_t base = (size_t)(rows.base - run->dev->stripes.base), end = base + rows.n_bytes;
  size_t at = base + i % n_tiles * rows.tile_bytes, last = at + rows.tile_bytes;
  if (last > end) last = end;
  for (size_t n; at < last; at += n) {
    const size_t page = at / reads->page_bytes, left = (page + 1) * reads->page_bytes - at;
    n = left < last - at ? left : last - at;
    atomic_fetch_add_explicit(
        &reads->n_bytes[td_thread_pool_node(run->dev->pool, member)][reads->page_node[page]], n,
        memory_order_relaxed);
  }
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
    const size_t item = item_of(t, i);
    show_pulse(run->pulse, member);
    run->tiles->fn(run->tiles->ctx, item, next, member);
    if (run->dev->reads && run->tiles->rows) count_reads(run, t, item, member);
  }
}

// Takes what others have left of a part: on the member's node, then on other nodes.
static void steal(const tile_run *run, const seats *s, td_cpu_tile_range *shares, size_t part,
                  unsigned member, unsigned n_members) {
  for (int is_away = 0; is_away < (s->n_nodes > 1 ? 2 : 1); is_away++) {
    for (unsigned k = 1; k < n_members; k++) {
      const unsigned other = (member + k) % n_members;
      if ((seat_of(run, s, other) != seat_of(run, s, member)) != is_away) continue;
      const stretch left = stretch_of(run, s, part, other);
      take_share(run, &shares[other], &left, member, false, TD_CPU_NO_ITEM);
    }
  }
}

// A member moves to the next part when nothing of this one is left to take. All its items are then
// done or running, so waiting for them ends.
static void take_tiles(void *ctx, unsigned member, unsigned n_members) {
  const tile_run *run = ctx;
  const size_t n_parts = run->tiles->n_parts;
  const seats s = seats_of(run, n_members);
  td_cpu_tile_range *shares = run->shares;
  stretch own = stretch_of(run, &s, 0, member);
  for (size_t part = 0; part < n_parts; part++, shares += td_thread_pool_size(run->dev->pool)) {
    stretch then = part + 1 < n_parts ? stretch_of(run, &s, part + 1, member) : (stretch){0};
    take_share(run, &shares[member], &own, member, true,
               then.n ? item_of(&then, 0) : TD_CPU_NO_ITEM);
    steal(run, &s, shares, part, member, n_members);
    own = then;
  }
}

static td_status map_tiles(td_cpu_stream *stream, const td_cpu_tiles *tiles, td_tile_map *map,
                           td_err *err) {
  const td_cpu_dev *dev = td_cpu_dev_of(stream);
  const td_tile_map_opts opts = {.parts = tiles->parts,
                                 .n_parts = tiles->n_parts,
                                 .rows = tiles->rows,
                                 .ctx = tiles->ctx,
                                 .stripes = &dev->stripes,
                                 .n_nodes = dev->nodes.n};
  void *runs;
  const size_t n_bytes = td_tile_map_max_runs(&opts) * sizeof *map->runs;
  td_status status = td_cpu_scratch(stream, SCRATCH_RUNS, n_bytes, &runs, err);
  if (status == TD_OK) td_tile_map_make(map, runs, &opts);
  return status;
}

td_status td_cpu_parallel_tiles(td_cpu_stream *stream, const td_cpu_tiles *tiles, td_err *err) {
  const td_cpu_dev *dev = td_cpu_dev_of(stream);
  TD_CHECK(tiles->n_parts <= TD_CPU_MAX_PARTS);
  size_t n_items = 0;
  for (size_t i = 0; i < tiles->n_parts; i++)
    n_items += tiles->parts[i].n_matrices * tiles->parts[i].n_tiles;
  if (n_items == 0) return TD_OK;
  if (n_items == 1 && !dev->reads) {
    show_pulse(dev->base.pulse, 0);
    tiles->fn(tiles->ctx, 0, TD_CPU_NO_ITEM, 0);
    return TD_OK;
  }
  memset(stream->shares, 0,
         tiles->n_parts * td_thread_pool_size(dev->pool) * sizeof *stream->shares);
  td_tile_map map;
  tile_run run = {.tiles = tiles, .dev = dev, .pulse = dev->base.pulse, .shares = stream->shares};
  if (dev->nodes.n > 1) {
    td_status status = map_tiles(stream, tiles, &map, err);
    if (status != TD_OK) return status;
    run.map = &map;
  }
  td_thread_pool_run(dev->pool, take_tiles, &run);
  return TD_OK;
}

uint32_t td_cpu_tile_rows(const td_cpu_dev *dev, const td_weight *w, uint32_t tile_rows) {
  enum { UNIT = 8 };
  if (dev->nodes.n < 2 || !dev->stripes.base) return tile_rows;
  const size_t most = dev->stripes.stripe_bytes / TD_STRIPE_TILES / td_weight_row_bytes(w);
  const uint32_t n = (uint32_t)(most < UNIT ? UNIT : most - most % UNIT);
  return n < tile_rows ? n : tile_rows;
}

td_cpu_rows td_cpu_rows_of(const td_weight *w, size_t row_begin, size_t tile_rows, size_t n_rows) {
  const size_t row_bytes = td_weight_row_bytes(w);
  return (td_cpu_rows){.base = (const char *)w->data + row_begin * row_bytes,
                       .tile_bytes = tile_rows * row_bytes,
                       .n_bytes = n_rows * row_bytes};
}
