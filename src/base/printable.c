// src/base/printable.c - escapes control characters.
#include "base/printable.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "base/utf8.h"

static bool is_shown(uint32_t code_point, const char *kept) {
  if (code_point >= 0x20 && code_point < 0x7f) return true;
  if (code_point >= 0xa0) return true;
  return code_point && code_point < 0x20 && strchr(kept, (int)code_point);
}

void td_printable_add(td_buf *out, const char *text, size_t len, const char *kept) {
  for (size_t i = 0, start = 0; i < len || start < len;) {
    uint32_t code_point = 0;
    int n = i < len ? td_utf8_decode(text + i, len - i, &code_point) : 0;
    if (n > 0 && is_shown(code_point, kept)) {
      i += (size_t)n;
      continue;
    }
    td_buf_add(out, text + start, i - start);
    if (i == len) return;
    size_t n_bad = n > 0 ? (size_t)n : 1;
    if (n > 0)
      td_buf_printf(out, "\\x%02x", (unsigned)code_point);
    else
      td_buf_printf(out, "\\x%02x", (unsigned)(uint8_t)text[i]);
    start = i += n_bad;
  }
}
