// kernels/cpu/avx2/delta.c - see delta_vec.h.
#include "kernels/cpu/avx2/vec.h"

#include "kernels/cpu/delta/delta_vec.h"
