// tests/unit/testing.h - cmocka without its ceremony: TEST(name) { ... } defines a test and
// registers it, and support/testing.c has main, which runs a program's tests in their order or,
// given a pattern (* and ?), those whose names match it.
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

typedef struct {
  const char *name;
  CMUnitTestFunction run;
  CMFixtureFunction fixture[2]; // setup, teardown
  int order;
} testing_entry;

// TEST(name, setup, teardown): both are cmocka's, and may be left out; state is what setup left.
#define TEST(name, ...)                                                                            \
  static void test_##name(void **state);                                                           \
  static const testing_entry entry_##name = {#name, test_##name, {__VA_ARGS__}, __COUNTER__};      \
  static const testing_entry *const at_##name                                                      \
      __attribute__((used, section("testing"))) = &entry_##name;                                   \
  static void test_##name(__attribute__((unused)) void **state)

// What a program may define: these run before the first test and after the last one.
__attribute__((weak)) int before_all(void **state);
__attribute__((weak)) int after_all(void **state);

// For a main of one's own. Returns the number of failures, and 2 if no name matches the pattern.
int testing_main(int argc, char **argv);
