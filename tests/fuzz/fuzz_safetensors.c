// tests/fuzz/fuzz_safetensors.c - a shard of any bytes: refused, or its tensors lie inside it.
// Input: the file, or, where it begins with an open brace, only its header: then the length before
// it and some bytes of data after it are supplied, so that mutations reach the checks.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "model/checkpoint/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void parse(const uint8_t *bytes, size_t n_bytes) {
  td_safetensors st;
  td_err err;
  td_status status = td_safetensors_parse(&st, bytes, n_bytes, "shard", &err);
  if (status != TD_OK) {
    TD_CHECK(!st.tensors && !st.names && strncmp(err.msg, "shard: ", 7) == 0);
    return;
  }
  uint64_t total = 0;
  for (size_t i = 0; i < st.n_tensors; i++) {
    const td_tensor *t = &st.tensors[i];
    TD_CHECK(t->data >= bytes && t->n_bytes <= (size_t)(bytes + n_bytes - t->data));
    TD_CHECK(strlen(t->name) <= n_bytes);
    total += t->n_bytes;
  }
  TD_CHECK(total <= n_bytes);
  td_safetensors_free(&st);
}

// A file with this header and n_data bytes, in a block of exactly its size.
static void parse_header(const uint8_t *header, size_t len, size_t n_data) {
  uint8_t *file = malloc(8 + len + n_data);
  for (int i = 0; i < 8; i++)
    file[i] = (uint8_t)((uint64_t)len >> 8 * i);
  memcpy(file + 8, header, len);
  memset(file + 8 + len, 0x5A, n_data);
  parse(file, 8 + len + n_data);
  free(file);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size && data[0] == '{') {
    static const size_t n_data[] = {0, 1, 16};
    for (size_t i = 0; i < TD_COUNT(n_data); i++)
      parse_header(data, size, n_data[i]);
  } else {
    parse(data, size);
  }
  return 0;
}
