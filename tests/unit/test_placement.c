// tests/unit/test_placement.c - where a model is computed, and how a GPU's memory is shared out.
// CTest: no-tsan
#include "engine/attn/kind.h"
#include "engine/engine.h"
#include "engine/experts/expert_slots.h"
#include "kv/plan.h"
#include "support/checkpoint.h"
#include "unit/log_of.h"
#include "unit/placement_test.h"

// ---- where a model is computed ------------------------------------------------------------------

TEST(what_cannot_be) {
  static const struct {
    td_runtime_opts opts;
    const char *says; // NULL: can be
  } cases[] = {
      {{.device = "cpu"}, NULL},
      {{.device = "auto", .experts = TD_EXPERTS_GPU}, NULL},
      {{.device = "cuda", .experts = TD_EXPERTS_CPU}, NULL},
      {{.device = "gpu"}, "--device gpu: give cpu, cuda or auto"},
      {{.device = "cpu", .experts = TD_EXPERTS_GPU}, "--expert-device gpu"},
      {{.device = "cuda", .activations = TD_ACTIVATIONS_INT8}, NULL},
      {{.device = "cpu", .activations = TD_ACTIVATIONS_FP8}, "--activations fp8 is for GPUs"},
      {{.device = "cuda", .activations = TD_ACTIVATIONS_FP8}, NULL},
      {{.device = "cuda", .devices = "1,0", .expert_parallel = 1}, NULL},
      {{.device = "cuda", .devices = "1", .expert_parallel = 1}, "--expert-parallel on"},
      {{.device = "cuda", .devices = "1,1"}, "--devices 1,1"},
      {{.device = "cuda", .devices = "0,"}, "--devices 0,"},
      {{.device = "cuda", .devices = "0;1"}, "--devices 0;1"},
      {{.device = "cuda", .devices = "-1"}, "--devices -1"},
      {{.device = "cuda", .devices = "64"}, "--devices 64"},
      {{.device = "cuda", .devices = "0,1,2,3,4,5,6,7,8"}, "up to 8"},
  };
  const td_model_config plain = {.kind = {TD_ATTN_MLA}};
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    td_err err;
    td_status st = td_placement_check(&cases[i].opts, &err);
    assert_int_equal(st, cases[i].says ? TD_EINVAL : TD_OK);
    if (i < 3) assert_int_equal(td_placement_may_use_gpu(&cases[i].opts, &plain), i > 0);
    if (cases[i].says) assert_non_null(strstr(err.msg, cases[i].says));
  }
}

static void check_kv(void *config) {
  assert_int_equal(td_attn_check_kv(config, TD_F16, NULL), TD_OK);
}

TEST(warns_of_a_kv_dtype_without_effect) {
  td_model_config c = {.arch_name = "deepseek_v4",
                       .n_layers = 1,
                       .kind = {TD_ATTN_NEAR},
                       .window = 128,
                       .head_dim = 8};
  char text[512];
  log_of(text, sizeof text, check_kv, &c);
  assert_non_null(strstr(text, "--kv-dtype f16 changes nothing: all that deepseek_v4 keeps"));
  c = (td_model_config){.n_layers = 1, .kind = {TD_ATTN_GQA}, .n_kv_heads = 1, .head_dim = 8};
  log_of(text, sizeof text, check_kv, &c);
  assert_string_equal(text, "");
}

TEST(models_that_devices_cannot_share) {
  const td_model_config sinks = {.arch_name = "gpt_oss", .window = 128};
  const td_model_config states = {.arch_name = "qwen3_next",
                                  .n_layers = 1,
                                  .kind = {TD_ATTN_DELTA},
                                  .delta_k_heads = 1,
                                  .delta_v_heads = 1,
                                  .delta_k_dim = 8,
                                  .delta_v_dim = 8,
                                  .delta_taps = 4};
  const td_model_config pooled = {.arch_name = "deepseek_v4",
                                  .n_layers = 1,
                                  .kind = {TD_ATTN_NEAR},
                                  .window = 128,
                                  .head_dim = 8};
  static const td_runtime_opts one[] = {
      {.device = "cpu"}, {.device = "cuda"}, {.device = "auto", .experts = TD_EXPERTS_GPU}};
  td_runtime_opts several = {.device = "cpu", .devices = "0,1"};
  td_err err;
  for (size_t i = 0; i < TD_COUNT(one); i++) {
    assert_int_equal(td_placement_check_model(&one[i], &states, &err), TD_OK);
    assert_int_equal(td_placement_check_model(&one[i], &sinks, &err), TD_OK);
  }
  assert_int_equal(td_placement_check_model(&several, &sinks, &err), TD_OK);
  assert_int_equal(td_placement_check_model(&several, &states, &err), TD_OK); // auto: they do not
  assert_true(td_shares_prompts(&several, &sinks) && !td_shares_prompts(&several, &states));
  several.expert_parallel = 2;
  assert_false(td_shares_prompts(&several, &sinks) || td_shares_prompts(&one[0], &sinks));
  several.expert_parallel = 1;
  assert_int_equal(td_placement_check_model(&several, &sinks, &err), TD_OK);
  assert_int_equal(td_placement_check_model(&several, &states, &err), TD_EUNSUPPORTED);
  assert_non_null(strstr(err.msg, "--expert-parallel on"));
  assert_int_equal(td_placement_check_model(&several, &pooled, &err), TD_EUNSUPPORTED);
  assert_non_null(strstr(err.msg, "two GPUs then prefill on one and decode on the other"));
}

// Kinds of attention without pages in E4M3, and rows that no runs of 16 make, are named; the pages
// of others are smaller.
TEST(fp8_pages) {
  static const struct {
    td_model_config config;
    const char *words; // NULL: there are
  } list[] = {
      {{.kv_lora_rank = 512, .rope_dim = 64, .kind = {[0 ... 60] = TD_ATTN_MLA}}, NULL},
      {{.n_kv_heads = 4, .head_dim = 128, .kind = {TD_ATTN_GQA}}, NULL},
      {{.n_kv_heads = 4, .head_dim = 24, .kind = {TD_ATTN_GQA}}, "24 elements"},
      {{.kv_lora_rank = 512, .rope_dim = 68, .kind = {TD_ATTN_MLA}}, "68 of them rotary"},
      {{.kind = {TD_ATTN_BLOCKS}, .head_dim = 128}, "blocks that an indexer selects"},
      {{.kind = {TD_ATTN_DSA}, .kv_lora_rank = 512}, "keys that an indexer selects"},
      {{.kind = {TD_ATTN_DSA_SHARED}, .kv_lora_rank = 512}, "keys that an indexer selects"},
      {{.kind = {TD_ATTN_NEAR}, .head_dim = 512}, "pooled keys"},
      {{.kind = {TD_ATTN_POOL}, .head_dim = 512, .pool_group = 128}, "pooled keys"},
      {{.kind = {TD_ATTN_POOL_TOP}, .head_dim = 512, .pool_top_group = 4}, "pooled keys"},
  };
  td_runtime_opts opts = {.device = "cpu"};
  td_err err;
  for (size_t i = 0; i < TD_COUNT(list); i++) {
    td_model_config c = list[i].config;
    c.n_layers = 1;
    strcpy(c.arch_name, "some_arch");
    opts.kv_dtype = TD_F16;
    assert_int_equal(td_placement_check_model(&opts, &c, &err), TD_OK);
    opts.kv_dtype = TD_F8E4M3;
    const td_status st = td_placement_check_model(&opts, &c, &err);
    assert_int_equal(st, list[i].words ? TD_EUNSUPPORTED : TD_OK);
    if (!list[i].words) continue;
    const char *parts[] = {"--kv-dtype fp8", "some_arch", list[i].words, "give f16"};
    for (size_t k = 0; k < TD_COUNT(parts); k++)
      if (!strstr(err.msg, parts[k])) fail_msg("'%s' does not speak of '%s'", err.msg, parts[k]);
  }
  opts.kv_dtype = TD_BF16;
  assert_int_equal(td_placement_check_model(&opts, &list[0].config, &err), TD_EINVAL);
  td_model_config c = list[0].config;
  c.n_layers = 61;
  c.max_position = 1 << 20;
  assert_int_equal(td_placement_kv_bytes(1000, TD_F32, &c, 0), 1000 * 61 * 1152);
  assert_int_equal(td_placement_kv_bytes(1000, TD_F8E4M3, &c, 0), 1000 * 61 * (512 + 4 * 4 + 128));
  c = list[1].config;
  c.n_layers = 1;
  assert_int_equal(td_placement_kv_bytes(1000, TD_F8E4M3, &c, 0), 1000 * 2 * 4 * (128 + 4));
}

// Without a GPU auto is cpu in every respect; with one the experts are the CPU's if they do not fit
// beside operators and a short context.
TEST(who_computes) {
  checkpoint ck;
  td_model *model;
  td_err err;
  ck_qwen3(&ck);
  ck_write(&ck);
  if (ck_open(&ck, &model, &err) != TD_OK) fail_msg("%s", err.msg);
  const td_model_stats stats = td_model_stats_of(model);
  const uint64_t kv_bytes = td_placement_kv_bytes(0, TD_F32, td_model_config_of(model), 8192);
  const uint64_t all = stats.bytes + TD_KV_DEVICE_SPARE + kv_bytes;
  assert_true(stats.expert_bytes > 0);
  static const td_expert_place places[] = {TD_EXPERTS_AUTO, TD_EXPERTS_CPU, TD_EXPERTS_GPU};
  for (size_t i = 0; i < TD_COUNT(places); i++) {
    const td_runtime_opts opts = {.device = "auto", .experts = places[i]};
    td_placement p = td_placement_of(&opts, model, 0);
    assert_string_equal(p.device, "cpu");
    assert_false(p.is_discrete || p.experts_on_cpu);
    p = td_placement_of(&opts, model, all);
    assert_string_equal(p.device, "cuda");
    assert_true(p.is_discrete);
    assert_int_equal(p.experts_on_cpu, places[i] == TD_EXPERTS_CPU);
    p = td_placement_of(&opts, model, all - 1);
    assert_int_equal(p.experts_on_cpu, places[i] != TD_EXPERTS_GPU);
    const bool all_there = places[i] == TD_EXPERTS_GPU;
    assert_int_equal(td_placement_need_bytes(&opts, &stats),
                     stats.bytes - (all_there ? 0 : stats.expert_bytes));
  }
  td_model_close(model);
  ck_free(&ck);
}

// ---- a GPU's memory -----------------------------------------------------------------------------

static const td_model_config qwen3_235b = {.n_layers = 94,
                                           .n_vocab = 151936,
                                           .dim = 4096,
                                           .n_heads = 64,
                                           .max_position = 40960,
                                           .n_kv_heads = 4,
                                           .head_dim = 128,
                                           .n_experts = 128,
                                           .top_k = 8};

static td_gpu_need need_of(const td_model_config *c, uint64_t free_bytes, uint64_t weight_bytes,
                           uint64_t layer_bytes, uint32_t ctx_size) {
  return (td_gpu_need){.free_bytes = free_bytes,
                       .weight_bytes = weight_bytes,
                       .layer_bytes = layer_bytes,
                       .kv_bytes = td_placement_kv_bytes(ctx_size, TD_F32, c, TD_KV_DEFAULT_CTX),
                       .is_ctx_given = ctx_size != 0,
                       .step_token_bytes = td_engine_step_bytes_per_token(c, TD_BF16),
                       .usual_chunk = td_engine_prefill_chunk(c)};
}

// Tokens that the KV plan makes of what is left.
static uint32_t context_of(const td_model_config *c, const td_gpu_need *need,
                           const td_gpu_plan *plan, uint32_t ctx_size) {
  td_kv_need kv = {
      .max_position = c->max_position,
      .weight_bytes = need->weight_bytes + plan->chunk_bytes + plan->stream_bytes,
      .available_bytes = need->free_bytes,
      .ctx_size = ctx_size,
      .max_batch = 1,
      .is_device = true,
  };
  const td_kv_layout layout = td_kv_layout_of(c, TD_BF16, 0);
  td_kv_layout_to_need(&layout, &kv);
  td_kv_plan out;
  td_err err;
  if (td_kv_plan_make(&out, &kv, &err) != TD_OK) fail_msg("%s", err.msg);
  return out.n_ctx;
}

// Cards of 24, 32 and 80 GB; free is what a driver and its context leave of them.
TEST(rings) {
  const uint64_t v3 = expert_bytes(7168, 2048), qwen3 = expert_bytes(4096, 1536);
  const struct {
    const td_model_config *config;
    uint64_t free_bytes, weight_bytes, expert_bytes;
    double least, most; // layers of experts in the ring
    uint32_t min_chunk, min_ctx;
  } cases[] = {
      {&deepseek_v3, 24500 * GB / 1000, 19 * GB, v3, 0.09, 0.15, 4096, 16384},
      {&deepseek_v3, 33 * GB, 19 * GB, v3, 0.5, 0.7, 16384, 32768},
      {&deepseek_v3, 84 * GB, 19 * GB, v3, 1, 1, 32768, 32768},
      {&qwen3_235b, 24500 * GB / 1000, 8 * GB, qwen3, 1, 1, 32768, 24576},
      {&qwen3_235b, 33 * GB, 8 * GB, qwen3, 1, 1, 32768, 32768},
      {&qwen3_235b, 84 * GB, 8 * GB, qwen3, 1, 1, 32768, 32768},
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    const td_model_config *c = cases[i].config;
    const uint64_t layer_bytes = c->n_experts * cases[i].expert_bytes;
    const td_gpu_need need = need_of(c, cases[i].free_bytes, cases[i].weight_bytes, layer_bytes, 0);
    const td_gpu_plan plan = td_gpu_plan_make(&need);
    const double layers = (double)plan.stream_bytes / (double)layer_bytes;
    const uint32_t n_ctx = context_of(c, &need, &plan, 0);
    if (layers < cases[i].least || layers > cases[i].most) fail_msg("case %zu: %g", i, layers);
    if (plan.prefill_chunk < cases[i].min_chunk) fail_msg("case %zu: chunk", i);
    if (n_ctx < cases[i].min_ctx) fail_msg("case %zu: a context of %u", i, n_ctx);
    const uint32_t n = td_slot_experts(plan.stream_bytes, cases[i].expert_bytes, c->n_experts);
    if (n == 0 || plan.stream_bytes / (n * cases[i].expert_bytes) < TD_SLOT_MIN) {
      fail_msg("case %zu: %u experts a slot", i, n);
    }
  }
}

// A context that was asked for comes before the ring, to the last token.
TEST(a_given_context_comes_first) {
  const uint64_t layer_bytes = 256 * expert_bytes(7168, 2048);
  for (uint32_t ctx = 8192; ctx <= 131072; ctx *= 4) {
    const td_gpu_need need = need_of(&deepseek_v3, 33 * GB, 19 * GB, layer_bytes, ctx);
    const td_gpu_plan plan = td_gpu_plan_make(&need);
    assert_int_equal(context_of(&deepseek_v3, &need, &plan, ctx), ctx);
    assert_true(ctx > 32768 || plan.stream_bytes > layer_bytes / 2);
  }
  const td_gpu_need need = need_of(&deepseek_v3, 24500 * GB / 1000, 19 * GB, layer_bytes, 131072);
  assert_int_equal(td_gpu_plan_make(&need).stream_bytes, 0);
  const td_gpu_need none = need_of(&deepseek_v3, GB, 19 * GB, layer_bytes, 0);
  assert_int_equal(td_gpu_plan_make(&none).stream_bytes, 0);
  assert_int_equal(td_gpu_plan_make(&none).prefill_chunk, none.usual_chunk);
}

// Layers that a GPU has experts of itself, in half of what a ring, a chunk and two contexts leave.
TEST(own_layers) {
  enum { N = 61, DENSE = 3 };
  uint64_t layer_bytes[N] = {0}, bytes;
  for (int i = DENSE; i < N; i++)
    layer_bytes[i] = 256 * expert_bytes(7168, 2048);
  static const struct {
    uint64_t free_gb;
    uint32_t n;
  } cases[] = {{1, DENSE}, {33, DENSE}, {84, DENSE + 1}, {150, DENSE + 4}, {2000, N}};
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    const td_gpu_need need = need_of(&deepseek_v3, cases[i].free_gb * GB, 19 * GB,
                                     layer_bytes[N - 1], 0);
    const td_gpu_plan plan = td_gpu_plan_make(&need);
    const uint64_t held = need.weight_bytes + plan.chunk_bytes + plan.stream_bytes;
    const uint32_t n = td_gpu_own_layers(&need, held, layer_bytes, N, &bytes);
    if (n != cases[i].n) fail_msg("%u layers of %d GB", n, (int)cases[i].free_gb);
    assert_int_equal(bytes, (n - DENSE) * layer_bytes[N - 1]);
  }
}

TEST(sizes_of_the_cache) {
  static const struct {
    const char *text;
    bool is_auto;
    uint64_t bytes;
  } good[] = {{NULL, false, 0},
              {"off", false, 0},
              {"auto", true, 0},
              {"8", false, (uint64_t)8 << 30},
              {"0.5", false, (uint64_t)1 << 29}};
  static const char *const bad[] = {"", "on", "8G", "-1", "0", "nan", "1e9", "auto "};
  td_expert_cache_size size;
  td_err err;
  for (size_t i = 0; i < TD_COUNT(good); i++) {
    assert_int_equal(td_expert_cache_parse(&size, good[i].text, &err), TD_OK);
    assert_true(size.is_auto == good[i].is_auto && size.bytes == good[i].bytes);
  }
  for (size_t i = 0; i < TD_COUNT(bad); i++) {
    const td_runtime_opts opts = {.device = "cuda", .expert_cache = bad[i]};
    assert_int_equal(td_placement_check(&opts, &err), TD_EINVAL);
    assert_non_null(strstr(err.msg, "--expert-cache"));
  }
}

// Without a cache, half of what is left goes to whole layers. A cache of a given size comes first.
// auto takes the layers' memory where less than half of them would fit, and else what they leave.
TEST(layers_and_the_cache) {
  enum { N = 58 };
  uint64_t layer_bytes[N + 3] = {0};
  for (int i = 3; i < N + 3; i++)
    layer_bytes[i] = 11 * GB;
  td_gpu_need need = need_of(&deepseek_v3, 80 * GB, 19 * GB, layer_bytes[3], 0);
  td_expert_cache_size size = {.bytes = 0};
  td_gpu_experts own = td_gpu_experts_plan(&need, 30 * GB, layer_bytes, N + 3, true, &size);
  const uint64_t half = own.layers_bytes + 11 * GB; // at least one more layer is half of the room
  assert_true(own.layers_bytes >= 11 * GB && own.cache_bytes == 0);
  size.bytes = 5 * GB;
  own = td_gpu_experts_plan(&need, 30 * GB, layer_bytes, N + 3, true, &size);
  assert_int_equal(own.cache_bytes, 5 * GB);
  own = td_gpu_experts_plan(&need, 30 * GB, layer_bytes, N + 3, false, &size);
  assert_true(own.cache_bytes == 5 * GB && own.n_layers == 0 && own.layers_bytes == 0);
  size.bytes = 500 * GB;
  own = td_gpu_experts_plan(&need, 30 * GB, layer_bytes, N + 3, true, &size);
  assert_true(own.cache_bytes > half && own.cache_bytes < 50 * GB && own.layers_bytes == 0);
  size = (td_expert_cache_size){.is_auto = true};
  own = td_gpu_experts_plan(&need, 30 * GB, layer_bytes, N + 3, true, &size);
  assert_true(own.n_layers == 0 && own.cache_bytes >= 11 * GB && own.cache_bytes <= half);
  need.free_bytes = 900 * GB;
  own = td_gpu_experts_plan(&need, 30 * GB, layer_bytes, N + 3, true, &size);
  assert_true(own.n_layers >= 3 + N / 2 && own.cache_bytes < 11 * GB);
}

static uint32_t pool_of(const td_card_wish *wish, uint64_t held_bytes) {
  const td_kv_layout layout = td_kv_layout_of(&deepseek_v3, TD_BF16, 0);
  td_kv_need need = {.max_position = deepseek_v3.max_position,
                     .weight_bytes = held_bytes,
                     .available_bytes = wish->free_bytes,
                     .max_batch = wish->n_seqs,
                     .is_device = true};
  td_kv_layout_to_need(&layout, &need);
  td_kv_plan out;
  td_err err;
  if (td_kv_plan_make(&out, &need, &err) != TD_OK) fail_msg("%s", err.msg);
  return out.n_pages * layout.page_tokens;
}

// Experts have what is left beside all contexts that there can be, and never less than otherwise;
// the pool then has as many tokens as without them.
TEST(experts_before_keys_of_no_request) {
  const td_plan_load load = load_of_v3();
  uint32_t n_more = 0, n_given = 0;
  for (uint64_t gb = 32; gb <= 256; gb += 16) {
    td_card_wish wish = {.free_bytes = gb * GB,
                         .n_gpus = 1,
                         .act_dtype = TD_BF16,
                         .streams_experts = true,
                         .keeps_layers = true};
    const uint64_t usual = td_divide(&load, &wish).own.layers_bytes;
    for (uint32_t n_seqs = 1; n_seqs <= 64; n_seqs *= 2) {
      wish.n_seqs = n_seqs;
      const td_division d = td_divide(&load, &wish);
      assert_true(d.own.layers_bytes >= usual);
      if (d.own.layers_bytes == usual) continue;
      assert_int_equal(pool_of(&wish, d.held_bytes), n_seqs * TD_KV_DEFAULT_CTX);
      n_more++;
    }
    assert_true(gb > 160 || td_divide(&load, &wish).own.layers_bytes == usual);
    wish.kv_tokens = 200000; // as asked for, whatever the requests
    const td_division d = td_divide(&load, &wish);
    const uint64_t pool_bytes = td_engine_kv_bytes(&deepseek_v3, TD_BF16, wish.kv_tokens);
    const uint64_t left = wish.free_bytes - d.held_bytes;
    assert_true(d.own.layers_bytes == usual || left > pool_bytes + TD_KV_DEVICE_SPARE);
    n_given += d.own.layers_bytes > usual;
  }
  assert_true(n_more > 15 && n_given > 3);
}

// Whole layers give half of their memory to a cache that two GPUs share; a cache that was asked for
// stays. The second GPU has a share of the whole layers, too.
TEST(experts_of_two_gpus) {
  static const uint64_t layer_bytes[] = {0, 4 * GB, 4 * GB, 4 * GB, 4 * GB, 4 * GB};
  td_gpu_experts own = {.n_layers = 6, .layers_bytes = 20 * GB};
  td_gpu_shared_experts s = td_gpu_share_experts(&own, layer_bytes, 6, 2);
  assert_true(s.is_fixed && s.first.n_layers == 3 && s.first.layers_bytes == 8 * GB);
  assert_true(s.first.cache_bytes == 12 * GB && s.peer_bytes == 16 * GB);
  own = (td_gpu_experts){.n_layers = 2, .layers_bytes = 4 * GB}; // less than two layers
  s = td_gpu_share_experts(&own, layer_bytes, 6, 2);
  assert_true(s.first.layers_bytes == 0 && s.first.n_layers == 1);
  assert_true(s.first.cache_bytes == 4 * GB && s.peer_bytes == 4 * GB);
  own = (td_gpu_experts){.n_layers = 4, .layers_bytes = 12 * GB, .cache_bytes = 5 * GB};
  s = td_gpu_share_experts(&own, layer_bytes, 6, 3);
  assert_true(!s.is_fixed && s.first.n_layers == 4 && s.first.cache_bytes == 5 * GB);
  assert_int_equal(s.peer_bytes, 13 * GB);
  own = (td_gpu_experts){.n_layers = 0};
  s = td_gpu_share_experts(&own, layer_bytes, 6, 2);
  assert_true(s.first.cache_bytes == 0 && s.peer_bytes == 0);
}

// A GPU that has all experts takes long pieces of prompts, too, where there is room for them.
TEST(chunks_of_a_gpu_alone) {
  td_gpu_need need = need_of(&qwen3_235b, 141 * GB, 125 * GB, 0, 0);
  td_gpu_plan plan = td_gpu_plan_make(&need);
  assert_int_equal(plan.prefill_chunk, 8192);
  assert_int_equal(plan.stream_bytes, 0);
  assert_true(plan.chunk_bytes > 0);
  need.free_bytes = 127 * GB; // room for the usual chunk alone
  plan = td_gpu_plan_make(&need);
  assert_in_range(plan.prefill_chunk, need.usual_chunk, 2048);
  need.prefill_chunk = 4096;
  assert_int_equal(td_gpu_plan_make(&need).prefill_chunk, 4096);
}

TEST(a_pair_of_gpus) {
  static const td_dense_size dense[61];
  td_gpu_need need = {.layer_bytes = 11 * GB, .usual_chunk = 1024, .step_token_bytes = 100000};
  td_gpu_plan plan = {.prefill_chunk = 21024, .chunk_bytes = 2 * GB, .stream_bytes = 3 * GB};
  td_gpu_pair pair = td_gpu_pair_plan(&need, &plan, 5 * GB, dense, 61);
  assert_true(pair.stream_bytes == 8 * GB && pair.cache_bytes == 10 * GB);
  assert_true(pair.prefill_chunk == 21024 && pair.n_streamed_dense == 0);
  need.layer_bytes = 6 * GB; // a ring is one layer at most
  pair = td_gpu_pair_plan(&need, &plan, 5 * GB, dense, 61);
  assert_true(pair.stream_bytes == 6 * GB && pair.cache_bytes == 10 * GB);
}

// Dense weights stream where a ring would be short or steps would be, and of no more layers than
// that takes: the last ones, which in V3 have the smaller MLPs.
TEST(dense_weights_of_a_pair) {
  const td_plan_load load = load_of_v3();
  const td_gpu_need need = {
      .layer_bytes = 11 * GB, .usual_chunk = 1024, .step_token_bytes = 160000};
  const td_gpu_plan plan = {
      .prefill_chunk = 7424, .chunk_bytes = 6400 * 160000ull, .stream_bytes = 2 * GB};
  td_gpu_pair pair = td_gpu_pair_plan(&need, &plan, GB, load.dense, 61);
  assert_true(pair.n_streamed_dense > 50 && pair.prefill_chunk > 3 * plan.prefill_chunk);
  assert_true(pair.stream_bytes > 11 * GB / 2 && pair.cache_bytes < 5 * GB);
  check_memory_of_first(&need, &plan, &pair, GB, load.dense);
  assert_true(pair.dense_ring_bytes == (pair.n_streamed_dense > 58 ? 583 : 235) << 20);
  td_gpu_need asked = need; // a shorter step was asked for: the ring alone decides
  asked.prefill_chunk = plan.prefill_chunk;
  const td_gpu_pair less = td_gpu_pair_plan(&asked, &plan, GB, load.dense, 61);
  assert_true(less.n_streamed_dense > 0 && less.n_streamed_dense < pair.n_streamed_dense);
  assert_true(less.prefill_chunk == 7424 && less.stream_bytes >= 11 * GB / 2);
  assert_true(less.stream_bytes < 6 * GB);
  check_memory_of_first(&asked, &plan, &less, GB, load.dense);
  static const td_dense_size one_large[61] = {[60] = {{GB, GB}}}; // each of two rings is as large
  assert_int_equal(td_gpu_pair_plan(&need, &plan, GB, one_large, 61).n_streamed_dense, 0);
}
