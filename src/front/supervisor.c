// src/front/supervisor.c - a worker's state machine: start, watch, kill, restart, give up.
#include "front/supervisor.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "front/worker_process.h"

#define TICK_MS           1000
#define GRACE_MS          3000
#define MAX_UNREADY       3 // before the first READY
#define MAX_UNREADY_AGAIN 9 // after it; about 24 s of attempts
#define SHORT_LIFE_NS     10000000000u
#define FIRST_DELAY_MS    250
#define MAX_DELAY_DOUBLES 5           // 250 ms << 5 = 8 s
#define LINGER_NS         5000000000u // until a killed process that lingers is reported
#define HEAVY             3           // deaths that a hang before READY or a bad model counts as
#define MAX_START_NS      3600000000000u

struct td_supervisor {
  td_supervisor_opts opts;
  uv_loop_t *loop;
  td_process *process; // NULL between death and restart
  td_backend_state state;
  char reason[TD_ERR_BYTES];
  char fatal[TD_WIRE_MAX_TEXT]; // text of this life's FATAL
  bool is_for_good;             // FATAL's cause is permanent
  uv_timer_t tick;              // watches the heartbeat; while closing, the grace period
  uv_timer_t restart;
  int n_timers;
  uint64_t born_ns, heard_ns;
  td_wire_heartbeat heartbeat; // this life's last
  uint32_t pulse;              // at the last tick
  uint64_t progress;           // at the last tick, before READY
  bool is_hung;                // was killed for showing no progress
  uint64_t killed_ns;          // 0: not killed by the supervisor
  bool was_ready;              // in any life
  bool is_up;                  // this life has sent READY
  unsigned n_unready;          // deaths in a row before READY
  uint32_t n_starts;
  unsigned n_short; // deaths in a row within SHORT_LIFE_NS
  bool is_closing;
  void (*closed)(void *ctx);
  void *closed_ctx;
};

static const char *role_name(const td_supervisor *s) {
  return td_worker_role_name(s->opts.worker.role);
}

static void set_state(td_supervisor *s, td_backend_state state) {
  if (s->state == state || s->is_closing) return;
  s->state = state;
  if (s->opts.on_state) s->opts.on_state(s->opts.ctx, state);
}

static void give_up(td_supervisor *s, const char *reason) {
  snprintf(s->reason, sizeof s->reason, "%s", reason);
  uv_timer_stop(&s->restart);
  set_state(s, TD_BACKEND_FAILED);
}

// ---- running ----------------------------------------------------------------------------------

static void on_ready(td_supervisor *s, const td_wire_ready *info) {
  td_err err;
  if (s->is_up) return;
  if (s->opts.on_ready(s->opts.ctx, info, &err) != TD_OK) {
    give_up(s, err.msg);
    td_process_kill(s->process);
    return;
  }
  s->is_up = s->was_ready = true;
  s->n_unready = 0;
  set_state(s, TD_BACKEND_READY);
}

static void note_life(td_supervisor *s) {
  s->heard_ns = td_clock_ns();
  if (s->state == TD_BACKEND_STUCK && !s->killed_ns) set_state(s, TD_BACKEND_READY);
}

// Whether the cause is the model's files, so that a retry cannot help.
static bool is_about_files(td_status code) {
  return code == TD_ENOENT || code == TD_EFORMAT || code == TD_EIO || code == TD_EUNSUPPORTED;
}

static void on_record(void *ctx, const td_wire_msg *msg) {
  td_supervisor *s = ctx;
  if (s->is_closing || s->state == TD_BACKEND_FAILED) return;
  note_life(s);
  switch (msg->kind) {
  case TD_MSG_READY: on_ready(s, &msg->u.ready); break;
  case TD_MSG_FATAL:
    snprintf(s->fatal, sizeof s->fatal, "%.*s", TD_WIRE_MAX_TEXT - 1, msg->u.text);
    s->is_for_good = is_about_files((td_status)(int64_t)msg->request);
    break;
  case TD_MSG_HEARTBEAT:
    s->heartbeat = msg->u.heartbeat;
    if (s->state == TD_BACKEND_READY) s->opts.on_space(s->opts.ctx);
    break;
  default: s->opts.on_record(s->opts.ctx, msg);
  }
}

static void on_space(void *ctx) {
  td_supervisor *s = ctx;
  if (!s->is_closing) s->opts.on_space(s->opts.ctx);
}

static void on_process_exit(void *ctx, const char *why, const char *said);

static td_status spawn(td_supervisor *s, td_err *err) {
  const td_process_events events = {
      .on_record = on_record, .on_space = on_space, .on_exit = on_process_exit, .ctx = s};
  s->is_up = s->is_hung = false;
  s->progress = 0;
  s->killed_ns = 0;
  s->fatal[0] = s->reason[0] = '\0';
  s->is_for_good = false;
  s->n_starts++;
  s->heartbeat = (td_wire_heartbeat){0};
  s->born_ns = s->heard_ns = td_clock_ns();
  return td_process_spawn(&s->process, s->loop, &s->opts.worker, s->opts.kv_fd, &events, err);
}

static void after_death(td_supervisor *s, const char *why, const char *said);

static void on_restart(uv_timer_t *timer) {
  td_supervisor *s = timer->data;
  td_err err;
  if (spawn(s, &err) != TD_OK) after_death(s, err.msg, "");
}

// ---- restarting -------------------------------------------------------------------------------

static void schedule_restart(td_supervisor *s) {
  uint64_t delay_ms = 0;
  if (s->n_short > 1) {
    unsigned doubles = s->n_short - 2 < MAX_DELAY_DOUBLES ? s->n_short - 2 : MAX_DELAY_DOUBLES;
    delay_ms = (uint64_t)FIRST_DELAY_MS << doubles;
  }
  uv_timer_start(&s->restart, on_restart, delay_ms, 0);
}

static bool is_hopeless(td_supervisor *s) {
  if (s->is_up) return false;
  bool is_heavy = s->is_hung || s->is_for_good;
  s->n_unready += is_heavy && s->was_ready ? HEAVY : 1;
  if (s->was_ready) return s->n_unready >= MAX_UNREADY_AGAIN;
  return s->n_unready >= MAX_UNREADY || s->fatal[0];
}

static void after_death(td_supervisor *s, const char *why, const char *said) {
  bool lived_long = s->is_up && td_clock_ns() - s->born_ns >= SHORT_LIFE_NS;
  s->n_short = lived_long ? 0 : s->n_short + 1;
  char text[TD_ERR_BYTES];
  if (s->fatal[0])
    snprintf(text, sizeof text, "%s", s->fatal);
  else
    snprintf(text, sizeof text, "%.150s%s%.250s", why, said[0] ? "; its last output: " : "", said);
  if (s->state == TD_BACKEND_FAILED) return;
  if (is_hopeless(s)) {
    give_up(s, text);
    return;
  }
  td_error("%s; starting it again", text);
  td_backend_state before = s->state;
  s->state = TD_BACKEND_LOADING;
  bool may_be_told = s->fatal[0] && !strchr(s->fatal, '/'); // no paths to clients
  s->opts.on_death(s->opts.ctx, may_be_told ? s->fatal : why);
  if (s->is_closing || s->state != TD_BACKEND_LOADING) return;
  if (before != TD_BACKEND_LOADING && s->opts.on_state)
    s->opts.on_state(s->opts.ctx, TD_BACKEND_LOADING);
  if (!s->is_closing) schedule_restart(s);
}

static void close_timers(td_supervisor *s);

static void on_process_exit(void *ctx, const char *why, const char *said) {
  td_supervisor *s = ctx;
  s->process = NULL;
  if (s->is_closing)
    close_timers(s);
  else
    after_death(s, why, said);
}

// ---- the heartbeat ----------------------------------------------------------------------------

static void kill_process(td_supervisor *s) {
  if (!s->killed_ns) s->killed_ns = td_clock_ns();
  td_process_kill(s->process);
}

// A process blocked in the kernel does not exit when killed, and keeps its GPU memory until it
// does. No replacement is started meanwhile; the reason is logged.
static void watch_end(td_supervisor *s) {
  uint64_t most_ns = s->opts.kill_ns < LINGER_NS ? s->opts.kill_ns : LINGER_NS;
  uint64_t since_ns = td_clock_ns() - s->killed_ns;
  if (s->reason[0] || since_ns < most_ns) return;
  char how[256];
  td_process_lingers(s->process, how, sizeof how);
  snprintf(s->reason, sizeof s->reason, "the %s process was killed %.0f s ago and %s", role_name(s),
           (double)since_ns * 1e-9, how);
  td_error("%s", s->reason);
  if (s->is_up) set_state(s, TD_BACKEND_STUCK);
}

static void watch_start(td_supervisor *s) {
  uint64_t progress = td_process_progress(s->process), now_ns = td_clock_ns();
  if (progress != s->progress) s->heard_ns = now_ns;
  s->progress = progress;
  uint64_t silence_ns = now_ns - s->heard_ns;
  if (s->is_hung || (silence_ns <= s->opts.kill_ns && now_ns - s->born_ns <= MAX_START_NS)) return;
  td_error("the %s process made no progress for %.0f s while starting; killing it", role_name(s),
           (double)silence_ns * 1e-9);
  s->is_hung = true;
  kill_process(s);
}

static void on_tick(uv_timer_t *timer) {
  td_supervisor *s = timer->data;
  td_log_catch_up();
  if (!s->process) return;
  td_process_drain(s->process);             // if this process was suspended, heartbeats are waiting
  if (s->is_closing || !s->process) return; // closed by a callback
  if (s->killed_ns) {
    watch_end(s);
    return;
  }
  if (!s->is_up) {
    watch_start(s);
    return;
  }
  uint32_t pulse = td_process_pulse(s->process);
  if (pulse != s->pulse) note_life(s);
  s->pulse = pulse;
  uint64_t silence_ns = td_clock_ns() - s->heard_ns;
  if (silence_ns > s->opts.kill_ns) {
    td_error("the %s process was silent for %.0f s; killing it", role_name(s),
             (double)silence_ns * 1e-9);
    kill_process(s);
  } else if (silence_ns > s->opts.stuck_ns && s->state == TD_BACKEND_READY) {
    td_warn("the %s process has been silent for %.0f s", role_name(s), (double)silence_ns * 1e-9);
    set_state(s, TD_BACKEND_STUCK);
  }
}

// ---- open and close ---------------------------------------------------------------------------

static void free_supervisor(td_supervisor *s) {
#define X(field, option) free((char *)s->opts.worker.runtime.field);
  TD_RUNTIME_TEXTS(X)
#undef X
  free(s);
}

// Texts of the worker's options are the supervisor's own.
static bool copy_texts(td_runtime_opts *out, const td_runtime_opts *from) {
  bool ok = true;
#define X(field, option)                                                                           \
  out->field = strdup(from->field ? from->field : "");                                             \
  ok &= out->field != NULL;
  TD_RUNTIME_TEXTS(X)
#undef X
  return ok;
}

static void on_timer_closed(uv_handle_t *handle) {
  td_supervisor *s = handle->data;
  if (--s->n_timers) return;
  void (*closed)(void *) = s->closed;
  void *ctx = s->closed_ctx;
  free_supervisor(s);
  if (closed) closed(ctx);
}

static void close_timers(td_supervisor *s) {
  uv_close((uv_handle_t *)&s->tick, on_timer_closed);
  uv_close((uv_handle_t *)&s->restart, on_timer_closed);
}

td_status td_supervisor_open(td_supervisor **out, uv_loop_t *loop, const td_supervisor_opts *opts,
                             td_err *err) {
  *out = NULL;
  td_supervisor *s = calloc(1, sizeof *s);
  if (!s) return td_fail(err, TD_ENOMEM, "out of memory");
  *s = (td_supervisor){.opts = *opts, .loop = loop, .state = TD_BACKEND_LOADING, .n_timers = 2};
  if (!copy_texts(&s->opts.worker.runtime, &opts->worker.runtime)) {
    free_supervisor(s);
    return td_fail(err, TD_ENOMEM, "out of memory");
  }
  s->opts.worker.parent_pid = (uint32_t)getpid();
  s->opts.worker.log_level = td_log_get().max_level;
  s->opts.worker.log_json = td_log_get().is_json;
  uv_timer_init(loop, &s->tick);
  uv_timer_init(loop, &s->restart);
  s->tick.data = s->restart.data = s;
  td_status st = spawn(s, err);
  if (st != TD_OK) {
    close_timers(s);
    return st;
  }
  uint64_t tick_ms = opts->stuck_ns / 4000000 < TICK_MS ? opts->stuck_ns / 4000000 + 1 : TICK_MS;
  uv_timer_start(&s->tick, on_tick, tick_ms, tick_ms);
  *out = s;
  return TD_OK;
}

static void on_grace_over(uv_timer_t *timer) {
  td_supervisor *s = timer->data;
  if (!s->process) return;
  if (s->killed_ns) watch_end(s);
  kill_process(s);
}

void td_supervisor_close(td_supervisor *s, void (*closed)(void *ctx), void *ctx) {
  TD_CHECK(!s->is_closing);
  s->is_closing = true;
  s->closed = closed;
  s->closed_ctx = ctx;
  uv_timer_stop(&s->tick);
  uv_timer_stop(&s->restart);
  if (!s->process) {
    close_timers(s);
    return;
  }
  const td_wire_msg msg = {.kind = TD_MSG_SHUTDOWN};
  const bool is_told = s->is_up && td_process_send(s->process, &msg) == TD_OK;
  if (!is_told) kill_process(s); // still loading, or its ring is full
  uv_timer_start(&s->tick, on_grace_over, GRACE_MS, GRACE_MS);
}

td_backend_state td_supervisor_state(const td_supervisor *s) {
  return s->state;
}

const char *td_supervisor_reason(const td_supervisor *s) {
  return s->reason;
}

uint32_t td_supervisor_n_restarts(const td_supervisor *s) {
  return s->n_starts - 1;
}

td_wire_heartbeat td_supervisor_heartbeat(const td_supervisor *s) {
  return s->heartbeat;
}

td_status td_supervisor_send(td_supervisor *s, const td_wire_msg *msg) {
  if (!s->process || !s->is_up || s->is_closing) return TD_EAGAIN;
  return td_process_send(s->process, msg) == TD_OK ? TD_OK : TD_EAGAIN;
}

void td_supervisor_lease(td_supervisor *s, uint32_t n_threads) {
  if (s->process) td_process_lease(s->process, n_threads);
}
