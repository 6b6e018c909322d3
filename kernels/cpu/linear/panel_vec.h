// kernels/cpu/linear/panel_vec.h - tiles, prefetching and results of a panel: some rows times up to
// PANEL_TOKENS tokens.
// Shared by linear_vec.h, avx512fp16/linear_bytes.h and avx512bf16/linear_rows.h. Include after
// elem, row_data and
//   panel       with a (the call), rows [row0, row0 + n_rows), columns [k, k + n), ahead and, per
//               row, nan
//   ROWS_1      rows multiplied at once with one token
//   ROWS_2      rows multiplied at once with two tokens
//   single_row_tiles  whether a panel's tokens take rows one by one nevertheless
//   PREFETCH_ROWS_BYTES   see prefetch.h, for more than one token
//   finish      the result of a row and token, from the sum of all lanes
//   is_sum      whether the result is that sum, unless something is tiny or NaN
//   is_final    the same for a whole panel
// Define linear_band, which computes rows that share scales for all tokens, after it.
#pragma once

// Lane sums of v [R][T], for rows [row, row + R) and tokens [token, token + T).
TD_INLINE void put_sums(const int R, const int T, const panel *p, uint32_t row, uint32_t token,
                        const vf *v) {
  const td_linear_args *a = p->a;
  float sum[MAX_ROWS * TILE_TOKENS];
  // token-major, since a token's results are contiguous
  TD_UNROLL for (int i = 0; i < R * T; i += 4) {
    vf of[4];
    TD_UNROLL for (int j = 0; j < 4; j++) {
      of[j] = i + j < R * T ? v[(i + j) % R * T + (i + j) / R] : vf_zero();
    }
    vf_sum4(of[0], of[1], of[2], of[3], sum + i);
  }
  float *y = a->y + token * a->ldy + p->row0 + row - a->y_row0;
  TD_UNROLL for (int t = 0; t < T; t++, y += a->ldy) {
    TD_UNROLL for (int r = 0; r < R; r++) y[r] = sum[t * R + r];
  }
}

static void finish_panel(const panel *p) {
  const td_linear_args *a = p->a;
  if (is_final(p)) return;
  for (uint32_t t = 0; t < a->n_tokens; t++) {
    float *y = a->y + t * a->ldy + p->row0 - a->y_row0;
    for (uint32_t r = 0; r < p->n_rows; r++)
      y[r] = finish(a->w, p->row0 + r, p->nan[r], y[r]);
  }
}

// Prefetches the scales that finish needs while the panel is multiplied.
static void fetch_scales(const panel *p) {
  if (is_sum(p->a->w) || p->k > 0) return;
  for (uint32_t r = 0; r < p->n_rows; r += 64 / (uint32_t)sizeof(float))
    __builtin_prefetch(row_scales(p->a->w, p->row0 + r));
}

static distance distance_of(const panel *p, uint32_t bytes) {
  const uint32_t n = bytes / (uint32_t)sizeof(elem);
  return (distance){.rows = n / p->n, .cols = n % p->n};
}

static void set_ahead(panel *p) {
  const uint32_t far = p->a->n_tokens == 1 ? PREFETCH_GEMV_BYTES : PREFETCH_ROWS_BYTES;
  p->ahead[0] = distance_of(p, far);
  p->ahead[1] = distance_of(p, far / 8);
}

// Prefetch distance in bytes, valid up to column `until` of the panel.
typedef struct {
  size_t offset;
  uint32_t until;
} fetch;

// What follows the panel, `at` elements on: the first row's next columns, or the next panel.
static uintptr_t behind_panel(const panel *p, size_t at) {
  const td_linear_args *a = p->a;
  const void *from = row_data(a->w, p->row0 + p->n_rows);
  if (p->k + p->n < a->w->cols) {
    from = row_data(a->w, p->row0) + p->k + p->n;
  } else if (a->next && p->row0 + p->n_rows == a->row_end) {
    from = a->next;
  }
  return (uintptr_t)from + at * sizeof(elem);
}

// Prefetch target for column k of the panel's row, at distance `ahead`: after a row's columns come
// the rows after row + R.
TD_INLINE fetch fetch_of(const panel *p, uint32_t row, uint32_t R, uint32_t k, distance ahead) {
  const bool wraps = k + ahead.cols >= p->n;
  const size_t rows = (ahead.rows + wraps) * R, cols = p->a->w->cols; // rows to advance
  const uint32_t until = wraps ? 2 * p->n - ahead.cols : p->n - ahead.cols;
  // elements to advance; may wrap around
  const size_t on = rows * cols + ahead.cols - (wraps ? p->n : 0);
  if (__builtin_expect(row + rows < p->n_rows, 1)) {
    return (fetch){.offset = on * sizeof(elem), .until = until};
  }
  const uintptr_t from = (uintptr_t)(row_data(p->a->w, p->row0 + row) + p->k + k);
  const size_t at = (row + rows - p->n_rows) * cols + k + ahead.cols - (wraps ? p->n : 0);
  return (fetch){.offset = behind_panel(p, at) - from, .until = until};
}

// Rows [row, row + R) of the panel times tokens [token, token + T), R and T constants. Defined by
// the including file.
TD_INLINE void dot_rows(const int R, const int T, panel *p, uint32_t row, uint32_t token);

#define DOT_TOKENS(T, R)                                                                           \
  case T:                                                                                          \
    for (; !single_row_tiles(p) && row + (R) <= end; row += (R))                                   \
      dot_rows(R, T, p, row, token);                                                               \
    for (; row < end; row++)                                                                       \
      dot_rows(1, T, p, row, token);                                                               \
    return;

// Rows [row, end) times a tile of tokens.
static void dot_tile(panel *p, uint32_t row, uint32_t end, uint32_t token, uint32_t n_tokens) {
  switch (n_tokens) {
    DOT_TOKENS(1, ROWS_1)
    DOT_TOKENS(2, ROWS_2)
    DOT_TOKENS(3, BATCH_ROWS)
    DOT_TOKENS(4, BATCH_ROWS)
    DOT_TOKENS(5, BATCH_ROWS_8)
    DOT_TOKENS(6, BATCH_ROWS_8)
    DOT_TOKENS(7, BATCH_ROWS_8)
    DOT_TOKENS(8, BATCH_ROWS_8)
  default: return;
  }
}
_Static_assert(TILE_TOKENS == 8, "a case for every size of tile");

static uint32_t panel_tiles(const panel *p) {
  return (p->a->n_tokens + TILE_TOKENS - 1) / TILE_TOKENS;
}

static uint32_t panel_tile_begin(const panel *p, uint32_t tile) {
  return tile * p->a->n_tokens / panel_tiles(p);
}

// All tiles of tokens for some rows, then the next rows: the first tile brings the weights into L1.
static void dot_panel(panel *p) {
  fetch_scales(p);
  uint32_t n_tiles = panel_tiles(p), step = n_tiles == 1 ? p->n_rows : BATCH_ROWS;
  for (uint32_t row = 0; row < p->n_rows; row += step) {
    uint32_t end = p->n_rows - row < step ? p->n_rows : row + step;
    for (uint32_t i = 0; i < n_tiles; i++) {
      uint32_t begin = panel_tile_begin(p, i);
      dot_tile(p, row, end, begin, panel_tile_begin(p, i + 1) - begin);
    }
  }
}

static void linear_band(const td_linear_args *a, const float *scales);

// For scales that change along rows and are shared by bands of rows.
static void linear_bands(const td_linear_args *a) {
  const td_weight *w = a->w;
  td_linear_args band = *a;
  for (; band.row_begin < a->row_end; band.row_begin = band.row_end) {
    uint32_t left = w->scale_rows - band.row_begin % w->scale_rows;
    band.row_end = a->row_end - band.row_begin < left ? a->row_end : band.row_begin + left;
    band.next = band.row_end == a->row_end ? a->next : NULL;
    linear_band(&band, row_scales(w, band.row_begin));
  }
}
