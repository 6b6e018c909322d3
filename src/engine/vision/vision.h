// src/engine/vision/vision.h - images' embeddings: a tower computes each once, on a CPU device, and
// those used last are kept by the images' hashes. An embedding depends on the image alone, neither
// on threads nor on what else is embedded. Thread: the one that steps the engines.
#pragma once

#include "device/device.h"
#include "model/model.h"
#include "tandem/image.h"

typedef struct td_vision td_vision;

// Operations for the embeddings of an image of so many patches.
double td_vision_flops(const td_vision_config *config, double n_patches);

// Rows that take the place of an image's tokens, and behind them those that are added behind each
// of the language model's first n_deep layers: [1 + n_deep][n_tokens][dim], of the activations'
// dtype, in memory of td_dev_alloc_host.
typedef struct {
  char *rows;
  uint32_t n_tokens;
} td_image_rows;

// cpu computes; dev is that of the engines. Both, and the model, are borrowed. TD_EUNSUPPORTED: the
// model does not see.
td_status td_vision_open(td_vision **out, const td_model *model, td_dev *cpu, td_dev *dev,
                         td_err *err);
void td_vision_close(td_vision *vision);

// Computes a piece, a layer of the tower, of the image's embeddings or, before that, of another
// image's that were begun. *is_done: the image's are known. TD_EINVAL: the image is not one for
// this tower.
td_status td_vision_advance(td_vision *vision, const td_image_input *image, bool *is_done,
                            td_err *err);
// The image's embeddings, computed now unless they are known. They stay until td_vision_unpin.
td_status td_vision_pin(td_vision *vision, const td_image_input *image, const td_image_rows **out,
                        td_err *err);
void td_vision_unpin(td_vision *vision, const td_image_rows *rows);
