// src/engine/attn/ops.c - operators of a layer's kind of attention.
#include "engine/attn/ops.h"

#include "engine/attn/window.h"
#include "engine/rows.h"

void td_attn_store_rows(td_engine *e, const td_microbatch *p, uint32_t layer_idx) {
  const td_attn_ops *ops = td_attn_ops_of(e->config, layer_idx);
  const td_attn_cache cache = td_attn_of(e->config, layer_idx)->cache(e->config);
  for (int g = 0; g < N_GROUPS; g++) {
    const step_group *group = &p->groups[g];
    if (!group->view.n_tokens) continue;
    td_attn_store store = {.batch = td_layer_batch(e, group, layer_idx),
                           .kv = td_layer_kv(e, layer_idx, g == GROUP_DECODE)};
    for (size_t i = 0; i < TD_N_ENTRIES; i++)
      if (cache.entry[i])
        store.entry[i] = td_rows_offset(e, e->act[i], (size_t)group->token_begin * cache.entry[i]);
    ops->store(e, &store);
    if (td_engine_has_state(e, layer_idx) || e->layout.beside_at)
      continue; // it leaves the device with its page (kv_transfer.h)
    if (g == GROUP_PREFILL) td_kv_outlet_layer(e, layer_idx);
    if (g == GROUP_DECODE && td_kv_outlet_is_active(e)) {
      store.kv = td_kv_outlet_view(e, layer_idx);
      ops->store(e, &store);
    }
  }
}
