// include/tandem/image.h - an image as it goes from the front to the tower.
#pragma once

#include <stdint.h>

typedef struct {
  uint32_t at;             // index among the sequence's tokens of its first image token
  uint32_t n_tokens;       // image tokens: grid_h * grid_w / merge^2
  uint32_t grid_h, grid_w; // in patches, before merging; one frame
  uint8_t hash[32];        // SHA-256 of rgb, its size and what it is normalized by
  const uint8_t *rgb;      // [grid_h * patch][grid_w * patch][3], resized, not normalized
} td_image_input;
