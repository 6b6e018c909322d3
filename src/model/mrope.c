// src/model/mrope.c - positions of tokens in sequences with images.
#include "model/mrope.h"

// Image tokens on a side for so many patches: n_tokens are grid_h * grid_w / merge^2.
static uint32_t merge_of(const td_image_input *image) {
  uint32_t merge = 1;
  while ((uint64_t)image->n_tokens * merge * merge < (uint64_t)image->grid_h * image->grid_w)
    merge++;
  return merge;
}

static int32_t moved_by(const td_model_config *c, const td_image_input *image) {
  const uint32_t most = image->grid_h > image->grid_w ? image->grid_h : image->grid_w;
  return td_model_has_axes(c) ? (int32_t)(most / merge_of(image)) - (int32_t)image->n_tokens : 0;
}

int32_t td_mrope_offset(const td_model_config *c, const td_image_input *images, uint32_t n_images) {
  int32_t offset = 0;
  for (uint32_t i = 0; i < n_images; i++)
    offset += moved_by(c, &images[i]);
  return offset;
}

const td_image_input *td_mrope_find(const td_model_config *c, const td_image_input *images,
                                    uint32_t n_images, uint32_t token, int32_t *offset) {
  *offset = 0;
  for (uint32_t i = 0; i < n_images && images[i].at <= token; i++) {
    if (token - images[i].at < images[i].n_tokens) return &images[i];
    *offset += moved_by(c, &images[i]);
  }
  return NULL;
}

void td_mrope_position(const td_image_input *image, uint32_t token, int32_t offset,
                       int32_t out[3]) {
  const uint32_t columns = image->grid_w / merge_of(image), at = token - image->at;
  out[0] = (int32_t)image->at + offset;
  out[1] = out[0] + (int32_t)(at / columns);
  out[2] = out[0] + (int32_t)(at % columns);
}
