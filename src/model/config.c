#include "model/config.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"

// The largest values leave the product of any two of them within 64 bits and of heads and head
// dimensions within 32.
#define MAX_DIM      (1u << 22)
#define MAX_HEADS    4096u
#define MAX_HEAD_DIM 8192u
#define MAX_EXPERTS  4096u

// One whole number of config.json: its key, another spelling of it, the field it goes to, its range
// and the default of transformers' configuration class.
typedef struct {
  const char *key, *alias;
  size_t offset;
  uint32_t min, max, fallback;
} uint_key;

#define FIELD(name) offsetof(td_model_config, name)

static const uint_key deepseek_keys[] = {
    {"vocab_size", NULL, FIELD(n_vocab), 1, 1u << 24, 129280},
    {"hidden_size", NULL, FIELD(dim), 1, MAX_DIM, 7168},
    {"num_hidden_layers", NULL, FIELD(n_layers), 1, TD_MAX_LAYERS, 61},
    {"num_attention_heads", NULL, FIELD(n_heads), 1, MAX_HEADS, 128},
    {"max_position_embeddings", NULL, FIELD(max_position), 1, 1u << 30, 4096},
    {"intermediate_size", NULL, FIELD(dense_dim), 1, MAX_DIM, 18432},
    {"moe_intermediate_size", NULL, FIELD(expert_dim), 1, MAX_DIM, 2048},
    {"n_routed_experts", "num_local_experts", FIELD(n_experts), 1, MAX_EXPERTS, 256},
    {"num_experts_per_tok", NULL, FIELD(top_k), 1, MAX_EXPERTS, 8},
    {"n_shared_experts", NULL, FIELD(n_shared_experts), 0, 256, 1},
    {"n_group", NULL, FIELD(n_groups), 1, MAX_EXPERTS, 8},
    {"topk_group", NULL, FIELD(topk_groups), 1, MAX_EXPERTS, 4},
    {"kv_lora_rank", NULL, FIELD(kv_lora_rank), 1, MAX_DIM, 512},
    {"qk_nope_head_dim", NULL, FIELD(nope_dim), 1, MAX_HEAD_DIM, 128},
    {"qk_rope_head_dim", NULL, FIELD(rope_dim), 2, MAX_HEAD_DIM, 64},
    {"v_head_dim", NULL, FIELD(v_dim), 1, MAX_HEAD_DIM, 128},
    {"num_nextn_predict_layers", "num_mtp_layers", FIELD(n_mtp_layers), 0, 64, 1},
};

static const uint_key qwen3_keys[] = {
    {"vocab_size", NULL, FIELD(n_vocab), 1, 1u << 24, 151936},
    {"hidden_size", NULL, FIELD(dim), 1, MAX_DIM, 2048},
    {"num_hidden_layers", NULL, FIELD(n_layers), 1, TD_MAX_LAYERS, 24},
    {"num_attention_heads", NULL, FIELD(n_heads), 1, MAX_HEADS, 32},
    {"num_key_value_heads", NULL, FIELD(n_kv_heads), 1, MAX_HEADS, 4},
    {"max_position_embeddings", NULL, FIELD(max_position), 1, 1u << 30, 32768},
    {"intermediate_size", NULL, FIELD(dense_dim), 1, MAX_DIM, 6144},
    {"moe_intermediate_size", NULL, FIELD(expert_dim), 1, MAX_DIM, 768},
    {"num_experts", "num_local_experts", FIELD(n_experts), 1, MAX_EXPERTS, 128},
    {"num_experts_per_tok", NULL, FIELD(top_k), 1, MAX_EXPERTS, 8},
};

static td_status read_uints(const td_config_reader *r, const uint_key *keys, size_t n) {
  for (size_t i = 0; i < n; i++) {
    uint32_t *out = (uint32_t *)((char *)r->out + keys[i].offset);
    *out = keys[i].fallback;
    bool by_alias = keys[i].alias && !cJSON_HasObjectItem(r->root, keys[i].key);
    const char *key = by_alias ? keys[i].alias : keys[i].key;
    td_status st = td_config_uint(r, r->root, key, keys[i].min, keys[i].max, out);
    if (st != TD_OK) return st;
  }
  return TD_OK;
}

// A feature chosen by name of which only one choice is supported, which is also the default.
static td_status expect_str(const td_config_reader *r, const char *key, const char *supported) {
  const char *value = supported;
  td_status st = td_config_str(r, r->root, key, &value);
  if (st == TD_OK && strcmp(value, supported) != 0) {
    st = td_fail(r->err, TD_EUNSUPPORTED, "%s: %s \"%.40s\" is not supported; supported is \"%s\"",
                 r->file, key, value, supported);
  }
  return st;
}

static td_status bad(const td_config_reader *r, const char *what) {
  return td_fail(r->err, TD_EFORMAT, "%s: %s", r->file, what);
}

static void set_moe(td_model_config *c, uint32_t layer_idx) {
  c->moe_layers[layer_idx / 64] |= (uint64_t)1 << layer_idx % 64;
}

// What both architectures have and spell the same.
static td_status read_common(const td_config_reader *r) {
  td_model_config *c = r->out;
  double eps = 1e-6;
  td_status st = td_config_double(r, r->root, "rms_norm_eps", 1e-30, 1, &eps);
  c->rms_eps = (float)eps;
  if (st == TD_OK) st = td_config_bool(r, r->root, "tie_word_embeddings", &c->tie_embeddings);
  if (st == TD_OK) st = td_config_bool(r, r->root, "attention_bias", &c->attention_bias);
  if (st == TD_OK) st = td_config_bool(r, r->root, "norm_topk_prob", &c->norm_topk);
  if (st == TD_OK) st = expect_str(r, "hidden_act", "silu");
  if (st == TD_OK) st = td_config_read_rope(r);
  if (st == TD_OK) st = td_config_read_quant(r);
  if (st == TD_OK && c->top_k > c->n_experts) {
    st = td_fail(r->err, TD_EFORMAT, "%s: num_experts_per_tok %u is more than the %u experts",
                 r->file, c->top_k, c->n_experts);
  }
  return st;
}

static td_status check_groups(const td_config_reader *r) {
  const td_model_config *c = r->out;
  if (c->n_experts % c->n_groups) return bad(r, "n_group must divide n_routed_experts");
  if (c->topk_groups > c->n_groups) return bad(r, "topk_group must not exceed n_group");
  uint32_t group_size = c->n_experts / c->n_groups;
  if (group_size < 2) return bad(r, "a group (n_routed_experts / n_group) needs two experts");
  if (c->top_k > c->topk_groups * group_size) {
    return bad(r, "num_experts_per_tok is more than the experts in topk_group groups");
  }
  return TD_OK;
}

static td_status read_deepseek_experts(const td_config_reader *r) {
  td_model_config *c = r->out;
  uint32_t n_dense = 3, every = 1;
  double scaling = 2.5;
  td_status st = td_config_uint(r, r->root, "first_k_dense_replace", 0, INT32_MAX, &n_dense);
  if (st == TD_OK) st = td_config_uint(r, r->root, "moe_layer_freq", 1, TD_MAX_LAYERS, &every);
  if (st == TD_OK && every != 1) {
    st = td_fail(r->err, TD_EUNSUPPORTED, "%s: moe_layer_freq other than 1 is not supported",
                 r->file);
  }
  if (st == TD_OK) {
    st = td_config_double(r, r->root, "routed_scaling_factor", 1e-6, 1e6, &scaling);
  }
  if (st == TD_OK) st = expect_str(r, "scoring_func", "sigmoid");
  if (st == TD_OK) st = expect_str(r, "topk_method", "noaux_tc");
  if (st != TD_OK) return st;
  c->routed_scaling = (float)scaling;
  for (uint32_t i = n_dense; i < c->n_layers; i++)
    set_moe(c, i);
  return check_groups(r);
}

static td_status read_deepseek(const td_config_reader *r) {
  td_model_config *c = r->out;
  c->arch = TD_ARCH_DEEPSEEK_V3;
  c->router_sigmoid = c->norm_topk = c->rope_interleaved = true;
  c->bos_id = 0;
  c->eos_ids[0] = 1;
  c->n_eos = 1;
  td_status st = read_uints(r, deepseek_keys, TD_COUNT(deepseek_keys));
  // null: q_proj is one matrix.
  c->q_lora_rank = 1536;
  if (cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(r->root, "q_lora_rank"))) {
    c->q_lora_rank = 0;
  } else if (st == TD_OK) {
    st = td_config_uint(r, r->root, "q_lora_rank", 1, MAX_DIM, &c->q_lora_rank);
  }
  if (st == TD_OK) st = td_config_bool(r, r->root, "rope_interleave", &c->rope_interleaved);
  if (st == TD_OK) st = read_common(r);
  if (st == TD_OK) st = read_deepseek_experts(r);
  if (st == TD_OK && c->rope_dim % 2) st = bad(r, "qk_rope_head_dim must be even");
  return st;
}

// mlp_only_layers lists the layers without experts besides those that decoder_sparse_step leaves
// out.
static td_status read_qwen3_layers(const td_config_reader *r) {
  td_model_config *c = r->out;
  uint32_t step = 1;
  td_status st = td_config_uint(r, r->root, "decoder_sparse_step", 1, INT32_MAX, &step);
  if (st != TD_OK) return st;
  for (uint32_t i = 0; i < c->n_layers; i++) {
    if ((i + 1) % step == 0) set_moe(c, i);
  }
  const cJSON *dense = td_json_get(r->root, "mlp_only_layers");
  if (!dense) return TD_OK;
  if (!cJSON_IsArray(dense)) return bad(r, "mlp_only_layers must be an array");
  for (const cJSON *item = dense->child; item; item = item->next) {
    double value = cJSON_IsNumber(item) ? item->valuedouble : -1;
    if (!(value >= 0 && value < c->n_layers && value == (uint32_t)value)) {
      return bad(r, "mlp_only_layers must hold indices of layers");
    }
    uint32_t i = (uint32_t)value;
    c->moe_layers[i / 64] &= ~((uint64_t)1 << i % 64);
  }
  return TD_OK;
}

static td_status check_sliding_window(const td_config_reader *r) {
  bool use = false;
  td_status st = td_config_bool(r, r->root, "use_sliding_window", &use);
  bool off = cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(r->root, "sliding_window"));
  if (st == TD_OK && use && !off) {
    st = td_fail(r->err, TD_EUNSUPPORTED, "%s: use_sliding_window is not supported", r->file);
  }
  return st;
}

static td_status read_qwen3(const td_config_reader *r) {
  td_model_config *c = r->out;
  c->arch = TD_ARCH_QWEN3_MOE;
  c->qk_norm = true;
  c->routed_scaling = 1;
  c->n_groups = c->topk_groups = 1;
  td_status st = read_uints(r, qwen3_keys, TD_COUNT(qwen3_keys));
  if (st != TD_OK) return st;
  c->head_dim = c->dim / c->n_heads;
  if (td_json_get(r->root, "head_dim")) {
    st = td_config_uint(r, r->root, "head_dim", 2, MAX_HEAD_DIM, &c->head_dim);
  }
  if (st == TD_OK) st = read_common(r);
  if (st == TD_OK) st = read_qwen3_layers(r);
  if (st == TD_OK) st = check_sliding_window(r);
  if (st != TD_OK) return st;
  if (c->head_dim < 2 || c->head_dim % 2 || c->head_dim > MAX_HEAD_DIM) {
    return bad(r, "head_dim (or hidden_size / num_attention_heads) must be even");
  }
  if (c->n_heads % c->n_kv_heads) {
    return bad(r, "num_key_value_heads must divide num_attention_heads");
  }
  return TD_OK;
}

static const struct {
  const char *model_type;
  td_status (*read)(const td_config_reader *r);
} archs[] = {
    {"deepseek_v3", read_deepseek},
    {"kimi_k2", read_deepseek},
    {"qwen3_moe", read_qwen3},
};

static td_status read_arch(const td_config_reader *r) {
  const char *type = NULL;
  if (!cJSON_IsObject(r->root)) return bad(r, "must hold a JSON object");
  td_status st = td_config_str(r, r->root, "model_type", &type);
  if (st != TD_OK) return st;
  if (!type) return bad(r, "has no model_type, so its architecture is unknown");
  char names[256];
  size_t len = 0;
  for (size_t i = 0; i < TD_COUNT(archs); i++) {
    if (strcmp(type, archs[i].model_type) == 0) {
      snprintf(r->out->arch_name, sizeof r->out->arch_name, "%s", type);
      return archs[i].read(r);
    }
    len += (size_t)snprintf(names + len, sizeof names - len, "%s%s", i ? ", " : "",
                            archs[i].model_type);
  }
  return td_fail(r->err, TD_EUNSUPPORTED,
                 "%s: model_type \"%.60s\" is not supported; supported are %s", r->file, type,
                 names);
}

td_status td_config_parse(td_model_config *out, const cJSON *config, const cJSON *generation,
                          const char *dir, td_err *err) {
  td_err local;
  char file[TD_ERR_BYTES];
  snprintf(file, sizeof file, "%s/config.json", dir);
  *out = (td_model_config){.bos_id = -1, .temperature = 1, .top_p = 1};
  td_config_reader r = {.root = config, .file = file, .out = out, .err = err ? err : &local};
  td_status st = read_arch(&r);
  if (st == TD_OK) st = td_config_read_token_ids(&r);
  if (st != TD_OK || !generation) return st;
  snprintf(file, sizeof file, "%s/generation_config.json", dir);
  r.root = generation;
  if (!cJSON_IsObject(generation)) return bad(&r, "must hold a JSON object");
  st = td_config_read_token_ids(&r);
  return st == TD_OK ? td_config_read_sampling(&r) : st;
}

static td_status read_json(cJSON **out, const char *dir, const char *file, td_err *err) {
  char *path;
  if (asprintf(&path, "%s/%s", dir, file) < 0) return td_fail(err, TD_ENOMEM, "out of memory");
  td_status st = td_json_parse_regular(out, path, TD_CONFIG_MAX_BYTES, err);
  free(path);
  return st;
}

td_status td_model_config_read(td_model_config *out, const char *dir, td_err *err) {
  td_err local;
  if (!err) err = &local;
  cJSON *config = NULL, *generation = NULL;
  td_status st = read_json(&config, dir, "config.json", err);
  if (st == TD_ENOENT) {
    return td_fail(err, TD_ENOENT,
                   "%s/config.json: no such file: give the directory of a checkpoint as published",
                   dir);
  }
  if (st == TD_OK) st = read_json(&generation, dir, "generation_config.json", err);
  if (st == TD_OK || (st == TD_ENOENT && config)) {
    st = td_config_parse(out, config, generation, dir, err);
  }
  cJSON_Delete(config);
  cJSON_Delete(generation);
  return st;
}
