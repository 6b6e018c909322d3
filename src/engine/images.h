// src/engine/images.h - images' embeddings in steps, and positions of tokens behind images.
// Internal to engine/.
#pragma once

#include "engine/engine_impl.h"
#include "model/mrope.h"

td_status td_images_open(td_engine *engine, td_err *err); // on error, close it too
void td_images_close(td_engine *engine);

// The part of an image that is among the sequence's tokens of a step, as tokens of the sequence:
// [*begin, *end). False: none is.
bool td_images_overlap(const td_step_seq *seq, const td_image_input *image, uint32_t *begin,
                       uint32_t *end);
bool td_images_are_in(const td_step_seq *seqs, uint32_t n_seqs); // any

// Before the step is built: embeds what is not known, and keeps it until td_images_end.
td_status td_images_begin(td_engine *engine, const td_step_seq *seqs, uint32_t n_seqs, td_err *err);
void td_images_end(td_engine *engine);
// The position of a sequence's token. In a step with images the engine has a rotary table by token,
// of which it fills the step's token t, in place of the one by position.
int32_t td_images_position(td_engine *engine, const td_step_seq *seq, uint32_t token, uint32_t t);
// Queues the copy of that table.
void td_images_upload(td_engine *engine);
// Queues: embeddings into the step's rows at out, [n_tokens][dim]; what is added behind a layer.
void td_images_embed(td_engine *engine, void *out);
void td_images_add_deep(td_engine *engine, uint32_t layer_idx);
