// src/kv/record.h - one KV page as a file: a head that says what it is, the page's token ids, its
// keys and values. Everything here may run on any thread.
//
// A page's name is the SHA-256 of the name of the page before it and its own tokens; the first
// page's is chained to the model's. So a name stands for all tokens from the start on, and for the
// model. The file is called after it.
#ifndef TD_KV_RECORD_H
#define TD_KV_RECORD_H

#include <stdint.h>

#include "base/sha256.h"
#include "base/status.h"

void td_kv_name_next(td_digest *out, const td_digest *before, const int32_t *tokens, uint32_t n);

typedef struct {
  td_digest model;       // fingerprint of all that decides what keys and values are
  td_digest name;        // of the page
  const int32_t *tokens; // [n_tokens], borrowed
  uint32_t n_tokens;
  uint64_t n_bytes; // of keys and values
} td_kv_record;

uint64_t td_kv_record_bytes(const td_kv_record *record); // of the whole file
// Where keys and values lie in the file.
uint64_t td_kv_record_offset(const td_kv_record *record);

// Fills in what comes before the keys and values, which are in place, and their checksum.
void td_kv_record_seal(void *file, const td_kv_record *record);
// Whether file[n_bytes] is this record and undamaged. TD_EFORMAT: says in what it is not.
td_status td_kv_record_check(const void *file, uint64_t n_bytes, const td_kv_record *record,
                             td_err *err);

// The same with files in the directory dir. file is a buffer of td_kv_record_bytes.
// Sealed, it appears under its name whole or not at all. used_ns is when it was used last, since
// 1970. Its bytes are on the disk before its name is.
td_status td_kv_record_write(const char *dir, const td_kv_record *record, const void *file,
                             uint64_t used_ns, td_err *err);
// TD_ENOENT: there is none. TD_EFORMAT: td_kv_record_check says no, or the file may not be read.
// TD_EIO.
td_status td_kv_record_read(const char *dir, const td_kv_record *record, void *file, td_err *err);
void td_kv_record_touch(const char *dir, const td_digest *name, uint64_t used_ns);
void td_kv_record_remove(const char *dir, const td_digest *name);

#define TD_KV_RECORD_MIN_BYTES 128 // shorter files are none

#define TD_KV_RECORD_SUFFIX ".kv"
#define TD_KV_TEMP_SUFFIX   ".tmp" // while it is written

#endif
