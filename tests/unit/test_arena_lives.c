// tests/unit/test_arena_lives.c - an arena of experts through many short lives: two threads and
// another process take, prefetch and release at random, with memory for one layer's top-k or for
// more, while reads end late, in any order, cut short or not at all, and the other process is
// killed, or dies within a change of the table. What is READY is the expert's own data.
// CTest: slow

#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

#include "support/folder.h"
#include "unit/arena_test.h"
#include "unit/ref.h"
#include "unit/sanitized.h"

enum {
  N_LIVES = 200,
  N_OPS = IS_TSAN || IS_ASAN ? 20 : 60, // of a thread
  N_PLAYERS = 2,                        // threads
  N_HELD = 24,                          // experts that a player holds at most
  N_AT_ONCE = 4,
  N_EXPERTS = 8, // of a layer
  // In the arena's head: the table's offset, the lock, and what follows from the slots.
  TABLE_AT = 6 * 4 + 2 * 8,
  LOCK_AT = 6 * 4 + 5 * 8,
  COUNTS_AT = LOCK_AT + sizeof(pthread_mutex_t) + 2 * 4 + 8 * 16 + 8,
};

typedef struct {
  const td_store *files;
  const td_model *model;
  int fd;
  td_expert_arena *arena;
  uint64_t rng;
  uint32_t n_layers;
  uint32_t n_held, layers[N_HELD];
  td_taken_expert held[N_HELD];
} player;

#ifdef __SANITIZE_THREAD__
// In the place of one by which it does not see that a lock is held whose owner died.
int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *until) {
  (void)until;
  usleep(1000);
  return pthread_mutex_trylock(mutex);
}
#endif

// ---- one player ---------------------------------------------------------------------------------

// A read is of whole pages, so that neighbours of what cannot be read cannot be either.
static void check_content(const player *p, uint32_t layer, const td_taken_expert *taken) {
  const td_expert_part *parts = td_expert_parts(td_expert_arena_places(p->arena), layer,
                                                taken->expert);
  bool is_bad = false;
  td_err err;
  for (int i = 0; i < TD_EXPERT_PARTS; i++) {
    const uint64_t begin = td_expert_part_begin(&parts[i]);
    is_bad |= begin < atomic_load(&bad_to) &&
              begin + td_expert_part_span(&parts[i]) > atomic_load(&bad_from);
  }
  if (td_expert_arena_state(p->arena, taken->slot) == TD_SLOT_FAILED) {
    assert_true(is_bad);
    assert_int_equal(td_expert_arena_failure(p->arena, taken->slot, &err), TD_EIO);
    return;
  }
  assert_false(is_bad);
  for (int i = 0; i < TD_EXPERT_PARTS; i++) {
    const td_shard_info shard = td_store_shard(p->files, parts[i].shard);
    const void *data = td_expert_arena_data(p->arena, layer, taken, i);
    assert_memory_equal(data, (const char *)shard.bytes + parts[i].offset, parts[i].n_bytes);
  }
}

static void await(const player *p, const td_taken_expert *taken) {
  for (;;) {
    const uint32_t n_events = td_expert_arena_events(p->arena);
    if (td_expert_arena_state(p->arena, taken->slot) != TD_SLOT_LOADING) return;
    td_expert_arena_wait(p->arena, n_events);
  }
}

static void release(player *p, uint32_t i) {
  td_expert_arena_release(p->arena, &p->held[i], 1);
  p->held[i] = p->held[--p->n_held];
  p->layers[i] = p->layers[p->n_held];
}

// Of a layer, some at once, each once.
static uint32_t choose(player *p, td_taken_expert chosen[N_AT_ONCE]) {
  const uint32_t n = 1 + ref_below(&p->rng, N_AT_ONCE), first = ref_below(&p->rng, N_EXPERTS);
  for (uint32_t i = 0; i < n; i++)
    chosen[i] = (td_taken_expert){.expert = (first + i * 3) % N_EXPERTS, .slot = -1};
  return n;
}

static void take_some(player *p, uint32_t layer) {
  td_taken_expert *more = p->held + p->n_held;
  uint32_t n_taken = 0;
  if (p->n_held + N_AT_ONCE > N_HELD) return;
  const uint32_t n = choose(p, more);
  const uint32_t n_found = td_expert_arena_take(p->arena, layer, more, n, ref_below(&p->rng, 2));
  for (uint32_t i = 0; i < n; i++) {
    if (more[i].slot < 0) continue;
    p->layers[p->n_held + n_taken] = layer;
    more[n_taken++] = more[i];
  }
  assert_int_equal(n_taken, n_found);
  p->n_held += n_taken;
}

static void guess_some(player *p, uint32_t layer) {
  td_taken_expert guesses[N_AT_ONCE];
  uint8_t is_wanted[N_EXPERTS];
  const uint32_t n = choose(p, guesses);
  for (uint32_t e = 0; e < N_EXPERTS; e++)
    is_wanted[e] = ref_below(&p->rng, 2) != 0;
  td_expert_arena_prefetch(p->arena, layer, guesses, n);
  td_expert_arena_end_prefetch(p->arena, guesses, n, is_wanted);
}

static void play(player *p, uint32_t n_ops) {
  for (uint32_t i = 0; i < n_ops; i++) {
    const uint32_t layer = ref_below(&p->rng, p->n_layers), op = ref_below(&p->rng, 8);
    const uint32_t at = p->n_held ? ref_below(&p->rng, p->n_held) : 0;
    if (op < 3) {
      take_some(p, layer);
    } else if (op == 3) {
      guess_some(p, layer);
    } else if (p->n_held && op < 6) {
      release(p, at);
    } else if (p->n_held) {
      await(p, &p->held[at]);
      check_content(p, p->layers[at], &p->held[at]);
    }
  }
}

static void open_player(player *p) {
  td_err err;
  if (td_expert_arena_open(&p->arena, p->model, p->fd, &odd_drive, &err) != TD_OK)
    fail_msg("%s", err.msg);
}

static void *run_player(void *arg) {
  player *p = arg;
  play(p, N_OPS);
  while (p->n_held)
    release(p, 0);
  return NULL;
}

// ---- another process ----------------------------------------------------------------------------

// Dies as if in the middle of a change: what is told of the slots elsewhere is anything.
static void die_within(player *p) {
  size_t n_bytes;
  char *head = (char *)(uintptr_t)td_expert_arena_memory(p->arena, &n_bytes);
  uint64_t table_at;
  memcpy(&table_at, head + TABLE_AT, sizeof table_at);
  pthread_mutex_lock((pthread_mutex_t *)(void *)(head + LOCK_AT));
  int32_t *table = (int32_t *)(void *)(head + table_at);
  for (uint32_t i = 0; i < p->n_layers * N_EXPERTS; i++)
    table[i] = (int32_t)ref_below(&p->rng, 1u << 20) - 5;
  for (int i = 0; i < 2; i++)
    ((uint32_t *)(void *)(head + COUNTS_AT))[i] = ref_below(&p->rng, 1u << 20);
  kill(getpid(), SIGKILL);
}

static pid_t fork_player(player p, uint32_t seed) {
  const pid_t pid = fork();
  assert_true(pid >= 0);
  if (pid) return pid;
  p.rng = seed;
  const bool dies_within = ref_below(&p.rng, 2);
  open_player(&p);
  play(&p, ref_below(&p.rng, N_OPS));
  if (dies_within) die_within(&p);
  for (;;)
    play(&p, N_OPS);
}

// ---- lives --------------------------------------------------------------------------------------

// Nothing is left of the others: every expert can be taken, and then the drive is idle.
static void check_end(player *p, const char *dir) {
  td_expert_watch watch;
  td_err err;
  open_player(p);
  for (uint32_t layer = 0; layer < p->n_layers; layer++) {
    for (uint32_t e = 0; e < N_EXPERTS; e++) {
      td_taken_expert taken = {.expert = e};
      while (!td_expert_arena_take(p->arena, layer, &taken, 1, false))
        td_expert_arena_wait(p->arena, td_expert_arena_events(p->arena));
      await(p, &taken);
      check_content(p, layer, &taken);
      td_expert_arena_release(p->arena, &taken, 1);
    }
  }
  assert_int_equal(td_expert_watch_open(&watch, p->fd, "", dir, &err), TD_OK);
  while (td_expert_watch_is_busy(&watch)) // what nobody holds any more
    td_expert_arena_wait(p->arena, td_expert_arena_events(p->arena));
  td_expert_watch_close(&watch);
  const td_expert_arena_stats stats = td_expert_arena_stats_of(p->arena);
  assert_true(stats.n_ready <= stats.n_slots);
  td_expert_arena_close(p->arena);
}

static void live(const char *dir, const td_store *files, uint32_t seed) {
  td_model *model;
  td_err err;
  pthread_t threads[N_PLAYERS];
  player players[N_PLAYERS];
  const uint32_t n_slots = seed % 4 ? 1 + seed % 23 : 0;
  const int fd = load_weights(dir, n_slots);
  assert_int_equal(td_model_open_weights(&model, dir, fd, &err), TD_OK);
  td_expert_places places;
  assert_int_equal(td_expert_places_open(&places, model, &err), TD_OK);
  assert_int_equal(places.n_experts, N_EXPERTS);
  player p = {.files = files, .model = model, .fd = fd, .n_layers = places.n_layers, .rng = seed};
  const uint32_t n_keys = p.n_layers * N_EXPERTS;
  const uint32_t bad_key = ref_below(&p.rng, 2 * n_keys); // or none
  const td_expert_part bad = places.parts[(size_t)(bad_key % n_keys) * TD_EXPERT_PARTS + 1];
  atomic_store(&bad_to, bad_key < n_keys ? bad.offset + bad.n_bytes : 0);
  atomic_store(&bad_from, bad_key < n_keys ? bad.offset : UINT64_MAX);
  atomic_store(&drive_seed, seed);
  const pid_t other = fork_player(p, seed + 1); // before there are threads
  for (uint32_t i = 0; i < N_PLAYERS; i++) {
    players[i] = p;
    players[i].rng += 77 * (i + 1);
    open_player(&players[i]);
  }
  for (uint32_t i = 0; i < N_PLAYERS; i++)
    assert_int_equal(pthread_create(&threads[i], NULL, run_player, &players[i]), 0);
  usleep(ref_below(&p.rng, 20000));
  kill(other, SIGKILL);
  assert_int_equal(waitpid(other, NULL, 0), other);
  for (uint32_t i = 0; i < N_PLAYERS; i++)
    pthread_join(threads[i], NULL);
  for (uint32_t i = 0; i < N_PLAYERS; i++)
    td_expert_arena_close(players[i].arena);
  check_end(&p, dir);
  td_expert_places_close(&places);
  td_model_close(model);
  close(fd);
}

TEST(lives) {
  char *dir = strdup(td_test_golden("qwen3_moe"));
  td_store *files;
  td_err err;
  assert_int_equal(td_store_open(&files, dir, &err), TD_OK);
  for (uint32_t seed = 1; seed <= N_LIVES; seed++)
    live(dir, files, seed);
  td_store_close(files);
  free(dir);
}
