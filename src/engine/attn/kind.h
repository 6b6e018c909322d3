// src/engine/attn/kind.h - kinds of attention, a row each of what follows from a model's
// configuration. Which kind a layer is matters to its row, and to its row of operators (ops.h),
// alone: the layout of KV pages, plans and descriptions call it.
#pragma once

#include "base/buf.h"
#include "base/status.h"
#include "device/device.h"
#include "model/model.h"
#include "tandem/kv_f8.h"

// Buffers of activations that attention uses. What a token leaves in the cache comes first: the
// engine that computes it stores it; with several ranks all of them do.
enum {
  TD_ACT_K,     // keys, or latents and rotary keys
  TD_ACT_V,     // values, or an indexer's keys
  TD_ACT_INDEX, // an indexer's keys beside values
  TD_N_ENTRIES,
  TD_ACT_Q = TD_N_ENTRIES,
  TD_ACT_Q_A,   // queries of low rank
  TD_ACT_OUT,   // attention's output, [layer->o.cols]
  TD_ACT_MIXED, // queries with their gates, or all inputs of a delta net, or an indexer's queries
  TD_N_ACTS
};

// A layer's part of a KV page: entries of its tokens, a state behind the last of them, or both.
typedef struct {
  uint32_t entry[TD_N_ENTRIES]; // elements of a token; 0: the kind has none of these
  td_kv_rows f8;      // of a token in E4M3 pages; n 0: the kind has none (td_attn_check_kv)
  size_t state_bytes; // f32; 0: no state
  bool is_beside;     // the state is in the page beside entries, behind those of all its tokens
  // A state may also have entries, of each pool_group tokens of a page (td_pool_entries); 0: none.
  uint32_t pool_group;
  size_t pool_bytes;
  // The part of a state that has gone on with tokens which are taken back (td_state_trail).
  size_t undo_at, undo_bytes;
  bool may_leave; // entries that no later token's window has may leave the page
} td_attn_cache;

// Elements of a token in each buffer; the cache says how many an entry has.
typedef struct {
  size_t act[TD_N_ACTS];
  size_t words; // of 32 bits, in one more buffer: gates of delta nets, selections
} td_attn_rows;

typedef struct {
  td_attn_cache (*cache)(const td_model_config *config);
  td_attn_rows (*rows)(const td_model_config *config);
  // Operations of a layer's scores and sums for n tokens after n_past, without its matrices.
  double (*flops)(const td_model_config *config, double n, double n_past);
  // The model's layers of this kind, as a line for people.
  void (*describe)(const td_model_config *config, td_buf *out);
  uint32_t min_chunk; // tokens of a prompt that a step should have at least
  bool has_gpu;       // a GPU has the operators
  const char *not_f8; // why there are no E4M3 pages, of td_attn_check_kv; NULL: there are
} td_attn_spec;

const td_attn_spec *td_attn_of(const td_model_config *config, uint32_t layer_idx);
// Of the kinds that a model's layers are.
td_attn_rows td_attn_rows_of(const td_model_config *config);
uint32_t td_attn_min_chunk(const td_model_config *config);
void td_attn_describe(const td_model_config *config, td_buf *out);
// Operations of a layer's expansion of n_past keys and values from MLA's latents, which prefill
// does once more for every chunk; part of td_attn_spec.flops.
double td_attn_expand_flops(const td_model_config *config, double n_past);
// Whether prompts multiply tiles of queries by tiles of all keys, which a GPU may do in F16.
bool td_attn_is_tiled(const td_model_config *config, uint32_t layer_idx);
bool td_attn_has_gpu(const td_model_config *config);    // for all layers
bool td_attn_has_states(const td_model_config *config); // in any layer
// Elements that a token leaves in a page, and their bytes.
uint32_t td_attn_cache_elements(const td_attn_cache *cache);
size_t td_attn_cache_bytes(const td_attn_cache *cache, td_dtype kv_dtype);
// Whether pages can have the dtype of --kv-dtype. TD_EUNSUPPORTED: names the kind of attention and
// the cure. Warns of one that changes nothing.
td_status td_attn_check_kv(const td_model_config *config, td_dtype kv_dtype, td_err *err);
td_delta_shape td_attn_delta_shape(const td_model_config *config);
// Elements of the open key of DSA_POOL and GROUPS, behind which pooled keys are.
size_t td_attn_open_floats(const td_model_config *config);
// Where what n-grams have of a delta net's state is, in elements: behind the net's own.
typedef struct {
  size_t rows, ids, end;
} td_ngram_places;
td_ngram_places td_attn_ngram_places(const td_model_config *config);
// Where the parts of a pooled layer's state are, in elements: a ring of keys first.
typedef struct {
  uint32_t ring;  // keys
  uint32_t group; // positions of an entry; 0: no entries
  size_t open, index_open, entries, index_entries;
} td_pool_places;
td_pool_places td_attn_pool_places(const td_model_config *config, td_attn_kind kind,
                                   uint32_t page_tokens);
