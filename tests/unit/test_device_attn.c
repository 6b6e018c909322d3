// tests/unit/test_device_attn.c - paged attention against a naive one in double, and the promise
// that chunks, batches and threads do not change a bit of it.
// CTest: no-tsan

#include "device/device.h"
#include "unit/attn_test.h"
#include "unit/ref.h"
#include "unit/sanitized.h"

// The rows of a step's tokens, one after the other.
typedef struct {
  const float *q, *k, *v, *index_q, *index_k, *index_weights;
  int32_t *selected;
  float *out;
} layer_io;

// Stores the indexer's keys behind the latents, or keys and values, of their pages.
static void run_index(const world *w, td_stream *stream, td_batch_view batch, const layer_io *io) {
  const layout *l = &w->l;
  const size_t entries = (size_t)l->page_tokens * entry_floats(l) * (l->mla ? 1 : 2);
  const td_kv_view kv = {.pages = (char *)w->pages + entries * td_dtype_bytes(l->kv_dtype),
                         .page_bytes = w->page_bytes,
                         .dtype = l->kv_dtype};
  td_op_kv_store(stream, &(td_kv_store_args){.batch = batch,
                                             .kv = kv,
                                             .k = io->index_k,
                                             .k_stride = INDEX_DIM,
                                             .n_heads = 1,
                                             .head_dim = INDEX_DIM});
  td_op_select(stream, &(td_select_args){.batch = batch,
                                         .kv = kv,
                                         .q = io->index_q,
                                         .weights = io->index_weights,
                                         .selected = io->selected,
                                         .n_heads = INDEX_HEADS,
                                         .dim = INDEX_DIM,
                                         .top_k = l->block ? l->top_blocks : l->top_k,
                                         .block = l->block,
                                         .n_local = l->n_local});
}

static void run_layer(const world *w, td_stream *stream, td_batch_view batch, layer_io io) {
  const layout *l = &w->l;
  const uint32_t e = entry_floats(l);
  td_kv_view kv = {.pages = (char *)w->pages,
                   .page_bytes = w->page_bytes,
                   .dtype = l->kv_dtype,
                   .n_bf16 = rows_of(l).n_bf16};
  for (uint32_t i = 0; l->group && i < batch.n_tokens * l->top_k; i++) {
    const uint32_t p = (uint32_t)batch.position[i / l->top_k];
    io.selected[i] = (int32_t)selected_group(l, p, i % l->top_k);
  }
  if (l->mla) {
    td_op_kv_store(
        stream,
        &(td_kv_store_args){
            .batch = batch, .kv = kv, .k = io.k, .k_stride = e, .n_heads = 1, .head_dim = e});
    if (l->top_k && !l->group) run_index(w, stream, batch, &io);
    td_op_attn_mla(stream, &(td_attn_mla_args){.batch = batch,
                                               .kv = kv,
                                               .q = io.q,
                                               .kv_b = &w->kv_b.w,
                                               .selected = l->top_k ? io.selected : NULL,
                                               .top_k = l->top_k,
                                               .group = l->group,
                                               .out = io.out,
                                               .n_heads = l->n_heads,
                                               .nope_dim = l->nope,
                                               .rope_dim = l->rope,
                                               .v_dim = l->v_dim,
                                               .kv_lora_rank = l->rank,
                                               .scale = w->scale,
                                               .absorbed = l->absorbed});
  } else {
    td_op_kv_store(stream, &(td_kv_store_args){.batch = batch,
                                               .kv = kv,
                                               .k = io.k,
                                               .v = io.v,
                                               .k_stride = e,
                                               .v_stride = e,
                                               .n_heads = l->n_kv_heads,
                                               .head_dim = l->head_dim});
    if (l->block) run_index(w, stream, batch, &io);
    td_op_attn_gqa(stream, &(td_attn_gqa_args){.batch = batch,
                                               .kv = kv,
                                               .q = io.q,
                                               .blocks = l->block ? io.selected : NULL,
                                               .block = l->block,
                                               .top_blocks = l->top_blocks,
                                               .selected = l->group ? io.selected : NULL,
                                               .top_k = l->top_k,
                                               .group = l->group,
                                               .out = io.out,
                                               .n_heads = l->n_heads,
                                               .n_kv_heads = l->n_kv_heads,
                                               .head_dim = l->head_dim,
                                               .window = l->window,
                                               .sinks = l->has_sinks ? w->sinks : NULL,
                                               .scale = w->scale,
                                               .prompt = l->prompt});
  }
}

// Runs tokens [from[s], to[s]) of every sequence in one step and keeps their outputs.
static void step(world *w, td_stream *stream, const uint32_t *from, const uint32_t *to) {
  const layout *l = &w->l;
  uint32_t n = 0, t = 0, e = entry_floats(l);
  for (uint32_t s = 0; s < l->n_seqs; s++)
    n += to[s] - from[s];
  int32_t *seq = malloc(n * sizeof *seq), *position = malloc(n * sizeof *position);
  int32_t q_begin[MAX_SEQS + 1] = {0};
  size_t q_row = (size_t)l->n_heads * w->q_dim, out_row = (size_t)l->n_heads * w->out_dim;
  float *q = malloc(n * q_row * sizeof *q), *out = malloc(n * out_row * sizeof *out);
  float *k = malloc((size_t)n * e * sizeof *k), *v = malloc((size_t)n * e * sizeof *v);
  float *index_q = malloc(n * INDEX_Q * sizeof *q), *index_k = malloc(n * INDEX_DIM * sizeof *k);
  float *index_weights = malloc(n * INDEX_HEADS * sizeof *q);
  int32_t *selected = calloc(n * selected_row(l) + 1, sizeof *selected);
  for (uint32_t s = 0; s < l->n_seqs; s++) {
    for (uint32_t p = from[s]; p < to[s]; p++, t++) {
      seq[t] = (int32_t)s;
      position[t] = (int32_t)p;
      memcpy(q + t * q_row, w->q[s] + p * q_row, q_row * sizeof *q);
      memcpy(k + (size_t)t * e, w->k[s] + (size_t)p * e, e * sizeof *k);
      memcpy(v + (size_t)t * e, w->v[s] + (size_t)p * e, e * sizeof *v);
      memcpy(index_q + t * INDEX_Q, w->index_q[s] + p * INDEX_Q, INDEX_Q * sizeof *q);
      memcpy(index_k + t * INDEX_DIM, w->index_k[s] + p * INDEX_DIM, INDEX_DIM * sizeof *k);
      memcpy(index_weights + t * INDEX_HEADS, w->index_weights[s] + p * INDEX_HEADS,
             INDEX_HEADS * sizeof *q);
    }
    q_begin[s + 1] = (int32_t)t;
  }
  td_batch_view batch = {.seq = seq,
                         .position = position,
                         .q_begin = q_begin,
                         .page_table = w->page_table,
                         .n_tokens = n,
                         .n_seqs = l->n_seqs,
                         .max_pages = w->max_pages,
                         .page_tokens = l->page_tokens};
  run_layer(w, stream, batch, (layer_io){q, k, v, index_q, index_k, index_weights, selected, out});
  td_err err;
  if (td_stream_sync(stream, &err) != TD_OK) fail_msg("%s", err.msg);
  t = 0;
  for (uint32_t s = 0; s < l->n_seqs; s++) {
    for (uint32_t p = from[s]; p < to[s]; p++, t++) {
      memcpy(w->out[s] + p * out_row, out + t * out_row, out_row * sizeof *out);
      memcpy(w->selected[s] + p * selected_row(l), selected + t * selected_row(l),
             selected_row(l) * sizeof *selected);
    }
  }
  free(index_q);
  free(index_k);
  free(index_weights);
  free(selected);
  free(seq);
  free(position);
  free(q);
  free(out);
  free(k);
  free(v);
}

// Compares every `every`-th token of each sequence with attention in double.
static void check_naive(const world *w, uint32_t every) {
  const layout *l = &w->l;
  double *k = ref_doubles(1024), *v = ref_doubles(1024), *want = ref_doubles(w->out_dim);
  bool sees[2048];
  for (uint32_t s = 0; s < l->n_seqs; s++) {
    double *keys = ref_doubles((size_t)l->len[s] * w->q_dim);
    double *values = ref_doubles((size_t)l->len[s] * w->out_dim);
    for (uint32_t h = 0; h < l->n_heads; h++) {
      for (uint32_t p = 0; p < l->len[s]; p++) {
        naive_kv(w, s, h, p, keys + (size_t)p * w->q_dim, values + (size_t)p * w->out_dim);
      }
      for (uint32_t t = l->len[s] - 1;; t -= every) {
        const float *q = w->q[s] + ((size_t)t * l->n_heads + h) * w->q_dim;
        double sum = l->has_sinks ? exp(w->sinks[h]) : 0;
        memset(want, 0, w->out_dim * sizeof *want);
        if (l->group) naive_groups(l, t, sees);
        if (l->top_k && !l->group) naive_selection(w, s, t, sees);
        if (l->block) naive_blocks(w, s, h / (l->n_heads / l->n_kv_heads), t, sees);
        for (uint32_t p = l->window && t >= l->window ? t + 1 - l->window : 0; p <= t; p++) {
          double dot = 0;
          if (selected_row(l) && !sees[p]) continue;
          for (uint32_t d = 0; d < w->q_dim; d++)
            dot += q[d] * keys[(size_t)p * w->q_dim + d];
          double weight = exp(w->scale * dot);
          sum += weight;
          for (uint32_t d = 0; d < w->out_dim; d++) {
            want[d] += weight * values[(size_t)p * w->out_dim + d];
          }
        }
        for (uint32_t d = 0; d < w->out_dim; d++)
          want[d] /= sum;
        double distance = ref_distance(w->out[s] + ((size_t)t * l->n_heads + h) * w->out_dim, want,
                                       w->out_dim);
        if (!(distance < 2e-5)) fail_msg("sequence %u head %u token %u: %g", s, h, t, distance);
        if (t < every) break;
      }
    }
    free(keys);
    free(values);
  }
  free(k);
  free(v);
  free(want);
}

// Whole sequences at once on one thread are compared with double; the same in chunks, sequence by
// sequence and token by token, on other teams, must agree with them to the bit.
static void check_layout_of(const layout *l, uint32_t every) {
  world whole, other;
  td_dev *dev;
  td_stream *stream;
  td_err err;
  uint32_t from[MAX_SEQS] = {0}, to[MAX_SEQS];
  assert_int_equal(td_dev_open(&dev, &(td_dev_opts){.kind = "cpu", .n_threads = 1}, &err), TD_OK);
  assert_int_equal(td_stream_open(&stream, dev, &err), TD_OK);
  make_world(&whole, l);
  step(&whole, stream, from, l->len);
  check_naive(&whole, every);
  td_stream_close(stream);
  td_dev_close(dev);

  assert_int_equal(td_dev_open(&dev, &(td_dev_opts){.kind = "cpu", .n_threads = 4}, &err), TD_OK);
  assert_int_equal(td_stream_open(&stream, dev, &err), TD_OK);
  static const uint32_t chunks[] = {1, 7, 100};
  for (size_t c = 0; c < TD_COUNT(chunks); c++) {
    make_world(&other, l);
    for (uint32_t done = 0;; done += chunks[c]) {
      bool more = false;
      for (uint32_t s = 0; s < l->n_seqs; s++) {
        from[s] = done < l->len[s] ? done : l->len[s];
        to[s] = done + chunks[c] < l->len[s] ? done + chunks[c] : l->len[s];
        more = more || to[s] < l->len[s];
      }
      step(&other, stream, from, to);
      if (!more) break;
    }
    for (uint32_t s = 0; s < l->n_seqs; s++) {
      size_t n = (size_t)l->len[s] * l->n_heads * whole.out_dim;
      assert_memory_equal(whole.out[s], other.out[s], n * sizeof(float));
      n = l->len[s] * selected_row(l);
      if (n) assert_memory_equal(whole.selected[s], other.selected[s], n * sizeof(int32_t));
    }
    free_world(&other);
  }
  free_world(&whole);
  td_stream_close(stream);
  td_dev_close(dev);
}

static void check_layout(const layout *l, uint32_t every) {
  static const td_dtype dtypes[] = {TD_F16, TD_F32};
  for (size_t i = 0; i < TD_COUNT(dtypes); i++) {
    enum { ASAN_MOST = 400 }; // tokens: more than a split
    layout of_dtype = *l;
    if (IS_ASAN && l->len[0] > ASAN_MOST) of_dtype.len[0] = ASAN_MOST;
    of_dtype.kv_dtype = dtypes[i];
    for (int prompt = 0; prompt < (l->mla ? 1 : 2); prompt++) {
      of_dtype.prompt = prompt;
      if (IS_ASAN && !l->mla && prompt != (int)i) continue;
      check_layout_of(&of_dtype, every);
    }
  }
}

TEST(gqa) {
  check_layout(&(layout){.n_heads = 6,
                         .n_kv_heads = 3,
                         .head_dim = 20,
                         .page_tokens = 16,
                         .n_seqs = 3,
                         .len = {130, 1, 33}},
               1);
}

// Windows within a block, over a page's end, over splits, and of one token; sinks.
TEST(gqa_with_windows_and_sinks) {
  static const uint32_t windows[] = {1, 5, 33, 70, 300};
  for (size_t i = 0; i < TD_COUNT(windows); i++) {
    check_layout(&(layout){.n_heads = 6,
                           .n_kv_heads = 2,
                           .head_dim = 20,
                           .window = windows[i],
                           .has_sinks = i % 2,
                           .page_tokens = 32,
                           .n_seqs = 2,
                           .len = {windows[i] > 100 ? 700 : 290, 40}},
                 13);
  }
  check_layout(&(layout){.n_heads = 3,
                         .n_kv_heads = 3,
                         .head_dim = 16,
                         .has_sinks = true,
                         .page_tokens = 16,
                         .n_seqs = 1,
                         .len = {70}},
               1);
}

// Blocks smaller than a page, that pages cut, larger than pages and than splits of keys; ties; with
// none, some and all of them near; one block, and more than there are.
TEST(gqa_over_selected_blocks) {
  static const struct {
    uint32_t block, top_blocks, n_local;
    bool has_ties;
  } list[] = {{8, 3, 1, false},   {5, 4, 0, false}, {24, 2, 2, false},
              {300, 1, 1, false}, {3, 9, 2, true},  {16, 99, 1, false}};
  for (size_t i = 0; i < TD_COUNT(list); i++) {
    check_layout(&(layout){.n_heads = 2 * INDEX_HEADS,
                           .n_kv_heads = INDEX_HEADS,
                           .head_dim = 12,
                           .block = list[i].block,
                           .top_blocks = list[i].top_blocks,
                           .n_local = list[i].n_local,
                           .has_ties = list[i].has_ties,
                           .page_tokens = 16,
                           .n_seqs = 2,
                           .len = {list[i].block > 100 ? 700 : 290, 40}},
                 13);
  }
}

// Groups of one, that fill pages, larger than pages; over more keys than a split; more than there
// are.
TEST(gqa_over_selected_groups) {
  static const uint32_t cases[][2] = {{1, 1}, {3, 4}, {5, 16}, {2, 32}, {40, 8}, {99, 4}};
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    check_layout(&(layout){.n_heads = 6,
                           .n_kv_heads = i % 2 ? 3 : 2,
                           .head_dim = 12,
                           .top_k = cases[i][0],
                           .group = cases[i][1],
                           .page_tokens = 16,
                           .n_seqs = 2,
                           .len = {390, 40}},
                 13);
  }
}

TEST(gqa_one_odd_head_group) {
  check_layout(&(layout){.n_heads = 35,
                         .n_kv_heads = 1,
                         .head_dim = 7,
                         .page_tokens = 4,
                         .n_seqs = 2,
                         .len = {19, 40}},
               1);
}

TEST(gqa_beyond_splits_and_large_pages) {
  check_layout(&(layout){.n_heads = 5,
                         .n_kv_heads = 5,
                         .head_dim = 16,
                         .page_tokens = 128,
                         .n_seqs = 2,
                         .len = {1300, 520}},
               97);
}

static const layout mla = {.mla = true,
                           .n_heads = 3,
                           .nope = 12,
                           .rope = 6,
                           .v_dim = 10,
                           .rank = 40,
                           .page_tokens = 16,
                           .n_seqs = 2,
                           .len = {150, 21}};

// Rows of one block, of two of which the second one is short, and of two whole ones; windows, and
// blocks of keys that the ends of pages and splits cut.
TEST(pages_in_e4m3) {
  static const layout list[] = {
      {.n_heads = 6,
       .n_kv_heads = 3,
       .head_dim = 16,
       .page_tokens = 16,
       .n_seqs = 3,
       .len = {130, 1, 33}},
      {.n_heads = 4,
       .n_kv_heads = 2,
       .head_dim = 144,
       .window = 33,
       .has_sinks = true,
       .page_tokens = 32,
       .n_seqs = 2,
       .len = {290, 40}},
      {.n_heads = 2,
       .n_kv_heads = 1,
       .head_dim = 256,
       .page_tokens = 64,
       .n_seqs = 1,
       .len = {600}},
      {.mla = true,
       .n_heads = 3,
       .nope = 12,
       .rope = 8,
       .v_dim = 10,
       .rank = 144,
       .page_tokens = 16,
       .n_seqs = 2,
       .len = {150, 21},
       .kv_b_dtype = TD_BF16},
      {.mla = true,
       .absorbed = true,
       .n_heads = 36,
       .nope = 12,
       .rope = 16,
       .v_dim = 10,
       .rank = 32,
       .page_tokens = 16,
       .n_seqs = 2,
       .len = {150, 21},
       .kv_b_dtype = TD_F8E4M3},
  };
  for (size_t i = 0; i < TD_COUNT(list); i++) {
    layout l = list[i];
    l.kv_dtype = TD_F8E4M3;
    for (int prompt = 0; prompt < (l.mla ? 1 : 2); prompt++) {
      l.prompt = prompt;
      check_layout_of(&l, 17);
    }
  }
}

TEST(mla) {
  static const td_dtype dtypes[] = {TD_BF16, TD_F8E4M3, TD_F32};
  for (size_t i = 0; i < TD_COUNT(dtypes); i++) {
    for (int absorbed = 0; absorbed < 2; absorbed++) {
      layout l = mla;
      l.kv_b_dtype = dtypes[i];
      l.absorbed = absorbed;
      check_layout(&l, 1);
    }
  }
}

TEST(mla_beyond_splits_and_large_pages) {
  for (int i = 0; i < 4; i++) {
    layout l = mla;
    l.kv_b_dtype = TD_BF16;
    l.absorbed = i % 2;
    l.page_tokens = i < 2 ? 64 : 128;
    l.len[0] = 1100;
    check_layout(&l, 111);
  }
}

// One key for a token, some, as many as a split, more than a sequence has; scores that tie and
// those that do not.
TEST(mla_over_selected_keys) {
  static const uint32_t top_k[] = {1, 7, 64, 149, 150};
  for (size_t i = 0; i < 2 * TD_COUNT(top_k); i++) {
    layout l = mla;
    l.kv_b_dtype = i % 2 ? TD_F8E4M3 : TD_BF16;
    l.top_k = top_k[i / 2];
    for (int k = 0; k < 2; k++) {
      l.has_ties = k == 0;
      l.absorbed = (i + k) % 2;
      check_layout(&l, IS_ASAN ? 13 : 3);
    }
  }
}

// Tokens that see all groups and the begin of another, or a selection; over more keys than a split,
// without a rotary part.
TEST(mla_over_selected_groups) {
  static const uint32_t cases[][3] = {{1, 1, 1}, {1, 8, 1}, {3, 16, 2}, {9, 16, 13}, {40, 2, 1}};
  for (size_t i = 0; i < 2 * TD_COUNT(cases); i++) {
    layout l = mla;
    l.kv_b_dtype = TD_BF16;
    l.top_k = cases[i / 2][0];
    l.group = cases[i / 2][1];
    l.absorbed = i % 2;
    if (i >= TD_COUNT(cases)) l.rope = 0;
    check_layout(&l, IS_ASAN ? 13 : cases[i / 2][2]);
  }
}

TEST(mla_over_selections_beyond_splits) {
  for (int i = 0; i < 4; i++) {
    layout l = mla;
    l.kv_b_dtype = TD_BF16;
    l.absorbed = i % 2;
    l.has_ties = i >= 2;
    l.page_tokens = i < 2 ? 64 : 128;
    l.top_k = 300;
    l.len[0] = 1100;
    check_layout(&l, 111);
  }
}

// Runs the layout in one step and returns a sequence's output.
static float *out_of(const layout *l) {
  world w;
  td_dev *dev;
  td_stream *stream;
  td_err err;
  const uint32_t from[MAX_SEQS] = {0};
  assert_int_equal(td_dev_open(&dev, &(td_dev_opts){.kind = "cpu", .n_threads = 2}, &err), TD_OK);
  assert_int_equal(td_stream_open(&stream, dev, &err), TD_OK);
  make_world(&w, l);
  step(&w, stream, from, l->len);
  float *out = w.out[0];
  w.out[0] = NULL;
  free_world(&w);
  td_stream_close(stream);
  td_dev_close(dev);
  return out;
}

// A selection that holds every key changes no bit, nor does one for tokens that see no more keys;
// and a token that selects is computed alike in a prompt and in decode.
TEST(selections_of_everything) {
  for (int absorbed = 0; absorbed < 2; absorbed++) {
    layout l = mla;
    l.kv_dtype = TD_F16;
    l.kv_b_dtype = TD_BF16;
    l.absorbed = absorbed;
    const size_t row = l.n_heads * l.v_dim, n = l.len[0] * row;
    float *all = out_of(&l);
    l.top_k = l.len[0];
    float *whole = out_of(&l);
    l.top_k = 40;
    float *some = out_of(&l);
    l.absorbed = true;
    float *decoded = out_of(&l);
    assert_memory_equal(all, whole, n * sizeof *all);
    assert_memory_equal(all, some, l.top_k * row * sizeof *all);
    assert_memory_equal(some + l.top_k * row, decoded + l.top_k * row,
                        (n - l.top_k * row) * sizeof *all);
    free(all);
    free(whole);
    free(some);
    free(decoded);
  }
}
