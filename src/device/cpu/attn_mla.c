// src/device/cpu/attn_mla.c - multi-head latent attention, absorbed and expanded.
// Absorbed: a head's query is multiplied once by its key rows of kv_b (q' = q_nope K, K decoded row
// by row), all heads then attend to the latents as to one KV head, and the result is multiplied by
// the head's value rows. Expanded: block by block, a head's keys and values are computed from the
// latents. With a selection, a prompt's tokens that see all keys are expanded, and the others
// absorbed: what each of them sees differs, so that an expansion would serve one token alone.
#include <string.h>

#include "device/cpu/attn.h"
#include "device/cpu/pages.h"

enum {
  EXPANDED_QUERIES = 1024, // per item: about 170 amortize the expansion of a block
  MIN_QUERIES = 256,       // where items are too few for all members
  KEY_ROWS = 16,           // decoded at a time; they stay in L1 while all tokens use them
  SELECTING_TOKENS = 64    // of a prompt at a time: kv_b is decoded once for them
};

typedef struct {
  const td_attn_mla_args *a;
  uint32_t entry_dim;              // kv_lora_rank + rope_dim
  size_t entry_bytes;              // in the cache
  float *query;                    // absorbed: [n_tokens][n_heads][entry_dim]
  float *latent;                   // absorbed: [n_tokens][n_heads][kv_lora_rank]
  const td_attn_tile *tiles;       // expanded
  char *member;                    // one piece per member
  size_t member_bytes;             //
  size_t query_bytes, state_bytes; // expanded: sizes within a piece
} mla_run;

// First row of a head in kv_b: its key rows, then its value rows.
static uint32_t head_row(const td_attn_mla_args *a, size_t head) {
  return (uint32_t)head * (a->nope_dim + a->v_dim);
}

// Prefetches a row of weights.
static void fetch_row(const td_weight *w, uint32_t row) {
  const char *at = td_cpu_rows_at(w, row), *end = td_cpu_rows_at(w, row + 1);
  for (; at < end; at += 64)
    __builtin_prefetch(at, 0, 2);
}

// Starts a token's absorbed query of a head: zero for the latent part, a copy of the rotated part.
static float *begin_query(const mla_run *run, uint32_t token, size_t head) {
  const td_attn_mla_args *a = run->a;
  const size_t at = (size_t)token * a->n_heads + head, q_dim = a->nope_dim + a->rope_dim;
  float *query = run->query + at * run->entry_dim;
  memset(query, 0, a->kv_lora_rank * sizeof *query);
  memcpy(query + a->kv_lora_rank, (const float *)a->q + at * q_dim + a->nope_dim,
         a->rope_dim * sizeof *query);
  return query;
}

// Absorbs one token's query of a head; key rows are decoded into registers. Prefetches the next
// head's rows at the end.
static void absorb_one(void *ctx, size_t head, size_t next, unsigned member) {
  (void)member;
  const mla_run *run = ctx;
  const td_attn_mla_args *a = run->a;
  float *query = begin_query(run, 0, head);
  const float *q = (const float *)a->q + head * (a->nope_dim + a->rope_dim);
  for (uint32_t d = 0, n; d < a->nope_dim; d += n) {
    n = a->nope_dim - d < KEY_ROWS ? a->nope_dim - d : KEY_ROWS;
    const bool moves_on = d + n == a->nope_dim && next != TD_CPU_NO_ITEM;
    td_kernels()->axpy_weights(&(td_axpy_weights_args){
        .w = a->kv_b,
        .y = query,
        .a = q + d,
        .row = head_row(a, head) + d,
        .n_rows = n,
        .next = moves_on ? td_cpu_rows_at(a->kv_b, head_row(a, next)) : NULL,
    });
  }
}

// Absorbs the queries of one head; each key row is decoded once for all tokens. Rows are prefetched
// KEY_ROWS ahead; after the last key rows come the head's value rows, which are needed soon.
static void absorb_head(void *ctx, size_t head, unsigned member) {
  const mla_run *run = ctx;
  const td_attn_mla_args *a = run->a;
  uint32_t n_tokens = a->batch.n_tokens, q_dim = a->nope_dim + a->rope_dim;
  uint32_t row0 = head_row(a, head);
  float *rows = (float *)(run->member + member * run->member_bytes);
  for (uint32_t t = 0; t < n_tokens; t++)
    begin_query(run, t, head);
  for (uint32_t d = 0, n; d < a->nope_dim; d += n) {
    n = a->nope_dim - d < KEY_ROWS ? a->nope_dim - d : KEY_ROWS;
    for (uint32_t i = 0; i < n; i++) {
      if (row0 + d + i + KEY_ROWS < a->kv_b->rows) fetch_row(a->kv_b, row0 + d + i + KEY_ROWS);
      td_kernels()->decode_row(&(td_decode_row_args){
          .w = a->kv_b, .row = row0 + d + i, .out = rows + (size_t)i * a->kv_lora_rank});
    }
    for (uint32_t t = 0; t < n_tokens; t++) {
      size_t at = (size_t)t * a->n_heads + head;
      td_kernels()->axpy(&(td_axpy_args){.y = run->query + at * run->entry_dim,
                                         .x = rows,
                                         .a = (const float *)a->q + at * q_dim + d,
                                         .n = a->kv_lora_rank,
                                         .ldx = a->kv_lora_rank,
                                         .n_rows = n});
    }
  }
}

// Multiplies a head's attended latents by its value rows.
static void value_head(void *ctx, size_t head, size_t next, unsigned member) {
  (void)member;
  const mla_run *run = ctx;
  const td_attn_mla_args *a = run->a;
  uint32_t row0 = head_row(a, head) + a->nope_dim;
  td_cpu_linear_tile(&(td_linear_args){
      .w = a->kv_b,
      .x = run->latent + head * a->kv_lora_rank,
      .y = (float *)a->out + head * a->v_dim,
      .ldx = (size_t)a->n_heads * a->kv_lora_rank,
      .ldy = (size_t)a->n_heads * a->v_dim,
      .n_tokens = a->batch.n_tokens,
      .row_begin = row0,
      .row_end = row0 + a->v_dim,
      .y_row0 = row0,
      .next = next == TD_CPU_NO_ITEM ? NULL
                                     : td_cpu_rows_at(a->kv_b, head_row(a, next) + a->nope_dim),
  });
}

static td_cpu_rows head_rows(const void *ctx, size_t part, size_t matrix) {
  (void)part, (void)matrix;
  const td_attn_mla_args *a = ((const mla_run *)ctx)->a;
  const size_t of_head = a->nope_dim + a->v_dim;
  return td_cpu_rows_of(a->kv_b, head_row(a, 0), of_head, a->n_heads * of_head);
}

static td_status run_absorbed(td_cpu_stream *stream, mla_run *run, td_err *err) {
  const td_attn_mla_args *a = run->a;
  size_t n_rows = (size_t)a->batch.n_tokens * a->n_heads;
  unsigned n_threads = td_thread_pool_size(td_cpu_dev_of(stream)->pool);
  run->member_bytes = (KEY_ROWS * a->kv_lora_rank * sizeof(float) + 63) & ~(size_t)63;
  void *member, *query, *latent;
  td_status status = td_cpu_scratch(stream, SCRATCH_MEMBER, n_threads * run->member_bytes, &member,
                                    err);
  if (status == TD_OK) {
    status = td_cpu_scratch(stream, SCRATCH_QUERY, n_rows * run->entry_dim * sizeof(float), &query,
                            err);
  }
  if (status == TD_OK) {
    status = td_cpu_scratch(stream, SCRATCH_LATENT, n_rows * a->kv_lora_rank * sizeof(float),
                            &latent, err);
  }
  if (status != TD_OK) return status;
  run->member = member;
  run->query = query;
  run->latent = latent;
  const td_cpu_part heads = {1, a->n_heads};
  if (a->batch.n_tokens == 1 && td_dtype_bits(a->kv_b->dtype) >= 8) {
    const td_cpu_tiles tiles = {
        .parts = &heads, .n_parts = 1, .fn = absorb_one, .rows = head_rows, .ctx = run};
    status = td_cpu_parallel_tiles(stream, &tiles, err);
  } else {
    td_cpu_for(stream, a->n_heads, absorb_head, run);
  }
  if (status != TD_OK) return status;
  status = td_attn_run_shared(stream,
                              &(td_attn_shared){
                                  .batch = &a->batch,
                                  .kv = &a->kv,
                                  .q = run->query,
                                  .out = run->latent,
                                  .ld = run->entry_dim,
                                  .rows = td_mla_rows(&a->kv, run->entry_dim),
                                  .n_heads = a->n_heads,
                                  .n_kv_heads = 1,
                                  .k_dim = run->entry_dim,
                                  .v_dim = a->kv_lora_rank,
                                  .selected = a->selected,
                                  .top_k = a->top_k,
                                  .group = a->group,
                                  .scale = a->scale,
                              },
                              err);
  if (status != TD_OK) return status;
  const td_cpu_tiles tiles = {
      .parts = &heads, .n_parts = 1, .fn = value_head, .rows = head_rows, .ctx = run};
  return td_cpu_parallel_tiles(stream, &tiles, err);
}

// A member's buffers for one block's latents and a head's expanded keys and values.
typedef struct {
  float *latent;     // [TD_ATTN_KEYS][entry_dim]
  float *k;          // [TD_ATTN_KEYS][nope_dim + rope_dim]
  float *transposed; // [nope_dim + rope_dim][TD_ATTN_KEYS]
  float *v;          // [TD_ATTN_KEYS][v_dim]
} expansion;

static const char *entries_at(const mla_run *run, const td_attn_tile *tile, uint32_t position) {
  const td_attn_mla_args *a = run->a;
  return td_attn_page(&a->batch, &a->kv, tile->seq, position) +
         position % a->batch.page_tokens * run->entry_bytes;
}

// The entries of the n positions from begin on, all in one page, as f32.
static void load_entries(const mla_run *run, const td_attn_tile *tile, uint32_t begin, uint32_t n,
                         float *out) {
  const td_attn_mla_args *a = run->a;
  const void *entries = entries_at(run, tile, begin);
  const size_t n_elements = (size_t)n * run->entry_dim;
  if (a->kv.dtype == TD_F8E4M3) {
    const td_kv_rows rows = td_mla_rows(&a->kv, run->entry_dim);
    const uint32_t page_tokens = a->batch.page_tokens;
    const char *page = td_attn_page(&a->batch, &a->kv, tile->seq, begin);
    for (uint32_t i = 0; i < n; i++)
      td_kv_f8_get(&rows, page_tokens, page, begin % page_tokens + i,
                   out + (size_t)i * run->entry_dim);
  } else if (a->kv.dtype == TD_F16) {
    td_kernels()->f32_from_f16(&(td_convert_args){.in = entries, .out = out, .n = n_elements});
  } else {
    memcpy(out, entries, n_elements * sizeof(float));
  }
}

static void expand_block(const mla_run *run, const td_attn_tile *tile, uint32_t head,
                         uint32_t begin, uint32_t n, const expansion *e) {
  const td_attn_mla_args *a = run->a;
  uint32_t k_dim = a->nope_dim + a->rope_dim;
  load_entries(run, tile, begin, n, e->latent);
  uint32_t row0 = head_row(a, head);
  td_linear_args args = {
      .w = a->kv_b,
      .x = e->latent,
      .y = e->k,
      .ldx = run->entry_dim,
      .ldy = k_dim,
      .n_tokens = n,
      .row_begin = row0,
      .row_end = row0 + a->nope_dim,
      .y_row0 = row0,
      .prompt = true,
  };
  td_cpu_linear_tile(&args);
  args.y = e->v;
  args.ldy = a->v_dim;
  args.row_begin = args.y_row0 = row0 + a->nope_dim;
  args.row_end = args.row_begin + a->v_dim;
  td_cpu_linear_tile(&args);
  for (uint32_t i = 0; i < n; i++) {
    memcpy(e->k + (size_t)i * k_dim + a->nope_dim,
           e->latent + (size_t)i * run->entry_dim + a->kv_lora_rank, a->rope_dim * sizeof(float));
  }
}

static void load_queries(const mla_run *run, const td_attn_tile *tile, uint32_t head, float *q) {
  const td_attn_mla_args *a = run->a;
  uint32_t k_dim = a->nope_dim + a->rope_dim;
  for (uint32_t i = 0; i < tile->n; i++) {
    const float *from = (const float *)a->q +
                        ((size_t)(tile->token + i) * a->n_heads + head) * k_dim;
    for (uint32_t d = 0; d < k_dim; d++)
      *q++ = from[d] * a->scale;
  }
}

// next: the latents that are expanded after this block, for prefetching.
static void attend_block(const mla_run *run, const td_attn_tile *tile, const float *q,
                         const expansion *e, uint32_t begin, uint32_t end, const void *next,
                         const td_attn_state *state) {
  const td_attn_mla_args *a = run->a;
  uint32_t n_visible[EXPANDED_QUERIES];
  for (uint32_t i = 0; i < tile->n; i++)
    n_visible[i] = td_attn_visible(&a->batch, tile->token + i, begin, end);
  uint32_t k_dim = a->nope_dim + a->rope_dim;
  td_kernels()->attn_f32(&(td_attn_block_args){
      .q = q,
      .k = e->k,
      .v = e->v,
      .n_visible = n_visible,
      .m = state->m,
      .l = state->l,
      .acc = state->acc,
      .transposed = e->transposed,
      .next_k = next,
      .next_bytes = TD_ATTN_KEYS * run->entry_bytes,
      .ldq = k_dim,
      .ldk = k_dim,
      .ldv = a->v_dim,
      .ldacc = a->v_dim,
      .n_q = tile->n,
      .k_dim = k_dim,
      .v_dim = a->v_dim,
  });
}

static void expanded_item(void *ctx, size_t item, unsigned member) {
  const mla_run *run = ctx;
  const td_attn_mla_args *a = run->a;
  const td_attn_tile *tile = &run->tiles[item / a->n_heads];
  uint32_t head = (uint32_t)(item % a->n_heads);
  char *piece = run->member + member * run->member_bytes;
  float *q = (float *)piece;
  td_attn_state total = td_attn_state_at(piece + run->query_bytes, tile->n, a->v_dim);
  td_attn_state part = td_attn_state_at(piece + run->query_bytes + run->state_bytes, tile->n,
                                        a->v_dim);
  float *latent = (float *)(piece + run->query_bytes + 2 * run->state_bytes);
  expansion e = {.latent = latent, .k = latent + (size_t)TD_ATTN_KEYS * run->entry_dim};
  e.transposed = e.k + (size_t)TD_ATTN_KEYS * (a->nope_dim + a->rope_dim);
  e.v = e.transposed + (size_t)TD_ATTN_KEYS * (a->nope_dim + a->rope_dim);

  load_queries(run, tile, head, q);
  td_attn_state_reset(&total, tile->n, a->v_dim);
  td_attn_state_reset(&part, tile->n, a->v_dim);
  uint32_t n_keys = td_attn_n_keys(&a->batch, tile);
  for (uint32_t begin = 0; begin < n_keys;) {
    uint32_t end = td_attn_block_end(begin, a->batch.page_tokens, n_keys);
    const char *next = end < n_keys ? entries_at(run, tile, end) : NULL;
    expand_block(run, tile, head, begin, end - begin, &e);
    attend_block(run, tile, q, &e, begin, end, next, &part);
    if (end % ATTN_SPLIT == 0 || end == n_keys) {
      td_attn_merge(&total, &part, tile->n, a->v_dim);
      td_attn_state_reset(&part, tile->n, a->v_dim);
    }
    begin = end;
  }
  for (uint32_t i = 0; i < tile->n; i++) {
    float *out = (float *)a->out + ((size_t)(tile->token + i) * a->n_heads + head) * a->v_dim;
    const float *acc = total.acc + (size_t)i * a->v_dim;
    for (uint32_t d = 0; d < a->v_dim; d++)
      out[d] = acc[d] / total.l[i];
  }
}

static td_status run_expanded(td_cpu_stream *stream, mla_run *run, td_err *err) {
  const td_attn_mla_args *a = run->a;
  const unsigned n_threads = td_thread_pool_size(td_cpu_dev_of(stream)->pool);
  uint32_t n_queries = EXPANDED_QUERIES, n_tiles;
  td_attn_tile *tiles;
  td_status status;
  for (;; n_queries /= 2) {
    status = td_attn_make_tiles(stream, &a->batch, n_queries, &tiles, &n_tiles, err);
    if (status != TD_OK) return status;
    if ((size_t)n_tiles * a->n_heads >= n_threads || n_queries == MIN_QUERIES) break;
  }
  run->tiles = tiles;
  size_t query_floats = (size_t)n_queries * (a->nope_dim + a->rope_dim);
  run->query_bytes = (query_floats * sizeof(float) + 63) & ~(size_t)63;
  run->state_bytes = td_attn_state_bytes(n_queries, a->v_dim);
  const size_t expansion_floats = (size_t)TD_ATTN_KEYS *
                                  (a->kv_lora_rank + a->rope_dim + 2 * (a->nope_dim + a->rope_dim) +
                                   a->v_dim);
  const size_t expansion_bytes = (expansion_floats * sizeof(float) + 63) & ~(size_t)63;
  run->member_bytes = run->query_bytes + 2 * run->state_bytes + expansion_bytes;
  void *member;
  status = td_cpu_scratch(stream, SCRATCH_MEMBER, n_threads * run->member_bytes, &member, err);
  if (status != TD_OK) return status;
  run->member = member;
  td_cpu_for(stream, (size_t)n_tiles * a->n_heads, expanded_item, run);
  return TD_OK;
}

// Tokens [token, token + n) of a sequence as a batch of their own; q_begin holds its bounds.
static td_attn_mla_args part_of(const td_attn_mla_args *a, uint32_t seq, uint32_t token, uint32_t n,
                                int32_t q_begin[2]) {
  td_attn_mla_args part = *a;
  q_begin[0] = 0;
  q_begin[1] = (int32_t)n;
  part.batch.q_begin = q_begin;
  part.batch.position += token;
  part.batch.page_table += (size_t)seq * a->batch.max_pages;
  part.batch.n_tokens = n;
  part.batch.n_seqs = 1;
  part.q = (const float *)a->q + (size_t)token * a->n_heads * (a->nope_dim + a->rope_dim);
  part.selected += (size_t)token * a->top_k;
  part.out = (float *)a->out + (size_t)token * a->n_heads * a->v_dim;
  return part;
}

// A sequence's tokens of a prompt, of which the first see all keys and the others a selection.
static td_status run_selecting(td_cpu_stream *stream, const mla_run *run, uint32_t seq,
                               td_err *err) {
  const td_attn_mla_args *a = run->a;
  uint32_t token = (uint32_t)a->batch.q_begin[seq], end = (uint32_t)a->batch.q_begin[seq + 1];
  const uint64_t n_all = td_most_selected(a->top_k, a->group); // first positions, which see all
  td_status status = TD_OK;
  for (uint32_t n; token < end && status == TD_OK; token += n) {
    const uint32_t position = (uint32_t)a->batch.position[token];
    const bool sees_all = position < n_all;
    const uint64_t most = sees_all ? n_all - position : SELECTING_TOKENS;
    n = end - token < most ? end - token : (uint32_t)most;
    int32_t q_begin[2];
    const td_attn_mla_args part = part_of(a, seq, token, n, q_begin);
    mla_run of_part = *run;
    of_part.a = &part;
    status = sees_all ? run_expanded(stream, &of_part, err) : run_absorbed(stream, &of_part, err);
  }
  return status;
}

td_status td_cpu_op_attn_mla(td_cpu_stream *stream, const td_attn_mla_args *a, td_err *err) {
  mla_run run = {.a = a, .entry_dim = a->kv_lora_rank + a->rope_dim};
  const td_kv_rows rows = td_mla_rows(&a->kv, run.entry_dim);
  td_status status = td_cpu_check_batch(&a->batch, &a->kv, rows, err);
  if (status == TD_OK) status = td_cpu_check_weight(a->kv_b, "kv_b", err);
  if (status == TD_OK) status = td_dev_check_attn_mla(a, err);
  if (status != TD_OK) return status;
  if (a->batch.n_tokens == 0) return TD_OK;
  run.entry_bytes = a->kv.dtype == TD_F8E4M3 ? td_kv_f8_row_bytes(&rows)
                                             : run.entry_dim * td_dtype_bytes(a->kv.dtype);
  if (a->absorbed) return run_absorbed(stream, &run, err);
  if (!a->selected) return run_expanded(stream, &run, err);
  for (uint32_t s = 0; s < a->batch.n_seqs && status == TD_OK; s++)
    status = run_selecting(stream, &run, s, err);
  return status;
}
