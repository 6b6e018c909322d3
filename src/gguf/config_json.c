// src/gguf/config_json.c - config.json as a model's publisher would have written it, from the
// metadata of a GGUF file.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "gguf/arch_impl.h"

#define MAX_KEY    128
#define MAX_LAYERS 1024

typedef td_gguf_config_writer writer;

// ---- reading metadata ---------------------------------------------------------------------------

// The value called by the architecture's name and key.
static const td_gguf_value *find(const writer *w, const char *key) {
  char whole[MAX_KEY];
  snprintf(whole, sizeof whole, "%s.%s", w->arch->name, key);
  return td_gguf_find(&w->parts[0], whole);
}

static td_status bad(const writer *w, const char *key, const char *what) {
  return td_fail(w->err, TD_EFORMAT, "%s: metadata %s.%s: %s", w->parts[0].file, w->arch->name, key,
                 what);
}

// A number, or a list of one value for all layers. *found says whether it is there.
static td_status number(const writer *w, const char *key, double *out, bool *found) {
  const td_gguf_value *v = find(w, key);
  *found = v && v->n > 0;
  if (!*found) return TD_OK;
  if (!td_gguf_number(v, 0, out) || !isfinite(*out)) return bad(w, key, "is not a number");
  for (uint64_t i = 1; i < v->n; i++) {
    double other = 0;
    if (!td_gguf_number(v, i, &other) || other != *out) {
      return td_fail(w->err, TD_EUNSUPPORTED,
                     "%s: metadata %s.%s: differs from layer to layer, which is not supported",
                     w->parts[0].file, w->arch->name, key);
    }
  }
  return TD_OK;
}

// A number that must be there.
static td_status needed(const writer *w, const char *key, double *out) {
  bool found = false;
  td_status st = number(w, key, out, &found);
  return st == TD_OK && !found ? bad(w, key, "is missing") : st;
}

static td_status number_or(const writer *w, const char *key, double fallback, double *out) {
  bool found = false;
  *out = fallback;
  return number(w, key, out, &found);
}

static bool has_tensor(const writer *w, const char *name) {
  return td_gguf_has_tensor(w->parts, w->n_parts, name);
}

// ---- writing ------------------------------------------------------------------------------------

static void put(const writer *w, const char *key, double value) {
  if (value == floor(value) && fabs(value) < 9e15)
    td_jw_int(w->to, key, (int64_t)value);
  else
    td_jw_double(w->to, key, value);
}

static td_status copy(const writer *w, const td_gguf_name *keys) {
  td_status st = TD_OK;
  for (; keys && keys->gguf && st == TD_OK; keys++) {
    double value = 0;
    bool found = false;
    st = number(w, keys->gguf, &value, &found);
    if (st == TD_OK && found) put(w, keys->published, value);
  }
  return st;
}

const td_gguf_name td_gguf_common_keys[] = {
    {"context_length", "max_position_embeddings"},
    {"embedding_length", "hidden_size"},
    {"attention.head_count", "num_attention_heads"},
    {"attention.layer_norm_rms_epsilon", "rms_norm_eps"},
    {"expert_used_count", "num_experts_per_tok"},
    {NULL, NULL},
};

// The layers of multi-token prediction, counted among the others, come last.
static td_status write_layers(const writer *w) {
  double n = 0, n_mtp = 0;
  td_status st = needed(w, "block_count", &n);
  if (st == TD_OK) st = number_or(w, "nextn_predict_layers", 0, &n_mtp);
  if (st != TD_OK) return st;
  put(w, "num_hidden_layers", n - n_mtp);
  return TD_OK;
}

static td_status write_vocab(const writer *w) {
  for (size_t p = 0; p < w->n_parts; p++) {
    for (size_t i = 0; i < w->parts[p].n_tensors; i++) {
      const td_gguf_tensor *t = &w->parts[p].tensors[i];
      if (t->n_dims != 2 || !td_gguf_str_is(t->name, "token_embd.weight")) continue;
      put(w, "vocab_size", (double)t->shape[0]);
      return TD_OK;
    }
  }
  return td_fail(w->err, TD_EFORMAT, "%s: token_embd.weight is absent: not a language model",
                 w->parts[0].file);
}

static td_status write_yarn(const writer *w) {
  double factor = 0, original = 0, log_mul = 0;
  bool found = false;
  td_status st = needed(w, "rope.scaling.factor", &factor);
  if (st == TD_OK) st = needed(w, "rope.scaling.original_context_length", &original);
  if (st == TD_OK) st = number(w, "rope.scaling.yarn_log_multiplier", &log_mul, &found);
  if (st != TD_OK) return st;
  td_jw_str(w->to, "rope_type", "yarn");
  put(w, "factor", factor);
  put(w, "original_max_position_embeddings", original);
  if (w->arch->untruncated) td_jw_bool(w->to, "truncate", false);
  if (found) { // 0.1 times mscale_all_dim, to which publishers set mscale, too
    put(w, "mscale", round(log_mul * 1e6) / 1e5);
    put(w, "mscale_all_dim", round(log_mul * 1e6) / 1e5);
  }
  static const td_gguf_name keys[] = {{"rope.scaling.yarn_beta_fast", "beta_fast"},
                                      {"rope.scaling.yarn_beta_slow", "beta_slow"},
                                      {"rope.scaling.yarn_attn_factor", "attention_factor"},
                                      {"attention.temperature_scale", "llama_4_scaling_beta"},
                                      {NULL, NULL}};
  return copy(w, keys);
}

// rope_parameters: the base, the part of a head that turns, and YaRN.
static td_status write_rope(const writer *w) {
  const td_gguf_value *v = find(w, "rope.scaling.type");
  td_gguf_str type = {.data = "none", .len = 4};
  if (v && !td_gguf_text(v, &type)) return bad(w, "rope.scaling.type", "is not a string");
  td_jw_begin_object(w->to, "rope_parameters");
  static const td_gguf_name keys[] = {{"rope.freq_base", "rope_theta"}, {NULL, NULL}};
  td_status st = copy(w, keys);
  if (st == TD_OK && td_gguf_str_is(type, "yarn"))
    st = write_yarn(w);
  else if (st == TD_OK && !td_gguf_str_is(type, "none"))
    td_jw_str_len(w->to, "rope_type", type.data, type.len < 40 ? type.len : 40);
  else
    td_jw_str(w->to, "rope_type", "default");
  double part = 0, head = 0;
  bool has_part = false, has_head = false;
  if (st == TD_OK) st = number(w, "rope.dimension_count", &part, &has_part);
  if (st == TD_OK) st = number(w, "attention.key_length", &head, &has_head);
  if (st == TD_OK && has_part && has_head && !w->arch->is_mla && head > 0)
    put(w, "partial_rotary_factor", part / head);
  td_jw_end_object(w->to);
  return st;
}

// The ends of a text, a turn and a message are ends of generation. The largest id stands for none.
static void write_tokens(const writer *w) {
  static const char *const ends[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                     "tokenizer.ggml.eom_token_id"};
  double id = 0;
  if (td_gguf_number(td_gguf_find(&w->parts[0], "tokenizer.ggml.bos_token_id"), 0, &id))
    put(w, "bos_token_id", id);
  td_jw_begin_array(w->to, "eos_token_id");
  for (size_t i = 0; i < TD_COUNT(ends); i++)
    if (td_gguf_number(td_gguf_find(&w->parts[0], ends[i]), 0, &id) && id != UINT32_MAX)
      put(w, NULL, id);
  td_jw_end_array(w->to);
}

// ---- architectures ------------------------------------------------------------------------------

#define GQA_KEYS                                                                                   \
  {"attention.head_count_kv", "num_key_value_heads"}, {"attention.key_length", "head_dim"}, {      \
    "feed_forward_length", "intermediate_size"                                                     \
  }

static const td_gguf_name gqa_keys[] = {
    GQA_KEYS,
    {"expert_feed_forward_length", "moe_intermediate_size"},
    {"expert_count", "num_experts"},
    {NULL, NULL},
};

static const td_gguf_name mla_keys[] = {
    {"feed_forward_length", "intermediate_size"},
    {"expert_feed_forward_length", "moe_intermediate_size"},
    {"expert_count", "n_routed_experts"},
    {"expert_shared_count", "n_shared_experts"},
    {"leading_dense_block_count", "first_k_dense_replace"},
    {"attention.kv_lora_rank", "kv_lora_rank"},
    {"rope.dimension_count", "qk_rope_head_dim"},
    {"expert_weights_scale", "routed_scaling_factor"},
    {"attention.indexer.head_count", "index_n_heads"},
    {"attention.indexer.key_length", "index_head_dim"},
    {"attention.indexer.top_k", "index_topk"},
    {NULL, NULL},
};

static const td_gguf_name hy_v3_keys[] = {
    GQA_KEYS,
    {"expert_feed_forward_length", "moe_intermediate_size"},
    {"expert_count", "num_experts"},
    {"expert_weights_scale", "router_scaling_factor"},
    {NULL, NULL},
};

static const td_gguf_name glm4moe_keys[] = {
    GQA_KEYS,
    {"expert_feed_forward_length", "moe_intermediate_size"},
    {"expert_count", "n_routed_experts"},
    {"expert_shared_count", "n_shared_experts"},
    {"leading_dense_block_count", "first_k_dense_replace"},
    {"expert_weights_scale", "routed_scaling_factor"},
    {"nextn_predict_layers", "num_nextn_predict_layers"},
    {NULL, NULL},
};

static const td_gguf_name olmoe_keys[] = {
    GQA_KEYS,
    {"expert_count", "num_experts"},
    {NULL, NULL},
};

static const td_gguf_name llama_keys[] = {
    GQA_KEYS,
    {"expert_count", "num_local_experts"},
    {NULL, NULL},
};

static const td_gguf_name ernie_keys[] = {
    GQA_KEYS,
    {"expert_feed_forward_length", "moe_intermediate_size"},
    {"expert_count", "moe_num_experts"},
    {"interleave_moe_layer_step", "moe_layer_interval"},
    {"leading_dense_block_count", "moe_layer_start_index"},
    {NULL, NULL},
};

static const td_gguf_name gemma4_keys[] = {
    {"attention.key_length", "global_head_dim"},
    {"attention.key_length_swa", "head_dim"},
    {"attention.sliding_window", "sliding_window"},
    {"attention.shared_kv_layers", "num_kv_shared_layers"},
    {"embedding_length_per_layer_input", "hidden_size_per_layer_input"},
    {"feed_forward_length", "intermediate_size"},
    {"expert_feed_forward_length", "moe_intermediate_size"},
    {"expert_count", "num_experts"},
    {"final_logit_softcapping", "final_logit_softcapping"},
    {NULL, NULL},
};

static const td_gguf_name delta_keys[] = {
    {"attention.head_count_kv", "num_key_value_heads"},
    {"attention.key_length", "head_dim"},
    {"expert_feed_forward_length", "moe_intermediate_size"},
    {"expert_shared_feed_forward_length", "shared_expert_intermediate_size"},
    {"expert_count", "num_experts"},
    {"ssm.conv_kernel", "linear_conv_kernel_dim"},
    {"ssm.state_size", "linear_key_head_dim"},
    {"ssm.group_count", "linear_num_key_heads"},
    {"ssm.time_step_rank", "linear_num_value_heads"},
    {NULL, NULL},
};

static const td_gguf_name one_expert_dim_keys[] = {
    {"attention.head_count_kv", "num_key_value_heads"},  {"attention.key_length", "head_dim"},
    {"expert_feed_forward_length", "intermediate_size"}, {"expert_count", "num_local_experts"},
    {"attention.sliding_window", "sliding_window"},      {NULL, NULL},
};

static void write_bias(const writer *w) {
  td_jw_bool(w->to, "attention_bias", has_tensor(w, "blk.0.attn_q.bias"));
}

// A list of what each layer is: `with` if it has a tensor of this name, `without` if not.
static td_status write_kinds(const writer *w, const char *key, const char *tensor, const char *with,
                             const char *without) {
  double n = 0, n_mtp = 0;
  td_status st = needed(w, "block_count", &n);
  if (st == TD_OK) st = number_or(w, "nextn_predict_layers", 0, &n_mtp);
  if (st != TD_OK) return st;
  if (!(n - n_mtp <= MAX_LAYERS)) return bad(w, "block_count", "is too large");
  td_jw_begin_array(w->to, key);
  for (int i = 0; i < n - n_mtp; i++) {
    char name[MAX_KEY];
    snprintf(name, sizeof name, "blk.%d.%s", i, tensor);
    td_jw_str(w->to, NULL, has_tensor(w, name) ? with : without);
  }
  td_jw_end_array(w->to);
  return TD_OK;
}

// Sums of the chosen experts' weights are 1 in llama.cpp, whatever the publisher says.
static td_status write_qwen3moe(const writer *w) {
  write_bias(w);
  td_jw_bool(w->to, "norm_topk_prob", true);
  return TD_OK;
}

// Dense models have the names of some architectures, too.
static td_status need_experts(const writer *w) {
  double n = 0;
  td_status st = number_or(w, "expert_count", 0, &n);
  return st == TD_OK && n == 0 ? bad(w, "expert_count", "is absent: a dense model") : st;
}

// Rows of queries and keys are sorted by pairs that turn together.
static td_status write_llama(const writer *w) {
  td_jw_bool(w->to, "rope_interleave", true);
  return need_experts(w);
}

static td_status write_ernie(const writer *w) {
  double n = 0;
  td_status st = number_or(w, "expert_shared_count", 0, &n);
  put(w, "moe_num_shared_experts", n);
  return st;
}

static td_status write_qwen3next(const writer *w) {
  double inner = 0, heads = 0;
  write_bias(w);
  td_status st = needed(w, "ssm.inner_size", &inner);
  if (st == TD_OK) st = needed(w, "ssm.time_step_rank", &heads);
  if (st == TD_OK && !(heads > 0)) st = bad(w, "ssm.time_step_rank", "must be positive");
  if (st == TD_OK) put(w, "linear_value_head_dim", inner / heads);
  return st == TD_OK
             ? write_kinds(w, "layer_types", "ssm_out.weight", "linear_attention", "full_attention")
             : st;
}

// Writers sort value heads so that those of one key head are far apart.
static td_status write_qwen35moe(const writer *w) {
  td_jw_bool(w->to, "linear_tiled_heads", true);
  return write_qwen3next(w);
}

static td_status write_topk(const writer *w) {
  double normed = 0;
  td_status st = number_or(w, "expert_weights_norm", 0, &normed);
  if (st == TD_OK) td_jw_bool(w->to, "norm_topk_prob", normed != 0);
  return st;
}

static td_status write_groups(const writer *w) {
  double n_experts = 0, n = 0, used = 0;
  td_status st = needed(w, "expert_count", &n_experts);
  // Files of DeepSeek-V3 from before writers stored the groups.
  const bool is_v3 = st == TD_OK && w->arch->is_mla && n_experts == 256;
  if (st == TD_OK) st = number_or(w, "expert_group_count", is_v3 ? 8 : 1, &n);
  if (st == TD_OK) st = number_or(w, "expert_group_used_count", is_v3 ? 4 : 1, &used);
  if (st != TD_OK) return st;
  put(w, "n_group", n);
  put(w, "topk_group", used);
  return TD_OK;
}

static td_status write_router(const writer *w, double fallback) {
  enum { SOFTMAX = 1, SIGMOID = 2 };
  double kind = 0;
  td_status st = number_or(w, "expert_gating_func", fallback, &kind);
  if (st == TD_OK) td_jw_str(w->to, "scoring_func", kind == SIGMOID ? "sigmoid" : "softmax");
  return st;
}

static td_status write_glm4moe(const writer *w) {
  write_bias(w);
  td_jw_bool(w->to, "use_qk_norm", has_tensor(w, "blk.0.attn_q_norm.weight"));
  td_status st = write_topk(w);
  return st == TD_OK ? write_groups(w) : st;
}

static td_status write_minimax(const writer *w) {
  return write_router(w, 2);
}

static td_status write_gpt_oss(const writer *w) {
  write_bias(w);
  return TD_OK;
}

static td_status write_mla(const writer *w) {
  double key = 0, value = 0, rope = 0, rank = 0;
  bool found = false;
  td_status st = needed(w, "rope.dimension_count", &rope);
  // Without keys of MLA, files from before llama.cpp computed it.
  if (st == TD_OK) st = number(w, "attention.key_length_mla", &key, &found);
  if (st == TD_OK && !found) st = needed(w, "attention.key_length", &key);
  if (st == TD_OK) st = number(w, "attention.value_length_mla", &value, &found);
  if (st == TD_OK && !found) st = needed(w, "attention.value_length", &value);
  if (st == TD_OK) st = number(w, "attention.q_lora_rank", &rank, &found);
  if (st != TD_OK) return st;
  if (key <= rope) return bad(w, "rope.dimension_count", "is not less than the keys' length");
  put(w, "qk_nope_head_dim", key - rope);
  put(w, "v_head_dim", value);
  if (found && rank > 0)
    put(w, "q_lora_rank", rank);
  else
    td_jw_null(w->to, "q_lora_rank");
  td_jw_bool(w->to, "rope_interleave", true);
  write_bias(w);
  st = write_router(w, 1);
  if (st == TD_OK) st = write_topk(w);
  return st == TD_OK ? write_groups(w) : st;
}

// Which layers have an indexer of their own.
static td_status write_glm_dsa(const writer *w) {
  const td_gguf_value *types = find(w, "attention.indexer.types");
  double n = 0, n_mtp = 0, is_full = 0;
  td_status st = write_mla(w);
  if (st == TD_OK) st = needed(w, "block_count", &n);
  if (st == TD_OK) st = number_or(w, "nextn_predict_layers", 0, &n_mtp);
  if (st != TD_OK) return st;
  if (!types) return write_kinds(w, "indexer_types", "indexer.attn_k.weight", "full", "shared");
  td_jw_begin_array(w->to, "indexer_types");
  for (uint64_t i = 0; i < types->n && (double)i < n - n_mtp; i++)
    td_jw_str(w->to, NULL, td_gguf_number(types, i, &is_full) && is_full != 0 ? "full" : "shared");
  td_jw_end_array(w->to);
  return TD_OK;
}

static td_status write_hy_v3(const writer *w) {
  double expert = 0, shared = 0;
  td_status st = needed(w, "expert_feed_forward_length", &expert);
  if (st == TD_OK) st = number_or(w, "expert_shared_feed_forward_length", expert, &shared);
  if (st == TD_OK && !(expert > 0)) st = bad(w, "expert_feed_forward_length", "must be positive");
  if (st != TD_OK) return st;
  write_bias(w);
  put(w, "num_shared_experts", shared / expert);
  return write_kinds(w, "mlp_layer_types", "ffn_gate_inp.weight", "sparse", "dense");
}

// Pairs of layers without a window that turn: others are slowed until they stand still.
static double turning_part(const writer *w) {
  for (size_t p = 0; p < w->n_parts; p++) {
    for (size_t i = 0; i < w->parts[p].n_tensors; i++) {
      const td_gguf_tensor *t = &w->parts[p].tensors[i];
      if (!td_gguf_str_is(t->name, "rope_freqs.weight") || t->n_dims != 1) continue;
      if (strcmp(t->dtype, "F32") != 0 || !t->n_bytes) continue;
      uint64_t n = 0;
      for (uint64_t k = 0; k < t->shape[0]; k++) {
        float slower;
        memcpy(&slower, t->data + k * sizeof slower, sizeof slower);
        n += slower == 1;
      }
      return (double)n / (double)t->shape[0];
    }
  }
  return 1;
}

// The bases of layers with a window and of those without.
static td_status write_two_ropes(const writer *w) {
  double theta = 0, theta_swa = 0;
  td_status st = needed(w, "rope.freq_base", &theta);
  if (st == TD_OK) st = number_or(w, "rope.freq_base_swa", 10000, &theta_swa);
  if (st != TD_OK) return st;
  td_jw_add(w->to, "'rope_parameters': {'full_attention': {'rope_type': 'proportional'");
  put(w, "rope_theta", theta);
  put(w, "partial_rotary_factor", turning_part(w));
  td_jw_add(w->to, "}, 'sliding_attention': {'rope_type': 'default'");
  put(w, "rope_theta", theta_swa);
  td_jw_add(w->to, "}}");
  return TD_OK;
}

// Which layers have a window, and the heads of keys of the first of both kinds.
static td_status write_gemma4(const writer *w) {
  const td_gguf_value *windows = find(w, "attention.sliding_window_pattern");
  const td_gguf_value *heads = find(w, "attention.head_count_kv");
  double n = 0, n_heads[2] = {0, 0};
  bool has_v = true;
  td_status st = need_experts(w);
  if (st == TD_OK) st = needed(w, "block_count", &n);
  if (st != TD_OK) return st;
  if (!windows || !(n <= MAX_LAYERS) || (double)windows->n < n)
    return bad(w, "attention.sliding_window_pattern", "is no list with an entry for each layer");
  td_jw_begin_array(w->to, "layer_types");
  for (uint64_t i = 0; i < n; i++) {
    double has_window = 0;
    char name[MAX_KEY];
    snprintf(name, sizeof name, "blk.%llu.attn_v.weight", (unsigned long long)i);
    td_gguf_number(windows, i, &has_window);
    td_jw_str(w->to, NULL, has_window != 0 ? "sliding_attention" : "full_attention");
    double *count = &n_heads[has_window != 0];
    if (heads && *count == 0) td_gguf_number(heads, heads->n > 1 ? i : 0, count);
    if (has_window == 0) has_v = has_v && has_tensor(w, name);
  }
  td_jw_end_array(w->to);
  write_bias(w);
  td_jw_add(w->to, "'enable_moe_block': true, 'attention_k_eq_v': %i", !has_v);
  put(w, "num_key_value_heads", n_heads[n_heads[1] > 0]);
  if (n_heads[0] > 0) put(w, "num_global_key_value_heads", n_heads[0]);
  return write_two_ropes(w);
}

static const td_gguf_name gemma4_names[] = {
    {"ffn_norm.weight", "pre_feedforward_layernorm.weight"},
    {"pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight"},
    {"post_ffw_norm.weight", "post_feedforward_layernorm.weight"},
    {"post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight"},
    {"post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight"},
    {"layer_output_scale.weight", "layer_scalar"},
    {"ffn_gate_inp.weight", "router.proj.weight"},
    {"ffn_gate_inp.scale", "router.scale"},
    {"ffn_down_exps.scale", "router.per_expert_scale"},
    {"ffn_gate_up_exps.weight", "experts.gate_up_proj"},
    {"ffn_gate_exps.weight", "experts.*.gate_proj.weight"},
    {"ffn_up_exps.weight", "experts.*.up_proj.weight"},
    {"ffn_down_exps.weight", "experts.*.down_proj.weight"},
    {NULL, NULL},
};

static const td_gguf_name hy_v3_names[] = {
    {"exp_probs_b", "mlp.e_score_correction_bias"},
    {"exp_probs_b.bias", "mlp.e_score_correction_bias"},
    {NULL, NULL},
};

static const td_gguf_name ernie_names[] = {
    {"exp_probs_b.bias", "mlp.moe_statics.e_score_correction_bias"},
    {NULL, NULL},
};

static const td_gguf_name minimax_names[] = {
    {"ffn_gate_inp.weight", "block_sparse_moe.gate.weight"},
    {"exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias"},
    {"ffn_gate_exps.weight", "block_sparse_moe.experts.*.w1.weight"},
    {"ffn_up_exps.weight", "block_sparse_moe.experts.*.w3.weight"},
    {"ffn_down_exps.weight", "block_sparse_moe.experts.*.w2.weight"},
    {NULL, NULL},
};

static const td_gguf_name qwen3next_names[] = {
    {"attn_qkv.weight", "linear_attn.in_proj_qkv.weight"},
    {"attn_gate.weight", "linear_attn.in_proj_z.weight"},
    {"ssm_ba.weight", "linear_attn.in_proj_ba.weight"},
    {"ssm_beta.weight", "linear_attn.in_proj_b.weight"},
    {"ssm_alpha.weight", "linear_attn.in_proj_a.weight"},
    {"ssm_conv1d.weight", "linear_attn.conv1d.weight"},
    {"ssm_a", "linear_attn.A_log"},
    {"ssm_dt.bias", "linear_attn.dt_bias"},
    {"ssm_norm.weight", "linear_attn.norm.weight"},
    {"ssm_out.weight", "linear_attn.out_proj.weight"},
    {"ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight"},
    {"ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight"},
    {"ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight"},
    {"ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight"},
    {NULL, NULL},
};

static const td_gguf_name gpt_oss_names[] = {
    {"attn_sinks.weight", "self_attn.sinks"},
    {"ffn_gate_inp.weight", "mlp.router.weight"},
    {"ffn_gate_inp.bias", "mlp.router.bias"},
    {"ffn_gate_exps.bias", "mlp.experts.*.gate_proj.bias"},
    {"ffn_up_exps.bias", "mlp.experts.*.up_proj.bias"},
    {"ffn_down_exps.bias", "mlp.experts.*.down_proj.bias"},
    {NULL, NULL},
};

static const td_gguf_arch archs[] = {
    {.name = "qwen3moe", .model_type = "qwen3_moe", .keys = gqa_keys, .write = write_qwen3moe},
    {.name = "qwen3vlmoe",
     .model_type = "qwen3_vl_moe_text",
     .keys = gqa_keys,
     .write = write_qwen3moe},
    {.name = "olmoe", .model_type = "olmoe", .keys = olmoe_keys},
    {.name = "llama",
     .model_type = "mixtral",
     .names = minimax_names,
     .keys = llama_keys,
     .write = write_llama},
    {.name = "dots1", .model_type = "dots1", .keys = glm4moe_keys, .write = write_glm4moe},
    {.name = "ernie4_5-moe",
     .model_type = "ernie4_5_moe",
     .names = ernie_names,
     .keys = ernie_keys,
     .write = write_ernie},
    {.name = "gemma4",
     .model_type = "gemma4_text",
     .writes_rope = true,
     .names = gemma4_names,
     .keys = gemma4_keys,
     .write = write_gemma4},
    // Its projections come apart, as Qwen3.5's are published.
    {.name = "qwen3next",
     .model_type = "qwen3_5_moe_text",
     .names = qwen3next_names,
     .keys = delta_keys,
     .write = write_qwen3next},
    {.name = "qwen35moe",
     .model_type = "qwen3_5_moe_text",
     .names = qwen3next_names,
     .keys = delta_keys,
     .write = write_qwen35moe},
    {.name = "glm4moe", .model_type = "glm4_moe", .keys = glm4moe_keys, .write = write_glm4moe},
    {.name = "minimax-m2",
     .model_type = "minimax_m2",
     .names = minimax_names,
     .keys = one_expert_dim_keys,
     .write = write_minimax},
    {.name = "gpt-oss",
     .model_type = "gpt_oss",
     .untruncated = true,
     .names = gpt_oss_names,
     .keys = one_expert_dim_keys,
     .write = write_gpt_oss},
    {.name = "deepseek2",
     .model_type = "deepseek_v3",
     .is_mla = true,
     .keys = mla_keys,
     .write = write_mla},
    {.name = "deepseek32",
     .model_type = "deepseek_v32",
     .is_mla = true,
     .keys = mla_keys,
     .write = write_mla},
    {.name = "glm-dsa",
     .model_type = "glm_moe_dsa",
     .is_mla = true,
     .keys = mla_keys,
     .write = write_glm_dsa},
    {.name = "hy_v3",
     .model_type = "hy_v3",
     .names = hy_v3_names,
     .keys = hy_v3_keys,
     .write = write_hy_v3},
    {.name = "mistral4",
     .model_type = "mistral4",
     .is_mla = true,
     .keys = mla_keys,
     .write = write_mla},
};

td_status td_gguf_arch_of(const td_gguf *g, const td_gguf_arch **out, td_err *err) {
  td_gguf_str name;
  if (!td_gguf_text(td_gguf_find(g, "general.architecture"), &name))
    return td_fail(err, TD_EFORMAT, "%s: metadata general.architecture: is missing", g->file);
  char list[256] = "";
  for (size_t i = 0, len = 0; i < TD_COUNT(archs) && len < sizeof list; i++) {
    *out = &archs[i];
    if (td_gguf_str_is(name, archs[i].name)) return TD_OK;
    len += (size_t)snprintf(list + len, sizeof list - len, "%s%s", len ? ", " : "", archs[i].name);
  }
  return td_fail(err, TD_EUNSUPPORTED, "%s: architecture %.*s is not supported; supported are %s",
                 g->file, name.len < 60 ? (int)name.len : 60, name.data, list);
}

td_status td_gguf_config(td_buf *out, const td_gguf *parts, size_t n_parts, td_err *err) {
  td_json_writer to = TD_JSON_WRITER(out);
  writer w = {.parts = parts, .n_parts = n_parts, .to = &to, .err = err};
  td_status st = td_gguf_arch_of(&parts[0], &w.arch, err);
  if (st != TD_OK) return st;
  td_gguf_str pre;
  const bool is_glm = strcmp(w.arch->name, "deepseek2") == 0 &&
                      td_gguf_text(td_gguf_find(&parts[0], "tokenizer.ggml.pre"), &pre) &&
                      td_gguf_str_is(pre, "glm4");
  td_jw_add(&to, "{'model_type': %s", is_glm ? "glm4_moe_lite" : w.arch->model_type);
  // The output matrix is tied unless it is there (model/tensor_bind.c).
  td_jw_bool(&to, "tie_word_embeddings", true);
  st = write_layers(&w);
  if (st == TD_OK) st = write_vocab(&w);
  if (st == TD_OK) st = copy(&w, td_gguf_common_keys);
  if (st == TD_OK) st = copy(&w, w.arch->keys);
  if (st == TD_OK && !w.arch->writes_rope) st = write_rope(&w);
  if (st == TD_OK && w.arch->write) st = w.arch->write(&w);
  write_tokens(&w);
  td_jw_end_object(&to);
  return st == TD_OK ? td_buf_status(out, err) : st;
}
