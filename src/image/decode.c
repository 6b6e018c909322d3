// src/image/decode.c - which format a file has, and what all formats have in common: limits,
// EXIF's orientation, transparency.
#include <stdlib.h>

#include "image/image_impl.h"

td_status td_decoding_measure(td_decoding *d) {
  const uint64_t n = (uint64_t)d->width * d->height;
  if (!n) return td_decoding_damaged(d, "it has no pixels");
  if (n > d->limits->max_pixels)
    return td_fail(d->err, TD_ELIMIT, "the image has %u x %u pixels, over the limit of %llu in all",
                   d->width, d->height, (unsigned long long)d->limits->max_pixels);
  return TD_OK;
}

td_status td_decoding_begin(td_decoding *d) {
  td_status st = td_decoding_measure(d);
  if (st != TD_OK) return st;
  d->pixels = malloc((size_t)d->width * d->height * d->n_channels);
  if (!d->pixels) return td_fail(d->err, TD_ENOMEM, "no memory for an image");
  return td_decoding_check(d);
}

td_status td_decoding_check(const td_decoding *d) {
  const td_image_limits *l = d->limits;
  if (l->is_cancelled && l->is_cancelled(l->ctx))
    return td_fail(d->err, TD_ECANCELED, "decoding an image was cancelled");
  return TD_OK;
}

td_status td_decoding_damaged(td_decoding *d, const char *why) {
  return td_fail(d->err, TD_EFORMAT, "the image is damaged or cut off: %s", why);
}

static uint32_t read_uint(const uint8_t *at, int n_bytes, bool is_big) {
  uint32_t value = 0;
  for (int i = 0; i < n_bytes; i++)
    value |= (uint32_t)at[i] << 8 * (is_big ? n_bytes - 1 - i : i);
  return value;
}

void td_decoding_exif(td_decoding *d, const uint8_t *tiff, size_t n) {
  if (n < 8 || (memcmp(tiff, "II*", 4) && memcmp(tiff, "MM\0*", 4))) return;
  const bool is_big = tiff[0] == 'M';
  const size_t at = read_uint(tiff + 4, 4, is_big);
  if (at > n - 2) return;
  const uint32_t n_entries = read_uint(tiff + at, 2, is_big);
  for (size_t i = 0; i < n_entries && (i + 1) * 12 <= n - 2 - at; i++) {
    const uint8_t *entry = tiff + at + 2 + i * 12;
    const uint32_t value = read_uint(entry + 8, 2, is_big);
    if (read_uint(entry, 2, is_big) == 0x0112 && value >= 1 && value <= 8) d->orientation = value;
  }
}

// Composites on white, in place: [n][4] to [n][3].
static void flatten(uint8_t *pixels, size_t n) {
  for (size_t i = 0; i < n; i++) {
    const uint32_t alpha = pixels[4 * i + 3];
    for (size_t c = 0; c < 3; c++) {
      const uint32_t x = pixels[4 * i + c] * alpha + 255 * (255 - alpha) + 128;
      pixels[3 * i + c] = (uint8_t)((x + (x >> 8)) >> 8); // x / 255, rounded
    }
  }
}

// Makes the image upright: bit 2 of the orientation less one swaps the axes, and the others say
// from which ends rows and columns are read.
static td_status turn(td_image *image, uint32_t orientation, td_err *err) {
  static const struct {
    bool swap, from_right, from_bottom; // of the stored image
  } turns[] = {{0, 0, 0}, {0, 1, 0}, {0, 1, 1}, {0, 0, 1},
               {1, 0, 0}, {1, 0, 1}, {1, 1, 1}, {1, 1, 0}};
  if (orientation <= 1) return TD_OK;
  const size_t w = image->width, h = image->height;
  const bool swap = turns[orientation - 1].swap;
  const size_t out_w = swap ? h : w, out_h = swap ? w : h;
  uint8_t *to = malloc(w * h * 3);
  if (!to) return td_fail(err, TD_ENOMEM, "no memory for an image");
  for (size_t y = 0; y < out_h; y++)
    for (size_t x = 0; x < out_w; x++) {
      size_t col = swap ? y : x, row = swap ? x : y;
      if (turns[orientation - 1].from_right) col = w - 1 - col;
      if (turns[orientation - 1].from_bottom) row = h - 1 - row;
      memcpy(to + (y * out_w + x) * 3, image->rgb + (row * w + col) * 3, 3);
    }
  free(image->rgb);
  *image = (td_image){.width = (uint32_t)out_w, .height = (uint32_t)out_h, .rgb = to};
  return TD_OK;
}

const char *td_image_type(const uint8_t *bytes, size_t n) {
  if (n >= 8 && !memcmp(bytes, "\x89PNG\r\n\x1a\n", 8)) return "png";
  if (n >= 3 && !memcmp(bytes, "\xff\xd8\xff", 3)) return "jpeg";
  return n >= 12 && !memcmp(bytes, "RIFF", 4) && !memcmp(bytes + 8, "WEBP", 4) ? "webp" : NULL;
}

static td_status decode_any(td_decoding *d) {
  const char *type = td_image_type(d->bytes, d->n);
  if (!type)
    return td_fail(d->err, TD_EUNSUPPORTED, "the image is no PNG, JPEG or WebP file: convert it");
  return type[0] == 'p' ? td_decode_png(d) : type[0] == 'j' ? td_decode_jpeg(d) : td_decode_webp(d);
}

td_status td_image_decode(td_image *out, const uint8_t *bytes, size_t n,
                          const td_image_limits *limits, td_err *err) {
  td_decoding d = {.bytes = bytes, .n = n, .limits = limits, .err = err};
  *out = (td_image){0};
  if (n > limits->max_bytes)
    return td_fail(err, TD_ELIMIT, "the image has %zu bytes, over the limit of %zu", n,
                   limits->max_bytes);
  td_status st = decode_any(&d);
  *out = (td_image){.width = d.width, .height = d.height, .rgb = d.pixels};
  if (st == TD_OK && d.n_channels == 4) {
    flatten(d.pixels, (size_t)d.width * d.height);
    uint8_t *less = realloc(d.pixels, (size_t)d.width * d.height * 3);
    if (less) out->rgb = less;
  }
  if (st == TD_OK) st = turn(out, d.orientation, err);
  if (st != TD_OK) td_image_free(out);
  return st;
}

void td_image_free(td_image *image) {
  free(image->rgb);
  *image = (td_image){0};
}
