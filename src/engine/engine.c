// src/engine/engine.c - the engine's memory, and how a step is laid out: groups, positions, pages,
// rows.
#include "engine/engine.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/trace.h"
#include "base/units.h"
#include "engine/attn/rope.h"
#include "engine/attn/window.h"
#include "engine/engine_impl.h"
#include "engine/experts/expert_drive.h"
#include "engine/experts/expert_peer.h"
#include "engine/experts/ranks.h"
#include "engine/images.h"
#include "kv/plan.h"

uint32_t td_engine_prefill_chunk(const td_model_config *config) {
  enum { MOST = 2048, OF_EXPERT = 32, ROUND = 64 };
  const uint32_t least = td_attn_min_chunk(config);
  if (!config->n_experts || !config->top_k) return least;
  uint64_t n = ((uint64_t)OF_EXPERT * config->n_experts / config->top_k + ROUND - 1) / ROUND *
               ROUND;
  return n < least ? least : n > MOST ? MOST : (uint32_t)n;
}

uint64_t td_engine_kv_bytes(const td_model_config *config, td_dtype kv_dtype, uint64_t n_tokens) {
  const td_kv_layout layout = td_kv_layout_of(config, kv_dtype, 0);
  const uint64_t n_pages = (n_tokens + layout.page_tokens - 1) / layout.page_tokens;
  return n_tokens * td_kv_layout_token_bytes(&layout) +
         n_pages * td_kv_layout_states_bytes(&layout);
}

// Elements of a gated shared expert's output.
static size_t shared_row(const td_model_config *c) {
  return c->shared_dim || c->has_out_norms ? c->dim : 0;
}

// Elements of a token's residual.
size_t td_engine_row(const td_model_config *c) {
  return (size_t)(c->n_streams ? c->n_streams : 1) * c->dim;
}

// Elements of the normed streams, or of their gates, if they are read by gates.
static size_t gated_row(const td_model_config *c) {
  return c->hyper_rank ? td_engine_row(c) : 0;
}

size_t td_engine_step_bytes_per_token(const td_model_config *config, td_dtype act_dtype) {
  const td_attn_rows r = td_attn_rows_of(config);
  size_t n = td_engine_row(config) + 2 * (size_t)config->dim + shared_row(config); // x, h, delta
  n += 2 * gated_row(config) + config->hyper_rank;
  for (size_t i = 0; i < TD_N_ACTS; i++)
    n += r.act[i];
  const size_t router = config->n_experts + 2 * config->top_k; // 32-bit each, as are streamed sums
  const td_kv_layout layout = td_kv_layout_of(config, act_dtype, 0);
  const size_t window = layout.n_blocks ? layout.part_bytes / layout.page_tokens : 0;
  const size_t words = config->dim + router + r.words + td_hyper_scores(config->n_streams);
  return n * td_dtype_bytes(act_dtype) + window + words * sizeof(float);
}

size_t td_engine_rank_bytes_per_token(const td_model_config *config, td_dtype act_dtype) {
  const td_attn_rows r = td_attn_rows_of(config);
  size_t n = config->dim;
  for (size_t i = 0; i < TD_N_ENTRIES; i++)
    n += r.act[i];
  return n * td_dtype_bytes(act_dtype) + (config->dim + 2 * config->top_k) * sizeof(float);
}

static td_status alloc_acts(td_engine *e, void **out, size_t row_elements, td_err *err) {
  *out = NULL;
  if (!row_elements) return TD_OK;
  return td_dev_alloc(e->dev, out, e->opts.max_step_tokens * row_elements * e->act_bytes, err);
}

static td_status alloc_activations(td_engine *e, td_err *err) {
  const td_model_config *c = e->config;
  const td_attn_rows r = td_attn_rows_of(c);
  td_status st = alloc_acts(e, &e->x, td_engine_row(c), err);
  if (st == TD_OK) st = alloc_acts(e, &e->delta, c->dim, err);
  for (size_t i = 0; i < TD_N_ACTS && st == TD_OK; i++)
    st = alloc_acts(e, &e->act[i], r.act[i], err);
  if (st == TD_OK) st = alloc_acts(e, &e->shared, shared_row(c), err);
  if (st == TD_OK) st = alloc_acts(e, &e->streams, gated_row(c), err);
  if (st == TD_OK) st = alloc_acts(e, &e->gates, gated_row(c), err);
  if (st == TD_OK) st = alloc_acts(e, &e->low, c->hyper_rank, err);
  if (st != TD_OK) return st;
  size_t n = e->opts.max_step_tokens;
  st = td_dev_alloc(e->dev, &e->h, td_engine_offload_input_bytes(e, n), err);
  const size_t n_scores = td_hyper_scores(c->n_streams);
  if (st == TD_OK && n_scores)
    st = td_dev_alloc(e->dev, (void **)&e->hyper, n * n_scores * sizeof(float), err);
  if (st == TD_OK && r.words)
    st = td_dev_alloc(e->dev, &e->act_words, n * r.words * sizeof(float), err);
  if (st != TD_OK) return st;
  return td_dev_alloc(e->dev, (void **)&e->router_logits, n * (c->n_experts + 1) * sizeof(float),
                      err);
}

// A table of n floats in device memory, filled on the host.
static td_status alloc_table(td_engine *e, float **out, size_t n,
                             void (*fill)(float *out, const td_model_config *config, uint32_t n),
                             td_err *err) {
  const size_t n_bytes = n * sizeof **out;
  td_status st = td_dev_alloc(e->dev, (void **)out, n_bytes, err);
  if (st != TD_OK) return st;
  float *host = malloc(n_bytes);
  if (!host) return td_fail(err, TD_ENOMEM, "out of memory: rotary table, %zu bytes", n_bytes);
  fill(host, e->config, e->opts.max_seq_tokens);
  td_op_copy(e->stream, *out, host, n_bytes);
  st = td_stream_sync(e->stream, err);
  free(host);
  return st;
}

static td_status alloc_rope(td_engine *e, td_err *err) {
  const size_t n = e->opts.max_seq_tokens;
  const bool is_pooled = e->config->pool_theta > 0;
  if (e->config->has_no_rope) return TD_OK;
  const size_t n_angles = n * td_rope_dims(e->config);
  td_status st = alloc_table(e, &e->cos_sin, n_angles, is_pooled ? td_rope_fill_near : td_rope_fill,
                             err);
  if (st == TD_OK && is_pooled)
    st = alloc_table(e, &e->pool_cos_sin, n_angles, td_rope_fill_pooled, err);
  if (st == TD_OK && e->config->wide_theta > 0)
    st = alloc_table(e, &e->wide_cos_sin, n * e->config->wide_head_dim, td_rope_fill_wide, err);
  if (st != TD_OK || e->config->query_beta <= 0) return st;
  return alloc_table(e, &e->query_scale, n, td_query_scale_fill, err);
}

// Room for n_rows rows of logits, on the device and on the host.
static td_status grow_logits(td_engine *e, uint32_t n_rows, td_err *err) {
  if (n_rows <= e->logits_rows) return TD_OK;
  size_t n_bytes = (size_t)n_rows * e->config->n_vocab * sizeof(float);
  td_dev_free(e->dev, e->dev_logits);
  td_dev_free(e->dev, e->dev_top);
  td_dev_free_host(e->dev, e->logits);
  td_dev_free_host(e->dev, e->top);
  e->logits = NULL;
  e->top = e->dev_top = NULL;
  e->logits_rows = 0;
  td_status st = td_dev_alloc(e->dev, (void **)&e->dev_logits, n_bytes, err);
  if (st == TD_OK && e->can_rank)
    st = td_dev_alloc(e->dev, (void **)&e->dev_top, n_rows * sizeof *e->top, err);
  if (st == TD_OK) st = td_dev_alloc_host(e->dev, (void **)&e->logits, n_bytes, err);
  if (st == TD_OK && e->can_rank)
    st = td_dev_alloc_host(e->dev, (void **)&e->top, n_rows * sizeof *e->top, err);
  if (st == TD_OK) e->logits_rows = n_rows;
  return st;
}

// Per token: tokens, seq, position, rows, temperature, position for rotation. Per sequence:
// q_begin, a slot of the trail, a page table and a block table (window.h). Then the step number,
// and slots of cached experts.
size_t td_engine_meta_entries(const td_engine *e, size_t n_seqs) {
  const size_t of_seq = 2 + e->max_pages + td_window_max_blocks(e);
  return 6 * (size_t)e->opts.max_step_tokens + n_seqs * of_seq + N_GROUPS + 1 +
         td_expert_cache_meta_entries(e);
}

static td_status alloc_meta(td_engine *e, td_err *err) {
  size_t n_seqs = e->opts.max_step_seqs;
  const size_t n_bytes = td_engine_meta_entries(e, n_seqs) * sizeof *e->meta;
  e->first_token = malloc(n_seqs * sizeof *e->first_token);
  if (!e->first_token) return td_fail(err, TD_ENOMEM, "out of memory: step tables");
  td_status st = td_dev_alloc_host(e->dev, (void **)&e->meta, n_bytes, err);
  return st == TD_OK ? td_dev_alloc(e->dev, (void **)&e->dev_meta, n_bytes, err) : st;
}

static td_status alloc_routing(td_engine *e, td_err *err) {
  if (!e->opts.record_routing) return TD_OK;
  size_t n = (size_t)e->config->n_layers * e->opts.max_step_tokens * (e->config->top_k + 1);
  e->routing = malloc(n * sizeof *e->routing);
  if (!e->routing) return td_fail(err, TD_ENOMEM, "out of memory: routing record");
  return td_dev_alloc(e->dev, (void **)&e->dev_routing, n * sizeof *e->routing, err);
}

static td_status alloc_kv(td_engine *e, td_err *err) {
  size_t n_bytes = td_kv_layout_page_bytes(&e->layout) * e->opts.n_pages;
  // Numbers the layers' parts of a page, states last.
  uint32_t n_whole = 0, n_states = 0;
  for (uint32_t i = 0; i < e->config->n_layers + e->config->n_draft_layers; i++) {
    const bool is_state = td_kv_layout_is_state(&e->layout, e->config, i);
    e->part[i] = is_state ? e->layout.n_layers + n_states++ : n_whole++;
  }
  e->kv_pages = e->opts.kv_pages;
  if (e->kv_pages) return TD_OK;
  td_status st = td_dev_alloc(e->dev, (void **)&e->kv_pages, n_bytes, err);
  if (st != TD_OK) {
    td_fail(err, st, "out of memory for a KV cache of %u tokens (%s); make the context smaller",
            e->opts.n_pages * e->opts.page_tokens, td_size(n_bytes).text);
  }
  return st;
}

static td_status alloc_trail(td_engine *e, td_err *err) {
  if (!td_attn_has_states(e->config) || !e->opts.max_drafts) return TD_OK;
  const uint64_t n_bytes = td_kv_trail_bytes(e->config, e->opts.max_drafts);
  for (uint32_t i = 1; i < e->config->n_layers; i++)
    e->trail_at[i] = e->trail_at[i - 1] + td_kv_undo_bytes(e->config, i - 1) * e->opts.max_drafts;
  e->trail_of = malloc(e->opts.max_step_seqs * sizeof *e->trail_of);
  if (!e->trail_of) return td_fail(err, TD_ENOMEM, "out of memory: states to go back to");
  return td_dev_alloc(e->dev, (void **)&e->trail, n_bytes, err);
}

static td_status open_memory(td_engine *e, td_err *err) {
  td_status st = e->opts.is_urgent       ? td_stream_open_urgent(&e->stream, e->dev, err)
                 : e->opts.is_confinable ? td_stream_open_confinable(&e->stream, e->dev, err)
                                         : td_stream_open(&e->stream, e->dev, err);
  if (st == TD_OK) st = td_event_open(&e->done, e->dev, err);
  if (st == TD_OK) st = alloc_activations(e, err);
  if (st == TD_OK) st = alloc_rope(e, err);
  if (st == TD_OK) st = alloc_routing(e, err);
  if (st == TD_OK) st = alloc_kv(e, err);
  if (st == TD_OK) st = td_window_open(e, err);
  if (st == TD_OK) st = td_kv_outlet_open(e, err);
  if (st == TD_OK) st = td_moe_offload_open(e, err);
  if (st == TD_OK) st = td_expert_stream_open(e, err);
  if (st == TD_OK) st = td_dense_stream_open(e, err);
  if (st == TD_OK) st = td_expert_cache_open(e, err);
  if (st == TD_OK) st = td_expert_drive_open(e, err);
  if (st == TD_OK) st = alloc_meta(e, err);
  if (st == TD_OK) st = alloc_trail(e, err);
  if (st == TD_OK) st = td_ngrams_open(e, err);
  if (st == TD_OK) st = td_draft_layer_open(e, err);
  if (st == TD_OK) st = td_images_open(e, err);
  if (st == TD_OK) st = grow_logits(e, e->opts.max_step_seqs + e->opts.max_drafts, err);
  return st == TD_OK ? td_ranks_open(e, err) : st;
}

td_status td_engine_open(td_engine **out, const td_model *model, td_dev *dev,
                         const td_engine_opts *opts, td_err *err) {
  *out = NULL;
  TD_CHECK(opts->page_tokens && opts->max_step_tokens && opts->max_step_seqs);
  td_engine *e = calloc(1, sizeof *e);
  if (!e) return td_fail(err, TD_ENOMEM, "out of memory");
  e->model = model;
  e->config = td_model_config_of(model);
  e->dev = dev;
  e->opts = *opts;
  e->can_rank = td_dev_free_vram_bytes(dev) != 0;
  e->act_bytes = td_dtype_bytes(td_dev_act_dtype(dev));
  e->max_pages = (opts->max_seq_tokens + opts->page_tokens - 1) / opts->page_tokens;
  e->layout = td_kv_layout_of(e->config, opts->kv_dtype, opts->page_tokens);
  td_status st = open_memory(e, err);
  if (st != TD_OK) {
    td_engine_close(e);
    return st;
  }
  *out = e;
  return TD_OK;
}

void td_engine_close(td_engine *e) {
  if (!e) return;
  td_ranks_close(e);
  td_stream_close(e->stream);
  td_event_close(e->done);
  td_images_close(e);
  td_kv_outlet_close(e);
  td_window_close(e);
  td_expert_stream_close(e);
  td_dense_stream_close(e);
  td_expert_cache_close(e);
  td_expert_drive_close(e);
  td_moe_offload_close(e);
  void *const buffers[] = {e->x,
                           e->h,
                           e->delta,
                           e->shared,
                           e->act_words,
                           e->cos_sin,
                           e->pool_cos_sin,
                           e->wide_cos_sin,
                           e->hyper,
                           e->streams,
                           e->gates,
                           e->low,
                           e->query_scale,
                           e->router_logits,
                           e->dev_logits,
                           e->dev_top,
                           e->dev_meta,
                           e->dev_routing,
                           e->trail,
                           e->draft_in,
                           e->draft_hidden,
                           e->draft_head_memory,
                           e->opts.kv_pages ? NULL : e->kv_pages};
  for (size_t i = 0; i < TD_COUNT(buffers); i++)
    td_dev_free(e->dev, buffers[i]);
  for (size_t i = 0; i < TD_N_ACTS; i++)
    td_dev_free(e->dev, e->act[i]);
  void *const host_buffers[] = {e->meta, e->logits, e->top, e->ngram_rows, e->ngram_ids};
  for (size_t i = 0; i < TD_COUNT(host_buffers); i++)
    td_dev_free_host(e->dev, host_buffers[i]);
  free(e->routing);
  free(e->first_token);
  free(e->draft_seqs);
  free(e->draft_rows);
  free(e->trail_of);
  free(e);
}

static td_status check_seq(const td_engine *e, const td_step_seq *seq, td_err *err) {
  TD_CHECK(seq->n_tokens > 0);
  uint64_t n = (uint64_t)seq->n_past + seq->n_tokens;
  if (n > e->opts.max_seq_tokens) {
    return td_fail(err, TD_EINVAL, "%llu tokens do not fit the context of %u",
                   (unsigned long long)n, e->opts.max_seq_tokens);
  }
  TD_CHECK(n <= (uint64_t)seq->n_pages * e->opts.page_tokens);
  for (uint32_t i = 0; i < seq->n_tokens; i++) {
    if (seq->tokens[i] < 0 || (uint32_t)seq->tokens[i] >= e->config->n_vocab) {
      return td_fail(err, TD_EINVAL, "token id %d is outside the vocabulary of %u", seq->tokens[i],
                     e->config->n_vocab);
    }
  }
  for (uint32_t i = 0; i < seq->n_pages; i++)
    TD_CHECK(seq->pages[i] >= 0 && (uint32_t)seq->pages[i] < e->opts.n_pages);
  return TD_OK;
}

td_status td_engine_check_step(const td_engine *e, const td_step_seq *seqs, uint32_t n_seqs,
                               td_err *err) {
  uint64_t n_tokens = 0;
  for (uint32_t i = 0; i < n_seqs; i++) {
    td_status st = check_seq(e, &seqs[i], err);
    if (st != TD_OK) return st;
    n_tokens += seqs[i].n_tokens;
  }
  if (!n_seqs || n_seqs > e->opts.max_step_seqs || n_tokens > e->opts.max_step_tokens) {
    return td_fail(err, TD_EINVAL, "a step of %u sequences and %llu tokens; limits are %u and %u",
                   n_seqs, (unsigned long long)n_tokens, e->opts.max_step_seqs,
                   e->opts.max_step_tokens);
  }
  return TD_OK;
}

// Where each table of the step lies in meta, in entries.
typedef struct {
  size_t tokens, seq, position, rows, temperature, rope, q_begin, trail, page_table, blocks, step;
} meta_layout;

// For a step of n_seqs sequences with n tokens in all.
static meta_layout lay_out_meta(const td_engine *e, size_t n, size_t n_seqs) {
  const size_t trail = 6 * n + n_seqs + N_GROUPS, page_table = trail + n_seqs;
  return (meta_layout){.tokens = 0,
                       .seq = n,
                       .position = 2 * n,
                       .rows = 3 * n,
                       .temperature = 4 * n,
                       .rope = 5 * n,
                       .q_begin = 6 * n,
                       .trail = trail,
                       .page_table = page_table,
                       .blocks = page_table + n_seqs * e->max_pages,
                       .step = page_table + n_seqs * (e->max_pages + td_window_max_blocks(e))};
}

// Appends sequence s of the step to a group; its first token has index t in the step. whole: the
// sequence of td_window_begin that it is, or is a part of.
static void add_seq(td_engine *e, const meta_layout *at, const step_group *group,
                    const td_step_seq *seq, uint32_t whole, uint32_t s, uint32_t t) {
  for (uint32_t i = 0; i < seq->n_tokens; i++) {
    e->meta[at->tokens + t + i] = seq->tokens[i];
    e->meta[at->seq + t + i] = (int32_t)group->view.n_seqs;
    e->meta[at->position + t + i] = (int32_t)(seq->n_past + i);
    e->meta[at->rope + t + i] = td_images_position(e, seq, seq->n_past + i, t + i);
  }
  uint32_t n_pages = seq->n_pages < e->max_pages ? seq->n_pages : e->max_pages;
  memcpy(e->meta + at->page_table + (size_t)s * e->max_pages, seq->pages,
         n_pages * sizeof *seq->pages);
  const uint32_t n_blocks = td_window_max_blocks(e);
  if (n_blocks) td_window_table(e, seq, whole, e->meta + at->blocks + (size_t)s * n_blocks);
}

// The first slot for the states of a sequence that drafts, of which n_kept are taken; -1: none.
static int32_t take_slots(const td_engine *e, const td_step_seq *seq, uint32_t *n_kept) {
  if (seq->want != TD_WANT_EACH) return -1;
  const uint32_t first = *n_kept;
  *n_kept += seq->n_tokens - 1;
  TD_CHECK(*n_kept <= e->opts.max_drafts);
  return (int32_t)first;
}

// Appends the sequences of group g after those placed so far; returns the step's tokens so far.
static uint32_t build_group(td_engine *e, const meta_layout *at, int g, const td_step_seq *seqs,
                            const uint32_t *wholes, uint32_t n_seqs, uint32_t *s, uint32_t t) {
  step_group *group = &e->step.whole.groups[g];
  size_t q_begin = at->q_begin + *s + (size_t)g;
  *group = (step_group){
      .token_begin = t,
      .blocks = e->dev_meta + at->blocks + (size_t)*s * td_window_max_blocks(e),
      .view = {.seq = e->dev_meta + at->seq + t,
               .position = e->dev_meta + at->position + t,
               .q_begin = e->dev_meta + q_begin,
               .page_table = e->dev_meta + at->page_table + (size_t)*s * e->max_pages,
               .max_pages = e->max_pages,
               .page_tokens = e->opts.page_tokens}};
  if (g == GROUP_PREFILL) {
    group->view.host_q_begin = e->meta + q_begin;
    group->view.host_position = e->meta + at->position + t;
  }
  e->meta[q_begin] = 0;
  uint32_t n_kept = 0;
  for (uint32_t i = 0; i < n_seqs; i++) {
    if (seqs[i].is_decode != (g == GROUP_DECODE)) continue;
    add_seq(e, at, group, &seqs[i], wholes ? wholes[i] : i, *s, t);
    e->first_token[i] = t;
    if (e->trail_of && g == GROUP_DECODE)
      e->meta[at->trail + *s] = e->trail_of[i] = take_slots(e, &seqs[i], &n_kept);
    t += seqs[i].n_tokens;
    group->view.n_seqs++;
    group->view.n_tokens += seqs[i].n_tokens;
    uint32_t n_keys = seqs[i].n_past + seqs[i].n_tokens;
    if (n_keys > group->view.max_keys) group->view.max_keys = n_keys;
    e->meta[q_begin + group->view.n_seqs] = (int32_t)group->view.n_tokens;
    (*s)++;
  }
  return t;
}

static uint32_t count_rows(const td_step_seq *seqs, uint32_t n_seqs) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < n_seqs; i++)
    n += td_step_seq_rows(&seqs[i]);
  return n;
}

void td_engine_place_part(const td_engine *e, td_microbatch *p, uint32_t begin, uint32_t n) {
  const size_t at = begin * e->act_bytes;
  p->begin = begin;
  p->n_tokens = n;
  p->x = (char *)e->x + at * td_engine_row(e->config);
  p->delta = (char *)e->delta + at * e->config->dim;
}

// Splits a decode step of one token per sequence in two microbatches.
static void split_microbatches(td_engine *e) {
  const uint32_t n = e->step.n_tokens, half = n / 2;
  for (uint32_t i = 0; i < TD_MAX_MICROBATCHES; i++) {
    td_microbatch *p = &e->step.microbatches[i];
    *p = e->step.whole;
    p->idx = i;
    td_engine_place_part(e, p, i ? half : 0, i ? n - half : half);
    td_batch_view *view = &p->groups[GROUP_DECODE].view;
    p->position += p->begin;
    view->position += p->begin;
    view->page_table += (size_t)p->begin * e->max_pages;
    p->groups[GROUP_DECODE].blocks += (size_t)p->begin * td_window_max_blocks(e);
    view->n_tokens = view->n_seqs = p->n_tokens; // sequence indices count from 0 in each
  }
}

void td_engine_note_wants(td_engine *e, const td_step_seq *seqs, uint32_t n_seqs) {
  e->step.is_copied = !e->can_rank;
  for (uint32_t i = 0; i < n_seqs; i++)
    e->step.is_copied |= seqs[i].want == TD_WANT_ALL;
}

// Fills meta and the groups. Rows of logits follow the caller's order, whatever the order of
// groups.
void td_engine_build_step(td_engine *e, const td_step_seq *seqs, const uint32_t *wholes,
                          uint32_t n_seqs) {
  uint32_t s = 0, t = 0, row = 0;
  for (uint32_t i = 0; i < n_seqs; i++)
    t += seqs[i].n_tokens;
  const meta_layout at = lay_out_meta(e, t, n_seqs);
  e->step.meta_len = at.step + 1;
  memset(e->meta, 0, e->step.meta_len * sizeof *e->meta);
  t = 0;
  e->step.has_axes = td_model_has_axes(e->config) && e->images && td_images_are_in(seqs, n_seqs);
  td_engine_note_wants(e, seqs, n_seqs);
  for (int g = 0; g < N_GROUPS; g++)
    t = build_group(e, &at, g, seqs, wholes, n_seqs, &s, t);
  for (uint32_t i = 0; i < n_seqs; i++) {
    for (uint32_t j = seqs[i].n_tokens - td_step_seq_rows(&seqs[i]); j < seqs[i].n_tokens; j++) {
      memcpy(&e->meta[at.temperature + row], &seqs[i].temperature, sizeof(float));
      e->meta[at.rows + row++] = (int32_t)(e->first_token[i] + j);
    }
  }
  e->meta[at.step] = (int32_t)++e->n_steps;
  e->step.number = (const uint32_t *)e->meta + at.step;
  e->step.dev_number = (const uint32_t *)e->dev_meta + at.step;
  e->step.n_tokens = t;
  e->step.n_rows = row;
  e->step.tokens = e->dev_meta + at.tokens;
  e->step.whole.position = e->dev_meta + at.rope;
  td_engine_place_part(e, &e->step.whole, 0, t);
  e->step.rows = e->dev_meta + at.rows;
  e->step.temperature = (const float *)(e->dev_meta + at.temperature);
  e->step.trail_first = e->dev_meta + at.trail;
}

enum { KEYS_ALIKE = 256 };

static void forward(void *ctx) {
  td_engine_forward(ctx);
}

// Decides what the step laid out in engine does with each layer.
static void plan_step(td_engine *e) {
  const td_batch_view *decode = &e->step.whole.groups[GROUP_DECODE].view;
  bool may_stream[TD_MAX_LAYERS];
  const bool is_parallel = td_rank_is_active(e);
  const uint32_t n_tokens = is_parallel ? e->rank->n_all : e->step.n_tokens;
  td_step_shape shape = {.n_tokens = n_tokens,
                         .n_prompt = n_tokens - decode->n_tokens,
                         .n_ranks = is_parallel ? e->rank->n_ranks : 1,
                         .n_seqs = decode->n_seqs,
                         .max_drafts = e->window ? 0 : e->opts.max_drafts,
                         .n_gpu_expert_layers = e->opts.n_gpu_expert_layers,
                         .has_expert_dev = e->offload.dev != NULL,
                         .has_drive = e->drive != NULL,
                         .may_replay = e->can_rank,
                         .break_even_tokens = td_engine_stream_tokens(e),
                         .may_stream = may_stream,
                         .may_cache = td_expert_cache_layers(e),
                         .pair_share = td_expert_cache_pair_share(e),
                         .dense_bytes = td_dense_stream_layer_bytes(e)};
  for (uint32_t i = 0; td_step_wants_streaming(&shape) && i < e->config->n_layers; i++)
    may_stream[i] = td_engine_is_offloaded(e, i) && td_engine_can_stream(e, i);
  if (td_step_can_split(e->config, &shape))
    shape.n_microbatches = e->opts.n_microbatches
                               ? e->opts.n_microbatches
                               : td_dual_batch_choose(&e->dual_batch, e->step.n_tokens);
  td_step_plan_make(&e->step.plan, e->config, &shape);
  uint32_t *max_keys = &e->step.whole.groups[GROUP_DECODE].view.max_keys;
  if (e->step.plan.is_replayed) *max_keys = (*max_keys + KEYS_ALIKE - 1) / KEYS_ALIKE * KEYS_ALIKE;
  e->step.cursor = (td_engine_cursor){.layer_idx = 0};
  td_dense_stream_begin_step(e);
  td_expert_drive_begin_step(e, true);
  e->step.microbatches[0] = e->step.whole;
  if (e->step.plan.n_microbatches > 1) split_microbatches(e);
}

static bool uses_peer(const td_engine *e) {
  return e->step.plan.n_ways[TD_LAYER_PAIRED] + e->step.plan.n_ways[TD_LAYER_SPREAD] > 0;
}

static bool uses_cache(const td_engine *e) {
  return e->step.plan.n_ways[TD_LAYER_CACHED] > 0 || uses_peer(e);
}

// A replayed step's operators depend only on the numbers of tokens and sequences, the longest
// context (rounded up) and the logits' memory.
static void run_replayed(td_engine *e) {
  const td_work_key key = {.n_tokens = e->step.n_tokens,
                           .n_seqs = e->step.whole.groups[GROUP_DECODE].view.n_seqs,
                           .n_rows = e->step.n_rows,
                           .n_microbatches = e->step.plan.n_microbatches,
                           .max_keys = e->step.microbatches[0].groups[GROUP_DECODE].view.max_keys,
                           // rows change only by growing
                           .memory = 2 * e->logits_rows + td_kv_outlet_is_active(e)};
  if (e->step.plan.handover == TD_HANDOVER_SIGNALS) td_moe_offload_enqueue(e);
  if (uses_peer(e)) td_expert_peer_enqueue(e);
  td_stream_run(e->stream, &key, forward, e);
}

// Begins the step that was built, with n_rows rows of logits.
static td_status begin_built(td_engine *e, uint32_t n_rows, td_err *err) {
  td_status st = grow_logits(e, n_rows, err);
  if (st != TD_OK) return st;
  plan_step(e);
  if (uses_cache(e)) {
    e->step.dev_slots = e->dev_meta + e->step.meta_len;
    e->step.dev_peer_slots = e->step.dev_slots + (size_t)e->config->n_layers * e->config->n_experts;
    e->step.meta_len += td_expert_cache_begin_step(e, e->meta + e->step.meta_len);
  }
  e->step.is_queued = false;
  e->step.begin_ns = td_clock_ns();
  td_op_copy_direct(e->stream, e->dev_meta, e->meta, e->step.meta_len * sizeof *e->meta);
  td_images_upload(e);
  return TD_OK;
}

td_status td_engine_begin(td_engine *e, const td_step_seq *seqs, uint32_t n_seqs, td_err *err) {
  e->step.begin_trace_ns = td_trace_begin();
  td_status st = td_engine_check_step(e, seqs, n_seqs, err);
  if (st == TD_OK) st = td_images_begin(e, seqs, n_seqs, err);
  if (st != TD_OK) return st;
  if (e->ranks) td_ranks_note_alone(e, seqs, n_seqs);
  td_window_begin(e, seqs, n_seqs);
  td_engine_build_step(e, seqs, NULL, n_seqs);
  e->step.n_seqs = n_seqs;
  td_kv_outlet_begin(e, seqs, n_seqs);
  st = td_ngrams_begin(e, seqs, n_seqs, err);
  if (st != TD_OK) return st;
  return begin_built(e, count_rows(seqs, n_seqs), err);
}

// Queues the rest of the step, or streamed experts up to ahead_bytes.
static void queue(td_engine *e, uint64_t ahead_bytes) {
  const bool may_stream = e->step.plan.n_ways[TD_LAYER_STREAMED] > 0;
  if (!ahead_bytes && !may_stream) return;
  if (e->step.plan.is_replayed) {
    run_replayed(e);
  } else if (!may_stream) {
    td_engine_forward(e);
  } else {
    do {
      if (!td_engine_may_queue_group(e, ahead_bytes)) return;
    } while (td_engine_forward_piece(e));
  }
  if (e->step.is_abandoned) return;
  td_engine_copy_outputs(e);
  td_kv_outlet_finish(e);
  td_event_record(e->done, e->stream);
  e->step.is_queued = true;
}

bool td_engine_feed(td_engine *e, uint64_t ahead_bytes) {
  if (!e->step.is_queued) queue(e, ahead_bytes);
  return e->step.is_queued && td_event_is_done(e->done);
}

void td_engine_confine(td_engine *e, bool is_confined) {
  e->is_confined = td_stream_confine(e->stream, is_confined);
}

void td_engine_wait(td_engine *e) {
  if (e->step.is_queued)
    td_event_sync(e->done);
  else
    td_expert_stream_wait(e);
}

td_status td_engine_end(td_engine *e, td_err *err) {
  td_status st = td_stream_sync(e->stream, err);
  if (st != TD_OK) {
    td_moe_offload_release(e);
    td_expert_peer_release(e);
  }
  const td_status peer_st = td_expert_peer_sync(e, st == TD_OK ? err : NULL);
  if (st == TD_OK) st = peer_st;
  if (e->offload.dev) {
    td_status side_st = td_stream_sync(e->offload.stream, st == TD_OK ? err : NULL);
    if (st == TD_OK) st = side_st;
  }
  if (st == TD_OK) st = td_expert_stream_sync(e, err);
  if (st == TD_OK) st = td_dense_stream_sync(e, err);
  td_expert_drive_end_step(e);
  td_images_end(e);
  if (st == TD_OK) st = td_kv_outlet_end(e, err);
  if (st == TD_OK && e->step.is_queued && uses_cache(e)) td_expert_cache_end_step(e);
  if (st == TD_OK && e->step.plan.handover == TD_HANDOVER_SIGNALS &&
      e->step.n_tokens == e->step.n_seqs) {
    td_dual_batch_note(&e->dual_batch, e->step.n_tokens, e->step.plan.n_microbatches,
                       td_clock_ns() - e->step.begin_ns);
  }
  td_trace_span(e->step.begin_trace_ns, TD_TRACE_STEP, e->step.n_tokens, e->step.n_seqs);
  return st;
}

td_status td_engine_run_step(td_engine *e, uint32_t n_rows, td_err *err) {
  e->step.begin_trace_ns = td_trace_begin();
  td_status st = begin_built(e, n_rows, err);
  if (st != TD_OK) return st;
  queue(e, UINT64_MAX);
  return td_engine_end(e, err);
}

// meanwhile looks after another engine, of which no event of this step tells: it is called every
// 100 us.
td_status td_engine_step_with(td_engine *e, const td_step_seq *seqs, uint32_t n_seqs,
                              void (*meanwhile)(void *ctx), void *ctx, td_err *err) {
  const struct timespec pause = {.tv_nsec = 100000};
  td_status st = td_engine_begin(e, seqs, n_seqs, err);
  if (st != TD_OK) return st;
  for (queue(e, UINT64_MAX); !td_event_is_done(e->done); nanosleep(&pause, NULL))
    meanwhile(ctx);
  return td_engine_end(e, err);
}

td_status td_engine_step(td_engine *e, const td_step_seq *seqs, uint32_t n_seqs, td_err *err) {
  if (e->ranks && td_ranks_wants(e, seqs, n_seqs)) return td_ranks_step(e, seqs, n_seqs, err);
  td_status st = td_engine_begin(e, seqs, n_seqs, err);
  if (st != TD_OK) return st;
  queue(e, UINT64_MAX);
  return td_engine_end(e, err);
}

td_status td_engine_copy_page(td_engine *e, int32_t to, int32_t from, td_err *err) {
  const td_kv_layout *layout = &e->layout;
  td_kv_outlet_enter(e, from);
  for (uint32_t i = 0; i < layout->n_layers + layout->n_states; i++) {
    const size_t n_bytes = td_kv_layout_bytes_of_part(layout, i);
    const size_t to_at = td_kv_layout_part_at(layout, i, e->opts.n_pages, (uint32_t)to);
    const size_t from_at = td_kv_layout_part_at(layout, i, e->opts.n_pages, (uint32_t)from);
    td_op_copy(e->stream, e->kv_pages + to_at, e->kv_pages + from_at, n_bytes);
    td_kv_outlet_part(e, to_at, n_bytes);
  }
  td_status st = td_stream_sync(e->stream, err);
  if (st == TD_OK) td_kv_outlet_note(e, to);
  return st;
}

td_state_trail td_engine_trail(const td_engine *e, uint32_t layer_idx, int group) {
  if (!e->trail_of || group != GROUP_DECODE) return (td_state_trail){.slots = NULL};
  return (td_state_trail){.slots = e->trail + e->trail_at[layer_idx],
                          .first = e->step.trail_first,
                          .slot_bytes = td_kv_undo_bytes(e->config, layer_idx)};
}

td_status td_engine_roll_back(td_engine *e, uint32_t seq_idx, uint32_t n_tokens, int32_t page,
                              td_err *err) {
  const td_kv_layout *layout = &e->layout;
  if (!e->trail_of) return TD_OK;
  TD_CHECK(n_tokens > 0 && e->trail_of[seq_idx] >= 0);
  const size_t slot = (size_t)e->trail_of[seq_idx] + n_tokens - 1;
  for (uint32_t i = 0; i < e->config->n_layers; i++) {
    const td_attn_cache cache = td_attn_of(e->config, i)->cache(e->config);
    if (!cache.undo_bytes) continue;
    size_t at = td_kv_layout_part_at(layout, e->part[i], e->opts.n_pages, (uint32_t)page);
    if (cache.is_beside) at += layout->beside_at;
    td_op_copy(e->stream, e->kv_pages + at + cache.undo_at,
               e->trail + e->trail_at[i] + slot * cache.undo_bytes, cache.undo_bytes);
  }
  td_kv_outlet_note_rolled_back(e, page);
  return td_stream_sync(e->stream, err);
}

void *td_engine_kv_pages(td_engine *e) {
  return e->kv_pages;
}

float *td_engine_logits(td_engine *e) {
  return e->logits;
}

td_status td_engine_fetch_logits(td_engine *e, uint32_t row, const float **out,
                                 const td_top_logits **top, td_err *err) {
  TD_CHECK(row < e->step.n_rows);
  const size_t n = e->config->n_vocab;
  *out = e->logits + row * n;
  *top = e->can_rank ? &e->top[row] : NULL;
  if (e->step.is_copied) return TD_OK;
  td_op_copy(e->stream, e->logits + row * n, e->dev_logits + row * n, n * sizeof *e->logits);
  return td_stream_sync(e->stream, err);
}

td_status td_engine_draw(td_engine *e, uint32_t row, td_sampler *sampler, int want_logprobs,
                         td_wire_token *out, td_err *err) {
  TD_CHECK(row < e->step.n_rows);
  const float *logits;
  const td_top_logits *top;
  if (e->can_rank && td_sampler_next_of_top(sampler, &e->top[row], want_logprobs, out))
    return TD_OK;
  td_status st = td_engine_fetch_logits(e, row, &logits, &top, err);
  if (st != TD_OK) return st;
  *out = td_sampler_next(sampler, e->logits + row * (size_t)e->config->n_vocab, want_logprobs);
  return TD_OK;
}

const int32_t *td_engine_routing(const td_engine *e, uint32_t layer_idx, uint32_t *n_tokens) {
  *n_tokens = e->step.n_tokens;
  if (!e->routing || !td_model_layer(e->model, layer_idx)->is_moe) return NULL;
  return e->routing + td_engine_routing_at(e, layer_idx);
}
