// kernels/cpu/common/grids.h - the grids of kernels/grids.inc with a byte a column, the first in
// the lowest bits: codes without signs; of IQ1 129 more, for 128 and an eighth more.
#pragma once

#include <stdint.h>

extern const uint64_t td_grid_iq2_xxs[256], td_grid_iq2_xs[512], td_grid_iq2_s[1024];
extern const uint64_t td_grid_iq1[2048];
extern const uint32_t td_grid_iq3_xxs[256], td_grid_iq3_s[512];
