// src/engine/engine.h - the forward pass over a paged KV pool, on any device.
// Thread: one caller at a time per engine. Sequences and their page tables belong to the caller
// (kv/kv.h). The engine owns activations and streams; it also owns page storage unless the caller
// passes kv_pages.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "device/device.h"
#include "engine/attn/kv_layout.h"
#include "engine/kv_transfer.h"
#include "engine/sampler.h"
#include "engine/vision/vision.h"
#include "model/drive/arena.h"
#include "model/model.h"

typedef struct td_engine td_engine;

// With fewer tokens in a step of several devices, matrices in halves take longer than the exchange
// that they would hide.
enum { TD_OVERLAP_TOKENS = 1024 };

typedef struct {
  uint32_t n_pages;         // KV pages in the pool
  uint32_t page_tokens;     // tokens per KV page
  uint32_t max_step_tokens; // most tokens one step may carry
  uint32_t max_step_seqs;   // most sequences one step may carry
  uint32_t max_drafts;      // rows of logits that a step may want beside one a sequence
  bool has_draft_layer;     // td_engine_draft is called, if the model uses its layer for that
  uint32_t max_seq_tokens;  // longest context
  td_dtype kv_dtype;        // TD_F32, or TD_F16 for half the memory and 12 bits of precision; or
                            // TD_F8E4M3 (tandem/kv_f8.h), with what td_attn_check_kv takes
  // Borrowed storage for all pages, reachable by the device, 64-byte aligned: n_pages *
  // td_kv_layout_page_bytes. NULL: the engine allocates its own.
  void *kv_pages;
  // Borrowed: keeps kv_pages, which are its dev_pages, equal to host memory. NULL: nobody shares
  // them. Not with peer_devs.
  td_kv_transfer *transfer;
  // Borrowed: where the layers' routed experts are found in place of the model's matrices, whose
  // data are then not read. On a CPU, without the options below. NULL: the model has them.
  td_expert_arena *arena;
  // With arena, or NULL: whether nobody wants the step that is run any more. Asked again and again
  // while experts are read; the step is then abandoned as by an early td_engine_end.
  bool (*is_unwanted)(void *ctx);
  void *unwanted_ctx;
  td_vision *vision;   // borrowed: embeds images, for all engines of the process; NULL: none come
  bool record_routing; // keep each step's expert choices for td_engine_routing
  // Borrowed: the device that computes offloaded experts, from host memory. Experts of the first
  // n_gpu_expert_layers layers stay on the engine's device. NULL: no offload.
  td_dev *expert_dev;
  uint32_t n_gpu_expert_layers;
  // With expert_dev: microbatches of a decode step, 1 or 2. With 2, one device works on one
  // microbatch while the other device works on the other. 0: the faster of the two, measured
  // (dual_batch.h).
  uint32_t n_microbatches;
  // With expert_dev: bytes of the engine's device for the ring through which prefill streams
  // experts, in steps with at least break_even_tokens prompt tokens. 0: no streaming.
  size_t stream_bytes;
  uint32_t break_even_tokens; // 0: any
  // The dense weights of the last n layers do not stay on the device: every step copies them, into
  // a ring of td_dense_ring_bytes (dense_slots.h). For an engine that prefills only; decode steps
  // are slow with it. Not with peer_devs. 0: none.
  uint32_t n_streamed_dense;
  // Copies of streamed experts that td_engine_feed queues a bounded time ahead have at most this
  // many bytes each, so that another stream's copy never waits for a long one. 0: a default.
  size_t stream_piece_bytes;
  // With expert_dev: bytes of the engine's device for a cache of the experts that decode has used
  // last (hot_experts.h), buffers included. 0: none. Results by the cache differ from the expert
  // device's by rounding where the two devices' kernels do; on devices of one kind, by no bit.
  size_t cache_bytes;
  size_t cache_step_bytes; // that may move to it in a step, at least one expert; 0: a default
  // Borrowed: another device of the same kind, peer_cache_bytes of whose memory hold more of the
  // cache. It computes those experts in decode. NULL: none. Unless peer_always, it is used only
  // where that is expected to be faster (step_plan.h: td_pair_pays).
  td_dev *cache_peer;
  size_t peer_cache_bytes;
  bool peer_always;
  // The cache is filled when the engine opens and stays so, with experts from the first layer on,
  // every other one on the peer: results then do not depend on what was computed before.
  bool is_cache_fixed;
  bool is_urgent;     // the device runs its operators before other engines' operators
  bool is_confinable; // or: see td_engine_confine
  // Borrowed: more devices of the same kind as the engine's, for expert parallelism. All compute a
  // step of prompts with at least parallel_tokens tokens (0: where experts stream, and no fewer
  // than 64), if by td_engine_step. Each has a KV cache of its own. comm_backend: see td_comm_opts;
  // NULL: "auto".
  // From overlap_tokens tokens on (0: TD_OVERLAP_TOKENS), one half is exchanged while the other is
  // computed.
  td_dev *const *peer_devs; // [n_peers]
  uint32_t n_peers, parallel_tokens, overlap_tokens;
  const char *comm_backend;
  // With peer_devs and kv_pages: td_engine_note_written reports every step of another engine on the
  // same pages. Otherwise the past of sequences is sent to the peers before every step.
  bool writes_are_noted;
} td_engine_opts;

typedef enum {
  TD_WANT_NONE,
  TD_WANT_LAST,
  TD_WANT_EACH, // all, to draw from each of them
  TD_WANT_ALL,  // all, for td_engine_logits
} td_want;

// One sequence's part of a step: n_tokens new tokens after n_past cached ones.
typedef struct {
  const int32_t *tokens;
  uint32_t n_tokens, n_past;
  // [n_past]: those in front of tokens. NULL: not known; a GPU whose model needs some of them
  // (n-grams) then waits for a copy of them, from the states in pages, before the step.
  const int32_t *past;
  const int32_t *pages; // enough for n_past + n_tokens
  uint32_t n_pages;
  td_want want; // which of its tokens' logits are computed
  // Generated tokens rather than a chunk of a prompt. Attention then uses the form that is cheap
  // for one query (MLA: absorbed) and matrices use the kernels for few tokens. It is passed in, not
  // guessed from n_tokens: a prompt's result must not depend on how it was cut into chunks, and
  // generated tokens must give the same bits one by one or replayed together.
  bool is_decode;
  float temperature; // for sampling from its logits; 0: greedy
  // Images of the sequence, by rising `at`, also those in front of n_past. Of those that are among
  // tokens, embeddings are computed unless opts.vision keeps them; pixels of others are not read.
  // Borrowed until td_engine_begin returns; td_engine_draft takes them without pixels.
  const td_image_input *images; // [n_images]
  uint32_t n_images;
  int32_t rope_offset; // of others in front of those and of tokens (mrope.h: td_mrope_offset)
} td_step_seq;

// Rows of logits that a sequence wants.
static inline uint32_t td_step_seq_rows(const td_step_seq *seq) {
  return seq->want >= TD_WANT_EACH ? seq->n_tokens : seq->want == TD_WANT_LAST;
}

// model and dev are borrowed and must outlive the engine. On error *out is NULL; TD_ENOMEM names
// the bytes asked for and what to make smaller.
td_status td_engine_open(td_engine **out, const td_model *model, td_dev *dev,
                         const td_engine_opts *opts, td_err *err);
void td_engine_close(td_engine *engine);

void *td_engine_kv_pages(td_engine *engine); // its own or borrowed, see td_engine_opts

// Runs one step. Wanted logits are rows in the order of seqs and tokens, valid until the next step.
// TD_EINVAL: a token outside the vocabulary, too many tokens or sequences, or a context beyond
// max_seq_tokens; nothing was computed then.
td_status td_engine_step(td_engine *engine, const td_step_seq *seqs, uint32_t n_seqs, td_err *err);
// The same, calling meanwhile(ctx) again and again while the device computes.
td_status td_engine_step_with(td_engine *engine, const td_step_seq *seqs, uint32_t n_seqs,
                              void (*meanwhile)(void *ctx), void *ctx, td_err *err);

// The same step in parts, so that the caller can run steps of another engine on the same device and
// KV pages meanwhile: begin, feed until it returns true, end. seqs need not outlive begin. After an
// error of begin there is no end.
td_status td_engine_begin(td_engine *engine, const td_step_seq *seqs, uint32_t n_seqs, td_err *err);
// Queues work as long as less than ahead_bytes of streamed experts wait to be copied, and at least
// one group of experts if none waits. 0: queues nothing. A step that streams nothing is queued
// whole by the first call. Returns whether the whole step is computed; waits for nothing that
// streams.
bool td_engine_feed(td_engine *engine, uint64_t ahead_bytes);
// Whether operators queued from now on run on a share of the device's SMs, so that the rest is
// always free for its other engines, or on all of them, as at first. Without is_confinable, or
// where the device has no shares, it is all of them. Results are the same.
void td_engine_confine(td_engine *engine, bool is_confined);
void td_engine_wait(td_engine *engine); // until the next td_engine_feed has something to do
// Waits for what is queued. If that is not the whole step, it is abandoned: its logits and its
// tokens' KV entries are undefined.
td_status td_engine_end(td_engine *engine, td_err *err);
// Copies a KV page, of every layer keys and values or recurrent state, and waits until it is done.
// Not between td_engine_begin and end.
td_status td_engine_copy_page(td_engine *engine, int32_t to, int32_t from, td_err *err);
// With opts.transfer: before somebody else may continue from the page, which this device has filled
// in part. Copies its recurrent states to host memory, unless they are there, and waits until it is
// done. Not between td_engine_begin and end.
td_status td_engine_save_state(td_engine *engine, int32_t page, td_err *err);
// Another engine has computed this step on the same kv_pages, see td_engine_opts.writes_are_noted.
void td_engine_note_written(td_engine *engine, const td_step_seq *seqs, uint32_t n_seqs);
// With a layer that drafts (td_model_use_mtp), one of the sequences of the step computed last.
typedef struct {
  const int32_t *next; // [n_next]: the token that follows each of its first tokens
  uint32_t n_next;     // the others were rejected drafts, or what follows is not known
  int32_t *out;        // [n_drafts]: what may follow the last of next; NULL: not wanted
  // The layer has, and sees, the sequence from this position on, where a page begins: its positions
  // count from there. With drafts wanted the last of next is behind it.
  uint32_t from;
} td_draft_seq;
typedef struct {
  // Computed the step, with rows of logits: another one of the same device and KV pages, or itself.
  const td_engine *of;
  const td_step_seq *seqs;    // [n_seqs], as in the step
  const td_draft_seq *drafts; // [n_seqs]
  uint32_t n_seqs, n_drafts;
} td_draft_step;
// Computes that layer for the tokens of the step, so that later drafts know of them, and drafts.
// Sequences that want drafts have pages for n_drafts - 1 tokens after the text. Another engine's
// step must not have more tokens than this engine's steps take. Replaces the logits of this
// engine's last step.
td_status td_engine_draft(td_engine *engine, const td_draft_step *step, td_err *err);
// Rolls the recurrent states of a sequence of the last step, which wanted TD_WANT_EACH, back to
// those after its first n_tokens tokens, fewer than it had. page: the page of the last of them.
// Does nothing in a model without states. Before td_engine_draft.
td_status td_engine_roll_back(td_engine *engine, uint32_t seq_idx, uint32_t n_tokens, int32_t page,
                              td_err *err);
// All rows of a step with TD_WANT_ALL: f32 [n_rows][n_vocab]. The caller may overwrite them.
float *td_engine_logits(td_engine *engine);
// Samples once from a row, with the result of td_sampler_next but for rounding. Where the device
// ranks logits and the top ones suffice, the full row is not copied to the host, nor used if it was
// for others: what else a step has changes no bit.
td_status td_engine_draw(td_engine *engine, uint32_t row, td_sampler *sampler, int want_logprobs,
                         td_wire_token *out, td_err *err);
// All logits of a row, and its top ones (*top NULL: the device does not rank), to draw from later
// as td_engine_draw would. Valid until the next step.
td_status td_engine_fetch_logits(td_engine *engine, uint32_t row, const float **out,
                                 const td_top_logits **top, td_err *err);

// With opts.arena, after a step: whether sequence seq_idx of its seqs needed an expert that cannot
// be read from the drive; its logits and KV entries are undefined then. err, which may be NULL,
// says which.
bool td_engine_has_failed(const td_engine *engine, const td_step_seq *seqs, uint32_t seq_idx,
                          td_err *err);

// Expert ids that layer layer_idx chose in the last step: i32 [n_tokens][top_k], tokens in the
// engine's internal order. NULL for a dense layer or without record_routing.
const int32_t *td_engine_routing(const td_engine *engine, uint32_t layer_idx, uint32_t *n_tokens);

// Break-even: the number of prompt tokens from which a step streams experts. Such a step's time
// hardly depends on its number of tokens. 0: no step streams.
uint32_t td_engine_stream_tokens(const td_engine *engine);

// Whether the experts of all offloaded layers can stream, so that a step of that many prompt
// tokens never waits for the expert device.
bool td_engine_streams_all(td_engine *engine);

// Bytes of streamed experts since the engine opened; td_engine_feed counts what is copied, and
// copying_ns, the time from when each copy could begin until td_engine_feed saw it done.
// dense_bytes: of streamed dense weights, queued; when a step ends, all are copied. confined_bytes:
// of queued_bytes, for experts computed on a share of the device.
typedef struct {
  uint64_t queued_bytes, copied_bytes, dense_bytes, confined_bytes;
  uint64_t copying_ns;
} td_stream_progress;
td_stream_progress td_engine_stream_progress(const td_engine *engine);

// Experts in the cache, and how often decode steps found theirs there.
typedef struct {
  uint32_t n_slots, n_cached;
  uint64_t hits, misses, moves; // since the engine opened, see hot_experts.h
  uint64_t expert_bytes;        // of a slot
} td_expert_cache_stats;
td_expert_cache_stats td_engine_cache_stats(const td_engine *engine);
// How many experts of expert_bytes each a cache of cache_bytes holds beside its buffers.
uint32_t td_expert_cache_slots(uint64_t cache_bytes, uint64_t expert_bytes,
                               const td_model_config *config, uint32_t max_step_seqs,
                               td_dtype act_dtype);

// Bytes of device memory per token of max_step_tokens, streaming included.
size_t td_engine_step_bytes_per_token(const td_model_config *config, td_dtype act_dtype);
// And how many more with an arena of experts.
size_t td_expert_drive_token_bytes(const td_model_config *config);
// Both, on a CPU.
static inline size_t td_engine_drive_step_bytes_per_token(const td_model_config *config) {
  return td_engine_step_bytes_per_token(config, TD_F32) + td_expert_drive_token_bytes(config);
}
// Pinned host memory that a GPU's engine has beside, for rows of n-grams of a step's tokens.
size_t td_engine_ngram_bytes_per_token(const td_model_config *config);
// And how many more with a layer that drafts (td_engine_opts.has_draft_layer).
size_t td_engine_draft_token_bytes(const td_model_config *config, td_dtype act_dtype);
// And how many more with peer_devs, on each.
size_t td_engine_rank_bytes_per_token(const td_model_config *config, td_dtype act_dtype);
// Bytes of the pages for n_tokens, in pages of the default size.
uint64_t td_engine_kv_bytes(const td_model_config *config, td_dtype kv_dtype, uint64_t n_tokens);
// Memory of a device for drafts, beside that of an engine without: recurrent states between them,
// logits, and for a layer of multi-token prediction its inputs and on a CPU the output matrix in 4
// bits. is_host: a CPU. Of opts only max_drafts, has_draft_layer, max_step_tokens and max_step_seqs
// are read.
uint64_t td_engine_draft_bytes(const td_model *model, bool is_host, const td_engine_opts *opts);
// Bytes of the output matrix read per draft token of that layer, on a CPU.
uint64_t td_engine_draft_head_bytes(const td_model *model);
// Default prefill chunk in tokens: 512; 1024 for MLA, which expands keys and values from latents
// again for each chunk; more where an expert would get fewer than 32 tokens, so that decoding its
// weights is amortized. At most 2048, which bounds the length of a step.
uint32_t td_engine_prefill_chunk(const td_model_config *config);
