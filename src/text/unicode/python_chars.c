// src/text/unicode/python_chars.c - looks up character properties and case mappings in tables.
#include "text/unicode/python_chars.h"

#include <stddef.h>

#include "base/status.h"

// Code points first, first + step, ... up to last have the property.
typedef struct {
  uint32_t first, last, step;
} run;

// As above, plus the offset to the other case.
typedef struct {
  uint32_t first, last, step;
  int32_t delta;
} shift;

// A case mapping without context that has several code points or fits no run.
typedef struct {
  uint32_t c;
  uint32_t to[3]; // 0: unused
} special;

#include "text/unicode/python_chars_tables.inc"

static bool in_runs(const run *runs, size_t n, uint32_t c) {
  size_t low = 0, high = n;
  while (low < high) {
    size_t mid = (low + high) / 2;
    if (c > runs[mid].last) {
      low = mid + 1;
    } else {
      high = mid;
    }
  }
  return low < n && c >= runs[low].first && (c - runs[low].first) % runs[low].step == 0;
}

#define IN(table, c) in_runs(table, TD_COUNT(table), c)

bool td_pychar_is_alpha(uint32_t c) {
  return IN(alpha, c);
}

bool td_pychar_is_decimal(uint32_t c) {
  return IN(decimal, c);
}

bool td_pychar_is_digit(uint32_t c) {
  return IN(digit, c);
}

bool td_pychar_is_numeric(uint32_t c) {
  return IN(numeric, c);
}

bool td_pychar_is_alnum(uint32_t c) {
  return IN(alpha, c) || IN(decimal, c) || IN(digit, c) || IN(numeric, c);
}

bool td_pychar_is_upper(uint32_t c) {
  return IN(upper, c);
}

bool td_pychar_is_lower(uint32_t c) {
  return IN(lower, c);
}

bool td_pychar_is_title(uint32_t c) {
  return IN(title, c);
}

bool td_pychar_is_cased(uint32_t c) {
  return IN(lower, c) || IN(upper, c) || IN(title, c);
}

bool td_pychar_is_case_ignorable(uint32_t c) {
  return IN(case_ignorable, c);
}

bool td_pychar_is_printable(uint32_t c) {
  return c < 0x7F ? c >= 0x20 : !IN(unprintable, c);
}

bool td_pychar_is_space(uint32_t c) {
  if (c < 0x80) return c == ' ' || (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x1F);
  return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 ||
         c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

bool td_pychar_is_newline(uint32_t c) {
  return (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 ||
         c == 0x2029;
}

static uint32_t shifted(const shift *runs, size_t n, uint32_t c) {
  size_t low = 0, high = n;
  while (low < high) {
    size_t mid = (low + high) / 2;
    if (c > runs[mid].last) {
      low = mid + 1;
    } else {
      high = mid;
    }
  }
  bool hit = low < n && c >= runs[low].first && (c - runs[low].first) % runs[low].step == 0;
  return hit ? (uint32_t)((int32_t)c + runs[low].delta) : c;
}

// Returns the number of code points written to out; 0 if c is not in the table.
static int find_special(const special *table, size_t n, uint32_t c, uint32_t out[3]) {
  size_t low = 0, high = n;
  while (low < high) {
    size_t mid = (low + high) / 2;
    if (c > table[mid].c) {
      low = mid + 1;
    } else {
      high = mid;
    }
  }
  if (low == n || table[low].c != c) return 0;
  int n_out = 0;
  while (n_out < 3 && table[low].to[n_out]) {
    out[n_out] = table[low].to[n_out];
    n_out++;
  }
  return n_out;
}

int td_pychar_lower(uint32_t c, uint32_t out[3]) {
  int n = find_special(lower_special, TD_COUNT(lower_special), c, out);
  if (n) return n;
  out[0] = shifted(to_lower, TD_COUNT(to_lower), c);
  return 1;
}

int td_pychar_upper(uint32_t c, uint32_t out[3]) {
  int n = find_special(upper_special, TD_COUNT(upper_special), c, out);
  if (n) return n;
  out[0] = shifted(to_upper, TD_COUNT(to_upper), c);
  return 1;
}

int td_pychar_title(uint32_t c, uint32_t out[3]) {
  int n = find_special(title_special, TD_COUNT(title_special), c, out);
  return n ? n : td_pychar_upper(c, out);
}
