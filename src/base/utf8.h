// src/base/utf8.h - strict UTF-8: no surrogates, no overlong forms, nothing above U+10FFFF.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"

// Decodes the code point at text[0..len), len >= 1. Returns its length (1 to 4); 0 if the bytes are
// not UTF-8; -1 if they are an incomplete sequence cut off by len.
int td_utf8_decode(const char *text, size_t len, uint32_t *code_point);
// Writes 1 to 4 bytes and returns their number. code_point must be a scalar value.
int td_utf8_encode(uint32_t code_point, char out[4]);
// Characters that begin in text.
size_t td_utf8_count(const char *text, size_t len);
bool td_utf8_valid(const char *text, size_t len);
// Length of text without an incomplete sequence at its end; len if there is none. For holding back
// split characters.
size_t td_utf8_whole(const char *text, size_t len);
// Appends text with each invalid part replaced by U+FFFD.
void td_utf8_add_replaced(td_buf *out, const char *text, size_t len);

// Appends text with control characters (C0, DEL, C1) and invalid UTF-8 bytes escaped as \xNN.
// Characters in kept, e.g. "\n\t", are not escaped.
void td_printable_add(td_buf *out, const char *text, size_t len, const char *kept);
