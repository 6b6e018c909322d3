// src/base/query.c - percent-encoding and the parameters of a URL.
#include "base/query.h"

#include <string.h>

#include "base/str.h"

bool td_percent_decode(td_buf *out, const char *text, size_t len) {
  bool is_good = true;
  for (size_t i = 0; i < len; i++) {
    const bool is_escape = text[i] == '%';
    const int high = is_escape && len - i > 2 ? td_hex_digit(text[i + 1]) : -1;
    const int low = high >= 0 ? td_hex_digit(text[i + 2]) : -1;
    if (low >= 0 && high + low > 0) {
      td_buf_char(out, (char)(high * 16 + low));
      i += 2;
    } else {
      td_buf_char(out, text[i]);
      is_good &= !is_escape;
    }
  }
  return is_good;
}

bool td_query_get(td_buf *out, const char *query, const char *name) {
  const size_t n = strlen(name);
  while (*query) {
    const size_t len = strcspn(query, "&");
    if (len > n && query[n] == '=' && strncmp(query, name, n) == 0) {
      const char *value = query + n + 1, *end = query + len;
      while (value < end) { // pieces between pluses
        const size_t left = (size_t)(end - value), piece = strcspn(value, "+&");
        td_percent_decode(out, value, piece);
        if (piece < left) td_buf_char(out, ' ');
        value += piece + (piece < left);
      }
      return true;
    }
    query += len + (query[len] == '&');
  }
  return false;
}
