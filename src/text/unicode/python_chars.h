// src/text/unicode/python_chars.h - character properties and case mappings of Python's str methods.
#pragma once

#include <stdbool.h>
#include <stdint.h>

bool td_pychar_is_digit(uint32_t c);
bool td_pychar_is_cased(uint32_t c);
bool td_pychar_is_case_ignorable(uint32_t c);
bool td_pychar_is_printable(uint32_t c);
bool td_pychar_is_space(uint32_t c);
// Whether c ends a line in str.splitlines().
bool td_pychar_is_newline(uint32_t c);

// Full case mappings without context. Each returns the number of code points written.
int td_pychar_lower(uint32_t c, uint32_t out[3]);
int td_pychar_upper(uint32_t c, uint32_t out[3]);
int td_pychar_title(uint32_t c, uint32_t out[3]);
