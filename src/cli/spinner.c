// src/cli/spinner.c - a thread that draws the progress of a prefill.
#include "cli/spinner.h"

#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/thread.h"

#define DELAY_NS 300000000u
#define FRAME_NS 120000000u
#define CLEAR    "\r\033[K"

// Seconds left at the speed so far; negative: unknown.
static double remaining_s(const td_spinner *s) {
  if (s->n_done <= s->n_first || s->n_done >= s->n_prompt) return -1;
  double per_token = (s->last_s - s->first_s) / (s->n_done - s->n_first);
  double left = per_token * (s->n_prompt - s->n_done) - (td_clock_s() - s->last_s);
  return left > 0 ? left : 0;
}

static void draw(td_spinner *s, unsigned frame) {
  char line[128];
  int n = snprintf(line, sizeof line, CLEAR "%c prefill", "|/-\\"[frame % 4]);
  if (s->n_prompt)
    n += snprintf(line + n, sizeof line - (size_t)n, ": %u of %u tokens", s->n_done, s->n_prompt);
  double left = remaining_s(s);
  if (left >= 0) n += snprintf(line + n, sizeof line - (size_t)n, ", %.0f s left", left + 0.5);
  td_log_draw(line, (size_t)n);
  s->is_drawn = true;
}

static void *run(void *arg) {
  td_spinner *s = arg;
  uint64_t next_ns = td_clock_ns() + DELAY_NS;
  pthread_mutex_lock(&s->lock);
  for (unsigned frame = 0; !s->is_done; frame++) {
    struct timespec until = {.tv_sec = (time_t)(next_ns / 1000000000u),
                             .tv_nsec = (long)(next_ns % 1000000000u)};
    while (!s->is_done && td_clock_ns() < next_ns)
      pthread_cond_timedwait(&s->wake, &s->lock, &until);
    if (!s->is_done) draw(s, frame);
    next_ns = td_clock_ns() + FRAME_NS;
  }
  pthread_mutex_unlock(&s->lock);
  return NULL;
}

void td_spinner_start(td_spinner *s) {
  *s = (td_spinner){0};
  pthread_condattr_t attr;
  pthread_condattr_init(&attr);
  pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
  pthread_mutex_init(&s->lock, NULL);
  pthread_cond_init(&s->wake, &attr);
  pthread_condattr_destroy(&attr);
  s->is_running = td_thread_start(&s->thread, run, s) == 0;
}

void td_spinner_update(td_spinner *s, uint32_t n_done, uint32_t n_prompt) {
  if (!s->is_running) return;
  pthread_mutex_lock(&s->lock);
  s->last_s = td_clock_s();
  if (!s->n_prompt) {
    s->n_first = n_done;
    s->first_s = s->last_s;
  }
  s->n_done = n_done;
  s->n_prompt = n_prompt;
  pthread_mutex_unlock(&s->lock);
}

void td_spinner_stop(td_spinner *s) {
  if (!s->is_running) return;
  pthread_mutex_lock(&s->lock);
  s->is_done = true;
  pthread_cond_signal(&s->wake);
  pthread_mutex_unlock(&s->lock);
  pthread_join(s->thread, NULL);
  if (s->is_drawn) td_log_draw(CLEAR, strlen(CLEAR));
  pthread_cond_destroy(&s->wake);
  pthread_mutex_destroy(&s->lock);
  s->is_running = false;
}
