// src/front/api_keys.h - who may use the server, and with what share of it: the keys of --api-key
// and --api-keys. Each key is a tenant of the scheduler (sched/fair_share.h).
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"
#include "options/options.h"

typedef struct {
  const char *key;
  uint32_t weight;
} td_api_key;

// Zeroed: no key is needed, and each peer address is a tenant.
typedef struct {
  td_buf text; // the file's contents; keys point into it
  td_api_key *keys;
  uint32_t n;
} td_api_keys;

// one (may be NULL, borrowed) is a key of weight 1. The file at path (may be NULL) has one key per
// line, optionally followed by a weight from 1 to 1000 (default 1); # starts a comment. TD_EINVAL:
// the message names the line. Call td_api_keys_free in every case.
td_status td_api_keys_read(td_api_keys *out, const char *one, const char *path, td_err *err);
void td_api_keys_free(td_api_keys *keys);

typedef struct {
  uint64_t tenant;
  uint32_t weight;
} td_api_caller;

// Identifies the caller from its Authorization header (NULL: none) and its peer address, as a
// number. False: not authorized. Constant time: independent of which key matches and of where the
// first difference is.
bool td_api_keys_check(const td_api_keys *keys, const char *authorization, uint64_t peer,
                       td_api_caller *out);

// Call before --api-key is used. Takes the key from --api-key-file or TANDEM_API_KEY if --api-key
// was not given; if it was, overwrites it in argv to hide it from the process list.
td_status td_api_key_find(td_options *options, int argc, char **argv, td_err *err);
