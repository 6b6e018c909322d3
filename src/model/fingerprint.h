// src/model/fingerprint.h - which checkpoint this is, for what is kept on disk beside it.
#ifndef TD_MODEL_FINGERPRINT_H
#define TD_MODEL_FINGERPRINT_H

#include "base/sha256.h"
#include "base/status.h"

// Adds the checkpoint in dir to sha: config.json whole; of each shard its name, its size, when it
// was last written, and samples of its bytes, the whole of small ones. A checkpoint that was
// changed in place or replaced differs in one of them; one that was copied anew may count as
// another.
td_status td_model_fingerprint(td_sha256 *sha, const char *dir, td_err *err);

#endif
