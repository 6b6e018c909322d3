// src/engine/experts/expert_cache.c - a cache of whole experts on the engine's device, for decode
// with the routed experts on the expert device. A layer's cached experts are computed where they
// are cached, the others on the expert device, at the same time; the results are added in the
// router's order, so the cache's state decides who computes a pair, not how its result enters the
// sum. Which experts are cached is a table in the step's metadata (expert -> slot), so that
// replayed steps need not change with the cache.
//
// Experts move between steps: after a step a few that it missed are copied to slots by a stream
// of their own, while later steps run; an expert is used from the first step that begins after its
// copies are done. Prefill neither uses the cache nor changes it.
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/units.h"
#include "engine/engine_impl.h"
#include "engine/experts/expert_peer.h"
#include "engine/experts/expert_slots.h"
#include "engine/experts/hot_experts.h"

enum {
  STEP_BYTES = 128 << 20, // about 2.5 ms of a PCIe 5 link
  MAX_MOVES = 64,         // in flight
};

// Slots in a device's memory.
typedef struct {
  td_dev *dev;
  uint32_t first_slot, n_slots; // they are [first_slot, first_slot + n_slots) of the cache's
  char *slots;                  // device memory: [n_slots][slot_bytes]
  td_weight *gate;              // [3][n_slots]: gate, up, down, with addresses in their slots
  td_stream *stream;            // for the copies
  td_event *moved;              // recorded after the moves
} cache_site;

enum { SITE_HERE, SITE_PEER, N_SITES };

struct td_expert_cache {
  td_hot_experts *hot;
  uint32_t n_slots; // of both sites
  size_t slot_bytes;
  td_slot_part layout[TD_SLOT_EXPERT_PARTS]; // offsets in a slot
  const td_layer *kind;                      // cached layers have experts like this one's
  bool is_layer[TD_MAX_LAYERS];              // layers whose experts are cached
  bool is_any;
  uint8_t pair_share[TD_MAX_LAYERS]; // td_pair_share
  cache_site sites[N_SITES];
  float *here;                  // device memory: [max_step_seqs][top_k][dim], results of the cached
  void *sum;                    // device memory: [max_step_seqs][dim]
  float *there;                 // td_dev_alloc_host: [max_step_seqs][top_k][dim], of the others
  int32_t *routing;             // [n_layers][max_step_seqs][top_k]: what the step chose
  td_hot_move moves[MAX_MOVES]; // in flight
  uint32_t n_moves, max_moves;
};

// ---- sizes --------------------------------------------------------------------------------------

static size_t pair_row_bytes(const td_model_config *c) {
  return (size_t)c->top_k * c->dim * sizeof(float);
}

uint32_t td_expert_cache_slots(uint64_t cache_bytes, uint64_t expert_bytes,
                               const td_model_config *c, uint32_t max_step_seqs,
                               td_dtype act_dtype) {
  const uint64_t row = pair_row_bytes(c) + (uint64_t)c->dim * td_dtype_bytes(act_dtype);
  const uint64_t buffers = row * max_step_seqs;
  if (!expert_bytes || cache_bytes < buffers + expert_bytes) return 0;
  const uint64_t n = (cache_bytes - buffers) / expert_bytes;
  const uint64_t all = (uint64_t)c->n_layers * c->n_experts;
  return (uint32_t)(n < all ? n : all);
}

static bool is_alike(const td_weight *a, const td_weight *b) {
  return a->dtype == b->dtype && a->scale_dtype == b->scale_dtype && a->rows == b->rows &&
         a->cols == b->cols && a->scale_rows == b->scale_rows && a->scale_cols == b->scale_cols &&
         a->global_scale == b->global_scale && !a->scale == !b->scale && !a->zero == !b->zero;
}

static bool is_taken(const td_engine *e, const td_layer *layer, uint32_t expert) {
  const td_layer *kind = e->cache->kind;
  const td_weight *const of[] = {layer->gate, layer->up, layer->down};
  const td_weight *const like[] = {kind->gate, kind->up, kind->down};
  for (size_t i = 0; i < TD_COUNT(of); i++) {
    if (!of[i] && !like[i]) continue; // gate and up are one matrix
    if (!of[i] || !like[i] || !is_alike(&of[i][expert], like[i]) ||
        !td_dev_supports_device_weights(e->dev, &of[i][expert]))
      return false;
  }
  return true;
}

// A layer is cached if the device takes all its experts as they are stored, in the shapes and
// formats of the first cached layer, so that any slot takes any expert.
static void choose_layers(td_engine *e) {
  td_expert_cache *cache = e->cache;
  for (uint32_t i = 0; i < e->config->n_layers; i++) {
    const td_layer *layer = td_model_layer(e->model, i);
    if (!td_engine_is_offloaded(e, i)) continue;
    if (!cache->kind) cache->kind = layer;
    bool all = true;
    for (uint32_t k = 0; k < e->config->n_experts && all; k++)
      all = is_taken(e, layer, k);
    cache->is_layer[i] = all;
    cache->is_any |= all;
    if (!all && cache->kind == layer) cache->kind = NULL;
  }
}

// ---- open and close -----------------------------------------------------------------------------

static bool has_peer(const td_engine *e) {
  return e->cache->sites[SITE_PEER].n_slots > 0;
}

static void place_slots(const td_expert_cache *cache, cache_site *site) {
  const td_weight *kind[] = {cache->kind->gate, cache->kind->up, cache->kind->down};
  for (uint32_t m = 0; m < TD_COUNT(kind); m++) {
    const td_slot_part *parts = cache->layout + (size_t)m * TD_SLOT_MATRIX_PARTS;
    for (uint32_t i = 0; kind[m] && i < site->n_slots; i++) {
      site->gate[m * site->n_slots + i] = td_slot_placed(kind[m], parts,
                                                         site->slots + i * cache->slot_bytes);
    }
  }
}

// NULL: gate and up are one matrix.
static const td_weight *up_of(const td_expert_cache *cache, const cache_site *site) {
  return cache->kind->up ? site->gate + site->n_slots : NULL;
}

static td_status open_site(const td_expert_cache *cache, cache_site *site, td_err *err) {
  if (!site->n_slots) return TD_OK;
  site->gate = malloc(3 * (size_t)site->n_slots * sizeof *site->gate);
  if (!site->gate) return td_fail(err, TD_ENOMEM, "out of memory: the cache of experts");
  td_status st = td_stream_open(&site->stream, site->dev, err);
  if (st == TD_OK) st = td_event_open(&site->moved, site->dev, err);
  if (st == TD_OK)
    st = td_dev_alloc(site->dev, (void **)&site->slots, site->n_slots * cache->slot_bytes, err);
  if (st == TD_OK) place_slots(cache, site);
  return st;
}

static void close_site(cache_site *site) {
  if (!site->dev) return;
  td_stream_close(site->stream);
  if (site->moved) td_event_close(site->moved);
  td_dev_free(site->dev, site->slots);
  free(site->gate);
}

static td_status alloc_buffers(td_engine *e, td_err *err) {
  td_expert_cache *cache = e->cache;
  const td_model_config *c = e->config;
  const size_t n = e->opts.max_step_seqs, pairs_bytes = n * pair_row_bytes(c);
  cache->routing = malloc(c->n_layers * n * c->top_k * sizeof *cache->routing);
  if (!cache->routing) return td_fail(err, TD_ENOMEM, "out of memory: the cache of experts");
  td_status st = td_dev_alloc(e->dev, (void **)&cache->here, pairs_bytes, err);
  if (st == TD_OK) st = td_dev_alloc_host(e->dev, (void **)&cache->there, pairs_bytes, err);
  if (st == TD_OK) st = td_dev_alloc(e->dev, &cache->sum, n * c->dim * e->act_bytes, err);
  for (int i = 0; i < N_SITES && st == TD_OK; i++)
    st = open_site(cache, &cache->sites[i], err);
  if (st != TD_OK || !has_peer(e)) return st;
  const cache_site *site = &cache->sites[SITE_PEER];
  return td_expert_peer_open(e,
                             &(td_peer_experts){.gate = site->gate,
                                                .up = up_of(cache, site),
                                                .down = site->gate + 2 * (size_t)site->n_slots,
                                                .n_slots = site->n_slots},
                             err);
}

static uint32_t count_experts(const td_engine *e) {
  uint32_t n_layers = 0;
  for (uint32_t i = 0; i < e->config->n_layers; i++)
    n_layers += e->cache->is_layer[i];
  return n_layers * e->config->n_experts;
}

static td_status sync_sites(td_engine *e, td_err *err) {
  td_status st = TD_OK;
  for (int i = 0; i < N_SITES; i++) {
    cache_site *site = &e->cache->sites[i];
    if (site->n_slots && st == TD_OK) st = td_stream_sync(site->stream, err);
  }
  return st;
}

// Queues the expert's copies. False: they would be slow, since its memory is not registered yet.
static bool begin_move(td_engine *e, const td_hot_move *move, bool may_be_slow) {
  td_expert_cache *cache = e->cache;
  const bool is_here = move->slot < cache->sites[SITE_PEER].first_slot;
  cache_site *site = &cache->sites[is_here ? SITE_HERE : SITE_PEER];
  td_slot_part parts[TD_SLOT_EXPERT_PARTS];
  td_slot_list_expert(parts, td_model_layer(e->model, move->layer_idx), move->expert);
  for (uint32_t i = 0; i < TD_COUNT(parts) && !may_be_slow; i++)
    if (parts[i].n_bytes && td_dev_is_pinning(site->dev, parts[i].from, parts[i].n_bytes))
      return false;
  char *base = site->slots + (move->slot - site->first_slot) * cache->slot_bytes;
  for (uint32_t i = 0; i < TD_COUNT(parts); i++)
    if (parts[i].n_bytes)
      td_op_copy(site->stream, base + cache->layout[i].to, parts[i].from, parts[i].n_bytes);
  return true;
}

// Fills all slots for good.
static td_status fill(td_engine *e, td_err *err) {
  td_expert_cache *cache = e->cache;
  td_hot_move *moves = malloc(cache->n_slots * sizeof *moves);
  if (!moves) return td_fail(err, TD_ENOMEM, "out of memory: the cache of experts");
  const uint32_t n = td_hot_experts_fill(cache->hot, cache->is_layer,
                                         cache->sites[SITE_HERE].n_slots, moves);
  for (uint32_t i = 0; i < n; i++)
    begin_move(e, &moves[i], true);
  const td_status st = sync_sites(e, err);
  for (uint32_t i = 0; i < n && st == TD_OK; i++)
    td_hot_experts_publish(cache->hot, &moves[i]);
  free(moves);
  return st;
}

// Which layers need the expert device beside the peer: all, unless the cache is fixed.
static void note_shares(td_engine *e) {
  td_expert_cache *cache = e->cache;
  const int32_t *table = td_hot_experts_table(cache->hot);
  const uint32_t n_experts = e->config->n_experts;
  for (uint32_t i = 0; i < e->config->n_layers && has_peer(e); i++) {
    uint32_t n = 0, n_peer = 0;
    for (uint32_t k = 0; k < n_experts; k++) {
      const int32_t slot = table[(size_t)i * n_experts + k];
      n += slot >= 0;
      n_peer += slot >= (int32_t)cache->sites[SITE_PEER].first_slot;
    }
    const bool is_fixed = e->opts.is_cache_fixed;
    if (!cache->is_layer[i] || (is_fixed && !n_peer)) continue;
    cache->pair_share[i] = is_fixed && n == n_experts ? TD_PAIR_ALL : TD_PAIR_SOME;
  }
}

static void log_size(const td_engine *e) {
  const td_expert_cache *cache = e->cache;
  td_info("%s: a cache of %u of %u experts, %s, for decode", td_dev_name(e->dev), cache->n_slots,
          count_experts(e), td_size((double)cache->n_slots * (double)cache->slot_bytes).text);
  if (has_peer(e))
    td_info("%s: %u of these experts", td_dev_name(e->opts.cache_peer),
            cache->sites[SITE_PEER].n_slots);
}

// Half of a layer's experts are expected on the peer, or all where the engine's device has none.
static bool does_peer_pay(const td_engine *e, uint32_t n_here) {
  const td_model_config *c = e->config;
  const td_pair_layer layer = {.dim = c->dim,
                               .top_k = c->top_k,
                               .n_experts = c->n_experts,
                               .n_peer = n_here ? c->n_experts / 2 : c->n_experts,
                               .expert_bytes = e->cache->slot_bytes};
  const td_pair_time t = td_pair_time_of(&layer, &td_pair_usual);
  if (td_pair_pays(&t)) return true;
  td_info("%s computes no experts of decode: a layer's would save %.0f us and take %.0f",
          td_dev_name(e->opts.cache_peer), t.saved_s * 1e6, (t.peer_s + t.sent_s) * 1e6);
  return false;
}

static uint32_t slots_of_peer(const td_engine *e, uint32_t n_here) {
  const size_t beside = td_expert_peer_bytes(e), n_bytes = e->opts.peer_cache_bytes;
  if (!e->opts.cache_peer || n_bytes < beside + e->cache->slot_bytes) return 0;
  if (!e->opts.peer_always && !does_peer_pay(e, n_here)) return 0;
  return (uint32_t)((n_bytes - beside) / e->cache->slot_bytes);
}

// As many slots as there are experts; the peer has no more than half if both devices can.
static void divide_slots(td_engine *e) {
  td_expert_cache *cache = e->cache;
  cache_site *here = &cache->sites[SITE_HERE], *peer = &cache->sites[SITE_PEER];
  const uint32_t all = count_experts(e);
  here->n_slots = td_expert_cache_slots(e->opts.cache_bytes, cache->slot_bytes, e->config,
                                        e->opts.max_step_seqs, td_dev_act_dtype(e->dev));
  peer->n_slots = slots_of_peer(e, here->n_slots);
  if (peer->n_slots > all / 2) {
    const uint32_t rest = here->n_slots < all ? all - here->n_slots : 0;
    if (peer->n_slots > rest) peer->n_slots = rest > all / 2 ? rest : all / 2;
  }
  if (here->n_slots > all - peer->n_slots) here->n_slots = all - peer->n_slots;
  here->dev = e->dev;
  peer->dev = e->opts.cache_peer;
  peer->first_slot = here->n_slots;
  cache->n_slots = here->n_slots + peer->n_slots;
  cache->is_any = cache->n_slots > 0;
}

static td_status open_slots(td_engine *e, td_err *err) {
  td_expert_cache *cache = e->cache;
  const size_t step_bytes = e->opts.cache_step_bytes ? e->opts.cache_step_bytes : STEP_BYTES;
  const size_t n = step_bytes / cache->slot_bytes;
  cache->max_moves = n < 1 ? 1 : n < MAX_MOVES ? (uint32_t)n : MAX_MOVES;
  if (e->opts.is_cache_fixed) cache->max_moves = 0;
  td_status st = td_hot_experts_open(&cache->hot, e->config->n_layers, e->config->n_experts,
                                     cache->n_slots, err);
  if (st == TD_OK) st = alloc_buffers(e, err);
  if (st == TD_OK && e->opts.is_cache_fixed) st = fill(e, err);
  if (st == TD_OK) note_shares(e);
  if (st == TD_OK) log_size(e);
  return st;
}

static td_status open_cache(td_engine *e, td_err *err) {
  td_expert_cache *cache = e->cache;
  choose_layers(e);
  if (!cache->is_any) {
    td_info("%s: no experts are cached: their formats differ, or would have to be repacked",
            td_dev_name(e->dev));
    return TD_OK;
  }
  td_slot_list_expert(cache->layout, cache->kind, 0);
  cache->slot_bytes = td_slot_lay_out(cache->layout, TD_COUNT(cache->layout));
  divide_slots(e);
  if (cache->is_any) return open_slots(e, err);
  td_info("%s: no experts are cached: %.0f MiB are left for them (--expert-cache)",
          td_dev_name(e->dev), td_mib(e->opts.cache_bytes));
  return TD_OK;
}

td_status td_expert_cache_open(td_engine *e, td_err *err) {
  if ((!e->opts.cache_bytes && !e->opts.cache_peer) || !e->offload.dev) return TD_OK;
  e->cache = calloc(1, sizeof *e->cache);
  return e->cache ? open_cache(e, err) : td_fail(err, TD_ENOMEM, "out of memory");
}

void td_expert_cache_close(td_engine *e) {
  td_expert_cache *cache = e->cache;
  if (!cache) return;
  td_expert_peer_close(e);
  for (int i = 0; i < N_SITES; i++)
    close_site(&cache->sites[i]);
  td_dev_free(e->dev, cache->here);
  td_dev_free(e->dev, cache->sum);
  td_dev_free_host(e->dev, cache->there);
  td_hot_experts_close(cache->hot);
  free(cache->routing);
  free(cache);
}

static bool is_on(const td_engine *e) {
  return e->cache && e->cache->is_any;
}

const bool *td_expert_cache_layers(const td_engine *e) {
  return is_on(e) ? e->cache->is_layer : NULL;
}

const uint8_t *td_expert_cache_pair_share(const td_engine *e) {
  return is_on(e) && has_peer(e) ? e->cache->pair_share : NULL;
}

static size_t n_all_experts(const td_engine *e) {
  return (size_t)e->config->n_layers * e->config->n_experts;
}

size_t td_expert_cache_meta_entries(const td_engine *e) {
  return is_on(e) ? n_all_experts(e) * (has_peer(e) ? 2 : 1) : 0;
}

td_expert_cache_stats td_engine_cache_stats(const td_engine *e) {
  if (!is_on(e)) return (td_expert_cache_stats){.n_slots = 0};
  const td_hot_counts counts = td_hot_experts_counts(e->cache->hot);
  return (td_expert_cache_stats){.n_slots = e->cache->n_slots,
                                 .n_cached = counts.n_cached,
                                 .hits = counts.hits,
                                 .misses = counts.misses,
                                 .moves = counts.moves,
                                 .expert_bytes = e->cache->slot_bytes};
}

// ---- between steps ------------------------------------------------------------------------------

// All copies are done, or one of them failed: then nothing moves any more, and what is cached
// stays.
static void end_moves(td_engine *e) {
  td_expert_cache *cache = e->cache;
  td_err err;
  const bool is_ok = sync_sites(e, &err) == TD_OK;
  if (!is_ok) {
    td_warn("%s: the cache of experts stays as it is: %s", td_dev_name(e->dev), err.msg);
    cache->max_moves = 0;
  }
  while (cache->n_moves) {
    const td_hot_move *move = &cache->moves[--cache->n_moves];
    if (is_ok)
      td_hot_experts_publish(cache->hot, move);
    else
      td_hot_experts_cancel(cache->hot, move);
  }
}

static bool are_moved(const td_expert_cache *cache) {
  bool all = true;
  for (int i = 0; i < N_SITES; i++) {
    const cache_site *site = &cache->sites[i];
    if (site->n_slots) all &= td_event_is_done(site->moved);
  }
  return all;
}

// out = slots counted from the site's first, -1 for experts that are not there.
static void write_table(const td_engine *e, const cache_site *site, int32_t *out) {
  const int32_t *table = td_hot_experts_table(e->cache->hot);
  for (size_t i = 0; i < n_all_experts(e); i++) {
    const int64_t slot = (int64_t)table[i] - site->first_slot;
    out[i] = table[i] >= 0 && slot >= 0 && slot < site->n_slots ? (int32_t)slot : -1;
  }
}

size_t td_expert_cache_begin_step(td_engine *e, int32_t *slots) {
  td_expert_cache *cache = e->cache;
  const size_t n = n_all_experts(e);
  if (cache->n_moves && are_moved(cache)) end_moves(e);
  write_table(e, &cache->sites[SITE_HERE], slots);
  if (!has_peer(e)) return n;
  write_table(e, &cache->sites[SITE_PEER], slots + n);
  memcpy(td_expert_peer_table(e), slots + n, n * sizeof *slots);
  return 2 * n;
}

static int32_t *routing_of(const td_engine *e, const td_microbatch *p, uint32_t layer_idx) {
  const size_t row = (size_t)layer_idx * e->opts.max_step_seqs + p->begin;
  return e->cache->routing + row * e->config->top_k;
}

// No step runs now, and none that follows reads a slot before its expert is published.
void td_expert_cache_end_step(td_engine *e) {
  td_expert_cache *cache = e->cache;
  td_hot_experts_begin_step(cache->hot);
  for (uint32_t i = 0; i < e->config->n_layers; i++) {
    if (e->step.plan.way[i] == TD_LAYER_CACHED || e->step.plan.way[i] == TD_LAYER_SPREAD) {
      td_hot_experts_use(cache->hot, i, routing_of(e, &e->step.whole, i),
                         e->step.n_tokens * e->config->top_k);
    }
  }
  if (cache->n_moves) return; // the link is busy with the last ones
  td_hot_move chosen[MAX_MOVES];
  const uint32_t n = td_hot_experts_choose(cache->hot, chosen, cache->max_moves);
  for (uint32_t i = 0; i < n; i++)
    if (begin_move(e, &chosen[i], false))
      cache->moves[cache->n_moves++] = chosen[i];
    else
      td_hot_experts_cancel(cache->hot, &chosen[i]);
  if (cache->n_moves) {
    for (int i = 0; i < N_SITES; i++) {
      cache_site *site = &cache->sites[i];
      if (site->n_slots) td_event_record(site->moved, site->stream);
    }
  }
}

// ---- a layer ------------------------------------------------------------------------------------

static const int32_t *slots_of(const td_engine *e, const int32_t *slots, uint32_t layer_idx) {
  return slots + (size_t)layer_idx * e->config->n_experts;
}

static float *pairs_of(const td_engine *e, float *pairs, const td_microbatch *p) {
  return pairs + (size_t)p->begin * e->config->top_k * e->config->dim;
}

void td_expert_cache_compute(td_engine *e, const td_microbatch *p, uint32_t layer_idx,
                             const td_moe_args *routed) {
  const td_expert_cache *cache = e->cache;
  const cache_site *site = &cache->sites[SITE_HERE];
  if (!site->n_slots) return;
  td_moe_args args = *routed;
  args.gate = site->gate;
  args.up = up_of(cache, site);
  args.down = site->gate + 2 * (size_t)site->n_slots;
  args.slots = slots_of(e, e->step.dev_slots, layer_idx);
  args.n_slots = site->n_slots;
  args.out = pairs_of(e, cache->here, p);
  args.out_f32 = args.by_pair = args.weights_on_device = true;
  td_op_moe(e->stream, &args);
}

void td_expert_cache_compute_rest(td_engine *e, const td_microbatch *p, uint32_t layer_idx,
                                  const td_moe_args *whole) {
  td_moe_args args = *whole;
  args.slots = slots_of(e, td_hot_experts_table(e->cache->hot), layer_idx);
  args.out = pairs_of(e, e->cache->there, p);
  args.out_f32 = args.by_pair = args.rest = true;
  td_op_copy(e->offload.stream, routing_of(e, p, layer_idx), args.ids,
             (size_t)p->n_tokens * e->config->top_k * sizeof *args.ids);
  td_op_moe(e->offload.stream, &args);
}

const void *td_expert_cache_join(td_engine *e, const td_microbatch *p, uint32_t layer_idx,
                                 const td_moe_args *args) {
  const td_expert_cache *cache = e->cache;
  const td_model_config *c = e->config;
  const bool has_shared = td_model_layer(e->model, layer_idx)->mlp_gate.data != NULL;
  const bool is_peers = td_layer_way_has_peer(e->step.plan.way[layer_idx]);
  const float *peer = is_peers ? td_expert_peer_await(e, p, layer_idx) : NULL;
  const int32_t *peer_slots = is_peers ? slots_of(e, e->step.dev_peer_slots, layer_idx) : NULL;
  char *sum = (char *)cache->sum + (size_t)p->begin * c->dim * e->act_bytes;
  td_op_moe_join(e->stream, &(td_moe_join_args){.here = pairs_of(e, cache->here, p),
                                                .there = pairs_of(e, cache->there, p),
                                                .peer = peer,
                                                .slots = slots_of(e, e->step.dev_slots, layer_idx),
                                                .peer_slots = peer_slots,
                                                .ids = args->ids,
                                                .weights = args->weights,
                                                .out = has_shared ? sum : p->delta,
                                                .n_tokens = p->n_tokens,
                                                .n_experts = c->n_experts,
                                                .top_k = c->top_k,
                                                .dim = c->dim});
  return has_shared ? sum : NULL;
}
