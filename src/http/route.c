// src/http/route.c - finds a route: linear search in a short table.
#include <string.h>

#include "http/http_impl.h"

static bool path_matches(const char *pattern, const char *path) {
  size_t len = strlen(pattern);
  if (len >= 2 && strcmp(pattern + len - 2, "/*") == 0)
    return strncmp(pattern, path, len - 1) == 0 && path[len - 1] != 0;
  return strcmp(pattern, path) == 0;
}

static bool method_matches(const char *allowed, const char *method) {
  if (strcmp(allowed, method) == 0) return true;
  return strcmp(allowed, "GET") == 0 && strcmp(method, "HEAD") == 0;
}

const td_http_route *td_http_route_find(const td_http_route *routes, size_t n, const char *method,
                                        const char *path, td_buf *allow) {
  for (size_t i = 0; i < n; i++) {
    if (!path_matches(routes[i].path, path)) continue;
    if (method_matches(routes[i].method, method)) return &routes[i];
    const bool is_new = strcmp(method, "POST") == 0 && strchr(routes[i].path, '*');
    if (is_new) continue; // what a client would make there is no endpoint
    if (allow->len > 0) td_buf_str(allow, ", ");
    td_buf_str(allow, routes[i].method);
    if (strcmp(routes[i].method, "GET") == 0) td_buf_str(allow, ", HEAD");
  }
  return NULL;
}

// The route that the first len characters of a path miss by what stands before them or before it,
// such as a /v1 that a client left out or gave twice. NULL: none.
static const td_http_route *nearest(const td_http_route *routes, size_t n, const char *path,
                                    size_t len) {
  for (size_t i = 0; i < n && len > 1; i++) {
    const char *other = routes[i].path;
    size_t other_len = strlen(other);
    if (other_len == 1) continue; // every path ends with it
    if (len >= other_len && memcmp(path + len - other_len, other, other_len) == 0)
      return &routes[i];
    if (other_len >= len && memcmp(other + other_len - len, path, len) == 0) return &routes[i];
  }
  return NULL;
}

void td_http_route_describe_miss(const td_http_route *routes, size_t n, const char *method,
                                 const char *path, const char *allow, td_buf *out) {
  const int shown = 128;
  if (allow[0]) {
    td_buf_printf(out, "%s is not allowed for %.*s: use %s", method, shown, path, allow);
    return;
  }
  size_t len = strlen(path);
  while (len > 1 && path[len - 1] == '/')
    len--;
  const td_http_route *other = nearest(routes, n, path, len);
  td_buf_printf(out, "there is no endpoint %.*s", shown, path);
  if (other) td_buf_printf(out, ": did you mean %s?", other->path);
}
