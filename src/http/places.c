// src/http/places.c - who may stay when max_connections are open. Whoever waits for a request to
// arrive can leave for a newcomer, first of the client that has most such connections, so that a
// client that opens many and sends little on each costs itself its places.
#include <netinet/in.h>
#include <string.h>

#include "http/http_impl.h"

#define SLOW_MS   2000 // age at which a request that is still arriving makes room for another
#define SLOW_BODY 1000 // bytes a second below which a body of that age counts as slow
#define MAX_SHARE 8    // a client that holds more than 1/MAX_SHARE of the places has no such age
#define BATCH_SHARE                                                                                \
  64 // 1/BATCH_SHARE of the places becomes free at once when a client has too many
// Descriptors that are not for places, or a quarter of all: half of them for extra connections,
// which are told that there is no place, half for the rest of the process.
#define MAX_SPARE 128

uint64_t td_http_peer_of(const td_http_conn *conn) {
  static const unsigned char v4_in_v6[12] = {[10] = 0xff, [11] = 0xff};
  struct sockaddr_storage addr = {0};
  int len = sizeof addr;
  const unsigned char *bytes = NULL;
  size_t n = 0;
  if (conn->io.handle.type == UV_TCP &&
      uv_tcp_getpeername(&conn->io.tcp, (struct sockaddr *)&addr, &len) == 0) {
    if (addr.ss_family == AF_INET6) {
      bytes = ((struct sockaddr_in6 *)&addr)->sin6_addr.s6_addr;
      n = 8;
      if (memcmp(bytes, v4_in_v6, sizeof v4_in_v6) == 0) bytes += 12, n = 4;
    } else {
      bytes = (const unsigned char *)&((struct sockaddr_in *)&addr)->sin_addr;
      n = 4;
    }
  }
  uint64_t hash = 0xcbf29ce484222325u; // FNV-1a
  for (size_t i = 0; i < n; i++)
    hash = (hash ^ bytes[i]) * 0x100000001b3u;
  return hash;
}

// Connections that wait for a request, by client.
typedef struct {
  uint16_t n[TD_HTTP_N_PEERS];
} shares;

static uint16_t *share_of(shares *s, const td_http_conn *conn) {
  return &s->n[td_http_bucket_of(conn->peer)];
}

// How suitable a connection is for being closed in favour of a new one; 0: not at all. Lingering
// ones first, then those idle between two requests, then those on which a request is slow to come.
static int eviction_rank(const td_http_conn *conn, uint64_t age_ms, bool has_too_many) {
  if (conn->phase == TD_CONN_LINGER) return 3;
  if (conn->phase != TD_CONN_READ) return 0;
  if (td_http_conn_is_idle(conn) && conn->served) return 2;
  if (!has_too_many && age_ms < SLOW_MS) return 0;
  // A head is slow by its age alone.
  return !conn->parser.head_done || conn->parser.body.len < age_ms * SLOW_BODY / 1000;
}

// The connection to close first, among the extra or the other ones; the oldest of equals.
// *has_too_many: its client has more than its share.
static td_http_conn *find_evictable(const td_http_conn *newcomer, bool is_extra,
                                    bool *has_too_many) {
  const td_http_server *server = newcomer->server;
  shares s = {0};
  for (const td_http_conn *c = server->conns; c; c = c->next) {
    uint16_t *n = share_of(&s, c);
    *n += c != newcomer && c->is_extra == is_extra && c->phase == TD_CONN_READ && *n < UINT16_MAX;
  }
  const uint32_t n_max = is_extra ? 0 : server->n_places / MAX_SHARE;
  td_http_conn *found = NULL;
  uint64_t most = 0, now = td_http_now_ms(), oldest = 0;
  for (td_http_conn *c = server->conns; c; c = c->next) {
    if (c == newcomer || c->is_extra != is_extra) continue;
    const uint64_t age = now - c->stage_since_ms, n = *share_of(&s, c);
    const int ready = eviction_rank(c, age, n > n_max);
    const uint64_t rank = ready == 3 ? UINT64_MAX : n << 2 | (uint64_t)ready;
    if (!ready || rank < most || (rank == most && age < oldest)) continue;
    most = rank;
    oldest = age;
    found = c;
    *has_too_many = ready != 3 && n > n_max;
  }
  return found;
}

// Answers a client that may have sent a request that nobody has read.
static void drop(td_http_conn *leaving) {
  static const char busy_reply[] = "HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
                                   "Content-Length: 0\r\nConnection: close\r\n\r\n";
  uv_buf_t text = uv_buf_init((char *)busy_reply, sizeof busy_reply - 1);
  const bool is_idle = td_http_conn_is_idle(leaving) && leaving->served;
  if (leaving->phase == TD_CONN_READ && !is_idle) uv_try_write(&leaving->io.stream, &text, 1);
  td_http_conn_drop(leaving);
}

// Drops several of a client that has too many, since finding one looks at all connections.
static void drop_with_others(td_http_conn *leaving) {
  const td_http_server *server = leaving->server;
  uint32_t n_left = server->n_places / BATCH_SHARE;
  const uint64_t now = td_http_now_ms();
  td_http_conn *oldest = leaving;
  while (oldest->next) // new ones are inserted at the head of the list
    oldest = oldest->next;
  for (td_http_conn *c = oldest; c && n_left; c = c->prev) {
    if (c->peer != leaving->peer || c->is_extra || c->phase != TD_CONN_READ) continue;
    if (!eviction_rank(c, now - c->stage_since_ms, true)) continue;
    drop(c);
    n_left--;
  }
}

static void drop_extra(const td_http_conn *newcomer) {
  bool has_too_many;
  td_http_conn *leaving = find_evictable(newcomer, true, &has_too_many);
  for (td_http_conn *c = leaving ? NULL : newcomer->server->conns; c; c = c->next)
    if (c != newcomer && c->is_extra && c->phase != TD_CONN_CLOSED) leaving = c;
  if (leaving) drop(leaving);
}

static size_t n_extra(const td_http_server *server) {
  size_t n = 0;
  for (const td_http_conn *c = server->conns; c; c = c->next)
    n += c->is_extra && c->phase != TD_CONN_CLOSED;
  return n;
}

// Descriptors are numbered from the lowest free one: a newcomer's tells how many there are, unless
// lower ones have become free.
static void count_places(td_http_server *server, const td_http_conn *newcomer, int spare) {
  uv_os_fd_t fd = 0;
  const uint32_t n_conns = (uint32_t)(server->n_conns - server->n_closing);
  uv_fileno(&newcomer->io.handle, &fd);
  const int n_others = fd + 1 - (int)n_conns;
  if (n_others > server->n_others) server->n_others = n_others;
  const int n_left = server->n_descriptors - server->n_others - spare;
  const uint32_t n_places = n_left > 1 ? (uint32_t)n_left : 1;
  server->n_places = n_places < server->opts.max_connections ? n_places
                                                             : server->opts.max_connections;
}

void td_http_conn_find_place(td_http_conn *conn) {
  td_http_server *server = conn->server;
  const int spare = server->n_descriptors / 4 < MAX_SPARE ? server->n_descriptors / 4 : MAX_SPARE;
  count_places(server, conn, spare);
  if (server->n_conns - server->n_closing <= server->n_places) return;
  bool has_too_many = false;
  td_http_conn *leaving = find_evictable(conn, false, &has_too_many);
  if (leaving && has_too_many) drop_with_others(leaving);
  if (leaving) {
    drop(leaving); // no effect on one that is closed
    return;
  }
  conn->is_extra = true;
  if (n_extra(server) > (size_t)(spare / 2)) drop_extra(conn);
}
