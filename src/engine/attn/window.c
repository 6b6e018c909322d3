// src/engine/attn/window.c - blocks of layers with a window: where they are, and their copies.
#include "engine/attn/window.h"

#include <stdlib.h>

// A run of neighbouring blocks, in the pages and in the engine's own memory.
typedef struct {
  uint32_t slot, at, n;
} block_run;

typedef struct {
  block_run *runs; // owned
  uint32_t n, most;
} run_list;

// Where a sequence's blocks are in the engine's own memory; n 0: its token goes to its page.
typedef struct {
  uint32_t first, n, at; // first: index of the block in the sequence
} region;

struct td_window {
  char *blocks;    // device memory: [n_blocks][block_bytes]
  region *regions; // [max_step_seqs], of the step's sequences
  run_list in, out;
  uint32_t n_used; // blocks of the step
  bool is_direct;  // generated tokens of the step are stored in the pages
};

// ---- open and close -----------------------------------------------------------------------------

static size_t block_bytes(const td_engine *e) {
  return e->layout.state_bytes / e->layout.n_blocks;
}

static uint32_t blocks_in_page(const td_engine *e) {
  return e->layout.page_tokens / e->layout.block_tokens;
}

uint32_t td_window_max_blocks(const td_engine *e) {
  return e->layout.n_blocks ? e->max_pages * blocks_in_page(e) : 0;
}

static td_status open_runs(run_list *list, size_t most, td_err *err) {
  list->most = (uint32_t)most;
  list->runs = malloc(most * sizeof *list->runs);
  return list->runs ? TD_OK : td_fail(err, TD_ENOMEM, "out of memory: blocks of a step");
}

td_status td_window_open(td_engine *e, td_err *err) {
  const td_kv_layout *layout = &e->layout;
  if (!layout->n_blocks) return TD_OK;
  const size_t n_seqs = e->opts.max_step_seqs, n_tokens = e->opts.max_step_tokens;
  td_window *w = e->window = calloc(1, sizeof *w);
  if (w) w->regions = calloc(n_seqs, sizeof *w->regions);
  if (!w || !w->regions) return td_fail(err, TD_ENOMEM, "out of memory: blocks of a step");
  const size_t most_pages = n_tokens / layout->page_tokens + 2 * n_seqs;
  const size_t max_blocks = n_tokens / layout->block_tokens + n_seqs * (layout->n_blocks + 1);
  td_status st = open_runs(&w->in, n_seqs * layout->n_blocks, err);
  if (st == TD_OK) st = open_runs(&w->out, most_pages * layout->n_blocks, err);
  if (st != TD_OK) return st;
  return td_dev_alloc(e->dev, (void **)&w->blocks, max_blocks * block_bytes(e), err);
}

void td_window_close(td_engine *e) {
  td_window *w = e->window;
  if (!w) return;
  td_dev_free(e->dev, w->blocks);
  free(w->regions);
  free(w->in.runs);
  free(w->out.runs);
  free(w);
}

// ---- where the tokens of a step go --------------------------------------------------------------

// Block `block` of a sequence in its page.
static uint32_t slot_of(const td_engine *e, const td_step_seq *seq, uint32_t block) {
  const uint32_t in_page = blocks_in_page(e), n = e->layout.n_blocks;
  return (uint32_t)seq->pages[block / in_page] * n + block % in_page % n;
}

static void add_run(run_list *list, uint32_t slot, uint32_t at) {
  block_run *last = list->n ? &list->runs[list->n - 1] : NULL;
  if (last && slot == last->slot + last->n && at == last->at + last->n) {
    last->n++;
    return;
  }
  TD_CHECK(list->n < list->most);
  list->runs[list->n++] = (block_run){.slot = slot, .at = at, .n = 1};
}

// Block of the first position that a token at `position` sees.
static uint32_t first_block(const td_engine *e, uint32_t position) {
  const uint32_t window = e->config->window;
  return position < window ? 0 : (position + 1 - window) / e->layout.block_tokens;
}

static void place(td_engine *e, const td_step_seq *seq, region *r) {
  td_window *w = e->window;
  const uint32_t of_block = e->layout.block_tokens, in_page = blocks_in_page(e);
  const uint32_t last = (seq->n_past + seq->n_tokens - 1) / of_block;
  r->first = first_block(e, seq->n_past);
  r->n = last - r->first + 1;
  r->at = w->n_used;
  w->n_used += r->n;
  for (uint32_t b = r->first; b * of_block < seq->n_past; b++)
    add_run(&w->in, slot_of(e, seq, b), r->at + b - r->first);
  for (uint32_t b = seq->n_past / of_block; b <= last; b++) {
    const uint32_t page_end = b / in_page * in_page + in_page;
    const uint32_t end = last + 1 < page_end ? last + 1 : page_end; // of the page's in this step
    if (b + e->layout.n_blocks >= end) add_run(&w->out, slot_of(e, seq, b), r->at + b - r->first);
  }
}

void td_window_begin(td_engine *e, const td_step_seq *seqs, uint32_t n_seqs) {
  td_window *w = e->window;
  if (!w) return;
  w->n_used = w->in.n = w->out.n = 0;
  w->is_direct = true;
  for (uint32_t i = 0; i < n_seqs; i++)
    w->is_direct &= !seqs[i].is_decode || seqs[i].n_tokens == 1;
  for (uint32_t i = 0; i < n_seqs; i++) {
    w->regions[i] = (region){.n = 0};
    if (!seqs[i].is_decode || !w->is_direct) place(e, &seqs[i], &w->regions[i]);
  }
}

// Blocks that no token of the step sees get a place that can be read.
void td_window_table(const td_engine *e, const td_step_seq *seq, uint32_t s, int32_t *out) {
  const region *r = &e->window->regions[s];
  const uint32_t n_tokens = seq->n_past + seq->n_tokens, of_block = e->layout.block_tokens;
  const uint32_t first = r->n ? r->first : first_block(e, seq->n_past);
  const uint32_t end = (n_tokens - 1) / of_block + 1;
  for (uint32_t b = first; b < end; b++)
    out[b] = (int32_t)(r->n ? r->at + b - first : slot_of(e, seq, b));
  for (uint32_t b = 0; b < first; b++)
    out[b] = out[first];
}

// ---- a layer ------------------------------------------------------------------------------------

static bool has_blocks(const td_engine *e, uint32_t layer_idx) {
  return e->window && td_engine_has_state(e, layer_idx);
}

static void copy_runs(td_engine *e, uint32_t layer_idx, const run_list *list, bool is_in) {
  char *pages = td_engine_kv_view(e, layer_idx).pages;
  const size_t n_bytes = block_bytes(e);
  for (uint32_t i = 0; i < list->n; i++) {
    const block_run *run = &list->runs[i];
    char *own = e->window->blocks + run->at * n_bytes, *kept = pages + run->slot * n_bytes;
    td_op_copy(e->stream, is_in ? own : kept, is_in ? kept : own, run->n * n_bytes);
  }
}

void td_window_enter(td_engine *e, uint32_t layer_idx) {
  if (has_blocks(e, layer_idx)) copy_runs(e, layer_idx, &e->window->in, true);
}

void td_window_leave(td_engine *e, uint32_t layer_idx) {
  if (has_blocks(e, layer_idx)) copy_runs(e, layer_idx, &e->window->out, false);
}

td_batch_view td_layer_batch(const td_engine *e, const step_group *group, uint32_t layer_idx) {
  td_batch_view out = group->view;
  if (!has_blocks(e, layer_idx)) return out;
  out.page_table = group->blocks;
  out.max_pages = td_window_max_blocks(e);
  out.page_tokens = e->layout.block_tokens;
  return out;
}

td_kv_view td_layer_kv(const td_engine *e, uint32_t layer_idx, bool is_decode) {
  td_kv_view out = td_engine_kv_view(e, layer_idx);
  if (!has_blocks(e, layer_idx)) return out;
  out.page_bytes = block_bytes(e);
  if (!is_decode || !e->window->is_direct) out.pages = e->window->blocks;
  return out;
}
