// src/device/cpu/delta.c - gated delta nets: the causal convolution, the recurrence over tokens,
// gates. A sequence's tokens are computed one after the other in every case, so that results do not
// depend on how they are cut into steps; work is divided by sequences, heads and columns of the
// state.
#include <assert.h>
#include <math.h>
#include <string.h>

#include "device/cpu/pages.h"

static_assert((int)TD_DELTA_TILE == (int)TD_DELTA_COLUMNS, "columns of a tile");

enum { GATES = 512, CHANNELS = 256 }; // decays of an item; channels convolved together
#define NORM_EPS 1e-6f                // of queries and keys

static td_status check(const td_batch_view *b, const td_kv_view *state, const td_delta_shape *shape,
                       td_err *err) {
  const td_status st = td_dev_check_delta(state, shape, err);
  return st == TD_OK ? td_cpu_check_batch(b, state, (td_kv_rows){0}, err) : st;
}

// ---- the convolution ----------------------------------------------------------------------------

typedef enum { PART_Q, PART_K, PART_V, N_PARTS } part_kind;

typedef struct {
  const td_delta_conv_args *args;
  td_vec norm[2]; // of queries and keys: the weights of an RMS norm that divides by the norm
} conv_run;

// Channels [channel, channel + n) of the convolution, whose inputs are at `input` of a token's row.
typedef struct {
  size_t input;
  uint32_t channel, n;
} conv_piece;

// Row i of the inputs, counted from the oldest one that the piece's first token needs.
static const float *input_row(const td_delta_conv_args *a, const conv_piece *p, const float *past,
                              int32_t first, int32_t i) {
  const int32_t n_past = (int32_t)a->shape.n_taps - 1;
  if (i < n_past) return past + (size_t)i * CHANNELS;
  return (const float *)a->x + (size_t)(first + i - n_past) * a->x_stride + p->input;
}

// The inputs that the token behind t needs, to a state.
static void keep_inputs(const td_delta_conv_args *a, const conv_piece *p, const float *past,
                        int32_t first, int32_t t, float *state) {
  const size_t channels = td_delta_channels(&a->shape);
  for (int32_t i = 0; i < (int32_t)a->shape.n_taps - 1; i++)
    memcpy(state + (size_t)i * channels + p->channel,
           input_row(a, p, past, first, t + 1 - first + i), p->n * sizeof *past);
}

static void conv_sequence(const td_delta_conv_args *a, uint32_t s, const conv_piece *p) {
  const int32_t n_past = (int32_t)a->shape.n_taps - 1;
  const size_t channels = td_delta_channels(&a->shape);
  const int32_t first = a->batch.q_begin[s], end = a->batch.q_begin[s + 1];
  float past[(TD_DELTA_MAX_TAPS - 1) * CHANNELS];
  const float *before = (const float *)(const void *)td_state_before(&a->batch, &a->state, s);
  for (int32_t i = 0; i < n_past; i++) {
    float *row = past + (size_t)i * CHANNELS;
    if (before)
      memcpy(row, before + (size_t)i * channels + p->channel, p->n * sizeof *row);
    else
      memset(row, 0, p->n * sizeof *row);
  }
  for (td_page_run run = {.end = first}; run.end < end;) {
    run = td_page_run_at(&a->batch, &a->state, s, run.end);
    for (int32_t t = run.begin; t < run.end; t++) {
      const float *rows[TD_DELTA_MAX_TAPS];
      for (int32_t j = 0; j <= n_past; j++)
        rows[j] = input_row(a, p, past, first, t - first + j);
      td_kernels()->conv_silu(
          &(td_conv_silu_args){.x = rows,
                               .w = a->conv + p->channel,
                               .out = (float *)a->out + t * channels + p->channel,
                               .n = p->n,
                               .ldw = channels,
                               .n_taps = a->shape.n_taps});
      float *slot = td_trail_slot(&a->trail, &a->batch, s, t);
      if (slot) keep_inputs(a, p, past, first, t, slot);
    }
    keep_inputs(a, p, past, first, run.end - 1, (float *)(void *)run.state);
  }
}

static void conv_group(const conv_run *run, uint32_t s, part_kind kind, uint32_t group) {
  const td_delta_conv_args *a = run->args;
  const td_delta_shape *shape = &a->shape;
  const td_row_part *parts[] = {&a->q, &a->k, &a->v};
  const uint32_t of_k = shape->n_k_heads * shape->k_dim;
  const uint32_t width = kind == PART_V ? shape->n_v_heads / shape->n_k_heads * shape->v_dim
                                        : shape->k_dim;
  const uint32_t channel = (uint32_t)kind * of_k + group * width;
  for (uint32_t c = 0; c < width; c += CHANNELS) {
    const conv_piece piece = {.input = parts[kind]->offset + group * parts[kind]->stride + c,
                              .channel = channel + c,
                              .n = width - c < CHANNELS ? width - c : CHANNELS};
    conv_sequence(a, s, &piece);
  }
  if (kind == PART_V) return;
  for (int32_t t = a->batch.q_begin[s]; t < a->batch.q_begin[s + 1]; t++) {
    float *row = (float *)a->out + t * (size_t)td_delta_channels(shape) + channel;
    td_kernels()->rmsnorm_row(&(td_norm_row_args){
        .x = row, .w = run->norm[kind], .out = row, .eps = NORM_EPS / (float)shape->k_dim});
  }
}

static float softplus(float x) {
  return x > 20 ? x : log1pf(expf(x));
}

// Value head h of token t.
static void gates_of_head(const td_delta_conv_args *a, size_t t, uint32_t h) {
  const uint32_t of_group = a->shape.n_v_heads / a->shape.n_k_heads;
  const uint32_t group = h / of_group, i = h % of_group, n = td_delta_decays(&a->shape);
  const float *row = (const float *)a->x + t * a->x_stride;
  const float *x = row + a->a.offset + group * a->a.stride + (size_t)i * n;
  const float *bias = a->bias + (size_t)h * n, rate = expf(a->decay[h]);
  float *out = a->gates + (t * a->shape.n_v_heads + h) * (n + 1);
  if (a->shape.by_channel) {
    td_kernels()->decay_row(&(td_decay_row_args){
        .x = x, .bias = bias, .out = out, .n = n, .rate = rate, .bound = a->bound});
  } else {
    out[0] = expf(-rate * softplus(x[0] + bias[0]));
  }
  out[n] = 1 / (1 + expf(-row[a->b.offset + group * a->b.stride + i]));
}

// Heads of tokens whose gates are an item.
static size_t gate_heads(const td_delta_shape *shape) {
  const uint32_t n = GATES / td_delta_decays(shape);
  return n ? n : 1;
}

// Items: of each sequence the groups of queries, keys and values; then gates of some heads of
// tokens.
static void conv_item(void *ctx, size_t item, unsigned member) {
  (void)member;
  const conv_run *run = ctx;
  const td_delta_conv_args *a = run->args;
  const size_t of_seq = (size_t)N_PARTS * a->shape.n_k_heads;
  if (item < of_seq * a->batch.n_seqs) {
    const size_t at = item % of_seq;
    conv_group(run, (uint32_t)(item / of_seq), (part_kind)(at % N_PARTS), (uint32_t)(at / N_PARTS));
    return;
  }
  const size_t heads = a->shape.n_v_heads, n = heads * a->batch.n_tokens;
  const size_t begin = (item - of_seq * a->batch.n_seqs) * gate_heads(&a->shape);
  for (size_t i = begin; i < begin + gate_heads(&a->shape) && i < n; i++)
    gates_of_head(a, i / heads, (uint32_t)(i % heads));
}

td_status td_cpu_op_delta_conv(td_cpu_stream *stream, const td_delta_conv_args *a, td_err *err) {
  td_status st = check(&a->batch, &a->state, &a->shape, err);
  void *memory = NULL;
  const uint32_t n = a->shape.k_dim;
  if (st == TD_OK)
    st = td_cpu_scratch(stream, SCRATCH_ITEMS, 2 * (size_t)n * sizeof(float), &memory, err);
  if (st != TD_OK) return st;
  // x / sqrt(sum x^2 + eps) = x / sqrt(mean x^2 + eps / n) / sqrt(n)
  float *norms = memory;
  for (uint32_t i = 0; i < n; i++) {
    norms[i] = 1 / (float)n;
    norms[n + i] = 1 / sqrtf((float)n);
  }
  conv_run run = {.args = a,
                  .norm = {{.data = norms, .dtype = TD_F32, .n = n},
                           {.data = norms + n, .dtype = TD_F32, .n = n}}};
  const size_t n_heads = (size_t)a->batch.n_tokens * a->shape.n_v_heads;
  const size_t n_gates = (n_heads + gate_heads(&a->shape) - 1) / gate_heads(&a->shape);
  td_cpu_for(stream, (size_t)N_PARTS * a->shape.n_k_heads * a->batch.n_seqs + n_gates, conv_item,
             &run);
  return TD_OK;
}

// ---- the recurrence -----------------------------------------------------------------------------

// Copies a tile of the state before to the page that the run fills, unless it is the same page.
static void begin_tile(float *to, const float *from, uint32_t k_dim) {
  const size_t n_bytes = (size_t)k_dim * TD_DELTA_TILE * sizeof *to;
  if (!from)
    memset(to, 0, n_bytes);
  else if (from != to)
    memcpy(to, from, n_bytes);
}

// Items: of each sequence the value heads, of each the tiles of its state's columns.
static void rule_item(void *ctx, size_t item, unsigned member) {
  (void)member;
  const td_delta_rule_op_args *a = ctx;
  const td_delta_shape *shape = &a->shape;
  const uint32_t n_tiles = td_delta_tiles(shape), tile = (uint32_t)(item % n_tiles);
  const uint32_t head = (uint32_t)(item / n_tiles % shape->n_v_heads);
  const uint32_t s = (uint32_t)(item / n_tiles / shape->n_v_heads);
  const size_t at = td_delta_conv_floats(shape) +
                    ((size_t)head * n_tiles + tile) * shape->k_dim * TD_DELTA_TILE;
  const size_t channels = td_delta_channels(shape), of_k = (size_t)shape->n_k_heads * shape->k_dim;
  const size_t of_gates = td_delta_decays(shape) + 1;
  const uint32_t k_head = shape->is_tiled ? head % shape->n_k_heads
                                          : head / (shape->n_v_heads / shape->n_k_heads);
  const uint32_t column = tile * TD_DELTA_TILE, left = shape->v_dim - column;
  const size_t value = (size_t)head * shape->v_dim + column;
  const float *before = (const float *)(const void *)td_state_before(&a->batch, &a->state, s);
  const float *from = before ? before + at : NULL;
  const int32_t end = a->batch.q_begin[s + 1];
  for (td_page_run run = {.end = a->batch.q_begin[s]}; run.end < end;) {
    run = td_page_run_at(&a->batch, &a->state, s, run.end);
    float *state = (float *)(void *)run.state + at;
    begin_tile(state, from, shape->k_dim);
    from = state;
    const size_t v_dims = (size_t)shape->n_v_heads * shape->v_dim;
    const bool is_kept = a->trail.slots && a->trail.first[s] >= 0;
    for (int32_t t = run.begin, n; t < run.end; t += n) {
      n = is_kept ? 1 : run.end - t;
      const float *row = (const float *)a->qkv + t * channels;
      td_kernels()->delta_rule(&(td_delta_rule_args){
          .state = state,
          .q = row + (size_t)k_head * shape->k_dim,
          .k = row + of_k + (size_t)k_head * shape->k_dim,
          .v = row + 2 * of_k + value,
          .gates = a->gates + ((size_t)t * shape->n_v_heads + head) * of_gates,
          .out = (float *)a->out + t * v_dims + value,
          .ldk = channels,
          .ldv = channels,
          .ldg = of_gates * shape->n_v_heads,
          .ldo = v_dims,
          .n_tokens = (uint32_t)n,
          .k_dim = shape->k_dim,
          .n_cols = left < TD_DELTA_TILE ? left : TD_DELTA_TILE,
          .n_decays = td_delta_decays(shape)});
      float *slot = td_trail_slot(&a->trail, &a->batch, s, t);
      if (slot) begin_tile(slot + at, state, shape->k_dim);
    }
  }
}

td_status td_cpu_op_delta_rule(td_cpu_stream *stream, const td_delta_rule_op_args *a, td_err *err) {
  td_status st = check(&a->batch, &a->state, &a->shape, err);
  if (st != TD_OK) return st;
  td_cpu_for(stream, (size_t)a->batch.n_seqs * a->shape.n_v_heads * td_delta_tiles(&a->shape),
             rule_item, (void *)a);
  return TD_OK;
}

// ---- gates --------------------------------------------------------------------------------------

static void gate_token(void *ctx, size_t t, unsigned member) {
  (void)member;
  const td_gate_rows_args *a = ctx;
  const float *gates = (const float *)a->gate + t * a->gate_stride + a->part.offset;
  for (uint32_t g = 0; g < a->n_groups; g++) {
    float *x = (float *)a->x + (t * a->n_groups + g) * a->dim;
    const float *gate = gates + g * a->part.stride;
    if (a->scalar) {
      const float factor = 1 / (1 + expf(-*gate));
      for (uint32_t i = 0; i < a->dim; i++)
        x[i] *= a->silu ? *gate * factor : factor;
    } else if (a->silu) {
      td_kernels()->swiglu_row(&(td_swiglu_row_args){.gate = gate, .up = x, .out = x, .n = a->dim});
    } else {
      td_kernels()->sigmoid_row(
          &(td_sigmoid_row_args){.gate = gate, .x = x, .out = x, .n = a->dim});
    }
  }
}

td_status td_cpu_op_gate_rows(td_cpu_stream *stream, const td_gate_rows_args *a, td_err *err) {
  (void)err;
  td_cpu_for(stream, a->n_tokens, gate_token, (void *)a);
  return TD_OK;
}
