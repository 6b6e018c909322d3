// src/engine/attn/kind.c - kinds of attention: their cache, buffers, cost and description.
#include "engine/attn/kind.h"

// Scores and sums of n tokens after n_past with the keys up to their own; dims: of a head's key and
// value together.
static double pair_flops(uint32_t n_heads, double dims, double n, double n_past) {
  const double pairs = n * (n_past + n / 2);
  return 2 * pairs * n_heads * dims;
}

// ---- grouped-query attention --------------------------------------------------------------------

enum { gqa_least_chunk = 512, gqa_has_gpu = true };

static td_attn_cache gqa_cache(const td_model_config *c) {
  const uint32_t kv_dim = c->n_kv_heads * c->head_dim;
  return (td_attn_cache){.entry = {[TD_ACT_K] = kv_dim, [TD_ACT_V] = kv_dim}, .may_leave = true};
}

static td_attn_rows gqa_rows(const td_model_config *c) {
  const size_t heads = (size_t)c->n_heads * c->head_dim;
  return (td_attn_rows){.act = {[TD_ACT_Q] = heads,
                                [TD_ACT_OUT] = heads,
                                [TD_ACT_MIXED] = c->has_attn_gate ? 2 * heads : 0}};
}

static double gqa_flops(const td_model_config *c, double n, double n_past) {
  return pair_flops(c->n_heads, c->head_dim + c->head_dim, n, n_past);
}

static void gqa_describe(const td_model_config *c, td_buf *out) {
  uint32_t n_windows = 0;
  for (uint32_t i = 0; i < c->n_layers; i++)
    n_windows += td_model_window(c, i) > 0;
  td_buf_printf(out, "attention     %u heads, GQA: %u of keys and values, %u wide", c->n_heads,
                c->n_kv_heads, c->head_dim);
  if (c->rope_dim < c->head_dim) td_buf_printf(out, ", %u rotary", c->rope_dim);
  if (n_windows) {
    td_buf_printf(out, ", %u positions in %u of the %u layers", c->window, n_windows, c->n_layers);
  }
  td_buf_str(out, "\n");
}

// ---- grouped-query attention over selected blocks -----------------------------------------------

enum { blocks_least_chunk = 512, blocks_has_gpu = false };

static td_attn_cache blocks_cache(const td_model_config *c) {
  td_attn_cache out = gqa_cache(c);
  out.entry[TD_ACT_INDEX] = c->index_dim;
  return out;
}

static td_attn_rows blocks_rows(const td_model_config *c) {
  td_attn_rows out = gqa_rows(c);
  out.act[TD_ACT_MIXED] = (size_t)c->index_heads * c->index_dim;
  out.words = (size_t)c->index_heads * c->index_top_blocks;
  return out;
}

// With the scores of all keys.
static double blocks_flops(const td_model_config *c, double n, double n_past) {
  const double most = (double)c->index_top_blocks * c->index_block, seen = n_past + n / 2;
  return pair_flops(c->index_heads, c->index_dim, n, n_past) +
         4 * n * (seen < most ? seen : most) * c->n_heads * c->head_dim;
}

static void blocks_describe(const td_model_config *c, td_buf *out) {
  if (!td_model_n_attn(c, TD_ATTN_GQA)) gqa_describe(c, out);
  td_buf_printf(out,
                "selection     %u blocks of %u keys for a token and KV head, by heads %u wide, in "
                "%u of the %u layers\n",
                c->index_top_blocks, c->index_block, c->index_dim,
                td_model_n_attn(c, TD_ATTN_BLOCKS), c->n_layers);
}

// ---- multi-head latent attention ----------------------------------------------------------------

enum { mla_least_chunk = 1024, mla_has_gpu = true };

static td_attn_cache mla_cache(const td_model_config *c) {
  return (td_attn_cache){.entry = {[TD_ACT_K] = c->kv_lora_rank + c->rope_dim}};
}

static td_attn_rows mla_rows(const td_model_config *c) {
  return (td_attn_rows){.act = {[TD_ACT_Q] = (size_t)c->n_heads * (c->nope_dim + c->rope_dim),
                                [TD_ACT_Q_A] = c->q_lora_rank,
                                [TD_ACT_OUT] = (size_t)c->n_heads * c->v_dim}};
}

double td_attn_expand_flops(const td_model_config *c, double n_past) {
  return 2.0 * n_past * c->kv_lora_rank * c->n_heads * (c->nope_dim + c->v_dim);
}

static double mla_flops(const td_model_config *c, double n, double n_past) {
  return pair_flops(c->n_heads, (double)(c->nope_dim + c->rope_dim) + c->v_dim, n, n_past) +
         td_attn_expand_flops(c, n_past);
}

static void mla_describe(const td_model_config *c, td_buf *out) {
  td_buf_printf(out, "attention     %u heads, MLA: keys and values of rank %u and %u rotary, ",
                c->n_heads, c->kv_lora_rank, c->rope_dim);
  if (c->q_lora_rank) {
    td_buf_printf(out, "queries of rank %u\n", c->q_lora_rank);
  } else {
    td_buf_str(out, "queries of full rank\n");
  }
}

// ---- latent attention over selected keys --------------------------------------------------------

enum { dsa_least_chunk = mla_least_chunk, dsa_has_gpu = true };
enum { dsa_shared_least_chunk = mla_least_chunk, dsa_shared_has_gpu = true };

static td_attn_cache dsa_cache(const td_model_config *c) {
  td_attn_cache out = mla_cache(c);
  out.entry[TD_ACT_V] = c->index_dim;
  return out;
}

static td_attn_rows dsa_rows(const td_model_config *c) {
  td_attn_rows out = mla_rows(c);
  out.act[TD_ACT_MIXED] = (size_t)c->index_heads * c->index_dim;
  out.words = (size_t)c->index_top_k + c->index_heads;
  return out;
}

// Beyond index_top_k positions a token's attention is absorbed, over so many latents.
static double dsa_shared_flops(const td_model_config *c, double n, double n_past) {
  const double left = n_past < c->index_top_k ? c->index_top_k - n_past : 0;
  const double n_dense = left < n ? left : n, entry = (double)c->kv_lora_rank + c->rope_dim;
  return (n_dense > 0 ? mla_flops(c, n_dense, n_past) : 0) +
         2 * (n - n_dense) * c->index_top_k * c->n_heads * (entry + c->kv_lora_rank);
}

// With the scores of all keys.
static double dsa_flops(const td_model_config *c, double n, double n_past) {
  return pair_flops(c->index_heads, c->index_dim, n, n_past) + dsa_shared_flops(c, n, n_past);
}

static void dsa_describe(const td_model_config *c, td_buf *out) {
  mla_describe(c, out);
  td_buf_printf(
      out, "selection     %u keys for a token, by %u heads, %u wide, in %u of the %u layers\n",
      c->index_top_k, c->index_heads, c->index_dim, td_model_n_attn(c, TD_ATTN_DSA), c->n_layers);
}

// Layers without an indexer of their own attend to what an earlier one selected.
static td_attn_cache dsa_shared_cache(const td_model_config *c) {
  return mla_cache(c);
}

static td_attn_rows dsa_shared_rows(const td_model_config *c) {
  return mla_rows(c);
}

static void dsa_shared_describe(const td_model_config *c, td_buf *out) {
  (void)c, (void)out; // dsa_describe counts them
}

// ---- gated delta nets ---------------------------------------------------------------------------

enum { delta_least_chunk = 512, delta_has_gpu = true };

td_delta_shape td_attn_delta_shape(const td_model_config *c) {
  return (td_delta_shape){.n_k_heads = c->delta_k_heads,
                          .n_v_heads = c->delta_v_heads,
                          .k_dim = c->delta_k_dim,
                          .v_dim = c->delta_v_dim,
                          .n_taps = c->delta_taps,
                          .is_tiled = c->delta_tiled};
}

static td_attn_cache delta_cache(const td_model_config *c) {
  const td_delta_shape shape = td_attn_delta_shape(c);
  return (td_attn_cache){.state_bytes = td_delta_state_bytes(&shape)};
}

static td_attn_rows delta_rows(const td_model_config *c) {
  const td_delta_shape shape = td_attn_delta_shape(c);
  const size_t values = (size_t)c->delta_v_heads * c->delta_v_dim;
  const size_t channels = td_delta_channels(&shape);
  return (td_attn_rows){.act = {[TD_ACT_Q] = channels,
                                [TD_ACT_OUT] = values,
                                [TD_ACT_MIXED] = channels + values + 2 * (size_t)c->delta_v_heads},
                        .words = 2 * (size_t)c->delta_v_heads};
}

// 7 for each element of the states.
static double delta_flops(const td_model_config *c, double n, double n_past) {
  (void)n_past;
  return 7.0 * n * c->delta_v_heads * c->delta_k_dim * c->delta_v_dim;
}

static void delta_describe(const td_model_config *c, td_buf *out) {
  td_buf_printf(out,
                "delta nets    in %u of the %u layers instead: %u heads of keys, %u of values, "
                "%u and %u wide\n",
                td_model_n_attn(c, TD_ATTN_DELTA), c->n_layers, c->delta_k_heads, c->delta_v_heads,
                c->delta_k_dim, c->delta_v_dim);
}

// ---- a window and pooled keys -------------------------------------------------------------------

enum { near_least_chunk = 512, near_has_gpu = true };
enum { pool_least_chunk = 512, pool_has_gpu = true };
enum { pool_top_least_chunk = 512, pool_top_has_gpu = true };
enum { RUNNING = 3 }; // numbers a channel that is being pooled has

td_pool_places td_attn_pool_places(const td_model_config *c, td_attn_kind kind,
                                   uint32_t page_tokens) {
  td_pool_places out = {.open = (size_t)c->window * c->head_dim};
  const bool is_top = kind == TD_ATTN_POOL_TOP;
  if (kind != TD_ATTN_NEAR) out.group = is_top ? c->pool_top_group : c->pool_group;
  const uint32_t n_open = is_top ? 2 : out.group ? 1 : 0;
  out.index_open = out.open + (size_t)n_open * RUNNING * c->head_dim;
  out.entries = out.index_open + (is_top ? (size_t)n_open * RUNNING * c->index_dim : 0);
  out.index_entries = out.entries;
  if (is_top) out.index_entries += (size_t)td_pool_entries(page_tokens, out.group) * c->head_dim;
  return out;
}

static td_attn_cache pooled_cache(const td_model_config *c, td_attn_kind kind) {
  const td_pool_places at = td_attn_pool_places(c, kind, 1);
  const uint32_t key = c->head_dim + (kind == TD_ATTN_POOL_TOP ? c->index_dim : 0);
  return (td_attn_cache){.state_bytes = at.entries * sizeof(float),
                         .pool_group = at.group,
                         .pool_bytes = key * sizeof(float)};
}

static td_attn_cache near_cache(const td_model_config *c) {
  return pooled_cache(c, TD_ATTN_NEAR);
}

static td_attn_cache pool_cache(const td_model_config *c) {
  return pooled_cache(c, TD_ATTN_POOL);
}

static td_attn_cache pool_top_cache(const td_model_config *c) {
  return pooled_cache(c, TD_ATTN_POOL_TOP);
}

static td_attn_rows near_rows(const td_model_config *c) {
  return (td_attn_rows){.act = {[TD_ACT_Q] = (size_t)c->n_heads * c->head_dim,
                                [TD_ACT_Q_A] = c->q_lora_rank,
                                [TD_ACT_OUT] = (size_t)c->o_groups * c->o_lora_rank,
                                [TD_ACT_MIXED] = c->head_dim}};
}

static td_attn_rows pool_rows(const td_model_config *c) {
  td_attn_rows out = near_rows(c);
  out.words = 2 * (size_t)c->head_dim;
  return out;
}

static td_attn_rows pool_top_rows(const td_model_config *c) {
  td_attn_rows out = near_rows(c);
  out.act[TD_ACT_MIXED] += c->index_heads * (size_t)c->index_dim;
  out.words = 4 * ((size_t)c->head_dim + c->index_dim) + c->index_top_k + c->index_heads;
  return out;
}

static double near_flops(const td_model_config *c, double n, double n_past) {
  const double seen = n_past + n / 2 < c->window ? n_past + n / 2 : c->window;
  return 4 * n * seen * c->n_heads * c->head_dim;
}

static double pool_flops(const td_model_config *c, double n, double n_past) {
  return near_flops(c, n, n_past) +
         pair_flops(c->n_heads, 2.0 * c->head_dim, n, n_past) / c->pool_group;
}

static double pool_top_flops(const td_model_config *c, double n, double n_past) {
  const double seen = (n_past + n / 2) / c->pool_top_group;
  const double n_top = seen < c->index_top_k ? seen : c->index_top_k;
  return near_flops(c, n, n_past) + 4 * n * n_top * c->n_heads * c->head_dim +
         pair_flops(c->index_heads, c->index_dim, n, n_past) / c->pool_top_group;
}

static void describe_window(const td_model_config *c, td_buf *out) {
  td_buf_printf(out,
                "attention     %u heads, one key and value, %u wide, %u rotary, of the last %u "
                "positions\n",
                c->n_heads, c->head_dim, c->rope_dim, c->window);
}

static void near_describe(const td_model_config *c, td_buf *out) {
  td_buf_printf(out, "window        alone in %u of the %u layers\n",
                td_model_n_attn(c, TD_ATTN_NEAR), c->n_layers);
}

static void pool_describe(const td_model_config *c, td_buf *out) {
  td_buf_printf(out, "pooled keys   of %u positions each, in %u of the %u layers\n", c->pool_group,
                td_model_n_attn(c, TD_ATTN_POOL), c->n_layers);
}

static void pool_top_describe(const td_model_config *c, td_buf *out) {
  td_buf_printf(out,
                "selection     %u pooled keys of %u positions each, by %u heads, %u wide, in %u of "
                "the %u layers\n",
                c->index_top_k, c->pool_top_group, c->index_heads, c->index_dim,
                td_model_n_attn(c, TD_ATTN_POOL_TOP), c->n_layers);
}

// ---- of any kind --------------------------------------------------------------------------------

// In the order of the fields, so that a kind without one of them does not compile.
static const td_attn_spec kinds[] = {
#define TD_ATTN_ROW(KIND, name)                                                                    \
  [TD_ATTN_##KIND] = {name##_cache,    name##_rows,        name##_flops,                           \
                      name##_describe, name##_least_chunk, name##_has_gpu},
    TD_ATTN_KINDS(TD_ATTN_ROW)
#undef TD_ATTN_ROW
};

const td_attn_spec *td_attn_of(const td_model_config *c, uint32_t layer_idx) {
  return &kinds[td_model_attn(c, layer_idx)];
}

static bool has_kind(const td_model_config *c, td_attn_kind kind) {
  return td_model_n_attn(c, kind) > 0;
}

bool td_attn_has_states(const td_model_config *c) {
  for (uint32_t i = 0; i < c->n_layers; i++)
    if (td_attn_of(c, i)->cache(c).state_bytes) return true;
  return false;
}

bool td_attn_rolls_back(const td_model_config *c) {
  for (uint32_t i = 0; i < c->n_layers; i++) {
    if (td_attn_of(c, i)->cache(c).state_bytes && td_model_attn(c, i) != TD_ATTN_DELTA)
      return false;
  }
  return td_attn_has_states(c);
}

uint32_t td_attn_cache_elements(const td_attn_cache *cache) {
  uint32_t n = 0;
  for (size_t i = 0; i < TD_N_ENTRIES; i++)
    n += cache->entry[i];
  return n;
}

static size_t larger(size_t a, size_t b) {
  return a > b ? a : b;
}

td_attn_rows td_attn_rows_of(const td_model_config *c) {
  td_attn_rows out = {.words = 0};
  for (size_t k = 0; k < TD_COUNT(kinds); k++) {
    if (!has_kind(c, k)) continue;
    td_attn_rows rows = kinds[k].rows(c);
    const td_attn_cache cache = kinds[k].cache(c);
    for (size_t i = 0; i < TD_N_ENTRIES; i++)
      rows.act[i] = cache.entry[i];
    for (size_t i = 0; i < TD_N_ACTS; i++)
      out.act[i] = larger(out.act[i], rows.act[i]);
    out.words = larger(out.words, rows.words);
  }
  return out;
}

uint32_t td_attn_least_chunk(const td_model_config *c) {
  uint32_t n = 0;
  for (size_t k = 0; k < TD_COUNT(kinds); k++)
    if (has_kind(c, k) && kinds[k].least_chunk > n) n = kinds[k].least_chunk;
  return n;
}

bool td_attn_has_gpu(const td_model_config *c) {
  for (uint32_t i = 0; i < c->n_layers; i++)
    if (!td_attn_of(c, i)->has_gpu) return false;
  return true;
}

void td_attn_describe(const td_model_config *c, td_buf *out) {
  if (c->pool_theta > 0) describe_window(c, out);
  for (size_t k = 0; k < TD_COUNT(kinds); k++)
    if (has_kind(c, k)) kinds[k].describe(c, out);
}
