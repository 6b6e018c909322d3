// src/front/lane.c - queues of tenants in front of uv_queue_work.
#include "front/lane.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/clock.h"

#define N_TENANTS 1024u // two whose numbers are congruent count as one
#define LOOK_MS   250

// ---- the choice ---------------------------------------------------------------------------------

static td_lane_line *queue_of(const td_lane_work *w) {
  return &w->lane->waiting[w->tenant_idx][w->kind];
}

static td_tenant *tenant_of(const td_lane_work *w) {
  return &w->lane->fair.tenants[w->tenant_idx];
}

static bool is_large(const td_lane_work *w) {
  return w->n_bytes >= TD_LANE_LARGE_BYTES;
}

void td_lane_enter(td_lane *lane, td_lane_work *w) {
  w->lane = lane;
  w->state = TD_LANE_WAITING;
  w->kind = w->n_bytes < TD_LANE_SLOW_BYTES ? TD_LANE_SHORT : TD_LANE_SLOW;
  w->tenant_idx = td_fair_share_join(&lane->fair, w->tenant % N_TENANTS, w->weight);
  td_fair_share_raise(&lane->fair, tenant_of(w));
  tenant_of(w)->n_waiting++;
  td_lane_line *q = queue_of(w);
  w->next = NULL;
  w->prev = q->last;
  *(q->last ? &q->last->next : &q->first) = w;
  q->last = w;
}

static void stop_waiting(td_lane_work *w) {
  td_lane_line *q = queue_of(w);
  *(w->prev ? &w->prev->next : &q->first) = w->next;
  *(w->next ? &w->next->prev : &q->last) = w->prev;
  w->state = TD_LANE_OUTSIDE;
  tenant_of(w)->n_waiting--;
}

static bool has_room(const td_lane *lane, const td_lane_work *w) {
  if (lane->n_of_kind[w->kind] == TD_LANE_MAX_OF_KIND) return false;
  return !is_large(w) || !lane->n_large;
}

// The first of a tenant's work that has room, short work before slow work.
static td_lane_work *first_of(const td_lane *lane, uint32_t tenant_idx) {
  for (unsigned kind = 0; kind < TD_LANE_N_KINDS; kind++) {
    td_lane_work *w = lane->waiting[tenant_idx][kind].first;
    if (w && has_room(lane, w)) return w;
  }
  return NULL;
}

td_lane_work *td_lane_next(td_lane *lane) {
  unsigned place = 0;
  td_lane_work *best = NULL;
  while (place < TD_LANE_MAX_RUNNING && lane->running[place])
    place++;
  if (place == TD_LANE_MAX_RUNNING) return NULL;
  for (uint32_t i = 0; i < lane->fair.n; i++) {
    const td_tenant *t = &lane->fair.tenants[i];
    if (!t->n_waiting || (best && !td_fair_share_is_before(&lane->fair, t, tenant_of(best))))
      continue;
    td_lane_work *w = first_of(lane, i);
    if (w) best = w;
  }
  if (!best) return NULL;
  stop_waiting(best);
  best->state = TD_LANE_RUNNING;
  tenant_of(best)->n_running++;
  tenant_of(best)->n_prefills++;
  lane->running[place] = best;
  lane->n_of_kind[best->kind]++;
  lane->n_large += is_large(best);
  return best;
}

void td_lane_end(td_lane_work *w, uint64_t cpu_ns) {
  td_lane *lane = w->lane;
  for (unsigned i = 0; i < TD_LANE_MAX_RUNNING; i++)
    if (lane->running[i] == w) lane->running[i] = NULL;
  lane->n_of_kind[w->kind]--;
  lane->n_large -= is_large(w);
  w->state = TD_LANE_OUTSIDE;
  tenant_of(w)->n_running--;
  tenant_of(w)->n_prefills--;
  td_fair_share_charge(&lane->fair, tenant_of(w), cpu_ns / 1000 + 1, true);
}

bool td_lane_cancel(td_lane_work *w) {
  atomic_store(&w->is_canceled, true);
  if (w->state == TD_LANE_RUNNING) return false;
  if (w->state == TD_LANE_WAITING) stop_waiting(w);
  return true;
}

// ---- on the thread pool -------------------------------------------------------------------------

static td_lane_work *work_of(uv_work_t *work) {
  return (td_lane_work *)((char *)work - offsetof(td_lane_work, work));
}

static void run_work(uv_work_t *work) {
  td_lane_work *w = work_of(work);
  w->begin_ns = td_clock_cpu_ns();
  pthread_getcpuclockid(pthread_self(), &w->clock);
  atomic_store(&w->has_begun, true);
  if (!atomic_load(&w->is_canceled)) w->run(work);
  w->cpu_ns = td_clock_cpu_ns() - w->begin_ns;
}

// ---- the loop -----------------------------------------------------------------------------------

static bool is_idle(const td_lane *lane) {
  return !lane->n_of_kind[TD_LANE_SHORT] && !lane->n_of_kind[TD_LANE_SLOW];
}

static void start_next(td_lane *lane);

static void on_done(uv_work_t *work, int status) {
  (void)status;
  td_lane_work *w = work_of(work);
  td_lane *lane = w->lane;
  td_lane_end(w, w->cpu_ns);
  start_next(lane);
  if (is_idle(lane)) uv_timer_stop(&lane->timer);
  w->after(work, 0);
  if (lane->on_stopped && is_idle(lane)) lane->on_stopped(lane);
}

// Ends what has used its CPU time.
static void on_look(uv_timer_t *timer) {
  td_lane *lane = timer->data;
  for (unsigned i = 0; i < TD_LANE_MAX_RUNNING; i++) {
    td_lane_work *w = lane->running[i];
    struct timespec t;
    if (!w || !atomic_load(&w->has_begun) || clock_gettime(w->clock, &t) != 0) continue;
    const uint64_t now_ns = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
    if (now_ns - w->begin_ns < lane->max_cpu_ns) continue;
    w->is_over = true;
    atomic_store(&w->is_canceled, true);
  }
}

static void start_next(td_lane *lane) {
  td_lane_work *w;
  while ((w = td_lane_next(lane)) != NULL) {
    atomic_store(&w->has_begun, false);
    TD_CHECK(uv_queue_work(lane->loop, &w->work, run_work, on_done) == 0);
    if (!uv_is_active((uv_handle_t *)&lane->timer))
      uv_timer_start(&lane->timer, on_look, LOOK_MS, LOOK_MS);
  }
}

td_status td_lane_open(td_lane *lane, uv_loop_t *loop, td_err *err) {
  *lane = (td_lane){.loop = loop, .max_cpu_ns = TD_LANE_MAX_CPU_S * (uint64_t)1000000000u};
  td_status st = td_fair_share_open(&lane->fair, N_TENANTS / 2, err);
  if (st == TD_OK) {
    lane->waiting = calloc(N_TENANTS, sizeof *lane->waiting);
    if (!lane->waiting) st = td_fail(err, TD_ENOMEM, "out of memory");
  }
  if (st != TD_OK) {
    td_fair_share_close(&lane->fair);
    return st;
  }
  uv_timer_init(loop, &lane->timer);
  lane->timer.data = lane;
  return TD_OK;
}

void td_lane_close(td_lane *lane) {
  uv_close((uv_handle_t *)&lane->timer, NULL);
  td_fair_share_close(&lane->fair);
  free(lane->waiting);
  lane->waiting = NULL;
}

void td_lane_queue(td_lane *lane, td_lane_work *w) {
  if (lane->on_stopped) {
    atomic_store(&w->is_canceled, true);
    w->after(&w->work, UV_ECANCELED);
    return;
  }
  td_lane_enter(lane, w);
  start_next(lane);
}

void td_lane_stop(td_lane *lane, void (*on_stopped)(td_lane *lane)) {
  lane->on_stopped = on_stopped;
  for (unsigned i = 0; i < TD_LANE_MAX_RUNNING; i++)
    if (lane->running[i]) td_lane_cancel(lane->running[i]);
  for (uint32_t i = 0; i < lane->fair.n; i++) {
    for (unsigned kind = 0; kind < TD_LANE_N_KINDS; kind++) {
      td_lane_work *w;
      while ((w = lane->waiting[i][kind].first) != NULL) {
        td_lane_cancel(w);
        w->after(&w->work, UV_ECANCELED);
      }
    }
  }
  if (is_idle(lane)) on_stopped(lane);
}
