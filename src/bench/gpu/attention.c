// src/bench/gpu/attention.c - attention: a token of one or of several sequences, and prompts.
#include "bench/gpu/paths.h"

td_batch_view td_gpu_batch(td_gpu_bench *b, uint32_t n_seqs, uint32_t n_tokens, uint32_t n_keys) {
  uint32_t n_pages = (n_keys + TD_GPU_PAGE_TOKENS - 1) / TD_GPU_PAGE_TOKENS, n = n_seqs * n_tokens;
  td_batch_view batch = {.n_tokens = n,
                         .n_seqs = n_seqs,
                         .max_pages = n_pages,
                         .page_tokens = TD_GPU_PAGE_TOKENS,
                         .max_keys = n_keys};
  int32_t *q_begin = td_gpu_host(b, (n_seqs + 1) * sizeof *q_begin);
  int32_t *position = td_gpu_host(b, n * sizeof *position), *seq = td_gpu_host(b, n * sizeof *seq);
  int32_t *pages = td_gpu_host(b, (size_t)n_seqs * n_pages * sizeof *pages);
  for (uint32_t i = 0; i <= n_seqs; i++)
    q_begin[i] = (int32_t)(i * n_tokens);
  for (uint32_t i = 0; i < n; i++) {
    seq[i] = (int32_t)(i / n_tokens);
    position[i] = (int32_t)(n_keys - n_tokens + i % n_tokens);
  }
  for (uint32_t i = 0; i < n_seqs * n_pages; i++)
    pages[i] = (int32_t)i;
  batch.q_begin = td_gpu_ints(b, q_begin, n_seqs + 1);
  batch.host_q_begin = q_begin;
  batch.seq = td_gpu_ints(b, seq, n);
  batch.position = td_gpu_ints(b, position, n);
  batch.host_position = position;
  batch.page_table = td_gpu_ints(b, pages, (size_t)n_seqs * n_pages);
  return batch;
}

// Number of (query, visible key) pairs in one sequence.
static double n_pairs(uint32_t n_tokens, uint32_t n_keys) {
  return n_tokens * ((double)n_keys - (n_tokens - 1) / 2.0);
}

enum { MAX_CACHES = 128, MAX_KV_B = 16 };

typedef struct {
  uint32_t seqs, tokens, keys;
} attn_shape;

static const attn_shape attn_shapes[] = {
    {1, 1, 1024},  {1, 1, 8192},  {1, 1, 32768},  {1, 4, 32768},   {16, 1, 8192},
    {64, 1, 1024}, {1, 512, 512}, {1, 512, 8192}, {1, 8192, 8192}, {1, 2048, 32768}};

// Of a sequence: a token, or one and those drafted behind it.
static bool is_decode(const attn_shape *s) {
  enum { MAX_DRAFTED = 3 };
  return s->tokens <= 1 + MAX_DRAFTED;
}

// KV caches that calls rotate through. In a real decode step the weights evict the KV cache from
// L2, so it must not be found there. For prefill one cache suffices, since reading it is a small
// part of the work.
typedef struct {
  size_t n_bytes; // size of one
  uint32_t n;
} caches;

static caches caches_of(const td_gpu_bench *b, const attn_shape *s, size_t n_bytes) {
  const size_t n = is_decode(s) ? TD_GPU_ROTATING_BYTES / 2 / n_bytes : 1;
  const size_t most = td_gpu_fewer(b, MAX_CACHES, 2);
  return (caches){n_bytes, (uint32_t)(n < 1 ? 1 : n > most ? most : n)};
}

static void *cache_of(const caches *c, const td_kv_view *first, uint32_t call) {
  return first->pages + call % c->n * c->n_bytes;
}

// BF16 pages, as a server's are by default, and those in E4M3.
static const struct {
  const char *name;
  td_dtype dtype;
} page_formats[] = {{"bf16", TD_BF16}, {"e4m3", TD_F8E4M3}};

static size_t token_bytes(td_dtype dtype, const td_kv_rows *rows) {
  return dtype == TD_F8E4M3 ? td_kv_f8_token_bytes(rows) : 2 * (size_t)rows->n * rows->dim;
}

typedef struct {
  td_attn_gqa_args args;
  caches caches;
} gqa_calls;

static void attn_gqa_once(td_gpu_bench *b, const void *args, uint32_t call) {
  const gqa_calls *c = args;
  td_attn_gqa_args a = c->args;
  a.kv.pages = cache_of(&c->caches, &a.kv, call);
  td_op_attn_gqa(b->stream, &a);
}

static void bench_gqa(td_gpu_bench *b, const td_gpu_shape *m, const attn_shape *s, size_t format) {
  const char *op = is_decode(s) ? "decode" : "prefill", *pages_name = page_formats[format].name;
  if (!td_gpu_wants(b, op, m->name, pages_name)) return;
  uint32_t n = s->seqs * s->tokens;
  const td_kv_rows rows = {.n = 2 * m->n_kv_heads, .dim = m->head_dim};
  const size_t of_token = token_bytes(page_formats[format].dtype, &rows);
  const size_t page_bytes = TD_GPU_PAGE_TOKENS * of_token;
  td_batch_view batch = td_gpu_batch(b, s->seqs, s->tokens, s->keys);
  gqa_calls calls = {.caches = caches_of(b, s, s->seqs * batch.max_pages * page_bytes)};
  void *pages = td_gpu_noise(b, calls.caches.n * calls.caches.n_bytes);
  void *q = td_gpu_noise(b, (size_t)n * m->n_heads * m->head_dim * 2);
  void *out = td_gpu_alloc(b, (size_t)n * m->n_heads * m->head_dim * 2);
  calls.args = (td_attn_gqa_args){
      .batch = batch,
      .kv = {.pages = pages, .page_bytes = page_bytes, .dtype = page_formats[format].dtype},
      .q = q,
      .out = out,
      .n_heads = m->n_heads,
      .n_kv_heads = m->n_kv_heads,
      .head_dim = m->head_dim,
      .scale = 0.1f,
      .prompt = !is_decode(s)};
  double pairs = s->seqs * n_pairs(s->tokens, s->keys);
  td_gpu_run(b,
             &(td_gpu_case){.op = op,
                            .model = m->name,
                            .format = pages_name,
                            .tokens = n,
                            .seqs = s->seqs,
                            .keys = s->keys,
                            .bytes = (double)of_token * s->keys * s->seqs,
                            .flops = 4.0 * m->n_heads * m->head_dim * pairs},
             attn_gqa_once, &calls, calls.caches.n);
}

typedef struct {
  td_attn_mla_args args;
  const td_weight *kv_b; // MAX_KV_B of them
  caches caches;
} mla_calls;

static void attn_mla_once(td_gpu_bench *b, const void *args, uint32_t call) {
  const mla_calls *c = args;
  td_attn_mla_args a = c->args;
  a.kv.pages = cache_of(&c->caches, &a.kv, call);
  a.kv_b = &c->kv_b[call % MAX_KV_B];
  td_op_attn_mla(b->stream, &a);
}

static void bench_mla(td_gpu_bench *b, const td_gpu_shape *m, const td_weight *kv_b,
                      const attn_shape *s, size_t format) {
  const char *op = is_decode(s) ? "mla_decode" : "mla_prefill";
  const char *pages_name = page_formats[format].name;
  if (!td_gpu_wants(b, op, m->name, pages_name)) return;
  uint32_t n = s->seqs * s->tokens;
  const td_kv_rows rows = {.n = 1, .dim = TD_GPU_RANK + TD_GPU_ROPE, .n_bf16 = TD_GPU_ROPE};
  const size_t of_token = token_bytes(page_formats[format].dtype, &rows);
  const size_t page_bytes = TD_GPU_PAGE_TOKENS * of_token;
  td_batch_view batch = td_gpu_batch(b, s->seqs, s->tokens, s->keys);
  mla_calls calls = {.kv_b = kv_b,
                     .caches = caches_of(b, s, s->seqs * batch.max_pages * page_bytes)};
  void *pages = td_gpu_noise(b, calls.caches.n * calls.caches.n_bytes);
  void *q = td_gpu_noise(b, (size_t)n * m->n_heads * (TD_GPU_NOPE + TD_GPU_ROPE) * 2);
  void *out = td_gpu_alloc(b, (size_t)n * m->n_heads * TD_GPU_V_DIM * 2);
  calls.args = (td_attn_mla_args){.batch = batch,
                                  .kv = {.pages = pages,
                                         .page_bytes = page_bytes,
                                         .dtype = page_formats[format].dtype,
                                         .n_bf16 = rows.n_bf16},
                                  .q = q,
                                  .out = out,
                                  .n_heads = m->n_heads,
                                  .nope_dim = TD_GPU_NOPE,
                                  .rope_dim = TD_GPU_ROPE,
                                  .v_dim = TD_GPU_V_DIM,
                                  .kv_lora_rank = TD_GPU_RANK,
                                  .scale = 0.1f,
                                  .absorbed = is_decode(s)};
  const uint32_t n_kv_b = td_gpu_fewer(b, MAX_KV_B, 2);
  const uint32_t n_turns = calls.caches.n > n_kv_b ? calls.caches.n : n_kv_b;
  double width = is_decode(s) ? 2 * TD_GPU_RANK + TD_GPU_ROPE
                              : TD_GPU_NOPE + TD_GPU_ROPE + TD_GPU_V_DIM;
  td_gpu_run(
      b,
      &(td_gpu_case){.op = op,
                     .model = m->name,
                     .format = pages_name,
                     .tokens = n,
                     .seqs = s->seqs,
                     .keys = s->keys,
                     .bytes = (double)of_token * s->keys * s->seqs + (double)td_weight_bytes(kv_b),
                     .flops = 2.0 * m->n_heads * width * s->seqs * n_pairs(s->tokens, s->keys)},
      attn_mla_once, &calls, is_decode(s) ? n_turns : 1);
}

// A prefill case keeps more tokens than decode has.
static attn_shape attn_shape_of(const td_gpu_bench *b, size_t i) {
  attn_shape s = attn_shapes[i];
  s.seqs = td_gpu_fewer(b, s.seqs, 2);
  if (!is_decode(&s)) s.tokens = td_gpu_fewer(b, s.tokens, 5);
  s.keys = td_gpu_fewer(b, s.keys, s.tokens);
  return s;
}

void td_gpu_attention_cases(td_gpu_bench *b, const td_gpu_shape *m) {
  td_weight kv_b[MAX_KV_B];
  const size_t n = TD_COUNT(attn_shapes);
  for (size_t i = 0; i < MAX_KV_B && !m->n_kv_heads; i++)
    kv_b[i] = td_gpu_weight(b, m->format, m->n_heads * (TD_GPU_NOPE + TD_GPU_V_DIM), TD_GPU_RANK);
  for (size_t i = 0; i < n * TD_COUNT(page_formats); i++) {
    const attn_shape s = attn_shape_of(b, i % n);
    td_gpu_kept *const weights = b->kept;
    if (m->n_kv_heads)
      bench_gqa(b, m, &s, i / n);
    else
      bench_mla(b, m, kv_b, &s, i / n);
    td_gpu_release(b, weights);
  }
  td_gpu_release(b, NULL);
}
