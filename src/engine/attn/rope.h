// src/engine/attn/rope.h - rotary position tables, with and without YaRN.
#pragma once

#include <stdint.h>

#include "model/model.h"

// Dimensions rotated by RoPE in each head: rope_dim, or head_dim if that is 0.
uint32_t td_rope_dims(const td_model_config *config);

// Fills out f32 [n_positions][rot_dim/2][2] with cos and sin, the attention factor multiplied in.
// YaRN: Peng et al., arXiv 2309.00071, sections 3.2 and 3.4, computed in f32 in the order
// transformers uses, so that both round alike.
void td_rope_fill(float *out, const td_model_config *config, uint32_t n_positions);

// A row of such a table, [rot_dim/2][2], for a token with positions in time, by row and by column,
// of which each pair has one (td_model_config.axes).
void td_rope_fill_axes(float *out, const td_model_config *config, const int32_t position[3]);

// The tables of layers without pooled keys, and of layers with them.
void td_rope_fill_near(float *out, const td_model_config *config, uint32_t n_positions);
void td_rope_fill_pooled(float *out, const td_model_config *config, uint32_t n_positions);
// Of layers with wide heads: [n_positions][wide_head_dim/2][2]; pairs that do not rotate are there.
void td_rope_fill_wide(float *out, const td_model_config *config, uint32_t n_positions);

// Fills out f32 [n_positions] with the factors of queries (query_beta of the configuration).
void td_query_scale_fill(float *out, const td_model_config *config, uint32_t n_positions);

// Factor of the attention scores beside 1/sqrt(query head dim), for kinds that apply it: with YaRN
// mscale(factor, mscale_all_dim)^2.
double td_rope_score_factor(const td_model_config *config);
