// src/api/dialects/response_store.h - the last responses, for previous_response_id and GET. Each
// belongs to the key that made it: to others it is not there. Any thread.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "api/error.h"
#include "base/buf.h"

typedef struct td_response_store td_response_store;

// What is kept of a response.
typedef enum {
  TD_STORED_MESSAGES, // the conversation with the answer: comma-separated messages of chat
  TD_STORED_INPUT,    // the request's items, comma-separated
  TD_STORED_RESPONSE, // the response
  TD_N_STORED
} td_stored_part;

// NULL: out of memory.
td_response_store *td_response_store_open(void);
void td_response_store_close(td_response_store *store);

// Appends a part of a response to out. False: the owner has no such response.
bool td_response_store_get(td_response_store *store, uint64_t owner, const char *id,
                           td_stored_part part, td_buf *out);
// Keeps copies of the parts under id; drops the oldest when there are many.
void td_response_store_put(td_response_store *store, uint64_t owner, const char *id,
                           const td_buf *const parts[TD_N_STORED]);
// False: the owner has no such response.
bool td_response_store_delete(td_response_store *store, uint64_t owner, const char *id);

// Appends what GET answers. path: ID or ID/input_items; query: that of the URL, "" if it has none:
// order (desc, or asc), limit (1 to 100, default 20), after (an item's id).
td_status td_responses_get(td_buf *out, td_response_store *store, uint64_t owner, const char *path,
                           const char *query, td_api_error *error);
td_status td_responses_delete(td_buf *out, td_response_store *store, uint64_t owner, const char *id,
                              td_api_error *error);
