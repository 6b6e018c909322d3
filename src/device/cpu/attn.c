// src/device/cpu/attn.c - attention over cached keys and values shared by a group of heads.
// An item is a tile of queries of one sequence: tokens times heads of one group. With many items, a
// member computes an item from its first key to its last. With few, the splits of all items are
// spread over the pool and merged afterwards; where even splits are too few to balance, items have
// fewer heads. All variants do the same additions in the same order.
// Of a token with selected keys, key i is the i-th selected one: blocks and splits are of those,
// and the kernel reads a block's keys where they are. Of one with selected blocks of keys, those
// between are passed over. Tokens that select share an item, but not a call of the kernel: they
// take turns with each split, so that keys which neighbors have in common are still in the cache. A
// block's entries in E4M3 are gathered into a piece of the member's memory, as f32.
#include "device/cpu/attn.h"

#include <math.h>
#include <string.h>

#include "device/cpu/pages.h"

enum {
  TILE_QUERIES = 32,    // per item in decode, and the minimum
  PROMPT_QUERIES = 256, // per item in prefill: transposing keys once serves this many queries
  FEW_HEADS = 8,        // per item: still nearly full speed
  MIN_HEADS = 4,        // the kernels' width
  ITEMS_A_THREAD = 3,   // with fewer, splits are spread over the pool
  SPLITS_A_THREAD = 4,  // with fewer, items get FEW_HEADS, so that little is idle at the end
  // per thread; with fewer, items get fewer tokens, because the last tokens have most keys
  PROMPT_ITEMS = 16
};
static const size_t max_part_bytes = (size_t)64 << 20; // of split states at a time

size_t td_attn_state_bytes(uint32_t n_q, uint32_t v_dim) {
  return ((size_t)n_q * (v_dim + 2) * sizeof(float) + 63) & ~(size_t)63;
}

td_attn_state td_attn_state_at(void *base, uint32_t n_q, uint32_t v_dim) {
  float *acc = base;
  float *m = acc + (size_t)n_q * v_dim;
  return (td_attn_state){.acc = acc, .m = m, .l = m + n_q};
}

void td_attn_state_reset(const td_attn_state *state, uint32_t n_q, uint32_t v_dim) {
  memset(state->acc, 0, (size_t)n_q * v_dim * sizeof(float));
  for (uint32_t i = 0; i < n_q; i++) {
    state->m[i] = -INFINITY;
    state->l[i] = 0;
  }
}

void td_attn_merge(const td_attn_state *total, const td_attn_state *part, uint32_t n_q,
                   uint32_t v_dim) {
  for (uint32_t i = 0; i < n_q; i++) {
    if (part->l[i] == 0) continue; // saw no key
    float m = fmaxf(total->m[i], part->m[i]);
    float keep = expf(total->m[i] - m), gain = expf(part->m[i] - m);
    float *acc = total->acc + (size_t)i * v_dim;
    const float *from = part->acc + (size_t)i * v_dim;
    for (uint32_t d = 0; d < v_dim; d++)
      acc[d] = acc[d] * keep + from[d] * gain;
    total->l[i] = total->l[i] * keep + part->l[i] * gain;
    total->m[i] = m;
  }
}

uint32_t td_attn_block_end(uint32_t begin, uint32_t page_tokens, uint32_t n_keys) {
  uint32_t end = begin + TD_ATTN_KEYS;
  uint32_t page_end = begin - begin % page_tokens + page_tokens;
  uint32_t split_end = begin - begin % ATTN_SPLIT + ATTN_SPLIT;
  if (page_end < end) end = page_end;
  if (split_end < end) end = split_end;
  return n_keys < end ? n_keys : end;
}

td_status td_attn_make_tiles(td_cpu_stream *stream, const td_batch_view *b, uint32_t tile_tokens,
                             td_attn_tile **tiles, uint32_t *n_tiles, td_err *err) {
  void *mem;
  td_status status = td_cpu_scratch(stream, SCRATCH_ITEMS, b->n_tokens * sizeof(td_attn_tile), &mem,
                                    err);
  if (status != TD_OK) return status;
  *tiles = mem;
  *n_tiles = 0;
  for (uint32_t s = 0; s < b->n_seqs; s++) {
    uint32_t end = (uint32_t)b->q_begin[s + 1];
    for (uint32_t t = (uint32_t)b->q_begin[s]; t < end; t += tile_tokens) {
      uint32_t n = end - t < tile_tokens ? end - t : tile_tokens;
      (*tiles)[(*n_tiles)++] = (td_attn_tile){.seq = s, .token = t, .n = n};
    }
  }
  return TD_OK;
}

typedef struct {
  const td_attn_shared *a;
  const td_attn_tile *tiles;
  uint32_t group;        // heads that share keys
  uint32_t tile_queries; // per item, at most
  uint32_t tile_heads;   // heads per item
  uint32_t head_tiles;   // items per group
  size_t first_item;     // of the wave
  uint32_t max_splits;   // of any tile
  size_t query_bytes, state_bytes;
  // pieces of queries, total, part; in prefill also transposed keys, then entries in E4M3 as f32
  char *member;
  size_t member_bytes, entries_at;
  char *parts; // [items of the wave][max_splits] states
} shared_run;

typedef struct {
  const td_attn_tile *tile;
  uint32_t kv_head, head, n_heads, n_q;
  const float *q; // [n_q][k_dim], times scale
} shared_item;

static shared_item item_at(const shared_run *run, size_t idx) {
  const td_attn_shared *a = run->a;
  uint32_t groups = (uint32_t)(idx % (a->n_kv_heads * run->head_tiles));
  uint32_t from = groups % run->head_tiles * run->tile_heads;
  shared_item item = {
      .tile = &run->tiles[idx / (a->n_kv_heads * run->head_tiles)],
      .kv_head = groups / run->head_tiles,
  };
  item.head = item.kv_head * run->group + from;
  item.n_heads = run->group - from < run->tile_heads ? run->group - from : run->tile_heads;
  item.n_q = item.tile->n * item.n_heads;
  return item;
}

// The item's queries times scale, contiguous: token-major, then heads.
static void load_queries(const shared_run *run, shared_item *item, float *q) {
  const td_attn_shared *a = run->a;
  item->q = q;
  for (uint32_t i = 0; i < item->tile->n; i++) {
    size_t head = (size_t)(item->tile->token + i) * a->n_heads + item->head;
    const float *from = a->q + head * a->k_dim;
    for (size_t d = 0; d < (size_t)item->n_heads * a->k_dim; d++)
      *q++ = from[d] * a->scale;
  }
}

// Whether the tile's last token sees a selection of keys or groups. Then all of them do.
static bool has_selection(const td_attn_shared *a, const td_attn_tile *tile) {
  return a->selected && td_attn_n_keys(a->batch, tile) > td_most_selected(a->top_k, a->group);
}

// What is selected for the tile's first token; NULL: it sees all keys up to its own.
static const int32_t *selection_of(const shared_run *run, const td_attn_tile *tile) {
  const td_attn_shared *a = run->a;
  return has_selection(a, tile) ? a->selected + (size_t)tile->token * a->top_k : NULL;
}

// Number of keys that the tile's last token sees; of several with selections the most.
static uint32_t n_keys_of(const shared_run *run, const td_attn_tile *tile) {
  const td_attn_shared *a = run->a;
  const uint32_t n = td_attn_n_keys(a->batch, tile);
  if (!selection_of(run, tile)) return n;
  if (tile->n > 1) return (uint32_t)td_most_selected(a->top_k, a->group);
  return a->group ? a->top_k * a->group + n % a->group : a->top_k;
}

// The position of the i-th key of a selection, which a token sees of n_keys.
static uint32_t selected_at(const td_attn_shared *a, const int32_t *selection, uint32_t n_keys,
                            uint32_t i) {
  if (!a->group) return (uint32_t)selection[i];
  const uint32_t of_group = i % a->group;
  if (i / a->group < a->top_k) return (uint32_t)selection[i / a->group] * a->group + of_group;
  return n_keys - n_keys % a->group + of_group;
}

// Whether the tile's last token sees a selection of blocks. Then all of them do.
static bool has_blocks(const td_attn_shared *a, const td_attn_tile *tile) {
  return a->blocks && (td_attn_n_keys(a->batch, tile) - 1) / a->block >= a->top_blocks;
}

// Whether the tile's tokens see keys of their own.
static bool takes_turns(const td_attn_shared *a, const td_attn_tile *tile) {
  return has_blocks(a, tile) || has_selection(a, tile);
}

// The blocks of keys that the item's first token sees; NULL: all.
static const int32_t *blocks_of(const shared_run *run, const shared_item *item) {
  const td_attn_shared *a = run->a;
  if (!has_blocks(a, item->tile)) return NULL;
  const size_t row = (size_t)item->tile->token * a->n_kv_heads + item->kv_head;
  return a->blocks + row * a->top_blocks;
}

// The first position from begin on that is in one of the blocks; UINT32_MAX: none.
static uint32_t next_seen(const td_attn_shared *a, const int32_t *blocks, uint32_t begin) {
  for (uint32_t i = 0; i < a->top_blocks; i++) {
    const uint32_t first = (uint32_t)blocks[i] * a->block;
    if (begin < first + a->block) return begin < first ? first : begin;
  }
  return UINT32_MAX;
}

static const char *keys_at(const shared_run *run, const shared_item *item, uint32_t position) {
  const td_attn_shared *a = run->a;
  const td_batch_view *b = a->batch;
  return td_attn_page(b, a->kv, item->tile->seq, position) + item->kv_head * a->head_bytes +
         position % b->page_tokens * a->ld * td_dtype_bytes(a->kv->dtype);
}

static bool is_f8(const td_attn_shared *a) {
  return a->kv->dtype == TD_F8E4M3;
}

// Some keys within one block. at NULL: none, those that are gathered, or those of a selection.
typedef struct {
  const char *at;
  uint32_t n; // 0: none
} key_block;

// The first keys from *begin on that the item's tokens see; *begin is then theirs.
static key_block block_at(const shared_run *run, const shared_item *item, uint32_t *begin) {
  const td_attn_shared *a = run->a;
  const int32_t *blocks = blocks_of(run, item);
  uint32_t n_keys = n_keys_of(run, item->tile);
  if (blocks) *begin = next_seen(a, blocks, *begin);
  if (*begin >= n_keys) return (key_block){0};
  const uint32_t end = blocks ? *begin - *begin % a->block + a->block : n_keys;
  if (end < n_keys) n_keys = end;
  const bool is_apart = is_f8(a) || selection_of(run, item->tile);
  return (key_block){.at = is_apart ? NULL : keys_at(run, item, *begin),
                     .n = td_attn_block_end(*begin, a->batch->page_tokens, n_keys) - *begin};
}

// The keys of the n positions from begin on, and behind TD_ATTN_KEYS keys their values, as f32.
static const char *gather_f8(const shared_run *run, const shared_item *item, uint32_t begin,
                             uint32_t n, char *out) {
  const td_attn_shared *a = run->a;
  const uint32_t page_tokens = a->batch->page_tokens,
                 first = begin % page_tokens; // one page has all
  const char *page = td_attn_page(a->batch, a->kv, item->tile->seq, begin);
  const size_t k = (size_t)item->kv_head * page_tokens + first;
  const size_t v = k + (size_t)a->n_kv_heads * page_tokens;
  float *to = (float *)(void *)out;
  for (uint32_t i = 0; i < n; i++)
    td_kv_f8_get(&a->rows, page_tokens, page, k + i, to + i * a->ld);
  for (uint32_t i = 0; i < n && a->v_bytes; i++)
    td_kv_f8_get(&a->rows, page_tokens, page, v + i, to + (TD_ATTN_KEYS + i) * a->ld);
  return out;
}

// Where the n selected keys from the begin-th on are. Those of a group that are in one page follow
// one another.
static void find_rows(const shared_run *run, const shared_item *item, uint32_t begin, uint32_t n,
                      const char **rows) {
  const td_attn_shared *a = run->a;
  const size_t entry_bytes = a->ld * td_dtype_bytes(a->kv->dtype);
  const int32_t *selection = selection_of(run, item->tile);
  const uint32_t n_keys = td_attn_n_keys(a->batch, item->tile);
  for (uint32_t i = 0; i < n; i++) {
    const uint32_t position = selected_at(a, selection, n_keys, begin + i);
    const bool follows = i && a->group && (begin + i) % a->group &&
                         position % a->batch->page_tokens;
    rows[i] = follows ? rows[i - 1] + entry_bytes : keys_at(run, item, position);
  }
}

// Attention over the item's keys of the block at begin. Prefetches the block `next` meanwhile.
static void run_block(const shared_run *run, const shared_item *item, uint32_t begin,
                      key_block block, key_block next, char *piece, const td_attn_state *state) {
  const td_attn_shared *a = run->a;
  const td_batch_view *b = a->batch;
  uint32_t n_visible[PROMPT_QUERIES], n_hidden[PROMPT_QUERIES];
  const char *rows[TD_ATTN_KEYS];
  const bool is_spread = selection_of(run, item->tile);
  size_t v_bytes = a->v_bytes;
  if (is_spread) {
    find_rows(run, item, begin, block.n, rows);
    block.at = rows[0];
  } else if (!block.at) {
    block.at = gather_f8(run, item, begin, block.n, piece + run->entries_at);
    if (v_bytes) v_bytes = TD_ATTN_KEYS * a->ld * sizeof(float);
  }
  for (uint32_t i = 0; i < item->n_q; i++) {
    const uint32_t token = item->tile->token + i / item->n_heads;
    const uint32_t first = td_attn_first(b, token, a->window);
    n_visible[i] = td_attn_visible(b, token, begin, begin + block.n);
    n_hidden[i] = first > begin ? first - begin : 0;
    if (n_hidden[i] >= n_visible[i]) n_visible[i] = 0;
  }
  td_attn_block_args args = {
      .q = item->q,
      .k = block.at,
      .v = block.at + v_bytes,
      .rows = is_spread ? rows : NULL,
      .n_visible = n_visible,
      .n_hidden = a->window ? n_hidden : NULL,
      .m = state->m,
      .l = state->l,
      .acc = state->acc,
      .transposed = a->prompt && !takes_turns(a, item->tile)
                        ? (float *)(piece + run->query_bytes + 2 * run->state_bytes)
                        : NULL,
      .next_k = next.at,
      .next_v = next.at && a->v_bytes ? next.at + a->v_bytes : NULL,
      .next_bytes = next.n * a->ld * td_dtype_bytes(a->kv->dtype),
      .ldq = a->k_dim,
      .ldk = a->ld,
      .ldv = a->ld,
      .ldacc = a->v_dim,
      .n_q = item->n_q,
      .k_dim = a->k_dim,
      .v_dim = a->v_dim,
  };
  (a->kv->dtype == TD_F16 ? td_kernels()->attn_f16 : td_kernels()->attn_f32)(&args);
}

// First position that any of the item's queries sees.
static uint32_t first_key(const shared_run *run, const shared_item *item) {
  return td_attn_first(run->a->batch, item->tile->token, run->a->window);
}

static td_attn_state state_from(const td_attn_state *state, uint32_t i, uint32_t v_dim) {
  return (td_attn_state){
      .m = state->m + i, .l = state->l + i, .acc = state->acc + (size_t)i * v_dim};
}

// All blocks of one split that some query sees. then: the block used after the last one, for
// prefetching.
static void run_split(const shared_run *run, const shared_item *item, uint32_t split,
                      key_block then, char *piece, const td_attn_state *state) {
  uint32_t begin = split * ATTN_SPLIT, split_end = begin + ATTN_SPLIT;
  td_attn_state_reset(state, item->n_q, run->a->v_dim);
  key_block block = block_at(run, item, &begin);
  while (block.n && begin + block.n <= first_key(run, item) && begin + block.n < split_end) {
    begin += block.n;
    block = block_at(run, item, &begin);
  }
  while (block.n && begin < split_end) {
    uint32_t end = begin + block.n;
    const key_block next = block_at(run, item, &end);
    run_block(run, item, begin, block, next.n && end < split_end ? next : then, piece, state);
    block = next;
    begin = end;
  }
}

// An item of one of them. tile: memory for its own.
static shared_item turn_of(const shared_run *run, const shared_item *item, uint32_t i,
                           td_attn_tile *tile) {
  shared_item out = *item;
  if (!takes_turns(run->a, item->tile)) return out;
  *tile = (td_attn_tile){.seq = item->tile->seq, .token = item->tile->token + i, .n = 1};
  out.tile = tile;
  out.n_q = item->n_heads;
  if (item->q) out.q += (size_t)i * item->n_heads * run->a->k_dim;
  return out;
}

// What turn i uses first of a split.
static key_block first_of(const shared_run *run, const shared_item *item, uint32_t i,
                          uint32_t split) {
  td_attn_tile tile;
  const shared_item turn = turn_of(run, item, i, &tile);
  uint32_t begin = split * ATTN_SPLIT;
  return block_at(run, &turn, &begin);
}

// One split of all the item's queries. then: as of run_split.
static void run_turns(const shared_run *run, const shared_item *item, uint32_t split,
                      key_block then, char *piece, const td_attn_state *state) {
  // Its tokens take turns with the item's keys, or all of them together have one.
  const uint32_t n = takes_turns(run->a, item->tile) ? item->tile->n : 1;
  for (uint32_t i = 0; i < n; i++) {
    td_attn_tile tile;
    const shared_item turn = turn_of(run, item, i, &tile);
    const td_attn_state part = state_from(state, i * turn.n_q, run->a->v_dim);
    run_split(run, &turn, split, i + 1 < n ? first_of(run, item, i + 1, split) : then, piece,
              &part);
  }
}

// Writes query i of the item, whose state is the first of total.
static void store_query(const shared_run *run, const shared_item *item, uint32_t i,
                        const td_attn_state *total) {
  const td_attn_shared *a = run->a;
  size_t token = item->tile->token + i / item->n_heads;
  const uint32_t head = item->head + i % item->n_heads;
  float *out = a->out + (token * a->n_heads + head) * a->v_dim;
  float gain = 1, l = *total->l;
  if (a->sinks) {
    const float m = fmaxf(*total->m, a->sinks[head]);
    gain = expf(*total->m - m);
    l = l * gain + expf(a->sinks[head] - m);
  }
  for (uint32_t d = 0; d < a->v_dim; d++)
    out[d] = total->acc[d] * gain / l;
}

// A whole item on one member.
static void whole_item(void *ctx, size_t idx, unsigned member) {
  const shared_run *run = ctx;
  const td_attn_shared *a = run->a;
  shared_item item = item_at(run, idx);
  char *piece = run->member + member * run->member_bytes;
  td_attn_state total = td_attn_state_at(piece + run->query_bytes, item.n_q, a->v_dim);
  td_attn_state part = td_attn_state_at(piece + run->query_bytes + run->state_bytes, item.n_q,
                                        a->v_dim);
  load_queries(run, &item, (float *)piece);
  td_attn_state_reset(&total, item.n_q, a->v_dim);
  uint32_t n_splits = td_attn_n_splits(n_keys_of(run, item.tile));
  for (uint32_t split = first_key(run, &item) / ATTN_SPLIT; split < n_splits; split++) {
    run_turns(run, &item, split, first_of(run, &item, 0, split + 1), piece, &part);
    td_attn_merge(&total, &part, item.n_q, a->v_dim);
  }
  for (uint32_t i = 0; i < item.n_q; i++) {
    td_attn_state state = state_from(&total, i, a->v_dim);
    store_query(run, &item, i, &state);
  }
}

static void one_split(void *ctx, size_t idx, size_t next, unsigned member) {
  const shared_run *run = ctx;
  const td_attn_shared *a = run->a;
  shared_item item = item_at(run, run->first_item + idx / run->max_splits);
  uint32_t split = (uint32_t)(idx % run->max_splits);
  if (split >= td_attn_n_splits(n_keys_of(run, item.tile))) return;
  key_block then = {0};
  if (next != TD_CPU_NO_ITEM) {
    const shared_item of = item_at(run, run->first_item + next / run->max_splits);
    then = first_of(run, &of, 0, (uint32_t)(next % run->max_splits));
  }
  char *piece = run->member + member * run->member_bytes;
  td_attn_state part = td_attn_state_at(run->parts + idx * run->state_bytes, item.n_q, a->v_dim);
  load_queries(run, &item, (float *)piece);
  run_turns(run, &item, split, then, piece, &part);
}

static void merge_query(void *ctx, size_t idx, size_t next, unsigned member) {
  (void)next;
  const shared_run *run = ctx;
  const td_attn_shared *a = run->a;
  size_t in_wave = idx / run->tile_queries;
  uint32_t i = (uint32_t)(idx % run->tile_queries);
  shared_item item = item_at(run, run->first_item + in_wave);
  if (i >= item.n_q) return;
  char *piece = run->member + member * run->member_bytes + run->query_bytes;
  td_attn_state total = td_attn_state_at(piece, 1, a->v_dim);
  td_attn_state_reset(&total, 1, a->v_dim);
  uint32_t n_splits = td_attn_n_splits(n_keys_of(run, item.tile));
  for (uint32_t split = 0; split < n_splits; split++) {
    char *at = run->parts + (in_wave * run->max_splits + split) * run->state_bytes;
    td_attn_state part = td_attn_state_at(at, item.n_q, a->v_dim);
    part = state_from(&part, i, a->v_dim);
    td_attn_merge(&total, &part, 1, a->v_dim);
  }
  store_query(run, &item, i, &total);
}

static td_status run_spread(td_cpu_stream *stream, shared_run *run, size_t n_items, td_err *err) {
  size_t item_bytes = run->max_splits * run->state_bytes;
  size_t wave = max_part_bytes / item_bytes > 0 ? max_part_bytes / item_bytes : 1;
  if (wave > n_items) wave = n_items;
  void *parts;
  td_status status = td_cpu_scratch(stream, SCRATCH_PARTS, wave * item_bytes, &parts, err);
  if (status != TD_OK) return status;
  run->parts = parts;
  for (; run->first_item < n_items; run->first_item += wave) {
    size_t left = n_items - run->first_item;
    size_t n = left < wave ? left : wave;
    const td_cpu_part splits = {1, n * run->max_splits}, queries = {n, run->tile_queries};
    status = td_cpu_parallel_tiles(
        stream, &(td_cpu_tiles){.parts = &splits, .n_parts = 1, .fn = one_split, .ctx = run}, err);
    if (status != TD_OK) return status;
    status = td_cpu_parallel_tiles(
        stream, &(td_cpu_tiles){.parts = &queries, .n_parts = 1, .fn = merge_query, .ctx = run},
        err);
    if (status != TD_OK) return status;
  }
  return TD_OK;
}

static size_t count_items(shared_run *run, uint32_t n_tiles) {
  run->head_tiles = (run->group + run->tile_heads - 1) / run->tile_heads;
  return (size_t)n_tiles * run->a->n_kv_heads * run->head_tiles;
}

// Whether items should have half as many heads, given n_splits of all items.
static bool should_halve(const shared_run *run, size_t n_splits, unsigned n_threads) {
  if (run->tile_heads > FEW_HEADS) return n_splits < (size_t)SPLITS_A_THREAD * n_threads;
  return run->tile_heads > MIN_HEADS && n_splits < n_threads;
}

// Tiles of at most tile_tokens tokens, of which all see a selection or none.
static td_status make_tiles(td_cpu_stream *stream, const td_attn_shared *a, uint32_t tile_tokens,
                            td_attn_tile **tiles, uint32_t *n_tiles, td_err *err) {
  const uint32_t most = a->selected || a->blocks ? 1 : tile_tokens; // at first
  const td_status status = td_attn_make_tiles(stream, a->batch, most, tiles, n_tiles, err);
  if (status != TD_OK || most == tile_tokens) return status;
  uint32_t n = 0;
  for (uint32_t i = 0; i < *n_tiles; i++) {
    const td_attn_tile tile = (*tiles)[i];
    td_attn_tile *last = n ? &(*tiles)[n - 1] : NULL;
    const bool joins = last && last->seq == tile.seq && last->n < tile_tokens &&
                       takes_turns(a, last) == takes_turns(a, &tile);
    if (joins)
      last->n++;
    else
      (*tiles)[n++] = tile;
  }
  *n_tiles = n;
  return TD_OK;
}

td_status td_attn_run_shared(td_cpu_stream *stream, const td_attn_shared *a, td_err *err) {
  if (a->batch->n_tokens == 0) return TD_OK;
  shared_run run = {.a = a, .group = a->n_heads / a->n_kv_heads};
  run.tile_heads = run.group < TILE_QUERIES ? run.group : TILE_QUERIES;
  run.tile_queries = a->prompt ? PROMPT_QUERIES : TILE_QUERIES;
  const unsigned n_threads = td_thread_pool_size(td_cpu_dev_of(stream)->pool);
  td_attn_tile *tiles;
  uint32_t n_tiles;
  td_status status;
  for (;; run.tile_queries /= 2) {
    status = make_tiles(stream, a, run.tile_queries / run.tile_heads, &tiles, &n_tiles, err);
    if (status != TD_OK) return status;
    const bool are_few = count_items(&run, n_tiles) < (size_t)PROMPT_ITEMS * n_threads;
    if (!are_few || run.tile_queries == TILE_QUERIES) break;
  }
  run.tiles = tiles;
  for (uint32_t i = 0; i < n_tiles; i++) {
    uint32_t n_splits = td_attn_n_splits(n_keys_of(&run, &tiles[i]));
    if (n_splits > run.max_splits) run.max_splits = n_splits;
  }
  run.query_bytes = ((size_t)run.tile_queries * a->k_dim * sizeof(float) + 63) & ~(size_t)63;
  run.state_bytes = td_attn_state_bytes(run.tile_queries, a->v_dim);
  run.member_bytes = run.query_bytes + 2 * run.state_bytes;
  if (a->prompt) run.member_bytes += (size_t)a->k_dim * TD_ATTN_KEYS * sizeof(float);
  run.entries_at = run.member_bytes;
  const size_t entry_bytes = (a->v_bytes ? 2 : 1) * sizeof(float);
  if (is_f8(a)) run.member_bytes += TD_ATTN_KEYS * a->ld * entry_bytes;
  void *member;
  status = td_cpu_scratch(stream, SCRATCH_MEMBER, n_threads * run.member_bytes, &member, err);
  if (status != TD_OK) return status;
  run.member = member;
  size_t n_items = count_items(&run, n_tiles);
  while (should_halve(&run, n_items * run.max_splits, n_threads)) {
    run.tile_heads = (run.tile_heads + 1) / 2;
    n_items = count_items(&run, n_tiles);
  }
  if (n_items < ITEMS_A_THREAD * n_threads && run.max_splits > 1)
    return run_spread(stream, &run, n_items, err);
  td_cpu_for(stream, n_items, whole_item, &run);
  return TD_OK;
}

// Has every token see all keys of its sequence: in place of its own position it has the last one's.
static td_status see_whole(td_cpu_stream *stream, td_batch_view *b, td_err *err) {
  void *memory;
  td_status status = td_cpu_scratch(stream, SCRATCH_ORDER, b->n_tokens * sizeof *b->position,
                                    &memory, err);
  if (status != TD_OK) return status;
  int32_t *position = memory;
  for (uint32_t s = 0; s < b->n_seqs; s++)
    for (int32_t t = b->q_begin[s]; t < b->q_begin[s + 1]; t++)
      position[t] = b->position[b->q_begin[s + 1] - 1];
  b->position = position;
  return TD_OK;
}

td_status td_cpu_op_attn_gqa(td_cpu_stream *stream, const td_attn_gqa_args *a, td_err *err) {
  const td_kv_rows rows = td_gqa_rows(&a->kv, a->n_kv_heads, a->head_dim);
  td_batch_view batch = a->batch;
  td_status status = td_cpu_check_batch(&batch, &a->kv, rows, err);
  if (status == TD_OK && a->whole) status = see_whole(stream, &batch, err);
  if (status != TD_OK) return status;
  TD_DEV_REQUIRE(a->n_kv_heads > 0 && a->n_heads % a->n_kv_heads == 0 && a->head_dim > 0,
                 "attention: %u heads over %u KV heads", a->n_heads, a->n_kv_heads);
  TD_DEV_REQUIRE(!a->blocks || (a->block > 0 && a->top_blocks > 0),
                 "attention: a selection of %u blocks of %u keys", a->top_blocks, a->block);
  TD_DEV_REQUIRE(!a->selected || (a->top_k > 0 && a->kv.dtype != TD_F8E4M3 && !a->blocks),
                 "attention: a selection of %u groups", a->top_k);
  size_t head_bytes = (size_t)a->batch.page_tokens * a->head_dim * td_dtype_bytes(a->kv.dtype);
  return td_attn_run_shared(stream,
                            &(td_attn_shared){
                                .batch = &batch,
                                .kv = &a->kv,
                                .q = a->q,
                                .out = a->out,
                                .head_bytes = head_bytes,
                                .v_bytes = a->n_kv_heads * head_bytes,
                                .ld = a->head_dim,
                                .rows = rows,
                                .n_heads = a->n_heads,
                                .n_kv_heads = a->n_kv_heads,
                                .k_dim = a->head_dim,
                                .v_dim = a->head_dim,
                                .blocks = a->blocks,
                                .block = a->block,
                                .top_blocks = a->top_blocks,
                                .selected = a->selected,
                                .top_k = a->top_k,
                                .group = a->group,
                                .window = a->window,
                                .sinks = a->sinks,
                                .scale = a->scale,
                                .prompt = a->prompt,
                            },
                            err);
}
