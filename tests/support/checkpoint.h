// tests/support/checkpoint.h - writes tiny checkpoints, whole ones and broken ones.
// A test starts from a whole one, changes what it is about, writes it and opens it. Anything that
// goes wrong in here aborts the test program.
#pragma once

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#include "model/model.h"

#define CK_MAX_TENSORS 256
#define CK_SHARDS      3

typedef struct {
  char name[128];
  char dtype[16];
  uint64_t shape[4];
  uint32_t n_dims;
  uint32_t shard;
  const char *text; // its data, borrowed; NULL: what ck_byte says
} ck_tensor;

typedef struct {
  char dir[64];
  cJSON *config;     // written as config.json unless NULL
  cJSON *generation; // written as generation_config.json unless NULL
  ck_tensor tensors[CK_MAX_TENSORS];
  uint32_t n_tensors;
  bool single;    // one model.safetensors; else three shards and an index
  bool is_random; // data of a model whose logits differ, instead of ck_byte's
} checkpoint;

// Two layers each, the first dense, the second with experts, all BF16, in a new directory.
// DeepSeek: 2 heads, q_lora, 8 experts of which 2, 2 groups, a shared expert.
void ck_deepseek(checkpoint *ck);
// Qwen3: 4 heads on 2, 8 experts of which 2.
void ck_qwen3(checkpoint *ck);
// gpt-oss, of one file and random data: 4 heads on 2, a window of 20 in the first layer, experts in
// both, 8 of which 2, in MXFP4; a vocabulary of 208.
void ck_gpt_oss(checkpoint *ck);
// Qwen3-Next, of one file and random data: two layers with gated delta nets of 2 heads, one with
// attention; 8 experts of which 2; a vocabulary of 208.
void ck_qwen3_next(checkpoint *ck);
// Makes config.json the text_config of a checkpoint of model_type, and puts prefix before every
// name.
void ck_wrap(checkpoint *ck, const char *model_type, const char *prefix);
void ck_free(checkpoint *ck); // removes the directory

// Sets a key of config.json to JSON text.
void ck_set(checkpoint *ck, const char *key, const char *json);
ck_tensor *ck_find(checkpoint *ck, const char *name); // must exist
// Dimensions end with the first 0.
ck_tensor *ck_add(checkpoint *ck, const char *name, const char *dtype, uint64_t d0, uint64_t d1,
                  uint64_t d2);
// A tensor of bytes that holds text.
void ck_add_text(checkpoint *ck, const char *name, const char *text);
void ck_drop(checkpoint *ck, const char *name);
// Stores a matrix as FP8 with scales of the given dtype, in blocks of block x block.
void ck_make_fp8(checkpoint *ck, const char *name, uint32_t block, const char *scale_dtype);

uint64_t ck_bytes(const ck_tensor *t);
// Byte idx of a tensor's data, which follows from its name alone.
uint8_t ck_byte(const ck_tensor *t, uint64_t idx);

void ck_write(const checkpoint *ck);
td_status ck_open(const checkpoint *ck, td_model **out, td_err *err); // after ck_write
// Overwrites a file of the checkpoint, or changes its length.
void ck_write_file(const checkpoint *ck, const char *file, const void *bytes, size_t len);
void ck_truncate(const checkpoint *ck, const char *file, long len);
