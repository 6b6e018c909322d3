// src/engine/vision/tower.c - towers: a patch is a token; learned positions, interpolated, and
// rotary ones by row and column; attention to all patches of the image; groups of merge^2 patches
// become a token of the language model. Tokens are in the order of these groups. Weights are
// multiplied as stored, activations are FP32 (td_linear_op_args.exact). What a tower has of all
// this, its weights say.
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
  float *up, *joined;   // of a gated MLP; [n_tokens][out_dim], with context_dim
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
    if (!layer->qkv_bias.data) continue;
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
  const size_t some = n < MLP_TOKENS ? n : MLP_TOKENS;
  const size_t widest = c->context_dim > c->mlp_dim ? c->context_dim : c->mlp_dim;
  size_t mid = n * patch > some * widest ? n * patch : some * widest;
  if (mid < merged) mid = merged;
  const size_t joined = (size_t)run->n_tokens * c->out_dim; // merged, with context_dim
  float **const parts[] = {&run->x,
                           &run->h,
                           &run->part[Q],
                           &run->part[K],
                           &run->part[V],
                           &run->page,
                           &run->mid,
                           &run->up,
                           &run->joined,
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
                          c->context_dim ? some * widest : 0,
                          c->context_dim ? joined : 0,
                          n * head_dim(run),
                          (1 + c->n_deep) * joined,
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
  const td_pixel_norm *norm = &image->norm;
  const size_t p = c->patch, width = image->grid_w * p;
  float values[3][256], *out = run->mid;
  for (int k = 0; k < 3; k++)
    for (int i = 0; i < 256; i++)
      values[k][i] = ((float)i - norm->mean[k] * 255) / (norm->std[k] * 255);
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

// Entries of a square's side, and their shares, for one of n places over it.
enum { MOST_TAPS = 4 };
typedef struct {
  uint32_t n, at[MOST_TAPS];
  float share[MOST_TAPS];
} taps;

// Keys' kernel with a = -0.75, or the linear one.
static float kernel(float distance, bool is_bicubic) {
  const float a = -0.75f, d = distance;
  if (!is_bicubic) return fmaxf(1 - d, 0);
  return d <= 1 ? ((a + 2) * d - (a + 3)) * d * d + 1 : ((a * d - 5 * a) * d + 8 * a) * d - 4 * a;
}

static taps taps_of(uint32_t i, uint32_t n, uint32_t side, bool is_bicubic) {
  const float from = is_bicubic ? ((float)i + 0.5f) * (float)side / (float)n - 0.5f
                                : (float)i * (float)(side - 1) / (float)(n > 1 ? n - 1 : 1);
  const float low = floorf(from);
  taps out = {.n = is_bicubic ? 4 : 2};
  for (uint32_t k = 0; k < out.n; k++) {
    const float at = low + (float)k - (is_bicubic ? 1 : 0);
    out.share[k] = kernel(fabsf(from - at), is_bicubic);
    out.at[k] = (uint32_t)fminf(fmaxf(at, 0), (float)(side - 1));
  }
  return out;
}

static float element(const td_weight *w, size_t i) {
  if (w->dtype == TD_F32) return ((const float *)w->data)[i];
  const uint32_t bits = (uint32_t)((const uint16_t *)w->data)[i] << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// x += learned positions, between those of a square.
static void learned_positions(const td_tower_run *run, const td_image_input *image) {
  const td_vision_config *c = run->config;
  const uint32_t side = (uint32_t)lrint(sqrt(c->n_positions));
  for (uint32_t t = 0; t < run->n && side; t++) {
    const cell at = cell_of(c, image->grid_w, t);
    const taps y = taps_of(at.row, image->grid_h, side, c->is_bicubic);
    const taps x = taps_of(at.col, image->grid_w, side, c->is_bicubic);
    float *out = run->h + (size_t)t * c->dim;
    memset(out, 0, c->dim * sizeof *out);
    for (uint32_t i = 0; i < y.n * x.n; i++) {
      const float share = y.share[i / x.n] * x.share[i % x.n];
      const size_t from = ((size_t)y.at[i / x.n] * side + x.at[i % x.n]) * c->dim;
      for (uint32_t d = 0; d < c->dim; d++)
        out[d] += element(&run->weights->positions, from + d) * share;
    }
  }
  if (side) td_op_add(run->stream, run->x, run->h, (size_t)run->n * c->dim);
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

// y = norm of x, rows of w.n elements.
static void norm(td_tower_run *run, td_vec w, td_vec b, const float *x, float *y, uint32_t n_rows) {
  if (!b.data) {
    td_op_rmsnorm(run->stream, &(td_rmsnorm_args){.x = (void *)x,
                                                  .w = w,
                                                  .out = y,
                                                  .x_stride = w.n,
                                                  .out_stride = w.n,
                                                  .n_rows = n_rows,
                                                  .dim = w.n,
                                                  .eps = run->config->eps});
    return;
  }
  if (x != y) td_op_copy(run->stream, y, x, (size_t)n_rows * w.n * sizeof *y);
  td_op_layernorm(run->stream,
                  &(td_layernorm_args){.x = y,
                                       .w = w,
                                       .b = b,
                                       .stride = w.n,
                                       .n_rows = n_rows,
                                       .dim = w.n,
                                       .eps = run->config->context_dim ? 1e-5f : run->config->eps,
                                       .is_f32 = true});
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
                                                 .exact = true,
                                                 .split = true});
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
  const td_vision_weights *w = run->weights;
  cut_patches(run, image);
  rotary_positions(run, image);
  linear(run, &w->patch, w->patch_bias, run->mid, run->x, run->n);
  if (w->patch_norm.data) norm(run, w->patch_norm, (td_vec){.n = 0}, run->x, run->x, run->n);
  learned_positions(run, image);
  return td_stream_sync(run->stream, err);
}

// ---- a layer ------------------------------------------------------------------------------------

static void attend(td_tower_run *run, const td_vision_layer *layer, const layer_parts *parts) {
  const td_vision_config *c = run->config;
  const uint32_t dim = head_dim(run);
  td_rope_heads heads[2];
  for (uint32_t i = 0; i < N_PARTS; i++) {
    linear(run, &parts->w[i], parts->bias[i], run->h, run->part[i], run->n);
    const td_vec w = i == Q ? layer->q_norm : layer->k_norm;
    if (i < V && w.data)
      norm(run, w, (td_vec){.n = 0}, run->part[i], run->part[i], run->n * c->n_heads);
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

static void activate(td_tower_run *run, float *x, uint32_t n_rows, uint32_t dim,
                     td_activate_kind kind) {
  td_op_activate_rows(run->stream, &(td_activate_rows_args){.x = x,
                                                            .up = run->up,
                                                            .n_rows = n_rows,
                                                            .dim = dim,
                                                            .kind = kind,
                                                            .limit = run->config->limit});
}

typedef struct {
  const td_weight *fc1, *up, *fc2;
  td_vec fc1_bias, up_bias, fc2_bias;
} mlp_weights;

// y = MLP of x; x and y are apart.
static void mlp(td_tower_run *run, const mlp_weights *w, const float *x, float *y,
                uint32_t n_rows) {
  const size_t x_dim = w->fc1->cols, y_dim = w->fc2->rows;
  const bool is_gated = w->up->data != NULL;
  for (uint32_t t = 0, n; t < n_rows; t += n) {
    n = n_rows - t < MLP_TOKENS ? n_rows - t : MLP_TOKENS;
    linear(run, w->fc1, w->fc1_bias, x + t * x_dim, run->mid, n);
    if (is_gated) linear(run, w->up, w->up_bias, x + t * x_dim, run->up, n);
    activate(run, run->mid, n, w->fc1->rows, is_gated ? TD_ACTIVATE_SWIGLU : TD_ACTIVATE_GELU_TANH);
    linear(run, w->fc2, w->fc2_bias, run->mid, y + t * y_dim, n);
  }
}

// mid = h, of each group of merge^2 patches the elements of all patches side by side, as a
// convolution over the group has them.
static void turn_groups(td_tower_run *run) {
  const uint32_t n = run->config->merge * run->config->merge, dim = run->config->dim;
  for (size_t g = 0; g < run->n_tokens; g++)
    for (uint32_t i = 0; i < n; i++)
      for (uint32_t d = 0; d < dim; d++)
        run->mid[(g * dim + d) * n + i] = run->h[(g * n + i) * dim + d];
}

// Rows i of td_tower_run_rows, from x.
static td_status merge(td_tower_run *run, const td_vision_merger *merger, uint32_t i, td_err *err) {
  const uint32_t n = run->n_tokens, dim = run->config->out_dim;
  float *out = run->rows + (size_t)i * n * dim;
  norm(run, merger->norm, merger->norm_bias, run->x, run->h,
       (uint32_t)((size_t)run->n * run->config->dim / merger->norm.n));
  if (!merger->conv.data) {
    linear(run, &merger->fc1, merger->fc1_bias, run->h, run->mid, n);
    activate(run, run->mid, n, merged_dim(run), TD_ACTIVATE_GELU);
    linear(run, &merger->fc2, merger->fc2_bias, run->mid, out, n);
    return td_stream_sync(run->stream, err);
  }
  td_status st = td_stream_sync(run->stream, err);
  if (st != TD_OK) return st;
  turn_groups(run);
  linear(run, &merger->conv, merger->conv_bias, run->mid, out, n);
  linear(run, &merger->fc1, merger->fc1_bias, out, run->joined, n);
  norm(run, merger->mid_norm, merger->mid_norm_bias, run->joined, run->joined, n);
  activate(run, run->joined, n, dim, TD_ACTIVATE_GELU);
  const mlp_weights w = {.fc1 = &merger->gate, .up = &merger->up, .fc2 = &merger->down};
  mlp(run, &w, run->joined, out, n);
  return td_stream_sync(run->stream, err);
}

td_status td_tower_run_piece(td_tower_run *run, bool *is_done, td_err *err) {
  const td_vision_config *c = run->config;
  *is_done = run->layer_idx == c->n_layers;
  if (*is_done) return merge(run, &run->weights->merger, 0, err);
  const td_vision_layer *layer = &run->weights->layers[run->layer_idx];
  const mlp_weights w = {.fc1 = &layer->fc1,
                         .up = &layer->up,
                         .fc2 = &layer->fc2,
                         .fc1_bias = layer->fc1_bias,
                         .up_bias = layer->up_bias,
                         .fc2_bias = layer->fc2_bias};
  norm(run, layer->norm1, layer->norm1_bias, run->x, run->h, run->n);
  attend(run, layer, &run->parts[run->layer_idx]);
  norm(run, layer->norm2, layer->norm2_bias, run->x, run->h, run->n);
  mlp(run, &w, run->h, run->part[Q], run->n);
  td_op_add(run->stream, run->x, run->part[Q], (size_t)run->n * c->dim);
  const uint32_t at = run->layer_idx++;
  if (run->n_deep < c->n_deep && c->deep[run->n_deep] == at) {
    const uint32_t i = run->n_deep++;
    return merge(run, &run->weights->deep[i], 1 + i, err);
  }
  return td_stream_sync(run->stream, err);
}

const float *td_tower_run_rows(const td_tower_run *run) {
  return run->rows;
}
