// src/text/jinja/filters_str.c - filters on text. Parameters have jinja2's names, since templates
// pass them by keyword.
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/jinja/native.h"
#include "text/unicode/python_chars.h"

#define FILTER(fn) static jj_value fn(jj *j, jj_value self, const jj_value *a, const jj_args *raw)
#define UNUSED     (void)j, (void)a, (void)raw

static jj_value recase(jj *j, jj_value v, jj_case how) {
  return JJ_OF_STR(jj_recase(j, jj_to_str(j, v), how));
}

FILTER(filter_upper) {
  UNUSED;
  return recase(j, self, JJ_UPPER);
}

FILTER(filter_lower) {
  UNUSED;
  return recase(j, self, JJ_LOWER);
}

FILTER(filter_capitalize) {
  UNUSED;
  return recase(j, self, JJ_CAPITALIZE);
}

static bool begins_word(uint32_t c) {
  return td_pychar_is_space(c) || (c < 0x80 && c && strchr("-({[<", (int)c));
}

// Differs from str.title(): only white space and opening punctuation start a new word.
FILTER(filter_title) {
  UNUSED;
  const jj_str *s = jj_to_str(j, self);
  jj_builder b;
  jj_build(&b, j);
  size_t word = 0;
  for (size_t i = 0, next; i <= s->len; i = next) {
    next = i + 1;
    bool boundary = i == s->len || begins_word(jj_decode(s, i, &next));
    if (!boundary) continue;
    if (word < i) {
      size_t second;
      jj_decode(s, word, &second);
      jj_add_str(&b, jj_recase(j, jj_sub(j, s, word, second), JJ_UPPER));
      jj_add_str(&b, jj_recase(j, jj_sub(j, s, second, i), JJ_LOWER));
    }
    if (i < s->len) jj_add_range(&b, s, i, next);
    word = next;
  }
  return JJ_OF_STR(jj_built(&b));
}

FILTER(filter_trim) {
  UNUSED;
  return JJ_OF_STR(jj_strip(j, jj_to_str(j, self), jj_arg_str(j, a[0]), true, true));
}

FILTER(filter_center) {
  UNUSED;
  int64_t width = jj_arg_int(j, a[0], 80);
  return JJ_OF_STR(jj_pad(j, jj_to_str(j, self), width, jj_lit(j, " "), 'c'));
}

FILTER(filter_replace) {
  UNUSED;
  int64_t max = jj_given_value(a[2]) ? jj_arg_int(j, a[2], -1) : -1;
  const jj_str *s = jj_marked(j, jj_to_str(j, self), false);
  return JJ_OF_STR(jj_replace(j, s, jj_to_str(j, a[0]), jj_to_str(j, a[1]), max));
}

FILTER(filter_string) {
  UNUSED;
  return JJ_OF_STR(jj_to_str(j, self));
}

FILTER(filter_safe) {
  UNUSED;
  return JJ_OF_STR(jj_marked(j, jj_to_str(j, self), true));
}

FILTER(filter_escape) {
  UNUSED;
  return JJ_OF_STR(jj_escape_html(j, jj_to_str(j, self)));
}

FILTER(filter_forceescape) {
  UNUSED;
  return JJ_OF_STR(jj_escape_html(j, jj_marked(j, jj_to_str(j, self), false)));
}

static const jj_str *spaces(jj *j, jj_value width) {
  if (width.type == JJ_STR) return width.s;
  int64_t n = jj_arg_int(j, width, 4);
  return jj_pad(j, jj_lit(j, ""), n, jj_lit(j, " "), '<');
}

FILTER(filter_indent) {
  (void)raw;
  if (self.type != JJ_STR) jj_raise_type(j, "a string", self);
  const jj_str *indent = spaces(j, a[0]);
  bool first = jj_arg_bool(a[1], false), blank = jj_arg_bool(a[2], false);
  // The added newline makes an empty last line count.
  jj_list *lines = jj_splitlines(j, jj_concat(j, self.s, jj_lit(j, "\n")), false);
  jj_builder b;
  jj_build(&b, j);
  if (first) jj_add_str(&b, indent);
  for (size_t i = 0; i < lines->n; i++) {
    const jj_str *line = lines->items[i].s;
    if (i) jj_add_text(&b, "\n");
    if (i && (blank || line->len)) jj_add_str(&b, indent);
    jj_add_str(&b, line);
  }
  return JJ_OF_STR(jj_marked(j, jj_built(&b), self.s->markup));
}

FILTER(filter_truncate) {
  (void)raw;
  int64_t length = jj_arg_int(j, a[0], 255);
  const jj_str *end = jj_given(a[2]) ? jj_arg_str(j, a[2]) : jj_lit(j, "...");
  int64_t leeway = jj_given_value(a[3]) ? jj_arg_int(j, a[3], 5) : 5;
  if (!end) jj_raise_type(j, "a string", a[2]);
  if (length < (int64_t)end->n_chars || leeway < 0) {
    jj_raise(j, TD_EFORMAT, "expected length >= %zu, got %lld", end->n_chars, (long long)length);
  }
  if (jj_len(j, self) - leeway <= length) return self;
  if (self.type != JJ_STR) jj_raise_type(j, "a string", self);
  const jj_str *s = self.s;
  size_t keep = jj_char_to_byte(j, s, (size_t)length - end->n_chars);
  if (!jj_arg_bool(a[1], false)) {
    size_t space = jj_rfind(j, s, jj_lit(j, " "), 0, keep);
    if (space != SIZE_MAX) keep = space;
  }
  return JJ_OF_STR(jj_concat(j, jj_sub(j, s, 0, keep), end));
}

FILTER(filter_wordcount) {
  UNUSED;
  const jj_str *s = jj_to_str(j, self);
  int64_t n = 0;
  bool inside = false;
  for (size_t i = 0; i < s->len;) {
    uint32_t c = jj_decode(s, i, &i);
    bool word = c == '_' || td_pychar_is_alnum(c);
    n += word && !inside;
    inside = word;
  }
  jj_steps(j, s->len >> 4);
  return JJ_OF_INT(n);
}

// ---- striptags ----

// Removes every range from `open` to the next `close`.
static const jj_str *remove_between(jj *j, const jj_str *s, const char *open, const char *close) {
  jj_builder b;
  jj_build(&b, j);
  const jj_str *begin = jj_lit(j, open), *end = jj_lit(j, close);
  size_t at = 0;
  for (;;) {
    size_t from = jj_find(j, s, begin, at, s->len);
    size_t to = from == SIZE_MAX ? SIZE_MAX : jj_find(j, s, end, from, s->len);
    if (to == SIZE_MAX) break;
    jj_add_range(&b, s, at, from);
    at = to + end->len;
  }
  jj_add_range(&b, s, at, s->len);
  return jj_built(&b);
}

// The character that the HTML entity at s[at] stands for; 0 if there is none. *end: position after
// its ';'.
static uint32_t entity(const jj_str *s, size_t at, size_t *end) {
  static const struct {
    const char *name;
    char c;
  } names[] = {{"&amp;", '&'}, {"&lt;", '<'}, {"&gt;", '>'}, {"&quot;", '"'}, {"&apos;", '\''}};
  for (size_t i = 0; i < TD_COUNT(names); i++) {
    size_t n = strlen(names[i].name);
    if (s->len - at < n || memcmp(s->p + at, names[i].name, n) != 0) continue;
    *end = at + n;
    return (uint32_t)names[i].c;
  }
  char digits[12] = "";
  const char *semicolon = memchr(s->p + at, ';', s->len - at);
  size_t n = semicolon ? (size_t)(semicolon - (s->p + at)) : 0;
  if (n < 3 || n - 2 >= sizeof digits || s->p[at + 1] != '#') return 0;
  memcpy(digits, s->p + at + 2, n - 2);
  bool hex = digits[0] == 'x' || digits[0] == 'X';
  char *stop;
  unsigned long c = strtoul(digits + hex, &stop, hex ? 16 : 10);
  if (*stop || !isxdigit((unsigned char)digits[hex]) || c == 0 || c > 0x10FFFF ||
      (c >= 0xD800 && c <= 0xDFFF)) {
    return 0;
  }
  *end = at + n + 1;
  return (uint32_t)c;
}

FILTER(filter_striptags) {
  UNUSED;
  const jj_str *s = remove_between(j, jj_to_str(j, self), "<!--", "-->");
  s = remove_between(j, s, "<", ">");
  jj_list *words = jj_split(j, s, NULL, -1, false);
  jj_builder b;
  jj_build(&b, j);
  for (size_t w = 0; w < words->n; w++) {
    const jj_str *word = words->items[w].s;
    if (w) jj_add_text(&b, " ");
    for (size_t i = 0; i < word->len;) {
      size_t end;
      uint32_t c = word->p[i] == '&' ? entity(word, i, &end) : 0;
      if (c) {
        jj_add_char(&b, c, jj_typed_at(word, i));
        i = end;
      } else {
        jj_add_range(&b, word, i, i + 1);
        i++;
      }
    }
  }
  return JJ_OF_STR(jj_built(&b));
}

// ---- urlencode ----

static void add_quoted(jj_builder *b, const jj_str *s, bool query) {
  for (size_t i = 0; i < s->len; i++) {
    unsigned char c = (unsigned char)s->p[i];
    bool plain = c < 0x80 && (isalnum(c) || strchr("_.-~", c) || (!query && c == '/'));
    bool typed = jj_typed_at(s, i);
    char text[4];
    if (query && c == ' ') {
      jj_add_typed(b, "+", 1, typed);
    } else if (plain && c) {
      jj_add_typed(b, s->p + i, 1, typed);
    } else {
      snprintf(text, sizeof text, "%%%02X", c);
      jj_add_typed(b, text, 3, typed);
    }
  }
}

FILTER(filter_urlencode) {
  UNUSED;
  jj_builder b;
  jj_build(&b, j);
  if (self.type == JJ_STR || !jj_iterable(self)) {
    add_quoted(&b, jj_to_str(j, self), false);
    return JJ_OF_STR(jj_built(&b));
  }
  jj_view items = {.kind = JJ_ITEMS, .dict = self.dict};
  jj_iter *it = jj_iterate(j, self.type == JJ_DICT ? (jj_value){.type = JJ_VIEW, .view = &items}
                                                   : self);
  jj_value pair;
  for (bool more = false; jj_next(j, it, &pair); more = true) {
    jj_list *two = jj_to_list(j, pair);
    if (two->n != 2) jj_raise(j, TD_EFORMAT, "not enough values to unpack (expected 2)");
    if (more) jj_add_text(&b, "&");
    add_quoted(&b, jj_to_str(j, two->items[0]), true);
    jj_add_text(&b, "=");
    add_quoted(&b, jj_to_str(j, two->items[1]), true);
  }
  return JJ_OF_STR(jj_built(&b));
}

// ---- format, tojson ----

FILTER(filter_format) {
  (void)a;
  if (raw->n_pos && raw->n_kw) {
    jj_raise(j, TD_EFORMAT, "can't handle positional and keyword arguments at the same time");
  }
  jj_value args;
  if (raw->n_kw) {
    args = JJ_OF_DICT(jj_dict_new(j));
    for (size_t i = 0; i < raw->n_kw; i++)
      jj_dict_set(j, args.dict, JJ_OF_STR(raw->kw[i].name), raw->kw[i].value);
  } else {
    args = JJ_OF_TUPLE(jj_list_new(j, raw->n_pos));
    for (size_t i = 0; i < raw->n_pos; i++)
      jj_push(j, args.list, raw->pos[i]);
  }
  return JJ_OF_STR(jj_percent(j, jj_to_str(j, self), args));
}

static const jj_str *json_separator(jj *j, jj_value pair, size_t which) {
  jj_list *two = jj_to_list(j, pair);
  if (two->n != 2 || two->items[which].type != JJ_STR) {
    jj_raise(j, TD_EFORMAT, "separators must be two strings");
  }
  return two->items[which].s;
}

// tojson as in transformers: json.dumps with its own defaults, without HTML escaping.
FILTER(filter_tojson) {
  (void)raw;
  jj_json_opts opts = {.ascii = jj_arg_bool(a[0], false), .sort_keys = jj_arg_bool(a[3], false)};
  if (jj_given_value(a[1])) opts.indent = spaces(j, a[1]);
  opts.item_sep = jj_lit(j, opts.indent ? "," : ", ");
  opts.key_sep = jj_lit(j, ": ");
  if (jj_given_value(a[2])) {
    opts.item_sep = json_separator(j, a[2], 0);
    opts.key_sep = json_separator(j, a[2], 1);
  }
  return JJ_OF_STR(jj_to_json(j, self, &opts));
}

const jj_native jj_str_filters[] = {
    {"tojson", "|ensure_ascii,indent,separators,sort_keys", filter_tojson},
    {"trim", "|chars", filter_trim},
    {"string", "", filter_string},
    {"replace", "old,new|count", filter_replace},
    {"upper", "", filter_upper},
    {"lower", "", filter_lower},
    {"capitalize", "", filter_capitalize},
    {"title", "", filter_title},
    {"indent", "|width,first,blank", filter_indent},
    {"safe", "", filter_safe},
    {"escape", "", filter_escape},
    {"e", "", filter_escape},
    {"forceescape", "", filter_forceescape},
    {"center", "|width", filter_center},
    {"truncate", "|length,killwords,end,leeway", filter_truncate},
    {"wordcount", "", filter_wordcount},
    {"striptags", "", filter_striptags},
    {"urlencode", "", filter_urlencode},
    {"format", NULL, filter_format},
    {NULL, NULL, NULL},
};
