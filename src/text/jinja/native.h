// src/text/jinja/native.h - reads arguments in filters, tests, methods and globals.
// Each function returns the default if the argument was omitted, and raises with Python's TypeError
// message if its type is wrong.
#pragma once

#include "text/jinja/jinja.h"

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
