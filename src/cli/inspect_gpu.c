// src/cli/inspect_gpu.c - predicts prefill with streamed experts, and decode with cached ones, on
// cards of several sizes.
#include "cli/inspect.h"
#include "runtime/predict.h"

#define GIB ((uint64_t)1 << 30)

// Rates of PCIe 4 and 5 with 16 lanes. The H100's operations are measured: 32768 tokens of
// DeepSeek-V3 in 18.4 s, where it computes longer than it copies. The others are scaled by their
// peak in BF16, and not measured.
static const td_gpu_card cards[] = {{"24 GB, as an RTX 4090", 24 * GIB, 25, 47},
                                    {"32 GB, as an RTX 5090", 32 * GIB, 55, 60},
                                    {"80 GB, as an H100", 80 * GIB, 55, 280}};
static const uint32_t prompts[] = {2048, 8192, 32768};
// Assumed of decode: what a server's CPU reads of its memory (12 channels of DDR5-4800, of 461 GB/s
// in theory), what a card reads of its own, and how often the cache holds an expert.
static const td_decode_rates decode_rates[] = {{400, 1000, 0}, {400, 1000, 0.25}, {400, 1000, 0.5}};

// The card with rates that were given instead of its own.
static td_gpu_card card_of(size_t i, const td_inspect_opts *opts) {
  td_gpu_card card = cards[i];
  if (opts->link_gbps > 0) card.link_gbps = opts->link_gbps;
  if (opts->gpu_tflops > 0) card.tflops = opts->gpu_tflops;
  return card;
}

// Where the CPU computes experts: how many are cached, and what hits are worth.
static void add_cache(td_buf *out, const td_prefill_load *load, const td_card_plan *plan) {
  const td_model_config *c = load->config;
  uint32_t n_layers = 0;
  for (uint32_t i = 0; i < c->n_layers; i++)
    n_layers += load->layer_bytes[i] > 0 && i >= plan->n_gpu_expert_layers;
  td_buf_printf(out, "  a cache of %u experts of %u (%.2f GiB) for decode\n", plan->n_cached,
                n_layers * c->n_experts, (double)plan->cache_bytes / (double)GIB);
  td_buf_printf(out, "  a token in ms, if the CPU reads %g GB/s and the card %g GB/s:",
                decode_rates[0].host_gbps, decode_rates[0].gpu_gbps);
  for (size_t i = 0; i < TD_COUNT(decode_rates); i++) {
    const td_decode_time t = td_decode_time_of(load, plan, &decode_rates[i]);
    td_buf_printf(out, "%s %.1f at %.0f %% hits", i ? "," : "", t.seconds * 1e3,
                  decode_rates[i].hit_rate * 100);
  }
  td_buf_str(out, "\n");
}

static void add_prompts(td_buf *out, const td_prefill_load *load, const td_card_plan *plan,
                        const td_gpu_card *card) {
  for (size_t k = 0; k < TD_COUNT(prompts); k++) {
    const td_prefill_time t = td_prefill_time_of(load, plan, card, prompts[k]);
    if (k == 0) {
      td_buf_str(out, "  ");
      td_step_plan_print(out, &t.step);
      td_buf_str(out, "\n");
    }
    td_buf_printf(out, "  %5u tokens in %6.2f s (copies %6.2f s, operations %6.2f s), %.0f/s\n",
                  prompts[k], t.seconds, t.link_s, t.compute_s, prompts[k] / t.seconds);
  }
}

// What two of the cards hold, one for prefill and one for decode, and how long the first takes.
static void add_pair(td_buf *out, const td_prefill_load *load, const td_card_plan *plan,
                     const td_gpu_card *card) {
  td_buf_printf(out, "  two of them, for prefill and decode: %.2f GiB of weights",
                (double)plan->weight_bytes / (double)GIB);
  if (plan->own_bytes) {
    td_buf_printf(out, ", %.2f GiB of experts", (double)plan->own_bytes / (double)GIB);
  }
  td_buf_printf(out, " and %.2f GiB of keys and values of %u tokens on each",
                (double)plan->kv_bytes / (double)GIB, plan->kv_tokens);
  if (plan->experts_stream) {
    td_buf_printf(out, "; the first streams experts through %.2f GiB, the second caches %.2f GiB",
                  (double)plan->pair.stream_bytes / (double)GIB,
                  (double)plan->pair.cache_bytes / (double)GIB);
  }
  td_buf_str(out, "\n");
  if (!plan->experts_stream) return;
  const td_card_plan first = td_card_plan_for_prefill(plan);
  td_buf_printf(out, "  the first, in steps of up to %u tokens:\n", first.memory.prefill_chunk);
  add_prompts(out, load, &first, card);
}

static void add_card(td_buf *out, const td_prefill_load *load, const td_gpu_card *card) {
  const td_card_plan plan = td_card_plan_of(load, card);
  td_buf_printf(out, "\n%s, %g GB/s, %g TFLOP/s: ", card->name, card->link_gbps, card->tflops);
  if (!plan.fits) {
    td_buf_str(out, "the weights that are no routed experts do not fit\n");
    return;
  }
  if (plan.experts_stream) {
    td_buf_printf(out, "%.2f GiB for experts that stream, ",
                  (double)plan.memory.stream_bytes / (double)GIB);
  } else {
    td_buf_str(out, "all experts fit, ");
  }
  td_buf_printf(out, "steps of up to %u tokens\n", plan.memory.prefill_chunk);
  add_prompts(out, load, &plan, card);
  if (plan.experts_stream) add_cache(out, load, &plan);
  add_pair(out, load, &plan, card);
}

void td_inspect_add_gpus(td_buf *out, const td_model *model, const td_inspect_opts *opts) {
  const td_prefill_load load = td_prefill_load_of(model);
  td_buf_str(out, "\non a GPU, predicted:");
  for (size_t i = 0; i < TD_COUNT(cards); i++) {
    const td_gpu_card card = card_of(i, opts);
    add_card(out, &load, &card);
  }
}

static void add_json_prompts(td_json_writer *w, const td_prefill_load *load,
                             const td_card_plan *plan, const td_gpu_card *card) {
  td_jw_begin_array(w, "prompts");
  for (size_t k = 0; k < TD_COUNT(prompts); k++) {
    const td_prefill_time t = td_prefill_time_of(load, plan, card, prompts[k]);
    td_buf text = TD_BUF_INIT;
    td_step_plan_print(&text, &t.step);
    td_jw_begin_object(w, NULL);
    td_jw_int(w, "tokens", prompts[k]);
    td_jw_int(w, "steps", t.n_steps);
    td_jw_double(w, "seconds", t.seconds);
    td_jw_double(w, "link_s", t.link_s);
    td_jw_double(w, "compute_s", t.compute_s);
    td_jw_str(w, "plan", td_buf_text(&text));
    td_jw_end_object(w);
    td_buf_free(&text);
  }
  td_jw_end_array(w);
}

// Two of the cards, the first for prefill alone.
static void add_json_pair(td_json_writer *w, const td_prefill_load *load, const td_card_plan *plan,
                          const td_gpu_card *card) {
  const td_card_plan first = td_card_plan_for_prefill(plan);
  td_jw_begin_object(w, "pair");
  td_jw_int(w, "stream_bytes", (int64_t)plan->pair.stream_bytes);
  td_jw_int(w, "cache_bytes", (int64_t)plan->pair.cache_bytes);
  td_jw_int(w, "prefill_chunk", plan->pair.prefill_chunk);
  td_jw_int(w, "streamed_dense_layers", plan->pair.n_streamed_dense);
  td_jw_int(w, "dense_ring_bytes", (int64_t)plan->pair.dense_ring_bytes);
  add_json_prompts(w, load, &first, card);
  td_jw_end_object(w);
}

static void add_json_decode(td_json_writer *w, const td_prefill_load *load,
                            const td_card_plan *plan) {
  td_jw_begin_array(w, "decode");
  for (size_t i = 0; i < TD_COUNT(decode_rates); i++) {
    td_jw_begin_object(w, NULL);
    td_jw_double(w, "host_gbps", decode_rates[i].host_gbps);
    td_jw_double(w, "gpu_gbps", decode_rates[i].gpu_gbps);
    td_jw_double(w, "hit_rate", decode_rates[i].hit_rate);
    td_jw_double(w, "seconds", td_decode_time_of(load, plan, &decode_rates[i]).seconds);
    td_jw_end_object(w);
  }
  td_jw_end_array(w);
}

void td_inspect_add_json_gpus(td_json_writer *w, const td_model *model,
                              const td_inspect_opts *opts) {
  const td_prefill_load load = td_prefill_load_of(model);
  td_jw_begin_array(w, "gpus");
  for (size_t i = 0; i < TD_COUNT(cards); i++) {
    const td_gpu_card card = card_of(i, opts);
    const td_card_plan plan = td_card_plan_of(&load, &card);
    td_jw_begin_object(w, NULL);
    td_jw_str(w, "card", card.name);
    td_jw_int(w, "memory_bytes", (int64_t)card.memory_bytes);
    td_jw_double(w, "link_gbps", card.link_gbps);
    td_jw_double(w, "tflops", card.tflops);
    td_jw_bool(w, "fits", plan.fits);
    td_jw_int(w, "stream_bytes", (int64_t)plan.memory.stream_bytes);
    td_jw_int(w, "prefill_chunk", plan.memory.prefill_chunk);
    td_jw_int(w, "cache_bytes", (int64_t)plan.cache_bytes);
    td_jw_int(w, "cached_experts", plan.n_cached);
    if (plan.fits && plan.experts_stream) add_json_decode(w, &load, &plan);
    td_jw_int(w, "resident_bytes", (int64_t)(plan.weight_bytes + plan.own_bytes));
    td_jw_int(w, "kv_tokens", plan.kv_tokens);
    td_jw_int(w, "kv_bytes", (int64_t)plan.kv_bytes);
    if (plan.fits) add_json_prompts(w, &load, &plan, &card);
    if (plan.fits && plan.experts_stream) add_json_pair(w, &load, &plan, &card);
    td_jw_end_object(w);
  }
  td_jw_end_array(w);
}
