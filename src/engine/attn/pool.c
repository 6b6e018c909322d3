// src/engine/attn/pool.c - attention over a window and pooled keys (DeepSeek-V4, "CSA" and "HCA"):
// one key for all heads, which is the value, too. Layers have the window alone (near), keys pooled
// of many positions beside it (pool), or of few, of which an indexer selects the best (pool_top).
// All of a layer's cache is a state of its pages (td_pool_places).
//
// Values are rotated, being keys; the output is rotated back by the query's position.
#include <math.h>

#include "engine/attn/kinds.h"
#include "engine/draft.h"

// The microbatch's rows. mixed: keys, then an indexer's queries. words: what is pooled, x and gate
// and an indexer's x and gate, in f32, for the gates are exponents; then selections, then weights.
typedef struct {
  void *h, *q_a, *q, *out;
  char *key, *index_q;
  float *x, *gate, *index_x, *index_gate;
  size_t stride; // floats of a row of x
  float *weights;
  int32_t *selected;
} pool_rows;

static pool_rows rows_of(const td_engine *e, const td_microbatch *p, td_attn_kind kind) {
  const td_model_config *c = e->config;
  const bool is_top = kind == TD_ATTN_POOL_TOP;
  const size_t of_pool = kind == TD_ATTN_NEAR ? 0 : (is_top ? 2 : 1) * (size_t)c->head_dim;
  const size_t of_index = is_top ? 2 * (size_t)c->index_dim : 0;
  const size_t of_q = is_top ? (size_t)c->index_heads * c->index_dim : 0;
  const size_t n = e->opts.max_step_tokens, stride = 2 * (of_pool + of_index);
  pool_rows at = {.h = td_rows_at(e, p, e->h, c->dim),
                  .q_a = td_rows_at(e, p, e->act[TD_ACT_Q_A], c->q_lora_rank),
                  .q = td_rows_at(e, p, e->act[TD_ACT_Q], (size_t)c->n_heads * c->head_dim),
                  .out = td_rows_at(e, p, e->act[TD_ACT_OUT], (size_t)c->o_groups * c->o_lora_rank),
                  .stride = stride};
  at.key = td_rows_at(e, p, e->act[TD_ACT_MIXED], c->head_dim + of_q);
  at.index_q = td_rows_offset(e, at.key, n * c->head_dim);
  at.x = (float *)e->act_words + p->begin * stride;
  at.gate = at.x + of_pool;
  at.index_x = at.gate + of_pool;
  at.index_gate = at.index_x + of_index;
  if (!is_top) return at;
  int32_t *selected = (int32_t *)e->act_words + n * stride;
  at.selected = selected + (size_t)p->begin * c->index_top_k;
  at.weights = (float *)selected + n * c->index_top_k + (size_t)p->begin * c->index_heads;
  return at;
}

static const float *angles_of(const td_engine *e, td_attn_kind kind) {
  return kind == TD_ATTN_NEAR ? e->cos_sin : e->pool_cos_sin;
}

// Rotates the last rope_dim elements of n_heads heads of dim elements.
static void rotate(td_engine *e, const td_microbatch *p, const float *angles, void *x,
                   size_t stride, uint32_t n_heads, uint32_t dim, bool backwards) {
  const td_model_config *c = e->config;
  void *first = td_rows_offset(e, x, dim - c->rope_dim);
  td_op_rope(
      e->stream,
      &(td_rope_args){
          .heads = {.x = first, .token_stride = stride, .head_stride = dim, .n_heads = n_heads},
          .cos_sin = angles,
          .position = p->position,
          .n_tokens = p->n_tokens,
          .rot_dim = c->rope_dim,
          .interleaved = true,
          .backwards = backwards});
}

static void project_index(td_engine *e, const td_microbatch *p, const td_layer *layer,
                          const pool_rows *at) {
  const td_model_config *c = e->config;
  const size_t q_dim = (size_t)c->index_heads * c->index_dim;
  td_rows_linear_f32(e, p, &layer->index_pool.x, at->h, at->index_x, at->stride);
  td_rows_linear_f32(e, p, &layer->index_pool.gate, at->h, at->index_gate, at->stride);
  td_rows_linear(e, p, &layer->index_q, (td_vec){0}, at->q_a, c->q_lora_rank, at->index_q);
  rotate(e, p, e->pool_cos_sin, at->index_q, q_dim, c->index_heads, c->index_dim, false);
  td_rows_linear_exact(e, p, &layer->index_weights, at->h, at->weights);
}

static void project(td_engine *e, const td_microbatch *p, const td_layer *layer) {
  const td_model_config *c = e->config;
  const td_attn_kind kind = layer->kind;
  const pool_rows at = rows_of(e, p, kind);
  const uint32_t q_dim = c->n_heads * c->head_dim;
  const td_vec none = {0};
  if (!p->n_tokens) return;
  td_rows_linear(e, p, &layer->q_a, none, at.h, c->dim, at.q_a);
  td_rows_norm(e, at.q_a, layer->q_a_norm, c->q_lora_rank, p->n_tokens, c->rms_eps);
  td_rows_linear(e, p, &layer->q_b, none, at.q_a, c->q_lora_rank, at.q);
  td_rows_norm(e, at.q, (td_vec){.n = c->head_dim}, c->head_dim, p->n_tokens * c->n_heads,
               c->rms_eps);
  td_rows_linear(e, p, &layer->k, none, at.h, c->dim, at.key);
  td_rows_norm(e, at.key, layer->k_norm, c->head_dim, p->n_tokens, c->rms_eps);
  rotate(e, p, angles_of(e, kind), at.q, q_dim, c->n_heads, c->head_dim, false);
  rotate(e, p, angles_of(e, kind), at.key, c->head_dim, 1, c->head_dim, false);
  if (kind == TD_ATTN_NEAR) return;
  td_rows_linear_f32(e, p, &layer->pool.x, at.h, at.x, at.stride);
  td_rows_linear_f32(e, p, &layer->pool.gate, at.h, at.gate, at.stride);
  if (kind == TD_ATTN_POOL_TOP) project_index(e, p, layer, &at);
}

// Nothing: the operators of attend write the state.
static void store(td_engine *e, const td_attn_store *s) {
  (void)e, (void)s;
}

static void pool(td_engine *e, const step_group *group, td_kv_view state, td_state_trail trail,
                 const td_pool_weights *w, const pool_rows *at, bool is_index, td_attn_kind kind) {
  const td_model_config *c = e->config;
  const td_pool_places places = td_attn_pool_places(c, kind, e->layout.page_tokens);
  const size_t first = group->token_begin * at->stride;
  td_op_pool(e->stream,
             &(td_pool_args){.batch = group->view,
                             .state = state,
                             .trail = trail,
                             .trail_at = is_index ? places.index_open - places.open : 0,
                             .x = (is_index ? at->index_x : at->x) + first,
                             .gate = (is_index ? at->index_gate : at->gate) + first,
                             .stride = at->stride,
                             .bias = w->bias,
                             .norm = w->norm,
                             .cos_sin = e->pool_cos_sin,
                             .open_at = is_index ? places.index_open : places.open,
                             .entry_at = is_index ? places.index_entries : places.entries,
                             .dim = is_index ? c->index_dim : c->head_dim,
                             .rot_dim = c->rope_dim,
                             .group = places.group,
                             .overlaps = kind == TD_ATTN_POOL_TOP,
                             .eps = c->rms_eps});
}

static void select_keys(td_engine *e, const step_group *group, td_kv_view state,
                        td_state_trail trail, const td_layer *layer, const pool_rows *at) {
  const td_model_config *c = e->config;
  const td_pool_places places = td_attn_pool_places(c, TD_ATTN_POOL_TOP, e->layout.page_tokens);
  const size_t t = group->token_begin;
  pool(e, group, state, trail, &layer->index_pool, at, true, TD_ATTN_POOL_TOP);
  state.pages += places.index_entries * sizeof(float);
  td_select_args args = td_index_selection(e, group, state, at->index_q);
  args.weights = at->weights + t * c->index_heads;
  args.selected = at->selected + t * c->index_top_k;
  args.group = places.group;
  td_op_select(e->stream, &args);
}

// A group of heads is projected by its rows of o_a.
static void project_out(td_engine *e, const td_microbatch *p, const td_layer *layer,
                        const pool_rows *at) {
  const td_model_config *c = e->config;
  const size_t q_dim = (size_t)c->n_heads * c->head_dim, of_group = q_dim / c->o_groups;
  for (uint32_t g = 0; g < c->o_groups; g++) {
    td_op_linear(e->stream,
                 &(td_linear_op_args){.w = &layer->o_a,
                                      .x = td_rows_offset(e, at->q, g * of_group),
                                      .y = td_rows_offset(e, at->out, g * c->o_lora_rank),
                                      .x_stride = q_dim,
                                      .y_stride = (size_t)c->o_groups * c->o_lora_rank,
                                      .n_tokens = p->n_tokens,
                                      .n_prompt = p->groups[GROUP_PREFILL].view.n_tokens,
                                      .row_begin = g * c->o_lora_rank,
                                      .n_rows = c->o_lora_rank,
                                      .weights_on_device = td_engine_is_in_slot(e, &layer->o_a)});
  }
}

static void attend(td_engine *e, const td_microbatch *p, const td_layer *layer,
                   uint32_t layer_idx) {
  const td_model_config *c = e->config;
  const td_attn_kind kind = layer->kind;
  const pool_rows at = rows_of(e, p, kind);
  const td_pool_places places = td_attn_pool_places(c, kind, e->layout.page_tokens);
  const size_t q_dim = (size_t)c->n_heads * c->head_dim;
  if (!p->n_tokens) return;
  for (int g = 0; g < N_GROUPS; g++) {
    const step_group *group = &p->groups[g];
    const size_t t = group->token_begin;
    const td_kv_view state = td_engine_kv_view(e, layer_idx);
    if (!group->view.n_tokens) continue;
    const td_state_trail trail = td_engine_trail(e, layer_idx, g);
    if (kind != TD_ATTN_NEAR) pool(e, group, state, trail, &layer->pool, &at, false, kind);
    if (kind == TD_ATTN_POOL_TOP) select_keys(e, group, state, trail, layer, &at);
    td_op_attn_pool(
        e->stream,
        &(td_attn_pool_args){.batch = group->view,
                             .state = state,
                             .q = td_rows_offset(e, at.q, t * q_dim),
                             .key = td_rows_offset(e, at.key, t * c->head_dim),
                             .key_stride = c->head_dim,
                             .sinks = layer->sinks,
                             .selected = at.selected ? at.selected + t * c->index_top_k : NULL,
                             .entry_at = places.entries,
                             .n_heads = c->n_heads,
                             .dim = c->head_dim,
                             .window = c->window,
                             .ring = places.ring,
                             .group = places.group,
                             .top_k = c->index_top_k,
                             .scale = (float)(1 / sqrt(c->head_dim))});
  }
  rotate(e, p, angles_of(e, kind), at.q, q_dim, c->n_heads, c->head_dim, true);
  project_out(e, p, layer, &at);
}

// ---- what follows from the configuration --------------------------------------------------------

td_pool_places td_attn_pool_places(const td_model_config *c, td_attn_kind kind,
                                   uint32_t page_tokens) {
  td_pool_places out = {.ring = c->window + TD_DRAFT_MAX};
  out.open = (size_t)out.ring * c->head_dim;
  const bool is_top = kind == TD_ATTN_POOL_TOP;
  if (kind != TD_ATTN_NEAR) out.group = is_top ? c->pool_top_group : c->pool_group;
  const uint32_t n_open = is_top ? 2 : out.group ? 1 : 0;
  out.index_open = out.open + (size_t)n_open * TD_POOL_RUNNING * c->head_dim;
  out.entries = out.index_open + (is_top ? (size_t)n_open * TD_POOL_RUNNING * c->index_dim : 0);
  out.index_entries = out.entries;
  if (is_top) out.index_entries += (size_t)td_pool_entries(page_tokens, out.group) * c->head_dim;
  return out;
}

static td_attn_cache pooled_cache(const td_model_config *c, td_attn_kind kind) {
  const td_pool_places at = td_attn_pool_places(c, kind, 1);
  const uint32_t key = c->head_dim + (kind == TD_ATTN_POOL_TOP ? c->index_dim : 0);
  return (td_attn_cache){.state_bytes = at.entries * sizeof(float),
                         .pool_group = at.group,
                         .pool_bytes = key * sizeof(float),
                         .undo_at = at.open * sizeof(float),
                         .undo_bytes = (at.entries - at.open) * sizeof(float)};
}

static td_attn_cache near_cache(const td_model_config *c) {
  return pooled_cache(c, TD_ATTN_NEAR);
}

static td_attn_cache pool_cache(const td_model_config *c) {
  return pooled_cache(c, TD_ATTN_POOL);
}

static td_attn_cache pool_top_cache(const td_model_config *c) {
  return pooled_cache(c, TD_ATTN_POOL_TOP);
}

static td_attn_rows near_act(const td_model_config *c) {
  return (td_attn_rows){.act = {[TD_ACT_Q] = (size_t)c->n_heads * c->head_dim,
                                [TD_ACT_Q_A] = c->q_lora_rank,
                                [TD_ACT_OUT] = (size_t)c->o_groups * c->o_lora_rank,
                                [TD_ACT_MIXED] = c->head_dim}};
}

static td_attn_rows pool_act(const td_model_config *c) {
  td_attn_rows out = near_act(c);
  out.words = 2 * (size_t)c->head_dim;
  return out;
}

static td_attn_rows pool_top_act(const td_model_config *c) {
  td_attn_rows out = near_act(c);
  out.act[TD_ACT_MIXED] += c->index_heads * (size_t)c->index_dim;
  out.words = 4 * ((size_t)c->head_dim + c->index_dim) + c->index_top_k + c->index_heads;
  return out;
}

static double near_flops(const td_model_config *c, double n, double n_past) {
  const double seen = n_past + n / 2 < c->window ? n_past + n / 2 : c->window;
  return 4 * n * seen * c->n_heads * c->head_dim;
}

static double pool_flops(const td_model_config *c, double n, double n_past) {
  return near_flops(c, n, n_past) +
         td_attn_pair_flops(c->n_heads, 2.0 * c->head_dim, n, n_past) / c->pool_group;
}

static double pool_top_flops(const td_model_config *c, double n, double n_past) {
  const double seen = (n_past + n / 2) / c->pool_top_group;
  const double n_top = seen < c->index_top_k ? seen : c->index_top_k;
  return near_flops(c, n, n_past) + 4 * n * n_top * c->n_heads * c->head_dim +
         td_attn_pair_flops(c->index_heads, c->index_dim, n, n_past) / c->pool_top_group;
}

void td_attn_describe_window(const td_model_config *c, td_buf *out) {
  td_buf_printf(out,
                "attention     %u heads, one key and value, %u wide, %u rotary, of the last %u "
                "positions\n",
                c->n_heads, c->head_dim, c->rope_dim, c->window);
}

static void near_describe(const td_model_config *c, td_buf *out) {
  td_buf_printf(out, "window        alone in %u of the %u layers\n",
                td_model_n_attn(c, TD_ATTN_NEAR), c->n_layers);
}

static void pool_describe(const td_model_config *c, td_buf *out) {
  td_buf_printf(out, "pooled keys   of %u positions each, in %u of the %u layers\n", c->pool_group,
                td_model_n_attn(c, TD_ATTN_POOL), c->n_layers);
}

static void pool_top_describe(const td_model_config *c, td_buf *out) {
  td_buf_printf(out,
                "selection     %u pooled keys of %u positions each, by %u heads, %u wide, in %u of "
                "the %u layers\n",
                c->index_top_k, c->pool_top_group, c->index_heads, c->index_dim,
                td_model_n_attn(c, TD_ATTN_POOL_TOP), c->n_layers);
}

static const char window[] = "a window beside pooled keys";

#define KIND(name)                                                                                 \
  {                                                                                                \
    {name##_cache, name##_act, name##_flops, name##_describe, 512, true, window}, project, store,  \
        attend                                                                                     \
  }
const td_attn_ops td_attn_near = KIND(near);
const td_attn_ops td_attn_pool = KIND(pool);
const td_attn_ops td_attn_pool_top = KIND(pool_top);
