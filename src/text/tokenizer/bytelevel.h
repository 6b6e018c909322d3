// src/text/tokenizer/bytelevel.h - GPT-2's alphabet, which spells any bytes with 256 printable
// characters: 0x21-0x7E, 0xA1-0xAC and 0xAE-0xFF stand for themselves, the 68 others in rising
// order are U+0100 and on. Private to text/.
#ifndef TD_TEXT_TOKENIZER_BYTELEVEL_H
#define TD_TEXT_TOKENIZER_BYTELEVEL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"

// The character that stands for a byte.
uint32_t td_bytelevel_char(uint8_t byte);
// Appends the spelling of bytes, UTF-8.
void td_bytelevel_spell(td_buf *out, const char *bytes, size_t len);
// Appends the bytes that text spells. False, and nothing appended, when it spells none.
bool td_bytelevel_bytes(td_buf *out, const char *text, size_t len);

#endif
