// src/front/kv_events.h - tells routers what the prefix cache holds, as vLLM does: KV events over
// ZeroMQ, so that a prompt goes to the server that has its pages. libzmq is loaded when this is
// asked for. Sending never blocks: a subscriber that is too slow misses batches, which it sees by
// their sequence numbers and may ask for again. Thread: the loop's.
#pragma once

#include <uv.h>

#include "front/pictures.h"
#include "kv/kv.h"

typedef struct td_kv_events td_kv_events;

typedef struct {
  const char *endpoint; // of the PUB socket
  const char *replay;   // of the ROUTER socket; NULL: no replay
  const char *topic;    // NULL: ""
} td_kv_events_opts;

// TD_EUNSUPPORTED: no libzmq. On success the caller owns *out; on error *out is NULL.
td_status td_kv_events_open(td_kv_events **out, const td_kv_events_opts *opts, td_err *err);
// Answers requests for replay from now on, until td_kv_events_stop. NULL is legal in both.
void td_kv_events_start(td_kv_events *events, uv_loop_t *loop);
void td_kv_events_stop(td_kv_events *events);
void td_kv_events_close(td_kv_events *events); // after the loop has ended; NULL is legal

// What a stored page is of.
typedef struct {
  const char *salt;                // that a first page's prompts are kept apart by; NULL: nothing
  const int32_t *ids;              // its tokens
  const td_picture_list *pictures; // of its request; NULL: none
  uint32_t at;                     // of its first token there
} td_kv_origin;

// Adds a change to the next batch.
void td_kv_events_add(td_kv_events *events, const td_kv_change *change, const td_kv_origin *origin);
// Sends what was added, as one batch. NULL is legal.
void td_kv_events_send(td_kv_events *events);
