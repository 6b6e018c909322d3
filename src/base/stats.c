// src/base/stats.c - order statistics of measurements.
#include "base/stats.h"

#include <math.h>
#include <stdlib.h>

static int by_size(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

void td_sort(double *values, size_t n) {
  qsort(values, n, sizeof *values, by_size);
}

double td_median(double *values, size_t n) {
  td_sort(values, n);
  return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

double td_percentile(const double *sorted, size_t n, double p) {
  if (!n) return NAN;
  const size_t rank = (size_t)ceil(p / 100 * (double)n);
  return sorted[rank ? rank - 1 : 0];
}
