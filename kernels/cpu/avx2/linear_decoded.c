// kernels/cpu/avx2/linear_decoded.c - see linear_decoded.h.
#include "kernels/cpu/avx2/vec.h"

#include "kernels/cpu/linear/linear_decoded.h"
