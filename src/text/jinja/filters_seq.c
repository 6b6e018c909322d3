// src/text/jinja/filters_seq.c - filters on sequences and mappings. Where Python returns a
// generator, the result is computed at once and returned as JJ_ITER, which behaves like one: always
// true, without length, consumed by reading.
#include <string.h>

#include "text/jinja/native.h"

// Strings are compared case-insensitively unless case_sensitive.
static jj_value fold(jj *j, jj_value v, bool case_sensitive) {
  if (case_sensitive || v.type != JJ_STR) return v;
  return JJ_OF_STR(jj_recase(j, v.s, JJ_LOWER));
}

static jj_value key_of(jj *j, jj_value item, jj_value path, jj_value fallback,
                       bool case_sensitive) {
  return fold(j, jj_get_path(j, item, path, fallback), case_sensitive);
}

// ---- sorting ----

static void merge(jj *j, const jj_value *keys, size_t *order, size_t *spare, size_t n,
                  bool reverse) {
  if (n < 2) return;
  size_t half = n / 2;
  merge(j, keys, order, spare, half, reverse);
  merge(j, keys, order + half, spare, n - half, reverse);
  memcpy(spare, order, half * sizeof *spare);
  size_t left = 0, right = half, out = 0;
  while (left < half && right < n) {
    bool take_right = jj_order(j, reverse ? OP_GT : OP_LT, keys[order[right]], keys[spare[left]]);
    order[out++] = take_right ? order[right++] : spare[left++];
  }
  while (left < half)
    order[out++] = spare[left++];
}

void jj_sort(jj *j, jj_value *items, jj_value *keys, size_t n, bool reverse) {
  size_t *order = jj_alloc_n(j, n, sizeof *order), *spare = jj_alloc_n(j, n, sizeof *spare);
  jj_value *old = jj_alloc_n(j, n, 2 * sizeof *old);
  for (size_t i = 0; i < n; i++) {
    order[i] = i;
    old[2 * i] = items[i];
    old[2 * i + 1] = keys[i];
  }
  merge(j, keys, order, spare, n, reverse);
  for (size_t i = 0; i < n; i++) {
    items[i] = old[2 * order[i]];
    keys[i] = old[2 * order[i] + 1];
  }
}

// "a,b" sorts by several attributes: the key is a list.
static jj_value multi_key(jj *j, jj_value item, jj_value attribute, bool case_sensitive) {
  bool several = attribute.type == JJ_STR && memchr(attribute.s->p, ',', attribute.s->len);
  if (!several) return key_of(j, item, attribute, JJ_NO_VALUE, case_sensitive);
  jj_list *paths = jj_split(j, attribute.s, jj_lit(j, ","), -1, false);
  jj_list *keys = jj_list_new(j, paths->n);
  for (size_t i = 0; i < paths->n; i++)
    jj_push(j, keys, key_of(j, item, paths->items[i], JJ_NO_VALUE, case_sensitive));
  return JJ_OF_LIST(keys);
}

JJ_NATIVE(filter_sort) {
  JJ_UNUSED;
  jj_list *items = jj_to_list(j, self);
  jj_value *keys = jj_alloc_n(j, items->n, sizeof *keys);
  for (size_t i = 0; i < items->n; i++)
    keys[i] = multi_key(j, items->items[i], a[2], jj_arg_bool(a[1]));
  jj_sort(j, items->items, keys, items->n, jj_arg_bool(a[0]));
  return JJ_OF_LIST(items);
}

static const jj_dict *need_dict(jj *j, jj_value v) {
  if (v.type != JJ_DICT) jj_raise_type(j, "a mapping", v);
  return v.dict;
}

JJ_NATIVE(filter_dictsort) {
  JJ_UNUSED;
  const jj_dict *dict = need_dict(j, self);
  const jj_str *by = jj_given(a[1]) ? jj_to_str(j, a[1]) : jj_lit(j, "key");
  bool by_value = jj_str_is(by, "value");
  if (!by_value && !jj_str_is(by, "key"))
    jj_raise(j, TD_EFORMAT, "You can only sort by either \"key\" or \"value\"");
  jj_list *items = jj_list_new(j, dict->n);
  jj_value *keys = jj_alloc_n(j, dict->n, sizeof *keys);
  for (size_t i = 0; i < dict->n; i++) {
    const jj_entry *e = &dict->entries[i];
    jj_push(j, items, jj_pair(j, e->key, e->value));
    keys[i] = fold(j, by_value ? e->value : e->key, jj_arg_bool(a[0]));
  }
  jj_sort(j, items->items, keys, items->n, jj_arg_bool(a[2]));
  return JJ_OF_LIST(items);
}

// ---- first, last, extremes, sums ----

JJ_NATIVE(filter_first) {
  JJ_UNUSED;
  jj_value v;
  if (jj_next(j, jj_iterate(j, self), &v)) return v;
  return jj_undefined(j, "No first item, sequence was empty.");
}

// list(reversed(v)), for types that Python can reverse without reading them first.
static jj_list *reversed(jj *j, jj_value v) {
  jj_list *list = jj_to_list(j, v);
  for (size_t i = 0; i < list->n / 2; i++) {
    jj_value other = list->items[list->n - 1 - i];
    list->items[list->n - 1 - i] = list->items[i];
    list->items[i] = other;
  }
  return list;
}

JJ_NATIVE(filter_last) {
  JJ_UNUSED;
  if (!jj_has_len(self))
    jj_raise(j, TD_EFORMAT, "'%s' object is not reversible", jj_type_name(self));
  if (jj_len(j, self) == 0) return jj_undefined(j, "No last item, sequence was empty.");
  if (self.type == JJ_LIST || self.type == JJ_TUPLE) return self.list->items[self.list->n - 1];
  return reversed(j, self)->items[0];
}

JJ_NATIVE(filter_reverse) {
  JJ_UNUSED;
  if (self.type == JJ_STR) return jj_slice(j, self, JJ_NO_VALUE, JJ_NO_VALUE, JJ_OF_INT(-1));
  if (!jj_iterable(self)) jj_raise(j, TD_EFORMAT, "argument must be iterable");
  jj_list *list = reversed(j, self);
  return self.type == JJ_ITER ? JJ_OF_LIST(list) : jj_generator(j, list);
}

static jj_value extreme(jj *j, jj_value self, const jj_value *a, jj_op better) {
  jj_list *items = jj_to_list(j, self);
  if (!items->n) return jj_undefined(j, "No aggregated item, sequence was empty.");
  bool case_sensitive = jj_arg_bool(a[0]);
  size_t best = 0;
  jj_value best_key = key_of(j, items->items[0], a[1], JJ_NO_VALUE, case_sensitive);
  for (size_t i = 1; i < items->n; i++) {
    jj_value key = key_of(j, items->items[i], a[1], JJ_NO_VALUE, case_sensitive);
    if (!jj_order(j, better, key, best_key)) continue;
    best = i;
    best_key = key;
  }
  return items->items[best];
}

JJ_NATIVE_OF(filter_min, extreme(j, self, a, OP_LT))
JJ_NATIVE_OF(filter_max, extreme(j, self, a, OP_GT))

JJ_NATIVE(filter_sum) {
  JJ_UNUSED;
  jj_value total = jj_given(a[1]) ? a[1] : JJ_OF_INT(0);
  if (total.type == JJ_STR)
    jj_raise(j, TD_EFORMAT, "sum() can't sum strings [use ''.join(seq) instead]");
  jj_iter *it = jj_iterate(j, self);
  jj_value v;
  while (jj_next(j, it, &v))
    total = jj_binary(j, OP_ADD, total, jj_get_path(j, v, a[0], JJ_NO_VALUE));
  return total;
}

JJ_NATIVE_OF(filter_length, JJ_OF_INT(jj_len(j, self)))

// ---- shaping ----

JJ_NATIVE_OF(filter_list, JJ_OF_LIST(jj_to_list(j, self)))

JJ_NATIVE(filter_items) {
  JJ_UNUSED;
  if (self.type == JJ_UNDEF) return jj_generator(j, jj_list_new(j, 0));
  if (self.type != JJ_DICT) jj_raise(j, TD_EFORMAT, "Can only get item pairs from a mapping.");
  jj_view view = {.kind = JJ_ITEMS, .dict = self.dict};
  return jj_generator(j, jj_to_list(j, (jj_value){.type = JJ_VIEW, .view = &view}));
}

JJ_NATIVE(filter_join) {
  JJ_UNUSED;
  const jj_str *separator = jj_given(a[0]) ? jj_to_str(j, a[0]) : jj_lit(j, "");
  jj_builder b;
  jj_build(&b, j);
  jj_iter *it = jj_iterate(j, self);
  jj_value v;
  for (bool more = false; jj_next(j, it, &v); more = true) {
    if (more) jj_add_str(&b, separator);
    jj_add_value(&b, jj_get_path(j, v, a[1], JJ_NO_VALUE));
  }
  return JJ_OF_STR(jj_built(&b));
}

JJ_NATIVE(filter_unique) {
  JJ_UNUSED;
  jj_dict *seen = jj_dict_new(j);
  jj_list *out = jj_list_new(j, 8);
  jj_iter *it = jj_iterate(j, self);
  jj_value v;
  while (jj_next(j, it, &v)) {
    jj_value key = key_of(j, v, a[1], JJ_NO_VALUE, jj_arg_bool(a[0]));
    if (jj_dict_get(j, seen, key)) continue;
    jj_dict_set(j, seen, key, JJ_NONE_VALUE);
    jj_push(j, out, v);
  }
  return jj_generator(j, out);
}

JJ_NATIVE(filter_default) {
  JJ_UNUSED;
  bool missing = self.type == JJ_UNDEF || (jj_arg_bool(a[1]) && !jj_truth(self));
  if (!missing) return self;
  return jj_given(a[0]) ? a[0] : jj_text(j, "");
}

JJ_NATIVE(filter_attr) {
  JJ_UNUSED;
  const jj_str *name = jj_to_str(j, a[0]);
  jj_value v = jj_getattr_only(j, self, name);
  return v.type == JJ_MISSING ? jj_undefined_attr(j, self, JJ_OF_STR(name)) : v;
}

// ---- map, select, reject ----

static jj_args behind(const jj_args *args, size_t n) {
  jj_args rest = *args;
  rest.pos += n;
  rest.n_pos -= n;
  return rest;
}

static const jj_kwarg *keyword(const jj_args *args, const char *name) {
  for (size_t i = 0; i < args->n_kw; i++)
    if (jj_str_is(args->kw[i].name, name)) return &args->kw[i];
  return NULL;
}

static void unknown(jj *j, const char *kind, jj_value name) {
  const jj_str *s = jj_to_str(j, name);
  jj_raise(j, TD_EFORMAT, "No %s named '%.*s'.", kind, jj_clip(s), s->p);
}

static jj_value map_attribute(jj *j, jj_iter *it, const jj_args *args) {
  const jj_kwarg *fallback = keyword(args, "default");
  if (args->n_kw > 1u + (fallback != NULL))
    jj_raise(j, TD_EFORMAT, "Unexpected keyword argument in map");
  bool given = fallback && jj_given_value(fallback->value);
  jj_list *out = jj_list_new(j, 8);
  jj_value v;
  while (jj_next(j, it, &v)) {
    jj_push(j, out,
            jj_get_path(j, v, keyword(args, "attribute")->value,
                        given ? fallback->value : JJ_NO_VALUE));
  }
  return jj_generator(j, out);
}

JJ_NATIVE(filter_map) {
  JJ_UNUSED;
  jj_list *out = jj_list_new(j, 8);
  if (!jj_truth(self)) return jj_generator(j, out);
  jj_iter *it = jj_iterate(j, self);
  if (!raw->n_pos && keyword(raw, "attribute")) return map_attribute(j, it, raw);
  if (!raw->n_pos) jj_raise(j, TD_EFORMAT, "map requires a filter argument");
  const jj_native *filter = raw->pos[0].type == JJ_STR ? jj_filter_find(raw->pos[0].s) : NULL;
  if (!filter) unknown(j, "filter", raw->pos[0]);
  jj_args rest = behind(raw, 1);
  jj_value v;
  while (jj_next(j, it, &v))
    jj_push(j, out, jj_native_call(j, filter, v, &rest));
  return jj_generator(j, out);
}

// raw arguments: [attribute] [test [arguments...]]
static jj_value choose(jj *j, jj_value self, const jj_args *raw, bool by_attribute, bool wanted) {
  jj_list *out = jj_list_new(j, 8);
  if (!jj_truth(self)) return jj_generator(j, out);
  if (by_attribute && !raw->n_pos) jj_raise(j, TD_EFORMAT, "Missing parameter for attribute name");
  jj_value path = by_attribute ? raw->pos[0] : JJ_NO_VALUE;
  jj_args rest = behind(raw, by_attribute);
  const jj_native *test = NULL;
  if (rest.n_pos) {
    test = rest.pos[0].type == JJ_STR ? jj_test_find(rest.pos[0].s) : NULL;
    if (!test) unknown(j, "test", rest.pos[0]);
    rest = behind(&rest, 1);
  }
  jj_iter *it = jj_iterate(j, self);
  jj_value v;
  while (jj_next(j, it, &v)) {
    jj_value subject = jj_get_path(j, v, path, JJ_NO_VALUE);
    if (test) subject = jj_native_call(j, test, subject, &rest);
    if (jj_truth(subject) == wanted) jj_push(j, out, v);
  }
  return jj_generator(j, out);
}

JJ_NATIVE_OF(filter_select, choose(j, self, raw, false, true))
JJ_NATIVE_OF(filter_reject, choose(j, self, raw, false, false))
JJ_NATIVE_OF(filter_selectattr, choose(j, self, raw, true, true))
JJ_NATIVE_OF(filter_rejectattr, choose(j, self, raw, true, false))

const jj_native jj_seq_filters[] = {
    {"length", "", filter_length},
    {"count", "", filter_length},
    {"default", "|default_value,boolean", filter_default},
    {"d", "|default_value,boolean", filter_default},
    {"join", "|d,attribute", filter_join},
    {"items", "", filter_items},
    {"list", "", filter_list},
    {"first", "", filter_first},
    {"last", "", filter_last},
    {"reverse", "", filter_reverse},
    {"map", NULL, filter_map},
    {"select", NULL, filter_select},
    {"reject", NULL, filter_reject},
    {"selectattr", NULL, filter_selectattr},
    {"rejectattr", NULL, filter_rejectattr},
    {"sort", "|reverse,case_sensitive,attribute", filter_sort},
    {"dictsort", "|case_sensitive,by,reverse", filter_dictsort},
    {"unique", "|case_sensitive,attribute", filter_unique},
    {"min", "|case_sensitive,attribute", filter_min},
    {"max", "|case_sensitive,attribute", filter_max},
    {"sum", "|attribute,start", filter_sum},
    {"attr", "name", filter_attr},
    {NULL, NULL, NULL},
};
