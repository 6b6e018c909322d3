// src/engine/engine_impl.h - state shared by engine.c (memory, steps), forward.c (operators), moe.c
// (MLP, routing, offload), expert_stream.c and dense_stream.c (streaming) and kv_transfer.c (pages
// in host memory).
#pragma once

#include <stdint.h>

#include "device/device.h"
#include "engine/attn/kind.h"
#include "engine/dense_slots.h"
#include "engine/dual_batch.h"
#include "engine/engine.h"
#include "engine/step_plan.h"

// A step runs decode tokens and prefill chunks as two groups, because attention is computed
// differently. A sequence's result never depends on the other sequences of its step.
enum { GROUP_DECODE, GROUP_PREFILL, N_GROUPS };

// Tokens [token_begin, token_begin + view.n_tokens) of the step. Indices in view count from the
// group's first token.
typedef struct {
  td_batch_view view;
  uint32_t token_begin;
  const int32_t *blocks; // [view.n_seqs][td_window_max_blocks], device memory
} step_group;

// Tokens that pass through the layers together: the whole step, or, with offloaded experts, the
// first or second half of a decode step, so that attention of one half overlaps the experts of the
// other.
typedef struct td_microbatch {
  // tokens [begin, begin + n_tokens) of the step; index of the microbatch
  uint32_t begin, n_tokens, idx;
  step_group groups[N_GROUPS]; // token_begin counts from the microbatch's first token
  const int32_t *position;     // for rotation, in dev_meta; groups have places in pages
  char *x, *delta; // the microbatch's rows of the engine's x and delta, kept from layer to layer
} td_microbatch;

// Set to the step number (td_engine.n_steps) when the event has happened in that step. Padded to a
// cache line of its own.
typedef struct {
  _Alignas(64) _Atomic uint32_t step;
} td_engine_signal;

// Routed experts computed by a second device.
typedef struct {
  td_dev *dev; // NULL: no offload
  td_stream *stream;
  uint32_t max_tokens; // largest number of tokens per transfer
  char *in;            // host memory; layout as at h
  void *out;           // host memory: [max_tokens][dim]
  // given, input_signals: a layer's input is in host memory. done, done_signals: the experts' sum
  // is. Steps with TD_HANDOVER_SIGNALS use the signals, which are in host memory,
  // [n_layers][TD_MAX_MICROBATCHES] each; other steps use the events.
  td_event *given, *done;
  td_engine_signal *input_signals, *done_signals;
} td_moe_offload;

typedef struct td_expert_stream td_expert_stream;
typedef struct td_dense_stream td_dense_stream;
typedef struct td_kv_outlet td_kv_outlet;
typedef struct td_expert_cache td_expert_cache;
typedef struct td_expert_peer td_expert_peer;
typedef struct td_expert_drive td_expert_drive;
typedef struct td_images td_images;
typedef struct td_window td_window;
typedef struct td_ranks td_ranks;
typedef struct td_rank td_rank;

// How far the step's operators are queued: the next layer, and the next group of the streamed layer
// before it, if that has any left.
typedef struct {
  uint32_t layer_idx, group, n_groups;
} td_engine_cursor;

// What a step needs beside the memory that the engine opened.
typedef struct {
  td_microbatch whole, microbatches[TD_MAX_MICROBATCHES];
  td_step_plan plan;
  td_engine_cursor cursor;
  uint32_t n_tokens, n_rows, n_seqs;
  uint64_t begin_ns, begin_trace_ns;   // when it began
  bool is_queued;                      // all of its operators are
  bool is_abandoned;                   // no more of them are: nobody wants it
  bool is_copied;                      // the host gets all logits, not only each row's top ones
  size_t meta_len;                     // entries of meta that it uses
  const uint32_t *number, *dev_number; // n_steps, in meta and in dev_meta
  const int32_t *tokens, *rows;        // in dev_meta
  const float *temperature;            // [n_rows], in dev_meta
  const int32_t *trail_first;          // in dev_meta, of the sequences of GROUP_DECODE
  const int32_t *dev_slots;            // of cached experts on the engine's device, in dev_meta
  const int32_t *dev_peer_slots;       // of cached experts on the peer, in dev_meta
  bool has_axes;             // positions of microbatches are rows of axes_cos_sin, a token each
  const float *axes_cos_sin; // takes the place of the engine's cos_sin
} td_step_run;

struct td_engine {
  const td_model *model;
  const td_model_config *config;
  td_dev *dev;
  td_stream *stream;
  td_moe_offload offload;
  td_expert_stream *streaming; // NULL: no streaming
  td_dense_stream *dense;      // NULL: dense weights stay on the device
  td_kv_outlet *outlet;        // with opts.transfer; else NULL
  td_expert_cache *cache;      // of experts, for decode; NULL: none
  td_expert_peer *peer;        // the other device with cached experts; NULL: none
  td_expert_drive *drive;      // experts come from the drive; NULL: they are in memory
  td_images *images;           // NULL: without opts.vision
  td_window *window;           // NULL: no layer has a window that leaves the KV pages
  td_ranks *ranks;             // rank 0 of several: the others; else NULL
  td_rank *rank;               // of several: this engine's end; else NULL
  td_engine_opts opts;
  size_t act_bytes; // of one activation element
  uint32_t max_pages;

  // device memory; activations are [max_step_tokens][...]
  // residual stream (or streams), normed input, a block's output: [dim]
  void *x, *h, *delta;
  void *act[TD_N_ACTS]; // of attention; NULL: no layer uses it
  void *shared;    // [dim], output of a gated shared expert or of a dense MLP beside; NULL: neither
  void *act_words; // td_attn_rows.words a token; NULL: none
  float *router_logits;
  float *cos_sin;      // [max_seq_tokens][rot_dim/2][2]
  float *pool_cos_sin; // as cos_sin, of layers with pooled keys; NULL: no layer has any
  float *wide_cos_sin; // [max_seq_tokens][wide_head_dim/2][2]; NULL: no layer has wide heads
  float *hyper;        // [max_step_tokens][td_hyper_scores]; NULL: no hyper-connections
  // With hyper_rank: normed streams, their gates, [n_streams * dim] each, and [hyper_rank].
  void *streams, *gates, *low;
  float *query_scale;     // [max_seq_tokens]; NULL: queries are not scaled
  float *dev_logits;      // [logits_rows][n_vocab]
  td_top_logits *dev_top; // [logits_rows]; NULL unless can_rank
  int32_t *dev_meta;
  // States after the tokens of sequences that draft, but their last ones; NULL: states do not go
  // back, or there are none.
  char *trail;             // [layers with a state][max_drafts][td_kv_undo_bytes]
  void *draft_in;          // [2 * td_engine_row], of the layer that drafts; NULL: none does
  void *draft_hidden;      // [max_step_seqs][td_engine_row], its states where tokens were drafted
  td_weight draft_head;    // its output matrix: the model's, or in 4 bits
  void *draft_head_memory; // the latter's memory
  int32_t *dev_routing;    // [n_layers][n_tokens][top_k]; NULL unless recorded
  char *kv_pages;          // see td_kv_layout
  td_kv_layout layout;
  uint32_t part[TD_MAX_LAYERS];   // of each layer in a page
  size_t trail_at[TD_MAX_LAYERS]; // of each layer's slots

  // host memory
  int32_t *meta;           // staged copy of dev_meta
  td_step_seq *draft_seqs; // [max_step_seqs], of the layer that drafts
  uint32_t *draft_rows;    // [max_step_seqs]: where their states are in a step's x
  uint32_t *first_token;   // index of each sequence's first token in the step
  int32_t *trail_of; // [max_step_seqs]: see td_state_trail.first; NULL: states do not go back, or
                     // there are none
  int32_t *routing;  // copy of dev_routing
  // Of n-grams, on a GPU, pinned: rows of the step's tokens, [layers with n-grams][max_step_tokens]
  // [ngram_dim], and ids that were copied from states, [max_step_seqs][ngram_size - 1]. NULL: not
  // needed.
  uint16_t *ngram_rows;
  int32_t *ngram_ids;
  float *logits;        // [logits_rows][n_vocab]
  td_top_logits *top;   // [logits_rows]; NULL unless can_rank
  uint32_t logits_rows; // allocated rows
  bool can_rank;        // logits would cross a bus to the host, so the device can rank them

  // from step to step
  td_dual_batch_tuner dual_batch;
  uint32_t n_steps; // so far
  bool is_confined; // operators queued from now on run on a share of the device
  td_event *done;   // recorded at the end of a step
  td_step_run step; // the one being run, or the last
};

// moe.c
td_status td_moe_offload_open(td_engine *engine, td_err *err); // on error, close it too
void td_moe_offload_close(td_engine *engine);
// Size of the offload input in h for n_tokens tokens (hidden states, expert ids, weights), and its
// offset for a microbatch that follows n_before tokens of the other one.
size_t td_engine_offload_input_bytes(const td_engine *engine, size_t n_tokens);
size_t td_engine_offload_input_at(const td_engine *engine, uint32_t n_before);
void td_moe_offload_enqueue(td_engine *engine); // queues all layers on the expert device
// lets its stream run to the end after a failure of the engine's device
void td_moe_offload_release(td_engine *engine);
// delta (+)= dense MLP of the layer, or its shared expert, applied to h.
void td_engine_mlp(td_engine *engine, const td_microbatch *part, const td_layer *layer,
                   bool accumulate);
// Before the layer's attention, in a step that prefetches experts from the drive: has its router
// guess them from x. Overwrites delta.
void td_engine_moe_guess(td_engine *engine, const td_microbatch *part, uint32_t layer_idx);
// delta = the layer's experts (routed and shared) applied to h; complete after td_engine_moe_end
// and td_rows_complete of what it returns, or an operator that adds both.
// For a streamed layer, td_engine_moe_group follows for every group instead.
void td_engine_moe_begin(td_engine *engine, const td_microbatch *part, uint32_t layer_idx);
void td_engine_moe_group(td_engine *engine, const td_microbatch *part, uint32_t layer_idx,
                         uint32_t group);
// Returns activations that delta lacks, [n_tokens][dim], or NULL; they stay until the layer's next
// td_engine_moe_begin.
const void *td_engine_moe_end(td_engine *engine, const td_microbatch *part, uint32_t layer_idx);

// In a step of several ranks, when hidden states are being gathered: routes, and computes the own
// experts unless they stream; then td_engine_moe_ranks_group follows for every group. For each
// half, td_engine_moe_ranks_end makes delta the layer's experts applied to h.
void td_engine_moe_ranks_begin(td_engine *engine, uint32_t layer_idx);
// The group's experts for the tokens of all ranks. The first group routes a half when it has
// arrived, and the last one has a half's sums exchanged when they are complete.
void td_engine_moe_ranks_group(td_engine *engine, uint32_t layer_idx, const td_moe_args *group,
                               bool is_first, bool is_last);
void td_engine_moe_ranks_end(td_engine *engine, uint32_t half, uint32_t layer_idx);

// For the routed experts of n_tokens decode tokens whose input (see td_engine_offload_input_bytes)
// is at `input`; without a place for the sum.
td_moe_args td_engine_moe_args(const td_engine *engine, uint32_t layer_idx, void *input,
                               uint32_t n_tokens);

// expert_stream.c
td_status td_expert_stream_open(td_engine *engine, td_err *err); // on error, close it too
void td_expert_stream_close(td_engine *engine);
td_status td_expert_stream_sync(td_engine *engine, td_err *err);
td_stream *td_expert_stream_queue(const td_engine *engine); // its copies' stream; NULL: none
// Whether the layer's experts can be streamed, in their stored format. Requests that their memory
// be registered.
bool td_engine_can_stream(td_engine *engine, uint32_t layer_idx);
// Whether less than ahead_bytes wait to be copied, and neither the ring nor the device's queue is
// full.
bool td_engine_may_queue_group(td_engine *engine, uint64_t ahead_bytes);
void td_expert_stream_wait(td_engine *engine); // for the oldest group to be copied or computed
// The groups of a layer that this engine streams: [*group, *n_groups).
void td_engine_stream_range(const td_engine *engine, uint32_t *group, uint32_t *n_groups);
// Copies group `group` of the layer's experts and adds it to their sum; with the last group, delta
// += that sum. routed: arguments as for all of the layer's experts.
void td_engine_stream_group(td_engine *engine, const td_microbatch *part, uint32_t layer_idx,
                            uint32_t group, const td_moe_args *routed);

// dense_stream.c; where dense weights stay on the device, the functions of steps do nothing.
td_status td_dense_stream_open(td_engine *engine, td_err *err); // on error, close it too
void td_dense_stream_close(td_engine *engine);
td_status td_dense_stream_sync(td_engine *engine, td_err *err);
// [n_layers], see td_step_shape.dense_bytes
const uint64_t *td_dense_stream_layer_bytes(const td_engine *engine);
uint64_t td_dense_stream_copied_bytes(const td_engine *engine); // since the engine opened
// The layer as the step finds it: streamed matrices have addresses in the device's memory, which
// hold their data between td_dense_stream_use and td_dense_stream_leave.
const td_layer *td_engine_layer(const td_engine *engine, uint32_t layer_idx);
// Whether w is streamed: its address is a slot's, in the device's memory.
bool td_engine_is_in_slot(const td_engine *engine, const td_weight *w);
void td_dense_stream_begin_step(td_engine *engine);
// Work queued from here on may use the part's weights; their copy is queued if it is not yet.
void td_dense_stream_use(td_engine *engine, uint32_t layer_idx, td_dense_part part);
void td_dense_stream_leave(td_engine *engine, td_dense_part part); // no further work will
// Queues the copies of the next layer's weights. The layer has been left.
void td_dense_stream_fetch_ahead(td_engine *engine, uint32_t layer_idx);

// expert_cache.c
td_status td_expert_cache_open(td_engine *engine, td_err *err); // on error, close it too
void td_expert_cache_close(td_engine *engine);
// Entries of a step's tables: slots of the experts of all layers.
size_t td_expert_cache_meta_entries(const td_engine *engine);
// [n_layers]: layers whose experts can be cached; NULL: none.
const bool *td_expert_cache_layers(const td_engine *engine);
// [n_layers], see td_step_shape.pair_share; NULL: no peer has experts.
const uint8_t *td_expert_cache_pair_share(const td_engine *engine);
// Before a step's tables are copied: experts that have arrived since the last one are used from now
// on. Writes [n_layers][n_experts] slots on the engine's device, -1 for experts that are not there,
// and with a peer the slots there; returns the number of entries.
size_t td_expert_cache_begin_step(td_engine *engine, int32_t *slots);
// After a step: what it used counts, and a few experts begin to move.
void td_expert_cache_end_step(td_engine *engine);
// Queues the cached experts of the microbatch's tokens; ids of routed are in device memory.
void td_expert_cache_compute(td_engine *engine, const td_microbatch *part, uint32_t layer_idx,
                             const td_moe_args *routed);
// Queues the others on the expert device; args: as for all of the layer's experts there.
void td_expert_cache_compute_rest(td_engine *engine, const td_microbatch *part, uint32_t layer_idx,
                                  const td_moe_args *args);
// Queues the sum of both: to delta or, for a layer with shared experts, which have that, to what it
// returns. args: as given to compute_rest, ids and weights in host memory.
const void *td_expert_cache_join(td_engine *engine, const td_microbatch *part, uint32_t layer_idx,
                                 const td_moe_args *args);

// engine.c, for ranks
size_t td_engine_meta_entries(const td_engine *engine, size_t n_seqs); // of a step's tables
td_status td_engine_check_step(const td_engine *engine, const td_step_seq *seqs, uint32_t n_seqs,
                               td_err *err);
// Fills meta and the groups. Rows of logits follow the order of seqs. wholes: if seqs are pieces,
// the sequence of td_window_begin that each belongs to; else NULL.
void td_engine_build_step(td_engine *engine, const td_step_seq *seqs, const uint32_t *wholes,
                          uint32_t n_seqs);
// Whether the host gets all logits of the step, by what all of its sequences want.
void td_engine_note_wants(td_engine *engine, const td_step_seq *seqs, uint32_t n_seqs);
// The microbatch is tokens [begin, begin + n) of the step.
void td_engine_place_part(const td_engine *engine, td_microbatch *part, uint32_t begin, uint32_t n);
// Runs the step that was built, with n_rows rows of logits.
td_status td_engine_run_step(td_engine *engine, uint32_t n_rows, td_err *err);

// Queues the next piece of the forward pass of the step described by engine: a layer, up to its
// experts if those stream, or a group of streamed experts. False: none is left.
bool td_engine_forward_piece(td_engine *engine);
// Queues one layer of the whole step, whose experts are on the engine's device: x += its output.
void td_engine_run_layer(td_engine *engine, uint32_t layer_idx);
void td_engine_forward(td_engine *engine); // queues all pieces
// Copies to the host what sampling needs (top logits of each row, or all logits) and the routing
// record.
void td_engine_copy_outputs(td_engine *engine);

// ngrams.c
td_status td_ngrams_open(td_engine *engine, td_err *err);
// Gathers rows of the step that was built, for a GPU, which does not read their tables. Waits for
// the stream if a sequence's past is not known.
td_status td_ngrams_begin(td_engine *engine, const td_step_seq *seqs, uint32_t n_seqs, td_err *err);
// The rows of a sequence's tokens in a step, as BF16 to out. fetched: the ids in front of the step,
// [hash.size - 1], unless the sequence's past is known or empty. Rows come from disk at the disk's
// pace: each token advances the device's progress counter.
void td_ngrams_gather(td_dev *dev, const td_ngram_table *table, const td_step_seq *seq,
                      const int32_t *fetched, uint16_t *out);
// The streams += embeddings of the n-grams that end with each token.
void td_engine_ngrams(td_engine *engine, const td_microbatch *part, const td_layer *layer,
                      uint32_t layer_idx);

// engine.c
size_t td_engine_row(const td_model_config *config); // elements of a token's residual
// Of the layer, for a group of the step.
td_state_trail td_engine_trail(const td_engine *engine, uint32_t layer_idx, int group);

// draft_layer.c
td_status td_draft_layer_open(td_engine *engine, td_err *err);
// draft_head.c
td_status td_draft_head_open(td_engine *engine, td_err *err);

// kv_transfer.c; without opts.transfer, all of them do nothing.
td_status td_kv_outlet_open(td_engine *engine, td_err *err); // on error, close it too
void td_kv_outlet_close(td_engine *engine);
// Copies in the sequences' past, where the device lacks it; the step's work waits for that.
void td_kv_outlet_begin(td_engine *engine, const td_step_seq *seqs, uint32_t n_seqs);
// Whether the step's keys and values also go to host memory, and the layer's pages there.
bool td_kv_outlet_is_active(const td_engine *engine);
td_kv_view td_kv_outlet_view(const td_engine *engine, uint32_t layer_idx);
// The layer's keys and values of prompts are stored by what is queued so far: copies them out.
void td_kv_outlet_layer(td_engine *engine, uint32_t layer_idx);
void td_kv_outlet_finish(td_engine *engine); // the stream waits for the step's copies
// The page's states were rolled back; those in host memory are ahead of them.
void td_kv_outlet_note_rolled_back(td_engine *engine, int32_t page);
// After the stream has been waited for: the pages that the step wrote are current.
td_status td_kv_outlet_end(td_engine *engine, td_err *err);
// For td_engine_copy_page: the stream waits until the device has `page`; a part of a page, at the
// offset in kv_pages, leaves the device; all of the page has left it and the stream is idle.
void td_kv_outlet_enter(td_engine *engine, int32_t page);
void td_kv_outlet_part(td_engine *engine, size_t at, size_t n_bytes);
void td_kv_outlet_note(td_engine *engine, int32_t page);

// Whether the layer keeps a state in a page, instead of keys and values of all its tokens.
static inline bool td_engine_has_state(const td_engine *engine, uint32_t layer_idx) {
  return engine->part[layer_idx] >= engine->layout.n_layers;
}

// The layer's part of all pages: keys and values, or states.
static inline td_kv_view td_engine_kv_view(const td_engine *engine, uint32_t layer_idx) {
  const td_kv_layout *layout = &engine->layout;
  const uint32_t part = engine->part[layer_idx];
  const td_model_config *config = engine->config;
  const td_attn_cache cache = td_attn_of(config, layer_idx)->cache(config);
  return (td_kv_view){
      .pages = engine->kv_pages + td_kv_layout_part_at(layout, part, engine->opts.n_pages, 0),
      .page_bytes = td_kv_layout_bytes_of_part(layout, part),
      .dtype = cache.state_bytes && !cache.is_beside ? TD_F32 : engine->opts.kv_dtype,
      .n_bf16 = cache.f8.n_bf16};
}

// The states beside the layer's keys and values.
static inline td_kv_view td_engine_beside_view(const td_engine *engine, uint32_t layer_idx) {
  td_kv_view out = td_engine_kv_view(engine, layer_idx);
  out.pages += engine->layout.beside_at;
  out.dtype = TD_F32;
  return out;
}

// Whether the layer's routed experts are offloaded.
static inline bool td_engine_is_offloaded(const td_engine *engine, uint32_t layer_idx) {
  return engine->offload.dev && layer_idx >= engine->opts.n_gpu_expert_layers &&
         td_model_is_moe(engine->config, layer_idx);
}

// Index of a layer's first entry in the step's routing record.
static inline size_t td_engine_routing_at(const td_engine *engine, uint32_t layer_idx) {
  return (size_t)layer_idx * engine->step.n_tokens * engine->config->top_k;
}
