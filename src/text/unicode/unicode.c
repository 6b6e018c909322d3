// src/text/unicode/unicode.c - normal forms and character properties.
#include "text/unicode/unicode.h"

#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"

typedef struct {
  uint32_t a, b, c;
} unicode_triple;

#include "base/grow.h"
#include "text/unicode/unicode_tables.inc"

// Hangul syllables are composed and decomposed arithmetically (Unicode 3.12).
enum {
  HANGUL_S = 0xAC00,
  HANGUL_L = 0x1100,
  HANGUL_V = 0x1161,
  HANGUL_T = 0x11A7,
  HANGUL_N_L = 19,
  HANGUL_N_V = 21,
  HANGUL_N_T = 28,
  HANGUL_N_S = HANGUL_N_L * HANGUL_N_V * HANGUL_N_T,
};

// The last entry of a sorted table with a <= code_point; NULL if there is none.
static const unicode_triple *find_floor(const unicode_triple *table, size_t n,
                                        uint32_t code_point) {
  size_t low = 0, high = n;
  while (low < high) {
    size_t mid = (low + high) / 2;
    if (table[mid].a <= code_point)
      low = mid + 1;
    else
      high = mid;
  }
  return low ? &table[low - 1] : NULL;
}

// The range of a table that contains code_point, or NULL.
static const unicode_triple *find_range(const unicode_triple *table, size_t n,
                                        uint32_t code_point) {
  const unicode_triple *range = find_floor(table, n, code_point);
  return range && code_point <= range->b ? range : NULL;
}

static uint32_t combining_class(uint32_t code_point) {
  if (code_point < combining_classes[0].a) return 0;
  const unicode_triple *range = find_range(combining_classes, TD_COUNT(combining_classes),
                                           code_point);
  return range ? range->c : 0;
}

// What a CJK compatibility ideograph decomposes to; 0 for other code points.
static uint32_t unified_ideograph(uint32_t code_point) {
  enum { BASIC = 0xF900, BASIC_END = 0xFADA, SUPPLEMENT = 0x2F800 };
  size_t i = SIZE_MAX;
  if (code_point >= BASIC && code_point < BASIC_END) i = code_point - BASIC;
  if (code_point >= SUPPLEMENT) i = BASIC_END - BASIC + code_point - SUPPLEMENT;
  return i < TD_COUNT(ideographs) ? ideographs[i] : 0;
}

// Full canonical decomposition of one code point: at most 4 code points.
static int decompose(uint32_t code_point, uint32_t out[4]) {
  uint32_t s = code_point - HANGUL_S;
  if (code_point >= HANGUL_S && s < HANGUL_N_S) {
    out[0] = HANGUL_L + s / (HANGUL_N_V * HANGUL_N_T);
    out[1] = HANGUL_V + s % (HANGUL_N_V * HANGUL_N_T) / HANGUL_N_T;
    out[2] = HANGUL_T + s % HANGUL_N_T;
    return s % HANGUL_N_T ? 3 : 2;
  }
  out[0] = unified_ideograph(code_point);
  if (out[0]) return 1;
  // Only the first part may decompose further, so the others are collected from the end.
  uint32_t tail[4];
  int n_tail = 0;
  while (code_point >= decompositions[0].a) {
    const unicode_triple *step = find_floor(decompositions, TD_COUNT(decompositions), code_point);
    if (step->a != code_point) break;
    if (step->c && n_tail < 3) tail[n_tail++] = step->c;
    code_point = step->b;
  }
  out[0] = code_point;
  for (int i = 0; i < n_tail; i++)
    out[1 + i] = tail[n_tail - 1 - i];
  return 1 + n_tail;
}

// The composition of first and second, or 0.
static uint32_t compose(uint32_t first, uint32_t second) {
  if (first >= HANGUL_L && first < HANGUL_L + HANGUL_N_L) {
    if (second < HANGUL_V || second >= HANGUL_V + HANGUL_N_V) return 0;
    return HANGUL_S + ((first - HANGUL_L) * HANGUL_N_V + second - HANGUL_V) * HANGUL_N_T;
  }
  if (first >= HANGUL_S && first < HANGUL_S + HANGUL_N_S) {
    bool open = (first - HANGUL_S) % HANGUL_N_T == 0;
    if (!open || second <= HANGUL_T || second >= HANGUL_T + HANGUL_N_T) return 0;
    return first + second - HANGUL_T;
  }
  size_t low = 0, high = TD_COUNT(compositions);
  while (low < high) {
    size_t mid = (low + high) / 2;
    const unicode_triple *whole = &decompositions[compositions[mid]];
    if (whole->b == first && whole->c == second) return whole->a;
    if (whole->b < first || (whole->b == first && whole->c < second))
      low = mid + 1;
    else
      high = mid;
  }
  return 0;
}

// Sorts a run of combining marks by class, stably. Counting sort keeps long runs linear.
static td_status sort_marks(uint32_t *run, size_t n, td_runes *spare, td_err *err) {
  spare->n = 0;
  td_status st = td_runes_add(spare, run, n, err);
  if (st != TD_OK) return st;
  size_t next[257] = {0};
  for (size_t i = 0; i < n; i++)
    next[combining_class(TD_RUNE_CODE(run[i])) + 1]++;
  for (size_t c = 1; c < TD_COUNT(next); c++)
    next[c] += next[c - 1];
  for (size_t i = 0; i < n; i++)
    run[next[combining_class(TD_RUNE_CODE(spare->r[i]))]++] = spare->r[i];
  return TD_OK;
}

static td_status order_marks(td_runes *text, size_t i, td_runes *spare, td_err *err) {
  while (i < text->n) {
    size_t begin = i;
    while (i < text->n && combining_class(TD_RUNE_CODE(text->r[i])))
      i++;
    td_status st = i - begin > 1 ? sort_marks(text->r + begin, i - begin, spare, err) : TD_OK;
    if (st != TD_OK) return st;
    i++;
  }
  return TD_OK;
}

// Appends the decompositions of n code points.
static td_status add_decomposed(td_runes *out, const uint32_t *text, size_t n, td_runes *spare,
                                td_err *err) {
  size_t begin = out->n;
  for (size_t i = 0; i < n; i++) {
    uint32_t parts[4];
    size_t put = out->n;
    const int n_parts = decompose(TD_RUNE_CODE(text[i]), parts);
    td_status st = td_runes_add(out, parts, (size_t)n_parts, err);
    if (st != TD_OK) return st;
    for (; put < out->n; put++)
      out->r[put] |= text[i] & TD_RUNE_LITERAL;
  }
  return order_marks(out, begin, spare, err);
}

// Composes text from begin on, which must be decomposed and in canonical order.
static void compose_tail(td_runes *text, size_t begin) {
  size_t n = begin, starter = SIZE_MAX;
  uint32_t last_class = 0; // class of the last character kept after the starter
  for (size_t i = begin; i < text->n; i++) {
    uint32_t r = text->r[i], class = combining_class(TD_RUNE_CODE(r));
    bool reachable = starter != SIZE_MAX && (n == starter + 1 || last_class < class);
    uint32_t whole = reachable ? compose(TD_RUNE_CODE(text->r[starter]), TD_RUNE_CODE(r)) : 0;
    if (whole) {
      text->r[starter] = whole | ((text->r[starter] | r) & TD_RUNE_LITERAL);
      continue;
    }
    if (class == 0) starter = n;
    last_class = class;
    text->r[n++] = r;
  }
  text->n = n;
}

static void swap_runes(td_runes *a, td_runes *b) {
  td_runes swap = *a;
  *a = *b;
  *b = swap;
}

static td_status to_decomposed(td_runes *text, td_runes *spare, td_err *err) {
  td_runes marks = {0};
  spare->n = 0;
  td_status st = add_decomposed(spare, text->r, text->n, &marks, err);
  td_runes_free(&marks);
  swap_runes(text, spare);
  return st;
}

// Whether c is unchanged and composes with nothing before it.
static bool is_inert(uint32_t c) {
  return c < 0x300 || (c >= 0x3400 && c <= 0x9FFF);
}

static td_status to_composed(td_runes *text, td_runes *spare, td_err *err) {
  td_runes marks = {0};
  spare->n = 0;
  td_status st = TD_OK;
  for (size_t i = 0; i < text->n && st == TD_OK;) {
    size_t begin = i;
    while (i < text->n && is_inert(TD_RUNE_CODE(text->r[i])))
      i++;
    // The last one may compose with what follows.
    if (i > begin && i < text->n) i--;
    st = td_runes_add(spare, text->r + begin, i - begin, err);
    if (i == text->n || st != TD_OK) break;
    begin = i++;
    while (i < text->n && !is_inert(TD_RUNE_CODE(text->r[i])))
      i++;
    size_t tail = spare->n;
    st = add_decomposed(spare, text->r + begin, i - begin, &marks, err);
    if (st == TD_OK) compose_tail(spare, tail);
  }
  td_runes_free(&marks);
  swap_runes(text, spare);
  return st;
}

td_status td_unicode_normalize(td_runes *text, td_normal_form form, td_runes *spare, td_err *err) {
  return form == TD_NFD ? to_decomposed(text, spare, err) : to_composed(text, spare, err);
}

bool td_unicode_surely_composed(const char *text, size_t len) {
  const uint8_t *b = (const uint8_t *)text;
  for (size_t i = 0; i < len;)
    if (b[i] < 0xCC) // below U+0300: nothing combines, and NFC leaves everything unchanged
      i++;
    else if (b[i] >= 0xE4 && b[i] <= 0xE9) // ideographs of the basic plane
      i += 3;
    else
      return false;
  return true;
}

bool td_unicode_is_space(uint32_t c) {
  if (c < 0x80) return c == ' ' || (c >= '\t' && c <= '\r');
  return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 ||
         c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

// The stand-in for the character at text[0..len), or 0; *n is its length.
static uint32_t newer_at(const char *text, size_t len, size_t *n) {
  uint32_t c;
  *n = (size_t)td_utf8_decode(text, len, &c);
  if (c < stand_ins[0].a) return 0;
  const unicode_triple *range = find_range(stand_ins, TD_COUNT(stand_ins), c);
  return range ? range->c : 0;
}

// Whether a code point in stand_ins can start with this byte. U+0897 is the lowest of them; the
// ideographs and Hangul of the basic plane have none.
static bool may_be_newer(uint8_t b) {
  return b >= 0xE0 && (b <= 0xE3 || b == 0xEA || b >= 0xF0);
}

bool td_unicode_has_newer(const char *text, size_t len) {
  for (size_t i = 0; i < len; i++) {
    size_t n;
    if (may_be_newer((uint8_t)text[i]) && newer_at(text + i, len - i, &n)) return true;
  }
  return false;
}

void td_unicode_stand_in(char *text, size_t len) {
  for (size_t i = 0, n = 1; i < len; i += n) {
    n = 1;
    if (!may_be_newer((uint8_t)text[i])) continue;
    uint32_t older = newer_at(text + i, len - i, &n);
    if (older) td_utf8_encode(older, text + i);
  }
}

// ---- arrays of code points, lists of spans ------------------------------------------------------

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
