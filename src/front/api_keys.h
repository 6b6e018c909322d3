// src/front/api_keys.h - who may use the server, and how much of it: the keys of --api-key and
// --api-keys. Each is a tenant of the scheduler (sched/fair_share.h).
#ifndef TD_FRONT_API_KEYS_H
#define TD_FRONT_API_KEYS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"
#include "options/options.h"

typedef struct {
  const char *key;
  uint32_t weight;
} td_api_key;

// Zeroed: everybody may, and each peer is a tenant.
typedef struct {
  td_buf text; // of the file, cut into keys
  td_api_key *keys;
  uint32_t n;
} td_api_keys;

// one (may be NULL, borrowed) is a key of weight 1. The file at path (may be NULL) has a key a
// line, with a weight from 1 to 1000 behind it where it is not 1; what follows # is a comment.
// TD_EINVAL names the line. Call td_api_keys_free in every case.
td_status td_api_keys_read(td_api_keys *out, const char *one, const char *path, td_err *err);
void td_api_keys_free(td_api_keys *keys);

typedef struct {
  uint64_t tenant;
  uint32_t weight;
} td_api_caller;

// Who sends this Authorization header (NULL: none) from peer, a number. False: somebody who may
// not. Takes the same time whichever key it is, and wherever the first difference stands.
bool td_api_keys_check(const td_api_keys *keys, const char *authorization, uint64_t peer,
                       td_api_caller *out);

// Before --api-key is used: takes it from --api-key-file or TANDEM_API_KEY where it was not given,
// and hides it from the process list, in argv, where it was.
td_status td_api_key_find(td_options *options, int argc, char **argv, td_err *err);

#endif
