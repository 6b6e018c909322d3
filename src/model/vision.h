// src/model/vision.h - the tower beside a language model that turns images into embeddings.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "tandem/types.h"

enum { TD_MAX_DEEP = 8, TD_MAX_VISION_LAYERS = 256 };

typedef struct td_tower td_tower; // families/towers.h

// Of config.json's vision_config. Dimensions are in elements.
typedef struct {
  const td_tower *tower;
  uint32_t n_layers; // 0: the model does not see, or its checkpoint has no tower
  uint32_t dim, n_heads, mlp_dim, out_dim;
  uint32_t context_dim;            // of a gated MLP behind the merger
  uint32_t patch, temporal, merge; // pixels, frames, patches on a side of an image token
  uint32_t n_positions;            // learned ones, of a square; 0: none
  uint32_t image_size;             // as stated, in pixels: what the square stands for
  bool is_bicubic;                 // how they are interpolated, see td_tower
  bool has_bias;                   // of attention (GLM)
  float eps;
  float limit; // of gated MLPs (td_activate_rows_args); 0: none
  double rope_theta;
  // The layers whose outputs, merged, are added behind the language model's first n_deep layers.
  uint32_t deep[TD_MAX_DEEP], n_deep;
  int32_t image_token; // the placeholder's id; -1: not stated
} td_vision_config;

// Absent parts are zeroed. Norms without a bias are RMS norms; with `up` MLPs are gated, fc1 the
// gate and fc2 what goes down.
typedef struct {
  td_vec norm1, norm1_bias, norm2, norm2_bias, q_norm, k_norm;
  td_weight qkv, proj, fc1, up, fc2;
  td_vec qkv_bias, proj_bias, fc1_bias, up_bias, fc2_bias;
} td_vision_layer;

// Turns merge^2 patches into an image token:
//   fc2 GELU(fc1 norm(x)), the norm of each patch or, in `deep`, of all together; or, with conv,
//   a gated MLP of GELU(layer norm(fc1 conv norm(x))).
typedef struct {
  td_vec norm, norm_bias;
  td_weight conv; // [out_dim][dim][merge][merge]
  td_vec conv_bias;
  td_weight fc1, fc2;
  td_vec fc1_bias, fc2_bias;
  td_vec mid_norm, mid_norm_bias;
  td_weight gate, up, down;
} td_vision_merger;

typedef struct {
  td_weight patch; // [dim][3 * temporal * patch * patch]
  td_vec patch_bias, patch_norm;
  td_weight positions;     // [n_positions][dim]
  td_vision_layer *layers; // [n_layers]
  td_vision_merger merger, deep[TD_MAX_DEEP];
} td_vision_weights;
