// src/text/jinja/filters_num.c - filters on numbers.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "text/jinja/native.h"

JJ_NATIVE(filter_abs) {
  JJ_UNUSED;
  int64_t i;
  if (self.type == JJ_FLOAT) return JJ_OF_FLOAT(fabs(self.f));
  if (!jj_as_int(self, &i))
    jj_raise(j, TD_EFORMAT, "bad operand type for abs(): '%s'", jj_type_name(self));
  return i < 0 ? jj_negate(j, JJ_OF_INT(i), OP_SUB) : JJ_OF_INT(i);
}

// float(value); false where Python would raise.
static bool to_float(jj *j, jj_value v, double *out) {
  if (v.type == JJ_UNDEF) jj_raise_undefined(j, v);
  if (v.type == JJ_STR) return jj_parse_float(v.s, out);
  if (!jj_is_number(v)) return false;
  *out = jj_as_double(j, v);
  return true;
}

JJ_NATIVE(filter_int) {
  JJ_UNUSED;
  jj_value otherwise = jj_given(a[0]) ? a[0] : JJ_OF_INT(0);
  int64_t base = jj_arg_int(j, a[1], 10);
  jj_value out;
  int64_t i;
  double f;
  if (jj_as_int(self, &i)) return JJ_OF_INT(i);
  if (self.type == JJ_BIG) return self;
  bool known_base = base == 0 || (base >= 2 && base <= 36);
  if (self.type == JJ_STR && known_base && jj_parse_int(j, self.s, (int)base, &out)) return out;
  if (self.type == JJ_FLOAT) return jj_float_to_int(j, self.f, &out) ? out : otherwise;
  // "42.23" becomes 42; text for an infinity yields the default.
  if (!to_float(j, self, &f) || isinf(f)) return otherwise;
  return jj_float_to_int(j, f, &out) ? out : otherwise;
}

JJ_NATIVE(filter_float) {
  JJ_UNUSED;
  double f;
  if (to_float(j, self, &f)) return JJ_OF_FLOAT(f);
  return jj_given(a[0]) ? a[0] : JJ_OF_FLOAT(0.0);
}

// round(): ties to even on the exact decimal expansion, as printf does.
static double round_float(double f, int64_t precision) {
  if (isnan(f) || isinf(f) || precision > 323) return f;
  if (precision >= 0) {
    char text[700];
    snprintf(text, sizeof text, "%.*f", (int)precision, f);
    return strtod(text, NULL);
  }
  if (precision < -308) return copysign(0.0, f);
  double unit = pow(10, (double)-precision);
  return nearbyint(f / unit) * unit;
}

static jj_value round_int(jj *j, int64_t i, int64_t precision) {
  if (precision >= 0) return JJ_OF_INT(i);
  if (precision < -18) return JJ_OF_INT(0);
  int64_t unit = 1;
  for (int64_t k = precision; k < 0; k++)
    unit *= 10;
  int64_t rest = i % unit, down = i - rest, size = rest < 0 ? -rest : rest;
  bool up = size > unit - size || (size == unit - size && down / unit % 2 != 0);
  return up ? jj_arith(j, OP_ADD, JJ_OF_INT(down), JJ_OF_INT(i < 0 ? -unit : unit))
            : JJ_OF_INT(down);
}

JJ_NATIVE(filter_round) {
  JJ_UNUSED;
  const jj_str *method = jj_given(a[1]) ? jj_to_str(j, a[1]) : jj_lit(j, "common");
  int64_t i, precision = jj_arg_int(j, a[0], 0);
  bool ceiling = jj_str_is(method, "ceil"), flooring = jj_str_is(method, "floor");
  if (!ceiling && !flooring && !jj_str_is(method, "common"))
    jj_raise(j, TD_EFORMAT, "method must be common, ceil or floor");
  if (!jj_is_number(self))
    jj_raise(j, TD_EFORMAT, "type %s doesn't define __round__ method", jj_type_name(self));
  if (!ceiling && !flooring) {
    if (jj_as_int(self, &i)) return round_int(j, i, precision);
    if (self.type == JJ_BIG && precision >= 0) return self;
    return JJ_OF_FLOAT(round_float(jj_as_double(j, self), precision));
  }
  double unit = pow(10, (double)precision), scaled = jj_as_double(j, self) * unit;
  if (isnan(scaled) || isinf(scaled)) jj_raise(j, TD_EFORMAT, "cannot convert float to integer");
  return JJ_OF_FLOAT((ceiling ? ceil(scaled) : floor(scaled)) / unit);
}

const jj_native jj_num_filters[] = {
    {"int", "|default,base", filter_int},
    {"float", "|default", filter_float},
    {"abs", "", filter_abs},
    {"round", "|precision,method", filter_round},
    {NULL, NULL, NULL},
};
