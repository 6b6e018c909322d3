// src/cli/plan.c - `tandem plan`: how long prompts and tokens take on a machine.
#include "cli/plan.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/fs.h"
#include "base/units.h"
#include "bench/this_rig.h"
#include "cli/cli.h"
#include "engine/attn/kind.h"
#include "engine/vision/vision.h"
#include "model/outline.h"
#include "runtime/command.h"

static int32_t usual_prompts[] = {2048, 8192, 32768}, usual_batches[] = {1};
const td_plan_opts td_plan_usual = {.prompts = {usual_prompts, TD_COUNT(usual_prompts)},
                                    .batches = {usual_batches, TD_COUNT(usual_batches)},
                                    .hit_rate = -1,
                                    .acceptance = 0.7};

// A model on a machine.
typedef struct {
  td_plan_load load;
  td_rig rig;
  td_card_plan card;
  const td_plan_opts *opts;
} setup;

static void divide(setup *s) {
  s->card = (td_card_plan){.fits = false};
  if (s->rig.n_gpus) s->card = td_card_plan_of(&s->load, &s->rig, &s->opts->cache);
}

static const td_card_plan *card_of(const setup *s) {
  return s->card.fits ? &s->card : NULL;
}

static td_drive_plan drive_of(const setup *s) {
  td_drive_plan d = td_drive_plan_of(&s->load, &s->rig, card_of(s) ? s->rig.n_gpus : 0);
  d.is_needed &= !card_of(s) || s->card.experts_stream;
  d.does_stream &= d.is_needed;
  return d;
}

static double share_cached(const setup *s) {
  const td_model_config *c = s->load.config;
  uint32_t n = 0;
  for (uint32_t i = s->card.n_gpu_expert_layers; i < c->n_layers; i++)
    n += s->load.layer_bytes[i] ? c->n_experts : 0;
  return n && s->card.n_cached < n ? (double)s->card.n_cached / n : n ? 1 : 0;
}

// A prompt of n tokens, or a step of n sequences with n_drafts guesses each.
typedef struct {
  bool is_prompt;
  uint32_t n, n_drafts;
} work;

static td_plan_time time_of(const setup *s, const work *w) {
  if (w->is_prompt) return td_prefill_time_of(&s->load, &s->rig, card_of(s), w->n);
  const double hits = s->opts->hit_rate < 0 ? share_cached(s) : s->opts->hit_rate;
  const td_decode_work step = {w->n, 1 + w->n_drafts, s->opts->depth, hits};
  return td_decode_time_of(&s->load, &s->rig, card_of(s), &step);
}

// ---- what would lift a limit --------------------------------------------------------------------

static void faster_memory(setup *s) {
  s->rig.read_gbps *= 2;
}
static void faster_nodes(setup *s) {
  s->rig.remote_gbps *= 2;
}
static void more_cores(setup *s) {
  s->rig.gflops *= 2;
  s->rig.n_cores *= 2;
}
static void more_gpus(setup *s) {
  if (!s->rig.n_gpus)
    td_rig_use_cards(&s->rig, "+rtx-5090", NULL);
  else
    s->rig.n_gpus++;
}
static void faster_link(setup *s) {
  s->rig.gpu.link_gbps *= 2;
}
static void faster_gpu(setup *s) {
  s->rig.gpu.tflops *= 2;
  s->rig.gpu.f16.tflops *= 2;
  for (int i = 0; i < TD_N_ACTIVATIONS; i++)
    s->rig.gpu.a8[i].tflops *= 2;
  s->rig.gpu.read_gbps *= 2;
}
static void more_memory(setup *s) {
  s->rig.memory_bytes += (uint64_t)32 << 30;
}
static void much_more_memory(setup *s) {
  s->rig.memory_bytes += (uint64_t)64 << 30;
}
// Where nothing is known of the link between sockets it reads half of what memory does.
static void more_sockets(setup *s) {
  s->rig.remote_gbps = s->rig.n_nodes > 1 ? 2 * s->rig.remote_gbps : s->rig.read_gbps / 2;
  s->rig.n_nodes *= 2;
  s->rig.memory_bytes *= 2;
  s->rig.read_gbps *= 2;
  more_cores(s);
}
static void faster_drive(setup *s) {
  s->rig.drive_gbps *= 2;
}
static void smaller_weights(setup *s) {
  for (uint32_t i = 0; i < s->load.config->n_layers; i++) {
    s->load.layer_bytes[i] /= 2;
    for (int k = 0; k < TD_N_DENSE_PARTS; k++)
      s->load.dense[i].bytes[k] /= 2;
  }
  s->load.other_bytes /= 2;
  s->load.step_bytes /= 2;
}

typedef enum { ALWAYS, WITH_GPU, WITHOUT_GPU, WITH_DRIVE, TO_BUY } change_kind;

static const struct {
  const char *what;
  void (*apply)(setup *s);
  change_kind kind;
} changes[] = {{"memory twice as fast (more channels)", faster_memory, ALWAYS},
               {"a link between nodes twice as fast", faster_nodes, ALWAYS},
               {"twice the cores", more_cores, ALWAYS},
               {"an RTX 5090", more_gpus, WITHOUT_GPU},
               {"one more GPU", more_gpus, WITH_GPU},
               {"a link twice as fast", faster_link, WITH_GPU},
               {"GPUs twice as fast", faster_gpu, WITH_GPU},
               {"32 GiB more memory", more_memory, WITH_DRIVE},
               {"a drive twice as fast (or two as one)", faster_drive, WITH_DRIVE},
               {"64 GiB more memory", much_more_memory, TO_BUY},
               {"twice the sockets, each with its memory", more_sockets, TO_BUY},
               {"weights of half the bits", smaller_weights, ALWAYS}};

static bool applies(const setup *s, change_kind kind) {
  switch (kind) {
  case WITH_GPU: return card_of(s) != NULL;
  case WITHOUT_GPU: return card_of(s) == NULL && td_attn_has_gpu(s->load.config);
  case WITH_DRIVE: return drive_of(s).does_stream;
  default: return true;
  }
}

typedef struct {
  const char *what;
  double seconds;
} lift;
enum { MAX_LIFTS = 2 };

static setup changed(const setup *s, size_t i) {
  setup other = *s;
  changes[i].apply(&other);
  divide(&other);
  return other;
}

// The changes that shorten the work most, by a tenth at least, but for what is bought whole.
// Returns their number.
static uint32_t find_lifts(const setup *s, const work *w, double seconds, lift out[MAX_LIFTS]) {
  uint32_t n = 0;
  for (size_t i = 0; i < TD_COUNT(changes); i++) {
    if (changes[i].kind == TO_BUY || !applies(s, changes[i].kind)) continue;
    const setup other = changed(s, i);
    const lift one = {changes[i].what, time_of(&other, w).seconds};
    if (one.seconds > 0.9 * seconds) continue;
    uint32_t at = n < MAX_LIFTS ? n++ : MAX_LIFTS;
    for (; at > 0 && one.seconds < out[at - 1].seconds; at--)
      if (at < MAX_LIFTS) out[at] = out[at - 1];
    if (at < MAX_LIFTS) out[at] = one;
  }
  return n;
}

// ---- drafts -------------------------------------------------------------------------------------

enum { MAX_DRAFTS = 3 };

typedef struct {
  double seconds, break_even; // of a step; the acceptance from which it pays, above 1: never
  double tokens_per_s;        // at opts->acceptance
} draft_plan;

static double tokens_drawn(double acceptance, uint32_t n_drafts) {
  double sum = 1, reach = 1;
  for (uint32_t i = 0; i < n_drafts; i++)
    sum += reach *= acceptance;
  return sum;
}

// Why nothing is drafted for n_seqs sequences; NULL: *most drafts of each may be.
static const char *no_drafts(const setup *s, uint32_t n_seqs, uint32_t *most) {
  const td_kv_layout layout = td_kv_layout_of(s->load.config, s->load.kv_dtype, 0);
  const td_card_plan *card = card_of(s);
  const char *why = td_draft_hindrance(&layout, card && card->n_cached > 0);
  *most = td_draft_max_each(n_seqs, td_attn_has_states(s->load.config), card != NULL);
  if (*most > MAX_DRAFTS) *most = MAX_DRAFTS;
  if (!why && card && !card->drafts.are_verified) why = "too little GPU memory for them";
  if (!why && !*most) why = "a step of that many sequences leaves no room for them";
  if (why) *most = 0;
  return why;
}

// Behind a step the model's layer that drafts computes the tokens that were drawn, then one of
// every sequence for each guess but the first.
static double guesses_s(const setup *s, uint32_t n_seqs, uint32_t n_drafts, double acceptance) {
  const double n_drawn = n_seqs * tokens_drawn(acceptance, n_drafts);
  return td_draft_time_of(&s->load, &s->rig, card_of(s), n_drawn, n_seqs) +
         (n_drafts - 1) * td_draft_time_of(&s->load, &s->rig, card_of(s), n_seqs, n_seqs);
}

static draft_plan plan_drafts(const setup *s, uint32_t n_seqs, uint32_t n_drafts, double alone_s) {
  const double verified_s = time_of(s, &(work){.n = n_seqs, .n_drafts = n_drafts}).seconds;
  const double max_s = verified_s + guesses_s(s, n_seqs, n_drafts, 1);
  const double seconds = verified_s + guesses_s(s, n_seqs, n_drafts, s->opts->acceptance);
  double low = 0, high = 1;
  for (int i = 0; i < 30; i++) {
    const double mid = (low + high) / 2;
    const double step_s = verified_s + guesses_s(s, n_seqs, n_drafts, mid);
    if (tokens_drawn(mid, n_drafts) * alone_s < step_s)
      low = mid;
    else
      high = mid;
  }
  const bool pays = (1 + n_drafts) * alone_s > max_s;
  return (draft_plan){seconds, pays ? high : 2,
                      n_seqs * tokens_drawn(s->opts->acceptance, n_drafts) / seconds};
}

// ---- text ---------------------------------------------------------------------------------------

static void add_limit(td_buf *out, const setup *s, const work *w, const td_plan_time *t) {
  lift lifts[MAX_LIFTS];
  const td_limit limit = td_plan_time_limit(t);
  td_buf_printf(out, "  limit       %s, busy for %.0f %% of the time\n", td_limit_name(limit),
                100 * fmin(t->busy_s[limit] / t->seconds, 1));
  const uint32_t n = find_lifts(s, w, t->seconds, lifts);
  for (uint32_t i = 0; i < n; i++) {
    const double times = t->seconds / lifts[i].seconds;
    td_buf_printf(out, "%s%.*f times with %s", i ? ", " : "  faster      ", times < 10, times,
                  lifts[i].what);
  }
  if (n) td_buf_str(out, "\n");
}

// Of a machine of several NUMA nodes: seconds that the work takes on one of them alone.
static double one_node_seconds(const setup *s, const work *w) {
  setup one = *s;
  one.rig = td_rig_node(&s->rig);
  divide(&one);
  return time_of(&one, w).seconds;
}

static void add_nodes(td_buf *out, const setup *s, const work *w, const td_plan_time *t) {
  const uint32_t n = s->rig.n_nodes;
  if (n < 2 || t->host_bytes <= 0) return;
  const double one_s = one_node_seconds(s, w);
  td_buf_printf(out,
                "  nodes       each of %u reads %.2f GB of its own memory and %.2f GB of others', "
                "the link between them busy for %.0f %% of the time; %.2f times as fast as one\n",
                n, (t->host_bytes - t->remote_bytes) / n * 1e-9, t->remote_bytes / n * 1e-9,
                100 * t->busy_s[TD_LIMIT_NODES] / t->seconds, one_s / t->seconds);
}

// Without a card that holds them.
static uint64_t host_kv_bytes(const setup *s) {
  return td_engine_kv_bytes(s->load.config, s->load.kv_dtype,
                            td_plan_load_ctx(&s->load) * s->load.n_seqs);
}

enum { IMAGE_SIDE = 1024 }; // pixels

static double image_seconds(const setup *s) {
  const td_vision_config *v = &s->load.config->vision;
  const double side = (double)(IMAGE_SIDE / v->patch);
  return td_vision_flops(v, side * side) / (s->rig.gflops * 1e9);
}

static void add_images(td_buf *out, const setup *s) {
  const td_vision_config *v = &s->load.config->vision;
  if (!v->n_layers) return;
  const uint32_t side = IMAGE_SIDE / (v->patch * v->merge);
  td_buf_printf(out, "image         %d x %d pixels: %u tokens, embedded by the CPU in %.1f s\n",
                IMAGE_SIDE, IMAGE_SIDE, side * side, image_seconds(s));
}

static void add_ctx_size(td_buf *out, const setup *s) {
  if (s->load.ctx_size) td_buf_printf(out, " (with --ctx-size %u)", s->load.ctx_size);
}

static void add_memory(td_buf *out, const setup *s) {
  const double experts = (double)td_plan_load_expert_bytes(&s->load);
  const double other = (double)s->load.other_bytes;
  const td_card_plan *card = card_of(s);
  const double host = (card ? 0 : other) + (card && !card->experts_stream ? 0 : experts) +
                      (double)s->load.vision_bytes;
  const double rows = card ? (double)card->ngram_bytes : 0;
  const uint32_t n_kv = td_plan_load_ctx(&s->load) * s->load.n_seqs;
  const double kv = card ? 0 : (double)host_kv_bytes(s);
  td_buf_printf(out, "memory        %s of weights", td_size(host).text);
  if (!card) {
    td_buf_printf(out, ", %s for keys and values of %u tokens", td_size(kv).text, n_kv);
    add_ctx_size(out, s);
  }
  if (rows > 0) td_buf_printf(out, " and %s for rows of n-grams", td_size(rows).text);
  td_buf_printf(out, " in the CPU's %.0f GiB", td_gib(s->rig.memory_bytes));
  const td_drive_plan drive = drive_of(s);
  if (drive.does_stream) {
    td_buf_printf(out,
                  ", which hold %.0f %% of the experts; about %.0f %% of a token's are found there "
                  "(assumed), others come from the drive at %.1f GB/s",
                  100 * drive.share, 100 * drive.hit_rate, s->rig.drive_gbps);
  } else if (1.1 * (host + rows) + kv > (double)s->rig.memory_bytes) {
    td_buf_str(out, ": they do not fit, and would be read from a drive, which a machine's file may "
                    "have (drive_gbps); figures are as if they did");
  }
  td_buf_str(out, "\n");
  if (s->rig.n_gpus && !card)
    td_buf_printf(out,
                  "              the GPU's %.0f GiB do not hold the %s beside the experts; "
                  "without it:\n",
                  td_gib(s->rig.gpu.memory_bytes), td_size(other).text);
  if (!card) return;
  const uint64_t experts_here = card->own_bytes + card->cache_bytes;
  td_buf_printf(out, "on the GPU    %s of weights", td_size(card->weight_bytes).text);
  if (experts_here) td_buf_printf(out, ", %s of experts", td_size(experts_here).text);
  if (card->experts_stream)
    td_buf_printf(out, ", %s to stream others through", td_size(card->memory.stream_bytes).text);
  if (card->drafts.bytes) td_buf_printf(out, ", %s for drafts", td_size(card->drafts.bytes).text);
  if (card->kv_tokens) {
    td_buf_printf(out, ", %s for keys and values of %u tokens", td_size(card->kv_bytes).text,
                  card->kv_tokens);
    add_ctx_size(out, s);
    td_buf_char(out, '\n');
  } else {
    td_buf_printf(out, "; keys and values of %u tokens do not fit: a smaller --ctx-size may\n",
                  td_plan_load_ctx(&s->load));
  }
  if (s->rig.n_gpus == 1 && card->long_steps.prefill_chunk) {
    td_buf_printf(
        out,
        "              while nothing decodes, long prompts have steps of %u tokens: dense "
        "weights stream then, and %s are for experts\n",
        card->long_steps.prefill_chunk, td_size(card->long_steps.stream_bytes).text);
  }
}

static void add_prompt(td_buf *out, const setup *s, uint32_t n) {
  const work w = {.is_prompt = true, .n = n};
  const td_plan_time t = time_of(s, &w);
  td_buf_printf(out, "prompt        %u tokens: %.2f s, %.0f tokens/s", n, t.seconds, n / t.seconds);
  if (t.n_steps > 1) td_buf_printf(out, ", in %u steps", t.n_steps);
  if (card_of(s) && n > s->card.kv_tokens) td_buf_printf(out, " (with --ctx-size %u)", n);
  td_buf_str(out, "\n");
  if (s->opts->is_short) return;
  add_limit(out, s, &w, &t);
  add_nodes(out, s, &w, &t);
}

static void add_drafts(td_buf *out, const setup *s, uint32_t n_seqs, double alone_s) {
  uint32_t most;
  const char *why = no_drafts(s, n_seqs, &most);
  if (why) {
    td_buf_printf(out, "  drafts      none: %s\n", why);
    return;
  }
  td_buf_printf(out, "  drafts      of which %.0f %% are right:", 100 * s->opts->acceptance);
  for (uint32_t n = 1; n <= most; n++) {
    const draft_plan d = plan_drafts(s, n_seqs, n, alone_s);
    td_buf_printf(out, "%s %u a step: %.1f tokens/s, ", n > 1 ? ";" : "", n, d.tokens_per_s);
    if (d.break_even <= 1)
      td_buf_printf(out, "pays from %.0f %%", 100 * d.break_even);
    else
      td_buf_str(out, "never pays");
  }
  td_buf_str(out, "\n");
}

static void add_decode(td_buf *out, const setup *s, uint32_t n_seqs) {
  const work w = {.n = n_seqs};
  const td_plan_time t = time_of(s, &w);
  td_buf_printf(out, "decode        %u request%s", n_seqs, n_seqs == 1 ? "" : "s");
  if (s->opts->depth) td_buf_printf(out, " behind %u tokens", s->opts->depth);
  td_buf_printf(out, ": %.1f tokens/s, %.1f ms a step\n", n_seqs / t.seconds, t.seconds * 1e3);
  if (s->opts->is_short) return;
  add_limit(out, s, &w, &t);
  add_nodes(out, s, &w, &t);
  add_drafts(out, s, n_seqs, t.seconds);
}

// ---- what if ------------------------------------------------------------------------------------

typedef struct {
  const char *what;
  double tokens_per_s, prompt_s; // of the first batch, of the last prompt
} outcome;

static outcome outcome_of(const setup *s, const char *what) {
  const uint32_t n_seqs = (uint32_t)s->opts->batches.values[0];
  const uint32_t n = (uint32_t)s->opts->prompts.values[s->opts->prompts.n - 1];
  return (outcome){what, n_seqs / time_of(s, &(work){.n = n_seqs}).seconds,
                   time_of(s, &(work){.is_prompt = true, .n = n}).seconds};
}

// Fastest decode first, then shortest prompt.
static int by_speed(const void *a, const void *b) {
  const outcome *x = a, *y = b;
  if (x->tokens_per_s != y->tokens_per_s) return x->tokens_per_s < y->tokens_per_s ? 1 : -1;
  return (x->prompt_s > y->prompt_s) - (x->prompt_s < y->prompt_s);
}

// As it is, then each change that applies and shows, ranked. Returns their number.
static size_t try_changes(const setup *s, outcome out[1 + TD_COUNT(changes)]) {
  size_t n = 0;
  out[n++] = outcome_of(s, "as it is");
  for (size_t i = 0; i < TD_COUNT(changes); i++) {
    if (changes[i].kind != TO_BUY && !applies(s, changes[i].kind)) continue;
    const setup other = changed(s, i);
    out[n] = outcome_of(&other, changes[i].what);
    n += changes[i].kind == TO_BUY || fabs(out[n].tokens_per_s / out[0].tokens_per_s - 1) > 0.01 ||
         fabs(out[n].prompt_s / out[0].prompt_s - 1) > 0.01;
  }
  qsort(out + 1, n - 1, sizeof *out, by_speed);
  return n;
}

static void add_what_if(td_buf *out, const setup *s) {
  outcome all[1 + TD_COUNT(changes)];
  const size_t n = try_changes(s, all);
  td_buf_printf(out, "what if       %-40s decode tokens/s   seconds of the last prompt\n", "");
  for (size_t i = 0; i < n; i++)
    td_buf_printf(out, "              %-40s %8.1f (%4.2fx)  %10.2f (%4.2fx)\n", all[i].what,
                  all[i].tokens_per_s, all[i].tokens_per_s / all[0].tokens_per_s, all[i].prompt_s,
                  all[0].prompt_s / all[i].prompt_s);
}

static void add_json_what_if(td_json_writer *w, const setup *s) {
  outcome all[1 + TD_COUNT(changes)];
  const size_t n = try_changes(s, all);
  td_jw_begin_array(w, "what_if");
  for (size_t i = 0; i < n; i++) {
    td_jw_add(w, "{'with': %s, 'tokens_per_s': %g, 'prompt_seconds': %g}", all[i].what,
              all[i].tokens_per_s, all[i].prompt_s);
  }
  td_jw_end_array(w);
}

// KV pages are for the requests that are planned.
static uint32_t most_requests(const td_plan_opts *opts) {
  int32_t most = 1;
  for (uint32_t i = 0; i < opts->batches.n; i++)
    if (opts->batches.values[i] > most) most = opts->batches.values[i];
  return (uint32_t)most;
}

static setup setup_of(const td_model *model, const td_rig *rig, const td_plan_opts *opts) {
  setup s = {.load = td_plan_load_of(model), .rig = *rig, .opts = opts};
  s.load.activations = opts->activations;
  s.load.kv_dtype = opts->kv_dtype;
  s.load.ctx_size = opts->ctx_size;
  s.load.n_seqs = most_requests(opts);
  divide(&s);
  return s;
}

td_plan_summary td_plan_summary_of(const td_model *model, const td_rig *rig,
                                   const td_plan_opts *opts) {
  const setup s = setup_of(model, rig, opts);
  const td_drive_plan drive = drive_of(&s);
  const outcome all = outcome_of(&s, NULL);
  return (td_plan_summary){.from_drive = drive.is_needed,
                           .share = drive.does_stream ? drive.share : 0,
                           .tokens_per_s = all.tokens_per_s,
                           .prompt_s = all.prompt_s};
}

static const char *source(bool is_assumed) {
  return is_assumed ? " (assumed)" : "";
}

static const char *name_of_a8(td_activations activations) {
  return activations == TD_ACTIVATIONS_INT8 ? "INT8" : "FP8";
}

static void add_fast(td_buf *out, const td_gpu_card *gpu, const td_fast_rate *rate,
                     const char *name) {
  if (rate->tflops > 0)
    td_buf_printf(out, "%g in %s%s, ", rate->tflops, name,
                  source(rate->is_assumed && !gpu->is_assumed));
}

void td_plan_add(td_buf *out, const td_model *model, const td_rig *rig, const td_plan_opts *opts) {
  const setup s = setup_of(model, rig, opts);
  td_buf_printf(out, "machine       %s: reads %.1f GB/s, computes %.0f GFLOP/s%s\n", rig->name,
                rig->read_gbps, rig->gflops, source(rig->is_assumed));
  if (rig->n_nodes > 1) {
    td_buf_printf(out,
                  "              %u NUMA nodes, which read %.1f GB/s of each other's memory%s\n",
                  rig->n_nodes, rig->remote_gbps, source(rig->is_assumed));
  }
  const td_gpu_card *gpu = &rig->gpu;
  if (rig->n_gpus) {
    td_buf_printf(out, "GPU           %s, %.0f GiB: %g GB/s to it, %g TFLOP/s in prompts, ",
                  gpu->name, td_gib(gpu->memory_bytes), gpu->link_gbps, gpu->tflops);
    add_fast(out, gpu, &gpu->f16, "F16");
    add_fast(out, gpu, &gpu->a8[opts->activations], name_of_a8(opts->activations));
    td_buf_printf(out, "%g GB/s in decode%s\n", gpu->read_gbps, source(gpu->is_assumed));
  }
  add_memory(out, &s);
  add_images(out, &s);
  for (uint32_t i = 0; i < opts->prompts.n; i++)
    add_prompt(out, &s, (uint32_t)opts->prompts.values[i]);
  for (uint32_t i = 0; i < opts->batches.n; i++)
    add_decode(out, &s, (uint32_t)opts->batches.values[i]);
  if (opts->what_if) add_what_if(out, &s);
}

void td_plan_add_cards(td_buf *out, const td_model *model, const td_rig *rig,
                       const td_plan_opts *opts) {
  enum { TOKENS = 32768 };
  if (!td_attn_has_gpu(td_model_config_of(model))) return;
  for (const td_rig_file *f = td_card_files; f->name; f++) {
    td_rig with = *rig;
    char name[64];
    snprintf(name, sizeof name, "+%s", f->name);
    if (td_rig_use_cards(&with, name, NULL) != TD_OK) continue;
    const setup s = setup_of(model, &with, opts);
    td_buf_printf(out, "  with        %-12s %3.0f GB: ", with.gpu.name,
                  td_gib(with.gpu.memory_bytes));
    if (!card_of(&s)) {
      td_buf_printf(out, "does not hold the %s beside the experts, so the CPU computes alone\n",
                    td_size(s.load.other_bytes).text);
      continue;
    }
    const td_plan_time prompt = time_of(&s, &(work){.is_prompt = true, .n = TOKENS});
    const td_plan_time token = time_of(&s, &(work){.n = 1});
    td_buf_printf(out, "prompt of %d tokens %.1f s, decode %.1f tokens/s%s\n", TOKENS,
                  prompt.seconds, 1 / token.seconds, source(with.gpu.is_assumed));
  }
}

// ---- JSON ---------------------------------------------------------------------------------------

static void add_json_time(td_json_writer *w, const setup *s, const work *what) {
  static const char *const keys[] = {
#define X(id, name) #id,
      TD_LIMITS(X)
#undef X
  };
  const td_plan_time t = time_of(s, what);
  lift lifts[MAX_LIFTS];
  td_buf plan = TD_BUF_INIT;
  td_step_plan_print(&plan, &t.step);
  td_jw_add(w, "'seconds': %g, 'tokens_per_s': %g, 'steps': %u, 'plan': %s", t.seconds,
            what->n / t.seconds, t.n_steps, td_buf_text(&plan));
  td_buf_free(&plan);
  td_jw_add(w, "'binds': %s, 'busy_s': {", td_limit_name(td_plan_time_limit(&t)));
  for (td_limit i = 0; i < TD_N_LIMITS; i++)
    td_jw_double(w, keys[i], t.busy_s[i]);
  td_jw_end_object(w);
  if (s->rig.n_nodes > 1) {
    td_jw_add(w, "'node': {'local_bytes': %g, 'remote_bytes': %g, 'seconds_alone': %g}",
              (t.host_bytes - t.remote_bytes) / s->rig.n_nodes, t.remote_bytes / s->rig.n_nodes,
              one_node_seconds(s, what));
  }
  td_jw_begin_array(w, "lifts");
  const uint32_t n = find_lifts(s, what, t.seconds, lifts);
  for (uint32_t i = 0; i < n; i++)
    td_jw_add(w, "{'by': %s, 'seconds': %g}", lifts[i].what, lifts[i].seconds);
  td_jw_end_array(w);
}

static void add_json_decode(td_json_writer *w, const setup *s, uint32_t n_seqs) {
  const work what = {.n = n_seqs};
  td_jw_add(w, "{'batch': %u, 'depth': %u", n_seqs, s->opts->depth);
  add_json_time(w, s, &what);
  const double alone_s = time_of(s, &what).seconds;
  uint32_t most;
  no_drafts(s, n_seqs, &most);
  td_jw_begin_array(w, "drafts");
  for (uint32_t n = 1; n <= most; n++) {
    const draft_plan d = plan_drafts(s, n_seqs, n, alone_s);
    td_jw_add(w, "{'n': %u, 'seconds': %g, 'tokens_per_s': %g", n, d.seconds, d.tokens_per_s);
    if (d.break_even <= 1) td_jw_double(w, "break_even_acceptance", d.break_even);
    td_jw_end_object(w);
  }
  td_jw_add(w, "]}");
}

static void add_json_card(td_json_writer *w, const td_card_plan *p) {
  const struct {
    const char *key;
    uint64_t value;
  } sizes[] = {{"resident_bytes", p->weight_bytes + p->own_bytes},
               {"stream_bytes", p->memory.stream_bytes},
               {"cache_bytes", p->cache_bytes},
               {"cached_experts", p->n_cached},
               {"expert_layers", p->n_gpu_expert_layers},
               {"prefill_chunk", p->memory.prefill_chunk},
               {"long_prefill_chunk", p->long_steps.prefill_chunk},
               {"long_stream_bytes", p->long_steps.prefill_chunk ? p->long_steps.stream_bytes : 0},
               {"draft_bytes", p->drafts.bytes},
               {"host_ngram_bytes", p->ngram_bytes},
               {"kv_tokens", p->kv_tokens},
               {"kv_bytes", p->kv_bytes}};
  td_jw_begin_object(w, "gpu");
  for (size_t i = 0; i < TD_COUNT(sizes); i++)
    td_jw_int(w, sizes[i].key, (int64_t)sizes[i].value);
  td_jw_end_object(w);
}

void td_plan_add_json(td_json_writer *w, const td_model *model, const td_rig *rig,
                      const td_plan_opts *opts) {
  const setup s = setup_of(model, rig, opts);
  td_jw_add(w, "{'machine': %s", rig->name);
  const td_model_stats stats = td_model_stats_of(model);
  td_jw_str(w, "model", td_model_name(model));
  td_jw_int(w, "params", (int64_t)stats.params);
  td_jw_int(w, "active_params", (int64_t)stats.active_params);
  td_jw_int(w, "weight_bytes", (int64_t)stats.bytes);
  td_jw_int(w, "expert_bytes", (int64_t)stats.expert_bytes);
  if (stats.vision_bytes)
    td_jw_add(w, "'vision_bytes': %lu, 'image_seconds': %g", stats.vision_bytes, image_seconds(&s));
  td_jw_add(w, "'memory_bytes': %lu, 'ctx_size': %u", rig->memory_bytes, td_plan_load_ctx(&s.load));
  if (!s.card.fits) td_jw_int(w, "kv_bytes", (int64_t)host_kv_bytes(&s));
  td_jw_add(w, "'read_gbps': %g, 'gflops': %g", rig->read_gbps, rig->gflops);
  const td_drive_plan drive = drive_of(&s);
  if (drive.does_stream) {
    td_jw_add(w, "'drive_gbps': %g, 'experts_in_memory': %g, 'found_in_memory': %g",
              rig->drive_gbps, drive.share, drive.hit_rate);
  }
  td_jw_int(w, "nodes", rig->n_nodes);
  if (rig->n_nodes > 1) td_jw_double(w, "remote_gbps", rig->remote_gbps);
  const bool is_card_assumed = rig->gpu.is_assumed || rig->gpu.f16.is_assumed ||
                               rig->gpu.a8[opts->activations].is_assumed;
  td_jw_bool(w, "assumed", rig->is_assumed || (rig->n_gpus && is_card_assumed));
  td_jw_bool(w, "fp8_activations", opts->activations == TD_ACTIVATIONS_FP8);
  td_jw_bool(w, "int8_activations", opts->activations == TD_ACTIVATIONS_INT8);
  td_jw_int(w, "gpus", rig->n_gpus);
  if (s.card.fits) add_json_card(w, &s.card);
  td_jw_begin_array(w, "prompts");
  for (uint32_t i = 0; i < opts->prompts.n; i++) {
    const work what = {.is_prompt = true, .n = (uint32_t)opts->prompts.values[i]};
    td_jw_add(w, "{'tokens': %u", what.n);
    add_json_time(w, &s, &what);
    td_jw_end_object(w);
  }
  td_jw_add(w, "], 'decode': [");
  for (uint32_t i = 0; i < opts->batches.n; i++)
    add_json_decode(w, &s, (uint32_t)opts->batches.values[i]);
  td_jw_end_array(w);
  if (opts->what_if) add_json_what_if(w, &s);
  td_jw_end_object(w);
}

// ---- the command --------------------------------------------------------------------------------

// A checkpoint's folder, or the name of a published model.
static td_status open_model(td_model **out, const td_options *o, td_err *err) {
  td_status st = td_cmd_need_model(o, err);
  if (st != TD_OK) return st;
  const td_shape_file *shape = td_shape_find(o->model);
  const char *meant = shape || td_file_exists(o->model) ? NULL : td_shape_closest(o->model);
  if (meant)
    return td_fail(err, TD_EINVAL, "%s: neither a file nor a known model; did you mean %s?",
                   o->model, meant);
  if (!shape || td_file_exists(o->model)) return td_model_open_shapes(out, o->model, err);
  return td_model_outline(out, shape, td_format_named(o->plan_format),
                          err); // options know them all
}

// On a CPU INT8 is for matrices of 4 bits, at no rate of its own.
static td_status check_a8(const td_rig *rig, td_activations activations, td_err *err) {
  const bool is_int8 = activations == TD_ACTIVATIONS_INT8;
  const bool needs_rate = activations == TD_ACTIVATIONS_FP8 || (is_int8 && rig->n_gpus);
  if (!needs_rate || (rig->n_gpus && rig->gpu.a8[activations].tflops > 0)) return TD_OK;
  return td_fail(err, TD_EINVAL,
                 "--activations %s: %s has no GPU with an %s rate (%s): leave it out, or add a "
                 "card that has one, as +rtx-5090",
                 is_int8 ? "int8" : "fp8", rig->name, name_of_a8(activations),
                 is_int8 ? "int8_tops" : "fp8_tflops");
}

// A context for the longest of what is planned and an answer, where the usual one is longer: a
// card's memory is rather for experts than for keys that nobody asked for. 0: the usual one.
static uint32_t planned_ctx(const td_plan_opts *opts, const td_model_config *c) {
  enum { ANSWER = 1024 }; // the default of run's --n-predict
  uint32_t most = opts->depth;
  for (uint32_t i = 0; i < opts->prompts.n; i++)
    if ((uint32_t)opts->prompts.values[i] > most) most = (uint32_t)opts->prompts.values[i];
  const uint32_t n = most + ANSWER;
  return n < td_plan_load_ctx(&(td_plan_load){.config = c}) ? n : 0;
}

int td_cmd_plan(const td_options *o) {
  td_plan_opts opts = {.prompts = o->bench_prompt,
                       .batches = o->bench_batch,
                       .depth = (uint32_t)o->plan_depth,
                       .ctx_size = (uint32_t)o->ctx_size,
                       .hit_rate = o->hit_rate,
                       .acceptance = o->acceptance,
                       .what_if = o->what_if,
                       .activations = o->activations,
                       .kv_dtype = td_cmd_kv_dtype(o)};
  td_err err;
  td_rig rig;
  td_model *model = NULL;
  td_status st = td_expert_cache_parse(&opts.cache, o->expert_cache, &err);
  if (st == TD_OK) st = open_model(&model, o, &err);
  if (st == TD_OK && opts.ctx_size > td_model_config_of(model)->max_position)
    st = td_fail(&err, TD_EINVAL, "--ctx-size %u: the model's longest context is %u tokens",
                 opts.ctx_size, td_model_config_of(model)->max_position);
  if (st == TD_OK && !opts.ctx_size) opts.ctx_size = planned_ctx(&opts, td_model_config_of(model));
  if (st == TD_OK) st = td_attn_check_kv(td_model_config_of(model), opts.kv_dtype, &err);
  if (st == TD_OK) st = td_rig_open(&rig, o->machine, model, (unsigned)o->threads, &err);
  if (st == TD_OK) st = check_a8(&rig, opts.activations, &err);
  td_buf text = TD_BUF_INIT;
  if (st == TD_OK && o->json) {
    td_json_writer w = TD_JSON_WRITER(&text);
    td_plan_add_json(&w, model, &rig, &opts);
    td_buf_char(&text, '\n');
  } else if (st == TD_OK) {
    td_buf_printf(&text, "model         %s\n", td_model_name(model));
    td_plan_add(&text, model, &rig, &opts);
  }
  if (st == TD_OK) st = td_buf_status(&text, &err);
  if (st == TD_OK) fputs(td_buf_text(&text), stdout);
  td_buf_free(&text);
  td_model_close(model);
  return st == TD_OK ? 0 : td_cmd_fail(&err);
}
