// How an operator's tiles are shared out: every one once, whatever members, nodes and parts there
// are, one at a time by a member, and an item may wait for all those of earlier parts.
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "device/cpu/cpu.h"
#include "unit/ref.h"

enum { MAX_ITEMS = 4096, N_THREADS = 4 };

typedef struct {
  size_t n_items;
  size_t part_begin[TD_CPU_MAX_PARTS + 1];
  _Atomic size_t n_done;
  _Atomic uint32_t n_calls[MAX_ITEMS];
  _Atomic bool is_next_wrong, is_member_wrong;
  _Atomic bool is_busy[N_THREADS];
  bool is_alone; // one member: its next is what follows
  td_cpu_rows first[TD_CPU_MAX_PARTS];
} tally;

static td_cpu_rows rows_of(const void *ctx, size_t part, size_t matrix) {
  const tally *t = ctx;
  td_cpu_rows rows = t->first[part];
  if (rows.base) rows.base += matrix * rows.n_bytes;
  return rows;
}

static void count_item(void *ctx, size_t item, size_t next, unsigned member) {
  tally *t = ctx;
  if (member >= N_THREADS || atomic_exchange(&t->is_busy[member], true)) t->is_member_wrong = true;
  size_t part = 0;
  while (item >= t->part_begin[part + 1])
    part++;
  while (atomic_load(&t->n_done) < t->part_begin[part])
    sched_yield();
  atomic_fetch_add(&t->n_calls[item], 1);
  if (next != TD_CPU_NO_ITEM && (next >= t->n_items || next == item)) t->is_next_wrong = true;
  if (t->is_alone && item + 1 < t->part_begin[part + 1] && next != item + 1) {
    t->is_next_wrong = true;
  }
  if (member < N_THREADS) atomic_store(&t->is_busy[member], false);
  atomic_fetch_add(&t->n_done, 1);
}

static const char memory[8192]; // nobody looks into it

static void run_round(td_stream *stream, bool is_alone, uint64_t *rng) {
  static tally t;
  t = (tally){.is_alone = is_alone};
  td_cpu_part parts[TD_CPU_MAX_PARTS];
  size_t n_parts = 1 + ref_next(rng) % TD_CPU_MAX_PARTS;
  for (size_t i = 0; i < n_parts; i++) {
    parts[i] = (td_cpu_part){.n_matrices = ref_next(rng) % 30, .n_tiles = ref_next(rng) % 20};
    t.part_begin[i + 1] = t.part_begin[i] + parts[i].n_matrices * parts[i].n_tiles;
    t.first[i] = (td_cpu_rows){.tile_bytes = 10, .n_bytes = 10 * parts[i].n_tiles};
    if (ref_next(rng) % 4) t.first[i].base = memory + ref_next(rng) % 100;
  }
  t.n_items = t.part_begin[n_parts];
  const td_cpu_tiles tiles = {
      .parts = parts, .n_parts = n_parts, .fn = count_item, .rows = rows_of, .ctx = &t};
  td_err err;
  assert_int_equal(td_cpu_parallel_tiles((td_cpu_stream *)stream, &tiles, &err), TD_OK);
  assert_int_equal(t.n_done, t.n_items);
  assert_false(t.is_next_wrong);
  assert_false(t.is_member_wrong);
  for (size_t i = 0; i < t.n_items; i++)
    assert_int_equal(t.n_calls[i], 1);
}

TEST(every_tile_once) {
  static const char *const nodes[] = {"1", "2", "3", "6"};
  for (size_t i = 0; i < TD_COUNT(nodes); i++) {
    setenv("TANDEM_FAKE_NODES", nodes[i], 1);
    td_dev *dev;
    td_stream *stream;
    td_err err;
    _Atomic uint32_t n_active = 0;
    assert_int_equal(td_dev_open(&dev, &(td_dev_opts){.kind = "cpu", .n_threads = N_THREADS}, &err),
                     TD_OK);
    assert_int_equal(td_stream_open(&stream, dev, &err), TD_OK);
    td_dev_set_thread_limit(dev, &n_active);
    td_dev_use_stripes(dev, &(td_stripes){memory, sizeof memory, 37, td_nodes_get().n});
    uint64_t rng = i;
    for (int round = 0; round < 50; round++) {
      n_active = (uint32_t)(ref_next(&rng) % (N_THREADS + 1));
      run_round(stream, n_active == 1, &rng);
    }
    td_stream_close(stream);
    td_dev_close(dev);
  }
}
