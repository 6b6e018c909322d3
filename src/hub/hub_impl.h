// src/hub/hub_impl.h - shared by the files of src/hub.
#pragma once

#include "base/buf.h"
#include "hub/hub.h"

// ---- curl.c: HTTP -------------------------------------------------------------------------------

typedef struct {
  const char *url, *token; // token: NULL without
  uint64_t begin;          // first byte that is wanted; not 0: as a Range
  long max_s;              // for the whole transfer; 0: as long as it is fast enough
  const atomic_bool *stop;
  // Receives the body of a successful response; `begin` is where it really begins. An error ends
  // the transfer.
  td_status (*take)(void *ctx, uint64_t begin, const void *bytes, size_t len, td_err *err);
  void *ctx;
} td_hub_get;

typedef struct {
  long http; // the response's status; 0: there was none
  unsigned retry_after_s;
  bool is_worth_retrying; // the network's or the server's fault
} td_hub_result;

// Loads libcurl. TD_EUNSUPPORTED: it is not installed. Call before threads start.
td_status td_hub_curl_open(td_err *err);
// One request; follows redirects, on which the token is not sent to other hosts. A response that
// does not begin, one that stalls and an error's page without end are given up. Any thread.
td_status td_hub_fetch(const td_hub_get *get, td_hub_result *result, td_err *err);

// ---- listing.c: what a repository holds
// ----------------------------------------------------------

#define TD_HUB_HASH_BYTES 65 // SHA-256 in hex, or git's SHA-1

typedef struct {
  char *path; // owned; relative, without . or ..
  char hash[TD_HUB_HASH_BYTES];
  bool is_sha256; // else the SHA-1 of git's blob
  uint64_t n_bytes;
  bool is_twin; // a file before it in the list has its content
} td_hub_file;

typedef struct {
  char commit[TD_HUB_HASH_BYTES];
  td_hub_file *files; // owned, [n]
  uint32_t n;
} td_hub_listing;

// Parses the hub's description of a repository and keeps the files that opts ask for.
td_status td_hub_listing_parse(td_hub_listing *out, const char *json, size_t len,
                               const td_hub_opts *opts, td_err *err);
void td_hub_listing_free(td_hub_listing *listing);

// ---- cache.c: folders ---------------------------------------------------------------------------

// Appends CACHE.
td_status td_hub_cache(td_buf *out, td_err *err);
// Appends CACHE/models--ORG--NAME.
td_status td_hub_folder(td_buf *out, const char *repo, td_err *err);
// Makes a folder and its parents.
td_status td_hub_make_folder(const char *path, td_err *err);
// The key, or NULL; the caller frees it.
char *td_hub_token(void);
// Links the file's blob into the snapshot of the commit.
td_status td_hub_link(const char *folder, const char *commit, const td_hub_file *file, td_err *err);
td_status td_hub_write_ref(const char *folder, const char *revision, const char *commit,
                           td_err *err);

// ---- quantization.c -----------------------------------------------------------------------------

// Length of the model's name if the path is that of a GGUF file of this quantization, of a part as
// well, which its name ends in or else its folder's; otherwise 0.
size_t td_hub_quant_len(const char *path, const char *quant);
// Appends the quantization that the path names if it is that of a GGUF file, behind a comma.
void td_hub_list_quant(td_buf *out, const char *path);
// The file of a quantization in a snapshot, of several parts the first; NULL: there is none, or it
// is incomplete. The caller frees it.
char *td_hub_find_quant(const char *snapshot, const char *quant);

// ---- download.c ---------------------------------------------------------------------------------

typedef struct {
  const char *base_url; // of the files, which follow it
  const char *folder, *token;
  const td_hub_listing *listing;
  const atomic_bool *stop;
} td_hub_download;

// Downloads the blobs that the folder lacks.
td_status td_hub_download_all(const td_hub_download *what, td_err *err);
// Appends text with what a URL does not hold escaped, slashes excepted.
void td_hub_escape(td_buf *out, const char *text);
