// tests/unit/test_cuda_attn_mla.c - the CUDA device's latent attention and its KV pages against a
// naive one in double: whole prompts, chunks on top of cached pages and single tokens, ragged
// lengths and dims, keys expanded or absorbed.
// CTest: gpu slow no-tsan

#include "unit/cuda_attn_test.h"

static const layout layouts[] = {
    {.name = "ragged dims, FP8 kv_b",
     .mla = true,
     .n_heads = 3,
     .nope = 40,
     .rope = 16,
     .v_dim = 56,
     .rank = 136,
     .page_tokens = 16,
     .n_seqs = 2,
     .len = {60, 12}, // more than 64 keys are expanded by rounded weights
     .kv_dtype = TD_BF16,
     .kv_b_dtype = TD_F8E4M3,
     .keys_bytes = 1},
    {.name = "three sequences",
     .mla = true,
     .n_heads = 2,
     .nope = 40,
     .rope = 16,
     .v_dim = 24,
     .rank = 64,
     .page_tokens = 16,
     .n_seqs = 3,
     .len = {20, 70, 3},
     .kv_dtype = TD_BF16,
     .kv_b_dtype = TD_BF16,
     .host_knows = true},
    {.name = "dims that no runs of eight make",
     .mla = true,
     .n_heads = 3,
     .nope = 20,
     .rope = 12,
     .v_dim = 27,
     .rank = 44,
     .page_tokens = 16,
     .n_seqs = 1,
     .len = {50},
     .kv_dtype = TD_BF16,
     .kv_b_dtype = TD_F16},
    {.name = "DeepSeek-V3's dims",
     .mla = true,
     .n_heads = 2,
     .nope = 128,
     .rope = 64,
     .v_dim = 128,
     .rank = 512,
     .page_tokens = 64,
     .n_seqs = 1,
     .len = {280},
     .kv_dtype = TD_F16,
     .kv_b_dtype = TD_BF16},
    {.name = "E4M3 pages, a short block of latents",
     .mla = true,
     .n_heads = 3,
     .nope = 40,
     .rope = 16,
     .v_dim = 24,
     .rank = 144,
     .page_tokens = 16,
     .n_seqs = 2,
     .len = {70, 12},
     .kv_dtype = TD_F8E4M3,
     .kv_b_dtype = TD_BF16},
    {.name = "E4M3 pages of DeepSeek-V3's dims",
     .mla = true,
     .n_heads = 34,
     .nope = 16,
     .rope = 64,
     .v_dim = 16,
     .rank = 512,
     .page_tokens = 64,
     .n_seqs = 1,
     .len = {140},
     .kv_dtype = TD_F8E4M3,
     .kv_b_dtype = TD_BF16,
     .host_knows = true},
    {.name = "selected keys, few at a time",
     .mla = true,
     .n_heads = 3,
     .nope = 40,
     .rope = 16,
     .v_dim = 24,
     .rank = 64,
     .top_k = 9,
     .page_tokens = 16,
     .n_seqs = 2,
     .len = {60, 12},
     .kv_dtype = TD_BF16,
     .kv_b_dtype = TD_BF16,
     .keys_bytes = 1},
    {.name = "selected keys of DeepSeek-V3's dims",
     .mla = true,
     .n_heads = 2,
     .nope = 128,
     .rope = 64,
     .v_dim = 128,
     .rank = 512,
     .top_k = 70,
     .page_tokens = 64,
     .n_seqs = 1,
     .len = {90},
     .kv_dtype = TD_F16,
     .kv_b_dtype = TD_BF16,
     .host_knows = true},
    {.name = "selected groups, no rotary part",
     .mla = true,
     .n_heads = 3,
     .nope = 40,
     .v_dim = 24,
     .rank = 64,
     .top_k = 2,
     .group = 8,
     .page_tokens = 16,
     .n_seqs = 2,
     .len = {60, 12},
     .kv_dtype = TD_BF16,
     .kv_b_dtype = TD_BF16,
     .keys_bytes = 1},
    {.name = "selected groups of GLM-5.3's dims",
     .mla = true,
     .n_heads = 2,
     .nope = 256,
     .v_dim = 256,
     .rank = 512,
     .top_k = 3,
     .group = 16,
     .page_tokens = 64,
     .n_seqs = 1,
     .len = {90},
     .kv_dtype = TD_F16,
     .kv_b_dtype = TD_BF16,
     .host_knows = true},
    {.name = "one selected key, of rows that no runs of eight make",
     .mla = true,
     .n_heads = 3,
     .nope = 20,
     .rope = 12,
     .v_dim = 27,
     .rank = 44,
     .top_k = 1,
     .page_tokens = 16,
     .n_seqs = 1,
     .len = {30},
     .kv_dtype = TD_F16,
     .kv_b_dtype = TD_F16},
};

static void check_mla(bool absorbed) {
  for (size_t i = 0; i < TD_COUNT(layouts); i++) {
    layout l = layouts[i];
    l.absorbed = absorbed;
    if (absorbed && l.len[0] > 140) l.len[0] = 140; // every token is a block of its own
    const uint32_t most = absorbed ? ASAN_MOST / 2 : ASAN_MOST;
    if (IS_ASAN && l.len[0] > most) l.len[0] = most;
    check_layout(&l);
  }
}

TEST(mla_expanded) {
  check_mla(false);
}

TEST(mla_absorbed) {
  check_mla(true);
}

// A replay brings thousands of tokens: memory is bounded whatever their number, and each
// gets what it gets alone. Scaled down, since each token is a block on the emulator: 8,192 tokens
// of DeepSeek-V3 want 4.25 GiB, 17 times keys_bytes; here 8 times.
TEST(mla_replay) {
  enum { SEQ = 8, N = 128, HEADS = 2, NOPE = 8, ROPE = 8, RANK = 16, PAGE = 16, N_SEQS = N / SEQ };
  enum { Q = HEADS * (NOPE + ROPE), OUT = HEADS * NOPE, ENTRY = RANK + ROPE, AT_ONCE = 16 };
  CUDA_OPEN(f);
  td_cuda_dev *dev = (td_cuda_dev *)f.dev;
  td_cuda_stream *stream = (td_cuda_stream *)f.stream;
  dev->keys_bytes = (size_t)AT_ONCE * HEADS * (ENTRY + RANK) * sizeof(float);
  static int32_t seq[N], position[N], begin[N_SEQS + 1], pages[N_SEQS];
  for (int32_t i = 0; i < N; i++) {
    seq[i] = i / SEQ;
    position[i] = i % SEQ;
    begin[i / SEQ + 1] = i + 1;
    pages[i / SEQ] = i / SEQ;
  }
  const size_t page_bytes = PAGE * ENTRY * sizeof(uint16_t);
  td_kv_view kv = {.page_bytes = page_bytes, .dtype = TD_BF16};
  kv.pages = cuda_alloc(&f, N_SEQS * page_bytes);
  td_batch_view batch = {.seq = cuda_put(&f, seq, sizeof seq),
                         .position = cuda_put(&f, position, sizeof position),
                         .q_begin = cuda_put(&f, begin, sizeof begin),
                         .page_table = cuda_put(&f, pages, sizeof pages),
                         .n_tokens = N,
                         .n_seqs = N_SEQS,
                         .max_pages = 1,
                         .page_tokens = PAGE};
  float *q = cuda_floats(&f, (size_t)N * Q), *entry = cuda_floats(&f, (size_t)N * ENTRY);
  float *values = cuda_floats(&f, (size_t)2 * HEADS * NOPE * RANK);
  const td_weight kv_b = {.data = values, .dtype = TD_F32, .rows = 2 * HEADS * NOPE, .cols = RANK};
  uint16_t *dev_q = cuda_put_bf16(&f, q, (size_t)N * Q);
  td_attn_mla_args args = {.batch = batch,
                           .kv = kv,
                           .q = dev_q,
                           .kv_b = &kv_b,
                           .out = cuda_alloc(&f, (size_t)N * OUT * sizeof(uint16_t)),
                           .n_heads = HEADS,
                           .nope_dim = NOPE,
                           .rope_dim = ROPE,
                           .v_dim = NOPE,
                           .kv_lora_rank = RANK,
                           .scale = 0.25f,
                           .absorbed = true};
  uint16_t *dev_entry = cuda_put_bf16(&f, entry, (size_t)N * ENTRY);
  td_op_kv_store(f.stream, &(td_kv_store_args){.batch = batch,
                                               .kv = kv,
                                               .k = dev_entry,
                                               .k_stride = ENTRY,
                                               .n_heads = 1,
                                               .head_dim = ENTRY});
  td_op_attn_mla(f.stream, &args);
  float *all = cuda_get_bf16(&f, args.out, (size_t)N * OUT);
  const size_t held = stream->scratch_bytes[CUDA_SCRATCH_QUERY] +
                      stream->scratch_bytes[CUDA_SCRATCH_LATENT];
  assert_true(held <= dev->keys_bytes + dev->keys_bytes / 4);
  for (uint32_t at = AT_ONCE - SEQ; at < N; at += 3 * AT_ONCE) { // the last of those before a cut
    args.batch.seq = batch.seq + at;
    args.batch.position = batch.position + at;
    args.batch.n_tokens = SEQ;
    args.q = dev_q + (size_t)at * Q;
    td_op_attn_mla(f.stream, &args);
    float *alone = cuda_get_bf16(&f, args.out, SEQ * OUT);
    assert_memory_equal(alone, all + (size_t)at * OUT, SEQ * OUT * sizeof *alone);
    free(alone);
  }
  free(q);
  free(entry);
  free(values);
  free(all);
  cuda_close(&f);
}

// Every sequence's last token, of those that are `last`, is the same to the last bit alone.
static void check_alone(world *w, const float *got, uint32_t last) {
  const layout *l = w->l;
  const size_t row = (size_t)l->n_heads * w->out_dim;
  uint32_t from[MAX_SEQS], to[MAX_SEQS], n = 0;
  for (uint32_t s = 0; s < l->n_seqs; s++) {
    for (uint32_t i = 0; i < l->n_seqs; i++) {
      to[i] = l->len[i];
      from[i] = l->len[i] - (i == s);
    }
    n += l->len[s] < last ? l->len[s] : last;
    float *alone = step(w, from, to);
    assert_memory_equal(alone, got + (n - 1) * row, row * sizeof *alone);
    free(alone);
  }
}

// Heads of which a block takes 64, in the second block some; splits of 64 keys, and of 128 from
// 1025 keys on; pages of one tile and of two, keys after the last in each. Last tokens beside one
// another are what drafted ones are.
static const layout many_heads[] = {
    {.name = "latents for 70 heads of ragged dims",
     .n_heads = 70,
     .nope = 8,
     .rope = 16,
     .v_dim = 12,
     .rank = 136,
     .page_tokens = 64,
     .n_seqs = 3,
     .len = {130, 64, 2},
     .kv_dtype = TD_BF16,
     .kv_b_dtype = TD_F8E4M3},
    {.name = "latents of DeepSeek-V3's dims",
     .n_heads = 34,
     .nope = 16,
     .rope = 64,
     .v_dim = 16,
     .rank = 512,
     .page_tokens = 128,
     .n_seqs = 2,
     .len = {1030, 140},
     .kv_dtype = TD_BF16,
     .kv_b_dtype = TD_BF16},
    {.name = "latents in E4M3 for 70 heads of ragged dims",
     .n_heads = 70,
     .nope = 8,
     .rope = 16,
     .v_dim = 12,
     .rank = 144,
     .page_tokens = 64,
     .n_seqs = 3,
     .len = {130, 64, 2},
     .kv_dtype = TD_F8E4M3,
     .kv_b_dtype = TD_BF16},
    {.name = "latents in E4M3 of DeepSeek-V3's dims",
     .n_heads = 34,
     .nope = 16,
     .rope = 64,
     .v_dim = 16,
     .rank = 512,
     .page_tokens = 128,
     .n_seqs = 2,
     .len = {200, 140},
     .kv_dtype = TD_F8E4M3,
     .kv_b_dtype = TD_BF16},
    {.name = "selected latents for 40 heads",
     .n_heads = 40,
     .nope = 8,
     .rope = 8,
     .v_dim = 8,
     .rank = 40,
     .top_k = 70,
     .page_tokens = 16,
     .n_seqs = 2,
     .len = {150, 75},
     .kv_dtype = TD_BF16,
     .kv_b_dtype = TD_BF16},
};

TEST(latents_of_many_heads) {
  for (size_t i = 0; i < TD_COUNT(many_heads); i++) {
    layout l = many_heads[i];
    l.mla = l.absorbed = true;
    if (IS_ASAN && l.len[0] > ASAN_MOST) l.len[0] = ASAN_MOST;
    CUDA_OPEN(f);
    world w;
    make_world(&w, &l, &f);
    enum { LAST = 2 };
    uint32_t from[MAX_SEQS] = {0};
    const td_kv_view kv = view_of(&w);
    const td_batch_view all = make_batch(&w, from, l.len);
    store_mla(&w, &all, &kv, gather(&w, w.k, w.entry, from, l.len));
    for (uint32_t s = 0; s < l.n_seqs; s++)
      from[s] = l.len[s] < LAST ? 0 : l.len[s] - LAST;
    float *got = step(&w, from, l.len);
    check_alone(&w, got, LAST);
    free(got);
    cuda_close(&f);
    free_world(&w);
  }
}

// Splits that a block adds up, where there are few SMs, are to the last bit those that it does not.
static void check_folding(uint32_t n_heads, uint32_t len, td_dtype kv_dtype) {
  const layout l = {.name = "many splits",
                    .mla = true,
                    .absorbed = true,
                    .n_heads = n_heads,
                    .nope = 16,
                    .rope = 8,
                    .v_dim = 16,
                    .rank = 48,
                    .page_tokens = 64,
                    .n_seqs = 1,
                    .len = {len},
                    .kv_dtype = kv_dtype,
                    .kv_b_dtype = TD_BF16};
  CUDA_OPEN(f);
  world w;
  make_world(&w, &l, &f);
  const uint32_t none = 0, before = len - 1;
  const td_kv_view kv = view_of(&w);
  const td_batch_view all = make_batch(&w, &none, &len);
  store_mla(&w, &all, &kv, gather(&w, w.k, w.entry, &none, &len));
  int *n_sms = &((td_cuda_dev *)f.dev)->props.n_sms;
  *n_sms = 1000;
  float *apart = step(&w, &before, &len);
  *n_sms = 1;
  float *by_block = step(&w, &before, &len);
  assert_memory_equal(by_block, apart, l.n_heads * w.out_dim * sizeof *apart);
  free(apart);
  free(by_block);
  cuda_close(&f);
  free_world(&w);
}

TEST(splits_are_added_up_alike) {
  check_folding(3, 900, TD_F16); // a block's four, and three and some
  check_folding(3, 512, TD_BF16);
  check_folding(3, 257, TD_BF16);
  check_folding(3, 257, TD_F8E4M3);
}

TEST(latents_are_added_up_alike) {
  check_folding(33, 450, TD_BF16); // a block's four, and four of which the last has two keys
  check_folding(33, 256, TD_BF16);
  check_folding(33, 256, TD_F8E4M3);
  check_folding(33, 100, TD_F16); // which attn_latents does not take
}

TEST(bad_batches) {
  enum { DIM = 8, PAGE = 4 };
  CUDA_OPEN(f);
  int32_t zero = 0, begin[] = {0, 1}, absent = -1, far = PAGE;
  uint16_t *x = cuda_alloc(&f, 64 * sizeof *x);
  td_kv_store_args args = {
      .batch = {.seq = cuda_put(&f, &zero, sizeof zero),
                .position = cuda_put(&f, &zero, sizeof zero),
                .q_begin = cuda_put(&f, begin, sizeof begin),
                .page_table = cuda_put(&f, &absent, sizeof absent),
                .n_tokens = 1,
                .n_seqs = 1,
                .max_pages = 1,
                .page_tokens = PAGE},
      .kv = {.pages = cuda_alloc(&f, 256), .page_bytes = 256, .dtype = TD_BF16},
      .k = x,
      .k_stride = DIM,
      .n_heads = 1,
      .head_dim = DIM,
  };
  td_op_kv_store(f.stream, &args);
  cuda_expect_failure(&f, "page is absent");
  args.batch.position = cuda_put(&f, &far, sizeof far);
  td_op_kv_store(f.stream, &args);
  cuda_expect_failure(&f, "position");
  args.batch.position = cuda_put(&f, &absent, sizeof absent);
  td_op_kv_store(f.stream, &args);
  cuda_expect_failure(&f, "position");
  args.kv.page_bytes = 32;
  td_op_kv_store(f.stream, &args);
  cuda_expect_failure(&f, "KV pages");
  cuda_close(&f);
}

// Attention after a store that fails touches nothing that is not there, few queries or many.
TEST(attention_over_bad_batches) {
  enum { DIM = 8, PAGE = 4, MOST = 5, ENTRIES = 2 * PAGE * DIM };
  static const uint32_t n_tokens[] = {1, MOST};
  static const int32_t first[] = {0, PAGE, -3, -9}; // page 0 is absent in the first case
  CUDA_OPEN(f);
  uint16_t *x = cuda_alloc(&f, (size_t)MOST * DIM * sizeof *x);
  uint16_t *out = cuda_alloc(&f, (size_t)MOST * DIM * sizeof *out);
  td_op_fill_zero(f.stream, x, (size_t)MOST * DIM * sizeof *x);
  const td_kv_view kv = {.pages = cuda_alloc(&f, ENTRIES * sizeof(float)),
                         .page_bytes = ENTRIES * sizeof(float),
                         .dtype = TD_BF16};
  for (size_t i = 0; i < TD_COUNT(n_tokens) * TD_COUNT(first); i++) {
    uint32_t n = n_tokens[i % 2];
    int32_t seq[MOST] = {0}, position[MOST], begin[] = {0, (int32_t)n}, page = i < 2 ? -1 : 0;
    for (int t = 0; t < MOST; t++)
      position[t] = first[i / 2] + t;
    const td_batch_view batch = {.seq = cuda_put(&f, seq, sizeof seq),
                                 .position = cuda_put(&f, position, sizeof position),
                                 .q_begin = cuda_put(&f, begin, sizeof begin),
                                 .page_table = cuda_put(&f, &page, sizeof page),
                                 .n_tokens = n,
                                 .n_seqs = 1,
                                 .max_pages = 1,
                                 .page_tokens = PAGE};
    td_op_kv_store(f.stream, &(td_kv_store_args){batch, kv, x, x, DIM, DIM, 1, DIM});
    td_op_attn_gqa(f.stream, &(td_attn_gqa_args){.batch = batch,
                                                 .kv = kv,
                                                 .q = x,
                                                 .out = out,
                                                 .n_heads = 1,
                                                 .n_kv_heads = 1,
                                                 .head_dim = DIM,
                                                 .scale = 1,
                                                 .prompt = n > 1});
    cuda_expect_failure(&f, i < 2 && n == 1 ? "page is absent" : i < 2 ? "batch" : "position");
  }
  cuda_close(&f);
}
