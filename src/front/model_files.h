// src/front/model_files.h - what the files of a model's folder say of it: size, time and a name for
// the content.
#pragma once

#include "base/sha256.h"

typedef struct {
  uint64_t n_bytes;   // of all weights and configuration files
  int64_t modified_s; // the newest of them, seconds since 1970
  td_digest digest;   // SHA-256 of config.json and of the names and sizes of the weights
} td_model_files;

// Reads the folder; what cannot be read is left out.
void td_model_files_read(td_model_files *out, const char *dir);
