// src/model/fingerprint.h - identifies a checkpoint: by samples, for data on disk that depends on
// it, and by the SHA-256 of its content, for receipts.
#pragma once

#include "base/sha256.h"
#include "base/status.h"

// Adds the checkpoint in dir to sha: all of config.json and, for each shard, its name, size,
// modification time and samples of its bytes (small files entirely). Detects a checkpoint that was
// modified or replaced; a fresh copy of the same checkpoint may get a different fingerprint.
td_status td_model_fingerprint(td_sha256 *sha, const char *dir, td_err *err);

// Of config.json and all shards, in their order: equal for every copy of the same files. The first
// time all of them are read, at the speed of the drive or of SHA-256; the result is kept beside the
// first shard, where the folder can be written, under the files' fingerprint.
// TD_ENOENT, TD_EFORMAT, TD_EIO.
td_status td_model_digest(td_digest *out, const char *dir, td_err *err);
