// src/engine/experts/expert_drive.c - takes a layer's experts from the arena and has them computed.
#include "engine/experts/expert_drive.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "engine/experts/prefetch_trial.h"
#include "model/drive/arena.h"

enum {
  N_QUEUED = 4,    // queued at once
  LEAST_GROUP = 4, // experts of a prompt's group, unless fewer are left
  // Experts of a prompt that are taken and not computed, at most: a part of the slots, but as many
  // as keep the drive busy while a group is awaited.
  MOST_PENDING = 32,
  FEW_PENDING = 2 * LEAST_GROUP
};

// Experts that one operator computes, and its arguments, which must not change until it ran.
typedef struct {
  td_taken_expert *taken; // [n]
  uint32_t n;
  td_weight *gate, *up, *down; // [n_experts]
  int32_t *slots;              // [n_experts]: its own index, or -1: not in this group
  td_event *done;
  bool is_queued;
} drive_group;

struct td_expert_drive {
  td_expert_arena *arena;
  td_dev *dev;       // the CPU
  td_stream *stream; // its
  td_event *routed;
  drive_group groups[N_QUEUED];
  uint32_t next_group, most_pending;
  uint32_t *order;       // [layers][n_experts], as the files have them
  uint8_t *is_wanted;    // [n_experts]
  td_taken_expert *todo; // [n_experts], of the layer: not taken
  uint32_t n_todo;
  td_taken_expert *pending; // [n_experts]: taken, not computed
  uint32_t n_pending;
  td_taken_expert *ahead; // [n_experts]: taken for ahead_layer
  uint32_t n_ahead, ahead_layer;
  bool is_starved; // others have what is for prompts, perhaps until this step is over
  td_prefetch_trial trial;
  uint64_t begin_ns;           // of a step that counts for the trial; 0: it does not
  bool may_guess;              // in this step
  bool has_guess;              // of the layer that is computed next
  td_event *guessed;           // it has been made
  int32_t *guess;              // [max_step_tokens][top_k], and as many weights behind them
  td_taken_expert *prefetched; // [n_experts], of that layer
  uint32_t n_prefetched;
  float *parts;    // [max_step_tokens][top_k][dim], and behind them [max_step_tokens][dim]
  int32_t *nobody; // [n_experts], zeros: the join's slots
  // of the step
  bool *failed; // [max_step_tokens]
  bool has_failed;
  td_err failure;
  void *memory;
};

// ---- open and close -----------------------------------------------------------------------------

size_t td_expert_drive_token_bytes(const td_model_config *c) {
  return ((size_t)c->top_k + 1) * c->dim * sizeof(float);
}

typedef struct {
  uint32_t shard, expert;
  uint64_t offset;
} file_place;

static int by_place(const void *a, const void *b) {
  const file_place *x = a, *y = b;
  if (x->shard != y->shard) return x->shard < y->shard ? -1 : 1;
  return (x->offset > y->offset) - (x->offset < y->offset);
}

static td_status order_experts(td_expert_drive *d, const td_model_config *c, td_err *err) {
  const td_expert_places *places = td_expert_arena_places(d->arena);
  file_place *at = calloc(c->n_experts, sizeof *at);
  if (!at) return td_fail(err, TD_ENOMEM, "out of memory: order of experts");
  for (uint32_t i = 0; i < places->n_layers; i++) {
    for (uint32_t e = 0; e < c->n_experts; e++) {
      const td_expert_part *p = td_expert_parts(places, i, e);
      at[e] = (file_place){.shard = p->shard, .offset = p->offset, .expert = e};
    }
    qsort(at, c->n_experts, sizeof *at, by_place);
    for (uint32_t e = 0; e < c->n_experts; e++)
      d->order[(size_t)i * c->n_experts + e] = at[e].expert;
  }
  free(at);
  return TD_OK;
}

// Arrays of n_experts elements and others, in one block.
static td_status alloc_arrays(td_engine *e, td_err *err) {
  td_expert_drive *d = e->drive;
  const size_t n = e->config->n_experts;
  const size_t n_layers = td_expert_arena_places(d->arena)->n_layers;
  const size_t of_group = n * (3 * sizeof(td_weight) + sizeof(td_taken_expert) + sizeof(int32_t));
  const size_t n_bytes = N_QUEUED * of_group + 4 * n * sizeof(td_taken_expert) +
                         n * (sizeof(int32_t) + 1) + e->opts.max_step_tokens +
                         n_layers * n * sizeof(uint32_t);
  char *at = d->memory = calloc(1, n_bytes);
  if (!at) return td_fail(err, TD_ENOMEM, "out of memory: tables of experts");
#define TAKE(field, count) (d->field = (void *)at, at += (count) * sizeof *d->field)
  for (int i = 0; i < N_QUEUED; i++) {
    TAKE(groups[i].gate, n);
    TAKE(groups[i].up, n);
    TAKE(groups[i].down, n);
  }
  for (int i = 0; i < N_QUEUED; i++) {
    TAKE(groups[i].taken, n);
    TAKE(groups[i].slots, n);
    memset(d->groups[i].slots, 0xff, n * sizeof(int32_t));
  }
  TAKE(todo, n);
  TAKE(pending, n);
  TAKE(ahead, n);
  TAKE(prefetched, n);
  TAKE(nobody, n);
  TAKE(order, n_layers * n);
  TAKE(is_wanted, n);
  TAKE(failed, e->opts.max_step_tokens);
#undef TAKE
  return TD_OK;
}

td_status td_expert_drive_open(td_engine *e, td_err *err) {
  if (!e->opts.arena) return TD_OK;
  TD_CHECK(!e->opts.n_peers && !e->opts.n_gpu_expert_layers);
  td_expert_drive *d = e->drive = calloc(1, sizeof *d);
  if (!d) return td_fail(err, TD_ENOMEM, "out of memory: tables of experts");
  d->arena = e->opts.arena;
  d->dev = e->offload.dev ? e->offload.dev : e->dev;
  d->stream = e->offload.dev ? e->offload.stream : e->stream;
  const uint32_t n_slots = td_expert_arena_stats_of(d->arena).n_slots;
  d->most_pending = n_slots / 8 < FEW_PENDING    ? FEW_PENDING
                    : n_slots / 8 > MOST_PENDING ? MOST_PENDING
                                                 : n_slots / 8;
  td_status st = alloc_arrays(e, err);
  if (st == TD_OK) st = order_experts(d, e->config, err);
  if (st == TD_OK) st = td_event_open(&d->routed, d->dev, err);
  if (st == TD_OK) st = td_event_open(&d->guessed, d->dev, err);
  for (int i = 0; i < N_QUEUED && st == TD_OK; i++)
    st = td_event_open(&d->groups[i].done, d->dev, err);
  if (st != TD_OK) return st;
  const size_t n_tokens = e->offload.dev ? e->offload.max_tokens : e->opts.max_step_tokens;
  if (!e->offload.dev)
    st = td_dev_alloc(d->dev, (void **)&d->guess,
                      n_tokens * e->config->top_k * (sizeof *d->guess + sizeof(float)), err);
  if (st != TD_OK) return st;
  return td_dev_alloc(d->dev, (void **)&d->parts, n_tokens * td_expert_drive_token_bytes(e->config),
                      err);
}

void td_expert_drive_close(td_engine *e) {
  td_expert_drive *d = e->drive;
  if (!d) return;
  td_expert_drive_end_step(e);
  td_event_close(d->routed);
  td_event_close(d->guessed);
  for (int i = 0; i < N_QUEUED; i++)
    td_event_close(d->groups[i].done);
  td_dev_free(d->dev, d->parts);
  td_dev_free(d->dev, d->guess);
  free(d->memory);
  free(d);
}

// ---- groups -------------------------------------------------------------------------------------

static void release_group(td_expert_drive *d, drive_group *g) {
  if (!g->is_queued) return;
  td_event_sync(g->done);
  td_expert_arena_release(d->arena, g->taken, g->n);
  for (uint32_t i = 0; i < g->n; i++)
    g->slots[g->taken[i].expert] = -1;
  g->is_queued = false;
}

static void release_groups(td_expert_drive *d) {
  for (int i = 0; i < N_QUEUED; i++)
    release_group(d, &d->groups[i]);
}

// Those that were computed leave their slots to others.
static void release_computed(td_expert_drive *d) {
  for (int i = 0; i < N_QUEUED; i++)
    if (d->groups[i].is_queued && td_event_is_done(d->groups[i].done))
      release_group(d, &d->groups[i]);
}

static void release_ahead(td_expert_drive *d) {
  td_expert_arena_release(d->arena, d->ahead, d->n_ahead);
  d->n_ahead = 0;
}

// The expert's matrices, with the data where they are.
static void place(const td_expert_drive *d, const drive_group *g, const td_layer *layer,
                  uint32_t layer_idx, const td_taken_expert *taken) {
  const uint32_t e = taken->expert;
  g->gate[e] = layer->gate[e];
  g->gate[e].data = td_expert_arena_data(d->arena, layer_idx, taken, 0);
  if (layer->up) {
    g->up[e] = layer->up[e];
    g->up[e].data = td_expert_arena_data(d->arena, layer_idx, taken, 1);
  }
  g->down[e] = layer->down[e];
  g->down[e].data = td_expert_arena_data(d->arena, layer_idx, taken, 2);
}

// Marks the tokens that need the expert.
static void fail_tokens(td_expert_drive *d, uint32_t first_token, const td_moe_args *all,
                        const td_taken_expert *taken) {
  if (!d->has_failed) td_expert_arena_failure(d->arena, taken->slot, &d->failure);
  d->has_failed = true;
  const size_t n = (size_t)all->n_tokens * all->top_k;
  for (size_t i = 0; i < n; i++)
    if ((uint32_t)all->ids[i] == taken->expert) d->failed[first_token + i / all->top_k] = true;
}

// Moves those of pending that have landed to a group; those that cannot be read leave it.
static void fill_group(td_expert_drive *d, drive_group *g, uint32_t first_token,
                       const td_layer *layer, uint32_t layer_idx, const td_moe_args *all) {
  uint32_t n_left = 0;
  g->n = 0;
  g->gate[0] = layer->gate[0]; // what the first expert is like decides between kernels
  g->down[0] = layer->down[0];
  if (layer->up) g->up[0] = layer->up[0];
  for (uint32_t i = 0; i < d->n_pending; i++) {
    const td_taken_expert taken = d->pending[i];
    switch (td_expert_arena_state(d->arena, taken.slot)) {
    case TD_SLOT_LOADING: d->pending[n_left++] = taken; break;
    case TD_SLOT_FAILED:
      fail_tokens(d, first_token, all, &taken);
      td_expert_arena_release(d->arena, &taken, 1);
      break;
    case TD_SLOT_READY:
      place(d, g, layer, layer_idx, &taken);
      g->slots[taken.expert] = (int32_t)taken.expert;
      g->taken[g->n++] = taken;
    }
  }
  d->n_pending = n_left;
}

static void queue_group(td_expert_drive *d, drive_group *g, const td_moe_args *all) {
  td_moe_args args = *all;
  args.gate = g->gate;
  args.up = all->pairs ? NULL : g->up;
  args.down = g->down;
  args.slots = g->slots;
  args.n_slots = args.n_experts;
  args.out = d->parts;
  args.out_f32 = args.by_pair = true;
  td_op_moe(d->stream, &args);
  td_event_record(g->done, d->stream);
  g->is_queued = true;
  d->next_group = (d->next_group + 1) % N_QUEUED;
}

// ---- a layer ------------------------------------------------------------------------------------

// The experts of the tokens, as the files have them. Returns their number.
static uint32_t list_wanted(td_expert_drive *d, uint32_t layer_idx, const td_moe_args *all) {
  const uint32_t *order = d->order + (size_t)layer_idx * all->n_experts;
  const size_t n = (size_t)all->n_tokens * all->top_k;
  memset(d->is_wanted, 0, all->n_experts);
  for (size_t i = 0; i < n; i++)
    if ((uint32_t)all->ids[i] < all->n_experts) d->is_wanted[all->ids[i]] = 1;
  d->n_todo = 0;
  for (uint32_t i = 0; i < all->n_experts; i++)
    if (d->is_wanted[order[i]]) d->todo[d->n_todo++].expert = order[i];
  return d->n_todo;
}

// What was taken ahead for this layer is pending now, or was of no use.
static void use_ahead(td_expert_drive *d, uint32_t layer_idx) {
  uint32_t n_left = 0;
  if (!d->n_ahead) return;
  for (uint32_t i = 0; i < d->n_ahead; i++) {
    const td_taken_expert taken = d->ahead[i];
    const bool is_used = d->ahead_layer == layer_idx && d->is_wanted[taken.expert];
    if (is_used) {
      d->pending[d->n_pending++] = taken;
      d->is_wanted[taken.expert] = 0;
    } else {
      td_expert_arena_release(d->arena, &taken, 1);
    }
  }
  d->n_ahead = 0;
  for (uint32_t i = 0; i < d->n_todo; i++)
    if (d->is_wanted[d->todo[i].expert]) d->todo[n_left++] = d->todo[i];
  d->n_todo = n_left;
}

// Takes more of the layer's experts. Those without a slot stay, in order.
static void take_more(td_expert_drive *d, uint32_t layer_idx, bool bypass) {
  const uint32_t most = bypass ? d->most_pending : UINT32_MAX;
  uint32_t n = d->n_todo, n_left = 0;
  if (!n || d->n_pending >= most) return;
  if (n > most - d->n_pending) n = most - d->n_pending;
  td_expert_arena_take(d->arena, layer_idx, d->todo, n, bypass && !d->is_starved);
  d->is_starved = false;
  for (uint32_t i = 0; i < d->n_todo; i++)
    if (i < n && d->todo[i].slot >= 0)
      d->pending[d->n_pending++] = d->todo[i];
    else
      d->todo[n_left++] = d->todo[i];
  d->n_todo = n_left;
}

// Has the first experts of the next layer read, which a prompt uses nearly all of.
static void read_ahead(td_engine *e, uint32_t layer_idx) {
  td_expert_drive *d = e->drive;
  const uint32_t n = e->config->n_experts;
  uint32_t next = layer_idx + 1;
  while (next < e->config->n_layers && !td_model_is_moe(e->config, next))
    next++;
  if (next >= e->config->n_layers) return;
  if (d->n_ahead && d->ahead_layer != next) release_ahead(d);
  d->ahead_layer = next;
  if (d->n_pending + d->n_ahead >= d->most_pending || d->n_ahead == n) return;
  uint32_t n_more = d->most_pending - d->n_pending - d->n_ahead;
  if (n_more > n - d->n_ahead) n_more = n - d->n_ahead;
  td_taken_expert *more = d->ahead + d->n_ahead;
  for (uint32_t i = 0; i < n_more; i++)
    more[i].expert = d->order[(size_t)next * n + d->n_ahead + i];
  td_expert_arena_take(d->arena, next, more, n_more, true);
  uint32_t n_taken = 0; // up to the first that has no slot: the rest comes later
  while (n_taken < n_more && more[n_taken].slot >= 0)
    n_taken++;
  td_expert_arena_release(d->arena, more + n_taken, n_more - n_taken);
  d->n_ahead += n_taken;
}

// ---- what will perhaps be needed ----------------------------------------------------------------

int32_t *td_expert_drive_guess(const td_engine *e, uint32_t layer_idx, float **weights) {
  const td_expert_drive *d = e->drive;
  const td_layer *layer = td_engine_layer(e, layer_idx);
  if (!d || !d->may_guess || !layer->is_moe || !layer->mlp_norm.data) return NULL;
  *weights = (float *)(d->guess + (size_t)e->opts.max_step_tokens * e->config->top_k);
  return d->guess;
}

void td_expert_drive_note_guessed(td_engine *e) {
  td_event_record(e->drive->guessed, e->stream);
  e->drive->has_guess = true;
}

// Has what was guessed read while attention is computed: all experts of the layer before have been.
static void prefetch(td_engine *e, uint32_t layer_idx, const td_moe_args *all) {
  td_expert_drive *d = e->drive;
  const size_t n = (size_t)all->n_tokens * all->top_k;
  if (!d->has_guess) return;
  d->has_guess = false;
  td_event_sync(d->guessed);
  release_groups(d);
  memset(d->is_wanted, 0, all->n_experts);
  for (size_t i = 0; i < n; i++) {
    if ((uint32_t)d->guess[i] >= all->n_experts || d->is_wanted[d->guess[i]]) continue;
    d->is_wanted[d->guess[i]] = 1;
    d->prefetched[d->n_prefetched++].expert = (uint32_t)d->guess[i];
  }
  td_expert_arena_prefetch(d->arena, layer_idx, d->prefetched, d->n_prefetched);
}

static void end_prefetch(td_expert_drive *d, const uint8_t *is_wanted) {
  td_expert_arena_end_prefetch(d->arena, d->prefetched, d->n_prefetched, is_wanted);
  d->n_prefetched = 0;
}

// ---- a layer, its experts in memory and others --------------------------------------------------

static uint32_t n_landed(const td_expert_drive *d) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < d->n_pending; i++)
    n += td_expert_arena_state(d->arena, d->pending[i].slot) != TD_SLOT_LOADING;
  return n;
}

// Waits for what is being read, or for slots: others' or, if all are this engine's, its own.
static void wait_for_more(td_engine *e, uint32_t n_events) {
  td_expert_drive *d = e->drive;
  td_dev_show_progress(d->dev);
  if (!d->n_pending) {
    for (uint32_t i = 0; i < N_QUEUED; i++) {
      drive_group *oldest = &d->groups[(d->next_group + i) % N_QUEUED];
      if (!oldest->is_queued) continue;
      release_group(d, oldest);
      return;
    }
    if (d->n_ahead) {
      release_ahead(d);
      return;
    }
    d->is_starved = true;
  }
  td_expert_arena_wait(d->arena, n_events);
}

static bool is_abandoned(td_engine *e) {
  const td_engine_opts *o = &e->opts;
  e->step.is_abandoned = e->step.is_abandoned ||
                         (o->is_unwanted && o->is_unwanted(o->unwanted_ctx));
  return e->step.is_abandoned;
}

void td_expert_drive_compute(td_engine *e, uint32_t first_token, uint32_t layer_idx,
                             const td_moe_args *all) {
  td_expert_drive *d = e->drive;
  const td_layer *layer = td_model_layer(e->model, layer_idx);
  const bool bypass = (uint64_t)all->n_prompt * all->top_k >= all->n_experts;
  const uint32_t least = bypass ? LEAST_GROUP : 1;
  prefetch(e, layer_idx, all);
  if (!e->offload.dev) td_event_sync(d->routed);
  release_groups(d); // they ran before the router did
  list_wanted(d, layer_idx, all);
  end_prefetch(d, d->is_wanted);
  use_ahead(d, layer_idx);
  while (d->n_todo || d->n_pending) {
    if (is_abandoned(e)) return;
    release_computed(d);
    uint32_t n_events = td_expert_arena_events(d->arena);
    take_more(d, layer_idx, bypass);
    if (bypass && !d->n_todo) {
      read_ahead(e, layer_idx);
      n_events = td_expert_arena_events(d->arena); // its own are no reason to look again
    }
    const uint32_t n = n_landed(d);
    if (!n || (n < least && n < d->n_pending)) {
      wait_for_more(e, n_events);
      continue;
    }
    drive_group *g = &d->groups[d->next_group];
    release_group(d, g);
    fill_group(d, g, first_token, layer, layer_idx, all);
    if (g->n) queue_group(d, g, all);
  }
  td_op_moe_join(d->stream, &(td_moe_join_args){.here = d->parts,
                                                .there = d->parts,
                                                .slots = d->nobody,
                                                .ids = all->ids,
                                                .weights = all->weights,
                                                .out = all->out,
                                                .n_tokens = all->n_tokens,
                                                .n_experts = all->n_experts,
                                                .top_k = all->top_k,
                                                .dim = e->config->dim,
                                                .is_bf16 = all->is_bf16});
}

void *td_expert_drive_sum(td_engine *e) {
  return e->drive->parts + (size_t)e->opts.max_step_tokens * e->config->top_k * e->config->dim;
}

void td_expert_drive_note_routed(td_engine *e) {
  td_event_record(e->drive->routed, e->stream);
}

// ---- a step -------------------------------------------------------------------------------------

void td_expert_drive_fail_missing(td_engine *e, const td_taken_expert *taken, uint32_t n) {
  td_expert_drive *d = e->drive;
  for (uint32_t i = 0; i < n; i++) {
    if (td_expert_arena_state(d->arena, taken[i].slot) != TD_SLOT_FAILED) continue;
    if (!d->has_failed) td_expert_arena_failure(d->arena, taken[i].slot, &d->failure);
    d->has_failed = true;
    memset(d->failed, true, e->step.n_tokens * sizeof *d->failed);
  }
}

// Whether the step guesses: one of decode does, in turn or because it pays.
static void begin_trial(td_engine *e) {
  td_expert_drive *d = e->drive;
  const bool counts = !e->offload.dev && !e->config->n_streams &&
                      !e->step.whole.groups[GROUP_PREFILL].view.n_tokens;
  d->begin_ns = counts ? td_clock_ns() : 0;
  d->may_guess = counts && td_prefetch_trial_next(&d->trial);
}

static void end_trial(td_engine *e) {
  td_expert_drive *d = e->drive;
  const uint64_t begin_ns = d->begin_ns;
  d->begin_ns = 0;
  d->may_guess = d->has_guess = false;
  if (!begin_ns || e->step.is_abandoned || d->has_failed) return;
  if (!td_prefetch_trial_note(&d->trial, e->step.n_tokens, td_clock_ns() - begin_ns)) return;
  td_info("experts: prefetching is %s: %u pairs of steps took %.1f ms with it and %.1f ms without",
          d->trial.pays ? "on" : "off", d->trial.n_pairs, d->trial.ns[1] * 1e-6,
          d->trial.ns[0] * 1e-6);
}

void td_expert_drive_begin_step(td_engine *e, bool may_prefetch) {
  td_expert_drive *d = e->drive;
  if (!d) return;
  if (may_prefetch) begin_trial(e);
  e->step.is_abandoned = false;
  if (d->has_failed) memset(d->failed, 0, e->opts.max_step_tokens * sizeof *d->failed);
  d->has_failed = false;
}

void td_expert_drive_end_step(td_engine *e) {
  td_expert_drive *d = e->drive;
  if (!d || !d->memory) return;
  end_trial(e);
  release_groups(d);
  end_prefetch(d, NULL);
  td_expert_arena_release(d->arena, d->pending, d->n_pending);
  d->n_pending = 0;
  release_ahead(d);
}

bool td_engine_has_failed(const td_engine *e, const td_step_seq *seqs, uint32_t seq_idx,
                          td_err *err) {
  const td_expert_drive *d = e->drive;
  if (!d || !d->has_failed) return false;
  const uint32_t first = e->first_token[seq_idx];
  for (uint32_t i = first; i < first + seqs[seq_idx].n_tokens; i++) {
    if (!d->failed[i]) continue;
    if (err) *err = d->failure;
    return true;
  }
  return false;
}
