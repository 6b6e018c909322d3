// src/image/processor.c - what a model's processor does with an image: the size of its grid, and
// resizing to it.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/fs.h"
#include "base/json_parse.h"
#include "base/sha256.h"
#include "image/image_impl.h"

// What a processor is named, and what counts where its file says nothing.
static const struct {
  const char *prefix; // of image_processor_type
  td_resize_rule rule;
  uint64_t min_pixels, max_pixels;
} processors[] = {
    {"Qwen2VLImageProcessor", TD_RESIZE_QWEN, 56 * 56, 28 * 28 * 1280},
    {"Qwen3VLImageProcessor", TD_RESIZE_QWEN, 56 * 56, 28 * 28 * 1280},
    {"Glm4vImageProcessor", TD_RESIZE_GLM, 112 * 112, 28 * 28 * 15000},
    {"Glm46VImageProcessor", TD_RESIZE_GLM, 112 * 112, 28 * 28 * 15000},
    {"Glm5NextImageProcessor", TD_RESIZE_PAD, 16, 8000}, // image tokens instead of pixels
};

static td_status read_three(float out[3], const cJSON *json, const char *key, td_err *err) {
  const cJSON *list = td_json_get(json, key);
  if (!list) return TD_OK;
  if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) != 3)
    return td_fail(err, TD_EFORMAT, "%s must be three numbers", key);
  for (int i = 0; i < 3; i++) {
    const cJSON *item = cJSON_GetArrayItem(list, i);
    if (!cJSON_IsNumber(item)) return td_fail(err, TD_EFORMAT, "%s must be three numbers", key);
    out[i] = (float)item->valuedouble;
  }
  return TD_OK;
}

// The first of the objects that has the key counts.
static td_status read_sizes(td_image_processor *p, const cJSON *json, td_err *err) {
  const bool is_tokens = p->rule == TD_RESIZE_PAD;
  const cJSON *size = is_tokens ? NULL : td_json_get(json, "size");
  int64_t expand = 1;
  int64_t patch = p->patch, merge = p->merge, temporal = p->temporal;
  int64_t least = (int64_t)p->min_pixels, most = (int64_t)p->max_pixels;
  const int64_t limit = (int64_t)1 << 40;
  const struct {
    const cJSON *of;
    const char *key;
    int64_t max, *value;
  } fields[] = {
      {json, "patch_size", 64, &patch},
      {json, "merge_size", 8, &merge},
      {json, "temporal_patch_size", 8, &temporal},
      {size, "shortest_edge", limit, &least},
      {size, "longest_edge", limit, &most},
      {json, is_tokens ? "min_image_tokens" : "min_pixels", limit, &least},
      {json, is_tokens ? "max_image_tokens" : "max_pixels", limit, &most},
      {json, "patch_expand_factor", 8, &expand},
  };
  for (size_t i = 0; i < TD_COUNT(fields); i++) {
    if (!fields[i].of) continue;
    td_status st = td_json_get_int(fields[i].of, fields[i].key, 1, fields[i].max, fields[i].value,
                                   err);
    if (st != TD_OK) return st;
  }
  if (least > most)
    return td_fail(err, TD_EFORMAT, "the least number of pixels is over the largest");
  if (expand != 1) return td_fail(err, TD_EUNSUPPORTED, "patch_expand_factor must be 1");
  const int64_t unit = is_tokens ? patch * merge * patch * merge : 1;
  p->patch = (uint32_t)patch;
  p->merge = (uint32_t)merge;
  p->temporal = (uint32_t)temporal;
  p->min_pixels = (uint64_t)(least * unit);
  p->max_pixels = (uint64_t)(most * unit);
  return TD_OK;
}

static td_status read_processor(td_image_processor *p, const cJSON *json, td_err *err) {
  const char *type = td_json_text(json, "image_processor_type");
  size_t i = 0;
  while (i < TD_COUNT(processors) &&
         (!type || strncmp(type, processors[i].prefix, strlen(processors[i].prefix))))
    i++;
  if (i == TD_COUNT(processors))
    return td_fail(err, TD_EUNSUPPORTED, "image_processor_type \"%s\" is not known",
                   type ? type : "");
  *p = (td_image_processor){.patch = 14,
                            .merge = 2,
                            .temporal = 2,
                            .min_pixels = processors[i].min_pixels,
                            .max_pixels = processors[i].max_pixels,
                            .norm = {.mean = {0.48145466f, 0.4578275f, 0.40821073f},
                                     .std = {0.26862954f, 0.26130258f, 0.27577711f}},
                            .rule = processors[i].rule};
  td_status st = read_sizes(p, json, err);
  if (st == TD_OK) st = read_three(p->norm.mean, json, "image_mean", err);
  if (st == TD_OK) st = read_three(p->norm.std, json, "image_std", err);
  for (int c = 0; c < 3 && st == TD_OK; c++)
    if (!(p->norm.std[c] > 0)) st = td_fail(err, TD_EFORMAT, "image_std must be above 0");
  return st;
}

td_status td_image_processor_read(td_image_processor *out, const char *model_dir, td_err *err) {
  static const char *const names[] = {"processor_config.json", "preprocessor_config.json"};
  *out = (td_image_processor){0};
  for (size_t i = 0; i < TD_COUNT(names); i++) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", model_dir, names[i]);
    if (!td_file_exists(path)) continue;
    cJSON *json;
    td_status st = td_json_parse_regular(&json, path, 1 << 20, err);
    if (st != TD_OK) return st;
    const cJSON *of = td_json_get(json, "image_processor");
    if (!of && i == 1) of = json;
    if (of && (st = read_processor(out, of, err)) != TD_OK) td_err_prefix(err, "%s", path);
    cJSON_Delete(json);
    if (of) return st;
  }
  return td_fail(err, TD_ENOENT,
                 "%s has no preprocessor_config.json: the model cannot see, or the file is missing",
                 model_dir);
}

typedef struct {
  uint64_t h, w;
} sides;

static sides rounded_up(double h, double w, uint64_t unit) {
  return (sides){((uint64_t)fmax(1, ceil(h)) + unit - 1) / unit * unit,
                 ((uint64_t)fmax(1, ceil(w)) + unit - 1) / unit * unit};
}

// The canvas of TD_RESIZE_PAD.
static sides canvas_of(uint64_t w, uint64_t h, const td_image_processor *p) {
  const uint64_t unit = p->patch * p->merge;
  sides to = rounded_up((double)h, (double)w, unit);
  if (to.h * to.w < p->min_pixels) {
    const double grow = sqrt((double)p->min_pixels / (double)(h * w));
    to = rounded_up((double)h * grow, (double)w * grow, unit);
  }
  if (to.h * to.w <= p->max_pixels) return to;
  to = (sides){unit, unit};
  for (uint64_t low = 1, high = h; low <= high;) { // the largest that fits
    const uint64_t middle = (low + high) / 2;
    const sides tried = rounded_up((double)middle, (double)(w * middle / h), unit);
    const bool fits = tried.h * tried.w <= p->max_pixels;
    if (fits) to = tried;
    if (fits)
      low = middle + 1;
    else
      high = middle - 1;
  }
  return to;
}

// Resizes to what has room on the canvas of w x h pixels, the rest of which is black.
static td_status resize_padded(uint8_t **rgb, const td_image *image, uint32_t w, uint32_t h,
                               const td_image_processor *p, td_err *err) {
  const double own_h = image->height, own_w = image->width;
  double scale = fmin(h / own_h, w / own_w);
  if (own_h * own_w >= (double)p->min_pixels) scale = fmin(scale, 1);
  const uint32_t in_h = (uint32_t)fmax(1, fmin(h, floor(own_h * scale)));
  const uint32_t in_w = (uint32_t)fmax(1, fmin(w, floor(own_w * scale)));
  uint8_t *content;
  td_status st = td_image_resize(&content, image, in_w, in_h, err);
  if (st != TD_OK) return st;
  *rgb = calloc((size_t)h * w, 3);
  for (size_t y = 0; *rgb && y < in_h; y++)
    memcpy(*rgb + y * w * 3, content + y * in_w * 3, (size_t)in_w * 3);
  free(content);
  return *rgb ? TD_OK : td_fail(err, TD_ENOMEM, "no memory for an image");
}

td_status td_image_grid(uint32_t *grid_h, uint32_t *grid_w, uint32_t width, uint32_t height,
                        const td_image_processor *p, td_err *err) {
  const double unit = p->patch * p->merge, frames = p->rule == TD_RESIZE_GLM ? p->temporal : 1;
  double w = width, h = height;
  if (p->rule == TD_RESIZE_PAD) {
    const sides to = canvas_of(width, height, p);
    *grid_h = (uint32_t)to.h / p->patch;
    *grid_w = (uint32_t)to.w / p->patch;
    return TD_OK;
  }
  if (p->rule == TD_RESIZE_GLM && (h < unit || w < unit)) {
    const double scale = fmax(unit / h, unit / w);
    h = trunc(h * scale);
    w = trunc(w * scale);
  }
  if (fmax(w, h) / fmin(w, h) > 200)
    return td_fail(err, TD_EINVAL,
                   "the image is %u x %u pixels: one side may be 200 times the other at most",
                   width, height);
  double to_h = rint(h / unit) * unit, to_w = rint(w / unit) * unit; // ties to even
  if (frames * to_h * to_w > (double)p->max_pixels) {
    const double shrink = sqrt(frames * h * w / (double)p->max_pixels);
    to_h = fmax(unit, floor(h / shrink / unit) * unit);
    to_w = fmax(unit, floor(w / shrink / unit) * unit);
  } else if (frames * to_h * to_w < (double)p->min_pixels) {
    const double grow = sqrt((double)p->min_pixels / (frames * h * w));
    to_h = ceil(h * grow / unit) * unit;
    to_w = ceil(w * grow / unit) * unit;
  }
  *grid_h = (uint32_t)to_h / p->patch;
  *grid_w = (uint32_t)to_w / p->patch;
  return TD_OK;
}

// Of all that the tower's output depends on, but for its weights.
static void hash_of(td_image_input *out, const td_image_processor *p, size_t n_bytes) {
  const uint32_t sizes[] = {out->grid_h, out->grid_w, p->patch, p->merge, p->temporal};
  td_digest digest;
  td_sha256 sha;
  td_sha256_begin(&sha);
  td_sha256_add(&sha, sizes, sizeof sizes);
  td_sha256_add(&sha, &p->norm, sizeof p->norm);
  td_sha256_add(&sha, out->rgb, n_bytes);
  td_sha256_end(&sha, &digest);
  memcpy(out->hash, digest.bytes, sizeof out->hash);
}

td_status td_image_prepare(td_image_input *out, uint8_t **rgb, const td_image *image,
                           const td_image_processor *p, td_err *err) {
  *out = (td_image_input){0};
  *rgb = NULL;
  td_status st = td_image_grid(&out->grid_h, &out->grid_w, image->width, image->height, p, err);
  if (st != TD_OK) return st;
  const uint32_t h = out->grid_h * p->patch, w = out->grid_w * p->patch;
  st = p->rule == TD_RESIZE_PAD ? resize_padded(rgb, image, w, h, p, err)
                                : td_image_resize(rgb, image, w, h, err);
  if (st != TD_OK) return st;
  out->n_tokens = out->grid_h * out->grid_w / (p->merge * p->merge);
  out->rgb = *rgb;
  out->norm = p->norm;
  hash_of(out, p, (size_t)h * w * 3);
  return TD_OK;
}
