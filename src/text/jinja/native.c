// src/text/jinja/native.c - calls: matches arguments to a native signature and dispatches on the
// callee.
#include "text/jinja/native.h"

#include <string.h>

const jj_native *jj_native_find(const jj_native *table, const jj_str *name) {
  for (; table->name; table++)
    if (jj_str_is(name, table->name)) return table;
  return NULL;
}

const jj_native *jj_filter_find(const jj_str *name) {
  const jj_native *found = jj_native_find(jj_str_filters, name);
  if (!found) found = jj_native_find(jj_seq_filters, name);
  return found ? found : jj_native_find(jj_num_filters, name);
}

const jj_native *jj_test_find(const jj_str *name) {
  return jj_native_find(jj_tests, name);
}

void jj_raise_type(jj *j, const char *expected, jj_value got) {
  if (got.type == JJ_UNDEF) jj_raise_undefined(j, got);
  jj_raise(j, TD_EFORMAT, "%s is required, not '%s'", expected, jj_type_name(got));
}

bool jj_arg_bool(jj_value v) {
  return jj_given(v) && jj_truth(v);
}

int64_t jj_arg_int(jj *j, jj_value v, int64_t otherwise) {
  int64_t i;
  if (!jj_given(v)) return otherwise;
  if (!jj_as_int(v, &i)) jj_raise_type(j, "an integer", v);
  return i;
}

const jj_str *jj_arg_str(jj *j, jj_value v) {
  if (!jj_given_value(v)) return NULL;
  if (v.type != JJ_STR) jj_raise_type(j, "a string", v);
  return v.s;
}

// ---- signatures ----

typedef struct {
  const char *names[JJ_MAX_PARAMS];
  size_t lens[JJ_MAX_PARAMS];
  size_t n, n_required;
  bool positional_only;
} signature;

static signature parse_signature(const char *text) {
  signature sig = {0};
  bool optional = false;
  if (*text == '/') sig.positional_only = true, text++;
  if (*text == '|') optional = true, text++;
  while (*text) {
    size_t len = strcspn(text, ",|");
    TD_CHECK(sig.n < JJ_MAX_PARAMS);
    sig.names[sig.n] = text;
    sig.lens[sig.n++] = len;
    sig.n_required += !optional;
    if (text[len] == '|') optional = true;
    text += len + (text[len] != '\0');
  }
  return sig;
}

static void bind_keyword(jj *j, const char *name, const signature *sig, const jj_kwarg *kw,
                         jj_value *out) {
  for (size_t i = 0; i < sig->n && !sig->positional_only; i++) {
    if (sig->lens[i] != kw->name->len || memcmp(sig->names[i], kw->name->p, kw->name->len) != 0)
      continue;
    if (jj_given(out[i])) {
      jj_raise(j, TD_EFORMAT, "%s() got multiple values for argument '%.*s'", name,
               (int)sig->lens[i], sig->names[i]);
    }
    out[i] = kw->value;
    return;
  }
  jj_raise(j, TD_EFORMAT, "%s() got an unexpected keyword argument '%.*s'", name, jj_clip(kw->name),
           kw->name->p);
}

jj_value jj_native_call(jj *j, const jj_native *native, jj_value self, const jj_args *args) {
  jj_value bound[JJ_MAX_PARAMS] = {{0}}; // JJ_MISSING is 0
  jj_steps(j, 1);
  if (native->sig) {
    signature sig = parse_signature(native->sig);
    if (args->n_pos > sig.n) {
      jj_raise(j, TD_EFORMAT, "%s() takes at most %zu arguments (%zu given)", native->name, sig.n,
               args->n_pos);
    }
    if (args->n_pos) memcpy(bound, args->pos, args->n_pos * sizeof *bound);
    for (size_t i = 0; i < args->n_kw; i++)
      bind_keyword(j, native->name, &sig, &args->kw[i], bound);
    for (size_t i = 0; i < sig.n_required; i++) {
      if (!jj_given(bound[i])) {
        jj_raise(j, TD_EFORMAT, "%s() missing required argument: '%.*s'", native->name,
                 (int)sig.lens[i], sig.names[i]);
      }
    }
  }
  jj_enter(j);
  jj_value result = native->fn(j, self, bound, args);
  jj_leave(j);
  return result;
}

jj_value jj_call(jj *j, jj_value callee, const jj_args *args) {
  switch (callee.type) {
  case JJ_NATIVE: return jj_native_call(j, callee.native->native, callee.native->self, args);
  case JJ_MACRO: return jj_macro_call(j, callee.macro, args);
  case JJ_UNDEF: jj_raise_undefined(j, callee);
  default: jj_raise(j, TD_EFORMAT, "'%s' object is not callable", jj_type_name(callee));
  }
}
