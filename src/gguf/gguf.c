// src/gguf/gguf.c - parses the header of a GGUF file.
#include "gguf/gguf.h"

#include <stdlib.h>
#include <string.h>

#include "base/fs.h"

#define MIN_VERSION   2u
#define MAX_VERSION   3u
#define MAX_ALIGNMENT (1u << 20)
#define MAX_VALUES    (1u << 16) // published models have up to a hundred
enum {
  VALUE_BYTES = 8 + 4 + 1, // the least that a metadata value takes: empty key, type, a byte
  TENSOR_BYTES = 8 + 4 + 8 + 4 + 8, // the least that a tensor's entry takes
  DEFAULT_ALIGNMENT = 32,
};

// Types of tensors by number, with columns and bytes of a block.
static const struct {
  uint32_t number;
  const char *name;
  uint32_t cols, bytes;
} dtypes[] = {
    {0, "F32", 1, 4},         {1, "F16", 1, 2},         {2, "Q4_0", 32, 18},
    {3, "Q4_1", 32, 20},      {6, "Q5_0", 32, 22},      {7, "Q5_1", 32, 24},
    {8, "Q8_0", 32, 34},      {9, "Q8_1", 32, 36},      {10, "Q2_K", 256, 84},
    {11, "Q3_K", 256, 110},   {12, "Q4_K", 256, 144},   {13, "Q5_K", 256, 176},
    {14, "Q6_K", 256, 210},   {15, "Q8_K", 256, 292},   {16, "IQ2_XXS", 256, 66},
    {17, "IQ2_XS", 256, 74},  {18, "IQ3_XXS", 256, 98}, {19, "IQ1_S", 256, 50},
    {20, "IQ4_NL", 32, 18},   {21, "IQ3_S", 256, 110},  {22, "IQ2_S", 256, 82},
    {23, "IQ4_XS", 256, 136}, {24, "I8", 1, 1},         {25, "I16", 1, 2},
    {26, "I32", 1, 4},        {27, "I64", 1, 8},        {28, "F64", 1, 8},
    {29, "IQ1_M", 256, 56},   {30, "BF16", 1, 2},       {34, "TQ1_0", 256, 54},
    {35, "TQ2_0", 256, 66},   {39, "MXFP4", 32, 17},    {40, "NVFP4", 64, 36},
};

typedef struct {
  td_gguf *out;
  const uint8_t *begin, *at, *end; // of the file; at: what is read next
  td_err *err;
} reader;

// ---- numbers and strings ------------------------------------------------------------------------

static uint64_t uint_at(const uint8_t *p, unsigned n_bytes) {
  uint64_t value = 0;
  for (unsigned i = n_bytes; i-- > 0;)
    value = value << 8 | p[i];
  return value;
}

static size_t left(const reader *r) {
  return (size_t)(r->end - r->at);
}

static td_status cut_short(const reader *r, const char *what) {
  return td_fail(r->err, TD_EFORMAT,
                 "%s: %s at byte %llu goes past the end of the file: it is cut short or corrupt, "
                 "download it again",
                 r->out->file, what, (unsigned long long)(r->at - r->begin));
}

static td_status take_uint(reader *r, unsigned n_bytes, const char *what, uint64_t *out) {
  if (left(r) < n_bytes) return cut_short(r, what);
  *out = uint_at(r->at, n_bytes);
  r->at += n_bytes;
  return TD_OK;
}

static td_status take_str(reader *r, const char *what, td_gguf_str *out) {
  uint64_t len = 0;
  td_status st = take_uint(r, 8, what, &len);
  if (st != TD_OK) return st;
  if (len > left(r)) return cut_short(r, what);
  *out = (td_gguf_str){.data = (const char *)r->at, .len = (size_t)len};
  r->at += len;
  return TD_OK;
}

bool td_gguf_str_is(td_gguf_str s, const char *text) {
  return s.len == strlen(text) && memcmp(s.data, text, s.len) == 0;
}

td_gguf_str td_gguf_next_str(const uint8_t **at) {
  const td_gguf_str s = {.data = (const char *)*at + 8, .len = (size_t)uint_at(*at, 8)};
  *at += 8 + s.len;
  return s;
}

static int compare(td_gguf_str a, td_gguf_str b) {
  const size_t n = a.len < b.len ? a.len : b.len;
  const int order = n ? memcmp(a.data, b.data, n) : 0;
  return order ? order : (a.len > b.len) - (a.len < b.len);
}

// A part of a name or key for a message, which must be text.
static int shown(td_gguf_str s) {
  return s.len < 80 ? (int)s.len : 80;
}

// ---- metadata -----------------------------------------------------------------------------------

// Bytes of a value; 0 for strings and arrays, whose sizes differ.
static unsigned type_bytes(td_gguf_type type) {
  static const uint8_t bytes[TD_GGUF_N_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
  return bytes[type];
}

static td_status take_type(reader *r, const td_gguf_value *v, td_gguf_type *out) {
  uint64_t type = 0;
  td_status st = take_uint(r, 4, "a type of metadata", &type);
  if (st != TD_OK) return st;
  if (type >= TD_GGUF_N_TYPES || (v->is_array && type == TD_GGUF_ARRAY)) {
    return td_fail(r->err, TD_EUNSUPPORTED, "%s: metadata %.*s: %s type %llu is not known",
                   r->out->file, shown(v->key), v->key.data, v->is_array ? "an array's" : "its",
                   (unsigned long long)type);
  }
  *out = (td_gguf_type)type;
  return TD_OK;
}

// Skips the elements of a value.
static td_status skip_elements(reader *r, const td_gguf_value *v) {
  const unsigned bytes = type_bytes(v->type);
  if (bytes) {
    if (v->n > left(r) / bytes) return cut_short(r, "a metadata value");
    r->at += v->n * bytes;
    return TD_OK;
  }
  if (v->n > left(r) / 8) return cut_short(r, "an array of strings");
  td_status st = TD_OK;
  for (uint64_t i = 0; i < v->n && st == TD_OK; i++) {
    td_gguf_str text;
    st = take_str(r, "a string", &text);
  }
  return st;
}

static td_status take_value(reader *r, td_gguf_value *v) {
  *v = (td_gguf_value){.n = 1};
  td_status st = take_str(r, "a key of metadata", &v->key);
  if (st == TD_OK) st = take_type(r, v, &v->type);
  if (st == TD_OK && v->type == TD_GGUF_ARRAY) {
    v->is_array = true;
    st = take_type(r, v, &v->type);
    if (st == TD_OK) st = take_uint(r, 8, "the length of an array", &v->n);
  }
  v->data = r->at;
  return st == TD_OK ? skip_elements(r, v) : st;
}

static int by_key(const void *a, const void *b) {
  return compare(((const td_gguf_value *)a)->key, ((const td_gguf_value *)b)->key);
}

static td_status read_values(reader *r, uint64_t n) {
  td_gguf *g = r->out;
  if (n > left(r) / VALUE_BYTES) return cut_short(r, "the metadata");
  if (n > MAX_VALUES) {
    return td_fail(r->err, TD_ELIMIT, "%s: %llu values of metadata: more than %u", g->file,
                   (unsigned long long)n, MAX_VALUES);
  }
  g->values = malloc((size_t)n * sizeof *g->values + 1);
  if (!g->values) return td_fail(r->err, TD_ENOMEM, "%s: out of memory", g->file);
  for (; g->n_values < n; g->n_values++) {
    td_status st = take_value(r, &g->values[g->n_values]);
    if (st != TD_OK) return st;
  }
  if (n) qsort(g->values, g->n_values, sizeof *g->values, by_key);
  for (size_t i = 1; i < n; i++) {
    const td_gguf_str key = g->values[i].key;
    if (by_key(&g->values[i - 1], &g->values[i]) != 0) continue;
    return td_fail(r->err, TD_EFORMAT, "%s: metadata %.*s: given twice", g->file, shown(key),
                   key.data);
  }
  return TD_OK;
}

const td_gguf_value *td_gguf_find(const td_gguf *g, const char *key) {
  const td_gguf_value wanted = {.key = {.data = key, .len = strlen(key)}};
  return g->n_values ? bsearch(&wanted, g->values, g->n_values, sizeof *g->values, by_key) : NULL;
}

bool td_gguf_number(const td_gguf_value *v, uint64_t idx, double *out) {
  if (!v || idx >= v->n || !type_bytes(v->type)) return false;
  const unsigned bytes = type_bytes(v->type);
  const uint64_t bits = uint_at(v->data + idx * bytes, bytes);
  float single;
  switch (v->type) {
  case TD_GGUF_I8: *out = (int8_t)bits; return true;
  case TD_GGUF_I16: *out = (int16_t)bits; return true;
  case TD_GGUF_I32: *out = (int32_t)bits; return true;
  case TD_GGUF_I64: *out = (double)(int64_t)bits; return true;
  case TD_GGUF_F64: memcpy(out, &bits, sizeof *out); return true;
  case TD_GGUF_F32: {
    const uint32_t half = (uint32_t)bits;
    memcpy(&single, &half, sizeof single);
    *out = single;
    return true;
  }
  default: *out = (double)bits; return true;
  }
}

bool td_gguf_text(const td_gguf_value *v, td_gguf_str *out) {
  if (!v || v->is_array || v->type != TD_GGUF_STR) return false;
  const uint8_t *at = v->data;
  *out = td_gguf_next_str(&at);
  return true;
}

// ---- tensors ------------------------------------------------------------------------------------

static td_status bad_tensor(const reader *r, const td_gguf_tensor *t, const char *what) {
  return td_fail(r->err, TD_EFORMAT, "%s: tensor %.*s: %s", r->out->file, shown(t->name),
                 t->name.data, what);
}

static td_status take_dims(reader *r, td_gguf_tensor *t) {
  uint64_t n = 0;
  td_status st = take_uint(r, 4, "the table of tensors", &n);
  if (st != TD_OK) return st;
  if (n < 1 || n > TD_GGUF_MAX_DIMS) {
    return td_fail(r->err, TD_EUNSUPPORTED, "%s: tensor %.*s: has %llu dimensions", r->out->file,
                   shown(t->name), t->name.data, (unsigned long long)n);
  }
  t->n_dims = (uint32_t)n;
  for (uint32_t i = t->n_dims; i-- > 0 && st == TD_OK;) {
    st = take_uint(r, 8, "the table of tensors", &t->shape[i]);
    if (st == TD_OK && !t->shape[i]) return bad_tensor(r, t, "a dimension is 0");
  }
  return st;
}

// The size of a tensor from its type and shape.
static td_status size_tensor(const reader *r, td_gguf_tensor *t, uint64_t type) {
  size_t i = 0;
  while (i < TD_COUNT(dtypes) && dtypes[i].number != type)
    i++;
  if (i == TD_COUNT(dtypes)) {
    return td_fail(r->err, TD_EUNSUPPORTED, "%s: tensor %.*s: type %llu is not known", r->out->file,
                   shown(t->name), t->name.data, (unsigned long long)type);
  }
  t->dtype = dtypes[i].name;
  const uint64_t cols = t->shape[t->n_dims - 1];
  if (cols % dtypes[i].cols) return bad_tensor(r, t, "its rows do not fill whole blocks");
  t->n_bytes = cols / dtypes[i].cols;
  bool overflows = __builtin_mul_overflow(t->n_bytes, dtypes[i].bytes, &t->n_bytes);
  for (uint32_t d = 0; d + 1 < t->n_dims; d++)
    overflows |= __builtin_mul_overflow(t->n_bytes, t->shape[d], &t->n_bytes);
  return overflows ? bad_tensor(r, t, "its shape overflows 64 bits") : TD_OK;
}

// Offsets count from the data, whose place is known after the table: kept as they are.
static td_status take_tensor(reader *r, td_gguf_tensor *t, uint64_t *offset) {
  uint64_t type = 0;
  *t = (td_gguf_tensor){0};
  td_status st = take_str(r, "the table of tensors", &t->name);
  if (st == TD_OK && (!t->name.len || memchr(t->name.data, '\0', t->name.len))) {
    st = td_fail(r->err, TD_EFORMAT, "%s: a tensor's name is empty or has a NUL in it",
                 r->out->file);
  }
  if (st == TD_OK) st = take_dims(r, t);
  if (st == TD_OK) st = take_uint(r, 4, "the table of tensors", &type);
  if (st == TD_OK) st = size_tensor(r, t, type);
  return st == TD_OK ? take_uint(r, 8, "the table of tensors", offset) : st;
}

static int by_data(const void *a, const void *b) {
  const td_gguf_tensor *x = a, *y = b;
  return (x->data > y->data) - (x->data < y->data);
}

static td_status check_layout(const reader *r) {
  td_gguf *g = r->out;
  if (g->n_tensors) qsort(g->tensors, g->n_tensors, sizeof *g->tensors, by_data);
  for (size_t i = 1; i < g->n_tensors; i++) {
    const td_gguf_tensor *t = &g->tensors[i];
    if (t->data >= t[-1].data + t[-1].n_bytes) continue;
    return td_fail(r->err, TD_EFORMAT, "%s: tensor %.*s: its data overlaps that of tensor %.*s",
                   g->file, shown(t->name), t->name.data, shown(t[-1].name), t[-1].name.data);
  }
  return TD_OK;
}

static td_status find_alignment(const reader *r, uint64_t *out) {
  const td_gguf_value *v = td_gguf_find(r->out, "general.alignment");
  double value = DEFAULT_ALIGNMENT;
  if (v && (!td_gguf_number(v, 0, &value) || !(value >= 1 && value <= MAX_ALIGNMENT) ||
            value != (uint32_t)value || ((uint32_t)value & ((uint32_t)value - 1)))) {
    return td_fail(r->err, TD_EFORMAT, "%s: general.alignment is not a power of two up to %u",
                   r->out->file, MAX_ALIGNMENT);
  }
  *out = (uint64_t)value;
  return TD_OK;
}

static td_status read_tensors(reader *r, uint64_t n) {
  td_gguf *g = r->out;
  uint64_t alignment = 0;
  td_status st = find_alignment(r, &alignment);
  if (st != TD_OK) return st;
  if (n > left(r) / TENSOR_BYTES) return cut_short(r, "the table of tensors");
  g->tensors = malloc((size_t)n * sizeof *g->tensors + 1);
  uint64_t *offsets = malloc((size_t)n * sizeof *offsets + 1);
  if (!g->tensors || !offsets) st = td_fail(r->err, TD_ENOMEM, "%s: out of memory", g->file);
  for (; st == TD_OK && g->n_tensors < n; g->n_tensors++)
    st = take_tensor(r, &g->tensors[g->n_tensors], &offsets[g->n_tensors]);
  const uint64_t used = (uint64_t)(r->at - r->begin), n_bytes = (uint64_t)(r->end - r->begin);
  const uint64_t start = (used + alignment - 1) / alignment * alignment;
  const uint64_t n_data = start < n_bytes ? n_bytes - start : 0;
  for (size_t i = 0; i < g->n_tensors && st == TD_OK; i++) {
    td_gguf_tensor *t = &g->tensors[i];
    if (offsets[i] % alignment) st = bad_tensor(r, t, "its offset is not aligned");
    if (st == TD_OK && (offsets[i] > n_data || t->n_bytes > n_data - offsets[i])) {
      st = bad_tensor(r, t,
                      "its data goes past the end of the file: it is cut short, download it again");
    }
    if (st == TD_OK) t->data = r->begin + start + offsets[i];
  }
  free(offsets);
  return st == TD_OK ? check_layout(r) : st;
}

// ---- file ---------------------------------------------------------------------------------------

static td_status read_head(reader *r, uint64_t *n_tensors, uint64_t *n_values) {
  const char *file = r->out->file;
  if (left(r) < 24 || memcmp(r->at, "GGUF", 4) != 0)
    return td_fail(r->err, TD_EFORMAT, "%s: not a GGUF file: it does not begin as one", file);
  const uint64_t version = uint_at(r->at + 4, 4);
  if (version < MIN_VERSION || version > MAX_VERSION) {
    const bool is_swapped = version && version % (1u << 24) == 0;
    return td_fail(r->err, TD_EUNSUPPORTED,
                   is_swapped ? "%s: big-endian: convert the model for a little-endian machine"
                              : "%s: GGUF version %llu: versions 2 and 3 are read",
                   file, (unsigned long long)version);
  }
  *n_tensors = uint_at(r->at + 8, 8);
  *n_values = uint_at(r->at + 16, 8);
  r->at += 24;
  return TD_OK;
}

td_status td_gguf_parse(td_gguf *out, const void *bytes, size_t n_bytes, const char *file,
                        td_err *err) {
  *out = (td_gguf){.file = file};
  td_status st = td_file_check_fetched(file, bytes, n_bytes, err);
  reader r = {.out = out, .begin = bytes, .at = bytes, .end = (const uint8_t *)bytes + n_bytes};
  r.err = err;
  uint64_t n_tensors = 0, n_values = 0;
  if (st == TD_OK) st = read_head(&r, &n_tensors, &n_values);
  if (st == TD_OK) st = read_values(&r, n_values);
  if (st == TD_OK) st = read_tensors(&r, n_tensors);
  if (st != TD_OK) td_gguf_free(out);
  return st;
}

void td_gguf_free(td_gguf *g) {
  free(g->values);
  free(g->tensors);
  *g = (td_gguf){0};
}
