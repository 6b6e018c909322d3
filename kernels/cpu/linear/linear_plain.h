// kernels/cpu/linear/linear_plain.h - definitions for linear_vec.h, for formats whose elements are
// converted a vector at a time.
// vector_at converts one vector of a group. No code is NaN.
#pragma once

#include <stdbool.h>

enum { DOWN = 1, GROUP = 64 / sizeof(elem) };

typedef struct {
  const elem *at;
} codes;

static inline codes load_codes(const elem *w) {
  return (codes){w};
}

static inline codes load_codes_n(const elem *w, uint32_t n, elem room[GROUP]) {
  memset(room, 0, GROUP * sizeof *room);
  memcpy(room, w, n * sizeof *room);
  return (codes){room};
}

static inline bool plain(int n, const codes *c) {
  (void)n;
  (void)c;
  return true;
}

static inline vf vector_of(const codes *c, int j) {
  return vector_at(c->at, j);
}

static inline vf any_vector_of(const codes *c, int j) {
  return vector_of(c, j);
}

static inline bool has_nan(const codes *c) {
  (void)c;
  return false;
}
