// kernels/heuristics.h - what heuristics.c asks registry.c.
#pragma once

#include <stdbool.h>

#include "tandem/kernels.h"

// From so many tokens on AMX's tiles are faster, by
//   tandem bench kernels --activations int8 --format int4-g128,q4_k,q6_k --batch 17,24,32,64,96
enum { TD_TILES_LEAST_TOKENS = 16 };

// TD_ISA_ and TD_MATH_ bits that the chosen variants may use.
unsigned td_kernels_features(void);
