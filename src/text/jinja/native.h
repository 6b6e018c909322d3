// src/text/jinja/native.h - reading arguments in filters, tests, methods and globals.
// Each takes the default where the argument was not given and raises a TypeError's words where it
// has the wrong type.
#ifndef TD_TEXT_JINJA_NATIVE_H
#define TD_TEXT_JINJA_NATIVE_H

#include "text/jinja/jinja.h"

static inline bool jj_given(jj_value v) {
  return v.type != JJ_MISSING;
}
static inline bool jj_given_value(jj_value v) { // and not None
  return v.type != JJ_MISSING && v.type != JJ_NONE;
}
bool jj_arg_bool(jj_value v, bool otherwise);
int64_t jj_arg_int(jj *j, jj_value v, int64_t otherwise);
// NULL where the argument is missing or None.
const jj_str *jj_arg_str(jj *j, jj_value v);
_Noreturn void jj_raise_type(jj *j, const char *expected, jj_value got);

#endif
