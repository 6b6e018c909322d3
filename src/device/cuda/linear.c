// src/device/cuda/linear.c - linear layers and experts.
#include <assert.h>

#include "device/cuda/cuda.h"

static bool is_aligned(const void *x, size_t stride) {
  return (uintptr_t)x % 16 == 0 && stride % 8 == 0;
}

static uint32_t ceil_div(uint32_t n, uint32_t d) {
  return (n + d - 1) / d;
}

// Memory for the sums of tiles that several blocks share, if there may be any.
static td_status open_wide(td_cuda_stream *stream, td_cu_linear_args *args, td_err *err) {
  const td_cuda_dev *dev = td_cuda_dev_of(stream);
  const uint32_t n_tiles = td_cu_wide_tiles(args), n_matrices = args->glu.out ? 2 : 1;
  const uint32_t n_warps = args->vec_warps / n_matrices; // per matrix, at most
  const uint32_t n_parts = n_warps < TD_CU_WIDE_PARTS ? n_warps : TD_CU_WIDE_PARTS;
  const size_t tile_bytes = (size_t)TD_CU_WIDE_ROWS * args->tile_tokens * sizeof(float);
  td_status status = TD_OK;
  args->wide = (td_cu_wide){.n_sms = (uint32_t)dev->props.n_sms};
  if (n_tiles >= args->wide.n_sms && n_warps <= TD_CU_WIDE_PARTS) return TD_OK;
  args->wide.sums = td_cuda_scratch(stream, CUDA_SCRATCH_SPLITS, n_tiles * n_parts * tile_bytes,
                                    &status, err);
  const size_t *n_bytes = &stream->scratch_bytes[CUDA_SCRATCH_ARRIVED], before = *n_bytes;
  args->wide.n_arrived = td_cuda_scratch(stream, CUDA_SCRATCH_ARRIVED,
                                         n_tiles * sizeof *args->wide.n_arrived, &status, err);
  if (status != TD_OK || *n_bytes == before) return status;
  const int code = dev->abi->fill_zero(args->wide.n_arrived, *n_bytes, stream->cu);
  return td_cuda_result(dev, code, "zeros", err);
}

static td_status launch(td_cuda_stream *stream, td_cu_linear_args *args, td_cuda_gemm gemm,
                        td_err *err) {
  const uint32_t n_together = args->glu.out ? args->n_matrices : 1; // in a block
  const uint32_t n_rows = args->n_matrices / n_together * args->n_rows;
  args->vec_warps = td_cuda_vec_warps(&args->w, n_together, n_rows, args->range.tiles != NULL,
                                      (uint32_t)td_cuda_dev_of(stream)->props.n_sms);
  const uint32_t wide = gemm == CUDA_GEMM_VEC && !args->range.tiles &&
                                td_cuda_dev_of(stream)->uses.wide
                            ? td_cuda_wide_tokens(args->read, args->n_tokens)
                            : 0;
  if (wide) {
    args->tile_tokens = wide;
    args->n_at_once = 1;
    const td_status status = open_wide(stream, args, err);
    if (status != TD_OK) return status;
  }
  args->in_f16 = td_cuda_dev_of(stream)->uses.f16 && args->read == TD_CU_READ_F8;
  switch (gemm) {
  case CUDA_GEMM_MMA: return TD_CUDA_LAUNCH(stream, linear_mma, args);
  case CUDA_GEMM_WGMMA: return TD_CUDA_LAUNCH(stream, linear_wgmma, args);
  case CUDA_GEMM_A8: return td_cuda_launch_a8(stream, args, err);
  default: return TD_CUDA_LAUNCH(stream, linear_vec, args);
  }
}

static td_cu_read read_of(const td_cuda_matmul *m) {
  return td_cuda_read_of(m->w, is_aligned(m->x, m->x_stride));
}

static td_cuda_gemm gemm_of(const td_cuda_stream *stream, const td_cuda_matmul *m) {
  return td_cuda_gemm_of(m->w, read_of(m), m->n_tokens, td_cuda_dev_of(stream)->uses.wgmma);
}

// By a kernel of this library; also: further matrices for linear_vec.
static td_status run_kernel(td_cuda_stream *stream, const td_cuda_matmul *m,
                            const td_cuda_matmul *const *also, uint32_t n_also, td_err *err) {
  const td_cuda_gemm gemm = gemm_of(stream, m);
  const uint32_t tile = td_cuda_tile_tokens(gemm, m->n_tokens);
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
      .tile_tokens = tile,
      .n_at_once = ceil_div(m->n_tokens, tile),
      .read = read_of(m),
      .y_f32 = m->y_f32,
      .add = m->add,
  };
  for (uint32_t i = 0; i < n_also; i++)
    args.also[i] = (td_cu_linear_also){
        .w = *also[i]->w, .bias = also[i]->bias, .y = also[i]->y, .y_stride = also[i]->y_stride};
  return launch(stream, &args, gemm, err);
}

// The tokens in as many parts, nearly alike.
static td_status run_passes(td_cuda_stream *stream, const td_cuda_matmul *m, uint32_t n_passes,
                            td_err *err) {
  const size_t y_bytes = m->y_f32 ? sizeof(float) : sizeof(uint16_t);
  td_status status = TD_OK;
  for (uint32_t i = 0; i < n_passes && status == TD_OK; i++) {
    const uint32_t begin = m->n_tokens * i / n_passes, end = m->n_tokens * (i + 1) / n_passes;
    td_cuda_matmul part = *m;
    part.x = (const uint16_t *)m->x + begin * m->x_stride;
    part.y = (char *)m->y + begin * m->y_stride * y_bytes;
    part.n_tokens = end - begin;
    status = run_kernel(stream, &part, NULL, 0, err);
  }
  return status;
}

td_status td_cuda_run_matmul(td_cuda_stream *stream, const td_cuda_matmul *m, td_err *err) {
  const td_cuda_dev *dev = td_cuda_dev_of(stream);
  if (m->is_prompt && td_cuda_rounds(dev, m->w, m->n_tokens))
    return td_cuda_run_a8(stream, m, 1, err);
  const uint32_t n_passes = dev->uses.wide ? td_cuda_wide_passes(m->w, read_of(m), m->n_tokens) : 1;
  if (n_passes > 1) return run_passes(stream, m, n_passes, err);
  if (td_cuda_takes_blas(stream, m)) return td_cuda_run_blas(stream, m, err);
  return run_kernel(stream, m, NULL, 0, err);
}

// Whether linear_vec computes it, rounded activations aside.
static bool is_of_vec(td_cuda_stream *stream, const td_cuda_matmul *m) {
  return gemm_of(stream, m) == CUDA_GEMM_VEC && !td_cuda_takes_blas(stream, m);
}

static bool is_for_vec(td_cuda_stream *stream, const td_cuda_matmul *m) {
  const td_cu_read read = read_of(m);
  return read != TD_CU_READ_ANY && read != TD_CU_READ_BLOCKS && is_of_vec(stream, m);
}

// Whether linear_vec computes both in one launch, with the bits that each has alone.
static bool share_launch(td_cuda_stream *stream, const td_cuda_matmul *m,
                         const td_cuda_matmul *more) {
  const uint32_t n_sms = (uint32_t)td_cuda_dev_of(stream)->props.n_sms;
  return m->n_tokens == more->n_tokens && is_for_vec(stream, m) && is_for_vec(stream, more) &&
         td_cuda_same_format(m->w, more->w) &&
         td_cuda_vec_warps(m->w, 1, m->n_rows, false, n_sms) ==
             td_cuda_vec_warps(more->w, 1, more->n_rows, false, n_sms);
}

static td_status matmul_of(td_cuda_stream *stream, const td_linear_op_args *a, td_weight *w,
                           td_cuda_matmul *out, td_err *err) {
  td_cuda_dev *dev = td_cuda_dev_of(stream);
  td_status status = td_cuda_weight_at(dev, a->w, a->weights_on_device, "linear", w, err);
  if (status == TD_OK) status = td_dev_check_linear(a, err);
  if (status != TD_OK) return status;
  *out = (td_cuda_matmul){.w = w,
                          .x = a->x,
                          .y = a->y,
                          .x_stride = a->x_stride,
                          .y_stride = a->y_stride,
                          .n_tokens = a->n_tokens,
                          .row0 = a->row_begin,
                          .n_rows = a->n_rows ? a->n_rows : w->rows,
                          .bias = a->bias,
                          .y_f32 = a->out_f32};
  td_cuda_vec(dev, &out->bias, &status, err);
  return status;
}

// Multiplies the prompts' tokens, which are the last, by matrices that take them in 8 bits. What is
// left of those matrices' tokens have the results of a step without prompts.
static td_status run_prompts_a8(td_cuda_stream *stream, td_cuda_matmul *m, uint32_t n,
                                uint32_t n_prompt, td_err *err) {
  td_cuda_matmul a8[1 + TD_LINEAR_ALSO];
  uint32_t n_a8 = 0;
  for (uint32_t i = 0; i < n; i++) {
    if (!td_cuda_rounds(td_cuda_dev_of(stream), m[i].w, n_prompt)) continue;
    const size_t n_others = m[i].n_tokens -= n_prompt;
    const size_t y_bytes = m[i].y_f32 ? sizeof(float) : sizeof(uint16_t);
    a8[n_a8] = m[i];
    a8[n_a8].x = (const uint16_t *)m[i].x + n_others * m[i].x_stride;
    a8[n_a8].y = (char *)m[i].y + n_others * m[i].y_stride * y_bytes;
    a8[n_a8++].n_tokens = n_prompt;
  }
  return n_a8 ? td_cuda_run_a8(stream, a8, n_a8, err) : TD_OK;
}

td_status td_cuda_op_linear(td_cuda_stream *stream, td_linear_op_args *a, td_err *err) {
  enum { MOST = 1 + TD_LINEAR_ALSO };
  static_assert((int)TD_LINEAR_ALSO == (int)TD_CU_LINEAR_ALSO, "further matrices");
  td_weight w[MOST];
  td_cuda_matmul m[MOST];
  bool is_done[MOST] = {false};
  td_status status = TD_OK;
  uint32_t n = 0;
  for (; status == TD_OK && n < MOST; n++) {
    const td_linear_op_args one = td_linear_matrix(a, n);
    if (!one.w && n > 0) break;
    status = matmul_of(stream, &one, &w[n], &m[n], err);
  }
  if (status != TD_OK || a->n_tokens == 0) return status;
  if (!a->exact) status = run_prompts_a8(stream, m, n, a->n_prompt, err);
  for (uint32_t i = 0; status == TD_OK && i < n; i++) {
    const td_cuda_matmul *also[TD_LINEAR_ALSO];
    uint32_t n_also = 0;
    if (is_done[i] || m[i].n_tokens == 0) continue;
    for (uint32_t j = i + 1; j < n; j++) {
      if (is_done[j] || !share_launch(stream, &m[i], &m[j])) continue;
      is_done[j] = true;
      also[n_also++] = &m[j];
    }
    status = n_also ? run_kernel(stream, &m[i], also, n_also, err)
                    : td_cuda_run_matmul(stream, &m[i], err);
  }
  return status;
}

// One pass over some of an operator's tokens; over all of them for a group of a layer's experts. A
// group's pairs are computed in rounds of as many tiles as fit scratch memory.
typedef struct {
  const td_moe_args *a;
  td_cuda_experts experts;
  const float *gate_bias, *down_bias; // in device memory, of the layer's experts
  uint32_t dim, hidden;
  size_t pair_bytes; // of scratch memory per pair
  uint32_t token0, n_tokens, n_pairs;
  bool is_group;
  bool is_a8; // activations are rounded to 8 bits, if there are tokens enough
  td_cuda_gemm gemm;
  uint32_t tile_tokens, max_tiles, likely_tiles;
  td_cu_tile_range range; // tiles of this round
  // scratch
  uint32_t *token, *place, *first_tile, *counts;
  td_cu_tile *tiles;
  float *gate, *up, *parts; // parts: at gate's place, which is read no more when they are written
  uint16_t *hidden_x;
  td_cuda_a8 x8, hidden_x8;
} moe_pass;

static uint32_t n_routed(const td_moe_args *a) {
  return a->n_routed ? a->n_routed : a->n_experts;
}

// Chooses kernel and tile size by the tokens per expert.
static void plan(td_cuda_stream *stream, moe_pass *p, size_t pass_bytes) {
  const uint32_t n_experts = p->a->n_experts, mean = p->n_pairs / n_routed(p->a);
  const td_cu_read read = is_aligned(p->a->x, p->dim) ? p->experts.read_gate : TD_CU_READ_ANY;
  const bool has_wgmma = td_cuda_dev_of(stream)->uses.wgmma;
  const td_cuda_gemm in = td_cuda_gemm_of(&p->experts.gate, read, p->n_tokens, has_wgmma);
  const td_cuda_gemm out = td_cuda_gemm_of(&p->experts.down, p->experts.read_down, p->n_tokens,
                                           has_wgmma);
  p->gemm = mean < 4 ? CUDA_GEMM_VEC : p->is_a8 ? CUDA_GEMM_A8 : in < out ? in : out;
  p->tile_tokens = td_cuda_tile_tokens(p->gemm, mean);
  // A token's experts are distinct, so a group has at most as many of its pairs as experts.
  const uint32_t most = p->is_group && n_experts < p->a->top_k ? n_experts : p->a->top_k;
  const uint32_t most_pairs = p->n_tokens * most;
  p->max_tiles = most_pairs / p->tile_tokens + n_experts;
  if (p->max_tiles > most_pairs) p->max_tiles = most_pairs;
  const uint64_t likely = (uint64_t)p->n_pairs * n_experts / n_routed(p->a); // pairs
  p->likely_tiles = (uint32_t)(likely + likely / 2) / p->tile_tokens + n_experts;
  p->range = (td_cu_tile_range){.n_tiles = p->max_tiles, .first_expert = p->a->first_expert};
  const size_t fitting = pass_bytes / p->pair_bytes / p->tile_tokens;
  if (p->is_group && fitting < p->max_tiles) p->range.n_tiles = fitting ? (uint32_t)fitting : 1;
}

static td_status reserve_sort(td_cuda_stream *stream, moe_pass *p, td_err *err) {
  const size_t n = p->n_pairs, n_experts = n_routed(p->a);
  const size_t n_counts = n > TD_CU_SORT_PAIRS ? TD_CU_SORT_BLOCKS * n_experts : 0;
  const size_t n_words = 2 * n + n_experts + 1 + n_counts;
  td_status status = TD_OK;
  p->token = td_cuda_scratch(stream, CUDA_SCRATCH_SORT,
                             n_words * sizeof *p->token + n * sizeof *p->tiles, &status, err);
  if (status != TD_OK) return status;
  p->place = p->token + n;
  p->first_tile = p->place + n;
  p->counts = p->first_tile + n_experts + 1;
  p->tiles = (td_cu_tile *)(p->counts + n_counts);
  p->range.tiles = p->tiles;
  p->range.first = p->first_tile + p->a->first_expert;
  p->range.end = p->range.first + p->a->n_experts;
  return TD_OK;
}

// Scratch memory per pair for gate and up, and then for parts.
static size_t parts_bytes(const moe_pass *p) {
  const size_t n = 2 * (size_t)p->hidden > p->dim ? 2 * (size_t)p->hidden : p->dim;
  return n * sizeof *p->parts;
}

static td_status reserve(td_cuda_stream *stream, moe_pass *p, td_err *err) {
  size_t n = (size_t)p->range.n_tiles * p->tile_tokens;
  if (n > p->n_pairs) n = p->n_pairs;
  const size_t hidden_elements = n * p->hidden;
  const size_t hidden_bytes = (hidden_elements * sizeof(uint16_t) + 15) / 16 * 16;
  const size_t a8_bytes = p->gemm == CUDA_GEMM_A8 ? td_cuda_a8_bytes(n, p->hidden) : 0;
  td_status status = p->a->ids ? reserve_sort(stream, p, err) : TD_OK;
  char *hidden = td_cuda_scratch(stream, CUDA_SCRATCH_HIDDEN, hidden_bytes + a8_bytes, &status,
                                 err);
  p->parts = td_cuda_scratch(stream, CUDA_SCRATCH_PARTS, n * parts_bytes(p), &status, err);
  if (status != TD_OK) return status;
  p->gate = p->parts;
  p->up = p->gate + hidden_elements;
  p->hidden_x = (uint16_t *)(void *)hidden;
  p->hidden_x8 = a8_bytes ? td_cuda_a8_at(hidden + hidden_bytes, n, p->hidden) : (td_cuda_a8){NULL};
  return TD_OK;
}

static td_status open_counts(td_cuda_stream *stream, td_err *err) {
  const td_cu_abi *abi = td_cuda_dev_of(stream)->abi;
  void *memory = NULL;
  int code = stream->counted ? 0 : abi->event_open(&stream->counted);
  if (code == 0) code = abi->alloc_host(&memory, (TD_CU_MAX_EXPERTS + 1) * sizeof(uint32_t));
  stream->first_tile = memory;
  return td_cuda_result(td_cuda_dev_of(stream), code, "memory for counts of experts", err);
}

// Copies the experts' numbers of tiles to the host, which does not wait for them: when they are
// there as a later group is queued, that group needs no rounds for tiles that do not exist.
static td_status begin_counting(td_cuda_stream *stream, const moe_pass *p, td_err *err) {
  const td_cu_abi *abi = td_cuda_dev_of(stream)->abi;
  if (!p->is_group || stream->is_capturing) return TD_OK;
  td_status status = stream->first_tile ? TD_OK : open_counts(stream, err);
  if (status != TD_OK) return status;
  const size_t n_bytes = (n_routed(p->a) + 1) * sizeof *p->first_tile;
  int code = abi->copy(stream->first_tile, p->first_tile, n_bytes, stream->cu);
  if (code == 0) code = abi->event_record(stream->counted, stream->cu);
  stream->is_counting = code == 0;
  return td_cuda_result(td_cuda_dev_of(stream), code, "counting tiles of experts", err);
}

// The group's number of tiles, or a bound where the host does not know it yet.
static uint32_t most_tiles(td_cuda_stream *stream, const moe_pass *p) {
  if (!p->is_group || !stream->is_counting || stream->is_capturing) return p->max_tiles;
  bool is_done = false;
  const int code = td_cuda_dev_of(stream)->abi->event_is_done(stream->counted, &is_done);
  if (code != 0 || !is_done) return p->max_tiles;
  const uint32_t *first = stream->first_tile + p->a->first_expert;
  return first[p->a->n_experts] - first[0];
}

// Sorts pairs by expert, unless the stream's previous group of this layer left them sorted.
static td_status sort(td_cuda_stream *stream, const moe_pass *p, td_err *err) {
  const td_moe_args *a = p->a;
  const td_cuda_sorted wanted = {.ids = a->ids + (size_t)p->token0 * a->top_k,
                                 .n_tokens = p->n_tokens,
                                 .top_k = a->top_k,
                                 .n_experts = n_routed(a),
                                 .tile_tokens = p->tile_tokens};
  const td_cuda_sorted *s = &stream->sorted;
  if (a->same_ids && s->ids == wanted.ids && s->n_tokens == wanted.n_tokens &&
      s->top_k == wanted.top_k && s->n_experts == wanted.n_experts &&
      s->tile_tokens == wanted.tile_tokens)
    return TD_OK;
  td_cu_moe_sort_args args = {.ids = wanted.ids,
                              .slots = a->slots,
                              .token = p->token,
                              .place = p->place,
                              .tiles = p->tiles,
                              .first_tile = p->first_tile,
                              .counts = p->counts,
                              .n_tokens = p->n_tokens,
                              .top_k = a->top_k,
                              .n_experts = n_routed(a),
                              .tile_tokens = p->tile_tokens,
                              .fault = stream->fault};
  stream->is_counting = false;
  td_status status = TD_CUDA_LAUNCH(stream, moe_sort, &args);
  if (status == TD_OK) status = begin_counting(stream, p, err);
  stream->sorted = status == TD_OK ? wanted : (td_cuda_sorted){.ids = NULL};
  return status;
}

// y = W x for every pair of the round, with the matrix of the pair's expert; for every token if all
// go to a single expert.
static td_status project(td_cuda_stream *stream, const moe_pass *p, const td_cu_linear_args *shape,
                         td_err *err) {
  td_cu_linear_args args = *shape;
  args.n_experts = p->experts.n_experts;
  args.slots = p->a->slots;
  args.y_stride = args.n_rows;
  args.tile_tokens = p->tile_tokens;
  args.y_f32 = true;
  if (p->a->ids) {
    const td_cu_tile_range *r = &p->range;
    args.range = *r;
    args.n_at_once = p->gemm == CUDA_GEMM_VEC
                         ? r->n_tiles
                         : td_cuda_tiles_at_once(r->skip, r->n_tiles, p->likely_tiles);
  } else {
    args.n_tokens = p->n_tokens;
    args.n_at_once = ceil_div(p->n_tokens, p->tile_tokens);
  }
  if (!is_aligned(args.x, args.x_stride)) args.read = TD_CU_READ_ANY;
  return launch(stream, &args, p->gemm, err);
}

// The pass's tokens in 8 bits, unless the stream's previous group of this layer left them.
static td_status round_tokens(td_cuda_stream *stream, moe_pass *p, td_err *err) {
  const td_cuda_rounded wanted = {(const uint16_t *)p->a->x + (size_t)p->token0 * p->dim,
                                  p->n_tokens, p->dim};
  const td_cuda_rounded *r = &stream->rounded;
  td_status status = TD_OK;
  void *memory = td_cuda_scratch(stream, CUDA_SCRATCH_MOE_A8, td_cuda_a8_bytes(p->n_tokens, p->dim),
                                 &status, err);
  if (status != TD_OK) return status;
  p->x8 = td_cuda_a8_at(memory, p->n_tokens, p->dim);
  if (p->a->same_ids && r->x == wanted.x && r->n_tokens == wanted.n_tokens && r->dim == wanted.dim)
    return TD_OK;
  const td_cu_round_a8_args args = {.x = wanted.x,
                                    .codes = p->x8.codes,
                                    .scales = p->x8.scales,
                                    .x_stride = p->dim,
                                    .n_rows = p->n_tokens,
                                    .cols = p->dim,
                                    .dtype = p->experts.gate.dtype};
  status = TD_CUDA_LAUNCH(stream, round_a8, &args);
  stream->rounded = status == TD_OK ? wanted : (td_cuda_rounded){.x = NULL};
  return status;
}

static td_status round_hidden(td_cuda_stream *stream, const moe_pass *p, td_err *err) {
  const uint64_t n_pairs = (uint64_t)p->range.n_tiles * p->tile_tokens;
  const td_cu_round_a8_args args = {.x = p->hidden_x,
                                    .codes = p->hidden_x8.codes,
                                    .scales = p->hidden_x8.scales,
                                    .range = p->range,
                                    .x_stride = p->hidden,
                                    .n_rows = n_pairs < p->n_pairs ? (uint32_t)n_pairs : p->n_pairs,
                                    .cols = p->hidden,
                                    .dtype = p->experts.down.dtype};
  return p->gemm == CUDA_GEMM_A8 ? TD_CUDA_LAUNCH(stream, round_a8, &args) : TD_OK;
}

// Whether linear_vec computes gate, up and their activation in one launch.
static bool takes_glu(const moe_pass *p) {
  const td_cu_read read = is_aligned(p->a->x, p->dim) ? p->experts.read_gate : TD_CU_READ_ANY;
  return !p->a->ids && read != TD_CU_READ_ANY && read != TD_CU_READ_BLOCKS;
}

static td_cu_glu glu_of(const moe_pass *p) {
  return (td_cu_glu){
      .out = p->hidden_x, .limit = p->a->limit, .alpha = p->a->alpha, .plain = p->a->plain};
}

// Gate and up in one launch: a single expert matrix would not fill a large GPU.
static td_status project_in(td_cuda_stream *stream, const moe_pass *p, const uint32_t *x_rows,
                            td_err *err) {
  td_cu_linear_args args = {.w = p->experts.gate,
                            .experts = p->experts.device,
                            .n_matrices = p->a->pairs ? 1 : 2,
                            .expert_bias = p->gate_bias,
                            .bias_step = (size_t)n_routed(p->a) * p->experts.gate.rows,
                            .y_step = (size_t)(p->up - p->gate),
                            .x_rows = x_rows,
                            .x = (const uint16_t *)p->a->x + (size_t)p->token0 * p->dim,
                            .x8 = p->x8.codes,
                            .x8_scale = p->x8.scales,
                            .y = p->gate,
                            .x_stride = p->dim,
                            .n_rows = p->experts.gate.rows,
                            .read = p->experts.read_gate};
  if (takes_glu(p)) args.glu = glu_of(p);
  return project(stream, p, &args, err);
}

static td_status run_swiglu(td_cuda_stream *stream, const moe_pass *p, td_err *err) {
  const uint64_t n_pairs = (uint64_t)p->range.n_tiles * p->tile_tokens;
  td_cu_swiglu_args args = {.gate = p->gate,
                            .up = p->up,
                            .glu = glu_of(p),
                            .range = p->range,
                            .n_rows = n_pairs < p->n_pairs ? (uint32_t)n_pairs : p->n_pairs,
                            .dim = p->hidden,
                            .pairs = p->a->pairs};
  return TD_CUDA_LAUNCH(stream, swiglu, &args);
}

// out (+)= the round's weighted sums.
static td_status run_sum(td_cuda_stream *stream, const moe_pass *p, td_err *err) {
  const td_moe_args *a = p->a;
  const size_t n_rows = a->by_pair ? a->top_k : 1; // per token
  const size_t row_bytes = n_rows * p->dim * (a->by_pair || a->out_f32 ? sizeof(float) : 2);
  td_cu_moe_sum_args args = {
      .parts = p->parts,
      .place = a->ids ? p->place : NULL,
      .weights = a->ids ? a->weights + (size_t)p->token0 * a->top_k : NULL,
      .out = (char *)a->out + p->token0 * row_bytes,
      .range = p->range,
      .n_tokens = p->n_tokens,
      .top_k = a->top_k,
      .dim = p->dim,
      .accumulate = a->accumulate || p->range.skip > 0,
      .out_f32 = a->out_f32,
      .by_expert = p->is_group,
      .by_pair = a->by_pair,
  };
  return TD_CUDA_LAUNCH(stream, moe_sum, &args);
}

static td_status run_round(td_cuda_stream *stream, const moe_pass *p, td_err *err) {
  td_status status = project_in(stream, p, p->token, err);
  if (status == TD_OK) status = run_swiglu(stream, p, err);
  if (status == TD_OK) status = round_hidden(stream, p, err);
  td_cu_linear_args down = {.w = p->experts.down,
                            .experts = p->experts.device + 2 * (size_t)p->experts.n_experts,
                            .n_matrices = 1,
                            .expert_bias = p->down_bias,
                            .x = p->hidden_x,
                            .x8 = p->hidden_x8.codes,
                            .x8_scale = p->hidden_x8.scales,
                            .y = p->parts,
                            .x_stride = p->hidden,
                            .n_rows = p->dim,
                            .read = p->experts.read_down};
  if (status == TD_OK) status = project(stream, p, &down, err);
  return status == TD_OK ? run_sum(stream, p, err) : status;
}

// The first round may be of no tiles: it sets the sum to zero.
static td_status run_experts(td_cuda_stream *stream, moe_pass *p, td_err *err) {
  td_status status = sort(stream, p, err);
  if (status == TD_OK && p->gemm == CUDA_GEMM_A8) status = round_tokens(stream, p, err);
  if (status == TD_OK) status = run_round(stream, p, err);
  for (p->range.skip = p->range.n_tiles; status == TD_OK && p->range.skip < most_tiles(stream, p);
       p->range.skip += p->range.n_tiles)
    status = run_round(stream, p, err);
  return status;
}

// Gate, up and activation of the single expert of all tokens: pairs are the tokens in order.
static td_status run_dense_in(td_cuda_stream *stream, const moe_pass *p, td_err *err) {
  const td_cuda_matmul in = {.w = &p->experts.gate,
                             .x = (const uint16_t *)p->a->x + (size_t)p->token0 * p->dim,
                             .y = p->gate,
                             .x_stride = p->dim,
                             .y_stride = p->hidden,
                             .n_tokens = p->n_tokens,
                             .n_rows = p->hidden,
                             .y_f32 = true};
  td_cuda_matmul both[] = {in, in};
  both[1].w = &p->experts.up;
  both[1].y = p->up;
  td_status status;
  if (p->gemm == CUDA_GEMM_A8) {
    status = td_cuda_run_a8(stream, both, TD_COUNT(both), err);
  } else if (p->gemm == CUDA_GEMM_VEC && !td_cuda_takes_blas(stream, &in)) {
    status = project_in(stream, p, NULL, err);
    if (takes_glu(p)) return status;
  } else {
    status = td_cuda_run_matmul(stream, &both[0], err);
    if (status == TD_OK) status = td_cuda_run_matmul(stream, &both[1], err);
  }
  return status == TD_OK ? run_swiglu(stream, p, err) : status;
}

// What nothing is added to needs no sum.
static td_status run_dense(td_cuda_stream *stream, const moe_pass *p, td_err *err) {
  const td_moe_args *a = p->a;
  const size_t row_bytes = p->dim * (a->out_f32 ? sizeof(float) : sizeof(uint16_t));
  td_status status = run_dense_in(stream, p, err);
  td_cuda_matmul out = {.w = &p->experts.down,
                        .x = p->hidden_x,
                        .y = (char *)a->out + p->token0 * row_bytes,
                        .x_stride = p->hidden,
                        .y_stride = p->dim,
                        .n_tokens = p->n_tokens,
                        .n_rows = p->dim,
                        .y_f32 = a->out_f32,
                        .is_prompt = p->gemm == CUDA_GEMM_A8};
  out.add = a->accumulate && !out.is_prompt && is_of_vec(stream, &out);
  if (a->accumulate && !out.add) {
    out.y = p->parts;
    out.y_f32 = true;
  }
  if (status == TD_OK) status = td_cuda_run_matmul(stream, &out, err);
  return status == TD_OK && a->accumulate && !out.add ? run_sum(stream, p, err) : status;
}

static uint32_t tokens_of_pass(const moe_pass *p, size_t pass_bytes) {
  size_t n = pass_bytes / p->pair_bytes / p->a->top_k;
  return n < 1 ? 1 : n < p->a->n_tokens ? (uint32_t)n : p->a->n_tokens;
}

static td_status check_moe(const td_moe_args *a, td_err *err) {
  TD_DEV_REQUIRE(a->n_experts > 0 && a->top_k > 0 && (a->ids || a->top_k == 1),
                 "experts: top %u of %u", a->top_k, a->n_experts);
  TD_DEV_REQUIRE(!a->ids || a->weights, "experts: ids without weights");
  TD_DEV_REQUIRE((a->limit > 0 && a->ids) || (!a->pairs && !a->gate_bias),
                 "experts: pairs and gate's bias belong to a clamped activation of routed experts");
  TD_DEV_REQUIRE(a->ids || !a->down_bias, "experts: a bias without ids");
  if (a->rest)
    return td_fail(err, TD_EUNSUPPORTED, "experts: those without a slot are left to a CPU");
  TD_DEV_REQUIRE(!a->slots || (a->ids && !a->n_routed), "experts: slots of a group");
  TD_DEV_REQUIRE((uint64_t)a->first_expert + a->n_experts <= n_routed(a),
                 "experts: %u from expert %u on, of %u", a->n_experts, a->first_expert,
                 n_routed(a));
  TD_CUDA_MOST(n_routed(a), TD_CU_MAX_EXPERTS, "experts: %u of them");
  TD_CUDA_MOST(a->top_k, TD_CU_MAX_TOP_K, "experts: %u a token");
  return TD_OK;
}

static td_status find_biases(td_cuda_stream *stream, moe_pass *p, td_err *err) {
  const td_moe_args *a = p->a;
  td_cuda_dev *dev = td_cuda_dev_of(stream);
  const size_t n = n_routed(a), row_bytes = sizeof(float);
  const size_t gate_rows = (size_t)p->experts.gate.rows * (a->pairs ? 1 : 2);
  td_status status = TD_OK;
  p->gate_bias = td_cuda_on_device(dev, a->gate_bias, n * gate_rows * row_bytes, &status, err);
  p->down_bias = td_cuda_on_device(dev, a->down_bias, n * p->dim * row_bytes, &status, err);
  return status;
}

// Tokens [begin, end), in as many passes as scratch memory asks for.
static td_status run_tokens(td_cuda_stream *stream, moe_pass *p, uint32_t begin, uint32_t end,
                            td_err *err) {
  const size_t pass_bytes = td_cuda_dev_of(stream)->pass_bytes;
  td_status status = TD_OK;
  p->pair_bytes = p->hidden * sizeof *p->hidden_x + parts_bytes(p);
  if (p->is_a8) p->pair_bytes += td_cuda_a8_bytes(1, p->hidden);
  const uint32_t most = p->is_group ? end - begin : tokens_of_pass(p, pass_bytes);
  for (p->token0 = begin; status == TD_OK && p->token0 < end; p->token0 += most) {
    const uint32_t left = end - p->token0;
    p->n_tokens = left < most ? left : most;
    p->n_pairs = p->n_tokens * p->a->top_k;
    plan(stream, p, pass_bytes);
    status = reserve(stream, p, err);
    if (status != TD_OK) break;
    status = p->a->ids ? run_experts(stream, p, err) : run_dense(stream, p, err);
  }
  return status;
}

// Only sums in f32 that accumulate over calls may be cut into rounds; otherwise rounding would
// depend on the cut. Tokens that are not rounded to 8 bits are computed as in a step without
// prompts.
td_status td_cuda_op_moe(td_cuda_stream *stream, td_moe_args *a, td_err *err) {
  if (a->n_tokens == 0) return TD_OK;
  td_status status = check_moe(a, err);
  moe_pass p = {.a = a, .is_group = a->ids && a->out_f32 && a->n_experts < n_routed(a)};
  if (status == TD_OK) status = td_cuda_experts_of(td_cuda_dev_of(stream), a, &p.experts, err);
  if (status != TD_OK) return status;
  p.dim = p.experts.gate.cols;
  p.hidden = p.experts.gate.rows / (a->pairs ? 2 : 1);
  status = find_biases(stream, &p, err);
  const bool is_a8 = p.experts.a8 != TD_ACTIVATIONS_AUTO && a->n_prompt <= a->n_tokens &&
                     td_cuda_rounds(td_cuda_dev_of(stream), &p.experts.gate, a->n_prompt);
  const uint32_t n_others = is_a8 ? a->n_tokens - a->n_prompt : a->n_tokens;
  if (status == TD_OK) status = run_tokens(stream, &p, 0, n_others, err);
  p.is_a8 = is_a8;
  return status == TD_OK ? run_tokens(stream, &p, n_others, a->n_tokens, err) : status;
}

td_status td_cuda_op_moe_join(td_cuda_stream *stream, td_moe_join_args *a, td_err *err) {
  if (a->n_tokens == 0) return TD_OK;
  TD_DEV_REQUIRE(a->top_k > 0 && a->top_k <= TD_CU_MAX_TOP_K, "experts: %u a token", a->top_k);
  a->fault = stream->fault;
  return TD_CUDA_LAUNCH(stream, moe_join, a);
}
