// src/device/cpu/kv_f8.h - rows of KV pages in E4M3 (tandem/kv_f8.h), one at a time.
#pragma once

#include "tandem/kv_f8.h"

// Row `row` of a page, counted over all heads and tokens: [rows->dim].
void td_kv_f8_put(const td_kv_rows *rows, uint32_t page_tokens, void *page, size_t row,
                  const float *in);
void td_kv_f8_get(const td_kv_rows *rows, uint32_t page_tokens, const void *page, size_t row,
                  float *out);
