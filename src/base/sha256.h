// src/base/sha256.h - SHA-256 (FIPS 180-4): names that nobody can make two things share.
#ifndef TD_BASE_SHA256_H
#define TD_BASE_SHA256_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
  uint8_t bytes[32];
} td_digest;

typedef struct {
  uint32_t state[8];
  uint64_t n_bytes; // added so far
  uint8_t block[64];
} td_sha256;

void td_sha256_begin(td_sha256 *sha);
void td_sha256_add(td_sha256 *sha, const void *bytes, size_t len);
void td_sha256_end(td_sha256 *sha, td_digest *out);

#define TD_DIGEST_HEX 65 // with the terminating NUL
void td_digest_hex(char out[TD_DIGEST_HEX], const td_digest *digest);

#endif
