// tests/unit/test_model_quant.c - quantization_config and the tensors of quantized matrices: what
// is read, what it becomes, and what is refused.
// CTest: no-tsan

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "base/json_parse.h"
#include "model/convert.h"
#include "model/quant_scheme.h"
#include "unit/checkpoint_test.h"

#define CT(format, weights, rest)                                                                  \
  "{\"quant_method\": \"compressed-tensors\", \"format\": \"" format                               \
  "\", \"config_groups\": {\"group_0\": {\"targets\": [\"Linear\"], \"input_activations\": null, " \
  "\"weights\": " weights "}}" rest "}"

#define INT4_G16                                                                                   \
  "{\"num_bits\": 4, \"type\": \"int\", \"strategy\": \"group\", \"group_size\": 16,"              \
  " \"symmetric\": true, \"actorder\": null, \"block_structure\": null, \"dynamic\": false}"

static td_status parse(const char *quant, td_quant **out, td_err *err) {
  char text[4096];
  snprintf(text, sizeof text, "{\"quantization_config\": %s}", quant);
  cJSON *root;
  assert_int_equal(td_json_parse(&root, text, strlen(text), TD_JSON_MAX_DEPTH, err), TD_OK);
  td_status st = td_quant_open(out, root, "dir/config.json", err);
  cJSON_Delete(root);
  return st;
}

static td_quant *parse_ok(const char *quant) {
  td_quant *q;
  td_err err;
  if (parse(quant, &q, &err) != TD_OK) fail_msg("%s: %s", quant, err.msg);
  return q;
}

static const struct {
  const char *config;
  td_quant_scheme want;
} methods[] = {
    {"{\"quant_method\": \"fp8\"}", {TD_QUANT_FP8, 128, 128, true, 0}},
    {"{\"quant_method\": \"fp8\", \"fmt\": \"e4m3\", \"weight_block_size\": [128, 64]}",
     {TD_QUANT_FP8, 128, 64, true, 0}},
    // as MiniMax-M2 and Mistral Small 4 have it
    {"{\"quant_method\": \"fp8\", \"fmt\": \"float8_e4m3fn\", \"weight_block_size\": [128, 128]}",
     {TD_QUANT_FP8, 128, 128, true, 0}},
    {"{\"quant_method\": \"fp8\", \"weight_block_size\": null}", {TD_QUANT_FP8, 0, 0, true, 0}},
    {CT("pack-quantized", INT4_G16, ""), {TD_QUANT_PACKED, 1, 16, true, 0}},
    {CT("pack-quantized",
        "{\"num_bits\": 4, \"strategy\": \"channel\", \"group_size\": -1, \"symmetric\": false,"
        " \"actorder\": \"weight\"}",
        ", \"sparsity_config\": {}"),
     {TD_QUANT_PACKED, 1, 0, false, 0}},
    {CT("int-quantized", "{\"num_bits\": 8, \"strategy\": \"channel\"}", ""),
     {TD_QUANT_INT, 1, 0, true, 0}},
    {CT("naive-quantized", "{\"num_bits\": 8, \"strategy\": \"tensor\"}", ""),
     {TD_QUANT_INT, 0, 0, true, 0}},
    {CT("float-quantized", "{\"type\": \"float\", \"strategy\": \"channel\"}", ""),
     {TD_QUANT_FLOAT, 1, 0, true, 0}},
    {CT("float-quantized",
        "{\"type\": \"float\", \"strategy\": \"block\", \"block_structure\": [128, 32]}", ""),
     {TD_QUANT_FLOAT, 128, 32, true, 0}},
    {CT("nvfp4-pack-quantized",
        "{\"type\": \"float\", \"num_bits\": 4, \"strategy\": \"tensor_group\","
        " \"group_size\": 16}",
        ""),
     {TD_QUANT_NVFP4, 1, 16, true, 0}},
    {CT("mxfp4-pack-quantized",
        "{\"type\": \"float\", \"num_bits\": 4, \"group_size\": 32, \"scale_dtype\": "
        "\"torch.uint8\"}",
        ""),
     {TD_QUANT_MXFP4_CT, 1, 32, true, 0}},
    {"{\"quant_method\": \"mxfp4\", \"modules_to_not_convert\": [\"lm_head\"]}",
     {TD_QUANT_MXFP4, 1, 32, true, 0}},
    {"{\"quant_method\": \"modelopt\", \"quant_algo\": \"NVFP4\"}",
     {TD_QUANT_MODELOPT, 1, 16, true, 0}},
    {"{\"quant_method\": \"gptq\", \"bits\": 4, \"group_size\": 128, \"desc_act\": true,"
     " \"sym\": true, \"checkpoint_format\": \"gptq\", \"dynamic\": {}}",
     {TD_QUANT_GPTQ, 1, 128, false, 0x11111111}},
    {"{\"quant_method\": \"gptq\", \"bits\": 4, \"group_size\": -1,"
     " \"checkpoint_format\": \"gptq_v2\"}",
     {TD_QUANT_GPTQ, 1, 0, false, 0}},
    {"{\"quant_method\": \"awq\", \"bits\": 4, \"group_size\": 64, \"version\": \"gemm\","
     " \"zero_point\": true, \"modules_to_not_convert\": null}",
     {TD_QUANT_AWQ, 1, 64, false, 0}},
    {"{\"quant_method\": \"awq\", \"bits\": 4, \"zero_point\": false}",
     {TD_QUANT_AWQ, 1, 0, true, 0}},
    {"{\"quant_method\": \"gptq\", \"bits\": 8, \"group_size\": 32}",
     {TD_QUANT_GPTQ8, 1, 32, false, 0x01010101}},
    {"{\"quant_method\": \"auto-round\", \"bits\": 4, \"group_size\": 128, \"sym\": true,"
     " \"packing_format\": \"auto_round:auto_gptq\"}",
     {TD_QUANT_GPTQ, 1, 128, false, 0x11111111}},
    {"{\"quant_method\": \"auto-round\", \"packing_format\": \"auto_round:auto_gptq:exllamav2\"}",
     {TD_QUANT_GPTQ, 1, 0, false, 0x11111111}},
    {"{\"quant_method\": \"auto-round\", \"packing_format\": \"auto_round:gptqmodel\"}",
     {TD_QUANT_GPTQ, 1, 0, false, 0}},
    {"{\"quant_method\": \"intel/auto-round\", \"backend\": \"auto_round:exllamav2\"}",
     {TD_QUANT_GPTQ, 1, 0, false, 0}},
    {"{\"quant_method\": \"auto-round\", \"packing_format\": \"auto_round:auto_awq\"}",
     {TD_QUANT_AWQ, 1, 0, false, 0}},
    {CT("pack-quantized", "{\"num_bits\": 8, \"strategy\": \"tensor\"}", ""),
     {TD_QUANT_PACKED8, 0, 0, true, 0}},
    {CT("int-quantized", "{\"num_bits\": 4, \"strategy\": \"channel\"}", ""),
     {TD_QUANT_INT, 1, 0, true, 0}},
    {CT("mxfp8-quantized", "{\"num_bits\": 8, \"type\": \"float\", \"group_size\": 32}", ""),
     {TD_QUANT_FLOAT, 1, 32, true, 0}},
    {"{\"quant_method\": \"mxfp8\"}", {TD_QUANT_FP8, 1, 32, true, 0}},
    {"{\"quant_method\": \"modelopt\", \"quant_algo\": \"W4A16_NVFP4\"}",
     {TD_QUANT_MODELOPT, 1, 16, true, 0}},
    {"{\"quant_method\": \"modelopt\", \"quant_algo\": \"MIXED_PRECISION\", \"quantized_layers\":"
     " {\"model.layers.0.mlp.up\": {\"quant_algo\": \"FP8\"},"
     " \"model.layers.0.mlp\": {\"quant_algo\": \"FP8_PB_WO\"}}}",
     {TD_QUANT_FP8, 128, 128, true, 0}},
    {"{\"quant_method\": \"modelopt\", \"quant_algo\": \"FP8\"}", {TD_QUANT_FLOAT, 0, 0, true, 0}},
    {"{\"quant_method\": \"modelopt\", \"quantization\": {\"quant_algo\": "
     "\"FP8_PER_CHANNEL_PER_TOKEN\"}}",
     {TD_QUANT_FLOAT, 1, 0, true, 0}},
    {"{\"quant_method\": \"modelopt\", \"quant_algo\": \"MIXED_PRECISION\", \"quantized_layers\":"
     " {\"model.layers.0.mlp.up_proj\": {\"quant_algo\": \"MXFP8\"}}}",
     {TD_QUANT_FLOAT, 1, 32, true, 0}},
};

TEST(reads_every_method) {
  for (size_t i = 0; i < TD_COUNT(methods); i++) {
    td_quant *q = parse_ok(methods[i].config);
    const td_quant_scheme *s = td_quant_find(q, "model.layers.0.mlp.up_proj");
    const td_quant_scheme *want = &methods[i].want;
    assert_non_null(s);
    if (s->format != want->format || s->scale_rows != want->scale_rows ||
        s->scale_cols != want->scale_cols || s->symmetric != want->symmetric ||
        s->zero_add != want->zero_add) {
      fail_msg("%s: format %d, [%u, %u], %d, %u", methods[i].config, s->format, s->scale_rows,
               s->scale_cols, s->symmetric, s->zero_add);
    }
    td_quant_close(q);
  }
}

TEST(targets_and_ignores) {
  td_quant *q = parse_ok(
      "{\"quant_method\": \"compressed-tensors\", \"format\": \"mixed-precision\","
      " \"config_groups\": {"
      "  \"a\": {\"targets\": [\"Linear\"], \"format\": \"pack-quantized\", \"weights\": " INT4_G16
      "},"
      "  \"b\": {\"targets\": [\"re:.*self_attn.(q|o)_proj$\", \"re:lm_head\"],"
      "   \"format\": \"float-quantized\","
      "   \"weights\": {\"type\": \"float\", \"num_bits\": 8, \"strategy\": \"channel\"}},"
      "  \"c\": {\"targets\": [\"model.layers.1.self_attn.o_proj\"], \"format\": \"int-quantized\","
      "   \"weights\": {\"num_bits\": 8, \"strategy\": \"tensor\"}},"
      "  \"d\": {\"targets\": [\"Linear\"], \"weights\": null}},"
      " \"ignore\": [\"re:.*mlp\\\\.gate$\", \"model.layers.0.mlp.up_proj\"]}");
  static const struct {
    const char *module;
    int format; // -1: none
  } cases[] = {
      {"model.layers.0.mlp.down_proj", TD_QUANT_PACKED},
      {"model.layers.0.mlp.up_proj", -1},
      {"model.layers.10.mlp.up_proj", TD_QUANT_PACKED},
      {"model.layers.3.mlp.gate", -1},
      {"model.layers.3.mlp.gate_proj", TD_QUANT_PACKED},
      {"model.layers.0.self_attn.q_proj", TD_QUANT_FLOAT},
      {"model.layers.0.self_attn.q_proj_not", TD_QUANT_PACKED},
      {"model.layers.0.self_attn.o_proj", TD_QUANT_FLOAT},
      {"model.layers.1.self_attn.o_proj", TD_QUANT_INT}, // a name goes before an expression
      {"lm_head", TD_QUANT_FLOAT},
      {"x.lm_head", TD_QUANT_PACKED}, // expressions match from the beginning
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    const td_quant_scheme *s = td_quant_find(q, cases[i].module);
    int format = s ? (int)s->format : -1;
    if (format != cases[i].format) fail_msg("%s: format %d", cases[i].module, format);
  }
  td_quant_close(q);

  cJSON *root = cJSON_Parse("{\"model_type\": \"x\"}");
  assert_int_equal(td_quant_open(&q, root, "f", NULL), TD_OK);
  assert_null(td_quant_find(q, "lm_head"));
  td_quant_close(q);
  cJSON_Delete(root);
}

// Settings of single modules, and modules left out, as GPTQModel and auto-round write them.
TEST(settings_of_modules) {
  static const struct {
    const char *config, *module;
    int format; // -1: none
    uint32_t scale_cols;
  } cases[] = {
#define DYNAMIC                                                                                    \
  "{\"quant_method\": \"gptq\", \"bits\": 4, \"group_size\": 32, \"dynamic\": {"                   \
  "\"-:.*\\\\.mlp\\\\.gate$\": {}, \"+:model\\\\.layers\\\\.1\\\\..*\": {\"bits\": 8},"            \
  " \".*o_proj\": {\"group_size\": 64}}}"
      {DYNAMIC, "model.layers.0.mlp.gate", -1, 0},
      {DYNAMIC, "model.layers.0.mlp.gate_proj", TD_QUANT_GPTQ, 32},
      {DYNAMIC, "model.layers.1.mlp.up_proj", TD_QUANT_GPTQ8, 32},
      {DYNAMIC, "model.layers.0.self_attn.o_proj", TD_QUANT_GPTQ, 64},
      {DYNAMIC, "x.model.layers.1.mlp.up_proj", TD_QUANT_GPTQ, 32}, // from the beginning
#define EXTRA                                                                                      \
  "{\"quant_method\": \"auto-round\", \"bits\": 4, \"group_size\": 128, \"extra_config\": {"       \
  "\"lm_head\": {\"bits\": 16}, \"layers\\\\.[23]\\\\.mlp\": {\"bits\": 16},"                      \
  " \"model.layers.0.self_attn.q_proj\": {\"bits\": 8, \"group_size\": 64}}}"
      {EXTRA, "lm_head", -1, 0},
      {EXTRA, "model.layers.3.mlp.up_proj", -1, 0},
      {EXTRA, "model.layers.4.mlp.up_proj", TD_QUANT_GPTQ, 128},
      {EXTRA, "model.layers.0.self_attn.q_proj", TD_QUANT_GPTQ8, 64},
      {EXTRA, "model.layers.0.self_attn.k_proj", TD_QUANT_GPTQ, 128},
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    td_quant *q = parse_ok(cases[i].config);
    const td_quant_scheme *s = td_quant_find(q, cases[i].module);
    int format = s ? (int)s->format : -1;
    if (format != cases[i].format || (s && s->scale_cols != cases[i].scale_cols)) {
      fail_msg("%s: format %d", cases[i].module, format);
    }
    td_quant_close(q);
  }
}

static const struct {
  const char *config;
  td_status status;
  const char *says;
} bad_configs[] = {
    {"{\"quant_method\": \"bitnet\"}", TD_EUNSUPPORTED, "quant_method \"bitnet\""},
    {CT("marlin-24", INT4_G16, ""), TD_EUNSUPPORTED, "format \"marlin-24\""},
    {CT("pack-quantized", "{\"num_bits\": 2, \"strategy\": \"channel\"}", ""), TD_EUNSUPPORTED,
     "2-bit int, strategy channel"},
    {CT("pack-quantized", "{\"num_bits\": 8, \"strategy\": \"tensor\", \"symmetric\": false}", ""),
     TD_EUNSUPPORTED, "8-bit int, strategy tensor, group_size 0, not symmetric"},
    {CT("mxfp8-quantized", "{\"num_bits\": 8, \"type\": \"float\", \"group_size\": 64}", ""),
     TD_EUNSUPPORTED, "group_size 64"},
    {CT("int-quantized", "{\"num_bits\": 8, \"strategy\": \"channel\", \"symmetric\": false}", ""),
     TD_EUNSUPPORTED, "not symmetric"},
    {CT("float-quantized", "{\"type\": \"int\", \"strategy\": \"channel\"}", ""), TD_EUNSUPPORTED,
     "8-bit int"},
    {CT("nvfp4-pack-quantized",
        "{\"type\": \"float\", \"num_bits\": 4, \"strategy\": \"group\", \"group_size\": 32}", ""),
     TD_EUNSUPPORTED, "group_size 32"},
    {CT("pack-quantized", "{\"num_bits\": 4, \"group_size\": 12}", ""), TD_EUNSUPPORTED,
     "group_size 12"},
    {CT("pack-quantized", "{\"num_bits\": 4, \"strategy\": \"group\"}", ""), TD_EUNSUPPORTED,
     "group_size 0"},
    {CT("pack-quantized", "{\"num_bits\": 4, \"group_size\": 1e9}", ""), TD_EFORMAT, "group_size"},
    {CT("int-quantized", "{\"num_bits\": 8, \"group_size\": 16, \"actorder\": \"group\"}", ""),
     TD_EUNSUPPORTED, "actorder \"group\""},
    {CT("int-quantized", "{\"num_bits\": 8, \"group_size\": 16, \"actorder\": true}", ""),
     TD_EUNSUPPORTED, "actorder"},
    {CT("int-quantized", "{\"num_bits\": 8, \"dynamic\": true}", ""), TD_EUNSUPPORTED, "dynamic"},
    {CT("float-quantized", "{\"type\": \"float\", \"strategy\": \"block\"}", ""), TD_EFORMAT,
     "block_structure"},
    {CT("pack-quantized", INT4_G16, ", \"ignore\": \"lm_head\""), TD_EFORMAT, "ignore must be"},
    {CT("pack-quantized", INT4_G16, ", \"ignore\": [1]"), TD_EFORMAT, "ignore must be"},
    {CT("pack-quantized", INT4_G16, ", \"ignore\": [\"re:(\"]"), TD_EFORMAT,
     "\"re:(\" is not a regular expression"},
    {CT("pack-quantized", INT4_G16, ", \"sparsity_config\": {\"format\": \"sparse-bitmask\"}"),
     TD_EUNSUPPORTED, "sparse-bitmask"},
    {CT("pack-quantized", "7", ""), TD_EFORMAT, "weights must be an object"},
    {"{\"quant_method\": \"compressed-tensors\", \"config_groups\": []}", TD_EFORMAT,
     "config_groups must be"},
    {"{\"quant_method\": \"compressed-tensors\", \"config_groups\": {\"g\": 1}}", TD_EFORMAT,
     "config_groups: g must be"},
    {"{\"quant_method\": \"gptq\", \"bits\": 3}", TD_EUNSUPPORTED, "bits 3"},
    {"{\"quant_method\": \"awq\", \"bits\": 8}", TD_EUNSUPPORTED, "bits 8 is not supported"},
    {"{\"quant_method\": \"gptq\", \"dynamic\": {\"+:.*attn\": {\"bits\": 2}}}", TD_EUNSUPPORTED,
     "bits 2"},
    {"{\"quant_method\": \"gptq\", \"dynamic\": {\".*attn\": 8}}", TD_EFORMAT,
     ".*attn must be an object"},
    {"{\"quant_method\": \"gptq\", \"dynamic\": {\"-:(\": {}}}", TD_EFORMAT,
     "\"re:(\" is not a regular expression"},
    {"{\"quant_method\": \"gptq\", \"dynamic\": []}", TD_EFORMAT, "dynamic must be"},
    {"{\"quant_method\": \"auto-round\", \"packing_format\": \"auto_round:llm_compressor\"}",
     TD_EUNSUPPORTED, "packing_format \"auto_round:llm_compressor\""},
    {"{\"quant_method\": \"auto-round\", \"data_type\": \"mx_fp\"}", TD_EUNSUPPORTED,
     "data_type \"mx_fp\""},
    {"{\"quant_method\": \"auto-round\", \"bits\": 3}", TD_EUNSUPPORTED, "bits 3"},
    {"{\"quant_method\": \"auto-round\", \"extra_config\": {\"a\": {\"bits\": 2}}}",
     TD_EUNSUPPORTED, "bits 2"},
    {"{\"quant_method\": \"auto-round\", \"extra_config\": 1}", TD_EFORMAT, "extra_config must be"},
    {"{\"quant_method\": \"gptq\", \"bits\": 4, \"group_size\": 12}", TD_EUNSUPPORTED,
     "group_size 12"},
    {"{\"quant_method\": \"gptq\", \"bits\": 4, \"checkpoint_format\": \"marlin\"}",
     TD_EUNSUPPORTED, "checkpoint_format \"marlin\""},
    {"{\"quant_method\": \"awq\", \"version\": \"gemv\"}", TD_EUNSUPPORTED, "version \"gemv\""},
    {"{\"quant_method\": \"modelopt\", \"quant_algo\": \"W4A16_AWQ\"}", TD_EUNSUPPORTED,
     "\"W4A16_AWQ\""},
    {"{\"quant_method\": \"modelopt\", \"quant_algo\": \"MIXED_PRECISION\"}", TD_EFORMAT,
     "quantized_layers must be"},
};

TEST(refuses_bad_configs) {
  for (size_t i = 0; i < TD_COUNT(bad_configs); i++) {
    td_quant *q;
    td_err err;
    td_status st = parse(bad_configs[i].config, &q, &err);
    assert_null(q);
    if (st != bad_configs[i].status || !strstr(err.msg, bad_configs[i].says) ||
        strncmp(err.msg, "dir/config.json: ", 17) != 0) {
      fail_msg("%s: status %d, message %s", bad_configs[i].config, st, st == TD_OK ? "" : err.msg);
    }
  }
}

// Checkpoints with one quantized matrix, [48][32].
#define MODULE "model.layers.0.mlp.up_proj"

static void start(checkpoint *ck, const char *quant) {
  ck_qwen3(ck);
  ck_set(ck, "quantization_config", quant);
  ck_drop(ck, MODULE ".weight");
}

// Bytes of a tensor as the fixture writes them.
static bool holds(checkpoint *ck, const char *name, const void *data) {
  const ck_tensor *t = ck_find(ck, name);
  for (uint64_t i = 0; i < ck_bytes(t); i++) {
    if (((const uint8_t *)data)[i] != ck_byte(t, i)) return false;
  }
  return true;
}

TEST(binds_words_with_zero_points) {
  checkpoint ck;
  start(&ck, CT("pack-quantized", "{\"num_bits\": 4, \"group_size\": 16, \"symmetric\": false}",
                ", \"ignore\": [\"lm_head\"]"));
  ck_add(&ck, MODULE ".weight_packed", "I32", 48, 4, 0);
  ck_add(&ck, MODULE ".weight_scale", "BF16", 48, 2, 0);
  ck_add(&ck, MODULE ".weight_zero_point", "I32", 6, 2, 0);
  td_model *m = open_ok(&ck);
  const td_weight *w = &td_model_layer(m, 0)->mlp_up;
  assert_int_equal(w->dtype, TD_I4);
  assert_int_equal(w->scale_dtype, TD_BF16);
  assert_int_equal(w->scale_rows, 1);
  assert_int_equal(w->scale_cols, 16);
  assert_true(holds(&ck, MODULE ".weight_packed", w->data));
  assert_true(holds(&ck, MODULE ".weight_scale", w->scale));
  assert_true(holds(&ck, MODULE ".weight_zero_point", w->zero));
  assert_int_equal(td_weight_bytes(w), 48 * 16 + 48 * 2 * 2 + 6 * 2 * 4);
  td_model_stats s = td_model_stats_of(m);
  assert_int_equal(s.bytes_by_dtype[TD_I4], 48 * 16);
  assert_int_equal(s.bytes_by_dtype[TD_I32], 6 * 2 * 4);
  td_model_close(m);
  ck_free(&ck);
}

static uint32_t word_of(const ck_tensor *t, uint64_t idx) {
  uint32_t word = 0;
  for (unsigned i = 0; i < 4; i++)
    word |= (uint32_t)ck_byte(t, 4 * idx + i) << 8 * i;
  return word;
}

// That each code, scale and zero point of the 48 rows of 32 columns in two groups is where rows
// have it. GPTQ adds 1 to each zero point of a word, with what is carried.
static void check_turned(checkpoint *ck, const td_weight *w, bool is_awq) {
  static const uint32_t order[] = {0, 4, 1, 5, 2, 6, 3, 7}; // where AWQ has row % 8
  const ck_tensor *codes = ck_find(ck, MODULE ".qweight"), *zeros = ck_find(ck, MODULE ".qzeros");
  const ck_tensor *scales = ck_find(ck, MODULE ".scales");
  for (uint32_t r = 0; r < 48; r++) {
    const uint32_t place = is_awq ? order[r % 8] : r % 8;
    for (uint32_t c = 0; c < 32; c++) {
      const uint32_t code = is_awq ? word_of(codes, c * 6 + r / 8) >> 4 * place & 15
                                   : word_of(codes, c / 8 * 48 + r) >> 4 * (c % 8) & 15;
      if ((((const uint32_t *)w->data)[r * 4 + c / 8] >> 4 * (c % 8) & 15) != code)
        fail_msg("the code of row %u, column %u", r, c);
    }
    for (uint32_t g = 0; g < 2; g++) {
      const uint32_t word = word_of(zeros, g * 6 + r / 8) + (is_awq ? 0 : 0x11111111);
      assert_int_equal(w->zero[r / 8 * 2 + g] >> 4 * (r % 8) & 15, word >> 4 * place & 15);
      const uint16_t scale = ((const uint16_t *)w->scale)[r * 2 + g];
      assert_int_equal(scale & 255, ck_byte(scales, 2 * (g * 48 + r)));
      assert_int_equal(scale >> 8, ck_byte(scales, 2 * (g * 48 + r) + 1));
    }
  }
}

// Words that columns begin with are turned into rows.
TEST(binds_columns_of_words) {
  checkpoint ck;
  start(&ck, "{\"quant_method\": \"gptq\", \"bits\": 4, \"group_size\": 16}");
  ck_add(&ck, MODULE ".qweight", "I32", 4, 48, 0);
  ck_add(&ck, MODULE ".scales", "F16", 2, 48, 0);
  ck_add(&ck, MODULE ".qzeros", "I32", 2, 6, 0);
  td_model *m = open_ok(&ck);
  const td_weight *w = &td_model_layer(m, 0)->mlp_up;
  assert_int_equal(w->scale_dtype, TD_F16);
  check_turned(&ck, w, false);
  assert_int_equal(td_weight_bytes(w), 4 * 48 * 4 + 2 * 48 * 2 + 2 * 6 * 4);
  td_model_close(m);
  // Written from the name, the group of column 0 is far from 0.
  ck_add(&ck, MODULE ".g_idx", "I32", 32, 0, 0);
  WRITTEN_REFUSED(&ck, TD_EFORMAT, MODULE ".g_idx", "column 0 is of group", "there are 2");
  ck_find(&ck, MODULE ".g_idx")->shape[0] = 31;
  WRITTEN_REFUSED(&ck, TD_EFORMAT, MODULE ".g_idx", "does not fit");
  ck_free(&ck);

  start(&ck, "{\"quant_method\": \"awq\", \"bits\": 4, \"group_size\": 16}");
  ck_add(&ck, MODULE ".qweight", "I32", 32, 6, 0);
  ck_add(&ck, MODULE ".scales", "F16", 2, 48, 0);
  ck_add(&ck, MODULE ".qzeros", "I32", 2, 6, 0);
  m = open_ok(&ck);
  w = &td_model_layer(m, 0)->mlp_up;
  check_turned(&ck, w, true);
  td_model_close(m);
  ck_find(&ck, MODULE ".qweight")->shape[1] = 48;
  WRITTEN_REFUSED(&ck, TD_EFORMAT, MODULE ".qweight", "[32, 48]", "[32, 6]");
  ck_free(&ck);
}

// 8-bit words have no kernel: I8 where the zero points are all in the middle, else the scales'
// dtype.
TEST(converts_words_of_8_bits) {
  checkpoint ck;
  start(&ck, CT("pack-quantized", "{\"num_bits\": 8, \"strategy\": \"channel\"}", ""));
  ck_add(&ck, MODULE ".weight_packed", "I32", 48, 8, 0);
  ck_add(&ck, MODULE ".weight_scale", "F32", 48, 1, 0);
  td_model *m = open_ok(&ck);
  const td_weight *w = &td_model_layer(m, 0)->mlp_up;
  assert_int_equal(w->dtype, TD_I8);
  assert_int_equal(w->scale_dtype, TD_F32);
  assert_int_equal(w->scale_cols, 32);
  const ck_tensor *words = ck_find(&ck, MODULE ".weight_packed");
  for (uint64_t i = 0; i < 48 * 32; i++) {
    if (((const int8_t *)w->data)[i] != (int)ck_byte(words, i) - 128) fail_msg("code %d", (int)i);
  }
  assert_true(holds(&ck, MODULE ".weight_scale", w->scale));
  td_model_close(m);
  ck_find(&ck, MODULE ".weight_scale")->shape[0] = 47;
  WRITTEN_REFUSED(&ck, TD_EFORMAT, MODULE ".weight_scale", "does not fit");
  ck_drop(&ck, MODULE ".weight_scale");
  WRITTEN_REFUSED(&ck, TD_EFORMAT, MODULE ".weight_scale is missing");
  ck_add(&ck, MODULE ".weight_scale", "I32", 48, 1, 0);
  WRITTEN_REFUSED(&ck, TD_EFORMAT, MODULE ".weight_scale", "dtype I32");
  ck_free(&ck);

  start(&ck, "{\"quant_method\": \"gptq\", \"bits\": 8, \"group_size\": 16}");
  ck_add(&ck, MODULE ".qweight", "I32", 8, 48, 0);
  ck_add(&ck, MODULE ".scales", "F16", 2, 48, 0);
  WRITTEN_REFUSED(&ck, TD_EFORMAT, MODULE ".qzeros is missing");
  ck_add(&ck, MODULE ".qzeros", "I32", 2, 12, 0);
  m = open_ok(&ck);
  w = &td_model_layer(m, 0)->mlp_up;
  assert_int_equal(w->dtype, TD_F16);
  assert_null(w->scale);
  assert_int_equal(td_weight_bytes(w), 48 * 32 * 2);
  td_model_close(m);
  ck_find(&ck, MODULE ".qweight")->shape[0] = 7;
  WRITTEN_REFUSED(&ck, TD_EFORMAT, MODULE ".weight", "[48, 28]", "[48, 32]");
  ck_find(&ck, MODULE ".qweight")->shape[0] = 8;
  ck_find(&ck, MODULE ".qzeros")->shape[1] = 11;
  WRITTEN_REFUSED(&ck, TD_EFORMAT, MODULE ".qzeros", "does not fit");
  ck_free(&ck);
}

TEST(conversions_can_be_canceled) {
  checkpoint ck;
  start(&ck, CT("pack-quantized", "{\"num_bits\": 8, \"strategy\": \"channel\"}", ""));
  ck_add(&ck, MODULE ".weight_packed", "I32", 48, 8, 0);
  ck_add(&ck, MODULE ".weight_scale", "F32", 48, 1, 0);
  ck_write(&ck);
  td_store *store;
  td_quant *quant;
  td_conversion *c;
  td_err err;
  assert_int_equal(td_store_open(&store, ck.dir, &err), TD_OK);
  assert_int_equal(td_quant_open_dir(&quant, ck.dir, &err), TD_OK);
  assert_int_equal(td_conversion_open(&c, store, quant, &err), TD_OK);
  void *memory = calloc(1, (size_t)td_conversion_bytes(c));
  assert_non_null(memory);
  atomic_bool canceled = true;
  const td_conversion_opts opts = {.canceled = &canceled};
  assert_int_equal(td_conversion_run(c, memory, &opts, &err), TD_ECANCELED);
  canceled = false;
  assert_int_equal(td_conversion_run(c, memory, &opts, &err), TD_OK);
  assert_string_equal(td_conversion_source(c, 0)->name, MODULE ".weight_packed");
  assert_null(td_conversion_source(c, 1));
  free(memory);
  td_conversion_close(c);
  td_quant_close(quant);
  td_store_close(store);
  ck_free(&ck);
}

static float ck_f32(checkpoint *ck, const char *name, uint64_t idx) {
  uint8_t bytes[4];
  float value;
  for (unsigned i = 0; i < 4; i++)
    bytes[i] = ck_byte(ck_find(ck, name), idx * 4 + i);
  memcpy(&value, bytes, sizeof value);
  return value;
}

// 1,536 codes of 4 bits in 24 blocks, whose factors are in F32, or in U8 with a table of their own.
static void add_bnb(checkpoint *ck, bool is_nested) {
  start(ck, "{\"quant_method\": \"bitsandbytes\", \"load_in_4bit\": true}");
  ck_add(ck, MODULE ".weight", "U8", 768, 1, 0);
  ck_add(ck, MODULE ".weight.quant_map", "F32", 16, 0, 0);
  ck_add(ck, MODULE ".weight.absmax", is_nested ? "U8" : "F32", 24, 0, 0);
  if (is_nested) {
    ck_add(ck, MODULE ".weight.nested_absmax", "F32", 2, 0, 0);
    ck_add(ck, MODULE ".weight.nested_quant_map", "F32", 256, 0, 0);
  }
  ck_add_text(ck, MODULE ".weight.quant_state.bitsandbytes__nf4",
              is_nested ? "{\"quant_type\": \"nf4\", \"blocksize\": 64, \"dtype\": \"float32\","
                          " \"shape\": [48, 32], \"nested_blocksize\": 16,"
                          " \"nested_dtype\": \"float32\", \"nested_offset\": 0.25}"
                        : "{\"quant_type\": \"nf4\", \"blocksize\": 64, \"dtype\": \"bfloat16\","
                          " \"shape\": [48, 32]}");
}

TEST(dequantizes_codes_of_bitsandbytes) {
  for (int is_nested = 0; is_nested < 2; is_nested++) {
    checkpoint ck;
    add_bnb(&ck, is_nested);
    td_model *m = open_ok(&ck);
    const td_weight *w = &td_model_layer(m, 0)->mlp_up;
    assert_int_equal(w->dtype, is_nested ? TD_F32 : TD_BF16);
    assert_null(w->scale);
    for (uint64_t i = 0; i < 48 * 32; i++) {
      const uint8_t pair = ck_byte(ck_find(&ck, MODULE ".weight"), i / 2);
      const float value = ck_f32(&ck, MODULE ".weight.quant_map", i % 2 ? pair % 16 : pair / 16);
      const uint8_t code = ck_byte(ck_find(&ck, MODULE ".weight.absmax"), i / 64);
      if (!is_nested) {
        const float product = value * ck_f32(&ck, MODULE ".weight.absmax", i / 64);
        assert_int_equal(((const uint16_t *)w->data)[i], td_bf16_of(product));
        continue;
      }
      float factor = ck_f32(&ck, MODULE ".weight.nested_quant_map", code);
      factor *= ck_f32(&ck, MODULE ".weight.nested_absmax", i / 64 / 16);
      factor += 0.25f;
      assert_float_equal(((const float *)w->data)[i], value * factor, 0);
    }
    td_model_close(m);
    ck_find(&ck, MODULE ".weight")->shape[0] = 767;
    WRITTEN_REFUSED(&ck, TD_EFORMAT, MODULE ".weight", "does not fit the state");
    ck_drop(&ck, MODULE ".weight.quant_map");
    WRITTEN_REFUSED(&ck, TD_EFORMAT, MODULE ".weight.absmax or .quant_map is missing");
    ck_free(&ck);
  }
  static const char *const states[] = {
      "{\"blocksize\": 0, \"dtype\": \"float32\", \"shape\": [48, 32]}",
      "{\"blocksize\": 64, \"dtype\": \"int8\", \"shape\": [48, 32]}",
      "{\"blocksize\": 64, \"dtype\": \"float32\", \"shape\": [48, 32, 1]}",
      "{\"blocksize\": 64, \"dtype\": \"float32\", \"shape\": [48, 1e300]}",
      "[[[[[[",
  };
  for (size_t i = 0; i < TD_COUNT(states); i++) {
    checkpoint ck;
    add_bnb(&ck, false);
    ck_drop(&ck, MODULE ".weight.quant_state.bitsandbytes__nf4");
    ck_add_text(&ck, MODULE ".weight.quant_state.bitsandbytes__fp4", states[i]);
    WRITTEN_REFUSED(&ck, TD_EFORMAT, MODULE ".weight.quant_state.bitsandbytes__fp4");
    ck_free(&ck);
  }
}

TEST(binds_rows_of_bitsandbytes) {
  checkpoint ck;
  start(&ck, "{\"quant_method\": \"bitsandbytes\", \"load_in_8bit\": true}");
  ck_add(&ck, MODULE ".weight", "I8", 48, 32, 0);
  ck_add(&ck, MODULE ".SCB", "F32", 48, 0, 0);
  ck_add(&ck, MODULE ".weight_format", "U8", 1, 0, 0);
  td_model *m = open_ok(&ck);
  const td_weight *w = &td_model_layer(m, 0)->mlp_up;
  assert_int_equal(w->dtype, TD_I8);
  assert_true(holds(&ck, MODULE ".weight", w->data));
  for (unsigned r = 0; r < 48; r++)
    assert_float_equal(((const float *)w->scale)[r], ck_f32(&ck, MODULE ".SCB", r) / 127, 0);
  td_model_close(m);
  ck_find(&ck, MODULE ".SCB")->shape[0] = 47;
  WRITTEN_REFUSED(&ck, TD_EFORMAT, MODULE ".SCB", "[47]");
  ck_free(&ck);
}

TEST(binds_fp4) {
  checkpoint ck;
  start(&ck, "{\"quant_method\": \"mxfp4\"}");
  ck_add(&ck, MODULE ".weight", "U8", 48, 16, 0);
  ck_add(&ck, MODULE ".weight_scale", "U8", 48, 1, 0);
  td_model *m = open_ok(&ck);
  const td_weight *w = &td_model_layer(m, 0)->mlp_up;
  assert_int_equal(w->dtype, TD_F4E2M1);
  assert_int_equal(w->scale_dtype, TD_F8E8M0);
  assert_true(w->global_scale == 1);
  td_model_close(m);
  strcpy(ck_find(&ck, MODULE ".weight")->dtype, "I8"); // as DeepSeek V4 has it
  strcpy(ck_find(&ck, MODULE ".weight_scale")->dtype, "F8_E8M0");
  td_model_close(open_ok(&ck));
  strcpy(ck_find(&ck, MODULE ".weight_scale")->dtype, "F32");
  WRITTEN_REFUSED(&ck, TD_EUNSUPPORTED, MODULE ".weight_scale", "dtype F32");
  ck_free(&ck);

  start(&ck, CT("nvfp4-pack-quantized",
                "{\"num_bits\": 4, \"type\": \"float\", \"group_size\": 16}", ""));
  ck_add(&ck, MODULE ".weight_packed", "U8", 48, 16, 0);
  ck_add(&ck, MODULE ".weight_scale", "F8_E4M3", 48, 2, 0);
  WRITTEN_REFUSED(&ck, TD_EFORMAT, MODULE ".weight_global_scale is missing");
  ck_add(&ck, MODULE ".weight_global_scale", "F32", 1, 0, 0);
  m = open_ok(&ck);
  w = &td_model_layer(m, 0)->mlp_up;
  assert_int_equal(w->scale_dtype, TD_F8E4M3);
  float divisor;
  uint8_t bytes[4];
  for (uint64_t i = 0; i < 4; i++)
    bytes[i] = ck_byte(ck_find(&ck, MODULE ".weight_global_scale"), i);
  memcpy(&divisor, bytes, sizeof divisor);
  assert_true(w->global_scale == 1 / divisor);
  td_model_close(m);
  ck_free(&ck);
}

TEST(binds_int8_and_fp8_rows) {
  checkpoint ck;
  start(&ck, CT("int-quantized", "{\"num_bits\": 8, \"strategy\": \"channel\"}", ""));
  ck_add(&ck, MODULE ".weight", "I8", 48, 32, 0);
  ck_add(&ck, MODULE ".weight_scale", "BF16", 48, 1, 0);
  td_model *m = open_ok(&ck);
  const td_weight *w = &td_model_layer(m, 0)->mlp_up;
  assert_int_equal(w->dtype, TD_I8);
  assert_int_equal(w->scale_dtype, TD_F32);
  assert_int_equal(w->scale_rows, 1);
  assert_int_equal(w->scale_cols, 32);
  td_model_close(m);
  ck_find(&ck, MODULE ".weight_scale")->shape[0] = 47;
  WRITTEN_REFUSED(&ck, TD_EFORMAT, MODULE ".weight_scale", "[47, 1]", "[48, 1]");
  ck_free(&ck);

  start(&ck, CT("float-quantized", "{\"type\": \"float\", \"strategy\": \"tensor\"}", ""));
  ck_add(&ck, MODULE ".weight", "F8_E4M3", 48, 32, 0);
  ck_add(&ck, MODULE ".weight_scale", "F32", 1, 0, 0);
  m = open_ok(&ck);
  w = &td_model_layer(m, 0)->mlp_up;
  assert_int_equal(w->scale_rows, 48);
  assert_int_equal(w->scale_cols, 32);
  td_model_close(m);
  strcpy(ck_find(&ck, MODULE ".weight")->dtype, "I8");
  WRITTEN_REFUSED(&ck, TD_EFORMAT, MODULE ".weight", "has dtype I8", "quantization_config",
                  "F8_E4M3");
  ck_free(&ck);
}

// One scale a matrix, under either name, whatever blocks are the default.
TEST(binds_fp8_with_one_scale) {
  static const char *const names[] = {MODULE ".weight_scale_inv", MODULE ".weight_scale"};
  static const char *const configs[] = {
      "{\"quant_method\": \"fp8\", \"activation_scheme\": \"static\", \"weight_block_size\": null}",
      "{\"quant_method\": \"fp8\", \"activation_scheme\": \"static\"}",
      "{\"quant_method\": \"fp8\", \"weight_block_size\": [16, 16]}",
  };
  for (size_t i = 0; i < TD_COUNT(names) * TD_COUNT(configs); i++) {
    checkpoint ck;
    start(&ck, configs[i / TD_COUNT(names)]);
    ck_add(&ck, MODULE ".weight", "F8_E4M3", 48, 32, 0);
    ck_add(&ck, names[i % TD_COUNT(names)], "BF16", 1, 0, 0);
    ck_add(&ck, MODULE ".activation_scale", "F32", 1, 0, 0);
    ck_add(&ck, "model.layers.0.self_attn.k_cache.scale", "F32", 1, 0, 0);
    td_model *m = open_ok(&ck);
    const td_weight *w = &td_model_layer(m, 0)->mlp_up;
    assert_int_equal(w->scale_rows, 48);
    assert_int_equal(w->scale_cols, 32);
    td_model_close(m);
    ck_drop(&ck, names[i % TD_COUNT(names)]);
    WRITTEN_REFUSED(&ck, TD_EFORMAT, MODULE ".weight_scale_inv is missing");
    ck_free(&ck);
  }
}

TEST(refuses_what_does_not_fit) {
  checkpoint ck;
  start(&ck, CT("pack-quantized", INT4_G16, ", \"ignore\": [\"re:.*layers\\\\.0\\\\.mlp.*\"]"));
  ck_add(&ck, MODULE ".weight_packed", "I32", 48, 4, 0);
  ck_add(&ck, MODULE ".weight_scale", "F32", 48, 2, 0);
  WRITTEN_REFUSED(&ck, TD_EFORMAT, MODULE ".weight_packed", "is I32", "quantization_config");
  ck_set(&ck, "quantization_config", CT("pack-quantized", INT4_G16, ""));
  ck_add(&ck, MODULE ".weight_shape", "I64", 2, 0, 0);
  WRITTEN_REFUSED(&ck, TD_EFORMAT, MODULE ".weight_shape", "[48, 32]");
  ck_drop(&ck, MODULE ".weight_shape");
  ck_add(&ck, MODULE ".weight_g_idx", "I32", 32, 0, 0);
  WRITTEN_REFUSED(&ck, TD_EFORMAT, MODULE ".weight_g_idx", "column 0 is of group");
  ck_drop(&ck, MODULE ".weight_g_idx");
  td_model_close(open_ok(&ck));
  ck_drop(&ck, MODULE ".weight_scale");
  WRITTEN_REFUSED(&ck, TD_EFORMAT, MODULE ".weight_scale is missing");
  ck_drop(&ck, MODULE ".weight_packed");
  WRITTEN_REFUSED(&ck, TD_EFORMAT, MODULE ".weight_packed is missing");
  ck_free(&ck);
}
