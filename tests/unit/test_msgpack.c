// tests/unit/test_msgpack.c - the bytes of MessagePack's values, at the edges of each of their
// forms.
// CTest: no-tsan
#include "base/msgpack.h"

#include <stdlib.h>
#include <string.h>

#include "unit/testing.h"

// The first bytes, as hexadecimal digits, and how many there are; empties buf.
static void check(td_buf *buf, const char *hex, size_t len) {
  assert_int_equal(buf->len, len);
  for (size_t i = 0; hex[2 * i]; i++) {
    const char digits[] = {hex[2 * i], hex[2 * i + 1], '\0'};
    assert_int_equal((unsigned char)buf->data[i], strtoul(digits, NULL, 16));
  }
  td_buf_clear(buf);
}

TEST(integers) {
  static const struct {
    uint64_t value;
    const char *hex;
  } cases[] = {
      {0, "00"},
      {127, "7f"},
      {128, "cc80"},
      {255, "ccff"},
      {256, "cd0100"},
      {65535, "cdffff"},
      {65536, "ce00010000"},
      {UINT32_MAX, "ceffffffff"},
      {1ull << 32, "cf0000000100000000"},
      {UINT64_MAX, "cfffffffffffffffff"},
  };
  td_buf buf = TD_BUF_INIT;
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    td_mp_uint(&buf, cases[i].value);
    check(&buf, cases[i].hex, strlen(cases[i].hex) / 2);
  }
  static const struct {
    int64_t value;
    const char *hex;
  } below[] = {{7, "07"}, {-1, "ff"}, {-32, "e0"}, {-33, "d3ffffffffffffffdf"}};
  for (size_t i = 0; i < TD_COUNT(below); i++) {
    td_mp_int(&buf, below[i].value);
    check(&buf, below[i].hex, strlen(below[i].hex) / 2);
  }
  td_buf_free(&buf);
}

TEST(arrays_texts_and_the_rest) {
  static char text[65537];
  static const struct {
    uint32_t n;
    const char *array, *map, *text;
  } cases[] = {
      {0, "90", "80", "a0"},
      {15, "9f", "8f", "af78"},
      {16, "dc0010", "de0010", "b078"},
      {31, "dc001f", "de001f", "bf78"},
      {32, "dc0020", "de0020", "d92078"},
      {255, "dc00ff", "de00ff", "d9ff78"},
      {256, "dc0100", "de0100", "da0100"},
      {65535, "dcffff", "deffff", "daffff78"},
      {65536, "dd00010000", "df00010000", "db0001000078"},
  };
  td_buf buf = TD_BUF_INIT;
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    const uint32_t n = cases[i].n;
    td_mp_array(&buf, n);
    check(&buf, cases[i].array, strlen(cases[i].array) / 2);
    td_mp_map(&buf, n);
    check(&buf, cases[i].map, strlen(cases[i].map) / 2);
    memset(text, 'x', n);
    text[n] = '\0';
    td_mp_str(&buf, text);
    check(&buf, cases[i].text, n + (n < 32 ? 1u : n < 256 ? 2u : n < 65536 ? 3u : 5u));
  }
  td_mp_nil(&buf);
  check(&buf, "c0", 1);
  td_mp_double(&buf, -1.5);
  check(&buf, "cbbff8000000000000", 9);
  td_buf_free(&buf);
}
