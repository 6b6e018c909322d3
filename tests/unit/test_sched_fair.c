// tests/unit/test_sched_fair.c - who waits how long. A server is simulated, in steps of 10 ms: it
// reads 1000 tokens of prompts a second in the order given, and gives each running answer a token
// every 50 ms. Bounds are those that sched.h and fair.h promise, with a little to spare.
// CTest: no-tsan
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "sched/fair_share.h"
#include "sched/sched.h"
#include "unit/testing.h"

enum { MAX_REQS = 2000, MAX_SEQS = 8, READ_A_STEP = 10, STEPS_A_TOKEN = 5, STEP_MS = 10 };

#define MS 1000000u

typedef struct {
  uint64_t tenant;
  uint32_t weight, n_prompt, max_tokens;
  uint32_t at_ms; // when it comes
  // what became of it
  int32_t *tokens;
  uint32_t n_past, n_output;
  bool is_leaving;
  uint64_t first_ms, end_ms; // since the simulation began; 0: not yet
} sreq;

typedef struct {
  td_sched *sched;
  sreq r[MAX_REQS];
  uint32_t n; // in order of arrival
  uint32_t order[MAX_SEQS], n_running;
  uint64_t now_ms;
} sim;

static sim *open_sim(uint32_t n_pages, uint32_t max_waiting) {
  td_err err;
  sim *s = calloc(1, sizeof *s);
  const td_sched_opts opts = {.max_seqs = MAX_SEQS,
                              .n_pages = n_pages,
                              .page_tokens = 64,
                              .max_waiting = max_waiting,
                              .prefill_ahead = 50};
  assert_int_equal(td_sched_open(&s->sched, &opts, &err), TD_OK);
  return s;
}

static void close_sim(sim *s) {
  td_sched_close(s->sched);
  for (uint32_t i = 0; i < s->n; i++)
    free(s->r[i].tokens);
  free(s);
}

// Prompts have nothing in common. Returns the id.
static uint32_t come(sim *s, uint32_t at_ms, uint64_t tenant, uint32_t n_prompt,
                     uint32_t max_tokens) {
  uint32_t id = s->n++;
  assert_true(id < MAX_REQS && (id == 0 || s->r[id - 1].at_ms <= at_ms));
  s->r[id] = (sreq){.tenant = tenant,
                    .weight = 1,
                    .n_prompt = n_prompt,
                    .max_tokens = max_tokens,
                    .at_ms = at_ms,
                    .tokens = calloc(n_prompt + max_tokens, sizeof(int32_t))};
  s->r[id].tokens[0] = (int32_t)id;
  return id;
}

static void submit(sim *s, uint32_t id) {
  sreq *r = &s->r[id];
  const td_sched_job job = {.tokens = r->tokens,
                            .n_prompt = r->n_prompt,
                            .max_tokens = r->max_tokens,
                            .tenant = r->tenant,
                            .weight = r->weight};
  td_err err;
  assert_int_equal(td_sched_submit(s->sched, id, &job, s->now_ms * MS, &err), TD_OK);
}

static void stop(sim *s, uint32_t id) {
  uint32_t i = 0;
  while (s->order[i] != id)
    i++;
  s->n_running--;
  memmove(&s->order[i], &s->order[i + 1], (s->n_running - i) * sizeof s->order[0]);
  s->r[id].is_leaving = false;
}

static void put_first(sim *s, uint32_t id) {
  uint32_t i = 0;
  while (s->order[i] != id)
    i++;
  memmove(&s->order[1], &s->order[0], i * sizeof s->order[0]);
  s->order[0] = id;
}

static void pump(sim *s) {
  td_growth growth;
  td_admission got;
  uint64_t id, now_ns = s->now_ms * MS;
  while (td_sched_grow(s->sched, &growth))
    continue;
  while (td_sched_preempt(s->sched, now_ns, &id))
    s->r[id].is_leaving = true;
  while (td_sched_admit(s->sched, now_ns, &got)) {
    s->order[s->n_running++] = (uint32_t)got.id;
    if (got.is_urgent) put_first(s, (uint32_t)got.id);
    s->r[got.id].n_past = got.n_cached;
  }
  if (td_sched_next_prefill(s->sched, NULL, NULL, &id)) put_first(s, (uint32_t)id);
}

static uint32_t n_to_prefill(const sreq *r) {
  return r->n_prompt + (r->n_output ? r->n_output - 1 : 0);
}

static void note_token(sim *s, uint32_t id) {
  sreq *r = &s->r[id];
  if (!r->n_output++) r->first_ms = s->now_ms;
  if (r->n_output < r->max_tokens) return;
  r->end_ms = s->now_ms;
  stop(s, id);
  td_sched_remove(s->sched, id);
}

// One step of the worker, and what it does before: it lets go of what was called back.
static void step(sim *s) {
  uint32_t running[MAX_SEQS], n = 0, budget = READ_A_STEP;
  for (uint32_t i = 0; i < s->n_running; i++)
    running[n++] = s->order[i];
  s->now_ms += STEP_MS;
  for (uint32_t i = 0; i < n; i++) {
    sreq *r = &s->r[running[i]];
    if (r->is_leaving) {
      stop(s, running[i]);
      td_sched_requeue(s->sched, running[i], r->n_output);
    } else if (r->n_past < n_to_prefill(r)) {
      uint32_t left = n_to_prefill(r) - r->n_past, n_read = left < budget ? left : budget;
      budget -= n_read;
      r->n_past += n_read;
      if (n_read) td_sched_progress(s->sched, running[i], r->n_past, s->now_ms * MS);
      if (r->n_past == r->n_prompt && !r->n_output) note_token(s, running[i]);
    } else if (s->now_ms / STEP_MS % STEPS_A_TOKEN == 0) {
      td_sched_progress(s->sched, running[i], ++r->n_past, s->now_ms * MS);
      note_token(s, running[i]);
    }
  }
}

static void run_until(sim *s, uint64_t end_ms) {
  static uint32_t next; // the first that has not come
  if (s->now_ms == 0) next = 0;
  while (s->now_ms < end_ms) {
    for (; next < s->n && s->r[next].at_ms <= s->now_ms; next++)
      submit(s, next);
    pump(s);
    step(s);
  }
}

static uint64_t first_token_ms(const sim *s, uint32_t id) {
  assert_true(s->r[id].first_ms > 0);
  return s->r[id].first_ms - s->r[id].at_ms;
}

static uint64_t worst_first_token_ms(const sim *s, uint64_t tenant, uint32_t n_prompt) {
  uint64_t worst = 0;
  for (uint32_t i = 0; i < s->n; i++) {
    if (s->r[i].tenant != tenant || s->r[i].n_prompt != n_prompt) continue;
    uint64_t ms = first_token_ms(s, i);
    if (ms > worst) worst = ms;
  }
  return worst;
}

// ---- one tenant ---------------------------------------------------------------------------------

// A long prompt is read while short ones come all the time, two thirds of what can be read: they do
// not stand after it, and it does not wait for them to end.
TEST(short_prompts_and_a_long_one) {
  sim *s = open_sim(2000, 2 * MAX_REQS);
  uint32_t long_one = 0;
  for (uint32_t ms = 0; ms < 100000; ms += 150) {
    come(s, ms, 0, 100, 2);
    if (ms == 900) long_one = come(s, ms, 0, 20000, 2);
  }
  run_until(s, 140000);
  assert_true(worst_first_token_ms(s, 0, 100) <= 500);
  assert_true(first_token_ms(s, long_one) <= 4 * 20000);
  close_sim(s);
}

// Short prompts for a fifth more than can be read: a long one begins when it is due.
TEST(a_long_prompt_in_overload) {
  sim *s = open_sim(2000, 2 * MAX_REQS);
  uint32_t long_one = come(s, 0, 0, 10000, 2);
  for (uint32_t ms = 0; ms < 100000; ms += 80)
    come(s, ms, 0, 100, 1);
  run_until(s, 140000);
  assert_true(first_token_ms(s, long_one) <= 6 * 10000);
  close_sim(s);
}

// ---- several ------------------------------------------------------------------------------------

// Somebody asks a thousand things at once; another asks one.
TEST(a_flood_delays_nobody_else) {
  sim *s = open_sim(2000, 2 * MAX_REQS);
  for (uint32_t i = 0; i < 1000; i++)
    come(s, 0, 1, 500, 100);
  uint32_t single = come(s, 20000, 2, 50, 20), again = come(s, 40000, 2, 50, 20);
  uint32_t large = come(s, 60000, 3, 4000, 20);
  run_until(s, 80000);
  assert_true(first_token_ms(s, single) <= 2000);
  assert_true(first_token_ms(s, again) <= 2000);
  assert_true(first_token_ms(s, large) <= 2 * 4000 + 2000); // half of the machine is its
  close_sim(s);
}

// One tenant's endless answers have every sequence, or every page: one of them makes room.
TEST(endless_answers_make_room) {
  for (int is_short_of_pages = 0; is_short_of_pages < 2; is_short_of_pages++) {
    sim *s = open_sim(is_short_of_pages ? 60 : 2000, 20);
    for (uint32_t i = 0; i < MAX_SEQS; i++)
      come(s, 0, 1, 300, 3500);
    uint32_t other = come(s, 30000, 2, 500, 100);
    run_until(s, 60000);
    assert_true(first_token_ms(s, other) <= 4 * 500 + 1000 + 500 + 200);
    assert_true(s->r[other].end_ms > 0);
    run_until(s, is_short_of_pages ? 1500000 : 250000); // nobody is left behind
    for (uint32_t i = 0; i < s->n; i++)
      assert_int_equal(s->r[i].n_output, s->r[i].max_tokens);
    assert_true(td_sched_n_preemptions(s->sched) > 0);
    close_sim(s);
  }
}

// Another's short prompt, or the first chunk of a long one, is computed in the next step, however
// much of somebody's long prompt is left, and however often the other asks.
TEST(a_newcomer_does_not_wait_for_a_long_prompt) {
  for (uint32_t kind = 0; kind < 3; kind++) { // a client again and again, a new one each time
    sim *s = open_sim(2000, 2 * MAX_REQS);
    const uint32_t long_one = come(s, 0, 1, 8000, 1);
    for (uint32_t ms = 305; ms < 8000; ms += 210)
      come(s, ms, kind == 1 ? 2 + ms : 2, kind == 2 ? 15 : 10, 1);
    run_until(s, 12000);
    for (uint32_t i = 1; i < s->n; i++)
      assert_true(first_token_ms(s, i) <= (kind == 2 ? 4 : 2) * STEP_MS);
    assert_true(first_token_ms(s, long_one) <= 8000 + 40 * 20);
    close_sim(s);
  }
}

// Two long prompts and a third later: each tenant has its share of the chunks, whoever came first.
TEST(long_prompts_take_turns) {
  sim *s = open_sim(2000, 2 * MAX_REQS);
  const uint32_t first = come(s, 0, 1, 4000, 1), second = come(s, 1005, 2, 1000, 1);
  const uint32_t heavy = come(s, 1005, 3, 1500, 1);
  s->r[heavy].weight = 2;
  run_until(s, 10000);
  // The others are done when 1000 + 1000 + 2000 of 4000, 1000 and 1500 tokens could be computed.
  assert_in_range(first_token_ms(s, second), 3200, 3600);
  assert_in_range(first_token_ms(s, heavy), 2800, 3100);
  assert_in_range(first_token_ms(s, first), 6490, 6520);
  close_sim(s);
}

// New tenants come all the time, more than can be served: a long prompt still has its turns.
TEST(newcomers_do_not_starve_a_long_prompt) {
  sim *s = open_sim(2000, 2 * MAX_REQS);
  const uint32_t long_one = come(s, 0, 1, 200, 1);
  for (uint32_t ms = 100; ms < 15000; ms += 9)
    come(s, ms, 2 + ms, 10, 1);
  run_until(s, 15000);
  assert_true(first_token_ms(s, long_one) < 6000);
  close_sim(s);
}

// A request that waits for what another leaves in the prefix cache does not hold up others.
TEST(nobody_else_waits_for_a_prefix) {
  sim *s = open_sim(2000, 2 * MAX_REQS);
  come(s, 0, 1, 4000, 1);
  const uint32_t alike = come(s, 105, 2, 4000, 1), other = come(s, 505, 3, 10, 1);
  s->r[alike].tokens[0] = 0;
  run_until(s, 10000);
  assert_true(first_token_ms(s, other) <= 2 * STEP_MS);
  assert_true(first_token_ms(s, alike) <= 4000);
  close_sim(s);
}

// What somebody had computed or generated while nobody else wanted anything is no debt.
TEST(no_debt_from_being_alone) {
  sim *s = open_sim(2000, 2 * MAX_REQS);
  come(s, 0, 3, 10, 2000);
  come(s, 0, 1, 5000, 1000);
  const uint32_t large = come(s, 20005, 2, 8000, 1), again = come(s, 20505, 1, 100, 1);
  run_until(s, 40000);
  assert_true(first_token_ms(s, again) <= 300);
  assert_true(first_token_ms(s, large) <= 8200);
  close_sim(s);
}

static uint32_t n_answered(const sim *s, uint64_t tenant, uint64_t begin_ms, uint64_t end_ms) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < s->n; i++) {
    uint64_t ms = s->r[i].end_ms;
    n += s->r[i].tenant == tenant && ms > begin_ms && ms <= end_ms;
  }
  return n;
}

TEST(weights) {
  sim *s = open_sim(2000, 2 * MAX_REQS);
  for (uint32_t i = 0; i < 600; i++) {
    uint32_t id = come(s, 0, i % 2, 200, 30);
    if (i % 2) s->r[id].weight = 3;
  }
  run_until(s, 60000);
  uint32_t light = n_answered(s, 0, 0, 60000), heavy = n_answered(s, 1, 0, 60000);
  assert_true(light + heavy > 200);
  assert_in_range(heavy * 100 / light, 260, 340);
  close_sim(s);
}

// Neither having been away nor having been served alone counts when both are there.
TEST(no_credit_for_being_away) {
  sim *s = open_sim(2000, 2 * MAX_REQS);
  for (uint32_t i = 0; i < 100; i++)
    come(s, 1000 * i, 0, 500, 10);
  for (uint32_t i = 0; i < 400; i++)
    come(s, 100000, i % 2, 200, 10);
  run_until(s, 140000);
  uint32_t a = n_answered(s, 0, 102000, 140000), b = n_answered(s, 1, 102000, 140000);
  assert_true(a + b > 150);
  assert_in_range(a * 100 / (a + b), 45, 55);
  close_sim(s);
}

// ---- the queue's end ----------------------------------------------------------------------------

static td_status try_submit(td_sched *sched, uint64_t id, uint64_t tenant) {
  static const int32_t tokens[110];
  const td_sched_job job = {.tokens = tokens, .n_prompt = 100, .max_tokens = 10, .tenant = tenant};
  td_err err;
  return td_sched_submit(sched, id, &job, 0, &err);
}

// Whoever comes finds a place, however many one has in the queue.
TEST(the_queue_is_for_all) {
  td_sched *sched;
  td_err err;
  const td_sched_opts opts = {
      .max_seqs = 2, .n_pages = 10, .page_tokens = 64, .max_waiting = 64, .prefill_ahead = 1};
  static const uint32_t places[] = {32, 16, 8, 4, 2, 1, 1, 0};
  uint64_t id = 0;
  assert_int_equal(td_sched_open(&sched, &opts, &err), TD_OK);
  for (uint64_t tenant = 0; tenant < TD_COUNT(places); tenant++) {
    uint32_t n = 0;
    while (try_submit(sched, id, tenant) == TD_OK) {
      id++;
      n++;
    }
    assert_int_equal(n, places[tenant]);
  }
  // The place of one that goes is for who has least.
  assert_int_equal(td_sched_remove(sched, 0), TD_SCHED_WAITING);
  assert_int_equal(try_submit(sched, id, 0), TD_EAGAIN);
  assert_int_equal(try_submit(sched, id, 100), TD_OK);
  td_sched_close(sched);
}

// 100 prompts of 100 tokens, 1 ms each: half of them are read in 5 s; and when each takes 400 ms to
// be followed by the next, half of them have begun in 20 s.
TEST(when_to_ask_again) {
  td_sched *sched;
  td_err err;
  td_admission got;
  const td_sched_opts opts = {
      .max_seqs = 1, .n_pages = 10, .page_tokens = 64, .max_waiting = 1000, .prefill_ahead = 1};
  assert_int_equal(td_sched_open(&sched, &opts, &err), TD_OK);
  assert_int_equal(td_sched_retry_ns(sched, 0), 0);
  for (uint64_t id = 0; id < 100; id++)
    assert_int_equal(try_submit(sched, id, 0), TD_OK);
  assert_int_equal(td_sched_retry_ns(sched, 0), 5000ull * MS);
  for (uint64_t id = 0; id < 40; id++) {
    uint64_t now_ns = 400 * MS * id;
    assert_true(td_sched_admit(sched, now_ns, &got));
    td_sched_progress(sched, got.id, 100, now_ns + 100 * MS);
    td_sched_remove(sched, got.id);
  }
  uint64_t ms = td_sched_retry_ns(sched, 39ull * 400 * MS) / MS;
  assert_in_range(ms, 60 * 400 / 2 * 9 / 10, 60 * 400 / 2);
  // Nothing moves any more.
  assert_int_equal(td_sched_retry_ns(sched, (39ull * 400 + 10000) * MS) / MS, 60 * 10000 / 2);
  td_sched_close(sched);
}
