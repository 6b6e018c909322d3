// JSON Schema to grammars: which texts a schema's grammar generates, and what is refused.
// CTest: no-tsan
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "unit/grammars.h"
#include "unit/sanitized.h"
#include "unit/testing.h"

typedef struct {
  const char *schema, *yes[8], *no[8];
} language;

static const language languages[] = {
    {"{}", {"1", "{\"a\":[1,\"x\",null]}", "\"\""}, {"", "x", "01", "{\"a\"}"}},
    {"true", {"[ ]", "-1.5e3"}, {"tru"}},
    {"{\"type\":\"string\"}",
     {"\"\"", "\"\\\"\\u00e9\xC3\xA9\\ud83d\\ude00\""},
     {"\"", "\"\n\"", "\"\\x\"", "\"\\ud83d\"", "1"}},
    {"{\"type\":\"string\",\"minLength\":2,\"maxLength\":3}",
     {"\"ab\"", "\"\\u00e9\xF0\x9F\x98\x80\"", "\"\\ud83d\\ude00ab\""},
     {"\"a\"", "\"abcd\""}},
    {"{\"type\":[\"boolean\",\"null\"]}", {"true", "false", "null"}, {"0", "\"\""}},
    {"{\"type\":\"integer\",\"minimum\":-3,\"exclusiveMaximum\":12}",
     {"-3", "-1", "0", "9", "11"},
     {"-4", "12", "1.5", "-0", "00", "111"}},
    {"{\"type\":\"integer\",\"minimum\":17,\"maximum\":2345}",
     {"17", "99", "100", "2345", "1999"},
     {"16", "2346", "9999", "017"}},
    {"{\"type\":\"integer\",\"exclusiveMinimum\":99}", {"100", "123456789"}, {"99", "9"}},
    {"{\"type\":\"integer\",\"maximum\":-5}", {"-5", "-10", "-999"}, {"-4", "0", "5"}},
    {"{\"type\":\"number\",\"minimum\":0,\"exclusiveMaximum\":2}",
     {"0", "0.0", "1.999", "1"},
     {"2", "-0.5", "2.0", "10"}},
    {"{\"type\":\"number\",\"exclusiveMinimum\":-1,\"maximum\":1}",
     {"-0.5", "0", "1", "1.0", "0.25", "-0.01"},
     {"-1", "-1.0", "1.01", "-2"}},
    {"{\"type\":\"number\",\"exclusiveMinimum\":-0.5,\"maximum\":0.25}",
     {"-0.4999", "-0.1", "0", "0.25", "0.250", "0.2"},
     {"-0.5", "-0.50", "0.251", "0.3", "1", "-1"}},
    {"{\"type\":\"number\",\"exclusiveMinimum\":0,\"maximum\":99.99}",
     {"0.01", "99.99", "5", "99.9", "10.5"},
     {"0", "0.0", "99.991", "100", "-1"}},
    {"{\"type\":\"integer\",\"minimum\":-9223372036854775808,\"maximum\":9223372036854775807}",
     {"-9223372036854775808", "9223372036854775807", "0", "-1"},
     {"-9223372036854775809", "9223372036854775808"}},
    {"{\"type\":\"integer\",\"exclusiveMinimum\":9007199254740990,\"maximum\":9007199254740999}",
     {"9007199254740991", "9007199254740999"},
     {"9007199254740990", "9007199254741000"}},
    {"{\"type\":\"number\",\"minimum\":-3.4028234663852886e38,\"maximum\":1.7976931348623157e308}",
     {"0", "-1.5", "9999999999999999"},
     {"-10000000000000000", "1e5"}},
    {"{\"type\":\"integer\",\"minimum\":-3.5,\"maximum\":2.5}", {"-3", "2"}, {"-4", "3"}},
    {"{\"type\":\"integer\",\"exclusiveMinimum\":-1,\"exclusiveMaximum\":1}", {"0"}, {"1", "-1"}},
    {"{\"type\":\"number\",\"multipleOf\":0.01,\"minimum\":0.005}",
     {"0.01", "7.25", "3"},
     {"0", "0.005", "7.251"}},
    {"{\"type\":\"integer\",\"multipleOf\":7,\"minimum\":-20,\"maximum\":20}",
     {"-14", "-7", "0", "14"},
     {"-21", "1", "21", "15", "-0", "07"}},
    {"{\"type\":\"integer\",\"multipleOf\":12,\"minimum\":0}",
     {"0", "12", "144", "999999996"},
     {"-12", "6", "13", "012", "1200000000008"}},
    {"{\"type\":\"number\",\"multipleOf\":3}", {"0", "-3", "9", "-111"}, {"-1", "1.5", "-0", "4"}},
    {"{\"type\":\"integer\",\"multipleOf\":5,\"exclusiveMinimum\":0}",
     {"5", "10"},
     {"0", "-5", "7"}},
    {"{\"type\":\"number\",\"multipleOf\":0.25}",
     {"0", "1.25", "-3.50", "7.00", "0.75"},
     {"1.3", "0.26", "1.", "2.5"}},
    {"{\"type\":\"number\",\"multipleOf\":0.5,\"minimum\":-1.0001,\"exclusiveMaximum\":5}",
     {"-1", "-0.5", "0", "4.5"},
     {"-1.5", "5", "0.25", "-0"}},
    {"{\"type\":\"number\",\"multipleOf\":1.25,\"exclusiveMinimum\":0,\"maximum\":100.0001}",
     {"1.25", "77.5", "100"},
     {"0", "1", "101.25", "-1.25"}},
    {"{\"type\":\"array\",\"uniqueItems\":true,\"items\":{\"enum\":[\"a\",\"b\",3]},\"minItems\":"
     "1}",
     {"[\"a\"]", "[3,\"b\",\"a\"]"},
     {"[]", "[\"a\",\"a\"]", "[3,3]", "[4]"}},
    {"{\"type\":\"array\",\"uniqueItems\":true,\"items\":{\"type\":\"boolean\"},\"maxItems\":3}",
     {"[]", "[true,false]", "[false]"},
     {"[true,true]", "[true,false,true]"}},
    {"{\"type\":\"object\",\"propertyNames\":{\"pattern\":\"^[a-c]+$\"},"
     "\"additionalProperties\":{\"type\":\"integer\"}}",
     {"{}", "{\"abc\":1}", "{\"a\":1,\"c\":2}"},
     {"{\"d\":1}", "{\"a\":\"x\"}"}},
    {"{\"type\":\"object\",\"propertyNames\":{\"enum\":[\"x\",\"y\"]},\"minProperties\":1}",
     {"{\"x\":[1]}", "{\"y\":null,\"x\":2}"},
     {"{}", "{\"z\":1}"}},
    {"{\"type\":\"object\",\"properties\":{\"x\":{},\"z\":{}},\"required\":[\"y\"],"
     "\"additionalProperties\":true,\"propertyNames\":{\"enum\":[\"x\",\"y\",\"w\"]}}",
     {"{\"y\":1}", "{\"x\":2,\"y\":1,\"w\":0}"},
     {"{\"x\":1}", "{\"y\":1,\"z\":1}", "{\"y\":1,\"v\":1}"}},
    {"{\"type\":\"object\",\"patternProperties\":{\"^x-\":{\"const\":1}},"
     "\"additionalProperties\":false}",
     {"{}", "{\"x-\":1}", "{\"x-a\":1,\"x-b\":1}"},
     {"{\"x-a\":2}", "{\"a\":1}", "{\"ax-\":1}"}},
    {"{\"type\":\"string\",\"format\":\"date\",\"pattern\":\"^20..$\"}", {"\"2024\""}, {"\"1\""}},
    {"{\"enum\":[1,\"a\",null,{\"x\":[true]}]}",
     {"1", "\"a\"", "null", "{\"x\": [true]}"},
     {"2", "\"b\""}},
    {"{\"type\":\"string\",\"enum\":[\"a\",1]}", {"\"a\""}, {"1"}},
    {"{\"enum\":[12,\"éx\",1,\"èx\",\"ab\",\"a\",1,[1]]}",
     {"1", "12", "\"éx\"", "\"èx\"", "\"a\"", "\"ab\"", "[1]"},
     {"2", "121", "\"êx\"", "\"abc\"", "\"\"", "[12]"}},
    {"{\"const\":null}", {"null"}, {"0"}},
    {"{\"type\":\"array\",\"items\":{\"type\":\"integer\"}}",
     {"[]", "[1, 2]", "[\n 1]"},
     {"[1,]", "[\"a\"]", "[,1]"}},
    {"{\"type\":\"array\",\"items\":{\"const\":1},\"minItems\":1,\"maxItems\":2}",
     {"[1]", "[1,1]"},
     {"[]", "[1,1,1]"}},
    {"{\"type\":\"array\",\"maxItems\":0}", {"[]"}, {"[1]"}},
    {"{\"type\":\"array\",\"prefixItems\":[{\"const\":1},{\"const\":2}],\"items\":false,"
     "\"minItems\":1}",
     {"[1]", "[1,2]"},
     {"[]", "[2]", "[1,2,3]"}},
    {"{\"type\":\"array\",\"prefixItems\":[{\"const\":1}],\"items\":{\"const\":3},\"minItems\":2,"
     "\"maxItems\":3}",
     {"[1,3]", "[1,3,3]"},
     {"[]", "[1]", "[1,3,3,3]", "[3,3]"}},
    {"{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"},\"b\":{\"type\":\"string\"}"
     "},"
     "\"required\":[\"a\"],\"additionalProperties\":false}",
     {"{\"a\":1}", "{ \"a\" : 1, \"b\" : \"x\" }", "{\"a\": -7}"},
     {"{}", "{\"b\":\"x\"}", "{\"a\":1,}", "{\"a\":1,\"c\":1}", "{\"a\":\"1\"}"}},
    {"{\"type\":\"object\",\"properties\":{\"ab\":{\"const\":1},\"ac\":{\"const\":2}}}",
     {"{}", "{\"ab\":1,\"ac\":2,\"x\":[]}", "{\"a\":5}", "{\"abc\":5}", "{\"\":5}"},
     {"{\"ab\":2}", "{\"x\":1,\"ab\":3}"}},
    {"{\"type\":\"object\",\"additionalProperties\":{\"type\":\"integer\"},\"minProperties\":1,"
     "\"maxProperties\":2}",
     {"{\"a\":1}", "{\"a\":1,\"b\":2}"},
     {"{}", "{\"a\":1,\"b\":2,\"c\":3}", "{\"a\":\"x\"}"}},
    {"{\"type\":\"object\",\"required\":[\"x\"]}",
     {"{\"x\":1}", "{\"x\":1,\"y\":2}"},
     {"{}", "{\"y\":1}"}},
    {"{\"properties\":{\"a\":{\"type\":\"integer\"}}}", {"1", "{\"a\":1}"}, {"{\"a\":\"x\"}"}},
    {"{\"anyOf\":[{\"type\":\"integer\"},{\"type\":\"string\"}]}", {"1", "\"x\""}, {"null"}},
    {"{\"oneOf\":[{\"type\":\"integer\"},{\"type\":\"string\"}]}", {"1", "\"x\""}, {"null"}},
    {"{\"type\":\"object\",\"oneOf\":["
     "{\"properties\":{\"k\":{\"const\":\"a\"},\"v\":{\"const\":1}},\"required\":[\"k\",\"v\"],"
     "\"additionalProperties\":false},"
     "{\"properties\":{\"k\":{\"const\":\"b\"}},\"required\":[\"k\"],\"additionalProperties\":"
     "false}]}",
     {"{\"k\":\"a\",\"v\":1}", "{\"k\":\"b\"}"},
     {"{\"k\":\"a\"}", "{\"k\":\"c\"}", "{\"k\":\"b\",\"v\":1}"}},
    {"{\"allOf\":[{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"}},\"required\":["
     "\"a\"]},"
     "{\"properties\":{\"a\":{\"minimum\":5},\"b\":{\"const\":1}},\"required\":[\"b\"]}],"
     "\"additionalProperties\":true}",
     {"{\"a\":5,\"b\":1}", "{\"a\":12,\"b\":1,\"c\":0}"},
     {"{\"a\":4,\"b\":1}", "{\"a\":5}"}},
    {"{\"type\":\"integer\",\"allOf\":[{\"minimum\":2},{\"maximum\":4}]}", {"2", "4"}, {"1", "5"}},
    {"{\"$ref\":\"#/$defs/"
     "n\",\"$defs\":{\"n\":{\"type\":\"object\",\"properties\":{\"v\":{\"type\":\"integer\"},"
     "\"next\":{\"anyOf\":[{\"$ref\":\"#/$defs/"
     "n\"},{\"type\":\"null\"}]}},\"required\":[\"v\",\"next\"],\"additionalProperties\":false}}}",
     {"{\"v\":1,\"next\":null}", "{\"v\":1,\"next\":{\"v\":2,\"next\":null}}"},
     {"{\"v\":1}", "{\"v\":1,\"next\":{}}"}},
    {"{\"type\":\"array\",\"items\":{\"$ref\":\"#\"}}", {"[]", "[[],[[]]]"}, {"[1]", "[[]"}},
    {"{\"$ref\":\"#node\",\"$defs\":{\"a\":{\"const\":1},\"n\":{\"$anchor\":\"node\",\"type\":"
     "\"array\","
     "\"items\":{\"$ref\":\"#node\"}}}}",
     {"[]", "[[],[[]]]"},
     {"1", "[1]", "[[]"}},
    {"{\"properties\":{\"a\":{\"$ref\":\"#/definitions/"
     "x~1y\"}},\"required\":[\"a\"],\"type\":\"object\",\"definitions\":{\"x/y\":{\"const\":1}}}",
     {"{\"a\":1}"},
     {"{\"a\":2}"}},
    {"{\"type\":\"string\",\"pattern\":\"^a[bc]+$\"}",
     {"\"ab\"", "\"acb\""},
     {"\"a\"", "\"xab\"", "\"abx\""}},
    {"{\"type\":\"string\",\"pattern\":\"b\"}", {"\"b\"", "\"abc\""}, {"\"a\"", "\"\""}},
    {"{\"type\":\"string\",\"pattern\":\"^[\\\"\\n]x$\"}",
     {"\"\\\"x\"", "\"\\nx\""},
     {"\"\"x\"", "\"\nx\""}},
    {"{\"type\":\"string\",\"format\":\"date\"}",
     {"\"2024-12-31\"", "\"2023-02-28\""},
     {"\"2023-02-30\"", "\"2023-13-01\"", "\"2023-04-31\"", "\"x\""}},
    {"{\"type\":\"string\",\"format\":\"date-time\"}",
     {"\"2024-12-31T23:59:59Z\"", "\"2024-01-01T00:00:00.5+01:00\""},
     {"\"2024-12-31 23:59:59Z\"", "\"2024-12-31T24:00:00Z\""}},
    {"{\"type\":\"string\",\"format\":\"uuid\"}",
     {"\"123e4567-e89b-12d3-a456-426614174000\""},
     {"\"123e4567\""}},
    {"{\"type\":\"string\",\"format\":\"ipv4\"}",
     {"\"127.0.0.1\"", "\"255.255.255.255\""},
     {"\"256.1.1.1\"", "\"1.1.1\""}},
    {"{\"type\":\"string\",\"format\":\"email\"}", {"\"a.b@example.com\""}, {"\"a\"", "\"@b\""}},
    {"{\"type\":\"string\",\"format\":\"email\",\"pattern\":\"^(?!\\\\.)(?!.*\\\\.\\\\.)([A-Za-z0-"
     "9_'+\\\\"
     "-\\\\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\\\\-]*\\\\.)+[A-Za-z]{2,}$\"}",
     {"\"a.b@x-1.example.com\""},
     {"\"a..b@example.com\"", "\".a@b.com\"", "\"a@b.c1\"", "\"a@b\""}},
    {"{\"type\":\"string\",\"pattern\":\"^(\\\\p{Extended_Pictographic}|\\\\p{Emoji_Component})+$"
     "\"}",
     {"\"\xF0\x9F\x98\x80\""},
     {"\"\"", "\"a\""}},
    {"{\"type\":\"string\",\"pattern\":\"^(?!^[-+.]*$)[+-]?0*\\\\d*\\\\.?\\\\d*$\"}",
     {"\"12\"", "\"-0.25\""},
     {"\"\"", "\"-\"", "\".\"", "\"1e5\"", "\"x\""}},
    {"{\"type\":\"string\",\"format\":\"duration\",\"pattern\":\"^P(?:(\\\\d+W)|(?!.*W)(?=\\\\d|T"
     "\\\\d)(\\\\d+Y)?(\\\\d+M)?(\\\\d+D)?(T(?=\\\\d)(\\\\d+H)?(\\\\d+M)?(\\\\d+([.,]\\\\d+)?S)?)?)"
     "$\"}",
     {"\"P1Y2M\"", "\"PT5S\"", "\"P3W\""},
     {"\"P\"", "\"1D\"", "\"P1WT1S\""}},
    {"{\"type\":\"string\",\"format\":\"json-pointer\"}",
     {"\"\"", "\"/a/~0b\"", "\"//\""},
     {"\"a\"", "\"/~2\"", "\"/~\""}},
    {"{\"type\":\"string\",\"format\":\"regex\"}",
     {"\"([abc])+\\\\s+$\"", "\"^a.*b?$\"", "\"(ab|[^cd]+)x\""},
     {"\"^(abc]\"", "\"^\\\\S(|(.|\\\\n)*\\\\S)\\\\Z\"", "\"a**\"", "\"[\"", "\"*\"", "\"\\\\\"",
      "\")\""}},
    {"{\"type\":\"string\",\"format\":\"hostname\"}",
     {"\"a-b.example.com\"", "\"x\""},
     {"\"-a\"", "\"xn--X\"", "\"a..b\"", "\"\""}},
    {"{\"type\":\"string\",\"format\":\"unheard-of\",\"title\":\"x\"}", {"\"a\""}, {"1"}},
    {"{\"type\":[\"string\",\"null\"],\"maxLength\":1}", {"null", "\"a\""}, {"\"ab\""}},
};

static void check_languages(const language *all, size_t n, bool is_free) {
  for (size_t i = 0; i < n; i++) {
    const language *c = &all[i];
    td_err err;
    test_grammar t;
    if (open_grammar(&t, is_free ? FREE_SCHEMA : SCHEMA, c->schema, &err) != TD_OK)
      fail_msg("%s: %s", c->schema, err.msg);
    for (size_t k = 0; k < TD_COUNT(c->yes) && c->yes[k]; k++) {
      if (!td_grammar_matches(t.g, c->yes[k], strlen(c->yes[k])))
        fail_msg("%s rejects %s", c->schema, c->yes[k]);
    }
    for (size_t k = 0; k < TD_COUNT(c->no) && c->no[k]; k++) {
      if (td_grammar_matches(t.g, c->no[k], strlen(c->no[k])))
        fail_msg("%s accepts %s", c->schema, c->no[k]);
    }
    close_grammar(&t);
  }
}

TEST(languages) {
  check_languages(languages, TD_COUNT(languages), true);
}

// Thousandths, as one writes them; without zeros at the end where is_short.
static void write_number(char out[32], long thousandths, bool is_short) {
  const long size = labs(thousandths);
  int n = snprintf(out, 32, "%s%ld.%03ld", thousandths < 0 ? "-" : "", size / 1000, size % 1000);
  while (is_short && out[n - 1] == '0')
    out[--n] = '\0';
  if (out[n - 1] == '.') out[n - 1] = '\0';
}

// Bounds with fractions admit the numbers that they should, however long a bound is written.
TEST(random_bounds) {
  srand(5);
  for (int i = 0; i < (IS_ASAN ? 50 : 300); i++) {
    const int size = i % 3 ? 3000 : 30000, step = i % 2 ? 10 : 1;
    const long low = rand() % size * step - size * step / 2, high = low + rand() % 2500;
    const bool is_low_open = rand() % 2, is_high_open = rand() % 2;
    char schema[160], from[32], to[32];
    write_number(from, low, true);
    write_number(to, high, true);
    snprintf(schema, sizeof schema, "{\"type\":\"number\",\"%s\":%s,\"%s\":%s}",
             is_low_open ? "exclusiveMinimum" : "minimum", from,
             is_high_open ? "exclusiveMaximum" : "maximum", to);
    td_err err;
    test_grammar t;
    if (low == high && (is_low_open || is_high_open)) continue;
    if (open_grammar(&t, SCHEMA, schema, &err) != TD_OK) fail_msg("%s: %s", schema, err.msg);
    for (long v = low - 1200; v <= high + 1200; v += 1 + rand() % 9) {
      const long value = rand() % 40 ? v : rand() % 2 ? low : high;
      const bool is_in = (is_low_open ? value > low : value >= low) &&
                         (is_high_open ? value < high : value <= high);
      char text[32];
      write_number(text, value, rand() % 2);
      if (value && td_grammar_matches(t.g, text, strlen(text)) != is_in)
        fail_msg("%s %s %s", schema, is_in ? "rejects" : "accepts", text);
    }
    close_grammar(&t);
  }
}

// Objects with properties have no others, and white space is one blank or lines of items.
static const language closed[] = {
    {"{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"array\",\"items\":{\"const\":1}},"
     "\"b\":{\"type\":\"object\",\"properties\":{\"c\":{\"const\":null}}}}}",
     {"{}", "{\"a\": [1, 1], \"b\": {\"c\": null}}", "{\n  \"a\": [1, 1],\n  \"b\": {}\n}",
      "{\n  \"a\": [\n    1,\n    1\n  ],\n  \"b\": {\n    \"c\": null\n  }\n}"},
     {"{\"a\": [1,1]}", "{\"a\":[1]}", "{ }", "{\"d\": 1}", "{\n \"a\": []\n}", "{\n}",
      "{\"a\": [\n    1\n  ]}", "{\n  \"a\": [\n  1\n  ]\n}"}},
    {"{\"type\":\"object\",\"properties\":{\"a\":{\"const\":1}},\"additionalProperties\":true}",
     {"{\"a\": 1, \"b\": []}", "{\n  \"b\": {\n    \"c\": 1\n  }\n}"},
     {"{\"a\": 2}"}},
    {"{\"type\":\"object\",\"properties\":{\"a\":{\"const\":1}},\"required\":[\"a\",\"x\"]}",
     {"{\"a\": 1, \"x\": {\"y\": 2}}"},
     {"{\"a\": 1}", "{\"a\": 1, \"x\": 1, \"z\": 1}"}},
    {"{\"type\":\"object\",\"properties\":{}}", {"{}"}, {"{\"a\": 1}"}},
    {"{\"type\":\"object\"}", {"{\"a\": [1]}", "{}", "{\n  \"a\": 1\n}"}, {"{\"a\":1}"}},
    {"{\"allOf\":[{\"properties\":{\"a\":{\"const\":1}}},{\"properties\":{\"b\":{\"const\":2}}}],"
     "\"type\":\"object\"}",
     {"{\"a\": 1, \"b\": 2}"},
     {"{\"a\": 1, \"c\": 2}"}},
    {"{\"$ref\":\"#/$defs/n\",\"$defs\":{\"n\":{\"type\":\"object\",\"properties\":{\"next\":{"
     "\"anyOf\":[{\"$ref\":\"#/$defs/n\"},{\"type\":\"null\"}]}}}}}",
     {"{\"next\": {\"next\": null}}", "{\n  \"next\": {\n    \"next\": null\n  }\n}"},
     {"{\n  \"next\": {\n  \"next\": null\n  }\n}"}},
    {"{\"enum\":[{\"x\":[1,2]},[]]}", {"{\"x\": [1, 2]}", "[]"}, {"{\"x\":[1, 2]}"}},
    {"true", {"[1, {\"a\": 2}]", "[\n  1,\n  2\n]", "[]"}, {"[ ]", "[1,2]", "[\n  1, 2\n]"}},
};

TEST(closed) {
  check_languages(closed, TD_COUNT(closed), false);
}

// Each message names the keyword, and where it stands.
TEST(refused) {
  static const char *const cases[][2] = {
      {"{\"not\":{\"type\":\"string\"}}", "not"},
      {"{\"type\":\"array\",\"uniqueItems\":true}", "uniqueItems"},
      {"{\"type\":\"array\",\"contains\":{\"const\":1}}", "contains"},
      {"{\"type\":\"number\",\"multipleOf\":3.5}", "multipleOf"},
      {"{\"type\":\"integer\",\"multipleOf\":7,\"minimum\":5}", "multipleOf"},
      {"{\"type\":\"integer\",\"minimum\":99999999999999999999}", "minimum"},
      {"{\"if\":{\"const\":1},\"then\":{\"const\":2}}", "if"},
      {"{\"type\":\"object\",\"patternProperties\":{\"a\":{\"const\":1},\"b\":{}}}",
       "patternProperties"},
      {"{\"type\":\"object\",\"propertyNames\":{\"not\":{\"const\":\"a\"}}}", "propertyNames"},
      {"{\"properties\":{\"a\":{}},\"propertyNames\":{\"maxLength\":1}}", "propertyNames"},
      {"{\"oneOf\":[{\"type\":\"integer\"},{\"minimum\":2}]}", "oneOf"},
      {"{\"properties\":{\"deep\":{\"items\":{\"type\":\"widget\"}}}}", "deep"},
      {"{\"type\":\"widget\"}", "type"},
      {"{\"$ref\":\"http://example.com/x\"}", "$ref"},
      {"{\"$ref\":\"#/$defs/none\"}", "$ref"},
      {"{\"$ref\":\"#none\",\"$defs\":{\"none\":{}}}", "$ref"},
      {"{\"allOf\":[{\"$ref\":\"#\"}]}", "allOf"},
      {"{\"type\":\"string\",\"pattern\":\"(?=a)\"}", "pattern"},
      {"{\"type\":\"string\",\"pattern\":\"a\",\"maxLength\":3}", "maxLength"},
      {"{\"type\":\"string\",\"minLength\":-1}", "minLength"},
      {"{\"type\":\"object\",\"required\":\"a\"}", "required"},
      {"{\"enum\":[1,2],\"minimum\":2}", "enum"},
      {"[]", "schema"},
      {"{\"properties\":{\"a\":5}}", "schema"},
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    test_grammar t;
    td_err err;
    if (open_grammar(&t, SCHEMA, cases[i][0], &err) == TD_OK) fail_msg("%s passes", cases[i][0]);
    if (!strstr(err.msg, cases[i][1])) fail_msg("%s: %s", cases[i][0], err.msg);
  }
}

// Nothing satisfies these: the grammar is refused when it is compiled.
TEST(unsatisfiable) {
  static const char *const cases[] = {
      "false",
      "{\"enum\":[]}",
      "{\"type\":\"integer\",\"minimum\":3,\"maximum\":2}",
      "{\"type\":\"string\",\"enum\":[1]}",
      "{\"type\":\"object\",\"required\":[\"a\"],\"additionalProperties\":false}",
      "{\"$ref\":\"#\"}",
      "{\"type\":\"object\",\"properties\":{\"a\":{\"$ref\":\"#\"}},\"required\":[\"a\"]}",
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    test_grammar t;
    td_err err;
    if (open_grammar(&t, SCHEMA, cases[i], &err) == TD_OK) fail_msg("%s passes", cases[i]);
  }
}
