// src/gguf/gguf.h - reads the header of one GGUF file: its metadata and its table of tensors.
// The file, little-endian: "GGUF", u32 version, u64 number of tensors, u64 number of metadata
// values, the values (key, type, value), the tensors (name, dimensions, type, offset), then, at a
// multiple of the alignment, the data. Nothing in it is trusted: every count and length is checked
// against the bytes that are left.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

#define TD_GGUF_MAX_DIMS 4
#define TD_GGUF_MAX_NAME 256 // bytes of a tensor's name that is read, with the NUL

// Types of metadata values. Numbers are part of the format.
typedef enum {
  TD_GGUF_U8,
  TD_GGUF_I8,
  TD_GGUF_U16,
  TD_GGUF_I16,
  TD_GGUF_U32,
  TD_GGUF_I32,
  TD_GGUF_F32,
  TD_GGUF_BOOL,
  TD_GGUF_STR,
  TD_GGUF_ARRAY,
  TD_GGUF_U64,
  TD_GGUF_I64,
  TD_GGUF_F64,
  TD_GGUF_N_TYPES
} td_gguf_type;

// Bytes of the file, not NUL-terminated.
typedef struct {
  const char *data;
  size_t len;
} td_gguf_str;

// A metadata value. A single one has n 1; of an array, type is that of its elements.
typedef struct {
  td_gguf_str key;
  td_gguf_type type;
  bool is_array;
  uint64_t n;
  const uint8_t *data; // the elements, one after the other
} td_gguf_value;

typedef struct {
  td_gguf_str name;
  const char *dtype;                // static; spelled as llama.cpp does: "Q4_K"
  uint64_t shape[TD_GGUF_MAX_DIMS]; // outermost first, the reverse of the file's order
  uint32_t n_dims;
  uint64_t n_bytes;
  const uint8_t *data;
} td_gguf_tensor;

typedef struct {
  const char *file;      // borrowed; for messages
  td_gguf_value *values; // owned, sorted by key
  size_t n_values;
  td_gguf_tensor *tensors; // owned, sorted by offset
  size_t n_tensors;
} td_gguf;

// Parses a complete file in memory. Strings, values and tensors borrow bytes and file; file
// prefixes every message. TD_EFORMAT: malformed, or tensors overlap. TD_EUNSUPPORTED: a version or
// type that is not known. TD_ELIMIT: more metadata than any model has. On error *out is zeroed.
td_status td_gguf_parse(td_gguf *out, const void *bytes, size_t n_bytes, const char *file,
                        td_err *err);
void td_gguf_free(td_gguf *gguf);

// NULL: there is no such value.
const td_gguf_value *td_gguf_find(const td_gguf *gguf, const char *key);
// A number, or element idx of an array of numbers, as a double. False: it is not one.
bool td_gguf_number(const td_gguf_value *v, uint64_t idx, double *out);
// A string. False: it is not one.
bool td_gguf_text(const td_gguf_value *v, td_gguf_str *out);
// The strings of an array, one after the other: *at begins as v->data. Call at most v->n times.
td_gguf_str td_gguf_next_str(const uint8_t **at);
bool td_gguf_str_is(td_gguf_str s, const char *text);
