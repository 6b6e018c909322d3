// src/runtime/session.c - opening a session, and prefill and decode of one sequence.
#include "runtime/session.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem_info.h"
#include "base/trace.h"
#include "engine/sampler.h"
#include "kv/plan.h"

static td_status plan_kv(const td_session *s, td_kv_plan *out, td_err *err) {
  // weights are uploaded later, so they still count against free memory
  const bool is_own = s->devices.placement.is_discrete;
  td_kv_need need = {
      .max_position = s->config->max_position,
      .weight_bytes = s->is_resident && !is_own ? 0 : s->devices.held_bytes,
      .available_bytes = is_own ? td_dev_free_vram_bytes(s->devices.dev)
                                : td_memory_available_bytes(),
      .ctx_size = s->opts.runtime.ctx_size,
      .max_batch = s->opts.max_seqs,
      .is_device = is_own,
  };
  if (s->arena && !is_own) { // activations are not there yet
    const uint64_t n = s->opts.runtime.prefill_chunk *
                       td_engine_drive_step_bytes_per_token(s->config);
    need.available_bytes -= n < need.available_bytes ? n : need.available_bytes;
  }
  td_kv_layout_to_need(&s->layout, &need);
  return td_kv_plan_make(out, &need, err);
}

static td_status open_engine(td_session *s, td_err *err) {
  td_kv_plan plan;
  s->layout = td_kv_layout_of(s->config, s->opts.runtime.kv_dtype, 0);
  td_status st = plan_kv(s, &plan, err);
  if (st != TD_OK) return st;
  s->n_ctx = plan.n_ctx;
  uint32_t n_seqs = s->opts.max_seqs;
  const uint32_t page_tokens = s->layout.page_tokens;
  td_kv_opts kv = {.page_tokens = page_tokens, .n_pages = plan.n_pages, .max_seqs = n_seqs};
  st = td_kv_open(&s->kv, &kv, err);
  if (st != TD_OK) return st;
  uint32_t chunk = s->opts.runtime.prefill_chunk < s->n_ctx ? s->opts.runtime.prefill_chunk
                                                            : s->n_ctx;
  td_engine_opts opts = {.n_pages = plan.n_pages,
                         .page_tokens = page_tokens,
                         .max_step_tokens = chunk > n_seqs ? chunk : n_seqs,
                         .max_step_seqs = n_seqs,
                         .max_seq_tokens = s->n_ctx,
                         .kv_dtype = s->opts.runtime.kv_dtype,
                         .record_routing = s->opts.record_routing,
                         .arena = s->arena,
                         .vision = s->devices.vision,
                         .expert_dev = s->devices.expert_dev,
                         .n_gpu_expert_layers = s->devices.n_gpu_expert_layers,
                         .stream_bytes = s->devices.stream_bytes,
                         .break_even_tokens = s->devices.stream_from};
  td_devices_use_peers(&s->devices, &opts);
  s->engine_opts = opts;
  td_devices_use_cache(&s->devices, s->model, &opts);
  return td_engine_open(&s->engine, s->model, s->devices.dev, &opts, err);
}

// The model is mapped so far. If the weights are to be resident, it is opened again from shared
// memory.
static td_status open_model(td_session *s, td_err *err) {
  const td_weights_opts opts = {.runtime = &s->opts.runtime,
                                .placement = s->devices.placement,
                                .arena_gib = s->opts.arena_gib};
  int fd;
  uint32_t chunk;
  td_status st = td_weights_open(&fd, &chunk, &opts, err);
  if (st != TD_OK) return st;
  if (chunk && !s->has_chunk) s->opts.runtime.prefill_chunk = chunk;
  if (fd < 0) return td_model_convert(s->model, err);
  const td_expert_arena_opts how = {.mirror = s->opts.runtime.mirror};
  td_model_close(s->model);
  s->model = NULL;
  st = td_model_open_weights(&s->model, s->opts.runtime.model_dir, fd, err);
  s->is_resident = true;
  if (st == TD_OK) st = td_expert_arena_open(&s->arena, s->model, fd, &how, err);
  close(fd); // the model's mapping keeps the memory
  return st;
}

static td_status open_devices(td_session *s, td_err *err) {
  const td_devices_opts opts = {.runtime = &s->opts.runtime,
                                .is_alone = s->opts.record_routing,
                                .has_drive = s->arena ||
                                             s->opts.runtime.weights == TD_WEIGHTS_STREAM,
                                .max_seqs = s->opts.max_seqs};
  td_status st = td_devices_open(&s->devices, &opts, s->model, err);
  if (st != TD_OK) return st;
  s->opts.runtime.kv_dtype = td_dev_kv_dtype(s->devices.dev, s->opts.runtime.kv_dtype);
  s->opts.runtime.prefill_chunk = s->devices.prefill_chunk;
  return TD_OK;
}

// That experts come from the drive is known when the weights are open; a GPU was to hold some.
// asked: the options, before devices and weights chose.
static td_status open_devices_again(td_session *s, const td_runtime_opts *asked, td_err *err) {
  if (!s->arena || !s->devices.placement.is_discrete ||
      s->opts.runtime.weights == TD_WEIGHTS_STREAM)
    return TD_OK;
  td_devices_close(&s->devices);
  s->opts.runtime = *asked;
  return open_devices(s, err);
}

static td_status open_parts(td_session *s, td_err *err) {
  uint64_t begin_ns = td_trace_begin();
  const td_runtime_opts asked = s->opts.runtime;
  s->has_chunk = asked.prefill_chunk > 0;
  td_status st = td_model_open_shapes(&s->model, s->opts.runtime.model_dir, err); // nearly free
  if (st == TD_OK) st = open_devices(s, err);
  if (st == TD_OK) st = open_model(s, err);
  if (st == TD_OK) st = open_devices_again(s, &asked, err);
  td_trace_span(begin_ns, TD_TRACE_OPEN_MODEL, 0, 0);
  if (st != TD_OK) return st;
  s->config = td_model_config_of(s->model);
  td_devices_use_memory(&s->devices, s->model, s->arena);
  st = td_devices_open_vision(&s->devices, s->model, err);
  if (st == TD_OK) st = open_engine(s, err);
  if (st == TD_OK) st = td_kv_seq_open(s->kv, &s->seq, err);
  if (st != TD_OK) return st;
  s->cached = malloc(s->n_ctx * sizeof *s->cached);
  return s->cached ? TD_OK : td_fail(err, TD_ENOMEM, "out of memory");
}

td_status td_session_open(td_session **out, const td_session_opts *opts, td_err *err) {
  *out = NULL;
  td_session *s = calloc(1, sizeof *s);
  if (!s) return td_fail(err, TD_ENOMEM, "out of memory");
  s->opts = *opts;
  if (!s->opts.max_seqs) s->opts.max_seqs = 1;
  if (!s->opts.runtime.device) s->opts.runtime.device = "cpu";
  double start = td_clock_s();
  td_status st = open_parts(s, err);
  if (st != TD_OK) {
    td_session_close(s);
    return st;
  }
  s->load_s = td_clock_s() - start;
  *out = s;
  return TD_OK;
}

void td_session_close(td_session *s) {
  if (!s) return;
  td_engine_close(s->long_engine);
  td_engine_close(s->engine);
  td_kv_close(s->kv);
  td_devices_close(&s->devices);
  td_expert_arena_close(s->arena);
  td_model_close(s->model);
  free(s->cached);
  free(s->cached_images);
  free(s);
}

// Whoever computes next: the engine for longer steps, or the usual one.
static td_engine *engine_of(const td_session *s) {
  return s->long_engine ? s->long_engine : s->engine;
}

// With an engine for longer steps if that pays for n_tokens of a prompt; 0: without.
static void choose_engine(td_session *s, uint32_t n_tokens) {
  if (td_long_steps_pay(&s->devices.long_steps, s->config, s->devices.stream_from, n_tokens) ==
      (s->long_engine != NULL))
    return;
  if (s->long_engine) {
    td_engine_close(s->long_engine);
    s->long_engine = NULL;
    return;
  }
  td_engine_opts opts = s->engine_opts;
  opts.kv_pages = td_engine_kv_pages(s->engine);
  td_devices_open_long_engine(&s->long_engine, &s->devices, s->model, &opts);
}

// One step: n tokens after the cached ones.
static td_status step(td_session *s, const td_generate_args *args, const int32_t *tokens,
                      uint32_t n, td_want want, bool is_decode, td_err *err) {
  td_status st = td_kv_reserve(s->kv, s->seq, s->n_cached + n, err);
  if (st != TD_OK) return st;
  td_step_seq seq = {.tokens = tokens,
                     .n_tokens = n,
                     .n_past = s->n_cached,
                     .past = s->cached,
                     .images = args->images,
                     .n_images = args->n_images,
                     .want = want,
                     .is_decode = is_decode,
                     .temperature = args->sampling.temperature};
  seq.pages = td_kv_pages(s->kv, s->seq, &seq.n_pages);
  st = td_engine_step(engine_of(s), &seq, 1, err);
  if (st == TD_OK && td_engine_has_failed(engine_of(s), &seq, 0, err)) st = err->code;
  if (st != TD_OK) {
    s->n_cached -= s->n_cached % td_kv_page_tokens(s->kv); // a state may be behind further tokens
    return st;
  }
  memcpy(s->cached + s->n_cached, tokens, n * sizeof *tokens);
  s->n_cached += n;
  return TD_OK;
}

// The first image of a, [n_a], that b, [n_b], does not have at its place, if it begins before n;
// else n.
static uint32_t differs_at(const td_image_input *a, uint32_t n_a, const td_image_input *b,
                           uint32_t n_b, uint32_t n) {
  for (uint32_t i = 0; i < n_a && a[i].at < n; i++) {
    const bool is_same = i < n_b && a[i].at == b[i].at && a[i].grid_h == b[i].grid_h &&
                         a[i].grid_w == b[i].grid_w &&
                         memcmp(a[i].hash, b[i].hash, sizeof a[i].hash) == 0;
    if (!is_same) return a[i].at;
  }
  return n;
}

// Notes the prompt's images, without pixels, as those of the sequence.
static td_status note_images(td_session *s, const td_generate_args *args, td_err *err) {
  s->n_cached_images = 0;
  if (!args->n_images) return TD_OK;
  td_image_input *images = realloc(s->cached_images, args->n_images * sizeof *images);
  if (!images) {
    s->n_cached = 0;
    return td_fail(err, TD_ENOMEM, "out of memory: %u images", args->n_images);
  }
  for (uint32_t i = 0; i < args->n_images; i++) {
    images[i] = args->images[i];
    images[i].rgb = NULL;
  }
  s->cached_images = images;
  s->n_cached_images = args->n_images;
  return TD_OK;
}

// Keeps the cached prefix that the prompt begins with, except for the prompt's last token, whose
// logits are needed.
static uint32_t reuse(td_session *s, const td_generate_args *args) {
  uint32_t n = 0;
  while (n < s->n_cached && n + 1 < args->n_prompt && s->cached[n] == args->prompt[n])
    n++;
  n = differs_at(args->images, args->n_images, s->cached_images, s->n_cached_images, n);
  n = differs_at(s->cached_images, s->n_cached_images, args->images, args->n_images, n);
  // A state is known at the end of what was computed and of full pages.
  if (s->layout.n_states && n < s->n_cached) n -= n % td_kv_page_tokens(s->kv);
  s->n_cached = n;
  return n;
}

static bool is_wanted(const td_session *s, const td_generate_args *args) {
  return !args->on_prefill || args->on_prefill(args->ctx, s->n_cached, args->n_prompt);
}

// Computes the prompt, or the beginning of it: until on_prefill returns false.
static td_status prefill(td_session *s, const td_generate_args *args, bool *is_whole, td_err *err) {
  *is_whole = is_wanted(s, args);
  if (!*is_whole) return TD_OK;
  choose_engine(s, args->n_prompt - s->n_cached);
  const uint32_t chunk = s->long_engine ? s->devices.long_steps.prefill_chunk
                                        : s->opts.runtime.prefill_chunk;
  while (s->n_cached < args->n_prompt) {
    uint32_t left = args->n_prompt - s->n_cached;
    uint32_t n = left < chunk ? left : chunk;
    td_status st = step(s, args, args->prompt + s->n_cached, n,
                        n == left ? TD_WANT_LAST : TD_WANT_NONE, false, err);
    if (st != TD_OK) return st;
    *is_whole = is_wanted(s, args);
    if (!*is_whole) return TD_OK;
  }
  return TD_OK;
}

static bool is_eos(const td_model_config *config, const td_tokenizer *tok, int32_t id) {
  uint32_t n = 0;
  const int32_t *ends = tok ? td_tokenizer_ends(tok, &n) : NULL;
  for (uint32_t i = 0; i < n; i++)
    if (ends[i] == id) return true;
  for (uint32_t i = 0; i < config->n_eos; i++)
    if (config->eos_ids[i] == id) return true;
  return false;
}

// Samples from the last step's logits until generation ends.
static td_status decode(td_session *s, const td_generate_args *args, td_sampler *sampler,
                        td_generate_stats *stats, td_err *err) {
  stats->reason = TD_DONE_LENGTH;
  while (stats->n_output < args->max_tokens) {
    td_wire_token token;
    td_status st = td_engine_draw(engine_of(s), 0, sampler, args->want_logprobs, &token, err);
    if (st == TD_OK) st = td_sampler_status(sampler, err);
    if (st != TD_OK) return st;
    int32_t id = token.id;
    stats->n_output++;
    if (!args->ignore_eos && is_eos(s->config, args->tok, id)) {
      stats->reason = TD_DONE_STOP;
      return TD_OK;
    }
    if (args->on_token && !args->on_token(args->ctx, id, token.logprob)) {
      stats->reason = TD_DONE_CANCELED;
      return TD_OK;
    }
    if (stats->n_output == args->max_tokens || s->n_cached == s->n_ctx) return TD_OK;
    choose_engine(s, 0);
    st = step(s, args, &id, 1, TD_WANT_LAST, true, err);
    if (st != TD_OK) return st;
  }
  return TD_OK;
}

td_status td_session_generate(td_session *s, const td_generate_args *args, td_generate_stats *stats,
                              td_err *err) {
  *stats = (td_generate_stats){.n_prompt = args->n_prompt, .reason = TD_DONE_CANCELED};
  if (!args->n_prompt) return td_fail(err, TD_EINVAL, "the prompt is empty");
  if (args->n_prompt > s->n_ctx) {
    return td_fail(err, TD_EINVAL, "the prompt has %u tokens, the context %u (--ctx-size)",
                   args->n_prompt, s->n_ctx);
  }
  td_sampler *sampler;
  td_status st = td_sampler_open(&sampler, &args->sampling, NULL, 0, s->config->n_vocab, err);
  if (st != TD_OK) return st;
  td_sampler_prompt(sampler, args->prompt, args->n_prompt);
  stats->n_reused = reuse(s, args);
  st = note_images(s, args, err);
  double start = td_clock_s();
  bool is_whole;
  if (st == TD_OK) st = prefill(s, args, &is_whole, err);
  double first = td_clock_s();
  stats->prefill_s = first - start;
  if (st == TD_OK && is_whole) {
    st = decode(s, args, sampler, stats, err);
    stats->decode_s = td_clock_s() - first;
  }
  choose_engine(s, 0);
  td_sampler_close(sampler);
  return st;
}
