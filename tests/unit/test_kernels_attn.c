// tests/unit/test_kernels_attn.c - the attention blocks, every version this machine runs.
// Scores are of magnitude 10 and come from sums of at most 600 products of magnitude 1/60, so they
// are right to 600 2^-24 10 / 2 < 2e-4 in the worst and 1e-6 in the usual case; probabilities and
// their averages inherit that. 1e-5 of the result's norm is asked for.
// CTest: no-asan no-tsan

#include "unit/kernel_test.h"

typedef struct {
  td_dtype dtype; // F16 or F32
  uint32_t n_q, k_dim, v_dim, n_blocks;
  bool shared;    // values are the first v_dim elements of the keys
  bool is_turned; // in scratch that is handed over
  bool is_spread; // keys are in rows
} shape;

typedef struct {
  ref_mem k, v; // one block
  uint32_t n_keys;
  uint32_t n_visible[40], n_hidden[40]; // hides is false: n_hidden is not handed over
  bool hides;
} key_block;

static double kv_at(const ref_mem *mem, td_dtype dtype, size_t i) {
  return dtype == TD_F16 ? ref_half(((uint16_t *)mem->data)[i]) : ((float *)mem->data)[i];
}

static ref_mem random_kv(uint64_t *rng, td_dtype dtype, size_t n) {
  ref_mem mem = ref_guarded(n * td_dtype_bytes(dtype));
  for (size_t i = 0; i < n; i++) {
    float f = ref_float(rng);
    if (dtype == TD_F32)
      ((float *)mem.data)[i] = f;
    else
      ((uint16_t *)mem.data)[i] = (uint16_t)(0x3000 + (ref_next(rng) & 0x87ff));
  }
  return mem;
}

static void make_block(key_block *b, const shape *s, uint64_t *rng, uint32_t idx) {
  b->n_keys = idx % 2 ? 1 + ref_below(rng, TD_ATTN_KEYS) : TD_ATTN_KEYS;
  b->k = random_kv(rng, s->dtype, (size_t)b->n_keys * s->k_dim);
  b->v = s->shared ? b->k : random_kv(rng, s->dtype, (size_t)b->n_keys * s->v_dim);
  for (uint32_t i = 0; i < s->n_q; i++) {
    uint32_t pick = ref_below(rng, 4);
    b->n_visible[i] = pick == 0 ? ref_below(rng, b->n_keys + 1) : b->n_keys;
    if (idx == 0 && b->n_visible[i] == 0) b->n_visible[i] = 1;
  }
  // Some query sees all keys of the block, as the contract promises of memory.
  b->n_visible[idx % s->n_q] = b->n_keys;
  b->hides = idx % 2;
  for (uint32_t i = 0; i < s->n_q; i++) {
    const bool hides = b->hides && b->n_visible[i] && i % 3;
    b->n_hidden[i] = hides ? ref_below(rng, b->n_visible[i]) : 0;
  }
}

typedef void (*attn_fn)(const td_attn_block_args *);

// Where the block's keys are in copies in falling order, each with its value behind it; NULL: they
// are not spread.
static const char **spread(const shape *s, const key_block *b, ref_mem *copy) {
  const size_t elem = td_dtype_bytes(s->dtype), k_bytes = s->k_dim * elem;
  const size_t v_bytes = s->shared ? 0 : s->v_dim * elem, row_bytes = k_bytes + v_bytes;
  if (!s->is_spread) return NULL;
  const char **rows = calloc(b->n_keys, sizeof *rows);
  *copy = ref_guarded(b->n_keys * row_bytes);
  for (uint32_t j = 0; j < b->n_keys; j++) {
    char *row = (char *)copy->data + (b->n_keys - 1 - j) * row_bytes;
    memcpy(row, (char *)b->k.data + j * k_bytes, k_bytes);
    if (v_bytes) memcpy(row + k_bytes, (char *)b->v.data + j * v_bytes, v_bytes);
    rows[j] = row;
  }
  return rows;
}

static void run(attn_fn fn, const shape *s, key_block *blocks, uint32_t q0, uint32_t n_q,
                const float *q, float *out) {
  uint32_t lda = s->v_dim + 3;
  size_t row_bytes = s->k_dim * td_dtype_bytes(s->dtype);
  float *acc = calloc((size_t)n_q * lda, sizeof *acc), m[40], l[40] = {0};
  ref_mem transposed = ref_guarded((size_t)s->k_dim * TD_ATTN_KEYS * sizeof(float));
  for (uint32_t i = 0; i < n_q; i++)
    m[i] = -INFINITY;
  for (uint32_t b = 0; b < s->n_blocks; b++) {
    const key_block *next = b + 1 < s->n_blocks ? &blocks[b + 1] : NULL;
    ref_mem copy;
    const char **rows = spread(s, &blocks[b], &copy);
    const size_t behind = s->shared ? 0 : row_bytes;
    fn(&(td_attn_block_args){.q = q + (size_t)q0 * s->k_dim,
                             .k = rows ? rows[0] : blocks[b].k.data,
                             .v = rows ? rows[0] + behind : blocks[b].v.data,
                             .rows = rows,
                             .n_visible = blocks[b].n_visible + q0,
                             .n_hidden = blocks[b].hides ? blocks[b].n_hidden + q0 : NULL,
                             .m = m,
                             .l = l,
                             .acc = acc,
                             .transposed = s->is_turned ? transposed.data : NULL,
                             .next_k = next ? next->k.data : NULL,
                             .next_v = next && !s->shared ? next->v.data : NULL,
                             .next_bytes = next ? next->n_keys * row_bytes : 0,
                             .ldq = s->k_dim,
                             .ldk = s->k_dim,
                             .ldv = s->shared ? s->k_dim : s->v_dim,
                             .ldacc = lda,
                             .n_q = n_q,
                             .k_dim = s->k_dim,
                             .v_dim = s->v_dim});
    if (rows) ref_unmap(&copy);
    free(rows);
  }
  for (uint32_t i = 0; i < n_q; i++) {
    for (uint32_t d = 0; d < s->v_dim; d++)
      out[i * s->v_dim + d] = acc[i * lda + d] / l[i];
  }
  free(acc);
  ref_unmap(&transposed);
}

static void naive(const shape *s, const key_block *blocks, uint32_t i, const float *q,
                  double *want) {
  double sum = 0;
  size_t ldv = s->shared ? s->k_dim : s->v_dim;
  memset(want, 0, s->v_dim * sizeof *want);
  for (uint32_t b = 0; b < s->n_blocks; b++) {
    for (uint32_t j = blocks[b].n_hidden[i]; j < blocks[b].n_visible[i]; j++) {
      double dot = 0;
      for (uint32_t d = 0; d < s->k_dim; d++) {
        dot += q[(size_t)i * s->k_dim + d] *
               kv_at(&blocks[b].k, s->dtype, (size_t)j * s->k_dim + d);
      }
      double p = exp(dot);
      sum += p;
      for (uint32_t d = 0; d < s->v_dim; d++) {
        want[d] += p * kv_at(&blocks[b].v, s->dtype, j * ldv + d);
      }
    }
  }
  for (uint32_t d = 0; d < s->v_dim; d++)
    want[d] /= sum;
}

static bool check(void (*fn)(void), const void *arg, why *w) {
  const shape *s = arg;
  uint64_t rng = 9;
  key_block blocks[4];
  float *q = ref_floats(&rng, (size_t)s->n_q * s->k_dim);
  float scale = 8 / sqrtf((float)s->k_dim);
  for (size_t i = 0; i < (size_t)s->n_q * s->k_dim; i++)
    q[i] *= scale;
  for (uint32_t b = 0; b < s->n_blocks; b++)
    make_block(&blocks[b], s, &rng, b);
  float *out = malloc((size_t)s->n_q * s->v_dim * sizeof *out);
  float *alone = malloc(s->v_dim * sizeof *alone);
  double *want = ref_doubles(s->v_dim);
  run((attn_fn)fn, s, blocks, 0, s->n_q, q, out);
  bool ok = true;
  for (uint32_t i = 0; ok && i < s->n_q; i++) {
    naive(s, blocks, i, q, want);
    double distance = ref_distance(out + (size_t)i * s->v_dim, want, s->v_dim);
    if (!(distance < 1e-5)) ok = KERNEL_FAIL(w, "query %u of %u: %g", i, s->n_q, distance);
    bool sees_all = true; // alone, it must be the one that vouches for the block's memory
    for (uint32_t b = 0; b < s->n_blocks; b++)
      sees_all &= blocks[b].n_visible[i] > 0;
    if (!sees_all) continue;
    run((attn_fn)fn, s, blocks, i, 1, q, alone);
    if (memcmp(alone, out + (size_t)i * s->v_dim, s->v_dim * sizeof *alone) != 0) {
      ok = KERNEL_FAIL(w, "query %u of %u differs from itself alone", i, s->n_q);
    }
  }
  for (uint32_t b = 0; b < s->n_blocks; b++) {
    ref_unmap(&blocks[b].k);
    if (!s->shared) ref_unmap(&blocks[b].v);
  }
  free(q);
  free(out);
  free(alone);
  free(want);
  return ok;
}

// A key whose numbers are NaN: what queries that see it get is NaN, and nothing of it reaches
// others.
static bool check_unseen(void (*fn)(void), const void *arg, why *w) {
  enum { N_KEYS = 38, N_Q = 9 };
  shape s = *(const shape *)arg;
  s.n_q = N_Q;
  s.n_blocks = 1;
  uint64_t rng = 10;
  key_block b = {.n_keys = N_KEYS, .k = random_kv(&rng, s.dtype, (size_t)N_KEYS * s.k_dim)};
  b.v = s.shared ? b.k : random_kv(&rng, s.dtype, (size_t)N_KEYS * s.v_dim);
  for (uint32_t i = 0; i < N_Q; i++)
    b.n_visible[i] = i % 3 == 2 ? N_KEYS : N_KEYS - 1 - i;
  float *q = ref_floats(&rng, (size_t)N_Q * s.k_dim);
  float *clean = malloc((size_t)N_Q * s.v_dim * sizeof *clean);
  float *out = malloc((size_t)N_Q * s.v_dim * sizeof *out);
  run((attn_fn)fn, &s, &b, 0, N_Q, q, clean);
  const size_t elem = td_dtype_bytes(s.dtype), last = N_KEYS - 1;
  memset((char *)b.k.data + last * s.k_dim * elem, 0xff, s.k_dim * elem);
  if (!s.shared) memset((char *)b.v.data + last * s.v_dim * elem, 0xff, s.v_dim * elem);
  run((attn_fn)fn, &s, &b, 0, N_Q, q, out);
  bool ok = true;
  for (uint32_t i = 0; ok && i < N_Q * s.v_dim; i++) {
    const bool sees = b.n_visible[i / s.v_dim] == N_KEYS;
    if (sees ? isnan(out[i]) : memcmp(&out[i], &clean[i], sizeof *out) == 0) continue;
    ok = KERNEL_FAIL(w, "element %u of query %u: %g", i % s.v_dim, i / s.v_dim, out[i]);
  }
  ref_unmap(&b.k);
  if (!s.shared) ref_unmap(&b.v);
  free(q);
  free(clean);
  free(out);
  return ok;
}

static const shape shapes[] = {
    {0, 1, 1, 1, 1, false, false, false},     {0, 4, 64, 64, 2, false, false, false},
    {0, 7, 128, 128, 3, false, false, false}, {0, 33, 20, 20, 4, false, false, false},
    {0, 16, 576, 512, 2, true, false, false}, {0, 5, 46, 40, 4, true, false, false},
    {0, 9, 192, 128, 3, false, false, false}, {0, 6, 33, 20, 3, true, false, false},
    {0, 6, 65, 31, 3, false, false, false}};

TEST(f16) {
  for (size_t i = 0; i < TD_COUNT(shapes); i++) {
    shape s = shapes[i];
    s.dtype = TD_F16;
    for (int spread = 0; spread < 2; spread++) {
      s.is_spread = spread;
      for_versions("attn_f16", check, &s);
      for_versions("attn_f16", check_unseen, &s);
    }
  }
}

TEST(f32) {
  for (size_t i = 0; i < TD_COUNT(shapes); i++) {
    shape s = shapes[i];
    s.dtype = TD_F32;
    for (int where = 0; where < 3; where++) {
      s.is_turned = where == 1;
      s.is_spread = where == 2;
      for_versions("attn_f32", check, &s);
      for_versions("attn_f32", check_unseen, &s);
    }
  }
}

// The scalar kernel, seeing one key too few of long rows.
static void broken_mask(const td_attn_block_args *a) {
  uint32_t fewer[40];
  for (uint32_t i = 0; i < a->n_q; i++)
    fewer[i] = a->n_visible[i] - (a->n_visible[i] > 40);
  td_attn_block_args args = *a;
  args.n_visible = fewer;
  td_kernels()->attn_f32(&args);
}

// Sees what a window hides.
static void broken_window(const td_attn_block_args *a) {
  td_attn_block_args args = *a;
  args.n_hidden = NULL;
  td_kernels()->attn_f32(&args);
}

// Forgets to rescale l when the maximum moves.
static void broken_rescale(const td_attn_block_args *a) {
  float l[40];
  memcpy(l, a->l, a->n_q * sizeof *l);
  for (uint32_t i = 0; i < a->n_q; i++)
    a->l[i] = 0;
  td_kernels()->attn_f32(a);
  for (uint32_t i = 0; i < a->n_q; i++)
    a->l[i] += l[i];
}

TEST(broken_kernels_are_caught) {
  assert_int_equal(td_kernels_init("scalar"), TD_KERNELS_OK);
  why w;
  shape s = {TD_F32, 7, 64, 64, 3, false, false, false};
  assert_true(check((void (*)(void))td_kernels()->attn_f32, &s, &w));
  assert_false(check((void (*)(void))broken_mask, &s, &w));
  assert_false(check((void (*)(void))broken_window, &s, &w));
  assert_false(check((void (*)(void))broken_rescale, &s, &w));
}
