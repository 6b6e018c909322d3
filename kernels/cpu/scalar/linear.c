// kernels/cpu/scalar/linear.c - the reference matrix product, for every format.
// A (row, token) pair has eight sums; lane l takes the columns with k % 8 == l of each run. A run's
// sums are scaled and then added to the row's. Every run is decoded once for a block of tokens. All
// families use this code; they differ only in their other variants.
#include "kernels/cpu/common/dequant.h"
#include "kernels/decl.h"

enum { RUN = 512, TOKENS = 32, LANES = 8 };

static void dot_run(const float *w, const float *x, uint32_t n, float scale, float *total) {
  float sum[LANES] = {0};
  uint32_t k = 0;
  for (; k + LANES <= n; k += LANES) {
    for (int l = 0; l < LANES; l++)
      sum[l] += w[k + l] * x[k + l];
  }
  for (int l = 0; k < n; k++, l++)
    sum[l] += w[k] * x[k];
  for (int l = 0; l < LANES; l++)
    total[l] += scale * sum[l];
}

static void decode_run(const td_weight *w, uint32_t row, uint32_t k, uint32_t n, float *out) {
  for (uint32_t i = 0; i < n; i++)
    out[i] = dequant_at(w, row, k + i);
}

static void linear_row(const td_linear_args *a, uint32_t row, uint32_t t0, uint32_t n_tok) {
  const td_weight *w = a->w;
  float global = w->dtype == TD_F4E2M1 ? w->global_scale : 1;
  float buf[RUN];
  float total[TOKENS][LANES] = {{0}};
  uint32_t n;
  for (uint32_t k = 0; k < w->cols; k += n) {
    n = run_length(w, k, RUN);
    decode_run(w, row, k, n, buf);
    float scale = w->scale ? scale_at(w, row, k / w->scale_cols) : 1;
    for (uint32_t t = 0; t < n_tok; t++) {
      size_t x_row = a->x_rows ? a->x_rows[t0 + t] : t0 + t;
      dot_run(buf, a->x + x_row * a->ldx + k, n, scale, total[t]);
    }
  }
  for (uint32_t t = 0; t < n_tok; t++) {
    float sum = 0;
    for (int l = 0; l < LANES; l++)
      sum += total[t][l];
    a->y[(t0 + t) * a->ldy + row - a->y_row0] = global * sum;
  }
}

void linear_any__scalar(const td_linear_args *a) {
  for (uint32_t t = 0; t < a->n_tokens; t += TOKENS) {
    uint32_t n_tok = a->n_tokens - t < TOKENS ? a->n_tokens - t : TOKENS;
    for (uint32_t row = a->row_begin; row < a->row_end; row++)
      linear_row(a, row, t, n_tok);
  }
}
