// src/base/msgpack.h - appends values to a td_buf as MessagePack, in the shortest form each has.
// Arrays are a header followed by their n values, maps by n pairs of key and value.
#pragma once

#include <stdint.h>

#include "base/buf.h"

void td_mp_array(td_buf *out, uint32_t n);
void td_mp_map(td_buf *out, uint32_t n);
void td_mp_uint(td_buf *out, uint64_t value);
void td_mp_int(td_buf *out, int64_t value);
void td_mp_double(td_buf *out, double value);
void td_mp_str(td_buf *out, const char *text);
void td_mp_nil(td_buf *out);
