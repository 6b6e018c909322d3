// src/device/cpu/moe.c - routed experts, shared experts and dense MLPs.
// A pair is a (token, j). Pairs are sorted by expert, decode pairs before prefill pairs, so that
// each weight is decoded once for all of its expert's tokens of a kind. There are three kinds of
// items, in this order: gate, up and activation by (expert, rows); down by (expert, rows), into one
// row per pair; the weighted sum by token, in the order of j, so that a token's result does not
// depend on its batch. They are one parallel run: a down item waits for its own expert's gate and
// up items, a sum waits for all down items. Items wait only for earlier items, and those are done
// or running, so there is no deadlock; with many experts there is hardly any waiting.
//
// Where weights lie on several NUMA nodes, the same rows of gate and up may be on different ones,
// so that each is an item of its own, and the second to be done computes the activation. Counters
// that all members change have a cache line each, and those of all items one a node.
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/bf16.h"
#include "base/clock.h"
#include "base/jitter.h"
#include "device/cpu/cpu.h"

enum {
  TILE_PAIRS = 192,
  MAX_PAIRS = 8192,
  SUM_ELEMENTS = 2048,
  WIDEN_ELEMENTS = 1 << 16, // takes about as long as waking the pool
};

// Some pairs of one expert; an item is one of these times a tile of rows.
typedef struct {
  uint32_t expert, begin, n; // pairs [begin, begin + n) in sorted order
  bool prompt;               // prefill or decode pairs
} pair_tile;

typedef struct {
  _Alignas(64) _Atomic uint32_t n;
} counter;

typedef struct {
  const td_moe_args *a;
  uint32_t dim, hidden;                 // of the model, of an expert
  uint32_t gate_rows;                   // hidden, or twice that with pairs
  const float *x;                       // [n_tokens][dim], from token0
  uint32_t dim_tile, hidden_tile;       // rows per item
  uint32_t n_dim_tiles, n_hidden_tiles; // per expert
  td_trial trial;                       // chose the tiles and the schedule
  uint32_t n_prompt; // of all tokens, those computed by the kernels for many tokens
  uint32_t token0, n_tokens;
  uint32_t n_pairs;
  uint32_t *token; // [n_pairs] in sorted order: the pair's token, relative to token0
  uint32_t *place; // [n_tokens][top_k]: the pair's index in sorted order, or UINT32_MAX
  // [2 n_experts + 1]: number of decode pairs, then of prefill pairs, of each expert
  uint32_t *count;
  pair_tile *tiles;       // at most n_pairs
  counter *n_hidden_done; // [n_tiles]: tiles of rows whose activation is done
  uint32_t n_tiles;
  // Of [n_tiles][n_hidden_tiles] tiles of rows, whether gate's or up's are done; NULL: they are one
  // item.
  _Atomic uint8_t *is_half_done;
  float *gate, *up; // [n_pairs][gate_rows], [n_pairs][hidden]
  float *active;    // [n_pairs][hidden]: the activation, in gate's memory or in up's
  float *parts;     // [n_pairs][dim]
  size_t n_hidden_items, n_down_items;
  const td_thread_pool *pool;
  counter n_down_done[TD_MAX_NODES]; // by the node of who computed them
} moe_run;

// The pair's expert, relative to first_expert; UINT32_MAX: it is not in this group.
static uint32_t expert_of(const td_moe_args *a, size_t pair) {
  uint32_t e = a->ids ? (uint32_t)a->ids[pair] - a->first_expert : 0;
  if (e >= a->n_experts || (a->slots && (a->slots[e] >= 0) == a->rest)) return UINT32_MAX;
  return e;
}

// Where the expert's matrices are in gate, up and down.
static uint32_t matrix_of(const td_moe_args *a, uint32_t expert) {
  return a->slots && !a->rest ? (uint32_t)a->slots[expert] : expert;
}

// Index in count of the pass's pair; UINT32_MAX: its expert is not in this group.
static uint32_t kind_of(const moe_run *run, uint32_t pair) {
  const td_moe_args *a = run->a;
  bool prompt = run->token0 + pair / a->top_k >= a->n_tokens - run->n_prompt;
  uint32_t e = expert_of(a, (size_t)run->token0 * a->top_k + pair);
  return e == UINT32_MAX ? e : 2 * e + prompt;
}

// Counting sort of the pass's pairs, and the tiles they make.
static void order_pairs(moe_run *run) {
  const td_moe_args *a = run->a;
  memset(run->count, 0, (2 * a->n_experts + 1) * sizeof *run->count);
  for (uint32_t p = 0; p < run->n_pairs; p++) {
    uint32_t kind = kind_of(run, p);
    if (kind != UINT32_MAX) run->count[kind + 1]++;
  }
  run->n_tiles = 0;
  uint32_t begin = 0;
  for (uint32_t kind = 0; kind < 2 * a->n_experts; kind++) {
    uint32_t n = run->count[kind + 1], n_tiles = (n + TILE_PAIRS - 1) / TILE_PAIRS;
    for (uint32_t i = 0; i < n_tiles; i++) {
      uint32_t at = td_cpu_cut(n, i, n_tiles);
      pair_tile *tile = &run->tiles[run->n_tiles++];
      tile->expert = kind / 2;
      tile->prompt = kind % 2;
      tile->begin = begin + at;
      tile->n = td_cpu_cut(n, i + 1, n_tiles) - at;
    }
    run->count[kind] = begin; // from here on: the index of its next pair
    begin += n;
  }
  for (uint32_t p = 0; p < run->n_pairs; p++) {
    uint32_t kind = kind_of(run, p);
    run->place[p] = kind == UINT32_MAX ? UINT32_MAX : run->count[kind]++;
    if (kind != UINT32_MAX) run->token[run->place[p]] = p / a->top_k;
  }
}

// The tile of pairs that matrix i of the hidden items is for, and the matrix itself; with gate and
// up in one item, gate.
static const pair_tile *hidden_tile_of(const moe_run *run, size_t i) {
  return &run->tiles[run->is_half_done ? i / 2 : i];
}

static const td_weight *hidden_matrix(const moe_run *run, size_t i) {
  const td_moe_args *a = run->a;
  const td_weight *matrices = run->is_half_done && i % 2 ? a->up : a->gate;
  return &matrices[matrix_of(a, hidden_tile_of(run, i)->expert)];
}

static const td_weight *down_matrix(const moe_run *run, size_t i) {
  return &run->a->down[matrix_of(run->a, run->tiles[i].expert)];
}

// Where an item's weights begin, for prefetching; NULL: it has none.
static const void *weights_of(const moe_run *run, size_t item) {
  if (item < run->n_hidden_items) {
    uint32_t row = (uint32_t)(item % run->n_hidden_tiles) * run->hidden_tile;
    return td_cpu_rows_at(hidden_matrix(run, item / run->n_hidden_tiles), row);
  }
  item -= run->n_hidden_items;
  if (item >= run->n_down_items) return NULL; // or no item at all
  uint32_t row = (uint32_t)(item % run->n_dim_tiles) * run->dim_tile;
  return td_cpu_rows_at(down_matrix(run, item / run->n_dim_tiles), row);
}

enum { HIDDEN_PART, DOWN_PART, SUM_PART };

static td_cpu_rows expert_rows(const void *ctx, size_t part, size_t matrix) {
  const moe_run *run = ctx;
  switch (part) {
  case HIDDEN_PART:
    return td_cpu_rows_of(hidden_matrix(run, matrix), 0, run->hidden_tile, run->gate_rows);
  case DOWN_PART: return td_cpu_rows_of(down_matrix(run, matrix), 0, run->dim_tile, run->dim);
  default: return (td_cpu_rows){.base = NULL};
  }
}

static float clamped(const td_moe_args *a, float gate, float up) {
  const float g = fminf(gate, a->limit), u = fminf(fmaxf(up, -a->limit), a->limit);
  if (a->plain) return u * (g / (1 + expf(-g)));
  return (u + 1) * (g / (1 + expf(-a->alpha * g)));
}

// The clamped activation of one pair's rows of gate and up, which alternate.
static void activate_pairs(const td_moe_args *a, const float *rows, const float *bias, float *out,
                           uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    out[i] = clamped(a, rows[2 * i] + (bias ? bias[2 * i] : 0),
                     rows[2 * i + 1] + (bias ? bias[2 * i + 1] : 0));
  }
}

// GELU's approximation by tanh is g * sigmoid(2 z) with z = sqrt(2/pi) (g + 0.044715 g^3), and so
// silu(2 z) / (2 z / g). 2 z takes gate's place, the rest of the product that of up.
static void turn_to_silu(float *gate, float *up, uint32_t n) {
  const float twice = 1.5957691216057308f; // 2 sqrt(2/pi)
  for (uint32_t i = 0; i < n; i++) {
    const float slope = twice * (1 + 0.044715f * gate[i] * gate[i]);
    gate[i] *= slope;
    up[i] /= slope;
  }
}

// The activation of rows [row, row + n) of gate and up, in gate's place.
static void activate(const moe_run *run, const pair_tile *tile, uint32_t row, uint32_t n,
                     float *gate, float *up) {
  const td_moe_args *a = run->a;
  if (a->gelu) turn_to_silu(gate, up, n);
  if (a->limit == 0) {
    td_kernels()->swiglu_row(&(td_swiglu_row_args){.gate = gate, .up = up, .out = gate, .n = n});
    return;
  }
  const size_t n_biases = (size_t)(a->n_routed ? a->n_routed : a->n_experts) * run->hidden;
  const float *bias = a->gate_bias;
  if (bias) bias += (size_t)(a->first_expert + tile->expert) * run->hidden + row;
  for (uint32_t i = 0; i < n; i++)
    gate[i] = clamped(a, gate[i] + (bias ? bias[i] : 0), up[i] + (bias ? bias[n_biases + i] : 0));
}

// Rows [row, row + n_rows) of gate and up, which alternate, and their activation.
static void pairs_tile(const moe_run *run, const pair_tile *tile, uint32_t row, uint32_t n_rows,
                       const void *next) {
  const td_moe_args *a = run->a;
  float *rows = run->gate + (size_t)tile->begin * run->gate_rows;
  float *out = run->active + (size_t)tile->begin * run->hidden;
  const float *bias = a->gate_bias;
  if (bias) bias += (size_t)(a->first_expert + tile->expert) * run->gate_rows + row;
  td_cpu_linear_tile(&(td_linear_args){.w = &a->gate[matrix_of(a, tile->expert)],
                                       .x = run->x,
                                       .x_rows = run->token + tile->begin,
                                       .y = rows,
                                       .ldx = run->dim,
                                       .ldy = run->gate_rows,
                                       .n_tokens = tile->n,
                                       .row_begin = row,
                                       .row_end = row + n_rows,
                                       .prompt = tile->prompt,
                                       .way = run->trial.way[0],
                                       .next = next});
  for (uint32_t i = 0; i < tile->n; i++) {
    activate_pairs(a, rows + (size_t)i * run->gate_rows + row, bias,
                   out + (size_t)i * run->hidden + row / 2, n_rows / 2);
  }
}

// Rows [row, row + n_rows) of gate and up, or of one of them if they are items of their own, which
// the other half's item may have to continue with. Whether the activation of the rows is done.
static bool gate_up_rows(const moe_run *run, const pair_tile *tile, size_t item, uint32_t row,
                         uint32_t n_rows, const void *next) {
  const td_moe_args *a = run->a;
  const uint32_t matrix = matrix_of(a, tile->expert);
  const size_t i = item / run->n_hidden_tiles;
  float *gate = run->gate + (size_t)tile->begin * run->hidden;
  float *up = run->up + (size_t)tile->begin * run->hidden;
  td_linear_args args = {
      .w = hidden_matrix(run, i),
      .x = run->x,
      .x_rows = run->token + tile->begin,
      .y = run->is_half_done && i % 2 ? up : gate,
      .ldx = run->dim,
      .ldy = run->hidden,
      .n_tokens = tile->n,
      .row_begin = row,
      .row_end = row + n_rows,
      .prompt = tile->prompt,
      .way = run->trial.way[0],
      .next = run->is_half_done ? next : td_cpu_rows_at(&a->up[matrix], row),
  };
  td_cpu_linear_tile(&args);
  if (run->is_half_done) {
    const size_t at = i / 2 * run->n_hidden_tiles + item % run->n_hidden_tiles;
    if (!atomic_exchange_explicit(&run->is_half_done[at], 1, memory_order_acq_rel)) return false;
  } else {
    args.w = &a->up[matrix];
    args.y = up;
    args.next = next;
    td_cpu_linear_tile(&args);
  }
  for (uint32_t k = 0; k < tile->n; k++) {
    size_t at = (size_t)k * run->hidden + row;
    activate(run, tile, row, n_rows, gate + at, up + at);
  }
  return true;
}

static void gate_up_tile(const moe_run *run, size_t item, const void *next) {
  const pair_tile *tile = hidden_tile_of(run, item / run->n_hidden_tiles);
  uint32_t row = (uint32_t)(item % run->n_hidden_tiles) * run->hidden_tile;
  uint32_t left = run->gate_rows - row, n_rows = left < run->hidden_tile ? left : run->hidden_tile;
  if (run->a->pairs)
    pairs_tile(run, tile, row, n_rows, next);
  else if (!gate_up_rows(run, tile, item, row, n_rows, next))
    return;
  atomic_fetch_add_explicit(&run->n_hidden_done[tile - run->tiles].n, 1, memory_order_release);
}

// To rows [row, row + n_rows) of each of the tile's parts, so that a part is the same whether it is
// summed here or elsewhere.
static void add_down_bias(const moe_run *run, const pair_tile *tile, uint32_t row,
                          uint32_t n_rows) {
  const td_moe_args *a = run->a;
  const float one = 1;
  const float *bias = a->down_bias + (size_t)(a->first_expert + tile->expert) * run->dim + row;
  for (uint32_t i = 0; i < tile->n; i++) {
    float *part = run->parts + (size_t)(tile->begin + i) * run->dim + row;
    td_kernels()->axpy(&(td_axpy_args){.y = part, .x = bias, .a = &one, .n = n_rows, .n_rows = 1});
  }
}

static void down_tile(moe_run *run, size_t item, const void *next, unsigned member) {
  const pair_tile *tile = &run->tiles[item / run->n_dim_tiles];
  const counter *done = &run->n_hidden_done[item / run->n_dim_tiles];
  for (unsigned i = 0; atomic_load_explicit(&done->n, memory_order_acquire) < run->n_hidden_tiles;
       i++)
    td_cpu_wait_turn(i);
  uint32_t row = (uint32_t)(item % run->n_dim_tiles) * run->dim_tile, left = run->dim - row;
  uint32_t n_rows = left < run->dim_tile ? left : run->dim_tile;
  td_cpu_linear_tile(&(td_linear_args){
      .w = &run->a->down[matrix_of(run->a, tile->expert)],
      .x = run->active + (size_t)tile->begin * run->hidden,
      .y = run->parts + (size_t)tile->begin * run->dim,
      .ldx = run->hidden,
      .ldy = run->dim,
      .n_tokens = tile->n,
      .row_begin = row,
      .row_end = row + n_rows,
      .prompt = tile->prompt,
      .way = run->trial.way[1],
      .next = next,
  });
  if (run->a->down_bias) add_down_bias(run, tile, row, n_rows);
  const unsigned node = td_thread_pool_node(run->pool, member);
  atomic_fetch_add_explicit(&run->n_down_done[node].n, 1, memory_order_release);
}

static size_t n_down_done(const moe_run *run) {
  size_t n = 0;
  for (unsigned k = 0; k < TD_MAX_NODES; k++)
    n += atomic_load_explicit(&run->n_down_done[k].n, memory_order_acquire);
  return n;
}

// Columns [begin, begin + n) of a token's pairs, each to its own row of out.
static void put_pairs(const moe_run *run, size_t t, size_t begin, size_t n) {
  const td_moe_args *a = run->a;
  for (size_t pair = t * a->top_k; pair < (t + 1) * a->top_k; pair++) {
    if (run->place[pair] == UINT32_MAX) continue;
    float *out = (float *)a->out + ((size_t)run->token0 * a->top_k + pair) * run->dim + begin;
    memcpy(out, run->parts + (size_t)run->place[pair] * run->dim + begin, n * sizeof *out);
  }
}

// Sums in f32 and rounds once.
static void sum_piece(moe_run *run, size_t item) {
  float widened[SUM_ELEMENTS];
  const td_moe_args *a = run->a;
  const bool is_rounded = a->is_bf16 && !a->out_f32;
  for (unsigned i = 0; n_down_done(run) < run->n_down_items; i++)
    td_cpu_wait_turn(i);
  size_t n_pieces = (run->dim + SUM_ELEMENTS - 1) / SUM_ELEMENTS;
  size_t t = item / n_pieces, begin = item % n_pieces * SUM_ELEMENTS;
  size_t n = run->dim - begin < SUM_ELEMENTS ? run->dim - begin : SUM_ELEMENTS;
  size_t token = run->token0 + t;
  if (a->by_pair) {
    put_pairs(run, t, begin, n);
    return;
  }
  uint16_t *rounded = (uint16_t *)a->out + token * run->dim + begin;
  float *out = is_rounded ? widened : (float *)a->out + token * run->dim + begin;
  if (!a->accumulate)
    memset(out, 0, n * sizeof *out);
  else if (is_rounded)
    td_bf16_values(out, rounded, n);
  for (uint32_t j = 0; j < a->top_k; j++) {
    const uint32_t place = run->place[t * a->top_k + j];
    if (place == UINT32_MAX) continue;
    const float *part = run->parts + (size_t)place * run->dim + begin;
    float weight = a->ids ? a->weights[token * a->top_k + j] : 1;
    td_kernels()->axpy(&(td_axpy_args){.y = out, .x = part, .a = &weight, .n = n, .n_rows = 1});
  }
  if (is_rounded) td_bf16_of_n(rounded, out, n);
}

static void run_item(void *ctx, size_t item, size_t next, unsigned member) {
  moe_run *run = ctx;
  if (item < run->n_hidden_items)
    gate_up_tile(run, item, weights_of(run, next));
  else if (item - run->n_hidden_items < run->n_down_items)
    down_tile(run, item - run->n_hidden_items, weights_of(run, next), member);
  else
    sum_piece(run, item - run->n_hidden_items - run->n_down_items);
}

static td_status check_expert(const moe_run *run, uint32_t e, td_err *err) {
  const td_moe_args *a = run->a;
  const uint32_t m = matrix_of(a, e);
  td_status status = td_cpu_check_weight(&a->gate[m], "expert gate", err);
  if (status == TD_OK && !a->pairs) status = td_cpu_check_weight(&a->up[m], "expert up", err);
  if (status == TD_OK) status = td_cpu_check_weight(&a->down[m], "expert down", err);
  if (status != TD_OK) return td_err_prefix(err, "expert %u", e);
  const td_weight *up = a->pairs ? &a->gate[m] : &a->up[m];
  TD_DEV_REQUIRE(a->gate[m].cols == run->dim && up->cols == run->dim &&
                     a->gate[m].rows == run->gate_rows && up->rows == run->gate_rows &&
                     a->down[m].rows == run->dim && a->down[m].cols == run->hidden,
                 "expert %u: its shapes are not those of the first one used", e);
  return TD_OK;
}

// Chooses the rows per item from the first used expert's shape and the number of experts likely to
// be chosen; the tuner starts from there.
static void cut_rows(moe_run *run, uint32_t e, const td_cpu_dev *dev) {
  const td_moe_args *a = run->a;
  uint64_t n_pairs = (uint64_t)a->n_tokens * a->top_k;
  uint32_t n_chosen = n_pairs < a->n_experts ? (uint32_t)n_pairs : a->n_experts;
  uint32_t n_tokens = (uint32_t)(n_pairs / a->n_experts); // per expert
  run->dim = a->gate[e].cols;
  run->gate_rows = a->gate[e].rows;
  run->hidden = a->pairs ? run->gate_rows / 2 : run->gate_rows;
  size_t n_times = (size_t)n_chosen * (n_tokens / TILE_PAIRS + 1);
  const unsigned n_threads = td_thread_pool_size(dev->pool);
  const uint32_t first[TD_TUNER_KNOBS] = {
      td_kernels_tile_rows(&a->gate[e], n_tokens, n_times, n_threads),
      td_kernels_tile_rows(&a->down[e], n_tokens, n_times, n_threads)};
  const td_tuner_kind kind = td_tuner_kind_of(&a->gate[e], a->n_experts, a->n_tokens,
                                              a->n_prompt > 0);
  run->trial = td_cpu_tuner_next(dev->tuner, &kind, first);
  run->hidden_tile = td_cpu_tile_rows(dev, &a->gate[e], run->trial.rows[0]);
  if (a->pairs) run->hidden_tile += run->hidden_tile % 2;
  run->dim_tile = td_cpu_tile_rows(dev, &a->down[e], run->trial.rows[1]);
  run->n_hidden_tiles = (run->gate_rows + run->hidden_tile - 1) / run->hidden_tile;
  run->n_dim_tiles = (run->dim + run->dim_tile - 1) / run->dim_tile;
}

// Whether prompt tokens use the GEMM kernels. Decided by a typical expert's share of a typical
// prompt and the first expert's weights, since neither chunking nor routing may change results.
static bool takes_prompts(const td_moe_args *a) {
  enum { USUAL_PROMPT = 512 };
  return td_kernels_use_gemm(&a->gate[0], USUAL_PROMPT * a->top_k / a->n_experts);
}

// Shapes are those of the first used expert, or of expert 0; all used experts must have them.
static td_status check(moe_run *run, const td_cpu_dev *dev, td_err *err) {
  const td_moe_args *a = run->a;
  TD_DEV_REQUIRE(a->n_experts > 0 && a->top_k > 0 && (a->ids || a->top_k == 1),
                 "experts: top %u of %u", a->top_k, a->n_experts);
  TD_DEV_REQUIRE(!a->ids || a->weights, "experts: ids without weights");
  TD_DEV_REQUIRE(!a->slots || (a->ids && !a->n_routed), "experts: slots of a group");
  TD_DEV_REQUIRE(a->limit > 0 || (!a->pairs && !a->gate_bias),
                 "experts: pairs and gate's bias belong to a clamped activation");
  TD_DEV_REQUIRE(!a->gelu || a->limit == 0, "experts: GELU with a limit");
  TD_DEV_REQUIRE(a->n_prompt <= a->n_tokens, "experts: %u of %u tokens are a prompt's", a->n_prompt,
                 a->n_tokens);
  run->n_prompt = takes_prompts(a) ? a->n_prompt : 0;
  const uint32_t n_ids = a->n_routed ? a->n_routed : a->ids ? a->n_experts : 1;
  uint32_t before = UINT32_MAX;
  for (size_t p = 0; p < (size_t)a->n_tokens * a->top_k; p++) {
    const uint32_t id = a->ids ? (uint32_t)a->ids[p] : 0, e = expert_of(a, p);
    TD_DEV_REQUIRE(id < n_ids, "experts: id %d is not one of %u", (int)id, n_ids);
    if (e == UINT32_MAX || e == before) continue;
    if (run->dim == 0) cut_rows(run, matrix_of(a, e), dev);
    td_status status = check_expert(run, e, err);
    if (status != TD_OK) return status;
    before = e;
  }
  if (run->dim == 0) cut_rows(run, 0, dev);
  return TD_OK;
}

static td_status reserve(td_cpu_stream *stream, moe_run *run, uint32_t max_pairs, td_err *err) {
  size_t n = max_pairs, n_experts = run->a->n_experts;
  void *order, *tiles, *gate, *up, *parts, *halves;
  td_status status = td_cpu_scratch(stream, SCRATCH_ORDER,
                                    (2 * (n + n_experts) + 1) * sizeof(uint32_t), &order, err);
  if (status == TD_OK) {
    status = td_cpu_scratch(stream, SCRATCH_ITEMS, n * (sizeof(counter) + sizeof(pair_tile)),
                            &tiles, err);
  }
  // Gate's rows and up's may be on different nodes, or are to be counted each.
  const td_cpu_dev *dev = td_cpu_dev_of(stream);
  if (status == TD_OK && (dev->nodes.n > 1 || dev->reads) && dev->stripes.base && !run->a->pairs) {
    status = td_cpu_scratch(stream, SCRATCH_HALVES, n * run->n_hidden_tiles, &halves, err);
    run->is_half_done = halves;
  }
  size_t hidden_bytes = n * run->hidden * sizeof(float);
  size_t gate_bytes = n * run->gate_rows * sizeof(float);
  if (status == TD_OK) status = td_cpu_scratch(stream, SCRATCH_GATE, gate_bytes, &gate, err);
  if (status == TD_OK) status = td_cpu_scratch(stream, SCRATCH_UP, hidden_bytes, &up, err);
  if (status == TD_OK)
    status = td_cpu_scratch(stream, SCRATCH_PARTS, n * run->dim * sizeof(float), &parts, err);
  if (status != TD_OK) return status;
  run->token = order;
  run->place = run->token + n;
  run->count = run->place + n;
  run->n_hidden_done = tiles;
  run->tiles = (pair_tile *)(run->n_hidden_done + n);
  run->gate = gate;
  run->up = up;
  run->active = run->a->pairs ? run->up : run->gate;
  run->parts = parts;
  return TD_OK;
}

typedef struct {
  float *to;
  const uint16_t *from;
  size_t n;
} widening;

static void widen_piece(void *ctx, size_t item, unsigned member) {
  (void)member;
  const widening *w = ctx;
  size_t begin = item * WIDEN_ELEMENTS, left = w->n - begin;
  td_bf16_values(w->to + begin, w->from + begin, left < WIDEN_ELEMENTS ? left : WIDEN_ELEMENTS);
}

// Sets run->x to the pass's activations in f32.
static td_status take_x(td_cpu_stream *stream, moe_run *run, td_err *err) {
  const td_moe_args *a = run->a;
  const size_t at = (size_t)run->token0 * run->dim;
  run->x = (const float *)a->x + at;
  if (!a->is_bf16) return TD_OK;
  widening w = {.from = (const uint16_t *)a->x + at, .n = (size_t)run->n_tokens * run->dim};
  void *x;
  td_status status = td_cpu_scratch(stream, SCRATCH_X, w.n * sizeof *w.to, &x, err);
  if (status != TD_OK) return status;
  run->x = w.to = x;
  td_cpu_for(stream, (w.n + WIDEN_ELEMENTS - 1) / WIDEN_ELEMENTS, widen_piece, &w);
  return TD_OK;
}

static void reset_counters(moe_run *run) {
  memset(run->n_hidden_done, 0, run->n_tiles * sizeof *run->n_hidden_done);
  memset(run->n_down_done, 0, sizeof run->n_down_done);
  if (run->is_half_done)
    memset((void *)run->is_half_done, 0, (size_t)run->n_tiles * run->n_hidden_tiles);
}

td_status td_cpu_op_moe(td_cpu_stream *stream, const td_moe_args *a, td_err *err) {
  if (a->n_tokens == 0) return TD_OK;
  const td_cpu_dev *dev = td_cpu_dev_of(stream);
  moe_run run = {.a = a, .pool = dev->pool};
  td_status status = check(&run, dev, err);
  if (status != TD_OK) return status;
  uint32_t pass_tokens = MAX_PAIRS / a->top_k > 0 ? MAX_PAIRS / a->top_k : 1;
  if (pass_tokens > a->n_tokens) pass_tokens = a->n_tokens;
  status = reserve(stream, &run, pass_tokens * a->top_k, err);
  if (status != TD_OK) return status;
  const uint64_t begin_ns = td_clock_ns();
  size_t n_tiles = 0, sum_pieces = (run.dim + SUM_ELEMENTS - 1) / SUM_ELEMENTS;
  for (; run.token0 < a->n_tokens; run.token0 += pass_tokens) {
    uint32_t left = a->n_tokens - run.token0;
    run.n_tokens = left < pass_tokens ? left : pass_tokens;
    run.n_pairs = run.n_tokens * a->top_k;
    status = take_x(stream, &run, err);
    if (status != TD_OK) return status;
    order_pairs(&run);
    const td_cpu_part parts[] = {
        [HIDDEN_PART] = {(size_t)run.n_tiles * (run.is_half_done ? 2 : 1), run.n_hidden_tiles},
        [DOWN_PART] = {run.n_tiles, run.n_dim_tiles},
        [SUM_PART] = {1, run.n_tokens * sum_pieces}};
    run.n_hidden_items = parts[HIDDEN_PART].n_matrices * run.n_hidden_tiles;
    run.n_down_items = (size_t)run.n_tiles * run.n_dim_tiles;
    reset_counters(&run);
    n_tiles += run.n_tiles;
    const td_cpu_tiles tiles = {.parts = parts,
                                .n_parts = TD_COUNT(parts),
                                .fn = run_item,
                                .rows = expert_rows,
                                .ctx = &run};
    status = td_cpu_parallel_tiles(stream, &tiles, err);
    if (status != TD_OK) return status;
  }
  // Decode time is proportional to the experts read, prefill time to the tokens.
  const double work = a->n_prompt > 0 ? a->n_tokens : (double)n_tiles;
  td_cpu_tuner_add(dev->tuner, &run.trial, td_jitter_time(td_clock_ns() - begin_ns), work);
  return TD_OK;
}

// ---- results of two devices ---------------------------------------------------------------------

typedef struct {
  const td_moe_join_args *a;
  size_t n_pieces; // of a token
} join_run;

static void join_piece(void *ctx, size_t item, unsigned member) {
  (void)member;
  const join_run *run = ctx;
  const td_moe_join_args *a = run->a;
  const size_t t = item / run->n_pieces, begin = item % run->n_pieces * SUM_ELEMENTS;
  const size_t n = a->dim - begin < SUM_ELEMENTS ? a->dim - begin : SUM_ELEMENTS;
  float widened[SUM_ELEMENTS];
  float *out = a->is_bf16 ? widened : (float *)a->out + t * a->dim + begin;
  memset(out, 0, n * sizeof *out);
  for (size_t pair = t * a->top_k; pair < (t + 1) * a->top_k; pair++) {
    const int32_t id = a->ids[pair];
    const bool is_peers = a->peer && a->peer_slots[id] >= 0;
    const float *parts = a->slots[id] >= 0 ? a->here : is_peers ? a->peer : a->there;
    td_kernels()->axpy(&(td_axpy_args){
        .y = out, .x = parts + pair * a->dim + begin, .a = &a->weights[pair], .n = n, .n_rows = 1});
  }
  if (a->is_bf16) td_bf16_of_n((uint16_t *)a->out + t * a->dim + begin, out, n);
}

td_status td_cpu_op_moe_join(td_cpu_stream *stream, const td_moe_join_args *a, td_err *err) {
  for (size_t i = 0; i < (size_t)a->n_tokens * a->top_k; i++) {
    TD_DEV_REQUIRE((uint32_t)a->ids[i] < a->n_experts, "experts: id %d is not one of %u",
                   (int)a->ids[i], a->n_experts);
  }
  join_run run = {.a = a, .n_pieces = (a->dim + SUM_ELEMENTS - 1) / SUM_ELEMENTS};
  td_cpu_for(stream, a->n_tokens * run.n_pieces, join_piece, &run);
  return TD_OK;
}
