// src/base/stats.h - order statistics of measurements.
#pragma once

#include <stddef.h>

void td_sort(double *values, size_t n); // ascending
// Sorts values in place. The mean of the two in the middle where n is even; n > 0.
double td_median(double *values, size_t n);
// Nearest rank, of values in ascending order; p in percent. NAN where n is 0.
double td_percentile(const double *sorted, size_t n, double p);
