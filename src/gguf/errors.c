// src/gguf/errors.c - errors about what is made of a GGUF file name what is in the file.
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "gguf/arch_impl.h"

// Keys of config.json whose values are made of one of the architecture's metadata, or of others.
static const td_gguf_name derived[] = {
    {"block_count", "num_hidden_layers"},
    {"nextn_predict_layers", "num_nextn_predict_layers"},
    {"rope.freq_base", "rope_theta"},
    {"attention.head_count_kv", "num_global_key_value_heads"},
    {"attention.head_count_kv", "num_key_value_heads"},
    {"attention.sliding_window_pattern", "layer_types"},
    {"rope.dimension_count", "partial_rotary_factor"},
    {"rope.scaling.type", "rope_type"},
    {"rope.scaling.factor", "factor"},
    {"rope.scaling.original_context_length", "original_max_position_embeddings"},
    {"rope.scaling.yarn_log_multiplier", "mscale_all_dim"},
    {"rope.scaling.yarn_log_multiplier", "mscale"},
    {"rope.scaling.yarn_beta_fast", "beta_fast"},
    {"rope.scaling.yarn_beta_slow", "beta_slow"},
    {"rope.scaling.yarn_attn_factor", "attention_factor"},
    {"attention.temperature_scale", "llama_4_scaling_beta"},
    {"expert_group_count", "n_group"},
    {"expert_group_used_count", "topk_group"},
    {"expert_weights_norm", "norm_topk_prob"},
    {"expert_gating_func", "scoring_func"},
    {"expert_shared_feed_forward_length", "num_shared_experts"},
    {"expert_shared_count", "moe_num_shared_experts"},
    {"attention.key_length_mla", "qk_nope_head_dim"},
    {"attention.value_length_mla", "v_head_dim"},
    {"attention.q_lora_rank", "q_lora_rank"},
    {"attention.indexer.types", "indexer_types"},
    {"ssm.inner_size", "linear_value_head_dim"},
    {NULL, NULL},
};
static const td_gguf_name whole[] = {
    {"general.architecture", "model_type"},
    {"tokenizer.ggml.bos_token_id", "bos_token_id"},
    {"tokenizer.ggml.eos_token_id", "eos_token_id"},
    {"the rows of token_embd.weight", "vocab_size"},
    {"tokenizer.ggml.tokens", "model.vocab"},
    {"tokenizer.ggml.merges", "model.merges"},
    {"tokenizer.ggml.scores", "model.scores"},
    {"tokenizer.ggml.token_type", "added_tokens"},
    {"tokenizer.chat_template", "chat template"},
    {"tokenizer.chat_template", "chat_template"},
    {NULL, NULL},
};

static void rename_keys(td_err *err, size_t begin, const char *arch, const td_gguf_name *names) {
  for (; names && names->gguf; names++) {
    char own[128];
    snprintf(own, sizeof own, "%s%s%s", arch, arch[0] ? "." : "", names->gguf);
    td_msg_rename(err->msg, begin, names->published, own);
  }
}

static void rename_tensors(td_err *err, size_t begin, const td_gguf_arch *arch,
                           const td_gguf *parts, size_t n_parts) {
  td_buf text = TD_BUF_INIT;
  td_buf_add(&text, err->msg, begin);
  for (const char *at = err->msg + begin; *at;) {
    const size_t n = strspn(at, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.");
    char own[TD_GGUF_MAX_NAME];
    if (n && td_gguf_own_name(arch, parts, n_parts, at, n, own, sizeof own))
      td_buf_str(&text, own);
    else
      td_buf_add(&text, at, n ? n : 1);
    at += n ? n : 1;
  }
  if (!text.failed) snprintf(err->msg, sizeof err->msg, "%s", td_buf_text(&text));
  td_buf_free(&text);
}

void td_gguf_name_error(const td_gguf_arch *arch, const td_gguf *parts, size_t n_parts,
                        td_err *err) {
  static const char *const made[] = {"/config.json", "/tokenizer.json", "/tokenizer_config.json"};
  const char *file = strstr(err->msg, ".gguf"); // in front is a path, which stays
  const size_t begin = file ? (size_t)(file - err->msg) + strlen(".gguf") : 0;
  for (size_t i = 0; i < TD_COUNT(made); i++) {
    const size_t n = strlen(made[i]);
    char rest[TD_ERR_BYTES];
    if (strncmp(err->msg + begin, made[i], n) != 0) continue;
    const bool has_colon = err->msg[begin + n] == ':'; // in front of what is named
    snprintf(rest, sizeof rest, "%s", err->msg + begin + n + has_colon);
    snprintf(err->msg + begin, sizeof err->msg - begin, ": metadata%s", rest);
    break;
  }
  rename_tensors(err, begin, arch, parts, n_parts);
  rename_keys(err, begin, arch->name, arch->keys);
  rename_keys(err, begin, arch->name, td_gguf_common_keys);
  rename_keys(err, begin, arch->name, derived);
  rename_keys(err, begin, "", whole);
  td_msg_rename(err->msg, begin, "config.json", "the metadata");
}
