// src/text/jinja/native.h - defines filters, tests, methods and globals, and reads their arguments.
// Each jj_arg_ function returns the default if the argument was omitted, and raises with Python's
// TypeError message if its type is wrong.
#pragma once

#include "text/jinja/jinja.h"

#define JJ_NATIVE(fn)                                                                              \
  static jj_value fn(jj *j, jj_value self, const jj_value *a, const jj_args *raw)
#define JJ_UNUSED (void)j, (void)self, (void)a, (void)raw
// One that is an expression.
#define JJ_NATIVE_OF(fn, expr)                                                                     \
  JJ_NATIVE(fn) {                                                                                  \
    JJ_UNUSED;                                                                                     \
    return expr;                                                                                   \
  }

static inline bool jj_given(jj_value v) {
  return v.type != JJ_MISSING;
}
static inline bool jj_given_value(jj_value v) { // given and not None
  return v.type != JJ_MISSING && v.type != JJ_NONE;
}
bool jj_arg_bool(jj_value v);
int64_t jj_arg_int(jj *j, jj_value v, int64_t otherwise);
// NULL if the argument is missing or None.
const jj_str *jj_arg_str(jj *j, jj_value v);
_Noreturn void jj_raise_type(jj *j, const char *expected, jj_value got);
