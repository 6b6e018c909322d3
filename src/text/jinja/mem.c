// src/text/jinja/mem.c - state of a run: arena, limits, errors.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem_info.h"
#include "text/jinja/jinja.h"

#define CHUNK_BYTES ((size_t)64 << 10)
#define LARGE_BYTES ((size_t)16 << 20)
#define SHARE       6 // of what is left: half of it for three runs at a time
#define ALIGN       16
#define CLOCK_STEPS 4096 // steps between two readings of the clock

struct jj_chunk {
  jj_chunk *next;
  size_t used, cap;
  _Alignas(ALIGN) char data[];
};

void jj_raise(jj *j, td_status code, const char *fmt, ...) {
  char msg[TD_ERR_BYTES];
  va_list args;
  va_start(args, fmt);
  vsnprintf(msg, sizeof msg, fmt, args);
  va_end(args);
  if (j->line)
    td_fail(j->err, code, "line %u: %s", j->line, msg);
  else
    td_fail(j->err, code, "%s", msg);
  j->status = code;
  longjmp(j->on_error, 1);
}

static _Noreturn void too_much(jj *j) {
  jj_raise(j, TD_ELIMIT, "the template needs more than %zu MiB of memory: shorten the messages",
           j->max_bytes >> 20);
}

static jj_chunk *add_chunk(jj *j, size_t cap) {
  if (j->takes_share && (cap > LARGE_BYTES || j->n_bytes > LARGE_BYTES - cap)) {
    const uint64_t left = j->left_bytes ? j->left_bytes : td_memory_available_bytes();
    const uint64_t most = j->n_bytes + left / SHARE;
    if (most < j->max_bytes) j->max_bytes = (size_t)most;
    j->takes_share = false;
  }
  if (cap > j->max_bytes || j->n_bytes > j->max_bytes - cap) too_much(j);
  jj_chunk *chunk = malloc(sizeof *chunk + cap);
  if (!chunk) jj_raise(j, TD_ENOMEM, "out of memory");
  *chunk = (jj_chunk){.cap = cap};
  j->n_bytes += cap;
  return chunk;
}

void *jj_alloc(jj *j, size_t n_bytes) {
  if (n_bytes > j->max_bytes) too_much(j);
  n_bytes = (n_bytes + ALIGN - 1) & ~(size_t)(ALIGN - 1);
  jj_chunk *chunk = j->chunks;
  if (!chunk || chunk->cap - chunk->used < n_bytes) {
    // Large pieces get a chunk of their own, inserted after the current one, which stays in use.
    bool large = n_bytes > CHUNK_BYTES / 4;
    jj_chunk *fresh = add_chunk(j, large ? n_bytes : CHUNK_BYTES);
    if (large && chunk) {
      fresh->next = chunk->next;
      chunk->next = fresh;
    } else {
      fresh->next = chunk;
      j->chunks = fresh;
    }
    chunk = fresh;
  }
  void *p = chunk->data + chunk->used;
  chunk->used += n_bytes;
  memset(p, 0, n_bytes);
  return p;
}

void *jj_alloc_n(jj *j, size_t n, size_t each_bytes) {
  if (each_bytes && n > SIZE_MAX / 2 / each_bytes)
    jj_raise(j, TD_ELIMIT, "the template asks for %zu items at once", n);
  return jj_alloc(j, n * each_bytes);
}

void *jj_grow(jj *j, void *items, size_t n, size_t *cap, size_t each_bytes) {
  if (n < *cap) return items;
  size_t new_cap = *cap ? *cap * 2 : 8;
  void *moved = jj_alloc_n(j, new_cap, each_bytes);
  if (n) memcpy(moved, items, n * each_bytes);
  *cap = new_cap;
  return moved;
}

void jj_free_all(jj *j) {
  while (j->chunks) {
    jj_chunk *next = j->chunks->next;
    free(j->chunks);
    j->chunks = next;
  }
  j->n_bytes = 0;
}

void jj_steps(jj *j, uint64_t n) {
  if (n > j->steps_left) {
    jj_raise(j, TD_ELIMIT, "the template runs for more than %llu steps",
             (unsigned long long)j->max_steps);
  }
  uint64_t before = j->steps_left / CLOCK_STEPS;
  j->steps_left -= n;
  if (j->steps_left / CLOCK_STEPS == before || !j->cpu_end_ns) return;
  if (j->is_canceled && atomic_load(j->is_canceled)) jj_raise(j, TD_ECANCELED, "canceled");
  if (td_clock_cpu_ns() > j->cpu_end_ns)
    jj_raise(j, TD_ELIMIT, "the template takes too long: it loops more than a chat template needs");
}

void jj_enter(jj *j) {
  if (j->depth >= j->max_depth)
    jj_raise(j, TD_ELIMIT, "nested more than %u levels deep", j->max_depth);
  j->depth++;
}
