// src/image/webp.c - WebP by libwebp; of an animation its first frame, on its canvas.
#include <stdlib.h>

#include <webp/decode.h>

#include "image/image_impl.h"

enum { PIECE_BYTES = 64 << 10 }; // between two looks at whether decoding is cancelled

typedef struct {
  const uint8_t *frame; // of the first frame; NULL: none found
  size_t n;
  uint32_t x, y, width, height;
} webp_frame;

static uint32_t u24(const uint8_t *at) {
  return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16;
}

// Finds EXIF and an animation's first frame among the chunks.
static webp_frame walk_chunks(td_decoding *d) {
  webp_frame out = {0};
  for (size_t at = 12; at + 8 <= d->n;) {
    const uint8_t *chunk = d->bytes + at, *data = chunk + 8;
    const size_t size = u24(chunk + 4) | (size_t)chunk[7] << 24;
    if (size > d->n - at - 8) break;
    if (!memcmp(chunk, "EXIF", 4)) {
      const size_t skip = size > 6 && !memcmp(data, "Exif\0", 6) ? 6 : 0;
      td_decoding_exif(d, data + skip, size - skip);
    }
    if (!memcmp(chunk, "ANMF", 4) && size > 16 && !out.frame)
      out = (webp_frame){.frame = data + 16,
                         .n = size - 16,
                         .x = 2 * u24(data),
                         .y = 2 * u24(data + 3),
                         .width = u24(data + 6) + 1,
                         .height = u24(data + 9) + 1};
    at += 8 + size + (size & 1);
  }
  return out;
}

// Decodes bytes[0..n), whose size is known, into a part of the canvas.
static td_status decode_into(td_decoding *d, const uint8_t *bytes, size_t n, uint8_t *to,
                             size_t to_bytes) {
  const size_t stride = (size_t)d->width * d->n_channels;
  WebPIDecoder *decoder = WebPINewRGB(d->n_channels == 4 ? MODE_RGBA : MODE_RGB, to, to_bytes,
                                      (int)stride);
  if (!decoder) return td_fail(d->err, TD_ENOMEM, "no memory for an image");
  VP8StatusCode code = VP8_STATUS_SUSPENDED;
  td_status st = TD_OK;
  for (size_t have = 0; have < n && code == VP8_STATUS_SUSPENDED && st == TD_OK;) {
    have = n - have > PIECE_BYTES ? have + PIECE_BYTES : n;
    code = WebPIUpdate(decoder, bytes, have);
    st = td_decoding_check(d);
  }
  WebPIDelete(decoder);
  if (st != TD_OK) return st;
  if (code == VP8_STATUS_OUT_OF_MEMORY) return td_fail(d->err, TD_ENOMEM, "no memory for an image");
  return code == VP8_STATUS_OK ? TD_OK : td_decoding_damaged(d, "its WebP data has errors");
}

td_status td_decode_webp(td_decoding *d) {
  const size_t riff_bytes = u24(d->bytes + 4) | (size_t)d->bytes[7] << 24;
  WebPBitstreamFeatures all, one;
  if (riff_bytes > d->n - 8 || WebPGetFeatures(d->bytes, d->n, &all) != VP8_STATUS_OK)
    return td_decoding_damaged(d, "its WebP header has errors");
  d->width = (uint32_t)all.width;
  d->height = (uint32_t)all.height;
  d->n_channels = all.has_alpha || all.has_animation ? 4 : 3;
  const webp_frame f = walk_chunks(d);
  td_status st = td_decoding_begin(d);
  if (st != TD_OK) return st;
  const size_t n_bytes = (size_t)d->width * d->height * d->n_channels;
  if (!all.has_animation) return decode_into(d, d->bytes, d->n, d->pixels, n_bytes);
  if (!f.frame || f.x + f.width > d->width || f.y + f.height > d->height ||
      WebPGetFeatures(f.frame, f.n, &one) != VP8_STATUS_OK || (uint32_t)one.width != f.width ||
      (uint32_t)one.height != f.height)
    return td_decoding_damaged(d, "its first frame is missing or not on its canvas");
  memset(d->pixels, 0, n_bytes); // transparent around the frame
  const size_t skip = ((size_t)f.y * d->width + f.x) * 4;
  return decode_into(d, f.frame, f.n, d->pixels + skip, n_bytes - skip);
}
