// src/text/jinja/value.c - types of values, truth, equality, order, iteration.
#include <math.h>
#include <string.h>

#include "text/jinja/jinja.h"

const char *jj_type_name(jj_value v) {
  static const char *const views[] = {"dict_keys", "dict_values", "dict_items"};
  switch (v.type) {
  case JJ_MISSING:
  case JJ_UNDEF: return "Undefined";
  case JJ_NONE: return "NoneType";
  case JJ_BOOL: return "bool";
  case JJ_INT:
  case JJ_BIG: return "int";
  case JJ_FLOAT: return "float";
  case JJ_STR: return v.s->markup ? "Markup" : "str";
  case JJ_LIST: return "list";
  case JJ_TUPLE: return "tuple";
  case JJ_DICT: return "dict";
  case JJ_VIEW: return views[v.view->kind];
  case JJ_RANGE: return "range";
  case JJ_ITER: return "generator";
  case JJ_NAMESPACE: return "Namespace";
  case JJ_NATIVE: return "function";
  case JJ_MACRO: return "Macro";
  case JJ_LOOP: return "LoopContext";
  }
  return "object";
}

bool jj_truth(jj_value v) {
  switch (v.type) {
  case JJ_MISSING:
  case JJ_UNDEF:
  case JJ_NONE: return false;
  case JJ_BOOL: return v.b;
  case JJ_INT: return v.i != 0;
  case JJ_FLOAT: return v.f != 0;
  case JJ_STR: return v.s->len > 0;
  case JJ_LIST:
  case JJ_TUPLE: return v.list->n > 0;
  case JJ_DICT: return v.dict->n > 0;
  case JJ_VIEW: return v.view->dict->n > 0;
  case JJ_RANGE: return v.range->n > 0;
  default: return true;
  }
}

bool jj_is_number(jj_value v) {
  return v.type == JJ_BOOL || v.type == JJ_INT || v.type == JJ_BIG || v.type == JJ_FLOAT;
}

bool jj_as_int(jj_value v, int64_t *out) {
  if (v.type == JJ_BOOL)
    *out = v.b;
  else if (v.type == JJ_INT)
    *out = v.i;
  else
    return false;
  return true;
}

double jj_as_double(jj *j, jj_value v) {
  int64_t i = 0;
  if (v.type == JJ_FLOAT) return v.f;
  if (v.type == JJ_BIG) {
    double f;
    if (jj_parse_float(v.s, &f) && isfinite(f)) return f;
    jj_raise(j, TD_ELIMIT, "int too large to convert to float");
  }
  TD_CHECK(jj_as_int(v, &i));
  return (double)i;
}

// ---- undefined ----

jj_value jj_undefined(jj *j, const char *hint) {
  jj_undef *u = jj_alloc(j, sizeof *u);
  u->hint = hint;
  return (jj_value){.type = JJ_UNDEF, .undef = u};
}

jj_value jj_undefined_name(jj *j, const jj_str *name) {
  jj_undef *u = jj_alloc(j, sizeof *u);
  u->name = JJ_OF_STR(name);
  return (jj_value){.type = JJ_UNDEF, .undef = u};
}

jj_value jj_undefined_attr(jj *j, jj_value obj, jj_value name) {
  jj_undef *u = jj_alloc(j, sizeof *u);
  u->has_obj = true;
  u->obj = obj;
  u->name = name;
  return (jj_value){.type = JJ_UNDEF, .undef = u};
}

// The name as shown in a message: shortened and printable.
static void describe(jj *j, jj_value name, char out[120]) {
  jj_builder b;
  jj_build(&b, j);
  jj_add_repr(&b, name);
  const jj_str *s = jj_built(&b);
  size_t n = s->len < 119 ? s->len : 119;
  memcpy(out, s->p, n);
  out[n] = '\0';
}

void jj_raise_undefined(jj *j, jj_value undef) {
  const jj_undef *u = undef.undef;
  if (undef.type == JJ_MISSING) jj_raise(j, TD_EFORMAT, "value is undefined");
  if (u->hint) jj_raise(j, TD_EFORMAT, "%s", u->hint);
  char name[120];
  describe(j, u->name, name);
  if (!u->has_obj) jj_raise(j, TD_EFORMAT, "%s is undefined", name);
  const char *type = u->obj.type == JJ_NONE ? "None" : jj_type_name(u->obj);
  const char *object = u->obj.type == JJ_NONE ? "" : " object";
  if (u->name.type == JJ_STR)
    jj_raise(j, TD_EFORMAT, "'%s%s' has no attribute %s", type, object, name);
  jj_raise(j, TD_EFORMAT, "%s%s has no element %s", type, object, name);
}

// ---- comparing ----

static bool equal_lists(jj *j, const jj_list *a, const jj_list *b) {
  if (a->n != b->n) return false;
  for (size_t i = 0; i < a->n; i++)
    if (!jj_equal(j, a->items[i], b->items[i])) return false;
  return true;
}

static bool equal_dicts(jj *j, const jj_dict *a, const jj_dict *b) {
  if (a->n != b->n) return false;
  for (size_t i = 0; i < a->n; i++) {
    const jj_value *other = jj_dict_get(j, b, a->entries[i].key);
    if (!other || !jj_equal(j, a->entries[i].value, *other)) return false;
  }
  return true;
}

static bool equal_ranges(const jj_range *a, const jj_range *b) {
  if (a->n != b->n || a->n == 0) return a->n == b->n;
  return a->start == b->start && (a->n == 1 || a->step == b->step);
}

// Compares int64 and double exactly: long double represents both.
static int compare_numbers(jj *j, jj_value a, jj_value b) {
  int64_t x, y;
  if (jj_as_int(a, &x) && jj_as_int(b, &y)) return (x > y) - (x < y);
  if (a.type == JJ_BIG && b.type == JJ_BIG) {
    bool neg_a = a.s->p[0] == '-', neg_b = b.s->p[0] == '-';
    if (neg_a != neg_b) return neg_a ? -1 : 1;
    int c = a.s->len != b.s->len ? (a.s->len > b.s->len ? 1 : -1) : jj_str_cmp(a.s, b.s);
    return neg_a ? -c : c;
  }
  long double u = jj_as_int(a, &x) ? (long double)x : (long double)jj_as_double(j, a);
  long double v = jj_as_int(b, &y) ? (long double)y : (long double)jj_as_double(j, b);
  return (u > v) - (u < v);
}

static bool is_nan(jj_value v) {
  return v.type == JJ_FLOAT && isnan(v.f);
}

bool jj_same(jj_value a, jj_value b) {
  if (a.type != b.type) return false;
  switch (a.type) {
  case JJ_MISSING:
  case JJ_NONE: return true;
  case JJ_BOOL: return a.b == b.b;
  case JJ_INT: return a.i == b.i;
  case JJ_FLOAT: return false;
  case JJ_STR: return a.s == b.s || (a.s->p == b.s->p && a.s->len == b.s->len);
  case JJ_NATIVE: return a.native == b.native;
  default: return a.list == b.list; // all other values are compared by pointer
  }
}

bool jj_equal(jj *j, jj_value a, jj_value b) {
  jj_steps(j, 1);
  if (jj_is_number(a) && jj_is_number(b)) {
    if (is_nan(a) || is_nan(b)) return false;
    if ((a.type == JJ_BIG) != (b.type == JJ_BIG))
      return (a.type == JJ_FLOAT || b.type == JJ_FLOAT) && compare_numbers(j, a, b) == 0;
    return compare_numbers(j, a, b) == 0;
  }
  if (a.type != b.type) return false;
  jj_enter(j);
  bool equal;
  switch (a.type) {
  case JJ_UNDEF: equal = true; break;
  case JJ_STR:
    jj_steps(j, a.s->len >> 6);
    equal = jj_str_eq(a.s, b.s);
    break;
  case JJ_LIST:
  case JJ_TUPLE: equal = equal_lists(j, a.list, b.list); break;
  case JJ_DICT: equal = equal_dicts(j, a.dict, b.dict); break;
  case JJ_RANGE: equal = equal_ranges(a.range, b.range); break;
  case JJ_VIEW:
    equal = a.view->kind == b.view->kind && a.view->kind != JJ_VALUES &&
            equal_lists(j, jj_to_list(j, a), jj_to_list(j, b));
    break;
  default: equal = jj_same(a, b);
  }
  jj_leave(j);
  return equal;
}

static bool holds(jj_op op, int c) {
  switch (op) {
  case OP_LT: return c < 0;
  case OP_LE: return c <= 0;
  case OP_GT: return c > 0;
  default: return c >= 0;
  }
}

static bool order_lists(jj *j, jj_op op, const jj_list *a, const jj_list *b) {
  for (size_t i = 0; i < a->n && i < b->n; i++)
    if (!jj_equal(j, a->items[i], b->items[i])) return jj_order(j, op, a->items[i], b->items[i]);
  return holds(op, (a->n > b->n) - (a->n < b->n));
}

bool jj_order(jj *j, jj_op op, jj_value a, jj_value b) {
  static const char *const signs[] = {[OP_LT] = "<", [OP_LE] = "<=", [OP_GT] = ">", [OP_GE] = ">="};
  jj_steps(j, 1);
  if (a.type == JJ_UNDEF) jj_raise_undefined(j, a);
  if (b.type == JJ_UNDEF) jj_raise_undefined(j, b);
  if (jj_is_number(a) && jj_is_number(b)) {
    if (is_nan(a) || is_nan(b)) return false;
    return holds(op, compare_numbers(j, a, b));
  }
  if (a.type == JJ_STR && b.type == JJ_STR) return holds(op, jj_str_cmp(a.s, b.s));
  if (a.type == b.type && (a.type == JJ_LIST || a.type == JJ_TUPLE)) {
    jj_enter(j);
    bool result = order_lists(j, op, a.list, b.list);
    jj_leave(j);
    return result;
  }
  jj_raise(j, TD_EFORMAT, "'%s' not supported between instances of '%s' and '%s'", signs[op],
           jj_type_name(a), jj_type_name(b));
}

// ---- sequences ----

bool jj_has_len(jj_value v) {
  switch (v.type) {
  case JJ_UNDEF:
  case JJ_STR:
  case JJ_LIST:
  case JJ_TUPLE:
  case JJ_DICT:
  case JJ_VIEW:
  case JJ_RANGE:
  case JJ_LOOP: return true;
  default: return false;
  }
}

int64_t jj_len(jj *j, jj_value v) {
  switch (v.type) {
  case JJ_UNDEF: return 0;
  case JJ_STR: return (int64_t)v.s->n_chars;
  case JJ_LIST:
  case JJ_TUPLE: return (int64_t)v.list->n;
  case JJ_DICT: return (int64_t)v.dict->n;
  case JJ_VIEW: return (int64_t)v.view->dict->n;
  case JJ_RANGE: return v.range->n;
  case JJ_LOOP: return jj_loop_attr(j, v.loop, jj_lit(j, "length")).i;
  default: jj_raise(j, TD_EFORMAT, "object of type '%s' has no len()", jj_type_name(v));
  }
}

static bool view_contains(jj *j, const jj_view *view, jj_value item) {
  if (view->kind == JJ_KEYS) return jj_dict_get(j, view->dict, item) != NULL;
  for (size_t i = 0; i < view->dict->n; i++) {
    const jj_entry *e = &view->dict->entries[i];
    jj_value v = view->kind == JJ_VALUES ? e->value : jj_pair(j, e->key, e->value);
    if (jj_equal(j, v, item)) return true;
  }
  return false;
}

// Computed unsigned, because idx * step may overflow int64 although the sum does not.
int64_t jj_range_at(const jj_range *r, size_t idx) {
  return (int64_t)((uint64_t)r->start + (uint64_t)idx * (uint64_t)r->step);
}

static bool range_contains(const jj_range *r, jj_value item) {
  int64_t i;
  if (item.type == JJ_FLOAT && item.f == floor(item.f) && fabs(item.f) < 9e18)
    i = (int64_t)item.f;
  else if (!jj_as_int(item, &i))
    return false;
  bool inside = r->step > 0 ? i >= r->start && i < r->stop : i <= r->start && i > r->stop;
  uint64_t apart = r->step > 0 ? (uint64_t)i - (uint64_t)r->start
                               : (uint64_t)r->start - (uint64_t)i;
  uint64_t step = r->step > 0 ? (uint64_t)r->step : -(uint64_t)r->step;
  return inside && apart % step == 0;
}

bool jj_contains(jj *j, jj_value container, jj_value item) {
  switch (container.type) {
  case JJ_STR:
    if (item.type != JJ_STR) {
      jj_raise(j, TD_EFORMAT, "'in <string>' requires string as left operand, not %s",
               jj_type_name(item));
    }
    return jj_find(j, container.s, item.s, 0, container.s->len) != SIZE_MAX;
  case JJ_DICT: return jj_dict_get(j, container.dict, item) != NULL;
  case JJ_VIEW: return view_contains(j, container.view, item);
  case JJ_RANGE: return range_contains(container.range, item);
  case JJ_UNDEF: return false;
  case JJ_LIST:
  case JJ_TUPLE:
  case JJ_ITER: {
    jj_iter *it = jj_iterate(j, container);
    jj_value v;
    while (jj_next(j, it, &v))
      if (jj_same(v, item) || jj_equal(j, v, item)) return true;
    return false;
  }
  default:
    jj_raise(j, TD_EFORMAT, "argument of type '%s' is not iterable", jj_type_name(container));
  }
}

jj_list *jj_list_new(jj *j, size_t cap) {
  jj_list *list = jj_alloc(j, sizeof *list);
  list->items = jj_alloc_n(j, cap, sizeof *list->items);
  list->cap = cap;
  return list;
}

void jj_push(jj *j, jj_list *list, jj_value v) {
  list->items = jj_grow(j, list->items, list->n, &list->cap, sizeof *list->items);
  list->items[list->n++] = v;
}

jj_value jj_pair(jj *j, jj_value a, jj_value b) {
  jj_list *pair = jj_list_new(j, 2);
  jj_push(j, pair, a);
  jj_push(j, pair, b);
  return JJ_OF_TUPLE(pair);
}

bool jj_iterable(jj_value v) {
  return v.type == JJ_ITER || v.type == JJ_LOOP || jj_has_len(v);
}

jj_iter *jj_iterate(jj *j, jj_value v) {
  if (v.type == JJ_ITER) return v.iter;
  if (!jj_has_len(v) || v.type == JJ_LOOP)
    jj_raise(j, TD_EFORMAT, "'%s' object is not iterable", jj_type_name(v));
  jj_iter *it = jj_alloc(j, sizeof *it);
  it->items = v;
  return it;
}

static jj_value entry_value(jj *j, jj_value items, size_t pos) {
  const jj_dict *dict = items.type == JJ_DICT ? items.dict : items.view->dict;
  const jj_entry *e = &dict->entries[pos];
  if (items.type == JJ_DICT || items.view->kind == JJ_KEYS) return e->key;
  return items.view->kind == JJ_VALUES ? e->value : jj_pair(j, e->key, e->value);
}

bool jj_next(jj *j, jj_iter *it, jj_value *out) {
  jj_value items = it->items;
  if (it->pos >= (size_t)jj_len(j, items)) return false;
  jj_steps(j, 1);
  switch (items.type) {
  case JJ_STR: {
    size_t next;
    jj_decode(items.s, it->byte, &next);
    *out = JJ_OF_STR(jj_marked(j, jj_sub(j, items.s, it->byte, next), false));
    it->byte = next;
    break;
  }
  case JJ_DICT:
  case JJ_VIEW: *out = entry_value(j, items, it->pos); break;
  case JJ_RANGE: *out = JJ_OF_INT(jj_range_at(items.range, it->pos)); break;
  default: *out = items.list->items[it->pos];
  }
  it->pos++;
  return true;
}

jj_list *jj_to_list(jj *j, jj_value v) {
  jj_iter *it = jj_iterate(j, v);
  jj_list *list = jj_list_new(j, it->items.type == JJ_STR ? 0 : (size_t)jj_len(j, it->items));
  jj_value item;
  while (jj_next(j, it, &item))
    jj_push(j, list, item);
  return list;
}

jj_value jj_generator(jj *j, jj_list *items) {
  jj_iter *it = jj_alloc(j, sizeof *it);
  it->items = JJ_OF_LIST(items);
  return (jj_value){.type = JJ_ITER, .iter = it};
}
