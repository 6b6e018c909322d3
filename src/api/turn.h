// src/api/turn.h - keys that identify the server's own messages when a conversation comes back
// with them: for whom it was made, what was said before it, the tools and options, and what it
// says. White space around the content and the spelling of arguments do not count, nor do ids of
// calls and the reasoning, which clients leave out.
#pragma once

#include "api/output_parser.h"
#include "api/request.h"
#include "base/sha256.h"

// What an assistant's message says: content, then its calls in order.
void td_api_said_begin(td_sha256 *sha, const char *content, size_t len);
void td_api_said_call(td_sha256 *sha, const char *name, const char *arguments);

// What generated text says, parsed as `how` was (its first members), and its reasoning, appended.
// Error: TD_ENOMEM.
td_status td_api_said_by(const td_output_parser *how, const char *text, size_t len, td_text_end end,
                         td_digest *said, td_buf *reasoning, td_err *err);

// places[i]: the first i messages of the request, with its tools and options; i up to n_marks.
void td_api_turn_places(const td_api_request *request, td_digest *places);
// The last of them alone.
void td_api_turn_place(const td_api_request *request, td_digest *place);
// The key of a message that says `said` there.
void td_api_turn_key(const td_digest *place, const td_digest *said, td_digest *key);
