// src/front/outbox.h - requests on their way to a worker. Each stands in the worker's outbox until
// all records that make it up are in the ring. Where it stands in them is kept in the request, so a
// full ring costs no memory and a worker's death only sets it back.
#ifndef TD_FRONT_OUTBOX_H
#define TD_FRONT_OUTBOX_H

#include <stdbool.h>
#include <stdint.h>

#include "front/supervisor.h"
#include "tandem/wire.h"

typedef struct td_outbox td_outbox;
typedef struct td_outgoing td_outgoing;

struct td_outgoing {
  uint64_t id;
  td_wire_submit submit;
  const int32_t *pages; // [submit.n_pages], borrowed
  int32_t *tokens; // [n_prompt + n_answer] at least, owned: the prompt, behind it the answer so far
  td_token_value *bias; // [submit.n_bias], owned
  bool is_canceled;     // nobody listens any more
  bool is_called_back;  // the worker shall let go of it
  // what the worker has of it
  bool submit_sent, cancel_sent;
  uint32_t n_pages_sent, n_tokens_sent, n_bias_sent;
  td_outbox *box; // in which it stands; NULL: in none
  td_outgoing *next;
};

// First in, first out. Zeroed is empty.
struct td_outbox {
  td_outgoing *head, *tail;
};

// Does nothing for one that stands there. One that the worker has enters again when there is more
// of it: pages (submit.n_pages), or that it is not wanted.
void td_outbox_enter(td_outbox *box, td_outgoing *out);
void td_outbox_leave(td_outgoing *out); // legal for one that stands in none
// The worker has nothing of it any more.
void td_outgoing_rewind(td_outgoing *out);
// Sends what the ring takes; the supervisor's on_space or on_death comes when that is not all.
void td_outbox_flush(td_outbox *box, td_supervisor *to);

#endif
