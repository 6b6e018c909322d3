// src/model/checkpoint/safetensors.c - parses and validates the header: tensors must tile the file.
#include "model/checkpoint/safetensors.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/json_parse.h"
#include "tandem/types.h"

// State of parsing one file.
typedef struct {
  const char *file_name;
  td_err *err;
  td_safetensors *out;
  char *names_end;  // where the next name is stored
  uint64_t n_data;  // bytes after the header
  const char *data; // the first of them
} reader;

// The members of one tensor before validation; NULL: absent.
typedef struct {
  const cJSON *dtype, *shape, *data_offsets;
  uint64_t offsets[2];
} entry;

// The dtypes of safetensors that no weight has, beside td_dtype's of a byte or more.
static const struct {
  const char *name;
  unsigned bits;
} other_dtypes[] = {
    {"F64", 64}, {"I64", 64},    {"I16", 16},    {"U64", 64}, {"U32", 32},
    {"U16", 16}, {"U8", 8},      {"BOOL", 8},    {"C64", 64}, {"F8_E5M2", 8},
    {"F4", 4},   {"F6_E2M3", 6}, {"F6_E3M2", 6},
};

static const char *find_dtype(const char *name, unsigned *bits) {
  td_dtype dtype;
  if (td_dtype_find(name, &dtype) && td_dtype_bytes(dtype) > 0) {
    *bits = td_dtype_bits(dtype);
    return td_dtype_name(dtype);
  }
  for (size_t i = 0; i < TD_COUNT(other_dtypes); i++) {
    if (strcmp(name, other_dtypes[i].name) == 0) {
      *bits = other_dtypes[i].bits;
      return other_dtypes[i].name;
    }
  }
  return NULL;
}

td_status td_tensor_fail(td_err *err, td_status code, const td_tensor *t, const char *fmt, ...) {
  char text[TD_ERR_BYTES];
  va_list args;
  va_start(args, fmt);
  vsnprintf(text, sizeof text, fmt, args);
  va_end(args);
  return td_fail(err, code, "%s: tensor %s: %s", t->file, t->name, text);
}

static td_status take_uint(const reader *r, const td_tensor *t, const cJSON *item, const char *what,
                           uint64_t *out) {
  // The parser keeps the text of numbers that a double cannot represent uniquely.
  const char *text = cJSON_IsNumber(item) ? item->valuestring : NULL;
  const bool is_whole = cJSON_IsNumber(item) && item->valuedouble >= 0 &&
                        (text ? !text[strspn(text, "0123456789")]
                              : item->valuedouble == (double)(uint64_t)item->valuedouble);
  if (!is_whole) {
    return td_tensor_fail(r->err, TD_EFORMAT, t,
                          "%s must be an array of whole numbers, none negative", what);
  }
  errno = 0;
  *out = text ? strtoull(text, NULL, 10) : (uint64_t)item->valuedouble;
  if (!errno) return TD_OK;
  return td_tensor_fail(r->err, TD_EFORMAT, t, "a number in %s is too large", what);
}

// Reads an array of at most max integers into out.
static td_status take_uints(const reader *r, const td_tensor *t, const cJSON *array, uint64_t *out,
                            uint32_t max, uint32_t *n) {
  const char *what = array->string;
  *n = 0;
  if (!cJSON_IsArray(array))
    return td_tensor_fail(r->err, TD_EFORMAT, t, "%s is not an array", what);
  for (const cJSON *item = array->child; item; item = item->next) {
    if (*n == max)
      return td_tensor_fail(r->err, TD_EUNSUPPORTED, t, "%s has more than %u numbers", what, max);
    td_status st = take_uint(r, t, item, what, &out[(*n)++]);
    if (st != TD_OK) return st;
  }
  return TD_OK;
}

// Members other than dtype, shape and data_offsets are ignored.
static td_status find_members(const reader *r, const td_tensor *t, const cJSON *object, entry *e) {
  const struct {
    const char *key;
    const cJSON **member;
  } keys[] = {{"dtype", &e->dtype}, {"shape", &e->shape}, {"data_offsets", &e->data_offsets}};
  for (const cJSON *item = object->child; item; item = item->next) {
    for (size_t i = 0; i < TD_COUNT(keys); i++) {
      if (strcmp(item->string, keys[i].key) != 0) continue;
      if (*keys[i].member)
        return td_tensor_fail(r->err, TD_EFORMAT, t, "%s is given twice", item->string);
      *keys[i].member = item;
    }
  }
  for (size_t i = 0; i < TD_COUNT(keys); i++) {
    if (*keys[i].member) continue;
    return td_tensor_fail(r->err, TD_EFORMAT, t, "header has no %s for it", keys[i].key);
  }
  return TD_OK;
}

static td_status read_members(const reader *r, td_tensor *t, entry *e, unsigned *bits) {
  if (!cJSON_IsString(e->dtype))
    return td_tensor_fail(r->err, TD_EFORMAT, t, "dtype is not a string");
  td_status st = take_uints(r, t, e->shape, t->shape, TD_SAFETENSORS_MAX_DIMS, &t->n_dims);
  uint32_t n = 2;
  if (st == TD_OK) st = take_uints(r, t, e->data_offsets, e->offsets, 2, &n);
  if (st == TD_OK && n != 2)
    st = td_tensor_fail(r->err, TD_EFORMAT, t, "data_offsets must be two numbers");
  t->dtype = find_dtype(e->dtype->valuestring, bits);
  if (st == TD_OK && !t->dtype)
    st = td_tensor_fail(r->err, TD_EUNSUPPORTED, t, "unknown dtype %.40s", e->dtype->valuestring);
  return st;
}

// Validates the members of one tensor against each other and the file's size.
static td_status check_entry(const reader *r, td_tensor *t, const entry *e, unsigned bits) {
  uint64_t n_bits = bits;
  for (uint32_t i = 0; i < t->n_dims; i++)
    if (__builtin_mul_overflow(n_bits, t->shape[i], &n_bits))
      return td_tensor_fail(r->err, TD_EFORMAT, t, "its shape overflows 64 bits");
  uint64_t begin = e->offsets[0], end = e->offsets[1];
  if (begin > end) {
    return td_tensor_fail(r->err, TD_EFORMAT, t, "data_offsets [%llu, %llu] run backwards",
                          (unsigned long long)begin, (unsigned long long)end);
  }
  if (n_bits % 8 || end - begin != n_bits / 8) {
    return td_tensor_fail(r->err, TD_EFORMAT, t,
                          "data_offsets span %llu bytes, but its dtype and shape need %llu",
                          (unsigned long long)(end - begin), (unsigned long long)(n_bits / 8));
  }
  if (end > r->n_data) {
    return td_tensor_fail(r->err, TD_EFORMAT, t,
                          "its data ends at byte %llu, but the file holds only %llu bytes "
                          "of data: it is cut short, download it again",
                          (unsigned long long)end, (unsigned long long)r->n_data);
  }
  t->data = (const uint8_t *)r->data + begin;
  t->n_bytes = end - begin;
  return TD_OK;
}

static td_status add_tensor(reader *r, const cJSON *object) {
  td_tensor *t = &r->out->tensors[r->out->n_tensors++];
  *t = (td_tensor){.name = r->names_end, .file = r->file_name};
  r->names_end = stpcpy(r->names_end, object->string) + 1;
  if (!cJSON_IsObject(object))
    return td_tensor_fail(r->err, TD_EFORMAT, t, "not described by an object");
  entry e = {0};
  unsigned bits = 0;
  td_status st = find_members(r, t, object, &e);
  if (st == TD_OK) st = read_members(r, t, &e, &bits);
  return st == TD_OK ? check_entry(r, t, &e, bits) : st;
}

static td_status read_header(reader *r, const cJSON *header) {
  size_t n_tensors = 0, n_name_bytes = 0;
  for (const cJSON *item = header->child; item; item = item->next) {
    n_tensors++;
    n_name_bytes += strlen(item->string) + 1;
  }
  r->out->tensors = malloc(n_tensors * sizeof *r->out->tensors + 1);
  r->names_end = r->out->names = malloc(n_name_bytes + 1);
  if (!r->out->tensors || !r->out->names)
    return td_fail(r->err, TD_ENOMEM, "%s: out of memory", r->file_name);
  for (const cJSON *item = header->child; item; item = item->next) {
    if (strcmp(item->string, "__metadata__") == 0) continue;
    td_status st = add_tensor(r, item);
    if (st != TD_OK) return st;
  }
  return TD_OK;
}

static int by_data(const void *a, const void *b) {
  const td_tensor *x = a, *y = b;
  if (x->data != y->data) return x->data < y->data ? -1 : 1;
  if (x->n_bytes != y->n_bytes) return x->n_bytes < y->n_bytes ? -1 : 1;
  return strcmp(x->name, y->name);
}

static int by_name(const void *a, const void *b) {
  return strcmp((*(const td_tensor *const *)a)->name, (*(const td_tensor *const *)b)->name);
}

static td_status check_names(const reader *r) {
  size_t n = r->out->n_tensors;
  const td_tensor **sorted = malloc(n * sizeof(const td_tensor *) + 1);
  if (!sorted) return td_fail(r->err, TD_ENOMEM, "%s: out of memory", r->file_name);
  for (size_t i = 0; i < n; i++)
    sorted[i] = &r->out->tensors[i];
  qsort(sorted, n, sizeof *sorted, by_name);
  td_status st = TD_OK;
  for (size_t i = 1; i < n && st == TD_OK; i++)
    if (strcmp(sorted[i - 1]->name, sorted[i]->name) == 0)
      st = td_tensor_fail(r->err, TD_EFORMAT, sorted[i], "named twice in the header");
  free(sorted);
  return st;
}

// Sorts the tensors by offset and checks that they tile the data.
static td_status check_layout(const reader *r) {
  td_safetensors *out = r->out;
  if (out->n_tensors) qsort(out->tensors, out->n_tensors, sizeof *out->tensors, by_data);
  uint64_t end = 0;
  for (size_t i = 0; i < out->n_tensors; i++) {
    const td_tensor *t = &out->tensors[i];
    uint64_t begin = (uint64_t)(t->data - (const uint8_t *)r->data);
    if (begin < end) {
      return td_tensor_fail(r->err, TD_EFORMAT, t, "its data overlaps that of tensor %s",
                            t[-1].name);
    }
    if (begin > end) {
      return td_tensor_fail(r->err, TD_EFORMAT, t, "%llu bytes before its data belong to no tensor",
                            (unsigned long long)(begin - end));
    }
    end = begin + t->n_bytes;
  }
  if (end != r->n_data) {
    return td_fail(r->err, TD_EFORMAT, "%s: %llu bytes at its end belong to no tensor",
                   r->file_name, (unsigned long long)(r->n_data - end));
  }
  return TD_OK;
}

static td_status parse(reader *r, const char *header, size_t header_len) {
  cJSON *root = NULL;
  td_status st = td_json_parse(&root, header, header_len, TD_JSON_MAX_DEPTH, r->err);
  if (st != TD_OK) {
    td_err_prefix(r->err, "%s: header", r->file_name);
    return st;
  }
  st = read_header(r, root);
  cJSON_Delete(root);
  if (st == TD_OK) st = check_names(r);
  return st == TD_OK ? check_layout(r) : st;
}

td_status td_safetensors_parse(td_safetensors *out, const void *bytes, size_t n_bytes,
                               const char *file_name, td_err *err) {
  *out = (td_safetensors){0};
  const uint8_t *b = bytes;
  td_status fetched = td_file_check_fetched(file_name, bytes, n_bytes, err);
  if (fetched != TD_OK) return fetched;
  if (n_bytes < 8) {
    return td_fail(err, TD_EFORMAT, "%s: not a safetensors file: it has only %zu bytes", file_name,
                   n_bytes);
  }
  uint64_t header_len = 0;
  for (int i = 7; i >= 0; i--)
    header_len = header_len << 8 | b[i];
  if (header_len > TD_SAFETENSORS_MAX_HEADER) {
    return td_fail(err, TD_ELIMIT,
                   "%s: claims a header of %llu bytes, the limit is %u: corrupt, or not a "
                   "safetensors file",
                   file_name, (unsigned long long)header_len, TD_SAFETENSORS_MAX_HEADER);
  }
  if (header_len > n_bytes - 8) {
    return td_fail(err, TD_EFORMAT,
                   "%s: claims a header of %llu bytes, but the file has only %zu bytes: it is cut "
                   "short or corrupt, download it again",
                   file_name, (unsigned long long)header_len, n_bytes);
  }
  const char *header = (const char *)b + 8;
  if (!header_len || *header != '{')
    return td_fail(err, TD_EFORMAT, "%s: its header is not a JSON object", file_name);
  reader r = {.file_name = file_name,
              .err = err,
              .out = out,
              .data = header + header_len,
              .n_data = n_bytes - 8 - header_len};
  td_status st = parse(&r, header, header_len);
  if (st != TD_OK) td_safetensors_free(out);
  return st;
}

void td_safetensors_free(td_safetensors *st) {
  free(st->tensors);
  free(st->names);
  *st = (td_safetensors){0};
}
