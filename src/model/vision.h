// src/model/vision.h - the tower beside a language model that turns images into embeddings.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "tandem/types.h"

enum { TD_MAX_DEEP = 8, TD_MAX_VISION_LAYERS = 256 };

typedef struct td_tower td_tower; // families/towers.h

// Of config.json's vision_config, and of preprocessor_config.json what the tower normalizes by.
// Dimensions are in elements.
typedef struct {
  const td_tower *tower;
  uint32_t n_layers; // 0: the model does not see, or its checkpoint has no tower
  uint32_t dim, n_heads, mlp_dim, out_dim;
  uint32_t patch, temporal, merge; // pixels, frames, patches on a side of an image token
  uint32_t n_positions;            // learned ones, of a square
  float eps;
  double rope_theta;
  // The layers whose outputs, merged, are added behind the language model's first n_deep layers.
  uint32_t deep[TD_MAX_DEEP], n_deep;
  int32_t image_token; // the placeholder's id; -1: not stated
  float mean[3], std[3];
} td_vision_config;

typedef struct {
  td_vec norm1, norm1_bias, norm2, norm2_bias;
  td_weight qkv, proj, fc1, fc2;
  td_vec qkv_bias, proj_bias, fc1_bias, fc2_bias;
} td_vision_layer;

// Turns merge^2 patches into an image token.
typedef struct {
  td_vec norm, norm_bias; // of a patch or, of those in `deep`, of all together
  td_weight fc1, fc2;
  td_vec fc1_bias, fc2_bias;
} td_vision_merger;

typedef struct {
  td_weight patch; // [dim][3 * temporal * patch * patch]
  td_vec patch_bias;
  td_weight positions;     // [n_positions][dim]
  td_vision_layer *layers; // [n_layers]
  td_vision_merger merger, deep[TD_MAX_DEEP];
} td_vision_weights;
