// src/device/cuda/linear.c - matrices times activations, and experts.
#include "device/cuda/cuda.h"

static bool is_aligned(const void *x, size_t stride) {
  return (uintptr_t)x % 16 == 0 && stride % 8 == 0;
}

static td_status launch(td_cuda_stream *stream, td_cu_linear_args *args, bool mma, td_err *err) {
  args->vec_warps = td_cuda_vec_warps(args->n_matrices * args->n_rows, args->tiles != NULL,
                                      (uint32_t)td_cuda_dev_of(stream)->props.n_sms);
  return mma ? TD_CUDA_LAUNCH(stream, linear_mma, args) : TD_CUDA_LAUNCH(stream, linear_vec, args);
}

td_status td_cuda_run_matmul(td_cuda_stream *stream, const td_cuda_matmul *m, td_err *err) {
  if (td_cuda_takes_blas(stream, m)) return td_cuda_run_blas(stream, m, err);
  bool mma = td_cuda_use_mma(m->w, m->n_tokens);
  td_cu_linear_args args = {
      .w = *m->w,
      .n_matrices = 1,
      .x = m->x,
      .y = m->y,
      .bias = m->bias,
      .x_stride = m->x_stride,
      .y_stride = m->y_stride,
      .n_tokens = m->n_tokens,
      .row0 = m->row0,
      .n_rows = m->n_rows,
      .tile_tokens = mma ? TD_CU_MMA_TOKENS : td_cuda_vec_tokens(m->n_tokens),
      .read = td_cuda_read_of(m->w, is_aligned(m->x, m->x_stride)),
      .y_f32 = m->y_f32,
  };
  return launch(stream, &args, mma, err);
}

td_status td_cuda_op_linear(td_cuda_stream *stream, const td_linear_op_args *a, td_err *err) {
  td_weight w;
  td_status status = td_cuda_weight(td_cuda_dev_of(stream), a->w, "linear", &w, err);
  if (status == TD_OK) status = td_dev_check_linear(a, err);
  if (status != TD_OK || a->n_tokens == 0) return status;
  td_cuda_matmul m = {.w = &w,
                      .x = a->x,
                      .y = a->y,
                      .x_stride = a->x_stride,
                      .y_stride = a->y_stride,
                      .n_tokens = a->n_tokens,
                      .n_rows = w.rows,
                      .y_f32 = a->out_f32};
  if (a->bias.data) status = td_cuda_vec(td_cuda_dev_of(stream), &a->bias, &m.bias, err);
  return status == TD_OK ? td_cuda_run_matmul(stream, &m, err) : status;
}

// One pass over some of an operator's tokens.
typedef struct {
  const td_moe_args *a;
  td_cuda_experts experts;
  uint32_t dim, hidden;
  uint32_t token0, n_tokens, n_pairs;
  bool mma;
  uint32_t tile_tokens, max_tiles;
  // scratch
  uint32_t *token, *place, *n_tiles, *n_ordered;
  td_cu_tile *tiles;
  float *gate, *up, *parts;
  uint16_t *hidden_x;
} moe_pass;

static td_status reserve(td_cuda_stream *stream, moe_pass *p, size_t n, td_err *err) {
  void *sort, *gate, *hidden, *parts;
  size_t sort_bytes = n * (2 * sizeof *p->token + sizeof *p->tiles) + 2 * sizeof *p->n_tiles;
  size_t hidden_elements = n * p->hidden;
  td_status status = td_cuda_scratch(stream, CUDA_SCRATCH_SORT, sort_bytes, &sort, err);
  if (status == TD_OK) {
    status = td_cuda_scratch(stream, CUDA_SCRATCH_GATE_UP, 2 * hidden_elements * sizeof(float),
                             &gate, err);
  }
  if (status == TD_OK) {
    status = td_cuda_scratch(stream, CUDA_SCRATCH_HIDDEN, hidden_elements * sizeof(uint16_t),
                             &hidden, err);
  }
  if (status == TD_OK) {
    status = td_cuda_scratch(stream, CUDA_SCRATCH_PARTS, n * p->dim * sizeof(float), &parts, err);
  }
  if (status != TD_OK) return status;
  p->token = sort;
  p->place = p->token + n;
  p->n_tiles = p->place + n;
  p->n_ordered = p->n_tiles + 1;
  p->tiles = (td_cu_tile *)(p->n_ordered + 1);
  p->gate = gate;
  p->up = p->gate + hidden_elements;
  p->hidden_x = hidden;
  p->parts = parts;
  return TD_OK;
}

static uint32_t n_routed(const td_moe_args *a) {
  return a->n_routed ? a->n_routed : a->n_experts;
}

// Tokens an expert has to do with decide how they are cut.
static void plan(moe_pass *p) {
  uint32_t n_experts = p->a->n_experts, mean = p->n_pairs / n_routed(p->a);
  p->mma = mean >= 4 && td_cuda_use_mma(&p->experts.gate, p->n_tokens) &&
           td_cuda_use_mma(&p->experts.down, p->n_tokens);
  p->tile_tokens = p->mma ? TD_CU_MMA_TOKENS : td_cuda_vec_tokens(mean);
  uint32_t max_tiles = p->n_pairs / p->tile_tokens + n_experts;
  p->max_tiles = max_tiles < p->n_pairs ? max_tiles : p->n_pairs;
}

static td_status sort(td_cuda_stream *stream, const moe_pass *p, td_err *err) {
  const td_moe_args *a = p->a;
  td_cu_moe_sort_args args = {.ids = a->ids + (size_t)p->token0 * a->top_k,
                              .token = p->token,
                              .place = p->place,
                              .tiles = p->tiles,
                              .n_tiles = p->n_tiles,
                              .n_ordered = p->n_ordered,
                              .n_tokens = p->n_tokens,
                              .top_k = a->top_k,
                              .n_experts = a->n_experts,
                              .first_expert = a->first_expert,
                              .n_routed = n_routed(a),
                              .tile_tokens = p->tile_tokens,
                              .fault = stream->fault};
  return TD_CUDA_LAUNCH(stream, moe_sort, &args);
}

// y = W x for every pair, W the pair's expert's matrix of the table; for every token, where all go
// to the one expert.
static td_status project(td_cuda_stream *stream, const moe_pass *p, const td_cu_linear_args *shape,
                         td_err *err) {
  td_cu_linear_args args = *shape;
  const bool is_routed = p->a->ids != NULL;
  args.n_experts = p->a->n_experts;
  args.tiles = is_routed ? p->tiles : NULL;
  args.n_tiles = is_routed ? p->n_tiles : NULL;
  args.y_stride = args.n_rows;
  args.n_tokens = is_routed ? p->max_tiles * p->tile_tokens : p->n_tokens;
  args.tile_tokens = p->tile_tokens;
  args.y_f32 = true;
  if (!is_aligned(args.x, args.x_stride)) args.read = TD_CU_READ_ANY;
  return launch(stream, &args, p->mma, err);
}

// Both in one launch: alone, a matrix of an expert would not keep a large GPU busy.
static td_status project_in(td_cuda_stream *stream, const moe_pass *p, const uint32_t *x_rows,
                            td_err *err) {
  td_cu_linear_args args = {.w = p->experts.gate,
                            .experts = p->experts.device,
                            .n_matrices = 2,
                            .y_step = (size_t)(p->up - p->gate),
                            .x_rows = x_rows,
                            .x = (const uint16_t *)p->a->x + (size_t)p->token0 * p->dim,
                            .y = p->gate,
                            .x_stride = p->dim,
                            .n_rows = p->hidden,
                            .read = p->experts.read_gate};
  return project(stream, p, &args, err);
}

static td_status run_swiglu(td_cuda_stream *stream, const moe_pass *p, td_err *err) {
  td_cu_swiglu_args args = {.gate = p->gate,
                            .up = p->up,
                            .out = p->hidden_x,
                            .n_used = p->a->ids ? p->n_ordered : NULL,
                            .n_rows = p->n_pairs,
                            .dim = p->hidden};
  return TD_CUDA_LAUNCH(stream, swiglu, &args);
}

static td_status run_experts(td_cuda_stream *stream, const moe_pass *p, td_err *err) {
  td_status status = sort(stream, p, err);
  if (status == TD_OK) status = project_in(stream, p, p->token, err);
  if (status == TD_OK) status = run_swiglu(stream, p, err);
  if (status != TD_OK) return status;
  td_cu_linear_args down = {.w = p->experts.down,
                            .experts = p->experts.device + 2 * (size_t)p->a->n_experts,
                            .n_matrices = 1,
                            .x = p->hidden_x,
                            .y = p->parts,
                            .x_stride = p->hidden,
                            .n_rows = p->dim,
                            .read = p->experts.read_down};
  return project(stream, p, &down, err);
}

// The one expert that every token goes to: pairs are the tokens in their order.
static td_status run_dense_in(td_cuda_stream *stream, const moe_pass *p, td_err *err) {
  if (!td_cuda_use_mma(&p->experts.gate, p->n_tokens)) return project_in(stream, p, NULL, err);
  td_cuda_matmul in = {.w = &p->experts.gate,
                       .x = (const uint16_t *)p->a->x + (size_t)p->token0 * p->dim,
                       .y = p->gate,
                       .x_stride = p->dim,
                       .y_stride = p->hidden,
                       .n_tokens = p->n_tokens,
                       .n_rows = p->hidden,
                       .y_f32 = true};
  td_status status = td_cuda_run_matmul(stream, &in, err);
  in.w = &p->experts.up;
  in.y = p->up;
  return status == TD_OK ? td_cuda_run_matmul(stream, &in, err) : status;
}

static td_status run_dense(td_cuda_stream *stream, const moe_pass *p, td_err *err) {
  td_status status = run_dense_in(stream, p, err);
  if (status == TD_OK) status = run_swiglu(stream, p, err);
  const td_cuda_matmul out = {.w = &p->experts.down,
                              .x = p->hidden_x,
                              .y = p->parts,
                              .x_stride = p->hidden,
                              .y_stride = p->dim,
                              .n_tokens = p->n_tokens,
                              .n_rows = p->dim,
                              .y_f32 = true};
  return status == TD_OK ? td_cuda_run_matmul(stream, &out, err) : status;
}

static td_status run_pass(td_cuda_stream *stream, moe_pass *p, td_err *err) {
  const td_moe_args *a = p->a;
  plan(p);
  td_status status = a->ids ? run_experts(stream, p, err) : run_dense(stream, p, err);
  if (status != TD_OK) return status;
  td_cu_moe_sum_args args = {
      .parts = p->parts,
      .place = a->ids ? p->place : NULL,
      .weights = a->ids ? a->weights + (size_t)p->token0 * a->top_k : NULL,
      .out = (char *)a->out + (size_t)p->token0 * p->dim * (a->out_f32 ? sizeof(float) : 2),
      .n_tokens = p->n_tokens,
      .top_k = a->top_k,
      .dim = p->dim,
      .accumulate = a->accumulate,
      .out_f32 = a->out_f32,
  };
  return TD_CUDA_LAUNCH(stream, moe_sum, &args);
}

static uint32_t tokens_of_pass(const moe_pass *p, size_t pass_bytes) {
  size_t pair_bytes = p->hidden * (2 * sizeof *p->gate + sizeof *p->hidden_x) +
                      p->dim * sizeof *p->parts;
  size_t n = pass_bytes / pair_bytes / p->a->top_k;
  return n < 1 ? 1 : n < p->a->n_tokens ? (uint32_t)n : p->a->n_tokens;
}

td_status td_cuda_op_moe(td_cuda_stream *stream, const td_moe_args *a, td_err *err) {
  if (a->n_tokens == 0) return TD_OK;
  TD_DEV_REQUIRE(a->n_experts > 0 && a->top_k > 0 && (a->ids || a->top_k == 1),
                 "experts: top %u of %u", a->top_k, a->n_experts);
  TD_DEV_REQUIRE(!a->ids || a->weights, "experts: ids without weights");
  if (a->n_experts > TD_CU_MAX_EXPERTS) {
    return td_fail(err, TD_EUNSUPPORTED, "experts: %u of them; on a GPU at most %d", a->n_experts,
                   TD_CU_MAX_EXPERTS);
  }
  moe_pass p = {.a = a};
  td_status status = td_cuda_experts_of(td_cuda_dev_of(stream), a, &p.experts, err);
  if (status != TD_OK) return status;
  p.dim = p.experts.gate.cols;
  p.hidden = p.experts.gate.rows;
  uint32_t pass_tokens = tokens_of_pass(&p, td_cuda_dev_of(stream)->pass_bytes);
  status = reserve(stream, &p, (size_t)pass_tokens * a->top_k, err);
  for (; status == TD_OK && p.token0 < a->n_tokens; p.token0 += pass_tokens) {
    uint32_t left = a->n_tokens - p.token0;
    p.n_tokens = left < pass_tokens ? left : pass_tokens;
    p.n_pairs = p.n_tokens * a->top_k;
    status = run_pass(stream, &p, err);
  }
  return status;
}
