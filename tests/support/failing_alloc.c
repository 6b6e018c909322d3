// tests/support/failing_alloc.c - wrappers of the allocating functions. Thread-safe.
#include "support/failing_alloc.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <execinfo.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/status.h"

#define MAX_SITES 4096
#define MAX_LIVE  (1u << 15) // a power of two
#define DEPTH     16         // frames that tell one place from another
#define WINDOW    3          // calls in a row that make a place worth a failure
#define MAX_SEEN  (1u << 14) // a power of two
#define MAX_DEPTH 128

typedef struct {
  void *frames[DEPTH];
  int n;
} stack;

typedef struct {
  void *address;      // NULL: free slot
  const void *caller; // that allocated it
} live;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool is_on, has_failed;
static fa_site chosen;
static uint32_t n_left; // allocations at the chosen site until the one that fails
static int trace_fd;
static pthread_t base_thread; // of fa_begin's caller
static int base_depth;        // frames outside of it
static fa_site sites[MAX_SITES];
static uint64_t seen[MAX_SEEN];
static size_t n_sites, n_live, n_seen;
static live table[MAX_LIVE];

// ---- what is not freed --------------------------------------------------------------------------

static size_t slot_of(const void *address) {
  return ((uintptr_t)address >> 4) * 0x9e3779b97f4a7c15u >> 32 & (MAX_LIVE - 1);
}

static void remember(void *address, const void *caller) {
  TD_CHECK(++n_live < MAX_LIVE / 2);
  size_t at = slot_of(address);
  while (table[at].address)
    at = (at + 1) & (MAX_LIVE - 1);
  table[at] = (live){address, caller};
}

static void forget(const void *address) {
  size_t at = slot_of(address);
  while (table[at].address && table[at].address != address)
    at = (at + 1) & (MAX_LIVE - 1);
  if (!table[at].address) return; // allocated before fa_begin, or by libc
  n_live--;
  for (size_t hole = at;;) { // closes the gap in the probe sequence
    table[hole].address = NULL;
    for (;;) {
      at = (at + 1) & (MAX_LIVE - 1);
      if (!table[at].address) return;
      size_t wish = slot_of(table[at].address);
      if (((at - wish) & (MAX_LIVE - 1)) >= ((at - hole) & (MAX_LIVE - 1))) break;
    }
    table[hole] = table[at];
    hole = at;
  }
}

// ---- which allocation fails ---------------------------------------------------------------------

static fa_site site_of(const void *caller, const stack *s) {
  uint64_t hash = 14695981039346656037u;
  for (int i = 0; i < s->n; i++)
    hash = (hash ^ (uintptr_t)s->frames[i]) * 1099511628211u;
  return (fa_site){caller, hash};
}

// True the first time.
static bool see(uint64_t hash) {
  size_t at = hash & (MAX_SEEN - 1);
  while (seen[at] && seen[at] != hash)
    at = (at + 1) & (MAX_SEEN - 1);
  if (seen[at]) return false;
  TD_CHECK(++n_seen < MAX_SEEN / 2);
  seen[at] = hash;
  return true;
}

// Notes a site if its stack has WINDOW calls, each made by the next, that no site before had in a
// row: an error at one of the sites passes through every caller of every function, while recursion
// does not multiply the sites.
static void note_site(fa_site site, const stack *s) {
  bool is_new = false;
  for (int i = 0; i == 0 || i + WINDOW <= s->n; i++) {
    stack window = {.n = s->n < WINDOW ? s->n : WINDOW};
    memcpy(window.frames, s->frames + i, (size_t)window.n * sizeof *s->frames);
    is_new |= see(site_of(NULL, &window).hash);
  }
  if (!is_new) return;
  TD_CHECK(n_sites < MAX_SITES);
  sites[n_sites++] = site;
}

// The innermost frames, without those outside of fa_begin's caller.
static stack stack_here(void) {
  void *frames[MAX_DEPTH];
  stack s;
  int n = backtrace(frames, MAX_DEPTH);
  if (pthread_equal(pthread_self(), base_thread)) n -= base_depth;
  s.n = n < 1 ? 1 : n > DEPTH ? DEPTH : n;
  memcpy(s.frames, frames, (size_t)s.n * sizeof *frames);
  return s;
}

// Whether an allocation made by caller fails. Unwinds the stack only where it may matter.
__attribute__((noinline)) static bool fails(const void *caller) {
  if (!__atomic_load_n(&is_on, __ATOMIC_ACQUIRE)) return false;
  if (chosen.caller && chosen.caller != caller) return false;
  const stack from = stack_here();
  const fa_site site = site_of(caller, &from);
  pthread_mutex_lock(&lock);
  if (!chosen.caller) note_site(site, &from);
  const bool result = site.hash == chosen.hash && !has_failed && n_left-- == 0;
  if (result) has_failed = true;
  pthread_mutex_unlock(&lock);
  if (result) {
    backtrace_symbols_fd(from.frames, from.n, trace_fd);
    errno = ENOMEM;
  }
  return result;
}

static void *made(void *address, const void *caller) {
  if (!address || !__atomic_load_n(&is_on, __ATOMIC_ACQUIRE)) return address;
  pthread_mutex_lock(&lock);
  remember(address, caller);
  pthread_mutex_unlock(&lock);
  return address;
}

static void gone(const void *address) {
  if (!address) return;
  pthread_mutex_lock(&lock);
  forget(address);
  pthread_mutex_unlock(&lock);
}

// ---- wrappers -----------------------------------------------------------------------------------
// Their names are the linker's: __wrap_NAME is called for NAME, and __real_NAME is NAME.

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *old, size_t n);
void *__real_aligned_alloc(size_t alignment, size_t n);
int __real_posix_memalign(void **out, size_t alignment, size_t n);
char *__real_strdup(const char *text);
char *__real_strndup(const char *text, size_t n);
char *__real_realpath(const char *path, char *out);
void *__real_mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset);
void __real_free(void *address);

void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *old, size_t n);
void *__wrap_aligned_alloc(size_t alignment, size_t n);
int __wrap_posix_memalign(void **out, size_t alignment, size_t n);
char *__wrap_strdup(const char *text);
char *__wrap_strndup(const char *text, size_t n);
char *__wrap_realpath(const char *path, char *out);
int __wrap_asprintf(char **out, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void *__wrap_mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset);
void __wrap_free(void *address);

void *__wrap_malloc(size_t n) {
  const void *caller = __builtin_return_address(0);
  return fails(caller) ? NULL : made(__real_malloc(n), caller);
}

void *__wrap_calloc(size_t n, size_t size) {
  const void *caller = __builtin_return_address(0);
  return fails(caller) ? NULL : made(__real_calloc(n, size), caller);
}

void *__wrap_realloc(void *old, size_t n) {
  const void *caller = __builtin_return_address(0);
  if (fails(caller)) return NULL;
  gone(old); // before another thread can be given the address
  return made(__real_realloc(old, n), caller);
}

void *__wrap_aligned_alloc(size_t alignment, size_t n) {
  const void *caller = __builtin_return_address(0);
  return fails(caller) ? NULL : made(__real_aligned_alloc(alignment, n), caller);
}

int __wrap_posix_memalign(void **out, size_t alignment, size_t n) {
  const void *caller = __builtin_return_address(0);
  if (fails(caller)) return ENOMEM;
  const int rc = __real_posix_memalign(out, alignment, n);
  if (rc == 0) made(*out, caller);
  return rc;
}

char *__wrap_strdup(const char *text) {
  const void *caller = __builtin_return_address(0);
  return fails(caller) ? NULL : made(__real_strdup(text), caller);
}

char *__wrap_strndup(const char *text, size_t n) {
  const void *caller = __builtin_return_address(0);
  return fails(caller) ? NULL : made(__real_strndup(text, n), caller);
}

char *__wrap_realpath(const char *path, char *out) {
  const void *caller = __builtin_return_address(0);
  return fails(caller) ? NULL : made(__real_realpath(path, out), caller);
}

int __wrap_asprintf(char **out, const char *fmt, ...) {
  const void *caller = __builtin_return_address(0);
  *out = NULL;
  if (fails(caller)) return -1;
  va_list args;
  va_start(args, fmt);
  const int n = vasprintf(out, fmt, args);
  va_end(args);
  if (n >= 0) made(*out, caller);
  return n;
}

void *__wrap_mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset) {
  const void *caller = __builtin_return_address(0);
  return fails(caller) ? MAP_FAILED : __real_mmap(at, n, prot, flags, fd, offset);
}

void __wrap_free(void *address) {
  gone(address);
  __real_free(address);
}

// ---- the test's side ----------------------------------------------------------------------------

void fa_begin(fa_site site, uint32_t idx, int fd) {
  trace_fd = fd;
  void *frames[MAX_DEPTH];
  base_depth = backtrace(frames, MAX_DEPTH) - 2; // the first call loads the unwinder
  base_thread = pthread_self();
  cJSON_InitHooks(&(cJSON_Hooks){.malloc_fn = __wrap_malloc, .free_fn = __wrap_free});
  chosen = site;
  n_left = idx;
  has_failed = false;
  n_sites = 0;
  __atomic_store_n(&is_on, true, __ATOMIC_RELEASE);
}

void fa_end(void) {
  __atomic_store_n(&is_on, false, __ATOMIC_RELEASE);
}

size_t fa_sites(const fa_site **out) {
  *out = sites;
  return n_sites;
}

int fa_has_failed(void) {
  return has_failed;
}

size_t fa_print_leaks(void) {
  for (size_t i = 0; i < MAX_LIVE && n_live; i++) {
    if (!table[i].address) continue;
    fprintf(stderr, "%p is never freed; allocated at\n", table[i].address);
    backtrace_symbols_fd((void *const *)&table[i].caller, 1, STDERR_FILENO);
  }
  return n_live;
}
