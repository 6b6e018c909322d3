// tests/unit/test_cuda_attn_gqa.c - the CUDA device's grouped-query attention and its KV pages
// against a naive one in double: whole prompts, chunks on top of cached pages and single tokens,
// ragged lengths and dims, windows and sinks, selected blocks.
// CTest: gpu slow no-tsan

#include "unit/cuda_attn_test.h"

static const layout layouts[] = {
    {.name = "heads of 24, BF16 pages",
     .n_heads = 6,
     .n_kv_heads = 2,
     .head_dim = 24,
     .page_tokens = 16,
     .n_seqs = 3,
     .len = {72, 9, 150},
     .kv_dtype = TD_BF16,
     .keys_bytes = 1}, // a head, or a token, at a time
    {.name = "heads of 20, which no runs of eight make",
     .n_heads = 2,
     .n_kv_heads = 1,
     .head_dim = 20,
     .page_tokens = 16,
     .n_seqs = 1,
     .len = {75},
     .kv_dtype = TD_F16},
    {.name = "heads of 128, f16 pages",
     .n_heads = 2,
     .n_kv_heads = 1,
     .head_dim = 128,
     .page_tokens = 64,
     .n_seqs = 1,
     .len = {290},
     .kv_dtype = TD_F16},
    {.name = "heads of 128, E4M3 pages, two tiles of keys in each",
     .n_heads = 4,
     .n_kv_heads = 2,
     .head_dim = 128,
     .page_tokens = 128,
     .n_seqs = 2,
     .len = {200, 30},
     .kv_dtype = TD_F8E4M3,
     .host_knows = true},
    {.name = "heads of 144, E4M3 pages smaller than a tile of keys",
     .n_heads = 3,
     .n_kv_heads = 1,
     .head_dim = 144,
     .page_tokens = 8,
     .n_seqs = 1,
     .len = {75},
     .kv_dtype = TD_F8E4M3},
    {.name = "heads of 256 that share one key",
     .n_heads = 9,
     .n_kv_heads = 1,
     .head_dim = 256,
     .page_tokens = 8,
     .n_seqs = 1,
     .len = {33},
     .kv_dtype = TD_F16},
    {.name = "a head of 256, many tiles of keys",
     .n_heads = 1,
     .n_kv_heads = 1,
     .head_dim = 256,
     .page_tokens = 16,
     .n_seqs = 1,
     .len = {210},
     .kv_dtype = TD_F16},
    {.name = "chunks whose first query sees all but one key of a tile, three KV heads by two",
     .n_heads = 3,
     .n_kv_heads = 3,
     .head_dim = 16,
     .page_tokens = 16,
     .n_seqs = 2,
     .len = {69, 133},
     .kv_dtype = TD_F16,
     .keys_bytes = (size_t)2 * 2 * 132 * 16 * sizeof(uint16_t)},
    {.name = "prompts of which two, then one, fit into a launch",
     .n_heads = 2,
     .n_kv_heads = 2,
     .head_dim = 16,
     .page_tokens = 16,
     .n_seqs = 3,
     .len = {9, 140, 21},
     .kv_dtype = TD_BF16,
     .keys_bytes = (size_t)2 * 2 * 149 * 16 * sizeof(uint16_t),
     .host_knows = true},
    {.name = "all prompts in a launch, one KV head at a time",
     .n_heads = 2,
     .n_kv_heads = 1,
     .head_dim = 24,
     .page_tokens = 16,
     .n_seqs = 3,
     .len = {30, 5, 75},
     .kv_dtype = TD_F16,
     .host_knows = true},
    {.name = "three splits of 256 keys",
     .n_heads = 3,
     .n_kv_heads = 3,
     .head_dim = 16,
     .page_tokens = 64,
     .n_seqs = 1,
     .len = {530},
     .kv_dtype = TD_F16},
    {.name = "a key a head, three splits of 128 keys",
     .n_heads = 2,
     .n_kv_heads = 2,
     .head_dim = 40,
     .page_tokens = 32,
     .n_seqs = 1,
     .len = {300},
     .kv_dtype = TD_BF16},
};

// Only prefill is otherwise there.
static bool is_sm90(void) {
  return getenv("TANDEM_EMU_CAPABILITY") != NULL;
}

TEST(gqa) {
  for (size_t i = 0; i < TD_COUNT(layouts); i++) {
    layout l = layouts[i];
    if (IS_ASAN && l.len[0] > ASAN_MOST) l.len[0] = ASAN_MOST;
    if (is_sm90() && l.len[0] > 300) l.len[0] = 300;
    check_layout(&l);
  }
}

// Windows of one token, within a tile of keys, of whole tiles, over splits and beyond the context.
static const layout windows[] = {
    {.name = "a window of one token",
     .n_heads = 2,
     .n_kv_heads = 1,
     .head_dim = 16,
     .window = 1,
     .page_tokens = 16,
     .n_seqs = 2,
     .len = {150, 9},
     .kv_dtype = TD_BF16},
    {.name = "a window within a tile, heads one by one",
     .n_heads = 6,
     .n_kv_heads = 2,
     .head_dim = 24,
     .window = 11,
     .has_sinks = true,
     .page_tokens = 16,
     .n_seqs = 3,
     .len = {72, 9, 290},
     .kv_dtype = TD_F16,
     .keys_bytes = 1,
     .host_knows = true},
    {.name = "a window of 128, pages of 64",
     .n_heads = 4,
     .n_kv_heads = 2,
     .head_dim = 64,
     .window = 128,
     .has_sinks = true,
     .page_tokens = 64,
     .n_seqs = 2,
     .len = {530, 200},
     .kv_dtype = TD_BF16,
     .host_knows = true},
    {.name = "a window over splits of 256, heads of 128",
     .n_heads = 9,
     .n_kv_heads = 3,
     .head_dim = 128,
     .window = 300,
     .has_sinks = true,
     .page_tokens = 64,
     .n_seqs = 1,
     .len = {700},
     .kv_dtype = TD_F16},
    {.name = "a window of 70, heads of 256",
     .n_heads = 2,
     .n_kv_heads = 1,
     .head_dim = 256,
     .window = 70,
     .page_tokens = 16,
     .n_seqs = 1,
     .len = {290},
     .kv_dtype = TD_F16,
     .host_knows = true},
    {.name = "a window that hides nothing",
     .n_heads = 3,
     .n_kv_heads = 3,
     .head_dim = 20,
     .window = 5000,
     .has_sinks = true,
     .page_tokens = 16,
     .n_seqs = 1,
     .len = {150},
     .kv_dtype = TD_BF16},
};

TEST(gqa_with_windows_and_sinks) {
  for (size_t i = 0; i < TD_COUNT(windows); i++) {
    layout l = windows[i];
    const uint32_t most = l.window + 90; // splits of decode are the same everywhere
    if ((IS_ASAN || is_sm90()) && l.len[0] > most) l.len[0] = most;
    check_layout(&l);
  }
}

// Blocks of whole tiles of keys and of a few, larger than pages, and more than there are; heads one
// by one.
static const layout blocks[] = {
    {.name = "blocks of 128, pages of 64",
     .n_heads = 6,
     .n_kv_heads = 2,
     .head_dim = 128,
     .block = 128,
     .top_blocks = 2,
     .page_tokens = 64,
     .n_seqs = 2,
     .len = {330, 200},
     .kv_dtype = TD_F16,
     .host_knows = true},
    {.name = "blocks of 64 over splits, pages of 128",
     .n_heads = 2,
     .n_kv_heads = 2,
     .head_dim = 64,
     .block = 64,
     .top_blocks = 5,
     .page_tokens = 128,
     .n_seqs = 1,
     .len = {400},
     .kv_dtype = TD_BF16},
    {.name = "blocks of 6, heads one by one",
     .n_heads = 9,
     .n_kv_heads = 3,
     .head_dim = 24,
     .has_sinks = true,
     .block = 6,
     .top_blocks = 5,
     .page_tokens = 16,
     .n_seqs = 3,
     .len = {72, 9, 150},
     .kv_dtype = TD_BF16,
     .keys_bytes = 1},
    {.name = "one block of 24, heads of 20, which no runs of eight make",
     .n_heads = 2,
     .n_kv_heads = 1,
     .head_dim = 20,
     .block = 24,
     .top_blocks = 1,
     .page_tokens = 16,
     .n_seqs = 1,
     .len = {75},
     .kv_dtype = TD_F16},
    {.name = "blocks of 32, heads of 256",
     .n_heads = 2,
     .n_kv_heads = 2,
     .head_dim = 256,
     .block = 32,
     .top_blocks = 3,
     .page_tokens = 32,
     .n_seqs = 1,
     .len = {200},
     .kv_dtype = TD_BF16},
    {.name = "more blocks than there are",
     .n_heads = 2,
     .n_kv_heads = 1,
     .head_dim = 16,
     .block = 8,
     .top_blocks = 99,
     .page_tokens = 16,
     .n_seqs = 1,
     .len = {70},
     .kv_dtype = TD_F16},
};

TEST(gqa_over_selected_blocks) {
  for (size_t i = 0; i < TD_COUNT(blocks); i++) {
    layout l = blocks[i];
    const uint32_t most = l.block * l.top_blocks + 50;
    if ((IS_ASAN || is_sm90()) && l.len[0] > most) l.len[0] = most;
    check_layout(&l);
  }
}

// Groups of a few keys, of whole tiles, larger than pages, and of one key; more than there are. A
// token selects from (top_k + 1) * group keys on.
static const layout groups[] = {
    {.name = "groups of 16, heads of 256",
     .n_heads = 16,
     .n_kv_heads = 2,
     .head_dim = 256,
     .top_k = 2,
     .group = 16,
     .page_tokens = 32,
     .n_seqs = 2,
     .len = {70, 40},
     .kv_dtype = TD_BF16,
     .host_knows = true},
    {.name = "groups of 64 over splits, heads of 128",
     .n_heads = 3,
     .n_kv_heads = 1,
     .head_dim = 128,
     .top_k = 3,
     .group = 64,
     .page_tokens = 64,
     .n_seqs = 1,
     .len = {265},
     .kv_dtype = TD_F16},
    {.name = "groups of 32, pages of 16, heads of 20, a token at a time",
     .n_heads = 2,
     .n_kv_heads = 1,
     .head_dim = 20,
     .has_sinks = true,
     .top_k = 2,
     .group = 32,
     .page_tokens = 16,
     .n_seqs = 3,
     .len = {110, 9, 100},
     .kv_dtype = TD_BF16,
     .keys_bytes = 1},
    {.name = "groups of one key",
     .n_heads = 2,
     .n_kv_heads = 2,
     .head_dim = 24,
     .top_k = 40,
     .group = 1,
     .page_tokens = 16,
     .n_seqs = 1,
     .len = {60},
     .kv_dtype = TD_F16},
    {.name = "more groups than there are",
     .n_heads = 2,
     .n_kv_heads = 1,
     .head_dim = 16,
     .top_k = 99,
     .group = 4,
     .page_tokens = 16,
     .n_seqs = 1,
     .len = {40},
     .kv_dtype = TD_BF16},
};

TEST(selected_groups_of_keys) {
  for (size_t i = 0; i < TD_COUNT(groups); i++)
    check_layout(&groups[i]);
}

// The last tokens of a prompt, one to four of them, are to the last bit what the whole prompt
// gives, and tokens that were decoded one by one what they are computed again all at once.
static void check_cuts(const layout *l) {
  enum { DECODED = 6 };
  CUDA_OPEN(f);
  world w;
  make_world(&w, l, &f);
  const size_t row = (size_t)l->n_heads * w.out_dim;
  const uint32_t n = l->len[0], none = 0, behind = n - DECODED;
  w.prompt = true;
  float *whole = step(&w, &none, &n);
  for (uint32_t tail = 1; tail <= 4; tail += 3) {
    const uint32_t from = n - tail;
    float *got = step(&w, &from, &n);
    assert_memory_equal(got, whole + from * row, tail * row * sizeof *got);
    free(got);
  }
  w.prompt = false;
  float *again = step(&w, &behind, &n);
  for (uint32_t from = behind; from < n; from++) {
    const uint32_t to = from + 1;
    float *got = step(&w, &from, &to);
    assert_memory_equal(got, again + (from - behind) * row, row * sizeof *got);
    free(got);
  }
  free(whole);
  free(again);
  cuda_close(&f);
  free_world(&w);
}

static const layout in_pieces[] = {
    {.name = "E4M3 pages, a window and sinks",
     .n_heads = 4,
     .n_kv_heads = 2,
     .head_dim = 32,
     .window = 100,
     .has_sinks = true,
     .page_tokens = 64,
     .n_seqs = 1,
     .len = {200},
     .kv_dtype = TD_F8E4M3},
    {.name = "BF16 pages",
     .n_heads = 3,
     .n_kv_heads = 1,
     .head_dim = 32,
     .page_tokens = 16,
     .n_seqs = 1,
     .len = {70},
     .kv_dtype = TD_BF16},
    {.name = "F16 pages, ragged heads, two splits",
     .n_heads = 1,
     .n_kv_heads = 1,
     .head_dim = 20,
     .page_tokens = 16,
     .n_seqs = 1,
     .len = {135},
     .kv_dtype = TD_F16},
    {.name = "a window and sinks, keys from the second tile on",
     .n_heads = 4,
     .n_kv_heads = 2,
     .head_dim = 32,
     .window = 100,
     .has_sinks = true,
     .page_tokens = 16,
     .n_seqs = 1,
     .len = {300},
     .kv_dtype = TD_F16,
     .host_knows = true},
};

TEST(prompts_and_replays_in_pieces) {
  for (size_t i = 0; i < TD_COUNT(in_pieces); i++)
    check_cuts(&in_pieces[i]);
}

// Overwrites the first pages of sequence 0 with NaN.
static void spoil_pages(world *w, uint32_t n) {
  char *nans = malloc(w->page_bytes);
  int32_t table[64];
  memset(nans, 0xff, w->page_bytes);
  cuda_get(w->f, table, w->page_table, n * sizeof *table);
  for (uint32_t i = 0; i < n; i++)
    td_op_copy(w->f->stream, w->pages + (size_t)table[i] * w->page_bytes, nans, w->page_bytes);
  cuda_sync(w->f);
  free(nans);
}

// Keys that no window of the step's tokens reaches are not read, whole tiles of them: NaN there
// changes no bit.
TEST(old_pages_are_not_read) {
  enum { LEN = 530, TAIL = 4, WINDOW = 128, OLD_PAGES = 6 };
  static const layout l = {.name = "a window of two pages",
                           .n_heads = 2,
                           .n_kv_heads = 1,
                           .head_dim = 32,
                           .window = WINDOW,
                           .has_sinks = true,
                           .page_tokens = 64,
                           .n_seqs = 1,
                           .len = {LEN},
                           .kv_dtype = TD_BF16,
                           .host_knows = true};
  CUDA_OPEN(f);
  world w;
  make_world(&w, &l, &f);
  const size_t row = (size_t)l.n_heads * w.out_dim;
  const uint32_t none = 0, n = LEN, from = LEN - TAIL;
  assert_true((from + 1 - WINDOW) / TD_CU_PREFILL_TOKENS * TD_CU_PREFILL_TOKENS ==
              OLD_PAGES * l.page_tokens);
  w.prompt = true;
  float *whole = step(&w, &none, &n);
  w.prompt = false;
  float *decoded = step(&w, &from, &n);
  spoil_pages(&w, OLD_PAGES);
  float *again = step(&w, &from, &n);
  assert_memory_equal(again, decoded, TAIL * row * sizeof *again);
  free(again);
  w.prompt = true;
  again = step(&w, &from, &n);
  assert_memory_equal(again, whole + from * row, TAIL * row * sizeof *again);
  free(again);
  free(decoded);
  free(whole);
  cuda_close(&f);
  free_world(&w);
}
