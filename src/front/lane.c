// src/front/lane.c - a FIFO in front of uv_queue_work with a concurrency limit.
#include "front/lane.h"

#include <stddef.h>

#include "base/status.h"

static void start(td_lane_work *w);

static void on_done(uv_work_t *work, int status) {
  td_lane_work *w = (td_lane_work *)((char *)work - offsetof(td_lane_work, work));
  td_lane *lane = w->lane;
  td_lane_work *next = lane->first;
  lane->n_running--;
  if (next) {
    lane->first = next->next;
    if (!lane->first) lane->last = NULL;
    start(next);
  }
  w->after(work, status);
}

static void start(td_lane_work *w) {
  w->lane->n_running++;
  TD_CHECK(uv_queue_work(w->lane->loop, &w->work, w->run, on_done) == 0);
}

void td_lane_queue(td_lane *lane, td_lane_work *w, uv_work_cb run, uv_after_work_cb after) {
  w->lane = lane;
  w->next = NULL;
  w->run = run;
  w->after = after;
  if (lane->n_running < lane->max_running) {
    start(w);
  } else {
    if (lane->last) {
      lane->last->next = w;
    } else {
      lane->first = w;
    }
    lane->last = w;
  }
}
