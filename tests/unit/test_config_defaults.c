// tests/unit/test_config_defaults.c - a config.json that states nothing but model_type means what
// the reference's configuration class makes of it (scripts/make_config_defaults.py).
// CTest: no-tsan
#include "unit/config_test.h"

static const char *const cases[][2] = {
#include "unit/config_defaults.inc"
};

// What the forward pass takes from config.json.
// clang-format off
#define FIELDS(X)                                                                                  \
  X(n_layers) X(n_vocab) X(dim) X(n_heads) X(max_position) X(kind) X(tie_embeddings)               \
  X(attention_bias) X(rms_eps) X(rope_theta) X(yarn.factor) X(yarn.beta_fast)                      \
  X(yarn.beta_slow) X(yarn.mscale) X(yarn.mscale_all_dim) X(yarn.original_max_position)            \
  X(rope_interleaved) X(rope_dim) X(query_beta) X(n_kv_heads) X(head_dim) X(qk_norm) X(window)     \
  X(window_layers) X(delta_k_heads) X(delta_v_heads) X(delta_k_dim) X(delta_v_dim)                 \
  X(delta_taps) X(delta_sigmoid) X(delta_bound) X(has_no_rope) X(q_lora_rank) X(kv_lora_rank)      \
  X(nope_dim) X(v_dim) X(index_heads) X(index_dim) X(index_top_k) X(index_interleaved)             \
  X(index_group) X(index_block) X(index_top_blocks) X(index_local_blocks) X(pool_group)            \
  X(pool_top_group) X(pool_theta) X(o_groups) X(o_lora_rank) X(n_streams) X(hyper_rounds)          \
  X(hyper_rank) X(hyper_eps) X(ngram_layers) X(ngram_size) X(n_experts) X(top_k)                   \
  X(n_shared_experts) X(expert_dim) X(dense_dim) X(shared_dim) X(n_groups) X(topk_groups)          \
  X(swiglu_limit) X(swiglu_alpha) X(norm_topk) X(routed_scaling) X(table_layers) X(moe_layers)
// clang-format on

TEST(defaults_are_those_of_the_reference) {
  char wrong[4096] = "";
  size_t len = 0;
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    const td_model_config bare = parse_ok(cases[i][0], NULL), whole = parse_ok(cases[i][1], NULL);
#define X(field)                                                                                   \
  if (memcmp(&bare.field, &whole.field, sizeof bare.field) != 0)                                   \
    len += (size_t)snprintf(wrong + len, sizeof wrong - len, "%s: %s\n", bare.arch_name, #field);
    FIELDS(X)
#undef X
    for (size_t k = 0; whole.ignored[k]; k++)
      len += (size_t)snprintf(wrong + len, sizeof wrong - len, "%s: %s is ignored\n",
                              bare.arch_name, whole.ignored[k]);
  }
  if (len) fail_msg("differ from the reference:\n%s", wrong);
}
