#include "base/sha256.h"

#include <string.h>

static const uint32_t rounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotr(uint32_t x, int n) {
  return x >> n | x << (32 - n);
}

static uint32_t big_endian(const uint8_t *p) {
  return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

// Names of variables are the standard's (6.2.2).
static void compress(uint32_t state[8], const uint8_t *block) {
  uint32_t w[64], v[8];
  for (int t = 0; t < 16; t++)
    w[t] = big_endian(block + t * 4);
  for (int t = 16; t < 64; t++) {
    uint32_t s0 = rotr(w[t - 15], 7) ^ rotr(w[t - 15], 18) ^ w[t - 15] >> 3;
    uint32_t s1 = rotr(w[t - 2], 17) ^ rotr(w[t - 2], 19) ^ w[t - 2] >> 10;
    w[t] = w[t - 16] + s0 + w[t - 7] + s1;
  }
  memcpy(v, state, sizeof v);
  for (int t = 0; t < 64; t++) {
    uint32_t a = v[0], e = v[4];
    uint32_t ch = (e & v[5]) ^ (~e & v[6]), maj = (a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]);
    uint32_t t1 = v[7] + (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) + ch + rounds[t] + w[t];
    uint32_t t2 = (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) + maj;
    memmove(v + 1, v, 7 * sizeof v[0]);
    v[0] = t1 + t2;
    v[4] += t1;
  }
  for (int i = 0; i < 8; i++)
    state[i] += v[i];
}

void td_sha256_begin(td_sha256 *sha) {
  *sha = (td_sha256){.state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f,
                               0x9b05688c, 0x1f83d9ab, 0x5be0cd19}};
}

void td_sha256_add(td_sha256 *sha, const void *bytes, size_t len) {
  const uint8_t *p = bytes;
  while (len) {
    size_t at = sha->n_bytes % 64, n = len < 64 - at ? len : 64 - at;
    memcpy(sha->block + at, p, n);
    sha->n_bytes += n;
    p += n;
    len -= n;
    if (at + n == 64) compress(sha->state, sha->block);
  }
}

void td_sha256_end(td_sha256 *sha, td_digest *out) {
  static const uint8_t padding[64] = {0x80};
  uint64_t n_bits = sha->n_bytes * 8;
  size_t at = sha->n_bytes % 64;
  td_sha256_add(sha, padding, (at < 56 ? 56 : 120) - at);
  uint8_t length[8];
  for (int i = 0; i < 8; i++)
    length[i] = (uint8_t)(n_bits >> (56 - 8 * i));
  td_sha256_add(sha, length, sizeof length);
  for (int i = 0; i < 32; i++)
    out->bytes[i] = (uint8_t)(sha->state[i / 4] >> (24 - i % 4 * 8));
}

void td_digest_hex(char out[TD_DIGEST_HEX], const td_digest *digest) {
  for (int i = 0; i < 32; i++) {
    out[2 * i] = "0123456789abcdef"[digest->bytes[i] >> 4];
    out[2 * i + 1] = "0123456789abcdef"[digest->bytes[i] & 15];
  }
  out[64] = '\0';
}
