// src/text/jinja/globals.c - global functions: jinja2's own and the two that transformers adds.
#include <stdio.h>
#include <time.h>

#include "text/jinja/native.h"

#define MAX_RANGE 100000 // limit of jinja2's sandbox

JJ_NATIVE(global_range) {
  JJ_UNUSED;
  bool one = !jj_given(a[1]);
  int64_t start = one ? 0 : jj_arg_int(j, a[0], 0), stop = jj_arg_int(j, a[one ? 0 : 1], 0);
  int64_t step = jj_arg_int(j, a[2], 1);
  if (step == 0) jj_raise(j, TD_EFORMAT, "range() arg 3 must not be zero");
  jj_range *range = jj_alloc(j, sizeof *range);
  *range = (jj_range){.start = start, .stop = stop, .step = step};
  uint64_t n = 0;
  if (step > 0 && start < stop) n = ((uint64_t)stop - (uint64_t)start - 1) / (uint64_t)step + 1;
  if (step < 0 && start > stop) n = ((uint64_t)start - (uint64_t)stop - 1) / -(uint64_t)step + 1;
  if (n > MAX_RANGE) {
    jj_raise(j, TD_ELIMIT, "Range too big. The sandbox blocks ranges larger than MAX_RANGE (%d).",
             MAX_RANGE);
  }
  range->n = (int64_t)n;
  return (jj_value){.type = JJ_RANGE, .range = range};
}

// dict(mapping or pairs, **more); shared by dict() and namespace().
static jj_dict *build_dict(jj *j, const char *name, const jj_args *raw) {
  jj_dict *dict = jj_dict_new(j);
  if (raw->n_pos > 1)
    jj_raise(j, TD_EFORMAT, "%s expected at most 1 argument, got %zu", name, raw->n_pos);
  if (raw->n_pos && raw->pos[0].type == JJ_DICT) {
    const jj_dict *from = raw->pos[0].dict;
    for (size_t i = 0; i < from->n; i++)
      jj_dict_set(j, dict, from->entries[i].key, from->entries[i].value);
  } else if (raw->n_pos) {
    jj_iter *it = jj_iterate(j, raw->pos[0]);
    jj_value pair;
    while (jj_next(j, it, &pair)) {
      jj_list *two = jj_to_list(j, pair);
      if (two->n != 2) {
        jj_raise(j, TD_EFORMAT, "dictionary update sequence element has length %zu; 2 is required",
                 two->n);
      }
      jj_dict_set(j, dict, two->items[0], two->items[1]);
    }
  }
  for (size_t i = 0; i < raw->n_kw; i++)
    jj_dict_set(j, dict, JJ_OF_STR(raw->kw[i].name), raw->kw[i].value);
  return dict;
}

JJ_NATIVE_OF(global_dict, JJ_OF_DICT(build_dict(j, "dict", raw)))

JJ_NATIVE(global_namespace) {
  JJ_UNUSED;
  jj_dict *dict = build_dict(j, "namespace", raw);
  for (size_t i = 0; i < dict->n; i++) {
    jj_value name = dict->entries[i].key;
    if (name.type == JJ_STR && name.s->len && name.s->p[0] == '_')
      jj_raise(j, TD_EFORMAT, "namespace attributes cannot begin with an underscore");
  }
  return (jj_value){.type = JJ_NAMESPACE, .dict = dict};
}

// A template rejects a conversation with raise_exception: a client error, with the template's
// message.
JJ_NATIVE(global_raise_exception) {
  JJ_UNUSED;
  const jj_str *message = jj_to_str(j, a[0]);
  size_t len = message->len < TD_ERR_BYTES ? message->len : TD_ERR_BYTES;
  jj_raise(j, TD_EINVAL, "%.*s", (int)len, message->p);
}

// Expands %f, which is Python's own, and drops zone codes, since a naive datetime has no zone.
static const jj_str *expand_python_codes(jj *j, const jj_str *format, int64_t micros) {
  jj_builder b;
  jj_build(&b, j);
  for (size_t i = 0; i < format->len; i++) {
    char code = format->p[i] == '%' && i + 1 < format->len ? format->p[i + 1] : 0;
    if (code == 'f')
      jj_addf(&b, "%06d", (int)micros);
    else if (code && code != 'z' && code != 'Z')
      jj_add_range(&b, format, i, i + 2);
    else if (!code)
      jj_add_range(&b, format, i, i + 1);
    i += code != 0;
  }
  return jj_built(&b);
}

JJ_NATIVE(global_strftime_now) {
  JJ_UNUSED;
  const jj_str *format = jj_arg_str(j, a[0]);
  if (!format) jj_raise_type(j, "a string", a[0]);
  struct timespec now = {.tv_sec = (time_t)(j->now_us / 1000000),
                         .tv_nsec = (long)(j->now_us % 1000000) * 1000};
  if (j->now_us == 0) clock_gettime(CLOCK_REALTIME, &now);
  struct tm local;
  localtime_r(&now.tv_sec, &local);
  const jj_str *plain = expand_python_codes(j, format, now.tv_nsec / 1000);
  char c_format[256], text[1024];
  if (plain->len >= sizeof c_format - 1) jj_raise(j, TD_ELIMIT, "strftime format too long");
  // The extra character distinguishes an empty result from one that did not fit.
  snprintf(c_format, sizeof c_format, "%.*s.", (int)plain->len, plain->p);
  size_t n = strftime(text, sizeof text, c_format, &local);
  if (!n) jj_raise(j, TD_ELIMIT, "strftime result too long");
  return JJ_OF_STR(jj_str_new(j, text, n - 1));
}

const jj_native jj_globals[] = {
    {"range", "/start|stop,step", global_range},
    {"dict", NULL, global_dict},
    {"namespace", NULL, global_namespace},
    {"raise_exception", "message", global_raise_exception},
    {"strftime_now", "format", global_strftime_now},
    {NULL, NULL, NULL},
};
