// tests/unit/test_safetensors.c - safetensors headers, whole and lying.
// CTest: no-tsan
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/clock.h"
#include "model/checkpoint/safetensors.h"
#include "unit/testing.h"

// A file in a heap block of exactly its size, so that ASan sees a read past its end.
static uint8_t *make_file(const char *header, size_t n_data, size_t *n_bytes) {
  uint64_t len = strlen(header);
  *n_bytes = 8 + len + n_data;
  uint8_t *bytes = calloc(1, *n_bytes);
  for (int i = 0; i < 8; i++)
    bytes[i] = (uint8_t)(len >> 8 * i);
  memcpy(bytes + 8, header, len);
  return bytes;
}

static td_status parse(const char *header, size_t n_data, td_safetensors *out, td_err *err) {
  size_t n_bytes;
  uint8_t *bytes = make_file(header, n_data, &n_bytes);
  td_status st = td_safetensors_parse(out, bytes, n_bytes, "shard-7", err);
  free(bytes);
  return st;
}

TEST(reads_tensors) {
  static const char header[] =
      " { \"b\" : { \"shape\" : [ 2 , 3 ] , \"data_offsets\" : [ 6 , 18 ] , \"dtype\" : \"BF16\" },"
      "\"__metadata__\":{\"dtype\":\"x\",\"n\":\"[{\"},"
      "\"a\":{\"dtype\":\"F8_E4M3\",\"shape\":[6],\"data_offsets\":[0,6],\"more\":[{\"x\":[-1.5]}]}"
      ","
      "\"empty\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[18,18]},"
      "\"scalar\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[18,26]}}   ";
  size_t n_bytes;
  uint8_t *bytes = make_file(header + 1, 26, &n_bytes);
  td_safetensors st;
  td_err err;
  assert_int_equal(td_safetensors_parse(&st, bytes, n_bytes, "file", &err), TD_OK);
  assert_int_equal(st.n_tensors, 4);
  const uint8_t *data = bytes + n_bytes - 26;
  static const struct {
    const char *name, *dtype;
    size_t begin, n_bytes;
    uint32_t n_dims;
  } want[] = {{"a", "F8_E4M3", 0, 6, 1},
              {"b", "BF16", 6, 12, 2},
              {"empty", "F32", 18, 0, 2},
              {"scalar", "I64", 18, 8, 0}};
  for (size_t i = 0; i < TD_COUNT(want); i++) {
    assert_string_equal(st.tensors[i].name, want[i].name);
    assert_string_equal(st.tensors[i].dtype, want[i].dtype);
    assert_string_equal(st.tensors[i].file, "file");
    assert_ptr_equal(st.tensors[i].data, data + want[i].begin);
    assert_int_equal(st.tensors[i].n_bytes, want[i].n_bytes);
    assert_int_equal(st.tensors[i].n_dims, want[i].n_dims);
  }
  assert_int_equal(st.tensors[1].shape[0], 2);
  assert_int_equal(st.tensors[1].shape[1], 3);
  td_safetensors_free(&st);
  free(bytes);
}

TEST(reads_empty_files) {
  td_safetensors st;
  assert_int_equal(parse("{}", 0, &st, NULL), TD_OK);
  assert_int_equal(st.n_tensors, 0);
  td_safetensors_free(&st);
  assert_int_equal(parse("{\"__metadata__\":{}}", 0, &st, NULL), TD_OK);
  td_safetensors_free(&st);
}

TEST(refuses_lies) {
  static const struct {
    const char *header;
    size_t n_data;
    td_status status;
    const char *says;
  } cases[] = {
#define T(name, dtype, shape, offsets)                                                             \
  "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" offsets "]}"
      {"", 0, TD_EFORMAT, "not a JSON object"},
      {"[]", 0, TD_EFORMAT, "not a JSON object"},
      {" {}", 0, TD_EFORMAT, "not a JSON object"},
      {"{", 0, TD_EFORMAT, "header"},
      {"{}x", 0, TD_EFORMAT, "header"},
      {"{\"a\":1}", 0, TD_EFORMAT, "tensor a: not described"},
      {"{\"a\":{}}", 0, TD_EFORMAT, "tensor a: header has no dtype"},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, TD_EFORMAT, "a: header has no data_offsets"},
      {"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, TD_EFORMAT,
       "a: header has no shape"},
      {"{\"a\":{\"dtype\":8,\"shape\":[1],\"data_offsets\":[0,1]}}", 1, TD_EFORMAT,
       "tensor a: dtype is not a string"},
      {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
       TD_EFORMAT, "tensor a: dtype is given twice"},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":1,\"data_offsets\":[0,1]}}", 1, TD_EFORMAT,
       "tensor a: shape is not an array"},
      {"{" T("a", "U8", "1", "0") "}", 1, TD_EFORMAT, "tensor a: data_offsets must be two"},
      {"{" T("a", "U8", "1", "0,1,2") "}", 1, TD_EUNSUPPORTED, "tensor a: data_offsets has more"},
      {"{" T("a", "U8", "1", "-1,0") "}", 1, TD_EFORMAT, "tensor a: data_offsets must be"},
      {"{" T("a", "U8", "1", "0,1.0") "}", 1, TD_EFORMAT, "tensor a: data_offsets must be"},
      {"{" T("a", "U8", "1", "0,1e0") "}", 1, TD_EFORMAT, "tensor a: data_offsets must be"},
      {"{" T("a", "U8", "\\\"1\\\"", "0,1") "}", 1, TD_EFORMAT, "shard-7: header"},
      {"{" T("a", "U8", "null", "0,1") "}", 1, TD_EFORMAT, "tensor a: shape must be"},
      {"{" T("a", "U8", "18446744073709551616", "0,1") "}", 1, TD_EFORMAT, "a: a number in shape"},
      {"{" T("a", "U8", "1,1,1,1,1,1,1,1,1", "0,1") "}", 1, TD_EUNSUPPORTED, "shape has more than"},
      {"{" T("a", "Q4_K", "1", "0,1") "}", 1, TD_EUNSUPPORTED, "tensor a: unknown dtype Q4_K"},
      {"{" T("a", "F32", "4294967296,4294967296", "0,1") "}", 1, TD_EFORMAT, "a: its shape overfl"},
      {"{" T("a", "F64", "2305843009213693952", "0,0") "}", 0, TD_EFORMAT, "a: its shape overflo"},
      {"{" T("a", "F32", "1", "4,0") "}", 4, TD_EFORMAT, "tensor a: data_offsets [4, 0] run back"},
      {"{" T("a", "F32", "2", "0,4") "}", 4, TD_EFORMAT, "a: data_offsets span 4 bytes, but"},
      {"{" T("a", "F4", "3", "0,1") "}", 1, TD_EFORMAT, "tensor a: data_offsets span 1 bytes"},
      {"{" T("a", "F32", "1", "0,4") "}", 3, TD_EFORMAT, "tensor a: its data ends at byte 4"},
      {"{" T("a", "U8", "1", "18446744073709551614,18446744073709551615") "}", 1, TD_EFORMAT,
       "tensor a: its data ends at byte 18446744073709551615"},
      {"{" T("a", "U8", "4", "0,4") "," T("b", "U8", "4", "3,7") "}", 7, TD_EFORMAT,
       "tensor b: its data overlaps that of tensor a"},
      {"{" T("a", "U8", "4", "0,4") "," T("b", "U8", "4", "0,4") "}", 4, TD_EFORMAT, "overlaps"},
      {"{" T("a", "U8", "4", "0,4") "," T("b", "U8", "4", "5,9") "}", 9, TD_EFORMAT,
       "tensor b: 1 bytes before its data belong to no tensor"},
      {"{" T("a", "U8", "4", "1,5") "}", 5, TD_EFORMAT, "tensor a: 1 bytes before"},
      {"{" T("a", "U8", "4", "0,4") "}", 5, TD_EFORMAT, "1 bytes at its end belong to no tensor"},
      {"{}", 1, TD_EFORMAT, "1 bytes at its end"},
      {"{" T("a", "U8", "1", "0,1") "," T("a", "U8", "1", "1,2") "}", 2, TD_EFORMAT,
       "tensor a: named twice"},
      {"{" T("aA", "U8", "1", "0,1") "," T("a\\u0041", "U8", "1", "1,2") "}", 2, TD_EFORMAT,
       "tensor aA: named twice"},
#undef T
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    td_safetensors st;
    td_err err;
    td_status status = parse(cases[i].header, cases[i].n_data, &st, &err);
    if (status != cases[i].status || !strstr(err.msg, cases[i].says) ||
        strncmp(err.msg, "shard-7: ", 9) != 0) {
      fail_msg("%s: status %d, message %s", cases[i].header, status,
               status == TD_OK ? "" : err.msg);
    }
    assert_null(st.tensors);
    assert_int_equal(parse(cases[i].header, cases[i].n_data, &st, NULL), cases[i].status);
  }
}

TEST(refuses_short_and_huge_headers) {
  td_safetensors st;
  td_err err;
  for (size_t n = 0; n < 8; n++) {
    uint8_t bytes[8] = {0};
    assert_int_equal(td_safetensors_parse(&st, bytes, n, "f", &err), TD_EFORMAT);
  }
  assert_int_equal(td_safetensors_parse(&st, NULL, 0, "f", &err), TD_EFORMAT);
  uint8_t cut[] = {3, 0, 0, 0, 0, 0, 0, 0, '{', '}'};
  assert_int_equal(td_safetensors_parse(&st, cut, sizeof cut, "f", &err), TD_EFORMAT);
  assert_non_null(strstr(err.msg, "cut short"));
  uint8_t huge[] = {0, 0, 0, 0, 0, 0, 0, 0x80, '{', '}'};
  assert_int_equal(td_safetensors_parse(&st, huge, sizeof huge, "f", &err), TD_ELIMIT);
}

// Every proper beginning of a file is refused.
TEST(refuses_truncation_anywhere) {
  size_t n_bytes;
  uint8_t *bytes = make_file("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8,
                             &n_bytes);
  for (size_t n = 0; n < n_bytes; n++) {
    uint8_t *cut = malloc(n ? n : 1);
    memcpy(cut, bytes, n);
    td_safetensors st;
    assert_int_not_equal(td_safetensors_parse(&st, cut, n, "f", NULL), TD_OK);
    free(cut);
  }
  free(bytes);
}

// The largest checkpoints have 90,000 tensors; reading their headers must not be felt.
TEST(is_fast) {
  const size_t n = 90000;
  td_buf header = TD_BUF_INIT;
  for (size_t i = 0; i < n; i++) {
    td_buf_printf(&header,
                  "%c\"model.layers.%zu.mlp.experts.%zu.gate_proj.weight\":{\"dtype\":\"U8\","
                  "\"shape\":[1],\"data_offsets\":[%zu,%zu]}",
                  i ? ',' : '{', i / 256, i % 256, i, i + 1);
  }
  td_buf_str(&header, "}");
  td_safetensors st;
  td_err err;
  uint64_t begin = td_clock_ns();
  assert_int_equal(parse(header.data, n, &st, &err), TD_OK);
  uint64_t ms = (td_clock_ns() - begin) / 1000000;
  print_message("%zu tensors, %zu bytes of header: %llu ms\n", n, header.len,
                (unsigned long long)ms);
  assert_int_equal(st.n_tensors, n);
  assert_true(ms < 30000); // with sanitizers; quadratic would be minutes
  td_safetensors_free(&st);
  td_buf_free(&header);
}
