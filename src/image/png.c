// src/image/png.c - PNG by libpng: every color type as 8-bit RGB or RGBA. Of 16 bits the upper 8
// count, also in grey, where Pillow shows what is over 255 as white; color profiles are not
// applied.
#include <stdlib.h>

#include <png.h>

#include "image/image_impl.h"

typedef struct {
  td_decoding *d;
  size_t at; // bytes read
  td_status st;
} png_source;

static void read_bytes(png_structp png, png_bytep to, size_t n) {
  png_source *source = png_get_io_ptr(png);
  if (n > source->d->n - source->at) png_error(png, "the file ends early");
  memcpy(to, source->d->bytes + source->at, n);
  source->at += n;
}

static void on_error(png_structp png, png_const_charp why) {
  png_source *source = png_get_error_ptr(png);
  source->st = td_decoding_damaged(source->d, why);
  png_longjmp(png, 1);
}

static void on_warning(png_structp png, png_const_charp why) {
  (void)png;
  (void)why;
}

static void set_transforms(png_structp png, png_infop info) {
  const int color = png_get_color_type(png, info);
  png_set_expand(png); // palettes, fewer bits, transparent colors
  png_set_strip_16(png);
  if (!(color & PNG_COLOR_MASK_COLOR)) png_set_gray_to_rgb(png);
}

static void read_rows(png_structp png, png_source *source, int n_passes) {
  td_decoding *d = source->d;
  for (int pass = 0; pass < n_passes; pass++)
    for (size_t y = 0; y < d->height; y++) {
      if (y % 64 == 0 && (source->st = td_decoding_check(d)) != TD_OK) png_longjmp(png, 1);
      png_read_row(png, d->pixels + y * d->width * d->n_channels, NULL);
    }
}

static void read_png(png_structp png, png_infop info, png_source *source) {
  td_decoding *d = source->d;
  png_byte *exif;
  png_uint_32 n_exif;
  png_set_read_fn(png, source, read_bytes);
  png_set_user_limits(png, PNG_UINT_31_MAX, PNG_UINT_31_MAX); // the limit on pixels is our own
  png_set_chunk_cache_max(png, 64);
  png_set_chunk_malloc_max(png, 1 << 20);
  // Not unpacked, as nobody reads them.
  png_set_keep_unknown_chunks(png, PNG_HANDLE_CHUNK_NEVER,
                              (png_const_bytep) "iCCP\0tEXt\0zTXt\0iTXt\0sPLT", 5);
  png_read_info(png, info);
  d->width = png_get_image_width(png, info);
  d->height = png_get_image_height(png, info);
  if ((source->st = td_decoding_measure(d)) != TD_OK) png_longjmp(png, 1);
  set_transforms(png, info);
  const int n_passes = png_set_interlace_handling(png);
  png_read_update_info(png, info);
  d->n_channels = png_get_channels(png, info);
  TD_CHECK(png_get_rowbytes(png, info) == (size_t)d->width * d->n_channels);
  if ((source->st = td_decoding_begin(d)) != TD_OK) png_longjmp(png, 1);
  read_rows(png, source, n_passes);
  png_read_end(png, info);
  if (png_get_eXIf_1(png, info, &n_exif, &exif)) td_decoding_exif(d, exif, n_exif);
}

td_status td_decode_png(td_decoding *d) {
  png_source source = {.d = d, .st = TD_OK};
  png_structp png = png_create_read_struct(PNG_LIBPNG_VER_STRING, &source, on_error, on_warning);
  png_infop info = png ? png_create_info_struct(png) : NULL;
  if (!info) {
    png_destroy_read_struct(&png, NULL, NULL);
    return td_fail(d->err, TD_ENOMEM, "no memory for an image");
  }
  if (!setjmp(png_jmpbuf(png))) read_png(png, info, &source);
  png_destroy_read_struct(&png, &info, NULL);
  return source.st;
}
