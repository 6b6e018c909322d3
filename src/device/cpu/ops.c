// src/device/cpu/ops.c - dispatch, argument checks, and the operators that move or touch rows.
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/bf16.h"
#include "device/cpu/cpu.h"
#include "device/cpu/pages.h"

td_status td_cpu_execute(td_cpu_stream *stream, const td_op *op, td_err *err) {
  switch (op->kind) {
#define X(NAME, name, args_type, ...)                                                              \
  case TD_OP_##NAME: return td_cpu_op_##name(stream, &op->name, err);
    TD_OPS(X)
#undef X
  case TD_N_OPS: break;
  }
  return td_fail(err, TD_EINTERNAL, "operator %d does not exist", (int)op->kind);
}

td_status td_cpu_check_weight(const td_weight *w, const char *what, td_err *err) {
  td_status status = td_dev_check_weight(w, what, err);
  if (status != TD_OK) return status;
  TD_DEV_REQUIRE(td_kernels_linear(w, false), "%s: no kernel for %s", what,
                 td_dtype_name(w->dtype));
  return TD_OK;
}

td_status td_cpu_check_batch(const td_batch_view *b, const td_kv_view *kv, td_kv_rows rows,
                             td_err *err) {
  td_status status = td_dev_check_batch(b, kv, TD_F32, rows, err);
  if (status != TD_OK) return status;
  TD_DEV_REQUIRE(b->q_begin[0] == 0 && (uint32_t)b->q_begin[b->n_seqs] == b->n_tokens,
                 "batch: q_begin does not cover the %u tokens", b->n_tokens);
  uint64_t max_position = (uint64_t)b->max_pages * b->page_tokens;
  for (uint32_t s = 0; s < b->n_seqs; s++) {
    TD_DEV_REQUIRE(b->q_begin[s] <= b->q_begin[s + 1] && (uint32_t)b->q_begin[s + 1] <= b->n_tokens,
                   "batch: q_begin falls at sequence %u", s);
    for (int32_t t = b->q_begin[s]; t < b->q_begin[s + 1]; t++) {
      int32_t position = b->position[t];
      TD_DEV_REQUIRE(b->seq[t] == (int32_t)s, "batch: token %d is not of sequence %u", t, s);
      TD_DEV_REQUIRE(position >= 0 && (uint64_t)position < max_position,
                     "batch: position %d of token %d is beyond its pages", position, t);
      TD_DEV_REQUIRE(t == b->q_begin[s] || position == b->position[t - 1] + 1,
                     "batch: token %d does not follow its predecessor", t);
    }
    if (b->q_begin[s] == b->q_begin[s + 1]) continue;
    uint32_t n_pages = (uint32_t)b->position[b->q_begin[s + 1] - 1] / b->page_tokens + 1;
    for (uint32_t p = 0; p < n_pages; p++) {
      TD_DEV_REQUIRE(b->page_table[(size_t)s * b->max_pages + p] >= 0,
                     "batch: page %u of sequence %u is absent", p, s);
    }
  }
  return TD_OK;
}

enum { COPY_BYTES = 1 << 18 }; // of a piece of a copy, which takes as long as waking the pool

static void copy_piece(void *ctx, size_t item, unsigned member) {
  (void)member;
  const td_copy_args *a = ctx;
  const size_t at = item * COPY_BYTES, left = a->n_bytes - at;
  memcpy((char *)a->dst + at, (const char *)a->src + at, left < COPY_BYTES ? left : COPY_BYTES);
}

td_status td_cpu_op_copy(td_cpu_stream *stream, const td_copy_args *a, td_err *err) {
  (void)err;
  const uintptr_t dst = (uintptr_t)a->dst, src = (uintptr_t)a->src;
  const bool is_apart = dst + a->n_bytes <= src || src + a->n_bytes <= dst;
  if (is_apart && a->n_bytes >= 2 * (size_t)COPY_BYTES)
    td_cpu_for(stream, (a->n_bytes + COPY_BYTES - 1) / COPY_BYTES, copy_piece, (void *)a);
  else if (a->n_bytes)
    memmove(a->dst, a->src, a->n_bytes);
  return TD_OK;
}

td_status td_cpu_op_fill_zero(td_cpu_stream *stream, const td_fill_zero_args *a, td_err *err) {
  (void)stream;
  (void)err;
  if (a->n_bytes) memset(a->dst, 0, a->n_bytes);
  return TD_OK;
}

enum { ELEMENTS = 1 << 15 }; // per piece of element-wise work

// y += x over n elements.
static void add(float *y, const float *x, size_t n) {
  td_kernels()->axpy(&(td_axpy_args){.y = y, .x = x, .a = &(float){1}, .n = n, .n_rows = 1});
}

static void multiply(float *x, float factor, size_t n) {
  for (size_t i = 0; i < n; i++)
    x[i] *= factor;
}

static void add_piece(void *ctx, size_t item, unsigned member) {
  (void)member;
  const td_add_args *a = ctx;
  size_t begin = item * ELEMENTS, n = a->n - begin < ELEMENTS ? a->n - begin : ELEMENTS;
  float *x = (float *)a->x + begin;
  add(x, (const float *)a->y + begin, n);
  if (a->factor != 0) multiply(x, a->factor, n);
}

td_status td_cpu_op_add(td_cpu_stream *stream, const td_add_args *a, td_err *err) {
  (void)err;
  td_cpu_for(stream, (a->n + ELEMENTS - 1) / ELEMENTS, add_piece, (void *)a);
  return TD_OK;
}

td_status td_cpu_op_signal(td_cpu_stream *stream, const td_signal_args *a, td_err *err) {
  (void)stream, (void)err;
  atomic_store_explicit(a->signal, *a->value, memory_order_release);
  return TD_OK;
}

td_status td_cpu_op_post(td_cpu_stream *stream, const td_post_args *a, td_err *err) {
  (void)stream, (void)err;
  if (a->n_bytes) memcpy(a->dst, a->src, a->n_bytes);
  atomic_store_explicit(a->signal, *a->value, memory_order_release);
  return TD_OK;
}

td_status td_cpu_op_await(td_cpu_stream *stream, const td_await_args *a, td_err *err) {
  (void)stream;
  for (unsigned i = 0; atomic_load_explicit(a->signal, memory_order_acquire) != *a->value; i++) {
    if (a->canceled && atomic_load_explicit(a->canceled, memory_order_acquire))
      return td_fail(err, TD_ECANCELED, "canceled while waiting for a signal");
    td_cpu_wait_turn(i);
  }
  return TD_OK;
}

static void sum_piece(void *ctx, size_t item, unsigned member) {
  (void)member;
  const td_sum_parts_args *a = ctx;
  const size_t begin = item * ELEMENTS, out_bytes = a->out_f32 ? sizeof(float) : sizeof(uint16_t);
  const void *parts[TD_MAX_SUM_PARTS];
  for (uint32_t p = 0; p < a->n_parts; p++) {
    const size_t part_bytes = a->f32_parts >> p & 1 ? sizeof(float) : sizeof(uint16_t);
    parts[p] = (const char *)a->parts[p] + begin * part_bytes;
  }
  td_kernels()->sum_row(&(td_sum_row_args){.parts = parts,
                                           .out = (char *)a->out + begin * out_bytes,
                                           .n = a->n - begin < ELEMENTS ? a->n - begin : ELEMENTS,
                                           .n_parts = a->n_parts,
                                           .f32_parts = a->f32_parts,
                                           .out_f32 = a->out_f32});
}

td_status td_cpu_op_sum_parts(td_cpu_stream *stream, const td_sum_parts_args *a, td_err *err) {
  TD_DEV_REQUIRE(a->n_parts > 0 && a->n_parts <= TD_MAX_SUM_PARTS, "sum: of %u parts", a->n_parts);
  td_cpu_for(stream, (a->n + ELEMENTS - 1) / ELEMENTS, sum_piece, (void *)a);
  return TD_OK;
}

td_status td_cpu_op_gather_rows(td_cpu_stream *stream, const td_gather_rows_args *a, td_err *err) {
  (void)stream;
  for (uint32_t i = 0; i < a->n_rows; i++) {
    TD_DEV_REQUIRE(a->rows[i] >= 0, "gather: row %d of output row %u", a->rows[i], i);
    memcpy((float *)a->out + (size_t)i * a->dim, (const float *)a->x + (size_t)a->rows[i] * a->dim,
           a->dim * sizeof(float));
  }
  return TD_OK;
}

// Row-wise work is cut into pieces of about ELEMENTS elements, at least one row.
typedef struct {
  const void *args;
  size_t n_rows, rows_a_piece;
  void (*row)(const void *args, size_t row);
} row_run;

static void row_piece(void *ctx, size_t item, unsigned member) {
  (void)member;
  const row_run *run = ctx;
  size_t begin = item * run->rows_a_piece, end = begin + run->rows_a_piece;
  for (size_t i = begin; i < end && i < run->n_rows; i++)
    run->row(run->args, i);
}

static void for_rows(td_cpu_stream *stream, size_t n_rows, size_t dim,
                     void (*row)(const void *args, size_t row), const void *args) {
  size_t rows = dim < ELEMENTS ? ELEMENTS / (dim ? dim : 1) : 1;
  row_run run = {.args = args, .n_rows = n_rows, .rows_a_piece = rows, .row = row};
  td_cpu_for(stream, (n_rows + rows - 1) / rows, row_piece, &run);
}

static void embed_row(const void *args, size_t t) {
  const td_embed_args *a = args;
  float *out = (float *)a->out + t * a->table.cols;
  td_kernels()->decode_row(
      &(td_decode_row_args){.w = &a->table, .row = (uint32_t)a->ids[t], .out = out});
  if (a->factor != 0) multiply(out, a->factor, a->table.cols);
}

td_status td_cpu_op_embed(td_cpu_stream *stream, const td_embed_args *a, td_err *err) {
  td_status status = td_cpu_check_weight(&a->table, "embedding", err);
  if (status != TD_OK) return status;
  for (uint32_t t = 0; t < a->n_tokens; t++) {
    TD_DEV_REQUIRE(a->ids[t] >= 0 && (uint32_t)a->ids[t] < a->table.rows,
                   "embedding: token id %d is not in a vocabulary of %u", a->ids[t], a->table.rows);
  }
  for_rows(stream, a->n_tokens, a->table.cols, embed_row, a);
  return TD_OK;
}

static void norm_plain(const float *x, float *out, uint32_t n, float eps) {
  double sum = 0;
  for (uint32_t i = 0; i < n; i++)
    sum += (double)x[i] * x[i];
  const float gain = 1 / sqrtf((float)(sum / n) + eps);
  for (uint32_t i = 0; i < n; i++)
    out[i] = x[i] * gain;
}

static void norm_row(const void *args, size_t i) {
  const td_rmsnorm_args *a = args;
  const float *x = (const float *)a->x + i * a->x_stride;
  if (a->residual) {
    float *residual = (float *)a->residual + i * a->dim;
    const float *more = a->more ? (const float *)a->more + i * a->dim : NULL;
    for (uint32_t c = 0; more && c < a->dim; c++)
      residual[c] += x[c] + more[c];
    if (!more) add(residual, x, a->dim);
    x = residual;
  }
  float *out = (float *)a->out + i * a->out_stride;
  if (!a->w.data) {
    norm_plain(x, out, a->dim, a->eps);
    return;
  }
  td_kernels()->rmsnorm_row(&(td_norm_row_args){.x = x, .w = a->w, .out = out, .eps = a->eps});
}

td_status td_cpu_op_rmsnorm(td_cpu_stream *stream, const td_rmsnorm_args *a, td_err *err) {
  td_status status = td_dev_check_rmsnorm(a, err);
  if (status != TD_OK) return status;
  const td_rmsnorm_args also = td_rmsnorm_also(a);
  for_rows(stream, a->n_rows, a->dim, norm_row, a);
  if (also.x) for_rows(stream, also.n_rows, also.dim, norm_row, &also);
  return TD_OK;
}

// Element i of a vector of weights.
static float element(const td_vec *v, uint32_t i) {
  return v->dtype == TD_BF16 ? td_bf16_value(((const uint16_t *)v->data)[i])
                             : ((const float *)v->data)[i];
}

static void center_row(const void *args, size_t row) {
  const td_layernorm_args *a = args;
  float *x = (float *)a->x + row * a->stride;
  double sum = 0, squares = 0;
  for (uint32_t i = 0; i < a->dim; i++)
    sum += x[i];
  const double mean = sum / a->dim;
  for (uint32_t i = 0; i < a->dim; i++)
    squares += (x[i] - mean) * (x[i] - mean);
  const double gain = 1 / sqrt(squares / a->dim + a->eps);
  for (uint32_t i = 0; i < a->dim; i++)
    x[i] = (float)((x[i] - mean) * gain) * element(&a->w, i) + element(&a->b, i);
}

td_status td_cpu_op_layernorm(td_cpu_stream *stream, const td_layernorm_args *a, td_err *err) {
  td_status status = td_dev_check_vec(&a->w, a->dim, "norm", err);
  if (status == TD_OK) status = td_dev_check_vec(&a->b, a->dim, "norm's bias", err);
  if (status != TD_OK) return status;
  for_rows(stream, a->n_rows, a->dim, center_row, a);
  return TD_OK;
}

static void turn_heads(const td_rope_args *a, const td_rope_heads *heads, size_t t) {
  size_t half = a->rot_dim / 2;
  const float *cos_sin = a->cos_sin + (size_t)a->position[t] * a->rot_dim;
  for (uint32_t h = 0; h < heads->n_heads; h++) {
    float *x = (float *)heads->x + t * heads->token_stride + h * heads->head_stride;
    for (size_t i = 0; i < half; i++) {
      float *first = a->interleaved ? x + 2 * i : x + i;
      float *second = a->interleaved ? x + 2 * i + 1 : x + half + i;
      float c = cos_sin[2 * i], s = a->backwards ? -cos_sin[2 * i + 1] : cos_sin[2 * i + 1];
      float u = *first, v = *second;
      *first = u * c - v * s;
      *second = v * c + u * s;
    }
  }
}

static void rope_token(const void *args, size_t t) {
  const td_rope_args *a = args;
  turn_heads(a, &a->heads, t);
  if (a->also.x) turn_heads(a, &a->also, t);
}

td_status td_cpu_op_rope(td_cpu_stream *stream, const td_rope_args *a, td_err *err) {
  TD_DEV_REQUIRE(a->rot_dim % 2 == 0, "rope: %u dimensions do not make pairs", a->rot_dim);
  for (uint32_t t = 0; t < a->n_tokens; t++)
    TD_DEV_REQUIRE(a->position[t] >= 0, "rope: position %d of token %u", a->position[t], t);
  const size_t n_heads = (size_t)a->heads.n_heads + (a->also.x ? a->also.n_heads : 0);
  for_rows(stream, a->n_tokens, n_heads * a->rot_dim, rope_token, a);
  return TD_OK;
}

static void scale_row(const void *args, size_t t) {
  const td_scale_rows_args *a = args;
  multiply((float *)a->x + t * a->dim, a->factor[a->position[t]], a->dim);
}

td_status td_cpu_op_scale_rows(td_cpu_stream *stream, const td_scale_rows_args *a, td_err *err) {
  for (uint32_t t = 0; t < a->n_tokens; t++)
    TD_DEV_REQUIRE(a->position[t] >= 0, "scaling: position %d of token %u", a->position[t], t);
  for_rows(stream, a->n_tokens, a->dim, scale_row, a);
  return TD_OK;
}

// The page that holds token t's position, and its *offset in tokens within the page.
static char *page_of(const td_kv_view *kv, const td_batch_view *b, size_t t, uint32_t *offset) {
  uint32_t position = (uint32_t)b->position[t];
  *offset = position % b->page_tokens;
  size_t slot = (size_t)b->seq[t] * b->max_pages + position / b->page_tokens;
  return kv->pages + (size_t)b->page_table[slot] * kv->page_bytes;
}

// Converts and writes row `at` of a page, counted over all heads and tokens.
static void store(const td_kv_view *kv, uint32_t page_tokens, td_kv_rows rows, char *page,
                  size_t at, const float *in) {
  void *out = page + at * rows.dim * td_dtype_bytes(kv->dtype);
  switch (kv->dtype) {
  case TD_F8E4M3: td_kv_f8_put(&rows, page_tokens, page, at, in); return;
  case TD_F16:
    td_kernels()->f16_from_f32(&(td_convert_args){.in = in, .out = out, .n = rows.dim});
    return;
  default: memcpy(out, in, rows.dim * sizeof(float));
  }
}

static void store_token(const void *args, size_t t) {
  const td_kv_store_args *a = args;
  uint32_t offset;
  char *page = page_of(&a->kv, &a->batch, t, &offset);
  const uint32_t n = a->batch.page_tokens;
  const td_kv_rows rows = td_kv_store_rows(a);
  for (uint32_t h = 0; h < a->n_heads; h++) {
    const size_t k = (size_t)h * n + offset, v = (size_t)(a->n_heads + h) * n + offset;
    const size_t from = (size_t)h * a->head_dim;
    store(&a->kv, n, rows, page, k, (const float *)a->k + t * a->k_stride + from);
    if (a->v) store(&a->kv, n, rows, page, v, (const float *)a->v + t * a->v_stride + from);
  }
}

td_status td_cpu_op_kv_store(td_cpu_stream *stream, const td_kv_store_args *a, td_err *err) {
  const td_kv_rows rows = td_kv_store_rows(a);
  td_status status = td_cpu_check_batch(&a->batch, &a->kv, rows, err);
  if (status != TD_OK) return status;
  for_rows(stream, a->batch.n_tokens, (size_t)rows.n * rows.dim, store_token, a);
  return TD_OK;
}
