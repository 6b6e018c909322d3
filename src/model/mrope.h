// src/model/mrope.h - positions of tokens in sequences with images. Text counts on; all of an
// image's tokens have its first position in time, and from there on count rows and columns; the
// text behind continues from the largest of them.
#pragma once

#include "model/model.h"
#include "tandem/image.h"

static inline bool td_model_has_axes(const td_model_config *config) {
  return config->axes[0] > 0;
}

// What is added to the index of a token behind all of these images to get its position: 0 in a
// model whose positions have no axes. Reads no pixels.
int32_t td_mrope_offset(const td_model_config *config, const td_image_input *images,
                        uint32_t n_images);

// The image that has the token; NULL: none. *offset: of the images in front of the token.
const td_image_input *td_mrope_find(const td_model_config *config, const td_image_input *images,
                                    uint32_t n_images, uint32_t token, int32_t *offset);

// Positions in time, by row and by column of a token of the image, in front of which others have
// moved positions by offset.
void td_mrope_position(const td_image_input *image, uint32_t token, int32_t offset, int32_t out[3]);
