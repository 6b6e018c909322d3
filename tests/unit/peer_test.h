// tests/unit/peer_test.h - all logits of decode steps of 1 to PEER_SEQS tokens, whose experts are
// in the memory of two devices and on the CPU.
#pragma once

#include "engine/experts/expert_peer.h"
#include "unit/engine_test.h"

enum { PEER_SEQS = 16, PEER_STEPS = 16 };

typedef struct {
  uint32_t n_here, n_peer; // slots for experts
  bool is_fixed;
  uint32_t n_microbatches;
} peer_case;

// With steps of few tokens, some of them alike: the emulator takes long. And the peer may be the
// engine's GPU.
static bool peer_is_brief, peer_is_first_gpu;

typedef struct {
  float *out; // [n_rows][n_vocab]
  size_t n_rows, n_vocab;
  td_expert_cache_stats stats;
  td_step_plan plan; // of the last step
} peer_result;

static inline size_t slots_bytes(const td_model *model, uint32_t n_slots) {
  const td_model_config *c = td_model_config_of(model);
  uint32_t layer_idx = 0;
  while (!td_model_is_moe(c, layer_idx))
    layer_idx++;
  td_slot_part parts[TD_SLOT_EXPERT_PARTS];
  td_slot_list_expert(parts, td_model_layer(model, layer_idx), 0);
  return n_slots * td_slot_lay_out(parts, TD_SLOT_EXPERT_PARTS);
}

// Room for the buffers, too, but not for another slot.
static inline size_t peer_here_bytes(const td_model *model, uint32_t n_slots, td_dtype act) {
  const td_model_config *c = td_model_config_of(model);
  const size_t row = c->dim * (c->top_k * sizeof(float) + td_dtype_bytes(act));
  return n_slots ? PEER_SEQS * row + slots_bytes(model, n_slots) : 0;
}

static inline void open_peer_engine(engine_fixture *f, const small_model *m, td_dev *const devs[2],
                                    const peer_case *c) {
  td_err err;
  *f = (engine_fixture){.dev = devs[0]};
  if (td_model_open(&f->model, golden_dir(m->name), &err) != TD_OK) fail_msg("%s", err.msg);
  f->n_vocab = td_model_config_of(f->model)->n_vocab;
  const td_dev_opts cpu = {.kind = "cpu", .n_threads = 2, .activations = engine_activations};
  assert_int_equal(td_dev_open(&f->expert_dev, &cpu, &err), TD_OK);
  td_engine_opts opts = {
      .n_pages = PEER_SEQS,
      .page_tokens = ENGINE_PAGE,
      .max_step_tokens = ENGINE_PAGE,
      .max_step_seqs = PEER_SEQS,
      .max_seq_tokens = ENGINE_PAGE,
      .kv_dtype = td_dev_kv_dtype(devs[0], TD_F32),
      .expert_dev = f->expert_dev,
      .n_microbatches = c->n_microbatches,
      .cache_bytes = peer_here_bytes(f->model, c->n_here, td_dev_act_dtype(devs[0])),
      .cache_step_bytes = 1,
      .cache_peer = c->n_peer ? devs[1] : NULL,
      .peer_always = true,
      .is_cache_fixed = c->is_fixed};
  td_engine *sizes; // of the buffers
  opts.peer_cache_bytes = (size_t)1 << 30;
  if (td_engine_open(&sizes, f->model, f->dev, &opts, &err) != TD_OK) fail_msg("%s", err.msg);
  opts.peer_cache_bytes = td_expert_peer_bytes(sizes) + slots_bytes(f->model, c->n_peer);
  td_engine_close(sizes);
  if (td_engine_open(&f->engine, f->model, f->dev, &opts, &err) != TD_OK) fail_msg("%s", err.msg);
}

static inline void run_peer(engine_fixture *f, peer_result *r) {
  static const uint32_t brief[] = {2, 2, 2, 5};
  const uint32_t n_steps = peer_is_brief ? TD_COUNT(brief) : PEER_STEPS;
  td_step_seq seqs[PEER_SEQS] = {{0}};
  int32_t tokens[PEER_SEQS][PEER_STEPS], pages[PEER_SEQS];
  td_err err;
  r->n_vocab = f->n_vocab;
  r->n_rows = 0;
  r->out = malloc((size_t)PEER_SEQS * PEER_STEPS * f->n_vocab * sizeof *r->out);
  for (int32_t s = 0; s < PEER_SEQS; s++) {
    pages[s] = s;
    for (int32_t i = 0; i < PEER_STEPS; i++)
      tokens[s][i] = cache_token((uint32_t)s, (uint32_t)i);
    seqs[s] = (td_step_seq){.tokens = tokens[s],
                            .n_tokens = 1,
                            .pages = &pages[s],
                            .n_pages = 1,
                            .is_decode = true,
                            .want = TD_WANT_ALL};
  }
  for (uint32_t i = 0; i < n_steps; i++) {
    const uint32_t n = peer_is_brief ? brief[i] : i + 1;
    if (td_engine_step(f->engine, seqs, n, &err) != TD_OK) fail_msg("%s", err.msg);
    memcpy(r->out + r->n_rows * f->n_vocab, td_engine_logits(f->engine),
           n * f->n_vocab * sizeof *r->out);
    r->n_rows += n;
    for (uint32_t s = 0; s < n; s++)
      seqs[s].tokens++, seqs[s].n_past++;
  }
  r->stats = td_engine_cache_stats(f->engine);
  r->plan = f->engine->step.plan;
}

// The caller frees out. seed: of delays.
static inline peer_result peer_logits(const small_model *m, const char *kind, const peer_case *c,
                                      unsigned seed) {
  td_dev *devs[2];
  td_err err;
  char text[16];
  snprintf(text, sizeof text, "%u", seed);
  setenv("TANDEM_JITTER", text, 1);
  for (unsigned i = 0; i < 2; i++) {
    const td_dev_opts opts = {.kind = kind,
                              .index = peer_is_first_gpu ? 0 : i,
                              .n_threads = 2,
                              .activations = engine_activations};
    if (td_dev_open(&devs[i], &opts, &err) != TD_OK) fail_msg("%s", err.msg);
  }
  engine_fixture f;
  open_peer_engine(&f, m, devs, c);
  peer_result r;
  run_peer(&f, &r);
  close_engine(&f);
  for (int i = 0; i < 2; i++)
    td_dev_close(devs[i]);
  unsetenv("TANDEM_JITTER");
  return r;
}
