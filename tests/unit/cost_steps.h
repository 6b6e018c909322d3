// tests/unit/cost_steps.h - what a function costs, as numbers that repeat: the steps that it takes
// and the stack that it needs. The parsers' sources are compiled once more for this program
// (tests/CMakeLists.txt), with a call at each basic block, which is a step. What libraries do
// beside them in proportion to their arguments counts as well, eight bytes or one node a step; the
// linker leads these calls here.
#pragma once

#include <cjson/cJSON.h>
#include <llhttp.h>
#include <malloc.h>
#include <nettle/sha2.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/buf.h"
#include "base/status.h"
#include "unit/testing.h"

static uint64_t n_steps;

void __sanitizer_cov_trace_pc(void);
void __sanitizer_cov_trace_pc(void) {
  n_steps++;
}

// ---- libraries ----------------------------------------------------------------------------------

// A function of this file in the place of a library's: its result is r, and it costs `steps`.
#define COUNTED(type, name, params, args, steps)                                                   \
  type __real_##name params;                                                                       \
  type __wrap_##name params;                                                                       \
  type __wrap_##name params {                                                                      \
    type r = __real_##name args;                                                                   \
    n_steps += 1 + (uint64_t)(steps);                                                              \
    return r;                                                                                      \
  }

static size_t until(const void *begin, const void *end, size_t len) {
  return end ? (size_t)((const char *)end - (const char *)begin) : len;
}

// The length of what two texts begin with alike; strings end at a NUL.
static size_t alike(const void *a, const void *b, size_t most, bool are_strings) {
  const char *x = a, *y = b;
  size_t n = 0;
  while (n < most && x[n] == y[n] && (x[n] || !are_strings))
    n++;
  return n;
}

size_t __real_strlen(const char *s);

COUNTED(size_t, strlen, (const char *s), (s), r / 8)
COUNTED(char *, strdup, (const char *s), (s), __real_strlen(s) / 8)
COUNTED(char *, strndup, (const char *s, size_t n), (s, n), __real_strlen(r) / 8)
COUNTED(char *, strchr, (const char *s, int c), (s, c), until(s, r, r ? 0 : __real_strlen(s)) / 8)
COUNTED(char *, strrchr, (const char *s, int c), (s, c), __real_strlen(s) / 8)
COUNTED(char *, strstr, (const char *s, const char *x), (s, x),
        until(s, r, r ? 0 : __real_strlen(s)) / 8)
COUNTED(size_t, strspn, (const char *s, const char *of), (s, of), r / 8)
COUNTED(size_t, strcspn, (const char *s, const char *of), (s, of), r / 8)
COUNTED(int, strcmp, (const char *a, const char *b), (a, b), alike(a, b, SIZE_MAX, true) / 8)
COUNTED(int, strncmp, (const char *a, const char *b, size_t n), (a, b, n), alike(a, b, n, true) / 8)
COUNTED(int, memcmp, (const void *a, const void *b, size_t n), (a, b, n), alike(a, b, n, false) / 8)
COUNTED(void *, memchr, (const void *s, int c, size_t n), (s, c, n), until(s, r, n) / 8)
COUNTED(void *, memmem, (const void *s, size_t n, const void *x, size_t m), (s, n, x, m),
        until(s, r, n) / 8)
COUNTED(void *, memcpy, (void *to, const void *from, size_t n), (to, from, n), n / 8)
COUNTED(void *, memmove, (void *to, const void *from, size_t n), (to, from, n), n / 8)
COUNTED(void *, memset, (void *to, int c, size_t n), (to, c, n), n / 8)
COUNTED(void *, calloc, (size_t n, size_t each), (n, each), n *each / 8)

void *__real_realloc(void *p, size_t n);
void *__wrap_realloc(void *p, size_t n);
void *__wrap_realloc(void *p, size_t n) {
  n_steps += 1 + malloc_usable_size(p) / 8;
  return __real_realloc(p, n);
}

int __wrap_vsnprintf(char *to, size_t n, const char *format, va_list args);
int __real_vsnprintf(char *to, size_t n, const char *format, va_list args);
int __wrap_vsnprintf(char *to, size_t n, const char *format, va_list args) {
  int r = __real_vsnprintf(to, n, format, args);
  n_steps += 1 + (uint64_t)r / 8;
  return r;
}

int __wrap_snprintf(char *to, size_t n, const char *format, ...);
int __wrap_snprintf(char *to, size_t n, const char *format, ...) {
  va_list args;
  va_start(args, format);
  int r = __wrap_vsnprintf(to, n, format, args);
  va_end(args);
  return r;
}

static size_t nodes(const cJSON *item) {
  size_t n = 0;
  for (const cJSON *child = item ? item->child : NULL; child; child = child->next)
    n += 1 + nodes(child);
  return n;
}

// The members up to the one of the name.
static size_t place(const cJSON *object, const char *name) {
  size_t n = 0;
  for (const cJSON *item = object ? object->child : NULL; item; item = item->next, n++)
    if (item->string && name && strcmp(item->string, name) == 0) break;
  return n;
}

static size_t siblings(const cJSON *list) {
  size_t n = 0;
  for (const cJSON *item = list ? list->child : NULL; item; item = item->next)
    n++;
  return n;
}

COUNTED(cJSON *, cJSON_ParseWithLength, (const char *text, size_t n), (text, n), n)
COUNTED(cJSON *, cJSON_GetObjectItemCaseSensitive, (const cJSON *o, const char *key), (o, key),
        place(o, key))
COUNTED(cJSON_bool, cJSON_HasObjectItem, (const cJSON *o, const char *key), (o, key), place(o, key))
COUNTED(cJSON *, cJSON_DetachItemFromObjectCaseSensitive, (cJSON * o, const char *key), (o, key),
        place(o, key))
COUNTED(int, cJSON_GetArraySize, (const cJSON *list), (list), siblings(list))
COUNTED(cJSON *, cJSON_GetArrayItem, (const cJSON *list, int i), (list, i), i)
COUNTED(cJSON *, cJSON_Duplicate, (const cJSON *item, cJSON_bool all), (item, all),
        all ? nodes(item) : 0)
COUNTED(cJSON_bool, cJSON_Compare, (const cJSON *a, const cJSON *b, cJSON_bool exact),
        (a, b, exact), (a->type == b->type ? nodes(a) : 0))
COUNTED(char *, cJSON_SetValuestring, (cJSON * item, const char *text), (item, text),
        __real_strlen(text) / 8)
COUNTED(cJSON *, cJSON_CreateString, (const char *text), (text), __real_strlen(text) / 8)
COUNTED(cJSON *, cJSON_AddStringToObject, (cJSON * o, const char *key, const char *text),
        (o, key, text), __real_strlen(text) / 8)

COUNTED(llhttp_errno_t, llhttp_execute, (llhttp_t * parser, const char *bytes, size_t n),
        (parser, bytes, n), n)

void __wrap_nettle_sha256_update(struct sha256_ctx *sha, size_t n, const uint8_t *bytes);
void __real_nettle_sha256_update(struct sha256_ctx *sha, size_t n, const uint8_t *bytes);
void __wrap_nettle_sha256_update(struct sha256_ctx *sha, size_t n, const uint8_t *bytes) {
  n_steps += 1 + n;
  __real_nettle_sha256_update(sha, n, bytes);
}

// Patterns are interpreted here, and each item of one that is tried is a step.
static int count_item(pcre2_callout_block *block, void *data) {
  (void)block, (void)data;
  n_steps++;
  return 0;
}

pcre2_code *__wrap_pcre2_compile_8(PCRE2_SPTR pattern, PCRE2_SIZE len, uint32_t options, int *code,
                                   PCRE2_SIZE *at, pcre2_compile_context *context);
pcre2_code *__real_pcre2_compile_8(PCRE2_SPTR pattern, PCRE2_SIZE len, uint32_t options, int *code,
                                   PCRE2_SIZE *at, pcre2_compile_context *context);
pcre2_code *__wrap_pcre2_compile_8(PCRE2_SPTR pattern, PCRE2_SIZE len, uint32_t options, int *code,
                                   PCRE2_SIZE *at, pcre2_compile_context *context) {
  return __real_pcre2_compile_8(pattern, len, options | PCRE2_AUTO_CALLOUT, code, at, context);
}

int __wrap_pcre2_jit_compile_8(pcre2_code *code, uint32_t options);
int __wrap_pcre2_jit_compile_8(pcre2_code *code, uint32_t options) {
  (void)code, (void)options;
  return PCRE2_ERROR_JIT_BADOPTION;
}

int __wrap_pcre2_match_8(const pcre2_code *code, PCRE2_SPTR text, PCRE2_SIZE len, PCRE2_SIZE start,
                         uint32_t options, pcre2_match_data *match, pcre2_match_context *context);
int __real_pcre2_match_8(const pcre2_code *code, PCRE2_SPTR text, PCRE2_SIZE len, PCRE2_SIZE start,
                         uint32_t options, pcre2_match_data *match, pcre2_match_context *context);
int __wrap_pcre2_match_8(const pcre2_code *code, PCRE2_SPTR text, PCRE2_SIZE len, PCRE2_SIZE start,
                         uint32_t options, pcre2_match_data *match, pcre2_match_context *context) {
  pcre2_set_callout(context, count_item, NULL);
  return __real_pcre2_match_8(code, text, len, start, options, match, context);
}

// ---- runs ---------------------------------------------------------------------------------------

typedef struct {
  td_status st;
  uint64_t n_steps;
  size_t stack_bytes;
} cost;

typedef struct {
  td_status (*run)(void *arg);
  void *arg;
  cost cost;
  char *top; // of the stack, where the run began
} cost_job;

static void *run_job(void *arg) {
  cost_job *job = arg;
  char here;
  job->top = &here;
  const uint64_t before = n_steps;
  job->cost.st = job->run(job->arg);
  job->cost.n_steps = n_steps - before;
  return NULL;
}

// Runs on a stack of its own, which begins as zeros: what is none any more was used.
static cost cost_of(td_status (*run)(void *arg), void *arg) {
  enum { STACK = 6 << 20 };
  cost_job job = {.run = run, .arg = arg};
  pthread_t thread;
  pthread_attr_t attr;
  char *stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TD_CHECK(stack != MAP_FAILED && pthread_attr_init(&attr) == 0);
  TD_CHECK(pthread_attr_setstack(&attr, stack, STACK) == 0);
  TD_CHECK(pthread_create(&thread, &attr, run_job, &job) == 0);
  TD_CHECK(pthread_join(thread, NULL) == 0);
  pthread_attr_destroy(&attr);
  const uint64_t *low = (const void *)stack;
  while ((const char *)low < job.top && !*low)
    low++;
  job.cost.stack_bytes = (size_t)(job.top - (const char *)low);
  munmap(stack, STACK);
  return job.cost;
}

#define MAX_GROWTH 2.5
#define MAX_STACK  (64u << 10)

// ---- inputs -------------------------------------------------------------------------------------

// Appends what a pattern describes: <*X*> is X n times, where ^ is how often it was there before,
// and ` one more; a comma that X begins with is left out of the first. Behind it ` is n. ~ is a
// quotation mark.
static void write_pattern(td_buf *out, const char *pattern, size_t n) {
  for (const char *c = pattern; *c;) {
    const char *end = strncmp(c, "<*", 2) == 0 ? strstr(c, "*>") : NULL;
    for (size_t i = 0; end && i < n; i++) {
      for (const char *x = c + 2 + (!i && c[2] == ','); x < end; x++) {
        if (*x == '^' || *x == '`') {
          td_buf_printf(out, "%zu", i + (*x == '`'));
        } else {
          td_buf_char(out, *x == '~' ? '"' : *x);
        }
      }
    }
    if (!end && *c == '`') td_buf_printf(out, "%zu", n);
    if (!end && *c != '`') td_buf_char(out, *c == '~' ? '"' : *c);
    c = end ? end + 2 : c + 1;
  }
}

typedef struct {
  td_buf text;
  unsigned with;          // what the run makes of it
  char why[TD_ERR_BYTES]; // it was refused
} input;

typedef struct {
  const char *name;
  td_status (*run)(void *in);
  unsigned with;
  const char *pattern;
  size_t n;
  td_status st; // of every size
} shape;

static unsigned n_bad;

// Judges what n and twice as much took.
static void judge(const char *name, const cost *once, const cost *twice) {
  const double growth = (double)twice->n_steps / (double)once->n_steps;
  const bool is_dear = growth > MAX_GROWTH;
  const bool is_deep = twice->stack_bytes > MAX_STACK;
  printf("%-44s %10llu %10llu  %.2f  %7zu%s%s\n", name, (unsigned long long)once->n_steps,
         (unsigned long long)twice->n_steps, growth, twice->stack_bytes, is_dear ? "  DEAR" : "",
         is_deep ? "  DEEP" : "");
  n_bad += is_dear || is_deep;
}

static void judge_shape(const shape *s) {
  cost costs[2];
  for (size_t i = 0; i < 2; i++) {
    input in = {.with = s->with};
    write_pattern(&in.text, s->pattern, s->n << i);
    costs[i] = cost_of(s->run, &in);
    if (costs[i].st != s->st) {
      printf("%s of %zu: status %d %s\n", s->name, s->n << i, (int)costs[i].st, in.why);
      n_bad++;
    }
    td_buf_free(&in.text);
  }
  judge(s->name, &costs[0], &costs[1]);
}

static void judge_shapes(const shape *shapes, size_t n) {
  n_bad = 0;
  for (size_t i = 0; i < n; i++)
    judge_shape(&shapes[i]);
  assert_int_equal(n_bad, 0);
}
