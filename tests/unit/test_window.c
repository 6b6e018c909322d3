// tests/unit/test_window.c - layers whose tokens see a short window, of which KV pages keep the
// last tokens only: the same bits as when pages keep all.
#include "engine/attn/window.h"

#include "unit/engine_test.h"

enum {
  PAGE = 16, // of 8 blocks
  WHOLE = 2, // a page of which nothing leaves, as long as such a block
  N_PAGES = 64,
  N_PROMPT = 45,
  N_ALL = 75,
  MAX_STEP = 40
};

typedef struct {
  td_dev *dev;
  td_model *model;
  td_engine *engine;
  uint32_t page_tokens;
} window_engine;

// Sequences of an engine: pages of sequence s are [s][..], except that the first n_shared pages are
// those of sequence 0.
typedef struct {
  int32_t tokens[2][N_ALL];
  uint32_t n_shared; // tokens, whole pages of either size
} window_text;

static void open_model(window_engine *e, checkpoint *ck, int window, bool is_mixed) {
  ck_gpt_oss(ck);
  cJSON_SetNumberValue(cJSON_GetObjectItem(ck->config, "sliding_window"), window);
  if (!is_mixed) { // then page sizes make no difference elsewhere
    const char *const kinds[] = {"sliding_attention", "sliding_attention"};
    cJSON_AddItemToObject(ck->config, "layer_types", cJSON_CreateStringArray(kinds, 2));
  }
  ck_write(ck);
  td_err err;
  const td_dev_opts dev = {.kind = "cpu", .n_threads = 2};
  if (td_dev_open(&e->dev, &dev, &err) != TD_OK) fail_msg("%s", err.msg);
  if (td_model_open(&e->model, ck->dir, &err) != TD_OK) fail_msg("%s", err.msg);
}

static void open_window_engine(window_engine *e, uint32_t page_tokens) {
  td_err err;
  e->page_tokens = page_tokens;
  const td_engine_opts opts = {.n_pages = N_PAGES * PAGE / page_tokens,
                               .page_tokens = page_tokens,
                               .max_step_tokens = MAX_STEP,
                               .max_step_seqs = 2,
                               .max_seq_tokens = (N_ALL / PAGE + 1) * PAGE,
                               .kv_dtype = TD_F32};
  if (td_engine_open(&e->engine, e->model, e->dev, &opts, &err) != TD_OK) fail_msg("%s", err.msg);
}

static void close_model(window_engine *e, checkpoint *ck) {
  td_model_close(e->model);
  td_dev_close(e->dev);
  ck_free(ck);
}

static window_text make_text(void) {
  window_text t = {.n_shared = 2 * PAGE};
  for (int32_t i = 0; i < N_ALL; i++) {
    t.tokens[0][i] = 3 + 7 * i % 200;
    t.tokens[1][i] = (uint32_t)i < t.n_shared ? t.tokens[0][i] : 5 + 11 * i % 190;
  }
  return t;
}

// Pages of a sequence, in no order.
static uint32_t list_pages(const window_engine *e, const window_text *t, uint32_t s, int32_t *out) {
  const uint32_t of_page = PAGE / e->page_tokens, n = (N_ALL / PAGE + 1) * of_page;
  for (uint32_t i = 0; i < n; i++) {
    const uint32_t owner = i * e->page_tokens < t->n_shared ? 0 : s;
    out[i] = (int32_t)((5 * i + 31 * owner * of_page + 3) % (N_PAGES * of_page));
  }
  return n;
}

// The next part of a sequence: prompt tokens or generated ones, at most n.
static td_step_seq next_part(const window_engine *e, const window_text *t, uint32_t s,
                             uint32_t n_past, uint32_t n, int32_t *pages) {
  const bool is_decode = n_past >= N_PROMPT;
  const uint32_t left = (is_decode ? N_ALL : N_PROMPT) - n_past;
  td_step_seq out = {.tokens = t->tokens[s] + n_past,
                     .n_tokens = n < left ? n : left,
                     .n_past = n_past,
                     .pages = pages,
                     .want = TD_WANT_ALL,
                     .is_decode = is_decode};
  out.n_pages = list_pages(e, t, s, pages);
  return out;
}

// All logits of both sequences, [2][N_ALL][n_vocab], in steps of the lengths in cuts (repeated).
// The second begins when the tokens that it shares are computed, and both go on together.
static float *all_logits(const window_engine *e, const uint32_t *cuts, size_t n_cuts) {
  const window_text t = make_text();
  const size_t n_vocab = td_model_config_of(e->model)->n_vocab;
  float *out = calloc(2 * N_ALL * n_vocab, sizeof *out);
  uint32_t n_done[2] = {0, t.n_shared};
  for (size_t c = 0; n_done[0] < N_ALL || n_done[1] < N_ALL; c++) {
    int32_t pages[2][N_PAGES * PAGE];
    td_step_seq seqs[2];
    uint32_t n_seqs = 0, which[2], n_left = MAX_STEP;
    for (uint32_t s = 0; s < 2; s++) {
      const uint32_t cut = cuts[(c + 3 * s) % n_cuts], n = cut < n_left ? cut : n_left;
      if (n_done[s] == N_ALL || (s && n_done[0] < t.n_shared) || !n) continue;
      which[n_seqs] = s;
      seqs[n_seqs++] = next_part(e, &t, s, n_done[s], n, pages[s]);
      n_left -= n;
    }
    td_err err;
    if (td_engine_step(e->engine, seqs, n_seqs, &err) != TD_OK) fail_msg("%s", err.msg);
    const float *rows = td_engine_logits(e->engine);
    for (uint32_t i = 0; i < n_seqs; rows += seqs[i++].n_tokens * n_vocab) {
      float *to = out + (which[i] * N_ALL + n_done[which[i]]) * n_vocab;
      memcpy(to, rows, seqs[i].n_tokens * n_vocab * sizeof *to);
      n_done[which[i]] += seqs[i].n_tokens;
    }
  }
  return out;
}

static const struct {
  uint32_t n, cuts[6];
} schedules[] = {{1, {MAX_STEP}}, {1, {1}}, {1, {3}}, {6, {1, 17, 2, 1, 9, 5}}, {3, {16, 1, 30}}};

static void check_rows(const window_engine *e, const float *got, const float *want, size_t k) {
  const size_t n_vocab = td_model_config_of(e->model)->n_vocab;
  for (uint32_t row = 0; row < 2 * N_ALL; row++) {
    if (memcmp(got + row * n_vocab, want + row * n_vocab, n_vocab * sizeof *got) != 0)
      fail_msg("schedule %zu: token %u of sequence %u differs", k, row % N_ALL, row / N_ALL);
  }
}

static void check_window(int window, uint32_t n_blocks) {
  checkpoint ck;
  window_engine e;
  open_model(&e, &ck, window, false);
  const td_kv_layout layout = td_kv_layout_of(td_model_config_of(e.model), TD_F32, PAGE);
  assert_int_equal(layout.n_layers, 0);
  assert_int_equal(layout.n_blocks, n_blocks);
  assert_int_equal(layout.state_bytes * PAGE, layout.part_bytes * n_blocks * layout.block_tokens);
  assert_int_equal(td_kv_layout_of(td_model_config_of(e.model), TD_F32, WHOLE).n_blocks, 0);
  open_window_engine(&e, WHOLE);
  float *want = all_logits(&e, schedules[0].cuts, schedules[0].n);
  td_engine_close(e.engine);
  for (size_t k = 0; k < TD_COUNT(schedules); k++) {
    open_window_engine(&e, PAGE);
    float *got = all_logits(&e, schedules[k].cuts, schedules[k].n);
    check_rows(&e, got, want, k);
    td_engine_close(e.engine);
    free(got);
  }
  free(want);
  close_model(&e, &ck);
}

TEST(same_bits_as_whole_pages) {
  check_window(9, 5);
  check_window(1, 1);
  check_window(2, 2);
  check_window(13, 7);
}

// Beside layers that keep all of a page's tokens.
TEST(same_bits_in_any_cut) {
  checkpoint ck;
  window_engine e;
  float *want = NULL;
  open_model(&e, &ck, 9, true);
  for (size_t k = 0; k < TD_COUNT(schedules); k++) {
    open_window_engine(&e, PAGE);
    float *got = all_logits(&e, schedules[k].cuts, schedules[k].n);
    if (want) check_rows(&e, got, want, k);
    td_engine_close(e.engine);
    if (want) free(got);
    if (!want) want = got;
  }
  free(want);
  close_model(&e, &ck);
}

// A copy of a page that is being filled can be filled further, as a snapshot of a prompt's end is.
TEST(a_copied_page_goes_on) {
  enum { N_PAST = 2 * PAGE + 13 };
  checkpoint ck;
  window_engine e;
  open_model(&e, &ck, 9, true);
  open_window_engine(&e, PAGE);
  const window_text t = make_text();
  int32_t pages[N_PAGES * PAGE];
  td_err err;
  for (uint32_t n = 0; n < N_PAST; n += 9) {
    const td_step_seq part = next_part(&e, &t, 0, n, 9, pages);
    if (td_engine_step(e.engine, &part, 1, &err) != TD_OK) fail_msg("%s", err.msg);
  }
  const int32_t copy = 60;
  assert_int_equal(td_engine_copy_page(e.engine, copy, pages[N_PAST / PAGE], &err), TD_OK);
  const size_t n_bytes = td_model_config_of(e.model)->n_vocab * sizeof(float);
  float *want = malloc(n_bytes);
  for (int i = 0; i < 2; i++) {
    td_step_seq part = next_part(&e, &t, 0, N_PAST, 12, pages);
    part.want = TD_WANT_LAST;
    if (i) pages[N_PAST / PAGE] = copy;
    if (td_engine_step(e.engine, &part, 1, &err) != TD_OK) fail_msg("%s", err.msg);
    if (i) assert_memory_equal(td_engine_logits(e.engine), want, n_bytes);
    memcpy(want, td_engine_logits(e.engine), n_bytes);
  }
  free(want);
  td_engine_close(e.engine);
  close_model(&e, &ck);
}

// gpt-oss-120b: 192 of 512 tokens in its 18 layers with a window.
TEST(layout_of_a_large_model) {
  td_model_config c = {.n_layers = 36, .n_kv_heads = 8, .head_dim = 64, .window = 128};
  c.window_layers[0] = 0x555555555;
  td_kv_layout layout = td_kv_layout_of(&c, TD_F16, 0);
  assert_int_equal(layout.page_tokens, 512);
  assert_int_equal(layout.n_layers, 18);
  assert_int_equal(layout.n_states, 18);
  assert_int_equal(layout.n_blocks * layout.block_tokens, 3 * 64);
  assert_int_equal(td_kv_layout_token_bytes(&layout), 18 * 2 * 8 * 64 * 2);
  assert_int_equal(td_kv_layout_page_bytes(&layout), 18 * (512 + 192) * 2 * 8 * 64 * 2);
  c.window = 4096; // nothing would leave a page
  layout = td_kv_layout_of(&c, TD_F16, 0);
  assert_int_equal(layout.page_tokens, TD_KV_PAGE_TOKENS);
  assert_int_equal(layout.n_states, 0);
}
