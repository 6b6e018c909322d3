// src/model/digest.h - the SHA-256 of a checkpoint's content, for receipts.
#pragma once

#include "base/sha256.h"
#include "base/status.h"

// Of config.json and all shards, in their order: equal for every copy of the same files. The first
// time all of them are read, at the speed of the drive or of SHA-256; the result is kept beside the
// first shard, where the folder can be written, under the files' fingerprint (model/fingerprint.h).
// TD_ENOENT, TD_EFORMAT, TD_EIO.
td_status td_model_digest(td_digest *out, const char *dir, td_err *err);
