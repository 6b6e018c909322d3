// src/text/tokenizer/bytelevel.h - GPT-2's alphabet of 256 printable characters for bytes:
// 0x21-0x7E, 0xA1-0xAC and 0xAE-0xFF represent themselves, the other 68 bytes in ascending order
// are U+0100 and following. Private to text/.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"

// The character that represents a byte.
uint32_t td_bytelevel_char(uint8_t byte);
// Appends bytes in this alphabet, as UTF-8.
void td_bytelevel_spell(td_buf *out, const char *bytes, size_t len);
// Appends the bytes that text represents. False, with nothing appended, if it has other characters.
bool td_bytelevel_bytes(td_buf *out, const char *text, size_t len);
