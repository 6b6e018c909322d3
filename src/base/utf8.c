// src/base/utf8.c - decodes, encodes and repairs UTF-8.
#include "base/utf8.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

// Length of the sequence that begins with lead; 0 if none does.
static size_t sequence_len(uint8_t lead) {
  if (lead < 0x80) return 1;
  if (lead < 0xC2) return 0;
  if (lead < 0xE0) return 2;
  if (lead < 0xF0) return 3;
  return lead < 0xF5 ? 4 : 0;
}

// Checking the second byte excludes overlong forms, surrogates and code points above U+10FFFF.
static bool second_ok(uint8_t lead, uint8_t second) {
  uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  return second >= low && second <= high;
}

int td_utf8_decode(const char *text, size_t len, uint32_t *code_point) {
  const uint8_t *b = (const uint8_t *)text;
  size_t n = sequence_len(b[0]);
  if (n == 1) {
    *code_point = b[0];
    return 1;
  }
  if (n == 0) return 0;
  uint32_t c = b[0] & (0x7Fu >> n);
  for (size_t i = 1; i < n; i++) {
    if (i == len) return -1;
    if (i == 1 ? !second_ok(b[0], b[1]) : (b[i] & 0xC0) != 0x80) return 0;
    c = c << 6 | (b[i] & 0x3Fu);
  }
  *code_point = c;
  return (int)n;
}

int td_utf8_encode(uint32_t code_point, char out[4]) {
  if (code_point < 0x80) {
    out[0] = (char)code_point;
    return 1;
  }
  if (code_point < 0x800) {
    out[0] = (char)(0xC0 | code_point >> 6);
    out[1] = (char)(0x80 | (code_point & 0x3F));
    return 2;
  }
  if (code_point < 0x10000) {
    out[0] = (char)(0xE0 | code_point >> 12);
    out[1] = (char)(0x80 | (code_point >> 6 & 0x3F));
    out[2] = (char)(0x80 | (code_point & 0x3F));
    return 3;
  }
  out[0] = (char)(0xF0 | code_point >> 18);
  out[1] = (char)(0x80 | (code_point >> 12 & 0x3F));
  out[2] = (char)(0x80 | (code_point >> 6 & 0x3F));
  out[3] = (char)(0x80 | (code_point & 0x3F));
  return 4;
}

// Length of the longest valid prefix.
static size_t valid_prefix(const char *text, size_t len) {
  size_t i = 0;
  while (i < len) {
    uint64_t eight;
    while (len - i >= 8) {
      memcpy(&eight, text + i, 8);
      if (eight & 0x8080808080808080u) break;
      i += 8;
    }
    if (i == len) break;
    uint32_t c;
    int n = td_utf8_decode(text + i, len - i, &c);
    if (n <= 0) break;
    i += (size_t)n;
  }
  return i;
}

size_t td_utf8_count(const char *text, size_t len) {
  size_t n = 0;
  for (size_t i = 0; i < len; i++)
    n += ((unsigned char)text[i] & 0xc0) != 0x80;
  return n;
}

bool td_utf8_valid(const char *text, size_t len) {
  return valid_prefix(text, len) == len;
}

size_t td_utf8_whole(const char *text, size_t len) {
  for (size_t back = 1; back <= 3 && back <= len; back++) {
    uint8_t b = (uint8_t)text[len - back];
    if ((b & 0xC0) == 0x80) continue;
    uint32_t c;
    return td_utf8_decode(text + len - back, back, &c) < 0 ? len - back : len;
  }
  return len;
}

// For text[0..len) that does not decode: bytes (1 to 3) to replace by one U+FFFD, i.e. the maximal
// subpart of Unicode chapter 3. Python's errors="replace" does the same.
static size_t bad_len(const char *text, size_t len) {
  const uint8_t *b = (const uint8_t *)text;
  size_t n = sequence_len(b[0]);
  if (n < 2 || len < 2 || !second_ok(b[0], b[1])) return 1;
  size_t i = 2;
  while (i < n && i < len && (b[i] & 0xC0) == 0x80)
    i++;
  return i;
}

void td_utf8_add_replaced(td_buf *out, const char *text, size_t len) {
  while (len) {
    size_t n = valid_prefix(text, len);
    td_buf_add(out, text, n);
    text += n;
    len -= n;
    if (!len) return;
    td_buf_str(out, "\xEF\xBF\xBD");
    n = bad_len(text, len);
    text += n;
    len -= n;
  }
}

// ---- untrusted text -----------------------------------------------------------------------------

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
