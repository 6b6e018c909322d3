// tests/fuzz/fuzz_kv_record.c - a file of --kv-dir that may hold anything.
// Input: the file. It is held against a record of 8 tokens and 64 bytes; one that passes must be
// that record and no other.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kv/record.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const int32_t tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  td_kv_record record = {.model = {.bytes = {'m', 'o', 'd', 'e', 'l'}},
                         .name = {.bytes = {'n', 'a', 'm', 'e'}},
                         .tokens = tokens,
                         .n_tokens = 8,
                         .n_bytes = 64};
  td_err err;
  err.msg[0] = '\0';
  if (td_kv_record_check(data, size, &record, &err) != TD_OK) {
    if (!err.msg[0]) abort();
    return 0;
  }
  uint8_t *copy = malloc(size);
  if (!copy) return 0;
  memcpy(copy, data, size);
  td_kv_record_seal(copy, &record);
  if (size != td_kv_record_bytes(&record) || memcmp(copy, data, size) != 0) abort();
  record.name.bytes[31] ^= 1;
  if (td_kv_record_check(data, size, &record, &err) == TD_OK) abort();
  free(copy);
  return 0;
}
