// src/text/span.h - byte ranges of a text that came from a user.
// Template rendering reports which ranges of a prompt are user input rather than template text; the
// tokenizer never parses control tokens inside them.
#pragma once

#include <stddef.h>
#include <stdlib.h>

typedef struct {
  size_t begin, end; // bytes [begin, end)
} td_span;

// Sorted, without overlap, none empty.
typedef struct {
  td_span *spans; // owned
  size_t n, cap;
} td_spans;

static inline void td_spans_free(td_spans *spans) {
  free(spans->spans);
  *spans = (td_spans){0};
}
