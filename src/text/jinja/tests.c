// src/text/jinja/tests.c - tests, i.e. what follows `is`.
#include "text/jinja/native.h"

static bool divisible(jj *j, jj_value v, jj_value by) {
  jj_value rest = jj_binary(j, OP_MOD, v, by);
  return jj_equal(j, rest, JJ_OF_INT(0));
}

static bool odd(jj *j, jj_value v) {
  return jj_equal(j, jj_binary(j, OP_MOD, v, JJ_OF_INT(2)), JJ_OF_INT(1));
}

static bool sequence(jj_value v) {
  return v.type == JJ_UNDEF || v.type == JJ_STR || v.type == JJ_LIST || v.type == JJ_TUPLE ||
         v.type == JJ_DICT || v.type == JJ_RANGE;
}

static bool callable(jj_value v) {
  return v.type == JJ_NATIVE || v.type == JJ_MACRO ||
         v.type == JJ_UNDEF; // Undefined has a __call__, which raises
}

static bool known(jj_value name, const jj_native *(*find)(const jj_str *)) {
  return name.type == JJ_STR && find(name.s);
}

// Name, signature, what self must be.
#define TESTS(X)                                                                                   \
  X(defined, "", self.type != JJ_UNDEF)                                                            \
  X(undefined, "", self.type == JJ_UNDEF)                                                          \
  X(none, "", self.type == JJ_NONE)                                                                \
  X(string, "", self.type == JJ_STR)                                                               \
  X(mapping, "", self.type == JJ_DICT)                                                             \
  X(iterable, "", jj_iterable(self))                                                               \
  X(sequence, "", sequence(self))                                                                  \
  X(number, "", jj_is_number(self))                                                                \
  X(integer, "", self.type == JJ_INT || self.type == JJ_BIG)                                       \
  X(float, "", self.type == JJ_FLOAT)                                                              \
  X(boolean, "", self.type == JJ_BOOL)                                                             \
  X(true, "", self.type == JJ_BOOL && self.b)                                                      \
  X(false, "", self.type == JJ_BOOL && !self.b)                                                    \
  X(callable, "", callable(self))                                                                  \
  X(odd, "", odd(j, self))                                                                         \
  X(even, "", divisible(j, self, JJ_OF_INT(2)))                                                    \
  X(divisibleby, "num", divisible(j, self, a[0]))                                                  \
  X(escaped, "", self.type == JJ_STR && self.s->markup)                                            \
  X(filter, "", known(self, jj_filter_find))                                                       \
  X(test, "", known(self, jj_test_find))                                                           \
  X(sameas, "other", jj_same(self, a[0]))                                                          \
  X(in, "seq", jj_contains(j, a[0], self))                                                         \
  X(eq, "/b", jj_equal(j, self, a[0]))                                                             \
  X(ne, "/b", !jj_equal(j, self, a[0]))                                                            \
  X(lt, "/b", jj_order(j, OP_LT, self, a[0]))                                                      \
  X(le, "/b", jj_order(j, OP_LE, self, a[0]))                                                      \
  X(gt, "/b", jj_order(j, OP_GT, self, a[0]))                                                      \
  X(ge, "/b", jj_order(j, OP_GE, self, a[0]))

#define X(name, sig, expr) JJ_NATIVE_OF(test_##name, JJ_OF_BOOL(expr))
TESTS(X)
#undef X

const jj_native jj_tests[] = {
    {"equalto", "/b", test_eq},
    {"==", "/b", test_eq},
    {"!=", "/b", test_ne},
    {"lessthan", "/b", test_lt},
    {"<", "/b", test_lt},
    {"<=", "/b", test_le},
    {"greaterthan", "/b", test_gt},
    {">", "/b", test_gt},
    {">=", "/b", test_ge},
#define X(name, sig, expr) {#name, sig, test_##name},
    TESTS(X)
#undef X
        {NULL, NULL, NULL},
};
