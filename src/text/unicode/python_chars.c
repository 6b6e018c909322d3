// src/text/unicode/python_chars.c - looks up character properties and case mappings in tables.
#include "text/unicode/python_chars.h"

#include <stdlib.h>

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

// row begins with the first and the last code point of a run.
static int against_run(const void *c, const void *row) {
  const uint32_t *range = row;
  return *(const uint32_t *)c < range[0] ? -1 : *(const uint32_t *)c > range[1];
}

static int against_special(const void *c, const void *row) {
  const special *s = row;
  return *(const uint32_t *)c < s->c ? -1 : *(const uint32_t *)c > s->c;
}

static bool in_runs(const run *runs, size_t n, uint32_t c) {
  const run *r = bsearch(&c, runs, n, sizeof *runs, against_run);
  return r && (c - r->first) % r->step == 0;
}

#define IN(table, c) in_runs(table, TD_COUNT(table), c)

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

static uint32_t shifted(const shift *runs, size_t n, uint32_t c) {
  const shift *r = bsearch(&c, runs, n, sizeof *runs, against_run);
  return r && (c - r->first) % r->step == 0 ? (uint32_t)((int32_t)c + r->delta) : c;
}

// Returns the number of code points written to out; 0 if c is not in the table.
static int find_special(const special *table, size_t n, uint32_t c, uint32_t out[3]) {
  const special *s = bsearch(&c, table, n, sizeof *table, against_special);
  int n_out = 0;
  for (; s && n_out < 3 && s->to[n_out]; n_out++)
    out[n_out] = s->to[n_out];
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
