// src/base/json_parse.c - validates JSON strictly, then parses it with cJSON.
#include "base/json_parse.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/utf8.h"

// State of one pass over the text. A failing function sets the reason and returns false; pos is the
// place of the error.
typedef struct {
  const char *text;
  size_t len, pos;
  int depth_left;
  size_t n_values;
  const char *why;
} checker;

static bool bad(checker *c, const char *why) {
  c->why = why;
  return false;
}

// The byte at pos, or -1 at the end.
static int peek(const checker *c) {
  return c->pos < c->len ? (unsigned char)c->text[c->pos] : -1;
}

static void skip_space(checker *c) {
  for (;; c->pos++) {
    int b = peek(c);
    if (b != ' ' && b != '\n' && b != '\t' && b != '\r') return;
  }
}

static bool read_hex4(checker *c, unsigned *unit) {
  *unit = 0;
  for (int i = 0; i < 4; i++, c->pos++) {
    int b = peek(c);
    int digit = b >= '0' && b <= '9'   ? b - '0'
                : b >= 'a' && b <= 'f' ? b - 'a' + 10
                : b >= 'A' && b <= 'F' ? b - 'A' + 10
                                       : -1;
    if (digit < 0) return bad(c, "\\u needs four hexadecimal digits");
    *unit = *unit << 4 | (unsigned)digit;
  }
  return true;
}

// After "\u".
static bool check_unicode_escape(checker *c) {
  unsigned unit, low;
  if (!read_hex4(c, &unit)) return false;
  if (unit == 0) return bad(c, "\\u0000 is not allowed");
  if (unit < 0xD800 || unit > 0xDFFF) return true;
  if (unit >= 0xDC00 || c->len - c->pos < 2 || memcmp(c->text + c->pos, "\\u", 2) != 0)
    return bad(c, "lone surrogate");
  c->pos += 2;
  if (!read_hex4(c, &low)) return false;
  if (low < 0xDC00 || low > 0xDFFF) return bad(c, "lone surrogate");
  return true;
}

static bool check_escape(checker *c) {
  c->pos++;
  int b = peek(c);
  if (b <= 0 || !strchr("\"\\/bfnrtu", b)) return bad(c, "unknown escape");
  c->pos++;
  return b != 'u' || check_unicode_escape(c);
}

static bool check_string(checker *c) {
  if (peek(c) != '"') return bad(c, "a string was expected");
  c->pos++;
  for (;;) {
    int b = peek(c);
    if (b < 0) return bad(c, "the text ends inside a string");
    if (b == '"') {
      c->pos++;
      return true;
    }
    if (b < 0x20) return bad(c, "control character in a string");
    if (b == '\\') {
      if (!check_escape(c)) return false;
    } else if (b < 0x80) {
      c->pos++;
    } else {
      uint32_t code_point;
      int n = td_utf8_decode(c->text + c->pos, c->len - c->pos, &code_point);
      if (n <= 0) return bad(c, "invalid UTF-8");
      c->pos += (size_t)n;
    }
  }
}

// One or more digits.
static bool check_digits(checker *c) {
  size_t start = c->pos;
  while (peek(c) >= '0' && peek(c) <= '9')
    c->pos++;
  return c->pos > start ? true : bad(c, "a digit was expected");
}

// cJSON copies numbers into a buffer of this size and truncates longer ones.
#define NUMBER_BYTES 64

static bool check_number(checker *c) {
  size_t start = c->pos;
  if (peek(c) == '-') c->pos++;
  if (peek(c) == '0')
    c->pos++;
  else if (!check_digits(c))
    return false;
  if (peek(c) == '.') {
    c->pos++;
    if (!check_digits(c)) return false;
  }
  const bool has_exponent = (peek(c) | 0x20) == 'e';
  if (has_exponent) {
    c->pos++;
    if (peek(c) == '+' || peek(c) == '-') c->pos++;
    if (!check_digits(c)) return false;
  }
  size_t n = c->pos - start;
  char text[NUMBER_BYTES] = "";
  if (n < sizeof text) memcpy(text, c->text + start, n);
  if (n < sizeof text && (!has_exponent || isfinite(strtod(text, NULL)))) return true;
  c->pos = start;
  return bad(c, n < sizeof text ? "number too large for a double" : "number of over 63 bytes");
}

static bool check_value(checker *c);

static bool check_word(checker *c, const char *word) {
  size_t n = strlen(word);
  if (c->len - c->pos < n || memcmp(c->text + c->pos, word, n) != 0)
    return bad(c, "a value was expected");
  c->pos += n;
  return true;
}

static bool check_member(checker *c) {
  if (!check_string(c)) return false;
  skip_space(c);
  if (peek(c) != ':') return bad(c, "':' was expected");
  c->pos++;
  return check_value(c);
}

// At the opening bracket of an array or object.
static bool check_container(checker *c, char close) {
  if (c->depth_left-- == 0) return bad(c, "nested too deeply");
  c->pos++;
  skip_space(c);
  bool more = peek(c) != close;
  while (more) {
    if (!(close == '}' ? check_member(c) : check_value(c))) return false;
    skip_space(c);
    more = peek(c) == ',';
    if (!more && peek(c) != close)
      return bad(c, close == '}' ? "',' or '}' was expected" : "',' or ']' was expected");
    if (more) {
      c->pos++;
      skip_space(c);
    }
  }
  c->pos++;
  c->depth_left++;
  return true;
}

static bool check_value(checker *c) {
  c->n_values++;
  skip_space(c);
  int b = peek(c);
  switch (b) {
  case '{': return check_container(c, '}');
  case '[': return check_container(c, ']');
  case '"': return check_string(c);
  case 't': return check_word(c, "true");
  case 'f': return check_word(c, "false");
  case 'n': return check_word(c, "null");
  default: break;
  }
  if (b == '-' || (b >= '0' && b <= '9')) return check_number(c);
  return bad(c, b < 0 ? "the text ends where a value was expected" : "a value was expected");
}

static td_status check_all(const char *bytes, size_t len, int max_depth, size_t *n_values,
                           td_err *err) {
  checker c = {.text = bytes, .len = len, .depth_left = max_depth};
  bool ok = check_value(&c);
  if (ok) {
    skip_space(&c);
    ok = c.pos == len || bad(&c, "unexpected text after the value");
  }
  *n_values = c.n_values;
  if (ok) return TD_OK;
  return td_fail(err, TD_EFORMAT, "invalid JSON at byte %zu: %s", c.pos, c.why);
}

td_status td_json_check(const char *bytes, size_t len, int max_depth, td_err *err) {
  size_t n_values;
  return check_all(bytes, len, max_depth, &n_values, err);
}

// ---- escapes without a character ----

// Whether there is a \uXXXX at text[at].
static bool unit_at(const char *text, size_t len, size_t at, unsigned *unit) {
  checker c = {.text = text, .len = len, .pos = at + 2};
  return at + 6 <= len && memcmp(text + at, "\\u", 2) == 0 && read_hex4(&c, unit);
}

static bool is_surrogate(unsigned unit) {
  return unit >= 0xD800 && unit <= 0xDFFF;
}

bool td_json_replace_escapes(char *bytes, size_t len) {
  bool found = false;
  for (size_t i = 0; i + 1 < len; i++) {
    unsigned unit, low;
    if (bytes[i] != '\\') continue;
    if (!unit_at(bytes, len, i, &unit)) {
      i++; // another escape, possibly of a backslash
    } else if (is_surrogate(unit) && unit < 0xDC00 && unit_at(bytes, len, i + 6, &low) &&
               is_surrogate(low) && low >= 0xDC00) {
      i += 11;
    } else {
      bool is_bad = unit == 0 || is_surrogate(unit);
      if (is_bad) memcpy(bytes + i, "\\ufffd", 6);
      found |= is_bad;
      i += 5;
    }
  }
  return found;
}

// ---- numbers with their spelling ----

// Moves pos past the next number, which must exist, and returns its length. The text has been
// validated.
static size_t next_number(checker *c) {
  for (bool in_string = false;; c->pos++) {
    int b = peek(c);
    TD_CHECK(b >= 0);
    if (in_string && b == '\\')
      c->pos++;
    else if (b == '"')
      in_string = !in_string;
    else if (!in_string && (b == '-' || (b >= '0' && b <= '9')))
      break;
  }
  size_t end = c->pos;
  while (end < c->len && strchr("+-.0123456789eE", c->text[end]))
    end++;
  return end - c->pos;
}

// A double represents integers of up to 15 digits uniquely, but cannot tell "1.0" from "1".
static bool needs_text(const char *number, size_t len) {
  bool negative = number[0] == '-';
  return len - negative > 15 || (negative && number[1] == '0') || memchr(number, '.', len) ||
         memchr(number, 'e', len) || memchr(number, 'E', len);
}

// Attaches the text of numbers below node that need it, scanning on from c->pos.
static bool keep_numbers(checker *c, cJSON *node) {
  if (cJSON_IsNumber(node)) {
    size_t len = next_number(c);
    const char *number = c->text + c->pos;
    c->pos += len;
    if (!needs_text(number, len)) return true;
    node->valuestring = cJSON_malloc(len + 1);
    if (!node->valuestring) return false;
    memcpy(node->valuestring, number, len);
    node->valuestring[len] = '\0';
    return true;
  }
  for (cJSON *child = node->child; child; child = child->next)
    if (!keep_numbers(c, child)) return false;
  return true;
}

td_status td_json_parse(cJSON **out, const char *bytes, size_t len, int max_depth, td_err *err) {
  return td_json_parse_at_most(out, bytes, len, max_depth, SIZE_MAX, err);
}

td_status td_json_parse_at_most(cJSON **out, const char *bytes, size_t len, int max_depth,
                                size_t max_values, td_err *err) {
  *out = NULL;
  size_t n_values;
  if (len >= 3 &&
      memcmp(bytes, "\xef\xbb\xbf", 3) == 0) { // as some editors and shells begin a file
    bytes += 3;
    len -= 3;
  }
  td_status st = check_all(bytes, len, max_depth, &n_values, err);
  if (st != TD_OK) return st;
  if (n_values > max_values)
    return td_fail(err, TD_ELIMIT, "%zu JSON values: more than %zu", n_values, max_values);
  // The text is valid, so parsing can fail only for lack of memory.
  *out = cJSON_ParseWithLength(bytes, len);
  checker c = {.text = bytes, .len = len};
  if (*out && keep_numbers(&c, *out)) return TD_OK;
  cJSON_Delete(*out);
  *out = NULL;
  return td_fail(err, TD_ENOMEM, "out of memory while parsing JSON");
}

static td_status parse_file(cJSON **out, const char *path, size_t max_bytes,
                            td_status (*read)(td_buf *, const char *, size_t, td_err *),
                            td_err *err) {
  *out = NULL;
  td_buf text = TD_BUF_INIT;
  td_status st = read(&text, path, max_bytes, err);
  if (st == TD_OK) {
    st = td_json_parse(out, td_buf_text(&text), text.len, TD_JSON_MAX_DEPTH, err);
    if (st != TD_OK) td_err_prefix(err, "%s", path);
  }
  td_buf_free(&text);
  return st;
}

td_status td_json_parse_file(cJSON **out, const char *path, size_t max_bytes, td_err *err) {
  return parse_file(out, path, max_bytes, td_file_read, err);
}

td_status td_json_parse_regular(cJSON **out, const char *path, size_t max_bytes, td_err *err) {
  return parse_file(out, path, max_bytes, td_file_read_regular, err);
}

const cJSON *td_json_get(const cJSON *object, const char *key) {
  if (!cJSON_IsObject(object)) return NULL;
  const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
  return cJSON_IsNull(item) ? NULL : item;
}

const char *td_json_text(const cJSON *object, const char *key) {
  const cJSON *item = td_json_get(object, key);
  return cJSON_IsString(item) ? item->valuestring : NULL;
}

bool td_json_is(const cJSON *object, const char *key, const char *text) {
  const char *of = td_json_text(object, key);
  return of && strcmp(of, text) == 0;
}

td_status td_json_get_bool(const cJSON *object, const char *key, bool *out, td_err *err) {
  const cJSON *item = td_json_get(object, key);
  if (!item) return TD_OK;
  if (!cJSON_IsBool(item)) return td_fail(err, TD_EINVAL, "%s must be true or false", key);
  *out = cJSON_IsTrue(item);
  return TD_OK;
}

td_status td_json_get_double(const cJSON *object, const char *key, double *out, td_err *err) {
  const cJSON *item = td_json_get(object, key);
  if (!item) return TD_OK;
  if (!cJSON_IsNumber(item)) return td_fail(err, TD_EINVAL, "%s must be a number", key);
  *out = item->valuedouble;
  return TD_OK;
}

bool td_json_whole(const cJSON *item, int64_t min, int64_t max, int64_t *out) {
  if (!cJSON_IsNumber(item)) return false;
  const char *text = item->valuestring; // kept where the double may be another number
  int64_t whole;
  errno = 0;
  if (text && !text[strspn(text, "-0123456789")])
    whole = strtoll(text, NULL, 10);
  else if (item->valuedouble == floor(item->valuedouble) && fabs(item->valuedouble) < 0x1p63)
    whole = (int64_t)item->valuedouble;
  else
    return false;
  if (errno || whole < min || whole > max) return false;
  *out = whole;
  return true;
}

td_status td_json_get_int(const cJSON *object, const char *key, int64_t min, int64_t max,
                          int64_t *out, td_err *err) {
  const cJSON *item = td_json_get(object, key);
  if (!item || td_json_whole(item, min, max, out)) return TD_OK;
  const double value = cJSON_IsNumber(item) ? item->valuedouble : NAN;
  if (!(value == floor(value))) return td_fail(err, TD_EINVAL, "%s must be an integer", key);
  return td_fail(err, TD_EINVAL, "%s must be between %lld and %lld", key, (long long)min,
                 (long long)max);
}

td_status td_json_get_str(const cJSON *object, const char *key, const char **out, td_err *err) {
  const cJSON *item = td_json_get(object, key);
  if (!item) return TD_OK;
  if (!cJSON_IsString(item)) return td_fail(err, TD_EINVAL, "%s must be a string", key);
  *out = item->valuestring;
  return TD_OK;
}

// ---- names as a set -----------------------------------------------------------------------------

static int by_text(const void *a, const void *b) {
  return strcmp(*(const char *const *)a, *(const char *const *)b);
}

bool td_json_names_open(td_json_names *out, const cJSON *list, td_json_name_of *name_of) {
  const cJSON *first = cJSON_IsArray(list) ? list->child : NULL;
  size_t n = 0;
  for (const cJSON *item = first; item; item = item->next)
    n++;
  *out = (td_json_names){.names = malloc((n + 1) * sizeof *out->names)};
  if (!out->names) return false;
  for (const cJSON *item = first; item; item = item->next) {
    const char *name = name_of ? name_of(item) : cJSON_IsString(item) ? item->valuestring : NULL;
    if (name) out->names[out->n++] = name;
  }
  qsort(out->names, out->n, sizeof *out->names, by_text);
  return true;
}

void td_json_names_close(td_json_names *names) {
  free(names->names);
  *names = (td_json_names){0};
}

bool td_json_names_has(const td_json_names *names, const char *name) {
  return names->n && bsearch(&name, names->names, names->n, sizeof *names->names, by_text);
}
