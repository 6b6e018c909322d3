// src/text/jinja/filters_str.c - filters on text. Parameters have jinja2's names, since templates
// pass them by keyword.
#include <string.h>

#include "text/jinja/native.h"
#include "text/unicode/python_chars.h"

static jj_value recase(jj *j, jj_value v, jj_case how) {
  return JJ_OF_STR(jj_recase(j, jj_to_str(j, v), how));
}

JJ_NATIVE_OF(filter_upper, recase(j, self, JJ_UPPER))
JJ_NATIVE_OF(filter_lower, recase(j, self, JJ_LOWER))
JJ_NATIVE_OF(filter_capitalize, recase(j, self, JJ_CAPITALIZE))

static bool begins_word(uint32_t c) {
  return td_pychar_is_space(c) || (c < 0x80 && c && strchr("-({[<", (int)c));
}

// Differs from str.title(): only white space and opening punctuation start a new word.
JJ_NATIVE(filter_title) {
  JJ_UNUSED;
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

JJ_NATIVE_OF(filter_trim,
             JJ_OF_STR(jj_strip(j, jj_to_str(j, self), jj_arg_str(j, a[0]), true, true)))

JJ_NATIVE(filter_replace) {
  JJ_UNUSED;
  int64_t max = jj_given_value(a[2]) ? jj_arg_int(j, a[2], -1) : -1;
  const jj_str *s = jj_marked(j, jj_to_str(j, self), false);
  return JJ_OF_STR(jj_replace(j, s, jj_to_str(j, a[0]), jj_to_str(j, a[1]), max));
}

JJ_NATIVE_OF(filter_string, JJ_OF_STR(jj_to_str(j, self)))
JJ_NATIVE_OF(filter_safe, JJ_OF_STR(jj_marked(j, jj_to_str(j, self), true)))
JJ_NATIVE_OF(filter_escape, JJ_OF_STR(jj_escape_html(j, jj_to_str(j, self))))

static const jj_str *spaces(jj *j, jj_value width) {
  if (width.type == JJ_STR) return width.s;
  int64_t n = jj_arg_int(j, width, 4);
  return jj_pad(j, jj_lit(j, ""), n, jj_lit(j, " "), '<');
}

JJ_NATIVE(filter_indent) {
  JJ_UNUSED;
  if (self.type != JJ_STR) jj_raise_type(j, "a string", self);
  const jj_str *indent = spaces(j, a[0]);
  bool first = jj_arg_bool(a[1]), blank = jj_arg_bool(a[2]);
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

// ---- format, tojson ----

JJ_NATIVE(filter_format) {
  JJ_UNUSED;
  if (raw->n_kw) jj_raise(j, TD_EFORMAT, "format takes no arguments by name");
  const jj_value args = JJ_OF_TUPLE(jj_list_new(j, raw->n_pos));
  for (size_t i = 0; i < raw->n_pos; i++)
    jj_push(j, args.list, raw->pos[i]);
  return JJ_OF_STR(jj_percent(j, jj_to_str(j, self), args));
}

static const jj_str *json_separator(jj *j, jj_value pair, size_t which) {
  jj_list *two = jj_to_list(j, pair);
  if (two->n != 2 || two->items[which].type != JJ_STR)
    jj_raise(j, TD_EFORMAT, "separators must be two strings");
  return two->items[which].s;
}

// tojson as in transformers: json.dumps with its own defaults, without HTML escaping.
JJ_NATIVE(filter_tojson) {
  JJ_UNUSED;
  jj_json_opts opts = {.ascii = jj_arg_bool(a[0]), .sort_keys = jj_arg_bool(a[3])};
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
    {"format", NULL, filter_format},
    {NULL, NULL, NULL},
};
