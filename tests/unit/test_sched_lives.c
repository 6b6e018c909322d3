// tests/unit/test_sched_lives.c - the scheduler in thousands of simulated lives. A shadow of the KV
// pool holds at every place what the engine would: a hash of all tokens up to there and of how they
// were computed, by prefill or by decode; and for every page a recurrent state, the same hash after
// the last token computed there. After every event: no page is held by two that may write to it,
// each request finds its own tokens and nobody else's, who makes room came later than who needs it
// or is not the only one of its tenant, and of all that run the first gets on. At the end of each
// life every request is answered to its last token or was canceled, and every page is free.
// CTest: no-tsan
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "sched/sched.h"
#include "unit/draw.h"
#include "unit/testing.h"

enum {
  MAX_IDS = 120,
  MAX_PROMPT = 60,
  MAX_PAGES = 40,
  MAX_PAGE_TOKENS = 16,
  MAX_TOKENS = MAX_PAGES * MAX_PAGE_TOKENS + 64,
  N_LIVES = 3000
};

typedef enum { NEW, WAITS, READS, DECODES, GONE } life;

typedef struct {
  life at;
  bool is_leaving;
  int32_t tokens[MAX_TOKENS]; // the prompt, then all of the output, known or not
  uint32_t n_prompt, max_tokens;
  uint32_t n_output; // generated tokens that are known
  uint32_t n_past;   // computed, generated ones included
  const int32_t *pages;
  uint32_t n_pages;
  uint64_t submitted_ns, tenant;
  int32_t source, keep; // copies to be made; -1
  uint32_t n_keep;
} req;

typedef struct {
  td_sched *sched;
  td_sched_opts opts;
  uint64_t now_ns;
  uint32_t n_ids;
  req r[MAX_IDS]; // by id, which is the order of arrival
  uint64_t shadow[MAX_PAGES][MAX_PAGE_TOKENS];
  uint64_t state[MAX_PAGES];
  bool has_states;
  uint64_t n_from_copies;       // tokens found in partial pages
  uint64_t n_cached, n_resumed; // tokens not computed: of new requests, of those that made room
} world;

static bool runs(const req *r) {
  return r->at == READS || r->at == DECODES;
}

static bool stays(const req *r) {
  return runs(r) && !r->is_leaving;
}

static uint32_t least(uint32_t a, uint32_t b) {
  return a < b ? a : b;
}

// Tokens to be computed before the next is drawn.
static uint32_t n_to_prefill(const req *r) {
  return r->n_prompt + (r->n_output ? r->n_output - 1 : 0);
}

static uint32_t capacity(const world *w, const req *r) {
  return r->n_pages * w->opts.page_tokens;
}

static bool shares_output; // of the life that is simulated

// What an engine leaves at a position: it depends on every token up to there, and on the way, but
// for a difference that shares_output lets pass.
static uint64_t next_hash(uint64_t hash, const req *r, uint32_t pos) {
  return (hash ^ (uint64_t)(r->tokens[pos] + 1 + (pos >= r->n_prompt && !shares_output ? 7 : 0))) *
         0x9e3779b97f4a7c15u;
}

static uint64_t hash_at(const req *r, uint32_t pos) {
  uint64_t hash = 1;
  for (uint32_t i = 0; i <= pos; i++)
    hash = next_hash(hash, r, i);
  return hash;
}

static uint64_t *place(world *w, const req *r, uint32_t pos) {
  uint32_t page_tokens = w->opts.page_tokens;
  return &w->shadow[r->pages[pos / page_tokens]][pos % page_tokens];
}

static void check_contents(world *w) {
  const uint32_t page_tokens = w->opts.page_tokens;
  for (uint32_t i = 0; i < w->n_ids; i++) {
    const req *r = &w->r[i];
    uint64_t hash = 1;
    for (uint32_t pos = 0; runs(r) && pos < r->n_past; pos++) {
      hash = next_hash(hash, r, pos);
      const bool is_copied = r->source >= 0 && pos >= r->n_past / page_tokens * page_tokens;
      const int32_t page = is_copied ? r->source : r->pages[pos / page_tokens];
      assert_true(w->shadow[page][pos % page_tokens] == hash);
      const bool is_end = pos + 1 == r->n_past || (pos + 1) % page_tokens == 0;
      assert_true(!w->has_states || !is_end || w->state[page] == hash);
    }
  }
}

// Of those that run, the first has a page for its next token, unless one is about to make room.
static void check_somebody_gets_on(const world *w) {
  const req *first = NULL;
  for (uint32_t i = 0; i < w->n_ids; i++) {
    if (runs(&w->r[i]) && w->r[i].is_leaving) return;
    if (!first && runs(&w->r[i])) first = &w->r[i];
  }
  assert_true(!first || first->n_past < capacity(w, first) ||
              first->n_past == first->n_prompt + first->max_tokens - 1);
}

static void check(world *w) {
  uint32_t n_waiting = 0, n_running = 0, n_held = 0, page_tokens = w->opts.page_tokens;
  uint8_t writers[MAX_PAGES] = {0}, readers[MAX_PAGES] = {0};
  for (uint32_t i = 0; i < w->n_ids; i++) {
    const req *r = &w->r[i];
    n_waiting += r->at == WAITS;
    if (!runs(r)) continue;
    n_running++;
    if (r->source >= 0) readers[r->source]++;
    if (r->keep >= 0) writers[r->keep]++;
    assert_true(r->n_past <= capacity(w, r) && n_to_prefill(r) <= capacity(w, r));
    assert_in_range(r->n_pages, 1, (r->n_prompt + r->max_tokens - 1) / page_tokens + 1);
    for (uint32_t j = 0; j < r->n_pages; j++) {
      assert_in_range(r->pages[j], 0, w->opts.n_pages - 1);
      bool is_whole = (j + 1) * page_tokens <= least(r->n_past, r->n_prompt);
      (is_whole ? readers : writers)[r->pages[j]]++;
    }
  }
  for (uint32_t i = 0; i < w->opts.n_pages; i++) {
    assert_true(writers[i] <= 1 && !(writers[i] && readers[i]));
    n_held += writers[i] || readers[i];
  }
  assert_int_equal(td_sched_n_waiting(w->sched), n_waiting);
  assert_int_equal(td_sched_n_running(w->sched), n_running);
  assert_true(n_running <= w->opts.max_seqs);
  // Beside them, the published twin of a page that two wrote at once is held.
  assert_true(td_sched_n_free_pages(w->sched) <= w->opts.n_pages - n_held);
  if (n_running == 0) assert_int_equal(td_sched_n_free_pages(w->sched), w->opts.n_pages);
  check_somebody_gets_on(w);
}

// Two tokens only, and half of the texts begin like one before: collisions abound, of prompts with
// other's answers, too.
static void draw_text(world *w, req *r) {
  uint32_t most = w->opts.n_pages * w->opts.page_tokens + 3;
  r->n_prompt = 1 + draw(least(most, MAX_PROMPT));
  r->max_tokens = 1 + draw(most);
  const req *like = w->n_ids && draw(2) ? &w->r[draw(w->n_ids)] : NULL;
  uint32_t n = r->n_prompt + r->max_tokens;
  uint32_t n_alike = like ? draw(least(n, like->n_prompt + like->max_tokens) + 1) : 0;
  for (uint32_t i = 0; i < n && i < MAX_TOKENS; i++)
    r->tokens[i] = i < n_alike ? like->tokens[i] : (int32_t)draw(2);
}

static uint32_t n_own(const world *w, life at, uint64_t tenant) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < w->n_ids; i++)
    n += w->r[i].at == at && w->r[i].tenant == tenant;
  return n;
}

static void submit(world *w) {
  if (w->n_ids == MAX_IDS) return;
  req *r = &w->r[w->n_ids];
  draw_text(w, r);
  uint32_t n_tokens = r->n_prompt + r->max_tokens;
  r->tenant = draw(3);
  uint32_t n_waiting = td_sched_n_waiting(w->sched);
  bool is_full = n_own(w, WAITS, r->tenant) + n_waiting >= w->opts.max_waiting;
  const td_sched_job job = {.tokens = r->tokens,
                            .n_prompt = r->n_prompt,
                            .max_tokens = r->max_tokens,
                            .tenant = r->tenant,
                            .weight = 1 + draw(3),
                            .n_keep = w->has_states ? draw(r->n_prompt + 1) : 0};
  td_err err;
  td_status st = td_sched_submit(w->sched, w->n_ids, &job, w->now_ns, &err);
  bool is_large = n_tokens > w->opts.n_pages * w->opts.page_tokens;
  assert_int_equal(st, is_large ? TD_ELIMIT : is_full ? TD_EAGAIN : TD_OK);
  if (st != TD_OK) return;
  r->at = WAITS;
  r->submitted_ns = w->now_ns;
  r->n_keep = job.n_keep;
  w->n_ids++;
}

static uint32_t first_waiting(const world *w) {
  uint32_t i = 0;
  while (i < w->n_ids && w->r[i].at != WAITS)
    i++;
  return i;
}

static uint32_t n_prefill_left(const world *w) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < w->n_ids; i++)
    n += w->r[i].at == READS ? n_to_prefill(&w->r[i]) - w->r[i].n_past : 0;
  return n;
}

static bool admit(world *w) {
  uint32_t before = n_prefill_left(w), n_running = td_sched_n_running(w->sched);
  td_admission got;
  if (!td_sched_admit(w->sched, w->now_ns, &got)) {
    // With nothing running, whoever is next may.
    assert_true(n_running > 0 || first_waiting(w) == w->n_ids);
    return false;
  }
  assert_true(n_running < w->opts.max_seqs);
  assert_true(before <= w->opts.prefill_ahead || got.is_urgent);
  req *r = &w->r[got.id];
  assert_int_equal(r->at, WAITS);
  assert_true(got.n_cached < n_to_prefill(r) + (r->n_output > 0));
  assert_true(w->has_states || got.n_cached % w->opts.page_tokens == 0);
  assert_true(got.source < 0 || got.n_cached % w->opts.page_tokens);
  assert_true(got.keep < 0 || (got.n_keep == r->n_keep && got.n_keep > got.n_cached));
  w->n_from_copies += got.n_cached % w->opts.page_tokens;
  r->source = got.source;
  r->keep = got.keep;
  r->pages = got.pages;
  r->n_pages = got.n_pages;
  r->n_past = got.n_cached;
  r->at = r->n_past < n_to_prefill(r) ? READS : DECODES;
  *(r->n_output ? &w->n_resumed : &w->n_cached) += got.n_cached;
  return true;
}

// What the front does after every event.
static void pump(world *w) {
  td_growth growth;
  uint64_t id;
  while (td_sched_grow(w->sched, &growth)) {
    req *r = &w->r[growth.id];
    assert_true(stays(r) && growth.n_pages == r->n_pages + 1);
    r->pages = growth.pages;
    r->n_pages = growth.n_pages;
  }
  while (td_sched_preempt(w->sched, w->now_ns, &id)) {
    uint32_t last = 0, first = MAX_IDS;
    uint64_t tenant = w->r[id].tenant;
    bool is_one_of_many = n_own(w, READS, tenant) + n_own(w, DECODES, tenant) > 1;
    for (uint32_t i = 0; i < w->n_ids; i++) {
      if (!runs(&w->r[i])) continue;
      assert_false(w->r[i].is_leaving);
      first = least(first, i);
      last = i;
    }
    bool lacks_pages = id == last && first < last && td_sched_n_free_pages(w->sched) == 0;
    assert_true(lacks_pages || is_one_of_many);
    w->r[id].is_leaving = true;
  }
}

static void requeue(world *w, uint32_t id, bool is_settled) {
  req *r = &w->r[id];
  if (is_settled) td_sched_settle(w->sched, id);
  td_sched_requeue(w->sched, id, r->n_output);
  r->at = WAITS;
  r->is_leaving = false;
  r->source = r->keep = -1;
}

static uint32_t pick(const world *w, bool (*is_fit)(const req *)) {
  uint32_t at = w->n_ids ? draw(w->n_ids) : 0;
  for (uint32_t i = 0; i < w->n_ids; i++) {
    uint32_t id = (at + i) % w->n_ids;
    if (is_fit(&w->r[id])) return id;
  }
  return MAX_IDS;
}

static const td_sched_phase phase_of[] = {[NEW] = TD_SCHED_UNKNOWN,
                                          [WAITS] = TD_SCHED_WAITING,
                                          [READS] = TD_SCHED_PREFILL,
                                          [DECODES] = TD_SCHED_DECODE,
                                          [GONE] = TD_SCHED_UNKNOWN};

static void finish_or_cancel(world *w, uint32_t i, bool is_settled) {
  if (is_settled) td_sched_settle(w->sched, i);
  assert_int_equal(td_sched_phase_of(w->sched, i), phase_of[w->r[i].at]);
  assert_int_equal(td_sched_remove(w->sched, i), phase_of[w->r[i].at]);
  w->r[i].at = GONE;
}

static void copy_page(world *w, int32_t to, int32_t from) {
  memcpy(w->shadow[to], w->shadow[from], sizeof w->shadow[to]);
  w->state[to] = w->state[from];
}

// The worker computes some tokens of a request; the front hears of it at once, or never.
static void compute(world *w, uint32_t id, uint32_t n_max) {
  req *r = &w->r[id];
  uint32_t end = r->at == READS ? n_to_prefill(r) : r->n_prompt + r->max_tokens - 1;
  end = least(least(end, capacity(w, r)), r->n_past + n_max);
  if (r->keep >= 0 && r->n_past < r->n_keep) end = least(end, r->n_keep);
  if (r->source >= 0 && r->n_past < end)
    copy_page(w, r->pages[r->n_past / w->opts.page_tokens], r->source);
  if (r->n_past < end) r->source = -1;
  for (; r->n_past < end; r->n_past++) {
    *place(w, r, r->n_past) = hash_at(r, r->n_past);
    w->state[r->pages[r->n_past / w->opts.page_tokens]] = hash_at(r, r->n_past);
  }
  if (r->keep >= 0 && r->n_past == r->n_keep) {
    copy_page(w, r->keep, r->pages[(r->n_past - 1) / w->opts.page_tokens]);
    r->keep = -1;
  }
  check_contents(w); // what was just written is in nobody's way
  td_sched_progress(w->sched, id, r->n_past, w->now_ns);
  if (r->n_past >= n_to_prefill(r)) {
    r->at = DECODES;
    r->n_output = r->n_past - r->n_prompt + 1;
  }
  // What is old, or cannot be, is ignored.
  uint32_t wrong = draw(2) ? draw(r->n_past + 1) : capacity(w, r) + 1 + draw(9);
  td_sched_progress(w->sched, id, wrong, w->now_ns);
  if (r->n_output == r->max_tokens) finish_or_cancel(w, id, w->has_states);
}

static void worker_dies(world *w) {
  for (uint32_t i = 0; i < w->n_ids; i++) {
    req *r = &w->r[i];
    if (!runs(r)) continue;
    // What it was writing is lost; what it had told stays.
    for (uint32_t pos = r->n_past; pos < capacity(w, r) && draw(4); pos++)
      *place(w, r, pos) = 0xdead;
    if (r->n_past % w->opts.page_tokens && r->source < 0 && draw(2))
      w->state[r->pages[r->n_past / w->opts.page_tokens]] = 0xdead;
    if (draw(2)) {
      requeue(w, i, false);
    } else {
      finish_or_cancel(w, i, false);
    }
  }
}

// A worker lets go of one that is to make room, a step or many after it was told to.
static void let_go(world *w) {
  for (uint32_t i = 0; i < w->n_ids; i++) {
    if (runs(&w->r[i]) && w->r[i].is_leaving) requeue(w, i, w->has_states && draw(8));
  }
}

// Every request gets to its end.
static void drain(world *w) {
  for (uint32_t rounds = 0; first_waiting(w) < w->n_ids || pick(w, runs) < MAX_IDS; rounds++) {
    assert_true(rounds <= MAX_IDS * MAX_TOKENS);
    w->now_ns += draw(10000000);
    let_go(w);
    pump(w);
    admit(w);
    check(w);
    for (uint32_t i = 0; i < w->n_ids; i++) {
      if (runs(&w->r[i])) compute(w, i, 1 + draw(2 * MAX_PAGE_TOKENS));
    }
  }
  assert_int_equal(td_sched_n_free_pages(w->sched), w->opts.n_pages);
}

static void live(world *w) {
  for (int i = 0; i < 250; i++) {
    w->now_ns += draw(100000000);
    uint32_t what = draw(100), id = pick(w, runs);
    if (what < 20) {
      submit(w);
    } else if (what < 40) {
      admit(w);
    } else if (what < 90) {
      if (id < MAX_IDS) compute(w, id, 1 + draw(2 * MAX_PAGE_TOKENS));
    } else if (what < 94) {
      let_go(w);
    } else if (what < 99) {
      if (w->n_ids) finish_or_cancel(w, draw(w->n_ids), w->has_states && draw(2));
    } else {
      worker_dies(w);
    }
    pump(w);
    check(w);
    if (i % 16 == 0) check_contents(w);
  }
}

TEST(simulated_lives) {
  uint64_t n_cached = 0, n_resumed = 0, n_preemptions = 0, n_from_copies = 0;
  world *w = malloc(sizeof *w);
  for (uint64_t seed = 1; seed <= N_LIVES; seed++) {
    rng_state = seed * 0x9e3779b97f4a7c15u;
    *w = (world){.opts = {.max_seqs = 1 + draw(6),
                          .n_pages = 1 + draw(MAX_PAGES),
                          .page_tokens = 1u << draw(5),
                          .max_waiting = 1 + draw(20),
                          .prefill_ahead = draw(100),
                          .shares_output = draw(2)}};
    shares_output = w->opts.shares_output;
    w->has_states = draw(2);
    td_err err;
    assert_int_equal(td_sched_open(&w->sched, &w->opts, &err), TD_OK);
    live(w);
    drain(w);
    n_preemptions += td_sched_n_preemptions(w->sched);
    td_sched_close(w->sched);
    n_cached += w->n_cached;
    n_resumed += w->n_resumed;
    n_from_copies += w->n_from_copies;
  }
  free(w);
  // The cache is in play, and room is made.
  assert_true(n_from_copies > N_LIVES);
  assert_true(n_cached > 20 * N_LIVES && n_resumed > 20 * N_LIVES && n_preemptions > 2 * N_LIVES);
}
