// src/model/f8.h - which matrices are multiplied by activations in E4M3 where those are wanted.
#ifndef TD_MODEL_F8_H
#define TD_MODEL_F8_H

#include <stdbool.h>

#include "tandem/types.h"

enum { TD_F8_BLOCK = 128 }; // columns of activations that share a scale

// E4M3 in rows whose scales are of whole rows or of multiples of such blocks.
static inline bool td_weight_takes_f8(const td_weight *w) {
  return w->dtype == TD_F8E4M3 && w->scale_dtype == TD_F32 && w->scale_cols > 0 &&
         w->cols % 8 == 0 && (w->scale_cols >= w->cols || w->scale_cols % TD_F8_BLOCK == 0);
}

#endif
