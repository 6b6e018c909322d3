// kernels/decl.h - prototypes of every registered kernel, made from the registry.
#pragma once

#include "tandem/kernels.h"

#define X(family, args_type) typedef void family##_kernel(const args_type *args);
TD_KERNEL_FAMILIES(X)
#undef X

#define TD_KERNEL(family, isa, features, ...) family##_kernel family##__##isa;
#include "kernels/registry.inc"
#undef TD_KERNEL

// What rows of the registry call whatever their format.
linear_f32_kernel linear_any__scalar, linear_decoded__avx512, linear_decoded__avx2;
