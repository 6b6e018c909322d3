// include/tandem/image.h - an image as it goes from the front to the tower.
#pragma once

#include <stdint.h>

// Of red, green and blue: a pixel's value / 255, less its mean, over its deviation.
typedef struct {
  float mean[3], std[3];
} td_pixel_norm;

typedef struct {
  uint32_t at;             // index among the sequence's tokens of its first image token
  uint32_t n_tokens;       // image tokens: grid_h * grid_w / merge^2
  uint32_t grid_h, grid_w; // in patches, before merging; one frame
  uint8_t hash[32];        // SHA-256 of rgb, its size and what it is normalized by
  td_pixel_norm norm;
  const uint8_t *rgb; // [grid_h * patch][grid_w * patch][3], resized, not normalized
} td_image_input;
