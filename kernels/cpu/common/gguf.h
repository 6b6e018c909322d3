// kernels/cpu/common/gguf.h - GGUF's blocks (kernels/blocks.h) for the CPU.
#ifndef KERNELS_CPU_GGUF_H
#define KERNELS_CPU_GGUF_H

#include "kernels/cpu/common/numeric.h"

#ifdef __F16C__
#include <immintrin.h>
#define TD_HALF_VALUE(bits) _cvtsh_ss(bits)
#else
#define TD_HALF_VALUE(bits) f32_from_half(bits)
#endif
#define TD_BITS_VALUE(bits) f32_from_bits(bits)

#include "kernels/blocks.h"

#endif
