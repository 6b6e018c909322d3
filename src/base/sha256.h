// src/base/sha256.h - SHA-256 by nettle, for collision-resistant names.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <nettle/base16.h>
#include <nettle/sha2.h>

typedef struct {
  uint8_t bytes[SHA256_DIGEST_SIZE];
} td_digest;

typedef struct sha256_ctx td_sha256;

static inline void td_sha256_begin(td_sha256 *sha) {
  sha256_init(sha);
}
static inline void td_sha256_add(td_sha256 *sha, const void *bytes, size_t len) {
  sha256_update(sha, len, bytes);
}
static inline void td_sha256_end(td_sha256 *sha, td_digest *out) {
  sha256_digest(sha, sizeof out->bytes, out->bytes);
}

#define TD_DIGEST_HEX (BASE16_ENCODE_LENGTH(SHA256_DIGEST_SIZE) + 1) // with the terminating NUL
static inline void td_digest_hex(char out[TD_DIGEST_HEX], const td_digest *digest) {
  base16_encode_update(out, sizeof digest->bytes, digest->bytes);
  out[TD_DIGEST_HEX - 1] = '\0';
}
