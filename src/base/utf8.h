// src/base/utf8.h - UTF-8, strictly (no surrogates, no overlong forms, nothing above U+10FFFF).
#ifndef TD_BASE_UTF8_H
#define TD_BASE_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"

// Decodes the code point at text[0..len), len >= 1. Returns its bytes (1 to 4); 0 when the bytes
// are not UTF-8; -1 when they are a proper beginning that len cuts off.
int td_utf8_decode(const char *text, size_t len, uint32_t *code_point);
// Writes 1 to 4 bytes and returns how many; code_point must be a scalar value.
int td_utf8_encode(uint32_t code_point, char out[4]);
bool td_utf8_valid(const char *text, size_t len);
// Bytes of the longest prefix that ends at a whole code point, when what follows it is a proper
// beginning of one; len itself otherwise. For holding back split characters.
size_t td_utf8_whole(const char *text, size_t len);
// For text[0..len) that does not decode: bytes to skip (1 to 3) for one U+FFFD, the maximal subpart
// of Unicode chapter 3, which is also what Python's errors="replace" does.
size_t td_utf8_bad_len(const char *text, size_t len);
// Appends text with each such part replaced by U+FFFD.
void td_utf8_add_replaced(td_buf *out, const char *text, size_t len);

#endif
