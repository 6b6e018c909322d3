// src/engine/images.c - images' embeddings in steps, and positions of tokens behind images.
#include "engine/images.h"

#include <stdlib.h>

#include "base/grow.h"
#include "engine/attn/rope.h"
#include "engine/rows.h"

// Rows [from, from + n) of an image, which are tokens of sequence seq_idx of the step from
// token_begin on.
typedef struct {
  const td_image_rows *rows;
  uint32_t seq_idx, token_begin, from, n;
} image_piece;

struct td_images {
  image_piece *pieces; // of the step
  size_t n_pieces, cap_pieces;
  float *host_cos_sin; // [max_step_tokens][rot_dim / 2][2], pinned; and the device's copy
  float *cos_sin;
};

td_status td_images_open(td_engine *e, td_err *err) {
  if (!e->opts.vision) return TD_OK;
  td_images *images = e->images = calloc(1, sizeof *images);
  if (!images) return td_fail(err, TD_ENOMEM, "out of memory: images");
  if (!td_model_has_axes(e->config)) return TD_OK;
  const size_t n_bytes = (size_t)e->opts.max_step_tokens * td_rope_dims(e->config) * sizeof(float);
  td_status st = td_dev_alloc_host(e->dev, (void **)&images->host_cos_sin, n_bytes, err);
  return st == TD_OK ? td_dev_alloc(e->dev, (void **)&images->cos_sin, n_bytes, err) : st;
}

void td_images_close(td_engine *e) {
  if (!e->images) return;
  td_images_end(e);
  td_dev_free_host(e->dev, e->images->host_cos_sin);
  td_dev_free(e->dev, e->images->cos_sin);
  free(e->images->pieces);
  free(e->images);
}

bool td_images_overlap(const td_step_seq *seq, const td_image_input *image, uint32_t *begin,
                       uint32_t *end) {
  *begin = seq->n_past > image->at ? seq->n_past : image->at;
  *end = seq->n_past + seq->n_tokens;
  if (*end > image->at + image->n_tokens) *end = image->at + image->n_tokens;
  return *begin < *end;
}

bool td_images_are_in(const td_step_seq *seqs, uint32_t n_seqs) {
  uint32_t begin, end;
  for (uint32_t i = 0; i < n_seqs; i++)
    for (uint32_t k = 0; k < seqs[i].n_images; k++)
      if (td_images_overlap(&seqs[i], &seqs[i].images[k], &begin, &end)) return true;
  return false;
}

static td_status add_piece(td_engine *e, const td_step_seq *seq, uint32_t seq_idx,
                           const td_image_input *image, td_err *err) {
  td_images *m = e->images;
  uint32_t begin, end;
  if (!td_images_overlap(seq, image, &begin, &end)) return TD_OK;
  if (!m)
    return td_fail(err, TD_EINVAL, "an image for %s, which does not see", td_model_name(e->model));
  if (!TD_GROW(m->pieces, m->n_pieces, m->cap_pieces, 8))
    return td_fail(err, TD_ENOMEM, "out of memory: images of a step");
  image_piece *piece = &m->pieces[m->n_pieces];
  *piece = (image_piece){.seq_idx = seq_idx,
                         .token_begin = begin - seq->n_past,
                         .from = begin - image->at,
                         .n = end - begin};
  td_status st = td_vision_pin(e->opts.vision, image, &piece->rows, err);
  m->n_pieces += st == TD_OK;
  return st;
}

td_status td_images_begin(td_engine *e, const td_step_seq *seqs, uint32_t n_seqs, td_err *err) {
  td_images_end(e); // of a step that failed before its end
  td_status st = TD_OK;
  for (uint32_t i = 0; i < n_seqs; i++)
    for (uint32_t k = 0; k < seqs[i].n_images && st == TD_OK; k++)
      st = add_piece(e, &seqs[i], i, &seqs[i].images[k], err);
  return st;
}

void td_images_end(td_engine *e) {
  td_images *m = e->images;
  while (m && m->n_pieces)
    td_vision_unpin(e->opts.vision, m->pieces[--m->n_pieces].rows);
}

int32_t td_images_position(td_engine *e, const td_step_seq *seq, uint32_t token, uint32_t t) {
  int32_t offset, at[3];
  const td_image_input *image = td_mrope_find(e->config, seq->images, seq->n_images, token,
                                              &offset);
  offset += seq->rope_offset;
  if (!e->step.has_axes) return (int32_t)token + offset;
  if (image)
    td_mrope_position(image, token, offset, at);
  else
    at[0] = at[1] = at[2] = (int32_t)token + offset;
  td_rope_fill_axes(e->images->host_cos_sin + (size_t)t * td_rope_dims(e->config), e->config, at);
  return (int32_t)t;
}

void td_images_upload(td_engine *e) {
  const td_images *m = e->images;
  if (!e->step.has_axes) return;
  td_op_copy(e->stream, m->cos_sin, m->host_cos_sin,
             (size_t)e->step.n_tokens * td_rope_dims(e->config) * sizeof(float));
  e->step.axes_cos_sin = m->cos_sin;
}

// Part i of the piece's rows, and which of the step's tokens they are.
static char *rows_of(const td_engine *e, const image_piece *piece, uint32_t i, size_t *token) {
  *token = (size_t)e->first_token[piece->seq_idx] + piece->token_begin;
  return piece->rows->rows +
         ((size_t)i * piece->rows->n_tokens + piece->from) * e->config->dim * e->act_bytes;
}

void td_images_embed(td_engine *e, void *out) {
  const td_images *m = e->images;
  size_t token;
  for (size_t i = 0; m && i < m->n_pieces; i++) {
    const char *rows = rows_of(e, &m->pieces[i], 0, &token);
    td_op_copy(e->stream, td_rows_offset(e, out, token * e->config->dim), rows,
               (size_t)m->pieces[i].n * e->config->dim * e->act_bytes);
  }
}

void td_images_add_deep(td_engine *e, uint32_t layer_idx) {
  const td_images *m = e->images;
  size_t token;
  if (layer_idx >= e->config->vision.n_deep) return;
  for (size_t i = 0; m && i < m->n_pieces; i++) {
    const char *rows = rows_of(e, &m->pieces[i], 1 + layer_idx, &token);
    td_op_add(e->stream, td_rows_offset(e, e->step.whole.x, token * e->config->dim), rows,
              (size_t)m->pieces[i].n * e->config->dim);
  }
}
