// src/base/formats.c - dtypes by name, and the tables of tandem/formats.h.
#include "tandem/formats.h"

#include <string.h>

static const char *const dtype_names[] = {
#define X(id, name, bits) [TD_##id] = name,
    TD_DTYPES(X)
#undef X
};

const char *td_dtype_name(td_dtype dtype) {
  return (unsigned)dtype < TD_N_DTYPES ? dtype_names[dtype] : "unknown";
}

bool td_dtype_find(const char *name, td_dtype *out) {
  for (int i = 0; i < TD_N_DTYPES; i++) {
    *out = (td_dtype)i;
    if (strcmp(dtype_names[i], name) == 0) return true;
  }
  *out = TD_N_DTYPES;
  return false;
}

const td_weight_kind *td_weight_kind_of(td_dtype dtype) {
  static const td_weight_kind kinds[] = {
#define X(dtype, family, scales) {TD_##dtype, #family, scales},
      TD_WEIGHT_KINDS(X)
#undef X
  };
  for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
    if (kinds[i].dtype == dtype) return &kinds[i];
  return NULL;
}

const td_format *td_formats(size_t *n) {
  static const td_format formats[] = {
#define X(name, dtype, scale_dtype, rows, cols, zero, what)                                        \
  {name, TD_##dtype, TD_##scale_dtype, rows, cols, zero, what},
      TD_FORMATS(X)
#undef X
  };
  *n = sizeof formats / sizeof formats[0];
  return formats;
}

const td_format *td_format_named(const char *name) {
  size_t n;
  const td_format *formats = td_formats(&n);
  for (size_t i = 0; i < n; i++)
    if (strcmp(formats[i].name, name) == 0) return &formats[i];
  return NULL;
}
