// kernels/cpu/avx2/rows.c - see rows_vec.h.
#include "kernels/cpu/avx2/nibbles.h"
#include "kernels/cpu/avx2/vec.h"

#include "kernels/cpu/rows/rows_vec.h"
