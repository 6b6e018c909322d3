// tests/fuzz/fuzz_config.c - config.json of any JSON: refused, or every value within its range.
// Input: config.json; after a line of "---", generation_config.json.
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "model/config.h"
#include "model/quant_scheme.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const td_model_config *c) {
  TD_CHECK(c->n_layers >= 1 && c->n_layers <= TD_MAX_LAYERS);
  TD_CHECK(c->dim >= 1 && c->n_vocab >= 1 && c->n_heads >= 1 && c->expert_dim >= 1);
  TD_CHECK(c->top_k >= 1 && c->top_k <= c->n_experts);
  TD_CHECK(c->n_groups >= 1 && c->n_experts % c->n_groups == 0);
  TD_CHECK(c->topk_groups >= 1 && c->topk_groups <= c->n_groups);
  TD_CHECK(isfinite(c->rope_theta) && c->rope_theta > 1 && c->yarn.factor >= 1);
  TD_CHECK(c->yarn.beta_fast > 0 && c->yarn.beta_slow > 0);
  TD_CHECK(c->rms_eps > 0 && c->routed_scaling > 0 && c->max_position >= 1);
  TD_CHECK(c->n_eos <= TD_MAX_EOS && c->bos_id < (int32_t)c->n_vocab && c->bos_id >= -1);
  switch (c->attn) {
  case TD_ATTN_MLA:
  case TD_ATTN_DSA:
  case TD_ATTN_DSA_SHARED:
    TD_CHECK(c->rope_dim % 2 == 0 && c->rope_dim && c->kv_lora_rank && c->v_dim && c->nope_dim);
    TD_CHECK(!c->delta_by_channel || c->delta_k_heads == c->delta_v_heads);
    break;
  case TD_ATTN_DSA_POOL:
    TD_CHECK(!c->rope_dim && c->has_no_rope && c->kv_lora_rank && c->q_lora_rank && c->v_dim);
    TD_CHECK(c->nope_dim && c->index_heads && c->index_dim && c->index_top_k && c->n_streams);
    TD_CHECK(c->index_group && (c->index_group & (c->index_group - 1)) == 0);
    TD_CHECK(c->delta_by_channel && c->delta_k_heads == c->delta_v_heads && c->delta_bound <= 0);
    break;
  case TD_ATTN_NEAR:
  case TD_ATTN_POOL:
  case TD_ATTN_POOL_TOP:
    TD_CHECK(c->rope_dim % 2 == 0 && c->rope_dim && c->rope_dim <= c->index_dim && c->window);
    TD_CHECK(c->o_groups && c->n_heads % c->o_groups == 0 && c->n_streams);
    TD_CHECK(c->pool_group && c->pool_top_group && c->rope_dim <= c->head_dim);
    TD_CHECK(c->head_dim % 2 == 0);
    break;
  case TD_ATTN_GROUPS:
    TD_CHECK(c->index_heads && c->index_dim && c->index_top_k && c->n_streams && c->hyper_rank);
    TD_CHECK(c->index_group && (c->index_group & (c->index_group - 1)) == 0);
    TD_CHECK(!c->ngram_size || (c->ngram_size <= TD_MAX_NGRAM && c->ngram_end >= 0 &&
                                c->ngram_dim % ((c->ngram_size - 1) * c->ngram_heads) == 0));
    TD_CHECK(c->index_dim >= c->rope_dim && c->delta_k_heads);
    break;
  case TD_ATTN_GQA:
  case TD_ATTN_GQA_WIDE:
  case TD_ATTN_BLOCKS:
  case TD_ATTN_DELTA:
  case TD_ATTN_KDA:
    TD_CHECK(c->n_kv_heads && c->n_heads % c->n_kv_heads == 0 && c->head_dim % 2 == 0);
    TD_CHECK(c->head_dim >= 2);
    TD_CHECK(!c->index_block || (c->index_heads == c->n_kv_heads && c->index_top_blocks));
    TD_CHECK(c->index_local_blocks <= c->index_top_blocks);
    break;
  }
}

// What was accepted reads again, and names find their schemes or none.
static void check_quant(const cJSON *config) {
  static const char *const modules[] = {"model.layers.3.mlp.experts.17.up_proj", "lm_head",
                                        "model.layers.0.self_attn.q_proj", ""};
  td_quant *quant;
  TD_CHECK(td_quant_open(&quant, config, "dir/config.json", NULL) == TD_OK);
  for (size_t i = 0; i < TD_COUNT(modules); i++) {
    const td_quant_scheme *s = td_quant_find(quant, modules[i]);
    TD_CHECK(!s || (s->format <= TD_QUANT_AWQ && s->scale_cols <= 65536));
  }
  td_quant_close(quant);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const char *text = (const char *)data;
  const char *rule = size ? memmem(text, size, "\n---\n", 5) : NULL;
  size_t len = rule ? (size_t)(rule - text) : size;
  cJSON *config = NULL, *generation = NULL;
  td_err err;
  td_model_config c;
  if (td_json_parse(&config, text, len, TD_JSON_MAX_DEPTH, &err) != TD_OK) return 0;
  if (rule &&
      td_json_parse(&generation, rule + 5, size - len - 5, TD_JSON_MAX_DEPTH, &err) != TD_OK) {
    generation = NULL;
  }
  if (td_config_parse(&c, config, generation, "dir", &err) == TD_OK) {
    check(&c);
    check_quant(config);
  } else {
    TD_CHECK(strncmp(err.msg, "dir/", 4) == 0);
  }
  cJSON_Delete(config);
  cJSON_Delete(generation);
  return 0;
}
