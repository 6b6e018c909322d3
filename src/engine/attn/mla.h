// src/engine/attn/mla.h - operators that the kinds of latent attention share. Internal to
// engine/attn/.
#pragma once

#include "engine/attn/ops.h"

// Epsilon of the norms inside MLA, whatever rms_norm_eps is (DeepSeek's modeling code), but for
// td_model_config.latents_eps.
#define TD_MLA_NORM_EPS 1e-6f

enum { TD_MLA_MIN_CHUNK = 1024 };

// Of td_attn_spec.
td_attn_cache td_mla_cache(const td_model_config *config);
td_attn_rows td_mla_act(const td_model_config *config);
double td_mla_flops(const td_model_config *config, double n, double n_past);
void td_mla_describe(const td_model_config *config, td_buf *out);
td_attn_rows td_dsa_act(const td_model_config *config);
double td_dsa_shared_flops(const td_model_config *config, double n, double n_past);

// Leaves the normed queries of low rank in TD_ACT_Q_A.
void td_mla_project(td_engine *engine, const td_microbatch *part, const td_layer *layer);
void td_mla_store(td_engine *engine, const td_attn_store *entries);
// top_k: tokens see the keys selected for them; 0: all.
void td_mla_attend(td_engine *engine, const td_microbatch *part, const td_layer *layer,
                   uint32_t layer_idx, uint32_t top_k);
// The selections of the microbatch's tokens from token_begin on, [index_top_k] each. They stay from
// layer to layer, in act_words, before the weights of the indexer's heads (dsa.c).
int32_t *td_mla_selected(const td_engine *engine, const td_microbatch *part, size_t token_begin);
