// tests/unit/test_predict.c - how long a machine is expected to take, and what a card holds for it.
// CTest: no-tsan
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "engine/engine.h"
#include "kv/plan.h"
#include "unit/placement_test.h"

static td_rig rig_of(uint64_t gpu_gib, double link_gbps, double tflops) {
  return (td_rig){.n_cores = 16,
                  .read_gbps = 400,
                  .gflops = 1600,
                  .n_gpus = 1,
                  .gpu = {.memory_bytes = gpu_gib << 30,
                          .link_gbps = link_gbps,
                          .tflops = tflops,
                          .read_gbps = 3000}};
}

static const td_expert_cache_size with_cache = {.is_auto = true}, no_cache;

// The first of two cards, which prefills only.
static td_card_plan card_that_prefills(const td_card_plan *plan) {
  td_card_plan first = *plan;
  first.memory.stream_bytes = plan->pair.stream_bytes;
  first.memory.prefill_chunk = plan->pair.prefill_chunk;
  first.n_streamed_dense = plan->pair.n_streamed_dense;
  first.long_steps = (td_long_steps){.prefill_chunk = 0};
  return first;
}

TEST(prediction_for_a_pair) {
  const td_plan_load load = load_of_v3();
  const td_rig rig = rig_of(32, 55, 60);
  const td_card_plan one = td_card_plan_of(&load, &rig, &with_cache);
  const td_card_plan first = card_that_prefills(&one);
  assert_true(one.n_streamed_dense == 0 && first.n_streamed_dense > 0);
  assert_true(first.memory.stream_bytes > one.memory.stream_bytes);
  check_memory_of_first(&(td_gpu_need){.usual_chunk = 1024, .step_token_bytes = 0}, &one.memory,
                        &one.pair, one.cache_bytes, load.dense);
  const td_plan_time t = td_prefill_time_of(&load, &rig, &first, 8192);
  const uint32_t n = first.n_streamed_dense < 58 ? first.n_streamed_dense : 58;
  const uint64_t dense_bytes = n * (235ull << 20) + (first.n_streamed_dense - n) * (583ull << 20);
  assert_true(t.step.dense_bytes == dense_bytes && !t.step.streams_dense[0]);
  const double link_s = (58 * (double)load.layer_bytes[3] + (double)dense_bytes) / 55e9;
  assert_true(fabs(t.busy_s[TD_LIMIT_LINK] - link_s * t.n_steps) < 1e-9);
  assert_true(td_prefill_time_of(&load, &rig, &first, 32768).seconds <
              td_prefill_time_of(&load, &rig, &one, 32768).seconds);
}

// Sums in F16 are of attention and of E4M3: twice the rate leaves half of those operations' time.
TEST(sums_in_f16) {
  td_plan_load load = load_of_v3();
  td_rig rig = rig_of(80, 55, 60);
  const td_card_plan plan = td_card_plan_of(&load, &rig, &no_cache);
  const double usual_s = td_prefill_time_of(&load, &rig, &plan, 8192).busy_s[TD_LIMIT_GPU_OPS];
  rig.gpu.f16.tflops = 2 * rig.gpu.tflops;
  const double attn_s = td_prefill_time_of(&load, &rig, &plan, 8192).busy_s[TD_LIMIT_GPU_OPS];
  for (uint32_t i = 0; i < load.config->n_layers; i++)
    load.a8_experts[i] = load.a8_latents[i] = TD_ACTIVATIONS_FP8;
  load.a8[TD_ACTIVATIONS_FP8].params = 15 * GB;
  const double all_s = td_prefill_time_of(&load, &rig, &plan, 8192).busy_s[TD_LIMIT_GPU_OPS];
  if (!(attn_s < 0.95 * usual_s && all_s < 0.6 * usual_s && all_s >= 0.5 * usual_s))
    fail_msg("%g s, with attention in F16 %g s, with E4M3 %g s", usual_s, attn_s, all_s);
  load.activations = TD_ACTIVATIONS_FP8; // whose rate is unknown
  const double f8_s = td_prefill_time_of(&load, &rig, &plan, 8192).busy_s[TD_LIMIT_GPU_OPS];
  assert_true(fabs(f8_s - attn_s) < 1e-9 * attn_s);
}

// What one node has more than another of regions that begin anywhere, half of it read across; found
// by trying.
static double tried_share(double n_regions, double region_bytes, unsigned n_nodes) {
  enum { TRIES = 400, STEPS = 200 };
  const double stripe = 2 << 20, step = region_bytes / STEPS;
  uint64_t random = 1;
  double sum = 0;
  for (int try = 0; try < TRIES; try++) {
    double on[TD_MAX_NODES] = {0}, more = 0;
    for (int r = 0; r < (int)n_regions; r++) {
      random = random * 6364136223846793005u + 1442695040888963407u;
      const double begin = (double)(random >> 33) / 2147483648.0 * stripe * n_nodes;
      for (int i = 0; i < STEPS; i++)
        on[(unsigned)((begin + (i + 0.5) * step) / stripe) % n_nodes] += step;
    }
    for (unsigned k = 0; k < n_nodes; k++)
      more += fmax(on[k] - n_regions * region_bytes / n_nodes, 0);
    sum += more / (n_regions * region_bytes) / TRIES;
  }
  return sum;
}

TEST(reads_across_nodes) {
  static const double mib = 1 << 20;
  const struct {
    double n_regions, mib;
    uint32_t n_nodes;
  } cases[] = {{8, 14, 2},   {16, 14, 2}, {8, 1.5, 2}, {8, 3, 2},
               {64, 0.3, 2}, {8, 4.5, 4}, {20, 7, 3}};
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    const double bytes = cases[i].mib * mib, n = cases[i].n_regions;
    const double share = td_plan_remote_share(n, bytes, cases[i].n_nodes);
    const double over_borders = 0.25 / TD_STRIPE_TILES,
                 tried = tried_share(n, bytes, cases[i].n_nodes);
    if (fabs(share - over_borders - tried) > 0.01 + 0.15 * tried)
      fail_msg("case %zu: %g, tried %g", i, share - over_borders, tried);
  }
  assert_true(td_plan_remote_share(8, 14 * mib, 1) <= 0);
  assert_true(td_plan_remote_share(1, 1000, 2) <= 0.5); // one node has it: half goes across
}

// Two nodes read twice what one does, as long as the link between them carries what goes across.
TEST(prediction_for_two_nodes) {
  const td_plan_load load = load_of_v3();
  td_rig rig = {.n_cores = 64, .read_gbps = 980, .gflops = 6400, .n_nodes = 2, .remote_gbps = 380};
  const td_rig one = td_rig_node(&rig);
  assert_true(one.n_nodes == 1 && one.n_cores == 32);
  const td_decode_work token = {.n_seqs = 1, .n_each = 1, .depth = 1024};
  const td_plan_time two_s = td_decode_time_of(&load, &rig, NULL, &token);
  const td_plan_time one_s = td_decode_time_of(&load, &one, NULL, &token);
  assert_true(one_s.seconds > 1.8 * two_s.seconds && one_s.seconds <= 2 * two_s.seconds);
  assert_true(one_s.remote_bytes <= 0 && two_s.remote_bytes > 0);
  assert_true(fabs(one_s.host_bytes - two_s.host_bytes) < 1e-6 * one_s.host_bytes);
  assert_true(two_s.remote_bytes < 0.1 * two_s.host_bytes);
  assert_int_equal(td_plan_time_limit(&two_s), TD_LIMIT_HOST_READ);
  rig.remote_gbps = 5; // a link that binds
  const td_plan_time slow = td_decode_time_of(&load, &rig, NULL, &token);
  assert_int_equal(td_plan_time_limit(&slow), TD_LIMIT_NODES);
  assert_true(slow.seconds > 2 * two_s.seconds);
}

// Each part of a pass is bound by itself: experts that its tokens choose, the layer's other
// weights, and the output matrix, of which there is a row a guess.
TEST(prediction_of_guesses) {
  td_plan_load load = load_of_v3();
  const td_rig rig = {.n_cores = 2, .read_gbps = 50, .gflops = 300, .n_nodes = 1, .layer_us = 20};
  const double experts = (double)load.layer_bytes[3], chosen = experts * 8 / 256;
  assert_true(td_draft_time_of(&load, &rig, NULL, 1, 1) <= 0); // no layer
  load.draft_expert_bytes = load.layer_bytes[3];
  load.draft_bytes = 1000 << 20;
  load.draft_head_bytes = 500 << 20;
  load.head_params = 900 << 20;
  const double rest = (double)(load.draft_bytes + load.draft_head_bytes);
  const double once = td_draft_time_of(&load, &rig, NULL, 1, 1);
  assert_true(fabs(once - (chosen + rest) / 50e9 - 20e-6) < 1e-9);
  const double two = td_draft_time_of(&load, &rig, NULL, 2, 1); // which choose fewer than twice
  assert_true(two > once + 0.9 * chosen / 50e9 && two < once + chosen / 50e9);
  const double many = td_draft_time_of(&load, &rig, NULL, 8, 8); // guesses that arithmetic binds
  const double share = 1 - pow(1 - 8.0 / 256, 8);
  const double head_s = 8 * 2 * (double)load.head_params / 300e9;
  assert_true(many > (experts * share + (double)load.draft_bytes) / 50e9 + head_s);
}

// Steps of several tokens read the output matrix once, and write states between them.
TEST(prediction_of_verifying) {
  td_model_config config = {.n_layers = 1,
                            .dim = 64,
                            .kind = {TD_ATTN_DELTA},
                            .delta_k_heads = 16,
                            .delta_v_heads = 32,
                            .delta_k_dim = 128,
                            .delta_v_dim = 128,
                            .delta_taps = 4};
  td_plan_load load = {.config = &config, .step_bytes = 3000000, .head_bytes = 1000000};
  const td_rig rig = {.n_cores = 2, .read_gbps = 50, .gflops = 1e6, .n_nodes = 1};
  const double state_bytes = (32 * 128 * 128 + 3 * 8192) * sizeof(float);
  for (uint32_t n = 1; n < 4; n++) {
    const td_decode_work work = {.n_seqs = 1, .n_each = n};
    const double want = (double)load.step_bytes + (1 + n) * state_bytes;
    assert_true(fabs(td_decode_time_of(&load, &rig, NULL, &work).host_bytes - want) < 1);
  }
}

// A card alone: dense weights, without a ring for them and workspaces, are room for long steps.
// They pay where copies bind.
TEST(long_prompts_of_a_card) {
  const td_plan_load load = load_of_v3();
  const uint64_t dense_bytes = (uint64_t)(61 * 187 + 3 * 396 + 58 * 48) << 20;
  const uint64_t token_bytes = td_engine_step_bytes_per_token(load.config, TD_BF16);
  td_rig rig = rig_of(24, 25, 70);
  const td_card_plan one = td_card_plan_of(&load, &rig, &with_cache);
  const td_long_steps *l = &one.long_steps;
  const td_model_config *c = load.config;
  assert_int_equal(l->prefill_chunk, 32768);
  assert_true(l->dense_bytes == dense_bytes && l->n_streamed_dense == 61);
  assert_true(l->work.expert_bytes == 58 * load.layer_bytes[3]);
  assert_true(l->stream_bytes > 7 * GB && one.memory.stream_bytes < 2 * GB);
  assert_true(l->stream_bytes + 32768 * token_bytes + TD_KV_DEVICE_SPARE + (583ull << 20) <=
              dense_bytes);
  const uint32_t usual = one.memory.prefill_chunk, from = 2000;
  assert_true(usual > from && usual < 8192);
  assert_false(td_long_steps_pay(l, c, from, 0) || td_long_steps_pay(l, c, from, usual));
  assert_false(td_long_steps_pay(l, c, from, usual + 50)); // the CPU computes these
  assert_true(td_long_steps_pay(l, c, from, usual + from) && td_long_steps_pay(l, c, from, 32768));
  const td_plan_time t = td_prefill_time_of(&load, &rig, &one, 32768);
  assert_true(t.n_steps == 1 && t.step.dense_bytes == dense_bytes);
  const uint64_t once = load.other_bytes; // by whoever uses them next
  const double link_s = (double)(l->work.expert_bytes + dense_bytes + once) / 25e9;
  assert_true(fabs(t.busy_s[TD_LIMIT_LINK] - link_s) < 1e-9);
  td_card_plan without = one;
  without.long_steps = (td_long_steps){.prefill_chunk = 0};
  const td_plan_time usual_t = td_prefill_time_of(&load, &rig, &without, 32768);
  assert_true(usual_t.n_steps > 4 && t.seconds < 0.5 * usual_t.seconds);
  rig.n_gpus = 2; // they compute together, with dense weights in both
  assert_true(td_prefill_time_of(&load, &rig, &one, 32768).n_steps > 4);
  // Two steps of many tokens take as long to compute as one.
  rig.gpu.memory_bytes = 32ull << 30;
  const td_card_plan larger = td_card_plan_of(&load, &rig, &with_cache);
  assert_true(larger.long_steps.prefill_chunk == 32768 && larger.memory.prefill_chunk > 16384);
  assert_false(td_long_steps_pay(&larger.long_steps, c, from, 32768));
  td_plan_load in_f8 = load, load_f8 = load; // but not if they compute in half of the time
  in_f8.activations = TD_ACTIVATIONS_FP8;
  in_f8.a8[TD_ACTIVATIONS_FP8].active_params = load.active_params / 2;
  const td_card_plan f8 = td_card_plan_of(&in_f8, &rig, &with_cache);
  assert_true(f8.long_steps.work.a8_params == load.active_params / 2);
  assert_true(td_long_steps_pay(&f8.long_steps, c, from, 32768));
  rig.gpu.f16.tflops = 1; // nor if attention and E4M3 are faster
  load_f8.a8[TD_ACTIVATIONS_FP8].active_params = load.active_params;
  const td_card_plan f16 = td_card_plan_of(&load_f8, &rig, &with_cache);
  assert_true(f16.long_steps.work.adds_f16 && !f16.long_steps.work.a8_params);
  assert_true(td_long_steps_pay(&f16.long_steps, c, from, 32768));
  rig.gpu.f16.tflops = 0;
  // No longer steps: those of a large card are long, those that were asked for are as asked for.
  rig.gpu.memory_bytes = 80ull << 30;
  assert_int_equal(td_card_plan_of(&load, &rig, &with_cache).long_steps.prefill_chunk, 0);
  const td_gpu_need asked = {
      .layer_bytes = 11 * GB, .usual_chunk = 1024, .step_token_bytes = 160000, .prefill_chunk = 64};
  const td_gpu_plan plan = {.prefill_chunk = 64, .stream_bytes = GB};
  assert_int_equal(td_long_steps_plan(&asked, &plan, &l->work, load.dense, 61).prefill_chunk, 0);
}

static void check_pages_of_card(const td_card_plan *plan, const td_gpu_card *card,
                                uint32_t min_tokens) {
  const td_gpu_plan *m = &plan->memory;
  const uint64_t held = plan->weight_bytes + plan->own_bytes + plan->cache_bytes + m->chunk_bytes +
                        m->decode_bytes + m->stream_bytes;
  assert_true(held + plan->kv_bytes < card->memory_bytes);
  if (plan->kv_tokens < min_tokens) fail_msg("%u tokens", plan->kv_tokens);
}

// A card alone has an engine for prompts, short or long, beside the one that decodes, unless it
// holds all experts.
TEST(rows_of_ngrams) {
  enum { DIM = 2048, LAYERS = 2, OF_TOKEN = LAYERS * DIM * 2 };
  td_plan_load load = load_of_v3();
  td_model_config c = *load.config;
  td_rig rig = rig_of(24, 25, 70);
  load.config = &c;
  assert_int_equal(td_card_plan_of(&load, &rig, &with_cache).ngram_bytes, 0);
  c.ngram_size = 3;
  c.ngram_dim = DIM;
  td_layers_add(c.ngram_layers, 1);
  td_layers_add(c.ngram_layers, 60);
  const uint64_t usual = td_engine_prefill_chunk(&c);
  td_card_plan plan = td_card_plan_of(&load, &rig, &with_cache);
  assert_int_equal(plan.long_steps.prefill_chunk, 32768);
  assert_int_equal(plan.ngram_bytes, (32768 + usual) * OF_TOKEN);
  rig.gpu.memory_bytes = 1000ull << 30;
  plan = td_card_plan_of(&load, &rig, &with_cache);
  assert_false(plan.experts_stream);
  assert_int_equal(plan.ngram_bytes, (uint64_t)plan.memory.prefill_chunk * OF_TOKEN);
}

static void check_near(double seconds, double measured_s) {
  if (fabs(seconds - measured_s) > 0.15 * measured_s)
    fail_msg("%.4f s, measured %.4f s", seconds, measured_s);
}

// What was measured on an H100 (bench/results), to 15 %.
TEST(predictions) {
  const td_plan_load load = load_of_v3();
  td_rig rig;
  assert_int_equal(td_rig_read(&rig, "h100", NULL), TD_OK);
  td_card_plan plan = td_card_plan_of(&load, &rig, &with_cache);
  assert_true(plan.fits && plan.experts_stream);
  assert_int_equal(plan.memory.prefill_chunk, 32768);
  check_pages_of_card(&plan, &rig.gpu, 32768);
  td_plan_time t = td_prefill_time_of(&load, &rig, &plan, 8192);
  check_near(t.seconds, 12.6);
  assert_int_equal(td_plan_time_limit(&t), TD_LIMIT_LINK);
  assert_int_equal(t.n_steps, 1);
  assert_int_equal(t.step.n_ways[TD_LAYER_DENSE], 3);
  assert_int_equal(t.step.n_ways[TD_LAYER_STREAMED] + plan.n_gpu_expert_layers,
                   plan.n_gpu_expert_layers > 3 ? 61 : 58 + plan.n_gpu_expert_layers);
  t = td_prefill_time_of(&load, &rig, &plan, 32768);
  check_near(t.seconds, 13.4);
  rig.gpu.memory_bytes = 32ull << 30; // a shorter ring, in which copies wait for operations
  plan = td_card_plan_of(&load, &rig, &with_cache);
  assert_true(plan.fits && plan.memory.stream_bytes < load.layer_bytes[3]);
  check_pages_of_card(&plan, &rig.gpu, 16384);
  assert_true(td_prefill_time_of(&load, &rig, &plan, 32768).seconds > t.seconds);
  rig.gpu.memory_bytes = 16ull << 30;
  assert_false(td_card_plan_of(&load, &rig, &with_cache).fits);
  rig.gpu.memory_bytes = 2000ull << 30;
  plan = td_card_plan_of(&load, &rig, &with_cache);
  assert_false(plan.experts_stream);
  check_pages_of_card(&plan, &rig.gpu, 32768);
  assert_true(plan.own_bytes == 58 * load.layer_bytes[3]);
  t = td_prefill_time_of(&load, &rig, &plan, 32768);
  assert_int_equal(t.step.n_ways[TD_LAYER_RESIDENT], 58);
  assert_true(t.busy_s[TD_LIMIT_LINK] == 0 && t.n_steps == 4);
  const double head_s = t.busy_s[TD_LIMIT_GPU_READ]; // for the last token's logits
  assert_true(t.seconds >= t.busy_s[TD_LIMIT_GPU_OPS] && head_s < 0.01);
  assert_true(t.seconds <= t.busy_s[TD_LIMIT_GPU_OPS] + head_s);
}

// Drafts have a part of a card's memory: with the model's layer if one card has all of it to itself
// and no cache of experts, none of them if a context would not fit beside them.
TEST(memory_of_drafts) {
  td_plan_load load = load_of_v3();
  td_rig rig = rig_of(32, 55, 89);
  const td_card_plan without = td_card_plan_of(&load, &rig, &no_cache);
  assert_true(without.drafts.are_verified && without.drafts.bytes == 0);
  load.drafts = (td_gpu_draft_bytes){.bytes = 20 << 20, .layer_bytes = 800 << 20};
  load.draft_expert_bytes = load.layer_bytes[3];
  load.draft_bytes = load.head_bytes;
  const td_card_plan with = td_card_plan_of(&load, &rig, &no_cache);
  assert_true(with.drafts.has_layer && with.drafts.bytes == 800 << 20);
  assert_true(with.weight_bytes == without.weight_bytes);
  const uint64_t most = without.memory.stream_bytes + without.memory.chunk_bytes + without.kv_bytes;
  assert_true(with.memory.stream_bytes + with.memory.chunk_bytes + with.kv_bytes <=
              most - (700 << 20));
  assert_true(td_draft_time_of(&load, &rig, &with, 1, 1) > 0);
  const td_card_plan cached = td_card_plan_of(&load, &rig, &with_cache);
  assert_true(!cached.drafts.has_layer && cached.drafts.bytes == 20 << 20);
  assert_true(td_draft_time_of(&load, &rig, &cached, 1, 1) <= 0);
  rig.n_gpus = 2;
  assert_true(td_card_plan_of(&load, &rig, &no_cache).drafts.bytes == 20 << 20);
  rig = rig_of(2000, 55, 89); // which holds all experts, and those of the layer that drafts
  assert_true(td_card_plan_of(&load, &rig, &no_cache).drafts.bytes ==
              (800 << 20) + load.layer_bytes[3]);
  rig = rig_of(32, 55, 89);
  load.drafts.bytes = load.drafts.layer_bytes = 14 * GB;
  const td_card_plan none = td_card_plan_of(&load, &rig, &no_cache);
  assert_true(none.fits && !none.drafts.are_verified && none.drafts.bytes == 0);
}

// Few tokens are computed by the CPU; several cards share what many stream.
TEST(who_computes_a_prompt) {
  const td_plan_load load = load_of_v3();
  td_rig rig = rig_of(32, 55, 89);
  const td_card_plan plan = td_card_plan_of(&load, &rig, &no_cache);
  td_plan_time t = td_prefill_time_of(&load, &rig, &plan, 16);
  assert_int_equal(t.step.n_ways[TD_LAYER_OFFLOADED] + plan.n_gpu_expert_layers, 58 + 3);
  assert_int_equal(td_plan_time_limit(&t), TD_LIMIT_HOST_READ);
  const double one_s = td_prefill_time_of(&load, &rig, &plan, 8192).seconds;
  rig.n_gpus = 2;
  const double two_s = td_prefill_time_of(&load, &rig, &plan, 8192).seconds;
  assert_true(two_s < 0.6 * one_s && two_s > 0.5 * one_s);
  t = td_prefill_time_of(&load, &rig, NULL, 512); // without a card
  assert_true(t.n_steps == 1 && t.busy_s[TD_LIMIT_LINK] == 0);
  assert_true(t.seconds >= t.busy_s[TD_LIMIT_HOST_OPS] - 1e-9 &&
              t.busy_s[TD_LIMIT_HOST_OPS] > 512 * 2 * 36e9 / 1600e9);
}

// Of a prompt, one token has logits, and each token's keys and values are made from its latents
// once in every chunk: with those matrices, all operations are twice the parameters and attention.
TEST(operations_of_a_prompt) {
  const td_plan_load load = load_of_v3();
  const td_model_config *c = load.config;
  const td_rig rig = rig_of(2000, 55, 100);
  td_card_plan plan = td_card_plan_of(&load, &rig, &no_cache);
  const double n = 4096, head = (double)load.head_params;
  const double matrices = 2 * (n * (37e9 - head) + head);
  const double scores = 61 * n * n * 128 * (128 + 64 + 128);
  td_plan_time t = td_prefill_time_of(&load, &rig, &plan, 4096);
  assert_int_equal(t.n_steps, 1);
  assert_true(fabs(t.busy_s[TD_LIMIT_GPU_OPS] * 100e12 / (matrices + scores) - 1) < 1e-9);
  plan.memory.prefill_chunk = 2048; // the first half's keys and values are made once more
  const double again = 61 * 2 * n / 2 * c->kv_lora_rank * 128 * (128 + 128);
  t = td_prefill_time_of(&load, &rig, &plan, 4096);
  assert_int_equal(t.n_steps, 2);
  assert_true(fabs(t.busy_s[TD_LIMIT_GPU_OPS] * 100e12 / (matrices + scores + again) - 1) < 1e-9);
}

// Decode with a cache: without hits all experts' bytes are the CPU's, with hits fewer, and time
// falls until the GPU has as much to read as the CPU.
TEST(predictions_of_decode) {
  const td_plan_load load = load_of_v3();
  td_rig rig = rig_of(80, 55, 420);
  const td_card_plan plan = td_card_plan_of(&load, &rig, &with_cache);
  assert_true(plan.n_cached > 200 && plan.n_cached < 58 * 256);
  assert_true(plan.n_cached * expert_bytes(7168, 2048) <= plan.cache_bytes);
  td_decode_work work = {.n_seqs = 1, .n_each = 1};
  const td_plan_time none = td_decode_time_of(&load, &rig, &plan, &work);
  assert_int_equal(none.step.n_ways[TD_LAYER_CACHED], 58);
  const double host_s = 58 * 8 * (double)expert_bytes(7168, 2048) / 400e9;
  const double gpu_s = (double)load.step_bytes / 3000e9;
  assert_true(fabs(none.busy_s[TD_LIMIT_HOST_READ] - host_s) < 1e-6);
  assert_true(fabs(none.busy_s[TD_LIMIT_GPU_READ] - gpu_s) < 1e-6);
  assert_true(fabs(none.seconds - host_s - gpu_s) < 1e-6);
  work.hit_rate = 0.25;
  const td_plan_time some = td_decode_time_of(&load, &rig, &plan, &work);
  assert_true(fabs(some.seconds - 0.75 * host_s - gpu_s) < 1e-6);
  work.n_each = 2; // other experts for each
  assert_true(td_decode_time_of(&load, &rig, &plan, &work).seconds > 1.7 * some.seconds);
  assert_int_equal(td_rig_read(&rig, "h100", NULL), TD_OK);
  work = (td_decode_work){.n_seqs = 1, .n_each = 1, .depth = 1024};
  check_near(td_decode_time_of(&load, &rig, &plan, &work).seconds, 0.1405);
  work.hit_rate = 0.25;
  check_near(td_decode_time_of(&load, &rig, &plan, &work).seconds, 0.118);
  work.hit_rate = 0.5;
  check_near(td_decode_time_of(&load, &rig, &plan, &work).seconds, 0.0838);
  work.hit_rate = 1;
  const td_plan_time all = td_decode_time_of(&load, &rig, &plan, &work);
  check_near(all.seconds, 0.0242);
  assert_true(all.busy_s[TD_LIMIT_HOST_READ] == 0);
  work = (td_decode_work){.n_seqs = 8, .n_each = 1};
  assert_true(td_decode_time_of(&load, &rig, &plan, &work).seconds <
              8 * none.busy_s[TD_LIMIT_HOST_READ] * 400 / 142);
}

TEST(descriptions_of_machines) {
  td_rig rig;
  td_err err;
  for (const td_rig_file *f = td_rig_files; f->name; f++) {
    assert_int_equal(td_rig_read(&rig, f->name, &err), TD_OK);
    assert_true(rig.read_gbps > 10 && rig.n_cores > 1 && rig.memory_bytes > 1 << 30);
    assert_true(!rig.n_gpus || rig.gpu.memory_bytes > 1 << 30);
    assert_true(rig.is_assumed != (strcmp(f->name, "h100") == 0)); // what was measured
    char name[128];
    for (const td_rig_file *card = td_card_files; card->name; card++) {
      snprintf(name, sizeof name, "%s+%s+%s", f->name, card->name, card->name);
      assert_int_equal(td_rig_read(&rig, name, &err), TD_OK);
      assert_true(rig.n_gpus == 2 && rig.gpu.memory_bytes > 1 << 30 && rig.gpu.is_assumed);
    }
  }
  static const struct {
    const char *json, *says;
  } wrong[] = {
      {"{", "machine x"},
      {"[]", "memory_gib"},
      {"{\"memory_gib\": 1e11, \"read_gbps\": 1, \"gflops\": 1, \"layer_us\": 1}", "memory_gib"},
      {"{\"memory_gib\": 8, \"read_gbps\": 0, \"gflops\": 1, \"layer_us\": 1}", "read_gbps"},
      {"{\"memory_gib\": 8, \"read_gbps\": 1, \"gflops\": \"9\", \"layer_us\": 1}", "gflops"},
      {"{\"memory_gib\": 8, \"read_gbps\": 1, \"gflops\": 1, \"layer_us\": 1, \"cores\": 1.5}",
       "cores"},
      {"{\"memory_gib\": 8, \"read_gbps\": 1, \"gflops\": 1, \"layer_us\": 1, \"gpus\": 1}", "gpu"},
      {"{\"memory_gib\": 8, \"read_gbps\": 1, \"gflops\": 1, \"layer_us\": 1, \"gpu\": {}}", "gpu"},
  };
  for (size_t i = 0; i < TD_COUNT(wrong); i++) {
    assert_int_not_equal(td_rig_parse(&rig, wrong[i].json, strlen(wrong[i].json), "x", &err),
                         TD_OK);
    if (!strstr(err.msg, wrong[i].says) || !strstr(err.msg, "machine x"))
      fail_msg("%zu: %s", i, err.msg);
    assert_int_not_equal(td_rig_parse(&rig, wrong[i].json, strlen(wrong[i].json), "x", NULL),
                         TD_OK);
  }
  assert_int_equal(td_rig_read(&rig, "/nonexistent", &err), TD_EINVAL);
  assert_non_null(strstr(err.msg, "h100"));
}

// A machine of one's own with cards to consider, and one whose path has a +.
TEST(a_file_with_cards) {
  td_rig rig;
  td_err err;
  char path[] = "/tmp/td-rig-a+b-XXXXXX", own[] = "/tmp/td-rig-XXXXXX", name[64];
  char *paths[] = {path, own};
  for (size_t i = 0; i < TD_COUNT(paths); i++) {
    FILE *f = fdopen(mkstemp(paths[i]), "w");
    assert_non_null(f);
    fputs("{\"memory_gib\": 8, \"read_gbps\": 1, \"gflops\": 1, \"layer_us\": 1}", f);
    fclose(f);
    if (td_rig_read(&rig, paths[i], &err) != TD_OK) fail_msg("%s", err.msg);
    assert_int_equal(rig.n_gpus, 0);
  }
  snprintf(name, sizeof name, "%s+rtx-4090+rtx-4090", own);
  if (td_rig_read(&rig, name, &err) != TD_OK) fail_msg("%s", err.msg);
  assert_true(rig.n_gpus == 2 && rig.memory_bytes == 8ull << 30);
  snprintf(name, sizeof name, "%s+rtx-1", own);
  assert_int_equal(td_rig_read(&rig, name, &err), TD_EINVAL);
  assert_non_null(strstr(err.msg, "rtx-1 is no known card"));
  unlink(path);
  unlink(own);
}
