// src/front/lane.h - a bounded share of libuv's thread pool: at most max_running of the items
// queued here run at a time, so that the pool's other threads stay free for short work. Thread: the
// loop's.
#pragma once

#include <uv.h>

typedef struct td_lane_work td_lane_work;

typedef struct {
  uv_loop_t *loop;
  unsigned max_running, n_running;
  td_lane_work *first, *last; // waiting
} td_lane;

// Embedded in the owner's struct; work.data belongs to the owner.
struct td_lane_work {
  uv_work_t work;
  td_lane *lane;
  td_lane_work *next;
  uv_work_cb run;
  uv_after_work_cb after;
};

// Like uv_queue_work. after may free work.
void td_lane_queue(td_lane *lane, td_lane_work *work, uv_work_cb run, uv_after_work_cb after);
