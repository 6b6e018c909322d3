// src/engine/attn/dsa_shared.c - latent attention over the keys that the last layer with an indexer
// selected for each token (dsa.c).
#include "engine/attn/mla.h"

static void attend(td_engine *e, const td_microbatch *p, const td_layer *layer,
                   uint32_t layer_idx) {
  td_mla_attend(e, p, layer, layer_idx, e->config->index_top_k);
}

// ---- what follows from the configuration --------------------------------------------------------

static void describe(const td_model_config *c, td_buf *out) {
  (void)c, (void)out; // dsa.c counts them
}

const td_attn_ops td_attn_dsa_shared = {{td_mla_cache, td_mla_act, td_dsa_shared_flops, describe,
                                         TD_MLA_MIN_CHUNK, true,
                                         "attention to keys that an indexer selects"},
                                        td_mla_project,
                                        td_mla_store,
                                        attend};
