// src/device/cpu/top_logits.c - the top logits of each row and the row's sums.
#include <math.h>

#include "device/cpu/cpu.h"

// NaN ranks below every number.
static bool is_better(float v, float than) {
  return v > than || (isnan(than) && !isnan(v));
}

// Inserts a token into the sorted list; earlier tokens of equal value stay ahead.
static void insert(td_top_logits *top, float v, int32_t id) {
  if (top->n == TD_TOP_LOGITS && !is_better(v, top->value[top->n - 1])) return;
  uint32_t i = top->n < TD_TOP_LOGITS ? top->n++ : top->n - 1;
  for (; i > 0 && is_better(v, top->value[i - 1]); i--) {
    top->value[i] = top->value[i - 1];
    top->id[i] = top->id[i - 1];
  }
  top->value[i] = v;
  top->id[i] = id;
}

static float weight_of(float v, float largest, float inverse) {
  return v == largest ? 1 : expf((v - largest) * inverse);
}

static void rank_row(void *ctx, size_t row, unsigned member) {
  (void)member;
  const td_top_logits_args *a = ctx;
  const float *logits = a->logits + row * a->n_vocab;
  td_top_logits *out = &a->out[row];
  *out = (td_top_logits){.n = 0};
  for (uint32_t i = 0; i < a->n_vocab; i++)
    insert(out, logits[i], (int32_t)i);
  float inverse = a->temperature[row] > 0 ? 1 / a->temperature[row] : 1;
  double sum = 0, warm = 0;
  for (uint32_t i = 0; i < a->n_vocab; i++) {
    sum += (double)weight_of(logits[i], out->value[0], 1);
    warm += (double)weight_of(logits[i], out->value[0], inverse);
  }
  out->sum = (float)sum;
  out->sum_warm = (float)warm;
}

td_status td_cpu_op_top_logits(td_cpu_stream *stream, const td_top_logits_args *a, td_err *err) {
  TD_DEV_REQUIRE(a->n_vocab > 0, "ranking: rows of no logits");
  td_cpu_for(stream, a->n_rows, rank_row, (void *)a);
  return TD_OK;
}
