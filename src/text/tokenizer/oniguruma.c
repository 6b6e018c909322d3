// src/text/tokenizer/oniguruma.c - translates Oniguruma patterns to PCRE2.
#include "text/tokenizer/oniguruma.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/utf8.h"
#include "text/tokenizer/charset.h"

#define MAX_GROUPS     64
#define MAX_CLASSES    16
#define MAX_REPETITION 1000
#define NO_ATOM        SIZE_MAX

typedef struct {
  size_t begin;      // position in out
  unsigned n_closes; // number of brackets to close at the end of the group
} group;

typedef struct {
  const char *text;
  size_t len, pos;
  td_buf *out;
  size_t atom; // position in out of the operand of a quantifier, or NO_ATOM
  group groups[MAX_GROUPS];
  size_t n_groups;
  td_err *err;
} translator;

static bool unsupported(translator *t, const char *what) {
  td_fail(t->err, TD_EUNSUPPORTED, "at byte %zu: %s", t->pos, what);
  return false;
}

static int peek(const translator *t, size_t ahead) {
  return t->len - t->pos > ahead ? (unsigned char)t->text[t->pos + ahead] : -1;
}

static bool accept(translator *t, const char *word) {
  size_t n = strlen(word);
  if (t->len - t->pos < n || memcmp(t->text + t->pos, word, n) != 0) return false;
  t->pos += n;
  return true;
}

static void put_literal(td_buf *out, uint32_t c) {
  if (c < 0x80 && !isalnum((int)c)) {
    td_buf_printf(out, "\\x{%x}", c);
    return;
  }
  char bytes[4];
  int n = td_utf8_encode(c, bytes);
  td_buf_add(out, bytes, (size_t)n);
}

void td_pattern_quote(td_buf *out, const char *text, size_t len) {
  for (size_t i = 0; i < len;) {
    uint32_t c;
    i += (size_t)td_utf8_decode(text + i, len - i, &c);
    put_literal(out, c);
  }
}

// Reads the code point at pos, which must exist.
static uint32_t read_char(translator *t) {
  uint32_t c;
  int n = td_utf8_decode(t->text + t->pos, t->len - t->pos, &c);
  TD_CHECK(n > 0);
  t->pos += (size_t)n;
  return c;
}

// ---- escapes

// Reads min_digits to max_digits hexadecimal digits.
static bool read_hex(translator *t, int min_digits, int max_digits, uint32_t *value) {
  int n = 0;
  for (*value = 0; n < max_digits; n++, t->pos++) {
    int b = peek(t, 0), low = b | 0x20;
    int digit = b >= '0' && b <= '9' ? b - '0' : low >= 'a' && low <= 'f' ? low - 'a' + 10 : -1;
    if (digit < 0) break;
    *value = *value << 4 | (uint32_t)digit;
  }
  bool scalar = *value <= 0x10FFFF && (*value < 0xD800 || *value > 0xDFFF);
  return n >= min_digits && scalar ? true : unsupported(t, "not a code point");
}

// Reads an escape for a single character, after the backslash. *known is false for other escapes;
// then nothing is consumed.
static bool read_char_escape(translator *t, uint32_t *c, bool *known) {
  static const char letters[] = "tnrfvae", codes[] = "\t\n\r\f\v\a\x1B";
  int b = peek(t, 0);
  *known = true;
  const char *letter = b > 0 ? strchr(letters, b) : NULL;
  if (letter) {
    t->pos++;
    *c = (uint32_t)codes[letter - letters];
    return true;
  }
  if (accept(t, "x{"))
    return read_hex(t, 1, 8, c) && (accept(t, "}") || unsupported(t, "'}' was expected"));
  if (accept(t, "x"))
    return read_hex(t, 1, 2, c) && (*c < 0x80 || unsupported(t, "\\x of a lone byte"));
  if (accept(t, "u")) return read_hex(t, 4, 4, c);
  *known = b >= 0x80 || (b >= 0 && !isalnum(b));
  if (*known) *c = read_char(t);
  return true;
}

// Reads \p{..}, \P{..}, \s and similar, after the backslash; *known as above.
static bool read_set_escape(translator *t, td_charset *set, bool *known) {
  int b = peek(t, 0);
  *known = b > 0 && strchr("pPsSdDwWhH", b) != NULL;
  if (!*known) return true;
  t->pos++;
  bool upper = b < 'a';
  set->negated = upper;
  if ((b | 0x20) != 'p') return td_charset_add_escape(set, (char)(b | 0x20), t->err);
  if (!accept(t, "{")) return unsupported(t, "'{' was expected");
  if (accept(t, "^")) set->negated = !upper;
  const char *name = t->text + t->pos, *end = memchr(name, '}', t->len - t->pos);
  if (!end) return unsupported(t, "'}' was expected");
  bool is_word = end - name == 4 && strncasecmp(name, "word", 4) == 0;
  if (is_word) return unsupported(t, "\\p{Word}, which is not quite \\w");
  if (!td_charset_add_property(set, name, (size_t)(end - name), t->err)) return false;
  t->pos = (size_t)(end - t->text) + 1;
  return true;
}

// Outside classes Oniguruma also counts superscripts and fractions of Latin-1 as word characters.
static void add_loose_words(td_charset *set, td_err *err) {
  td_charset_add_range(set, 0xB2, 0xB3, err);
  td_charset_add_range(set, 0xB9, 0xB9, err);
  td_charset_add_range(set, 0xBC, 0xBE, err);
}

// Appends a word boundary according to Oniguruma's word characters.
static void put_boundary(translator *t, bool boundary) {
  td_charset word = {0};
  td_buf text = TD_BUF_INIT;
  td_charset_add_escape(&word, 'w', t->err);
  add_loose_words(&word, t->err);
  td_charset_write(&word, &text);
  const char *w = td_buf_text(&text);
  td_buf_printf(t->out, "(?:(?<=%s)(?%c%s)|(?<!%s)(?%c%s))", w, boundary ? '!' : '=', w, w,
                boundary ? '=' : '!', w);
  if (text.failed) t->out->failed = true;
  td_buf_free(&text);
  td_charset_free(&word);
}

static bool translate_escape(translator *t) {
  t->pos++;
  t->atom = t->out->len;
  td_charset set = {0};
  bool known, is_word = (peek(t, 0) | 0x20) == 'w';
  bool ok = read_set_escape(t, &set, &known);
  if (ok && is_word) add_loose_words(&set, t->err);
  if (ok && known) td_charset_write(&set, t->out);
  td_charset_free(&set);
  if (!ok || known) return ok;
  uint32_t c;
  if (!read_char_escape(t, &c, &known)) return false;
  if (known) {
    put_literal(t->out, c);
    return true;
  }
  switch (peek(t, 0)) {
  case 'b': put_boundary(t, true); break;
  case 'B': put_boundary(t, false); break;
  case 'A': td_buf_str(t->out, "\\A"); break;
  case 'z': td_buf_str(t->out, "\\z"); break;
  case 'Z': td_buf_str(t->out, "\\Z"); break;
  case 'R': td_buf_str(t->out, "\\R"); break;
  default: return unsupported(t, "an escape without a translation");
  }
  t->pos++;
  return true;
}

// ---- classes

static bool read_class(translator *t, td_charset *set, td_buf *guards, unsigned depth);

// Reads [:name:] or [:^name:], if there is one at pos.
static bool read_posix(translator *t, td_charset *set, bool *found) {
  size_t start = t->pos;
  *found = false;
  if (!accept(t, "[:")) return true;
  set->negated = accept(t, "^");
  size_t begin = t->pos;
  while (peek(t, 0) >= 'a' && peek(t, 0) <= 'z')
    t->pos++;
  size_t n = t->pos - begin;
  *found = n > 0 && accept(t, ":]");
  const char *name = t->text + begin;
  if (*found && n == 5 && memcmp(name, "punct", n) == 0) { // wider than \p{Punct}
    name = "posixpunct";
    n = strlen(name);
  }
  if (*found) return td_charset_add_property(set, name, n, t->err);
  t->pos = start;
  set->negated = false;
  return true;
}

// Reads a single character of a class, possibly the end of a range.
static bool read_class_char(translator *t, uint32_t *c) {
  bool known = true;
  if (peek(t, 0) < 0) return unsupported(t, "']' was expected");
  if (!accept(t, "\\")) {
    *c = read_char(t);
    return true;
  }
  if (accept(t, "b")) {
    *c = '\b';
    return true;
  }
  return read_char_escape(t, c, &known) && (known || unsupported(t, "an escape in a class"));
}

static bool read_class_range(translator *t, td_charset *set) {
  uint32_t first, last;
  if (!read_class_char(t, &first)) return false;
  last = first;
  bool range = peek(t, 0) == '-' && peek(t, 1) != ']' && peek(t, 1) >= 0;
  if (range) {
    t->pos++;
    if (peek(t, 0) == '[') return unsupported(t, "a class at the end of a range");
    if (!read_class_char(t, &last)) return false;
    if (last < first) return unsupported(t, "a range that runs backwards");
  }
  return td_charset_add_range(set, first, last, t->err) == TD_OK;
}

// Reads one item of a class: a nested class, a property, a range or a character.
static bool read_class_item(translator *t, td_charset *item, unsigned depth) {
  bool known;
  if (!read_posix(t, item, &known)) return false;
  if (known) return true;
  if (peek(t, 0) == '[') return read_class(t, item, NULL, depth + 1);
  if (peek(t, 0) == '\\') {
    t->pos++;
    if (!read_set_escape(t, item, &known)) return false;
    if (known) return true;
    t->pos--;
  }
  return read_class_range(t, item);
}

// Reads items up to "&&" or "]".
static bool read_operand(translator *t, td_charset *set, bool first, unsigned depth) {
  bool ok = true;
  for (bool more = true; ok && more; first = false) {
    bool literal_bracket = first && peek(t, 0) == ']' &&
                           memchr(t->text + t->pos + 1, ']', t->len - t->pos - 1);
    if (peek(t, 0) < 0) return unsupported(t, "']' was expected");
    if (peek(t, 0) == ']' && !literal_bracket) break;
    if (peek(t, 0) == '&' && peek(t, 1) == '&') break;
    td_charset item = {0};
    ok = read_class_item(t, &item, depth) && td_charset_unite(set, &item, t->err);
    td_charset_free(&item);
  }
  return ok;
}

// At "[". An intersection that is not a set is expressed by lookaheads in guards, unless that is
// NULL.
static bool read_class(translator *t, td_charset *set, td_buf *guards, unsigned depth) {
  if (depth == MAX_CLASSES) return unsupported(t, "classes nested too deeply");
  t->pos++;
  bool negated = accept(t, "^");
  bool ok = read_operand(t, set, true, depth);
  while (ok && accept(t, "&&")) {
    td_charset next = {0};
    ok = read_operand(t, &next, false, depth);
    if (ok && !td_charset_intersect(set, &next, t->err)) {
      ok = guards && !negated;
      if (ok) {
        td_buf_str(guards, "(?=");
        td_charset_write(set, guards);
        td_buf_char(guards, ')');
        td_charset swap = *set;
        *set = next;
        next = swap;
      }
    }
    td_charset_free(&next);
  }
  if (negated) set->negated = !set->negated;
  return ok && (accept(t, "]") || unsupported(t, "']' was expected"));
}

static bool translate_class(translator *t) {
  td_charset set = {0};
  td_buf guards = TD_BUF_INIT;
  bool ok = read_class(t, &set, &guards, 0);
  if (ok) {
    t->atom = t->out->len;
    if (guards.len) td_buf_printf(t->out, "(?:%s", td_buf_text(&guards));
    td_charset_write(&set, t->out);
    if (guards.len) td_buf_char(t->out, ')');
    if (guards.failed || set.properties.failed) t->out->failed = true;
  }
  td_charset_free(&set);
  td_buf_free(&guards);
  return ok;
}

// ---- groups and quantifiers

static bool open_group(translator *t, const char *opening) {
  if (t->n_groups == MAX_GROUPS) return unsupported(t, "groups nested too deeply");
  t->groups[t->n_groups++] = (group){.begin = t->out->len, .n_closes = 1};
  td_buf_str(t->out, opening);
  t->atom = NO_ATOM;
  return true;
}

// After "(?": the letters i and m, with "-" between those switched on and off.
static bool translate_options(translator *t) {
  char opening[16] = "(?";
  size_t n = 2, n_read = 0;
  int b;
  for (; (b = peek(t, 0)) == 'i' || b == 'm' || b == '-'; t->pos++) {
    if (++n_read > 8) return unsupported(t, "too many options");
    opening[n++] = (char)(b == 'm' ? 's' : b);
  }
  opening[n++] = ':';
  if (n_read && accept(t, ":")) return open_group(t, opening);
  if (!n_read || !accept(t, ")")) return unsupported(t, "a group without a translation");
  // Options without a group apply up to the end of the enclosing group, including its alternatives.
  group *around = &t->groups[t->n_groups - 1];
  around->n_closes++;
  td_buf_str(t->out, opening);
  t->atom = NO_ATOM;
  return true;
}

static bool translate_group(translator *t) {
  static const char *const openings[] = {"(?:", "(?=", "(?!", "(?>", "(?<=", "(?<!"};
  for (size_t i = 0; i < TD_COUNT(openings); i++)
    if (accept(t, openings[i])) return open_group(t, openings[i]);
  if (accept(t, "(?#")) {
    while (peek(t, 0) >= 0 && peek(t, 0) != ')')
      t->pos++;
    return accept(t, ")") || unsupported(t, "')' was expected");
  }
  if (accept(t, "(?<")) {
    size_t n = 0;
    while (peek(t, n) == '_' || (peek(t, n) >= 0 && isalnum(peek(t, n))))
      n++;
    t->pos += n;
    return n && accept(t, ">") ? open_group(t, "(?:") : unsupported(t, "not the name of a group");
  }
  if (accept(t, "(?")) return translate_options(t);
  t->pos++;
  if (peek(t, 0) == '*') return unsupported(t, "a group without a translation");
  return open_group(t, "(?:");
}

static bool close_group(translator *t) {
  if (t->n_groups == 1) return unsupported(t, "')' without '('");
  group *closed = &t->groups[--t->n_groups];
  for (unsigned i = 0; i < closed->n_closes; i++)
    td_buf_char(t->out, ')');
  t->atom = closed->begin;
  t->pos++;
  return true;
}

static bool read_count(translator *t, unsigned *count) {
  size_t start = t->pos;
  for (*count = 0; peek(t, 0) >= '0' && peek(t, 0) <= '9'; t->pos++)
    if (*count <= MAX_REPETITION) *count = *count * 10 + (unsigned)(peek(t, 0) - '0');
  return t->pos > start;
}

// Reads {n}, {n,}, {n,m} or {,m}, if there is one at pos.
static bool read_interval(translator *t, char text[32], bool *found, bool *fixed) {
  size_t start = t->pos;
  unsigned low = 0, high = 0;
  t->pos++;
  bool has_low = read_count(t, &low);
  *fixed = !accept(t, ",");
  bool has_high = !*fixed && read_count(t, &high);
  *found = (has_low || has_high) && accept(t, "}");
  if (!*found) {
    t->pos = start;
    return true;
  }
  if (low > MAX_REPETITION || high > MAX_REPETITION || (has_high && high < low))
    return unsupported(t, "a repetition out of bounds");
  size_t cap = 32;
  if (*fixed)
    snprintf(text, cap, "{%u}", low);
  else if (has_high)
    snprintf(text, cap, "{%u,%u}", low, high);
  else
    snprintf(text, cap, "{%u,}", low);
  return true;
}

// A quantifier on a quantified atom needs brackets in PCRE2, where it would be possessive or an
// error.
static void wrap_atom(translator *t) {
  static const char opening[] = "(?:";
  size_t n = sizeof opening - 1, tail = t->out->len - t->atom;
  td_buf_str(t->out, opening);
  if (t->out->failed) return;
  memmove(t->out->data + t->atom + n, t->out->data + t->atom, tail);
  memcpy(t->out->data + t->atom, opening, n);
  td_buf_char(t->out, ')');
}

// Translates the quantifiers after an atom, if any.
static bool translate_quantifiers(translator *t) {
  for (bool again = false;; again = true) {
    char text[32];
    bool fixed = false, found = true, interval = peek(t, 0) == '{';
    int b = peek(t, 0);
    if (interval) {
      if (!read_interval(t, text, &found, &fixed)) return false;
    } else {
      found = b == '*' || b == '+' || b == '?';
      if (found) t->pos++;
      snprintf(text, sizeof text, "%c", b);
    }
    if (!found) return true;
    if (t->atom == NO_ATOM) return unsupported(t, "nothing to repeat");
    if (again) wrap_atom(t);
    td_buf_str(t->out, text);
    if (peek(t, 0) == '?' && !fixed)
      td_buf_char(t->out, t->text[t->pos++]);
    else if (peek(t, 0) == '+' && !interval)
      td_buf_char(t->out, t->text[t->pos++]);
  }
}

static bool translate_one(translator *t) {
  switch (peek(t, 0)) {
  case '\\': return translate_escape(t);
  case '[': return translate_class(t);
  case '(': return translate_group(t);
  case ')': return close_group(t);
  case '|':
  case '^':
  case '$':
    t->atom = NO_ATOM;
    td_buf_char(t->out, t->text[t->pos++]);
    return true;
  case '.':
    t->atom = t->out->len;
    td_buf_char(t->out, t->text[t->pos++]);
    return true;
  case '*':
  case '+':
  case '?': return unsupported(t, "nothing to repeat");
  default:
    t->atom = t->out->len;
    put_literal(t->out, read_char(t));
    return true;
  }
}

td_status td_pattern_translate(td_buf *out, const char *pattern, size_t len, td_err *err) {
  td_err own = {.code = TD_OK};
  translator t = {.text = pattern, .len = len, .out = out, .err = err ? err : &own};
  t.groups[t.n_groups++] = (group){0};
  while (t.pos < len) {
    bool ok = translate_one(&t) && translate_quantifiers(&t);
    if (!ok) return t.err->code;
  }
  if (t.n_groups > 1) {
    unsupported(&t, "')' was expected");
    return t.err->code;
  }
  for (unsigned i = 0; i < t.groups[0].n_closes; i++)
    td_buf_char(out, ')');
  return td_buf_status(out, err);
}
