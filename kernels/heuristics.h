// kernels/heuristics.h - what heuristics.c asks registry.c.
#pragma once

#include <stdbool.h>

#include "tandem/kernels.h"

// TD_ISA_ and TD_MATH_ bits that the chosen variants may use.
unsigned td_kernels_features(void);
// Whether prefill rounds activations to 8 bits for these weights (linear_w4a8).
bool td_kernels_rounds_x(const td_weight *w);
