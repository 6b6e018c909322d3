// src/http/route.c - finds a route: linear search in a short table.
#include <string.h>

#include "http/http_impl.h"

static bool path_matches(const char *pattern, const char *path) {
  size_t len = strlen(pattern);
  if (len >= 2 && strcmp(pattern + len - 2, "/*") == 0) {
    return strncmp(pattern, path, len - 1) == 0 && path[len - 1] != 0;
  }
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
    if (allow->len > 0) td_buf_str(allow, ", ");
    td_buf_str(allow, routes[i].method);
    if (strcmp(routes[i].method, "GET") == 0) td_buf_str(allow, ", HEAD");
  }
  return NULL;
}
