// src/base/msgpack.c - MessagePack's encodings: a tag, and the value in big endian.
#include "base/msgpack.h"

#include <string.h>

static void put(td_buf *out, unsigned tag, uint64_t value, unsigned n_bytes) {
  unsigned char bytes[9] = {(unsigned char)tag};
  for (unsigned i = n_bytes; i > 0; i--, value >>= 8)
    bytes[i] = (unsigned char)value;
  td_buf_add(out, bytes, n_bytes + 1);
}

// few: the tag that holds a count below 16; many: the one before a count of 2 bytes; its next,
// of 4.
static void put_count(td_buf *out, unsigned few, unsigned many, uint32_t n) {
  if (n < 16)
    put(out, few | n, 0, 0);
  else if (n <= UINT16_MAX)
    put(out, many, n, 2);
  else
    put(out, many + 1, n, 4);
}

void td_mp_array(td_buf *out, uint32_t n) {
  put_count(out, 0x90, 0xdc, n);
}

void td_mp_map(td_buf *out, uint32_t n) {
  put_count(out, 0x80, 0xde, n);
}

void td_mp_uint(td_buf *out, uint64_t value) {
  if (value < 128)
    put(out, (unsigned)value, 0, 0);
  else if (value <= UINT8_MAX)
    put(out, 0xcc, value, 1);
  else if (value <= UINT16_MAX)
    put(out, 0xcd, value, 2);
  else if (value <= UINT32_MAX)
    put(out, 0xce, value, 4);
  else
    put(out, 0xcf, value, 8);
}

void td_mp_int(td_buf *out, int64_t value) {
  if (value >= 0)
    td_mp_uint(out, (uint64_t)value);
  else if (value >= -32)
    put(out, (unsigned)value & 0xff, 0, 0);
  else
    put(out, 0xd3, (uint64_t)value, 8);
}

void td_mp_double(td_buf *out, double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  put(out, 0xcb, bits, 8);
}

void td_mp_str(td_buf *out, const char *text) {
  const size_t n = strlen(text);
  if (n < 32)
    put(out, 0xa0 | (unsigned)n, 0, 0);
  else if (n <= UINT8_MAX)
    put(out, 0xd9, n, 1);
  else if (n <= UINT16_MAX)
    put(out, 0xda, n, 2);
  else
    put(out, 0xdb, n, 4);
  td_buf_add(out, text, n);
}

void td_mp_nil(td_buf *out) {
  put(out, 0xc0, 0, 0);
}
