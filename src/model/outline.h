// src/model/outline.h - models by their shapes alone, without a checkpoint: what their weights
// weigh.
#pragma once

#include "model/model.h"
#include "tandem/formats.h"

// What the program knows of published models: config.json's values, configs/shapes.
typedef struct {
  const char *name; // of the file, without .json
  const char *json;
  size_t len;
} td_shape_file;
extern const td_shape_file td_shape_files[]; // the last has no name

// NULL: unknown. Upper and lower case are alike, and so is what is before a slash.
const td_shape_file *td_shape_find(const char *name);
// The name of the known model that a mistyped name may mean; NULL: none is close.
const char *td_shape_closest(const char *name);

// A model of that shape whose matrices have sizes and a format, but no data. Embedding, head and
// routers are BF16; with 4-bit floats all but the routed experts is, as gpt-oss is published, or
// FP8 where the shape's quantization_config says so, as DeepSeek-V4 is.
td_status td_model_outline(td_model **out, const td_shape_file *shape, const td_format *format,
                           td_err *err);
