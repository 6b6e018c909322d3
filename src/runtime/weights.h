// src/runtime/weights.h - where the weights live: mapped from the checkpoint's files through the
// page cache, or read once into shared memory (model/checkpoint/resident.h), with or without the
// routed experts, which then come from the drive (model/drive/arena.h). Makes the choice, loads,
// and reports on stderr.
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/mem_info.h"
#include "base/status.h"
#include "runtime/placement.h"

// Input of the choice.
typedef struct {
  td_weights_mode mode;
  td_placement placement;
  uint64_t file_bytes;     // size of the checkpoint
  uint64_t resident_bytes; // memory it takes when resident
  // what is converted and so in no file: when mapped, each worker would hold its own copy
  uint64_t converted_bytes;
  // KV cache of one context in host memory; auto leaves room for two besides the weights
  uint64_t kv_bytes, available_bytes;
  // memory that may become available: the machine's, or the control group's limit
  uint64_t limit_bytes;
  td_page_kind pages; // page kind that shared memory would get
  unsigned n_nodes;   // NUMA nodes
  // of resident_bytes, experts that can stay in the files; 0: none can, and why_not says so
  uint64_t streamed_bytes;
  const char *why_not;
  uint64_t slot_bytes, n_slots, least_slots; // of an expert; of all experts; that a token takes
  uint64_t arena_bytes;                      // as requested; 0: chosen here
  uint64_t token_bytes;                      // of activations, for a token of a step
  uint64_t draft_bytes;                      // of host memory for drafts, beside those
  uint32_t usual_chunk, n_ctx;               // tokens of a prompt's step, and of a context
} td_weights_need;

// What experts that stream need by the model's shape and the placement, which is set.
void td_weights_need_to_stream(td_weights_need *need, const td_model_config *config);

typedef struct {
  bool is_resident, is_warning; // is_warning: text is a warning
  bool is_streamed;             // is_resident but for the experts, of which arena_bytes hold some
  uint64_t arena_bytes;
  uint32_t prefill_chunk; // with is_streamed: tokens of a prompt's step
  char text[384];         // the reason, a sentence
} td_weights_choice;

// Auto chooses resident if it fits and either brings huge pages, spreads weights over NUMA nodes,
// saves workers a conversion, or lets a GPU stream experts from there. A GPU that holds all weights
// needs no other copy. It chooses to stream experts from the drive where memory is smaller than the
// files and no GPU holds them. TD_ENOMEM: resident was requested and can never fit, or memory is
// too small for stream. TD_EUNSUPPORTED: the model's experts cannot stream.
td_status td_weights_choose(td_weights_choice *out, const td_weights_need *need, td_err *err);

typedef struct {
  const td_runtime_opts *runtime;
  const atomic_bool *canceled; // may be NULL
  td_placement placement;
  bool has_host_kv; // KV pages are in host memory, whatever the placement
  double arena_gib; // of --weights stream=GIB; 0: not given
} td_weights_opts;

// Chooses, and loads if the choice is resident, with progress on stderr. *fd is the descriptor of
// the weights, the caller's to close; -1: map the files. *prefill_chunk: of td_weights_choice, or
// 0. Any thread.
td_status td_weights_open(int *fd, uint32_t *prefill_chunk, const td_weights_opts *opts,
                          td_err *err);
