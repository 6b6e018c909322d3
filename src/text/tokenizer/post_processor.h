// src/text/tokenizer/post_processor.h - the "post_processor" of tokenizer.json: tokens added before
// and after a text. Private to text/.
#pragma once

#include <cjson/cJSON.h>

#include "base/token_ids.h"

typedef struct {
  td_token_ids before, after;
} td_post;

// Supports TemplateProcessing, BertProcessing, RobertaProcessing, ByteLevel, and Sequences of them.
// json may be NULL.
td_status td_post_read(td_post *post, const cJSON *json, td_err *err);
void td_post_free(td_post *post);
