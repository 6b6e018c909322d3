// src/engine/dense_slots.c - the dense weights of a layer that can stream, and room for them.
#include "engine/dense_slots.h"

// MXFP4's scales may have to be widened first.
static bool can_stream(const td_weight *w) {
  return w->rows && !(w->dtype == TD_F4E2M1 && w->scale_dtype == TD_F8E8M0);
}

uint32_t td_dense_matrices(td_layer *l, td_dense_part part, td_weight *out[TD_DENSE_MAX_MATRICES]) {
  td_weight *const attn[] = {&l->q,
                             &l->k,
                             &l->v,
                             &l->o,
                             &l->q_a,
                             &l->q_b,
                             &l->kv_a,
                             &l->kv_b,
                             &l->delta_qkv,
                             &l->delta_z,
                             &l->delta_b,
                             &l->delta_a,
                             &l->delta_z_in,
                             &l->delta_a_in,
                             &l->head_gate,
                             &l->index_q,
                             &l->index_k,
                             &l->index_weights,
                             &l->o_a,
                             &l->pool.x,
                             &l->pool.gate,
                             &l->index_pool.x,
                             &l->index_pool.gate,
                             &l->attn_hyper.fn,
                             &l->mlp_hyper.fn};
  td_weight *const mlp[] = {&l->router, &l->shared_gate};
  td_weight *const expert[] = {&l->mlp_gate, &l->mlp_up, &l->mlp_down};
  const bool is_attn = part == TD_DENSE_ATTN;
  uint32_t n = 0;
  for (size_t i = 0; i < (is_attn ? TD_COUNT(attn) : TD_COUNT(mlp)); i++) {
    td_weight *w = is_attn ? attn[i] : mlp[i];
    if (can_stream(w)) out[n++] = w;
  }
  // One operator takes all three.
  if (is_attn || !can_stream(expert[0]) || !can_stream(expert[1]) || !can_stream(expert[2]))
    return n;
  for (size_t i = 0; i < TD_COUNT(expert); i++)
    out[n++] = expert[i];
  return n;
}

uint32_t td_dense_list(td_slot_part parts[TD_DENSE_MAX_PARTS], td_weight *const *matrices,
                       uint32_t n) {
  for (uint32_t i = 0; i < n; i++)
    td_slot_list_matrix(parts + i * TD_SLOT_MATRIX_PARTS, matrices[i]);
  return n * TD_SLOT_MATRIX_PARTS;
}

td_dense_size td_dense_size_of(const td_layer *layer) {
  td_layer l = *layer;
  td_dense_size size = {{0}};
  for (int part = 0; part < TD_N_DENSE_PARTS; part++) {
    td_weight *matrices[TD_DENSE_MAX_MATRICES];
    td_slot_part parts[TD_DENSE_MAX_PARTS];
    const uint32_t n = td_dense_matrices(&l, (td_dense_part)part, matrices);
    size.bytes[part] = td_slot_lay_out(parts, td_dense_list(parts, matrices, n));
  }
  return size;
}

uint64_t td_dense_slot_bytes(const td_dense_size *sizes, uint32_t n_layers, uint32_t n_streamed,
                             td_dense_part part) {
  uint64_t most = 0;
  for (uint32_t i = n_layers - n_streamed; i < n_layers; i++)
    if (sizes[i].bytes[part] > most) most = sizes[i].bytes[part];
  return most;
}

uint64_t td_dense_ring_bytes(const td_dense_size *sizes, uint32_t n_layers, uint32_t n_streamed) {
  uint64_t n = 0;
  for (int part = 0; part < TD_N_DENSE_PARTS; part++)
    n += td_dense_slot_bytes(sizes, n_layers, n_streamed, (td_dense_part)part);
  return n;
}
