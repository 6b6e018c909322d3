// src/base/thread_pool.c - the thread pool.
// A run is published by advancing `turn`, one word that holds the run's number and the number of
// members that take part, so that a member reading it knows whether it is included. Members spin on
// `turn` for a while, then sleep on a condition variable.
//
// The publisher signals only if some member sleeps. A member increments n_asleep before its last
// look at turn; the publisher advances turn before it reads n_asleep. Both are sequentially
// consistent, so at least one sees the other and no wakeup is lost. The end of a run is signalled
// in the same way with roles swapped, through n_running and runner_asleep. Members at work are
// counted by NUMA node, and n_running counts nodes, so that the end of a run moves one cache line a
// node between sockets, not one a member.
//
// Members that do not take part are parked on a separate condition variable, which runs do not
// signal until the number of members grows.
#include "base/thread_pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "base/thread.h"

// Pause instructions before a member sleeps, about 0.5 to 2 ms. That exceeds the time for which one
// thread works alone between the runs of a step. Waking an idle core can take 0.5 ms, longer than
// most runs.
enum { SPINS = 40000 };

typedef void (*run_fn)(void *ctx, unsigned member, unsigned n_members);

typedef struct {
  _Alignas(64) _Atomic unsigned n;
} counter;

struct td_thread_pool {
  unsigned n_threads;
  unsigned n_started; // threads to join: members 1 to n_started
  unsigned spins;     // 0 if members outnumber CPUs
  pthread_t *threads; // [n_threads - 1]
  struct member *members;
  td_nodes nodes;
  td_cpu *places;  // [n_threads]; NULL: not pinned
  unsigned *ranks; // [n_threads], rank of each on its node

  pthread_mutex_t run_lock; // held during a whole run
  run_fn fn;                // of the current run; written before turn advances
  void *ctx;

  const _Atomic uint32_t *n_active;   // number of members in the next run; NULL: all
  _Alignas(64) _Atomic uint64_t turn; // run number << 16 | members
  _Atomic bool stopping;
  counter on_node[TD_MAX_NODES];           // members still at work, except the runner
  _Alignas(64) _Atomic unsigned n_running; // nodes with such members
  _Alignas(64) _Atomic unsigned n_asleep;
  _Atomic bool runner_asleep;
  pthread_mutex_t sleep_lock;
  pthread_cond_t wake, unpark, done;
};

struct member {
  td_thread_pool *pool;
  unsigned idx;
};

static void pause_cpu(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

enum { MEMBER_BITS = 16 };

static unsigned members_of(uint64_t turn) {
  return (unsigned)(turn & ((1u << MEMBER_BITS) - 1));
}

static bool is_meant(uint64_t turn, uint64_t seen, unsigned member) {
  return turn >> MEMBER_BITS != seen >> MEMBER_BITS && member < members_of(turn);
}

// Sleeps until there is a turn after `seen` that includes the member.
static uint64_t sleep_for_turn(td_thread_pool *pool, uint64_t seen, unsigned member) {
  uint64_t turn;
  pthread_mutex_lock(&pool->sleep_lock);
  while (!is_meant(turn = atomic_load(&pool->turn), seen, member)) {
    if (member >= members_of(turn)) {
      pthread_cond_wait(&pool->unpark, &pool->sleep_lock);
      continue;
    }
    atomic_fetch_add(&pool->n_asleep, 1);
    if (atomic_load(&pool->turn) == turn) pthread_cond_wait(&pool->wake, &pool->sleep_lock);
    atomic_fetch_sub(&pool->n_asleep, 1);
  }
  pthread_mutex_unlock(&pool->sleep_lock);
  return turn;
}

static uint64_t wait_for_turn(td_thread_pool *pool, uint64_t seen, unsigned member) {
  for (unsigned i = 0; i < pool->spins; i++) {
    uint64_t turn = atomic_load_explicit(&pool->turn, memory_order_acquire);
    if (is_meant(turn, seen, member)) return turn;
    if (member >= members_of(turn)) break; // not included in this run: park
    pause_cpu();
  }
  return sleep_for_turn(pool, seen, member);
}

static void *member_main(void *arg) {
  struct member *member = arg;
  td_thread_pool *pool = member->pool;
  for (uint64_t turn = pool->n_threads;;) { // initial value: run 0, all members
    turn = wait_for_turn(pool, turn, member->idx);
    if (atomic_load(&pool->stopping)) return NULL;
    pool->fn(pool->ctx, member->idx, members_of(turn));
    counter *here = &pool->on_node[td_thread_pool_node(pool, member->idx)];
    if (atomic_fetch_sub(&here->n, 1) > 1) continue; // others of the node are at work
    if (atomic_fetch_sub(&pool->n_running, 1) == 1 && atomic_load(&pool->runner_asleep)) {
      pthread_mutex_lock(&pool->sleep_lock);
      pthread_cond_signal(&pool->done);
      pthread_mutex_unlock(&pool->sleep_lock);
    }
  }
}

static void publish(td_thread_pool *pool, unsigned n_members) {
  uint64_t before = atomic_load(&pool->turn);
  atomic_store(&pool->turn, ((before >> MEMBER_BITS) + 1) << MEMBER_BITS | n_members);
  bool grew = n_members > members_of(before);
  if (!grew && atomic_load(&pool->n_asleep) == 0) return;
  pthread_mutex_lock(&pool->sleep_lock);
  pthread_cond_broadcast(&pool->wake);
  if (grew) pthread_cond_broadcast(&pool->unpark);
  pthread_mutex_unlock(&pool->sleep_lock);
}

static void wait_for_members(td_thread_pool *pool) {
  for (unsigned i = 0; i < pool->spins; i++) {
    if (atomic_load_explicit(&pool->n_running, memory_order_acquire) == 0) return;
    pause_cpu();
  }
  pthread_mutex_lock(&pool->sleep_lock);
  atomic_store(&pool->runner_asleep, true);
  while (atomic_load(&pool->n_running) != 0)
    pthread_cond_wait(&pool->done, &pool->sleep_lock);
  atomic_store(&pool->runner_asleep, false);
  pthread_mutex_unlock(&pool->sleep_lock);
}

// ---- CPU placement of members -----------------------------------------------------------------

unsigned td_thread_pool_node(const td_thread_pool *pool, unsigned member) {
  return pool->places ? pool->places[member].node : member % pool->nodes.n;
}

unsigned td_thread_pool_rank(const td_thread_pool *pool, unsigned member) {
  return pool->ranks[member];
}

// Pins a member's thread. A failure only costs speed.
static void place_member(const td_thread_pool *pool, unsigned member, pthread_t thread) {
  if (!pool->places) {
    td_nodes_bind(&pool->nodes, td_thread_pool_node(pool, member), thread);
    return;
  }
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET((size_t)pool->places[member].id, &one);
  pthread_setaffinity_np(thread, sizeof one, &one);
}

void td_thread_pool_pin_caller(const td_thread_pool *pool, cpu_set_t *before) {
  pthread_getaffinity_np(pthread_self(), sizeof *before, before);
  place_member(pool, 0, pthread_self());
}

void td_thread_pool_unpin_caller(const cpu_set_t *before) {
  pthread_setaffinity_np(pthread_self(), sizeof *before, before);
}

static void choose_places(td_thread_pool *pool, bool from_end) {
  td_cpu *cpus = calloc(TD_MAX_CPUS, sizeof *cpus);
  td_cpu *places = calloc(pool->n_threads, sizeof *places);
  unsigned n = cpus ? td_cpus_get(cpus, &pool->nodes) : 0;
  if (cpus && places && td_cpus_place(places, pool->n_threads, cpus, n, pool->nodes.n, from_end))
    pool->places = places;
  else
    free(places);
  free(cpus);
}

// ---- open and close ---------------------------------------------------------------------------

static td_status start_members(td_thread_pool *pool, td_err *err) {
  for (unsigned i = 1; i < pool->n_threads; i++) {
    struct member *member = &pool->members[i - 1];
    *member = (struct member){.pool = pool, .idx = i};
    if (td_thread_start(&pool->threads[i - 1], member_main, member) != 0) {
      return td_fail(err, TD_ENOMEM, "cannot start thread %u of %u: lower the number of threads", i,
                     pool->n_threads);
    }
    pool->n_started = i;
    place_member(pool, i, pool->threads[i - 1]);
  }
  return TD_OK;
}

td_status td_thread_pool_open(td_thread_pool **out, const td_thread_pool_opts *opts, td_err *err) {
  *out = NULL;
  td_thread_pool *pool = aligned_alloc(64, sizeof *pool);
  if (!pool) return td_fail(err, TD_ENOMEM, "out of memory for a thread pool");
  unsigned n_cpus = td_cpu_count();
  *pool = (td_thread_pool){.n_threads = opts->n_threads ? opts->n_threads : n_cpus,
                           .nodes = opts->nodes ? *opts->nodes : (td_nodes){.n = 1}};
  TD_CHECK(pool->n_threads < 1u << MEMBER_BITS);
  pool->turn = pool->n_threads;
  pool->spins = pool->n_threads <= n_cpus ? SPINS : 0;
  pthread_mutex_init(&pool->run_lock, NULL);
  pthread_mutex_init(&pool->sleep_lock, NULL);
  pthread_cond_init(&pool->wake, NULL);
  pthread_cond_init(&pool->unpark, NULL);
  pthread_cond_init(&pool->done, NULL);
  pool->threads = calloc(pool->n_threads, sizeof *pool->threads);
  pool->members = calloc(pool->n_threads, sizeof *pool->members);
  pool->ranks = calloc(pool->n_threads, sizeof *pool->ranks);
  if (opts->pin) choose_places(pool, opts->from_end);
  td_status status = TD_OK;
  if (!pool->threads || !pool->members || !pool->ranks) {
    status = td_fail(err, TD_ENOMEM, "out of memory for a pool of %u threads", pool->n_threads);
  } else {
    unsigned n_on[TD_MAX_NODES] = {0};
    for (unsigned i = 0; i < pool->n_threads; i++)
      pool->ranks[i] = n_on[td_thread_pool_node(pool, i)]++;
    status = start_members(pool, err);
  }
  if (status != TD_OK) {
    td_thread_pool_close(pool);
    return status;
  }
  *out = pool;
  return TD_OK;
}

void td_thread_pool_close(td_thread_pool *pool) {
  if (!pool) return;
  atomic_store(&pool->stopping, true);
  publish(pool, pool->n_threads);
  for (unsigned i = 0; i < pool->n_started; i++)
    pthread_join(pool->threads[i], NULL);
  pthread_cond_destroy(&pool->done);
  pthread_cond_destroy(&pool->unpark);
  pthread_cond_destroy(&pool->wake);
  pthread_mutex_destroy(&pool->sleep_lock);
  pthread_mutex_destroy(&pool->run_lock);
  free(pool->places);
  free(pool->ranks);
  free(pool->members);
  free(pool->threads);
  free(pool);
}

unsigned td_thread_pool_size(const td_thread_pool *pool) {
  return pool->n_threads;
}

void td_thread_pool_set_limit(td_thread_pool *pool, const _Atomic uint32_t *n_active) {
  pthread_mutex_lock(&pool->run_lock);
  pool->n_active = n_active;
  pthread_mutex_unlock(&pool->run_lock);
}

// Relaxed is sufficient: no other data is published with this number.
static unsigned n_active_of(const td_thread_pool *pool) {
  unsigned n = pool->n_active ? atomic_load_explicit(pool->n_active, memory_order_relaxed) : 0;
  return n && n < pool->n_threads ? n : pool->n_threads;
}

// Of the first n members but the runner.
static void count_members(td_thread_pool *pool, unsigned n) {
  unsigned on_node[TD_MAX_NODES] = {n - 1}, n_nodes = 1;
  if (pool->nodes.n > 1) on_node[0] = n_nodes = 0;
  for (unsigned i = 1; i < n && pool->nodes.n > 1; i++)
    n_nodes += on_node[td_thread_pool_node(pool, i)]++ == 0;
  for (unsigned k = 0; k < pool->nodes.n; k++)
    atomic_store_explicit(&pool->on_node[k].n, on_node[k], memory_order_relaxed);
  atomic_store(&pool->n_running, n_nodes); // turn publishes them
}

void td_thread_pool_run(td_thread_pool *pool, run_fn fn, void *ctx) {
  pthread_mutex_lock(&pool->run_lock);
  unsigned n = n_active_of(pool);
  if (n > 1) {
    pool->fn = fn;
    pool->ctx = ctx;
    count_members(pool, n);
    publish(pool, n);
  }
  fn(ctx, 0, n);
  if (n > 1) wait_for_members(pool);
  pthread_mutex_unlock(&pool->run_lock);
}
