// kernels/cpu/avx512/rows.c - see rows_vec.h.
#include "kernels/cpu/avx512/nibbles.h"
#include "kernels/cpu/avx512/vec.h"

#include "kernels/cpu/rows/rows_vec.h"
