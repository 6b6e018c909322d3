// src/engine/draft_head.c - the output matrix in 4 bits, for guesses.
// Of models with large vocabularies the published matrix takes as long as several layers, and every
// guess reads it. A wrong guess costs time and never a text, so its best tokens are found in fewer
// bits: TD_I4, whose kernels keep up with memory, where those of GGUF's blocks do not.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/thread_pool.h"
#include "engine/attn/kind.h"
#include "engine/engine_impl.h"
#include "tandem/kernels.h"

enum { GROUP = 32, GROUP_BYTES = GROUP / 2, SCALE_BYTES = 2 }; // of a scale, F16

static int code_of(float x) {
  return x < 15 ? x > 0 ? (int)x : 0 : 15; // not a number: 15
}

// The codes of a group, and its scale: (code - 8) * scale. The largest value gets the code 0.
static float encode_group(uint8_t *codes, const float *x) {
  float most = 0;
  for (uint32_t i = 0; i < GROUP; i++)
    most = fabsf(x[i]) > fabsf(most) ? x[i] : most;
  const float scale = most / -8, inverse = scale != 0 ? 1 / scale : 0;
  for (uint32_t i = 0; i < GROUP; i += 2) {
    const int low = code_of(x[i] * inverse + 8.5f), high = code_of(x[i + 1] * inverse + 8.5f);
    codes[i / 2] = (uint8_t)(low | high << 4);
  }
  return scale;
}

typedef struct {
  const td_weight *from;
  uint8_t *codes;
  uint16_t *scales;
  float *rows; // a row and its scales for each member
} encoding;

static size_t scratch_floats(uint32_t cols) {
  return cols + (size_t)cols / GROUP;
}

static void encode_rows(void *ctx, unsigned member, unsigned n_members) {
  const encoding *e = ctx;
  const uint32_t n_rows = e->from->rows, cols = e->from->cols;
  const size_t n_groups = cols / GROUP;
  float *row = e->rows + member * scratch_floats(cols), *scales = row + cols;
  const uint32_t begin = (uint32_t)((uint64_t)n_rows * member / n_members);
  const uint32_t end = (uint32_t)((uint64_t)n_rows * (member + 1) / n_members);
  for (uint32_t r = begin; r < end; r++) {
    td_kernels()->decode_row(&(td_decode_row_args){.w = e->from, .out = row, .row = r});
    for (uint32_t i = 0; i < n_groups; i++)
      scales[i] = encode_group(e->codes + (r * n_groups + i) * GROUP_BYTES, row + i * GROUP);
    td_kernels()->f16_from_f32(
        &(td_convert_args){.in = scales, .out = e->scales + r * n_groups, .n = n_groups});
  }
}

// 0: the matrix is used as it is.
static uint64_t few_bits_bytes(const td_weight *head) {
  const bool is_wide = head->dtype == TD_F32 || head->dtype == TD_BF16 || head->dtype == TD_F16;
  if (!is_wide || head->cols % GROUP) return 0;
  return (uint64_t)head->rows * (head->cols / GROUP) * (GROUP_BYTES + SCALE_BYTES);
}

size_t td_engine_draft_token_bytes(const td_model_config *c, td_dtype act_dtype) {
  return 2 * td_engine_row(c) * td_dtype_bytes(act_dtype);
}

uint64_t td_engine_draft_bytes(const td_model *model, bool is_host, const td_engine_opts *opts) {
  const td_model_config *c = td_model_config_of(model);
  const uint64_t of_token = td_engine_draft_token_bytes(c, is_host ? TD_F32 : TD_BF16);
  const uint64_t logits = (uint64_t)opts->max_drafts * c->n_vocab * sizeof(float);
  uint64_t n = td_kv_trail_bytes(c, opts->max_drafts);
  n += logits + (is_host ? logits : opts->max_drafts * sizeof(td_top_logits)); // see grow_logits
  if (!opts->has_draft_layer) return n;
  n += of_token * opts->max_step_tokens + of_token / 2 * opts->max_step_seqs;
  return n + (is_host && opts->max_drafts ? few_bits_bytes(td_model_lm_head(model)) : 0);
}

uint64_t td_engine_draft_head_bytes(const td_model *model) {
  const td_weight *head = td_model_lm_head(model);
  const uint64_t n_bytes = few_bits_bytes(head);
  return n_bytes ? n_bytes : td_weight_bytes(head);
}

td_status td_draft_head_open(td_engine *e, td_err *err) {
  const td_weight *head = td_model_lm_head(e->model);
  const bool is_host = td_dev_free_vram_bytes(e->dev) == 0;
  const size_t n_bytes = few_bits_bytes(head);
  e->draft_head = *head;
  if (!is_host || !e->opts.max_drafts || !n_bytes) return TD_OK;
  td_thread_pool *pool;
  td_status st = td_thread_pool_open(&pool, &(td_thread_pool_opts){0}, err);
  if (st != TD_OK) return st;
  encoding to = {.from = head};
  to.rows = malloc(td_thread_pool_size(pool) * scratch_floats(head->cols) * sizeof *to.rows);
  st = to.rows ? td_dev_alloc(e->dev, &e->draft_head_memory, n_bytes, err)
               : td_fail(err, TD_ENOMEM, "out of memory: the output matrix of guesses");
  if (st == TD_OK) {
    to.codes = e->draft_head_memory;
    to.scales = (uint16_t *)(void *)(to.codes + (size_t)head->rows * head->cols / 2);
    td_thread_pool_run(pool, encode_rows, &to);
    e->draft_head = (td_weight){.data = to.codes,
                                .scale = to.scales,
                                .dtype = TD_I4,
                                .scale_dtype = TD_F16,
                                .rows = head->rows,
                                .cols = head->cols,
                                .scale_rows = 1,
                                .scale_cols = GROUP};
  }
  free(to.rows);
  td_thread_pool_close(pool);
  return st;
}
