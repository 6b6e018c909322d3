// src/comm/nccl.c - the back end by NCCL, which is loaded when a GPU joins a group; the required
// API is declared here, so neither the build nor the program depends on it.
//
// NCCL only moves bytes (grouped sends and receives, which take the same wires as its collectives
// and as many bytes); sums are ours, so that their order is the ranks', whatever rings or trees
// NCCL would choose. Its communicators do not block: a call may be in progress, which is polled
// until the next call, and the rank's watcher can abort it at any time, also while the GPU waits
// for another rank.
//
// NCCL reads its own environment (NCCL_DEBUG=INFO says what it does, NCCL_P2P_DISABLE=1 keeps it
// off the direct path between GPUs); tandem sets none of it.
#include <dlfcn.h>
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/env.h"
#include "base/log.h"
#include "comm/comm_impl.h"

#define LIBRARY_NAME "libnccl.so.2"

typedef struct ncclComm *nccl_comm;
typedef struct {
  char bytes[COMM_ID_BYTES];
} nccl_id; // ncclUniqueId

// ncclConfig_t as of release 2.18; later releases take it by its version.
typedef struct {
  size_t size;
  unsigned magic, version;
  int blocking, cga_cluster_size, min_ctas, max_ctas;
  const char *net_name;
  int split_share;
} nccl_config;

enum {
  NCCL_SUCCESS = 0,     // ncclSuccess
  NCCL_IN_PROGRESS = 7, // ncclInProgress
  NCCL_UINT8 = 1,       // ncclUint8
  NCCL_OLDEST = 21800,  // 2.18.0
  NCCL_NEXT_MAJOR = 30000,
  NCCL_CLOSE_MS = 5000, // for ranks that do not close
};
#define NCCL_MAGIC 0xcafebeefu // NCCL_API_MAGIC
#define NCCL_UNSET INT_MIN     // NCCL_CONFIG_UNDEF_INT

#define NCCL_FUNCTIONS(X)                                                                          \
  X(GetVersion, (int *version))                                                                    \
  X(GetUniqueId, (nccl_id * id))                                                                   \
  X(CommInitRankConfig, (nccl_comm * out, int n_ranks, nccl_id id, int rank, nccl_config *config)) \
  X(CommGetAsyncError, (nccl_comm comm, int *state))                                               \
  X(CommFinalize, (nccl_comm comm))                                                                \
  X(CommDestroy, (nccl_comm comm))                                                                 \
  X(CommAbort, (nccl_comm comm))                                                                   \
  X(GroupStart, (void))                                                                            \
  X(GroupEnd, (void))                                                                              \
  X(Send, (const void *data, size_t n, int type, int peer, nccl_comm comm, void *stream))          \
  X(Recv, (void *data, size_t n, int type, int peer, nccl_comm comm, void *stream))

typedef struct {
#define X(name, args) int(*name) args;
  NCCL_FUNCTIONS(X)
#undef X
  const char *(*error_text)(int code);
  const char *(*last_error)(nccl_comm comm);
} nccl_api;

typedef struct {
  nccl_api api;
  size_t section;       // BF16 elements that a rank sends to another, or gets from it, at once
  char *outbox, *inbox; // device memory: [n_ranks][section], BF16

  pthread_mutex_t lock; // guards comm: the watcher may abort it between two calls
  nccl_comm comm;       // NULL: not open, or aborted
} nccl_state;

// ---- the library --------------------------------------------------------------------------------

static void *open_matching(const char *pattern) {
  glob_t found;
  void *library = NULL;
  if (glob(pattern, 0, NULL, &found) == 0)
    for (size_t i = 0; i < found.gl_pathc && !library; i++)
      library = dlopen(found.gl_pathv[i], RTLD_NOW | RTLD_LOCAL);
  globfree(&found);
  return library;
}

// By the loader's search, then as a Python package beside each folder of PATH (PyTorch brings it).
static void *open_library(void) {
  const char *named = td_test_var_get(TD_ENV_NCCL_LIB);
  if (named) return dlopen(named, RTLD_NOW | RTLD_LOCAL);
  void *library = dlopen(LIBRARY_NAME, RTLD_NOW | RTLD_LOCAL);
  for (const char *at = td_env("PATH"); at && !library;) {
    const size_t n = strcspn(at, ":");
    char pattern[PATH_MAX];
    snprintf(pattern, sizeof pattern,
             "%.*s/../lib/python3*/*-packages/nvidia/nccl/lib/" LIBRARY_NAME, (int)n, at);
    if (n > 0) library = open_matching(pattern);
    at = at[n] ? at + n + 1 : NULL;
  }
  return library;
}

// The library stays loaded: it has threads and exit handlers of its own.
static bool load(nccl_api *api) {
  void *library = open_library();
  if (!library) return false;
#define X(name, args) *(void **)&api->name = dlsym(library, "nccl" #name);
  NCCL_FUNCTIONS(X)
#undef X
  *(void **)&api->error_text = dlsym(library, "ncclGetErrorString");
  *(void **)&api->last_error = dlsym(library, "ncclGetLastError");
  bool is_whole = api->error_text && api->last_error;
#define X(name, args) is_whole = is_whole && api->name;
  NCCL_FUNCTIONS(X)
#undef X
  int version = 0;
  if (!is_whole || api->GetVersion(&version) != NCCL_SUCCESS) return false;
  if (version >= NCCL_OLDEST && version < NCCL_NEXT_MAJOR) return true;
  td_warn("NCCL %d.%d is not used: 2.18 or later is needed", version / 10000, version / 100 % 100);
  return false;
}

bool comm_nccl_is_there(void) {
  nccl_api api;
  return load(&api);
}

// ---- calls that do not block --------------------------------------------------------------------

// Aborts the group for a failure of NCCL's on this rank; lock held, unless nobody else knows comm.
static void fail(td_comm *comm, int code) {
  const nccl_state *s = comm->state;
  char why[TD_ERR_BYTES];
  const char *more = s->comm ? s->api.last_error(s->comm) : NULL;
  snprintf(why, sizeof why, "NCCL on rank %u: %s%s%.200s", comm->rank, s->api.error_text(code),
           more && more[0] ? ": " : "", more ? more : "");
  td_comm_abort(comm, why);
}

// Of the call that was last made.
static int state_of(td_comm *comm) {
  nccl_state *s = comm->state;
  int state = NCCL_SUCCESS;
  pthread_mutex_lock(&s->lock);
  const int code = s->comm ? s->api.CommGetAsyncError(s->comm, &state) : NCCL_SUCCESS;
  if (code != NCCL_SUCCESS) state = code;
  if (state != NCCL_SUCCESS && state != NCCL_IN_PROGRESS) fail(comm, state);
  pthread_mutex_unlock(&s->lock);
  return state;
}

// Until a call that returned `code` is complete, at most most_ns (0: as long as it takes).
static td_status settle(td_comm *comm, int code, uint64_t most_ns, td_err *err) {
  nccl_state *s = comm->state;
  const uint64_t begin_ns = td_clock_ns();
  if (code != NCCL_SUCCESS && code != NCCL_IN_PROGRESS) {
    pthread_mutex_lock(&s->lock);
    fail(comm, code);
    pthread_mutex_unlock(&s->lock);
  }
  while (!comm_is_aborted(comm->group) && state_of(comm) == NCCL_IN_PROGRESS) {
    if (most_ns && td_clock_ns() - begin_ns > most_ns) break;
    nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
  }
  return td_comm_check(comm, err);
}

// What a rank sends to another, and gets from it, in one group.
typedef struct {
  const void *out[TD_COMM_MAX_RANKS];
  void *in[TD_COMM_MAX_RANKS];
  size_t n_out[TD_COMM_MAX_RANKS], n_in[TD_COMM_MAX_RANKS]; // bytes; 0: nothing
} transfers;

// Lock held.
static int queue_transfers(td_comm *comm, void *stream, const transfers *t) {
  const nccl_state *s = comm->state;
  int code = s->api.GroupStart();
  for (uint32_t r = 0; r < comm->n_ranks && code == NCCL_SUCCESS; r++) {
    if (t->n_out[r])
      code = s->api.Send(t->out[r], t->n_out[r], NCCL_UINT8, (int)r, s->comm, stream);
    if (t->n_in[r] && code == NCCL_SUCCESS)
      code = s->api.Recv(t->in[r], t->n_in[r], NCCL_UINT8, (int)r, s->comm, stream);
  }
  const int ended = s->api.GroupEnd();
  return code == NCCL_SUCCESS ? ended : code;
}

static td_status transfer(td_comm *comm, td_stream *stream, const transfers *t, td_err *err) {
  nccl_state *s = comm->state;
  void *native = td_stream_native(stream); // and makes its GPU the current one
  pthread_mutex_lock(&s->lock);
  const int code = s->comm ? queue_transfers(comm, native, t) : NCCL_SUCCESS;
  pthread_mutex_unlock(&s->lock);
  return settle(comm, code, 0, err);
}

// ---- open and close -----------------------------------------------------------------------------

static td_status share_id(td_comm *comm, nccl_id *id, td_err *err) {
  nccl_state *s = comm->state;
  comm_group *group = comm->group;
  if (comm->rank == 0) {
    const int code = s->api.GetUniqueId(id);
    if (code != NCCL_SUCCESS) fail(comm, code);
    memcpy(group->id, id, sizeof *id);
    if (code == NCCL_SUCCESS) atomic_store_explicit(&group->has_id, 1, memory_order_release);
  }
  td_status st = comm_wait_flag(comm, &group->has_id, err);
  if (st == TD_OK) memcpy(id, group->id, sizeof *id);
  return st;
}

static td_status open_comm(td_comm *comm, td_err *err) {
  nccl_state *s = comm->state;
  nccl_id id;
  td_status st = share_id(comm, &id, err);
  if (st != TD_OK) return st;
  nccl_config config = {.size = sizeof config,
                        .magic = NCCL_MAGIC,
                        .version = NCCL_OLDEST,
                        .blocking = 0,
                        .cga_cluster_size = NCCL_UNSET,
                        .min_ctas = NCCL_UNSET,
                        .max_ctas = NCCL_UNSET,
                        .split_share = NCCL_UNSET};
  const int code = s->api.CommInitRankConfig(&s->comm, (int)comm->n_ranks, id, (int)comm->rank,
                                             &config);
  return settle(comm, code, 0, err);
}

static void cancel_nccl(td_comm *comm) {
  nccl_state *s = comm->state;
  pthread_mutex_lock(&s->lock);
  if (s->comm) s->api.CommAbort(s->comm);
  s->comm = NULL;
  pthread_mutex_unlock(&s->lock);
}

static void close_nccl(td_comm *comm) {
  nccl_state *s = comm->state;
  if (!s) return;
  if (s->comm && !comm_is_aborted(comm->group)) {
    const int code = s->api.CommFinalize(s->comm);
    settle(comm, code, NCCL_CLOSE_MS * (uint64_t)1000000, NULL);
    if (state_of(comm) == NCCL_SUCCESS) {
      s->api.CommDestroy(s->comm);
      s->comm = NULL;
    }
  }
  cancel_nccl(comm);
  td_dev_free(comm->dev, s->outbox);
  td_dev_free(comm->dev, s->inbox);
  pthread_mutex_destroy(&s->lock);
  free(s);
  comm->state = NULL;
}

static td_status open_nccl(td_comm *comm, td_err *err) {
  nccl_state *s = comm->state = calloc(1, sizeof *s);
  if (!s) return td_fail(err, TD_ENOMEM, "out of memory");
  pthread_mutex_init(&s->lock, NULL);
  TD_CHECK(load(&s->api)); // as comm_nccl_is_there found it
  s->section = comm->group->piece_bytes / sizeof(uint16_t);
  const size_t n_bytes = comm->n_ranks * s->section * sizeof(uint16_t);
  // Also makes the GPU the calling thread's current one, which NCCL then uses.
  td_status st = td_dev_alloc(comm->dev, (void **)&s->outbox, n_bytes, err);
  if (st == TD_OK) st = td_dev_alloc(comm->dev, (void **)&s->inbox, n_bytes, err);
  if (st == TD_OK) st = open_comm(comm, err);
  if (st != TD_OK) close_nccl(comm);
  return st;
}

static void poll_nccl(td_comm *comm) {
  state_of(comm);
}

// ---- collectives --------------------------------------------------------------------------------

static td_status gather_piece(td_comm *comm, td_stream *stream, const td_all_gather_args *a,
                              size_t most, size_t p, td_err *err) {
  transfers t = {.n_out = {0}};
  const comm_span own = comm_piece(a->n_bytes[comm->rank], most, p);
  char *block = a->all;
  for (uint32_t r = 0; r < comm->n_ranks; block += a->n_bytes[r++]) {
    if (r == comm->rank) continue;
    const comm_span piece = comm_piece(a->n_bytes[r], most, p);
    t.out[r] = (const char *)a->mine + own.begin;
    t.n_out[r] = own.length;
    t.in[r] = block + piece.begin;
    t.n_in[r] = piece.length;
  }
  return transfer(comm, stream, &t, err);
}

static td_status nccl_all_gather(td_comm *comm, td_stream *stream, const td_all_gather_args *a,
                                 td_err *err) {
  char *own = (char *)a->all + comm_before(a->n_bytes, comm->rank);
  if (own != a->mine) td_op_copy(stream, own, a->mine, a->n_bytes[comm->rank]);
  const size_t largest = comm_largest(a->n_bytes, comm->n_ranks);
  if (!largest) return TD_OK;
  // Nobody waits for pieces: NCCL has its own.
  const size_t most = a->on_arrival ? comm->group->piece_bytes : largest;
  td_status st = TD_OK;
  for (size_t p = 0; p * most < largest && st == TD_OK; p++) {
    st = gather_piece(comm, stream, a, most, p, err);
    const comm_span piece = comm_piece(largest, most, p);
    if (a->on_arrival) a->on_arrival(a->ctx, piece.begin, piece.begin + piece.length);
  }
  return st;
}

static td_status sum_piece(td_comm *comm, td_stream *stream, const td_reduce_scatter_args *a,
                           size_t p, td_err *err) {
  const nccl_state *s = comm->state;
  const comm_span own = comm_piece(a->n[comm->rank], s->section, p);
  transfers t = {.n_out = {0}};
  td_sum_parts_args sum = {.out = (char *)a->out + own.begin * (a->out_f32 ? 4 : 2),
                           .n = own.length,
                           .n_parts = comm->n_ranks,
                           .f32_parts = 1u << comm->rank,
                           .out_f32 = a->out_f32};
  const float *block = a->part;
  for (uint32_t r = 0; r < comm->n_ranks; block += a->n[r++]) {
    const comm_span piece = comm_piece(a->n[r], s->section, p);
    const size_t at = r * s->section * sizeof(uint16_t);
    sum.parts[r] = r == comm->rank ? (const void *)(block + own.begin) : s->inbox + at;
    if (r == comm->rank) continue;
    t.out[r] = s->outbox + at;
    t.n_out[r] = piece.length * sizeof(uint16_t);
    t.in[r] = s->inbox + at;
    t.n_in[r] = own.length * sizeof(uint16_t);
    if (!piece.length) continue;
    td_op_sum_parts(stream, &(td_sum_parts_args){.parts = {block + piece.begin},
                                                 .out = s->outbox + at,
                                                 .n = piece.length,
                                                 .n_parts = 1,
                                                 .f32_parts = 1});
  }
  td_status st = transfer(comm, stream, &t, err);
  if (own.length) td_op_sum_parts(stream, &sum);
  return st;
}

static td_status nccl_reduce_scatter(td_comm *comm, td_stream *stream,
                                     const td_reduce_scatter_args *a, td_err *err) {
  const nccl_state *s = comm->state;
  const size_t largest = comm_largest(a->n, comm->n_ranks);
  td_status st = TD_OK;
  for (size_t p = 0; p * s->section < largest && st == TD_OK; p++) {
    st = sum_piece(comm, stream, a, p, err);
    const comm_span piece = comm_piece(largest, s->section, p);
    if (a->on_arrival) a->on_arrival(a->ctx, piece.begin, piece.begin + piece.length);
  }
  return st;
}

static td_status nccl_broadcast(td_comm *comm, td_stream *stream, void *data, size_t n_bytes,
                                uint32_t root, td_err *err) {
  transfers t = {.n_out = {0}};
  for (uint32_t r = 0; r < comm->n_ranks; r++) {
    if (comm->rank == root && r != root) t.out[r] = data, t.n_out[r] = n_bytes;
    if (comm->rank != root && r == root) t.in[r] = data, t.n_in[r] = n_bytes;
  }
  return transfer(comm, stream, &t, err);
}

const comm_backend comm_nccl = {
    .name = "nccl",
    .open = open_nccl,
    .close = close_nccl,
    .all_gather = nccl_all_gather,
    .reduce_scatter = nccl_reduce_scatter,
    .broadcast = nccl_broadcast,
    .poll = poll_nccl,
    .cancel = cancel_nccl,
};
