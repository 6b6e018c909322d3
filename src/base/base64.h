// src/base/base64.h - decoding base64 by nettle.
#pragma once

#include <nettle/base64.h>

#include "base/buf.h"

// Appends what padded base64 stands for; blanks and line feeds in it do not count. False: it is
// invalid, or empty.
static inline bool td_base64_decode(td_buf *out, const char *text, size_t len) {
  struct base64_decode_ctx ctx;
  size_t n = BASE64_DECODE_LENGTH(len);
  td_buf_reserve_exact(out, n);
  if (!len || out->failed) return len;
  base64_decode_init(&ctx);
  if (!base64_decode_update(&ctx, &n, (uint8_t *)out->data + out->len, len, text)) return false;
  out->len += n;
  out->data[out->len] = '\0';
  return base64_decode_final(&ctx);
}
