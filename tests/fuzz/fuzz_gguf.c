// tests/fuzz/fuzz_gguf.c - a GGUF file of any bytes: refused, or its tensors lie inside it, and so
// does all that is made of its metadata.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/json_parse.h"
#include "gguf/arch.h"
#include "gguf/tokenizer.h"
#include "model/checkpoint/gguf_shard.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

// What is made is JSON.
static void check_json(td_buf *text, td_status st) {
  cJSON *root = NULL;
  td_err err;
  if (st == TD_OK) {
    const td_status parsed = td_json_parse(&root, td_buf_text(text), text->len, 64, &err);
    TD_CHECK(parsed == TD_OK);
  }
  cJSON_Delete(root);
  td_buf_free(text);
}

static void check_shard(const td_gguf *g, const uint8_t *data, size_t size) {
  const td_gguf_arch *arch;
  td_safetensors st;
  td_err err;
  if (td_gguf_arch_of(g, &arch, &err) != TD_OK) return;
  if (td_gguf_shard(&st, g, arch, &err) != TD_OK) return;
  for (size_t i = 0; i < st.n_tensors; i++) {
    const td_tensor *t = &st.tensors[i];
    TD_CHECK(t->data >= data && t->n_bytes <= (size_t)(data + size - t->data));
    TD_CHECK(strlen(t->name) < 512);
  }
  td_safetensors_free(&st);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  uint8_t *file = malloc(size ? size : 1); // a block of exactly its size, so that ASan sees
  td_gguf g;
  td_err err;
  memcpy(file, data, size);
  if (td_gguf_parse(&g, file, size, "file", &err) != TD_OK) {
    TD_CHECK(!g.values && !g.tensors && strncmp(err.msg, "file: ", 6) == 0);
    free(file);
    return 0;
  }
  uint64_t total = 0;
  for (size_t i = 0; i < g.n_tensors; i++) {
    const td_gguf_tensor *t = &g.tensors[i];
    TD_CHECK(t->data >= file && t->n_bytes <= (size_t)(file + size - t->data));
    total += t->n_bytes;
  }
  TD_CHECK(total <= size);
  check_shard(&g, file, size);
  td_buf config = TD_BUF_INIT, tokenizer = TD_BUF_INIT, settings = TD_BUF_INIT;
  check_json(&config, td_gguf_config(&config, &g, 1, &err));
  check_json(&tokenizer, td_gguf_tokenizer(&tokenizer, &g, &err));
  check_json(&settings, td_gguf_tokenizer_config(&settings, &g, &err));
  td_gguf_free(&g);
  free(file);
  return 0;
}
