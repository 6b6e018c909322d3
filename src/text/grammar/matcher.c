// src/text/grammar/matcher.c - matchers, the grammars they share, and the thread that makes masks.
// A grammar's automaton is the thread's while jobs of its matchers wait or run (n_jobs), else the
// caller's. What a matcher shows meanwhile (mask, may_end, must_end, status) is its own copy, which
// is the caller's while the matcher is ready.
#include "text/grammar/matcher.h"

#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/grow.h"
#include "base/thread.h"

#include "text/grammar/automaton.h"
#include "text/grammar/cover.h"
#include "text/grammar/grammar.h"

#define MAX_IDLE    16          // unused grammars that are kept
#define MAX_MEMORY  (40u << 20) // bytes of all grammars, their configurations and masks
#define MAX_SHARE   (8u << 20)  // of one, where all have more than that
#define MAX_MASK_NS 500000000u  // CPU time for one token: a grammar that needs more fails
#define MAX_WIDTH   64          // items of a configuration that the caller advances itself

// A grammar in use, or idle.
typedef struct shared_grammar {
  struct shared_grammar *next;
  td_grammars *owner;
  char *bytes; // [len], owned: grammar.h
  size_t len;
  td_grammar *grammar; // NULL: not opened yet, which the first job does
  td_automaton automaton;
  td_matcher *matchers;
  uint32_t start;
  uint64_t *first_mask; // of the start, where a first token loses its space
  uint64_t used;        // when it was released last
  atomic_uint n_jobs;   // the thread's: waiting and running
  uint64_t job_ns;      // CPU time of a job, the mean of the last ones; under the lock
  size_t n_counted;     // bytes of it in the owner's n_bytes
} shared_grammar;

struct td_grammars {
  const td_token_index *index;
  shared_grammar *first;
  td_covers covers;
  uint32_t *path; // [max_bytes + 1] configurations along a token
  uint64_t clock;
  atomic_size_t n_bytes;
  // The thread. The lock protects jobs, lists of matchers, and what is said above.
  pthread_t thread;
  bool has_thread, is_stopped, is_held;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  td_matcher *jobs;
  int wake_fd;
};

typedef enum { IDLE, QUEUED, RUNNING } job_state;

struct td_matcher {
  shared_grammar *of;
  td_matcher *next;
  uint32_t config; // UINT32_MAX: the start, of a grammar that was the thread's
  bool has_begun;
  job_state job; // under the lock
  td_matcher *next_job;
  bool is_closed;   // by the caller, while the thread had it
  int32_t *pending; // [n_pending], owned: tokens not followed yet
  uint32_t n_pending;
  size_t cap_pending;
  // What is known of config, while is_ready.
  atomic_bool is_ready;
  const uint64_t *mask;
  bool may_end, must_end;
  td_status status;
};

// ---- grammars ----------------------------------------------------------------------------------

td_status td_grammars_open(td_grammars **out, const td_token_index *index, td_err *err) {
  *out = calloc(1, sizeof **out);
  uint32_t *path = malloc((index->max_bytes + (size_t)1) * sizeof *path);
  if (!*out || !path) {
    free(*out);
    free(path);
    *out = NULL;
    return td_fail(err, TD_ENOMEM, "out of memory for grammars");
  }
  **out = (td_grammars){.index = index, .path = path, .covers.index = index, .wake_fd = -1};
  pthread_mutex_init(&(*out)->lock, NULL);
  pthread_cond_init(&(*out)->changed, NULL);
  return TD_OK;
}

static void free_shared(shared_grammar *s) {
  const bool is_large = s->n_counted > MAX_SHARE;
  atomic_fetch_sub(&s->owner->n_bytes, s->n_counted);
  td_automaton_close(&s->automaton);
  td_grammar_close(s->grammar);
  free(s->first_mask);
  free(s->bytes);
  free(s);
  if (is_large) malloc_trim(0);
}

static void stop_thread(td_grammars *grammars) {
  if (!grammars->has_thread) return;
  pthread_mutex_lock(&grammars->lock);
  grammars->is_stopped = true;
  pthread_cond_broadcast(&grammars->changed);
  pthread_mutex_unlock(&grammars->lock);
  pthread_join(grammars->thread, NULL);
}

static void free_matcher(td_matcher *m) {
  free(m->pending);
  free(m);
}

void td_grammars_close(td_grammars *grammars) {
  if (!grammars) return;
  stop_thread(grammars);
  for (shared_grammar *s = grammars->first, *next; s; s = next) {
    next = s->next;
    for (td_matcher *m = s->matchers, *after; m; m = after) { // closed while the thread had them
      after = m->next;
      free_matcher(m);
    }
    free_shared(s);
  }
  pthread_mutex_destroy(&grammars->lock);
  pthread_cond_destroy(&grammars->changed);
  td_covers_close(&grammars->covers);
  free(grammars->path);
  free(grammars);
}

static bool is_threads(shared_grammar *s) {
  return atomic_load_explicit(&s->n_jobs, memory_order_acquire) > 0;
}

// Removes the grammar released longest ago when more than MAX_IDLE are idle, or all have too much.
// Under the lock. Whether one was removed.
static bool drop_idle(td_grammars *grammars) {
  shared_grammar **oldest = NULL;
  uint32_t n = 0;
  for (shared_grammar **link = &grammars->first; *link; link = &(*link)->next) {
    if ((*link)->matchers || is_threads(*link)) continue;
    n++;
    if (!oldest || (*link)->used < (*oldest)->used) oldest = link;
  }
  if (!oldest || (n <= MAX_IDLE && atomic_load(&grammars->n_bytes) <= MAX_MEMORY)) return false;
  shared_grammar *gone = *oldest;
  *oldest = gone->next;
  free_shared(gone);
  return true;
}

// Opens the grammar's bytes. Whoever owns the automaton.
static td_status open_automaton(shared_grammar *s, td_err *err) {
  td_grammar *grammar;
  td_status st = td_grammar_open(&grammar, s->bytes, s->len, err);
  if (st == TD_OK) st = td_automaton_open(&s->automaton, grammar, err);
  s->grammar = grammar;
  if (st == TD_OK) s->start = td_automaton_start(&s->automaton);
  if (st == TD_OK && s->automaton.status != TD_OK)
    st = td_fail(err, s->automaton.status, "the grammar is too ambiguous");
  s->automaton.status = st;
  return st;
}

static shared_grammar *add_shared(td_grammars *grammars, const void *bytes, size_t len) {
  shared_grammar *s = calloc(1, sizeof *s);
  if (!s) return NULL;
  *s = (shared_grammar){.owner = grammars, .bytes = malloc(len + 1), .len = len};
  if (!s->bytes) {
    free(s);
    return NULL;
  }
  memcpy(s->bytes, bytes, len);
  s->next = grammars->first;
  grammars->first = s;
  return s;
}

td_status td_matcher_open(td_matcher **out, td_grammars *grammars, const void *bytes, size_t len,
                          td_err *err) {
  *out = NULL;
  shared_grammar *s = grammars->first;
  while (s && (s->len != len || memcmp(s->bytes, bytes, len) != 0 ||
               (!is_threads(s) && s->automaton.status != TD_OK)))
    s = s->next;
  td_matcher *m = calloc(1, sizeof *m);
  if (m && !s) s = add_shared(grammars, bytes, len);
  if (!m || !s) {
    free(m);
    return td_fail(err, TD_ENOMEM, "out of memory for a grammar");
  }
  m->of = s;
  td_status st = TD_OK;
  if (!grammars->has_thread && !s->grammar) st = open_automaton(s, err);
  pthread_mutex_lock(&grammars->lock);
  m->config = is_threads(s) || !s->grammar ? UINT32_MAX : s->start;
  m->next = s->matchers;
  s->matchers = m;
  while (drop_idle(grammars)) {
  }
  pthread_mutex_unlock(&grammars->lock);
  if (st == TD_OK)
    *out = m;
  else
    td_matcher_close(m);
  return st;
}

// Under the lock.
static void remove_matcher(td_matcher *m) {
  shared_grammar *s = m->of;
  td_matcher **link = &s->matchers;
  while (*link != m)
    link = &(*link)->next;
  *link = m->next;
  s->used = ++s->owner->clock;
  free_matcher(m);
}

static void remove_job(td_matcher *m) {
  td_matcher **link = &m->of->owner->jobs;
  while (*link != m)
    link = &(*link)->next_job;
  *link = m->next_job;
}

void td_matcher_close(td_matcher *m) {
  if (!m) return;
  td_grammars *grammars = m->of->owner;
  pthread_mutex_lock(&grammars->lock);
  if (m->job == QUEUED) {
    remove_job(m);
    atomic_fetch_sub(&m->of->n_jobs, 1);
    m->job = IDLE;
  }
  if (m->job == RUNNING)
    m->is_closed = true; // the thread removes it
  else
    remove_matcher(m);
  while (drop_idle(grammars)) {
  }
  pthread_mutex_unlock(&grammars->lock);
}

// Counts the grammar's bytes. Keeps the memory of all bounded: all but the matchers' configurations
// are found again.
static void bound_memory(shared_grammar *s) {
  td_grammars *grammars = s->owner;
  const size_t n_bytes = s->len + s->automaton.n_bytes;
  atomic_fetch_add(&grammars->n_bytes, n_bytes - s->n_counted);
  s->n_counted = n_bytes;
  if (atomic_load(&grammars->n_bytes) <= MAX_MEMORY || n_bytes <= MAX_SHARE) return;
  pthread_mutex_lock(&grammars->lock);
  uint32_t n = 1;
  for (const td_matcher *m = s->matchers; m; m = m->next)
    n++;
  uint32_t **keep = malloc(n * sizeof *keep);
  if (keep) {
    keep[0] = &s->start;
    n = 1;
    for (td_matcher *m = s->matchers; m; m = m->next)
      if (m->config != UINT32_MAX) keep[n++] = &m->config;
    td_automaton_forget(&s->automaton, keep, n);
    free(keep);
    atomic_fetch_sub(&grammars->n_bytes, n_bytes - s->len - s->automaton.n_bytes);
    s->n_counted = s->len + s->automaton.n_bytes;
    malloc_trim(0);
  }
  pthread_mutex_unlock(&grammars->lock);
}

// ---- tokens ------------------------------------------------------------------------------------

// Whether the first token's space is dropped.
static bool is_at_strip(const td_matcher *m) {
  return !m->has_begun && m->of->owner->index->strips_space;
}

// The configuration after a token; DEAD: it does not match.
static uint32_t follow(td_matcher *m, int32_t id) {
  const td_token_index *index = m->of->owner->index;
  if (id < 0 || (uint32_t)id >= index->n_vocab || index->place_of[id] == UINT32_MAX)
    return TD_AUTOMATON_DEAD;
  uint32_t place = index->place_of[id], at = index->begin[place], config = m->config;
  at += is_at_strip(m) && index->bytes[at] == ' ';
  for (; at < index->begin[place + 1] && config != TD_AUTOMATON_DEAD; at++)
    config = td_automaton_step(&m->of->automaton, config, index->bytes[at]);
  return config;
}

// Whether the token at `place` is a proper beginning of the one at `whole`.
static bool begins(const td_token_index *index, uint32_t place, uint32_t whole) {
  const uint32_t at = index->begin[place], n = index->begin[place + 1] - at;
  return n < index->begin[whole + 1] - index->begin[whole] &&
         memcmp(index->bytes + at, index->bytes + index->begin[whole], n) == 0;
}

// Whether it may have to be written as a part of an added token.
static bool may_be_part(const td_token_index *index, int32_t id) {
  for (uint32_t k = 0; k < index->n_added; k++)
    if (begins(index, index->place_of[id], index->added[k])) return true;
  return false;
}

bool td_matcher_accepts(td_matcher *m, int32_t id) {
  const td_token_index *index = m->of->owner->index;
  if (id < 0 || (uint32_t)id >= index->n_vocab) return false;
  if (!m->mask && !m->of->owner->has_thread && index->place_of[id] != UINT32_MAX &&
      may_be_part(index, id))
    td_matcher_mask(m);
  if (m->mask) return m->mask[id / 64] >> (id % 64) & 1;
  return !m->of->owner->has_thread && follow(m, id) != TD_AUTOMATON_DEAD;
}

// Has the thread follow the token later. What a mask allows is known to match.
static bool put_off(td_matcher *m, int32_t id) {
  const td_token_index *index = m->of->owner->index;
  if (id < 0 || (uint32_t)id >= index->n_vocab || index->place_of[id] == UINT32_MAX) return false;
  if (m->mask && !td_matcher_accepts(m, id)) return false;
  if (!TD_GROW(m->pending, m->n_pending, m->cap_pending, 16)) {
    m->status = TD_ENOMEM;
    return true;
  }
  m->pending[m->n_pending++] = id;
  m->mask = NULL;
  m->must_end = false;
  atomic_store_explicit(&m->is_ready, false, memory_order_relaxed);
  return true;
}

// Copies what is known of the matcher's configuration. Whoever owns the automaton.
static void show(td_matcher *m) {
  const td_automaton *a = &m->of->automaton;
  const td_automaton_config *config = &a->configs[m->config];
  if (m->status == TD_OK) m->status = a->status;
  m->may_end = config->may_end;
  m->must_end = config->n_items == 0;
  m->mask = is_at_strip(m) ? m->of->first_mask : config->mask;
}

static bool advance(td_matcher *m, int32_t id) {
  uint32_t config = follow(m, id);
  if (config == TD_AUTOMATON_DEAD) return false;
  m->config = config;
  m->has_begun = true;
  bound_memory(m->of);
  return true;
}

bool td_matcher_advance(td_matcher *m, int32_t id) {
  shared_grammar *s = m->of;
  if (s->owner->has_thread && (m->n_pending || is_threads(s) || m->config == UINT32_MAX ||
                               s->automaton.configs[m->config].n_items > MAX_WIDTH))
    return put_off(m, id);
  const bool matches = advance(m, id);
  show(m);
  if (matches) atomic_store_explicit(&m->is_ready, false, memory_order_relaxed);
  return matches;
}

// Walks the vocabulary, or the rest of a cover, in its order. path[d] is the configuration after d
// bytes, valid for the bytes that a token shares with the one before, up to the byte that did not
// match.
static void walk(td_automaton *a, const td_token_index *index, const td_cover *cover,
                 uint32_t *path, bool strips, uint64_t *mask) {
  const uint64_t until_ns = td_clock_cpu_ns() + MAX_MASK_NS;
  uint32_t n_steps = 0, n_configs = a->n_configs; // at the last look at the clock
  const uint16_t *shared = cover ? cover->shared : index->shared;
  const uint32_t n = cover ? cover->n : index->n;
  uint32_t n_valid = 0;
  for (uint32_t i = 0; i < n && a->status == TD_OK; i++) {
    uint32_t d = shared[i];
    if (d > n_valid) continue; // shares the byte that did not match
    if (++n_steps == 1024 || a->n_configs > n_configs + 256) {
      if (a->n_bytes > MAX_MEMORY || td_clock_cpu_ns() > until_ns) {
        a->status = TD_EAGAIN;
        return;
      }
      n_steps = 0;
      n_configs = a->n_configs;
    }
    const uint32_t place = cover ? cover->places[i] : i;
    const uint32_t len = index->begin[place + 1] - index->begin[place];
    const uint8_t *bytes = index->bytes + index->begin[place];
    uint32_t config = path[d];
    for (; d < len; d++) {
      if (d > 0 || !strips || bytes[0] != ' ') config = td_automaton_step(a, config, bytes[d]);
      if (config == TD_AUTOMATON_DEAD) break;
      path[d + 1] = config;
    }
    n_valid = d;
    if (d == len)
      mask[index->ids[place] / 64] |= (uint64_t)1 << (index->ids[place] % 64);
    else if (d == 0 && !cover)
      i = index->bucket_end[bytes[0]] - 1;
  }
}

// Whether behind the first byte of bytes[0..len) nothing matches but the others.
static bool is_forced(td_automaton *a, uint32_t config, const uint8_t *bytes, uint32_t len) {
  config = td_automaton_step(a, config, bytes[0]);
  for (uint32_t d = 1; d < len; d++) {
    for (unsigned b = 0; b < 256; b++)
      if (b != bytes[d] && td_automaton_step(a, config, (uint8_t)b) != TD_AUTOMATON_DEAD)
        return false;
    config = td_automaton_step(a, config, bytes[d]);
  }
  return a->status == TD_OK;
}

// A marker that must come is written as the token that it is, as the model knows it, and not
// spelled in others.
static void keep_whole(td_matcher *m, uint64_t *mask) {
  const td_token_index *index = m->of->owner->index;
  for (uint32_t k = 0; k < index->n_added; k++) {
    const uint32_t whole = index->added[k], len = index->begin[whole + 1] - index->begin[whole];
    const uint8_t *bytes = index->bytes + index->begin[whole];
    const int32_t id = index->ids[whole];
    if (len < 2 || !(mask[id / 64] >> (id % 64) & 1)) continue;
    if (!is_forced(&m->of->automaton, m->config, bytes, len)) continue;
    for (uint32_t i = whole; i > 0 && index->bytes[index->begin[i - 1]] == bytes[0]; i--) {
      if (begins(index, i - 1, whole)) {
        const int32_t part = index->ids[i - 1];
        mask[part / 64] &= ~((uint64_t)1 << (part % 64));
      }
    }
  }
}

static const uint64_t *make_mask(td_matcher *m) {
  shared_grammar *s = m->of;
  const td_token_index *index = s->owner->index;
  bool strips = is_at_strip(m);
  bound_memory(s);
  uint64_t *mask = strips ? s->first_mask : s->automaton.configs[m->config].mask;
  if (mask) return mask;
  size_t n_words = (index->n_vocab + (size_t)63) / 64;
  mask = calloc(n_words + 1, sizeof *mask);
  if (!mask) {
    if (s->automaton.status == TD_OK) s->automaton.status = TD_ENOMEM;
    return NULL;
  }
  s->owner->path[0] = m->config;
  const td_cover *cover = NULL;
  if (!strips) {
    const td_automaton_run run = td_automaton_run_of(&s->automaton, m->config);
    cover = td_covers_get(&s->owner->covers, &run);
  }
  if (cover) memcpy(mask, cover->mask, n_words * sizeof *mask);
  walk(&s->automaton, index, cover, s->owner->path, strips, mask);
  if (s->automaton.status == TD_OK) keep_whole(m, mask);
  if (s->automaton.status != TD_OK) {
    free(mask);
    return NULL;
  }
  *(strips ? &s->first_mask : &s->automaton.configs[m->config].mask) = mask;
  s->automaton.n_bytes += n_words * sizeof *mask;
  return mask;
}

const uint64_t *td_matcher_mask(td_matcher *m) {
  if (!m->mask && !m->of->owner->has_thread) {
    make_mask(m);
    show(m);
  }
  return m->mask;
}

// ---- the thread --------------------------------------------------------------------------------

static void run(td_matcher *m) {
  shared_grammar *s = m->of;
  td_err ignored;
  if (!s->grammar) open_automaton(s, &ignored);
  if (!s->automaton.configs) {
    m->status = s->automaton.status;
    return;
  }
  if (m->config == UINT32_MAX) m->config = s->start;
  for (uint32_t i = 0; i < m->n_pending && s->automaton.status == TD_OK; i++)
    if (!advance(m, m->pending[i]) && m->status == TD_OK) m->status = TD_EINVAL;
  m->n_pending = 0;
  if (s->automaton.status == TD_OK) make_mask(m);
  show(m);
}

// The job of the grammar that costs least; of equal ones the first.
static td_matcher *next_job(td_grammars *grammars) {
  td_matcher *best = grammars->is_held ? NULL : grammars->jobs;
  for (td_matcher *m = best; m; m = m->next_job)
    if (m->of->job_ns < best->of->job_ns) best = m;
  return best;
}

static void *thread_main(void *arg) {
  td_grammars *grammars = arg;
  pthread_mutex_lock(&grammars->lock);
  while (!grammars->is_stopped) {
    td_matcher *m = next_job(grammars);
    if (!m) {
      pthread_cond_wait(&grammars->changed, &grammars->lock);
      continue;
    }
    shared_grammar *s = m->of;
    remove_job(m);
    m->job = RUNNING;
    pthread_mutex_unlock(&grammars->lock);
    const uint64_t begin_ns = td_clock_cpu_ns();
    run(m);
    const uint64_t ns = td_clock_cpu_ns() - begin_ns;
    pthread_mutex_lock(&grammars->lock);
    s->job_ns = (3 * s->job_ns + ns) / 4;
    m->job = IDLE;
    if (m->is_closed)
      remove_matcher(m);
    else
      atomic_store_explicit(&m->is_ready, true, memory_order_release);
    atomic_fetch_sub_explicit(&s->n_jobs, 1, memory_order_release);
    const uint64_t one = 1;
    if (grammars->wake_fd >= 0 && write(grammars->wake_fd, &one, sizeof one) < 0) continue;
  }
  pthread_mutex_unlock(&grammars->lock);
  return NULL;
}

td_status td_grammars_start(td_grammars *grammars, int wake_fd, td_err *err) {
  grammars->wake_fd = wake_fd;
  grammars->has_thread = true;
  if (td_thread_start(&grammars->thread, thread_main, grammars) == 0) return TD_OK;
  grammars->has_thread = false;
  return td_fail(err, TD_ENOMEM, "cannot start the thread that makes grammars' masks");
}

void td_matcher_prepare(td_matcher *m) {
  td_grammars *grammars = m->of->owner;
  if (!grammars->has_thread || td_matcher_is_ready(m)) return;
  pthread_mutex_lock(&grammars->lock);
  if (m->job == IDLE && !atomic_load(&m->is_ready)) {
    if (!m->n_pending && !is_threads(m->of) && m->config != UINT32_MAX) show(m);
    if (m->mask || m->status != TD_OK) {
      atomic_store(&m->is_ready, true);
    } else {
      td_matcher **end = &grammars->jobs;
      while (*end)
        end = &(*end)->next_job;
      m->next_job = NULL;
      *end = m;
      m->job = QUEUED;
      atomic_fetch_add(&m->of->n_jobs, 1);
      pthread_cond_signal(&grammars->changed);
    }
  }
  pthread_mutex_unlock(&grammars->lock);
}

bool td_matcher_is_ready(td_matcher *m) {
  return !m->of->owner->has_thread || atomic_load_explicit(&m->is_ready, memory_order_acquire);
}

size_t td_grammars_n_bytes(td_grammars *grammars) {
  return atomic_load(&grammars->n_bytes);
}

void td_grammars_hold(td_grammars *grammars, bool is_held) {
  pthread_mutex_lock(&grammars->lock);
  grammars->is_held = is_held;
  pthread_cond_signal(&grammars->changed);
  pthread_mutex_unlock(&grammars->lock);
}

// ---- what is known -----------------------------------------------------------------------------

bool td_matcher_may_end(const td_matcher *m) {
  return m->of->owner->has_thread ? m->may_end : m->of->automaton.configs[m->config].may_end;
}

bool td_matcher_must_end(const td_matcher *m) {
  return m->of->owner->has_thread ? m->must_end : m->of->automaton.configs[m->config].n_items == 0;
}

td_status td_matcher_status(const td_matcher *m, td_err *err) {
  td_status st = m->of->owner->has_thread ? m->status : m->of->automaton.status;
  switch (st) {
  case TD_OK: return TD_OK;
  case TD_ENOMEM: return td_fail(err, st, "out of memory for a grammar's masks");
  case TD_EFORMAT: return td_fail(err, st, "malformed grammar");
  case TD_EINVAL: return td_fail(err, st, "the text so far does not match the grammar");
  case TD_EAGAIN:
    return td_fail(err, TD_ELIMIT,
                   "the grammar is too complex: finding the tokens that may come next needs more "
                   "than %u ms or %u MB; use fewer or smaller repetitions of wide classes",
                   MAX_MASK_NS / 1000000, MAX_MEMORY >> 20);
  default:
    return td_fail(err, TD_ELIMIT,
                   "the grammar is too ambiguous: one text has too many derivations");
  }
}
