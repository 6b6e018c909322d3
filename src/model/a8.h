// src/model/a8.h - which matrices a GPU multiplies by 8-bit activations in prefill.
#pragma once

#include "tandem/types.h"

enum { TD_A8_BLOCK = 128 }; // columns of activations that share a scale

// The value of --activations under which a GPU multiplies w by 8-bit activations:
// TD_ACTIVATIONS_FP8 for E4M3, TD_ACTIVATIONS_INT8 for INT8, where one scale covers a whole row or
// a multiple of TD_A8_BLOCK columns. TD_ACTIVATIONS_AUTO: none does.
static inline td_activations td_weight_a8(const td_weight *w) {
  const td_activations own = w->dtype == TD_F8E4M3 ? TD_ACTIVATIONS_FP8
                             : w->dtype == TD_I8   ? TD_ACTIVATIONS_INT8
                                                   : TD_ACTIVATIONS_AUTO;
  return w->scale_dtype == TD_F32 && w->scale_cols > 0 && w->cols % 8 == 0 &&
                 (w->scale_cols >= w->cols || w->scale_cols % TD_A8_BLOCK == 0)
             ? own
             : TD_ACTIVATIONS_AUTO;
}
