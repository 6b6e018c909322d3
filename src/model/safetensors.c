#include "model/safetensors.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "config/json.h"

// The header is checked to be JSON first, so the scanner below only has to know the shape that a
// safetensors header must have; anything else it meets is skipped as a value.
typedef struct {
  const char *p; // next byte; the header ends in '}', which the scanner never passes
  const char *file_name;
  td_err *err;
  td_safetensors *out;
  size_t cap;       // tensors allocated
  char *names_end;  // where the next name goes
  uint64_t n_data;  // bytes after the header
  const char *data; // first of them
} scanner;

typedef struct {
  const char *text; // between the quotes, escapes untouched
  size_t len;
} span;

// One tensor's members as they stand, before they are checked against each other.
typedef struct {
  bool has_dtype, has_shape, has_offsets;
  span dtype;
  uint64_t offsets[2];
} entry;

static const struct {
  const char *name;
  unsigned bits;
} dtypes[] = {
    {"BF16", 16},   {"F8_E4M3", 8}, {"F32", 32},    {"F16", 16}, {"F64", 64},
    {"I64", 64},    {"I32", 32},    {"I16", 16},    {"I8", 8},   {"U64", 64},
    {"U32", 32},    {"U16", 16},    {"U8", 8},      {"BOOL", 8}, {"F8_E5M2", 8},
    {"F8_E8M0", 8}, {"C64", 64},    {"F6_E2M3", 6}, {"F4", 4},   {"F6_E3M2", 6},
};

static bool span_is(span s, const char *text) {
  return strlen(text) == s.len && memcmp(s.text, text, s.len) == 0;
}

static void skip_space(scanner *s) {
  while (*s->p == ' ' || *s->p == '\n' || *s->p == '\r' || *s->p == '\t')
    s->p++;
}

// Steps over byte if it is next.
static bool take(scanner *s, char byte) {
  skip_space(s);
  if (*s->p != byte) return false;
  s->p++;
  skip_space(s);
  return true;
}

static span take_string(scanner *s) {
  const char *begin = ++s->p;
  while (*s->p != '"')
    s->p += *s->p == '\\' ? 2 : 1;
  return (span){begin, (size_t)(s->p++ - begin)};
}

static void skip_value(scanner *s) {
  size_t depth = 0;
  do {
    skip_space(s);
    switch (*s->p) {
    case '"': take_string(s); continue;
    case '{':
    case '[': depth++; break;
    case '}':
    case ']': depth--; break;
    case ',':
    case ':': break;
    default:
      while (!strchr(",:]}\" \n\r\t", *s->p))
        s->p++;
      continue;
    }
    s->p++;
  } while (depth);
}

static td_status take_uint(scanner *s, const char *name, const char *what, uint64_t *out) {
  const char *begin = s->p;
  uint64_t value = 0;
  for (; *s->p >= '0' && *s->p <= '9'; s->p++) {
    uint64_t digit = (uint64_t)(*s->p - '0');
    if (value > (UINT64_MAX - digit) / 10) {
      return td_fail(s->err, TD_EFORMAT, "%s: tensor %s: a number in %s is too large", s->file_name,
                     name, what);
    }
    value = value * 10 + digit;
  }
  if (s->p == begin || strchr(".eE", *s->p)) {
    return td_fail(s->err, TD_EFORMAT,
                   "%s: tensor %s: %s must be an array of whole numbers, none negative",
                   s->file_name, name, what);
  }
  *out = value;
  return TD_OK;
}

// Reads an array of whole numbers into out, at most max of them.
static td_status take_uints(scanner *s, const char *name, const char *what, uint64_t *out,
                            uint32_t max, uint32_t *n) {
  *n = 0;
  if (!take(s, '[')) {
    return td_fail(s->err, TD_EFORMAT, "%s: tensor %s: %s is not an array", s->file_name, name,
                   what);
  }
  if (take(s, ']')) return TD_OK;
  do {
    if (*n == max) {
      return td_fail(s->err, TD_EUNSUPPORTED, "%s: tensor %s: %s has more than %u numbers",
                     s->file_name, name, what, max);
    }
    td_status st = take_uint(s, name, what, &out[(*n)++]);
    if (st != TD_OK) return st;
  } while (take(s, ','));
  take(s, ']');
  return TD_OK;
}

static td_status duplicate_key(scanner *s, const char *name, const char *key) {
  return td_fail(s->err, TD_EFORMAT, "%s: tensor %s: %s is given twice", s->file_name, name, key);
}

static td_status take_member(scanner *s, span key, td_tensor *t, entry *e) {
  if (span_is(key, "dtype")) {
    if (e->has_dtype) return duplicate_key(s, t->name, "dtype");
    e->has_dtype = true;
    if (*s->p != '"') {
      return td_fail(s->err, TD_EFORMAT, "%s: tensor %s: dtype is not a string", s->file_name,
                     t->name);
    }
    e->dtype = take_string(s);
    return TD_OK;
  }
  if (span_is(key, "shape")) {
    if (e->has_shape) return duplicate_key(s, t->name, "shape");
    e->has_shape = true;
    return take_uints(s, t->name, "shape", t->shape, TD_SAFETENSORS_MAX_DIMS, &t->n_dims);
  }
  if (span_is(key, "data_offsets")) {
    if (e->has_offsets) return duplicate_key(s, t->name, "data_offsets");
    e->has_offsets = true;
    uint32_t n;
    td_status st = take_uints(s, t->name, "data_offsets", e->offsets, 2, &n);
    if (st == TD_OK && n != 2) {
      st = td_fail(s->err, TD_EFORMAT, "%s: tensor %s: data_offsets must be two numbers",
                   s->file_name, t->name);
    }
    return st;
  }
  skip_value(s);
  return TD_OK;
}

static const char *find_dtype(span name, unsigned *bits) {
  for (size_t i = 0; i < TD_COUNT(dtypes); i++) {
    if (span_is(name, dtypes[i].name)) {
      *bits = dtypes[i].bits;
      return dtypes[i].name;
    }
  }
  return NULL;
}

// Checks the members of one tensor against each other and against the file.
static td_status check_entry(scanner *s, td_tensor *t, const entry *e) {
  if (!e->has_dtype || !e->has_shape || !e->has_offsets) {
    return td_fail(s->err, TD_EFORMAT, "%s: tensor %s: header has no %s for it", s->file_name,
                   t->name,
                   !e->has_dtype   ? "dtype"
                   : !e->has_shape ? "shape"
                                   : "data_offsets");
  }
  unsigned bits;
  t->dtype = find_dtype(e->dtype, &bits);
  if (!t->dtype) {
    return td_fail(s->err, TD_EUNSUPPORTED, "%s: tensor %s: unknown dtype %.*s", s->file_name,
                   t->name, (int)(e->dtype.len < 40 ? e->dtype.len : 40), e->dtype.text);
  }
  uint64_t n_bits = bits;
  for (uint32_t i = 0; i < t->n_dims; i++) {
    if (__builtin_mul_overflow(n_bits, t->shape[i], &n_bits)) {
      return td_fail(s->err, TD_EFORMAT, "%s: tensor %s: its shape overflows 64 bits", s->file_name,
                     t->name);
    }
  }
  uint64_t begin = e->offsets[0], end = e->offsets[1];
  if (begin > end) {
    return td_fail(s->err, TD_EFORMAT, "%s: tensor %s: data_offsets [%llu, %llu] run backwards",
                   s->file_name, t->name, (unsigned long long)begin, (unsigned long long)end);
  }
  if (n_bits % 8 || end - begin != n_bits / 8) {
    return td_fail(s->err, TD_EFORMAT,
                   "%s: tensor %s: data_offsets span %llu bytes, but its dtype and shape need %llu",
                   s->file_name, t->name, (unsigned long long)(end - begin),
                   (unsigned long long)(n_bits / 8));
  }
  if (end > s->n_data) {
    return td_fail(s->err, TD_EFORMAT,
                   "%s: tensor %s: its data ends at byte %llu, but the file holds only %llu bytes "
                   "of data: it is cut short, download it again",
                   s->file_name, t->name, (unsigned long long)end, (unsigned long long)s->n_data);
  }
  t->data = (const uint8_t *)s->data + begin;
  t->n_bytes = end - begin;
  return TD_OK;
}

static td_status add_tensor(scanner *s, span name) {
  td_safetensors *out = s->out;
  if (memchr(name.text, '\\', name.len)) {
    return td_fail(s->err, TD_EUNSUPPORTED, "%s: tensor %.*s: its name has an escape sequence",
                   s->file_name, (int)(name.len < 100 ? name.len : 100), name.text);
  }
  if (out->n_tensors == s->cap) {
    size_t cap = s->cap ? 2 * s->cap : 64;
    td_tensor *tensors = realloc(out->tensors, cap * sizeof *tensors);
    if (!tensors) return td_fail(s->err, TD_ENOMEM, "%s: out of memory", s->file_name);
    out->tensors = tensors;
    s->cap = cap;
  }
  td_tensor *t = &out->tensors[out->n_tensors++];
  *t = (td_tensor){.name = s->names_end, .file = s->file_name};
  memcpy(s->names_end, name.text, name.len);
  s->names_end[name.len] = '\0';
  s->names_end += name.len + 1;

  if (!take(s, '{')) {
    return td_fail(s->err, TD_EFORMAT, "%s: tensor %s: not described by an object", s->file_name,
                   t->name);
  }
  entry e = {0};
  if (!take(s, '}')) {
    do {
      span key = take_string(s);
      take(s, ':');
      td_status st = take_member(s, key, t, &e);
      if (st != TD_OK) return st;
    } while (take(s, ','));
    take(s, '}');
  }
  return check_entry(s, t, &e);
}

static td_status scan_header(scanner *s) {
  take(s, '{');
  if (*s->p == '}') return TD_OK; // not taken: nothing behind it may be looked at
  do {
    span name = take_string(s);
    take(s, ':');
    if (span_is(name, "__metadata__")) {
      skip_value(s);
    } else {
      td_status st = add_tensor(s, name);
      if (st != TD_OK) return st;
    }
  } while (take(s, ','));
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

static td_status check_names(const scanner *s) {
  size_t n = s->out->n_tensors;
  const td_tensor **sorted = malloc(n * sizeof(const td_tensor *) + 1);
  if (!sorted) return td_fail(s->err, TD_ENOMEM, "%s: out of memory", s->file_name);
  for (size_t i = 0; i < n; i++)
    sorted[i] = &s->out->tensors[i];
  qsort(sorted, n, sizeof *sorted, by_name);
  td_status st = TD_OK;
  for (size_t i = 1; i < n && st == TD_OK; i++) {
    if (strcmp(sorted[i - 1]->name, sorted[i]->name) == 0) {
      st = td_fail(s->err, TD_EFORMAT, "%s: tensor %s: named twice in the header", s->file_name,
                   sorted[i]->name);
    }
  }
  free(sorted);
  return st;
}

// Sorts the tensors by their place and checks that they tile the data.
static td_status check_layout(const scanner *s) {
  td_safetensors *out = s->out;
  if (out->n_tensors) qsort(out->tensors, out->n_tensors, sizeof *out->tensors, by_data);
  uint64_t end = 0;
  for (size_t i = 0; i < out->n_tensors; i++) {
    const td_tensor *t = &out->tensors[i];
    uint64_t begin = (uint64_t)(t->data - (const uint8_t *)s->data);
    if (begin < end) {
      return td_fail(s->err, TD_EFORMAT, "%s: tensor %s: its data overlaps that of tensor %s",
                     s->file_name, t->name, t[-1].name);
    }
    if (begin > end) {
      return td_fail(s->err, TD_EFORMAT,
                     "%s: tensor %s: %llu bytes before its data belong to no tensor", s->file_name,
                     t->name, (unsigned long long)(begin - end));
    }
    end = begin + t->n_bytes;
  }
  if (end != s->n_data) {
    return td_fail(s->err, TD_EFORMAT, "%s: %llu bytes at its end belong to no tensor",
                   s->file_name, (unsigned long long)(s->n_data - end));
  }
  return TD_OK;
}

static td_status parse(scanner *s, const char *header, size_t header_len) {
  td_status st = td_json_check(header, header_len, TD_JSON_MAX_DEPTH, s->err);
  if (st != TD_OK) {
    if (s->err) td_err_prefix(s->err, "%s: header", s->file_name);
    return st;
  }
  // A name takes at least two quotes in the header, so its NUL always has room here.
  s->names_end = s->out->names = malloc(header_len);
  if (!s->names_end) return td_fail(s->err, TD_ENOMEM, "%s: out of memory", s->file_name);
  st = scan_header(s);
  if (st == TD_OK) st = check_names(s);
  if (st == TD_OK) st = check_layout(s);
  return st;
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
  if (!header_len || *header != '{') {
    return td_fail(err, TD_EFORMAT, "%s: its header is not a JSON object", file_name);
  }
  scanner s = {.p = header,
               .file_name = file_name,
               .err = err,
               .out = out,
               .data = header + header_len,
               .n_data = n_bytes - 8 - header_len};
  td_status st = parse(&s, header, header_len);
  if (st != TD_OK) td_safetensors_free(out);
  return st;
}

void td_safetensors_free(td_safetensors *st) {
  free(st->tensors);
  free(st->names);
  *st = (td_safetensors){0};
}
