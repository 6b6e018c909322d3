// src/front/kv_events.c - vLLM's KV events (vllm/distributed/kv_events.py): batches in MessagePack,
// whose events are maps, as vLLM 0.28 has them, from a PUB socket with the frames topic, sequence
// number, batch.
// A page is a block, its hash the first 8 bytes of its name (kv/record.h). A ROUTER socket sends
// the batches from a sequence number on again.
#include "front/kv_events.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/env.h"
#include "base/log.h"
#include "base/msgpack.h"

#define LIBRARY_NAME   "libzmq.so.5"
#define KEPT_BATCHES   4096u // for replay
#define KEPT_BYTES     (64u << 20)
#define END_OF_REPLAY  UINT64_MAX
#define MAX_WAITING    100000 // messages for a subscriber, then it misses some; vLLM's number
#define ENDPOINT_BYTES 256
#define MEDIUM         "GPU" // vLLM's name of the cache that is computed with, on any device

// Of zmq.h, whose numbers are its ABI.
enum {
  ZMQ_PUB = 1,
  ZMQ_ROUTER = 6,
  ZMQ_RCVMORE = 13,
  ZMQ_FD = 14,
  ZMQ_LINGER = 17,
  ZMQ_SNDHWM = 23,
  ZMQ_LAST_ENDPOINT = 32,
  ZMQ_IPV6 = 42,
  ZMQ_DONTWAIT = 1,
  ZMQ_SNDMORE = 2,
};

#define ZMQ_FUNCTIONS(X)                                                                           \
  X(void *, ctx_new, (void))                                                                       \
  X(int, ctx_term, (void *context))                                                                \
  X(void *, socket, (void *context, int type))                                                     \
  X(int, close, (void *socket))                                                                    \
  X(int, setsockopt, (void *socket, int option, const void *value, size_t n))                      \
  X(int, getsockopt, (void *socket, int option, void *value, size_t *n))                           \
  X(int, bind, (void *socket, const char *endpoint))                                               \
  X(int, connect, (void *socket, const char *endpoint))                                            \
  X(int, send, (void *socket, const void *bytes, size_t n, int flags))                             \
  X(int, recv, (void *socket, void *bytes, size_t n, int flags))                                   \
  X(int, errno, (void))                                                                            \
  X(const char *, strerror, (int error))

typedef struct {
#define X(result, name, args) result(*z_##name) args;
  ZMQ_FUNCTIONS(X)
#undef X
} zmq_api;

typedef struct {
  char *bytes;
  size_t n;
} kept_batch;

struct td_kv_events {
  zmq_api zmq;
  void *context, *pub, *replay;
  char *topic;
  uv_poll_t poll;
  bool is_polling;
  uint64_t n_batches; // the next one's sequence number
  // Changes of one kind that become one event: hashes of pages, and of stored ones, which follow
  // each other, the tokens.
  td_kv_change_kind kind;
  uint32_t n_run, n_tokens; // pages; tokens of each
  uint64_t parent, last;    // hashes: before the first, if it has one; of the last
  bool has_parent;
  td_buf hashes, tokens; // as MessagePack
  td_buf extra;          // an entry a page
  bool has_extra;        // one of them says something
  td_buf list;           // finished events
  uint32_t n_events;
  kept_batch *kept; // [KEPT_BATCHES] with replay: batch i is in i % KEPT_BATCHES
  uint64_t first;   // the oldest one kept
  size_t kept_bytes;
};

// ---- events -----------------------------------------------------------------------------------

static uint64_t hash_of(const td_digest *name) {
  uint64_t hash = 0;
  for (int i = 0; i < 8; i++)
    hash = hash << 8 | name->bytes[i];
  return hash;
}

static void write_array(td_buf *out, uint32_t n, const td_buf *values) {
  td_mp_array(out, n);
  td_buf_add(out, values->data, values->len);
  out->failed |= values->failed;
}

static void begin_event(td_buf *out, uint32_t n_members, const char *type) {
  td_mp_map(out, n_members);
  td_mp_str(out, "type");
  td_mp_str(out, type);
}

static void write_blocks(td_kv_events *e) {
  td_mp_str(&e->list, "block_hashes");
  write_array(&e->list, e->n_run, &e->hashes);
  td_mp_str(&e->list, "medium");
  td_mp_str(&e->list, MEDIUM);
}

static void write_stored(td_kv_events *e) {
  td_buf *out = &e->list;
  begin_event(out, e->has_extra ? 9 : 8, "BlockStored");
  write_blocks(e);
  td_mp_str(out, "parent_block_hash");
  if (e->has_parent)
    td_mp_uint(out, e->parent);
  else
    td_mp_nil(out);
  td_mp_str(out, "token_ids");
  write_array(out, e->n_run * e->n_tokens, &e->tokens);
  td_mp_str(out, "block_size");
  td_mp_uint(out, e->n_tokens);
  td_mp_str(out, "lora_id");
  td_mp_nil(out);
  td_mp_str(out, "lora_name");
  td_mp_nil(out);
  if (!e->has_extra) return;
  td_mp_str(out, "extra_keys");
  write_array(out, e->n_run, &e->extra);
}

// What a page's hash depends on besides its tokens: the images it has a part of, each with where it
// begins relative to the page, and the salt of a first page.
static void write_extra(td_kv_events *e, const td_kv_origin *o, uint32_t n_tokens) {
  const td_picture_list *p = o->pictures;
  td_buf *out = &e->extra;
  uint32_t first = p ? p->first : 0, end;
  while (p && first < p->n && p->images[first].at + p->images[first].n_tokens <= o->at)
    first++;
  for (end = first; p && end < p->n && p->images[end].at < o->at + n_tokens; end++)
    continue;
  const uint32_t n = end - first + (o->salt != NULL);
  e->has_extra |= n > 0;
  if (n)
    td_mp_array(out, n);
  else
    td_mp_nil(out);
  for (; first < end; first++) {
    td_digest hash;
    char hex[TD_DIGEST_HEX];
    memcpy(hash.bytes, p->images[first].hash, sizeof hash.bytes);
    td_digest_hex(hex, &hash);
    td_mp_array(out, 2);
    td_mp_str(out, hex);
    td_mp_int(out, (int64_t)p->images[first].at - o->at);
  }
  if (o->salt) td_mp_str(out, o->salt);
}

// Makes an event of the run.
static void end_run(td_kv_events *e) {
  td_buf *out = &e->list;
  if (!e->n_run) return;
  if (e->kind == TD_KV_STORED) {
    write_stored(e);
  } else if (e->kind == TD_KV_REMOVED) {
    begin_event(out, 3, "BlockRemoved");
    write_blocks(e);
  } else {
    begin_event(out, 1, "AllBlocksCleared");
  }
  e->n_events++;
  e->n_run = 0;
  td_buf_clear(&e->hashes);
  td_buf_clear(&e->tokens);
  td_buf_clear(&e->extra);
  e->has_extra = false;
}

void td_kv_events_add(td_kv_events *e, const td_kv_change *change, const td_kv_origin *origin) {
  const bool follows = change->kind == TD_KV_REMOVED ||
                       (change->before && e->last == hash_of(change->before));
  if (e->n_run && (e->kind != change->kind || !follows)) end_run(e);
  if (!e->n_run && change->kind == TD_KV_STORED) {
    e->n_tokens = change->n_tokens;
    e->has_parent = change->before;
    e->parent = change->before ? hash_of(change->before) : 0;
  }
  e->kind = change->kind;
  e->n_run++;
  if (change->kind == TD_KV_CLEARED) return;
  e->last = hash_of(change->name);
  td_mp_uint(&e->hashes, e->last);
  if (change->kind == TD_KV_REMOVED) return;
  for (uint32_t i = 0; i < change->n_tokens; i++)
    td_mp_uint(&e->tokens, (uint32_t)origin->ids[i]);
  write_extra(e, origin, change->n_tokens);
}

// ---- batches ----------------------------------------------------------------------------------

static void to_bytes(uint64_t value, unsigned char out[8]) {
  for (int i = 7; i >= 0; i--, value >>= 8)
    out[i] = (unsigned char)value;
}

static void drop_oldest(td_kv_events *e) {
  kept_batch *old = &e->kept[e->first++ % KEPT_BATCHES];
  e->kept_bytes -= old->n;
  free(old->bytes);
  *old = (kept_batch){0};
}

// Takes the bytes; without any, nothing can be replayed of this number.
static void keep(td_kv_events *e, td_buf *batch) {
  if (e->n_batches - e->first == KEPT_BATCHES) drop_oldest(e);
  e->kept[e->n_batches % KEPT_BATCHES] = (kept_batch){batch->data, batch->len};
  e->kept_bytes += batch->len;
  *batch = TD_BUF_INIT;
  while (e->kept_bytes > KEPT_BYTES && e->first < e->n_batches)
    drop_oldest(e);
}

static void publish(td_kv_events *e, const td_buf *batch) {
  unsigned char number[8];
  to_bytes(e->n_batches, number);
  if (e->zmq.z_send(e->pub, e->topic, strlen(e->topic), ZMQ_DONTWAIT | ZMQ_SNDMORE) < 0) return;
  if (e->zmq.z_send(e->pub, number, sizeof number, ZMQ_DONTWAIT | ZMQ_SNDMORE) < 0) return;
  e->zmq.z_send(e->pub, batch->data, batch->len, ZMQ_DONTWAIT);
}

// KVEventBatch: ts, events, data_parallel_rank. Without memory a batch is missing, and its number
// tells so.
void td_kv_events_send(td_kv_events *e) {
  struct timespec now;
  td_buf batch = TD_BUF_INIT;
  if (!e) return;
  end_run(e);
  if (!e->n_events) return;
  clock_gettime(CLOCK_REALTIME, &now);
  td_mp_array(&batch, 3);
  td_mp_double(&batch, (double)now.tv_sec + (double)now.tv_nsec * 1e-9);
  write_array(&batch, e->n_events, &e->list);
  td_mp_uint(&batch, 0);
  td_buf_clear(&e->list);
  e->n_events = 0;
  if (batch.failed)
    td_buf_free(&batch);
  else
    publish(e, &batch);
  if (e->kept) keep(e, &batch);
  e->n_batches++;
  td_buf_free(&batch);
}

// ---- replay -----------------------------------------------------------------------------------

// One reply: the client, an empty frame, the number, the batch. False: it cannot be sent.
static bool reply(td_kv_events *e, const void *client, size_t n_client, uint64_t seq,
                  const kept_batch *batch) {
  unsigned char number[8];
  const int more = ZMQ_DONTWAIT | ZMQ_SNDMORE;
  to_bytes(seq, number);
  return e->zmq.z_send(e->replay, client, n_client, more) >= 0 &&
         e->zmq.z_send(e->replay, "", 0, more) >= 0 &&
         e->zmq.z_send(e->replay, number, sizeof number, more) >= 0 &&
         e->zmq.z_send(e->replay, batch->bytes, batch->n, ZMQ_DONTWAIT) >= 0;
}

static void answer(td_kv_events *e, const void *client, size_t n_client, uint64_t seq) {
  if (seq < e->first) seq = e->first;
  for (; seq < e->n_batches; seq++) {
    const kept_batch *batch = &e->kept[seq % KEPT_BATCHES];
    if (batch->bytes && !reply(e, client, n_client, seq, batch)) return;
  }
  reply(e, client, n_client, END_OF_REPLAY, &(kept_batch){.bytes = ""});
}

// Receives a request: the client, an empty frame, the first number. False: there is none left.
static bool serve_replay(td_kv_events *e) {
  unsigned char frames[3][256];
  int sizes[3] = {0}, n = 0, has_more = 1;
  size_t n_more = sizeof has_more;
  for (; has_more; n++) {
    unsigned char *frame = frames[n < 3 ? n : 2];
    const int size = e->zmq.z_recv(e->replay, frame, sizeof frames[0], ZMQ_DONTWAIT);
    if (size < 0) return false;
    if (n < 3) sizes[n] = size;
    if (e->zmq.z_getsockopt(e->replay, ZMQ_RCVMORE, &has_more, &n_more) != 0) return false;
  }
  if (n != 3 || sizes[0] > 255 || sizes[1] || sizes[2] != 8) return true; // not a request
  uint64_t seq = 0;
  for (int i = 0; i < 8; i++)
    seq = seq << 8 | frames[2][i];
  answer(e, frames[0], (size_t)sizes[0], seq);
  return true;
}

// The descriptor becomes readable once for all that has arrived.
static void on_replay(uv_poll_t *poll, int status, int what) {
  (void)status;
  (void)what;
  while (serve_replay(poll->data))
    continue;
}

void td_kv_events_start(td_kv_events *e, uv_loop_t *loop) {
  int fd = -1;
  size_t n = sizeof fd;
  if (!e || !e->replay) return;
  TD_CHECK(e->zmq.z_getsockopt(e->replay, ZMQ_FD, &fd, &n) == 0);
  TD_CHECK(uv_poll_init(loop, &e->poll, fd) == 0);
  e->poll.data = e;
  e->is_polling = true;
  TD_CHECK(uv_poll_start(&e->poll, UV_READABLE, on_replay) == 0);
  on_replay(&e->poll, 0, 0); // what came before
}

void td_kv_events_stop(td_kv_events *e) {
  if (e && e->is_polling) uv_close((uv_handle_t *)&e->poll, NULL);
  if (e) e->is_polling = false;
}

// ---- open and close ---------------------------------------------------------------------------

static td_status load(zmq_api *api, td_err *err) {
  const char *named = td_test_var_get(TD_ENV_ZMQ_LIB);
  void *library = dlopen(named ? named : LIBRARY_NAME, RTLD_NOW | RTLD_LOCAL);
  bool is_whole = library;
  if (!library) {
    return td_fail(err, TD_EUNSUPPORTED,
                   "--kv-events needs ZeroMQ, and there is no " LIBRARY_NAME
                   ": install libzmq5 (Debian, Ubuntu) or zeromq (Fedora, Arch): %s",
                   dlerror());
  }
#define X(result, name, args)                                                                      \
  *(void **)&api->z_##name = dlsym(library, "zmq_" #name);                                         \
  is_whole = is_whole && api->z_##name;
  ZMQ_FUNCTIONS(X)
#undef X
  return is_whole ? TD_OK : td_fail(err, TD_EUNSUPPORTED, LIBRARY_NAME " is not ZeroMQ 4");
}

static td_status open_socket(td_kv_events *e, void **out, int type, const char *endpoint,
                             td_err *err) {
  const int hwm = MAX_WAITING, linger = 0, yes = 1;
  // As vLLM: an address that stands for all of this machine's is bound to, any other is connected
  // to.
  const bool binds = type == ZMQ_ROUTER || strchr(endpoint, '*') || strstr(endpoint, "::") ||
                     strstr(endpoint, "0.0.0.0") || strncmp(endpoint, "ipc://", 6) == 0;
  const char *option = type == ZMQ_ROUTER ? "kv-events-replay" : "kv-events";
  char last[ENDPOINT_BYTES] = "";
  size_t n = sizeof last;
  *out = e->zmq.z_socket(e->context, type);
  bool works = *out && e->zmq.z_setsockopt(*out, ZMQ_SNDHWM, &hwm, sizeof hwm) == 0 &&
               e->zmq.z_setsockopt(*out, ZMQ_LINGER, &linger, sizeof linger) == 0;
  if (works && strstr(endpoint, "::"))
    works = e->zmq.z_setsockopt(*out, ZMQ_IPV6, &yes, sizeof yes) == 0;
  works = works && (binds ? e->zmq.z_bind : e->zmq.z_connect)(*out, endpoint) == 0;
  if (!works) {
    const int error = e->zmq.z_errno();
    return td_fail(err, TD_EINVAL, "--%s %s: %s%s", option, endpoint, e->zmq.z_strerror(error),
                   error == EINVAL ? ": give tcp://*:5557 or ipc://PATH" : "");
  }
  if (e->zmq.z_getsockopt(*out, ZMQ_LAST_ENDPOINT, last, &n) != 0) last[0] = '\0';
  td_info("--%s: %s %s", option, binds ? "bound to" : "connected to", last);
  return TD_OK;
}

td_status td_kv_events_open(td_kv_events **out, const td_kv_events_opts *opts, td_err *err) {
  *out = NULL;
  td_kv_events *e = calloc(1, sizeof *e);
  if (!e) return td_fail(err, TD_ENOMEM, "out of memory");
  td_status st = load(&e->zmq, err);
  if (st == TD_OK) {
    e->topic = strdup(opts->topic ? opts->topic : "");
    e->context = e->zmq.z_ctx_new();
    if (opts->replay) e->kept = calloc(KEPT_BATCHES, sizeof *e->kept);
    if (!e->topic || !e->context || (opts->replay && !e->kept))
      st = td_fail(err, TD_ENOMEM, "out of memory");
  }
  if (st == TD_OK) st = open_socket(e, &e->pub, ZMQ_PUB, opts->endpoint, err);
  if (st == TD_OK && opts->replay) st = open_socket(e, &e->replay, ZMQ_ROUTER, opts->replay, err);
  if (st == TD_OK)
    *out = e;
  else
    td_kv_events_close(e);
  return st;
}

void td_kv_events_close(td_kv_events *e) {
  if (!e) return;
  if (e->pub) e->zmq.z_close(e->pub);
  if (e->replay) e->zmq.z_close(e->replay);
  if (e->context) e->zmq.z_ctx_term(e->context);
  while (e->kept && e->first < e->n_batches)
    drop_oldest(e);
  free(e->kept);
  free(e->topic);
  td_buf_free(&e->hashes);
  td_buf_free(&e->tokens);
  td_buf_free(&e->extra);
  td_buf_free(&e->list);
  free(e);
}
