// src/image/jpeg.c - JPEG by libjpeg-turbo: grey, color, and CMYK as Adobe writes it (inverted).
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>

#include <jerror.h>
#include <jpeglib.h>

#include "image/image_impl.h"

// Decoding a scan takes time for every pixel, whatever its bytes; cameras and encoders write about
// ten.
enum { MAX_SCANS = 100 };

typedef struct {
  struct jpeg_error_mgr errors; // first: found by libjpeg's pointer to it
  struct jpeg_progress_mgr progress;
  struct jpeg_decompress_struct info;
  td_decoding *d;
  td_status st;
  jmp_buf jump;
} jpeg_state;

static void on_error(j_common_ptr info) {
  jpeg_state *s = (jpeg_state *)info->err;
  char why[JMSG_LENGTH_MAX];
  info->err->format_message(info, why);
  s->st = td_decoding_damaged(s->d, why);
  longjmp(s->jump, 1);
}

// Damage that decoders repair is left to them, but for a file that ends early.
static void on_message(j_common_ptr info, int level) {
  if (level < 0 && info->err->msg_code == JWRN_JPEG_EOF) on_error(info);
}

static void on_progress(j_common_ptr info) {
  jpeg_state *s = (jpeg_state *)info->err;
  if (s->info.input_scan_number > MAX_SCANS)
    s->st = td_decoding_damaged(s->d, "too many scans");
  else
    s->st = td_decoding_check(s->d);
  if (s->st != TD_OK) longjmp(s->jump, 1);
}

// [n][4], inverted CMYK, to [n][3].
static void cmyk_to_rgb(uint8_t *to, const uint8_t *row, size_t n) {
  for (size_t i = 0; i < n; i++)
    for (size_t c = 0; c < 3; c++) {
      const uint32_t k = row[4 * i + 3], x = (255 - row[4 * i + c]) * k + 128;
      to[3 * i + c] = (uint8_t)(k - ((x + (x >> 8)) >> 8));
    }
}

static void find_exif(td_decoding *d, struct jpeg_decompress_struct *info) {
  for (jpeg_saved_marker_ptr m = info->marker_list; m; m = m->next)
    if (m->data_length > 6 && !memcmp(m->data, "Exif\0", 6))
      td_decoding_exif(d, m->data + 6, m->data_length - 6);
}

static void read_jpeg(jpeg_state *s) {
  struct jpeg_decompress_struct *info = &s->info;
  td_decoding *d = s->d;
  jpeg_create_decompress(info);
  info->progress = &s->progress;
  jpeg_mem_src(info, d->bytes, (unsigned long)d->n);
  jpeg_save_markers(info, JPEG_APP0 + 1, 0xffff);
  jpeg_read_header(info, TRUE);
  find_exif(d, info);
  const bool is_cmyk = info->jpeg_color_space == JCS_CMYK || info->jpeg_color_space == JCS_YCCK;
  info->out_color_space = is_cmyk ? JCS_CMYK : JCS_RGB;
  d->width = info->image_width;
  d->height = info->image_height;
  d->n_channels = 3;
  if ((s->st = td_decoding_begin(d)) != TD_OK) longjmp(s->jump, 1);
  jpeg_start_decompress(info);
  JSAMPARRAY row = NULL;
  if (is_cmyk) row = info->mem->alloc_sarray((j_common_ptr)info, JPOOL_IMAGE, d->width * 4, 1);
  while (info->output_scanline < info->output_height) {
    uint8_t *to = d->pixels + (size_t)info->output_scanline * d->width * 3;
    jpeg_read_scanlines(info, is_cmyk ? row : &to, 1);
    if (is_cmyk) cmyk_to_rgb(to, row[0], d->width);
  }
  jpeg_finish_decompress(info);
}

td_status td_decode_jpeg(td_decoding *d) {
  jpeg_state *s = calloc(1, sizeof *s);
  if (!s) return td_fail(d->err, TD_ENOMEM, "no memory for an image");
  s->d = d;
  s->info.err = jpeg_std_error(&s->errors);
  s->errors.error_exit = on_error;
  s->errors.emit_message = on_message;
  s->progress.progress_monitor = on_progress;
  if (!setjmp(s->jump)) read_jpeg(s);
  jpeg_destroy_decompress(&s->info);
  const td_status st = s->st;
  free(s);
  return st;
}
