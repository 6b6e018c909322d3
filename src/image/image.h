// src/image/image.h - images as clients send them, and as a model's tower takes them.
// Pure functions, which may run in any thread. Nothing is allocated for an image before its size
// is known to be within the limits.
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "tandem/image.h"

// 8-bit RGB, upright, [height][width][3], owned. What is transparent lies on white.
typedef struct {
  uint32_t width, height;
  uint8_t *rgb;
} td_image;

typedef struct {
  uint64_t max_pixels;
  size_t max_bytes;                // of the file
  bool (*is_cancelled)(void *ctx); // asked now and then; NULL: never
  void *ctx;
} td_image_limits;

// "png", "jpeg" or "webp" by a file's first bytes; NULL: another format.
const char *td_image_type(const uint8_t *bytes, size_t n);
// Decodes a PNG, JPEG or WebP file (of several frames the first). On error *out is zeroed.
// TD_EUNSUPPORTED: another format; TD_EFORMAT: damaged or cut off; TD_ELIMIT: more bytes or pixels
// than the limits; TD_ECANCELED.
td_status td_image_decode(td_image *out, const uint8_t *bytes, size_t n,
                          const td_image_limits *limits, td_err *err);
void td_image_free(td_image *image); // frees and zeroes; legal for a zeroed image

// How the grid is found. The first two round sides to multiples of patch * merge and then scale the
// area into [min_pixels, max_pixels].
typedef enum {
  TD_RESIZE_QWEN,
  TD_RESIZE_GLM, // counts `temporal` frames' pixels, and enlarges sides below a multiple first
  TD_RESIZE_PAD, // rounds sides up, and puts the image, as large as fits, on black
} td_resize_rule;

typedef struct {
  uint32_t patch, merge, temporal; // temporal: frames that a patch spans; an image repeats
  uint64_t min_pixels, max_pixels;
  td_pixel_norm norm;
  td_resize_rule rule;
} td_image_processor;

// Reads preprocessor_config.json or processor_config.json, with defaults by the model's
// vision_config. TD_ENOENT: the model does not see.
td_status td_image_processor_read(td_image_processor *out, const char *model_dir, td_err *err);

// Patches of an image of width x height pixels. TD_EINVAL: a side is over 200 times the other.
td_status td_image_grid(uint32_t *grid_h, uint32_t *grid_w, uint32_t width, uint32_t height,
                        const td_image_processor *p, td_err *err);

// Resizes to the processor's grid; *rgb is the caller's (free), out->at is left 0.
td_status td_image_prepare(td_image_input *out, uint8_t **rgb, const td_image *image,
                           const td_image_processor *p, td_err *err);
