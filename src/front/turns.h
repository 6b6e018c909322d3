// src/front/turns.h - memory of the server's own turns: the tokens of a conversation up to the end
// of a generated message, found again when the conversation comes back with that message. A client
// sends the message as text, whose rendering may differ from what was generated (white space,
// spelling of arguments, reasoning left out); the prefix cache needs the same tokens.
// Any thread.
#pragma once

#include "base/sha256.h"
#include "base/token_ids.h"

typedef struct td_turns td_turns;

// max_bytes: of all turns; the least recently used ones are dropped. On error *out is NULL.
td_status td_turns_open(td_turns **out, size_t max_bytes, td_err *err);
void td_turns_close(td_turns *turns);

// ids: prompt and generated tokens without the end token; end: that token, or -1. reasoning: of the
// message, "" if it has none. A turn with the same key is replaced. What does not fit is not kept.
typedef struct {
  td_digest key;
  const int32_t *ids;
  size_t n_ids;
  int32_t end;
  const char *reasoning;
} td_turn;
void td_turns_keep(td_turns *turns, const td_turn *turn);

// A copy of the turn with that key: its ids are added to *ids, *reasoning is the caller's to free.
// False: there is none, or memory ran out.
bool td_turns_find(td_turns *turns, const td_digest *key, td_token_ids *ids, int32_t *end,
                   char **reasoning);
