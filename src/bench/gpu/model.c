// src/bench/gpu/model.c - a synthetic model; see model.h. It has the tensors of the family's table.
// The six tensors of an expert are adjacent, as in published files, and start 16 bytes after a
// cache line.
#include "bench/gpu/model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "model/families/family.h"

enum { BLOCK = 128, ALIGN = 16, N_DENSE = 3, N_LAYERS = 61, FILL_BYTES = 1 << 20 };

// ---- shape --------------------------------------------------------------------------------------

static uint32_t smaller(uint32_t n, uint32_t shrink) {
  return shrink == 1 ? n : (n / shrink / BLOCK + 1) * BLOCK;
}

// The defaults of config.json's keys are those of DeepSeek-V3.
static td_model_config v3_config(uint32_t n_layers, uint32_t shrink) {
  const td_family *family = &td_family_deepseek_v3;
  td_model_config c = family->defaults;
  memset(c.kind, c.attn, sizeof c.kind);
  for (size_t i = 0; i < family->n_keys; i++)
    memcpy((char *)&c + family->keys[i].offset, &family->keys[i].fallback, sizeof(uint32_t));
  c.family = family;
  snprintf(c.arch_name, sizeof c.arch_name, "deepseek_v3");
  c.n_layers = n_layers ? n_layers : N_LAYERS;
  c.n_vocab = smaller(129280, shrink);
  c.dim = smaller(7168, shrink);
  c.n_heads = 128 / shrink > 2 ? 128 / shrink : 2;
  c.max_position = 163840;
  c.rms_eps = 1e-6f;
  c.rope_theta = 10000;
  c.yarn = (td_yarn){.factor = 40,
                     .beta_fast = 32,
                     .beta_slow = 1,
                     .mscale = 1,
                     .mscale_all_dim = 1,
                     .original_max_position = 4096};
  c.q_lora_rank = smaller(c.q_lora_rank, shrink);
  c.kv_lora_rank = 512;
  c.n_experts = 256 / shrink > 16 ? 256 / shrink : 16;
  c.expert_dim = smaller(2048, shrink);
  c.dense_dim = smaller(18432, shrink);
  c.n_mtp_layers = 0;
  c.tie_embeddings = true; // saves one matrix
  memset(c.moe_layers, 0, sizeof c.moe_layers);
  for (uint32_t i = c.n_layers > N_DENSE ? N_DENSE : c.n_layers - 1; i < c.n_layers; i++)
    c.moe_layers[i / 64] |= (uint64_t)1 << i % 64;
  return c;
}

// ---- memory -------------------------------------------------------------------------------------

// Allocates from a block of memory; without a block it only adds up sizes.
typedef struct {
  char *base;
  size_t n_bytes;
  unsigned n_threads; // that fill it
} arena;

typedef struct {
  uint64_t *words, mask, base, seed;
} filling;

static void fill_words(const filling *f, size_t begin, size_t end) {
  uint64_t x = (begin + 1) * 0x9e3779b97f4a7c15u ^ f->seed;
  for (size_t i = begin; i < end; i++) {
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    f->words[i] = (x & f->mask) | f->base;
  }
}

// Fills each 8 bytes with base, with the bits of mask randomized.
static void *take(arena *a, size_t n_bytes, uint64_t mask, uint64_t base) {
  char *out = a->base ? a->base + a->n_bytes : NULL;
  a->n_bytes += (n_bytes + ALIGN - 1) / ALIGN * ALIGN;
  filling f = {(uint64_t *)out, mask, base, a->n_bytes};
  const size_t n_words = out ? (n_bytes + 7) / 8 : 0, step = FILL_BYTES / 8;
#pragma omp parallel for schedule(dynamic, 1) num_threads(a->n_threads)
  for (size_t i = 0; i < n_words; i += step)
    fill_words(&f, i, n_words - i < step ? n_words : i + step);
  return out;
}

// Values of either sign with magnitude 0.5 to 2, times 2^-7, so that products have about x's
// magnitude.
static td_weight fp8_weight(arena *a, uint32_t rows, uint32_t cols) {
  td_weight w = {.dtype = TD_F8E4M3,
                 .rows = rows,
                 .cols = cols,
                 .scale_rows = BLOCK,
                 .scale_cols = BLOCK,
                 .scale_dtype = TD_F32,
                 .global_scale = 1};
  w.data = take(a, td_weight_data_bytes(&w), 0x8f8f8f8f8f8f8f8fu, 0x3030303030303030u);
  w.scale = &w; // any non-NULL value, to get the size
  w.scale = take(a, td_weight_scale_bytes(&w), 0, 0x3c0000003c000000u);
  return w;
}

// Values of either sign with magnitude 2^-7 to 2^-5.
static td_weight bf16_weight(arena *a, uint32_t rows, uint32_t cols) {
  td_weight w = {.dtype = TD_BF16, .rows = rows, .cols = cols, .global_scale = 1};
  w.data = take(a, td_weight_data_bytes(&w), 0x80ff80ff80ff80ffu, 0x3c003c003c003c00u);
  return w;
}

static td_vec ones(arena *a, uint32_t n) {
  return (td_vec){take(a, n * sizeof(float), 0, 0x3f8000003f800000u), TD_F32, n};
}

// ---- layers -------------------------------------------------------------------------------------

static void place_experts(td_gpu_model *m, arena *a, td_layer *layer) {
  const td_model_config *c = &m->config;
  const size_t before = a->n_bytes;
  layer->gate = m->experts;
  layer->up = layer->gate + c->n_experts;
  layer->down = layer->up + c->n_experts;
  for (uint32_t e = 0; e < c->n_experts; e++) { // in the order of tensor names
    layer->down[e] = fp8_weight(a, c->dim, c->expert_dim);
    layer->gate[e] = fp8_weight(a, c->expert_dim, c->dim);
    layer->up[e] = fp8_weight(a, c->expert_dim, c->dim);
  }
  m->layer_bytes = a->n_bytes - before;
}

static void place_tensor(const td_model_config *c, arena *a, const td_tensor_spec *p,
                         void *object) {
  void *field = (char *)object + p->offset;
  const uint32_t rows = td_dim_value(c, p->rows), cols = td_dim_value(c, p->cols);
  switch (p->kind) {
  case TD_SPEC_VEC: *(td_vec *)field = ones(a, rows); return;
  case TD_SPEC_F32: *(const float **)field = take(a, rows * sizeof(float), 0, 0); return;
  case TD_SPEC_WEIGHT: *(td_weight *)field = fp8_weight(a, rows, cols); return;
  case TD_SPEC_EXPERT: return;
  default: *(td_weight *)field = bf16_weight(a, rows, cols); return; // never quantized
  }
}

static void place_layer(td_gpu_model *m, arena *a, uint32_t layer_idx, td_layer *layer) {
  const td_model_config *c = &m->config;
  const unsigned met = td_layer_conditions(c, layer_idx);
  *layer = (td_layer){.is_moe = td_model_is_moe(c, layer_idx), .kind = td_model_attn(c, layer_idx)};
  for (size_t i = 0; i < c->family->n_layer; i++) {
    const td_tensor_spec *p = &c->family->layer[i];
    if (!(p->conditions & ~met)) place_tensor(c, a, p, layer);
  }
  if (layer->is_moe) place_experts(m, a, layer);
}

// One dense layer and one MoE layer, which are used for all layers.
typedef struct {
  td_layer first, last;
  td_weight embed;
  td_vec final_norm;
} distinct;

static void place_all(td_gpu_model *m, arena *a, distinct *d) {
  const td_model_config *c = &m->config;
  if (!td_model_is_moe(c, 0)) place_layer(m, a, 0, &d->first);
  place_layer(m, a, c->n_layers - 1, &d->last);
  d->embed = bf16_weight(a, c->n_vocab, c->dim);
  d->final_norm = ones(a, c->dim);
}

static td_status assemble(td_model **out, const td_gpu_model *m, const td_model_config *c,
                          const distinct *d, td_err *err) {
  td_layer layers[TD_MAX_LAYERS];
  for (uint32_t i = 0; i < c->n_layers; i++)
    layers[i] = td_model_is_moe(c, i) ? d->last : d->first;
  return td_model_assemble(out, c,
                           &(td_model_parts){.layers = layers,
                                             .embed = d->embed,
                                             .final_norm = d->final_norm,
                                             .memory = m->memory,
                                             .n_bytes = m->n_bytes},
                           err);
}

td_status td_gpu_model_open(td_gpu_model *m, uint32_t n_layers, uint32_t shrink, unsigned n_threads,
                            td_err *err) {
  *m = (td_gpu_model){.config = v3_config(n_layers, shrink)};
  if (m->config.n_layers > TD_MAX_LAYERS)
    return td_fail(err, TD_EINVAL, "--layers: at most %d", TD_MAX_LAYERS);
  m->experts = calloc(3 * (size_t)m->config.n_experts, sizeof *m->experts);
  if (!m->experts) return td_fail(err, TD_ENOMEM, "out of memory: tables of experts");
  distinct d;
  arena a = {.n_bytes = ALIGN};
  place_all(m, &a, &d);
  m->n_bytes = a.n_bytes + 64; // padding for vector loads past the end
  m->memory = mmap(NULL, m->n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (m->memory == MAP_FAILED) {
    m->memory = NULL;
    return td_fail(err, TD_ENOMEM, "no memory for %.1f GB of weights", (double)m->n_bytes * 1e-9);
  }
  madvise(m->memory, m->n_bytes, MADV_HUGEPAGE); // as resident weights have, if permitted
  a = (arena){.base = m->memory, .n_bytes = ALIGN, .n_threads = n_threads};
  place_all(m, &a, &d);
  mprotect(m->memory, m->n_bytes, PROT_READ);
  return assemble(&m->model, m, &m->config, &d, err);
}

td_status td_gpu_model_shorter(td_model **out, const td_gpu_model *m, uint32_t n_layers,
                               td_err *err) {
  td_model_config c = m->config;
  const distinct d = {.first = *td_model_layer(m->model, 0),
                      .last = *td_model_layer(m->model, c.n_layers - 1),
                      .embed = *td_model_embed(m->model),
                      .final_norm = td_model_final_norm(m->model)};
  if (n_layers < c.n_layers) c.n_layers = n_layers;
  return assemble(out, m, &c, &d, err);
}

void td_gpu_model_close(td_gpu_model *m) {
  td_model_close(m->model);
  if (m->memory) munmap(m->memory, m->n_bytes);
  free(m->experts);
}
