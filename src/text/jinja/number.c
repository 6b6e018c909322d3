// src/text/jinja/number.c - Python's arithmetic on int64 and double, and parsing of numbers.
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "text/jinja/jinja.h"

static _Noreturn void overflow(jj *j) {
  jj_raise(j, TD_ELIMIT, "integer overflow: the result does not fit 64 bits");
}

static int64_t floor_div(jj *j, int64_t a, int64_t b) {
  if (a == INT64_MIN && b == -1) overflow(j);
  int64_t q = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? q - 1 : q;
}

static int64_t floor_mod(int64_t a, int64_t b) {
  if (b == -1) return 0;
  int64_t r = a % b;
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}

static jj_value int_power(jj *j, int64_t base, int64_t exponent) {
  if (exponent < 0) {
    if (base == 0) jj_raise(j, TD_EFORMAT, "0.0 cannot be raised to a negative power");
    return JJ_OF_FLOAT(pow((double)base, (double)exponent));
  }
  int64_t result = 1;
  for (; exponent; exponent >>= 1) {
    if ((exponent & 1) && __builtin_mul_overflow(result, base, &result)) overflow(j);
    if (exponent > 1 && __builtin_mul_overflow(base, base, &base)) overflow(j);
  }
  return JJ_OF_INT(result);
}

static jj_value int_arith(jj *j, jj_op op, int64_t a, int64_t b) {
  int64_t r = 0;
  bool too_big = false;
  switch (op) {
  case OP_ADD: too_big = __builtin_add_overflow(a, b, &r); break;
  case OP_SUB: too_big = __builtin_sub_overflow(a, b, &r); break;
  case OP_MUL: too_big = __builtin_mul_overflow(a, b, &r); break;
  case OP_POW: return int_power(j, a, b);
  default:
    if (b == 0) {
      jj_raise(j, TD_EFORMAT, "%s",
               op == OP_DIV ? "division by zero" : "integer division or modulo by zero");
    }
    if (op == OP_DIV) return JJ_OF_FLOAT((double)((long double)a / (long double)b));
    r = op == OP_FLOORDIV ? floor_div(j, a, b) : floor_mod(a, b);
  }
  if (too_big) overflow(j);
  return JJ_OF_INT(r);
}

static double float_mod(double a, double b) {
  double m = fmod(a, b);
  if (m == 0) return copysign(0, b);
  return (b < 0) != (m < 0) ? m + b : m;
}

// CPython's float_floor_div, including its rounding.
static double float_floor_div(double a, double b) {
  double m = fmod(a, b), div = (a - m) / b;
  if (m != 0 && (b < 0) != (m < 0)) div -= 1;
  if (div == 0) return copysign(0, a / b);
  double whole = floor(div);
  return div - whole > 0.5 ? whole + 1 : whole;
}

static jj_value float_power(jj *j, double a, double b) {
  if (a == 0 && b < 0) jj_raise(j, TD_EFORMAT, "0.0 cannot be raised to a negative power");
  double r = pow(a, b);
  if (isnan(r) && !isnan(a) && !isnan(b))
    jj_raise(j, TD_EUNSUPPORTED, "complex numbers are not supported");
  if (isinf(r) && !isinf(a) && !isinf(b))
    jj_raise(j, TD_EFORMAT, "(34, 'Numerical result out of range')");
  return JJ_OF_FLOAT(r);
}

static jj_value float_arith(jj *j, jj_op op, double a, double b) {
  switch (op) {
  case OP_ADD: return JJ_OF_FLOAT(a + b);
  case OP_SUB: return JJ_OF_FLOAT(a - b);
  case OP_MUL: return JJ_OF_FLOAT(a * b);
  case OP_POW: return float_power(j, a, b);
  default:
    if (b == 0)
      jj_raise(j, TD_EFORMAT, "%s", op == OP_DIV ? "float division by zero" : "float modulo");
    if (op == OP_DIV) return JJ_OF_FLOAT(a / b);
    return JJ_OF_FLOAT(op == OP_MOD ? float_mod(a, b) : float_floor_div(a, b));
  }
}

jj_value jj_arith(jj *j, jj_op op, jj_value a, jj_value b) {
  int64_t x, y;
  if (jj_as_int(a, &x) && jj_as_int(b, &y)) return int_arith(j, op, x, y);
  if (a.type != JJ_FLOAT && b.type != JJ_FLOAT) overflow(j); // beyond int64
  return float_arith(j, op, jj_as_double(j, a), jj_as_double(j, b));
}

jj_value jj_negate(jj *j, jj_value v, jj_op op) {
  int64_t i;
  if (v.type == JJ_UNDEF) jj_raise_undefined(j, v);
  if (!jj_is_number(v)) {
    jj_raise(j, TD_EFORMAT, "bad operand type for unary %s: '%s'", op == OP_SUB ? "-" : "+",
             jj_type_name(v));
  }
  if (v.type == JJ_FLOAT) return JJ_OF_FLOAT(op == OP_SUB ? -v.f : v.f);
  if (!jj_as_int(v, &i)) {
    if (op == OP_ADD) return v;
    overflow(j);
  }
  if (op == OP_SUB && i == INT64_MIN) overflow(j);
  return JJ_OF_INT(op == OP_SUB ? -i : i);
}

// ---- parsing ----

jj_value jj_big(jj *j, const char *digits, size_t len) {
  return (jj_value){.type = JJ_BIG, .s = jj_str_new(j, digits, len)};
}

static int digit_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  c = (char)tolower((unsigned char)c);
  return c >= 'a' && c <= 'z' ? c - 'a' + 10 : 99;
}

// After sign and white space: skips a base prefix if the base permits it. Returns the base to use,
// or 0 if the text cannot be a number.
static int take_prefix(const char **p, const char *end, int base) {
  if (end - *p > 1 && (*p)[0] == '0') {
    char c = (char)tolower((unsigned char)(*p)[1]);
    int prefix = c == 'x' ? 16 : c == 'o' ? 8 : c == 'b' ? 2 : 0;
    if (prefix && (base == 0 || base == prefix)) {
      *p += 2;
      if (end - *p > 1 && **p == '_') ++*p;
      return prefix;
    }
    // int("010", 0) is an error, int("000", 0) is not.
    for (const char *q = *p; base == 0 && q < end; q++)
      if (*q != '0' && *q != '_') return 0;
  }
  return base ? base : 10;
}

bool jj_parse_int(jj *j, const jj_str *text, int base, jj_value *out) {
  const jj_str *s = jj_strip(j, text, NULL, true, true);
  const char *p = s->p, *end = s->p + s->len;
  bool negative = p < end && *p == '-';
  if (p < end && (*p == '-' || *p == '+')) p++;
  base = take_prefix(&p, end, base);
  if (!base) return false;
  int64_t value = 0;
  bool big = false, digit_before = false;
  const char *first = p;
  for (; p < end; p++) {
    if (*p == '_' && digit_before) {
      digit_before = false;
      continue;
    }
    int d = digit_value(*p);
    if (d >= base) return false;
    digit_before = true;
    big = big || __builtin_mul_overflow(value, base, &value) ||
          __builtin_sub_overflow(value, d, &value);
  }
  if (!digit_before) return false;
  if (!negative && value == INT64_MIN) big = true;
  if (!big) {
    *out = JJ_OF_INT(negative ? value : -value);
    return true;
  }
  if (base != 10) overflow(j);
  jj_builder b;
  jj_build(&b, j);
  if (negative) jj_add_text(&b, "-");
  while (*first == '0' || *first == '_')
    first++;
  for (; first < end; first++)
    if (*first != '_') jj_add(&b, first, 1);
  *out = (jj_value){.type = JJ_BIG, .s = jj_built(&b)};
  return true;
}

// Copies the number without underscores, each of which must be between digits.
static size_t plain_number(const char *p, size_t len, char *out, size_t cap) {
  size_t n = 0;
  for (size_t i = 0; i < len && n + 1 < cap; i++) {
    if (p[i] == '_') {
      bool between = i > 0 && i + 1 < len && isdigit((unsigned char)p[i - 1]) &&
                     isdigit((unsigned char)p[i + 1]);
      if (!between) return 0;
      continue;
    }
    if (!isdigit((unsigned char)p[i]) && !strchr("+-.eE", p[i])) return 0;
    out[n++] = p[i];
  }
  out[n] = '\0';
  return n;
}

bool jj_parse_float(const jj_str *s, double *out) {
  char text[512];
  const char *p = s->p;
  size_t len = s->len;
  while (len && isspace((unsigned char)*p))
    p++, len--;
  while (len && isspace((unsigned char)p[len - 1]))
    len--;
  bool negative = len && *p == '-';
  size_t sign = len && (*p == '-' || *p == '+');
  static const char *const words[] = {"inf", "infinity", "nan"};
  for (size_t i = 0; i < TD_COUNT(words); i++) {
    if (len - sign != strlen(words[i]) || strncasecmp(p + sign, words[i], len - sign) != 0)
      continue;
    *out = i == 2 ? NAN : negative ? -INFINITY : INFINITY;
    return true;
  }
  if (len >= sizeof text || !plain_number(p, len, text, sizeof text)) return false;
  char *stop;
  *out = strtod(text, &stop);
  return stop != text && *stop == '\0';
}

bool jj_float_to_int(jj *j, double f, jj_value *out) {
  if (isnan(f)) return false;
  if (isinf(f)) jj_raise(j, TD_EFORMAT, "cannot convert float infinity to integer");
  f = trunc(f);
  if (f >= -9223372036854775808.0 && f < 9223372036854775808.0) {
    *out = JJ_OF_INT((int64_t)f);
    return true;
  }
  char digits[400];
  int n = snprintf(digits, sizeof digits, "%.0f", f);
  *out = jj_big(j, digits, (size_t)n);
  return true;
}
