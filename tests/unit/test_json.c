// tests/unit/test_json.c - the strict JSON reader, the JSON writer, and UTF-8 under both.
// CTest: no-tsan
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json_parse.h"
#include "base/json_write.h"
#include "base/utf8.h"
#include "unit/testing.h"

static td_status check(const char *text, td_err *err) {
  return td_json_check(text, strlen(text), TD_JSON_MAX_DEPTH, err);
}

TEST(accepts_json) {
  static const char *const good[] = {
      "null",
      " true ",
      "\t\r\nfalse\n",
      "0",
      "-0",
      "-0.5e-7",
      "1E+2",
      "12345678901234567890",
      "1.7976931348623157e308",
      "-1.7976931348623157E308",
      "0e999999999999",
      "1e-999",
      "0.00000000000000000000000000000000000000000000000000000001e360",
      "123456789012345678901234567890123456789012345678901234567890123",
      "\"\"",
      "\"\\u0001 \\ud83d\\ude00 \\\" \\\\ \\/ \\b\\f\\n\\r\\t\"",
      "\"\xF0\x9F\x98\x80\"",
      "[]",
      "{}",
      "[ 1 , [ ] , { } ]",
      "{\"a\":{\"b\":[1,2,{\"c\":null}]} , \"a\":1}",
  };
  for (size_t i = 0; i < TD_COUNT(good); i++) {
    td_err err = {.msg = ""};
    if (check(good[i], &err) != TD_OK) fail_msg("%s: %s", good[i], err.msg);
  }
}

TEST(rejects_with_the_offset) {
  static const struct {
    const char *text;
    size_t at;
  } bad[] = {
      {"", 0},
      {"  ", 2},
      {"{} x", 3},
      {"1 2", 2},
      {"[1,]", 3},
      {"[1 2]", 3},
      {"{\"a\" 1}", 5},
      {"{\"a\":}", 5},
      {"{\"a\":1,}", 7},
      {"{a:1}", 1},
      {"{1:1}", 1},
      {"'a'", 0},
      {"nul", 0},
      {"True", 0},
      {"NaN", 0},
      {"Infinity", 0},
      {"01", 1},
      {"+1", 0},
      {".5", 0},
      {"1.", 2},
      {"-", 1},
      {"1e", 2},
      {"1e+", 3},
      {"0x10", 1},
      {"[1234567890123456789012345678901234567890123456789012345678901234]", 1},
      {"1e999", 0},
      {"[-1e309]", 1},
      {"1.7976931348623159e308", 0},
      {"\"\\u0000\"", 7},
      {"\"\\ud800\"", 7},
      {"\"\\udc00 \"", 7},
      {"\"\\ud800\\u0041\"", 13},
      {"\"\\u12g4\"", 5},
      {"\"\\x\"", 2},
      {"\"a", 2},
      {"\"\n\"", 1},
      {"\"\\", 2},
      {"[", 1},
      {"{\"a\"", 4},
      {"\"\xFF\"", 1},
      {"\"\xC0\x80\"", 1},
      {"\"\xED\xA0\x80\"", 1},
      {"\"\xE2\x82\"", 1},
      {"\"\xF4\x90\x80\x80\"", 1},
      {"\xEF\xBB\xBF{}", 0},
      {"// x\n1", 0},
      {"[1]]", 3},
  };
  for (size_t i = 0; i < TD_COUNT(bad); i++) {
    td_err err = {.msg = ""};
    char want[64];
    snprintf(want, sizeof want, "at byte %zu:", bad[i].at);
    assert_int_equal(check(bad[i].text, &err), TD_EFORMAT);
    if (!strstr(err.msg, want)) fail_msg("%s: %s, not %s", bad[i].text, err.msg, want);
  }
  td_err err;
  assert_int_equal(td_json_check("\"a\0b\"", 5, 64, &err), TD_EFORMAT);
  assert_int_equal(td_json_check("1\0", 2, 64, &err), TD_EFORMAT);
  assert_int_equal(td_json_check("\"\\\0\"", 4, 64, &err), TD_EFORMAT);
}

TEST(nests_to_the_limit_and_no_further) {
  char text[300];
  for (int depth = 63; depth <= 65; depth++) {
    for (int kind = 0; kind < 2; kind++) {
      td_buf buf = TD_BUF_INIT;
      for (int i = 0; i < depth; i++)
        td_buf_str(&buf, kind ? "{\"a\":" : "[");
      td_buf_str(&buf, "1");
      for (int i = 0; i < depth; i++)
        td_buf_char(&buf, kind ? '}' : ']');
      td_err err;
      assert_int_equal(td_json_check(buf.data, buf.len, 64, &err),
                       depth <= 64 ? TD_OK : TD_EFORMAT);
      td_buf_free(&buf);
    }
  }
  // Siblings give their depth back.
  memset(text, 0, sizeof text);
  strcpy(text, "[[[]],[[]],[[]],[[]]]");
  assert_int_equal(td_json_check(text, strlen(text), 3, NULL), TD_OK);
  assert_int_equal(td_json_check(text, strlen(text), 2, NULL), TD_EFORMAT);
}

TEST(a_byte_order_mark_is_no_part) {
  cJSON *root;
  td_err err;
  static const char text[] = "\xef\xbb\xbf[1]";
  assert_int_equal(td_json_parse(&root, text, sizeof text - 1, 64, &err), TD_OK);
  assert_true(cJSON_IsArray(root));
  cJSON_Delete(root);
  assert_int_equal(td_json_parse(&root, text, 3, 64, &err), TD_EFORMAT);
}

TEST(parses_and_reads_members) {
  static const char text[] = "{\"a\":1,\"a\":2,\"n\":null,\"b\":true,\"s\":\"x\",\"d\":1.5,"
                             "\"big\":90071992547409930000}trailing";
  cJSON *root;
  td_err err;
  assert_int_equal(td_json_parse(&root, text, sizeof text - 1, 64, &err), TD_EFORMAT);
  assert_null(root);
  assert_int_equal(td_json_parse(&root, text, sizeof text - 1 - 8, 64, &err), TD_OK);
  int64_t i = 7;
  double d = 0;
  bool b = false;
  const char *s = NULL;
  assert_int_equal(td_json_get_int(root, "a", 0, 10, &i, &err), TD_OK);
  assert_int_equal(i, 1); // the first of two
  assert_int_equal(td_json_get_int(root, "n", 0, 10, &i, &err), TD_OK);
  assert_int_equal(td_json_get_int(root, "absent", 0, 10, &i, &err), TD_OK);
  assert_int_equal(i, 1);
  assert_int_equal(td_json_get_int(root, "a", 2, 10, &i, &err), TD_EINVAL);
  assert_string_equal(err.msg, "a must be between 2 and 10");
  assert_int_equal(td_json_get_int(root, "d", 0, 10, &i, &err), TD_EINVAL);
  assert_int_equal(td_json_get_int(root, "big", INT64_MIN, INT64_MAX, &i, &err), TD_EINVAL);
  assert_int_equal(td_json_get_int(root, "s", 0, 10, &i, &err), TD_EINVAL);
  assert_int_equal(td_json_get_double(root, "d", &d, &err), TD_OK);
  assert_true(d == 1.5);
  assert_int_equal(td_json_get_double(root, "b", &d, &err), TD_EINVAL);
  assert_int_equal(td_json_get_bool(root, "b", &b, &err), TD_OK);
  assert_true(b);
  assert_int_equal(td_json_get_bool(root, "a", &b, &err), TD_EINVAL);
  assert_int_equal(td_json_get_str(root, "s", &s, &err), TD_OK);
  assert_string_equal(s, "x");
  assert_int_equal(td_json_get_str(root, "a", &s, &err), TD_EINVAL);
  assert_null(td_json_get(root, "n"));
  assert_null(td_json_get(NULL, "n"));
  cJSON_Delete(root);
}

TEST(numbers_keep_their_text_where_it_matters) {
  // Not NUL-terminated, so that reading past the end shows under ASan.
  static const char source[] =
      "{\"1.5 \\\"2\":[1,-7,1.0,1e2,-0],\"b\":{\"c\":18446744073709551615},\"d\":2E3}";
  size_t len = strlen(source);
  char *bytes = malloc(len);
  memcpy(bytes, source, len);
  cJSON *root;
  td_err err;
  assert_int_equal(td_json_parse(&root, bytes, len, TD_JSON_MAX_DEPTH, &err), TD_OK);
  free(bytes);
  const cJSON *list = root->child;
  static const char *const texts[] = {NULL, NULL, "1.0", "1e2", "-0"};
  for (int i = 0; i < 5; i++) {
    const char *text = cJSON_GetArrayItem(list, i)->valuestring;
    if (texts[i]) {
      assert_string_equal(text, texts[i]);
    } else {
      assert_null(text);
    }
  }
  const cJSON *c = td_json_get(td_json_get(root, "b"), "c");
  assert_string_equal(c->valuestring, "18446744073709551615");
  assert_string_equal(td_json_get(root, "d")->valuestring, "2E3");
  cJSON_Delete(root);
  const char one[] = {'1', '.', '5'};
  assert_int_equal(td_json_parse(&root, one, sizeof one, TD_JSON_MAX_DEPTH, &err), TD_OK);
  assert_string_equal(root->valuestring, "1.5");
  cJSON_Delete(root);
}

// Doubles from 2^63 on are no int64, and the next below is.
TEST(whole_numbers) {
  static const struct {
    const char *text;
    bool is_whole;
    int64_t value;
  } cases[] = {
      {"[0]", true, 0},
      {"[-3]", true, -3},
      {"[1e2]", true, 100},
      {"[2.0]", true, 2},
      {"[9007199254740993]", true, 9007199254740993},
      {"[9223372036854775807]", true, INT64_MAX},
      {"[-9223372036854775808]", true, INT64_MIN},
      {"[9223372036854774784.0]", true, 9223372036854774784},
      {"[9223372036854775808]", false, 0},
      {"[9223372036854775808.0]", false, 0},
      {"[1e300]", false, 0},
      {"[-1e300]", false, 0},
      {"[1.5]", false, 0},
      {"[\"1\"]", false, 0},
      {"[true]", false, 0},
      {"[]", false, 0},
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    cJSON *root;
    td_err err;
    int64_t value = 7;
    const char *text = cases[i].text;
    assert_int_equal(td_json_parse(&root, text, strlen(text), TD_JSON_MAX_DEPTH, &err), TD_OK);
    assert_int_equal(td_json_whole(root->child, INT64_MIN, INT64_MAX, &value), cases[i].is_whole);
    assert_int_equal(value, cases[i].is_whole ? cases[i].value : 7);
    assert_false(td_json_whole(root->child, 101, 200, &value));
    cJSON_Delete(root);
  }
}

TEST(missing_file_is_named) {
  cJSON *root;
  td_err err;
  assert_int_equal(td_json_parse_file(&root, "/nonexistent/x.json", 100, &err), TD_ENOENT);
  assert_non_null(strstr(err.msg, "/nonexistent/x.json"));
  assert_int_equal(td_json_parse_file(&root, "/nonexistent/x.json", 100, NULL), TD_ENOENT);
  assert_int_equal(td_json_parse_file(&root, "/proc/version", 4096, NULL), TD_EFORMAT); // no JSON
}

static void write_all_kinds(td_json_writer *w) {
  td_jw_begin_object(w, NULL);
  td_jw_str(w, "s", "a\"\\\b\f\n\r\t\x01/\xC3\xA9\xFF");
  td_jw_int(w, "i", INT64_MIN);
  td_jw_begin_array(w, "l");
  td_jw_double(w, NULL, 0.1);
  td_jw_double(w, NULL, INFINITY);
  td_jw_begin_object(w, NULL);
  td_jw_end_object(w);
  td_jw_bool(w, NULL, true);
  td_jw_end_array(w);
  td_jw_begin_array(w, "e");
  td_jw_end_array(w);
  td_jw_null(w, "n");
  td_jw_str_len(w, "z", "a\0b", 3);
  td_jw_raw(w, "r", "[1]");
  td_jw_end_object(w);
}

TEST(writes_json) {
  td_buf buf = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&buf);
  write_all_kinds(&w);
  assert_string_equal(buf.data, "{\"s\":\"a\\\"\\\\\\b\\f\\n\\r\\t\\u0001/\xC3\xA9\xEF\xBF\xBD\","
                                "\"i\":-9223372036854775808,\"l\":[0.1,null,{},true],\"e\":[],"
                                "\"n\":null,\"z\":\"a\xEF\xBF\xBD"
                                "b\",\"r\":[1]}");
  td_buf_free(&buf);
}

// Forms say what single calls say, and go together with them.
TEST(writes_by_forms) {
  td_buf out = TD_BUF_INIT, name = TD_BUF_INIT;
  td_buf_str(&name, "it's {1, 2}");
  const char *volatile none = NULL;
  td_json_writer w = TD_JSON_WRITER(&out);
  td_jw_add(&w, "{'a b': %s, 'none': %s, 'l': [%d, %u, %ld, %lu, %zu], 'e': {}, 't': '[x, y: z}'",
            "a\"b%", none, -1, UINT32_MAX, (long)INT64_MIN, 7ul, (size_t)8);
  td_jw_int(&w, "i", 1);
  td_jw_add(&w, "'o': {'n': %p, 'f': [%g, %g], 'b': %i", &name, 0.1, NAN, true);
  td_jw_bool(&w, "c", false);
  td_jw_add(&w, "}, 'v':");
  td_jw_raw(&w, NULL, "[2]");
  td_jw_add(&w, "'k': [");
  td_jw_add(&w, "%i", 0);
  td_jw_add(&w, "'x'");
  td_jw_add(&w, "]}");
  assert_int_equal(w.depth, 0);
  assert_string_equal(td_buf_text(&out),
                      "{\"a b\":\"a\\\"b%\",\"none\":null,\"l\":[-1,4294967295,"
                      "-9223372036854775808,7,8],\"e\":{},\"t\":\"[x, y: z}\",\"i\":1,"
                      "\"o\":{\"n\":\"it's {1, 2}\",\"f\":[0.1,null],\"b\":true,\"c\":false},"
                      "\"v\":[2],\"k\":[false,\"x\"]}");
  td_buf_free(&out);
  td_buf_free(&name);
}

TEST(escapes_of_no_text_are_replaced) {
  static const struct {
    const char *text, *wanted;
  } cases[] = {
      {"\"\\u0000\"", "\"\\ufffd\""},
      {"\"\\\\u0000\"", NULL}, // a backslash, and letters
      {"\"\\\\\\u0000\"", "\"\\\\\\ufffd\""},
      {"\"\\ud83d\"", "\"\\ufffd\""},
      {"\"\\uDE00x\"", "\"\\ufffdx\""},
      {"\"\\ud83d\\ude00\"", NULL},
      {"\"\\ud83d\\ud83d\\ude00\"", "\"\\ufffd\\ud83d\\ude00\""},
      {"\"\\ud83d\\n\"", "\"\\ufffd\\n\""},
      {"\"\\u00e9\\n\"", NULL},
      {"\\u000", NULL},
      {"\\", NULL},
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    char text[64];
    strcpy(text, cases[i].text);
    assert_int_equal(td_json_replace_escapes(text, strlen(text)), cases[i].wanted != NULL);
    assert_string_equal(text, cases[i].wanted ? cases[i].wanted : cases[i].text);
  }
}

TEST(prints_lines) {
  td_buf buf = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&buf);
  FILE *file = tmpfile();
  char text[64] = "";
  for (int i = 0; i < 2; i++) {
    td_jw_begin_object(&w, NULL);
    td_jw_int(&w, "i", i);
    td_jw_end_object(&w);
    assert_true(td_jw_print_line(&w, file));
  }
  rewind(file);
  assert_int_equal(fread(text, 1, sizeof text, file), 16);
  assert_string_equal(text, "{\"i\":0}\n{\"i\":1}\n");
  fclose(file);
  file = fopen("/dev/full", "w");
  td_jw_begin_object(&w, NULL);
  td_jw_end_object(&w);
  assert_false(td_jw_print_line(&w, file));
  fclose(file);
  td_buf_free(&buf);
}

TEST(doubles_are_short_and_exact) {
  static const struct {
    double value;
    const char *text;
  } cases[] = {
      {0, "0"},
      {-0.0, "-0"},
      {1, "1"},
      {0.3, "0.3"},
      {1e21, "1e+21"},
      {5e-324, "5e-324"},
      {0.1 + 0.2, "0.30000000000000004"},
      {1.7976931348623157e308, "1.7976931348623157e+308"},
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    td_buf buf = TD_BUF_INIT;
    td_json_writer w = TD_JSON_WRITER(&buf);
    td_jw_double(&w, NULL, cases[i].value);
    assert_string_equal(buf.data, cases[i].text);
    assert_true(strtod(buf.data, NULL) == cases[i].value);
    td_buf_free(&buf);
  }
}

TEST(utf8_round_trip) {
  for (uint32_t c = 0; c <= 0x10FFFF; c++) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    char bytes[4];
    uint32_t back = 0;
    int n = td_utf8_encode(c, bytes);
    assert_int_equal(td_utf8_decode(bytes, (size_t)n, &back), n);
    assert_int_equal(back, c);
    for (int cut = 1; cut < n; cut++) {
      assert_int_equal(td_utf8_decode(bytes, (size_t)cut, &back), -1);
      assert_int_equal(td_utf8_whole(bytes, (size_t)cut), 0);
    }
    assert_int_equal(td_utf8_whole(bytes, (size_t)n), n);
  }
}

TEST(utf8_replaces_maximal_subparts) {
#define R "\xEF\xBF\xBD"
  static const struct {
    const char *in, *out;
  } cases[] = {
      {"abc", "abc"},
      {"a\x80z", "a" R "z"},
      {"\xC0\x80", R R},
      {"\xE2\x82z", R "z"},
      {"\xE2\x82", R},
      {"\xE0\x80\x80", R R R},
      {"\xED\xA0\x80", R R R},
      {"\xF0\x9F\x98z", R "z"},
      {"\xF0\x9F\xF0\x9F\x98\x80", R "\xF0\x9F\x98\x80"},
      {"\xF4\x90\x80\x80", R R R R},
      {"\xFF\xFE", R R},
      {"0123456789\xC3\xA9\xC3", "0123456789\xC3\xA9" R},
  };
#undef R
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    td_buf buf = TD_BUF_INIT;
    td_utf8_add_replaced(&buf, cases[i].in, strlen(cases[i].in));
    assert_string_equal(buf.data, cases[i].out);
    assert_true(td_utf8_valid(buf.data, buf.len));
    assert_int_equal(td_utf8_valid(cases[i].in, strlen(cases[i].in)),
                     strcmp(cases[i].in, cases[i].out) == 0);
    td_buf_free(&buf);
  }
}

TEST(values_are_counted) {
  static const char text[] = "{\"a\": [1, [], \"x\", null], \"b\": 2}"; // 7 values
  cJSON *root;
  td_err err;
  assert_int_equal(td_json_parse_at_most(&root, text, sizeof text - 1, 9, 7, &err), TD_OK);
  cJSON_Delete(root);
  assert_int_equal(td_json_parse_at_most(&root, text, sizeof text - 1, 9, 6, &err), TD_ELIMIT);
  assert_null(root);
  assert_string_equal(err.msg, "7 JSON values: more than 6");
}

static const char *id_of(const cJSON *item) {
  const cJSON *id = cJSON_GetObjectItemCaseSensitive(item, "id");
  return cJSON_IsString(id) ? id->valuestring : NULL;
}

// Names as they are or of objects; what has none is left out, and what is no array has none.
TEST(names_are_found) {
  static const char list[] = "[\"b\",\"\",\"a\",\"b\",1,null,{\"id\":\"c\"},{\"id\":2}]";
  static const char *const there[2][4] = {{"a", "b", "", NULL}, {"c", NULL}};
  cJSON *root = cJSON_Parse(list);
  assert_non_null(root);
  for (int of_objects = 0; of_objects < 2; of_objects++) {
    td_json_names names;
    assert_true(td_json_names_open(&names, root, of_objects ? id_of : NULL));
    assert_int_equal(names.n, of_objects ? 1 : 4);
    for (size_t i = 0; there[of_objects][i]; i++)
      assert_true(td_json_names_has(&names, there[of_objects][i]));
    assert_false(td_json_names_has(&names, of_objects ? "a" : "c"));
    assert_false(td_json_names_has(&names, "B"));
    td_json_names_close(&names);
  }
  const cJSON *const others[] = {NULL, root->child};
  for (size_t i = 0; i < TD_COUNT(others); i++) {
    td_json_names names;
    assert_true(td_json_names_open(&names, others[i], NULL));
    assert_false(td_json_names_has(&names, "a"));
    td_json_names_close(&names);
  }
  cJSON_Delete(root);
}
