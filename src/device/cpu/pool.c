// src/device/cpu/pool.c - attention over a window and over keys that are pooled of many. A token's
// result depends on its sequence alone: softmax runs over its keys in one order, pooled ones first,
// however its sequence is cut into steps; so does the pooling over the positions of a group.
#include <math.h>
#include <string.h>

#include "device/check.h"
#include "device/cpu/attn.h"
#include "device/cpu/pages.h"

// ---- pooling ------------------------------------------------------------------------------------

enum { CHANNELS = 64, N_RUNNING = 3 }; // channels of an item; maximum, weights, weighted sum

// An entry that is being pooled, of some channels.
typedef struct {
  float max[CHANNELS], weights[CHANNELS], sum[CHANNELS];
} open_entry;

static void clear(open_entry *e) {
  for (uint32_t i = 0; i < CHANNELS; i++) {
    e->max[i] = -INFINITY;
    e->weights[i] = e->sum[i] = 0;
  }
}

// Copies n channels between an open entry and its place in a page's state, [3][dim].
static void load_open(open_entry *e, const float *at, uint32_t dim, uint32_t n) {
  memcpy(e->max, at, n * sizeof *at);
  memcpy(e->weights, at + dim, n * sizeof *at);
  memcpy(e->sum, at + 2 * (size_t)dim, n * sizeof *at);
}

// Those of all channels follow one another.
static void store_open(const open_entry *open, uint32_t n_open, float *at, uint32_t dim,
                       uint32_t n) {
  for (const open_entry *e = open; e < open + n_open; e++, at += (size_t)N_RUNNING * dim) {
    memcpy(at, e->max, n * sizeof *at);
    memcpy(at + dim, e->weights, n * sizeof *at);
    memcpy(at + 2 * (size_t)dim, e->sum, n * sizeof *at);
  }
}

static void take(open_entry *e, const float *x, const float *gate, const float *bias, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    const float g = gate ? gate[i] + bias[i] : 0;
    const bool is_most = g > e->max[i];
    const float other = expf(is_most ? e->max[i] - g : g - e->max[i]);
    const float keep = is_most ? other : 1, gain = is_most ? 1 : other;
    e->max[i] = is_most ? g : e->max[i];
    e->weights[i] = e->weights[i] * keep + gain;
    e->sum[i] = e->sum[i] * keep + gain * x[i];
  }
}

// Where the entry of the group that ends at this position is.
static float *entry_of(const td_pool_args *a, char *page, int32_t position) {
  const uint32_t entry = (uint32_t)position / a->group;
  const uint32_t slot = entry % td_pool_entries(a->batch.page_tokens, a->group);
  return (float *)(void *)page + a->entry_at + (size_t)slot * a->dim;
}

static bool ends_group(const td_pool_args *a, int32_t position) {
  return ((uint32_t)position + 1) % a->group == 0;
}

// Takes a token in; where it ends a group, the entry goes to its place in the page, before its
// norm.
static void take_token(const td_pool_args *a, open_entry *open, char *page, uint32_t t,
                       uint32_t channel, uint32_t n) {
  const int32_t position = a->batch.position[t];
  const float *x = a->x + t * a->stride + channel;
  const float *gate = a->gate ? a->gate + t * a->stride + channel : NULL;
  const size_t width = a->overlaps ? 2 * (size_t)a->dim : a->dim;
  const float *bias = gate ? a->bias + (uint32_t)position % a->group * width + channel : NULL;
  if (a->overlaps) {
    take(&open[1], x, gate, bias, n);
    take(&open[0], x + a->dim, gate + a->dim, bias + a->dim, n);
  } else {
    take(open, x, gate, bias, n);
  }
  if (!ends_group(a, position)) return;
  float *out = entry_of(a, page, position) + channel;
  for (uint32_t i = 0; i < n; i++)
    out[i] = open[0].sum[i] / open[0].weights[i];
  open[0] = open[1];
  clear(&open[1]);
}

// Items: of each sequence the pieces of channels.
static void pool_item(void *ctx, size_t item, unsigned member) {
  (void)member;
  const td_pool_args *a = ctx;
  const uint32_t n_pieces = (a->dim + CHANNELS - 1) / CHANNELS, n_open = a->overlaps ? 2 : 1;
  const uint32_t s = (uint32_t)(item / n_pieces), channel = (uint32_t)(item % n_pieces) * CHANNELS;
  const uint32_t n = a->dim - channel < CHANNELS ? a->dim - channel : CHANNELS;
  const float *before = (const float *)(const void *)td_state_before(&a->batch, &a->state, s);
  open_entry open[2];
  for (uint32_t i = 0; i < 2; i++)
    clear(&open[i]);
  const size_t of_open = (size_t)N_RUNNING * a->dim;
  for (uint32_t i = 0; before && i < n_open; i++)
    load_open(&open[i], before + a->open_at + i * of_open + channel, a->dim, n);
  const int32_t end = a->batch.q_begin[s + 1];
  for (td_page_run run = {.end = a->batch.q_begin[s]}; run.end < end;) {
    run = td_page_run_at(&a->batch, &a->state, s, run.end);
    for (int32_t t = run.begin; t < run.end; t++) {
      take_token(a, open, run.state, (uint32_t)t, channel, n);
      float *slot = td_trail_slot(&a->trail, &a->batch, s, t);
      if (slot) store_open(open, n_open, slot + a->trail_at + channel, a->dim, n);
    }
    float *state = (float *)(void *)run.state + a->open_at + channel;
    store_open(open, n_open, state, a->dim, n);
  }
}

// Norms and rotates the entry that ends with a token.
static void finish_entry(void *ctx, size_t t, unsigned member) {
  (void)member;
  const td_pool_args *a = ctx;
  const int32_t position = a->batch.position[t];
  if (!ends_group(a, position)) return;
  char *page = td_state_page(&a->batch, &a->state, (uint32_t)a->batch.seq[t], position);
  float *entry = entry_of(a, page, position);
  td_kernels()->rmsnorm_row(
      &(td_norm_row_args){.x = entry, .w = a->norm, .out = entry, .eps = a->eps});
  const float *cos_sin = a->cos_sin + ((size_t)position + 1 - a->group) * a->rot_dim;
  float *x = entry + (a->rotates_first ? 0 : a->dim - a->rot_dim);
  const uint32_t apart = a->rotates_first ? a->rot_dim / 2 : 1; // elements of a pair
  for (uint32_t i = 0; i < a->rot_dim; i += 2) {
    float *pair = a->rotates_first ? x + i / 2 : x + i;
    const float u = pair[0], v = pair[apart], c = cos_sin[i], s = cos_sin[i + 1];
    pair[0] = u * c - v * s;
    pair[apart] = v * c + u * s;
  }
}

td_status td_cpu_op_pool(td_cpu_stream *stream, const td_pool_args *a, td_err *err) {
  td_status st = td_cpu_check_batch(&a->batch, &a->state, (td_kv_rows){0}, err);
  if (st == TD_OK && a->norm.n) st = td_dev_check_vec(&a->norm, a->dim, "pooled keys' norm", err);
  if (st == TD_OK) st = td_dev_check_pool(&a->state, &a->batch, a->group, a->entry_at, a->dim, err);
  if (st != TD_OK) return st;
  TD_DEV_REQUIRE(!a->gate || a->bias, "pooled keys: gates without a bias");
  TD_DEV_REQUIRE(!a->overlaps || a->gate, "pooled keys: halves without gates");
  TD_DEV_REQUIRE(a->group > 0 && a->rot_dim % 2 == 0 && a->rot_dim <= (a->norm.n ? a->dim : 0),
                 "pooled keys: %u of %u elements rotate", a->rot_dim, a->dim);
  const size_t n_pieces = (a->dim + CHANNELS - 1) / CHANNELS;
  td_cpu_for(stream, a->batch.n_seqs * n_pieces, pool_item, (void *)a);
  if (a->norm.n) td_cpu_for(stream, a->batch.n_tokens, finish_entry, (void *)a);
  return TD_OK;
}

// ---- attention ----------------------------------------------------------------------------------

enum { TILE_HEADS = 64, FEW_HEADS = 8, ITEMS_A_THREAD = 4 };

typedef struct {
  const td_attn_pool_args *a;
  uint32_t tile_heads, n_tiles;
  char *member; // of each: queries, their state, a block of keys
  size_t query_bytes, state_bytes, member_bytes;
} attn_run;

// What a token sees, in this order.
typedef struct {
  uint32_t token, seq, position;
  uint32_t n_entries, n_keys; // pooled, all
  const int32_t *selected;    // entries; NULL: the first n_entries
  uint32_t first, past;       // the window's first position; positions before this step
  const char *before;         // the state there
} seen;

static seen seen_by(const td_attn_pool_args *a, uint32_t token) {
  const td_batch_view *b = &a->batch;
  seen out = {
      .token = token, .seq = (uint32_t)b->seq[token], .position = (uint32_t)b->position[token]};
  out.past = (uint32_t)b->position[b->q_begin[out.seq]];
  out.before = td_state_before(b, &a->state, out.seq);
  out.n_entries = a->group ? (out.position + 1) / a->group : 0;
  if (a->selected && out.n_entries > a->top_k) {
    out.n_entries = a->top_k;
    out.selected = a->selected + (size_t)token * a->top_k;
  }
  out.first = td_attn_first(b, token, a->window);
  out.n_keys = out.n_entries + out.position + 1 - out.first;
  return out;
}

static const float *key_at(const td_attn_pool_args *a, const seen *s, uint32_t i) {
  if (i < s->n_entries) {
    const uint32_t entry = s->selected ? (uint32_t)s->selected[i] : i;
    const uint32_t slot = entry % td_pool_entries(a->batch.page_tokens, a->group);
    const char *page = td_state_page(&a->batch, &a->state, s->seq,
                                     (int32_t)((entry + 1) * a->group - 1));
    return (const float *)(const void *)page + a->entry_at + (size_t)slot * a->dim;
  }
  const uint32_t position = s->first + i - s->n_entries;
  if (position < s->past)
    return (const float *)(const void *)s->before + (size_t)(position % a->ring) * a->dim;
  const uint32_t token = (uint32_t)a->batch.q_begin[s->seq] + position - s->past;
  return (const float *)a->key + token * a->key_stride;
}

static void finish_head(const td_attn_pool_args *a, const td_attn_state *state, uint32_t i,
                        uint32_t head, float *out) {
  const float m = fmaxf(state->m[i], a->sinks[head]), gain = expf(state->m[i] - m);
  const float l = state->l[i] * gain + expf(a->sinks[head] - m);
  const float *acc = state->acc + (size_t)i * a->dim;
  for (uint32_t d = 0; d < a->dim; d++)
    out[d] = acc[d] * gain / l;
}

// Items: of each token the tiles of heads.
static void attn_item(void *ctx, size_t item, unsigned member) {
  const attn_run *run = ctx;
  const td_attn_pool_args *a = run->a;
  const uint32_t head = (uint32_t)(item % run->n_tiles) * run->tile_heads;
  const uint32_t left = a->n_heads - head, n = left < run->tile_heads ? left : run->tile_heads;
  const seen s = seen_by(a, (uint32_t)(item / run->n_tiles));
  char *piece = run->member + member * run->member_bytes;
  float *q = (float *)(void *)piece;
  float *rows = (float *)a->q + ((size_t)s.token * a->n_heads + head) * a->dim;
  const td_attn_state state = td_attn_state_at(piece + run->query_bytes, n, a->dim);
  float *keys = (float *)(void *)(piece + run->query_bytes + run->state_bytes);
  for (size_t i = 0; i < (size_t)n * a->dim; i++)
    q[i] = rows[i] * a->scale;
  td_attn_state_reset(&state, n, a->dim);
  for (uint32_t begin = 0; begin < s.n_keys; begin += TD_ATTN_KEYS) {
    const uint32_t n_left = s.n_keys - begin;
    const uint32_t n_block = n_left < TD_ATTN_KEYS ? n_left : TD_ATTN_KEYS;
    uint32_t n_visible[TILE_HEADS];
    for (uint32_t i = 0; i < n_block; i++)
      memcpy(keys + (size_t)i * a->dim, key_at(a, &s, begin + i), a->dim * sizeof *keys);
    for (uint32_t i = 0; i < n; i++)
      n_visible[i] = n_block;
    td_kernels()->attn_f32(&(td_attn_block_args){.q = q,
                                                 .k = keys,
                                                 .v = keys,
                                                 .n_visible = n_visible,
                                                 .m = state.m,
                                                 .l = state.l,
                                                 .acc = state.acc,
                                                 .ldq = a->dim,
                                                 .ldk = a->dim,
                                                 .ldv = a->dim,
                                                 .ldacc = a->dim,
                                                 .n_q = n,
                                                 .k_dim = a->dim,
                                                 .v_dim = a->dim});
  }
  for (uint32_t i = 0; i < n; i++)
    finish_head(a, &state, i, head + i, rows + (size_t)i * a->dim);
}

// Leaves the last keys in the page of every run.
static void store_ring(void *ctx, size_t s, unsigned member) {
  (void)member;
  const td_attn_pool_args *a = ctx;
  const td_batch_view *b = &a->batch;
  const int32_t end = b->q_begin[s + 1];
  const float *from = (const float *)(const void *)td_state_before(b, &a->state, (uint32_t)s);
  for (td_page_run run = {.end = b->q_begin[s]}; run.end < end;) {
    run = td_page_run_at(b, &a->state, (uint32_t)s, run.end);
    float *ring = (float *)(void *)run.state;
    const uint32_t begin = (uint32_t)b->position[run.begin];
    const uint32_t n_keys = begin + (uint32_t)(run.end - run.begin);
    for (uint32_t p = n_keys > a->ring ? n_keys - a->ring : 0; p < n_keys; p++) {
      const size_t at = (size_t)(p % a->ring) * a->dim;
      const uint32_t token = (uint32_t)run.begin + p - begin;
      const float *key = p < begin ? from + at : (const float *)a->key + token * a->key_stride;
      if (key != ring + at) memcpy(ring + at, key, a->dim * sizeof *ring);
    }
    from = ring;
  }
}

td_status td_cpu_op_attn_pool(td_cpu_stream *stream, const td_attn_pool_args *a, td_err *err) {
  td_status st = td_cpu_check_batch(&a->batch, &a->state, (td_kv_rows){0}, err);
  if (st == TD_OK) st = td_dev_check_pool(&a->state, &a->batch, a->group, a->entry_at, a->dim, err);
  if (st != TD_OK || a->batch.n_tokens == 0) return st;
  TD_DEV_REQUIRE(a->window > 0 && a->ring >= a->window && a->n_heads > 0 && a->sinks,
                 "pooled attention: %u heads over a window of %u in a ring of %u", a->n_heads,
                 a->window, a->ring);
  const unsigned n_threads = td_thread_pool_size(td_cpu_dev_of(stream)->pool);
  attn_run run = {.a = a, .tile_heads = a->n_heads < TILE_HEADS ? a->n_heads : TILE_HEADS};
  if (a->batch.n_tokens < ITEMS_A_THREAD * n_threads && run.tile_heads > FEW_HEADS)
    run.tile_heads = FEW_HEADS;
  run.n_tiles = (a->n_heads + run.tile_heads - 1) / run.tile_heads;
  run.query_bytes = ((size_t)run.tile_heads * a->dim * sizeof(float) + 63) & ~(size_t)63;
  run.state_bytes = td_attn_state_bytes(run.tile_heads, a->dim);
  const size_t key_bytes = ((size_t)TD_ATTN_KEYS * a->dim * sizeof(float) + 63) & ~(size_t)63;
  run.member_bytes = run.query_bytes + run.state_bytes + key_bytes;
  void *member;
  st = td_cpu_scratch(stream, SCRATCH_MEMBER, n_threads * run.member_bytes, &member, err);
  if (st != TD_OK) return st;
  run.member = member;
  td_cpu_for(stream, (size_t)a->batch.n_tokens * run.n_tiles, attn_item, &run);
  td_cpu_for(stream, a->batch.n_seqs, store_ring, (void *)a);
  return TD_OK;
}
