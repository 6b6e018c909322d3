// src/text/tokenizer/bytelevel.c - GPT-2's byte alphabet.
#include "text/tokenizer/bytelevel.h"

#include "base/utf8.h"

uint32_t td_bytelevel_char(uint8_t byte) {
  if (byte < 0x21) return 0x100u + byte;
  if (byte < 0x7F) return byte;
  if (byte < 0xA1) return 0x121u + (byte - 0x7Fu);
  return byte == 0xAD ? 0x143u : byte;
}

// The byte that a character represents, or -1.
static int byte_of(uint32_t c) {
  if (c >= 0x100 && c < 0x121) return (int)(c - 0x100);
  if (c >= 0x121 && c < 0x143) return (int)(c - 0x121 + 0x7F);
  if (c == 0x143) return 0xAD;
  bool itself = (c >= 0x21 && c < 0x7F) || (c >= 0xA1 && c <= 0xFF && c != 0xAD);
  return itself ? (int)c : -1;
}

void td_bytelevel_spell(td_buf *out, const char *bytes, size_t len) {
  td_buf_reserve(out, len * 2);
  for (size_t i = 0; i < len; i++) {
    char utf8[4];
    int n = td_utf8_encode(td_bytelevel_char((uint8_t)bytes[i]), utf8);
    td_buf_add(out, utf8, (size_t)n);
  }
}

bool td_bytelevel_bytes(td_buf *out, const char *text, size_t len) {
  size_t start = out->len;
  for (size_t i = 0; i < len;) {
    uint32_t c;
    int n = td_utf8_decode(text + i, len - i, &c), byte = n > 0 ? byte_of(c) : -1;
    if (byte < 0) {
      out->len = start;
      if (out->data) out->data[start] = '\0';
      return false;
    }
    td_buf_char(out, (char)byte);
    i += (size_t)n;
  }
  return true;
}
