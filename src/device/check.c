// src/device/check.c - checks of operator arguments that all devices share.
#include "device/check.h"

#include <math.h>

#include "tandem/formats.h"

td_status td_dev_check_weight(const td_weight *w, const char *what, td_err *err) {
  TD_DEV_REQUIRE(w && w->data && w->rows > 0 && w->cols > 0, "%s: the matrix is absent", what);
  const td_weight_kind *kind = td_weight_kind_of(w->dtype);
  TD_DEV_REQUIRE(kind, "%s: no kernel reads %s", what, td_dtype_name(w->dtype));
  TD_DEV_REQUIRE(w->scale ? kind->scale_dtypes >> w->scale_dtype & 1 : !kind->scale_dtypes,
                 "%s: scales of %s do not belong to weights of %s", what,
                 w->scale ? td_dtype_name(w->scale_dtype) : "no dtype", td_dtype_name(w->dtype));
  TD_DEV_REQUIRE(!w->scale || (w->scale_rows > 0 && w->scale_cols > 0), "%s: scale block is empty",
                 what);
  TD_DEV_REQUIRE(td_dtype_bits(w->dtype) != 4 || w->scale_rows == 1,
                 "%s: 4-bit weights of %u rows to a scale", what, w->scale_rows);
  TD_DEV_REQUIRE(w->dtype != TD_F4E2M1 || isfinite(w->global_scale),
                 "%s: its global scale is not finite", what);
  return TD_OK;
}

td_status td_dev_check_vec(const td_vec *v, uint32_t n, const char *what, td_err *err) {
  TD_DEV_REQUIRE(v->data && v->n == n, "%s: %u elements where %u belong", what, v->n, n);
  TD_DEV_REQUIRE(v->dtype == TD_F32 || v->dtype == TD_BF16,
                 "%s: dtype %d; vectors must be F32 or BF16", what, (int)v->dtype);
  return TD_OK;
}

td_status td_dev_check_rmsnorm(const td_rmsnorm_args *a, td_err *err) {
  td_status status = a->w.data ? td_dev_check_vec(&a->w, a->dim, "norm", err) : TD_OK;
  if (status != TD_OK || !a->also.x) return status;
  return td_dev_check_vec(&a->also.w, a->also.dim, "norm of further rows", err);
}

td_status td_dev_check_linear(const td_linear_op_args *a, td_err *err) {
  TD_DEV_REQUIRE(a->n_prompt <= a->n_tokens, "linear: %u of %u tokens are a prompt's", a->n_prompt,
                 a->n_tokens);
  const uint32_t n_rows = a->n_rows ? a->n_rows : a->w->rows;
  TD_DEV_REQUIRE(a->n_tokens <= 1 || (a->x_stride >= a->w->cols && a->y_stride >= n_rows),
                 "linear: strides %zu and %zu are too short for a %u x %u matrix", a->x_stride,
                 a->y_stride, n_rows, a->w->cols);
  TD_DEV_REQUIRE((uint64_t)a->row_begin + n_rows <= a->w->rows && (!a->n_rows || !a->bias.data),
                 "linear: %u rows from %u on, of %u", n_rows, a->row_begin, a->w->rows);
  return a->bias.data ? td_dev_check_vec(&a->bias, a->w->rows, "bias", err) : TD_OK;
}

td_status td_dev_check_router(const td_router_args *a, td_err *err) {
  TD_DEV_REQUIRE(a->top_k > 0 && a->top_k <= a->n_experts, "router: top %u of %u experts", a->top_k,
                 a->n_experts);
  TD_DEV_REQUIRE(!a->table || (a->tokens && a->n_vocab && a->kind == TD_ROUTER_SOFTPLUS),
                 "router: a table without tokens");
  if (a->n_groups > 1) {
    TD_DEV_REQUIRE(
        a->n_experts % a->n_groups == 0 && a->topk_groups > 0 && a->topk_groups <= a->n_groups,
        "router: %u of %u groups over %u experts", a->topk_groups, a->n_groups, a->n_experts);
    TD_DEV_REQUIRE(a->top_k <= a->n_experts / a->n_groups * a->topk_groups,
                   "router: %u groups do not hold %u experts", a->topk_groups, a->top_k);
  }
  return TD_OK;
}

td_status td_dev_check_attn_mla(const td_attn_mla_args *a, td_err *err) {
  TD_DEV_REQUIRE(a->kv_b->cols == a->kv_lora_rank &&
                     a->kv_b->rows == (uint64_t)a->n_heads * (a->nope_dim + a->v_dim),
                 "attention: kv_b is %u x %u, not %u heads of %u + %u over rank %u", a->kv_b->rows,
                 a->kv_b->cols, a->n_heads, a->nope_dim, a->v_dim, a->kv_lora_rank);
  TD_DEV_REQUIRE(!a->selected || a->top_k > 0, "attention: an empty selection");
  TD_DEV_REQUIRE(!a->selected || a->kv.dtype != TD_F8E4M3,
                 "attention: a selection of keys in E4M3 pages");
  return TD_OK;
}

td_status td_dev_check_select(const td_select_args *a, td_err *err) {
  TD_DEV_REQUIRE(a->n_heads > 0 && a->dim > 0 && a->top_k > 0 &&
                     (a->block ? a->n_local <= a->top_k : !a->n_local),
                 "selection: %u of them, %u of these near, in blocks of %u, by %u heads of %u",
                 a->top_k, a->n_local, a->block, a->n_heads, a->dim);
  TD_DEV_REQUIRE(a->kv.dtype != TD_F8E4M3, "selection: keys in E4M3");
  return TD_OK;
}

td_status td_dev_check_pool(const td_kv_view *state, const td_batch_view *b, uint32_t group,
                            size_t at, size_t dim, td_err *err) {
  TD_DEV_REQUIRE((group & (group - 1)) == 0, "pooled keys: groups of %u", group);
  const size_t n = at + (group ? td_pool_entries(b->page_tokens, group) : 0) * dim;
  TD_DEV_REQUIRE(state->dtype == TD_F32 && state->page_bytes >= n * sizeof(float),
                 "pooled keys: a state of %zu bytes in pages of %zu", n * sizeof(float),
                 state->page_bytes);
  return TD_OK;
}

td_status td_dev_check_delta(const td_kv_view *state, const td_delta_shape *shape, td_err *err) {
  TD_DEV_REQUIRE(shape->n_k_heads && shape->n_v_heads % shape->n_k_heads == 0,
                 "delta net: %u value heads for %u key heads", shape->n_v_heads, shape->n_k_heads);
  TD_DEV_REQUIRE(shape->n_taps >= 2 && shape->n_taps <= TD_DELTA_MAX_TAPS,
                 "delta net: a filter of %u taps", shape->n_taps);
  TD_DEV_REQUIRE(state->dtype == TD_F32 && state->page_bytes >= td_delta_state_bytes(shape),
                 "delta net: a state of %zu bytes in pages of %zu", td_delta_state_bytes(shape),
                 state->page_bytes);
  return TD_OK;
}

td_status td_dev_check_batch(const td_batch_view *b, const td_kv_view *kv, td_dtype act_dtype,
                             td_kv_rows rows, td_err *err) {
  enum { RUN = 16 }; // bytes
  const bool is_f8 = kv->dtype == TD_F8E4M3;
  TD_DEV_REQUIRE(kv->dtype == act_dtype || kv->dtype == TD_F16 || is_f8,
                 "KV pages: dtype %d is not for them", (int)kv->dtype);
  const size_t token_bytes = is_f8 ? td_kv_f8_token_bytes(&rows)
                                   : (size_t)rows.n * rows.dim * td_dtype_bytes(kv->dtype);
  const size_t used = b->page_tokens * token_bytes;
  TD_DEV_REQUIRE(!is_f8 || (rows.n_bf16 < rows.dim && td_kv_f8_codes(&rows) % RUN == 0 &&
                            rows.n_bf16 % (RUN / 2) == 0 && kv->page_bytes % RUN == 0 &&
                            (uintptr_t)kv->pages % RUN == 0),
                 "KV pages in E4M3: rows of %u codes and %u BF16 in pages of %zu bytes are not in "
                 "runs of %d bytes",
                 td_kv_f8_codes(&rows), rows.n_bf16, kv->page_bytes, RUN);
  TD_DEV_REQUIRE(used <= kv->page_bytes, "KV pages: %u tokens need %zu bytes, a page has %zu",
                 b->page_tokens, used, kv->page_bytes);
  TD_DEV_REQUIRE(b->seq && b->position && b->q_begin && b->page_table && b->page_tokens > 0,
                 "batch: an array is absent");
  return TD_OK;
}
