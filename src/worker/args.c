// src/worker/args.c - formatting and parsing a worker's command line.
#include "worker/args.h"

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"

typedef struct {
  const char *key;
  size_t offset; // of the uint32_t or enum in td_worker_opts
  int64_t least, most;
} number;

_Static_assert(sizeof(td_dtype) == sizeof(uint32_t), "enums are read and written as uint32_t");

static const number numbers[] = {
#define X(type, field, option, least, most, in_kv)                                                 \
  {option, offsetof(td_worker_opts, runtime.field), least, most},
    TD_RUNTIME_NUMBERS(X)
#undef X
#define X(field, key, least, most) {key, offsetof(td_worker_opts, field), least, most},
        TD_WORKER_NUMBERS(X)
#undef X
};

static const struct {
  const char *key;
  size_t offset; // of the const char * in td_worker_opts
} texts[] = {
#define X(field, option) {option, offsetof(td_worker_opts, runtime.field)},
    TD_RUNTIME_TEXTS(X)
#undef X
};

const char *td_worker_role_name(uint32_t role) {
  static const char *const names[] = {
#define X(id, name) name,
      TD_WORKER_ROLES(X)
#undef X
  };
  return role < TD_COUNT(names) ? names[role] : "";
}

#define FIRST_NUMBER (2 + TD_COUNT(texts)) // after the program and "worker"
#define N_ARGS       (FIRST_NUMBER + TD_COUNT(numbers))

// The value of "key=value" if arg has that key, else NULL.
static const char *value_of(const char *arg, const char *key) {
  size_t len = strlen(key);
  return strncmp(arg, key, len) == 0 && arg[len] == '=' ? arg + len + 1 : NULL;
}

static td_status parse_number(td_worker_opts *out, const number *n, const char *text, td_err *err) {
  char *end;
  errno = 0;
  long long value = strtoll(text, &end, 10);
  if (end == text || *end || errno || value < n->least || value > n->most) {
    return td_fail(err, TD_EINVAL, "worker: %s=%s: give a whole number from %lld to %lld", n->key,
                   text, (long long)n->least, (long long)n->most);
  }
  memcpy((char *)out + n->offset, &(uint32_t){(uint32_t)value}, sizeof(uint32_t));
  return TD_OK;
}

static bool take_text(td_worker_opts *out, const char *arg) {
  for (size_t k = 0; k < TD_COUNT(texts); k++) {
    const char *text = value_of(arg, texts[k].key);
    if (text) *(const char **)((char *)out + texts[k].offset) = text;
    if (text) return true;
  }
  return false;
}

static bool has_texts(const td_worker_opts *opts) {
  for (size_t k = 0; k < TD_COUNT(texts); k++)
    if (!*(const char *const *)((const char *)opts + texts[k].offset)) return false;
  return true;
}

td_status td_worker_args_parse(td_worker_opts *out, int argc, char **argv, td_err *err) {
  *out = (td_worker_opts){0};
  uint32_t given = 0; // bit i: number i
  for (int i = 2; i < argc; i++) {
    if (take_text(out, argv[i])) continue;
    size_t k = 0;
    const char *text = NULL;
    while (k < TD_COUNT(numbers) && !(text = value_of(argv[i], numbers[k].key)))
      k++;
    if (!text) return td_fail(err, TD_EINVAL, "worker: unknown argument \"%s\"", argv[i]);
    td_status st = parse_number(out, &numbers[k], text, err);
    if (st != TD_OK) return st;
    given |= 1u << k;
  }
  if (!has_texts(out) || given != (1u << TD_COUNT(numbers)) - 1) {
    return td_fail(err, TD_EINVAL,
                   "worker: arguments are missing; this command is for tandem serve alone");
  }
  return TD_OK;
}

td_status td_worker_args_format(td_worker_argv *out, const td_worker_opts *opts, td_err *err) {
  *out = (td_worker_argv){.argv = calloc(N_ARGS + 1, sizeof(char *))};
  if (!out->argv) return td_fail(err, TD_ENOMEM, "out of memory");
  for (size_t i = 0; i < N_ARGS; i++) {
    td_buf text = TD_BUF_INIT;
    if (i == 0) {
      td_buf_str(&text, "tandem");
    } else if (i == 1) {
      td_buf_str(&text, "worker");
    } else if (i < FIRST_NUMBER) {
      size_t offset = texts[i - 2].offset;
      td_buf_printf(&text, "%s=%s", texts[i - 2].key,
                    *(const char *const *)((const char *)opts + offset));
    } else {
      const number *n = &numbers[i - FIRST_NUMBER];
      uint32_t value;
      memcpy(&value, (const char *)opts + n->offset, sizeof value);
      td_buf_printf(&text, "%s=%u", n->key, value);
    }
    out->argv[out->argc++] = text.data; // owned from here
    td_status st = td_buf_status(&text, err);
    if (st != TD_OK) return st;
  }
  return TD_OK;
}

void td_worker_argv_free(td_worker_argv *args) {
  for (int i = 0; i < args->argc; i++)
    free(args->argv[i]);
  free(args->argv);
  *args = (td_worker_argv){0};
}
