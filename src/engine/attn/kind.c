// src/engine/attn/kind.c - kinds of attention: their cache, buffers, cost and description.
#include "engine/attn/kind.h"

#include "engine/draft.h"

// Scores and sums of n tokens after n_past with the keys up to their own; dims: of a head's key and
// value together.
static double pair_flops(uint32_t n_heads, double dims, double n, double n_past) {
  const double pairs = n * (n_past + n / 2);
  return 2 * pairs * n_heads * dims;
}

static size_t larger(size_t a, size_t b) {
  return a > b ? a : b;
}

// ---- grouped-query attention --------------------------------------------------------------------

enum { gqa_min_chunk = 512, gqa_has_gpu = true, gqa_not_f8 = 0 };

static td_attn_cache gqa_cache(const td_model_config *c) {
  const uint32_t kv_dim = c->n_kv_heads * c->head_dim;
  return (td_attn_cache){.entry = {[TD_ACT_K] = kv_dim, [TD_ACT_V] = kv_dim},
                         .f8 = {.n = 2 * c->n_kv_heads, .dim = c->head_dim},
                         .may_leave = true};
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

enum { blocks_min_chunk = 512, blocks_has_gpu = true };
static const char blocks_not_f8[] = "attention to blocks that an indexer selects";

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

// ---- grouped-query attention over selected groups of keys ---------------------------------------

enum { groups_min_chunk = 512, groups_has_gpu = true };
static const char groups_not_f8[] = "attention to groups of keys that an indexer selects";
enum { RUNNING = 3 }; // numbers a channel that is being pooled has

size_t td_attn_open_floats(const td_model_config *c) {
  return (size_t)RUNNING * c->index_dim;
}

static void add_pooled_keys(const td_model_config *c, td_attn_cache *out) {
  out->is_beside = true;
  out->state_bytes = out->undo_bytes = td_attn_open_floats(c) * sizeof(float);
  out->pool_group = c->index_group;
  out->pool_bytes = c->index_dim * sizeof(float);
}

static td_attn_cache groups_cache(const td_model_config *c) {
  td_attn_cache out = gqa_cache(c);
  out.may_leave = false;
  add_pooled_keys(c, &out);
  return out;
}

static td_attn_rows groups_rows(const td_model_config *c) {
  td_attn_rows out = gqa_rows(c);
  out.act[TD_ACT_Q_A] = (size_t)c->index_heads * c->index_dim;
  out.words = (size_t)c->index_top_k + c->index_dim; // a key
  return out;
}

// With the scores of all pooled keys.
static double groups_flops(const td_model_config *c, double n, double n_past) {
  const double most = (double)td_most_selected(c->index_top_k, c->index_group);
  const double seen = n_past + n / 2;
  return pair_flops(c->index_heads, c->index_dim, n, n_past) / c->index_group +
         4 * n * (seen < most ? seen : most) * c->n_heads * c->head_dim;
}

static void describe_groups(const td_model_config *c, td_attn_kind kind, td_buf *out) {
  td_buf_printf(
      out,
      "selection     %u groups of %u keys for a token, by %u heads, %u wide, in %u of the "
      "%u layers\n",
      c->index_top_k, c->index_group, c->index_heads, c->index_dim, td_model_n_attn(c, kind),
      c->n_layers);
}

static void groups_describe(const td_model_config *c, td_buf *out) {
  gqa_describe(c, out);
  describe_groups(c, TD_ATTN_GROUPS, out);
}

// ---- multi-head latent attention ----------------------------------------------------------------

enum { mla_min_chunk = 1024, mla_has_gpu = true, mla_not_f8 = 0 };

static td_attn_cache mla_cache(const td_model_config *c) {
  const uint32_t entry = c->kv_lora_rank + c->rope_dim;
  return (td_attn_cache){.entry = {[TD_ACT_K] = entry},
                         .f8 = {.n = 1, .dim = entry, .n_bf16 = c->rope_dim}};
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
  td_buf_printf(out, "attention     %u heads, MLA: keys and values of rank %u", c->n_heads,
                c->kv_lora_rank);
  if (c->rope_dim)
    td_buf_printf(out, " and %u %s", c->rope_dim, c->has_no_rope ? "shared" : "rotary");
  td_buf_str(out, ", ");
  if (c->q_lora_rank) {
    td_buf_printf(out, "queries of rank %u\n", c->q_lora_rank);
  } else {
    td_buf_str(out, "queries of full rank\n");
  }
}

// ---- latent attention over selected keys --------------------------------------------------------

// Positions that a token sees at most, or nearly.
static double n_selected(const td_model_config *c) {
  return (double)c->index_top_k * (c->index_group ? c->index_group : 1);
}

enum { dsa_min_chunk = mla_min_chunk, dsa_has_gpu = true };
enum { dsa_shared_min_chunk = mla_min_chunk, dsa_shared_has_gpu = true };
static const char dsa_not_f8[] = "attention to keys that an indexer selects";
#define dsa_shared_not_f8 dsa_not_f8
// Layers without an indexer of their own attend to what an earlier one selected.
#define dsa_shared_cache mla_cache
#define dsa_shared_rows  mla_rows

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

// Beyond n_selected positions a token's attention is absorbed, over so many latents.
static double dsa_shared_flops(const td_model_config *c, double n, double n_past) {
  const double most = n_selected(c), left = n_past < most ? most - n_past : 0;
  const double n_dense = left < n ? left : n, entry = (double)c->kv_lora_rank + c->rope_dim;
  return (n_dense > 0 ? mla_flops(c, n_dense, n_past) : 0) +
         2 * (n - n_dense) * most * c->n_heads * (entry + c->kv_lora_rank);
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

static void dsa_shared_describe(const td_model_config *c, td_buf *out) {
  (void)c, (void)out; // dsa_describe counts them
}

// ---- latent attention over selected groups of keys ----------------------------------------------

enum { dsa_pool_min_chunk = mla_min_chunk, dsa_pool_has_gpu = true };
static const char dsa_pool_not_f8[] = "attention to groups of keys that an indexer selects";

static td_attn_cache dsa_pool_cache(const td_model_config *c) {
  td_attn_cache out = mla_cache(c);
  add_pooled_keys(c, &out);
  return out;
}

static td_attn_rows dsa_pool_rows(const td_model_config *c) {
  td_attn_rows out = dsa_rows(c);
  out.words += 2 * (size_t)c->index_dim; // keys and gates
  return out;
}

// With the scores of all pooled keys.
static double dsa_pool_flops(const td_model_config *c, double n, double n_past) {
  return pair_flops(c->index_heads, c->index_dim, n, n_past) / c->index_group +
         dsa_shared_flops(c, n, n_past);
}

static void dsa_pool_describe(const td_model_config *c, td_buf *out) {
  mla_describe(c, out);
  describe_groups(c, TD_ATTN_DSA_POOL, out);
}

// ---- gated delta nets ---------------------------------------------------------------------------

enum { delta_min_chunk = 512, delta_has_gpu = true, delta_not_f8 = 0 }; // the state is F32

td_delta_shape td_attn_delta_shape(const td_model_config *c) {
  return (td_delta_shape){.n_k_heads = c->delta_k_heads,
                          .n_v_heads = c->delta_v_heads,
                          .k_dim = c->delta_k_dim,
                          .v_dim = c->delta_v_dim,
                          .n_taps = c->delta_taps,
                          .is_tiled = c->delta_tiled,
                          .by_channel = c->delta_by_channel};
}

td_ngram_places td_attn_ngram_places(const td_model_config *c) {
  const td_delta_shape shape = td_attn_delta_shape(c);
  td_ngram_places out = {.rows = td_delta_state_bytes(&shape) / sizeof(float)};
  out.ids = out.end = out.rows;
  if (!c->ngram_size) return out;
  const size_t n_past = td_ngram_past(c->ngram_taps, c->ngram_size);
  out.ids += n_past * c->n_streams * c->dim;
  out.end = out.ids + c->ngram_size - 1;
  return out;
}

static td_attn_cache delta_cache(const td_model_config *c) {
  const size_t n_bytes = td_attn_ngram_places(c).end * sizeof(float);
  return (td_attn_cache){.state_bytes = n_bytes, .undo_bytes = n_bytes};
}

static td_attn_rows delta_rows(const td_model_config *c) {
  const td_delta_shape shape = td_attn_delta_shape(c);
  const size_t values = (size_t)c->delta_v_heads * c->delta_v_dim;
  const size_t channels = td_delta_channels(&shape);
  const size_t inputs = channels + values + 2 * (size_t)c->delta_v_heads;
  return (td_attn_rows){.act = {[TD_ACT_Q] = channels,
                                [TD_ACT_OUT] = values,
                                [TD_ACT_MIXED] = larger(inputs, c->ngram_size ? c->ngram_dim : 0)},
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
  if (!c->ngram_size) return;
  uint32_t n = 0;
  for (uint32_t i = 0; i < c->n_layers; i++)
    n += td_layers_have(c->ngram_layers, i);
  td_buf_printf(
      out, "n-grams       of up to %u tokens, %u rows of a table each, in %u of the %u layers\n",
      c->ngram_size, c->ngram_heads, n, c->n_layers);
}

// ---- Kimi delta attention -----------------------------------------------------------------------

enum { kda_min_chunk = delta_min_chunk, kda_has_gpu = true, kda_not_f8 = 0 };

#define kda_cache delta_cache
#define kda_flops delta_flops

// Inputs as of a delta net, the decays' own and those of both gates of low rank, as wide as a head.
static td_attn_rows kda_rows(const td_model_config *c) {
  const td_delta_shape shape = td_attn_delta_shape(c);
  td_attn_rows out = delta_rows(c);
  const size_t decays = (size_t)shape.n_v_heads * td_delta_decays(&shape);
  out.act[TD_ACT_MIXED] += decays + 2 * (size_t)shape.v_dim;
  out.words = decays + shape.n_v_heads;
  return out;
}

static void kda_describe(const td_model_config *c, td_buf *out) {
  td_buf_printf(out,
                "delta nets    in %u of the %u layers instead: %u heads, %u wide, with a decay for "
                "each channel\n",
                td_model_n_attn(c, TD_ATTN_KDA), c->n_layers, c->delta_v_heads, c->delta_v_dim);
}

// ---- a window and pooled keys -------------------------------------------------------------------

enum { near_min_chunk = 512, near_has_gpu = true };
enum { pool_min_chunk = 512, pool_has_gpu = true };
enum { pool_top_min_chunk = 512, pool_top_has_gpu = true };
static const char near_not_f8[] = "a window beside pooled keys";
#define pool_not_f8     near_not_f8
#define pool_top_not_f8 near_not_f8

td_pool_places td_attn_pool_places(const td_model_config *c, td_attn_kind kind,
                                   uint32_t page_tokens) {
  td_pool_places out = {.ring = c->window + TD_DRAFT_MAX};
  out.open = (size_t)out.ring * c->head_dim;
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
                         .pool_bytes = key * sizeof(float),
                         .undo_at = at.open * sizeof(float),
                         .undo_bytes = (at.entries - at.open) * sizeof(float)};
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

// ---- all kinds ----------------------------------------------------------------------------------

// In the order of the fields, so that a kind without one of them does not compile.
static const td_attn_spec kinds[] = {
#define TD_ATTN_ROW(KIND, name)                                                                    \
  [TD_ATTN_##KIND] = {name##_cache,     name##_rows,    name##_flops, name##_describe,             \
                      name##_min_chunk, name##_has_gpu, name##_not_f8},
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

uint32_t td_attn_cache_elements(const td_attn_cache *cache) {
  uint32_t n = 0;
  for (size_t i = 0; i < TD_N_ENTRIES; i++)
    n += cache->entry[i];
  return n;
}

size_t td_attn_cache_bytes(const td_attn_cache *cache, td_dtype kv_dtype) {
  return kv_dtype == TD_F8E4M3 ? td_kv_f8_token_bytes(&cache->f8)
                               : td_attn_cache_elements(cache) * td_dtype_bytes(kv_dtype);
}

td_status td_attn_check_kv(const td_model_config *c, td_dtype kv_dtype, td_err *err) {
  enum { RUN = 16 }; // codes that are loaded at once
  if (kv_dtype == TD_F32 || kv_dtype == TD_F16) return TD_OK;
  if (kv_dtype != TD_F8E4M3) {
    return td_fail(err, TD_EINVAL, "KV pages in %s: they are in F32, F16 or FP8",
                   td_dtype_name(kv_dtype));
  }
  for (uint32_t i = 0; i < c->n_layers; i++) {
    const td_attn_spec *kind = td_attn_of(c, i);
    if (kind->not_f8) {
      return td_fail(err, TD_EUNSUPPORTED,
                     "--kv-dtype fp8: %s has %s, whose pages are not in FP8: give f16 or f32",
                     c->arch_name, kind->not_f8);
    }
    const td_kv_rows rows = kind->cache(c).f8;
    if (td_kv_f8_codes(&rows) % RUN || rows.n_bf16 % (RUN / 2)) {
      return td_fail(err, TD_EUNSUPPORTED,
                     "--kv-dtype fp8: %s has keys and values of %u elements, %u of them rotary, "
                     "and FP8 takes %d at a time: give f16 or f32",
                     c->arch_name, rows.dim, rows.n_bf16, RUN);
    }
  }
  return TD_OK;
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

uint32_t td_attn_min_chunk(const td_model_config *c) {
  uint32_t n = 0;
  for (size_t k = 0; k < TD_COUNT(kinds); k++)
    if (has_kind(c, k) && kinds[k].min_chunk > n) n = kinds[k].min_chunk;
  return n;
}

bool td_attn_is_tiled(const td_model_config *config, uint32_t layer_idx) {
  const td_attn_kind kind = td_model_attn(config, layer_idx);
  return kind == TD_ATTN_GQA || kind == TD_ATTN_MLA;
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
