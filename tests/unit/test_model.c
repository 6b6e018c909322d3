// tests/unit/test_model.c - whole checkpoints load, and broken ones are refused by name.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/fs.h"
#include "model/convert_matrix.h"
#include "tandem/kernels.h"
#include "unit/checkpoint_test.h"

#define SHARD(n) "model-0000" #n "-of-00003.safetensors"
#define INDEX    "model.safetensors.index.json"

static void check_data(const ck_tensor *t, const void *data) {
  const uint8_t *bytes = data;
  for (uint64_t i = 0; i < ck_bytes(t); i++) {
    if (bytes[i] != ck_byte(t, i)) fail_msg("%s: byte %llu", t->name, (unsigned long long)i);
  }
}

static void check_weight(checkpoint *ck, const char *name, const td_weight *w) {
  const ck_tensor *t = ck_find(ck, name);
  assert_int_equal(w->rows, t->shape[0]);
  assert_int_equal(w->cols, t->shape[1]);
  assert_string_equal(t->dtype, w->dtype == TD_BF16  ? "BF16"
                                : w->dtype == TD_F32 ? "F32"
                                                     : "F8_E4M3");
  assert_int_equal((uintptr_t)w->data % td_dtype_bytes(w->dtype), 0);
  assert_int_equal(w->scale != NULL, w->dtype == TD_F8E4M3);
  check_data(t, w->data);
}

static void check_vec(checkpoint *ck, const char *name, const td_vec *v) {
  const ck_tensor *t = ck_find(ck, name);
  assert_int_equal(v->n, t->shape[0]);
  assert_int_equal((uintptr_t)v->data % td_dtype_bytes(v->dtype), 0);
  check_data(t, v->data);
}

#define WEIGHT(n, layer, field, suffix)                                                            \
  check_weight(ck, "model.layers." #n "." suffix ".weight", &(layer)->field)
#define VEC(n, layer, field, suffix) check_vec(ck, "model.layers." #n "." suffix, &(layer)->field)

static void check_common(checkpoint *ck, const td_model *m) {
  const td_layer *l0 = td_model_layer(m, 0), *l1 = td_model_layer(m, 1);
  check_weight(ck, "model.embed_tokens.weight", td_model_embed(m));
  td_vec norm = td_model_final_norm(m);
  check_vec(ck, "model.norm.weight", &norm);
  assert_false(l0->is_moe);
  WEIGHT(0, l0, mlp_gate, "mlp.gate_proj");
  WEIGHT(0, l0, mlp_up, "mlp.up_proj");
  WEIGHT(0, l0, mlp_down, "mlp.down_proj");
  VEC(0, l0, attn_norm, "input_layernorm.weight");
  VEC(1, l1, mlp_norm, "post_attention_layernorm.weight");
  assert_true(l1->is_moe);
  WEIGHT(1, l1, router, "mlp.gate");
  WEIGHT(1, l1, gate[0], "mlp.experts.0.gate_proj");
  WEIGHT(1, l1, up[3], "mlp.experts.3.up_proj");
  WEIGHT(1, l1, down[7], "mlp.experts.7.down_proj");
  WEIGHT(1, l1, o, "self_attn.o_proj");
  assert_null(l0->gate);
}

TEST(loads_deepseek) {
  checkpoint whole, *ck = &whole;
  ck_deepseek(ck);
  td_model *m = open_ok(ck);
  const td_layer *l1 = td_model_layer(m, 1);
  check_common(ck, m);
  check_weight(ck, "lm_head.weight", td_model_lm_head(m));
  WEIGHT(1, l1, q_a, "self_attn.q_a_proj");
  WEIGHT(1, l1, q_b, "self_attn.q_b_proj");
  WEIGHT(1, l1, kv_a, "self_attn.kv_a_proj_with_mqa");
  WEIGHT(1, l1, kv_b, "self_attn.kv_b_proj");
  VEC(1, l1, q_a_norm, "self_attn.q_a_layernorm.weight");
  VEC(1, l1, kv_a_norm, "self_attn.kv_a_layernorm.weight");
  WEIGHT(1, l1, mlp_gate, "mlp.shared_experts.gate_proj");
  WEIGHT(1, l1, mlp_up, "mlp.shared_experts.up_proj");
  WEIGHT(1, l1, mlp_down, "mlp.shared_experts.down_proj");
  assert_null(l1->q.data);
  assert_null(l1->q_norm.data);
  assert_null(l1->q_a_bias.data);
  // The correction bias, BF16 in the file, is F32 in the model.
  const ck_tensor *bias = ck_find(ck, "model.layers.1.mlp.gate.e_score_correction_bias");
  for (uint32_t i = 0; i < 8; i++) {
    uint32_t bits = (uint32_t)ck_byte(bias, 2 * i) << 16 | (uint32_t)ck_byte(bias, 2 * i + 1) << 24;
    float want;
    memcpy(&want, &bits, 4);
    assert_true(l1->router_bias[i] == want);
  }
  assert_string_equal(td_model_dir(m), ck->dir);
  assert_string_equal(td_model_name(m), strrchr(ck->dir, '/') + 1);
  td_model_close(m);
  ck_free(ck);
}

TEST(loads_qwen3_tied_with_biases) {
  checkpoint whole, *ck = &whole;
  ck_qwen3(ck);
  ck->single = true;
  ck_drop(ck, "lm_head.weight");
  ck_set(ck, "tie_word_embeddings", "true");
  ck_set(ck, "attention_bias", "true");
  for (int i = 0; i < 2; i++) {
    static const char *const names[] = {"q", "k", "v", "o"};
    static const uint64_t dims[] = {24, 12, 12, 32};
    for (int k = 0; k < 4; k++) {
      char name[64];
      snprintf(name, sizeof name, "model.layers.%d.self_attn.%s_proj.bias", i, names[k]);
      ck_add(ck, name, "F32", dims[k], 0, 0);
    }
  }
  td_model *m = open_ok(ck);
  const td_layer *l0 = td_model_layer(m, 0);
  check_common(ck, m);
  assert_ptr_equal(td_model_lm_head(m), td_model_embed(m));
  assert_true(td_model_config_of(m)->tie_embeddings);
  WEIGHT(0, l0, q, "self_attn.q_proj");
  WEIGHT(0, l0, k, "self_attn.k_proj");
  WEIGHT(0, l0, v, "self_attn.v_proj");
  VEC(0, l0, q_norm, "self_attn.q_norm.weight");
  VEC(0, l0, k_norm, "self_attn.k_norm.weight");
  VEC(0, l0, q_bias, "self_attn.q_proj.bias");
  VEC(0, l0, k_bias, "self_attn.k_proj.bias");
  VEC(0, l0, v_bias, "self_attn.v_proj.bias");
  VEC(0, l0, o_bias, "self_attn.o_proj.bias");
  assert_int_equal(l0->q_bias.dtype, TD_F32);
  td_model_close(m);
  ck_free(ck);
}

// With both matrices in the checkpoint, transformers does not tie them.
TEST(unties_where_both_are_there) {
  checkpoint ck;
  ck_qwen3(&ck);
  ck_set(&ck, "tie_word_embeddings", "true");
  td_model *m = open_ok(&ck);
  assert_false(td_model_config_of(m)->tie_embeddings);
  check_weight(&ck, "lm_head.weight", td_model_lm_head(m));
  td_model_close(m);
  ck_free(&ck);
}

TEST(loads_deepseek_without_q_lora) {
  checkpoint whole, *ck = &whole;
  ck_deepseek(ck);
  ck_set(ck, "q_lora_rank", "null");
  ck_set(ck, "attention_bias", "true");
  ck_set(ck, "n_shared_experts", "0");
  ck_drop(ck, "model.layers.1.mlp.shared_experts.gate_proj.weight");
  ck_drop(ck, "model.layers.1.mlp.shared_experts.up_proj.weight");
  ck_drop(ck, "model.layers.1.mlp.shared_experts.down_proj.weight");
  for (int i = 0; i < 2; i++) {
    static const char *const drop[] = {"q_a_proj.weight", "q_a_layernorm.weight",
                                       "q_b_proj.weight"};
    char name[96];
    for (int k = 0; k < 3; k++) {
      snprintf(name, sizeof name, "model.layers.%d.self_attn.%s", i, drop[k]);
      ck_drop(ck, name);
    }
    snprintf(name, sizeof name, "model.layers.%d.self_attn.q_proj.weight", i);
    ck_add(ck, name, "F32", 20, 32, 0);
    snprintf(name, sizeof name, "model.layers.%d.self_attn.kv_a_proj_with_mqa.bias", i);
    ck_add(ck, name, "BF16", 14, 0, 0);
    snprintf(name, sizeof name, "model.layers.%d.self_attn.o_proj.bias", i);
    ck_add(ck, name, "BF16", 32, 0, 0);
  }
  td_model *m = open_ok(ck);
  const td_layer *l0 = td_model_layer(m, 0), *l1 = td_model_layer(m, 1);
  WEIGHT(0, l0, q, "self_attn.q_proj");
  VEC(0, l0, kv_a_bias, "self_attn.kv_a_proj_with_mqa.bias");
  VEC(0, l0, o_bias, "self_attn.o_proj.bias");
  assert_null(l0->q_a.data);
  assert_null(l0->q_bias.data);
  assert_null(l1->mlp_gate.data);
  td_model_close(m);
  ck_free(ck);
}

// FP8 at edges that no block divides, beside BF16 and F32, with scales of two dtypes.
TEST(loads_mixed_fp8) {
  checkpoint whole, *ck = &whole;
  ck_deepseek(ck);
  ck_set(ck, "quantization_config", "{\"quant_method\": \"fp8\", \"weight_block_size\": [12, 12]}");
  ck_make_fp8(ck, "model.layers.1.self_attn.kv_b_proj.weight", 12, "F32");
  ck_make_fp8(ck, "model.layers.1.mlp.experts.5.down_proj.weight", 12, "BF16");
  strcpy(ck_find(ck, "model.layers.1.self_attn.o_proj.weight")->dtype, "F32");
  td_model *m = open_ok(ck);
  const td_layer *l1 = td_model_layer(m, 1);
  WEIGHT(1, l1, kv_b, "self_attn.kv_b_proj");
  assert_int_equal(l1->kv_b.scale_rows, 12);
  assert_int_equal(l1->kv_b.scale_cols, 12);
  assert_int_equal((uintptr_t)l1->kv_b.scale % sizeof(float), 0);
  const ck_tensor *scale = ck_find(ck, "model.layers.1.self_attn.kv_b_proj.weight_scale_inv");
  assert_int_equal(scale->shape[0] * scale->shape[1], 3); // [28][10] in blocks of 12
  check_data(scale, l1->kv_b.scale);
  WEIGHT(1, l1, down[5], "mlp.experts.5.down_proj");
  const ck_tensor *s5 = ck_find(ck, "model.layers.1.mlp.experts.5.down_proj.weight_scale_inv");
  for (uint32_t i = 0; i < 6; i++) {
    uint32_t bits;
    memcpy(&bits, (const float *)l1->down[5].scale + i, 4);
    assert_int_equal(bits, (uint32_t)ck_byte(s5, 2 * i) << 16 | (uint32_t)ck_byte(s5, 2 * i + 1)
                                                                    << 24);
  }
  WEIGHT(1, l1, o, "self_attn.o_proj");
  WEIGHT(1, l1, down[4], "mlp.experts.4.down_proj");
  td_model_close(m);
  ck_free(ck);
}

TEST(copies_only_what_is_misaligned) {
  checkpoint ck;
  ck_qwen3(&ck);
  ck.single = true;
  // One odd byte in front shifts everything after it.
  ck_add(&ck, "model.layers.0.self_attn.k_scale", "U8", 1, 0, 0);
  ck_tensor odd = ck.tensors[ck.n_tensors - 1];
  memmove(ck.tensors + 1, ck.tensors, (ck.n_tensors - 1) * sizeof odd);
  ck.tensors[0] = odd;
  td_model *m = open_ok(&ck);
  check_common(&ck, m);
  td_model_close(m);
  ck_free(&ck);
}

TEST(ignores_what_no_pass_needs) {
  checkpoint ck;
  ck_deepseek(&ck);
  ck_set(&ck, "num_nextn_predict_layers", "2");
  ck_add(&ck, "model.layers.0.self_attn.rotary_emb.inv_freq", "F32", 2, 0, 0);
  ck_add(&ck, "model.layers.1.self_attn.k_scale", "F32", 1, 0, 0);
  ck_add(&ck, "model.layers.2.eh_proj.weight", "BF16", 32, 64, 0);
  ck_add(&ck, "model.layers.2.embed_tokens.weight", "F16", 24, 32, 0);
  td_model *m = open_ok(&ck);
  assert_int_equal(td_model_config_of(m)->n_mtp_layers, 1); // of the two that might be there
  assert_false(td_model_use_mtp(m));                        // only parts of it
  assert_int_equal(td_model_config_of(m)->n_draft_layers, 0);
  assert_int_equal(td_model_n_tensors(m), ck.n_tensors);
  td_model_close(m);

  ck_add(&ck, "model.layers.4.enorm.weight", "BF16", 32, 0, 0);
  ck_write(&ck);
  REFUSED(&ck, TD_EFORMAT, "model.layers.4.enorm.weight", "is not part of", ".safetensors");
  ck_free(&ck);
}

TEST(counts_parameters) {
  checkpoint ck;
  ck_deepseek(&ck);
  ck_set(&ck, "quantization_config", "{\"quant_method\": \"fp8\", \"weight_block_size\": [8, 8]}");
  ck_make_fp8(&ck, "model.layers.0.mlp.up_proj.weight", 8, "F32");
  td_model *m = open_ok(&ck);
  uint64_t params = 0, bytes = 0, expert_params = 0;
  for (uint32_t i = 0; i < ck.n_tensors; i++) {
    const ck_tensor *t = &ck.tensors[i];
    uint64_t n = t->shape[0] * (t->n_dims == 2 ? t->shape[1] : 1);
    bytes += ck_bytes(t);
    if (strstr(t->name, "scale_inv")) continue;
    params += n;
    if (strstr(t->name, ".experts.")) expert_params += n;
  }
  bytes += 8 * 2; // the correction bias is widened to F32
  td_model_stats s = td_model_stats_of(m);
  assert_int_equal(s.params, params);
  assert_int_equal(s.bytes, bytes);
  uint64_t embed = 24 * 32;
  assert_int_equal(s.active_params, params - embed - expert_params * 6 / 8);
  assert_int_equal(s.active_bytes, bytes - 2 * embed - 2 * expert_params * 6 / 8);
  assert_int_equal(s.bytes_by_dtype[TD_F8E4M3], 48 * 32);
  assert_int_equal(s.bytes_by_dtype[TD_F32], 6 * 4 * 4 + 8 * 4);
  assert_int_equal(s.bytes_by_dtype[TD_BF16], bytes - 48 * 32 - 6 * 4 * 4 - 8 * 4);
  td_model_close(m);
  ck_free(&ck);
}

TEST(refuses_missing_tensors) {
  static const char *const names[] = {
      "model.embed_tokens.weight",
      "model.norm.weight",
      "lm_head.weight",
      "model.layers.0.input_layernorm.weight",
      "model.layers.1.mlp.gate.weight",
      "model.layers.1.mlp.gate.e_score_correction_bias",
      "model.layers.1.mlp.experts.7.down_proj.weight",
      "model.layers.1.mlp.shared_experts.up_proj.weight",
      "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
  };
  for (size_t i = 0; i < TD_COUNT(names); i++) {
    checkpoint ck;
    ck_deepseek(&ck);
    ck_drop(&ck, names[i]);
    ck_write(&ck);
    REFUSED(&ck, TD_EFORMAT, INDEX, names[i], "missing");
    ck_free(&ck);
  }
}

TEST(refuses_extra_tensors) {
  static const char *const names[] = {
      "model.layers.0.self_attn.q_proj.bias", // attention_bias is false
      "model.layers.1.mlp.experts.8.gate_proj.weight",
      "model.layers.9.input_layernorm.weight",
      "model.layers.1.self_attn.o_proj.weight_scale_inv", // of a weight that is not FP8
      "vision.patch_embed.weight",
  };
  for (size_t i = 0; i < TD_COUNT(names); i++) {
    checkpoint ck;
    ck_qwen3(&ck);
    ck_add(&ck, names[i], "BF16", 4, 0, 0)->shard = 1;
    ck_write(&ck);
    REFUSED(&ck, TD_EFORMAT, SHARD(2), names[i], "is not part of a qwen3_moe model");
    ck_free(&ck);
  }
}

TEST(refuses_wrong_shapes) {
  checkpoint ck;
  ck_deepseek(&ck);
  ck_tensor *t = ck_find(&ck, "model.layers.1.self_attn.q_b_proj.weight");
  t->shard = 0;
  ck_tensor whole = *t;
  t->shape[0] = 21;
  ck_write(&ck);
  REFUSED(&ck, TD_EFORMAT, SHARD(1), t->name, "[21, 12]", "[20, 12]");
  *t = whole;
  t->shape[0] = 12, t->shape[1] = 20; // transposed
  ck_write(&ck);
  REFUSED(&ck, TD_EFORMAT, SHARD(1), t->name, "[12, 20]", "[20, 12]");
  *t = whole;
  t->n_dims = 3, t->shape[2] = 1;
  ck_write(&ck);
  REFUSED(&ck, TD_EFORMAT, SHARD(1), t->name, "[20, 12, 1]", "[20, 12]");
  *t = whole;
  t = ck_find(&ck, "model.norm.weight");
  t->n_dims = 2, t->shape[1] = 1;
  ck_write(&ck);
  REFUSED(&ck, TD_EFORMAT, t->name, "[32, 1]", "[32]");
  t->n_dims = 0;
  ck_write(&ck);
  REFUSED(&ck, TD_EFORMAT, t->name, "[]", "[32]");
  ck_free(&ck);
}

TEST(refuses_wrong_dtypes) {
  static const struct {
    const char *name, *dtype;
  } cases[] = {
      {"model.layers.0.mlp.up_proj.weight", "F64"},
      {"model.layers.0.mlp.up_proj.weight", "I8"},
      {"model.layers.1.mlp.experts.2.up_proj.weight", "F8_E5M2"},
      {"model.layers.0.input_layernorm.weight", "F8_E4M3"},
      {"model.embed_tokens.weight", "F8_E4M3"},
      {"model.layers.1.mlp.gate.e_score_correction_bias", "I32"},
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    checkpoint ck;
    ck_deepseek(&ck);
    ck_tensor *t = ck_find(&ck, cases[i].name);
    t->shard = 2;
    strcpy(t->dtype, cases[i].dtype);
    ck_write(&ck);
    REFUSED(&ck, TD_EUNSUPPORTED, SHARD(3), cases[i].name, cases[i].dtype, "dtype");
    ck_free(&ck);
  }
}

TEST(refuses_bad_scales) {
  static const char name[] = "model.layers.0.mlp.down_proj.weight";
  static const char scale[] = "model.layers.0.mlp.down_proj.weight_scale_inv";
  checkpoint ck;
  ck_deepseek(&ck);
  ck_make_fp8(&ck, name, 16, "F32");
  ck_write(&ck);
  REFUSED(&ck, TD_EFORMAT, name, "quantization_config");
  ck_set(&ck, "quantization_config",
         "{\"quant_method\": \"fp8\", \"weight_block_size\": [16, 32]}");
  ck_write(&ck);
  REFUSED(&ck, TD_EFORMAT, scale, "[2, 3]", "[2, 2]");
  strcpy(ck_find(&ck, scale)->dtype, "F8_E5M2");
  ck_find(&ck, scale)->shape[1] = 2;
  ck_write(&ck);
  REFUSED(&ck, TD_EUNSUPPORTED, scale, "F8_E5M2");
  ck_drop(&ck, scale);
  ck_write(&ck);
  REFUSED(&ck, TD_EFORMAT, INDEX, scale, "missing");
  ck_free(&ck);
}

// A layer's experts as two tensors: each expert's matrix is its part of them.
static void drop_experts(checkpoint *ck) {
  for (int e = 0; e < 8; e++) {
    static const char *const names[] = {"gate", "up", "down"};
    for (int k = 0; k < 3; k++) {
      char name[80];
      snprintf(name, sizeof name, "model.layers.1.mlp.experts.%d.%s_proj.weight", e, names[k]);
      ck_drop(ck, name);
    }
  }
}

TEST(reads_fused_experts) {
  checkpoint ck;
  ck_qwen3(&ck);
  drop_experts(&ck);
  ck_add(&ck, "model.layers.1.mlp.experts.gate_up_proj", "BF16", 8, 32, 32)->shard = 0;
  ck_add(&ck, "model.layers.1.mlp.experts.down_proj", "BF16", 8, 32, 16);
  td_model *m = open_ok(&ck);
  const td_layer *layer = td_model_layer(m, 1);
  for (uint32_t e = 0; e < 8; e++) {
    static const uint32_t rows[] = {16, 16, 32}, cols[] = {32, 32, 16}, first[] = {0, 16, 0};
    const td_weight *of[] = {&layer->gate[e], &layer->up[e], &layer->down[e]};
    for (int k = 0; k < 3; k++) {
      const ck_tensor *t = ck_find(&ck, k < 2 ? "model.layers.1.mlp.experts.gate_up_proj"
                                              : "model.layers.1.mlp.experts.down_proj");
      assert_int_equal(of[k]->rows, rows[k]);
      assert_int_equal(of[k]->cols, cols[k]);
      assert_int_equal(of[k]->dtype, TD_BF16);
      const uint64_t at = (e * 32 + first[k]) * cols[k] * 2u;
      for (uint64_t i = 0; i < rows[k] * cols[k] * 2u; i++)
        assert_int_equal(((const uint8_t *)of[k]->data)[i], ck_byte(t, at + i));
    }
  }
  td_model_close(m);

  ck_tensor *fused = ck_find(&ck, "model.layers.1.mlp.experts.gate_up_proj");
  strcpy(fused->dtype, "F8_E4M3");
  ck_write(&ck);
  REFUSED(&ck, TD_EFORMAT, "model.layers.1.mlp.experts.gate_up_proj_scale_inv is missing");
  strcpy(fused->dtype, "I8");
  ck_write(&ck);
  REFUSED(&ck, TD_EUNSUPPORTED, SHARD(1), "model.layers.1.mlp.experts.gate_up_proj", "I8");
  strcpy(fused->dtype, "BF16");
  fused->shape[1] = 30;
  ck_write(&ck);
  REFUSED(&ck, TD_EFORMAT, "model.layers.1.mlp.experts.gate_up_proj", "[8, 32, 32]");
  ck_free(&ck);
}

#define GATE_UP "model.layers.1.mlp.experts.gate_up_proj"

// Scales of a whole expert, of gate and of up, of blocks; the last are those of
// quantization_config.
TEST(reads_fused_fp8_experts) {
  static const struct {
    uint64_t shape[3];
    uint32_t rows, cols, up_from; // a scale's block; the scales before an expert's first of up
    const char *block;
  } cases[] = {
      {{8, 1, 1}, 16, 32, 0, "null"},
      {{8, 0, 0}, 16, 32, 0, "null"},
      {{8, 2, 1}, 16, 32, 1, "null"},
      {{8, 4, 2}, 8, 16, 4, "[8, 16]"},
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    checkpoint ck;
    ck_qwen3(&ck);
    drop_experts(&ck);
    char quant[96];
    snprintf(quant, sizeof quant, "{\"quant_method\": \"fp8\", \"weight_block_size\": %s}",
             cases[i].block);
    ck_set(&ck, "quantization_config", quant);
    const uint64_t *shape = cases[i].shape;
    ck_add(&ck, GATE_UP, "F8_E4M3", 8, 32, 32);
    ck_add(&ck, GATE_UP "_scale_inv", "F32", shape[0], shape[1], shape[2]);
    ck_add(&ck, GATE_UP "_activation_scale", "F32", 8, 0, 0);
    ck_add(&ck, "model.layers.1.mlp.experts.down_proj", "BF16", 8, 32, 16);
    td_model *m = open_ok(&ck);
    const td_layer *layer = td_model_layer(m, 1);
    const float *first = layer->gate[0].scale;
    const size_t each = (shape[1] ? shape[1] : 1) * (shape[2] ? shape[2] : 1);
    for (uint32_t e = 0; e < 8; e++) {
      assert_ptr_equal(layer->gate[e].scale, first + e * each);
      assert_ptr_equal(layer->up[e].scale, first + e * each + cases[i].up_from);
      assert_int_equal(layer->up[e].scale_rows, cases[i].rows);
      assert_int_equal(layer->gate[e].scale_cols, cases[i].cols);
    }
    td_model_close(m);
    ck_find(&ck, GATE_UP "_scale_inv")->shape[0] = 7;
    ck_write(&ck);
    REFUSED(&ck, TD_EFORMAT, GATE_UP "_scale_inv", "do not fit 8 experts of [32, 32]");
    ck_free(&ck);
  }
}

// Experts of gpt-oss in BF16 are transposed by the biases beside them, which these do not fit.
TEST(refuses_pairs_of_other_shapes) {
  checkpoint ck;
  ck_gpt_oss(&ck);
  ck_add(&ck, "model.layers.0.mlp.experts.gate_up_proj", "BF16", 8, 64, 60);
  ck_write(&ck);
  REFUSED(&ck, TD_EUNSUPPORTED, "model.layers.0.mlp.experts.gate_up_proj", "gpt_oss in BF16",
          "beside biases that fit");
  ck_free(&ck);
}

// The language model of a checkpoint with vision, whose tensors are counted.
TEST(reads_a_wrapped_model) {
  checkpoint ck;
  ck_deepseek(&ck);
  ck_wrap(&ck, "kimi_k25", "language_model.");
  ck_add(&ck, "vision_tower.patch_embed.proj.weight", "BF16", 4, 6, 0);
  ck_add(&ck, "mm_projector.proj.0.bias", "F32", 5, 0, 0);
  td_model *m = open_ok(&ck);
  const td_model_config *c = td_model_config_of(m);
  assert_string_equal(c->arch_name, "kimi_k25");
  assert_int_equal(c->n_other_tensors, 2);
  assert_int_equal(c->other_bytes, 4 * 6 * 2 + 5 * 4);
  check_weight(&ck, "language_model.model.layers.1.self_attn.o_proj.weight",
               &td_model_layer(m, 1)->o);
  td_model_close(m);

  ck_add(&ck, "audio_tower.weight", "BF16", 4, 6, 0);
  ck_write(&ck);
  REFUSED(&ck, TD_EFORMAT, "audio_tower.weight", "is not part of");
  ck_free(&ck);
}

TEST(refuses_truncated_and_corrupt_shards) {
  checkpoint ck;
  ck_deepseek(&ck);
  ck_write(&ck);
  static const long lengths[] = {0, 5, 8, 100, 9000};
  for (size_t i = 0; i < TD_COUNT(lengths); i++) {
    ck_truncate(&ck, SHARD(2), lengths[i]);
    REFUSED(&ck, TD_EFORMAT, SHARD(2));
    ck_write(&ck);
  }
  static const char html[] = "<html>404 not found, says the download</html>";
  ck_write_file(&ck, SHARD(2), html, sizeof html);
  REFUSED(&ck, TD_ELIMIT, SHARD(2), "corrupt");
  static const uint8_t noise[64] = {20, 0, 0, 0, 0, 0, 0, 0, '{', '"', 0xFF, 1};
  ck_write_file(&ck, SHARD(2), noise, sizeof noise);
  REFUSED(&ck, TD_EFORMAT, SHARD(2), "header");
  ck_free(&ck);
}

TEST(refuses_files_never_fetched) {
  checkpoint ck;
  ck_qwen3(&ck);
  static const char pointer[] = "version https://git-lfs.github.com/spec/v1\n"
                                "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca2"
                                "4d17e2393\nsize 12345\n";
  static const char *const files[] = {SHARD(2), "config.json", INDEX, "generation_config.json"};
  for (size_t i = 0; i < TD_COUNT(files); i++) {
    ck_write(&ck);
    ck_write_file(&ck, files[i], pointer, sizeof pointer - 1);
    REFUSED(&ck, TD_EFORMAT, files[i], "git-lfs pointer", "git lfs pull");
    ck_write_file(&ck, files[i], "", 0);
    REFUSED(&ck, TD_EFORMAT, files[i], "is empty", "download it again");
    // Opening a FIFO for reading would wait for somebody to write to it.
    char path[256];
    snprintf(path, sizeof path, "%s/%s", ck.dir, files[i]);
    assert_int_equal(remove(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0);
    REFUSED(&ck, TD_EINVAL, files[i], "not a regular file");
    assert_int_equal(remove(path), 0);
    if (symlink("/dev/zero", path) != 0) fail_msg("%s: cannot link", path);
    REFUSED(&ck, TD_EINVAL, files[i], "not a regular file");
    assert_int_equal(remove(path), 0);
  }
  ck_free(&ck);
}

// Replaces text in a file of the checkpoint by other text of the same length.
static void lie(const checkpoint *ck, const char *file, const char *truth, const char *lie_text) {
  char path[256];
  snprintf(path, sizeof path, "%s/%s", ck->dir, file);
  td_buf bytes = TD_BUF_INIT;
  assert_int_equal(td_file_read(&bytes, path, 1 << 20, NULL), TD_OK);
  char *at = memmem(bytes.data, bytes.len, truth, strlen(truth));
  assert_non_null(at);
  assert_int_equal(strlen(truth), strlen(lie_text));
  memcpy(at, lie_text, strlen(truth));
  ck_write_file(ck, file, bytes.data, bytes.len);
  td_buf_free(&bytes);
}

TEST(refuses_lying_headers) {
  checkpoint ck;
  ck_deepseek(&ck);
  ck.single = true;
  static const char file[] = "model.safetensors", first[] = "model.embed_tokens.weight";
  static const char *const lies[][2] = {
      {"\"data_offsets\":[0,1536]", "\"data_offsets\":[0,1535]"},
      {"\"data_offsets\":[0,1536]", "\"data_offsets\":[9,1545]"},
      {"\"shape\":[24,32]", "\"shape\":[24,33]"},
      {"\"dtype\":\"BF16\"", "\"dtype\":\"BF61\""},
      {"\"dtype\":\"BF16\"", "\"dtipe\":\"BF16\""},
  };
  for (size_t i = 0; i < TD_COUNT(lies); i++) {
    ck_write(&ck);
    lie(&ck, file, lies[i][0], lies[i][1]);
    REFUSED(&ck, strstr(lies[i][1], "BF61") ? TD_EUNSUPPORTED : TD_EFORMAT, file, "model.");
  }
  ck_write(&ck);
  lie(&ck, file, "[0,1536]", "[1,1536]");
  REFUSED(&ck, TD_EFORMAT, file, first);
  ck_free(&ck);
}

TEST(refuses_bad_indices) {
  checkpoint ck;
  ck_deepseek(&ck);
  static const char name[] = "model.norm.weight"; // the second tensor, so in the second shard
  static const struct {
    const char *truth, *lie_text;
    td_status status;
    const char *says[3];
  } cases[] = {
      {"model.norm.weight\":\"" SHARD(2),
       "model.norm.weight\":\"model-00004-of-00003.safetensors",
       TD_ENOENT,
       {"model-00004-of-00003.safetensors", name, "incomplete"}},
      {"model.norm.weight\":\"" SHARD(2),
       "model.norm.weight\":\"" SHARD(1),
       TD_EFORMAT,
       {INDEX, name, SHARD(1)}},
      {"model.norm.weight\":\"" SHARD(2),
       "model.norm.weight\":\"../00002-of-00003.safetensors///",
       TD_EFORMAT,
       {INDEX, name, "leads out"}},
      {"\"model.norm.weight\":",
       "\"model.noom.weight\":",
       TD_EFORMAT,
       {INDEX, "model.noom.weight", "no shard"}},
      {"\"weight_map\"", "\"weight-map\"", TD_EFORMAT, {INDEX, "weight_map"}},
      {"\"weight_map\":{", "\"weight_map\":[", TD_EFORMAT, {INDEX}},
      {"\"" SHARD(2) "\"",
       "1234567890123456789012345678901234",
       TD_EFORMAT,
       {INDEX, name, "gives no file name"}},
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    ck_write(&ck);
    lie(&ck, INDEX, cases[i].truth, cases[i].lie_text);
    REFUSED(&ck, cases[i].status, cases[i].says[0], cases[i].says[1], cases[i].says[2]);
  }
  ck_free(&ck);
}

TEST(refuses_one_tensor_in_two_shards) {
  checkpoint ck;
  ck_deepseek(&ck);
  ck_add(&ck, "model.norm.weight", "BF16", 32, 0, 0)->shard = 2; // shard 1 has it already
  ck_write(&ck);
  REFUSED(&ck, TD_EFORMAT, SHARD(2), SHARD(3), "model.norm.weight");
  ck_free(&ck);
}

TEST(refuses_incomplete_directories) {
  checkpoint ck;
  ck_deepseek(&ck);
  REFUSED(&ck, TD_ENOENT, "config.json", "no such file");
  ck_write_file(&ck, "config.json", "{", 1);
  REFUSED(&ck, TD_EFORMAT, "config.json");
  cJSON *config = ck.config;
  ck_write(&ck);
  char path[128];
  snprintf(path, sizeof path, "%s/" INDEX, ck.dir);
  assert_int_equal(remove(path), 0);
  REFUSED(&ck, TD_ENOENT, "model.safetensors", INDEX);
  ck.config = config;
  ck_set(&ck, "model_type", "\"abacus\"");
  ck_write(&ck);
  REFUSED(&ck, TD_EUNSUPPORTED, "config.json", "abacus", "deepseek_v3", "qwen3_moe");
  ck_free(&ck);
  td_model *m;
  td_err err;
  assert_int_equal(td_model_open(&m, "/nonexistent/model", &err), TD_ENOENT);
  assert_non_null(strstr(err.msg, "/nonexistent/model"));
  td_model_close(NULL);
}

// Q8_0's (1 + 2^-10) * 127 and F16's 2^-24 need more than F16's 11 bits, or BF16's.
TEST(halves_of_kv_b_are_joined_exactly) {
  enum { COLS = 32, BYTES = 34 };
  uint8_t k[BYTES] = {0x01, 0x3c}; // the scale
  uint16_t v[COLS];
  for (int i = 0; i < COLS; i++) {
    k[2 + i] = (uint8_t)(127 - i);
    v[i] = (uint16_t)(i + 1);
  }
  td_kernels_init_any();
  td_kv_b_parts p = {.k = k, .v = v, .k_dtype = TD_Q8_0, .v_dtype = TD_F16};
  p.dtype = td_kv_b_dtype(p.k_dtype, p.v_dtype);
  assert_int_equal(p.dtype, TD_F32);
  assert_int_equal(td_kv_b_dtype(TD_BF16, TD_F16), TD_F32);
  assert_int_equal(td_kv_b_dtype(TD_F16, TD_F16), TD_F16);
  assert_int_equal(td_kv_b_dtype(TD_BF16, TD_BF16), TD_BF16);
  float out[2 * COLS];
  p.heads = p.latent = 1, p.nope = p.v_dim = COLS; // k [1][1][32], v [1][32][1]
  assert_true(td_kv_b_join(&p, out));
  for (int i = 0; i < COLS; i++) {
    assert_true(out[i] == (1 + 0x1p-10f) * (float)(127 - i));
    assert_true(out[COLS + i] == (float)(i + 1) * 0x1p-24f);
  }
}

TEST(lists_tensors) {
  checkpoint ck;
  ck_qwen3(&ck);
  td_model *m = open_ok(&ck);
  assert_int_equal(td_model_n_tensors(m), ck.n_tensors);
  for (size_t i = 0; i < ck.n_tensors; i++) {
    td_tensor_info info = td_model_tensor(m, i);
    const ck_tensor *t = ck_find(&ck, info.name);
    assert_string_equal(info.dtype, t->dtype);
    assert_int_equal(info.n_dims, t->n_dims);
    assert_int_equal(info.shape[0], t->shape[0]);
    assert_int_equal(info.n_bytes, ck_bytes(t));
    assert_int_equal(info.file[10] - '1', t->shard);
  }
  td_model_close(m);
  ck_free(&ck);
}
