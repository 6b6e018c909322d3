// src/engine/kv_transfer.c - copies of KV pages in and out, and which of them are current.
#include "engine/kv_transfer.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "engine/engine_impl.h"

struct td_kv_transfer {
  td_kv_transfer_opts opts;
  td_stream *in;     // for copies to the device
  td_event *entered; // recorded after the last of them
  uint32_t *here;    // [n_pages] version of the device's copy; 0: none
  bool *is_ahead;    // [n_pages] while the copy is current: its state is not in host memory
  bool is_paused;
  td_kv_transfer_stats stats;
};

// What an engine has for its steps.
struct td_kv_outlet {
  td_stream *stream; // for copies from the device
  td_event *stored;  // a layer's keys and values are in the device's pages
  td_event *left;    // all copies of the step have ended
  // Pages that the step in progress writes: n_prompt_pages of prompts come first.
  int32_t *pages;
  uint32_t n_pages, n_prompt_pages;
  int32_t *full; // the pages among them that it fills, in a model with states
  uint32_t n_full;
};

// ---- open and close -----------------------------------------------------------------------------

td_status td_kv_transfer_open(td_kv_transfer **out, const td_kv_transfer_opts *opts, td_err *err) {
  *out = NULL;
  td_kv_transfer *t = calloc(1, sizeof *t);
  if (!t) return td_fail(err, TD_ENOMEM, "out of memory");
  t->opts = *opts;
  t->here = calloc(opts->n_pages, sizeof *t->here);
  t->is_ahead = calloc(opts->n_pages, sizeof *t->is_ahead);
  td_status st = TD_OK;
  if (!t->here || !t->is_ahead) st = td_fail(err, TD_ENOMEM, "out of memory: versions of KV pages");
  if (st == TD_OK) st = td_stream_open(&t->in, opts->dev, err);
  if (st == TD_OK) st = td_event_open(&t->entered, opts->dev, err);
  if (st != TD_OK) {
    td_kv_transfer_close(t);
    return st;
  }
  *out = t;
  return TD_OK;
}

void td_kv_transfer_close(td_kv_transfer *t) {
  if (!t) return;
  td_stream_close(t->in);
  td_event_close(t->entered);
  free(t->here);
  free(t->is_ahead);
  free(t);
}

void td_kv_transfer_pause(td_kv_transfer *t, bool is_paused) {
  t->is_paused = is_paused;
}

td_kv_transfer_stats td_kv_transfer_stats_of(const td_kv_transfer *t) {
  return t->stats;
}

// ---- pages in and out ---------------------------------------------------------------------------

static uint32_t n_parts(const td_kv_transfer *t) {
  return t->opts.layout.n_layers + t->opts.layout.n_states;
}

static size_t part_bytes(const td_kv_transfer *t, uint32_t part) {
  return td_kv_layout_bytes_of_part(&t->opts.layout, part);
}

static size_t part_at(const td_kv_transfer *t, uint32_t part, int32_t page) {
  return td_kv_layout_part_at(&t->opts.layout, part, t->opts.n_pages, (uint32_t)page);
}

// How many of the pages, from the first on, are neighbours in memory.
static uint32_t neighbours(const int32_t *pages, uint32_t n_pages) {
  uint32_t n = 1;
  while (n < n_pages && pages[n] == pages[0] + (int32_t)n)
    n++;
  return n;
}

static bool is_current(const td_kv_transfer *t, int32_t page) {
  const uint32_t now = atomic_load_explicit(&t->opts.versions[page], memory_order_acquire);
  return now && t->here[page] == now;
}

static void copy_in(td_kv_transfer *t, int32_t page, uint32_t n) {
  for (uint32_t i = 0; i < n_parts(t); i++) {
    const size_t at = part_at(t, i, page), n_bytes = n * part_bytes(t, i);
    td_op_copy(t->in, t->opts.dev_pages + at, t->opts.host_pages + at, n_bytes);
    t->stats.in_bytes += n_bytes;
  }
}

void td_kv_transfer_enter(td_kv_transfer *t, const int32_t *pages, uint32_t n_pages) {
  bool is_any = false;
  for (uint32_t i = 0, n = 1; i < n_pages && !t->is_paused; i += n, n = 1) {
    if (is_current(t, pages[i])) continue;
    const uint32_t most = neighbours(pages + i, n_pages - i);
    while (n < most && !is_current(t, pages[i + n]))
      n++;
    for (uint32_t k = 0; k < n; k++) {
      const uint32_t now = atomic_load_explicit(&t->opts.versions[pages[i + k]],
                                                memory_order_acquire);
      t->here[pages[i + k]] = now;
      t->is_ahead[pages[i + k]] = false;
    }
    copy_in(t, pages[i], n);
    is_any = true;
  }
  if (is_any) td_event_record(t->entered, t->in);
}

bool td_kv_transfer_has_entered(td_kv_transfer *t) {
  return td_event_is_done(t->entered);
}

void td_kv_transfer_wait(td_kv_transfer *t) {
  td_event_sync(t->entered);
}

// The device has the page's new content. So has host memory, but for the state if is_ahead.
static void note_written(td_kv_transfer *t, int32_t page, bool is_ahead) {
  t->here[page] = atomic_fetch_add_explicit(&t->opts.versions[page], 1, memory_order_release) + 1;
  t->is_ahead[page] = is_ahead;
}

// ---- steps of an engine -------------------------------------------------------------------------

static size_t max_written(const td_engine *e) {
  return e->opts.max_step_tokens / e->opts.page_tokens + 2 * (size_t)e->opts.max_step_seqs;
}

td_status td_kv_outlet_open(td_engine *e, td_err *err) {
  if (!e->opts.transfer) return TD_OK;
  TD_CHECK(e->opts.kv_pages == e->opts.transfer->opts.dev_pages && !e->opts.n_peers);
  td_kv_outlet *o = e->outlet = calloc(1, sizeof *o);
  if (o) o->pages = malloc(max_written(e) * sizeof *o->pages);
  if (o) o->full = malloc(max_written(e) * sizeof *o->full);
  if (!o || !o->pages || !o->full)
    return td_fail(err, TD_ENOMEM, "out of memory: KV pages of a step");
  td_status st = td_stream_open(&o->stream, e->dev, err);
  if (st == TD_OK) st = td_event_open(&o->stored, e->dev, err);
  return st == TD_OK ? td_event_open(&o->left, e->dev, err) : st;
}

void td_kv_outlet_close(td_engine *e) {
  td_kv_outlet *o = e->outlet;
  if (!o) return;
  td_stream_close(o->stream);
  td_event_close(o->stored);
  td_event_close(o->left);
  free(o->pages);
  free(o->full);
  free(o);
}

// Appends the pages that the sequence's tokens of this step are written to.
static void list_written(const td_engine *e, const td_step_seq *seq) {
  td_kv_outlet *o = e->outlet;
  const uint32_t page_tokens = e->opts.page_tokens, n_past = seq->n_past + seq->n_tokens;
  for (uint32_t p = seq->n_past / page_tokens; p <= (n_past - 1) / page_tokens; p++) {
    o->pages[o->n_pages++] = seq->pages[p];
    if (e->opts.transfer->opts.layout.n_states && p < n_past / page_tokens)
      o->full[o->n_full++] = seq->pages[p];
  }
}

void td_kv_outlet_begin(td_engine *e, const td_step_seq *seqs, uint32_t n_seqs) {
  td_kv_outlet *o = e->outlet;
  if (!o) return;
  const uint32_t page_tokens = e->opts.page_tokens;
  o->n_pages = o->n_prompt_pages = o->n_full = 0;
  if (e->opts.transfer->is_paused) return;
  for (int is_decode = 0; is_decode < 2; is_decode++) {
    for (uint32_t i = 0; i < n_seqs; i++)
      if (seqs[i].is_decode == is_decode) list_written(e, &seqs[i]);
    if (!is_decode) o->n_prompt_pages = o->n_pages;
  }
  for (uint32_t i = 0; i < n_seqs; i++) {
    td_kv_transfer_enter(e->opts.transfer, seqs[i].pages,
                         (seqs[i].n_past + page_tokens - 1) / page_tokens);
  }
  td_stream_wait(e->stream, e->opts.transfer->entered);
}

bool td_kv_outlet_is_active(const td_engine *e) {
  return e->outlet && !e->opts.transfer->is_paused;
}

td_kv_view td_kv_outlet_view(const td_engine *e, uint32_t layer_idx) {
  const td_kv_transfer *t = e->opts.transfer;
  td_kv_view out = td_engine_kv_view(e, layer_idx);
  out.pages = t->opts.host_pages + part_at(t, e->part[layer_idx], 0);
  return out;
}

// Copies a part of the pages out, on a stream of its own.
static void leave(td_engine *e, uint32_t part, const int32_t *pages, uint32_t n_pages) {
  td_kv_outlet *o = e->outlet;
  td_kv_transfer *t = e->opts.transfer;
  for (uint32_t i = 0, n; i < n_pages; i += n) {
    n = neighbours(pages + i, n_pages - i);
    const size_t at = part_at(t, part, pages[i]), n_bytes = n * part_bytes(t, part);
    td_op_copy(o->stream, t->opts.host_pages + at, t->opts.dev_pages + at, n_bytes);
    t->stats.out_bytes += n_bytes;
  }
}

// What leaves from here on is what the engine's stream has so far.
static void wait_for_step(td_engine *e) {
  td_event_record(e->outlet->stored, e->stream);
  td_stream_wait(e->outlet->stream, e->outlet->stored);
}

void td_kv_outlet_layer(td_engine *e, uint32_t layer_idx) {
  td_kv_outlet *o = e->outlet;
  if (!o || !o->n_prompt_pages) return;
  wait_for_step(e);
  leave(e, e->part[layer_idx], o->pages, o->n_prompt_pages);
}

void td_kv_outlet_finish(td_engine *e) {
  td_kv_outlet *o = e->outlet;
  if (!o || (!o->n_prompt_pages && !o->n_full)) return;
  const td_kv_transfer *t = e->opts.transfer;
  if (o->n_full) wait_for_step(e);
  for (uint32_t i = td_kv_layout_first_state(&t->opts.layout); i < n_parts(t); i++)
    leave(e, i, o->full, o->n_full);
  td_event_record(o->left, o->stream);
  td_stream_wait(e->stream, o->left);
}

void td_kv_outlet_enter(td_engine *e, int32_t page) {
  if (!td_kv_outlet_is_active(e)) return;
  td_kv_transfer_enter(e->opts.transfer, &page, 1);
  td_stream_wait(e->stream, e->opts.transfer->entered);
}

void td_kv_outlet_part(td_engine *e, size_t at, size_t n_bytes) {
  if (!td_kv_outlet_is_active(e)) return;
  td_kv_transfer *t = e->opts.transfer;
  td_op_copy(e->stream, t->opts.host_pages + at, t->opts.dev_pages + at, n_bytes);
  t->stats.out_bytes += n_bytes;
}

void td_kv_outlet_note(td_engine *e, int32_t page) {
  if (td_kv_outlet_is_active(e)) note_written(e->opts.transfer, page, false);
}

void td_kv_outlet_note_rolled_back(td_engine *e, int32_t page) {
  if (td_kv_outlet_is_active(e)) e->opts.transfer->is_ahead[page] = true;
}

td_status td_engine_save_state(td_engine *e, int32_t page, td_err *err) {
  td_kv_transfer *t = e->opts.transfer;
  if (!td_kv_outlet_is_active(e) || !is_current(t, page) || !t->is_ahead[page]) return TD_OK;
  for (uint32_t i = td_kv_layout_first_state(&t->opts.layout); i < n_parts(t); i++)
    leave(e, i, &page, 1);
  td_status st = td_stream_sync(e->outlet->stream, err);
  if (st == TD_OK) note_written(t, page, false);
  return st;
}

td_status td_kv_outlet_end(td_engine *e, td_err *err) {
  td_kv_outlet *o = e->outlet;
  if (!o || !o->n_pages) return TD_OK;
  td_kv_transfer *t = e->opts.transfer;
  td_status st = td_stream_sync(o->stream, err);
  // The step's own copies have ended; nothing waits for copies for later steps.
  if (st == TD_OK && td_event_is_done(t->entered)) st = td_stream_sync(t->in, err);
  for (uint32_t i = 0; i < o->n_pages && st == TD_OK; i++)
    note_written(t, o->pages[i], t->opts.layout.n_states > 0);
  for (uint32_t i = 0; i < o->n_full; i++)
    t->is_ahead[o->full[i]] = false;
  o->n_pages = o->n_full = 0;
  return st;
}
