// src/text/jinja/format.c - Python's string formatting, the part that chat templates need:
//   "..." % args         %s %r %d %i %f %%, each with '-', '0', a width and a precision
//   "...".format(args)   {} {0} {name}, each with a specification [<>^][0][width][.precision][sdf]
// The rest of Python's raises an error: signs, other fills, grouping, bases, exponents,
// conversions, attributes of arguments, arguments by name in "%".
#include <ctype.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "text/jinja/jinja.h"

enum { MAX_PRECISION = 1000 };

typedef struct {
  char align;    // '<' '>' '^'; 0: text to the left with format(), else to the right
  bool zeros;    // between the sign and the digits
  int64_t width; // characters, at least
  int precision; // -1: none
  char type;     // 0: none
} spec;

static _Noreturn void unknown_type(jj *j, char type) {
  jj_raise(j, TD_EFORMAT, "format code '%c' is not supported; s, d and f are",
           isprint((unsigned char)type) ? type : '?');
}

static int number_at(jj *j, const jj_str *s, size_t *at) {
  int64_t n = 0;
  for (; *at < s->len && isdigit((unsigned char)s->p[*at]); ++*at) {
    n = n * 10 + (s->p[*at] - '0');
    if (n > INT32_MAX) jj_raise(j, TD_ELIMIT, "width or precision too big");
  }
  return (int)n;
}

// Reads [0][width][.precision], common to both kinds of formatting.
static void read_size(jj *j, const jj_str *s, size_t *at, spec *out) {
  out->zeros = *at < s->len && s->p[*at] == '0';
  out->width = number_at(j, s, at);
  out->precision = -1;
  if (*at == s->len || s->p[*at] != '.') return;
  ++*at;
  out->precision = number_at(j, s, at);
  if (out->precision > MAX_PRECISION) jj_raise(j, TD_ELIMIT, "precision too big");
}

// ---- values ----

static void add_text(jj_builder *out, const spec *s, const jj_str *text, char usual) {
  jj *j = out->j;
  if (s->precision >= 0 && (size_t)s->precision < text->n_chars)
    text = jj_sub(j, text, 0, jj_char_to_byte(j, text, (size_t)s->precision));
  jj_add_str(out, jj_pad(j, text, s->width, jj_lit(j, " "), s->align ? s->align : usual));
}

static void add_number(jj_builder *out, const spec *s, bool negative, const jj_str *digits) {
  jj *j = out->j;
  if (s->zeros) digits = jj_pad(j, digits, s->width - negative, jj_lit(j, "0"), '>');
  if (negative) digits = jj_concat(j, jj_lit(j, "-"), digits);
  jj_add_str(out, jj_pad(j, digits, s->width, jj_lit(j, " "), s->align ? s->align : '>'));
}

static void add_int(jj_builder *out, const spec *s, jj_value v) {
  jj *j = out->j;
  int64_t i;
  if (s->precision >= 0) jj_raise(j, TD_EFORMAT, "an integer has no precision");
  if (!jj_as_int(v, &i)) { // JJ_BIG
    const bool negative = v.s->p[0] == '-';
    add_number(out, s, negative, jj_sub(j, v.s, negative, v.s->len));
    return;
  }
  char text[24];
  const int n = snprintf(text, sizeof text, "%" PRIu64, i < 0 ? -(uint64_t)i : (uint64_t)i);
  add_number(out, s, i < 0, jj_str_new(j, text, (size_t)n));
}

static void add_float(jj_builder *out, const spec *s, double f) {
  char text[512 + MAX_PRECISION];
  const bool negative = signbit(f) && !isnan(f);
  const double magnitude = fabs(f);
  if (!s->type && s->precision >= 0)
    jj_raise(out->j, TD_EFORMAT, "a precision needs the format code f");
  const size_t n = s->type ? (size_t)snprintf(text, sizeof text, "%.*f",
                                              s->precision < 0 ? 6 : s->precision, magnitude)
                           : jj_float_repr(magnitude, text);
  add_number(out, s, negative, jj_str_new(out->j, text, n));
}

// ---- "..." % args ----

static spec percent_spec(jj *j, const jj_str *fmt, size_t *at) {
  spec s = {0};
  if (*at < fmt->len && fmt->p[*at] == '-') s.align = fmt->p[(*at)++] == '-' ? '<' : 0;
  read_size(j, fmt, at, &s);
  if (s.align) s.zeros = false;
  if (*at == fmt->len) jj_raise(j, TD_EFORMAT, "incomplete format");
  s.type = fmt->p[(*at)++];
  return s;
}

static const jj_str *repr(jj *j, jj_value v) {
  jj_builder b;
  jj_build(&b, j);
  jj_add_repr(&b, v);
  return jj_built(&b);
}

static void percent_value(jj_builder *out, const spec *s, jj_value v) {
  jj *j = out->j;
  switch (s->type) {
  case 's': add_text(out, s, jj_to_str(j, v), '>'); return;
  case 'r': add_text(out, s, repr(j, v), '>'); return;
  case 'd':
  case 'i':
  case 'f': break;
  default: unknown_type(j, s->type);
  }
  if (!jj_is_number(v))
    jj_raise(j, TD_EFORMAT, "%%%c: a number is required, not %s", s->type, jj_type_name(v));
  if (s->type == 'f') {
    add_float(out, s, jj_as_double(j, v));
    return;
  }
  if (v.type == JJ_FLOAT && !jj_float_to_int(j, v.f, &v))
    jj_raise(j, TD_EFORMAT, "cannot convert float NaN to integer");
  add_int(out, s, v);
}

const jj_str *jj_percent(jj *j, const jj_str *fmt, jj_value args) {
  const bool several = args.type == JJ_TUPLE;
  const jj_value *items = several ? args.list->items : &args;
  const size_t n_items = several ? args.list->n : 1;
  size_t used = 0;
  jj_builder out;
  jj_build(&out, j);
  for (size_t at = 0; at < fmt->len;) {
    size_t stop = at;
    while (stop < fmt->len && fmt->p[stop] != '%')
      stop++;
    jj_add_range(&out, fmt, at, stop);
    at = stop + 1;
    if (stop == fmt->len) break;
    jj_steps(j, 1);
    const spec s = percent_spec(j, fmt, &at);
    if (s.type == '%') {
      jj_add_text(&out, "%");
      continue;
    }
    if (used == n_items) jj_raise(j, TD_EFORMAT, "not enough arguments for format string");
    percent_value(&out, &s, items[used++]);
  }
  // Python takes what has a [] for arguments by name, all of which need not be used.
  const bool by_name = args.type == JJ_DICT || args.type == JJ_LIST || args.type == JJ_RANGE ||
                       args.type == JJ_UNDEF;
  if (used < n_items && !by_name)
    jj_raise(j, TD_EFORMAT, "not all arguments converted during string formatting");
  return jj_built(&out);
}

// ---- "...".format() ----

typedef struct {
  const jj_args *args;
  int next; // next automatic field number
  bool manual;
} fields;

static spec parse_spec(jj *j, const jj_str *s) {
  spec out = {0};
  size_t at = 0;
  if (s->len && strchr("<>^", s->p[0])) out.align = s->p[at++];
  read_size(j, s, &at, &out);
  if (at < s->len) out.type = s->p[at++];
  if (at < s->len || (out.align && out.zeros))
    jj_raise(j, TD_EFORMAT, "format specification '%.*s' is not supported", jj_clip(s), s->p);
  return out;
}

static void format_value(jj_builder *out, jj_value v, const jj_str *spec_text) {
  jj *j = out->j;
  if (!spec_text->len) {
    jj_add_value(out, v);
    return;
  }
  const spec s = parse_spec(j, spec_text);
  if (s.type && !strchr("sdf", s.type)) unknown_type(j, s.type);
  if (v.type == JJ_STR && (!s.type || s.type == 's') && !s.zeros) {
    add_text(out, &s, v.s, '<');
  } else if (jj_is_number(v) && (s.type == 'f' || (v.type == JJ_FLOAT && !s.type))) {
    add_float(out, &s, jj_as_double(j, v));
  } else if (jj_is_number(v) && v.type != JJ_FLOAT && s.type != 's') {
    add_int(out, &s, v);
  } else {
    jj_raise(j, TD_EFORMAT, "format specification '%.*s' is not for %s", jj_clip(spec_text),
             spec_text->p, jj_type_name(v));
  }
}

static jj_value named_arg(jj *j, const jj_args *args, const jj_str *name) {
  for (size_t i = 0; i < args->n_kw; i++)
    if (jj_str_eq(args->kw[i].name, name)) return args->kw[i].value;
  jj_raise(j, TD_EFORMAT, "KeyError: '%.*s'", jj_clip(name), name->p);
}

// name: empty, a number, or a keyword argument's.
static jj_value field_value(jj *j, fields *f, const jj_str *name) {
  size_t n_digits = 0;
  const int number = number_at(j, name, &n_digits);
  if (n_digits < name->len) return named_arg(j, f->args, name);
  const bool manual = name->len > 0;
  if (manual ? f->next > 0 : f->manual)
    jj_raise(j, TD_EFORMAT, "cannot switch between manual and automatic field numbering");
  f->manual = manual;
  const int idx = manual ? number : f->next++;
  if ((size_t)idx >= f->args->n_pos)
    jj_raise(j, TD_EFORMAT, "Replacement index out of range for positional args tuple");
  return f->args->pos[idx];
}

// Formats the field in fmt[begin, end), without its braces.
static void format_field(jj_builder *out, const jj_str *fmt, size_t begin, size_t end, fields *f) {
  jj *j = out->j;
  const char *colon = memchr(fmt->p + begin, ':', end - begin);
  const size_t name_end = colon ? (size_t)(colon - fmt->p) : end;
  const jj_value v = field_value(j, f, jj_sub(j, fmt, begin, name_end));
  format_value(out, v, jj_sub(j, fmt, colon ? name_end + 1 : end, end));
}

const jj_str *jj_format(jj *j, const jj_str *fmt, const jj_args *args) {
  fields f = {.args = args};
  jj_builder out;
  jj_build(&out, j);
  for (size_t at = 0; at < fmt->len;) {
    size_t stop = at;
    while (stop < fmt->len && fmt->p[stop] != '{' && fmt->p[stop] != '}')
      stop++;
    jj_add_range(&out, fmt, at, stop);
    if (stop == fmt->len) break;
    if (stop + 1 < fmt->len && fmt->p[stop + 1] == fmt->p[stop]) {
      jj_add_range(&out, fmt, stop, stop + 1);
      at = stop + 2;
      continue;
    }
    if (fmt->p[stop] == '}') jj_raise(j, TD_EFORMAT, "Single '}' encountered in format string");
    const char *close = memchr(fmt->p + stop, '}', fmt->len - stop);
    if (!close) jj_raise(j, TD_EFORMAT, "expected '}' before end of string");
    const size_t end = (size_t)(close - fmt->p);
    format_field(&out, fmt, stop + 1, end, &f);
    at = end + 1;
    jj_steps(j, 1);
  }
  return jj_built(&out);
}
