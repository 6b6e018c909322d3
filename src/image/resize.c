// src/image/resize.c - resizing to the last bit of the reference (image_impl.h).
#include <math.h>
#include <stdlib.h>

#include "image/image_impl.h"

// The taps of each output position: n[i] inputs from first[i] on, weights[i * max_taps...].
typedef struct {
  size_t *first, *n, max_taps;
  int16_t *weights;
  unsigned precision; // a weight of 1 is 1 << precision
} taps;

// Keys' cubic with a = -0.5.
static double cubic(double x) {
  x = fabs(x);
  if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
  return x < 2 ? (((x - 5) * x + 8) * x - 4) * -0.5 : 0;
}

static void taps_free(taps *t) {
  free(t->first);
  free(t->n);
  free(t->weights);
}

// The weights of one output position, which sum to 1; their largest.
static double weigh(double *weights, const taps *t, size_t i, double center, double stretch) {
  double sum = 0, largest = 0;
  for (size_t j = 0; j < t->n[i]; j++) {
    weights[j] = cubic(((double)(j + t->first[i]) - center + 0.5) / stretch);
    sum += weights[j];
  }
  for (size_t j = 0; j < t->n[i]; j++) {
    weights[j] /= sum;
    largest = fmax(largest, weights[j]);
  }
  return largest;
}

// taps_free in every case.
static td_status taps_make(taps *t, size_t n_in, size_t n_out) {
  const double scale = (double)n_in / (double)n_out, stretch = fmax(scale, 1), reach = 2 * stretch;
  double largest = 0;
  *t = (taps){.max_taps = (size_t)ceil(reach) * 2 + 1};
  double *exact = calloc(n_out * t->max_taps, sizeof *exact);
  t->first = calloc(n_out, sizeof *t->first);
  t->n = calloc(n_out, sizeof *t->n);
  t->weights = calloc(n_out * t->max_taps, sizeof *t->weights);
  if (!exact || !t->first || !t->n || !t->weights) {
    free(exact);
    return TD_ENOMEM;
  }
  for (size_t i = 0; i < n_out; i++) {
    const double center = scale * ((double)i + 0.5), from = center - reach + 0.5;
    const size_t end = (size_t)(center + reach + 0.5);
    t->first[i] = from > 0 ? (size_t)from : 0;
    t->n[i] = (end < n_in ? end : n_in) - t->first[i];
    if (t->n[i] > t->max_taps) t->n[i] = t->max_taps;
    largest = fmax(largest, weigh(exact + i * t->max_taps, t, i, center, stretch));
  }
  while (t->precision < 22 && (int)(0.5 + largest * (2 << t->precision)) < 1 << 15)
    t->precision++;
  for (size_t i = 0; i < n_out * t->max_taps; i++)
    t->weights[i] = (int16_t)(exact[i] * (1 << t->precision) + copysign(0.5, exact[i]));
  free(exact);
  return TD_OK;
}

static uint8_t clamp_byte(int32_t sum, unsigned precision) {
  const int32_t value = sum >> precision;
  return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

// [n_rows][w_in][3] to [n_rows][w_out][3].
static void resize_columns(uint8_t *out, const uint8_t *in, size_t n_rows, size_t w_in,
                           size_t w_out, const taps *t) {
  for (size_t y = 0; y < n_rows; y++)
    for (size_t x = 0; x < w_out; x++) {
      const uint8_t *from = in + (y * w_in + t->first[x]) * 3;
      const int16_t *weights = t->weights + x * t->max_taps;
      int32_t r = 1 << (t->precision - 1), g = r, b = r;
      for (size_t j = 0; j < t->n[x]; j++) {
        r += weights[j] * from[3 * j];
        g += weights[j] * from[3 * j + 1];
        b += weights[j] * from[3 * j + 2];
      }
      uint8_t *to = out + (y * w_out + x) * 3;
      to[0] = clamp_byte(r, t->precision);
      to[1] = clamp_byte(g, t->precision);
      to[2] = clamp_byte(b, t->precision);
    }
}

// Rows of n bytes: [h_in][n] to [h_out][n]; sums [n].
static void resize_rows(uint8_t *out, const uint8_t *in, int32_t *sums, size_t h_out, size_t n,
                        const taps *t) {
  for (size_t y = 0; y < h_out; y++) {
    for (size_t i = 0; i < n; i++)
      sums[i] = 1 << (t->precision - 1);
    for (size_t j = 0; j < t->n[y]; j++) {
      const uint8_t *from = in + (t->first[y] + j) * n;
      const int32_t weight = t->weights[y * t->max_taps + j];
      for (size_t i = 0; i < n; i++)
        sums[i] += weight * from[i];
    }
    for (size_t i = 0; i < n; i++)
      out[y * n + i] = clamp_byte(sums[i], t->precision);
  }
}

td_status td_image_resize(uint8_t **out, const td_image *image, uint32_t out_w, uint32_t out_h,
                          td_err *err) {
  taps columns = {0}, rows = {0};
  const size_t w = image->width, h = image->height, row_bytes = (size_t)out_w * 3;
  uint8_t *half = malloc(h * row_bytes);
  int32_t *sums = malloc(row_bytes * sizeof *sums);
  *out = malloc(out_h * row_bytes);
  td_status st = half && sums && *out ? TD_OK : TD_ENOMEM;
  if (st == TD_OK) st = taps_make(&columns, w, out_w);
  if (st == TD_OK) st = taps_make(&rows, h, out_h);
  if (st == TD_OK) {
    resize_columns(half, image->rgb, h, w, out_w, &columns);
    resize_rows(*out, half, sums, out_h, row_bytes, &rows);
  } else {
    free(*out);
    *out = NULL;
    td_fail(err, st, "no memory for an image");
  }
  taps_free(&columns);
  taps_free(&rows);
  free(half);
  free(sums);
  return st;
}
