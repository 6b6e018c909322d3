// src/text/jinja/tests.c - tests, i.e. what follows `is`.
#include "text/jinja/native.h"

#define TEST(fn, expr)                                                                             \
  static jj_value fn(jj *j, jj_value self, const jj_value *a, const jj_args *raw) {                \
    (void)j, (void)a, (void)raw;                                                                   \
    return JJ_OF_BOOL(expr);                                                                       \
  }

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

TEST(test_defined, self.type != JJ_UNDEF)
TEST(test_undefined, self.type == JJ_UNDEF)
TEST(test_none, self.type == JJ_NONE)
TEST(test_boolean, self.type == JJ_BOOL)
TEST(test_true, self.type == JJ_BOOL && self.b)
TEST(test_false, self.type == JJ_BOOL && !self.b)
TEST(test_integer, self.type == JJ_INT || self.type == JJ_BIG)
TEST(test_float, self.type == JJ_FLOAT)
TEST(test_number, jj_is_number(self))
TEST(test_string, self.type == JJ_STR)
TEST(test_mapping, self.type == JJ_DICT)
TEST(test_iterable, jj_iterable(self))
TEST(test_sequence, sequence(self))
TEST(test_callable, callable(self))
TEST(test_odd, odd(j, self))
TEST(test_even, divisible(j, self, JJ_OF_INT(2)))
TEST(test_divisibleby, divisible(j, self, a[0]))
TEST(test_escaped, self.type == JJ_STR && self.s->markup)
TEST(test_filter, known(self, jj_filter_find))
TEST(test_test, known(self, jj_test_find))
TEST(test_sameas, jj_same(self, a[0]))
TEST(test_in, jj_contains(j, a[0], self))
TEST(test_eq, jj_equal(j, self, a[0]))
TEST(test_ne, !jj_equal(j, self, a[0]))
TEST(test_lt, jj_order(j, OP_LT, self, a[0]))
TEST(test_le, jj_order(j, OP_LE, self, a[0]))
TEST(test_gt, jj_order(j, OP_GT, self, a[0]))
TEST(test_ge, jj_order(j, OP_GE, self, a[0]))

const jj_native jj_tests[] = {
    {"defined", "", test_defined},
    {"undefined", "", test_undefined},
    {"none", "", test_none},
    {"string", "", test_string},
    {"mapping", "", test_mapping},
    {"iterable", "", test_iterable},
    {"sequence", "", test_sequence},
    {"number", "", test_number},
    {"integer", "", test_integer},
    {"float", "", test_float},
    {"boolean", "", test_boolean},
    {"true", "", test_true},
    {"false", "", test_false},
    {"callable", "", test_callable},
    {"odd", "", test_odd},
    {"even", "", test_even},
    {"divisibleby", "num", test_divisibleby},
    {"escaped", "", test_escaped},
    {"filter", "", test_filter},
    {"test", "", test_test},
    {"sameas", "other", test_sameas},
    {"in", "seq", test_in},
    {"eq", "/b", test_eq},
    {"equalto", "/b", test_eq},
    {"==", "/b", test_eq},
    {"ne", "/b", test_ne},
    {"!=", "/b", test_ne},
    {"lt", "/b", test_lt},
    {"lessthan", "/b", test_lt},
    {"<", "/b", test_lt},
    {"le", "/b", test_le},
    {"<=", "/b", test_le},
    {"gt", "/b", test_gt},
    {"greaterthan", "/b", test_gt},
    {">", "/b", test_gt},
    {"ge", "/b", test_ge},
    {">=", "/b", test_ge},
    {NULL, NULL, NULL},
};
