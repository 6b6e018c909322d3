// tests/unit/test_inspect.c - the description of a checkpoint, as text and as JSON.
// CTest: no-tsan
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json_parse.h"
#include "cli/inspect.h"
#include "support/checkpoint.h"
#include "unit/testing.h"

// The caller frees the text.
static char *inspect(const checkpoint *ck, bool tensors, bool json) {
  char *text = NULL;
  size_t len;
  FILE *out = open_memstream(&text, &len);
  td_err err;
  const td_inspect_opts opts = {.tensors = tensors, .json = json};
  if (td_inspect_model(ck->dir, &opts, out, &err) != TD_OK) fail_msg("%s", err.msg);
  fclose(out);
  return text;
}

static int64_t number(const cJSON *object, const char *key) {
  int64_t value = -1;
  assert_int_equal(td_json_get_int(object, key, 0, INT64_MAX, &value, NULL), TD_OK);
  return value;
}

TEST(describes_in_json) {
  checkpoint ck;
  ck_deepseek(&ck);
  ck_write(&ck);
  char *text = inspect(&ck, true, true);
  cJSON *object;
  td_err err;
  assert_int_equal(td_json_parse(&object, text, strlen(text), 8, &err), TD_OK);
  const char *arch = NULL;
  td_json_get_str(object, "architecture", &arch, NULL);
  assert_string_equal(arch, "deepseek_v3");
  assert_int_equal(number(object, "n_layers"), 2);
  assert_int_equal(number(object, "n_moe_layers"), 1);
  assert_int_equal(number(object, "n_experts"), 8);
  assert_int_equal(number(object, "top_k"), 2);
  const cJSON *tensors = td_json_get(object, "tensors");
  assert_int_equal(cJSON_GetArraySize(tensors), ck.n_tensors);
  uint64_t bytes = 0;
  for (const cJSON *t = tensors->child; t; t = t->next) {
    const char *name = NULL;
    td_json_get_str(t, "name", &name, NULL);
    const ck_tensor *want = ck_find(&ck, name);
    assert_int_equal(number(t, "bytes"), ck_bytes(want));
    assert_int_equal(cJSON_GetArraySize(td_json_get(t, "shape")), want->n_dims);
    bytes += ck_bytes(want);
  }
  uint64_t widened = 8 * 2; // the correction bias, BF16 to F32
  assert_int_equal(number(object, "weight_bytes"), bytes + widened);
  const cJSON *by_dtype = td_json_get(object, "bytes_by_dtype");
  assert_int_equal(cJSON_GetArraySize(by_dtype), 2);
  assert_true(number(object, "active_params") < number(object, "params"));
  // 10 compressed and 4 rotary, in 2 layers; the element size is the engine's.
  assert_int_equal(number(object, "kv_bytes_per_token") % (2 * 14), 0);
  const cJSON *plan = td_json_get(object, "plans")->child; // of a desktop
  assert_null(td_json_get(plan, "gpu"));
  plan = plan->next->next; // of an H100
  const cJSON *gpu = td_json_get(plan, "gpu");
  assert_int_equal(cJSON_GetArraySize(td_json_get(plan, "prompts")), 3);
  assert_int_equal(number(gpu, "resident_bytes"), bytes + widened);                 // all fits
  assert_int_equal(number(gpu, "kv_bytes"), number(gpu, "kv_tokens") * 14 * 2 * 2); // in BF16
  cJSON_Delete(object);
  free(text);
  ck_free(&ck);
}

TEST(describes_in_text) {
  checkpoint ck;
  ck_qwen3(&ck);
  ck_write(&ck);
  char *text = inspect(&ck, false, false);
  static const char *const says[] = {
      "architecture  qwen3_moe: 2 layers of width 32, vocabulary of 24\n",
      "GQA: 2 of keys and values, 6 wide\n",
      "experts       8 a layer, 2 for a token, 16 wide\n",
      "dense         1 of the 2 layers, 48 wide\n",
      "parameters    ",
      "BF16",
      "for every 1000 tokens of context",
      "chat          no template\n",
      "sampling      temperature 1, top_p 1, unless",
      "machine       H100",
      "  with        RTX 3060      12 GB: prompt of 32768 tokens ",
      "keys and values of ",
      "prompt        8192 tokens: ",
      "decode        1 request: ",
  };
  for (size_t i = 0; i < TD_COUNT(says); i++) {
    if (!strstr(text, says[i])) fail_msg("no \"%s\" in:\n%s", says[i], text);
  }
  assert_null(strstr(text, "model.norm.weight"));
  free(text);
  text = inspect(&ck, true, false);
  for (uint32_t i = 0; i < ck.n_tensors; i++)
    assert_non_null(strstr(text, ck.tensors[i].name));
  free(text);
  ck_free(&ck);
}

TEST(says_what_is_wrong) {
  td_err err;
  const td_inspect_opts json = {.json = true};
  assert_int_equal(td_inspect_model("/nonexistent", &json, stdout, &err), TD_ENOENT);
  assert_non_null(strstr(err.msg, "/nonexistent/config.json"));
  checkpoint ck;
  ck_qwen3(&ck);
  ck_write(&ck);
  FILE *full = fopen("/dev/full", "w");
  assert_non_null(full);
  assert_int_equal(td_inspect_model(ck.dir, &json, full, &err), TD_EIO);
  fclose(full);
  ck_free(&ck);
}
