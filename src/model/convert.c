// src/model/convert.c - plans and runs the conversion of formats that have no kernel.
#include "model/convert.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/grow.h"
#include "base/log.h"
#include "base/str.h"
#include "base/thread_pool.h"
#include "model/convert_bnb.h"
#include "model/convert_matrix.h"
#include "tandem/kernels.h"

// Sources and result of converting one module. matrix points to the data in the store.
typedef struct {
  const td_tensor *words, *zeros, *scales, *order; // zeros and order may be NULL
  td_word_matrix matrix;
  bool to_i8;
  bool transposes; // words is [experts][columns][rows], and all else is unused
  bool joins;      // words is GGUF's k_b and zeros its v_b: parts says the rest
  td_kv_b_parts parts;
  td_bnb_matrix bnb; // with rows, and all else but words is unused
  size_t entry;      // index of the weight's entry; for GPTQ converted to I8 the scales follow
} job;

// A tensor that is turned into rows. from: its data in the store.
typedef struct {
  const td_tensor *t;
  const uint8_t *from;
  enum { TURN_ELEMENTS, TURN_ZEROS, TURN_AWQ_ZEROS, TURN_AWQ_CODES } how;
  uint32_t zero_add; // TURN_ZEROS
  uint64_t offset;   // in the memory
} turn;

struct td_conversion {
  const td_store *store;
  const td_quant *quant;
  job *jobs;
  size_t n_jobs, cap_jobs;
  turn *turns;
  size_t n_turns, cap_turns;
  td_shard_entry *entries;
  size_t n_entries, cap_entries;
  td_buf header;
  uint64_t n_bytes, n_memory_bytes;
};

// Formats that may need conversion, identified by the tensor with the codes.
static const struct {
  td_quant_format format;
  uint32_t bits;
  bool is_gptq;
  const char *words, *scales, *zeros, *order; // tensor names after the module's
} formats[] = {
    {TD_QUANT_GPTQ, 4, true, "qweight", "scales", "qzeros", "g_idx"},
    {TD_QUANT_GPTQ8, 8, true, "qweight", "scales", "qzeros", "g_idx"},
    {TD_QUANT_PACKED, 4, false, "weight_packed", "weight_scale", "weight_zero_point",
     "weight_g_idx"},
    {TD_QUANT_PACKED8, 8, false, "weight_packed", "weight_scale", "weight_zero_point",
     "weight_g_idx"},
};

// ---- finding the tensors ----------------------------------------------------------------------

typedef struct {
  td_conversion *c;
  const td_quant_scheme *scheme;
  size_t format; // index into formats
  const char *module;
  int n_module;
  td_err *err;
} search;

static const td_tensor *peek(const search *s, const char *part) {
  char name[512];
  int n = snprintf(name, sizeof name, "%.*s.%s", s->n_module, s->module, part);
  ptrdiff_t idx = n < (int)sizeof name ? td_store_find(s->c->store, name) : -1;
  return idx < 0 ? NULL : td_store_tensor(s->c->store, (size_t)idx);
}

static td_status misfit(const search *s, const td_tensor *t) {
  return td_tensor_fail(s->err, TD_EFORMAT, t,
                        "dtype %s or its shape does not fit the codes of %.*s and "
                        "quantization_config",
                        t->dtype, s->n_module, s->module);
}

static td_status missing(const search *s, const char *part) {
  return td_fail(s->err, TD_EFORMAT, "%s: tensor %.*s.%s is missing: the checkpoint is incomplete",
                 td_store_listing(s->c->store), s->n_module, s->module, part);
}

static bool has_shape(const td_tensor *t, uint64_t d0, uint64_t d1) {
  return t->n_dims == 2 && t->shape[0] == d0 && t->shape[1] == d1;
}

// Reads rows and columns. In PACKED formats the last word of a row may be partly unused.
static td_status read_size(const search *s, job *j) {
  const td_tensor *t = j->words, *stated = peek(s, "weight_shape");
  td_word_matrix *m = &j->matrix;
  if (t->n_dims != 2 || strcmp(t->dtype, "I32") != 0) return misfit(s, t);
  uint64_t per_word = 32 / m->bits;
  uint64_t rows = t->shape[m->is_gptq ? 1 : 0], words = t->shape[m->is_gptq ? 0 : 1];
  if (!rows || !words || rows > UINT32_MAX || words > UINT32_MAX / per_word) return misfit(s, t);
  uint64_t cols = words * per_word;
  if (stated && !m->is_gptq) {
    bool wide = strcmp(stated->dtype, "I64") == 0;
    int64_t size[2] = {0};
    if (stated->n_dims != 1 || stated->shape[0] != 2 ||
        (!wide && strcmp(stated->dtype, "I32") != 0))
      return misfit(s, stated);
    for (size_t i = 0; i < 2; i++)
      memcpy(&size[i], stated->data + i * (wide ? 8 : 4), wide ? 8 : 4);
    if (size[0] != (int64_t)rows || size[1] > (int64_t)cols ||
        size[1] <= (int64_t)(cols - per_word))
      return misfit(s, stated);
    cols = (uint64_t)size[1];
  }
  m->rows = (uint32_t)rows;
  m->cols = (uint32_t)cols;
  m->group_cols = s->scheme->scale_cols ? s->scheme->scale_cols : m->cols;
  m->groups = (m->cols - 1) / m->group_cols + 1;
  return TD_OK;
}

static td_status read_scales(const search *s, job *j) {
  td_word_matrix *m = &j->matrix;
  const td_tensor *t = j->scales = peek(s, formats[s->format].scales);
  if (!t) return missing(s, formats[s->format].scales);
  td_dtype dtype;
  const bool known = td_dtype_find(t->dtype, &dtype) &&
                     (dtype == TD_F16 || dtype == TD_BF16 || dtype == TD_F32);
  if (known) m->scale_dtype = dtype;
  m->one_scale = !s->scheme->scale_rows;
  const uint64_t n = td_tensor_elements(t);
  bool fits = m->one_scale ? n == 1
              : m->is_gptq ? has_shape(t, m->groups, m->rows)
                           : has_shape(t, m->rows, m->groups) ||
                                 (m->groups == 1 && t->n_dims == 1 && n == m->rows);
  return known && fits ? TD_OK : misfit(s, t);
}

static td_status read_zeros(const search *s, job *j) {
  td_word_matrix *m = &j->matrix;
  const td_tensor *t = peek(s, formats[s->format].zeros);
  if (s->scheme->symmetric) return TD_OK;
  if (!t) return missing(s, formats[s->format].zeros);
  uint64_t words = ((uint64_t)m->rows * m->bits + 31) / 32;
  bool fits = m->is_gptq ? has_shape(t, m->groups, words) : has_shape(t, words, m->groups);
  if (!fits || strcmp(t->dtype, "I32") != 0) return misfit(s, t);
  m->zero_add = s->scheme->zero_add;
  m->zeros = t->data;
  j->zeros = t;
  return TD_OK;
}

// Records the column order unless it is the plain one.
static td_status read_order(const search *s, job *j) {
  td_word_matrix *m = &j->matrix;
  const td_tensor *t = peek(s, formats[s->format].order);
  if (!t) return TD_OK;
  if (t->n_dims != 1 || t->shape[0] != m->cols || strcmp(t->dtype, "I32") != 0) return misfit(s, t);
  bool plain = true;
  for (uint32_t c = 0; c < m->cols; c++) {
    int32_t group;
    memcpy(&group, t->data + c * sizeof group, sizeof group);
    if (group < 0 || (uint32_t)group >= m->groups) {
      return td_tensor_fail(s->err, TD_EFORMAT, t, "column %u is of group %d; there are %u", c,
                            group, m->groups);
    }
    plain &= (uint32_t)group == c / m->group_cols;
  }
  if (!plain) j->order = t;
  return TD_OK;
}

// ---- planning ---------------------------------------------------------------------------------

static td_status no_memory(const td_conversion *c, td_err *err) {
  return td_fail(err, TD_ENOMEM, "%s: out of memory", td_store_listing(c->store));
}

// Adds an entry of this name, which becomes the conversion's, as the next job's result.
static td_status add_entry(td_conversion *c, char *name, td_shard_entry entry, td_err *err) {
  entry.name = name;
  if (name && TD_GROW(c->entries, c->n_entries, c->cap_entries, 64)) {
    c->entries[c->n_entries++] = entry;
    return TD_OK;
  }
  free(name);
  return no_memory(c, err);
}

static td_status add_job(td_conversion *c, job j, char *name, td_shard_entry entry, td_err *err) {
  j.entry = c->n_entries;
  td_status st = add_entry(c, name, entry, err);
  if (st != TD_OK || !TD_GROW(c->jobs, c->n_jobs, c->cap_jobs, 64)) return no_memory(c, err);
  c->jobs[c->n_jobs++] = j;
  return TD_OK;
}

// NULL: out of memory.
__attribute__((format(printf, 1, 2))) static char *text_of(const char *format, ...) {
  char *text;
  va_list args;
  va_start(args, format);
  const int n = vasprintf(&text, format, args);
  va_end(args);
  return n < 0 ? NULL : text;
}

static td_shard_entry matrix_of(td_dtype dtype, uint64_t rows, uint64_t cols) {
  return (td_shard_entry){.dtype = td_dtype_name(dtype),
                          .n_dims = 2,
                          .shape = {rows, cols},
                          .n_bytes = rows * cols * td_dtype_bytes(dtype)};
}

static td_status add_words(const search *s, job j) {
  td_conversion *c = s->c;
  td_word_matrix *m = &j.matrix;
  m->words = j.words->data;
  j.to_i8 = !j.order && td_words_are_symmetric(m);
  td_status st = add_job(c, j, text_of("%.*s.weight", s->n_module, s->module),
                         matrix_of(j.to_i8 ? TD_I8 : m->scale_dtype, m->rows, m->cols), s->err);
  if (st != TD_OK || !j.to_i8 || !m->is_gptq) return st;
  return add_entry(c, text_of("%.*s.weight_scale", s->n_module, s->module),
                   matrix_of(TD_F32, m->rows, m->groups), s->err);
}

// Adds the module whose codes are t, if it needs conversion.
static td_status look_at(search *s, const td_tensor *t) {
  job j = {.words = t};
  td_word_matrix *m = &j.matrix;
  m->bits = formats[s->format].bits;
  m->is_gptq = formats[s->format].is_gptq;
  if (peek(s, "weight")) return TD_OK; // reported as an error when it is bound
  bool always = m->bits == 8 || !s->scheme->scale_rows;
  if (!always && !peek(s, formats[s->format].order)) return TD_OK;
  td_status st = read_size(s, &j);
  if (st == TD_OK) st = read_order(s, &j);
  if (st != TD_OK || (!always && !j.order)) return st;
  st = read_scales(s, &j);
  if (st == TD_OK) st = read_zeros(s, &j);
  return st == TD_OK ? add_words(s, j) : st;
}

static td_status add_turn(search *s, const td_tensor *t, int how) {
  td_conversion *c = s->c;
  if (!t) return TD_OK;
  const uint64_t n = td_tensor_elements(t);
  const bool is_well_formed = t->n_dims == 2 && n && t->n_bytes % n == 0 &&
                              (how == TURN_ELEMENTS || strcmp(t->dtype, "I32") == 0);
  if (!is_well_formed) return TD_OK; // reported as an error when it is bound
  if (!TD_GROW(c->turns, c->n_turns, c->cap_turns, 64)) return no_memory(c, s->err);
  c->turns[c->n_turns++] = (turn){
      .t = t, .from = t->data, .how = how, .zero_add = s->scheme->zero_add};
  return TD_OK;
}

// Adds the module whose codes are t, stored by columns.
static td_status look_at_columns(search *s, const td_tensor *t) {
  const bool is_awq = s->scheme->format == TD_QUANT_AWQ;
  if (t->n_dims == 2 && is_awq && t->shape[0] % 8) return TD_OK; // refused when it is bound
  td_status st = add_turn(s, t, is_awq ? TURN_AWQ_CODES : TURN_ELEMENTS);
  if (st == TD_OK) st = add_turn(s, peek(s, "scales"), TURN_ELEMENTS);
  return st == TD_OK ? add_turn(s, peek(s, "qzeros"), is_awq ? TURN_AWQ_ZEROS : TURN_ZEROS) : st;
}

// Whether t, experts without biases in BF16, F16 or F32, is transposed, as in Qwen3-VL: the router
// beside it says how wide the model is, and the shape of down_proj, which is not square, which
// way both lie.
static bool is_turned(const td_conversion *c, const td_tensor *t) {
  if (!td_ends_with(t->name, ".experts.down_proj") &&
      !td_ends_with(t->name, ".experts.gate_up_proj"))
    return false;
  const td_tensor *beside[2];
  static const char *const names[] = {"gate.weight", "experts.down_proj"};
  const int n = (int)(strstr(t->name, ".experts.") - t->name);
  for (size_t i = 0; i < TD_COUNT(names); i++) {
    char name[512];
    if (snprintf(name, sizeof name, "%.*s.%s", n, t->name, names[i]) >= (int)sizeof name)
      return false;
    const ptrdiff_t idx = td_store_find(c->store, name);
    beside[i] = idx < 0 ? NULL : td_store_tensor(c->store, (size_t)idx);
    if (!beside[i] || beside[i]->n_dims != (i ? 3 : 2)) return false;
  }
  const uint64_t dim = beside[0]->shape[1], *down = beside[1]->shape;
  return t->n_bytes / td_tensor_elements(t) >= 2 && down[1] != dim && down[2] == dim;
}

// Whether t holds transposed matrices of a layer's experts, as gpt-oss has them in other formats
// than its own: those with biases beside them. Codes and scales of FP4, too.
static bool is_transposed(const td_conversion *c, const td_tensor *t) {
  static const char *const parts[] = {"", "_weight_scale", "_scale", "_packed"};
  td_dtype dtype;
  if (t->n_dims != 3 || !strstr(t->name, ".experts.") || !td_tensor_elements(t)) return false;
  const bool is_known = td_dtype_find(t->dtype, &dtype) ? td_dtype_bytes(dtype) > 0
                                                        : strcmp(t->dtype, "U8") == 0;
  if (!is_known || t->n_bytes % td_tensor_elements(t)) return false;
  for (size_t i = 0; i < TD_COUNT(parts); i++) {
    if (!td_ends_with(t->name, parts[i])) continue;
    char name[512];
    const int n = (int)(strlen(t->name) - strlen(parts[i]));
    if (snprintf(name, sizeof name, "%.*s_bias", n, t->name) >= (int)sizeof name) return false;
    const ptrdiff_t idx = td_store_find(c->store, name);
    if (idx < 0) continue;
    const td_tensor *bias = td_store_tensor(c->store, (size_t)idx);
    return bias->n_dims == 2 && bias->shape[0] == t->shape[0] && bias->shape[1] == t->shape[2];
  }
  return is_turned(c, t);
}

static td_status add_transposed(td_conversion *c, const td_tensor *t, td_err *err) {
  const td_shard_entry entry = {.dtype = t->dtype,
                                .n_dims = 3,
                                .shape = {t->shape[0], t->shape[2], t->shape[1]},
                                .n_bytes = t->n_bytes};
  return add_job(c, (job){.words = t, .transposes = true}, text_of("%s" TD_TRANSPOSED, t->name),
                 entry, err);
}

// The other part of kv_b_proj, of which t is the keys'; NULL: t is none, or it has no other.
static const td_tensor *other_part(const td_conversion *c, const td_tensor *t, char name[512]) {
  const size_t n = strlen(t->name) - (td_ends_with(t->name, "." TD_K_B) ? strlen(TD_K_B) : 0);
  if (t->name[n] == '\0' || t->n_dims != 3) return NULL;
  if (snprintf(name, 512, "%.*s" TD_V_B, (int)n, t->name) >= 512) return NULL;
  const ptrdiff_t idx = td_store_find(c->store, name);
  const td_tensor *v = idx < 0 ? NULL : td_store_tensor(c->store, (size_t)idx);
  snprintf(name, 512, "%.*skv_b_proj.weight", (int)n, t->name);
  return v && v->n_dims == 3 && td_store_find(c->store, name) < 0 ? v : NULL;
}

// Dtypes whose values need no other tensor.
static bool stands_alone(const td_tensor *t, td_dtype *out) {
  return td_dtype_find(t->dtype, out) &&
         (td_dtype_block(*out).cols > 0 || *out == TD_F32 || *out == TD_F16 || *out == TD_BF16);
}

static td_status add_joined(td_conversion *c, const td_tensor *k, const td_tensor *v,
                            const char *name, td_err *err) {
  job j = {.words = k, .zeros = v, .joins = true};
  td_kv_b_parts *p = &j.parts;
  if (!stands_alone(k, &p->k_dtype) || !stands_alone(v, &p->v_dtype)) {
    const td_tensor *t = stands_alone(k, &p->k_dtype) ? v : k;
    return td_tensor_fail(err, TD_EUNSUPPORTED, t, "dtype %s is not supported here", t->dtype);
  }
  if (k->shape[0] != v->shape[0] || k->shape[1] != v->shape[2] ||
      k->shape[0] * k->shape[1] > UINT32_MAX || v->shape[0] * v->shape[1] > UINT32_MAX ||
      k->shape[2] > UINT32_MAX) {
    return td_fail(err, TD_EFORMAT, "%s: tensors %s and %s: their shapes do not fit together",
                   k->file, k->name, v->name);
  }
  p->dtype = td_kv_b_dtype(p->k_dtype, p->v_dtype);
  p->heads = (uint32_t)k->shape[0];
  p->latent = (uint32_t)k->shape[1];
  p->nope = (uint32_t)k->shape[2];
  p->v_dim = (uint32_t)v->shape[1];
  const uint64_t rows = (uint64_t)p->heads * (p->nope + (uint64_t)p->v_dim);
  return add_job(c, j, strdup(name), matrix_of(p->dtype, rows, p->latent), err);
}

// Adds the matrix of bitsandbytes whose factors are in the tensor with this name.
static td_status add_dequantized(td_conversion *c, const char *absmax, td_err *err) {
  char name[512];
  const int n = (int)(strlen(absmax) - strlen(TD_BNB_FACTORS));
  if (snprintf(name, sizeof name, "%.*s", n, absmax) >= (int)sizeof name) return TD_OK;
  job j = {.entry = 0};
  const td_bnb_matrix *m = &j.bnb;
  td_status st = td_bnb_open(&j.bnb, c->store, name, err);
  if (st != TD_OK) return st;
  j.words = m->parts[TD_BNB_CODES];
  return add_job(c, j, text_of("%s" TD_DEQUANTIZED, name), matrix_of(m->dtype, m->rows, m->cols),
                 err);
}

static td_status plan(td_conversion *c, td_err *err) {
  td_status st = TD_OK;
  for (size_t i = 0; i < td_store_n_tensors(c->store) && st == TD_OK; i++) {
    const td_tensor *t = td_store_tensor(c->store, i);
    char joined[512];
    const td_tensor *v = other_part(c, t, joined);
    if (v) {
      st = add_joined(c, t, v, joined, err);
      continue;
    }
    if (is_transposed(c, t)) {
      st = add_transposed(c, t, err);
      continue;
    }
    if (td_ends_with(t->name, ".weight" TD_BNB_FACTORS)) {
      st = add_dequantized(c, t->name, err);
      continue;
    }
    const char *dot = strrchr(t->name, '.');
    bool is_codes = dot && (strcmp(dot, ".qweight") == 0 || strcmp(dot, ".weight_packed") == 0);
    char module[512];
    if (!is_codes || dot - t->name >= (ptrdiff_t)sizeof module) continue;
    snprintf(module, sizeof module, "%.*s", (int)(dot - t->name), t->name);
    search s = {.c = c,
                .scheme = td_quant_find(c->quant, module),
                .module = t->name,
                .n_module = (int)(dot - t->name),
                .err = err};
    const size_t n_before = c->n_jobs;
    for (; s.scheme && s.format < TD_COUNT(formats); s.format++) {
      if (formats[s.format].format != s.scheme->format) continue;
      if (strcmp(dot + 1, formats[s.format].words) == 0) st = look_at(&s, t);
      break;
    }
    const bool is_by_columns = s.scheme && (s.scheme->format == TD_QUANT_GPTQ ||
                                            s.scheme->format == TD_QUANT_AWQ);
    if (st == TD_OK && is_by_columns && c->n_jobs == n_before && strcmp(dot, ".qweight") == 0)
      st = look_at_columns(&s, t);
  }
  return st;
}

enum { TURN_ALIGN = 64 };

td_status td_conversion_open(td_conversion **out, const td_store *store, const td_quant *quant,
                             td_err *err) {
  *out = NULL;
  td_conversion *c = calloc(1, sizeof *c);
  if (!c) return td_fail(err, TD_ENOMEM, "%s: out of memory", td_store_listing(store));
  c->store = store;
  c->quant = quant;
  td_status st = plan(c, err);
  if (st == TD_OK && c->n_jobs) {
    st = td_shard_layout(c->entries, c->n_entries, &c->header, err);
    c->n_bytes = c->header.len;
  }
  for (size_t i = 0; i < c->n_entries; i++)
    c->n_bytes += c->entries[i].n_bytes;
  c->n_memory_bytes = c->n_bytes;
  for (size_t i = 0; i < c->n_turns; i++) {
    c->turns[i].offset = (c->n_memory_bytes + TURN_ALIGN - 1) / TURN_ALIGN * TURN_ALIGN;
    c->n_memory_bytes = c->turns[i].offset + c->turns[i].t->n_bytes;
  }
  if (st == TD_OK)
    *out = c;
  else
    td_conversion_close(c);
  return st;
}

void td_conversion_close(td_conversion *c) {
  if (!c) return;
  for (size_t i = 0; i < c->n_entries; i++)
    free(c->entries[i].name);
  free(c->entries);
  free(c->jobs);
  free(c->turns);
  td_buf_free(&c->header);
  free(c);
}

uint64_t td_conversion_bytes(const td_conversion *c) {
  return c ? c->n_bytes : 0;
}

uint64_t td_conversion_memory_bytes(const td_conversion *c) {
  return c ? c->n_memory_bytes : 0;
}

void td_conversion_place(const td_conversion *c, td_store *store, const void *memory) {
  for (size_t i = 0; i < c->n_turns; i++)
    td_store_place(store, c->turns[i].t, (const uint8_t *)memory + c->turns[i].offset);
}

const td_tensor *td_conversion_source(const td_conversion *c, size_t idx) {
  return idx < c->n_jobs ? c->jobs[idx].words : NULL;
}

const td_tensor *td_conversion_turned(const td_conversion *c, size_t idx, const uint8_t **from) {
  if (idx >= c->n_turns) return NULL;
  *from = c->turns[idx].from;
  return c->turns[idx].t;
}

void td_conversion_write_header(const td_conversion *c, void *memory) {
  memcpy(memory, c->header.data, c->header.len);
}

// ---- running ----------------------------------------------------------------------------------

typedef struct {
  const td_conversion *c;
  uint8_t *memory;
  td_conversion_opts opts;
  atomic_size_t next_job; // not begun yet
  atomic_bool failed;     // out of memory
} run;

static const void *data_of(const run *r, const td_tensor *t) {
  if (!t) return NULL;
  return r->opts.moved ? r->opts.moved(r->opts.ctx, t) : t->data;
}

static bool is_canceled(const run *r) {
  return r->opts.canceled && atomic_load(r->opts.canceled);
}

// Turns a tensor into rows. False: out of memory.
static bool run_turn(const run *r, const turn *u) {
  const td_tensor *t = u->t;
  const uint64_t cols = t->shape[0], rows = t->shape[1];
  const uint8_t *from = r->opts.moved ? data_of(r, t) : u->from;
  uint32_t *rows_of = from ? malloc(t->n_bytes) : NULL;
  if (!rows_of) return !from;
  if (u->how == TURN_AWQ_CODES)
    td_awq_to_rows(rows_of, from, rows * 8, cols);
  else
    td_transpose(rows_of, from, rows, cols, t->n_bytes / (rows * cols));
  for (uint64_t i = 0; u->how == TURN_ZEROS && i < rows * cols; i++)
    rows_of[i] += u->zero_add;
  if (u->how == TURN_AWQ_ZEROS) td_awq_sort(rows_of, rows * cols);
  memcpy(r->opts.moved ? (uint8_t *)from : r->memory + u->offset, rows_of, t->n_bytes);
  free(rows_of);
  return true;
}

static void run_jobs(void *ctx, unsigned member, unsigned n_members) {
  (void)member;
  (void)n_members;
  run *r = ctx;
  size_t i;
  const size_t n = r->c->n_jobs + r->c->n_turns;
  while ((i = atomic_fetch_add(&r->next_job, 1)) < n && !is_canceled(r)) {
    if (i >= r->c->n_jobs) {
      if (!run_turn(r, &r->c->turns[i - r->c->n_jobs])) atomic_store(&r->failed, true);
      continue;
    }
    const job *j = &r->c->jobs[i];
    td_word_matrix m = j->matrix;
    const td_shard_entry *e = &r->c->entries[j->entry];
    if (j->joins) {
      td_kv_b_parts parts = j->parts;
      parts.k = data_of(r, j->words);
      parts.v = data_of(r, j->zeros);
      if (!td_kv_b_join(&parts, r->memory + e->offset)) atomic_store(&r->failed, true);
      continue;
    }
    if (j->bnb.rows) {
      const void *data[TD_BNB_N_PARTS];
      for (size_t k = 0; k < TD_BNB_N_PARTS; k++)
        data[k] = data_of(r, j->bnb.parts[k]);
      td_bnb_values(&j->bnb, data, r->memory + e->offset);
      continue;
    }
    if (j->transposes) {
      for (uint64_t k = 0; k < e->shape[0]; k++) {
        const uint64_t bytes = e->n_bytes / e->shape[0], rows = e->shape[1], cols = e->shape[2];
        td_transpose(r->memory + e->offset + k * bytes,
                     (const uint8_t *)data_of(r, j->words) + k * bytes, rows, cols,
                     bytes / (rows * cols));
      }
      continue;
    }
    m.words = data_of(r, j->words);
    m.zeros = data_of(r, j->zeros);
    m.scales = data_of(r, j->scales);
    m.order = data_of(r, j->order);
    uint8_t *out = r->memory + e->offset;
    if (!j->to_i8) {
      if (!td_words_to_values(&m, out)) atomic_store(&r->failed, true);
      continue;
    }
    td_words_to_i8(&m, (int8_t *)out);
    if (m.is_gptq) td_words_scales(&m, (float *)(r->memory + e[1].offset));
  }
}

static void log_counts(const td_conversion *c) {
  size_t n[TD_N_DTYPES] = {0};
  size_t n_transposed = 0;
  for (size_t i = 0; i < c->n_jobs; i++) {
    const job *j = &c->jobs[i];
    n_transposed += j->transposes;
    if (!j->transposes && !j->joins)
      n[j->to_i8 ? TD_I8 : j->bnb.rows ? j->bnb.dtype : j->matrix.scale_dtype]++;
  }
  if (c->n_turns) td_info("%zu tensors are turned into rows while loading", c->n_turns);
  if (n_transposed) td_info("%zu tensors of experts are transposed while loading", n_transposed);
  for (size_t i = 0; i < TD_N_DTYPES; i++) {
    if (!n[i]) continue;
    td_info("%zu matrices are converted to %s while loading (%s): their format has no kernel", n[i],
            td_dtype_name((td_dtype)i), i == TD_I8 || i == TD_F32 ? "exact" : "rounded once");
  }
}

td_status td_conversion_run(const td_conversion *c, void *memory, const td_conversion_opts *opts,
                            td_err *err) {
  if (!c->n_jobs && !c->n_turns) return TD_OK;
  run r = {.c = c, .memory = memory};
  td_kernels_init_any();
  if (opts) r.opts = *opts;
  td_thread_pool *pool;
  log_counts(c);
  td_status st = td_thread_pool_open(&pool, &(td_thread_pool_opts){0}, err);
  if (st != TD_OK) return st;
  td_thread_pool_run(pool, run_jobs, &r);
  td_thread_pool_close(pool);
  if (is_canceled(&r)) return td_fail(err, TD_ECANCELED, "the loading of the weights was canceled");
  return atomic_load(&r.failed) ? no_memory(c, err) : TD_OK;
}
