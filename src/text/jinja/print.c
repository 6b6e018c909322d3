// src/text/jinja/print.c - text of values: str(), repr() and json.dumps().
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/jinja/jinja.h"
#include "text/unicode/python_chars.h"

// The fewest digits that read back as f, in the format of Python's repr().
size_t jj_float_repr(double f, char out[JJ_FLOAT_CHARS]) {
  if (isnan(f)) return (size_t)snprintf(out, JJ_FLOAT_CHARS, "nan");
  if (isinf(f)) return (size_t)snprintf(out, JJ_FLOAT_CHARS, f < 0 ? "-inf" : "inf");
  char sci[JJ_FLOAT_CHARS];
  int digits = 0;
  do {
    snprintf(sci, sizeof sci, "%.*e", digits++, f);
  } while (strtod(sci, NULL) != f && digits < 17);
  int exponent = atoi(strchr(sci, 'e') + 1);
  if (exponent < -4 || exponent >= 16) {
    // "1e+16": like Python, C pads the exponent to two digits.
    return (size_t)snprintf(out, JJ_FLOAT_CHARS, "%s", sci);
  }
  int decimals = digits - 1 - exponent;
  return (size_t)snprintf(out, JJ_FLOAT_CHARS, "%.*f", decimals > 0 ? decimals : 1, f);
}

static void add_float(jj_builder *b, double f) {
  char text[JJ_FLOAT_CHARS];
  jj_add(b, text, jj_float_repr(f, text));
}

static void add_quoted(jj_builder *b, const jj_str *s) {
  bool single = memchr(s->p, '\'', s->len) && !memchr(s->p, '"', s->len);
  char quote = single ? '"' : '\'';
  jj_add(b, &quote, 1);
  for (size_t i = 0, next; i < s->len; i = next) {
    uint32_t c = jj_decode(s, i, &next);
    bool typed = jj_typed_at(s, i);
    char text[16];
    int n = 0;
    if (c == (uint32_t)quote || c == '\\') {
      n = snprintf(text, sizeof text, "\\%c", (char)c);
    } else if (c == '\n' || c == '\r' || c == '\t') {
      n = snprintf(text, sizeof text, "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
    } else if (!td_pychar_is_printable(c)) {
      const char *fmt = c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x";
      n = snprintf(text, sizeof text, fmt, c);
    }
    if (n)
      jj_add_typed(b, text, (size_t)n, typed);
    else
      jj_add_typed(b, s->p + i, next - i, typed);
  }
  jj_add(b, &quote, 1);
  jj_steps(b->j, s->len >> 4);
}

static void add_items(jj_builder *b, const jj_list *list) {
  for (size_t i = 0; i < list->n; i++) {
    if (i) jj_add_text(b, ", ");
    jj_add_repr(b, list->items[i]);
  }
}

static void add_dict(jj_builder *b, const jj_dict *dict) {
  jj_add_text(b, "{");
  for (size_t i = 0; i < dict->n; i++) {
    if (i) jj_add_text(b, ", ");
    jj_add_repr(b, dict->entries[i].key);
    jj_add_text(b, ": ");
    jj_add_repr(b, dict->entries[i].value);
  }
  jj_add_text(b, "}");
}

static void add_range_repr(jj_builder *b, const jj_range *r) {
  jj_addf(b, "range(%lld, %lld", (long long)r->start, (long long)r->stop);
  if (r->step != 1) jj_addf(b, ", %lld", (long long)r->step);
  jj_add_text(b, ")");
}

static void add_macro(jj_builder *b, const jj_macro *macro) {
  jj_add_text(b, "<Macro ");
  if (macro->node->name)
    add_quoted(b, macro->node->name);
  else
    jj_add_text(b, "anonymous");
  jj_add_text(b, ">");
}

static void add_loop(jj_builder *b, jj_loop *loop) {
  jj *j = b->j;
  jj_addf(b, "<LoopContext %lld/%lld>", (long long)jj_loop_attr(j, loop, jj_lit(j, "index")).i,
          (long long)jj_loop_attr(j, loop, jj_lit(j, "length")).i);
}

static void add_object(jj_builder *b, jj_value v) {
  switch (v.type) {
  case JJ_VIEW:
    jj_addf(b, "%s([", jj_type_name(v));
    add_items(b, jj_to_list(b->j, v));
    jj_add_text(b, "])");
    break;
  case JJ_RANGE: add_range_repr(b, v.range); break;
  case JJ_NAMESPACE:
    jj_add_text(b, "<Namespace ");
    add_dict(b, v.dict);
    jj_add_text(b, ">");
    break;
  case JJ_MACRO: add_macro(b, v.macro); break;
  case JJ_LOOP: add_loop(b, v.loop); break;
  case JJ_NATIVE: jj_addf(b, "<function %.100s>", v.native->native->name); break;
  case JJ_UNDEF: jj_add_text(b, "Undefined"); break;
  default: jj_addf(b, "<%s object>", jj_type_name(v));
  }
}

void jj_add_repr(jj_builder *b, jj_value v) {
  jj_steps(b->j, 1);
  jj_enter(b->j);
  switch (v.type) {
  case JJ_NONE: jj_add_text(b, "None"); break;
  case JJ_BOOL: jj_add_text(b, v.b ? "True" : "False"); break;
  case JJ_INT: jj_addf(b, "%lld", (long long)v.i); break;
  case JJ_BIG: jj_add_str(b, v.s); break;
  case JJ_FLOAT: add_float(b, v.f); break;
  case JJ_STR:
    if (v.s->markup) jj_add_text(b, "Markup(");
    add_quoted(b, v.s);
    if (v.s->markup) jj_add_text(b, ")");
    break;
  case JJ_LIST:
    jj_add_text(b, "[");
    add_items(b, v.list);
    jj_add_text(b, "]");
    break;
  case JJ_TUPLE:
    jj_add_text(b, "(");
    add_items(b, v.list);
    jj_add_text(b, v.list->n == 1 ? ",)" : ")");
    break;
  case JJ_DICT: add_dict(b, v.dict); break;
  default: add_object(b, v);
  }
  jj_leave(b->j);
}

void jj_add_value(jj_builder *b, jj_value v) {
  if (v.type == JJ_STR)
    jj_add_str(b, v.s);
  else if (v.type != JJ_UNDEF)
    jj_add_repr(b, v);
}

const jj_str *jj_to_str(jj *j, jj_value v) {
  if (v.type == JJ_STR) return v.s;
  jj_builder b;
  jj_build(&b, j);
  jj_add_value(&b, v);
  return jj_built(&b);
}

// ---- JSON ----

typedef struct {
  jj_builder out;
  const jj_json_opts *opts;
} json_writer;

static void json_value(json_writer *w, jj_value v, size_t level);

static size_t json_escape(const json_writer *w, uint32_t c, char out[16]) {
  static const char short_form[] = {
      ['\b'] = 'b', ['\t'] = 't', ['\n'] = 'n', ['\f'] = 'f', ['\r'] = 'r', ['"'] = '"'};
  if (c == '\\') return (size_t)snprintf(out, 16, "\\\\");
  if (c < sizeof short_form && short_form[c])
    return (size_t)snprintf(out, 16, "\\%c", short_form[c]);
  if (c >= 0x20 && (c < 0x7F || !w->opts->ascii)) return 0;
  if (c < 0x10000) return (size_t)snprintf(out, 16, "\\u%04x", c);
  c -= 0x10000;
  return (size_t)snprintf(out, 16, "\\u%04x\\u%04x", 0xD800 + (c >> 10), 0xDC00 + (c & 0x3FF));
}

static void json_string(json_writer *w, const jj_str *s) {
  jj_add(&w->out, "\"", 1);
  size_t plain = 0; // start of the range that needs no escapes
  for (size_t i = 0, next; i < s->len; i = next) {
    char escape[16];
    size_t n = json_escape(w, jj_decode(s, i, &next), escape);
    if (!n) continue;
    jj_add_range(&w->out, s, plain, i);
    jj_add_typed(&w->out, escape, n, jj_typed_at(s, i));
    plain = next;
  }
  jj_add_range(&w->out, s, plain, s->len);
  jj_add(&w->out, "\"", 1);
  jj_steps(w->out.j, s->len >> 4);
}

static void json_float(json_writer *w, double f) {
  if (isnan(f))
    jj_add_text(&w->out, "NaN");
  else if (isinf(f))
    jj_add_text(&w->out, f < 0 ? "-Infinity" : "Infinity");
  else
    add_float(&w->out, f);
}

static void json_newline(json_writer *w, size_t level) {
  if (!w->opts->indent) return;
  jj_add(&w->out, "\n", 1);
  jj_add_repeat(&w->out, w->opts->indent, level);
}

static void json_key(json_writer *w, jj_value key) {
  if (key.type == JJ_STR) {
    json_string(w, key.s);
    return;
  }
  if (key.type != JJ_NONE && !jj_is_number(key)) {
    jj_raise(w->out.j, TD_EFORMAT, "keys must be str, int, float, bool or None, not %s",
             jj_type_name(key));
  }
  jj_add(&w->out, "\"", 1);
  json_value(w, key, 0);
  jj_add(&w->out, "\"", 1);
}

static void json_list(json_writer *w, const jj_list *list, size_t level) {
  jj_add(&w->out, "[", 1);
  for (size_t i = 0; i < list->n; i++) {
    if (i) jj_add_str(&w->out, w->opts->item_sep);
    json_newline(w, level + 1);
    json_value(w, list->items[i], level + 1);
  }
  if (list->n) json_newline(w, level);
  jj_add(&w->out, "]", 1);
}

static void json_dict(json_writer *w, const jj_dict *dict, size_t level) {
  jj *j = w->out.j;
  jj_value *keys = jj_alloc_n(j, dict->n, sizeof *keys);
  jj_value *values = jj_alloc_n(j, dict->n, sizeof *values);
  for (size_t i = 0; i < dict->n; i++) {
    keys[i] = dict->entries[i].key;
    values[i] = dict->entries[i].value;
  }
  if (w->opts->sort_keys) jj_sort(j, values, keys, dict->n, false);
  jj_add(&w->out, "{", 1);
  for (size_t i = 0; i < dict->n; i++) {
    if (i) jj_add_str(&w->out, w->opts->item_sep);
    json_newline(w, level + 1);
    json_key(w, keys[i]);
    jj_add_str(&w->out, w->opts->key_sep);
    json_value(w, values[i], level + 1);
  }
  if (dict->n) json_newline(w, level);
  jj_add(&w->out, "}", 1);
}

static void json_value(json_writer *w, jj_value v, size_t level) {
  jj_steps(w->out.j, 1);
  jj_enter(w->out.j);
  switch (v.type) {
  case JJ_NONE: jj_add_text(&w->out, "null"); break;
  case JJ_BOOL: jj_add_text(&w->out, v.b ? "true" : "false"); break;
  case JJ_INT: jj_addf(&w->out, "%lld", (long long)v.i); break;
  case JJ_BIG: jj_add_str(&w->out, v.s); break;
  case JJ_FLOAT: json_float(w, v.f); break;
  case JJ_STR: json_string(w, v.s); break;
  case JJ_LIST:
  case JJ_TUPLE: json_list(w, v.list, level); break;
  case JJ_DICT: json_dict(w, v.dict, level); break;
  default:
    jj_raise(w->out.j, TD_EFORMAT, "Object of type %s is not JSON serializable", jj_type_name(v));
  }
  jj_leave(w->out.j);
}

const jj_str *jj_to_json(jj *j, jj_value v, const jj_json_opts *opts) {
  json_writer w = {.opts = opts};
  jj_build(&w.out, j);
  json_value(&w, v, 0);
  return jj_built(&w.out);
}
