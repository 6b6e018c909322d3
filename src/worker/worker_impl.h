// src/worker/worker_impl.h - the worker's state, shared by worker.c (opening, the loop) and
// results.c (what a step gave, as records).
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/engine.h"
#include "model/drive/arena.h"
#include "runtime/devices.h"
#include "worker/args.h"
#include "worker/front_link.h"
#include "worker/kv_memory.h"
#include "worker/request.h"
#include "worker/step.h"
#include "worker/stream_pace.h"

typedef struct {
  td_worker_opts opts;
  td_front_link front_link;
  td_model *model;
  const td_model_config *config;
  td_expert_arena *arena; // NULL: experts do not come from the drive
  td_devices devices;
  td_engine *engine;
  td_kv_memory kv;
  td_token_index *tokens; // NULL: the checkpoint has no tokenizer
  td_grammars *grammars;  // NULL: no tokens
  int masks_fd;           // can be read when a grammar's mask was made; -1: none
  td_requests requests;
  td_step step;
  // Prefill with streamed experts; NULL: engine does all.
  td_engine *streaming;
  td_engine_opts streaming_opts;
  // While streaming is the engine of devices.long_steps: the one with the usual steps. Else NULL.
  td_engine *saved_engine;
  td_step stream_step; // in progress if n is not 0; its requests are held
  td_stream_pace pace;
  uint64_t stream_begin_ns;
  td_stream_progress stream_begin; // as it was then
  uint64_t stream_until_bytes;     // queued_bytes up to which this decode step queues experts
  uint32_t n_beside;               // decode steps since
  td_segment trace;                // --trace records to it; closed without it
  bool has_draft_layer;            // td_model_use_mtp
  int32_t drawn;                   // the last token drawn; -1: none since a step's results began
  uint64_t n_steps, heartbeat_ns;
  uint64_t gpu_bytes, gpu_free_bytes; // see td_wire_heartbeat
  uint32_t n_threads;                 // of the thread pool
  // Of messages in the middle of a step.
  bool is_in_step;
  td_status link_status;
  td_err link_err;
  bool is_shut_down;
} td_worker;

// Before a DONE that says that the state in the request's last page is that after n_past tokens:
// it has to be where all workers find it.
td_status td_worker_save_state(td_worker *w, const td_worker_request *r, td_err *err);
// Sends what a computed step has for its requests.
td_status td_worker_post_results(td_worker *w, td_engine *engine, td_step *step, td_err *err);
// With a layer that drafts: before the results of a step are posted, which may end requests, notes
// which tokens follow its own and their pages; after, has it compute them, and guess the next
// tokens of requests that decode.
td_status td_worker_note_next(const td_worker *w, td_step *step, td_err *err);
td_status td_worker_draft(td_worker *w, td_step *step, td_err *err);
// Samples the tokens that waited for a mask which is made now.
td_status td_worker_answer_waiting(td_worker *w, td_err *err);
