// src/engine/experts/expert_drive.h - routed experts that come from the drive, through an arena in
// memory (model/drive/arena.h), to a CPU. Internal to engine/.
//
// In a layer the calling thread waits for the routing, takes the experts of its tokens and queues
// those that are in memory, group by group as the others land. Each pair of token and expert has a
// result of its own, and results are added in the router's order, so no bit depends on where an
// expert was found, or when. A prompt that uses nearly all experts of a layer goes through them in
// the files' order, the next layer's first ones being read meanwhile.
//
// In decode the router of a layer also gets what goes into the layer, as if its attention added
// nothing, and experts that it names and memory lacks are read while attention is computed, if
// steps are faster so (prefetch_trial.h). Not beside a GPU, whose attention takes too little time.
#pragma once

#include "engine/engine_impl.h"

td_status td_expert_drive_open(td_engine *engine, td_err *err); // on error, close it too
void td_expert_drive_close(td_engine *engine);
// may_prefetch: it is a step of whole sequences, not of the layer that drafts.
void td_expert_drive_begin_step(td_engine *engine, bool may_prefetch);
// Whether the layer's experts are to be guessed, and where: ids [n_tokens][top_k], and as many
// weights, which nobody reads. NULL: not in this step or layer.
int32_t *td_expert_drive_guess(const td_engine *engine, uint32_t layer_idx, float **weights);
void td_expert_drive_note_guessed(td_engine *engine); // the guess is queued
// Pins end; nothing of the step is queued any more.
void td_expert_drive_end_step(td_engine *engine);
void *td_expert_drive_sum(td_engine *engine); // [max_step_tokens][dim], for the experts' sum
// The routing of a layer's tokens is queued.
void td_expert_drive_note_routed(td_engine *engine);
// Queues the routed experts of the step's tokens from first_token on, whose routing is queued, or
// known if the CPU is the expert device. all: arguments as for all of the layer's experts, with
// their sum at out, which is undefined if the step is abandoned meanwhile.
void td_expert_drive_compute(td_engine *engine, uint32_t first_token, uint32_t layer_idx,
                             const td_moe_args *all);
// The step's tokens fail if one of the n experts, which have landed, could not be read.
void td_expert_drive_fail_missing(td_engine *engine, const td_taken_expert *taken, uint32_t n);
