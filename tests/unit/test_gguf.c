// tests/unit/test_gguf.c - GGUF headers, whole and lying, and what is made of them.
// CTest: no-tsan
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "gguf/files.h"
#include "gguf/tokenizer.h"
#include "model/checkpoint/gguf_shard.h"
#include "unit/testing.h"

// ---- writing a file -----------------------------------------------------------------------------

static void put(td_buf *b, uint64_t value, unsigned n_bytes) {
  for (unsigned i = 0; i < n_bytes; i++)
    td_buf_char(b, (char)(value >> 8 * i));
}

static void put_str(td_buf *b, const char *text) {
  put(b, strlen(text), 8);
  td_buf_str(b, text);
}

static void begin(td_buf *b, uint64_t n_tensors, uint64_t n_values) {
  td_buf_clear(b);
  td_buf_str(b, "GGUF");
  put(b, 3, 4);
  put(b, n_tensors, 8);
  put(b, n_values, 8);
}

static void put_text(td_buf *b, const char *key, const char *value) {
  put_str(b, key);
  put(b, TD_GGUF_STR, 4);
  put_str(b, value);
}

static void put_u32(td_buf *b, const char *key, uint32_t value) {
  put_str(b, key);
  put(b, TD_GGUF_U32, 4);
  put(b, value, 4);
}

// Dimensions are given outermost first.
static void put_tensor(td_buf *b, const char *name, uint64_t rows, uint64_t cols, uint32_t type,
                       uint64_t offset) {
  put_str(b, name);
  put(b, rows ? 2 : 1, 4);
  put(b, cols, 8);
  if (rows) put(b, rows, 8);
  put(b, type, 4);
  put(b, offset, 8);
}

static void put_data(td_buf *b, size_t n) {
  while (b->len % 32)
    td_buf_char(b, 0);
  for (size_t i = 0; i < n; i++)
    td_buf_char(b, (char)i);
}

// Parses from a block of exactly the size, so that ASan sees a read past the end.
static td_status parse(const td_buf *b, td_gguf *out, uint8_t **bytes, td_err *err) {
  *bytes = malloc(b->len ? b->len : 1);
  if (b->len) memcpy(*bytes, b->data, b->len);
  return td_gguf_parse(out, *bytes, b->len, "x.gguf", err);
}

static void refuses(const td_buf *b, td_status want, const char *says) {
  td_gguf g;
  td_err err;
  uint8_t *bytes;
  assert_int_equal(parse(b, &g, &bytes, &err), want);
  if (!strstr(err.msg, says)) fail_msg("\"%s\" does not say \"%s\"", err.msg, says);
  assert_null(g.values);
  assert_null(g.tensors);
  free(bytes);
}

// ---- tests --------------------------------------------------------------------------------------

TEST(reads_values_and_tensors) {
  td_buf b = TD_BUF_INIT;
  begin(&b, 2, 4);
  put_text(&b, "general.architecture", "qwen3moe");
  put_u32(&b, "qwen3moe.block_count", 7);
  put_str(&b, "list");
  put(&b, TD_GGUF_ARRAY, 4);
  put(&b, TD_GGUF_STR, 4);
  put(&b, 2, 8);
  put_str(&b, "a");
  put_str(&b, "");
  put_str(&b, "flag");
  put(&b, TD_GGUF_BOOL, 4);
  put(&b, 1, 1);
  put_tensor(&b, "late", 0, 8, 0, 96);
  put_tensor(&b, "early", 2, 32, 8, 0); // Q8_0
  put_data(&b, 96 + 32);
  td_gguf g;
  uint8_t *bytes;
  assert_int_equal(parse(&b, &g, &bytes, NULL), TD_OK);
  double n;
  td_gguf_str text;
  assert_true(td_gguf_number(td_gguf_find(&g, "qwen3moe.block_count"), 0, &n) && n == 7);
  assert_true(td_gguf_number(td_gguf_find(&g, "flag"), 0, &n) && n == 1);
  assert_true(td_gguf_text(td_gguf_find(&g, "general.architecture"), &text));
  assert_true(td_gguf_str_is(text, "qwen3moe"));
  const td_gguf_value *list = td_gguf_find(&g, "list");
  assert_true(list->is_array && list->n == 2 && !td_gguf_text(list, &text));
  assert_false(td_gguf_number(list, 0, &n));
  assert_null(td_gguf_find(&g, "lis"));
  assert_int_equal(g.n_tensors, 2);
  assert_true(td_gguf_str_is(g.tensors[0].name, "early"));
  assert_string_equal(g.tensors[0].dtype, "Q8_0");
  assert_int_equal(g.tensors[0].shape[0], 2);
  assert_int_equal(g.tensors[0].shape[1], 32);
  assert_int_equal(g.tensors[0].n_bytes, 68);
  assert_ptr_equal(g.tensors[1].data, g.tensors[0].data + 96);
  td_gguf_free(&g);
  free(bytes);
  td_buf_free(&b);
}

TEST(refuses_lies_about_the_file) {
  td_buf b = TD_BUF_INIT;
  td_buf_str(&b, "GGML, not a file of this kind");
  refuses(&b, TD_EFORMAT, "not a GGUF file");
  begin(&b, 0, 0);
  b.data[4] = 1;
  refuses(&b, TD_EUNSUPPORTED, "version 1");
  b.data[4] = 0;
  b.data[7] = 3;
  refuses(&b, TD_EUNSUPPORTED, "big-endian");
  begin(&b, 0, UINT64_MAX); // counts that no file can hold
  refuses(&b, TD_EFORMAT, "goes past the end");
  begin(&b, (uint64_t)1 << 60, 0);
  refuses(&b, TD_EFORMAT, "goes past the end");
  begin(&b, 0, 1); // a string of 2^60 bytes
  put(&b, (uint64_t)1 << 60, 8);
  td_buf_str(&b, "key and more bytes");
  refuses(&b, TD_EFORMAT, "goes past the end");
  begin(&b, 0, 1); // an array of 2^62 numbers of 4 bytes
  put_str(&b, "key");
  put(&b, TD_GGUF_ARRAY, 4);
  put(&b, TD_GGUF_U32, 4);
  put(&b, (uint64_t)1 << 62, 8);
  put_data(&b, 64);
  refuses(&b, TD_EFORMAT, "goes past the end");
  begin(&b, 0, 1);
  put_str(&b, "key");
  put(&b, TD_GGUF_ARRAY, 4);
  put(&b, TD_GGUF_ARRAY, 4);
  put_data(&b, 64);
  refuses(&b, TD_EUNSUPPORTED, "an array's type 9");
  begin(&b, 0, 1);
  put_str(&b, "key");
  put(&b, 13, 4);
  put_data(&b, 64);
  refuses(&b, TD_EUNSUPPORTED, "type 13");
  begin(&b, 0, 2);
  put_u32(&b, "same", 1);
  put_u32(&b, "same", 2);
  refuses(&b, TD_EFORMAT, "given twice");
  begin(&b, 0, 1);
  put_u32(&b, "general.alignment", 24);
  refuses(&b, TD_EFORMAT, "not a power of two");
  td_buf_free(&b);
}

static void one_tensor(td_buf *b, uint64_t rows, uint64_t cols, uint32_t type, uint64_t offset) {
  begin(b, 1, 0);
  put_tensor(b, "t", rows, cols, type, offset);
  put_data(b, 256);
}

TEST(refuses_lies_about_tensors) {
  td_buf b = TD_BUF_INIT;
  one_tensor(&b, 2, 32, 0, 32);
  refuses(&b, TD_EFORMAT, "past the end of the file");
  one_tensor(&b, 0, 4, 0, UINT64_MAX - 31);
  refuses(&b, TD_EFORMAT, "past the end of the file");
  one_tensor(&b, 0, 4, 0, 16);
  refuses(&b, TD_EFORMAT, "offset is not aligned");
  one_tensor(&b, (uint64_t)1 << 33, (uint64_t)1 << 33, 0, 0);
  refuses(&b, TD_EFORMAT, "overflows");
  one_tensor(&b, 1, 48, 8, 0);
  refuses(&b, TD_EFORMAT, "do not fill whole blocks");
  one_tensor(&b, 1, 0, 0, 0);
  refuses(&b, TD_EFORMAT, "a dimension is 0");
  one_tensor(&b, 1, 32, 99, 0);
  refuses(&b, TD_EUNSUPPORTED, "type 99");
  begin(&b, 1, 0);
  put_str(&b, "five");
  put(&b, 5, 4);
  put_data(&b, 256);
  refuses(&b, TD_EUNSUPPORTED, "5 dimensions");
  begin(&b, 2, 0);
  put_tensor(&b, "a", 0, 16, 0, 0);
  put_tensor(&b, "b", 0, 8, 0, 32);
  put_data(&b, 64);
  refuses(&b, TD_EFORMAT, "tensor b: its data overlaps that of tensor a");
  td_buf_free(&b);
}

// Every shorter file is refused, or holds fewer bytes of data than it says.
TEST(refuses_cut_files) {
  td_buf b = TD_BUF_INIT;
  begin(&b, 1, 2);
  put_text(&b, "general.architecture", "qwen3moe");
  put_u32(&b, "n", 1);
  put_tensor(&b, "t", 2, 32, 0, 0);
  put_data(&b, 68);
  for (size_t len = b.len; len-- > 0;) {
    const td_buf cut = {.data = b.data, .len = len};
    td_gguf g;
    td_err err;
    uint8_t *bytes;
    assert_int_not_equal(parse(&cut, &g, &bytes, &err), TD_OK);
    free(bytes);
  }
  td_buf_free(&b);
}

TEST(cuts_experts_apart) {
  td_buf b = TD_BUF_INIT;
  begin(&b, 2, 1);
  put_text(&b, "general.architecture", "qwen3moe");
  put_str(&b, "blk.3.ffn_up_exps.weight");
  put(&b, 3, 4);
  put(&b, 32, 8);
  put(&b, 2, 8);
  put(&b, 3, 8); // experts
  put(&b, 8, 4);
  put(&b, 0, 8);
  put_tensor(&b, "blk.3.attn_q.weight", 2, 4, 0, 224);
  put_data(&b, 256);
  td_gguf g;
  uint8_t *bytes;
  const td_gguf_arch *arch;
  td_safetensors st;
  assert_int_equal(parse(&b, &g, &bytes, NULL), TD_OK);
  assert_int_equal(td_gguf_arch_of(&g, &arch, NULL), TD_OK);
  assert_int_equal(td_gguf_shard(&st, &g, arch, NULL), TD_OK);
  assert_int_equal(st.n_tensors, 4);
  assert_string_equal(st.tensors[2].name, "model.layers.3.mlp.experts.2.up_proj.weight");
  assert_int_equal(st.tensors[2].n_dims, 2);
  assert_int_equal(st.tensors[2].shape[1], 32);
  assert_int_equal(st.tensors[2].n_bytes, 68);
  assert_ptr_equal(st.tensors[2].data, g.tensors[0].data + 2 * 68);
  assert_string_equal(st.tensors[3].name, "model.layers.3.self_attn.q_proj.weight");
  td_safetensors_free(&st);
  td_gguf_free(&g);
  free(bytes);
  td_buf_free(&b);
}

TEST(finds_parts) {
  static const char part[] = "/m/Big-Q4_K_M-00002-of-00003.gguf";
  assert_int_equal(td_gguf_n_parts(part), 3);
  assert_int_equal(td_gguf_n_parts("/m/Big-00002-of-3.gguf"), 1);
  assert_int_equal(td_gguf_n_parts("a.gguf"), 1);
  assert_false(td_gguf_is_first(part));
  assert_true(td_gguf_is_first("a.gguf"));
  assert_false(td_gguf_is(".gguf"));
  assert_false(td_gguf_is("/m/gguf"));
  assert_int_equal(td_gguf_n_parts("/m/Big-00002-of-00003"), 1);
  char *path = td_gguf_part_path(part, 0, 3), *name = td_gguf_model_name(part);
  assert_string_equal(path, "/m/Big-Q4_K_M-00001-of-00003.gguf");
  assert_string_equal(name, "Big-Q4_K_M");
  free(path);
  free(name);
}

typedef struct {
  uint32_t no, count, n_tensors; // as it states
  const char *architecture;      // "": none
} part;

// Opens a model of two parts with a tensor each.
static void opens_parts(const part parts[2], td_status want, const char *says) {
  td_buf b = TD_BUF_INIT;
  td_gguf_files files;
  td_err err;
  char folder[] = "/tmp/tandem-gguf-XXXXXX", path[2][64];
  assert_non_null(mkdtemp(folder));
  for (int i = 0; i < 2; i++) {
    const bool is_named = parts[i].architecture[0];
    begin(&b, 1, 3 + is_named);
    put_u32(&b, "split.no", parts[i].no);
    put_u32(&b, "split.count", parts[i].count);
    put_u32(&b, "split.tensors.count", parts[i].n_tensors);
    if (is_named) put_text(&b, "general.architecture", parts[i].architecture);
    put_tensor(&b, i ? "b" : "a", 0, 4, 0, 0);
    put_data(&b, 16);
    snprintf(path[i], sizeof path[i], "%s/m-0000%d-of-00002.gguf", folder, i + 1);
    FILE *file = fopen(path[i], "w");
    assert_non_null(file);
    assert_int_equal(fwrite(b.data, 1, b.len, file), b.len);
    fclose(file);
  }
  assert_int_equal(td_gguf_files_open(&files, path[0], &err), want);
  if (says && !strstr(err.msg, says)) fail_msg("\"%s\" does not say \"%s\"", err.msg, says);
  td_gguf_files_close(&files);
  assert_true(unlink(path[0]) == 0 && unlink(path[1]) == 0 && rmdir(folder) == 0);
  td_buf_free(&b);
}

TEST(refuses_parts_of_others) {
  const td_status bad = TD_EFORMAT;
  opens_parts((part[]){{0, 2, 2, "llama"}, {1, 2, 2, ""}}, TD_OK, NULL);
  opens_parts((part[]){{0, 2, 2, "llama"}, {1, 2, 2, "llama"}}, TD_OK, NULL);
  opens_parts((part[]){{0, 2, 2, "llama"}, {0, 2, 2, ""}}, bad, "02-of-00002.gguf: it is part 1");
  opens_parts((part[]){{0, 2, 2, "llama"}, {1, 3, 2, ""}}, bad, "02-of-00002.gguf: it is one of 3");
  opens_parts((part[]){{0, 2, 2, "llama"}, {1, 2, 3, ""}}, bad, "by its split.tensors.count");
  opens_parts((part[]){{0, 2, 2, "llama"}, {1, 2, 2, "qwen3"}}, bad, "by its general.architecture");
  opens_parts((part[]){{0, 2, 3, "llama"}, {1, 2, 3, ""}}, bad, "has 3 tensors, and its parts 2");
}

TEST(refuses_endless_metadata) {
  td_buf b = TD_BUF_INIT;
  const uint32_t most = 1 << 16;
  for (uint32_t n = most; n <= most + 1; n++) {
    char key[16];
    begin(&b, 0, n);
    for (uint32_t i = 0; i < n; i++) {
      snprintf(key, sizeof key, "k%u", i);
      put_u32(&b, key, i);
    }
    td_gguf g;
    td_err err;
    uint8_t *bytes;
    const td_status st = parse(&b, &g, &bytes, &err);
    assert_int_equal(st, n > most ? TD_ELIMIT : TD_OK);
    td_gguf_free(&g);
    free(bytes);
  }
  td_buf_free(&b);
}
