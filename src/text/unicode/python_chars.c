// src/text/unicode/python_chars.c - looks up character properties and case mappings in tables.
#include "text/unicode/python_chars.h"

#include <stdlib.h>

#include "base/status.h"

// Code points first, first + step, ... up to last, and the offset to the other case.
typedef struct {
  uint32_t first, last, step;
  int32_t delta;
} shift;

// A case mapping without context to several code points.
typedef struct {
  uint32_t c;
  uint32_t to[3]; // 0: unused
} special;

#include "text/unicode/python_chars_tables.inc"

// bounds are where a property begins, ends, begins again, and so on.
static bool in_set(const uint32_t *bounds, size_t n, uint32_t c) {
  size_t low = 0; // the number of bounds up to c
  while (low < n) {
    size_t mid = (low + n) / 2;
    if (bounds[mid] <= c)
      low = mid + 1;
    else
      n = mid;
  }
  return low % 2;
}

#define IN(table, c) in_set(table, TD_COUNT(table), c)

static int against_shift(const void *c, const void *row) {
  const shift *s = row;
  return *(const uint32_t *)c < s->first ? -1 : *(const uint32_t *)c > s->last;
}

static int against_special(const void *c, const void *row) {
  const special *s = row;
  return *(const uint32_t *)c < s->c ? -1 : *(const uint32_t *)c > s->c;
}

bool td_pychar_is_digit(uint32_t c) {
  return IN(digit, c);
}

bool td_pychar_is_cased(uint32_t c) {
  return IN(cased, c);
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

typedef struct {
  const special *specials;
  const shift *shifts;
  size_t n_specials, n_shifts;
} mapping;

#define MAPPING(name)                                                                              \
  (&(const mapping){name##_special, to_##name, TD_COUNT(name##_special), TD_COUNT(to_##name)})

// Returns the number of code points written to out; 0 if the mapping leaves out c.
static int find(const mapping *m, uint32_t c, uint32_t out[3]) {
  const special *s = bsearch(&c, m->specials, m->n_specials, sizeof *s, against_special);
  int n_out = 0;
  for (; s && n_out < 3 && s->to[n_out]; n_out++)
    out[n_out] = s->to[n_out];
  if (s) return n_out;
  const shift *r = bsearch(&c, m->shifts, m->n_shifts, sizeof *r, against_shift);
  if (!r || (c - r->first) % r->step) return 0;
  out[0] = (uint32_t)((int32_t)c + r->delta);
  return 1;
}

static int find_or_keep(const mapping *m, uint32_t c, uint32_t out[3]) {
  out[0] = c;
  int n = find(m, c, out);
  return n ? n : 1;
}

int td_pychar_lower(uint32_t c, uint32_t out[3]) {
  return find_or_keep(MAPPING(lower), c, out);
}

int td_pychar_upper(uint32_t c, uint32_t out[3]) {
  return find_or_keep(MAPPING(upper), c, out);
}

int td_pychar_title(uint32_t c, uint32_t out[3]) {
  int n = find(MAPPING(title), c, out);
  return n ? n : td_pychar_upper(c, out);
}
