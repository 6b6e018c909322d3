// src/front/outbox.h - requests being sent to a worker. A request stays in the worker's outbox
// until all records that make it up are in the ring. The send position is kept in the request, so a
// full ring costs no memory and a worker's death only resets the position. Thread: the loop's.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "front/request_state.h"
#include "front/supervisor.h"
#include "tandem/wire.h"

typedef struct td_outbox td_outbox;
typedef struct td_outgoing td_outgoing;

struct td_outgoing {
  uint64_t id;
  td_wire_submit submit;
  const int32_t *pages; // [submit.n_pages], borrowed
  int32_t *tokens;      // [>= n_prompt + n_answer], owned: the prompt, then the generated tokens
  td_token_value *bias; // [submit.n_bias], owned
  char *grammar;        // [submit.n_grammar], owned
  const td_wire_image *images; // [submit.n_images], borrowed
  td_wire_copies copies;       // with TD_SUBMIT_COPIES
  td_wire_dry dry;             // with TD_SUBMIT_DRY
  // SENDING becomes RUNNING as SUBMIT is sent; what is RECALLED or CANCELED is followed by CANCEL.
  td_request_state state;
  // what else has been sent to the worker
  bool cancel_sent, copies_sent, dry_sent;
  uint32_t n_pages_sent, n_tokens_sent, n_bias_sent, n_grammar_sent, n_images_sent;
  td_outbox *box; // the outbox it is in; NULL: none
  td_outgoing *next;
};

// FIFO. Zeroed is empty.
struct td_outbox {
  td_outgoing *head, *tail;
};

// No effect if out is already in an outbox. A request the worker already has is entered again to
// send more: new pages (submit.n_pages) or a cancellation.
void td_outbox_enter(td_outbox *box, td_outgoing *out);
void td_outbox_leave(td_outgoing *out); // no effect if it is in none
// Resets the send position: the worker no longer has any of it.
void td_outgoing_rewind(td_outgoing *out);
// Sends as much as fits into the ring. The rest is sent by another flush after the supervisor's
// on_space.
void td_outbox_flush(td_outbox *box, td_supervisor *to);
