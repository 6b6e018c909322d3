// src/engine/draft.h - drafted tokens: guesses of what comes next, which one step verifies. Pure
// functions; time is passed in.
//
// A decode step computes the token drawn last and the drafts behind it. From each row a token is
// drawn as ever; as long as it is the one that was drafted, the next row is that of the text. So
// drafts never change a text: what is drawn depends on the text before it alone, and nothing
// depends on its batch (src/README.md). Rejected drafts leave keys and values behind the last
// token, which later tokens overwrite before anything attends to them.
//
// How many to draft follows from how often drafts were right and from what a token more costs a
// step, both measured: a draft is computed if tokens per second are expected to rise by it.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/attn/kv_layout.h"

enum {
  TD_DRAFT_MAX = 8,         // drafts of one request in a step
  TD_DRAFT_STEP = 32,       // of all requests
  TD_DRAFT_STATES = 8,      // of all requests where recurrent states are kept after each
  TD_DRAFT_GPU_TOKENS = 16, // of a step with drafts on a GPU: with more, kernels round differently
};

// Drafts of all requests in a step.
static inline uint32_t td_draft_max(bool has_states) {
  return has_states ? TD_DRAFT_STATES : TD_DRAFT_STEP;
}

// Why a model whose pages are laid out so drafts nothing; NULL: it may.
static inline const char *td_draft_hindrance(const td_kv_layout *layout, bool has_expert_cache) {
  if (layout->n_blocks) return "keys that have left a window do not come back";
  return has_expert_cache ? "a cache of experts is for steps of one token a request" : NULL;
}

// Drafts of each of n_seqs requests that decode together, if all have as many.
uint32_t td_draft_max_each(uint32_t n_seqs, bool has_states, bool is_gpu);

// Values of --draft: AUTO, OFF, and 1 + n for n drafts.
enum { TD_DRAFT_AUTO, TD_DRAFT_OFF, TD_N_DRAFT_MODES = 2 + TD_DRAFT_MAX };

// Guesses from the text itself: what followed the last occurrence of its last tokens, of the
// longest that occurred. Writes up to most guesses behind the n tokens and returns how many; 0:
// fewer than three tokens match.
uint32_t td_draft_lookup(int32_t *tokens, uint32_t n, uint32_t most);

// How often guesses were right, of late. Zeroed: none was made.
typedef struct {
  float hits, trials;
} td_draft_odds;

// Where guesses come from: the text, or the model's layer for that (td_engine_draft).
typedef enum { TD_DRAFT_TEXT, TD_DRAFT_LAYER, TD_N_DRAFT_SOURCES } td_draft_source;

// What requests have in common: how often guesses were right, and the time of decode steps as a
// line over their number of tokens, in sums that forget. Zeroed: nothing is known.
typedef struct {
  td_draft_odds odds[TD_N_DRAFT_SOURCES];
  double n, x, xx, y, xy;
  double pass_ns;        // of the layer that drafts, for one guess of every request
  uint64_t n_passes;     // that were measured
  uint32_t n_tries_left; // passes to make even if they seem not to pay
  uint32_t n_rest;       // decode steps since the last pass
} td_draft_pace;

// A request's guesses for the step in progress: n_proposed, of which the first n_drafted are
// computed and n_taken have been drawn so far. What was proposed beyond n_drafted costs no more,
// and shows whether it would have been right.
typedef struct {
  uint32_t n_proposed, n_drafted, n_taken;
  td_draft_source source;
  td_draft_odds odds[TD_N_DRAFT_SOURCES];
  float reach; // probability that its next draft and all before are right
} td_draft;

// Probability that the request's next guess is right: from its own record or, while that is short,
// from all requests'.
float td_draft_odds_of(const td_draft *draft, td_draft_source source, const td_draft_pace *pace);

// The next token was drawn as id; guess is the one proposed for it, read only if there is one.
// Whether it was drafted, so that the step has a row for the token after it.
bool td_draft_take(td_draft *draft, td_draft_pace *pace, const int32_t *guess, int32_t id);
// Drops the guesses that were not drawn. Returns how many of them were computed.
uint32_t td_draft_drop(td_draft *draft);

void td_draft_pace_init(td_draft_pace *pace);
// Records a decode step. Not the first after a pause, when caches are cold.
void td_draft_pace_note(td_draft_pace *pace, uint32_t n_tokens, uint64_t ns);
// What one more token adds to a step of n_tokens, as a share of its time.
double td_draft_pace_cost(const td_draft_pace *pace, uint32_t n_tokens);

// Records that n_passes of the layer took ns.
void td_draft_pace_note_passes(td_draft_pace *pace, uint32_t n_passes, uint64_t ns);
// How many guesses the layer should make for a request, beside n_seqs that decode. has_text: its
// text also has guesses, which cost no pass; 0 if the text's are expected to pay more.
uint32_t td_draft_depth(const td_draft *draft, uint32_t mode, const td_draft_pace *pace,
                        uint32_t n_seqs, bool has_text);
// Whether computing the layer for a new request's prompt is worth it: its guesses are expected to
// pay for a request like the others, or it is time to try.
bool td_draft_layer_pays(const td_draft_pace *pace, uint32_t n_seqs);

// Sets n_drafted of the drafts of a step with n of them and n_tokens tokens without drafts, so that
// it has max_tokens at most. mode: --draft.
void td_draft_choose(td_draft *const *drafts, uint32_t n, uint32_t mode, const td_draft_pace *pace,
                     uint32_t n_tokens, uint32_t max_tokens);
