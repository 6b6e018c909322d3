// src/engine/vision/tower.c - the towers of Qwen3-VL and Qwen3.5: a patch is a token; learned
// positions, interpolated, and rotary ones by row and column; attention to all patches of the
// image; groups of merge^2 patches become a token of the language model. Tokens are in the order of
// these groups. Weights are multiplied as stored, activations are FP32 (td_linear_op_args.exact).
#include "engine/vision/tower.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
  MLP_TOKENS = 1024, // in an MLP at a time
  Q = 0,
  K,
  V,
  N_PARTS
};

// A layer's projection, cut in three.
typedef struct {
  td_weight w[N_PARTS];
  td_vec bias[N_PARTS];
} layer_parts;

struct td_tower_run {
  const td_vision_config *config;
  const td_vision_weights *weights;
  td_dev *dev;
  td_stream *stream;
  layer_parts *parts; // [n_layers]
  // Of the image.
  char *memory;         // what follows is in it; NULL: no image
  float *x, *h;         // [n][dim]
  float *part[N_PARTS]; // [n][dim]
  float *page;          // keys, then values: [n_heads][n][head_dim]
  float *mid;           // of an MLP, or patches
  float *cos_sin;       // [n][head_dim]
  float *rows;          // see td_tower_run_rows
  int32_t *position;    // [n]: 0, 1, 2, ...
  int32_t *zeros;       // [n]
  int32_t q_begin[2];
  uint32_t n, n_tokens, layer_idx, n_deep; // n_deep: of rows so far
};

static uint32_t head_dim(const td_tower_run *run) {
  return run->config->dim / run->config->n_heads;
}

static uint32_t merged_dim(const td_tower_run *run) {
  return run->config->merge * run->config->merge * run->config->dim;
}

static void cut_projection(const td_vision_layer *layer, uint32_t dim, layer_parts *out) {
  for (uint32_t i = 0; i < N_PARTS; i++) {
    td_weight *w = &out->w[i];
    *w = layer->qkv;
    w->rows = dim;
    w->data = (const char *)w->data + (size_t)i * dim * td_weight_row_bytes(w);
    td_vec *bias = &out->bias[i];
    *bias = layer->qkv_bias;
    bias->n = dim;
    bias->data = (const char *)bias->data + (size_t)i * dim * td_dtype_bytes(bias->dtype);
  }
}

td_status td_tower_run_open(td_tower_run **out, const td_model *model, td_dev *dev, td_err *err) {
  td_tower_run *run = *out = calloc(1, sizeof *run);
  if (!run) return td_fail(err, TD_ENOMEM, "out of memory: the model's tower");
  run->config = &td_model_config_of(model)->vision;
  run->weights = td_model_vision(model);
  run->dev = dev;
  run->parts = calloc(run->config->n_layers, sizeof *run->parts);
  td_status st = run->parts ? td_stream_open(&run->stream, dev, err)
                            : td_fail(err, TD_ENOMEM, "out of memory: the model's tower");
  for (uint32_t i = 0; i < run->config->n_layers && st == TD_OK; i++)
    cut_projection(&run->weights->layers[i], run->config->dim, &run->parts[i]);
  if (st == TD_OK) return TD_OK;
  td_tower_run_close(run);
  *out = NULL;
  return st;
}

void td_tower_run_close(td_tower_run *run) {
  if (!run) return;
  td_tower_run_end(run);
  if (run->stream) td_stream_close(run->stream);
  free(run->parts);
  free(run);
}

void td_tower_run_end(td_tower_run *run) {
  td_dev_free(run->dev, run->memory);
  run->memory = NULL;
}

// ---- what enters the first layer ----------------------------------------------------------------

static td_status alloc(td_tower_run *run, td_err *err) {
  const td_vision_config *c = run->config;
  const size_t n = run->n, x = n * c->dim;
  const size_t patch = (size_t)3 * c->temporal * c->patch * c->patch, merged = n * c->dim;
  const size_t mlp = (n < MLP_TOKENS ? n : MLP_TOKENS) * (size_t)c->mlp_dim;
  size_t mid = n * patch > mlp ? n * patch : mlp;
  if (mid < merged) mid = merged;
  float **const parts[] = {&run->x,
                           &run->h,
                           &run->part[Q],
                           &run->part[K],
                           &run->part[V],
                           &run->page,
                           &run->mid,
                           &run->cos_sin,
                           &run->rows,
                           (float **)&run->position,
                           (float **)&run->zeros};
  const size_t sizes[] = {x,
                          x,
                          x,
                          x,
                          x,
                          2 * x,
                          mid,
                          n * head_dim(run),
                          (size_t)(1 + c->n_deep) * run->n_tokens * c->out_dim,
                          n,
                          n};
  size_t n_bytes = 0, at = 0;
  for (size_t i = 0; i < TD_COUNT(parts); i++)
    n_bytes += (sizes[i] * sizeof(float) + 63) & ~(size_t)63;
  td_status st = td_dev_alloc(run->dev, (void **)&run->memory, n_bytes, err);
  if (st != TD_OK) return td_err_prefix(err, "an image of %u patches", run->n);
  for (size_t i = 0; i < TD_COUNT(parts); i++) {
    *parts[i] = (float *)(void *)(run->memory + at);
    at += (sizes[i] * sizeof(float) + 63) & ~(size_t)63;
  }
  return TD_OK;
}

typedef struct {
  uint32_t row, col;
} cell;

// Where in the image token t is.
static cell cell_of(const td_vision_config *c, uint32_t grid_w, uint32_t t) {
  const uint32_t m = c->merge, group = t / (m * m), in = t % (m * m), columns = grid_w / m;
  return (cell){.row = group / columns * m + in / m, .col = group % columns * m + in % m};
}

// Every frame of a patch is the image.
static void cut_patches(const td_tower_run *run, const td_image_input *image) {
  const td_vision_config *c = run->config;
  const size_t p = c->patch, width = image->grid_w * p;
  float values[3][256], *out = run->mid;
  for (int k = 0; k < 3; k++)
    for (int i = 0; i < 256; i++)
      values[k][i] = ((float)i - c->mean[k] * 255) / (c->std[k] * 255);
  for (uint32_t t = 0; t < run->n; t++) {
    const cell at = cell_of(c, image->grid_w, t);
    for (int k = 0; k < 3; k++) {
      for (uint32_t frame = 0; frame < c->temporal; frame++) {
        for (size_t y = 0; y < p; y++) {
          const uint8_t *rgb = image->rgb + ((at.row * p + y) * width + at.col * p) * 3 + k;
          for (size_t i = 0; i < p; i++)
            *out++ = values[k][rgb[3 * i]];
        }
      }
    }
  }
}

// Two entries of a square's side, and the share of the second, for one of n places over it.
typedef struct {
  uint32_t at[2];
  float share[2];
} taps;

static taps taps_of(uint32_t i, uint32_t n, uint32_t side) {
  const float from = (float)i * (float)(side - 1) / (float)(n > 1 ? n - 1 : 1);
  const float low = floorf(from);
  const uint32_t at = (uint32_t)low, next = at + 1 < side ? at + 1 : side - 1;
  return (taps){.at = {at, next}, .share = {1 - (from - low), from - low}};
}

static float element(const td_weight *w, size_t i) {
  if (w->dtype == TD_F32) return ((const float *)w->data)[i];
  const uint32_t bits = (uint32_t)((const uint16_t *)w->data)[i] << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Learned positions, bilinear between those of a square, to h.
static void learned_positions(const td_tower_run *run, const td_image_input *image) {
  const td_vision_config *c = run->config;
  const uint32_t side = (uint32_t)lrint(sqrt(c->n_positions));
  memset(run->h, 0, (size_t)run->n * c->dim * sizeof *run->h);
  for (uint32_t t = 0; t < run->n; t++) {
    const cell at = cell_of(c, image->grid_w, t);
    const taps y = taps_of(at.row, image->grid_h, side), x = taps_of(at.col, image->grid_w, side);
    float *out = run->h + (size_t)t * c->dim;
    for (int i = 0; i < 4; i++) {
      const float share = y.share[i / 2] * x.share[i % 2];
      const size_t from = ((size_t)y.at[i / 2] * side + x.at[i % 2]) * c->dim;
      for (uint32_t d = 0; d < c->dim; d++)
        out[d] += element(&run->weights->positions, from + d) * share;
    }
  }
}

// Of a head's pairs the first half turns by the row, the second by the column.
static void rotary_positions(const td_tower_run *run, const td_image_input *image) {
  const uint32_t n_pairs = head_dim(run) / 2, half = n_pairs / 2;
  for (uint32_t i = 0; i < half; i++) {
    const float power = (float)(2 * i) / (float)n_pairs;
    const float inverse = 1.0f / powf((float)run->config->rope_theta, power);
    for (uint32_t t = 0; t < run->n; t++) {
      const cell at = cell_of(run->config, image->grid_w, t);
      const float angle[] = {(float)at.row * inverse, (float)at.col * inverse};
      for (uint32_t k = 0; k < 2; k++) {
        float *pair = run->cos_sin + ((size_t)t * n_pairs + i + k * half) * 2;
        pair[0] = cosf(angle[k]);
        pair[1] = sinf(angle[k]);
      }
    }
  }
}

static void linear(td_tower_run *run, const td_weight *w, td_vec bias, const float *x, float *y,
                   uint32_t n) {
  td_op_linear(run->stream, &(td_linear_op_args){.w = w,
                                                 .bias = bias,
                                                 .x = x,
                                                 .y = y,
                                                 .x_stride = w->cols,
                                                 .y_stride = w->rows,
                                                 .n_tokens = n,
                                                 .n_prompt = n,
                                                 .out_f32 = true,
                                                 .exact = true});
}

td_status td_tower_run_begin(td_tower_run *run, const td_image_input *image, td_err *err) {
  const td_vision_config *c = run->config;
  const uint64_t n = (uint64_t)image->grid_h * image->grid_w;
  if (!n || n > 1u << 24 || image->grid_h % c->merge || image->grid_w % c->merge ||
      n != (uint64_t)image->n_tokens * c->merge * c->merge || !image->rgb) {
    return td_fail(err, TD_EINVAL, "an image of %u x %u patches does not make %u tokens of %u x %u",
                   image->grid_w, image->grid_h, image->n_tokens, c->merge, c->merge);
  }
  td_tower_run_end(run);
  run->n = (uint32_t)n;
  run->n_tokens = image->n_tokens;
  run->layer_idx = run->n_deep = 0;
  run->q_begin[1] = (int32_t)n;
  td_status st = alloc(run, err);
  if (st != TD_OK) return st;
  for (uint32_t t = 0; t < run->n; t++) {
    run->position[t] = (int32_t)t;
    run->zeros[t] = 0;
  }
  cut_patches(run, image);
  learned_positions(run, image);
  rotary_positions(run, image);
  linear(run, &run->weights->patch, run->weights->patch_bias, run->mid, run->x, run->n);
  td_op_add(run->stream, run->x, run->h, n * c->dim);
  return td_stream_sync(run->stream, err);
}

// ---- a layer ------------------------------------------------------------------------------------

// h = norm of x, rows of `dim` elements.
static void norm(td_tower_run *run, td_vec w, td_vec b, uint32_t dim) {
  const size_t n = (size_t)run->n * run->config->dim;
  td_op_copy(run->stream, run->h, run->x, n * sizeof *run->h);
  td_op_layernorm(run->stream, &(td_layernorm_args){.x = run->h,
                                                    .w = w,
                                                    .b = b,
                                                    .stride = dim,
                                                    .n_rows = (uint32_t)(n / dim),
                                                    .dim = dim,
                                                    .eps = run->config->eps,
                                                    .is_f32 = true});
}

static void attend(td_tower_run *run, const td_vision_layer *layer, const layer_parts *parts) {
  const td_vision_config *c = run->config;
  const uint32_t dim = head_dim(run);
  td_rope_heads heads[2];
  for (uint32_t i = 0; i < N_PARTS; i++) {
    linear(run, &parts->w[i], parts->bias[i], run->h, run->part[i], run->n);
    if (i < V)
      heads[i] = (td_rope_heads){
          .x = run->part[i], .token_stride = c->dim, .head_stride = dim, .n_heads = c->n_heads};
  }
  td_op_rope(run->stream, &(td_rope_args){.heads = heads[Q],
                                          .also = heads[K],
                                          .cos_sin = run->cos_sin,
                                          .position = run->position,
                                          .n_tokens = run->n,
                                          .rot_dim = dim});
  const td_batch_view batch = {.seq = run->zeros,
                               .position = run->position,
                               .q_begin = run->q_begin,
                               .page_table = run->zeros,
                               .n_tokens = run->n,
                               .n_seqs = 1,
                               .max_pages = 1,
                               .page_tokens = run->n,
                               .max_keys = run->n};
  const td_kv_view kv = {.pages = (char *)run->page,
                         .page_bytes = (size_t)2 * run->n * c->dim * sizeof(float),
                         .dtype = TD_F32};
  td_op_kv_store(run->stream, &(td_kv_store_args){.batch = batch,
                                                  .kv = kv,
                                                  .k = run->part[K],
                                                  .v = run->part[V],
                                                  .k_stride = c->dim,
                                                  .v_stride = c->dim,
                                                  .n_heads = c->n_heads,
                                                  .head_dim = dim});
  td_op_attn_gqa(run->stream, &(td_attn_gqa_args){.batch = batch,
                                                  .kv = kv,
                                                  .q = run->part[Q],
                                                  .out = run->h,
                                                  .n_heads = c->n_heads,
                                                  .n_kv_heads = c->n_heads,
                                                  .head_dim = dim,
                                                  .scale = (float)(1 / sqrt(dim)),
                                                  .prompt = true,
                                                  .whole = true});
  linear(run, &layer->proj, layer->proj_bias, run->h, run->part[Q], run->n);
  td_op_add(run->stream, run->x, run->part[Q], (size_t)run->n * c->dim);
}

static void gelu(td_tower_run *run, uint32_t n_rows, uint32_t dim, bool by_tanh) {
  td_op_gelu_rows(
      run->stream,
      &(td_gelu_rows_args){.x = run->mid, .n_rows = n_rows, .dim = dim, .by_tanh = by_tanh});
}

static void mlp(td_tower_run *run, const td_vision_layer *layer) {
  const size_t dim = run->config->dim;
  for (uint32_t t = 0, n; t < run->n; t += n) {
    n = run->n - t < MLP_TOKENS ? run->n - t : MLP_TOKENS;
    linear(run, &layer->fc1, layer->fc1_bias, run->h + t * dim, run->mid, n);
    gelu(run, n, run->config->mlp_dim, true);
    linear(run, &layer->fc2, layer->fc2_bias, run->mid, run->part[Q] + t * dim, n);
  }
  td_op_add(run->stream, run->x, run->part[Q], run->n * dim);
}

// Rows i of td_tower_run_rows, from x.
static void merge(td_tower_run *run, const td_vision_merger *merger, uint32_t i) {
  norm(run, merger->norm, merger->norm_bias, merger->norm.n);
  linear(run, &merger->fc1, merger->fc1_bias, run->h, run->mid, run->n_tokens);
  gelu(run, run->n_tokens, merged_dim(run), false);
  linear(run, &merger->fc2, merger->fc2_bias, run->mid,
         run->rows + (size_t)i * run->n_tokens * run->config->out_dim, run->n_tokens);
}

td_status td_tower_run_piece(td_tower_run *run, bool *is_done, td_err *err) {
  const td_vision_config *c = run->config;
  *is_done = run->layer_idx == c->n_layers;
  if (*is_done) {
    merge(run, &run->weights->merger, 0);
    return td_stream_sync(run->stream, err);
  }
  const td_vision_layer *layer = &run->weights->layers[run->layer_idx];
  norm(run, layer->norm1, layer->norm1_bias, c->dim);
  attend(run, layer, &run->parts[run->layer_idx]);
  norm(run, layer->norm2, layer->norm2_bias, c->dim);
  mlp(run, layer);
  if (run->n_deep < c->n_deep && c->deep[run->n_deep] == run->layer_idx) {
    merge(run, &run->weights->deep[run->n_deep], 1 + run->n_deep);
    run->n_deep++;
  }
  run->layer_idx++;
  return td_stream_sync(run->stream, err);
}

const float *td_tower_run_rows(const td_tower_run *run) {
  return run->rows;
}
