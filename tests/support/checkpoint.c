#include "support/checkpoint.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/fs.h"

#define INDEX_FILE "model.safetensors.index.json"

static const char deepseek_config[] =
    "{\"model_type\": \"deepseek_v3\", \"vocab_size\": 24, \"hidden_size\": 32,"
    " \"intermediate_size\": 48, \"moe_intermediate_size\": 16, \"num_hidden_layers\": 2,"
    " \"num_attention_heads\": 2, \"n_routed_experts\": 8, \"num_experts_per_tok\": 2,"
    " \"n_shared_experts\": 1, \"n_group\": 2, \"topk_group\": 1, \"first_k_dense_replace\": 1,"
    " \"q_lora_rank\": 12, \"kv_lora_rank\": 10, \"qk_rope_head_dim\": 4, \"qk_nope_head_dim\": 6,"
    " \"v_head_dim\": 8, \"num_nextn_predict_layers\": 1}";

static const char qwen3_config[] =
    "{\"model_type\": \"qwen3_moe\", \"vocab_size\": 24, \"hidden_size\": 32,"
    " \"intermediate_size\": 48, \"moe_intermediate_size\": 16, \"num_hidden_layers\": 2,"
    " \"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"head_dim\": 6, \"num_experts\": 8,"
    " \"num_experts_per_tok\": 2, \"mlp_only_layers\": [0]}";

static const char gpt_oss_config[] =
    "{\"model_type\": \"gpt_oss\", \"vocab_size\": 208, \"hidden_size\": 32,"
    " \"intermediate_size\": 32, \"num_hidden_layers\": 2, \"num_attention_heads\": 4,"
    " \"num_key_value_heads\": 2, \"head_dim\": 8, \"num_local_experts\": 8,"
    " \"num_experts_per_tok\": 2, \"sliding_window\": 9, \"max_position_embeddings\": 2048}";

static const char qwen3_next_config[] =
    "{\"model_type\": \"qwen3_next\", \"vocab_size\": 208, \"hidden_size\": 32,"
    " \"moe_intermediate_size\": 16, \"shared_expert_intermediate_size\": 16,"
    " \"num_hidden_layers\": 3, \"full_attention_interval\": 3, \"num_attention_heads\": 4,"
    " \"num_key_value_heads\": 2, \"head_dim\": 8, \"linear_num_key_heads\": 1,"
    " \"linear_num_value_heads\": 2, \"linear_key_head_dim\": 8, \"linear_value_head_dim\": 8,"
    " \"num_experts\": 8, \"num_experts_per_tok\": 2, \"max_position_embeddings\": 2048}";

static void require(bool ok, const char *what) {
  if (ok) return;
  perror(what);
  abort();
}

static void start(checkpoint *ck, const char *config) {
  *ck = (checkpoint){0};
  const char *tmp = getenv("TMPDIR");
  snprintf(ck->dir, sizeof ck->dir, "%.40s/td-model-XXXXXX", tmp ? tmp : "/tmp");
  require(mkdtemp(ck->dir) != NULL, "mkdtemp");
  ck->config = cJSON_Parse(config);
  require(ck->config != NULL, "configuration");
}

ck_tensor *ck_add(checkpoint *ck, const char *name, const char *dtype, uint64_t d0, uint64_t d1,
                  uint64_t d2) {
  require(ck->n_tensors < CK_MAX_TENSORS, "CK_MAX_TENSORS");
  ck_tensor *t = &ck->tensors[ck->n_tensors];
  *t = (ck_tensor){.shape = {d0, d1, d2}, .shard = ck->n_tensors % CK_SHARDS};
  snprintf(t->name, sizeof t->name, "%s", name);
  snprintf(t->dtype, sizeof t->dtype, "%s", dtype);
  while (t->n_dims < 3 && t->shape[t->n_dims])
    t->n_dims++;
  ck->n_tensors++;
  return t;
}

void ck_add_text(checkpoint *ck, const char *name, const char *text) {
  ck_add(ck, name, "U8", strlen(text), 0, 0)->text = text;
}

static void add(checkpoint *ck, int layer, const char *name, uint64_t d0, uint64_t d1) {
  char full[128];
  snprintf(full, sizeof full, "model.layers.%d.%s", layer, name);
  ck_add(ck, full, "BF16", d0, d1, 0);
}

static void add_experts(checkpoint *ck, int layer) {
  for (int e = 0; e < 8; e++) {
    char name[64];
    snprintf(name, sizeof name, "mlp.experts.%d.gate_proj.weight", e);
    add(ck, layer, name, 16, 32);
    snprintf(name, sizeof name, "mlp.experts.%d.up_proj.weight", e);
    add(ck, layer, name, 16, 32);
    snprintf(name, sizeof name, "mlp.experts.%d.down_proj.weight", e);
    add(ck, layer, name, 32, 16);
  }
  add(ck, layer, "mlp.gate.weight", 8, 32);
}

static void add_common(checkpoint *ck) {
  ck_add(ck, "model.embed_tokens.weight", "BF16", 24, 32, 0);
  ck_add(ck, "model.norm.weight", "BF16", 32, 0, 0);
  ck_add(ck, "lm_head.weight", "BF16", 24, 32, 0);
  add(ck, 0, "mlp.gate_proj.weight", 48, 32);
  add(ck, 0, "mlp.up_proj.weight", 48, 32);
  add(ck, 0, "mlp.down_proj.weight", 32, 48);
  add_experts(ck, 1);
  for (int i = 0; i < 2; i++) {
    add(ck, i, "input_layernorm.weight", 32, 0);
    add(ck, i, "post_attention_layernorm.weight", 32, 0);
  }
}

void ck_deepseek(checkpoint *ck) {
  start(ck, deepseek_config);
  add_common(ck);
  add(ck, 1, "mlp.gate.e_score_correction_bias", 8, 0);
  add(ck, 1, "mlp.shared_experts.gate_proj.weight", 16, 32);
  add(ck, 1, "mlp.shared_experts.up_proj.weight", 16, 32);
  add(ck, 1, "mlp.shared_experts.down_proj.weight", 32, 16);
  for (int i = 0; i < 2; i++) {
    add(ck, i, "self_attn.q_a_proj.weight", 12, 32);
    add(ck, i, "self_attn.q_a_layernorm.weight", 12, 0);
    add(ck, i, "self_attn.q_b_proj.weight", 20, 12);
    add(ck, i, "self_attn.kv_a_proj_with_mqa.weight", 14, 32);
    add(ck, i, "self_attn.kv_a_layernorm.weight", 10, 0);
    add(ck, i, "self_attn.kv_b_proj.weight", 28, 10);
    add(ck, i, "self_attn.o_proj.weight", 32, 16);
  }
}

void ck_qwen3(checkpoint *ck) {
  start(ck, qwen3_config);
  add_common(ck);
  for (int i = 0; i < 2; i++) {
    add(ck, i, "self_attn.q_proj.weight", 24, 32);
    add(ck, i, "self_attn.k_proj.weight", 12, 32);
    add(ck, i, "self_attn.v_proj.weight", 12, 32);
    add(ck, i, "self_attn.o_proj.weight", 32, 24);
    add(ck, i, "self_attn.q_norm.weight", 6, 0);
    add(ck, i, "self_attn.k_norm.weight", 6, 0);
  }
}

// Blocks and scales of a layer's experts.
static void add_mxfp4(checkpoint *ck, int layer, const char *name, uint64_t rows) {
  char full[128];
  snprintf(full, sizeof full, "model.layers.%d.mlp.experts.%s_blocks", layer, name);
  ck_tensor *blocks = ck_add(ck, full, "U8", 8, rows, 1);
  blocks->shape[3] = 16;
  blocks->n_dims = 4;
  snprintf(full, sizeof full, "model.layers.%d.mlp.experts.%s_scales", layer, name);
  ck_add(ck, full, "U8", 8, rows, 1);
}

void ck_gpt_oss(checkpoint *ck) {
  start(ck, gpt_oss_config);
  ck->single = ck->is_random = true;
  ck_add(ck, "model.embed_tokens.weight", "BF16", 208, 32, 0);
  ck_add(ck, "model.norm.weight", "BF16", 32, 0, 0);
  ck_add(ck, "lm_head.weight", "BF16", 208, 32, 0);
  for (int i = 0; i < 2; i++) {
    add(ck, i, "input_layernorm.weight", 32, 0);
    add(ck, i, "post_attention_layernorm.weight", 32, 0);
    static const struct {
      const char *name;
      uint64_t rows;
    } of_attention[] = {{"q_proj", 32}, {"k_proj", 16}, {"v_proj", 16}, {"o_proj", 32}};
    for (size_t m = 0; m < TD_COUNT(of_attention); m++) {
      char name[64];
      snprintf(name, sizeof name, "self_attn.%s.weight", of_attention[m].name);
      add(ck, i, name, of_attention[m].rows, 32);
      snprintf(name, sizeof name, "self_attn.%s.bias", of_attention[m].name);
      add(ck, i, name, of_attention[m].rows, 0);
    }
    add(ck, i, "self_attn.sinks", 4, 0);
    add(ck, i, "mlp.router.weight", 8, 32);
    add(ck, i, "mlp.router.bias", 8, 0);
    add_mxfp4(ck, i, "gate_up_proj", 64);
    add(ck, i, "mlp.experts.gate_up_proj_bias", 8, 64);
    add_mxfp4(ck, i, "down_proj", 32);
    add(ck, i, "mlp.experts.down_proj_bias", 8, 32);
  }
}

static void add_delta_net(checkpoint *ck, int layer) {
  add(ck, layer, "linear_attn.in_proj_qkvz.weight", 48, 32);
  add(ck, layer, "linear_attn.in_proj_ba.weight", 4, 32);
  add(ck, layer, "linear_attn.conv1d.weight", 32, 1);
  ck_tensor *filter = &ck->tensors[ck->n_tensors - 1];
  filter->shape[filter->n_dims++] = 4;
  add(ck, layer, "linear_attn.A_log", 2, 0);
  add(ck, layer, "linear_attn.dt_bias", 2, 0);
  add(ck, layer, "linear_attn.norm.weight", 8, 0);
  add(ck, layer, "linear_attn.out_proj.weight", 32, 16);
}

static void add_gated_attention(checkpoint *ck, int layer) {
  add(ck, layer, "self_attn.q_proj.weight", 64, 32);
  add(ck, layer, "self_attn.k_proj.weight", 16, 32);
  add(ck, layer, "self_attn.v_proj.weight", 16, 32);
  add(ck, layer, "self_attn.o_proj.weight", 32, 32);
  add(ck, layer, "self_attn.q_norm.weight", 8, 0);
  add(ck, layer, "self_attn.k_norm.weight", 8, 0);
}

void ck_qwen3_next(checkpoint *ck) {
  start(ck, qwen3_next_config);
  ck->single = ck->is_random = true;
  ck_add(ck, "model.embed_tokens.weight", "BF16", 208, 32, 0);
  ck_add(ck, "model.norm.weight", "BF16", 32, 0, 0);
  ck_add(ck, "lm_head.weight", "BF16", 208, 32, 0);
  for (int i = 0; i < 3; i++) {
    add(ck, i, "input_layernorm.weight", 32, 0);
    add(ck, i, "post_attention_layernorm.weight", 32, 0);
    if (i < 2) {
      add_delta_net(ck, i);
    } else {
      add_gated_attention(ck, i);
    }
    add_experts(ck, i);
    add(ck, i, "mlp.shared_expert.gate_proj.weight", 16, 32);
    add(ck, i, "mlp.shared_expert.up_proj.weight", 16, 32);
    add(ck, i, "mlp.shared_expert.down_proj.weight", 32, 16);
    add(ck, i, "mlp.shared_expert_gate.weight", 1, 32);
  }
}

void ck_free(checkpoint *ck) {
  DIR *dir = opendir(ck->dir);
  require(dir != NULL, ck->dir);
  for (struct dirent *e; (e = readdir(dir));) {
    if (e->d_name[0] != '.') unlinkat(dirfd(dir), e->d_name, 0);
  }
  closedir(dir);
  require(rmdir(ck->dir) == 0, ck->dir);
  cJSON_Delete(ck->config);
  cJSON_Delete(ck->generation);
}

void ck_set(checkpoint *ck, const char *key, const char *json) {
  cJSON *value = cJSON_Parse(json);
  require(value != NULL, json);
  cJSON_DeleteItemFromObjectCaseSensitive(ck->config, key);
  cJSON_AddItemToObject(ck->config, key, value);
}

void ck_wrap(checkpoint *ck, const char *model_type, const char *prefix) {
  cJSON *whole = cJSON_CreateObject();
  require(whole && cJSON_AddStringToObject(whole, "model_type", model_type), model_type);
  cJSON_AddItemToObject(whole, "text_config", ck->config);
  ck->config = whole;
  for (uint32_t i = 0; i < ck->n_tensors; i++) {
    char name[sizeof ck->tensors[i].name];
    const int n = snprintf(name, sizeof name, "%s%s", prefix, ck->tensors[i].name);
    require(n < (int)sizeof name, name);
    strcpy(ck->tensors[i].name, name);
  }
}

ck_tensor *ck_find(checkpoint *ck, const char *name) {
  for (uint32_t i = 0; i < ck->n_tensors; i++) {
    if (strcmp(ck->tensors[i].name, name) == 0) return &ck->tensors[i];
  }
  require(false, name);
  return NULL;
}

void ck_drop(checkpoint *ck, const char *name) {
  ck_tensor *t = ck_find(ck, name);
  size_t behind = (size_t)(&ck->tensors[ck->n_tensors] - (t + 1));
  memmove(t, t + 1, behind * sizeof *t);
  ck->n_tensors--;
}

void ck_make_fp8(checkpoint *ck, const char *name, uint32_t block, const char *scale_dtype) {
  ck_tensor *t = ck_find(ck, name);
  strcpy(t->dtype, "F8_E4M3");
  char scale[160];
  snprintf(scale, sizeof scale, "%s_scale_inv", name);
  ck_add(ck, scale, scale_dtype, (t->shape[0] + block - 1) / block,
         (t->shape[1] + block - 1) / block, 0);
}

uint64_t ck_bytes(const ck_tensor *t) {
  static const struct {
    const char *dtype;
    uint64_t bytes;
  } sizes[] = {{"F64", 8}, {"I64", 8}, {"F32", 4}, {"I32", 4}, {"BF16", 2}, {"F16", 2}};
  uint64_t n = 1;
  for (size_t i = 0; i < TD_COUNT(sizes); i++) {
    if (strcmp(t->dtype, sizes[i].dtype) == 0) n = sizes[i].bytes;
  }
  for (uint32_t i = 0; i < t->n_dims; i++)
    n *= t->shape[i];
  return n;
}

uint8_t ck_byte(const ck_tensor *t, uint64_t idx) {
  uint32_t h = 17;
  for (const char *p = t->name; *p; p++)
    h = h * 31 + (uint8_t)*p;
  return (uint8_t)((h + idx * 7) % 61); // a small positive number in every dtype
}

void ck_write_file(const checkpoint *ck, const char *file, const void *bytes, size_t len) {
  char path[256];
  snprintf(path, sizeof path, "%s/%s", ck->dir, file);
  require(td_file_write(path, bytes, len, NULL) == TD_OK, path);
}

void ck_truncate(const checkpoint *ck, const char *file, long len) {
  char path[256];
  snprintf(path, sizeof path, "%s/%s", ck->dir, file);
  require(truncate(path, len) == 0, path);
}

static void shard_name(const checkpoint *ck, uint32_t shard, char out[64]) {
  if (ck->single) {
    strcpy(out, "model.safetensors");
  } else {
    snprintf(out, 64, "model-%05u-of-%05u.safetensors", shard + 1, (unsigned)CK_SHARDS);
  }
}

// Numbers in [-0.5, 0.5), of BF16; codes of MXFP4, whose scales are 1/16 or 1/8.
static void add_random(const ck_tensor *t, td_buf *out) {
  const bool is_scale = strstr(t->name, "_scales") != NULL, is_byte = strcmp(t->dtype, "U8") == 0;
  uint32_t h = 17;
  for (const char *p = t->name; *p; p++)
    h = h * 31 + (uint8_t)*p;
  for (uint64_t k = 0; k < ck_bytes(t); k += is_byte ? 1 : 2) {
    h = h * 1664525 + 1013904223;
    const float f = (float)(h >> 8) / (1 << 24) - 0.5f;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if (is_byte) {
      td_buf_char(out, (char)(is_scale ? 123 + (h >> 31) : h >> 24));
    } else {
      td_buf_add(out, (const char *)&bits + 2, 2);
    }
  }
}

static void write_shard(const checkpoint *ck, uint32_t shard) {
  td_buf header = TD_BUF_INIT, data = TD_BUF_INIT, file = TD_BUF_INIT;
  td_buf_str(&header, "{\"__metadata__\":{\"format\":\"pt\"}");
  for (uint32_t i = 0; i < ck->n_tensors; i++) {
    const ck_tensor *t = &ck->tensors[i];
    if (!ck->single && t->shard != shard) continue;
    uint64_t begin = data.len;
    if (ck->is_random) add_random(t, &data);
    for (uint64_t k = 0; !ck->is_random && k < ck_bytes(t); k++)
      td_buf_char(&data, t->text ? t->text[k] : (char)ck_byte(t, k));
    td_buf_printf(&header, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->name, t->dtype);
    for (uint32_t d = 0; d < t->n_dims; d++)
      td_buf_printf(&header, "%s%llu", d ? "," : "", (unsigned long long)t->shape[d]);
    td_buf_printf(&header, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)begin,
                  (unsigned long long)data.len);
  }
  td_buf_str(&header, "}");
  while (header.len % 8)
    td_buf_char(&header, ' ');
  uint64_t len = header.len;
  td_buf_add(&file, &len, sizeof len);
  td_buf_add(&file, header.data, header.len);
  td_buf_add(&file, data.data, data.len);
  char name[64];
  shard_name(ck, shard, name);
  ck_write_file(ck, name, file.data, file.len);
  td_buf_free(&header);
  td_buf_free(&data);
  td_buf_free(&file);
}

static void write_index(const checkpoint *ck) {
  td_buf index = TD_BUF_INIT;
  td_buf_str(&index, "{\"metadata\":{\"total_size\":1},\"weight_map\":{");
  for (uint32_t i = 0; i < ck->n_tensors; i++) {
    char name[64];
    shard_name(ck, ck->tensors[i].shard, name);
    td_buf_printf(&index, "%s\"%s\":\"%s\"", i ? "," : "", ck->tensors[i].name, name);
  }
  td_buf_str(&index, "}}");
  ck_write_file(ck, INDEX_FILE, index.data, index.len);
  td_buf_free(&index);
}

static void write_json(const checkpoint *ck, const char *file, const cJSON *value) {
  if (!value) return;
  char *text = cJSON_Print(value);
  ck_write_file(ck, file, text, strlen(text));
  cJSON_free(text);
}

void ck_write(const checkpoint *ck) {
  for (uint32_t i = 0; i < (ck->single ? 1 : CK_SHARDS); i++)
    write_shard(ck, i);
  if (!ck->single) write_index(ck);
  write_json(ck, "config.json", ck->config);
  write_json(ck, "generation_config.json", ck->generation);
}

td_status ck_open(const checkpoint *ck, td_model **out, td_err *err) {
  return td_model_open(out, ck->dir, err);
}
