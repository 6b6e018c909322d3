// src/model/config.c - reads the parts of config.json that all families share.
#include "model/config.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "gguf/files.h"
#include "model/families/family.h"

td_status td_config_read_uints(const td_config_reader *r, const td_config_key *keys, size_t n) {
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

td_status td_config_expect_str(const td_config_reader *r, const char *key, const char *supported) {
  const char *value = supported;
  td_status st = td_config_str(r, r->root, key, &value);
  if (st == TD_OK && strcmp(value, supported) != 0) {
    st = td_config_fail(r, TD_EUNSUPPORTED, "%s \"%.40s\" is not supported; supported is \"%s\"",
                        key, value, supported);
  }
  return st;
}

td_status td_config_fail(const td_config_reader *r, td_status code, const char *fmt, ...) {
  char text[TD_ERR_BYTES];
  va_list args;
  va_start(args, fmt);
  vsnprintf(text, sizeof text, fmt, args);
  va_end(args);
  return td_fail(r->err, code, "%s: %s", r->file, text);
}

td_status td_config_bad(const td_config_reader *r, const char *what) {
  return td_config_fail(r, TD_EFORMAT, "%s", what);
}

td_status td_config_part(const td_config_reader *r, const char *key, const cJSON **out) {
  *out = td_json_get(r->root, key);
  return !*out || cJSON_IsObject(*out) ? TD_OK
                                       : td_config_fail(r, TD_EFORMAT, "%s must be an object", key);
}

bool td_config_takes(const td_config_reader *r, const char *key) {
  for (const char *const *name = r->out->family->ignores; *name; name++)
    if (strcmp(*name, key) == 0) return false;
  return true;
}

// Keys that most families have under the same names.
static td_status read_common(const td_config_reader *r) {
  td_model_config *c = r->out;
  double eps = c->rms_eps > 0 ? c->rms_eps : 1e-6;
  td_status st = td_config_double(r, r->root, "rms_norm_eps", 1e-30, 1, &eps);
  c->rms_eps = (float)eps;
  if (st == TD_OK) st = td_config_bool(r, r->root, "tie_word_embeddings", &c->tie_embeddings);
  if (st == TD_OK && td_config_takes(r, "attention_bias"))
    st = td_config_bool(r, r->root, "attention_bias", &c->attention_bias);
  if (st == TD_OK && td_config_takes(r, "norm_topk_prob"))
    st = td_config_bool(r, r->root, "norm_topk_prob", &c->norm_topk);
  if (st == TD_OK && td_config_takes(r, "hidden_act"))
    st = td_config_expect_str(r, "hidden_act", "silu");
  if (st == TD_OK) st = td_config_read_rope(r);
  if (st == TD_OK && c->top_k > c->n_experts) {
    st = td_config_fail(r, TD_EFORMAT, "num_experts_per_tok %u is more than the %u experts",
                        c->top_k, c->n_experts);
  }
  return st;
}

// The experts' groups, if there is a key for them.
static td_status check_groups(const td_config_reader *r) {
  td_model_config *c = r->out;
  if (!c->n_groups) {
    c->n_groups = c->topk_groups = 1;
    return TD_OK;
  }
  if (c->n_experts % c->n_groups) return td_config_bad(r, "n_group must divide n_routed_experts");
  if (c->topk_groups > c->n_groups) return td_config_bad(r, "topk_group must not exceed n_group");
  uint32_t group_size = c->n_experts / c->n_groups;
  if (group_size < 2)
    return td_config_bad(r, "a group (n_routed_experts / n_group) needs two experts");
  if (c->top_k > c->topk_groups * group_size)
    return td_config_bad(r, "num_experts_per_tok is more than the experts in topk_group groups");
  return TD_OK;
}

// head_dim, and that the heads fit.
static td_status read_head_dim(const td_config_reader *r) {
  td_model_config *c = r->out;
  td_status st = TD_OK;
  if (!c->head_dim) c->head_dim = c->dim / c->n_heads;
  if (td_json_get(r->root, "head_dim"))
    st = td_config_uint(r, r->root, "head_dim", 2, TD_MAX_HEAD_DIM, &c->head_dim);
  if (st != TD_OK) return st;
  if (c->head_dim < 2 || c->head_dim % 2 || c->head_dim > TD_MAX_HEAD_DIM)
    return td_config_bad(r, "head_dim (or hidden_size / num_attention_heads) must be even");
  if (c->n_heads % c->n_kv_heads)
    return td_config_bad(r, "num_key_value_heads must divide num_attention_heads");
  return TD_OK;
}

// q_lora_rank (null: q_proj is one matrix) and rope_interleave.
static td_status read_mla(const td_config_reader *r) {
  td_model_config *c = r->out;
  td_status st = TD_OK;
  if (cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(r->root, "q_lora_rank")))
    c->q_lora_rank = 0;
  else
    st = td_config_uint(r, r->root, "q_lora_rank", 1, TD_MAX_DIM, &c->q_lora_rank);
  if (st == TD_OK) st = td_config_bool(r, r->root, "rope_interleave", &c->rope_interleaved);
  if (st == TD_OK && c->rope_dim % 2) st = td_config_bad(r, "qk_rope_head_dim must be even");
  return st;
}

// What MLA over selected keys has: queries of low rank, and the indexer's keys hold the rotary
// part. Every layer has an indexer.
static td_status read_dsa(const td_config_reader *r) {
  td_model_config *c = r->out;
  const bool is_interleaved = c->rope_interleaved; // the reference does not read rope_interleave
  td_status st = read_mla(r);
  c->rope_interleaved = is_interleaved;
  if (st == TD_OK && !c->q_lora_rank)
    st = td_config_bad(r, "q_lora_rank must be a number: the indexer's queries are made of it");
  if (st == TD_OK && c->index_dim < c->rope_dim)
    st = td_config_bad(r, "index_head_dim must not be less than qk_rope_head_dim");
  return st;
}

void td_config_set_kind(const td_config_reader *r, const uint64_t *layers, td_attn_kind kind) {
  for (uint32_t i = 0; i < r->out->n_layers; i++)
    if (td_layers_have(layers, i)) r->out->kind[i] = (uint8_t)kind;
}

td_status td_config_read_layer_names(const td_config_reader *r, const char *key,
                                     const td_layer_name *names, size_t n_names, uint64_t *layers) {
  const cJSON *list = td_json_get(r->root, key);
  if (!cJSON_IsArray(list) || (uint32_t)cJSON_GetArraySize(list) != r->out->n_layers)
    return td_config_fail(r, TD_EFORMAT, "%s must be an array with an entry for each layer", key);
  uint32_t i = 0;
  for (const cJSON *item = list->child; item; item = item->next, i++) {
    const char *name = cJSON_IsString(item) ? item->valuestring : "";
    size_t at = 0;
    while (at < n_names && strcmp(name, names[at].name) != 0)
      at++;
    if (at == n_names) {
      return td_config_fail(r, TD_EFORMAT, "%s must hold \"%s\" or \"%s\"", key, names[0].name,
                            names[1].name);
    }
    if (names[at].is_in) td_layers_add(layers, i);
  }
  return TD_OK;
}

bool td_config_has_no_window(const td_config_reader *r) {
  return cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(r->root, "sliding_window"));
}

td_status td_config_read_windows(const td_config_reader *r, uint32_t fallback) {
  static const td_layer_name names[] = {{"sliding_attention", true}, {"full_attention", false}};
  td_model_config *c = r->out;
  if (td_json_get(r->root, "layer_types")) {
    memset(c->window_layers, 0, sizeof c->window_layers);
    td_status st = td_config_read_layer_names(r, "layer_types", names, 2, c->window_layers);
    if (st != TD_OK) return st;
  }
  if (!td_config_has_no_window(r)) {
    c->window = fallback;
    return td_config_uint(r, r->root, "sliding_window", 1, 1u << 30, &c->window);
  }
  for (uint32_t i = 0; i < c->n_layers; i++) {
    if (td_layers_have(c->window_layers, i))
      return td_config_bad(r, "sliding_window must not be null: layer_types has layers of "
                              "\"sliding_attention\"");
  }
  return TD_OK;
}

static td_status read_sparse_step(const td_config_reader *r) {
  td_model_config *c = r->out;
  uint32_t step = 1;
  td_status st = td_config_uint(r, r->root, "decoder_sparse_step", 1, INT32_MAX, &step);
  if (st != TD_OK) return st;
  for (uint32_t i = 0; i < c->n_layers; i++)
    if ((i + 1) % step == 0) td_layers_add(c->moe_layers, i);
  const cJSON *dense = td_json_get(r->root, "mlp_only_layers");
  if (!dense) return TD_OK;
  if (!cJSON_IsArray(dense)) return td_config_bad(r, "mlp_only_layers must be an array");
  for (const cJSON *item = dense->child; item; item = item->next) {
    int64_t value;
    if (!td_json_whole(item, 0, (int64_t)c->n_layers - 1, &value))
      return td_config_bad(r, "mlp_only_layers must hold indices of layers");
    uint32_t i = (uint32_t)value;
    c->moe_layers[i / 64] &= ~((uint64_t)1 << i % 64);
  }
  return TD_OK;
}

static td_status read_expert_layers(const td_config_reader *r) {
  static const td_layer_name names[] = {{"dense", false}, {"sparse", true}};
  const td_expert_layers kind = r->out->family->expert_layers;
  uint32_t n_dense = r->out->family->n_dense;
  if (kind == TD_EXPERTS_OWN) return TD_OK;
  if (kind == TD_EXPERTS_STEP) return read_sparse_step(r);
  const bool is_stated = kind == TD_EXPERTS_FROM;
  if (is_stated && td_json_get(r->root, "mlp_layer_types") && td_config_takes(r, "mlp_layer_types"))
    return td_config_read_layer_names(r, "mlp_layer_types", names, 2, r->out->moe_layers);
  td_status st = TD_OK;
  if (is_stated && td_config_takes(r, "first_k_dense_replace"))
    st = td_config_uint(r, r->root, "first_k_dense_replace", 0, INT32_MAX, &n_dense);
  for (uint32_t i = n_dense; i < r->out->n_layers && st == TD_OK; i++)
    td_layers_add(r->out->moe_layers, i);
  return st;
}

// What descriptors say of most families.
static td_status read_described(const td_config_reader *r) {
  td_model_config *c = r->out;
  const bool is_indexed = c->attn == TD_ATTN_DSA || c->attn == TD_ATTN_DSA_POOL;
  double scaling = c->routed_scaling > 0 ? c->routed_scaling : 1;
  td_status st = is_indexed ? read_dsa(r) : c->attn == TD_ATTN_MLA ? read_mla(r) : read_head_dim(r);
  if (st == TD_OK) st = read_expert_layers(r);
  if (st == TD_OK && c->family->scaling)
    st = td_config_double(r, r->root, c->family->scaling, 1e-6, 1e6, &scaling);
  c->routed_scaling = (float)scaling;
  return st == TD_OK ? check_groups(r) : st;
}

// Turns partial_rotary into the number of elements of a head.
static td_status set_rotary(const td_config_reader *r) {
  td_model_config *c = r->out;
  const double part = c->partial_rotary > 0 ? c->partial_rotary : 1;
  if (part != 1 && !c->family->has_partial_rotary)
    return td_config_fail(r, TD_EUNSUPPORTED, "partial_rotary_factor %g is not supported", part);
  if (c->rope_dim || c->has_no_rope) return TD_OK; // stated: qk_rope_head_dim
  c->rope_dim = (uint32_t)(c->head_dim * part);
  if (c->rope_dim < 2 || c->rope_dim % 2)
    return td_config_bad(r, "partial_rotary_factor must leave an even part of each head");
  return TD_OK;
}

static const td_family *const families[] = {
#define TD_FAMILY(name) &td_family_##name,
#include "model/families/families.inc"
#undef TD_FAMILY
};

static td_status read_family(const td_config_reader *r, const td_family *family,
                             const char *model_type) {
  td_model_config *c = r->out;
  *c = family->defaults;
  memset(c->kind, c->attn, sizeof c->kind);
  c->family = family;
  c->temperature = c->top_p = 1;
  snprintf(c->arch_name, sizeof c->arch_name, "%s", model_type);
  td_status st = td_config_read_uints(r, family->keys, family->n_keys);
  if (st == TD_OK) st = read_common(r);
  if (st == TD_OK) st = read_described(r);
  if (st == TD_OK && family->read) st = family->read(r);
  if (st == TD_OK) st = set_rotary(r);
  if (st == TD_OK) td_config_find_ignored(r);
  return st;
}

// td_wrapper.body and .head.
#define INSIDE  "model.language_model.", ""
#define OUTSIDE "language_model.model.", "language_model."

static const td_wrapper wrappers[] = {
    {"kimi_k25",
     "kimi_k2",
     OUTSIDE,
     true,
     {"vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector."},
     NULL},
    {"mistral3",
     "mistral4",
     OUTSIDE,
     true,
     {"vision_tower.", "multi_modal_projector.", "model.vision_tower.",
      "model.multi_modal_projector."},
     NULL},
    {"qwen3_vl_moe", "qwen3_vl_moe_text", INSIDE, false, {"model.visual."}, &td_tower_qwen3_vl},
    {"qwen3_omni_moe",
     "qwen3_omni_moe_text",
     "thinker.model.",
     "thinker.",
     false,
     {"thinker.visual.", "thinker.audio_tower.", "talker.", "code2wav."},
     &td_tower_qwen3_omni},
    {"qwen3_5_moe", "qwen3_5_moe_text", INSIDE, false, {"model.visual."}, &td_tower_qwen3_5},
    {"glm4v_moe", "glm4v_moe_text", INSIDE, false, {"model.visual."}, &td_tower_glm4v},
    {"minimax_m3_vl",
     "minimax_m3_vl_text",
     OUTSIDE,
     false,
     {"vision_tower.", "multi_modal_projector.", "patch_merge_mlp.", "model.vision_tower.",
      "model.multi_modal_projector."},
     NULL},
    {"gemma4",
     "gemma4_text",
     INSIDE,
     true,
     {"model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."},
     NULL},
    {"glm5_next", "glm5_next_text", INSIDE, false, {"model.visual."}, &td_tower_glm5},
    {"qwen4_exp", "qwen4_exp_text", INSIDE, false, {"model.visual."}, NULL},
};

// The wrapper with this model_type, or NULL.
static const td_wrapper *find_wrapper(const char *model_type) {
  for (size_t i = 0; i < TD_COUNT(wrappers); i++)
    if (strcmp(wrappers[i].model_type, model_type) == 0) return &wrappers[i];
  return NULL;
}

// Makes r read text_config, which describes the language model.
static td_status enter_wrapper(td_config_reader *r, const td_wrapper *wrapper, const char **type) {
  const cJSON *thinker = td_json_get(r->root, "thinker_config"); // Qwen3-Omni's
  const cJSON *text = td_json_get(thinker ? thinker : r->root, "text_config");
  if (!cJSON_IsObject(text)) return td_config_bad(r, "text_config must be an object");
  r->root = text;
  *type = wrapper->text_model_type;
  return td_config_str(r, text, "model_type", type);
}

// The output matrix is the whole's, so that text_config does not say whether it is tied. (One that
// is in the checkpoint is used anyway.)
static td_status read_tied(const td_config_reader *r, const cJSON *whole,
                           const td_wrapper *wrapper) {
  bool *tied = &r->out->tie_embeddings;
  const bool of_text = cJSON_IsTrue(td_json_get(r->root, "tie_word_embeddings"));
  *tied = wrapper->is_tied;
  td_status st = td_config_bool(r, whole, "tie_word_embeddings", tied);
  if (of_text && !*tied) td_config_add_ignored(r, "tie_word_embeddings");
  return st;
}

// Keys that say how a model computes and that families read beside their tables, and keys that say
// nothing of it.
static const char *const known_keys[] = {"rms_norm_eps",
                                         "tie_word_embeddings",
                                         "attention_bias",
                                         "norm_topk_prob",
                                         "hidden_act",
                                         "rope_theta",
                                         "rope_scaling",
                                         "rope_parameters",
                                         "partial_rotary_factor",
                                         "head_dim",
                                         "q_lora_rank",
                                         "routed_scaling_factor",
                                         "first_k_dense_replace",
                                         "decoder_sparse_step",
                                         "mlp_only_layers",
                                         "moe_layer_freq",
                                         "mlp_layer_types",
                                         "layer_types",
                                         "scoring_func",
                                         "topk_method",
                                         "model_type",
                                         "architectures",
                                         "auto_map",
                                         "dtype",
                                         "torch_dtype",
                                         "use_cache",
                                         "transformers_version",
                                         "initializer_range",
                                         "attention_dropout",
                                         "quantization_config",
                                         "output_router_logits",
                                         "router_aux_loss_coef",
                                         "bos_token_id",
                                         "eos_token_id",
                                         "pad_token_id",
                                         "ep_size",
                                         "pretraining_tp",
                                         "num_experts",
                                         "num_local_experts",
                                         "n_routed_experts"};

static bool is_known(const char *key) {
  for (size_t i = 0; i < TD_COUNT(known_keys); i++)
    if (strcmp(key, known_keys[i]) == 0) return true;
  for (size_t i = 0; i < TD_COUNT(families); i++)
    for (size_t k = 0; k < families[i]->n_keys; k++)
      if (strcmp(key, families[i]->keys[k].key) == 0) return true;
  return false;
}

static uint32_t n_shared_keys(const td_family *family, const cJSON *config) {
  uint32_t n = 0;
  for (size_t k = 0; k < family->n_keys; k++) {
    const td_config_key *key = &family->keys[k];
    n += td_json_get(config, key->key) || (key->alias && td_json_get(config, key->alias));
  }
  return n;
}

// The family of which config has the largest part of the table of keys, and the keys that are in no
// family's table.
static void describe_unknown(const cJSON *config, td_buf *out) {
  const cJSON *text = td_json_get(config, "text_config");
  if (cJSON_IsObject(text)) config = text;
  const td_family *best = families[0];
  uint32_t n_best = 0;
  for (size_t i = 0; i < TD_COUNT(families); i++) {
    const uint32_t n = n_shared_keys(families[i], config);
    if (n * best->n_keys <= n_best * families[i]->n_keys) continue;
    best = families[i];
    n_best = n;
  }
  if (!n_best) return;
  td_buf_printf(out, "; it resembles %s, with %u of %zu keys", best->model_types[0], n_best,
                best->n_keys);
  enum { MOST = 8 };
  uint32_t n = 0;
  for (const cJSON *item = config->child; item; item = item->next) {
    if (cJSON_IsNull(item) || is_known(item->string) || n++ >= MOST) continue;
    td_buf_printf(out, "%s%.40s", n == 1 ? "; no table of keys here has " : ", ", item->string);
  }
  if (n > MOST) td_buf_printf(out, " and %u more", n - MOST);
}

static td_status find_family(td_config_reader *r) {
  const cJSON *const root = r->root;
  const char *type = NULL;
  if (!cJSON_IsObject(r->root)) return td_config_bad(r, "must hold a JSON object");
  td_status st = td_config_str(r, r->root, "model_type", &type);
  if (st != TD_OK) return st;
  if (!type) return td_config_bad(r, "has no model_type, so its architecture is unknown");
  const td_wrapper *wrapper = find_wrapper(type);
  const char *whole = type;
  if (wrapper) st = enter_wrapper(r, wrapper, &type);
  if (st != TD_OK) return st;
  td_buf names = TD_BUF_INIT;
  for (size_t i = 0; i < TD_COUNT(families); i++) {
    for (const char *const *name = families[i]->model_types; *name; name++) {
      if (strcmp(type, *name) == 0) {
        td_buf_free(&names);
        st = read_family(r, families[i], whole);
        r->out->wrapper = wrapper;
        return st == TD_OK && wrapper ? read_tied(r, root, wrapper) : st;
      }
      td_buf_printf(&names, "%s%s", names.len ? ", " : "", *name);
    }
  }
  for (size_t i = 0; i < TD_COUNT(wrappers); i++)
    td_buf_printf(&names, ", %s", wrappers[i].model_type);
  td_buf parts = TD_BUF_INIT;
  describe_unknown(r->root, &parts);
  td_config_fail(r, TD_EUNSUPPORTED, "model_type \"%.60s\" is not supported%s; supported are %s",
                 type, parts.len ? td_buf_text(&parts) : "", td_buf_text(&names));
  td_buf_free(&parts);
  td_buf_free(&names);
  return TD_EUNSUPPORTED;
}

td_status td_config_parse(td_model_config *out, const cJSON *config, const cJSON *generation,
                          const char *dir, td_err *err) {
  td_err local;
  char file[TD_ERR_BYTES];
  snprintf(file, sizeof file, "%s/config.json", dir);
  *out = (td_model_config){.bos_id = -1};
  td_config_reader r = {.root = config, .file = file, .out = out, .err = err ? err : &local};
  td_status st = find_family(&r);
  if (st == TD_OK) {
    const td_config_reader whole = {.root = config, .file = file, .out = out, .err = r.err};
    st = td_config_read_quant(&whole);
    if (out->wrapper) td_config_read_vision(&whole, out->wrapper->tower);
  }
  // What config.json states replaces the family's default; the whole has precedence over
  // text_config.
  const cJSON *const places[] = {r.root, config};
  for (size_t i = r.root == config; i < TD_COUNT(places) && st == TD_OK; i++) {
    r.root = places[i];
    if (td_json_get(r.root, "eos_token_id")) out->n_eos = 0;
    st = td_config_read_token_ids(&r);
  }
  if (st != TD_OK || !generation) return st;
  snprintf(file, sizeof file, "%s/generation_config.json", dir);
  r.root = generation;
  if (!cJSON_IsObject(generation)) return td_config_bad(&r, "must hold a JSON object");
  st = td_config_read_token_ids(&r);
  return st == TD_OK ? td_config_read_sampling(&r) : st;
}

td_status td_model_config_read(td_model_config *out, const char *dir, td_err *err) {
  td_err local;
  if (!err) err = &local;
  cJSON *config = NULL, *generation = NULL;
  td_status st = td_checkpoint_json(&config, dir, "config.json", TD_CONFIG_MAX_BYTES, err);
  if (st == TD_ENOENT && !td_gguf_is(dir)) {
    return td_fail(
        err, TD_ENOENT,
        "%s/config.json: no such file: give the directory of a checkpoint as published, or "
        "a GGUF file",
        dir);
  }
  if (st == TD_OK)
    st = td_checkpoint_json(&generation, dir, "generation_config.json", TD_CONFIG_MAX_BYTES, err);
  if (st == TD_OK || (st == TD_ENOENT && config))
    st = td_config_parse(out, config, generation, dir, err);
  if (st != TD_OK) td_checkpoint_name_error(dir, err);
  cJSON_Delete(config);
  cJSON_Delete(generation);
  return st;
}
