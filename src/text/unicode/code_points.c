// src/text/unicode/code_points.c - arrays of code points and lists of spans, declared in
// text/unicode/unicode.h and text/span.h.
#include <stdlib.h>
#include <string.h>

#include "base/grow.h"
#include "base/utf8.h"
#include "text/unicode/unicode.h"

void td_runes_free(td_runes *runes) {
  free(runes->r);
  *runes = (td_runes){0};
}

td_status td_runes_reserve(td_runes *runes, size_t n_extra, td_err *err) {
  if (n_extra <= runes->cap - runes->n) return TD_OK;
  if (n_extra > SIZE_MAX - runes->n ||
      !td_grow(&runes->r, &runes->cap, runes->n + n_extra, 64, sizeof *runes->r))
    return td_fail(err, TD_ENOMEM, "out of memory for %zu more characters", n_extra);
  return TD_OK;
}

td_status td_runes_add(td_runes *runes, const uint32_t *more, size_t n, td_err *err) {
  if (!n) return TD_OK;
  td_status st = td_runes_reserve(runes, n, err);
  if (st != TD_OK) return st;
  memcpy(runes->r + runes->n, more, n * sizeof *more);
  runes->n += n;
  return TD_OK;
}

td_status td_runes_decode(td_runes *runes, const char *text, size_t len, const td_spans *literal,
                          td_err *err) {
  td_status st = td_runes_reserve(runes, len, err);
  if (st != TD_OK) return st;
  size_t k = 0, n_literal = literal ? literal->n : 0;
  for (size_t i = 0; i < len;) {
    uint32_t c;
    int n = td_utf8_decode(text + i, len - i, &c);
    TD_CHECK(n > 0);
    size_t end = i + (size_t)n;
    while (k < n_literal && literal->spans[k].end <= i)
      k++;
    bool flagged = k < n_literal && literal->spans[k].begin < end;
    runes->r[runes->n++] = flagged ? c | TD_RUNE_LITERAL : c;
    i = end;
  }
  return TD_OK;
}

td_status td_runes_encode(const td_runes *runes, td_buf *text, td_spans *literal, td_err *err) {
  td_buf_reserve(text, runes->n * 4);
  td_status st = td_buf_status(text, err);
  for (size_t i = 0; i < runes->n && st == TD_OK; i++) {
    size_t begin = text->len;
    text->len += (size_t)td_utf8_encode(TD_RUNE_CODE(runes->r[i]), text->data + begin);
    if (!literal || !(runes->r[i] & TD_RUNE_LITERAL)) continue;
    td_span *last = literal->n ? &literal->spans[literal->n - 1] : NULL;
    if (last && last->end == begin)
      last->end = text->len;
    else
      st = td_spans_add(literal, begin, text->len, err);
  }
  if (text->data) text->data[text->len] = '\0';
  return st;
}

td_status td_spans_add(td_spans *spans, size_t begin, size_t end, td_err *err) {
  if (!TD_GROW(spans->spans, spans->n, spans->cap, 64))
    return td_fail(err, TD_ENOMEM, "out of memory for %zu spans", spans->n + 1);
  spans->spans[spans->n++] = (td_span){.begin = begin, .end = end};
  return TD_OK;
}
