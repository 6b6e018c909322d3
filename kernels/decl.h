// kernels/decl.h - prototypes of every registered kernel, made from the registry.
#pragma once

#include "tandem/kernels.h"

#define X(family, args_type) typedef void family##_kernel(const args_type *args);
TD_KERNEL_FAMILIES(X)
#undef X

#define TD_KERNEL(family, isa, features, ...) family##_kernel family##__##isa;
#include "kernels/registry.inc"
#undef TD_KERNEL
