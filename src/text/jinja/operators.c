// src/text/jinja/operators.c - operators, attributes, items and slices, with the lookup rules of
// jinja2's sandbox.
#include <string.h>

#include "text/jinja/jinja.h"

// ---- binary operators ----

static _Noreturn void bad_operands(jj *j, jj_op op, jj_value a, jj_value b) {
  static const char *const signs[] = {
      [OP_ADD] = "+",       [OP_SUB] = "-", [OP_MUL] = "*",          [OP_DIV] = "/",
      [OP_FLOORDIV] = "//", [OP_MOD] = "%", [OP_POW] = "** or pow()"};
  if (op == OP_ADD && (a.type == JJ_STR || a.type == JJ_LIST || a.type == JJ_TUPLE)) {
    const char *type = jj_type_name(a);
    jj_raise(j, TD_EFORMAT, "can only concatenate %s (not \"%s\") to %s", type, jj_type_name(b),
             type);
  }
  jj_raise(j, TD_EFORMAT, "unsupported operand type(s) for %s: '%s' and '%s'", signs[op],
           jj_type_name(a), jj_type_name(b));
}

static jj_value add_lists(jj *j, jj_value a, jj_value b) {
  jj_list *list = jj_list_new(j, a.list->n + b.list->n);
  if (a.list->n) memcpy(list->items, a.list->items, a.list->n * sizeof *list->items);
  list->n = a.list->n;
  for (size_t i = 0; i < b.list->n; i++)
    jj_push(j, list, b.list->items[i]);
  jj_steps(j, list->n >> 2);
  return (jj_value){.type = a.type, .list = list};
}

static jj_value add(jj *j, jj_value a, jj_value b) {
  if (a.type != b.type) bad_operands(j, OP_ADD, a, b);
  if (a.type == JJ_STR) {
    if (!a.s->markup && !b.s->markup) return JJ_OF_STR(jj_concat(j, a.s, b.s));
    const jj_str *sum = jj_concat(j, jj_escape_html(j, a.s), jj_escape_html(j, b.s));
    return JJ_OF_STR(jj_marked(j, sum, true));
  }
  if (a.type == JJ_LIST || a.type == JJ_TUPLE) return add_lists(j, a, b);
  bad_operands(j, OP_ADD, a, b);
}

static jj_value repeat_list(jj *j, jj_value v, size_t n) {
  if (v.list->n && n > SIZE_MAX / 64 / v.list->n)
    jj_raise(j, TD_ELIMIT, "a list of %zu times %zu items does not fit", n, v.list->n);
  jj_steps(j, v.list->n * n);
  jj_list *list = jj_list_new(j, v.list->n * n);
  for (size_t i = 0; v.list->n && i < n; i++)
    for (size_t k = 0; k < v.list->n; k++)
      jj_push(j, list, v.list->items[k]);
  return (jj_value){.type = v.type, .list = list};
}

static jj_value multiply(jj *j, jj_value a, jj_value b) {
  int64_t n;
  jj_value seq = jj_as_int(a, &n) ? b : a;
  if (!jj_as_int(a, &n) && !jj_as_int(b, &n)) bad_operands(j, OP_MUL, a, b);
  size_t times = n < 0 ? 0 : (size_t)n;
  if (seq.type == JJ_LIST || seq.type == JJ_TUPLE) return repeat_list(j, seq, times);
  if (seq.type != JJ_STR) bad_operands(j, OP_MUL, a, b);
  jj_builder out;
  jj_build(&out, j);
  jj_add_repeat(&out, seq.s, times);
  return JJ_OF_STR(jj_marked(j, jj_built(&out), seq.s->markup));
}

jj_value jj_binary(jj *j, jj_op op, jj_value a, jj_value b) {
  if (op == OP_MOD && a.type == JJ_STR) return JJ_OF_STR(jj_percent(j, a.s, b));
  if (a.type == JJ_UNDEF) jj_raise_undefined(j, a);
  if (b.type == JJ_UNDEF) jj_raise_undefined(j, b);
  if (jj_is_number(a) && jj_is_number(b)) return jj_arith(j, op, a, b);
  if (op == OP_ADD) return add(j, a, b);
  if (op == OP_MUL) return multiply(j, a, b);
  bad_operands(j, op, a, b);
}

// ---- attributes ----

static jj_value bind(jj *j, const jj_native *native, jj_value self) {
  jj_bound *bound = jj_alloc(j, sizeof *bound);
  *bound = (jj_bound){.native = native, .self = self};
  return (jj_value){.type = JJ_NATIVE, .native = bound};
}

// Mutating methods, which the immutable sandbox hides: the attribute exists, but is undefined.
static bool alters(jj_value obj, const jj_str *name) {
  static const char *const of_list[] = {"append", "clear", "pop",    "reverse",
                                        "insert", "sort",  "extend", "remove"};
  static const char *const of_dict[] = {"clear", "pop", "popitem", "setdefault", "update"};
  const char *const *names = obj.type == JJ_LIST ? of_list : of_dict;
  size_t n = obj.type == JJ_LIST ? TD_COUNT(of_list) : obj.type == JJ_DICT ? TD_COUNT(of_dict) : 0;
  for (size_t i = 0; i < n; i++)
    if (jj_str_is(name, names[i])) return true;
  return false;
}

static jj_value unsafe(jj *j, jj_value obj, const jj_str *name) {
  jj_builder b;
  jj_build(&b, j);
  jj_add_text(&b, "access to attribute '");
  jj_add_str(&b, name);
  jj_addf(&b, "' of '%s' object is unsafe.", jj_type_name(obj));
  jj_add_char(&b, 0, false);
  return jj_undefined(j, jj_built(&b)->p);
}

static const jj_native *methods_of(jj_value obj) {
  switch (obj.type) {
  case JJ_STR: return jj_str_methods;
  case JJ_LIST: return jj_list_methods;
  case JJ_TUPLE: return jj_tuple_methods;
  case JJ_DICT: return jj_dict_methods;
  default: return NULL;
  }
}

static jj_value macro_attr(jj *j, const jj_macro *macro, const jj_str *name) {
  const jj_node *node = macro->node;
  if (jj_str_is(name, "name")) return node->name ? JJ_OF_STR(node->name) : JJ_NONE_VALUE;
  if (jj_str_is(name, "catch_kwargs")) return JJ_OF_BOOL(node->macro.kwargs_slot >= 0);
  if (jj_str_is(name, "catch_varargs")) return JJ_OF_BOOL(node->macro.varargs_slot >= 0);
  if (jj_str_is(name, "caller")) return JJ_OF_BOOL(node->macro.caller_slot >= 0);
  if (!jj_str_is(name, "arguments")) return JJ_NO_VALUE;
  jj_list *names = jj_list_new(j, node->list.n);
  for (size_t i = 0; i < node->list.n; i++)
    jj_push(j, names, JJ_OF_STR(node->list.items[i]->name));
  return JJ_OF_TUPLE(names);
}

// Attributes that are data, not methods.
static jj_value data_attr(jj *j, jj_value obj, const jj_str *name) {
  switch (obj.type) {
  case JJ_NAMESPACE: {
    const jj_value *v = jj_dict_get_str(j, obj.dict, name);
    return v ? *v : JJ_NO_VALUE;
  }
  case JJ_LOOP: return jj_loop_attr(j, obj.loop, name);
  case JJ_MACRO: return macro_attr(j, obj.macro, name);
  case JJ_RANGE:
    if (jj_str_is(name, "start")) return JJ_OF_INT(obj.range->start);
    if (jj_str_is(name, "stop")) return JJ_OF_INT(obj.range->stop);
    if (jj_str_is(name, "step")) return JJ_OF_INT(obj.range->step);
    break;
  default: break;
  }
  return JJ_NO_VALUE;
}

jj_value jj_getattr_only(jj *j, jj_value obj, const jj_str *name) {
  if (obj.type == JJ_UNDEF) jj_raise_undefined(j, obj);
  const jj_native *methods = methods_of(obj);
  const jj_native *method = methods ? jj_native_find(methods, name) : NULL;
  if (method) return bind(j, method, obj);
  if (alters(obj, name)) return unsafe(j, obj, name);
  return data_attr(j, obj, name);
}

// ---- items ----

// Resolves an index; a negative one counts from the end. False if out of range.
static bool find_index(int64_t i, size_t n, size_t *out) {
  if (i < 0) i += (int64_t)n;
  if (i < 0 || (uint64_t)i >= n) return false;
  *out = (size_t)i;
  return true;
}

static jj_value char_at(jj *j, const jj_str *s, size_t idx) {
  size_t at = jj_char_to_byte(j, s, idx), next;
  jj_decode(s, at, &next);
  return JJ_OF_STR(jj_sub(j, s, at, next));
}

// obj[key] only. JJ_MISSING if Python would raise LookupError or TypeError.
static jj_value item(jj *j, jj_value obj, jj_value key) {
  if (obj.type == JJ_DICT) {
    const jj_value *v = jj_hashable(j, key) ? jj_dict_get(j, obj.dict, key) : NULL;
    return v ? *v : JJ_NO_VALUE;
  }
  int64_t i;
  size_t idx;
  if (!jj_as_int(key, &i)) return JJ_NO_VALUE;
  if (obj.type == JJ_STR && find_index(i, obj.s->n_chars, &idx)) return char_at(j, obj.s, idx);
  if ((obj.type == JJ_LIST || obj.type == JJ_TUPLE) && find_index(i, obj.list->n, &idx))
    return obj.list->items[idx];
  if (obj.type == JJ_RANGE && find_index(i, (size_t)obj.range->n, &idx))
    return JJ_OF_INT(jj_range_at(obj.range, idx));
  return JJ_NO_VALUE;
}

jj_value jj_getattr(jj *j, jj_value obj, const jj_str *name) {
  jj_value v = jj_getattr_only(j, obj, name);
  if (v.type == JJ_MISSING) v = item(j, obj, JJ_OF_STR(name));
  return v.type == JJ_MISSING ? jj_undefined_attr(j, obj, JJ_OF_STR(name)) : v;
}

jj_value jj_getitem(jj *j, jj_value obj, jj_value key) {
  if (obj.type == JJ_UNDEF) jj_raise_undefined(j, obj);
  jj_value v = item(j, obj, key);
  if (v.type == JJ_MISSING && key.type == JJ_STR) v = jj_getattr_only(j, obj, key.s);
  return v.type == JJ_MISSING ? jj_undefined_attr(j, obj, key) : v;
}

static bool all_digits(const jj_str *s) {
  for (size_t i = 0; i < s->len; i++)
    if (s->p[i] < '0' || s->p[i] > '9') return false;
  return s->len > 0;
}

jj_value jj_get_path(jj *j, jj_value obj, jj_value path, jj_value fallback) {
  if (path.type == JJ_MISSING || path.type == JJ_NONE) return obj;
  if (path.type != JJ_STR) return jj_getitem(j, obj, path);
  jj_list *parts = jj_split(j, path.s, jj_lit(j, "."), -1, false);
  for (size_t i = 0; i < parts->n; i++) {
    jj_value key = parts->items[i];
    if (all_digits(key.s)) jj_parse_int(j, key.s, 10, &key);
    obj = jj_getitem(j, obj, key);
    if (obj.type == JJ_UNDEF && fallback.type != JJ_MISSING) obj = fallback;
  }
  return obj;
}

// ---- slices ----

typedef struct {
  int64_t start, stop, step;
  size_t n;
} slice_range;

static bool slice_index(jj *j, jj_value v, int64_t *out) {
  if (v.type == JJ_NONE || v.type == JJ_MISSING) return false;
  if (!jj_as_int(v, out))
    jj_raise(j, TD_EFORMAT, "slice indices must be integers or None or have an __index__ method");
  return true;
}

// Clamps an index to [low, high]; negative ones count from the end.
static int64_t clamp_index(int64_t i, int64_t n, int64_t low, int64_t high) {
  if (i < 0) i += n;
  return i < low ? low : i > high ? high : i;
}

static slice_range make_slice(jj *j, size_t len, jj_value start, jj_value stop, jj_value step) {
  int64_t n = (int64_t)len, from, to, by = 1;
  slice_index(j, step, &by);
  if (by == 0) jj_raise(j, TD_EFORMAT, "slice step cannot be zero");
  if (by == INT64_MIN) by++;
  int64_t low = by < 0 ? -1 : 0, high = by < 0 ? n - 1 : n;
  from = slice_index(j, start, &from) ? clamp_index(from, n, low, high) : by < 0 ? high : 0;
  to = slice_index(j, stop, &to) ? clamp_index(to, n, low, high) : by < 0 ? -1 : n;
  slice_range r = {.start = from, .stop = to, .step = by};
  if (by > 0 && from < to) r.n = (size_t)((to - from - 1) / by + 1);
  if (by < 0 && from > to) r.n = (size_t)((from - to - 1) / -by + 1);
  return r;
}

static jj_value slice_str(jj *j, const jj_str *s, slice_range r) {
  if (r.step == 1 || r.n <= 1) {
    size_t begin = jj_char_to_byte(j, s, (size_t)(r.n ? r.start : 0));
    size_t end = r.n ? jj_char_to_byte(j, s, (size_t)r.start + r.n) : begin;
    return JJ_OF_STR(jj_sub(j, s, begin, end));
  }
  size_t *starts = jj_alloc_n(j, s->n_chars + 1, sizeof *starts);
  size_t n = 0;
  for (size_t i = 0; i < s->len; i++)
    if (((unsigned char)s->p[i] & 0xC0) != 0x80) starts[n++] = i;
  starts[n] = s->len;
  jj_builder b;
  jj_build(&b, j);
  for (size_t i = 0; i < r.n; i++) {
    size_t at = (size_t)(r.start + (int64_t)i * r.step);
    jj_add_range(&b, s, starts[at], starts[at + 1]);
  }
  jj_steps(j, s->len >> 3);
  return JJ_OF_STR(jj_marked(j, jj_built(&b), s->markup));
}

static jj_value slice_of_range(jj *j, const jj_range *range, slice_range r) {
  jj_range *cut = jj_alloc(j, sizeof *cut);
  cut->n = (int64_t)r.n;
  bool too_big = __builtin_mul_overflow(range->step, r.step, &cut->step) ||
                 __builtin_mul_overflow(range->step, r.start, &cut->start) ||
                 __builtin_add_overflow(range->start, cut->start, &cut->start) ||
                 __builtin_mul_overflow(range->step, r.stop, &cut->stop) ||
                 __builtin_add_overflow(range->start, cut->stop, &cut->stop);
  if (too_big) jj_raise(j, TD_ELIMIT, "integer overflow in a slice of a range");
  return (jj_value){.type = JJ_RANGE, .range = cut};
}

jj_value jj_slice(jj *j, jj_value obj, jj_value start, jj_value stop, jj_value step) {
  if (obj.type == JJ_UNDEF) jj_raise_undefined(j, obj);
  bool sliceable = obj.type == JJ_STR || obj.type == JJ_LIST || obj.type == JJ_TUPLE ||
                   obj.type == JJ_RANGE;
  if (!sliceable) {
    jj_raise(j, TD_EFORMAT, "%s%s%s", obj.type == JJ_DICT ? "unhashable type: 'slice" : "'",
             obj.type == JJ_DICT ? "" : jj_type_name(obj),
             obj.type == JJ_DICT ? "'" : "' object is not subscriptable");
  }
  slice_range r = make_slice(j, (size_t)jj_len(j, obj), start, stop, step);
  if (obj.type == JJ_STR) return slice_str(j, obj.s, r);
  if (obj.type == JJ_RANGE) return slice_of_range(j, obj.range, r);
  jj_list *list = jj_list_new(j, r.n);
  for (size_t i = 0; i < r.n; i++)
    jj_push(j, list, obj.list->items[r.start + (int64_t)i * r.step]);
  jj_steps(j, r.n >> 2);
  return (jj_value){.type = obj.type, .list = list};
}
