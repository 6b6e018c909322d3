// src/worker/stream_pace.c - learning the share of the link that streaming may use beside decode.
#include "worker/stream_pace.h"

#include <stdbool.h>

#define FIRST_SHARE 0.5  // until steps beside streaming are measured
#define FIRST_RATE  1.0  // bytes/ns, until a copy is measured: what any link carries
#define KEEP_COPIES 0.75 // of earlier steps' copies in the rate, a step
#define MAX_RISE    1.25 // of the share, from one step to the next
#define MAX_FALL    0.5
#define MAX_MIXED   4    // paused steps in a row that cannot be measured alone
#define MARGIN      1.25 // queued beyond the expected step, so that a whole share never idles

static double within(double x, double least, double most) {
  return x < least ? least : x > most ? most : x;
}

void td_stream_pace_init(td_stream_pace *out, double slowdown) {
  *out = (td_stream_pace){.slowdown = slowdown, .share = FIRST_SHARE};
}

static bool is_measured(const td_stream_pace *pace, uint32_t n_decode) {
  return pace->alone_ns > 0 && pace->n_steps < TD_STREAM_PACE_STEPS &&
         n_decode < 2 * pace->n_decode && pace->n_decode < 2 * n_decode;
}

uint64_t td_stream_pace_ahead(const td_stream_pace *pace, uint32_t n_decode) {
  double ns = TD_STREAM_AHEAD_NS;
  if (n_decode) {
    if (!is_measured(pace, n_decode)) return 0;
    ns = pace->alone_ns * (1 + pace->slowdown) * pace->share;
    if (pace->share >= 1) ns *= MARGIN;
  }
  const double bytes = ns * (pace->copying_ns > 0 ? pace->bytes / pace->copying_ns : FIRST_RATE);
  return bytes < 1 ? 1 : (uint64_t)bytes;
}

// A shorter time replaces the old one at once; a longer one is averaged in, so that a single
// delayed step has little effect.
static void note_alone(td_stream_pace *pace, uint32_t n_decode, double ns) {
  const bool averages = pace->n_decode == n_decode && pace->n_steps < TD_STREAM_PACE_STEPS &&
                        ns > pace->alone_ns && pace->alone_ns > 0;
  pace->alone_ns = averages ? pace->alone_ns + (ns - pace->alone_ns) / 4 : ns;
  pace->n_decode = n_decode;
  pace->n_steps = pace->n_mixed = 0;
}

void td_stream_pace_note(td_stream_pace *pace, const td_timed_step *step) {
  const double ns = step->ns ? (double)step->ns : 1;
  const bool streamed = step->copied_bytes || step->left_bytes;
  if (step->copied_bytes && step->copying_ns) {
    pace->bytes = KEEP_COPIES * pace->bytes + (double)step->copied_bytes;
    pace->copying_ns = KEEP_COPIES * pace->copying_ns + (double)step->copying_ns;
  }
  if (!step->n_decode) return;
  if (step->n_prefilled) {
    // A step with prompt tokens is too long a measure, and still a better one than pausing forever.
    if (!is_measured(pace, step->n_decode) && ++pace->n_mixed == MAX_MIXED)
      note_alone(pace, step->n_decode, ns);
  } else if (!streamed) {
    note_alone(pace, step->n_decode, ns);
  } else if (is_measured(pace, step->n_decode)) { // else the queue runs dry first
    pace->n_steps++;
    const double slower = ns / pace->alone_ns - 1;
    const double change = slower > 0 ? pace->slowdown / slower : MAX_RISE;
    pace->share = within(pace->share * within(change, MAX_FALL, MAX_RISE), TD_STREAM_PACE_MIN, 1);
  }
}
