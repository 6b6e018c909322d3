// src/kv/record.h - a KV page as a file: header, token ids, keys and values. Thread-safe.
//
// A page's name is the SHA-256 of the previous page's name and its own tokens; the first page is
// chained to the model's fingerprint. A name therefore identifies all tokens from the start, and
// the model. It is also the file name.
#pragma once

#include <stdint.h>

#include "base/sha256.h"
#include "base/status.h"

// The name of the page with tokens[n] that follows the page named before.
void td_kv_name_next(td_digest *out, const td_digest *before, const int32_t *tokens, uint32_t n);
// The name before that of the first page of prompts with this salt; 0: root itself.
void td_kv_name_salted(td_digest *out, const td_digest *root, uint64_t salt);

typedef struct {
  td_digest model;       // fingerprint of all that determines keys and values
  td_digest name;        // the page's name
  const int32_t *tokens; // [n_tokens], borrowed
  uint32_t n_tokens;
  uint64_t n_bytes; // size of keys and values
} td_kv_record;

uint64_t td_kv_record_bytes(const td_kv_record *record); // size of the whole file
// Offset of keys and values in the file.
uint64_t td_kv_record_offset(const td_kv_record *record);

// Fills in header, checksum and tokens; keys and values are already in place.
void td_kv_record_seal(void *file, const td_kv_record *record);
// Checks that file[n_bytes] is this record and undamaged. TD_EFORMAT: the message says what
// differs.
td_status td_kv_record_check(const void *file, uint64_t n_bytes, const td_kv_record *record,
                             td_err *err);

// Files in the directory dir; file is a buffer of td_kv_record_bytes.
// Writes a sealed record atomically: its data is on disk before it appears under its name. used_ns
// is the time of last use, in ns since 1970. TD_ELIMIT: the disk is full. TD_EIO.
td_status td_kv_record_write(const char *dir, const td_kv_record *record, const void *file,
                             uint64_t used_ns, td_err *err);
// TD_ENOENT: no such record. TD_EFORMAT: rejected by td_kv_record_check, or the file may not be
// read. TD_EIO.
td_status td_kv_record_read(const char *dir, const td_kv_record *record, void *file, td_err *err);
void td_kv_record_touch(const char *dir, const td_digest *name, uint64_t used_ns);
void td_kv_record_remove(const char *dir, const td_digest *name);

#define TD_KV_RECORD_MIN_BYTES 128 // shorter files are not records

#define TD_KV_RECORD_SUFFIX ".kv"
#define TD_KV_TEMP_SUFFIX   ".tmp" // while being written
