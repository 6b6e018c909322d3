// src/text/span.h - byte ranges of a text that came from its user.
// The chat template says which ranges of a prompt were typed rather than written by the template;
// the tokenizer never reads a control token out of them.
#ifndef TD_TEXT_SPAN_H
#define TD_TEXT_SPAN_H

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

#endif
