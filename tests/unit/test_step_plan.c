// tests/unit/test_step_plan.c - what steps do with each layer, without any device.
// CTest: no-tsan
#include <string.h>

#include "engine/step_plan.h"
#include "unit/testing.h"

enum { N_LAYERS = 61, N_DENSE = 3 };

// DeepSeek-V3's layers: three dense ones come first.
static const td_model_config *v3(void) {
  static td_model_config config = {.n_layers = N_LAYERS};
  memset(config.moe_layers, 0xff, sizeof config.moe_layers);
  config.moe_layers[0] &= ~(uint64_t)7;
  return &config;
}

static bool all_stream[TD_MAX_LAYERS];

static td_step_shape decode_of(uint32_t n_seqs) {
  return (td_step_shape){.n_tokens = n_seqs,
                         .n_seqs = n_seqs,
                         .has_expert_dev = true,
                         .may_replay = true,
                         .break_even_tokens = 1000,
                         .may_stream = all_stream,
                         .n_microbatches = 1};
}

static td_step_shape prompt_of(uint32_t n) {
  td_step_shape shape = decode_of(0);
  shape.n_tokens = shape.n_prompt = n;
  return shape;
}

static td_step_plan plan_of(const td_step_shape *shape) {
  td_step_plan plan;
  td_step_plan_make(&plan, v3(), shape);
  return plan;
}

static void check_text(const td_step_plan *plan, const char *want) {
  td_buf text = TD_BUF_INIT;
  td_step_plan_print(&text, plan);
  assert_string_equal(td_buf_text(&text), want);
  td_buf_free(&text);
}

TEST(ranks) {
  td_step_shape shape = prompt_of(4096);
  shape.n_ranks = 2;
  const td_step_plan plan = plan_of(&shape);
  check_text(&plan, "layers 0-2 dense, 3-60 streamed; 4096 tokens, 4096 of prompts, in 1 "
                    "microbatch, on 2 devices");
}

// With a peer: layers whose experts the two devices have, and those that need the third, too. None
// in steps that no peer computes.
TEST(a_peer) {
  static bool may_cache[TD_MAX_LAYERS];
  static uint8_t share[TD_MAX_LAYERS];
  for (uint32_t i = 3; i < N_LAYERS; i++) {
    may_cache[i] = true;
    share[i] = i < 20 ? TD_PAIR_ALL : i < 30 ? TD_PAIR_SOME : TD_PAIR_NONE;
  }
  td_step_shape shape = decode_of(4);
  shape.may_cache = may_cache;
  shape.pair_share = share;
  td_step_plan plan = plan_of(&shape);
  check_text(&plan, "layers 0-2 dense, 3-19 on device and peer, 20-29 on device, peer and expert "
                    "device, 30-60 cached; "
                    "4 tokens, 0 of prompts, in 1 microbatch, both devices queued up front, "
                    "replayed");
  shape = prompt_of(2000);
  shape.may_cache = may_cache;
  shape.pair_share = share;
  plan = plan_of(&shape);
  assert_int_equal(plan.n_ways[TD_LAYER_PAIRED] + plan.n_ways[TD_LAYER_SPREAD], 0);
}

// Half of the experts of DeepSeek-V3 are worth two messages, half of a small model's are not.
TEST(whether_a_peer_pays) {
  td_pair_layer layer = {
      .dim = 7168, .top_k = 8, .n_experts = 256, .n_peer = 128, .expert_bytes = 44050000};
  td_pair_time t = td_pair_time_of(&layer, &td_pair_usual);
  assert_int_equal(t.to_peer, 7168 * 2 + 8 * 8);
  assert_int_equal(t.from_peer, 4 * 7168 * 4);
  assert_true(t.saved_s > 4.4e-4 && t.saved_s < 4.5e-4);
  assert_true(t.sent_s > 3e-5 && t.sent_s < 4e-5);
  assert_true(td_pair_pays(&t));
  layer = (td_pair_layer){
      .dim = 2048, .top_k = 8, .n_experts = 128, .n_peer = 64, .expert_bytes = 2400000};
  t = td_pair_time_of(&layer, &td_pair_usual);
  assert_false(td_pair_pays(&t));
  layer.n_peer = 0;
  t = td_pair_time_of(&layer, &td_pair_usual);
  assert_true(t.saved_s == 0 && t.from_peer == 0);
}

// Nothing is queued up front where dense weights stream, or replayed.
TEST(dense_weights) {
  static uint64_t dense_bytes[N_LAYERS], all;
  for (uint32_t i = 10; i < N_LAYERS; i++)
    all += dense_bytes[i] = (1 << 28) + i;
  td_step_shape shape = prompt_of(4096);
  shape.dense_bytes = dense_bytes;
  td_step_plan plan = plan_of(&shape);
  assert_true(plan.dense_bytes == all && plan.streams_dense[10] && !plan.streams_dense[9]);
  check_text(&plan, "layers 0-2 dense, 3-60 streamed; 4096 tokens, 4096 of prompts, in 1 "
                    "microbatch; dense weights of layers 10-60 streamed, 12.75 GiB");
  shape = decode_of(4);
  shape.dense_bytes = dense_bytes;
  shape.n_microbatches = 2;
  shape.may_cache = all_stream;
  plan = plan_of(&shape);
  check_text(&plan,
             "layers 0-2 dense, 3-60 offloaded; 4 tokens, 0 of prompts, in 1 microbatch, the "
             "host waits between devices; dense weights of layers 10-60 streamed, 12.75 GiB");
  shape.has_expert_dev = false;
  assert_false(plan_of(&shape).is_replayed);
}

// As many tokens beside one a sequence as there may be drafts are handed over and replayed as one a
// sequence is, but neither cached nor cut in two; more are sequences that are computed again.
TEST(drafts) {
  static bool may_cache[TD_MAX_LAYERS];
  for (uint32_t i = 4; i < N_LAYERS; i++)
    may_cache[i] = true;
  td_step_shape shape = decode_of(4);
  shape.max_drafts = 3;
  shape.n_microbatches = 2;
  for (shape.n_tokens = 5; shape.n_tokens < 9; shape.n_tokens++) {
    const bool is_drafted = shape.n_tokens <= 7;
    shape.may_cache = may_cache;
    td_step_plan plan = plan_of(&shape);
    assert_int_equal(plan.is_replayed, is_drafted);
    assert_int_equal(plan.handover, is_drafted ? TD_HANDOVER_SIGNALS : TD_HANDOVER_HOST);
    assert_int_equal(plan.n_ways[TD_LAYER_CACHED], 0);
    assert_int_equal(plan.n_microbatches, 1);
  }
}

TEST(cached_experts) {
  static bool may_cache[TD_MAX_LAYERS];
  for (uint32_t i = 4; i < N_LAYERS; i++)
    may_cache[i] = true;
  td_step_shape shape = decode_of(4);
  shape.may_cache = may_cache;
  td_step_plan plan = plan_of(&shape);
  assert_int_equal(plan.handover, TD_HANDOVER_SIGNALS);
  assert_true(plan.is_replayed);
  check_text(&plan, "layers 0-2 dense, 3 offloaded, 4-60 cached; 4 tokens, 0 of prompts, in 1 "
                    "microbatch, both devices queued up front, replayed");
  shape.n_tokens = 5; // a sequence is computed again: as without a cache
  plan = plan_of(&shape);
  assert_int_equal(plan.n_ways[TD_LAYER_CACHED], 0);
  shape = prompt_of(2000);
  shape.may_cache = may_cache;
  plan = plan_of(&shape);
  assert_int_equal(plan.n_ways[TD_LAYER_CACHED], 0);
}

TEST(decode) {
  td_step_shape shape = decode_of(4);
  td_step_plan plan = plan_of(&shape);
  assert_int_equal(plan.handover, TD_HANDOVER_SIGNALS);
  assert_int_equal(plan.n_ways[TD_LAYER_OFFLOADED], N_LAYERS - N_DENSE);
  assert_true(plan.is_replayed);
  check_text(&plan, "layers 0-2 dense, 3-60 offloaded; 4 tokens, 0 of prompts, in 1 microbatch, "
                    "both devices queued up front, replayed");
  shape.n_microbatches = 2;
  assert_true(td_step_can_split(v3(), &shape));
  plan = plan_of(&shape);
  assert_int_equal(plan.n_microbatches, 2);
  shape.n_tokens = 5; // a sequence is computed again, with two tokens
  assert_false(td_step_can_split(v3(), &shape));
  plan = plan_of(&shape);
  assert_int_equal(plan.handover, TD_HANDOVER_HOST);
  assert_int_equal(plan.n_microbatches, 1);
  assert_false(plan.is_replayed);
}

TEST(one_device) {
  td_step_shape shape = decode_of(1);
  shape.has_expert_dev = false;
  td_step_plan plan = plan_of(&shape);
  assert_int_equal(plan.handover, TD_HANDOVER_NONE);
  assert_true(plan.is_replayed);
  check_text(&plan, "layers 0-2 dense, 3-60 resident; 1 tokens, 0 of prompts, in 1 microbatch, "
                    "replayed");
  shape.may_replay = false;
  assert_false(plan_of(&shape).is_replayed);
}

TEST(prompts) {
  td_step_shape shape = prompt_of(999);
  td_step_plan plan = plan_of(&shape);
  assert_int_equal(plan.n_ways[TD_LAYER_OFFLOADED], N_LAYERS - N_DENSE);
  assert_int_equal(plan.handover, TD_HANDOVER_HOST);
  assert_false(td_step_wants_streaming(&shape));
  shape = prompt_of(1000);
  shape.n_gpu_expert_layers = 10;
  plan = plan_of(&shape);
  assert_int_equal(plan.n_ways[TD_LAYER_STREAMED], N_LAYERS - 10);
  check_text(&plan, "layers 0-2 dense, 3-9 resident, 10-60 streamed; 1000 tokens, 1000 of prompts, "
                    "in 1 microbatch");
  bool may_stream[TD_MAX_LAYERS];
  memcpy(may_stream, all_stream, sizeof may_stream);
  may_stream[60] = false;
  shape.may_stream = may_stream;
  plan = plan_of(&shape);
  assert_int_equal(plan.way[59], TD_LAYER_STREAMED);
  assert_int_equal(plan.way[60], TD_LAYER_OFFLOADED);
  shape.break_even_tokens = 0;
  assert_false(td_step_wants_streaming(&shape));
}

// Work of both devices is queued up front where a stream holds it, which is counted over offloaded
// layers alone. Qwen3-235B has 94 layers, and all may be offloaded.
TEST(depth_of_streams) {
  static td_model_config config = {.n_layers = 94};
  td_step_shape shape = decode_of(2);
  shape.has_expert_dev = false;
  assert_false(td_step_can_split(&config, &shape));
  shape.has_expert_dev = true;
  memset(config.moe_layers, 0xff, sizeof config.moe_layers);
  assert_true(td_step_can_split(&config, &shape));
  config.n_layers = 200;
  assert_false(td_step_can_split(&config, &shape));
  shape.n_gpu_expert_layers = 110;
  assert_true(td_step_can_split(&config, &shape));
  shape.n_gpu_expert_layers = 0;
  memset(config.moe_layers, 0x55, sizeof config.moe_layers);
  assert_true(td_step_can_split(&config, &shape));
}

int before_all(void **state) {
  (void)state;
  memset(all_stream, true, sizeof all_stream);
  return 0;
}
