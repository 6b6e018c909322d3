// src/hub/pull.c - a model from the hub: its list of files, then the files, then the links.
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "base/env.h"
#include "base/log.h"
#include "base/mem_info.h"
#include "hub/hub_impl.h"

#define MAX_LIST_BYTES (64u << 20)
#define MAX_LIST_S     300

void td_hub_escape(td_buf *out, const char *text) {
  for (const char *c = text; *c; c++)
    if (isalnum((unsigned char)*c) || strchr("-_.~/", *c))
      td_buf_char(out, *c);
    else
      td_buf_printf(out, "%%%02X", (unsigned)(unsigned char)*c);
}

static const char *endpoint(void) {
  const char *given = td_env("HF_ENDPOINT");
  return given ? given : "https://huggingface.co";
}

static td_status take_text(void *ctx, uint64_t begin, const void *bytes, size_t len, td_err *err) {
  td_buf *text = ctx;
  (void)begin;
  if (text->len + len > MAX_LIST_BYTES)
    return td_fail(err, TD_ELIMIT, "the hub's list is too large");
  td_buf_add(text, bytes, len);
  return td_buf_status(text, err);
}

static td_status explain(const td_hub_opts *opts, const td_hub_result *r, td_err *err) {
  if (r->http == 404) {
    return td_fail(err, TD_ENOENT, "%s: %s has no such model%s%s (or it is private: set HF_TOKEN)",
                   opts->repo, endpoint(), opts->revision ? " or revision " : "",
                   opts->revision ? opts->revision : "");
  }
  if (r->http == 401 || r->http == 403) {
    return td_fail(err, TD_EINVAL,
                   "%s: the server answers %ld: the model does not exist, or it is gated: accept "
                   "its terms at %s/%s and set HF_TOKEN to a key that may read it",
                   opts->repo, r->http, endpoint(), opts->repo);
  }
  return td_err_prefix(err, "%s", opts->repo);
}

static td_status list_files(td_hub_listing *out, const td_hub_opts *opts, const char *revision,
                            const char *token, td_err *err) {
  td_buf url = TD_BUF_INIT, text = TD_BUF_INIT;
  td_hub_result result;
  td_buf_printf(&url, "%s/api/models/%s/revision/", endpoint(), opts->repo);
  td_hub_escape(&url, revision);
  td_buf_str(&url, "?blobs=true");
  const td_hub_get get = {.url = td_buf_text(&url),
                          .token = token,
                          .max_s = MAX_LIST_S,
                          .stop = opts->stop,
                          .take = take_text,
                          .ctx = &text};
  td_status st = td_hub_fetch(&get, &result, err);
  for (unsigned n = 0; st != TD_OK && result.is_worth_retrying && n < 2; n++) {
    td_buf_clear(&text);
    st = td_hub_fetch(&get, &result, err);
  }
  st = st == TD_OK ? td_hub_listing_parse(out, td_buf_text(&text), text.len, opts, err)
                   : explain(opts, &result, err);
  td_buf_free(&url);
  td_buf_free(&text);
  return st;
}

// Says, before anything is downloaded, whether the weights fit into memory: with a tenth more for
// the rest. Read from disk, decode is slower by a factor of tens.
static void tell_memory(const td_hub_listing *l) {
  static const char end[] = ".safetensors";
  const uint64_t limit = td_memory_limit_bytes();
  uint64_t n_weights = 0;
  for (uint32_t i = 0; i < l->n; i++) {
    const size_t len = strlen(l->files[i].path), n_end = sizeof end - 1;
    if (len > n_end && !strcmp(l->files[i].path + len - n_end, end))
      n_weights += l->files[i].n_bytes;
  }
  if (!n_weights || limit == UINT64_MAX) return;
  if (n_weights + n_weights / 10 > limit) {
    td_warn("%.2f GB of weights do not fit into this machine's %.2f GB of memory: every token "
            "would read them from disk. `tandem recommend` lists models that fit",
            (double)n_weights * 1e-9, (double)limit * 1e-9);
  } else {
    td_info("%.2f GB of weights fit into this machine's %.2f GB of memory",
            (double)n_weights * 1e-9, (double)limit * 1e-9);
  }
}

static td_status link_all(const char *folder, const char *revision, const td_hub_listing *l,
                          td_err *err) {
  td_status st = TD_OK;
  for (uint32_t i = 0; i < l->n && st == TD_OK; i++)
    st = td_hub_link(folder, l->commit, &l->files[i], err);
  return st == TD_OK ? td_hub_write_ref(folder, revision, l->commit, err) : st;
}

static td_status download(char **out, const td_hub_opts *opts, const char *revision,
                          const char *folder, td_err *err) {
  td_hub_listing listing = {0};
  td_buf blobs = TD_BUF_INIT, base = TD_BUF_INIT, snapshot = TD_BUF_INIT;
  char *token = td_hub_token();
  td_status st = list_files(&listing, opts, revision, token, err);
  td_buf_printf(&blobs, "%s/blobs", folder);
  td_buf_printf(&base, "%s/%s/resolve/%s/", endpoint(), opts->repo, listing.commit);
  td_buf_printf(&snapshot, "%s/snapshots/%s", folder, listing.commit);
  if (st == TD_OK) tell_memory(&listing);
  if (st == TD_OK) st = td_hub_make_folder(td_buf_text(&blobs), err);
  const td_hub_download what = {.base_url = td_buf_text(&base),
                                .folder = folder,
                                .token = token,
                                .listing = &listing,
                                .stop = opts->stop};
  if (st == TD_OK) st = td_hub_download_all(&what, err);
  if (st == TD_OK) st = link_all(folder, revision, &listing, err);
  if (st == TD_OK) {
    const char *where = td_buf_text(&snapshot);
    *out = opts->quant ? td_hub_find_quant(where, opts->quant) : strdup(where);
    if (!*out) st = td_fail(err, TD_EIO, "%s: parts of the model are missing", where);
  }
  free(token);
  td_hub_listing_free(&listing);
  td_buf_free(&blobs);
  td_buf_free(&base);
  td_buf_free(&snapshot);
  return st;
}

typedef struct {
  const char *repo;
  td_buf quants; // that the cache has of it
} cached;

static td_status take_quants(void *ctx, const td_hub_model *model) {
  cached *c = ctx;
  if (strcmp(model->repo, c->repo) == 0) td_buf_str(&c->quants, model->quants);
  return TD_OK;
}

static td_status fail_offline(const td_hub_opts *opts, td_err *err) {
  cached c = {.repo = opts->repo, .quants = TD_BUF_INIT};
  (void)td_hub_list(take_quants, &c, err);
  const char *quants = td_buf_text(&c.quants);
  td_fail(err, TD_EINVAL, "%s: not downloaded, as HF_HUB_OFFLINE is set", opts->repo);
  if (quants[0]) {
    td_fail(err, TD_EINVAL,
            "%s: not downloaded, as HF_HUB_OFFLINE is set; here are GGUF files of %s: give one "
            "quantization, as %s:%.*s",
            opts->repo, quants, opts->repo, (int)strcspn(quants, ","), quants);
  }
  td_buf_free(&c.quants);
  return TD_EINVAL;
}

td_status td_hub_pull(char **out, const td_hub_opts *opts, td_err *err) {
  const char *revision = opts->revision ? opts->revision : "main";
  const char *offline = td_env("HF_HUB_OFFLINE");
  td_buf folder = TD_BUF_INIT;
  *out = NULL;
  if (!td_hub_is_name(opts->repo))
    return td_fail(err, TD_EINVAL, "%.200s: give the model as ORG/NAME", opts->repo);
  if (strstr(revision, "..") || revision[0] == '/')
    return td_fail(err, TD_EINVAL, "%.200s: not a revision", revision);
  if (offline && strcmp(offline, "0") != 0) return fail_offline(opts, err);
  td_status st = td_hub_curl_open(err);
  if (st == TD_OK) st = td_hub_folder(&folder, opts->repo, err);
  if (st == TD_OK) st = download(out, opts, revision, td_buf_text(&folder), err);
  td_buf_free(&folder);
  return st;
}
