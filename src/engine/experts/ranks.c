// src/engine/experts/ranks.c - expert parallelism: the other ranks' engines and threads, and a step
// on all.
#include "engine/experts/ranks.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/thread.h"
#include "engine/attn/ops.h"
#include "engine/attn/window.h"
#include "engine/images.h"
#include "engine/rows.h"

enum { MIN_PARALLEL_TOKENS = 64 };

// A rank other than 0 and its thread, which waits for steps.
typedef struct {
  td_engine *engine;
  pthread_t thread;
  bool has_thread;
  td_ranks *all;
  td_status status; // of its last step
  td_err err;
} peer;

struct td_ranks {
  uint32_t n;
  td_engine *engines[TD_COMM_MAX_RANKS]; // engines[0]: the caller's
  peer peers[TD_COMM_MAX_RANKS];         // from 1 on
  bool *is_shared;                       // [n_pages] all ranks have the page's content
  bool is_broken;                        // the group was aborted

  pthread_mutex_t lock; // guards what follows, and the peers' statuses
  pthread_cond_t moved;
  const td_step_seq *seqs; // of the step being run
  uint32_t n_seqs;
  const int32_t *pages; // [n_pages] to send before it
  uint32_t n_pages;
  uint64_t n_steps;   // begun
  uint32_t n_running; // peers that compute
  bool is_closing;
};

// ---- memory of a rank ---------------------------------------------------------------------------

static size_t max_pieces(const td_engine *e) {
  return 2 * (size_t)e->rank->n_ranks * e->opts.max_step_seqs;
}

static td_status open_tables(td_engine *e, rank_tables *t, td_err *err) {
  const size_t n_bytes = td_engine_meta_entries(e, max_pieces(e)) * sizeof *t->meta;
  t->first_token = malloc(max_pieces(e) * sizeof *t->first_token);
  if (!t->first_token) return td_fail(err, TD_ENOMEM, "out of memory: step tables");
  td_status st = td_dev_alloc_host(e->dev, (void **)&t->meta, n_bytes, err);
  return st == TD_OK ? td_dev_alloc(e->dev, (void **)&t->dev_meta, n_bytes, err) : st;
}

static void close_tables(td_engine *e, rank_tables *t) {
  td_dev_free_host(e->dev, t->meta);
  td_dev_free(e->dev, t->dev_meta);
  free(t->first_token);
}

static td_status open_halves(td_engine *e, td_err *err) {
  td_rank *r = e->rank;
  td_status st = td_stream_open_urgent(&r->stream, e->dev, err);
  if (st == TD_OK) st = td_event_open(&r->ready, e->dev, err);
  for (uint32_t h = 0; h < TD_RANK_HALVES && st == TD_OK; h++) {
    st = td_event_open(&r->halves[h].exchanged, e->dev, err);
    if (st == TD_OK) st = open_tables(e, &r->all[h], err);
    if (st == TD_OK) st = open_tables(e, &r->own_halves[h], err);
  }
  return st;
}

static void close_halves(td_engine *e) {
  td_rank *r = e->rank;
  for (uint32_t h = 0; h < TD_RANK_HALVES; h++) {
    td_event_close(r->halves[h].exchanged);
    close_tables(e, &r->all[h]);
    close_tables(e, &r->own_halves[h]);
  }
  td_event_close(r->ready);
}

static td_status open_rank(td_engine *e, td_comm *comm, td_err *err) {
  td_rank *r = e->rank = calloc(1, sizeof *r);
  if (!r) {
    td_comm_close(comm);
    return td_fail(err, TD_ENOMEM, "out of memory");
  }
  const td_model_config *c = e->config;
  const size_t n = e->opts.max_step_tokens;
  const td_attn_rows rows = td_attn_rows_of(c);
  r->comm = comm;
  r->rank = td_comm_rank(comm);
  r->n_ranks = td_comm_n_ranks(comm);
  r->first_expert = td_rank_first_expert(c->n_experts, r->n_ranks, r->rank);
  r->n_experts = td_rank_first_expert(c->n_experts, r->n_ranks, r->rank + 1) - r->first_expert;
  r->seqs = malloc(max_pieces(e) * sizeof *r->seqs);
  r->wholes = malloc(max_pieces(e) * sizeof *r->wholes);
  if (!r->seqs || !r->wholes) return td_fail(err, TD_ENOMEM, "out of memory");
  td_status st = open_halves(e, err);
  if (st == TD_OK) st = open_tables(e, &r->own, err);
  if (st == TD_OK) st = open_tables(e, &r->wanted, err);
  if (st == TD_OK) st = td_dev_alloc(e->dev, &r->h, td_engine_offload_input_bytes(e, n), err);
  for (size_t i = 0; i < TD_N_ENTRIES && st == TD_OK; i++)
    if (rows.act[i]) st = td_dev_alloc(e->dev, &r->entry[i], n * rows.act[i] * e->act_bytes, err);
  if (st == TD_OK) st = td_dev_alloc(e->dev, (void **)&r->part, n * c->dim * sizeof(float), err);
  return st;
}

static void close_rank(td_engine *e) {
  td_rank *r = e->rank;
  if (!r) return;
  td_stream_close(r->stream);
  td_dev_free(e->dev, r->h);
  td_dev_free(e->dev, r->part);
  for (size_t i = 0; i < TD_N_ENTRIES; i++)
    td_dev_free(e->dev, r->entry[i]);
  close_halves(e);
  close_tables(e, &r->own);
  close_tables(e, &r->wanted);
  free(r->seqs);
  free(r->wholes);
  free(r);
  e->rank = NULL;
}

// ---- a step of one rank -------------------------------------------------------------------------

// The piece of a sequence; false: it is empty.
static bool cut(td_step_seq *out, const td_step_seq *seq, uint32_t n_ranks, uint32_t piece) {
  const uint32_t begin = td_zigzag_begin(seq->n_tokens, n_ranks, piece);
  const uint32_t end = td_zigzag_begin(seq->n_tokens, n_ranks, piece + 1);
  if (begin == end) return false;
  *out = *seq;
  out->tokens += begin;
  out->n_tokens = end - begin;
  out->n_past += begin;
  if (seq->want == TD_WANT_LAST && piece + 1 < 2 * n_ranks) out->want = TD_WANT_NONE;
  return true;
}

static uint32_t count_tokens(const td_step_seq *seqs, uint32_t n_seqs) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < n_seqs; i++)
    n += seqs[i].n_tokens;
  return n;
}

// Piece i of a rank: its tokens are in the order of halves, each in the order of sequences.
static bool piece_of(td_step_seq *out, const td_rank *r, const td_step_seq *seqs, uint32_t n_seqs,
                     uint32_t rank, uint32_t i) {
  return cut(out, &seqs[i % n_seqs], r->n_ranks, td_zigzag_piece(r->n_ranks, rank, i / n_seqs));
}

// Appends pieces [begin, end) of a rank to r->seqs; returns their tokens.
static uint32_t add_pieces(td_rank *r, const td_step_seq *seqs, uint32_t n_seqs, uint32_t rank,
                           uint32_t begin, uint32_t end, uint32_t *n) {
  uint32_t n_tokens = 0;
  for (uint32_t i = begin; i < end; i++) {
    if (!piece_of(&r->seqs[*n], r, seqs, n_seqs, rank, i)) continue;
    r->wholes[*n] = i % n_seqs;
    n_tokens += r->seqs[(*n)++].n_tokens;
  }
  return n_tokens;
}

static void count_wanted(td_rank *r, const td_step_seq *seqs, uint32_t n_seqs) {
  r->n_all_rows = 0;
  for (uint32_t rank = 0; rank < r->n_ranks; rank++) {
    td_step_seq piece;
    r->n_rows[rank] = 0;
    for (uint32_t i = 0; i < 2 * n_seqs; i++)
      if (piece_of(&piece, r, seqs, n_seqs, rank, i)) r->n_rows[rank] += td_step_seq_rows(&piece);
    r->n_all_rows += (uint32_t)r->n_rows[rank];
  }
}

static void use_tables(td_engine *e, const rank_tables *t) {
  e->meta = t->meta;
  e->dev_meta = t->dev_meta;
  e->first_token = t->first_token;
}

// The first gathered row of a rank's piece of sequence s.
static size_t row_of_piece(const td_rank *r, const td_step_seq *seqs, uint32_t n_seqs, uint32_t s,
                           uint32_t piece) {
  const uint32_t half = piece >= r->n_ranks;
  const uint32_t rank = half ? 2 * r->n_ranks - 1 - piece : piece;
  size_t row = 0;
  for (uint32_t i = 0; i < rank; i++)
    row += r->n_rows[i];
  for (uint32_t i = 0; i < half * n_seqs + s; i++) {
    td_step_seq before;
    if (piece_of(&before, r, seqs, n_seqs, rank, i)) row += td_step_seq_rows(&before);
  }
  return row;
}

// Where the caller's rows are among the gathered ones, and their temperatures.
static void order_rows(td_rank *r, const td_step_seq *seqs, uint32_t n_seqs) {
  int32_t *order = r->wanted.meta, *temperature = order + r->n_all_rows;
  uint32_t row = 0;
  for (uint32_t s = 0; s < n_seqs; s++) {
    for (uint32_t piece = 0; piece < 2 * r->n_ranks && seqs[s].want != TD_WANT_NONE; piece++) {
      td_step_seq part;
      if (!cut(&part, &seqs[s], r->n_ranks, piece)) continue;
      const size_t first = row_of_piece(r, seqs, n_seqs, s, piece);
      for (uint32_t i = 0; i < td_step_seq_rows(&part); i++) {
        memcpy(&temperature[row], &seqs[s].temperature, sizeof(float));
        order[row++] = (int32_t)(first + i);
      }
    }
  }
  r->wanted.len = 2 * (size_t)r->n_all_rows;
}

// Lays out the own tokens of a half, and all ranks' tokens for their KV entries.
static void build_half(td_engine *e, const td_step_seq *seqs, uint32_t n_seqs, uint32_t h) {
  td_rank *r = e->rank;
  td_rank_half *half = &r->halves[h];
  const uint32_t n_pieces = 2 * n_seqs / r->n_halves, first = h * n_pieces;
  uint32_t n = 0;
  for (uint32_t rank = 0; rank < r->n_ranks; rank++)
    half->n_tokens[rank] = add_pieces(r, seqs, n_seqs, rank, first, first + n_pieces, &n);
  use_tables(e, &r->all[h]);
  td_engine_build_step(e, r->seqs, r->wholes, n);
  r->all[h].len = e->step.meta_len;
  half->all = e->step.whole.groups[GROUP_PREFILL];
  half->begin = h ? r->halves[h - 1].begin + r->halves[h - 1].n : 0;
  half->n = e->step.n_tokens;
  n = 0;
  add_pieces(r, seqs, n_seqs, r->rank, first, first + n_pieces, &n);
  use_tables(e, &r->own_halves[h]);
  td_engine_build_step(e, r->seqs, r->wholes, n);
  r->own_halves[h].len = e->step.meta_len;
  half->own = e->step.whole;
}

// Lays out the step by halves, and then the own tokens together.
static void build(td_engine *e, const td_step_seq *seqs, uint32_t n_seqs) {
  td_rank *r = e->rank;
  const uint32_t least = e->opts.overlap_tokens ? e->opts.overlap_tokens : TD_OVERLAP_TOKENS;
  r->n_halves = count_tokens(seqs, n_seqs) >= least ? TD_RANK_HALVES : 1;
  r->n_all = 0;
  count_wanted(r, seqs, n_seqs);
  order_rows(r, seqs, n_seqs);
  td_window_begin(e, seqs, n_seqs);
  for (uint32_t h = 0; h < r->n_halves; h++) {
    build_half(e, seqs, n_seqs, h);
    r->n_all += r->halves[h].n;
  }
  uint32_t n = 0;
  add_pieces(r, seqs, n_seqs, r->rank, 0, 2 * n_seqs, &n);
  use_tables(e, &r->own);
  td_engine_build_step(e, r->seqs, r->wholes, n);
  td_engine_note_wants(e, seqs, n_seqs);
  uint32_t begin = 0;
  for (uint32_t h = 0; h < r->n_halves; begin += r->halves[h++].own.n_tokens)
    td_engine_place_part(e, &r->halves[h].own, begin, r->halves[h].own.n_tokens);
}

static void upload(td_engine *e, const rank_tables *t) {
  if (t->len) td_op_copy_direct(e->stream, t->dev_meta, t->meta, t->len * sizeof *t->meta);
}

// All but the own tokens', which the engine's step uploads.
static void upload_tables(td_engine *e) {
  const td_rank *r = e->rank;
  upload(e, &r->wanted);
  for (uint32_t h = 0; h < r->n_halves; h++) {
    upload(e, &r->all[h]);
    upload(e, &r->own_halves[h]);
  }
}

// ---- exchange within a step ---------------------------------------------------------------------

// What the exchange's stream is given next begins behind what the engine's has so far.
static void begin_exchange(td_engine *e) {
  td_event_record(e->rank->ready, e->stream);
  td_stream_wait(e->rank->stream, e->rank->ready);
}

void td_rank_await(td_engine *e, const td_rank_half *half) {
  td_stream_wait(e->stream, half->exchanged);
}

// Gathers rows of row_bytes each; n: of each rank.
static void gather(td_engine *e, const void *mine, void *all, const size_t *n, size_t row_bytes) {
  td_rank *r = e->rank;
  size_t n_bytes[TD_COMM_MAX_RANKS];
  for (uint32_t i = 0; i < r->n_ranks; i++)
    n_bytes[i] = n[i] * row_bytes;
  const td_all_gather_args args = {.mine = mine, .all = all, .n_bytes = n_bytes};
  if (r->status == TD_OK) r->status = td_comm_all_gather(r->comm, r->stream, &args, &r->err);
}

// The half's rows of activations that all ranks have.
static void gather_half(td_engine *e, const td_rank_half *half, const void *mine, void *all,
                        size_t row_elements) {
  const size_t row = row_elements * e->act_bytes;
  gather(e, (const char *)mine + half->own.begin * row, (char *)all + half->begin * row,
         half->n_tokens, row);
}

void td_rank_gather_entries(td_engine *e, td_rank_half *half, uint32_t layer_idx) {
  td_rank *r = e->rank;
  const td_attn_cache cache = td_attn_of(e->config, layer_idx)->cache(e->config);
  begin_exchange(e);
  for (size_t i = 0; i < TD_N_ENTRIES; i++)
    if (cache.entry[i]) gather_half(e, half, e->act[i], r->entry[i], cache.entry[i]);
  td_event_record(half->exchanged, r->stream);
}

void td_rank_store(td_engine *e, const td_rank_half *half, uint32_t layer_idx) {
  const td_attn_cache cache = td_attn_of(e->config, layer_idx)->cache(e->config);
  td_rank_await(e, half);
  if (!half->n) return;
  td_attn_store store = {.batch = td_layer_batch(e, &half->all, layer_idx),
                         .kv = td_layer_kv(e, layer_idx, false)};
  for (size_t i = 0; i < TD_N_ENTRIES; i++) {
    const size_t at = (size_t)half->begin * cache.entry[i];
    if (cache.entry[i]) store.entry[i] = td_rows_offset(e, e->rank->entry[i], at);
  }
  td_attn_ops_of(e->config, layer_idx)->store(e, &store);
}

void td_rank_gather_hidden(td_engine *e, td_rank_half *half) {
  begin_exchange(e);
  gather_half(e, half, e->h, e->rank->h, e->config->dim);
  td_event_record(half->exchanged, e->rank->stream);
}

void td_rank_reduce(td_engine *e, td_rank_half *half, const float *sums) {
  td_rank *r = e->rank;
  size_t n[TD_COMM_MAX_RANKS];
  for (uint32_t i = 0; i < r->n_ranks; i++)
    n[i] = half->n_tokens[i] * e->config->dim;
  const td_reduce_scatter_args args = {.part = sums + (size_t)half->begin * e->config->dim,
                                       .out = half->own.delta,
                                       .n = n,
                                       .out_f32 = e->act_bytes == sizeof(float)};
  begin_exchange(e);
  if (r->status == TD_OK) r->status = td_comm_reduce_scatter(r->comm, r->stream, &args, &r->err);
  td_event_record(half->exchanged, r->stream);
}

void td_rank_gather_rows(td_engine *e) {
  td_rank *r = e->rank;
  begin_exchange(e);
  gather(e, e->h, r->h, r->n_rows, e->config->dim * e->act_bytes);
  td_event_record(r->halves[0].exchanged, r->stream);
  td_rank_await(e, &r->halves[0]);
  e->step.n_rows = r->n_all_rows;
  e->step.temperature = (const float *)(r->wanted.dev_meta + r->n_all_rows);
  td_op_gather_rows(e->stream, e->h, r->h, r->wanted.dev_meta, e->step.n_rows, e->config->dim);
}

// ---- a step -------------------------------------------------------------------------------------

// Pages that only rank 0 has, neighbours together.
static void send_pages(td_engine *e, const int32_t *pages, uint32_t n_pages) {
  td_rank *r = e->rank;
  begin_exchange(e);
  for (uint32_t i = 0, n; i < n_pages; i += n) {
    for (n = 1; i + n < n_pages && pages[i + n] == pages[i] + (int32_t)n;)
      n++;
    for (uint32_t layer_idx = 0; layer_idx < e->config->n_layers && r->status == TD_OK;
         layer_idx++) {
      const td_kv_view kv = td_engine_kv_view(e, layer_idx);
      char *page = kv.pages + (size_t)pages[i] * kv.page_bytes;
      r->status = td_comm_broadcast(r->comm, r->stream, page, n * kv.page_bytes, 0, &r->err);
    }
  }
  td_event_record(r->halves[0].exchanged, r->stream);
  td_rank_await(e, &r->halves[0]);
}

// The same on every rank, each on a thread of its own.
static td_status step_of_rank(td_engine *e, const td_ranks *all, td_err *err) {
  td_rank *r = e->rank;
  r->status = TD_OK;
  r->saved = (rank_tables){.meta = e->meta, .dev_meta = e->dev_meta, .first_token = e->first_token};
  td_status st = td_engine_check_step(e, all->seqs, all->n_seqs, err);
  if (st == TD_OK) {
    r->is_active = true;
    td_dev_set_in_group(e->dev, true);
    e->step.n_seqs = all->n_seqs;
    send_pages(e, all->pages, all->n_pages);
    build(e, all->seqs, all->n_seqs);
    upload_tables(e);
    st = td_engine_run_step(e, r->n_all_rows, err);
    td_err why;
    const td_status exchanged = td_stream_sync(r->stream, &why);
    if (st == TD_OK && exchanged != TD_OK) st = exchanged, *err = why;
    if (r->status != TD_OK) st = r->status, *err = r->err;
    td_dev_set_in_group(e->dev, false);
    r->is_active = false;
    use_tables(e, &r->saved);
  }
  if (st != TD_OK) td_comm_abort(r->comm, err->msg);
  td_err why;
  if (td_comm_check(r->comm, &why) != TD_OK) st = why.code, *err = why;
  return st;
}

// ---- a step on all ranks ------------------------------------------------------------------------

static void *peer_main(void *arg) {
  peer *p = arg;
  td_ranks *all = p->all;
  uint64_t n_done = 0;
  pthread_mutex_lock(&all->lock);
  for (;;) {
    while (all->n_steps == n_done && !all->is_closing)
      pthread_cond_wait(&all->moved, &all->lock);
    if (all->is_closing) break;
    n_done++;
    pthread_mutex_unlock(&all->lock);
    td_err err;
    const td_status st = step_of_rank(p->engine, all, &err);
    pthread_mutex_lock(&all->lock);
    p->status = st;
    if (st != TD_OK) p->err = err;
    all->n_running--;
    pthread_cond_broadcast(&all->moved);
  }
  pthread_mutex_unlock(&all->lock);
  return NULL;
}

bool td_ranks_wants(td_engine *e, const td_step_seq *seqs, uint32_t n_seqs) {
  const td_ranks *all = e->ranks;
  if (all->is_broken || td_images_are_in(seqs, n_seqs)) return false;
  for (uint32_t i = 0; i < n_seqs; i++)
    if (seqs[i].is_decode) return false;
  const uint32_t n = count_tokens(seqs, n_seqs);
  uint32_t least = e->opts.parallel_tokens;
  if (!least) {
    least = td_engine_stream_tokens(e);
    if (least < MIN_PARALLEL_TOKENS) least = MIN_PARALLEL_TOKENS;
  }
  if (n < least) return false;
  for (uint32_t r = 0; r < all->n; r++) {
    td_engine *rank = all->engines[r];
    const uint32_t break_even = td_engine_stream_tokens(rank);
    if (rank->offload.dev && (!break_even || n < break_even || !td_engine_streams_all(rank)))
      return false;
  }
  return true;
}

// Borrowed pages may be written by others at any time.
static bool knows_writes(const td_engine *e) {
  return !e->opts.kv_pages || e->opts.writes_are_noted;
}

// Pages with the past of sequences, which the other ranks lack.
static uint32_t list_pages(const td_engine *e, const td_step_seq *seqs, uint32_t n_seqs,
                           int32_t *out) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < n_seqs; i++) {
    const uint32_t n_past = (seqs[i].n_past + e->opts.page_tokens - 1) / e->opts.page_tokens;
    for (uint32_t p = 0; p < n_past; p++) {
      bool *is_shared = &e->ranks->is_shared[seqs[i].pages[p]];
      if (*is_shared) continue;
      *is_shared = knows_writes(e);
      out[n++] = seqs[i].pages[p];
    }
  }
  return n;
}

static void mark_pages(td_engine *e, const td_step_seq *seqs, uint32_t n_seqs, bool is_shared) {
  for (uint32_t i = 0; i < n_seqs; i++) {
    const uint32_t first = seqs[i].n_past / e->opts.page_tokens;
    const uint32_t last = (seqs[i].n_past + seqs[i].n_tokens - 1) / e->opts.page_tokens;
    for (uint32_t p = first; p <= last && p < seqs[i].n_pages; p++)
      e->ranks->is_shared[seqs[i].pages[p]] = is_shared && knows_writes(e);
  }
}

void td_ranks_note_alone(td_engine *e, const td_step_seq *seqs, uint32_t n_seqs) {
  mark_pages(e, seqs, n_seqs, false);
}

static void begin_peers(td_ranks *all, const td_step_seq *seqs, uint32_t n_seqs,
                        const int32_t *pages, uint32_t n_pages) {
  pthread_mutex_lock(&all->lock);
  all->seqs = seqs;
  all->n_seqs = n_seqs;
  all->pages = pages;
  all->n_pages = n_pages;
  all->n_steps++;
  all->n_running = all->n - 1;
  pthread_cond_broadcast(&all->moved);
  pthread_mutex_unlock(&all->lock);
}

static td_status end_peers(td_ranks *all, td_status st, td_err *err) {
  pthread_mutex_lock(&all->lock);
  while (all->n_running)
    pthread_cond_wait(&all->moved, &all->lock);
  for (uint32_t r = 1; r < all->n && st == TD_OK; r++) {
    st = all->peers[r].status;
    if (st != TD_OK && err) *err = all->peers[r].err;
  }
  pthread_mutex_unlock(&all->lock);
  return st;
}

td_status td_ranks_step(td_engine *e, const td_step_seq *seqs, uint32_t n_seqs, td_err *err) {
  td_ranks *all = e->ranks;
  td_err why = {.code = TD_OK};
  td_status st = td_engine_check_step(e, seqs, n_seqs, err);
  if (st != TD_OK) return st;
  uint32_t n_past = 0;
  for (uint32_t i = 0; i < n_seqs; i++)
    n_past += seqs[i].n_pages;
  int32_t *pages = malloc((n_past + 1) * sizeof *pages);
  if (!pages) return td_fail(err, TD_ENOMEM, "out of memory");
  const uint32_t n_pages = list_pages(e, seqs, n_seqs, pages);
  begin_peers(all, seqs, n_seqs, pages, n_pages);
  st = step_of_rank(e, all, &why);
  st = end_peers(all, st, &why);
  free(pages);
  if (st == TD_OK) {
    td_debug("a step of %u tokens on %u devices", count_tokens(seqs, n_seqs), all->n);
    mark_pages(e, seqs, n_seqs, true);
    return TD_OK;
  }
  all->is_broken = true;
  td_warn("expert parallelism ends: %s", why.msg);
  if (err) *err = why;
  return st;
}

// ---- open and close -----------------------------------------------------------------------------

static td_status open_peers(td_engine *e, td_err *err) {
  td_ranks *all = e->ranks;
  td_status st = TD_OK;
  for (uint32_t r = 1; r < all->n && st == TD_OK; r++) {
    td_engine_opts opts = e->opts;
    opts.n_peers = 0;
    opts.kv_pages = NULL;
    opts.cache_bytes = 0; // they do not decode
    opts.cache_peer = NULL;
    const uint32_t break_even = td_engine_stream_tokens(e);
    opts.break_even_tokens = break_even ? break_even : UINT32_MAX;
    st = td_engine_open(&all->engines[r], e->model, e->opts.peer_devs[r - 1], &opts, err);
  }
  return st;
}

static td_status open_group(td_engine *e, td_err *err) {
  td_ranks *all = e->ranks;
  td_dev *devs[TD_COMM_MAX_RANKS] = {e->dev};
  td_comm *comms[TD_COMM_MAX_RANKS];
  for (uint32_t r = 1; r < all->n; r++)
    devs[r] = e->opts.peer_devs[r - 1];
  const td_comm_opts opts = {.backend = e->opts.comm_backend ? e->opts.comm_backend : "auto",
                             .n_ranks = all->n};
  td_status st = td_comm_open(comms, devs, &opts, err);
  if (st != TD_OK) return st;
  for (uint32_t r = 0; r < all->n; r++)
    if (st != TD_OK)
      td_comm_close(comms[r]);
    else
      st = open_rank(all->engines[r], comms[r], err);
  if (st == TD_OK)
    td_info("expert parallelism on %u devices, exchange by %s", all->n,
            td_comm_backend(e->rank->comm));
  return st;
}

static td_status start_threads(td_ranks *all, td_err *err) {
  for (uint32_t r = 1; r < all->n; r++) {
    peer *p = &all->peers[r];
    p->all = all;
    p->engine = all->engines[r];
    if (td_thread_start(&p->thread, peer_main, p) != 0)
      return td_fail(err, TD_ENOMEM, "cannot start a thread for a rank");
    p->has_thread = true;
  }
  return TD_OK;
}

td_status td_ranks_open(td_engine *e, td_err *err) {
  if (!e->opts.n_peers) return TD_OK;
  if (e->opts.n_peers >= TD_COMM_MAX_RANKS)
    return td_fail(err, TD_EINVAL, "at most %d devices", TD_COMM_MAX_RANKS);
  if (e->opts.record_routing)
    return td_fail(err, TD_EUNSUPPORTED, "the routing is recorded on one device only");
  if (e->opts.transfer)
    return td_fail(err, TD_EUNSUPPORTED, "KV pages are kept in host memory by one device only");
  if (td_attn_has_states(e->config)) {
    td_info("expert parallelism is not for models with a recurrent state: one device computes");
    return TD_OK;
  }
  td_ranks *all = e->ranks = calloc(1, sizeof *all);
  if (!all) return td_fail(err, TD_ENOMEM, "out of memory");
  all->n = e->opts.n_peers + 1;
  all->engines[0] = e;
  pthread_mutex_init(&all->lock, NULL);
  pthread_cond_init(&all->moved, NULL);
  all->is_shared = calloc(e->opts.n_pages, sizeof *all->is_shared);
  if (!all->is_shared) return td_fail(err, TD_ENOMEM, "out of memory");
  td_status st = open_peers(e, err);
  if (st == TD_OK) st = open_group(e, err);
  return st == TD_OK ? start_threads(all, err) : st;
}

void td_ranks_close(td_engine *e) {
  td_ranks *all = e->ranks;
  if (!all) return;
  pthread_mutex_lock(&all->lock);
  all->is_closing = true;
  pthread_cond_broadcast(&all->moved);
  pthread_mutex_unlock(&all->lock);
  for (uint32_t r = 1; r < all->n; r++)
    if (all->peers[r].has_thread) pthread_join(all->peers[r].thread, NULL);
  td_comm *comms[TD_COMM_MAX_RANKS] = {NULL};
  for (uint32_t r = 0; r < all->n; r++)
    if (all->engines[r] && all->engines[r]->rank) comms[r] = all->engines[r]->rank->comm;
  td_comm_close_all(comms, all->n);
  for (uint32_t r = 0; r < all->n; r++)
    if (all->engines[r]) close_rank(all->engines[r]);
  for (uint32_t r = 1; r < all->n; r++)
    td_engine_close(all->engines[r]);
  pthread_cond_destroy(&all->moved);
  pthread_mutex_destroy(&all->lock);
  free(all->is_shared);
  free(all);
  e->ranks = NULL;
}

void td_engine_note_written(td_engine *e, const td_step_seq *seqs, uint32_t n_seqs) {
  if (e->ranks) td_ranks_note_alone(e, seqs, n_seqs);
}
