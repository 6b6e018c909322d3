// src/model/checkpoint/gguf_shard.c - renames and splits the tensors of a GGUF file.
#include "model/checkpoint/gguf_shard.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/str.h"

enum { MAX_NAME = TD_GGUF_MAX_NAME, MAX_EXPERTS = 4096 };

typedef struct {
  td_safetensors *out;
  const td_gguf *gguf;
  const td_gguf_arch *arch;
  td_buf names; // NUL-terminated, in the order of tensors
  td_err *err;
} sharding;

static td_status bad(const sharding *s, const td_gguf_tensor *t, const char *what) {
  return td_fail(s->err, TD_EFORMAT, "%s: tensor %.*s: %s", s->gguf->file,
                 t->name.len < 80 ? (int)t->name.len : 80, t->name.data, what);
}

static td_status name_of(const sharding *s, const td_gguf_tensor *t, char out[MAX_NAME]) {
  return td_gguf_tensor_name(s->arch, t->name, out, MAX_NAME) ? TD_OK
                                                              : bad(s, t, "its name is too long");
}

// How many tensors become of it: one, or one for each expert.
static td_status n_parts_of(const sharding *s, const td_gguf_tensor *t, const char *name,
                            uint64_t *n) {
  *n = 1;
  if (!strchr(name, '*')) return TD_OK;
  *n = t->shape[0];
  return t->n_dims >= 2 && *n <= MAX_EXPERTS
             ? TD_OK
             : bad(s, t, "its first dimension does not count experts");
}

static void add(sharding *s, const td_gguf_tensor *t, const char *name, uint64_t idx,
                uint64_t n_parts) {
  td_tensor *to = &s->out->tensors[s->out->n_tensors++];
  const uint32_t cut = n_parts > 1 || strchr(name, '*') ? 1 : 0;
  *to = (td_tensor){.file = s->gguf->file,
                    .dtype = t->dtype,
                    .data = t->data + idx * (t->n_bytes / n_parts),
                    .n_bytes = t->n_bytes / n_parts,
                    .n_dims = t->n_dims - cut};
  memcpy(to->shape, t->shape + cut, to->n_dims * sizeof *to->shape);
  if (to->n_dims == 1 && td_ends_with(name, ".shared_expert_gate.weight")) { // a matrix of one row
    to->shape[1] = to->shape[0];
    to->shape[0] = 1;
    to->n_dims = 2;
  }
  const char *star = strchr(name, '*');
  if (star) {
    td_buf_printf(&s->names, "%.*s%llu%s", (int)(star - name), name, (unsigned long long)idx,
                  star + 1);
  } else {
    td_buf_str(&s->names, name);
  }
  td_buf_char(&s->names, '\0');
}

static td_status count(const sharding *s, size_t *n) {
  *n = 0;
  for (size_t i = 0; i < s->gguf->n_tensors; i++) {
    char name[MAX_NAME];
    uint64_t n_parts = 0;
    td_status st = name_of(s, &s->gguf->tensors[i], name);
    if (st == TD_OK) st = n_parts_of(s, &s->gguf->tensors[i], name, &n_parts);
    if (st != TD_OK) return st;
    *n += n_parts;
  }
  return TD_OK;
}

static td_status add_all(sharding *s) {
  td_status st = TD_OK;
  for (size_t i = 0; i < s->gguf->n_tensors && st == TD_OK; i++) {
    const td_gguf_tensor *t = &s->gguf->tensors[i];
    char name[MAX_NAME];
    uint64_t n_parts = 0;
    st = name_of(s, t, name);
    if (st == TD_OK) st = n_parts_of(s, t, name, &n_parts);
    for (uint64_t e = 0; e < n_parts && st == TD_OK; e++)
      add(s, t, name, e, n_parts);
  }
  return st == TD_OK ? td_buf_status(&s->names, s->err) : st;
}

td_status td_gguf_shard(td_safetensors *out, const td_gguf *gguf, const td_gguf_arch *arch,
                        td_err *err) {
  sharding s = {.out = out, .gguf = gguf, .arch = arch, .err = err};
  size_t n;
  *out = (td_safetensors){0};
  td_status st = count(&s, &n);
  if (st == TD_OK && !(out->tensors = malloc(n * sizeof *out->tensors + 1)))
    st = td_fail(err, TD_ENOMEM, "%s: out of memory", gguf->file);
  if (st == TD_OK) st = add_all(&s);
  if (st != TD_OK) {
    td_buf_free(&s.names);
    td_safetensors_free(out);
    return st;
  }
  out->names = s.names.data;
  const char *name = out->names;
  for (size_t i = 0; i < out->n_tensors; i++, name += strlen(name) + 1)
    out->tensors[i].name = name;
  return TD_OK;
}
