// src/engine/attn/kind.c - what follows from the kinds of attention of a model's layers.
#include "engine/attn/kind.h"

#include "base/log.h"
#include "engine/attn/ops.h"

static const td_attn_ops *const kinds[] = {
#define TD_ATTN_ROW(KIND, name) [TD_ATTN_##KIND] = &td_attn_##name,
    TD_ATTN_KINDS(TD_ATTN_ROW)
#undef TD_ATTN_ROW
};

const td_attn_ops *td_attn_ops_of(const td_model_config *c, uint32_t layer_idx) {
  return kinds[td_model_attn(c, layer_idx)];
}

const td_attn_spec *td_attn_of(const td_model_config *c, uint32_t layer_idx) {
  return &td_attn_ops_of(c, layer_idx)->spec;
}

double td_attn_pair_flops(uint32_t n_heads, double dims, double n, double n_past) {
  const double pairs = n * (n_past + n / 2);
  return 2 * pairs * n_heads * dims;
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
  uint32_t n_elements = 0;
  for (uint32_t i = 0; i < c->n_layers && kv_dtype == TD_F16; i++) {
    const td_attn_cache cache = td_attn_of(c, i)->cache(c);
    n_elements += td_attn_cache_elements(&cache);
  }
  if (kv_dtype == TD_F16 && !n_elements) {
    td_warn("--kv-dtype f16 changes nothing: all that %s keeps of a context is F32 states",
            c->arch_name);
  }
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
    td_attn_rows rows = kinds[k]->spec.rows(c);
    const td_attn_cache cache = kinds[k]->spec.cache(c);
    for (size_t i = 0; i < TD_N_ENTRIES; i++)
      rows.act[i] = cache.entry[i];
    for (size_t i = 0; i < TD_N_ACTS; i++)
      out.act[i] = rows.act[i] > out.act[i] ? rows.act[i] : out.act[i];
    out.words = rows.words > out.words ? rows.words : out.words;
  }
  return out;
}

uint32_t td_attn_min_chunk(const td_model_config *c) {
  uint32_t n = 0;
  for (size_t k = 0; k < TD_COUNT(kinds); k++)
    if (has_kind(c, k) && kinds[k]->spec.min_chunk > n) n = kinds[k]->spec.min_chunk;
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
  if (c->pool_theta > 0) td_attn_describe_window(c, out);
  for (size_t k = 0; k < TD_COUNT(kinds); k++)
    if (has_kind(c, k)) kinds[k]->spec.describe(c, out);
}
