// src/api/dialects/responses_stored.h - what GET and DELETE of /v1/responses/ID answer.
#pragma once

#include "api/dialects/response_store.h"
#include "api/error.h"

// Appends what GET answers. path: ID or ID/input_items; query: that of the URL, "" if it has none:
// order (desc, or asc), limit (1 to 100, default 20), after (an item's id).
td_status td_responses_get(td_buf *out, td_response_store *store, uint64_t owner, const char *path,
                           const char *query, td_api_error *error);
td_status td_responses_delete(td_buf *out, td_response_store *store, uint64_t owner, const char *id,
                              td_api_error *error);
