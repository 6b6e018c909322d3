// src/model/fingerprint.h - identifies a checkpoint, for data on disk that depends on it.
#pragma once

#include "base/sha256.h"
#include "base/status.h"

// Adds the checkpoint in dir to sha: all of config.json and, for each shard, its name, size,
// modification time and samples of its bytes (small files entirely). Detects a checkpoint that was
// modified or replaced; a fresh copy of the same checkpoint may get a different fingerprint.
td_status td_model_fingerprint(td_sha256 *sha, const char *dir, td_err *err);
