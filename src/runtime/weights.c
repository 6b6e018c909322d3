// src/runtime/weights.c - choosing between mapped and resident weights, and loading the latter.
#include "runtime/weights.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/trace.h"
#include "base/units.h"
#include "engine/attn/kind.h"
#include "engine/draft.h"
#include "engine/engine.h"
#include "kv/plan.h"
#include "model/checkpoint/resident.h"
#include "model/drive/arena.h"

#define SAY_NS     10000000000u // between two progress lines in a log
#define LINE_CHARS 79

// ---- the choice -----------------------------------------------------------------------------

// Reserved huge pages are not part of the available memory.
static uint64_t taken_bytes(const td_weights_need *need) {
  return need->pages == TD_PAGES_RESERVED ? 0 : need->resident_bytes;
}

static bool has_room_for_kv(const td_weights_need *need) {
  uint64_t taken = taken_bytes(need), available = need->available_bytes;
  return taken <= available && (available - taken) / 2 >= need->kv_bytes;
}

// Commands that enable huge pages for shared memory; a per-size setting overrides the global one.
#define ALLOW_HUGE                                                                                 \
  "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, or sysctl "                    \
  "vm.nr_hugepages=%llu"

static unsigned long long huge_pages(const td_weights_need *need) {
  return (need->resident_bytes + TD_HUGE_PAGE_BYTES - 1) / TD_HUGE_PAGE_BYTES;
}

static bool is_to_be_resident(const td_weights_need *need) {
  const td_placement *p = &need->placement;
  if (need->mode != TD_WEIGHTS_AUTO) return need->mode == TD_WEIGHTS_RESIDENT;
  if (p->is_discrete && !p->experts_on_cpu) return false;
  bool gains = p->experts_on_cpu || need->pages != TD_PAGES_PLAIN || need->n_nodes > 1 ||
               need->converted_bytes;
  return gains && has_room_for_kv(need);
}

static void explain_mapping(td_weights_choice *out, const td_weights_need *need) {
  const td_size_text weights = td_size(need->file_bytes);
  const td_size_text available = td_size(need->available_bytes);
  const bool is_gpus = need->placement.is_discrete && !need->placement.experts_on_cpu;
  if (need->file_bytes > need->available_bytes && !is_gpus) {
    out->is_warning = true;
    snprintf(out->text, sizeof out->text,
             "the checkpoint is larger (%s) than the memory available (%s): answers "
             "will wait for the disk; a smaller one can be made with tandem quantize",
             weights.text, available.text);
  } else if (need->mode == TD_WEIGHTS_AUTO && is_gpus) {
    snprintf(out->text, sizeof out->text,
             "%s of weights are mapped from their files: the GPU copies all of them", weights.text);
  } else if (need->mode == TD_WEIGHTS_AUTO && !has_room_for_kv(need)) {
    snprintf(out->text, sizeof out->text,
             "%s of weights are mapped from their files: a copy in memory would leave no "
             "room for the KV cache",
             weights.text);
  } else if (need->mode == TD_WEIGHTS_AUTO) {
    snprintf(out->text, sizeof out->text,
             "%s of weights are mapped from their files, since shared memory has no 2 MB "
             "pages; to allow them: " ALLOW_HUGE,
             weights.text, huge_pages(need));
  }
}

static uint64_t without(uint64_t n, uint64_t taken) {
  return taken < n ? n - taken : 0;
}

// What is left of the memory beside the weights that stay in it.
static uint64_t left_bytes(const td_weights_need *need) {
  return without(need->available_bytes, need->resident_bytes - need->streamed_bytes);
}

// Whether experts stay in host memory, if there is room.
static bool has_experts_here(const td_weights_need *need) {
  return !need->placement.is_discrete || need->placement.experts_on_cpu;
}

#define LEAST_OTHERS ((uint64_t)128 << 20)

// For KV pages, beside LEAST_OTHERS: they get half of both, and one context must fit (kv/plan.h).
static uint64_t kv_room(const td_weights_need *need) {
  const uint64_t left = left_bytes(need), two = 2 * need->kv_bytes, most = left / 8 * 3;
  const uint64_t usual = two < left / 8 ? 2 * two : left / 4, one = without(two, LEAST_OTHERS);
  const uint64_t least = one < most ? one : most;
  return usual > least ? usual : least;
}

// What experts and activations of prompts share.
static uint64_t shared_bytes(const td_weights_need *need) {
  return without(left_bytes(need), LEAST_OTHERS + need->draft_bytes + kv_room(need));
}

// For activations of prompts: the longer a step, the more tokens share an expert that was read. So
// where an eighth takes no prompt of usual length, half of what experts would have is for them.
// Those of a GPU are there, but for the experts' own results of two engines.
static uint64_t activation_bytes(const td_weights_need *need) {
  enum { USUAL_PROMPT = 2048 };
  if (need->placement.is_discrete) return 2 * need->usual_chunk * need->token_bytes;
  const uint64_t least = left_bytes(need) / 8, shared = shared_bytes(need);
  const uint64_t n_tokens = need->n_ctx < USUAL_PROMPT ? need->n_ctx : USUAL_PROMPT;
  const uint64_t wanted = n_tokens * need->token_bytes;
  const uint64_t most = need->arena_bytes ? without(shared, need->arena_bytes)
                                          : (shared + least) / 2;
  const uint64_t more = wanted < most ? wanted : most;
  return more > least ? more : least;
}

static uint64_t arena_bytes(const td_weights_need *need) {
  const uint64_t all = need->n_slots * (need->slot_bytes + 64) + TD_HUGE_PAGE_BYTES;
  const uint64_t most = need->arena_bytes ? need->arena_bytes
                                          : without(shared_bytes(need), activation_bytes(need));
  return most < all ? most : all;
}

// A whole prompt, as far as its activations fit; 0: a GPU's memory decides.
static uint32_t chunk_of(const td_weights_need *need) {
  enum { ROUND = 64 };
  if (need->placement.is_discrete) return 0;
  uint64_t n = need->token_bytes ? activation_bytes(need) / need->token_bytes : 0;
  if (n > need->n_ctx) n = need->n_ctx;
  return n > need->usual_chunk ? (uint32_t)(n - n % ROUND) : need->usual_chunk;
}

static bool has_room_for_arena(const td_weights_need *need) {
  const uint64_t n_bytes = arena_bytes(need);
  return n_bytes <= left_bytes(need) && n_bytes >= (need->least_slots + 1) * need->slot_bytes;
}

void td_weights_need_to_stream(td_weights_need *need, const td_model_config *config) {
  const bool has_gpu = need->placement.is_discrete;
  enum { LEAST_BESIDE_GPU = 8 }; // some are being copied there
  need->least_slots = config->top_k;
  if (has_gpu && need->least_slots < LEAST_BESIDE_GPU) need->least_slots = LEAST_BESIDE_GPU;
  need->usual_chunk = td_engine_prefill_chunk(config);
  need->token_bytes = has_gpu ? td_expert_drive_token_bytes(config)
                              : td_engine_drive_step_bytes_per_token(config);
  if (has_gpu) return;
  if (config->n_mtp_layers) need->token_bytes += td_engine_draft_token_bytes(config, TD_F32);
}

static td_status choose_stream(td_weights_choice *out, const td_weights_need *need, td_err *err) {
  const td_size_text weights = td_size(need->file_bytes), left = td_size(left_bytes(need));
  const td_size_text arena = td_size(arena_bytes(need)), slot = td_size(need->slot_bytes);
  if (!has_experts_here(need)) {
    return td_fail(err, TD_EUNSUPPORTED,
                   "--weights stream: the GPU holds all experts; leave it out, or give "
                   "--expert-device cpu");
  }
  if (!need->streamed_bytes) {
    return td_fail(err, TD_EUNSUPPORTED, "--weights stream: %s; or give --weights mmap",
                   need->why_not);
  }
  if (!has_room_for_arena(need)) {
    return td_fail(
        err, TD_ENOMEM,
        "--weights stream: the weights that are no experts leave %s of memory, and %s for "
        "experts of %s: a token takes %llu of them; give %s",
        left.text, arena.text, slot.text, (unsigned long long)need->least_slots,
        need->arena_bytes ? "other GiB" : "a smaller --ctx-size, or --weights mmap");
  }
  *out = (td_weights_choice){.is_resident = true,
                             .is_streamed = true,
                             .arena_bytes = arena_bytes(need),
                             .prefill_chunk = chunk_of(need)};
  snprintf(
      out->text, sizeof out->text,
      "experts are read from the drive when they are used: of %s of weights, %s stay in memory, "
      "and %s are for %.0f %% of the experts",
      weights.text, td_size(need->resident_bytes - need->streamed_bytes).text, arena.text,
      fmin(100, 100.0 * (double)out->arena_bytes / (double)(need->n_slots * need->slot_bytes)));
  return TD_OK;
}

// Whether auto streams: answers would wait for pages of the files otherwise.
static bool is_to_stream(const td_weights_need *need) {
  if (need->mode != TD_WEIGHTS_AUTO) return need->mode == TD_WEIGHTS_STREAM;
  return need->file_bytes > need->available_bytes && has_experts_here(need) &&
         need->streamed_bytes && has_room_for_arena(need);
}

td_status td_weights_choose(td_weights_choice *out, const td_weights_need *need, td_err *err) {
  *out = (td_weights_choice){.is_resident = is_to_be_resident(need)};
  if (!out->is_resident && is_to_stream(need)) return choose_stream(out, need, err);
  const uint64_t taken = taken_bytes(need);
  const td_size_text weights = td_size(need->file_bytes);
  const td_size_text available = td_size(need->available_bytes);
  const td_size_text limit = td_size(need->limit_bytes);
  if (need->mode == TD_WEIGHTS_RESIDENT && taken > need->limit_bytes) {
    return td_fail(err, TD_ENOMEM,
                   "--weights resident: %s of weights do not fit into the %s of memory "
                   "there are; give --weights mmap, which reads them through the page cache",
                   weights.text, limit.text);
  }
  if (!out->is_resident) {
    explain_mapping(out, need);
  } else if (taken > need->available_bytes) {
    out->is_warning = true;
    snprintf(out->text, sizeof out->text,
             "--weights resident: of the %s of memory there are, %s are available, and "
             "the weights take %s; loading continues, and fails if no more becomes available",
             limit.text, available.text, weights.text);
  } else if (need->pages == TD_PAGES_PLAIN) {
    out->is_warning = need->placement.experts_on_cpu;
    snprintf(out->text, sizeof out->text,
             "%s of weights will be in 4 KB pages, which are slower to read%s; to allow 2 MB "
             "pages: " ALLOW_HUGE,
             weights.text, need->placement.is_discrete ? " and to register with the GPU" : "",
             huge_pages(need));
  }
  return TD_OK;
}

// ---- loading --------------------------------------------------------------------------------

typedef struct {
  bool is_terminal;
  uint64_t begin_ns, said_ns;
} reporter;

static double gib_per_second(const reporter *r, uint64_t bytes) {
  double seconds = (double)(td_clock_ns() - r->begin_ns) * 1e-9;
  return seconds > 0 ? td_gib(bytes) / seconds : 0;
}

static void draw_bar(const reporter *r, uint64_t done, uint64_t total) {
  enum { CELLS = 30 };
  char line[LINE_CHARS + 1];
  int n_full = total ? (int)(done * CELLS / total) : CELLS;
  int n = snprintf(line, sizeof line, "\rloading [%.*s%*s] %5.1f of %.1f GiB, %.2f GiB/s", n_full,
                   "##############################", CELLS - n_full, "", td_gib(done),
                   td_gib(total), gib_per_second(r, done));
  if (n > LINE_CHARS) n = LINE_CHARS;
  td_log_draw(line, (size_t)n);
}

static void on_progress(void *ctx, uint64_t done, uint64_t total) {
  reporter *r = ctx;
  uint64_t now_ns = td_clock_ns();
  if (r->is_terminal) {
    draw_bar(r, done, total);
  } else if (now_ns - r->said_ns >= SAY_NS) {
    r->said_ns = now_ns;
    td_info("loading weights: %.1f of %.1f GiB, %.2f GiB/s", td_gib(done), td_gib(total),
            gib_per_second(r, done));
  }
}

static void say_loaded(const reporter *r, const td_resident_stats *stats) {
  const char *pages = "plain pages: the kernel gives shared memory no larger ones here";
  char text[96];
  if (stats->pages == TD_PAGES_RESERVED) {
    pages = "reserved 2 MB pages";
  } else if (stats->pages == TD_PAGES_TRANSPARENT) {
    snprintf(text, sizeof text, "%s of that in 2 MB pages", td_size(stats->huge_bytes).text);
    pages = text;
  }
  td_info("%s of weights are in memory after %.2f s, %.2f GiB/s (%s)", td_size(stats->n_bytes).text,
          (double)(td_clock_ns() - r->begin_ns) * 1e-9, gib_per_second(r, stats->n_bytes), pages);
  if (stats->n_nodes < 2) return;
  td_buf parts = TD_BUF_INIT;
  for (unsigned i = 0; i < stats->n_nodes; i++)
    td_buf_printf(&parts, "%s%.1f", i ? " + " : "", td_mib(stats->node_bytes[i]));
  td_info("weights are on %u NUMA nodes: %s MiB, in turn", stats->n_nodes, td_buf_text(&parts));
  td_buf_free(&parts);
}

// A checkpoint's files and the tensors that must be converted.
typedef struct {
  td_store *store;
  td_quant *quant;
  td_conversion *conversion;
  td_expert_places places; // if experts may stream
  td_shard_range *ranges;  // of the experts, [n_ranges]
  size_t n_ranges;
  uint64_t draft_bytes; // td_engine_draft_bytes, on a CPU
  td_err why_not;       // if they cannot
} checkpoint;

static void close_checkpoint(checkpoint *c) {
  td_expert_places_close(&c->places);
  free(c->ranges);
  td_conversion_close(c->conversion);
  td_quant_close(c->quant);
  td_store_close(c->store);
}

static td_status open_checkpoint(checkpoint *c, const char *dir, td_err *err) {
  *c = (checkpoint){0};
  td_status st = td_store_open(&c->store, dir, err);
  if (st == TD_OK) st = td_quant_open_dir(&c->quant, dir, err);
  if (st == TD_OK) st = td_conversion_open(&c->conversion, c->store, c->quant, err);
  if (st != TD_OK) close_checkpoint(c);
  return st;
}

static int by_place(const void *a, const void *b) {
  const td_shard_range *x = a, *y = b;
  if (x->shard != y->shard) return x->shard < y->shard ? -1 : 1;
  return (x->begin > y->begin) - (x->begin < y->begin);
}

// Finds what can stay in the files. td_resident_load has shards in the model's order, too.
static td_status find_experts(checkpoint *c, const char *dir, td_err *err) {
  td_model *model;
  td_status st = td_model_open_shapes(&model, dir, err);
  if (st != TD_OK) return st;
  st = td_expert_places_open(&c->places, model, &c->why_not);
  const td_engine_opts drafts = {
      .max_drafts = td_draft_max(td_attn_has_states(td_model_config_of(model))),
      .has_draft_layer = td_model_mtp(model) != NULL};
  c->draft_bytes = td_engine_draft_bytes(model, true, &drafts);
  td_model_close(model);
  if (st != TD_OK) return st == TD_EUNSUPPORTED ? TD_OK : td_fail(err, st, "%s", c->why_not.msg);
  const size_t n = (size_t)c->places.n_layers * c->places.n_experts * TD_EXPERT_PARTS;
  c->ranges = malloc(n * sizeof *c->ranges);
  if (!c->ranges) return td_fail(err, TD_ENOMEM, "out of memory: places of experts");
  for (size_t i = 0; i < n; i++) {
    const td_expert_part *p = &c->places.parts[i];
    if (!p->n_bytes) continue;
    c->ranges[c->n_ranges++] = (td_shard_range){p->shard, p->offset, p->offset + p->n_bytes};
  }
  qsort(c->ranges, c->n_ranges, sizeof *c->ranges, by_place);
  return TD_OK;
}

// arena_bytes 0: with the experts.
static td_status load(int *fd, const checkpoint *c, const td_weights_opts *opts,
                      uint64_t arena_bytes, td_err *err) {
  reporter r = {.is_terminal = isatty(STDERR_FILENO) == 1 && !td_log_get().is_json,
                .begin_ns = td_clock_ns()};
  r.said_ns = r.begin_ns;
  const td_resident_opts how = {.canceled = opts->canceled,
                                .on_progress = on_progress,
                                .ctx = &r,
                                .conversion = c->conversion,
                                .for_device = opts->placement.is_discrete,
                                .left_out = c->ranges,
                                .n_left_out = arena_bytes ? c->n_ranges : 0,
                                .arena_bytes = arena_bytes};
  td_resident_stats stats;
  uint64_t begin_ns = td_trace_begin();
  td_status st = td_resident_load(fd, &stats, c->store, &how, err);
  td_trace_span(begin_ns, TD_TRACE_LOAD_WEIGHTS, 0, 0);
  static const char clear[] = "\r\033[K";
  if (r.is_terminal) td_log_draw(clear, sizeof clear - 1);
  if (st == TD_OK) say_loaded(&r, &stats);
  if (st != TD_OK || !arena_bytes) return st;
  st = td_expert_arena_create(*fd, &c->places, c->store,
                              td_expert_arena_slots(&c->places, c->store, arena_bytes), err);
  if (st == TD_OK) return st;
  close(*fd);
  *fd = -1;
  return st;
}

// Whether experts of this model may come from the drive.
static void measure_experts(td_weights_need *need, const checkpoint *c, const td_weights_opts *opts,
                            const td_model_config *config) {
  need->why_not = c->n_ranges ? "its experts are smaller than a page" : c->why_not.msg;
  need->arena_bytes = (uint64_t)(opts->arena_gib * (double)TD_GIB);
  if (td_shares_prompts(opts->runtime, config)) {
    need->why_not = "experts come from the drive for one device alone";
    return;
  }
  need->slot_bytes = c->places.slot_bytes;
  need->n_slots = (uint64_t)c->places.n_layers * c->places.n_experts;
  const bool has_drafts = opts->runtime->draft != TD_DRAFT_OFF && !opts->placement.is_discrete;
  need->draft_bytes = has_drafts ? c->draft_bytes : 0;
  td_weights_need_to_stream(need, config);
  for (size_t i = 0; i < c->n_ranges; i++) { // whole pages
    const uint64_t begin = c->ranges[i].begin + TD_DRIVE_ALIGN - 1;
    const uint64_t first = begin / TD_DRIVE_ALIGN, end = c->ranges[i].end / TD_DRIVE_ALIGN;
    if (first < end) need->streamed_bytes += (end - first) * TD_DRIVE_ALIGN;
  }
}

static td_status measure(td_weights_need *need, checkpoint *c, const td_weights_opts *opts,
                         td_err *err) {
  td_model_config config;
  td_status st = td_model_config_read(&config, opts->runtime->model_dir, err);
  if (st != TD_OK) return st;
  uint32_t n_ctx = opts->runtime->ctx_size ? opts->runtime->ctx_size : config.max_position;
  if (!opts->runtime->ctx_size && n_ctx > TD_KV_DEFAULT_CTX) n_ctx = TD_KV_DEFAULT_CTX;
  *need = (td_weights_need){.mode = opts->runtime->weights,
                            .placement = opts->placement,
                            .n_ctx = n_ctx,
                            .resident_bytes = td_resident_bytes(c->store, c->conversion),
                            .converted_bytes = td_conversion_memory_bytes(c->conversion),
                            .available_bytes = td_memory_available_bytes(),
                            .limit_bytes = td_memory_limit_bytes()};
  if (!opts->placement.is_discrete || opts->has_host_kv) // else KV pages are on the device
    need->kv_bytes = td_engine_kv_bytes(&config, opts->runtime->kv_dtype, n_ctx);
  need->pages = td_memory_shared_pages(need->resident_bytes);
  need->n_nodes = td_nodes_get().n;
  for (size_t i = 0; i < td_store_n_shards(c->store); i++)
    need->file_bytes += td_store_shard(c->store, i).n_bytes;
  need->file_bytes -= td_store_table_bytes(c->store); // a token reads single rows
  const bool may_stream = need->mode == TD_WEIGHTS_STREAM ||
                          (need->mode == TD_WEIGHTS_AUTO && has_experts_here(need) &&
                           need->file_bytes > need->available_bytes);
  if (!may_stream) return TD_OK;
  st = find_experts(c, opts->runtime->model_dir, err);
  if (st == TD_OK) measure_experts(need, c, opts, &config);
  return st;
}

td_status td_weights_open(int *fd, uint32_t *prefill_chunk, const td_weights_opts *opts,
                          td_err *err) {
  *fd = -1;
  *prefill_chunk = 0;
  checkpoint c;
  td_status st = open_checkpoint(&c, opts->runtime->model_dir, err);
  if (st != TD_OK) return st;
  td_weights_need need;
  td_weights_choice choice = {0};
  st = measure(&need, &c, opts, err);
  if (st == TD_OK) st = td_weights_choose(&choice, &need, err);
  if (st == TD_OK && choice.text[0]) {
    td_log(choice.is_warning    ? TD_LOG_WARN
           : choice.is_streamed ? TD_LOG_INFO
                                : TD_LOG_DEBUG,
           "%s", choice.text);
  }
  if (st == TD_OK && choice.is_resident) st = load(fd, &c, opts, choice.arena_bytes, err);
  if (st == TD_OK) *prefill_chunk = choice.prefill_chunk;
  close_checkpoint(&c);
  return st;
}
