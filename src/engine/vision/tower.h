// src/engine/vision/tower.h - a tower's forward pass for one image, piece by piece. Internal to
// engine/vision/.
#pragma once

#include "engine/vision/vision.h"

typedef struct td_tower_run td_tower_run;

// One at a time. dev computes, a CPU.
td_status td_tower_run_open(td_tower_run **out, const td_model *model, td_dev *dev, td_err *err);
void td_tower_run_close(td_tower_run *run);
// Memory for the image, and what enters the first layer; after that the image's pixels are not
// read any more.
td_status td_tower_run_begin(td_tower_run *run, const td_image_input *image, td_err *err);
// The next layer or, behind the last one, the rest: *is_done. Rows are then at td_tower_run_rows.
td_status td_tower_run_piece(td_tower_run *run, bool *is_done, td_err *err);
// f32 [1 + n_deep][n_tokens][dim], until td_tower_run_end.
const float *td_tower_run_rows(const td_tower_run *run);
void td_tower_run_end(td_tower_run *run); // frees the memory; legal without begin
