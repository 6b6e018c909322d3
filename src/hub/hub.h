// src/hub/hub.h - models by their names on a hub: the local cache, and downloads into it. The cache
// has the layout of Hugging Face's own programs, so each finds the other's files:
//   CACHE/models--ORG--NAME/blobs/HASH              a file by its content
//   CACHE/models--ORG--NAME/blobs/HASH.incomplete   the part downloaded so far
//   CACHE/models--ORG--NAME/snapshots/COMMIT/PATH   a link to it
//   CACHE/models--ORG--NAME/refs/REVISION           the commit a branch or tag was at
// CACHE is HF_HUB_CACHE, HF_HOME/hub or ~/.cache/huggingface/hub. The hub is HF_ENDPOINT or
// https://huggingface.co; the key is HF_TOKEN, or in the file HF_TOKEN_PATH or HF_HOME/token.
// HF_HUB_OFFLINE=1: the cache only.
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

typedef struct {
  const char *repo;     // ORG/NAME
  const char *quant;    // "Q4_K_M": the GGUF files of this quantization alone; NULL: safetensors
  const char *revision; // a branch, tag or commit; NULL: main
  // Patterns of fnmatch for the paths to download; none: the files that tandem reads.
  char *const *include;
  uint32_t n_include;
  const atomic_bool *stop; // set it to stop soon, also from a signal handler; may be NULL
} td_hub_opts;

// Whether the text is ORG/NAME or ORG/NAME:QUANT and names no file here.
bool td_hub_is_name(const char *model);
// Cuts ORG/NAME:QUANT in two; *quant is NULL without one. The caller frees both.
td_status td_hub_split(const char *model, char **repo, char **quant, td_err *err);

// The folder of a model that the cache holds whole or, with a quantization, its first GGUF file;
// the caller frees *out. TD_ENOENT: it does not.
td_status td_hub_find(char **out, const char *repo, const char *quant, const char *revision,
                      td_err *err);

// Whether model is a model's folder of a hub's cache, rather than a checkpoint.
bool td_hub_is_folder(const char *model);
// Like td_hub_find, in that folder.
td_status td_hub_find_in(char **out, const char *folder, const char *revision, td_err *err);

// Downloads what the cache lacks, several files at once; what was begun is continued. Every file is
// checked by its size and hash. Progress goes to stderr. *out is as td_hub_find's. TD_ECANCELED:
// stopped; partial files are kept.
td_status td_hub_pull(char **out, const td_hub_opts *opts, td_err *err);

// A model in the cache.
typedef struct {
  const char *repo;     // ORG/NAME
  const char *quants;   // of its GGUF files, separated by commas; "": none
  uint64_t n_bytes;     // of all its files and revisions
  bool has_safetensors; // of the branch main, whole
  bool is_partial;      // a download was not finished
} td_hub_model;
typedef td_status td_hub_each(void *ctx, const td_hub_model *model);

// Calls each for every model in the cache, by name, until it fails.
td_status td_hub_list(td_hub_each *each, void *ctx, td_err *err);
// Removes a model with all its revisions or, with a quantization, its GGUF files. *n_bytes: what
// was freed. TD_ENOENT: it is not there.
td_status td_hub_remove(uint64_t *n_bytes, const char *repo, const char *quant, td_err *err);
