// src/cli/run_images.c - a conversation's images for a model that is opened here.
#include <stdlib.h>
#include <string.h>

#include "base/base64.h"
#include "cli/run_impl.h"
#include "cli/terminal.h"

#define MAX_PIXELS (1u << 26)

// What was prepared for another model.
static void forget(td_conversation *c) {
  for (size_t i = 0; i < c->n; i++)
    for (size_t k = 0; k < c->messages[i].images.n; k++) {
      free(c->messages[i].images.items[k].rgb);
      c->messages[i].images.items[k].rgb = NULL;
    }
}

td_status td_run_open_images(td_runner *r, const char *model_dir, td_err *err) {
  const td_vision_config *v = &td_model_config_of(r->session->model)->vision;
  r->processor = (td_image_processor){0};
  forget(&r->conversation);
  if (!v->n_layers || v->image_token < 0) return TD_OK;
  td_status st = td_image_processor_read(&r->processor, model_dir, err);
  if (st == TD_ENOENT || st == TD_EUNSUPPORTED) return TD_OK; // said where an image is shown
  if (st == TD_OK && (r->processor.patch != v->patch || r->processor.merge != v->merge))
    st = td_fail(err, TD_EFORMAT,
                 "%s: its image processor and its config.json cut images into different patches",
                 model_dir);
  return st;
}

static bool is_interrupted(void *ctx) {
  (void)ctx;
  return td_interrupted();
}

static td_status prepare(const td_runner *r, td_attached *image, td_err *err) {
  const td_image_limits limits = {
      .max_pixels = MAX_PIXELS, .max_bytes = SIZE_MAX, .is_cancelled = is_interrupted};
  const char *data = strchr(image->url, ',');
  td_buf file = TD_BUF_INIT;
  td_image pixels = {0};
  td_status st = TD_OK;
  if (!data || !td_base64_decode(&file, data + 1, strlen(data + 1)))
    st = td_fail(err, TD_EFORMAT, "its base64 is damaged");
  if (st == TD_OK) st = td_buf_status(&file, err);
  const uint8_t *bytes = (const uint8_t *)td_buf_text(&file);
  if (st == TD_OK) st = td_image_decode(&pixels, bytes, file.len, &limits, err);
  if (st == TD_OK) st = td_image_prepare(&image->input, &image->rgb, &pixels, &r->processor, err);
  td_image_free(&pixels);
  td_buf_free(&file);
  return st == TD_OK ? st : td_err_prefix(err, "%s", image->name);
}

// Those of the messages that are sent, in their order, to r->images.
static td_status gather(td_runner *r, td_err *err) {
  const td_conversation *c = &r->conversation;
  size_t n = 0;
  for (size_t i = c->first; i < c->n; i++)
    n += c->messages[i].images.n;
  r->n_images = 0;
  if (!n) return TD_OK;
  if (!r->processor.patch)
    return td_fail(err, TD_EUNSUPPORTED,
                   "%s does not see images, or has no preprocessor_config.json that is known",
                   td_model_name(r->session->model));
  if (r->options->receipt)
    return td_fail(err, TD_EINVAL, "--receipt is of text alone: leave out the images");
  td_image_input *images = realloc(r->images, n * sizeof *images);
  if (!images) return td_fail(err, TD_ENOMEM, "out of memory");
  r->images = images;
  for (size_t i = c->first; i < c->n; i++)
    for (size_t k = 0; k < c->messages[i].images.n; k++) {
      td_attached *image = &c->messages[i].images.items[k];
      td_status st = image->rgb ? TD_OK : prepare(r, image, err);
      if (st != TD_OK) return st;
      r->images[r->n_images++] = image->input;
    }
  return TD_OK;
}

td_status td_run_put_images(td_runner *r, td_token_ids *ids, td_err *err) {
  td_token_ids out = {0};
  uint32_t n = 0;
  td_status st = gather(r, err);
  if (st != TD_OK || !r->n_images) return st;
  const int32_t token = td_model_config_of(r->session->model)->vision.image_token;
  for (size_t i = 0; i < ids->n && st == TD_OK; i++) {
    uint32_t n_times = 1;
    if (ids->ids[i] == token && n < r->n_images) {
      r->images[n].at = (uint32_t)out.n;
      n_times = r->images[n].n_tokens;
    }
    n += ids->ids[i] == token;
    for (uint32_t k = 0; k < n_times && st == TD_OK; k++)
      st = td_token_ids_push(&out, ids->ids[i], err);
  }
  if (st == TD_OK && n != r->n_images)
    st = td_fail(err, TD_EUNSUPPORTED, "the chat template shows %u of %u images", n, r->n_images);
  td_token_ids_free(st == TD_OK ? ids : &out);
  if (st == TD_OK) *ids = out;
  return st;
}
