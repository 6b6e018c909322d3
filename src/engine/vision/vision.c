// src/engine/vision/vision.c - images' embeddings that are kept, and the one that is computed.
#include "engine/vision/vision.h"

#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "engine/vision/tower.h"

// Of embeddings that no step uses: some 20 images of 1024 x 1024 of a model 2,048 wide.
static const size_t kept_bytes = (size_t)512 << 20;

typedef struct kept_image {
  td_image_rows rows; // first
  struct kept_image *next;
  td_image_input image; // without pixels
  size_t n_bytes;
  uint64_t last_use;
  uint32_t n_pins;
} kept_image;

struct td_vision {
  const td_model_config *config;
  td_dev *dev;
  td_tower_run *run;
  kept_image *images;
  td_image_input current; // begun and not done; n_tokens 0: none
  size_t n_bytes;         // of all images
  uint64_t n_uses;
};

double td_vision_flops(const td_vision_config *c, double n) {
  const double dim = c->dim, merged = dim * c->merge * c->merge,
               n_tokens = n / (c->merge * c->merge);
  const double mlp = (c->context_dim ? 3 : 2) * dim * c->mlp_dim;
  const double layer = n * (4 * dim * dim + mlp) + 2 * n * n * dim;
  const double merger = c->context_dim ? merged * c->out_dim + (double)c->out_dim * c->out_dim +
                                             3.0 * c->out_dim * c->context_dim
                                       : merged * (merged + c->out_dim);
  const double patch = 3.0 * c->temporal * c->patch * c->patch * dim;
  return 2 * (c->n_layers * layer + (1 + c->n_deep) * n_tokens * merger + n * patch);
}

td_status td_vision_open(td_vision **out, const td_model *model, td_dev *cpu, td_dev *dev,
                         td_err *err) {
  *out = NULL;
  if (!td_model_vision(model))
    return td_fail(err, TD_EUNSUPPORTED, "%s: the model does not see", td_model_name(model));
  td_vision *v = calloc(1, sizeof *v);
  if (!v) return td_fail(err, TD_ENOMEM, "out of memory: the model's tower");
  v->config = td_model_config_of(model);
  v->dev = dev;
  td_status st = td_tower_run_open(&v->run, model, cpu, err);
  if (st == TD_OK)
    *out = v;
  else
    td_vision_close(v);
  return st;
}

// Drops the image used longest ago that no step uses. False: there is none.
static bool drop(td_vision *v) {
  kept_image **oldest = NULL;
  for (kept_image **at = &v->images; *at; at = &(*at)->next)
    if (!(*at)->n_pins && (!oldest || (*at)->last_use < (*oldest)->last_use)) oldest = at;
  if (!oldest) return false;
  kept_image *image = *oldest;
  *oldest = image->next;
  v->n_bytes -= image->n_bytes;
  td_dev_free_host(v->dev, image->rows.rows);
  free(image);
  return true;
}

void td_vision_close(td_vision *v) {
  if (!v) return;
  td_tower_run_close(v->run);
  while (drop(v)) {
  }
  TD_CHECK(!v->images);
  free(v);
}

// Images of the same hash and grid have the same pixels.
static bool is_same(const td_image_input *a, const td_image_input *b) {
  return a->n_tokens == b->n_tokens && a->grid_h == b->grid_h && a->grid_w == b->grid_w &&
         memcmp(a->hash, b->hash, sizeof a->hash) == 0;
}

static kept_image *find(td_vision *v, const td_image_input *image) {
  kept_image *at = v->images;
  while (at && !is_same(&at->image, image))
    at = at->next;
  if (at) at->last_use = ++v->n_uses;
  return at;
}

// Keeps the rows that the tower has computed.
static td_status keep(td_vision *v, td_err *err) {
  const td_dtype dtype = td_dev_act_dtype(v->dev);
  const size_t n = (size_t)(1 + v->config->vision.n_deep) * v->current.n_tokens * v->config->dim;
  const float *rows = td_tower_run_rows(v->run);
  kept_image *image = calloc(1, sizeof *image);
  if (!image) return td_fail(err, TD_ENOMEM, "out of memory: an image's embeddings");
  *image = (kept_image){
      .image = v->current, .n_bytes = n * td_dtype_bytes(dtype), .last_use = ++v->n_uses};
  image->rows.n_tokens = v->current.n_tokens;
  while (v->n_bytes + image->n_bytes > kept_bytes && drop(v)) {
  }
  td_status st = td_dev_alloc_host(v->dev, (void **)&image->rows.rows, image->n_bytes, err);
  if (st != TD_OK) {
    free(image);
    return st;
  }
  if (dtype == TD_BF16)
    td_bf16_of_n((uint16_t *)(void *)image->rows.rows, rows, n);
  else
    memcpy(image->rows.rows, rows, image->n_bytes);
  v->n_bytes += image->n_bytes;
  image->next = v->images;
  v->images = image;
  return TD_OK;
}

td_status td_vision_advance(td_vision *v, const td_image_input *image, bool *is_done, td_err *err) {
  *is_done = find(v, image) != NULL;
  if (*is_done) return TD_OK;
  td_status st = TD_OK;
  bool is_whole = false;
  if (v->current.n_tokens) {
    st = td_tower_run_piece(v->run, &is_whole, err);
  } else {
    v->current = *image;
    v->current.rgb = NULL;
    st = td_tower_run_begin(v->run, image, err);
  }
  if (st == TD_OK && is_whole) st = keep(v, err);
  if (st == TD_OK && !is_whole) return TD_OK;
  *is_done = st == TD_OK && is_same(&v->current, image);
  v->current.n_tokens = 0;
  td_tower_run_end(v->run);
  return st;
}

td_status td_vision_pin(td_vision *v, const td_image_input *image, const td_image_rows **out,
                        td_err *err) {
  for (bool is_done = false; !is_done;) {
    td_status st = td_vision_advance(v, image, &is_done, err);
    if (st != TD_OK) return st;
  }
  kept_image *kept = find(v, image);
  kept->n_pins++;
  *out = &kept->rows;
  return TD_OK;
}

void td_vision_unpin(td_vision *v, const td_image_rows *rows) {
  (void)v;
  ((kept_image *)(void *)rows)->n_pins--;
}
