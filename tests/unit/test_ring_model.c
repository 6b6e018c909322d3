// tests/unit/test_ring_model.c - every interleaving of the ring's algorithm (src/shm/ring.c).
//
// Writer and reader are two step machines over shared words. Each has a store buffer, as x86 and
// every weaker machine has: a store waits there and reaches memory at any later moment, in order. A
// seq_cst store empties the buffer before the next step. The checker visits every reachable state
// and demands: records come whole and in order, and nobody sleeps for ever. As proof that it can
// fail, the same search with a mere release store, or without the second look after arming, must
// find a lost wake.
// CTest: no-tsan
#include <stdlib.h>
#include <string.h>

#include "unit/testing.h"

enum { CAPACITY = 2, N_RECORDS = 4, N_STORES = 3 };

// The shared words. The two eventfds are counts and written by system calls, which empty the
// store buffer.
enum { SEQ0, DATA0 = SEQ0 + CAPACITY, READER_ASLEEP = DATA0 + CAPACITY, WRITER_ASLEEP, N_WORDS };

typedef enum { LOOK, FILL, PUBLISH, WAKE_LOAD, WAKE_TAKE, ARM, LOOK_AGAIN, SLEEP, DONE } step_kind;

typedef struct {
  uint8_t step, pos, n_stores;
  uint8_t data; // the reader's copy
  struct {
    uint8_t word, value;
  } stores[N_STORES];
} machine;

typedef struct {
  uint8_t words[N_WORDS];
  uint8_t signals[2]; // [0]: reader's eventfd, [1]: writer's
  machine m[2];       // [0]: reader, [1]: writer
} moment;

typedef struct {
  int sc_publish; // the slot's number is stored seq_cst
  int look_again; // the sleeper looks once more after arming
  int sc_arm;     // the armed flag is stored seq_cst
  moment *seen;   // open-addressing set
  uint8_t *used;
  size_t cap, n_seen;
  int lost_wake, wrong_record;
} search;

static uint8_t load(const moment *s, const machine *m, int word) {
  for (int i = m->n_stores; i-- > 0;) {
    if (m->stores[i].word == word) return m->stores[i].value;
  }
  return s->words[word];
}

static void flush_one(moment *s, machine *m) {
  s->words[m->stores[0].word] = m->stores[0].value;
  m->n_stores--;
  memmove(m->stores, m->stores + 1, sizeof m->stores[0] * m->n_stores);
  memset(&m->stores[m->n_stores], 0, sizeof m->stores[0]);
}

static void flush(moment *s, machine *m) {
  while (m->n_stores)
    flush_one(s, m);
}

static void store(moment *s, machine *m, int word, int value, int seq_cst) {
  if (m->n_stores == N_STORES) flush_one(s, m);
  m->stores[m->n_stores].word = (uint8_t)word;
  m->stores[m->n_stores].value = (uint8_t)value;
  m->n_stores++;
  if (seq_cst) flush(s, m);
}

// One step of machine `who`; false when it cannot move. is_reader: 0 writes, 1 reads.
static int step(search *c, moment *s, int who) {
  machine *m = &s->m[who];
  int is_reader = who == 0;
  int slot = m->pos % CAPACITY;
  int ready = load(s, m, SEQ0 + slot) == (is_reader ? m->pos + 1 : m->pos);
  int own_flag = is_reader ? READER_ASLEEP : WRITER_ASLEEP;
  int peer_flag = is_reader ? WRITER_ASLEEP : READER_ASLEEP;
  switch ((step_kind)m->step) {
  case LOOK: m->step = m->pos == N_RECORDS ? DONE : ready ? FILL : ARM; return 1;
  case FILL:
    if (is_reader) {
      if (load(s, m, DATA0 + slot) != m->pos + 1) c->wrong_record = 1;
    } else {
      store(s, m, DATA0 + slot, m->pos + 1, 0);
    }
    m->step = PUBLISH;
    return 1;
  case PUBLISH:
    store(s, m, SEQ0 + slot, is_reader ? m->pos + CAPACITY : m->pos + 1, c->sc_publish);
    m->pos++;
    m->step = WAKE_LOAD;
    return 1;
  case WAKE_LOAD: m->step = load(s, m, peer_flag) ? WAKE_TAKE : LOOK; return 1;
  case WAKE_TAKE: // an exchange, then the system call when it was armed
    flush(s, m);
    if (s->words[peer_flag]) s->signals[!who] = 1;
    s->words[peer_flag] = 0;
    m->step = LOOK;
    return 1;
  case ARM:
    store(s, m, own_flag, 1, c->sc_arm);
    m->step = c->look_again ? LOOK_AGAIN : SLEEP;
    return 1;
  case LOOK_AGAIN:
    if (ready) store(s, m, own_flag, 0, 0);
    m->step = ready ? LOOK : SLEEP;
    return 1;
  case SLEEP:
    if (!s->signals[who]) return 0;
    store(s, m, own_flag, 0, 1);
    s->signals[who] = 0;
    m->step = LOOK;
    return 1;
  case DONE: return 0;
  }
  return 0;
}

static int remember(search *c, const moment *s) {
  uint64_t hash = 1469598103934665603u;
  for (size_t i = 0; i < sizeof *s; i++)
    hash = (hash ^ ((const uint8_t *)s)[i]) * 1099511628211u;
  for (size_t i = hash & (c->cap - 1);; i = (i + 1) & (c->cap - 1)) {
    if (!c->used[i]) {
      c->used[i] = 1;
      c->seen[i] = *s;
      c->n_seen++;
      assert_true(c->n_seen < c->cap / 2);
      return 1;
    }
    if (memcmp(&c->seen[i], s, sizeof *s) == 0) return 0;
  }
}

static void visit(search *c, const moment *s) {
  if (c->lost_wake || c->wrong_record || !remember(c, s)) return;
  int moved = 0;
  for (int who = 0; who < 2; who++) {
    moment next = *s;
    if (step(c, &next, who)) {
      moved = 1;
      visit(c, &next);
    }
    if (s->m[who].n_stores) { // a buffered store reaches memory by itself
      next = *s;
      flush_one(&next, &next.m[who]);
      moved = 1;
      visit(c, &next);
    }
  }
  if (!moved && (s->m[0].step != DONE || s->m[1].step != DONE)) c->lost_wake = 1;
}

static search run(int sc_publish, int sc_arm, int look_again) {
  search c = {.sc_publish = sc_publish, .sc_arm = sc_arm, .look_again = look_again, .cap = 1 << 20};
  c.seen = calloc(c.cap, sizeof *c.seen);
  c.used = calloc(c.cap, 1);
  assert_non_null(c.seen);
  assert_non_null(c.used);
  moment start;
  memset(&start, 0, sizeof start);
  for (int i = 0; i < CAPACITY; i++)
    start.words[SEQ0 + i] = (uint8_t)i;
  visit(&c, &start);
  free(c.seen);
  free(c.used);
  return c;
}

TEST(every_interleaving) {
  search c = run(1, 1, 1);
  assert_false(c.wrong_record);
  assert_false(c.lost_wake);
  assert_true(c.n_seen > 500); // the search went somewhere
  print_message("%zu states\n", c.n_seen);
}

TEST(weaker_rings_lose_wakes) {
  assert_true(run(0, 1, 1).lost_wake); // number published with release only
  assert_true(run(1, 0, 1).lost_wake); // flag armed with release only
  assert_true(run(1, 1, 0).lost_wake); // no second look
}
