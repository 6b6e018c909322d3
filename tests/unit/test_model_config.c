// tests/unit/test_model_config.c - config.json in all its spellings, and how prompts are cut
// because of it.
// CTest: no-tsan
#include "engine/engine.h"
#include "unit/config_test.h"

// What deepseek-ai publishes with V3, as far as it matters.
static const char deepseek_v3[] =
    "{\"architectures\": [\"DeepseekV3ForCausalLM\"], \"attention_bias\": false,"
    " \"bos_token_id\": 0, \"eos_token_id\": 1, \"ep_size\": 1, \"first_k_dense_replace\": 3,"
    " \"hidden_act\": \"silu\", \"hidden_size\": 7168, \"intermediate_size\": 18432,"
    " \"kv_lora_rank\": 512, \"max_position_embeddings\": 163840, \"model_type\": \"deepseek_v3\","
    " \"moe_intermediate_size\": 2048, \"moe_layer_freq\": 1, \"n_group\": 8,"
    " \"n_routed_experts\": 256, \"n_shared_experts\": 1, \"norm_topk_prob\": true,"
    " \"num_attention_heads\": 128, \"num_experts_per_tok\": 8, \"num_hidden_layers\": 61,"
    " \"num_key_value_heads\": 128, \"num_nextn_predict_layers\": 1, \"q_lora_rank\": 1536,"
    " \"qk_nope_head_dim\": 128, \"qk_rope_head_dim\": 64,"
    " \"quantization_config\": {\"activation_scheme\": \"dynamic\", \"fmt\": \"e4m3\","
    " \"quant_method\": \"fp8\", \"weight_block_size\": [128, 64]}, \"rms_norm_eps\": 1e-06,"
    " \"rope_scaling\": {\"beta_fast\": 32, \"beta_slow\": 1, \"factor\": 40, \"mscale\": 1.0,"
    " \"mscale_all_dim\": 0.5, \"original_max_position_embeddings\": 4096, \"type\": \"yarn\"},"
    " \"rope_theta\": 10000, \"routed_scaling_factor\": 2.5, \"scoring_func\": \"sigmoid\","
    " \"tie_word_embeddings\": false, \"topk_group\": 4, \"topk_method\": \"noaux_tc\","
    " \"torch_dtype\": \"bfloat16\", \"v_head_dim\": 128, \"vocab_size\": 129280}";

static void check_deepseek(const td_model_config *c) {
  assert_int_equal(c->attn, TD_ATTN_MLA);
  assert_int_equal(c->dim, 7168);
  assert_int_equal(c->n_layers, 61);
  assert_int_equal(c->n_vocab, 129280);
  assert_int_equal(c->n_heads, 128);
  assert_int_equal(c->q_lora_rank, 1536);
  assert_int_equal(c->kv_lora_rank, 512);
  assert_int_equal(c->nope_dim, 128);
  assert_int_equal(c->rope_dim, 64);
  assert_int_equal(c->v_dim, 128);
  assert_int_equal(c->n_experts, 256);
  assert_int_equal(c->top_k, 8);
  assert_int_equal(c->n_shared_experts, 1);
  assert_int_equal(c->expert_dim, 2048);
  assert_int_equal(c->dense_dim, 18432);
  assert_int_equal(c->n_groups, 8);
  assert_int_equal(c->topk_groups, 4);
  assert_true(c->router_sigmoid && c->norm_topk && c->rope_interleaved);
  assert_false(c->tie_embeddings || c->attention_bias || c->qk_norm);
  assert_true(c->routed_scaling == 2.5f);
  assert_true(c->rms_eps == 1e-6f);
  assert_int_equal(c->n_mtp_layers, 1);
  assert_int_equal(c->bos_id, 0);
  assert_int_equal(c->n_eos, 1);
  assert_int_equal(c->eos_ids[0], 1);
  for (uint32_t i = 0; i < 61; i++)
    assert_int_equal(td_model_is_moe(c, i), i >= 3);
}

TEST(reads_deepseek) {
  td_model_config c = parse_ok(deepseek_v3, NULL);
  assert_string_equal(c.arch_name, "deepseek_v3");
  check_deepseek(&c);
  assert_int_equal(c.max_position, 163840);
  assert_true(c.rope_theta == 10000);
  assert_true(c.yarn.factor == 40 && c.yarn.beta_fast == 32 && c.yarn.beta_slow == 1);
  assert_true(c.yarn.mscale == 1 && c.yarn.mscale_all_dim == 0.5 && c.yarn.attention_factor == 0);
  assert_int_equal(c.yarn.original_max_position, 4096);
}

TEST(defaults_are_transformers) {
  td_model_config c = parse_ok("{\"model_type\": \"kimi_k2\"}", NULL);
  assert_string_equal(c.arch_name, "kimi_k2");
  check_deepseek(&c);
  assert_int_equal(c.max_position, 4096);
  assert_true(c.yarn.factor == 1);

  c = parse_ok("{\"model_type\": \"qwen3_moe\"}", NULL);
  assert_int_equal(c.attn, TD_ATTN_GQA);
  assert_int_equal(c.n_vocab, 151936);
  assert_int_equal(c.dim, 2048);
  assert_int_equal(c.n_layers, 24);
  assert_int_equal(c.n_heads, 32);
  assert_int_equal(c.n_kv_heads, 4);
  assert_int_equal(c.head_dim, 64); // hidden_size / num_attention_heads
  assert_int_equal(c.n_experts, 128);
  assert_int_equal(c.top_k, 8);
  assert_int_equal(c.expert_dim, 768);
  assert_int_equal(c.dense_dim, 6144);
  assert_int_equal(c.max_position, 32768);
  assert_int_equal(c.n_shared_experts, 0);
  assert_true(c.qk_norm);
  assert_false(c.norm_topk || c.router_sigmoid || c.tie_embeddings || c.attention_bias);
  assert_true(c.routed_scaling == 1 && c.rope_theta == 10000);
  assert_int_equal(c.bos_id, -1);
  assert_int_equal(c.n_eos, 0);
  assert_true(c.temperature == 1 && c.top_p == 1 && c.top_k_sampling == 0);
  for (uint32_t i = 0; i < c.n_layers; i++)
    assert_true(td_model_is_moe(&c, i));
}

TEST(reads_glm) {
  td_model_config c = parse_ok("{\"model_type\": \"glm4_moe\", \"head_dim\": 128}", NULL);
  assert_int_equal(c.attn, TD_ATTN_GQA);
  assert_int_equal(c.rope_dim, 64);
  assert_int_equal(c.qk_norm, TD_QK_NORM_NONE);
  assert_true(c.rms_eps == 1e-5f && c.norm_topk && c.router_sigmoid && c.routed_scaling == 1);
  assert_false(td_model_is_moe(&c, 0) || !td_model_is_moe(&c, 1));
  c = parse_ok("{\"model_type\": \"glm4_moe\", \"head_dim\": 24, \"use_qk_norm\": true,"
               " \"partial_rotary_factor\": 0.5, \"rope_parameters\":"
               " {\"rope_type\": \"default\", \"partial_rotary_factor\": 0.25}}",
               NULL);
  assert_int_equal(c.rope_dim, 6);
  assert_int_equal(c.qk_norm, TD_QK_NORM_HEAD);

  c = parse_ok("{\"model_type\": \"glm4_moe_lite\", \"num_hidden_layers\": 3,"
               " \"mlp_layer_types\": [\"sparse\", \"dense\", \"sparse\"]}",
               NULL);
  assert_int_equal(c.attn, TD_ATTN_MLA);
  assert_int_equal(c.moe_layers[0], 5);
  assert_true(c.routed_scaling == 1.8f && c.rope_interleaved);
}

// What an indexer's layers are, as V3.2, GLM-5 and GLM-5.2 are published, and in other spellings.
TEST(reads_indexers) {
  td_model_config c = parse_ok("{\"model_type\": \"deepseek_v32\", \"rope_interleave\": false}",
                               NULL);
  assert_int_equal(c.attn, TD_ATTN_DSA);
  assert_int_equal(c.n_layers, 61);
  assert_int_equal(c.index_heads, 64);
  assert_int_equal(c.index_dim, 128);
  assert_int_equal(c.index_top_k, 2048);
  assert_true(c.rope_interleaved && !c.index_interleaved);
  assert_string_equal(c.ignored[0], "rope_interleave");
  // The last is the one that predicts.
  for (uint32_t i = 0; i <= 61; i++)
    assert_int_equal(td_model_attn(&c, i), TD_ATTN_DSA);
  static const struct {
    const char *says;
    uint64_t layers;
  } cases[] = {
      {"\"index_topk\": 7", 0x3ff},
      {"\"index_topk_freq\": 4, \"index_skip_topk_offset\": 3", 0x007 | 1 << 6},
      {"\"index_topk_freq\": 3", 0x003 | 1 << 4 | 1 << 7},
      {"\"index_topk_freq\": 0", 0x3ff},
      {"\"index_topk_pattern\": \"FSFSSSSSSF\"", 1 | 1 << 2 | 1 << 9},
      {"\"index_topk_pattern\": [\"full\", \"shared\", \"full\", \"shared\", \"shared\", "
       "\"shared\","
       " \"shared\", \"shared\", \"shared\", \"shared\"]",
       5},
      {"\"index_topk_freq\": 1, \"indexer_types\": [\"full\", \"full\", \"shared\", \"shared\","
       " \"shared\", \"shared\", \"shared\", \"shared\", \"shared\", \"full\"]",
       3 | 1 << 9},
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    char json[512];
    snprintf(json, sizeof json, "{\"model_type\": \"glm_moe_dsa\", \"num_hidden_layers\": 10, %s}",
             cases[i].says);
    c = parse_ok(json, NULL);
    assert_int_equal(td_model_attn(&c, 10), TD_ATTN_DSA); // the layer that predicts
    assert_true(c.rope_interleaved && c.index_interleaved && c.index_heads == 32);
    for (uint32_t k = 0; k < 10; k++)
      assert_int_equal(td_model_attn(&c, k),
                       cases[i].layers >> k & 1 ? TD_ATTN_DSA : TD_ATTN_DSA_SHARED);
  }
}

// As published, and as transformers 5 writes it.
TEST(reads_pooled_attention) {
  static const char published[] =
      "{\"model_type\": \"deepseek_v4\", \"num_hidden_layers\": 4, \"compress_ratios\": [0, 4, "
      "128, 4, "
      "0],"
      " \"num_hash_layers\": 2, \"rope_theta\": 20000, \"compress_rope_theta\": 160000,"
      " \"qk_rope_head_dim\": 64, \"expert_dtype\": \"fp4\", \"scoring_func\": \"sqrtsoftplus\","
      " \"rope_scaling\": {\"type\": \"yarn\", \"factor\": 16, \"beta_fast\": 32, \"beta_slow\": 1,"
      " \"original_max_position_embeddings\": 65536}, \"quantization_config\": {\"quant_method\":"
      " \"fp8\", \"fmt\": \"e4m3\", \"scale_fmt\": \"ue8m0\", \"weight_block_size\": [128, 128]}}";
  td_model_config c = parse_ok(published, NULL);
  static const td_attn_kind kinds[] = {TD_ATTN_NEAR, TD_ATTN_POOL_TOP, TD_ATTN_POOL,
                                       TD_ATTN_POOL_TOP};
  for (uint32_t i = 0; i < 4; i++) {
    assert_int_equal(td_model_attn(&c, i), kinds[i]);
    assert_true(td_model_is_moe(&c, i));
  }
  assert_int_equal(c.table_layers[0], 3);
  assert_int_equal(c.rope_dim, 64);
  assert_int_equal(c.max_position, 1048576);
  assert_true(c.rope_theta == 20000 && c.pool_theta == 160000 && c.yarn.factor == 16);
  assert_true(c.yarn.attention_factor == 1 && c.swiglu_limit == 10 && c.router_softplus);
  assert_null(c.ignored[0]);

  c = parse_ok(
      "{\"model_type\": \"deepseek_v4\", \"num_hidden_layers\": 5, \"head_dim\": 48,"
      " \"index_head_dim\": 16, \"mlp_layer_types\": [\"moe\", \"hash_moe\", \"moe\", \"moe\","
      " \"moe\"], \"compress_rates\": {\"compressed_sparse_attention\": 8,"
      " \"heavily_compressed_attention\": 32}, \"rope_parameters\": {\"main\": {\"rope_type\":"
      " \"default\", \"rope_theta\": 5000}, \"compress\": {\"rope_type\": \"default\","
      " \"rope_theta\": 7000, \"partial_rotary_factor\": 0.25}}}",
      NULL);
  for (uint32_t i = 0; i < 5; i++) // as they are without layer_types
    assert_int_equal(td_model_attn(&c, i), i == 3 ? TD_ATTN_POOL_TOP : TD_ATTN_POOL);
  assert_int_equal(c.table_layers[0], 2);
  assert_int_equal(c.pool_top_group, 8);
  assert_int_equal(c.pool_group, 32);
  assert_int_equal(c.rope_dim, 12);
  assert_null(c.ignored[0]);
  assert_true(c.rope_theta == 5000 && c.pool_theta == 7000 && c.yarn.factor == 1);
}

TEST(reads_minimax_hy_and_mistral) {
  td_model_config c = parse_ok("{\"model_type\": \"minimax_m2\", \"rotary_dim\": 64}", NULL);
  assert_int_equal(c.rope_dim, 64);
  assert_int_equal(c.qk_norm, TD_QK_NORM_ALL);
  assert_int_equal(c.expert_dim, 1536);
  assert_true(c.rope_theta == 5e6 && td_model_is_moe(&c, 0));

  c = parse_ok(
      "{\"model_type\": \"minimax_m3_vl\", \"text_config\": {\"num_hidden_layers\": 3,"
      " \"model_type\": \"minimax_m3_vl_text\", \"hidden_act\": \"swigluoai\","
      " \"rotary_dim\": 64, \"moe_layer_freq\": [0, 1, 1], \"sparse_attention_config\":"
      " {\"sparse_attention_freq\": [false, false, true, true], \"sparse_topk_blocks\": 8}}}",
      NULL);
  assert_int_equal(td_model_attn(&c, 1), TD_ATTN_GQA);
  assert_int_equal(td_model_attn(&c, 2), TD_ATTN_BLOCKS);
  assert_true(!td_model_is_moe(&c, 0) && td_model_is_moe(&c, 1) && c.routed_scaling == 2);
  assert_int_equal(c.index_top_blocks, 8);
  assert_int_equal(c.index_block, 128);
  assert_int_equal(c.rope_dim, 64);

  c = parse_ok("{\"model_type\": \"hy_v3\"}", NULL);
  assert_int_equal(c.rope_dim, 128);
  assert_int_equal(c.n_shared_experts, 1);
  assert_true(c.routed_scaling == 2.826f && c.rms_eps == 1e-5f && c.rope_theta == 11158840);
  c = parse_ok("{\"model_type\": \"hy_v3\", \"expert_hidden_dim\": 96}", NULL);
  assert_true(c.expert_dim == 96);

  c = parse_ok("{\"model_type\": \"mistral3\", \"eos_token_id\": 7, \"text_config\":"
               " {\"model_type\": \"mistral4\", \"eos_token_id\": 6, \"rope_parameters\":"
               " {\"type\": \"yarn\", \"factor\": 128, \"llama_4_scaling_beta\": 0.1,"
               " \"original_max_position_embeddings\": 8192, \"partial_rotary_factor\": 0.5}}}",
               NULL);
  assert_string_equal(c.arch_name, "mistral3");
  assert_true(c.query_beta == 0.1 && !c.router_sigmoid && td_model_is_moe(&c, 0));
  assert_int_equal(c.query_span, 8192);
  assert_int_equal(c.n_eos, 1);
  assert_int_equal(c.eos_ids[0], 7);
}

// Keys that the family's reference does not have change nothing and are named.
TEST(ignores_what_the_reference_does) {
  static const struct {
    const char *model_type, *keys, *ignored;
  } cases[] = {
      {"minimax_m2", "\"norm_topk_prob\": false", "norm_topk_prob "},
      {"hy_v3", "\"norm_topk_prob\": false", "norm_topk_prob "},
      {"gpt_oss", "\"norm_topk_prob\": false", "norm_topk_prob "},
      {"qwen3_5_moe_text", "\"norm_topk_prob\": false", "norm_topk_prob "},
      {"hy_v3", "\"route_norm\": false", "route_norm "},
      {"minimax_m2", "\"attention_bias\": true", "attention_bias "},
      {"minimax_m2", "\"routed_scaling_factor\": 2.5, \"n_group\": 4",
       "routed_scaling_factor n_group "},
      {"hy_v3", "\"routed_scaling_factor\": 2.5", "routed_scaling_factor "},
      {"hy_v3", "\"first_k_dense_replace\": 3", "first_k_dense_replace "},
      {"glm4_moe_lite", "\"first_k_dense_replace\": 0", "first_k_dense_replace "},
      {"glm4_moe", "\"num_hidden_layers\": 2, \"mlp_layer_types\": [\"dense\", \"dense\"]",
       "mlp_layer_types "},
      {"mistral4", "\"mlp_layer_types\": [\"dense\"]", "mlp_layer_types "},
      {"gpt_oss", "\"hidden_act\": \"gelu\"", ""},
      {"qwen3_5_moe_text", "\"mlp_only_layers\": [1], \"decoder_sparse_step\": 2",
       "decoder_sparse_step mlp_only_layers "},
      {"qwen3_moe", "\"n_group\": 2, \"swiglu_limit\": 7", "swiglu_limit n_group "},
      {"qwen3_next", "\"sliding_window\": 128", "sliding_window "},
      {"glm4_moe",
       "\"rope_parameters\": {\"type\": \"yarn\", \"llama_4_scaling_beta\": 0.1,"
       " \"factor\": 2}",
       "llama_4_scaling_beta "},
      {"deepseek_v3", "\"rope_parameters\": {\"llama_4_scaling_beta\": 0.1}",
       "llama_4_scaling_beta "},
      // What says the same as the family computes, or is read.
      {"minimax_m2",
       "\"norm_topk_prob\": true, \"attention_bias\": false, \"n_group\": 1,"
       " \"routed_scaling_factor\": 1.0, \"sliding_window\": null",
       ""},
      {"hy_v3", "\"first_k_dense_replace\": 1, \"route_norm\": true", ""},
      {"qwen3_moe",
       "\"norm_topk_prob\": true, \"decoder_sparse_step\": 2, \"mlp_only_layers\":"
       " [1], \"use_sliding_window\": false, \"sliding_window\": 4096",
       ""},
      {"deepseek_v3", "\"norm_topk_prob\": false, \"first_k_dense_replace\": 2", ""},
      {"gpt_oss", "\"attention_bias\": false, \"swiglu_limit\": 3, \"sliding_window\": 64", ""},
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    char text[512], names[256] = "";
    snprintf(text, sizeof text, "{\"model_type\": \"%s\", \"head_dim\": 128}", cases[i].model_type);
    td_model_config plain = parse_ok(text, NULL);
    snprintf(text, sizeof text, "{\"model_type\": \"%s\", \"head_dim\": 128, %s}",
             cases[i].model_type, cases[i].keys);
    const td_model_config c = parse_ok(text, NULL);
    for (size_t k = 0; c.ignored[k]; k++) {
      const size_t len = strlen(names);
      snprintf(names + len, sizeof names - len, "%s ", c.ignored[k]);
    }
    if (strcmp(names, cases[i].ignored) != 0) fail_msg("%s: %s", text, names);
    if (!names[0]) continue;
    assert_true(c.norm_topk == plain.norm_topk && c.attention_bias == plain.attention_bias);
    assert_true(c.routed_scaling == plain.routed_scaling && c.query_beta == plain.query_beta);
    assert_int_equal(c.moe_layers[0] & 3, plain.moe_layers[0] & 3);
  }
}

// lm_head is the whole's, so that text_config does not say whether it is there.
TEST(ties_as_the_whole_says) {
  static const struct {
    const char *whole, *keys, *text;
    bool tied;
  } cases[] = {
      {"kimi_k25", "", "", true},
      {"mistral3", "", "\"model_type\": \"mistral4\"", true},
      {"qwen3_5_moe", "", "", false},
      {"kimi_k25", "", "\"tie_word_embeddings\": false", true},
      {"kimi_k25", "\"tie_word_embeddings\": false,", "", false},
      {"qwen3_5_moe", "\"tie_word_embeddings\": true,", "\"tie_word_embeddings\": false", true},
      {"qwen3_5_moe", "", "\"tie_word_embeddings\": true", false},
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    char text[512];
    snprintf(text, sizeof text, "{\"model_type\": \"%s\", %s \"text_config\": {%s}}",
             cases[i].whole, cases[i].keys, cases[i].text);
    const td_model_config c = parse_ok(text, NULL);
    if (c.tie_embeddings != cases[i].tied) fail_msg("%s", text);
    const bool says_otherwise = !cases[i].tied && strstr(cases[i].text, "true");
    assert_int_equal(c.ignored[0] != NULL, says_otherwise);
  }
}

TEST(defaults_of_rope) {
  td_model_config c = parse_ok("{\"model_type\": \"gpt_oss\", \"rope_scaling\": null}", NULL);
  assert_true(c.yarn.factor == 32 && c.yarn.untruncated && c.rope_theta == 150000);
  assert_int_equal(c.yarn.original_max_position, 4096);
  c = parse_ok("{\"model_type\": \"gpt_oss\", \"rope_parameters\": {\"rope_type\": \"default\"}}",
               NULL);
  assert_true(c.yarn.factor == 1 && !c.yarn.untruncated);
  c = parse_ok("{\"model_type\": \"mistral4\"}", NULL);
  assert_true(c.yarn.factor == 128 && c.yarn.mscale == 1 && c.query_beta == 0.1);
  assert_int_equal(c.query_span, 8192);
  c = parse_ok("{\"model_type\": \"mistral4\", \"rope_parameters\": {\"rope_theta\": 5e5}}", NULL);
  assert_true(c.yarn.factor == 1 && c.query_beta == 0 && c.rope_theta == 5e5);
}

TEST(reads_spellings_of_rope) {
  static const char *const yarns[] = {
      "\"rope_theta\": 1e6, \"max_position_embeddings\": 40960,"
      "\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4,"
      " \"original_max_position_embeddings\": 32768}",
      "\"rope_theta\": 7, \"max_position_embeddings\": 40960,"
      "\"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 4, \"rope_theta\": 1e6,"
      " \"beta_fast\": null, \"attention_factor\": null,"
      " \"original_max_position_embeddings\": 32768}, \"rope_scaling\": {}",
      "\"max_position_embeddings\": 40960, \"rope_parameters\": {\"rope_type\": \"default\"},"
      "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4, \"rope_theta\": 1e6,"
      " \"original_max_position_embeddings\": 32768}",
      "\"rope_theta\": 1e6, \"max_position_embeddings\": 131072,"
      "\"original_max_position_embeddings\": 32768,"
      "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": null}",
  };
  for (size_t i = 0; i < TD_COUNT(yarns); i++) {
    char text[1024];
    snprintf(text, sizeof text, "{\"model_type\": \"qwen3_moe\", %s}", yarns[i]);
    td_model_config c = parse_ok(text, NULL);
    assert_true(c.rope_theta == 1e6);
    assert_true(c.yarn.factor == 4);
    assert_true(c.yarn.beta_fast == 32 && c.yarn.beta_slow == 1);
    assert_true(c.yarn.mscale == 0 && c.yarn.mscale_all_dim == 0 && c.yarn.attention_factor == 0);
    assert_int_equal(c.yarn.original_max_position, 32768);
    assert_int_equal(c.max_position, 131072); // what the scaling makes of 32768
  }
  td_model_config c = parse_ok("{\"model_type\": \"qwen3_moe\", \"rope_scaling\": null,"
                               "\"rope_parameters\": {\"rope_theta\": 5e5, \"rope_type\": "
                               "\"default\"}}",
                               NULL);
  assert_true(c.rope_theta == 5e5 && c.yarn.factor == 1);
}

TEST(reads_layer_kinds) {
  td_model_config c = parse_ok("{\"model_type\": \"qwen3_moe\", \"num_hidden_layers\": 130,"
                               "\"decoder_sparse_step\": 2, \"mlp_only_layers\": [3, 129, 4]}",
                               NULL);
  for (uint32_t i = 0; i < 130; i++)
    assert_int_equal(td_model_is_moe(&c, i), i % 2 == 1 && i != 3 && i != 129);
  c = parse_ok("{\"model_type\": \"deepseek_v3\", \"num_hidden_layers\": 2}", NULL);
  assert_false(td_model_is_moe(&c, 0) || td_model_is_moe(&c, 1));
}

TEST(reads_variants) {
  td_model_config c = parse_ok(
      "{\"model_type\": \"deepseek_v3\", \"q_lora_rank\": null, \"num_local_experts\": 64,"
      " \"n_group\": 1, \"topk_group\": 1, \"rope_interleave\": false,"
      " \"norm_topk_prob\": false, \"num_nextn_predict_layers\": 0}",
      NULL);
  assert_int_equal(c.q_lora_rank, 0);
  assert_int_equal(c.n_experts, 64);
  assert_int_equal(c.n_mtp_layers, 0);
  assert_false(c.rope_interleaved || c.norm_topk);
  c = parse_ok("{\"model_type\": \"qwen3_moe\", \"head_dim\": null, \"num_local_experts\": 16,"
               " \"attention_bias\": true, \"tie_word_embeddings\": true,"
               " \"use_sliding_window\": true, \"sliding_window\": null,"
               " \"quantization_config\": {\"quant_method\": \"fp8\"}}",
               NULL);
  assert_int_equal(c.head_dim, 64);
  assert_int_equal(c.n_experts, 16);
  assert_true(c.attention_bias && c.tie_embeddings);
}

TEST(generation_config_goes_before) {
  td_model_config c = parse_ok("{\"model_type\": \"qwen3_moe\", \"eos_token_id\": 9,"
                               " \"bos_token_id\": 3, \"temperature\": 0.1}",
                               "{\"eos_token_id\": [151645, 151643], \"temperature\": 0.6,"
                               " \"top_p\": 0.95, \"top_k\": 20, \"do_sample\": true}");
  assert_int_equal(c.bos_id, 3);
  assert_int_equal(c.n_eos, 3); // of both files
  assert_int_equal(c.eos_ids[0], 9);
  assert_int_equal(c.eos_ids[1], 151645);
  assert_int_equal(c.eos_ids[2], 151643);
  assert_true(c.temperature == 0.6f && c.top_p == 0.95f && c.top_k_sampling == 20);
  c = parse_ok("{\"model_type\": \"qwen3_moe\"}", "{\"top_k\": -1, \"top_p\": 1.0}");
  assert_int_equal(c.top_k_sampling, 0);
  c = parse_ok("{\"model_type\": \"qwen3_moe\", \"eos_token_id\": 9, \"temperature\": 0.1}",
               "{\"eos_token_id\": null, \"bos_token_id\": 8, \"top_p\": null}");
  assert_int_equal(c.bos_id, 8);
  assert_int_equal(c.n_eos, 1);
  assert_int_equal(c.eos_ids[0], 9);
  assert_true(c.temperature == 1 && c.top_p == 1);
}

TEST(reads_gpt_oss) {
  td_model_config c = parse_ok("{\"model_type\": \"gpt_oss\", \"rope_scaling\":"
                               " {\"rope_type\": \"yarn\", \"factor\": 32, \"truncate\": false,"
                               " \"original_max_position_embeddings\": 4096}}",
                               NULL);
  assert_true(c.attention_bias && c.norm_topk && !c.router_sigmoid);
  assert_true(c.yarn.untruncated && c.rope_theta == 150000);
  assert_true(c.swiglu_limit == 7 && c.swiglu_alpha == 1.702f);
  assert_int_equal(c.max_position, 131072);
  for (uint32_t i = 0; i < c.n_layers; i++)
    assert_int_equal(td_model_window(&c, i), i % 2 ? 0 : 128);
  c = parse_ok("{\"model_type\": \"gpt_oss\", \"num_hidden_layers\": 2, \"sliding_window\": 9,"
               " \"layer_types\": [\"full_attention\", \"sliding_attention\"]}",
               NULL);
  assert_int_equal(td_model_window(&c, 0), 0);
  assert_int_equal(td_model_window(&c, 1), 9);
  c = parse_ok("{\"model_type\": \"gpt_oss\", \"num_hidden_layers\": 2, \"sliding_window\": null,"
               " \"layer_types\": [\"full_attention\", \"full_attention\"]}",
               NULL);
  assert_int_equal(td_model_window(&c, 0) + td_model_window(&c, 1), 0);
}

TEST(reads_delta_nets) {
  td_model_config c = parse_ok("{\"model_type\": \"qwen3_next\", \"mlp_only_layers\": [2]}", NULL);
  assert_true(c.has_attn_gate && c.delta_grouped && c.norm_topk);
  assert_int_equal(c.rope_dim, 64);
  assert_int_equal(c.shared_dim, 512);
  assert_int_equal(td_model_n_attn(&c, TD_ATTN_DELTA), 36);
  assert_true(td_model_attn(&c, 2) == TD_ATTN_DELTA && td_model_attn(&c, 3) == TD_ATTN_GQA);
  assert_true(!td_model_is_moe(&c, 2) && td_model_is_moe(&c, 3));
  // 36 states of 32 matrices of 128 x 128 and three inputs of 8192 channels.
  const td_kv_layout kv = td_kv_layout_of(&c, TD_F16, 0);
  assert_int_equal(td_kv_layout_states_bytes(&kv), 36 * (32 * 128 * 128 + 3 * 8192) * 4);
  assert_int_equal(td_kv_layout_token_bytes(&kv), 12 * 2 * 2 * 256 * 2);
  assert_int_equal(kv.page_tokens, 512);
  assert_int_equal(td_kv_trail_bytes(&c, 8), 8 * td_kv_layout_states_bytes(&kv));
  c = parse_ok("{\"model_type\": \"qwen3_5_moe\", \"text_config\": {\"num_hidden_layers\": 3,"
               " \"layer_types\": [\"linear_attention\", \"full_attention\","
               " \"full_attention\"], \"rope_parameters\": {\"mrope_section\": [11, 11, 10],"
               " \"partial_rotary_factor\": 0.5, \"rope_theta\": 1000, \"rope_type\":"
               " \"default\"}}}",
               NULL);
  assert_string_equal(c.arch_name, "qwen3_5_moe");
  assert_true(!c.delta_grouped && c.rope_dim == 128 && c.rope_theta == 1000);
  assert_true(td_model_attn(&c, 0) == TD_ATTN_DELTA && td_model_attn(&c, 1) == TD_ATTN_GQA &&
              td_model_attn(&c, 2) == TD_ATTN_GQA);
}

TEST(reads_kimi_linear) {
  td_model_config c = parse_ok("{\"model_type\": \"kimi_linear\", \"rope_scaling\": {\"type\":"
                               " \"yarn\", \"factor\": 4, \"mscale_all_dim\": 1}}",
                               NULL);
  assert_true(c.has_no_rope && c.yarn.factor == 1 && c.norm_topk && c.router_sigmoid);
  assert_int_equal(c.q_lora_rank, 0);
  assert_int_equal(c.max_position, 1048576);
  assert_true(td_model_attn(&c, 0) == TD_ATTN_KDA && td_model_attn(&c, 4) == TD_ATTN_MLA);
  assert_true(!td_model_is_moe(&c, 0) && td_model_is_moe(&c, 1));
  c = parse_ok("{\"model_type\": \"kimi_linear\", \"num_hidden_layers\": 3, \"linear_attn_config\":"
               " {\"kda_layers\": [2, 3], \"full_attn_layers\": [1], \"num_heads\": 5,"
               " \"head_dim\": 24, \"short_conv_kernel_size\": 3}, \"moe_renormalize\": false}",
               NULL);
  assert_true(td_model_attn(&c, 0) == TD_ATTN_MLA && td_model_attn(&c, 2) == TD_ATTN_KDA);
  assert_true(!c.norm_topk && c.delta_k_heads == 5 && c.delta_v_heads == 5 && c.delta_taps == 3);
  // 2 states of 5 matrices of 24 x 32 and two inputs of 360 channels; one layer of latents.
  const td_kv_layout kv = td_kv_layout_of(&c, TD_F32, 64);
  assert_int_equal(td_kv_layout_states_bytes(&kv), 2 * (5 * 24 * 32 + 2 * 360) * 4);
  assert_int_equal(td_kv_layout_token_bytes(&kv), (512 + 64) * 4);
}

// As published, inside of a checkpoint with vision, and as transformers 5 writes it.
TEST(reads_glm5_next) {
  td_model_config c = parse_ok(
      "{\"model_type\": \"glm5_next\", \"text_config\": {\"first_k_dense_replace\": 1,"
      " \"linear_attn_config\": {\"gate_lower_bound\": null, \"head_dim\": 24}}}",
      NULL);
  assert_string_equal(c.arch_name, "glm5_next");
  assert_string_equal(c.ignored[0], "first_k_dense_replace");
  assert_int_equal(td_model_n_attn(&c, TD_ATTN_KDA), 34);
  assert_true(td_model_attn(&c, 2) == TD_ATTN_KDA && td_model_attn(&c, 3) == TD_ATTN_DSA_POOL);
  assert_true(c.has_no_rope && !c.rope_dim && c.streams_mean && c.latents_eps && c.swiglu_plain);
  assert_true(c.index_group == 16 && c.index_top_k == 128 && c.delta_bound == -5);
  assert_true(c.delta_k_dim == 24 && c.delta_v_heads == 64 && c.swiglu_limit == 10);
  assert_true(!td_model_is_moe(&c, 2) && td_model_is_moe(&c, 3));
  // Latents in F16, 32 pooled keys and an open one in F32 in every page.
  const td_kv_layout kv = td_kv_layout_of(&c, TD_F16, 512);
  assert_int_equal(kv.beside_at, 512 * 512 * 2);
  assert_int_equal(kv.part_bytes, 512 * 512 * 2 + (32 + 3) * 128 * 4);
  assert_int_equal(kv.n_layers, 11);
  c = parse_ok(
      "{\"model_type\": \"glm5_next_text\", \"num_hidden_layers\": 3, \"layer_types\":"
      " [\"indexed_attention\", \"full_attention\", \"linear_attention\"],"
      " \"indexer_types\": [\"full\", \"shared\", \"full\"], \"linear_lower_bound\": null}",
      NULL);
  assert_true(td_model_attn(&c, 0) == TD_ATTN_DSA_POOL);
  assert_true(td_model_attn(&c, 1) == TD_ATTN_DSA_SHARED && c.delta_bound == 0);
}

#define QWEN4_INDEX                                                                                \
  "\"indexer_n_heads\": 16, \"indexer_kv_heads\": 1, \"indexer_head_dim\": 128,"                   \
  " \"indexer_compress_ratio\": 16"

// Inside of a checkpoint with vision, layers as published.
TEST(reads_qwen4_exp) {
  td_model_config c = parse_ok(
      "{\"model_type\": \"qwen4_exp\", \"text_config\": {" QWEN4_INDEX
      ", \"indexer_budget\": 2048, \"ple_layer_ids\": [6, 2], \"eos_token_id\": [9, 4],"
      " \"num_hidden_layers\": 8, \"hidden_size\": 1024, \"head_dim\": 256,"
      " \"partial_rotary_factor\": 0.25, \"output_gate_type\": \"sigmoid\"}}",
      NULL);
  assert_string_equal(c.arch_name, "qwen4_exp");
  assert_int_equal(td_model_n_attn(&c, TD_ATTN_DELTA), 6);
  assert_int_equal(td_model_n_attn(&c, TD_ATTN_GROUPS), 2);
  assert_true(c.index_group == 16 && c.index_top_k == 128 && c.index_dim == 128);
  assert_true(c.n_streams == 4 && c.hyper_rank == 320 && c.delta_sigmoid && c.norm_topk);
  assert_true(c.ngram_size == 3 && c.ngram_heads == 8 && c.ngram_dim == 1024 && c.ngram_end == 9);
  assert_true(td_layers_have(c.ngram_layers, 1) && td_layers_have(c.ngram_layers, 5));
  assert_true(!td_layers_have(c.ngram_layers, 0) && td_model_is_moe(&c, 0));
  // Keys and values of 2 heads of 256 in F16, 32 mean keys and an open one in F32; a matrix of 128
  // x 128 for each of 32 heads, 3 inputs of its convolution, 9 of the other one, 2 ids.
  const td_kv_layout kv = td_kv_layout_of(&c, TD_F16, 512);
  assert_int_equal(kv.beside_at, 512 * 1024 * 2);
  assert_int_equal(kv.part_bytes, 512 * 1024 * 2 + (32 + 3) * 128 * 4);
  assert_int_equal(kv.state_bytes, 4 * (32 * 128 * 128 + 3 * 8192 + 9 * 4 * 1024 + 2));
  c = parse_ok("{\"model_type\": \"qwen4_exp_text\", \"num_hidden_layers\": 2, " QWEN4_INDEX
               ", \"indexer_budget\": 64, \"layer_types\": [\"full_attention\","
               " \"linear_attention\"], \"norm_topk_prob\": false, \"head_dim\": 128}",
               NULL);
  assert_int_equal(c.rope_dim, 128); // all of a head, where no part is stated
  assert_true(td_model_attn(&c, 0) == TD_ATTN_GROUPS && !c.ngram_size && !c.norm_topk);
}

// Experts of many get 32 tokens of a prompt, latents are made into keys for 1024.
TEST(prefill_chunk) {
  static const uint32_t cases[][3] = {{0, 0, 512},    {64, 6, 512},         {128, 8, 512},
                                      {160, 8, 640},  {256, 8, 1024},       {384, 8, 1536},
                                      {512, 6, 2048}, {UINT32_MAX, 1, 2048}};
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    const td_model_config config = {.n_layers = 1, .n_experts = cases[i][0], .top_k = cases[i][1]};
    assert_int_equal(td_engine_prefill_chunk(&config), cases[i][2]);
    td_model_config mla = config;
    mla.kind[0] = TD_ATTN_MLA;
    mla.kv_lora_rank = 512;
    assert_int_equal(td_engine_prefill_chunk(&mla), cases[i][2] < 1024 ? 1024 : cases[i][2]);
  }
}
