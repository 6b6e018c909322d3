// src/text/jinja/dict.c - dictionaries: insertion order, key equality as in Python (1 == 1.0 ==
// True).
#include <math.h>
#include <string.h>

#include "text/jinja/jinja.h"

#define LINEAR_ENTRIES 8

static bool is_mutable(jj_value v) {
  return v.type == JJ_LIST || v.type == JJ_DICT || v.type == JJ_VIEW;
}

bool jj_hashable(jj *j, jj_value v) {
  if (v.type != JJ_TUPLE) return !is_mutable(v);
  jj_enter(j);
  jj_steps(j, v.list->n);
  bool hashable = true;
  for (size_t i = 0; hashable && i < v.list->n; i++)
    hashable = jj_hashable(j, v.list->items[i]);
  jj_leave(j);
  return hashable;
}

static uint64_t mix(uint64_t h) {
  h ^= h >> 33;
  h *= 0xFF51AFD7ED558CCDu;
  h ^= h >> 33;
  return h;
}

static uint64_t hash_bytes(const char *p, size_t len) {
  uint64_t h = 0xCBF29CE484222325u;
  for (size_t i = 0; i < len; i++)
    h = (h ^ (unsigned char)p[i]) * 0x100000001B3u;
  return mix(h);
}

static uint64_t hash_value(jj *j, jj_value v) {
  int64_t i;
  if (is_mutable(v)) jj_raise(j, TD_EFORMAT, "unhashable type: '%s'", jj_type_name(v));
  if (jj_as_int(v, &i)) return mix((uint64_t)i);
  if (v.type == JJ_FLOAT) {
    if (v.f == floor(v.f) && fabs(v.f) < 9e18) return mix((uint64_t)(int64_t)v.f);
    uint64_t bits;
    memcpy(&bits, &v.f, sizeof bits);
    return mix(bits);
  }
  if (v.type == JJ_STR || v.type == JJ_BIG) {
    jj_steps(j, v.s->len >> 6);
    return hash_bytes(v.s->p, v.s->len);
  }
  if (v.type == JJ_TUPLE) {
    uint64_t h = v.list->n;
    jj_enter(j);
    jj_steps(j, v.list->n);
    for (size_t k = 0; k < v.list->n; k++)
      h = mix(h * 31 + hash_value(j, v.list->items[k]));
    jj_leave(j);
    return h;
  }
  return (uint64_t)v.type; // none, undefined and objects, which are rarely used as keys
}

jj_dict *jj_dict_new(jj *j) {
  return jj_alloc(j, sizeof(jj_dict));
}

static bool entry_is(jj *j, const jj_entry *e, jj_value key, uint64_t hash) {
  return e->hash == hash && jj_equal(j, e->key, key);
}

static jj_entry *find(jj *j, const jj_dict *dict, jj_value key, uint64_t hash) {
  if (!dict->index) {
    for (size_t i = 0; i < dict->n; i++)
      if (entry_is(j, &dict->entries[i], key, hash)) return &dict->entries[i];
    return NULL;
  }
  for (size_t at = hash & (dict->index_cap - 1); dict->index[at];
       at = (at + 1) & (dict->index_cap - 1)) {
    jj_entry *e = &dict->entries[dict->index[at] - 1];
    if (entry_is(j, e, key, hash)) return e;
    jj_steps(j, 1);
  }
  return NULL;
}

static void index_entry(jj_dict *dict, size_t entry) {
  size_t at = dict->entries[entry].hash & (dict->index_cap - 1);
  while (dict->index[at])
    at = (at + 1) & (dict->index_cap - 1);
  dict->index[at] = (uint32_t)entry + 1;
}

void jj_dict_set(jj *j, jj_dict *dict, jj_value key, jj_value value) {
  uint64_t hash = hash_value(j, key);
  jj_entry *e = find(j, dict, key, hash);
  if (e) {
    e->value = value;
    return;
  }
  dict->entries = jj_grow(j, dict->entries, dict->n, &dict->cap, sizeof *dict->entries);
  dict->entries[dict->n++] = (jj_entry){.key = key, .value = value, .hash = hash};
  if (dict->n <= LINEAR_ENTRIES) return;
  if (!dict->index || dict->n * 2 > dict->index_cap) {
    dict->index_cap = dict->index_cap ? dict->index_cap * 2 : 32;
    dict->index = jj_alloc_n(j, dict->index_cap, sizeof *dict->index);
    for (size_t i = 0; i < dict->n; i++)
      index_entry(dict, i);
  } else {
    index_entry(dict, dict->n - 1);
  }
}

const jj_value *jj_dict_get(jj *j, const jj_dict *dict, jj_value key) {
  jj_entry *e = find(j, dict, key, hash_value(j, key));
  return e ? &e->value : NULL;
}

const jj_value *jj_dict_get_str(jj *j, const jj_dict *dict, const jj_str *key) {
  return jj_dict_get(j, dict, JJ_OF_STR(key));
}
