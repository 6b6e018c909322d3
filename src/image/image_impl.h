// src/image/image_impl.h - what the decoders share.
#pragma once

#include <string.h>

#include "image/image.h"

// The file and what becomes of it. Decoders fill size, n_channels (3: RGB, 4: with alpha) and
// pixels, of 8 bits, and what they find of EXIF.
typedef struct {
  const uint8_t *bytes;
  size_t n;
  const td_image_limits *limits;
  uint32_t width, height, n_channels;
  uint8_t *pixels;
  uint32_t orientation; // EXIF's, 1 to 8; 0: not known
  td_err *err;
} td_decoding;

td_status td_decode_png(td_decoding *d);
td_status td_decode_jpeg(td_decoding *d);
td_status td_decode_webp(td_decoding *d);

// Checks the size, which the decoder has set, against the limits: before its library allocates by
// it.
td_status td_decoding_measure(td_decoding *d);
// The same, and allocates pixels.
td_status td_decoding_begin(td_decoding *d);
// TD_ECANCELED.
td_status td_decoding_check(const td_decoding *d);
td_status td_decoding_damaged(td_decoding *d, const char *why);
// EXIF's orientation from a TIFF header and its first directory.
void td_decoding_exif(td_decoding *d, const uint8_t *tiff, size_t n);

// Resizes RGB to out_w x out_h as torch's antialiased bicubic interpolation of bytes does: columns,
// then rows, each with weights of 16 bits, rounded and clamped in between.
td_status td_image_resize(uint8_t **out, const td_image *image, uint32_t out_w, uint32_t out_h,
                          td_err *err);
