// src/worker/stream_pace.h - how far streamed prefill may queue ahead while requests decode. Pure
// arithmetic; time is passed in.
//
// Streaming takes memory bandwidth, bus and SMs from decode. Decode steps may take 1 + slowdown
// times as long as without it. During a decode step, as many bytes of experts are queued as keep
// the link busy for a share of it. The rate of the link is measured over the last copies, each from
// when it could begin until it was done, so it does not depend on how much was queued or on what
// copies waited for. The share is learned from the steps' times and is at least
// TD_STREAM_PACE_MIN, so that prefill never starves. How long a decode step takes alone is
// measured again every TD_STREAM_PACE_STEPS steps and when the number of sequences has doubled or
// halved: for that, streaming pauses until one step has run without it.
#pragma once

#include <stdint.h>

#define TD_STREAM_PACE_MIN   0.25     // of the link
#define TD_STREAM_PACE_STEPS 64       // beside streaming until decode is measured alone again
#define TD_STREAM_AHEAD_NS   60000000 // of link time queued when nothing decodes

typedef struct {
  double slowdown;   // 0.15: decode steps may take 15 % longer
  double bytes;      // copied in copying_ns; earlier steps count less
  double copying_ns; // 0: the rate of the link is unknown
  double share;      // of the link
  double alone_ns;   // a decode step without streaming; 0: unknown
  uint32_t n_decode; // sequences in that step
  uint32_t n_steps;  // beside streaming since
  uint32_t n_mixed;  // steps with prompt tokens of their own while streaming paused
} td_stream_pace;

void td_stream_pace_init(td_stream_pace *out, double slowdown);

// Bytes to queue until the end of a step that decodes n_decode sequences, what waits already
// included. 0: queue nothing, the next step is measured alone. With n_decode 0: bytes to have
// queued ahead at any time.
uint64_t td_stream_pace_ahead(const td_stream_pace *pace, uint32_t n_decode);

typedef struct {
  uint32_t n_decode, n_prefilled;    // sequences decoded; prompt tokens of the step itself
  uint64_t ns;                       // how long it took
  uint64_t copied_bytes, left_bytes; // of experts: streamed meanwhile; still queued at its end
  uint64_t copying_ns;               // how long streamed ones took
} td_timed_step;
void td_stream_pace_note(td_stream_pace *pace, const td_timed_step *step);
