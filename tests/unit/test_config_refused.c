// tests/unit/test_config_refused.c - what config.json must not say, and what the message names.
// CTest: no-tsan
#include "unit/config_test.h"

static const refusal deepseek[] = {
    {"\"hidden_size\": 0", TD_EFORMAT, "hidden_size must be between 1"},
    {"\"hidden_size\": \"7168\"", TD_EFORMAT, "hidden_size"},
    {"\"hidden_size\": 71.5", TD_EFORMAT, "hidden_size"},
    {"\"hidden_size\": null", TD_EFORMAT, "hidden_size must not be null"},
    {"\"num_hidden_layers\": 1025", TD_EFORMAT, "num_hidden_layers"},
    {"\"num_hidden_layers\": -1", TD_EFORMAT, "num_hidden_layers"},
    {"\"num_attention_heads\": 1e9", TD_EFORMAT, "num_attention_heads"},
    {"\"vocab_size\": 1e300", TD_EFORMAT, "vocab_size"},
    {"\"rms_norm_eps\": 0", TD_EFORMAT, "rms_norm_eps"},
    {"\"rms_norm_eps\": \"x\"", TD_EFORMAT, "rms_norm_eps"},
    {"\"attention_bias\": 1", TD_EFORMAT, "attention_bias"},
    {"\"qk_rope_head_dim\": 63", TD_EFORMAT, "qk_rope_head_dim must be even"},
    {"\"n_group\": 7", TD_EFORMAT, "n_group must divide"},
    {"\"topk_group\": 9", TD_EFORMAT, "topk_group must not exceed"},
    {"\"n_group\": 256", TD_EFORMAT, "a group"},
    {"\"n_group\": 64, \"topk_group\": 1", TD_EFORMAT, "num_experts_per_tok is more than"},
    {"\"num_experts_per_tok\": 257", TD_EFORMAT, "num_experts_per_tok 257 is more than the 256"},
    {"\"q_lora_rank\": 0", TD_EFORMAT, "q_lora_rank"},
    {"\"first_k_dense_replace\": -1", TD_EFORMAT, "first_k_dense_replace"},
    {"\"moe_layer_freq\": 2", TD_EUNSUPPORTED, "moe_layer_freq"},
    {"\"routed_scaling_factor\": 0", TD_EFORMAT, "routed_scaling_factor"},
    {"\"scoring_func\": \"softmax\"", TD_EUNSUPPORTED, "scoring_func \"softmax\""},
    {"\"topk_method\": \"greedy\"", TD_EUNSUPPORTED, "topk_method \"greedy\""},
    {"\"hidden_act\": \"gelu\"", TD_EUNSUPPORTED, "hidden_act \"gelu\""},
    {"\"eos_token_id\": 129280", TD_EFORMAT, "eos_token_id"},
    {"\"eos_token_id\": \"1\"", TD_EFORMAT, "eos_token_id"},
    {"\"eos_token_id\": [1, -1]", TD_EFORMAT, "eos_token_id"},
    {"\"eos_token_id\": [1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,1,17]", TD_EUNSUPPORTED,
     "eos_token_id"},
    {"\"bos_token_id\": 0.5", TD_EFORMAT, "bos_token_id"},
};

static const refusal qwen3[] = {
    {"\"num_key_value_heads\": 5", TD_EFORMAT, "num_key_value_heads must divide"},
    {"\"head_dim\": 63", TD_EFORMAT, "head_dim"},
    {"\"hidden_size\": 63", TD_EFORMAT, "head_dim"},
    {"\"mlp_only_layers\": [24]", TD_EFORMAT, "mlp_only_layers"},
    {"\"mlp_only_layers\": [\"1\"]", TD_EFORMAT, "mlp_only_layers"},
    {"\"mlp_only_layers\": 1", TD_EFORMAT, "mlp_only_layers"},
    {"\"decoder_sparse_step\": 0", TD_EFORMAT, "decoder_sparse_step"},
    {"\"use_sliding_window\": true", TD_EUNSUPPORTED, "use_sliding_window"},
    {"\"num_experts\": 4", TD_EFORMAT, "num_experts_per_tok 8 is more than the 4"},
};

static const refusal dsa[] = {
    {"\"q_lora_rank\": null", TD_EFORMAT, "q_lora_rank must be a number"},
    {"\"index_head_dim\": 62", TD_EFORMAT, "index_head_dim must not be less than qk_rope_head_dim"},
    {"\"index_topk\": 0", TD_EFORMAT, "index_topk"},
    {"\"indexer_types\": [\"full\"]", TD_EFORMAT, "indexer_types must have an entry for each"},
    {"\"indexer_types\": [\"half\"]", TD_EFORMAT, "indexer_types must hold \"full\""},
    {"\"index_topk_pattern\": \"FS\"", TD_EFORMAT, "index_topk_pattern must have a letter"},
    {"\"num_hidden_layers\": 2, \"index_topk_pattern\": \"SF\"", TD_EFORMAT,
     "the first layer must have an indexer"},
    {"\"num_hidden_layers\": 2, \"index_topk_pattern\": \"FX\"", TD_EFORMAT,
     "index_topk_pattern must hold F and S"},
};

static const refusal pooled[] = {
    {"\"compress_ratios\": [0]", TD_EFORMAT, "an entry for each layer"},
    {"\"num_hidden_layers\": 1, \"compress_ratios\": [8]", TD_EFORMAT, "must hold 0, 4 or 128"},
    {"\"num_hidden_layers\": 1, \"layer_types\": [\"full_attention\"]", TD_EFORMAT,
     "layer_types must hold"},
    {"\"compress_rates\": {\"compressed_sparse_attention\": 6}", TD_EUNSUPPORTED, "powers of two"},
    {"\"mlp_layer_types\": [\"moe\"]", TD_EFORMAT, "mlp_layer_types must be an array"},
    {"\"num_hidden_layers\": 1, \"mlp_layer_types\": [\"dense\"]", TD_EFORMAT, "\"hash_moe\""},
    {"\"scoring_func\": \"softmax\"", TD_EUNSUPPORTED, "scoring_func"},
    {"\"num_key_value_heads\": 2", TD_EFORMAT, "num_key_value_heads"},
    {"\"n_shared_experts\": 2", TD_EFORMAT, "n_shared_experts"},
    {"\"o_groups\": 7", TD_EFORMAT, "o_groups must divide"},
    {"\"o_groups\": 64, \"o_lora_rank\": 4000000", TD_EFORMAT, "o_groups times o_lora_rank"},
    {"\"hc_mult\": 17", TD_EFORMAT, "hc_mult"},
    {"\"head_dim\": 23", TD_EFORMAT, "must be even"},
    {"\"sliding_window\": 0", TD_EFORMAT, "sliding_window"},
    {"\"qk_rope_head_dim\": 63", TD_EFORMAT, "qk_rope_head_dim must be even"},
    {"\"index_head_dim\": 32", TD_EFORMAT, "index_head_dim must not be less"},
    {"\"mlp_bias\": true", TD_EFORMAT, "mlp_bias"},
    {"\"expert_dtype\": \"fp6\", \"quantization_config\": {\"quant_method\": \"fp8\"}",
     TD_EUNSUPPORTED, "expert_dtype \"fp6\""},
};

static const refusal blocks[] = {
    {"\"index_n_heads\": 8", TD_EFORMAT, "index_n_heads must be num_key_value_heads"},
    {"\"index_head_dim\": 64", TD_EFORMAT, "index_head_dim must not be less"},
    {"\"index_local_blocks\": 17", TD_EFORMAT, "index_local_blocks must not exceed"},
    {"\"moe_layer_freq\": [1]", TD_EFORMAT, "moe_layer_freq must be an array"},
    {"\"num_hidden_layers\": 1, \"layer_types\": [\"x\"]", TD_EFORMAT,
     "layer_types must hold \"minimax_m3_sparse\""},
    {"\"sparse_attention_config\": {\"sparse_block_size\": 0}", TD_EFORMAT, "sparse_block_size"},
};

static const refusal rope_and_quantization[] = {
    {"\"rope_scaling\": 4", TD_EFORMAT, "rope_scaling must be an object"},
    {"\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}", TD_EUNSUPPORTED, "\"linear\""},
    {"\"rope_parameters\": {\"rope_type\": \"llama3\"}", TD_EUNSUPPORTED, "\"llama3\""},
    {"\"rope_parameters\": {\"full_attention\": {\"rope_type\": \"default\"}}", TD_EUNSUPPORTED,
     "rope_parameters differs from layer to layer"},
    {"\"rope_scaling\": {\"type\": 1}", TD_EFORMAT, "type must be a string"},
    {"\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 0.5}", TD_EFORMAT, "factor is 0.5"},
    {"\"rope_scaling\": {\"type\": \"yarn\", \"truncate\": 0}", TD_EFORMAT, "truncate"},
    {"\"rope_scaling\": {\"type\": \"yarn\", \"original_max_position_embeddings\": 0}", TD_EFORMAT,
     "original_max_position_embeddings"},
    {"\"rope_scaling\": {\"type\": \"yarn\", \"attention_factor\": 0}", TD_EFORMAT,
     "attention_factor"},
    {"\"rope_theta\": 0", TD_EFORMAT, "rope_theta"},
    {"\"rope_theta\": \"x\"", TD_EFORMAT, "rope_theta"},
    {"\"partial_rotary_factor\": 0.5", TD_EUNSUPPORTED, "partial_rotary_factor"},
    {"\"quantization_config\": []", TD_EFORMAT, "quantization_config must be an object"},
    {"\"quantization_config\": {}", TD_EUNSUPPORTED, "quant_method"},
    {"\"quantization_config\": {\"quant_method\": \"bitnet\"}", TD_EUNSUPPORTED, "\"bitnet\""},
    {"\"quantization_config\": {\"quant_method\": \"quark\"}", TD_EFORMAT, "global_quant_config"},
    {"\"quantization_config\": {\"quant_method\": \"quark\", \"global_quant_config\": "
     "{\"weight\":"
     " {\"dtype\": \"int4\"}}}",
     TD_EUNSUPPORTED, "dtype int4"},
    {"\"quantization_config\": {\"quant_method\": \"fp8\", \"fmt\": \"e5m2\"}", TD_EUNSUPPORTED,
     "\"e5m2\""},
    {"\"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": [128]}",
     TD_EFORMAT, "weight_block_size"},
    {"\"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": [0, 1]}",
     TD_EFORMAT, "weight_block_size"},
    {"\"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": [1.5, 1e99]}",
     TD_EFORMAT, "weight_block_size"},
};

static const refusal glm[] = {
    {"\"partial_rotary_factor\": 0.01", TD_EFORMAT, "partial_rotary_factor"},
    {"\"use_qk_norm\": 1", TD_EFORMAT, "use_qk_norm"},
};

static const refusal mlp_types[] = {
    {"\"num_hidden_layers\": 2, \"mlp_layer_types\": [\"dense\"]", TD_EFORMAT, "an entry for"},
    {"\"num_hidden_layers\": 1, \"mlp_layer_types\": [\"thin\"]", TD_EFORMAT, "\"sparse\""},
};

static const refusal mistral[] = {
    {"\"rope_parameters\": {\"llama_4_scaling_beta\": 0.1, \"rope_theta\": 1e4,"
     " \"original_max_position_embeddings\": 64}",
     TD_EUNSUPPORTED, "llama_4_scaling_beta"},
};

static const refusal olmoe[] = {{"\"clip_qkv\": 8.0", TD_EUNSUPPORTED, "clip_qkv is not"}};

static const refusal ernie[] = {{"\"use_bias\": true", TD_EUNSUPPORTED, "use_bias is not"}};

#define GEMMA(rest)                                                                                \
  "\"enable_moe_block\": true, \"hidden_size_per_layer_input\": 0, \"num_experts\": 8,"            \
  " \"top_k_experts\": 2, \"moe_intermediate_size\": 64" rest
#define GEMMA_ROPE(full)                                                                           \
  GEMMA(", \"rope_parameters\": {\"sliding_attention\": {\"rope_type\": \"default\"}, "            \
        "\"full_attention\": {" full "}}")

static const refusal gemma[] = {
    {"\"num_experts\": 8", TD_EUNSUPPORTED, "enable_moe_block false"},
    {"\"enable_moe_block\": true", TD_EUNSUPPORTED, "hidden_size_per_layer_input above 0"},
    {"\"enable_moe_block\": true, \"hidden_size_per_layer_input\": 0", TD_EFORMAT,
     "num_experts, top_k_experts and moe_intermediate_size must be stated"},
    {GEMMA(", \"num_kv_shared_layers\": 2"), TD_EUNSUPPORTED, "num_kv_shared_layers above 0"},
    {GEMMA(", \"use_double_wide_mlp\": true"), TD_EUNSUPPORTED, "use_double_wide_mlp true"},
    {GEMMA(", \"use_bidirectional_attention\": \"all\""), TD_EUNSUPPORTED,
     "use_bidirectional_attention of text"},
    {GEMMA(", \"hidden_activation\": \"silu\""), TD_EUNSUPPORTED, "hidden_activation \"silu\""},
    {GEMMA(", \"sliding_window\": null"), TD_EFORMAT, "sliding_window must be a number"},
    {GEMMA(", \"global_head_dim\": 17"), TD_EFORMAT, "global_head_dim must be even"},
    {GEMMA(", \"attention_k_eq_v\": true, \"num_global_key_value_heads\": 3"), TD_EFORMAT,
     "num_global_key_value_heads divide"},
    {GEMMA(", \"final_logit_softcapping\": -1"), TD_EFORMAT, "final_logit_softcapping"},
    {GEMMA(", \"per_layer_config\": {\"5\": {\"head_dim\": 64}, \"11\": {\"head_dim\": 32}}"),
     TD_EUNSUPPORTED, "other than one kind of heads"},
    {GEMMA_ROPE("\"rope_type\": \"linear\""), TD_EUNSUPPORTED, "type \"linear\""},
    {GEMMA_ROPE("\"rope_type\": \"proportional\", \"factor\": 8"), TD_EUNSUPPORTED,
     "a factor of 8"},
    {GEMMA(", \"rope_parameters\": {\"full_attention\": {\"rope_type\": \"default\"}}"),
     TD_EUNSUPPORTED, "differs from layer to layer"},
};

static const refusal ling[] = {
    {"\"layer_group_size\": 50", TD_EFORMAT, "at least one layer must be of type"},
    {"\"kda_lower_bound\": 1", TD_EFORMAT, "kda_lower_bound"},
    {"\"n_group\": 7", TD_EFORMAT, "n_group must divide"},
};

static const refusal mixtral[] = {
    {"\"sliding_window\": 4096", TD_EUNSUPPORTED, "sliding_window is not"}};

static const refusal minimax[] = {
    {"\"rotary_dim\": 129", TD_EFORMAT, "rotary_dim"},
    {"\"scoring_func\": \"softmax\"", TD_EUNSUPPORTED, "scoring_func"},
    {"\"qk_norm_type\": \"per_head\"", TD_EUNSUPPORTED, "qk_norm_type"},
};

static const refusal hy[] = {
    {"\"moe_router_use_sigmoid\": false", TD_EFORMAT, "moe_router_use_sigmoid"},
    {"\"qk_norm\": false", TD_EFORMAT, "qk_norm"},
};

static const refusal oss[] = {
    {"\"num_hidden_layers\": 2, \"layer_types\": [\"full_attention\"]", TD_EFORMAT, "an entry for"},
    {"\"num_hidden_layers\": 1, \"layer_types\": [\"linear\"]", TD_EFORMAT, "layer_types"},
    {"\"swiglu_limit\": 0", TD_EFORMAT, "swiglu_limit"},
    {"\"sliding_window\": 0", TD_EFORMAT, "sliding_window"},
    {"\"sliding_window\": null", TD_EFORMAT, "sliding_window must not be null"},
};

static const refusal next[] = {
    {"\"num_hidden_layers\": 2, \"layer_types\": [\"full_attention\"]", TD_EFORMAT, "an entry for"},
    {"\"num_hidden_layers\": 1, \"layer_types\": [\"sliding_attention\"]", TD_EFORMAT,
     "layer_types"},
    {"\"num_hidden_layers\": 3", TD_EFORMAT, "at least one layer"},
    {"\"linear_num_key_heads\": 5", TD_EFORMAT, "linear_num_key_heads"},
    {"\"linear_conv_kernel_dim\": 1", TD_EFORMAT, "linear_conv_kernel_dim"},
    {"\"linear_num_value_heads\": 4096, \"linear_value_head_dim\": 8192", TD_EFORMAT, "too wide"},
};

static const refusal linear[] = {
    {"\"mla_use_nope\": false", TD_EUNSUPPORTED, "mla_use_nope"},
    {"\"moe_router_activation_func\": \"softmax\"", TD_EUNSUPPORTED, "activation_func"},
    {"\"num_hidden_layers\": 2, \"linear_attn_config\": {\"kda_layers\": [0], "
     "\"full_attn_layers\": [1, 2]}",
     TD_EFORMAT, "numbers of layers"},
    {"\"num_hidden_layers\": 2, \"linear_attn_config\": {\"kda_layers\": [1], "
     "\"full_attn_layers\": [1, 2]}",
     TD_EFORMAT, "each layer must be"},
    {"\"num_hidden_layers\": 2, \"linear_attn_config\": {\"kda_layers\": [1, 2], "
     "\"full_attn_layers\": []}",
     TD_EFORMAT, "at least one layer"},
    {"\"linear_attn_config\": {\"num_heads\": 4096, \"head_dim\": 8192}", TD_EFORMAT, "too wide"},
};

static const refusal glm_next[] = {
    {"\"qk_rope_head_dim\": 64", TD_EUNSUPPORTED, "supported is 0"},
    {"\"index_kpool\": 12", TD_EUNSUPPORTED, "powers of two"},
    {"\"index_topk\": 40", TD_EFORMAT, "must divide index_topk"},
    {"\"index_kpool_always_select_tail\": false", TD_EUNSUPPORTED, "select_tail"},
    {"\"num_key_value_heads\": 8", TD_EFORMAT, "num_key_value_heads"},
    {"\"q_lora_rank\": null", TD_EFORMAT, "q_lora_rank"},
    {"\"index_topk_freq\": 3", TD_EFORMAT, "without an indexer must follow"},
    {"\"num_hidden_layers\": 1, \"layer_types\": [\"indexed_attention\"]", TD_EUNSUPPORTED,
     "layer_types without"},
    {"\"linear_attn_config\": {\"gate_lower_bound\": 2}", TD_EFORMAT, "gate_lower_bound"},
};

// Parts that are no objects: not as if they were absent.
static const refusal delta_part[] = {
    {"\"linear_attn_config\": 5", TD_EFORMAT, "linear_attn_config must be an object"}};

static const refusal lists[] = {{"\"linear_attn_config\": {\"kda_layers\": [1, 2]}", TD_EFORMAT,
                                 "kda_layers and full_attn_layers must be arrays"}};

static const refusal rates[] = {
    {"\"compress_rates\": \"4\"", TD_EFORMAT, "compress_rates must be an object"}};

static const refusal sparse[] = {
    {"\"sparse_attention_config\": []", TD_EFORMAT, "sparse_attention_config must be an object"}};

#define QWEN4_INDEX                                                                                \
  "\"indexer_n_heads\": 16, \"indexer_kv_heads\": 1, \"indexer_head_dim\": 256,"                   \
  " \"indexer_compress_ratio\": 16"

static const refusal qwen4[] = {
    {"\"indexer_n_heads\": 4", TD_EFORMAT, "indexer_head_dim"},
    {QWEN4_INDEX ", \"indexer_budget\": 40", TD_EFORMAT, "must divide indexer_budget"},
    {"\"indexer_n_heads\": 4, \"indexer_head_dim\": 128, \"indexer_budget\": 48,"
     " \"indexer_compress_ratio\": 12",
     TD_EUNSUPPORTED, "powers of two"},
    {"\"indexer_n_heads\": 4, \"indexer_head_dim\": 32, \"indexer_budget\": 48,"
     " \"indexer_compress_ratio\": 16",
     TD_EFORMAT, "rotary part"},
    {"\"indexer_kv_heads\": 2", TD_EFORMAT, "indexer_kv_heads"},
    {QWEN4_INDEX ", \"indexer_budget\": 64, \"ple_layer_ids\": [4]", TD_EFORMAT,
     "\"linear_attention\""},
    {QWEN4_INDEX ", \"indexer_budget\": 64, \"ple_layer_ids\": [99]", TD_EFORMAT, "from 1 on"},
    {QWEN4_INDEX ", \"indexer_budget\": 64, \"ple_layer_ids\": [1]", TD_EFORMAT, "eos_token_id"},
    {QWEN4_INDEX ", \"indexer_budget\": 64, \"ple_layer_ids\": [1], \"ple_embed_dim\": 100",
     TD_EUNSUPPORTED, "16 heads of n-grams"},
    {QWEN4_INDEX ", \"indexer_budget\": 64, \"output_gate_type\": \"gelu\"", TD_EUNSUPPORTED,
     "gelu"},
    {QWEN4_INDEX ", \"indexer_budget\": 64, \"hc_count\": 1", TD_EFORMAT, "hc_count"},
};

static const refusal kimi[] = {
    {"\"text_config\": []", TD_EFORMAT, "text_config"},
    {"\"text_config\": {\"model_type\": \"llama\"}", TD_EUNSUPPORTED, "\"llama\""},
    // The whole's stands before text_config's, as for the weights.
    {"\"text_config\": {}, \"quantization_config\": {\"quant_method\": \"x\"}", TD_EUNSUPPORTED,
     "quant_method"},
};

// What is not a family here is told by the one that it is like.
TEST(says_what_an_unknown_family_is_like) {
  td_model_config c;
  td_err err;
  const char *const keys =
      "\"vocab_size\": 9, \"hidden_size\": 8, \"num_hidden_layers\": 1, \"num_experts\": 4,"
      " \"num_attention_heads\": 2, \"max_position_embeddings\": 9, \"intermediate_size\": 8,"
      " \"num_key_value_heads\": 1, \"moe_intermediate_size\": 8, \"num_experts_per_tok\": 2,"
      " \"rms_norm_eps\": 1e-6, \"clip_qkv\": 8, \"zero_experts\": 2, \"conv_bias\": null";
  static const char *const shapes[] = {"{\"model_type\": \"novel\", %s}",
                                       "{\"model_type\": \"novel\", \"text_config\": {%s}}"};
  for (size_t i = 0; i < TD_COUNT(shapes); i++) {
    char text[1024];
    snprintf(text, sizeof text, i ? shapes[1] : shapes[0], keys);
    assert_int_equal(parse(text, NULL, &c, &err), TD_EUNSUPPORTED);
    if (!strstr(err.msg, "\"novel\" is not supported; it resembles qwen3_moe, with 10 of 10 keys"
                         "; no table of keys here has clip_qkv, zero_experts; supported are"))
      fail_msg("%s", err.msg);
  }
  assert_int_equal(parse("{\"model_type\": \"novel\"}", NULL, &c, &err), TD_EUNSUPPORTED);
  assert_non_null(strstr(err.msg, "\"novel\" is not supported; supported are"));
}

TEST(refuses) {
#define OF(model_type, list)                                                                       \
  { model_type, list, TD_COUNT(list) }
  static const struct {
    const char *model_type;
    const refusal *list;
    size_t n;
  } families[] = {
      OF("deepseek_v3", deepseek),
      OF("qwen3_moe", qwen3),
      OF("glm_moe_dsa", dsa),
      OF("deepseek_v4", pooled),
      OF("minimax_m3_vl_text", blocks),
      OF("deepseek_v3", rope_and_quantization),
      OF("qwen3_moe", rope_and_quantization),
      OF("glm4_moe", glm),
      OF("hy_v3", mlp_types),
      OF("mistral4", mistral),
      OF("olmoe", olmoe),
      OF("mixtral", mixtral),
      OF("gemma4_text", gemma),
      OF("bailing_hybrid", ling),
      OF("ernie4_5_moe", ernie),
      OF("minimax_m2", minimax),
      OF("hy_v3", hy),
      OF("gpt_oss", oss),
      OF("qwen3_next", next),
      OF("kimi_linear", linear),
      OF("glm5_next_text", glm_next),
      OF("glm5_next_text", delta_part),
      OF("kimi_linear", delta_part),
      OF("kimi_linear", lists),
      OF("deepseek_v4", rates),
      OF("minimax_m3_vl_text", sparse),
      OF("qwen4_exp_text", qwen4),
      OF("kimi_k25", kimi),
  };
#undef OF
  for (size_t i = 0; i < TD_COUNT(families); i++)
    check_refusals(families[i].model_type, families[i].list, families[i].n);
}

TEST(refuses_other_architectures) {
  td_model_config c;
  td_err err;
  assert_int_equal(parse("{\"model_type\": \"llama\"}", NULL, &c, &err), TD_EUNSUPPORTED);
  const char *start = "dir/config.json: model_type \"llama\" is not supported; supported are "
                      "deepseek_v3, kimi_k2, deepseek_v32, deepseek_v4, qwen3_moe, ";
  assert_int_equal(strncmp(err.msg, start, strlen(start)), 0);
  assert_int_equal(parse("{}", NULL, &c, &err), TD_EFORMAT);
  assert_non_null(strstr(err.msg, "model_type"));
  assert_int_equal(parse("{\"model_type\": 3}", NULL, &c, &err), TD_EFORMAT);
  assert_int_equal(parse("[]", NULL, &c, &err), TD_EFORMAT);
  assert_int_equal(parse("{\"model_type\": \"kimi_k2\"}", "[]", &c, &err), TD_EFORMAT);
  assert_non_null(strstr(err.msg, "dir/generation_config.json: "));
  assert_int_equal(parse("{\"model_type\": \"kimi_k2\"}", "{\"top_p\": 2}", &c, &err), TD_EFORMAT);
  assert_non_null(strstr(err.msg, "dir/generation_config.json: top_p"));
}
