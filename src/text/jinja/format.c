// src/text/jinja/format.c - Python's string formatting: "..." % args and "...".format(...).
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "text/jinja/jinja.h"

#define MAX_PRECISION 1000

// A conversion specification of either kind.
typedef struct {
  const jj_str *fill; // one character
  char align;         // '<' '>' '^' '=' or 0
  char sign;          // '-' '+' ' '
  bool alt;
  char group; // ',' '_' or 0
  int64_t width;
  int precision; // -1: none
  char type;     // 0: none
} spec;

// ---- numbers ----

static const jj_str *insert_groups(jj *j, const jj_str *digits, char group, size_t every) {
  jj_builder b;
  jj_build(&b, j);
  size_t whole = 0;
  while (whole < digits->len && isxdigit((unsigned char)digits->p[whole]))
    whole++;
  for (size_t i = 0; i < digits->len; i++) {
    if (i && i < whole && (whole - i) % every == 0) jj_add(&b, &group, 1);
    jj_add(&b, digits->p + i, 1);
  }
  return jj_built(&b);
}

// Appends sign, prefix and digits, padded according to the specification.
static void add_number(jj_builder *out, const spec *s, bool negative, const char *prefix,
                       const jj_str *digits) {
  jj *j = out->j;
  if (s->group) {
    bool decimal = !strchr("bBoxX", s->type) || !s->type;
    digits = insert_groups(j, digits, s->group, decimal ? 3 : 4);
  }
  jj_builder head;
  jj_build(&head, j);
  if (negative || s->sign != '-') jj_add(&head, negative ? "-" : s->sign == '+' ? "+" : " ", 1);
  jj_add_text(&head, prefix);
  const jj_str *before = jj_built(&head);
  if (s->align == '=') {
    jj_add_str(out, before);
    jj_add_str(out, jj_pad(j, digits, s->width - (int64_t)before->n_chars, s->fill, '>'));
    return;
  }
  jj_add_str(&head, digits);
  jj_add_str(out, jj_pad(j, jj_built(&head), s->width, s->fill, s->align ? s->align : '>'));
}

static const jj_str *int_digits(jj *j, uint64_t magnitude, char type, int min_digits) {
  char text[72];
  char *p = text + sizeof text;
  unsigned base = type == 'x' || type == 'X' ? 16 : type == 'o' ? 8 : type == 'b' ? 2 : 10;
  const char *figures = type == 'X' ? "0123456789ABCDEF" : "0123456789abcdef";
  do {
    *--p = figures[magnitude % base];
    magnitude /= base;
  } while (magnitude);
  const jj_str *s = jj_str_new(j, p, (size_t)(text + sizeof text - p));
  return jj_pad(j, s, min_digits, jj_lit(j, "0"), '>');
}

static void add_int(jj_builder *out, const spec *s, jj_value v) {
  int64_t i = 0;
  jj *j = out->j;
  if (!jj_as_int(v, &i)) { // JJ_BIG has only decimal digits
    bool negative = v.s->p[0] == '-';
    add_number(out, s, negative, "", jj_sub(j, v.s, negative, v.s->len));
    return;
  }
  const char *prefix = "";
  if (s->alt) {
    prefix = s->type == 'x' ? "0x" : s->type == 'X' ? "0X" : s->type == 'o' ? "0o" : "";
    if (s->type == 'b') prefix = "0b";
  }
  uint64_t magnitude = i < 0 ? -(uint64_t)i : (uint64_t)i;
  add_number(out, s, i < 0, prefix, int_digits(j, magnitude, s->type, s->precision));
}

// float.__format__ without a type: repr, or %g with at least one decimal so as not to look like an
// integer.
static size_t general_digits(double f, int precision, char *text, size_t cap) {
  if (precision < 0) return jj_float_repr(f, text);
  if (precision == 0) precision = 1;
  char sci[64 + MAX_PRECISION];
  snprintf(sci, sizeof sci, "%.*e", precision - 1, f);
  int exponent = atoi(strchr(sci, 'e') + 1);
  bool scientific = exponent < -4 || exponent + 1 > precision - 1;
  int n = 0;
  if (!scientific) {
    n = snprintf(text, cap, "%.*g", precision, f);
    return (size_t)(strchr(text, '.') ? n : n + snprintf(text + n, cap - (size_t)n, ".0"));
  }
  char *e = strchr(sci, 'e'), *last = e;
  while (strchr(sci, '.') && strchr(sci, '.') < e && (last[-1] == '0' || last[-1] == '.')) {
    bool dot = *--last == '.';
    if (dot) break;
  }
  return (size_t)snprintf(text, cap, "%.*s%s", (int)(last - sci), sci, e);
}

static void add_float_digits(jj_builder *out, const spec *s, double f) {
  char fmt[8] = "%";
  char text[512 + MAX_PRECISION];
  double magnitude = signbit(f) && !isnan(f) ? -f : f;
  bool upper = s->type == 'E' || s->type == 'F' || s->type == 'G';
  int n;
  if (isnan(f) || isinf(f)) {
    n = snprintf(text, sizeof text, "%s",
                 isnan(f) ? (upper ? "NAN" : "nan")
                 : upper  ? "INF"
                          : "inf");
  } else if (!s->type) {
    n = (int)general_digits(magnitude, s->precision, text, sizeof text);
  } else {
    char type = s->type == '%' ? 'f' : s->type == 'n' ? 'g' : s->type;
    snprintf(fmt, sizeof fmt, "%%%s.*%c", s->alt ? "#" : "", type);
    n = snprintf(text, sizeof text, fmt, s->precision < 0 ? 6 : s->precision,
                 s->type == '%' ? magnitude * 100 : magnitude);
  }
  if (s->type == '%') n += snprintf(text + n, sizeof text - (size_t)n, "%%");
  const jj_str *digits = jj_str_new(out->j, text, (size_t)n);
  add_number(out, s, signbit(f) && !isnan(f), "", digits);
}

// ---- text ----

static void add_padded(jj_builder *out, const spec *s, const jj_str *text, char usual) {
  jj *j = out->j;
  if (s->precision >= 0 && (size_t)s->precision < text->n_chars) {
    text = jj_sub(j, text, 0, jj_char_to_byte(j, text, (size_t)s->precision));
  }
  jj_add_str(out, jj_pad(j, text, s->width, s->fill, s->align ? s->align : usual));
}

static const jj_str *repr(jj *j, jj_value v) {
  jj_builder b;
  jj_build(&b, j);
  jj_add_repr(&b, v);
  return jj_built(&b);
}

// repr() with non-ASCII characters escaped.
static const jj_str *ascii(jj *j, jj_value v) {
  const jj_str *s = repr(j, v);
  jj_builder b;
  jj_build(&b, j);
  for (size_t i = 0, next; i < s->len; i = next) {
    uint32_t c = jj_decode(s, i, &next);
    char text[16];
    const char *fmt = c < 0x80 ? "%c" : c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x";
    int n = snprintf(text, sizeof text, fmt, c);
    jj_add_typed(&b, text, (size_t)n, jj_typed_at(s, i));
  }
  return jj_built(&b);
}

// ---- "..." % args ----

typedef struct {
  jj *j;
  const jj_str *fmt;
  size_t at;
  jj_value args;
  const jj_value *items; // positional arguments
  size_t n_items, used;
} percent;

static char next_char(percent *p) {
  if (p->at >= p->fmt->len) jj_raise(p->j, TD_EFORMAT, "incomplete format");
  return p->fmt->p[p->at++];
}

static jj_value next_arg(percent *p) {
  if (p->used >= p->n_items) {
    jj_raise(p->j, TD_EFORMAT, "not enough arguments for format string");
  }
  return p->items[p->used++];
}

// A number or '*'; -1 if there is none.
static int64_t percent_number(percent *p) {
  if (p->at < p->fmt->len && p->fmt->p[p->at] == '*') {
    p->at++;
    int64_t n;
    if (!jj_as_int(next_arg(p), &n)) jj_raise(p->j, TD_EFORMAT, "* wants int");
    return n;
  }
  int64_t n = -1;
  while (p->at < p->fmt->len && isdigit((unsigned char)p->fmt->p[p->at])) {
    n = (n < 0 ? 0 : n) * 10 + (p->fmt->p[p->at++] - '0');
    if (n > INT32_MAX) jj_raise(p->j, TD_ELIMIT, "width or precision too big");
  }
  return n;
}

// "%(name)": the value that the mapping has for name.
static jj_value percent_key(percent *p) {
  size_t begin = ++p->at;
  int depth = 1;
  while (depth) {
    char c = next_char(p);
    depth += c == '(' ? 1 : c == ')' ? -1 : 0;
  }
  if (p->args.type != JJ_DICT) jj_raise(p->j, TD_EFORMAT, "format requires a mapping");
  const jj_str *key = jj_sub(p->j, p->fmt, begin, p->at - 1);
  const jj_value *v = jj_dict_get_str(p->j, p->args.dict, key);
  if (!v) jj_raise(p->j, TD_EFORMAT, "KeyError: '%.*s'", jj_clip(key), key->p);
  return *v;
}

static spec percent_spec(percent *p) {
  spec s = {.fill = jj_lit(p->j, " "), .sign = '-', .precision = -1};
  bool zero = false;
  for (; p->at < p->fmt->len && strchr("-+ #0", p->fmt->p[p->at]); p->at++) {
    char c = p->fmt->p[p->at];
    if (c == '-') s.align = '<';
    if (c == '+' || (c == ' ' && s.sign != '+')) s.sign = c;
    if (c == '#') s.alt = true;
    if (c == '0') zero = true;
  }
  int64_t width = percent_number(p);
  if (width < -1) s.align = '<';
  s.width = width < -1 ? -width : width;
  if (p->at < p->fmt->len && p->fmt->p[p->at] == '.') {
    p->at++;
    int64_t precision = percent_number(p);
    s.precision = precision < 0 ? 0 : precision > INT32_MAX ? INT32_MAX : (int)precision;
  }
  if (p->at < p->fmt->len && strchr("hlL", p->fmt->p[p->at])) p->at++;
  s.type = next_char(p);
  if (zero && !s.align && strchr("diouxXeEfFgG", s.type)) {
    s.align = '=';
    s.fill = jj_lit(p->j, "0");
  }
  return s;
}

static void check_precision(jj *j, const spec *s) {
  if (s->precision > MAX_PRECISION) jj_raise(j, TD_ELIMIT, "precision too big");
}

static jj_value percent_int(jj *j, const spec *s, jj_value v) {
  bool decimal = strchr("diu", s->type) != NULL;
  if (!jj_is_number(v) || (v.type == JJ_FLOAT && !decimal)) {
    jj_raise(j, TD_EFORMAT, "%%%c format: %s is required, not %s", s->type,
             decimal ? "a real number" : "an integer", jj_type_name(v));
  }
  if (v.type == JJ_FLOAT && !jj_float_to_int(j, v.f, &v)) {
    jj_raise(j, TD_EFORMAT, "cannot convert float NaN to integer");
  }
  return v;
}

static void percent_char(jj_builder *out, const spec *s, jj_value v) {
  jj *j = out->j;
  int64_t c;
  if (v.type == JJ_STR && v.s->n_chars == 1) {
    add_padded(out, s, v.s, '>');
  } else if (jj_as_int(v, &c) && c >= 0 && c < 0x110000 && (c < 0xD800 || c > 0xDFFF)) {
    jj_builder one;
    jj_build(&one, j);
    jj_add_char(&one, (uint32_t)c, false);
    add_padded(out, s, jj_built(&one), '>');
  } else {
    jj_raise(j, TD_EFORMAT, "%%c requires int or char");
  }
}

static void percent_value(jj_builder *out, spec *s, jj_value v) {
  jj *j = out->j;
  switch (s->type) {
  case 's': add_padded(out, s, jj_to_str(j, v), '>'); return;
  case 'r': add_padded(out, s, repr(j, v), '>'); return;
  case 'a': add_padded(out, s, ascii(j, v), '>'); return;
  case 'c': percent_char(out, s, v); return;
  case 'd':
  case 'i':
  case 'u':
  case 'o':
  case 'x':
  case 'X':
    check_precision(j, s);
    v = percent_int(j, s, v);
    if (strchr("iu", s->type)) s->type = 'd';
    add_int(out, s, v);
    return;
  case 'e':
  case 'E':
  case 'f':
  case 'F':
  case 'g':
  case 'G': {
    check_precision(j, s);
    double f = 0;
    bool is_text = v.type == JJ_STR || !jj_is_number(v);
    if (is_text) jj_raise(j, TD_EFORMAT, "must be real number, not %s", jj_type_name(v));
    f = jj_as_double(j, v);
    add_float_digits(out, s, f);
    return;
  }
  default:
    jj_raise(j, TD_EFORMAT, "unsupported format character '%c'",
             isprint((unsigned char)s->type) ? s->type : '?');
  }
}

const jj_str *jj_percent(jj *j, const jj_str *fmt, jj_value args) {
  percent p = {.j = j, .fmt = fmt, .args = args, .items = &args, .n_items = 1};
  if (args.type == JJ_TUPLE) {
    p.items = args.list->items;
    p.n_items = args.list->n;
  }
  jj_builder out;
  jj_build(&out, j);
  while (p.at < fmt->len) {
    size_t stop = p.at;
    while (stop < fmt->len && fmt->p[stop] != '%')
      stop++;
    jj_add_range(&out, fmt, p.at, stop);
    p.at = stop + 1;
    if (stop == fmt->len) break;
    jj_steps(j, 1);
    bool keyed = p.at < fmt->len && fmt->p[p.at] == '(';
    jj_value v = keyed ? percent_key(&p) : JJ_NO_VALUE;
    spec s = percent_spec(&p);
    if (s.type == '%') {
      jj_add_text(&out, "%");
      continue;
    }
    percent_value(&out, &s, keyed ? v : next_arg(&p));
  }
  bool subscriptable = args.type == JJ_DICT || args.type == JJ_LIST || args.type == JJ_RANGE ||
                       args.type == JJ_UNDEF;
  if (p.used < p.n_items && !subscriptable) {
    jj_raise(j, TD_EFORMAT, "not all arguments converted during string formatting");
  }
  return jj_built(&out);
}

// ---- "...".format() ----

typedef struct {
  const jj_args *args;
  int64_t next; // next automatic field number
  bool manual;
} fields;

static const jj_str *format_text(jj *j, const jj_str *fmt, fields *f, int depth);

static void one_char(jj *j, const jj_str *s, size_t *at, spec *out) {
  size_t next;
  jj_decode(s, *at, &next);
  out->fill = jj_sub(j, s, *at, next);
  *at = next;
}

static int64_t spec_number(jj *j, const jj_str *s, size_t *at) {
  int64_t n = 0;
  for (; *at < s->len && isdigit((unsigned char)s->p[*at]); ++*at) {
    n = n * 10 + (s->p[*at] - '0');
    if (n > INT32_MAX) jj_raise(j, TD_ELIMIT, "too many decimal digits in format string");
  }
  return n;
}

static spec parse_spec(jj *j, const jj_str *s) {
  spec out = {.fill = jj_lit(j, " "), .sign = '-', .precision = -1};
  size_t at = 0, second = 0;
  if (s->len) jj_decode(s, 0, &second);
  if (s->len && second < s->len && strchr("<>=^", s->p[second])) {
    one_char(j, s, &at, &out);
    out.align = s->p[at++];
  } else if (s->len && strchr("<>=^", s->p[0])) {
    out.align = s->p[at++];
  }
  if (at < s->len && strchr("+- ", s->p[at])) out.sign = s->p[at++];
  if (at < s->len && s->p[at] == '#') at++, out.alt = true;
  if (at < s->len && s->p[at] == '0') {
    at++;
    if (!out.align) {
      out.align = '=';
      out.fill = jj_lit(j, "0");
    }
  }
  out.width = spec_number(j, s, &at);
  if (at < s->len && strchr(",_", s->p[at])) out.group = s->p[at++];
  if (at < s->len && s->p[at] == '.') {
    at++;
    if (at == s->len || !isdigit((unsigned char)s->p[at])) {
      jj_raise(j, TD_EFORMAT, "Format specifier missing precision");
    }
    out.precision = (int)spec_number(j, s, &at);
  }
  if (at < s->len) out.type = s->p[at++];
  if (at < s->len) jj_raise(j, TD_EFORMAT, "Invalid format specifier");
  return out;
}

static _Noreturn void unknown_type(jj *j, const spec *s, jj_value v) {
  jj_raise(j, TD_EFORMAT, "Unknown format code '%c' for object of type '%s'",
           isprint((unsigned char)s->type) ? s->type : '?', jj_type_name(v));
}

static void format_str(jj_builder *out, spec *s, jj_value v) {
  if (s->type && s->type != 's') unknown_type(out->j, s, v);
  if (s->align == '=' && s->fill->p[0] == '0') s->align = '<'; // "{:05}" of a string
  if (s->align == '=' || s->sign != '-' || s->group || s->alt) {
    jj_raise(out->j, TD_EFORMAT, "format specifier not allowed for a string");
  }
  add_padded(out, s, v.s, '<');
}

static void format_number(jj_builder *out, spec *s, jj_value v) {
  jj *j = out->j;
  check_precision(j, s);
  bool as_float = v.type == JJ_FLOAT || (s->type && strchr("eEfFgG%", s->type));
  if (as_float) {
    if (s->type && !strchr("eEfFgGn%", s->type)) unknown_type(j, s, v);
    add_float_digits(out, s, jj_as_double(j, v));
    return;
  }
  if (s->precision >= 0) {
    jj_raise(j, TD_EFORMAT, "Precision not allowed in integer format specifier");
  }
  if (s->type == 'c') {
    s->align = s->align ? s->align : '<';
    percent_char(out, s, v);
    return;
  }
  if (s->type && !strchr("bdoxXn", s->type)) unknown_type(j, s, v);
  add_int(out, s, v);
}

static void format_value(jj_builder *out, jj_value v, const jj_str *spec_text) {
  jj *j = out->j;
  if (!spec_text->len) {
    jj_add_value(out, v);
    return;
  }
  spec s = parse_spec(j, spec_text);
  if (v.type == JJ_STR) {
    format_str(out, &s, v);
  } else if (jj_is_number(v)) {
    format_number(out, &s, v);
  } else {
    jj_raise(j, TD_EFORMAT, "unsupported format string passed to %s.__format__", jj_type_name(v));
  }
}

static jj_value named_arg(jj *j, const jj_args *args, const jj_str *name) {
  for (size_t i = 0; i < args->n_kw; i++) {
    if (jj_str_eq(args->kw[i].name, name)) return args->kw[i].value;
  }
  jj_raise(j, TD_EFORMAT, "KeyError: '%.*s'", jj_clip(name), name->p);
}

static jj_value numbered_arg(jj *j, const jj_args *args, jj_value index) {
  if (index.type != JJ_INT || (uint64_t)index.i >= args->n_pos) {
    jj_raise(j, TD_EFORMAT, "Replacement index out of range for positional args tuple");
  }
  return args->pos[index.i];
}

static bool is_number_text(jj *j, const jj_str *s, jj_value *out) {
  for (size_t i = 0; i < s->len; i++) {
    if (!isdigit((unsigned char)s->p[i])) return false;
  }
  return s->len && jj_parse_int(j, s, 10, out);
}

// Evaluates "name.attr[key]". An empty or numeric first part is positional.
static jj_value field_value(jj *j, fields *f, const jj_str *name) {
  size_t at = 0;
  while (at < name->len && !strchr(".[", name->p[at]))
    at++;
  const jj_str *first = jj_sub(j, name, 0, at);
  jj_value v, number;
  bool manual = is_number_text(j, first, &number);
  if (!name->len || manual) {
    if ((manual && f->next > 0) || (!manual && f->manual)) {
      jj_raise(j, TD_EFORMAT, "cannot switch between manual and automatic field numbering");
    }
    f->manual = f->manual || manual;
    v = numbered_arg(j, f->args, manual ? number : JJ_OF_INT(f->next++));
  } else {
    v = named_arg(j, f->args, first);
  }
  while (at < name->len) {
    bool attr = name->p[at++] == '.';
    size_t begin = at;
    while (at < name->len && !strchr(attr ? ".[" : "]", name->p[at]))
      at++;
    const jj_str *part = jj_sub(j, name, begin, at);
    if (!part->len) jj_raise(j, TD_EFORMAT, "Empty attribute in format string");
    if (!attr && at++ >= name->len) jj_raise(j, TD_EFORMAT, "Missing ']' in format string");
    jj_value key = JJ_OF_STR(part);
    if (!attr) is_number_text(j, part, &key);
    v = attr ? jj_getattr(j, v, part) : jj_getitem(j, v, key);
  }
  return v;
}

// Formats the replacement field fmt[begin, end), which excludes the braces.
static void format_field(jj_builder *out, const jj_str *fmt, size_t begin, size_t end, fields *f,
                         int depth) {
  jj *j = out->j;
  size_t name_end = begin;
  for (bool bracket = false; name_end < end; name_end++) {
    char c = fmt->p[name_end];
    if (c == '[') bracket = true;
    if (c == ']') bracket = false;
    if (!bracket && (c == '!' || c == ':')) break;
  }
  jj_value v = field_value(j, f, jj_sub(j, fmt, begin, name_end));
  size_t at = name_end;
  if (at < end && fmt->p[at] == '!') {
    char conversion = at + 1 < end ? fmt->p[at + 1] : 0;
    at += 2;
    bool known = conversion == 'r' || conversion == 's' || conversion == 'a';
    if (!known || (at < end && fmt->p[at] != ':')) {
      jj_raise(j, TD_EFORMAT, "Unknown conversion specifier in format string");
    }
    v = JJ_OF_STR(conversion == 'r'   ? repr(j, v)
                  : conversion == 'a' ? ascii(j, v)
                                      : jj_to_str(j, v));
  }
  const jj_str *spec_text = jj_sub(j, fmt, at < end ? at + 1 : end, end);
  format_value(out, v, format_text(j, spec_text, f, depth + 1));
}

static size_t field_end(jj *j, const jj_str *fmt, size_t at) {
  int open = 1;
  for (; at < fmt->len; at++) {
    open += fmt->p[at] == '{' ? 1 : fmt->p[at] == '}' ? -1 : 0;
    if (!open) return at;
  }
  jj_raise(j, TD_EFORMAT, "expected '}' before end of string");
}

static const jj_str *format_text(jj *j, const jj_str *fmt, fields *f, int depth) {
  if (depth > 2) jj_raise(j, TD_EFORMAT, "Max string recursion exceeded");
  jj_builder out;
  jj_build(&out, j);
  for (size_t at = 0; at < fmt->len;) {
    size_t stop = at;
    while (stop < fmt->len && fmt->p[stop] != '{' && fmt->p[stop] != '}')
      stop++;
    jj_add_range(&out, fmt, at, stop);
    if (stop == fmt->len) break;
    bool doubled = stop + 1 < fmt->len && fmt->p[stop + 1] == fmt->p[stop];
    if (doubled) {
      jj_add_range(&out, fmt, stop, stop + 1);
      at = stop + 2;
      continue;
    }
    if (fmt->p[stop] == '}') jj_raise(j, TD_EFORMAT, "Single '}' encountered in format string");
    size_t end = field_end(j, fmt, stop + 1);
    format_field(&out, fmt, stop + 1, end, f, depth);
    at = end + 1;
    jj_steps(j, 1);
  }
  return jj_built(&out);
}

const jj_str *jj_format(jj *j, const jj_str *fmt, const jj_args *args) {
  fields f = {.args = args};
  return format_text(j, fmt, &f, 0);
}
