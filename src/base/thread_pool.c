// src/base/thread_pool.c - the thread team.
// A run is published by advancing `turn`: the number of the run and of the members that take part,
// in one word, so that whoever reads it knows whether it is meant. Members spin on it for a
// while and then sleep on a condition variable. The publisher wakes them only when some sleep: a
// member announces itself in n_asleep before it looks at turn for the last time, the publisher
// advances turn before it reads n_asleep, both sequentially consistent, so one of them sees the
// other. Members beyond those that take part are parked on a condition of their own, which runs
// leave alone until they are more. The end of a run is signalled the same way the other way round,
// through n_running and runner_asleep.
#include "base/thread_pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#include "base/thread.h"

// Pauses before a member sleeps, half a millisecond to two: longer than one thread works alone
// between the runs of a step. A core that was idle may take half a millisecond to come back, and
// most runs take less.
enum { SPINS = 40000 };

typedef void (*run_fn)(void *ctx, unsigned member, unsigned n_members);

struct td_team {
  unsigned n_threads;
  unsigned n_started; // threads to join; members 1 to n_started
  unsigned spins;     // 0 where members outnumber CPUs
  pthread_t *threads; // [n_threads - 1]
  struct member *members;
  td_nodes nodes;
  td_cpu *places;  // [n_threads]; NULL: members are not pinned
  unsigned *ranks; // [n_threads], each on its node

  pthread_mutex_t run_lock; // held for a whole run
  run_fn fn;                // of the current run; written before turn advances
  void *ctx;

  const _Atomic uint32_t *n_active;   // members of the next run; NULL: all
  _Alignas(64) _Atomic uint64_t turn; // run << 16 | members
  _Atomic bool stopping;
  _Alignas(64) _Atomic unsigned n_running; // members other than the runner still at work
  _Atomic unsigned n_asleep;
  _Atomic bool runner_asleep;
  pthread_mutex_t sleep_lock;
  pthread_cond_t wake, unpark, done;
};

struct member {
  td_team *team;
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

// Sleeps until a turn behind `seen` is for the member.
static uint64_t sleep_for_turn(td_team *team, uint64_t seen, unsigned member) {
  uint64_t turn;
  pthread_mutex_lock(&team->sleep_lock);
  while (!is_meant(turn = atomic_load(&team->turn), seen, member)) {
    if (member >= members_of(turn)) {
      pthread_cond_wait(&team->unpark, &team->sleep_lock);
      continue;
    }
    atomic_fetch_add(&team->n_asleep, 1);
    if (atomic_load(&team->turn) == turn) pthread_cond_wait(&team->wake, &team->sleep_lock);
    atomic_fetch_sub(&team->n_asleep, 1);
  }
  pthread_mutex_unlock(&team->sleep_lock);
  return turn;
}

static uint64_t wait_for_turn(td_team *team, uint64_t seen, unsigned member) {
  for (unsigned i = 0; i < team->spins; i++) {
    uint64_t turn = atomic_load_explicit(&team->turn, memory_order_acquire);
    if (is_meant(turn, seen, member)) return turn;
    if (member >= members_of(turn)) break; // it may be a while
    pause_cpu();
  }
  return sleep_for_turn(team, seen, member);
}

static void *member_main(void *arg) {
  struct member *member = arg;
  td_team *team = member->team;
  for (uint64_t turn = team->n_threads;;) { // as the team was made: run 0
    turn = wait_for_turn(team, turn, member->idx);
    if (atomic_load(&team->stopping)) return NULL;
    team->fn(team->ctx, member->idx, members_of(turn));
    if (atomic_fetch_sub(&team->n_running, 1) == 1 && atomic_load(&team->runner_asleep)) {
      pthread_mutex_lock(&team->sleep_lock);
      pthread_cond_signal(&team->done);
      pthread_mutex_unlock(&team->sleep_lock);
    }
  }
}

static void publish(td_team *team, unsigned n_members) {
  uint64_t before = atomic_load(&team->turn);
  atomic_store(&team->turn, ((before >> MEMBER_BITS) + 1) << MEMBER_BITS | n_members);
  bool grew = n_members > members_of(before);
  if (!grew && atomic_load(&team->n_asleep) == 0) return;
  pthread_mutex_lock(&team->sleep_lock);
  pthread_cond_broadcast(&team->wake);
  if (grew) pthread_cond_broadcast(&team->unpark);
  pthread_mutex_unlock(&team->sleep_lock);
}

static void wait_for_members(td_team *team) {
  for (unsigned i = 0; i < team->spins; i++) {
    if (atomic_load_explicit(&team->n_running, memory_order_acquire) == 0) return;
    pause_cpu();
  }
  pthread_mutex_lock(&team->sleep_lock);
  atomic_store(&team->runner_asleep, true);
  while (atomic_load(&team->n_running) != 0)
    pthread_cond_wait(&team->done, &team->sleep_lock);
  atomic_store(&team->runner_asleep, false);
  pthread_mutex_unlock(&team->sleep_lock);
}

// ---- where members are ------------------------------------------------------------------------

unsigned td_team_node(const td_team *team, unsigned member) {
  return team->places ? team->places[member].node : member % team->nodes.n;
}

unsigned td_team_rank(const td_team *team, unsigned member) {
  return team->ranks[member];
}

static void set_ranks(td_team *team) {
  unsigned n_on[TD_MAX_NODES] = {0};
  for (unsigned i = 0; i < team->n_threads; i++)
    team->ranks[i] = n_on[td_team_node(team, i)]++;
}

// A preference: failure costs speed alone.
static void place_member(const td_team *team, unsigned member, pthread_t thread) {
  if (!team->places) {
    td_nodes_bind(&team->nodes, td_team_node(team, member), thread);
    return;
  }
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET((size_t)team->places[member].id, &one);
  pthread_setaffinity_np(thread, sizeof one, &one);
}

void td_team_sit(const td_team *team, cpu_set_t *before) {
  pthread_getaffinity_np(pthread_self(), sizeof *before, before);
  place_member(team, 0, pthread_self());
}

void td_team_stand(const cpu_set_t *before) {
  pthread_setaffinity_np(pthread_self(), sizeof *before, before);
}

static void choose_places(td_team *team, bool from_end) {
  td_cpu *cpus = calloc(TD_MAX_CPUS, sizeof *cpus);
  td_cpu *places = calloc(team->n_threads, sizeof *places);
  unsigned n = cpus ? td_cpus_get(cpus, &team->nodes) : 0;
  if (places && td_cpus_place(places, team->n_threads, cpus, n, team->nodes.n, from_end)) {
    team->places = places;
  } else {
    free(places);
  }
  free(cpus);
}

// ---- open and close ---------------------------------------------------------------------------

static td_status start_members(td_team *team, td_err *err) {
  for (unsigned i = 1; i < team->n_threads; i++) {
    struct member *member = &team->members[i - 1];
    *member = (struct member){.team = team, .idx = i};
    if (td_thread_start(&team->threads[i - 1], member_main, member) != 0) {
      return td_fail(err, TD_ENOMEM, "cannot start thread %u of %u: lower the number of threads", i,
                     team->n_threads);
    }
    team->n_started = i;
    place_member(team, i, team->threads[i - 1]);
  }
  return TD_OK;
}

td_status td_team_open(td_team **out, const td_team_opts *opts, td_err *err) {
  *out = NULL;
  td_team *team = aligned_alloc(64, sizeof *team);
  if (!team) return td_fail(err, TD_ENOMEM, "no memory for a thread team");
  unsigned n_cpus = td_cpu_count();
  *team = (td_team){.n_threads = opts->n_threads ? opts->n_threads : n_cpus,
                    .nodes = opts->nodes ? *opts->nodes : (td_nodes){.n = 1}};
  TD_CHECK(team->n_threads < 1u << MEMBER_BITS);
  team->turn = team->n_threads;
  team->spins = team->n_threads <= n_cpus ? SPINS : 0;
  pthread_mutex_init(&team->run_lock, NULL);
  pthread_mutex_init(&team->sleep_lock, NULL);
  pthread_cond_init(&team->wake, NULL);
  pthread_cond_init(&team->unpark, NULL);
  pthread_cond_init(&team->done, NULL);
  team->threads = calloc(team->n_threads, sizeof *team->threads);
  team->members = calloc(team->n_threads, sizeof *team->members);
  team->ranks = calloc(team->n_threads, sizeof *team->ranks);
  if (opts->pin) choose_places(team, opts->from_end);
  td_status status = TD_OK;
  if (!team->threads || !team->members || !team->ranks) {
    status = td_fail(err, TD_ENOMEM, "no memory for a team of %u threads", team->n_threads);
  } else {
    set_ranks(team);
    status = start_members(team, err);
  }
  if (status != TD_OK) {
    td_team_close(team);
    return status;
  }
  *out = team;
  return TD_OK;
}

void td_team_close(td_team *team) {
  if (!team) return;
  atomic_store(&team->stopping, true);
  publish(team, team->n_threads);
  for (unsigned i = 0; i < team->n_started; i++)
    pthread_join(team->threads[i], NULL);
  pthread_cond_destroy(&team->done);
  pthread_cond_destroy(&team->unpark);
  pthread_cond_destroy(&team->wake);
  pthread_mutex_destroy(&team->sleep_lock);
  pthread_mutex_destroy(&team->run_lock);
  free(team->places);
  free(team->ranks);
  free(team->members);
  free(team->threads);
  free(team);
}

unsigned td_team_size(const td_team *team) {
  return team->n_threads;
}

void td_team_follow(td_team *team, const _Atomic uint32_t *n_active) {
  pthread_mutex_lock(&team->run_lock);
  team->n_active = n_active;
  pthread_mutex_unlock(&team->run_lock);
}

// A number that stands for itself: nothing else is published with it.
static unsigned n_active_of(const td_team *team) {
  unsigned n = team->n_active ? atomic_load_explicit(team->n_active, memory_order_relaxed) : 0;
  return n && n < team->n_threads ? n : team->n_threads;
}

void td_team_run(td_team *team, run_fn fn, void *ctx) {
  pthread_mutex_lock(&team->run_lock);
  unsigned n = n_active_of(team);
  if (n > 1) {
    team->fn = fn;
    team->ctx = ctx;
    atomic_store(&team->n_running, n - 1);
    publish(team, n);
  }
  fn(ctx, 0, n);
  if (n > 1) wait_for_members(team);
  pthread_mutex_unlock(&team->run_lock);
}

typedef struct {
  void (*fn)(void *ctx, size_t begin, size_t end);
  void *ctx;
  size_t n_items, grain;
  _Atomic size_t next;
} for_run;

static void take_pieces(void *ctx, unsigned member, unsigned n_members) {
  (void)member;
  (void)n_members;
  for_run *run = ctx;
  for (;;) {
    size_t begin = atomic_fetch_add_explicit(&run->next, run->grain, memory_order_relaxed);
    if (begin >= run->n_items) return;
    size_t left = run->n_items - begin;
    run->fn(run->ctx, begin, begin + (left < run->grain ? left : run->grain));
  }
}

void td_team_for(td_team *team, size_t n_items, size_t grain,
                 void (*fn)(void *ctx, size_t begin, size_t end), void *ctx) {
  if (n_items == 0) return;
  if (grain == 0) grain = 1;
  if (n_items <= grain) {
    fn(ctx, 0, n_items);
    return;
  }
  for_run run = {.fn = fn, .ctx = ctx, .n_items = n_items, .grain = grain};
  td_team_run(team, take_pieces, &run);
}
