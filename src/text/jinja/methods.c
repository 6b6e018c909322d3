// src/text/jinja/methods.c - methods of Python's str, dict, list and tuple. Mutating methods do not
// exist, because the sandbox hides them (operators.c).
#include <string.h>

#include "text/jinja/native.h"
#include "text/unicode/python_chars.h"

static const jj_str *need_str(jj *j, jj_value v) {
  if (v.type != JJ_STR) jj_raise_type(j, "a string", v);
  return v.s;
}

// ---- case, stripping ----

JJ_NATIVE_OF(str_lower, JJ_OF_STR(jj_recase(j, self.s, JJ_LOWER)))
JJ_NATIVE_OF(str_upper, JJ_OF_STR(jj_recase(j, self.s, JJ_UPPER)))
JJ_NATIVE_OF(str_title, JJ_OF_STR(jj_recase(j, self.s, JJ_TITLE)))
JJ_NATIVE_OF(str_capitalize, JJ_OF_STR(jj_recase(j, self.s, JJ_CAPITALIZE)))
JJ_NATIVE_OF(str_strip, JJ_OF_STR(jj_strip(j, self.s, jj_arg_str(j, a[0]), true, true)))
JJ_NATIVE_OF(str_lstrip, JJ_OF_STR(jj_strip(j, self.s, jj_arg_str(j, a[0]), true, false)))
JJ_NATIVE_OF(str_rstrip, JJ_OF_STR(jj_strip(j, self.s, jj_arg_str(j, a[0]), false, true)))

// ---- splitting and joining ----

JJ_NATIVE_OF(str_split,
             JJ_OF_LIST(jj_split(j, self.s, jj_arg_str(j, a[0]), jj_arg_int(j, a[1], -1), false)))
JJ_NATIVE_OF(str_rsplit,
             JJ_OF_LIST(jj_split(j, self.s, jj_arg_str(j, a[0]), jj_arg_int(j, a[1], -1), true)))
JJ_NATIVE_OF(str_splitlines, JJ_OF_LIST(jj_splitlines(j, self.s, jj_arg_bool(a[0]))))

static jj_value partition(jj *j, jj_value self, jj_value separator, bool from_right) {
  const jj_str *s = self.s, *sep = need_str(j, separator);
  if (!sep->len) jj_raise(j, TD_EFORMAT, "empty separator");
  size_t at = (from_right ? jj_rfind : jj_find)(j, s, sep, 0, s->len);
  jj_list *three = jj_list_new(j, 3);
  bool hit = at != SIZE_MAX;
  size_t head = hit ? at : from_right ? 0 : s->len, tail = hit ? at + sep->len : head;
  jj_push(j, three, JJ_OF_STR(jj_sub(j, s, 0, head)));
  jj_push(j, three, JJ_OF_STR(jj_sub(j, s, head, tail)));
  jj_push(j, three, JJ_OF_STR(jj_sub(j, s, tail, s->len)));
  return JJ_OF_TUPLE(three);
}

JJ_NATIVE_OF(str_partition, partition(j, self, a[0], false))
JJ_NATIVE_OF(str_rpartition, partition(j, self, a[0], true))

JJ_NATIVE(str_join) {
  JJ_UNUSED;
  jj_builder b;
  jj_build(&b, j);
  jj_iter *it = jj_iterate(j, a[0]);
  jj_value v;
  for (size_t i = 0; jj_next(j, it, &v); i++) {
    if (v.type != JJ_STR) {
      jj_raise(j, TD_EFORMAT, "sequence item %zu: expected str instance, %s found", i,
               jj_type_name(v));
    }
    if (i) jj_add_str(&b, self.s);
    jj_add_str(&b, v.s);
  }
  return JJ_OF_STR(jj_built(&b));
}

JJ_NATIVE(str_replace) {
  JJ_UNUSED;
  int64_t max = jj_arg_int(j, a[2], -1);
  return JJ_OF_STR(jj_replace(j, self.s, need_str(j, a[0]), need_str(j, a[1]), max));
}

JJ_NATIVE(str_removeprefix) {
  JJ_UNUSED;
  const jj_str *s = self.s, *prefix = need_str(j, a[0]);
  bool has = s->len >= prefix->len && memcmp(s->p, prefix->p, prefix->len) == 0;
  return JJ_OF_STR(has ? jj_sub(j, s, prefix->len, s->len) : s);
}

JJ_NATIVE(str_removesuffix) {
  JJ_UNUSED;
  const jj_str *s = self.s, *suffix = need_str(j, a[0]);
  bool has = s->len >= suffix->len && suffix->len &&
             memcmp(s->p + s->len - suffix->len, suffix->p, suffix->len) == 0;
  return JJ_OF_STR(has ? jj_sub(j, s, 0, s->len - suffix->len) : s);
}

JJ_NATIVE_OF(str_format, JJ_OF_STR(jj_format(j, self.s, raw)))

// ---- searching ----

// An optional bound, counted in characters and clamped as in slices.
static size_t bound(jj *j, const jj_str *s, jj_value v, size_t otherwise) {
  if (!jj_given_value(v)) return otherwise;
  int64_t i = jj_arg_int(j, v, 0), n = (int64_t)s->n_chars;
  if (i < 0) i += n;
  if (i > n) return SIZE_MAX; // starts after the end: not even "" is found
  return jj_char_to_byte(j, s, i < 0 ? 0 : (size_t)i);
}

// a: needle, start, end. Returns the byte offset or SIZE_MAX.
static size_t search(jj *j, const jj_str *s, const jj_value *a, bool from_right) {
  size_t begin = bound(j, s, a[1], 0), end = bound(j, s, a[2], s->len);
  if (end == SIZE_MAX) end = s->len;
  const jj_str *what = need_str(j, a[0]);
  if (begin == SIZE_MAX || begin > end) return SIZE_MAX;
  return (from_right ? jj_rfind : jj_find)(j, s, what, begin, end);
}

static jj_value found(const jj_str *s, size_t byte) {
  return JJ_OF_INT(byte == SIZE_MAX ? -1 : (int64_t)jj_byte_to_char(s, byte));
}

JJ_NATIVE_OF(str_find, found(self.s, search(j, self.s, a, false)))
JJ_NATIVE_OF(str_rfind, found(self.s, search(j, self.s, a, true)))

static jj_value must_find(jj *j, jj_value self, const jj_value *a, bool from_right) {
  size_t at = search(j, self.s, a, from_right);
  if (at == SIZE_MAX) jj_raise(j, TD_EFORMAT, "substring not found");
  return found(self.s, at);
}

JJ_NATIVE_OF(str_index, must_find(j, self, a, false))
JJ_NATIVE_OF(str_rindex, must_find(j, self, a, true))

JJ_NATIVE(str_count) {
  JJ_UNUSED;
  const jj_str *what = need_str(j, a[0]);
  size_t at = bound(j, self.s, a[1], 0), end = bound(j, self.s, a[2], self.s->len);
  if (end == SIZE_MAX) end = self.s->len;
  if (at == SIZE_MAX || at > end) return JJ_OF_INT(0);
  if (!what->len) return JJ_OF_INT((int64_t)jj_sub(j, self.s, at, end)->n_chars + 1);
  int64_t n = 0;
  while ((at = jj_find(j, self.s, what, at, end)) != SIZE_MAX) {
    n++;
    at += what->len;
  }
  return JJ_OF_INT(n);
}

static bool affix_matches(jj *j, const jj_str *s, size_t begin, size_t end, jj_value affix,
                          bool at_end) {
  const jj_str *text = need_str(j, affix);
  if (end - begin < text->len) return false;
  const char *where = at_end ? s->p + end - text->len : s->p + begin;
  return memcmp(where, text->p, text->len) == 0;
}

static jj_value has_affix(jj *j, const jj_str *s, const jj_value *a, bool at_end) {
  size_t begin = bound(j, s, a[1], 0), end = bound(j, s, a[2], s->len);
  if (end == SIZE_MAX) end = s->len;
  if (begin == SIZE_MAX || begin > end) return JJ_OF_BOOL(false);
  if (a[0].type != JJ_TUPLE) return JJ_OF_BOOL(affix_matches(j, s, begin, end, a[0], at_end));
  for (size_t i = 0; i < a[0].list->n; i++)
    if (affix_matches(j, s, begin, end, a[0].list->items[i], at_end)) return JJ_OF_BOOL(true);
  return JJ_OF_BOOL(false);
}

JJ_NATIVE_OF(str_startswith, has_affix(j, self.s, a, false))
JJ_NATIVE_OF(str_endswith, has_affix(j, self.s, a, true))

// ---- kinds of characters ----

static bool every(jj *j, const jj_str *s, bool (*test)(uint32_t)) {
  for (size_t i = 0; i < s->len;)
    if (!test(jj_decode(s, i, &i))) return false;
  jj_steps(j, s->len >> 4);
  return true;
}

JJ_NATIVE_OF(str_isdigit, JJ_OF_BOOL(self.s->len &&every(j, self.s, td_pychar_is_digit)))
JJ_NATIVE_OF(str_isspace, JJ_OF_BOOL(self.s->len &&every(j, self.s, td_pychar_is_space)))

const jj_native jj_str_methods[] = {
    {"strip", "/|chars", str_strip},
    {"lstrip", "/|chars", str_lstrip},
    {"rstrip", "/|chars", str_rstrip},
    {"split", "|sep,maxsplit", str_split},
    {"rsplit", "|sep,maxsplit", str_rsplit},
    {"splitlines", "|keepends", str_splitlines},
    {"partition", "/sep", str_partition},
    {"rpartition", "/sep", str_rpartition},
    {"startswith", "/prefix|start,end", str_startswith},
    {"endswith", "/suffix|start,end", str_endswith},
    {"replace", "/old,new|count", str_replace},
    {"join", "/iterable", str_join},
    {"lower", "", str_lower},
    {"upper", "", str_upper},
    {"title", "", str_title},
    {"capitalize", "", str_capitalize},
    {"find", "/sub|start,end", str_find},
    {"rfind", "/sub|start,end", str_rfind},
    {"index", "/sub|start,end", str_index},
    {"rindex", "/sub|start,end", str_rindex},
    {"count", "/sub|start,end", str_count},
    {"format", NULL, str_format},
    {"removeprefix", "/prefix", str_removeprefix},
    {"removesuffix", "/suffix", str_removesuffix},
    {"isdigit", "", str_isdigit},
    {"isspace", "", str_isspace},
    {NULL, NULL, NULL},
};

// ---- dict ----

JJ_NATIVE(dict_get) {
  JJ_UNUSED;
  const jj_value *v = jj_dict_get(j, self.dict, a[0]);
  return v ? *v : jj_given(a[1]) ? a[1] : JJ_NONE_VALUE;
}

static jj_value view(jj *j, jj_value self, jj_view_kind kind) {
  jj_view *v = jj_alloc(j, sizeof *v);
  *v = (jj_view){.kind = kind, .dict = self.dict};
  return (jj_value){.type = JJ_VIEW, .view = v};
}

JJ_NATIVE_OF(dict_keys, view(j, self, JJ_KEYS))
JJ_NATIVE_OF(dict_values, view(j, self, JJ_VALUES))
JJ_NATIVE_OF(dict_items, view(j, self, JJ_ITEMS))

JJ_NATIVE(dict_copy) {
  JJ_UNUSED;
  jj_dict *copy = jj_dict_new(j);
  for (size_t i = 0; i < self.dict->n; i++)
    jj_dict_set(j, copy, self.dict->entries[i].key, self.dict->entries[i].value);
  return JJ_OF_DICT(copy);
}

const jj_native jj_dict_methods[] = {
    {"get", "/key|default", dict_get}, {"items", "", dict_items}, {"keys", "", dict_keys},
    {"values", "", dict_values},       {"copy", "", dict_copy},   {NULL, NULL, NULL},
};

// ---- list and tuple ----

JJ_NATIVE(list_index) {
  JJ_UNUSED;
  size_t n = self.list->n;
  int64_t begin = jj_arg_int(j, a[1], 0), end = jj_arg_int(j, a[2], (int64_t)n);
  if (begin < 0) begin = begin + (int64_t)n < 0 ? 0 : begin + (int64_t)n;
  if (end < 0) end += (int64_t)n;
  for (int64_t i = begin; i < end && i < (int64_t)n; i++)
    if (jj_equal(j, self.list->items[i], a[0])) return JJ_OF_INT(i);
  jj_raise(j, TD_EFORMAT, "value is not in %s", jj_type_name(self));
}

JJ_NATIVE(list_count) {
  JJ_UNUSED;
  int64_t n = 0;
  for (size_t i = 0; i < self.list->n; i++)
    n += jj_equal(j, self.list->items[i], a[0]);
  return JJ_OF_INT(n);
}

JJ_NATIVE_OF(list_copy, JJ_OF_LIST(jj_to_list(j, self)))

const jj_native jj_list_methods[] = {
    {"index", "/value|start,stop", list_index},
    {"count", "/value", list_count},
    {"copy", "", list_copy},
    {NULL, NULL, NULL},
};

const jj_native jj_tuple_methods[] = {
    {"index", "/value|start,stop", list_index},
    {"count", "/value", list_count},
    {NULL, NULL, NULL},
};
