// kernels/cpu/avx512/delta.c - see delta_vec.h.
#include "kernels/cpu/avx512/vec.h"

#include "kernels/cpu/delta/delta_vec.h"
