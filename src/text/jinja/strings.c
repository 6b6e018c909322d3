// src/text/jinja/strings.c - strings: building with typed runs, slicing, searching, splitting, case
// conversion.
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"
#include "text/jinja/jinja.h"
#include "text/unicode/python_chars.h"

// ---- building ----

void jj_build(jj_builder *b, jj *j) {
  *b = (jj_builder){.j = j, .store = jj_alloc(j, sizeof(jj_store))};
}

static char *make_room(jj_builder *b, size_t len) {
  jj_store *store = b->store;
  if (len > b->j->max_bytes)
    jj_raise(b->j, TD_ELIMIT, "a string of %zu bytes does not fit the template's memory", len);
  if (store->cap - store->used < len) {
    size_t cap = store->cap ? store->cap * 2 : 64;
    while (cap - store->used < len)
      cap *= 2;
    char *data = jj_alloc(b->j, cap);
    if (store->used) memcpy(data, store->data, store->used);
    store->data = data;
    store->cap = cap;
  }
  jj_steps(b->j, len >> 6);
  return store->data + store->used;
}

static void note_typed(jj_builder *b, size_t begin, size_t end) {
  if (begin == end) return;
  if (b->n_runs && b->runs[b->n_runs - 1].end == begin) {
    b->runs[b->n_runs - 1].end = end;
    return;
  }
  b->runs = jj_grow(b->j, b->runs, b->n_runs, &b->cap_runs, sizeof *b->runs);
  b->runs[b->n_runs++] = (td_span){begin, end};
}

void jj_add_typed(jj_builder *b, const char *bytes, size_t len, bool typed) {
  if (!len) return;
  memcpy(make_room(b, len), bytes, len);
  if (typed) note_typed(b, b->store->used, b->store->used + len);
  b->store->used += len;
}

void jj_add(jj_builder *b, const char *bytes, size_t len) {
  jj_add_typed(b, bytes, len, false);
}

void jj_add_text(jj_builder *b, const char *text) {
  jj_add(b, text, strlen(text));
}

void jj_add_char(jj_builder *b, uint32_t code_point, bool typed) {
  char bytes[4];
  jj_add_typed(b, bytes, (size_t)td_utf8_encode(code_point, bytes), typed);
}

void jj_addf(jj_builder *b, const char *fmt, ...) {
  char text[512];
  va_list args;
  va_start(args, fmt);
  int n = vsnprintf(text, sizeof text, fmt, args);
  va_end(args);
  TD_CHECK(n >= 0 && (size_t)n < sizeof text);
  jj_add(b, text, (size_t)n);
}

// Index of the first typed run of s that ends after byte.
static size_t first_run(const jj_str *s, size_t byte) {
  size_t low = 0, high = s->n_runs;
  while (low < high) {
    size_t mid = (low + high) / 2;
    if (byte >= s->runs[mid].end)
      low = mid + 1;
    else
      high = mid;
  }
  return low;
}

void jj_add_range(jj_builder *b, const jj_str *s, size_t begin, size_t end) {
  size_t at = b->store->used;
  jj_add(b, s->p + begin, end - begin);
  for (size_t i = first_run(s, begin); i < s->n_runs && s->runs[i].begin < end; i++) {
    size_t from = s->runs[i].begin > begin ? s->runs[i].begin : begin;
    size_t to = s->runs[i].end < end ? s->runs[i].end : end;
    note_typed(b, at + from - begin, at + to - begin);
    jj_steps(b->j, 1);
  }
}

void jj_add_str(jj_builder *b, const jj_str *s) {
  jj_add_range(b, s, 0, s->len);
}

void jj_add_repeat(jj_builder *b, const jj_str *s, size_t n) {
  if (s->len && n > b->j->max_bytes / s->len) {
    jj_raise(b->j, TD_ELIMIT, "a string of %zu times %zu bytes does not fit the template's memory",
             n, s->len);
  }
  for (size_t i = 0; s->len && i < n; i++)
    jj_add_str(b, s);
  jj_steps(b->j, s->len ? n : 0);
}

// Sets the list of runs of s, which s does not share.
static void set_runs(jj *j, jj_str *s, td_span *runs, size_t n, size_t cap) {
  if (!n) return;
  s->runs = runs;
  s->n_runs = n;
  s->run_store = jj_alloc(j, sizeof *s->run_store);
  *s->run_store = (jj_run_store){.runs = runs, .used = n, .cap = cap};
}

const jj_str *jj_built(jj_builder *b) {
  jj_str *s = jj_alloc(b->j, sizeof *s);
  s->p = b->store->data ? b->store->data : "";
  s->len = b->store->used;
  s->n_chars = td_utf8_count(s->p, s->len);
  set_runs(b->j, s, b->runs, b->n_runs, b->cap_runs);
  s->store = b->store;
  return s;
}

const jj_str *jj_str_borrow(jj *j, const char *bytes, size_t len, bool typed) {
  jj_str *s = jj_alloc(j, sizeof *s);
  s->p = bytes;
  s->len = len;
  s->n_chars = td_utf8_count(bytes, len);
  if (typed && len) {
    td_span *run = jj_alloc(j, sizeof *run);
    *run = (td_span){0, len};
    s->runs = run;
    s->n_runs = 1;
  }
  return s;
}

const jj_str *jj_str_new(jj *j, const char *bytes, size_t len) {
  char *copy = jj_alloc(j, len);
  if (len) memcpy(copy, bytes, len);
  return jj_str_borrow(j, copy, len, false);
}

const jj_str *jj_lit(jj *j, const char *literal) {
  return jj_str_borrow(j, literal, strlen(literal), false);
}

jj_value jj_text(jj *j, const char *literal) {
  return JJ_OF_STR(jj_lit(j, literal));
}

const jj_str *jj_marked(jj *j, const jj_str *s, bool markup) {
  if (s->markup == markup) return s;
  jj_str *copy = jj_alloc(j, sizeof *copy);
  *copy = *s;
  copy->markup = markup;
  return copy;
}

// Gives cut the typed runs of s within [begin, end), relative to begin.
static void cut_runs(jj *j, jj_str *cut, const jj_str *s, size_t begin, size_t end) {
  size_t first = first_run(s, begin), last = first;
  while (last < s->n_runs && s->runs[last].begin < end)
    last++;
  if (first == last) return;
  td_span *runs = jj_alloc_n(j, last - first, sizeof *runs);
  for (size_t i = first; i < last; i++) {
    td_span run = s->runs[i];
    runs[i - first].begin = run.begin > begin ? run.begin - begin : 0;
    runs[i - first].end = (run.end < end ? run.end : end) - begin;
  }
  cut->runs = runs;
  cut->n_runs = last - first;
  jj_steps(j, (last - first) >> 2);
}

const jj_str *jj_sub(jj *j, const jj_str *s, size_t begin, size_t end) {
  if (begin == 0 && end == s->len) return s;
  jj_str *cut = jj_alloc(j, sizeof *cut);
  cut->p = s->p + begin;
  cut->len = end - begin;
  cut->n_chars = s->n_chars == s->len ? cut->len : td_utf8_count(cut->p, cut->len);
  cut_runs(j, cut, s, begin, end);
  cut->markup = s->markup;
  jj_steps(j, s->n_chars == s->len ? 0 : cut->len >> 6);
  return cut;
}

// Gives sum the runs of a followed by those of b.
static void join_runs(jj *j, jj_str *sum, const jj_str *a, const jj_str *b) {
  sum->runs = a->runs;
  sum->n_runs = a->n_runs;
  sum->run_store = a->run_store;
  if (!b->n_runs) return;
  jj_run_store *store = a->run_store;
  bool at_end = store && a->runs + a->n_runs == store->runs + store->used;
  size_t n = a->n_runs + b->n_runs;
  if (!at_end || store->cap - store->used < b->n_runs) {
    size_t cap = store ? 2 * n : n;
    td_span *runs = jj_alloc_n(j, cap, sizeof *runs);
    if (a->n_runs) memcpy(runs, a->runs, a->n_runs * sizeof *runs);
    set_runs(j, sum, runs, n, cap);
    store = sum->run_store;
    store->used = a->n_runs;
    jj_steps(j, a->n_runs >> 2);
  }
  for (size_t i = 0; i < b->n_runs; i++)
    store->runs[store->used++] = (td_span){b->runs[i].begin + a->len, b->runs[i].end + a->len};
  sum->n_runs = n;
  jj_steps(j, b->n_runs >> 2);
}

const jj_str *jj_concat(jj *j, const jj_str *a, const jj_str *b) {
  if (!b->len) return a;
  if (!a->len) return b;
  if (b->len > j->max_bytes - a->len)
    jj_raise(j, TD_ELIMIT, "a string of %zu bytes does not fit the template's memory", a->len);
  jj_str *s = jj_alloc(j, sizeof *s);
  size_t len = a->len + b->len;
  jj_store *store = a->store;
  bool at_end = store && a->p + a->len == store->data + store->used;
  if (!at_end || store->cap - store->used < b->len) {
    jj_store *fresh = jj_alloc(j, sizeof *fresh);
    fresh->cap = store ? 2 * len : len; // a string appended to once is likely appended to again
    fresh->data = jj_alloc(j, fresh->cap);
    memcpy(fresh->data, a->p, a->len);
    fresh->used = a->len;
    store = fresh;
    jj_steps(j, a->len >> 6);
  }
  memcpy(store->data + store->used, b->p, b->len);
  store->used += b->len;
  jj_steps(j, b->len >> 6);
  *s = (jj_str){.p = store->data, .len = len, .n_chars = a->n_chars + b->n_chars, .store = store};
  join_runs(j, s, a, b);
  return s;
}

const jj_str *jj_escape_html(jj *j, const jj_str *s) {
  if (s->markup) return s;
  jj_builder b;
  jj_build(&b, j);
  for (size_t i = 0; i < s->len; i++) {
    const char *entity = s->p[i] == '&'    ? "&amp;"
                         : s->p[i] == '<'  ? "&lt;"
                         : s->p[i] == '>'  ? "&gt;"
                         : s->p[i] == '"'  ? "&#34;"
                         : s->p[i] == '\'' ? "&#39;"
                                           : NULL;
    bool typed = jj_typed_at(s, i);
    if (entity)
      jj_add_typed(&b, entity, strlen(entity), typed);
    else
      jj_add_typed(&b, s->p + i, 1, typed);
  }
  return jj_marked(j, jj_built(&b), true);
}

// ---- searching ----

bool jj_typed_at(const jj_str *s, size_t byte) {
  size_t run = first_run(s, byte);
  return run < s->n_runs && byte >= s->runs[run].begin;
}

bool jj_str_eq(const jj_str *a, const jj_str *b) {
  return a->len == b->len && memcmp(a->p, b->p, a->len) == 0;
}

bool jj_str_is(const jj_str *s, const char *text) {
  return s->len == strlen(text) && memcmp(s->p, text, s->len) == 0;
}

// Compares by code point, which in UTF-8 is the order by byte.
int jj_str_cmp(const jj_str *a, const jj_str *b) {
  int c = memcmp(a->p, b->p, a->len < b->len ? a->len : b->len);
  return c ? c : (a->len > b->len) - (a->len < b->len);
}

size_t jj_char_to_byte(jj *j, const jj_str *s, size_t char_idx) {
  if (s->n_chars == s->len) return char_idx;
  size_t byte = 0;
  for (size_t seen = 0; byte < s->len; byte++)
    if (((unsigned char)s->p[byte] & 0xC0) != 0x80 && seen++ == char_idx) break;
  jj_steps(j, byte >> 6);
  return byte;
}

size_t jj_byte_to_char(const jj_str *s, size_t byte) {
  return s->n_chars == s->len ? byte : td_utf8_count(s->p, byte);
}

uint32_t jj_decode(const jj_str *s, size_t byte, size_t *next) {
  uint32_t c;
  int n = td_utf8_decode(s->p + byte, s->len - byte, &c);
  TD_CHECK(n > 0);
  *next = byte + (size_t)n;
  return c;
}

size_t jj_find(jj *j, const jj_str *s, const jj_str *sub, size_t begin, size_t end) {
  if (begin > end || end - begin < sub->len) return SIZE_MAX;
  if (!sub->len) return begin;
  const char *hit = memmem(s->p + begin, end - begin, sub->p, sub->len);
  size_t at = hit ? (size_t)(hit - s->p) : SIZE_MAX;
  jj_steps(j, 1 + (((hit ? at : end) - begin) >> 6));
  return at;
}

size_t jj_rfind(jj *j, const jj_str *s, const jj_str *sub, size_t begin, size_t end) {
  if (begin > end || end - begin < sub->len) return SIZE_MAX;
  size_t at = end - sub->len;
  for (;; at--) {
    if (memcmp(s->p + at, sub->p, sub->len) == 0) break;
    if ((at & 63) == 0) jj_steps(j, 1 + (sub->len >> 6));
    if (at == begin) return SIZE_MAX;
  }
  return at;
}

// ---- changing text ----

// Offset of the character that ends at `end`.
static size_t char_before(const jj_str *s, size_t end) {
  do {
    end--;
  } while (((unsigned char)s->p[end] & 0xC0) == 0x80);
  return end;
}

// Capital sigma becomes a final sigma after a cased letter if none follows.
static bool final_sigma(const jj_str *s, size_t at, size_t next) {
  size_t i = at;
  bool before = false;
  while (i > 0) {
    i = char_before(s, i);
    size_t unused;
    uint32_t c = jj_decode(s, i, &unused);
    if (td_pychar_is_case_ignorable(c)) continue;
    before = td_pychar_is_cased(c);
    break;
  }
  if (!before) return false;
  while (next < s->len) {
    uint32_t c = jj_decode(s, next, &next);
    if (!td_pychar_is_case_ignorable(c)) return !td_pychar_is_cased(c);
  }
  return true;
}

static int lower_at(const jj_str *s, size_t at, size_t next, uint32_t c, uint32_t out[3]) {
  if (c != 0x3A3) return td_pychar_lower(c, out);
  out[0] = final_sigma(s, at, next) ? 0x3C2 : 0x3C3;
  return 1;
}

const jj_str *jj_recase(jj *j, const jj_str *s, jj_case how) {
  jj_builder b;
  jj_build(&b, j);
  bool behind_cased = false;
  for (size_t i = 0, next; i < s->len; i = next) {
    uint32_t c = jj_decode(s, i, &next), out[3];
    bool lower = how == JJ_LOWER || (how == JJ_TITLE && behind_cased) ||
                 (how == JJ_CAPITALIZE && i > 0);
    const int n = lower             ? lower_at(s, i, next, c, out)
                  : how == JJ_UPPER ? td_pychar_upper(c, out)
                                    : td_pychar_title(c, out);
    for (int k = 0; k < n; k++)
      jj_add_char(&b, out[k], jj_typed_at(s, i));
    behind_cased = td_pychar_is_cased(c);
  }
  jj_steps(j, s->len >> 3);
  return jj_marked(j, jj_built(&b), s->markup);
}

static bool strips(jj *j, const jj_str *s, const jj_str *chars, size_t at, size_t next) {
  if (chars) {
    const jj_str one = {.p = s->p + at, .len = next - at};
    return jj_find(j, chars, &one, 0, chars->len) != SIZE_MAX;
  }
  size_t unused;
  return td_pychar_is_space(jj_decode(s, at, &unused));
}

const jj_str *jj_strip(jj *j, const jj_str *s, const jj_str *chars, bool left, bool right) {
  size_t begin = 0, end = s->len;
  while (left && begin < end) {
    size_t next;
    jj_decode(s, begin, &next);
    if (!strips(j, s, chars, begin, next)) break;
    begin = next;
  }
  while (right && end > begin) {
    size_t at = char_before(s, end);
    if (!strips(j, s, chars, at, end)) break;
    end = at;
  }
  return jj_sub(j, s, begin, end);
}

const jj_str *jj_replace(jj *j, const jj_str *s, const jj_str *from, const jj_str *to,
                         int64_t max) {
  jj_builder b;
  jj_build(&b, j);
  size_t at = 0;
  for (int64_t n = 0; max < 0 || n < max; n++) {
    if (!from->len) {
      // Inserts between all characters and at both ends.
      jj_add_str(&b, to);
      if (at == s->len) break;
      size_t next;
      jj_decode(s, at, &next);
      jj_add_range(&b, s, at, next);
      at = next;
      jj_steps(j, 1);
      continue;
    }
    size_t hit = jj_find(j, s, from, at, s->len);
    if (hit == SIZE_MAX) break;
    jj_add_range(&b, s, at, hit);
    jj_add_str(&b, to);
    at = hit + from->len;
  }
  if (at == 0 && b.store->used == 0) return s;
  jj_add_range(&b, s, at, s->len);
  return jj_marked(j, jj_built(&b), s->markup);
}

jj_list *jj_splitlines(jj *j, const jj_str *s, bool keep_ends) {
  jj_list *lines = jj_list_new(j, 4);
  size_t begin = 0;
  while (begin < s->len) {
    size_t end = begin, next = begin;
    while (next < s->len) {
      end = next;
      uint32_t c = jj_decode(s, next, &next);
      if (!td_pychar_is_newline(c)) {
        end = next;
        continue;
      }
      if (c == '\r' && next < s->len && s->p[next] == '\n') next++;
      break;
    }
    jj_push(j, lines, JJ_OF_STR(jj_sub(j, s, begin, keep_ends ? next : end)));
    begin = next;
  }
  jj_steps(j, s->len >> 4);
  return lines;
}

static bool space_at(const jj_str *s, size_t at) {
  size_t unused;
  return td_pychar_is_space(jj_decode(s, at, &unused));
}

// str.split() without separator. The rest after the last split keeps its white space.
static void split_space(jj *j, const jj_str *s, int64_t max, jj_list *parts) {
  size_t at = 0;
  for (;;) {
    size_t next = at;
    while (at < s->len && td_pychar_is_space(jj_decode(s, at, &next)))
      at = next;
    if (at == s->len) return;
    size_t end = at;
    if (max >= 0 && (int64_t)parts->n >= max) end = s->len;
    while (end < s->len && !td_pychar_is_space(jj_decode(s, end, &next)))
      end = next;
    jj_push(j, parts, JJ_OF_STR(jj_sub(j, s, at, end)));
    jj_steps(j, 1 + ((end - at) >> 4));
    at = end;
  }
}

static void rsplit_space(jj *j, const jj_str *s, int64_t max, jj_list *parts) {
  size_t end = s->len;
  for (;;) {
    while (end > 0 && space_at(s, char_before(s, end)))
      end = char_before(s, end);
    if (end == 0) return;
    size_t begin = end;
    if (max >= 0 && (int64_t)parts->n >= max) begin = 0;
    while (begin > 0 && !space_at(s, char_before(s, begin)))
      begin = char_before(s, begin);
    jj_push(j, parts, JJ_OF_STR(jj_sub(j, s, begin, end)));
    jj_steps(j, 1 + ((end - begin) >> 4));
    end = begin;
  }
}

static void reverse(jj_list *list) {
  for (size_t i = 0; i < list->n / 2; i++) {
    jj_value v = list->items[i];
    list->items[i] = list->items[list->n - 1 - i];
    list->items[list->n - 1 - i] = v;
  }
}

jj_list *jj_split(jj *j, const jj_str *s, const jj_str *sep, int64_t max, bool from_right) {
  jj_list *parts = jj_list_new(j, 4);
  if (!sep) {
    (from_right ? rsplit_space : split_space)(j, s, max, parts);
    if (from_right) reverse(parts);
    return parts;
  }
  if (!sep->len) jj_raise(j, TD_EFORMAT, "empty separator");
  size_t begin = 0, end = s->len;
  while (max < 0 || (int64_t)parts->n < max) {
    size_t hit = from_right ? jj_rfind(j, s, sep, 0, end) : jj_find(j, s, sep, begin, s->len);
    if (hit == SIZE_MAX) break;
    if (from_right) {
      jj_push(j, parts, JJ_OF_STR(jj_sub(j, s, hit + sep->len, end)));
      end = hit;
    } else {
      jj_push(j, parts, JJ_OF_STR(jj_sub(j, s, begin, hit)));
      begin = hit + sep->len;
    }
  }
  jj_push(j, parts, JJ_OF_STR(jj_sub(j, s, begin, end)));
  if (from_right) reverse(parts);
  return parts;
}

const jj_str *jj_pad(jj *j, const jj_str *s, int64_t width, const jj_str *fill, char align) {
  if (width < 0 || (uint64_t)width <= s->n_chars) return s;
  size_t missing = (size_t)width - s->n_chars, left = 0;
  if (align == '>') left = missing;
  if (align == '^') left = missing / 2;
  jj_builder b;
  jj_build(&b, j);
  jj_add_repeat(&b, fill, left);
  jj_add_str(&b, s);
  jj_add_repeat(&b, fill, missing - left);
  return jj_marked(j, jj_built(&b), s->markup);
}
