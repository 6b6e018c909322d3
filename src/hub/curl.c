// src/hub/curl.c - HTTP by libcurl, which is loaded when something is downloaded: the program does
// not depend on it.
#define CURL_DISABLE_TYPECHECK
#include <curl/curl.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/clock.h"
#include "base/env.h"
#include "hub/hub_impl.h"

#define CONNECT_SECONDS 30
#define STALLED_SECONDS 60 // too slow, or no body has begun, redirects included
#define SLOW_BYTES_S    1024L
#define MAX_ERROR_BYTES (64u << 10) // read of an error's page

#define CURL_FUNCTIONS(X)                                                                          \
  X(curl_global_init)                                                                              \
  X(curl_easy_init)                                                                                \
  X(curl_easy_setopt)                                                                              \
  X(curl_easy_perform)                                                                             \
  X(curl_easy_getinfo)                                                                             \
  X(curl_easy_cleanup)                                                                             \
  X(curl_easy_strerror)                                                                            \
  X(curl_slist_append)                                                                             \
  X(curl_slist_free_all)

static struct {
#define X(name) __typeof__(name) *name;
  CURL_FUNCTIONS(X)
#undef X
} lib;

td_status td_hub_curl_open(td_err *err) {
  static const char *const names[] = {"libcurl.so.4", "libcurl-gnutls.so.4"};
  void *library = NULL;
  if (lib.curl_global_init) return TD_OK;
  for (size_t i = 0; i < TD_COUNT(names) && !library; i++)
    library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    return td_fail(err, TD_EUNSUPPORTED,
                   "downloads need libcurl, which is not installed (Debian: apt install libcurl4)");
  }
#define X(name)                                                                                    \
  *(void **)&lib.name = dlsym(library, #name);                                                     \
  if (!lib.name) return td_fail(err, TD_EUNSUPPORTED, "libcurl lacks " #name ": it is too old");
  CURL_FUNCTIONS(X)
#undef X
  return lib.curl_global_init(CURL_GLOBAL_DEFAULT) == CURLE_OK
             ? TD_OK
             : td_fail(err, TD_EIO, "libcurl does not start");
}

typedef struct {
  const td_hub_get *get;
  CURL *curl;
  td_hub_result *result;
  td_err *err;
  bool has_failed; // take has
  bool has_begun;
  bool is_late;   // it has not begun in time
  uint64_t begin; // of the body
  size_t n_error; // bytes of an error's page
  uint64_t begun_ns;
} transfer;

static long stalled_seconds(void) {
  const char *test = td_test_var_get(TD_ENV_HUB_STALLED_S);
  return test ? strtol(test, NULL, 10) : STALLED_SECONDS;
}

// The first byte of "Content-Range: bytes 5-9/10".
static size_t on_header(char *line, size_t size, size_t n, void *arg) {
  transfer *t = arg;
  static const char range[] = "content-range: bytes ", after[] = "retry-after: ";
  const size_t len = size * n;
  char text[128];
  snprintf(text, sizeof text, "%.*s", (int)(len < sizeof text ? len : sizeof text - 1), line);
  if (strncmp(text, "HTTP/", 5) == 0) { // of each response on the way
    t->begin = 0;
    t->result->retry_after_s = 0;
  } else if (strncasecmp(text, range, sizeof range - 1) == 0) {
    t->begin = strtoull(text + sizeof range - 1, NULL, 10);
  } else if (strncasecmp(text, after, sizeof after - 1) == 0) {
    t->result->retry_after_s = (unsigned)strtoul(text + sizeof after - 1, NULL, 10);
  }
  return len;
}

static size_t on_body(char *bytes, size_t size, size_t n, void *arg) {
  transfer *t = arg;
  const size_t len = size * n;
  long http = 0;
  lib.curl_easy_getinfo(t->curl, CURLINFO_RESPONSE_CODE, &http);
  if (http >= 300) {
    t->n_error += len;
    return t->n_error <= MAX_ERROR_BYTES ? len : 0;
  }
  if (!t->has_begun && http != 206) t->begin = 0;
  t->has_begun = true;
  t->has_failed = t->get->take(t->get->ctx, t->begin, bytes, len, t->err) != TD_OK;
  t->begin += len;
  return t->has_failed ? 0 : len;
}

static int on_progress(void *arg, curl_off_t total, curl_off_t now, curl_off_t up_total,
                       curl_off_t up_now) {
  transfer *t = arg;
  (void)total, (void)now, (void)up_total, (void)up_now;
  const uint64_t waited_ns = td_clock_ns() - t->begun_ns;
  t->is_late = !t->has_begun && waited_ns > (uint64_t)stalled_seconds() * 1000000000u;
  return t->is_late || (t->get->stop && atomic_load(t->get->stop));
}

static void set_options(transfer *t, struct curl_slist *headers) {
  CURL *c = t->curl;
  const bool is_safe = strncmp(t->get->url, "https:", 6) == 0;
  char range[32];
  lib.curl_easy_setopt(c, CURLOPT_URL, t->get->url);
  lib.curl_easy_setopt(c, CURLOPT_USERAGENT, "tandem/" TD_VERSION);
  lib.curl_easy_setopt(c, CURLOPT_HTTPHEADER, headers);
  lib.curl_easy_setopt(c, CURLOPT_NOSIGNAL, 1L);
  lib.curl_easy_setopt(c, CURLOPT_FOLLOWLOCATION, 1L);
  lib.curl_easy_setopt(c, CURLOPT_MAXREDIRS, 10L);
  lib.curl_easy_setopt(c, CURLOPT_PROTOCOLS_STR, "http,https");
  lib.curl_easy_setopt(c, CURLOPT_REDIR_PROTOCOLS_STR, is_safe ? "https" : "http,https");
  lib.curl_easy_setopt(c, CURLOPT_CONNECTTIMEOUT, (long)CONNECT_SECONDS);
  lib.curl_easy_setopt(c, CURLOPT_LOW_SPEED_LIMIT, SLOW_BYTES_S);
  lib.curl_easy_setopt(c, CURLOPT_LOW_SPEED_TIME, stalled_seconds());
  lib.curl_easy_setopt(c, CURLOPT_TIMEOUT, t->get->max_s);
  lib.curl_easy_setopt(c, CURLOPT_BUFFERSIZE, 1L << 18);
  lib.curl_easy_setopt(c, CURLOPT_HEADERFUNCTION, on_header);
  lib.curl_easy_setopt(c, CURLOPT_HEADERDATA, t);
  lib.curl_easy_setopt(c, CURLOPT_WRITEFUNCTION, on_body);
  lib.curl_easy_setopt(c, CURLOPT_WRITEDATA, t);
  lib.curl_easy_setopt(c, CURLOPT_NOPROGRESS, 0L);
  lib.curl_easy_setopt(c, CURLOPT_XFERINFOFUNCTION, on_progress);
  lib.curl_easy_setopt(c, CURLOPT_XFERINFODATA, t);
  if (!t->get->begin) return;
  snprintf(range, sizeof range, "%llu-", (unsigned long long)t->get->begin);
  lib.curl_easy_setopt(c, CURLOPT_RANGE, range);
}

static td_status judge(transfer *t, CURLcode code, td_err *err) {
  const char *url = t->get->url;
  long http = 0;
  lib.curl_easy_getinfo(t->curl, CURLINFO_RESPONSE_CODE, &http);
  t->result->http = http;
  if (t->has_failed) return err->code;
  if (t->is_late) {
    t->result->is_worth_retrying = true;
    return td_fail(err, TD_EIO, "%.300s: no response after %d s", url, STALLED_SECONDS);
  }
  if (code == CURLE_ABORTED_BY_CALLBACK) return td_fail(err, TD_ECANCELED, "interrupted");
  if (code != CURLE_OK && t->n_error <= MAX_ERROR_BYTES) {
    const bool is_final = code == CURLE_URL_MALFORMAT || code == CURLE_UNSUPPORTED_PROTOCOL ||
                          code == CURLE_TOO_MANY_REDIRECTS ||
                          code == CURLE_PEER_FAILED_VERIFICATION;
    t->result->is_worth_retrying = !is_final;
    return td_fail(err, TD_EIO, "%.300s: %s", url, lib.curl_easy_strerror(code));
  }
  if (http >= 200 && http < 300) return TD_OK;
  t->result->is_worth_retrying = http == 408 || http == 416 || http == 429 || http >= 500;
  return td_fail(err, TD_EIO, "%.300s: the server answers %ld", url, http);
}

td_status td_hub_fetch(const td_hub_get *get, td_hub_result *result, td_err *err) {
  transfer t = {.get = get, .result = result, .err = err, .begun_ns = td_clock_ns()};
  struct curl_slist *headers = NULL;
  *result = (td_hub_result){0};
  if (get->token) {
    td_buf line = TD_BUF_INIT;
    td_buf_printf(&line, "Authorization: Bearer %s", get->token);
    headers = lib.curl_slist_append(NULL, td_buf_text(&line));
    td_buf_free(&line);
  }
  t.curl = lib.curl_easy_init();
  td_status st = t.curl ? TD_OK : td_fail(err, TD_ENOMEM, "out of memory");
  if (t.curl) {
    set_options(&t, headers);
    st = judge(&t, lib.curl_easy_perform(t.curl), err);
    lib.curl_easy_cleanup(t.curl);
  }
  lib.curl_slist_free_all(headers);
  return st;
}
