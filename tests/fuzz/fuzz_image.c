// tests/fuzz/fuzz_image.c - an image file of any bytes: refused, or pixels within the limits, which
// can be resized.
#include <stdint.h>
#include <stdlib.h>

#include "image/image.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const td_image_processor processor = {
      .patch = 4, .merge = 2, .temporal = 2, .min_pixels = 256, .max_pixels = 4096};
  const td_image_limits limits = {.max_pixels = 1 << 18, .max_bytes = 1 << 20};
  td_image image;
  td_image_input input;
  uint8_t *rgb;
  td_err err;
  if (td_image_decode(&image, data, size, &limits, &err) != TD_OK) {
    TD_CHECK(!image.rgb && err.msg[0]);
    return 0;
  }
  TD_CHECK((uint64_t)image.width * image.height <= limits.max_pixels);
  uint32_t sum = 0; // reads every byte
  for (size_t i = 0; i < (size_t)image.width * image.height * 3; i++)
    sum += image.rgb[i];
  TD_CHECK(sum <= 255u * 3 << 18);
  if (td_image_prepare(&input, &rgb, &image, &processor, &err) == TD_OK) {
    TD_CHECK(input.n_tokens * 4 == input.grid_h * input.grid_w && input.n_tokens >= 1);
    free(rgb);
  }
  td_image_free(&image);
  return 0;
}
