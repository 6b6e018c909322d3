// src/bench/gpu/steps.c - benchmarks steps of a whole model on a GPU with experts on the CPU:
// prefill with streamed experts, decode on both devices, and decode concurrent with such a prefill.
// Devices, prefill chunk and the ring of streamed experts are chosen as in a worker.
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/cpus.h"
#include "base/stats.h"
#include "base/units.h"
#include "bench/gpu/paths.h"
#include "bench/report.h"
#include "engine/engine.h"
#include "engine/experts/expert_slots.h"
#include "worker/stream_pace.h"

enum {
  PAGE_TOKENS = TD_GPU_PAGE_TOKENS,
  MAX_BATCH = 16,
  DEPTH = 1024,
  LONGEST_PROMPT = 32768,
  MAX_STEPS = 64
};
enum { MIN_STEPS = 3, WARM_LAYERS = 5, MIN_PROMPT = 8 };
#define CASE_S           1.5
#define CACHE_STEP_BYTES (2 * TD_GIB) // so that a cache is full after few steps

// ---- open and close -----------------------------------------------------------------------------

// Divides by --shrink, so that the prompt shrinks along with the layers.
static uint32_t fewer(const td_gpu_steps *s, uint32_t n, uint32_t least) {
  n /= s->b->shrink;
  return n < least ? least : n;
}

// Opens two CPU devices, with a streaming ring of a quarter of a layer.
static td_status open_cpus(td_gpu_steps *s, td_err *err) {
  td_devices *d = &s->devices;
  const td_dev_opts opts = {.kind = "cpu", .n_threads = s->n_threads};
  *d = (td_devices){.stream_bytes = s->model.layer_bytes / 4, .prefill_chunk = LONGEST_PROMPT};
  td_status st = td_dev_open(&d->dev, &opts, err);
  return st == TD_OK ? td_dev_open(&d->expert_dev, &opts, err) : st;
}

static td_status open_devices(td_gpu_steps *s, const char *kind, td_err *err) {
  const td_runtime_opts runtime = {
      .device = kind, .n_threads = s->n_threads, .experts = TD_EXPERTS_CPU};
  const td_devices_opts opts = {.runtime = &runtime};
  if (strcmp(kind, "cpu") == 0) return open_cpus(s, err);
  return td_devices_open(&s->devices, &opts, s->model.model, err);
}

void td_gpu_steps_open(td_gpu_steps *s, td_gpu_bench *b, const td_gpu_steps_opts *opts) {
  td_err err;
  *s = (td_gpu_steps){.b = b, .random = 1};
  s->n_threads = opts->n_threads ? opts->n_threads : td_cpu_count();
  double start = td_clock_s();
  td_gpu_must(td_gpu_model_open(&s->model, opts->n_layers, b->shrink, s->n_threads, &err), &err);
  s->fill_s = td_clock_s() - start;
  td_gpu_must(open_devices(s, opts->device, &err), &err);
  b->dev = s->devices.dev;
  td_gpu_must(td_stream_open(&b->stream, b->dev, &err), &err);
  td_dev_set_thread_limit(s->devices.expert_dev, &s->n_active);
  start = td_clock_s();
  td_dev_pin(b->dev, s->model.memory, s->model.n_bytes, false);
  td_dev_wait_pinned(b->dev, s->model.memory, s->model.n_bytes);
  s->pin_s = td_clock_s() - start;
}

void td_gpu_steps_close(td_gpu_steps *s) {
  td_stream_close(s->b->stream);
  td_devices_close(&s->devices);
  td_gpu_model_close(&s->model);
}

void td_gpu_steps_head(const td_gpu_steps *s) {
  td_json_writer *w = s->b->json;
  td_jw_add(w,
            "'model': %s, 'format': 'fp8', 'layers': %u, 'aliased_layers': true, "
            "'layer_expert_bytes': %lu, 'weight_bytes_in_memory': %lu, 'prefill_chunk': %u, "
            "'stream_bytes': %lu, 'cpu_threads': %u, 'kv_dtype': %s, 'fill_s': %g, 'pin_s': %g",
            s->model.config.arch_name, s->model.config.n_layers, s->model.layer_bytes,
            s->model.n_bytes, s->devices.prefill_chunk, s->devices.stream_bytes, s->n_threads,
            td_dtype_name(td_dev_kv_dtype(s->b->dev, TD_F32)), s->fill_s, s->pin_s);
}

// ---- steps --------------------------------------------------------------------------------------

// An engine and its zeroed KV cache, in which all sequences have the same number of pages.
typedef struct {
  td_engine *engine;
  td_gpu_kept *before;     // what was kept before it was opened
  int32_t *pages, *tokens; // [n_pages], [max_step_tokens]
  uint32_t seq_pages, max_step_tokens;
} rig;

typedef struct {
  uint32_t n_seqs, seq_tokens, step_tokens, n_microbatches;
  bool is_streaming, is_urgent; // a streaming one can be confined
  uint32_t n_streamed_dense;    // see td_engine_opts
  size_t cache_bytes;           // likewise
  td_dtype kv_dtype;            // as --kv-dtype; F32, as auto
} rig_opts;

static rig open_rig(td_gpu_steps *s, const td_model *model, const rig_opts *o) {
  td_err err;
  td_gpu_bench *b = s->b;
  rig r = {.max_step_tokens = o->step_tokens, .before = b->kept};
  r.seq_pages = (o->seq_tokens + PAGE_TOKENS - 1) / PAGE_TOKENS;
  const uint32_t n_pages = r.seq_pages * o->n_seqs;
  const td_dtype kv_dtype = td_dev_kv_dtype(b->dev, o->kv_dtype);
  const td_kv_layout kv = td_kv_layout_of(td_model_config_of(model), kv_dtype, PAGE_TOKENS);
  void *kv_pages = td_gpu_alloc(b, td_kv_layout_page_bytes(&kv) * n_pages);
  td_gpu_sync(b);
  r.pages = td_gpu_host(b, n_pages * sizeof *r.pages);
  r.tokens = td_gpu_host(b, o->step_tokens * sizeof *r.tokens);
  for (uint32_t i = 0; i < n_pages; i++)
    r.pages[i] = (int32_t)i;
  const td_engine_opts opts = {.n_pages = n_pages,
                               .page_tokens = PAGE_TOKENS,
                               .max_step_tokens = o->step_tokens,
                               .max_step_seqs = o->n_seqs,
                               .max_seq_tokens = r.seq_pages * PAGE_TOKENS,
                               .kv_dtype = kv_dtype,
                               .kv_pages = kv_pages,
                               .record_routing = !o->is_streaming,
                               .expert_dev = s->devices.expert_dev,
                               .n_microbatches = o->n_microbatches,
                               .stream_bytes = o->is_streaming ? s->devices.stream_bytes : 0,
                               .break_even_tokens = o->is_streaming ? 1 : 0,
                               .n_streamed_dense = o->n_streamed_dense,
                               .cache_bytes = o->cache_bytes,
                               .cache_step_bytes = CACHE_STEP_BYTES,
                               .is_urgent = o->is_urgent,
                               .is_confinable = o->is_streaming};
  td_gpu_must(td_engine_open(&r.engine, model, b->dev, &opts, &err), &err);
  return r;
}

// Those opened last close first.
static void close_rig(td_gpu_steps *s, rig *r) {
  td_engine_close(r->engine);
  td_gpu_release(s->b, r->before);
}

// A step: one token of each of n_decode sequences at depth n_past, with drafts behind it, plus
// n_prompt tokens of another sequence after its first prompt_past tokens.
typedef struct {
  uint32_t n_decode, n_past, n_prompt, prompt_past, n_drafted; // n_drafted: behind each token
} step_shape;

// Returns the number of sequences; seqs has room for MAX_BATCH + 1.
static uint32_t build_step(td_gpu_steps *s, rig *r, const step_shape *p, td_step_seq *seqs) {
  const uint32_t of_seq = 1 + p->n_drafted;
  uint32_t n = 0;
  for (uint32_t i = 0; i < p->n_decode * of_seq + p->n_prompt; i++) {
    s->random = s->random * 6364136223846793005u + 1442695040888963407u;
    r->tokens[i] = (int32_t)((s->random >> 33) % s->model.config.n_vocab);
  }
  for (; n < p->n_decode; n++) {
    seqs[n] = (td_step_seq){.tokens = r->tokens + (size_t)n * of_seq,
                            .n_tokens = of_seq,
                            .n_past = p->n_past,
                            .is_decode = true,
                            .want = p->n_drafted ? TD_WANT_EACH : TD_WANT_LAST};
  }
  if (p->n_prompt) {
    seqs[n++] = (td_step_seq){.tokens = r->tokens + (size_t)p->n_decode * of_seq,
                              .n_tokens = p->n_prompt,
                              .n_past = p->prompt_past,
                              .want = TD_WANT_LAST};
  }
  for (uint32_t i = 0; i < n; i++) {
    seqs[i].pages = r->pages + (size_t)i * r->seq_pages;
    seqs[i].n_pages = r->seq_pages;
  }
  return n;
}

static double run_step(td_gpu_steps *s, rig *r, const step_shape *p) {
  td_step_seq seqs[MAX_BATCH + 1];
  const uint32_t n = build_step(s, r, p, seqs);
  td_err err;
  const double start = td_clock_s();
  td_gpu_must(td_engine_step(r->engine, seqs, n, &err), &err);
  return td_clock_s() - start;
}

// Triggers everything done on first use, with a few layers only: weight copies, kernels, cuBLAS.
static void warm_up(td_gpu_steps *s, uint32_t n_prompt) {
  td_err err;
  td_model *model;
  td_gpu_must(td_gpu_model_shorter(&model, &s->model, WARM_LAYERS, &err), &err);
  rig r = open_rig(
      s, model,
      &(rig_opts){
          .n_seqs = 2, .seq_tokens = n_prompt, .step_tokens = n_prompt + 1, .is_streaming = true});
  run_step(s, &r, &(step_shape){.n_prompt = n_prompt});
  run_step(s, &r, &(step_shape){.n_decode = 1, .n_past = 1});
  close_rig(s, &r);
  td_model_close(model);
}

static void begin(td_gpu_steps *s, const char *path) {
  td_jw_add(s->b->json, "{'path': %s, 'layers': %u, 'aliased_layers': true", path,
            s->model.config.n_layers);
}

static void end(td_gpu_steps *s) {
  td_jw_end_object(s->b->json);
  td_gpu_write(s->b);
}

// ---- decode with cached experts -----------------------------------------------------------------

// Memory for n experts and the buffers of a cache.
static size_t cache_bytes_of(const td_gpu_steps *s, uint32_t n) {
  const td_model_config *c = &s->model.config;
  td_slot_part parts[TD_SLOT_EXPERT_PARTS];
  td_slot_list_expert(parts, td_model_layer(s->model.model, c->n_layers - 1), 0);
  const size_t expert = td_slot_lay_out(parts, TD_COUNT(parts));
  size_t n_bytes = n * expert;
  while (n && td_expert_cache_slots(n_bytes, expert, c, 1, td_dev_act_dtype(s->b->dev)) < n)
    n_bytes += TD_SLOT_ALIGN;
  return n_bytes;
}

// Steps until the cache stays as it is. The token is the same each time, and so are its experts.
static void fill_cache(td_gpu_steps *s, rig *r, const step_shape *shape) {
  enum { MAX_FILLING = 500, STILL = 4 };
  uint64_t moves = 0;
  for (uint32_t i = 0, n_still = 0; i < MAX_FILLING && n_still < STILL; i++) {
    s->random = 1;
    run_step(s, r, shape);
    const uint64_t now = td_engine_cache_stats(r->engine).moves;
    n_still = now == moves ? n_still + 1 : 0;
    moves = now;
  }
}

// One sequence whose token's experts are cached in part: n of them.
static void cache_case(td_gpu_steps *s, uint32_t n, uint32_t n_of_token, td_dtype kv_dtype) {
  const step_shape shape = {.n_decode = 1, .n_past = fewer(s, DEPTH, 1)};
  const size_t cache_bytes = cache_bytes_of(s, n), n_free = td_dev_free_vram_bytes(s->b->dev);
  if (n_free && cache_bytes > n_free - n_free / 8) return;
  rig r = open_rig(s, s->model.model,
                   &(rig_opts){.n_seqs = 1,
                               .seq_tokens = DEPTH + PAGE_TOKENS,
                               .step_tokens = 1,
                               .n_microbatches = 1,
                               .cache_bytes = cache_bytes,
                               .kv_dtype = kv_dtype});
  double seconds[MAX_STEPS], sum = 0;
  uint32_t n_steps = 0;
  fill_cache(s, &r, &shape);
  const td_expert_cache_stats before = td_engine_cache_stats(r.engine);
  while (n_steps < MAX_STEPS && (n_steps < MIN_STEPS || (s->b->shrink == 1 && sum < CASE_S))) {
    s->random = 1;
    seconds[n_steps] = run_step(s, &r, &shape);
    sum += seconds[n_steps++];
  }
  const td_expert_cache_stats after = td_engine_cache_stats(r.engine);
  begin(s, "cache");
  td_jw_add(s->b->json,
            "'kv_dtype': %s, 'slots': %u, 'cached': %u, 'experts_of_token': %u, 'hit_rate': %g, "
            "'cache_bytes': %g, 'itl_ms': %g",
            td_dtype_name(td_dev_kv_dtype(s->b->dev, kv_dtype)), after.n_slots, after.n_cached,
            n_of_token, (double)(after.hits - before.hits) / ((double)n_steps * n_of_token),
            (double)cache_bytes, td_median(seconds, n_steps) * 1e3);
  end(s);
  close_rig(s, &r);
}

// No cache; one of a single expert, which shows what the cache itself costs; and caches of a
// quarter, half and all of a token's experts, the last also with pages in E4M3.
void td_gpu_path_cache(td_gpu_steps *s) {
  const td_model_config *c = &s->model.config;
  uint32_t n = 0;
  for (uint32_t i = 0; i < c->n_layers; i++)
    n += td_model_is_moe(c, i) ? c->top_k : 0;
  const uint32_t sizes[] = {0, 1, n / 4, n / 2, n};
  warm_up(s, MIN_PROMPT);
  for (size_t i = 0; i < TD_COUNT(sizes); i++)
    cache_case(s, sizes[i], n, TD_F32);
  cache_case(s, n, n, TD_F8E4M3);
}

// ---- prefill with streamed experts --------------------------------------------------------------

static uint32_t chunk_of(const td_gpu_steps *s, uint32_t n_tokens) {
  const uint32_t chunk = s->devices.prefill_chunk;
  return chunk < n_tokens ? chunk : n_tokens;
}

static void stream_case(td_gpu_steps *s, rig *r, uint32_t n_tokens) {
  const uint64_t pass_bytes = td_model_stats_of(s->model.model).expert_bytes;
  const uint32_t n = fewer(s, n_tokens, MIN_PROMPT);
  const uint64_t dense_before = td_engine_stream_progress(r->engine).dense_bytes;
  double seconds = 0, bytes = 0;
  for (uint32_t done = 0; done < n; done += r->max_step_tokens) {
    const uint32_t chunk = n - done < r->max_step_tokens ? n - done : r->max_step_tokens;
    seconds += run_step(s, r, &(step_shape){.n_prompt = chunk, .prompt_past = done});
    bytes += (double)pass_bytes;
  }
  const uint64_t dense = td_engine_stream_progress(r->engine).dense_bytes - dense_before;
  const double gbps = (bytes + (double)dense) / seconds * 1e-9;
  begin(s, "stream");
  td_jw_add(s->b->json,
            "'tokens': %u, 'chunk_tokens': %u, 'seconds': %g, 'tokens_per_s': %g, "
            "'streamed_bytes': %g, 'streamed_dense_bytes': %lu, 'gbps': %g, "
            "'share_of_pinned_bandwidth': %g",
            n, chunk_of(s, n), seconds, n / seconds, bytes, dense, gbps, gbps / s->b->pinned_gbps);
  end(s);
}

// Prompts with the dense weights on the GPU, then one with those streamed, too.
void td_gpu_path_stream(td_gpu_steps *s) {
  enum { DENSE_PROMPT = 8192 };
  static const uint32_t prompts[] = {2048, DENSE_PROMPT, LONGEST_PROMPT};
  const uint32_t longest = fewer(s, LONGEST_PROMPT, MIN_PROMPT);
  warm_up(s, fewer(s, 2048, MIN_PROMPT));
  rig r = open_rig(s, s->model.model,
                   &(rig_opts){.n_seqs = 1,
                               .seq_tokens = longest,
                               .step_tokens = chunk_of(s, longest),
                               .is_streaming = true});
  for (size_t i = 0; i < TD_COUNT(prompts); i++)
    stream_case(s, &r, prompts[i]);
  close_rig(s, &r);
  const uint32_t n = fewer(s, DENSE_PROMPT, MIN_PROMPT);
  r = open_rig(s, s->model.model,
               &(rig_opts){.n_seqs = 1,
                           .seq_tokens = n,
                           .step_tokens = chunk_of(s, n),
                           .is_streaming = true,
                           .n_streamed_dense = s->model.config.n_layers});
  stream_case(s, &r, DENSE_PROMPT);
  close_rig(s, &r);
}

// ---- decode -------------------------------------------------------------------------------------

// Bytes of the experts used by at least one token of the last step.
static double routed_bytes(const td_gpu_steps *s, const rig *r) {
  const td_model_config *c = &s->model.config;
  double n_chosen = 0;
  for (uint32_t i = 0; i < c->n_layers; i++) {
    bool is_chosen[1024] = {false};
    uint32_t n_tokens;
    const int32_t *ids = td_engine_routing(r->engine, i, &n_tokens);
    for (uint32_t k = 0; ids && k < n_tokens * c->top_k; k++) {
      n_chosen += !is_chosen[ids[k]];
      is_chosen[ids[k]] = true;
    }
  }
  return n_chosen * (double)s->model.layer_bytes / c->n_experts;
}

typedef struct {
  double seconds, bytes; // per step: median, mean
} decode_time;

// NaN activations would route all tokens to the same experts and make steps too fast.
static void need_choices(const td_gpu_steps *s, uint32_t batch, double bytes) {
  const td_model_config *c = &s->model.config;
  const double of_all = (double)td_model_stats_of(s->model.model).expert_bytes;
  if (batch == 1 || bytes > 1.1 * of_all * c->top_k / c->n_experts) return;
  fprintf(stderr, "bench_gpu: all of %u tokens chose the same experts: not a measurement\n", batch);
  exit(1);
}

static decode_time measure_decode(td_gpu_steps *s, rig *r, uint32_t batch, uint32_t n_drafted) {
  const step_shape shape = {
      .n_decode = batch, .n_past = fewer(s, DEPTH, 1), .n_drafted = n_drafted};
  double seconds[MAX_STEPS], bytes = 0, sum = 0;
  uint32_t n = 0;
  run_step(s, r, &shape); // allocates memory, then captures a graph
  run_step(s, r, &shape);
  const uint32_t least = s->b->shrink > 1 ? 1 : MIN_STEPS;
  while (n < MAX_STEPS && (n < least || (s->b->shrink == 1 && sum < CASE_S))) {
    seconds[n] = run_step(s, r, &shape);
    sum += seconds[n++];
    bytes += routed_bytes(s, r);
  }
  need_choices(s, batch, bytes / n);
  return (decode_time){td_median(seconds, n), bytes / n};
}

static void decode_case(td_gpu_steps *s, rig *r, uint32_t n_microbatches, uint32_t batch,
                        uint32_t n_drafted) {
  const decode_time t = measure_decode(s, r, batch, n_drafted);
  begin(s, "decode");
  td_jw_add(s->b->json,
            "'batch': %u, 'drafted': %u, 'microbatches': %u, 'cpu_threads': %u, 'keys': %u, "
            "'itl_ms': %g, 'tokens_per_s': %g, 'expert_bytes': %g, 'expert_gbps': %g",
            batch, n_drafted, n_microbatches, atomic_load(&s->n_active), fewer(s, DEPTH, 1) + 1,
            t.seconds * 1e3, batch / t.seconds, t.bytes, t.bytes / t.seconds * 1e-9);
  if (s->b->read_gbps > 0) {
    td_jw_double(s->b->json, "share_of_read_bandwidth",
                 t.bytes / t.seconds * 1e-9 / s->b->read_gbps);
  }
  end(s);
}

// Batches, and one sequence with drafts.
void td_gpu_path_decode(td_gpu_steps *s) {
  enum { DRAFTED = 2 };
  static const uint32_t batches[] = {1, 4, 8, MAX_BATCH};
  warm_up(s, MIN_PROMPT);
  for (uint32_t n_microbatches = 1; n_microbatches <= 2; n_microbatches++) {
    rig r = open_rig(s, s->model.model,
                     &(rig_opts){.n_seqs = MAX_BATCH,
                                 .seq_tokens = DEPTH + PAGE_TOKENS,
                                 .step_tokens = MAX_BATCH,
                                 .n_microbatches = n_microbatches});
    for (size_t i = 0; i < TD_COUNT(batches); i++) {
      if (batches[i] < n_microbatches) continue;
      for (uint32_t less = 0; less < 2 && less < s->n_threads; less++) {
        atomic_store(&s->n_active, s->n_threads - less);
        decode_case(s, &r, n_microbatches, batches[i], 0);
      }
    }
    atomic_store(&s->n_active, s->n_threads);
    if (n_microbatches == 1) decode_case(s, &r, 1, 1, DRAFTED);
    close_rig(s, &r);
  }
  atomic_store(&s->n_active, 0);
}

// ---- decode concurrent with prefill -------------------------------------------------------------

enum { MAX_GAPS = 4096, ALONE_STEPS = 7 };
#define BESIDE_S 8.0 // of a prompt at most; the rest of it is abandoned

// A prompt whose experts stream, and one sequence that decodes beside it, as in a worker.
typedef struct {
  td_gpu_steps *s;
  rig *prefill, *decode;
  uint32_t depth;
  double alone_s;                    // a decode step
  double gaps_s[MAX_GAPS];           // decode steps beside the prompt
  uint32_t n;                        // of them
  double seconds, stream_gbps;       // of the prompt
  uint64_t until_bytes, ahead_bytes; // see feed
  bool is_whole;                     // not abandoned
} interference;

static void feed(void *ctx) {
  const interference *t = ctx;
  td_engine *engine = t->prefill->engine;
  const uint64_t queued_bytes = td_engine_stream_progress(engine).queued_bytes;
  td_engine_feed(engine, queued_bytes < t->until_bytes ? t->ahead_bytes : 0);
}

// Runs a decode step and feeds the prompt meanwhile, as far as pace allows. Returns whether the
// prompt is done.
static bool run_beside(interference *t, td_stream_pace *pace) {
  td_engine *engine = t->prefill->engine;
  const td_stream_progress before = td_engine_stream_progress(engine);
  t->until_bytes = before.copied_bytes + td_stream_pace_ahead(pace, 1);
  t->ahead_bytes = td_stream_pace_ahead(pace, 0);
  feed(t);
  td_step_seq seqs[MAX_BATCH + 1];
  const uint32_t n = build_step(t->s, t->decode, &(step_shape){.n_decode = 1, .n_past = t->depth},
                                seqs);
  td_err err;
  const double start = td_clock_s();
  td_gpu_must(td_engine_step_with(t->decode->engine, seqs, n, feed, t, &err), &err);
  const double gap_s = td_clock_s() - start;
  const bool is_done = td_engine_feed(engine, 0);
  const td_stream_progress after = td_engine_stream_progress(engine);
  const td_timed_step step = {.n_decode = 1,
                              .ns = (uint64_t)(gap_s * 1e9),
                              .copied_bytes = after.copied_bytes - before.copied_bytes,
                              .left_bytes = after.queued_bytes - after.copied_bytes,
                              .copying_ns = after.copying_ns - before.copying_ns};
  td_stream_pace_note(pace, &step);
  if (!is_done && t->n < MAX_GAPS) t->gaps_s[t->n++] = gap_s;
  return is_done;
}

static void measure_beside(interference *t, uint32_t n_prompt, double slowdown) {
  td_step_seq seqs[MAX_BATCH + 1];
  td_err err;
  td_engine *engine = t->prefill->engine;
  td_stream_pace pace;
  td_stream_pace_init(&pace, slowdown);
  const uint32_t n = build_step(t->s, t->prefill, &(step_shape){.n_prompt = n_prompt}, seqs);
  const uint64_t copied = td_engine_stream_progress(engine).copied_bytes;
  t->n = 0;
  t->is_whole = false;
  const double start = td_clock_s();
  td_gpu_must(td_engine_begin(engine, seqs, n, &err), &err);
  const double max_s = t->s->b->shrink > 1 ? BESIDE_S / 10 : BESIDE_S;
  while (!t->is_whole && td_clock_s() - start < max_s)
    t->is_whole = run_beside(t, &pace);
  t->seconds = td_clock_s() - start;
  t->stream_gbps = (double)(td_engine_stream_progress(engine).copied_bytes - copied) / t->seconds *
                   1e-9;
  td_gpu_must(td_engine_end(engine, &err), &err);
}

// slowdown 0: without a limit. is_confined: the prompt has a share of the SMs only.
static void interference_case(interference *t, uint32_t n_prompt, double slowdown,
                              bool is_confined) {
  td_engine_confine(t->prefill->engine, is_confined);
  const uint64_t confined = td_engine_stream_progress(t->prefill->engine).confined_bytes;
  measure_beside(t, n_prompt, slowdown > 0 ? slowdown : 1000);
  const double gbytes = (double)td_model_stats_of(t->s->model.model).expert_bytes * 1e-9;
  double sum = 0, longest = 0;
  for (uint32_t i = 0; i < t->n; i++) {
    sum += t->gaps_s[i];
    if (t->gaps_s[i] > longest) longest = t->gaps_s[i];
  }
  td_json_writer *w = t->s->b->json;
  begin(t->s, "interference");
  td_jw_int(w, "prompt_tokens_a_step", n_prompt);
  if (slowdown > 0) td_jw_double(w, "slowdown_limit", slowdown);
  // not where the device has no shares
  td_jw_add(w, "'is_confined': %i, 'decode_steps': %u, 'itl_alone_ms': %g",
            td_engine_stream_progress(t->prefill->engine).confined_bytes > confined, t->n,
            t->alone_s * 1e3);
  if (t->n) {
    const double itl_s = td_median(t->gaps_s, t->n);
    td_jw_add(w, "'itl_ms': %g, 'itl_mean_ms': %g, 'itl_max_ms': %g, 'itl_over_alone': %g",
              itl_s * 1e3, sum / t->n * 1e3, longest * 1e3, itl_s / t->alone_s);
  }
  td_jw_double(w, "prompt_s", t->seconds);
  td_jw_bool(w, "is_whole_prompt", t->is_whole);
  td_jw_double(w, "stream_gbps", t->stream_gbps);
  td_jw_double(w, "share_of_pinned_bandwidth", t->stream_gbps / t->s->b->pinned_gbps);
  td_jw_double(w, "prompt_tokens_per_s", n_prompt * t->stream_gbps / gbytes);
  end(t->s);
}

void td_gpu_path_interference(td_gpu_steps *s) {
  static const uint32_t prompts[] = {8192, LONGEST_PROMPT};
  const uint32_t longest = fewer(s, LONGEST_PROMPT, MIN_PROMPT);
  warm_up(s, fewer(s, 2048, MIN_PROMPT));
  rig prefill = open_rig(s, s->model.model,
                         &(rig_opts){.n_seqs = 1,
                                     .seq_tokens = longest,
                                     .step_tokens = chunk_of(s, longest),
                                     .is_streaming = true});
  rig decode = open_rig(s, s->model.model,
                        &(rig_opts){.n_seqs = 1,
                                    .seq_tokens = DEPTH + PAGE_TOKENS,
                                    .step_tokens = 1,
                                    .n_microbatches = 1,
                                    .is_urgent = true});
  static interference t;
  t = (interference){.s = s, .prefill = &prefill, .decode = &decode, .depth = fewer(s, DEPTH, 1)};
  double alone_s[ALONE_STEPS];
  for (int i = -2; i < ALONE_STEPS; i++) {
    const double seconds = run_step(t.s, t.decode, &(step_shape){.n_decode = 1, .n_past = t.depth});
    if (i >= 0) alone_s[i] = seconds;
  }
  t.alone_s = td_median(alone_s, ALONE_STEPS);
  for (size_t i = 0; i < TD_COUNT(prompts); i++) {
    const uint32_t n = chunk_of(s, fewer(s, prompts[i], MIN_PROMPT));
    interference_case(&t, n, 0, false);
    interference_case(&t, n, 0, true);
    interference_case(&t, n, 0.15, true);
  }
  close_rig(s, &decode);
  close_rig(s, &prefill);
}
