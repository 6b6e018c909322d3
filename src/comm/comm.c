// src/comm/comm.c - groups: opening them, ending them when a rank has failed, and the checks that
// all back ends share.
#include "comm/comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/log.h"
#include "base/thread.h"
#include "comm/comm_impl.h"

enum { PIECE_BYTES = 4 << 20, MIN_PIECE = 64 * TD_COMM_MAX_RANKS, ABORT_WRITING = 1, ABORTED };

// ---- aborts -------------------------------------------------------------------------------------

bool comm_is_aborted(const comm_group *group) {
  return atomic_load_explicit(&group->abort_state, memory_order_acquire) == ABORTED;
}

static void abort_group(comm_group *group, const char *why) {
  uint32_t none = 0;
  if (!atomic_compare_exchange_strong(&group->abort_state, &none, ABORT_WRITING)) return;
  snprintf(group->reason, sizeof group->reason, "%s", why);
  atomic_store_explicit(&group->abort_state, ABORTED, memory_order_release);
}

void td_comm_abort(td_comm *comm, const char *why) {
  abort_group(comm->group, why);
}

td_status td_comm_check(td_comm *comm, td_err *err) {
  if (!comm_is_aborted(comm->group)) return TD_OK;
  return td_fail(err, TD_ECANCELED, "expert parallelism: %s", comm->group->reason);
}

static void sleep_ms(long ms) {
  nanosleep(&(struct timespec){.tv_nsec = ms * 1000000}, NULL);
}

td_status comm_wait_flag(td_comm *comm, const _Atomic uint32_t *flag, td_err *err) {
  while (!atomic_load_explicit(flag, memory_order_acquire)) {
    td_status st = td_comm_check(comm, err);
    if (st != TD_OK) return st;
    sleep_ms(1);
  }
  return TD_OK;
}

// ---- the watcher --------------------------------------------------------------------------------

// Until the group closes: the back end's own failures, and the end of what this rank waits for.
static void *watch(void *arg) {
  td_comm *comm = arg;
  while (!atomic_load_explicit(&comm->is_closing, memory_order_acquire)) {
    const bool is_ready = atomic_load_explicit(&comm->is_ready, memory_order_acquire);
    if (is_ready && comm->backend->poll) comm->backend->poll(comm);
    if (is_ready && comm_is_aborted(comm->group)) {
      comm->backend->cancel(comm);
      break;
    }
    sleep_ms(COMM_TICK_MS);
  }
  return NULL;
}

// ---- groups -------------------------------------------------------------------------------------

static td_status check_opts(const td_comm_opts *opts, td_err *err) {
  if (opts->n_ranks < 1 || opts->n_ranks > TD_COMM_MAX_RANKS)
    return td_fail(err, TD_EINVAL, "%u ranks: use 1 to %d", opts->n_ranks, TD_COMM_MAX_RANKS);
  static const char *const names[] = {"auto", "host", "nccl"};
  for (size_t i = 0; i < TD_COUNT(names); i++)
    if (strcmp(opts->backend, names[i]) == 0) return TD_OK;
  return td_fail(err, TD_EINVAL, "unknown exchange '%s' between devices; use auto, host or nccl",
                 opts->backend);
}

static td_status create(comm_group **out, const td_comm_opts *opts, td_err *err) {
  *out = NULL;
  td_status st = check_opts(opts, err);
  if (st != TD_OK) return st;
  comm_group *group = *out = calloc(1, sizeof *group);
  if (!group) return td_fail(err, TD_ENOMEM, "out of memory");
  const size_t piece = opts->piece_bytes ? opts->piece_bytes : PIECE_BYTES;
  group->piece_bytes = piece < MIN_PIECE ? MIN_PIECE : piece & ~(size_t)63;
  group->n_ranks = opts->n_ranks;
  group->backend = opts->backend;
  atomic_init(&group->n_refs, opts->n_ranks + 1);
  return TD_OK;
}

static void release_group(comm_group *group) {
  if (atomic_fetch_sub_explicit(&group->n_refs, 1, memory_order_acq_rel) == 1) free(group);
}

// ---- joining ------------------------------------------------------------------------------------

static bool is_gpu_shared(const comm_group *group) {
  for (uint32_t a = 0; a < group->n_ranks; a++) {
    for (uint32_t b = 0; b < a; b++)
      if (group->ranks[a].gpu == group->ranks[b].gpu) return true;
  }
  return false;
}

// The first rank that cannot use NCCL; n_ranks: all can.
static uint32_t rank_without_nccl(const comm_group *group) {
  uint32_t r = 0;
  while (r < group->n_ranks && group->ranks[r].has_nccl)
    r++;
  return r;
}

static bool can_use_nccl(const comm_group *group) {
  return rank_without_nccl(group) == group->n_ranks && !is_gpu_shared(group);
}

// The same choice on every rank, from what all have told.
static td_status choose_backend(td_comm *comm, td_err *err) {
  const comm_group *group = comm->group;
  const uint32_t r = rank_without_nccl(group);
  const bool can = can_use_nccl(group);
  comm->backend = &comm_host;
  if (strcmp(group->backend, "host") == 0 || (!can && strcmp(group->backend, "auto") == 0))
    return TD_OK;
  comm->backend = &comm_nccl;
  if (can) return TD_OK;
  if (r == comm->n_ranks) return td_fail(err, TD_EUNSUPPORTED, "NCCL: two ranks have the same GPU");
  if (group->ranks[r].gpu < 0)
    return td_fail(err, TD_EUNSUPPORTED, "NCCL: the device of rank %u is not a GPU", r);
  return td_fail(
      err, TD_EUNSUPPORTED,
      "NCCL: libnccl.so.2 is not found, or older than 2.18: install it (package libnccl2, "
      "or nvidia-nccl-cu13 of Python), or name its folder in LD_LIBRARY_PATH");
}

static td_status start_watcher(td_comm *comm, td_err *err) {
  if (td_thread_start(&comm->watcher, watch, comm) != 0)
    return td_fail(err, TD_ENOMEM, "cannot start a thread that watches other ranks");
  comm->has_watcher = true;
  return TD_OK;
}

static td_status open_backend(td_comm *comm, td_err *err) {
  comm_rank_info *own = &comm->group->ranks[comm->rank];
  own->gpu = td_dev_gpu_index(comm->dev);
  own->has_nccl = own->gpu >= 0 && comm_nccl_is_there();
  atomic_store_explicit(&own->has_joined, 1, memory_order_release);
  td_status st = start_watcher(comm, err);
  for (uint32_t r = 0; r < comm->n_ranks && st == TD_OK; r++)
    st = comm_wait_flag(comm, &comm->group->ranks[r].has_joined, err);
  if (st == TD_OK) st = choose_backend(comm, err);
  if (st == TD_OK) st = comm->backend->open(comm, err);
  if (st == TD_OK) atomic_store_explicit(&comm->is_ready, true, memory_order_release);
  return st;
}

// Takes over a reference to the group.
static td_status join(td_comm **out, td_dev *dev, comm_group *group, uint32_t rank, td_err *err) {
  *out = NULL;
  td_comm *comm = calloc(1, sizeof *comm);
  if (!comm) {
    abort_group(group, "out of memory for a rank");
    release_group(group);
    return td_fail(err, TD_ENOMEM, "out of memory");
  }
  comm->group = group;
  comm->dev = dev;
  comm->rank = rank;
  comm->n_ranks = group->n_ranks;
  td_err why = {.code = TD_OK};
  td_status st = open_backend(comm, &why);
  if (st == TD_OK) {
    *out = comm;
    return TD_OK;
  }
  if (!comm_is_aborted(comm->group)) td_comm_abort(comm, why.msg);
  td_comm_close(comm);
  if (err) *err = why;
  return st;
}

// One rank of td_comm_open, on a thread of its own, since joining waits for the others.
typedef struct {
  td_comm **out;
  td_dev *dev;
  comm_group *group;
  uint32_t rank;
  pthread_t thread;
  bool has_thread;
  td_status status;
  td_err err;
} joining;

static void *join_main(void *arg) {
  joining *j = arg;
  j->status = join(j->out, j->dev, j->group, j->rank, &j->err);
  return NULL;
}

static void start_joining(joining *j) {
  if (td_thread_start(&j->thread, join_main, j) == 0) {
    j->has_thread = true;
    return;
  }
  j->status = td_fail(&j->err, TD_ENOMEM, "cannot start a thread for a rank");
  abort_group(j->group, j->err.msg);
  release_group(j->group);
}

// failed_nccl: whether an error is that of a group that chose NCCL.
static td_status open_group(td_comm **out, td_dev *const *devs, const td_comm_opts *opts,
                            bool *failed_nccl, td_err *err) {
  *failed_nccl = false;
  for (uint32_t r = 0; r < opts->n_ranks && r < TD_COMM_MAX_RANKS; r++)
    out[r] = NULL;
  comm_group *group;
  td_status st = create(&group, opts, err);
  if (st != TD_OK) return st;
  joining ranks[TD_COMM_MAX_RANKS];
  for (uint32_t r = 0; r < opts->n_ranks; r++) {
    ranks[r] = (joining){.out = &out[r], .dev = devs[r], .group = group, .rank = r};
    start_joining(&ranks[r]);
  }
  for (uint32_t r = 0; r < opts->n_ranks; r++) {
    if (ranks[r].has_thread) pthread_join(ranks[r].thread, NULL);
    // What another rank's failure led to is not the reason.
    if (ranks[r].status == TD_OK || (st != TD_OK && st != TD_ECANCELED)) continue;
    st = ranks[r].status;
    if (err) *err = ranks[r].err;
  }
  for (uint32_t r = 0; r < opts->n_ranks && st != TD_OK; r++) {
    td_comm_close(out[r]);
    out[r] = NULL;
  }
  *failed_nccl = st != TD_OK && can_use_nccl(group);
  release_group(group);
  return st;
}

td_status td_comm_open(td_comm **out, td_dev *const *devs, const td_comm_opts *opts, td_err *err) {
  bool failed_nccl;
  td_err why = {.code = TD_OK};
  td_status st = open_group(out, devs, opts, &failed_nccl, &why);
  if (failed_nccl && strcmp(opts->backend, "auto") == 0) {
    td_warn("%s; the devices exchange data through host memory instead", why.msg);
    td_comm_opts by_host = *opts;
    by_host.backend = "host";
    st = open_group(out, devs, &by_host, &failed_nccl, &why);
  }
  if (st != TD_OK && err) *err = why;
  return st;
}

void td_comm_close(td_comm *comm) {
  if (!comm) return;
  atomic_store_explicit(&comm->is_closing, true, memory_order_release);
  if (comm->has_watcher) pthread_join(comm->watcher, NULL);
  if (comm->is_ready) comm->backend->close(comm);
  release_group(comm->group);
  free(comm);
}

static void *close_main(void *arg) {
  td_comm_close(arg);
  return NULL;
}

void td_comm_close_all(td_comm *const *comms, uint32_t n) {
  pthread_t threads[TD_COMM_MAX_RANKS];
  bool has_thread[TD_COMM_MAX_RANKS];
  for (uint32_t i = 0; i < n; i++)
    has_thread[i] = comms[i] && td_thread_start(&threads[i], close_main, comms[i]) == 0;
  for (uint32_t i = 0; i < n; i++)
    if (has_thread[i])
      pthread_join(threads[i], NULL);
    else
      td_comm_close(comms[i]);
}

uint32_t td_comm_rank(const td_comm *comm) {
  return comm->rank;
}

uint32_t td_comm_n_ranks(const td_comm *comm) {
  return comm->n_ranks;
}

const char *td_comm_backend(const td_comm *comm) {
  return comm->backend->name;
}

// ---- collectives --------------------------------------------------------------------------------

typedef enum {
  CALL_ALL_GATHER = 1,
  CALL_REDUCE_SCATTER,
  CALL_ALL_REDUCE,
  CALL_BROADCAST
} call_kind;

// FNV-1a over what must be the same on all ranks.
static uint32_t hash_call(call_kind kind, const size_t *sizes, size_t n) {
  uint32_t hash = 2166136261u ^ (uint32_t)kind;
  for (size_t i = 0; i < n * sizeof *sizes; i++)
    hash = (hash ^ ((const unsigned char *)sizes)[i]) * 16777619u;
  return hash;
}

// Notes this call and compares it with the same call of the others, as far as they have come. One
// that is far ahead has overwritten its entry, and compared with ours itself.
static td_status note_call(td_comm *comm, call_kind kind, const size_t *sizes, size_t n,
                           td_err *err) {
  const uint32_t c = comm->n_calls++;
  const uint64_t own = (uint64_t)(c + 1) << 32 | hash_call(kind, sizes, n);
  atomic_store(&comm->group->ranks[comm->rank].calls[c % COMM_CALLS], own);
  for (uint32_t r = 0; r < comm->n_ranks; r++) {
    const uint64_t other = atomic_load(&comm->group->ranks[r].calls[c % COMM_CALLS]);
    if (other >> 32 != own >> 32 || other == own) continue;
    char why[128];
    snprintf(why, sizeof why, "ranks %u and %u differ in their collective call %u", comm->rank, r,
             c);
    td_comm_abort(comm, why);
  }
  return td_comm_check(comm, err);
}

td_status td_comm_all_gather(td_comm *comm, td_stream *stream, const td_all_gather_args *args,
                             td_err *err) {
  td_status st = note_call(comm, CALL_ALL_GATHER, args->n_bytes, comm->n_ranks, err);
  return st == TD_OK ? comm->backend->all_gather(comm, stream, args, err) : st;
}

td_status td_comm_reduce_scatter(td_comm *comm, td_stream *stream,
                                 const td_reduce_scatter_args *args, td_err *err) {
  td_status st = note_call(comm, CALL_REDUCE_SCATTER, args->n, comm->n_ranks, err);
  return st == TD_OK ? comm->backend->reduce_scatter(comm, stream, args, err) : st;
}

td_status td_comm_all_reduce(td_comm *comm, td_stream *stream, const float *part, void *out,
                             size_t n, bool out_f32, td_err *err) {
  enum { ROUND = 64 };
  const size_t key[] = {n, out_f32}, element = out_f32 ? sizeof(float) : sizeof(uint16_t);
  td_status st = note_call(comm, CALL_ALL_REDUCE, key, TD_COUNT(key), err);
  const size_t n_bytes = n * sizeof(uint16_t);
  const bool is_small = n_bytes <= COMM_SMALL_BYTES && n_bytes <= comm->group->piece_bytes;
  if (st == TD_OK && is_small && comm->backend->reduce_small)
    return comm->backend->reduce_small(comm, stream, part, out, n, out_f32, err);
  size_t sizes[TD_COMM_MAX_RANKS], bytes[TD_COMM_MAX_RANKS];
  const size_t share = (n / comm->n_ranks + ROUND - 1) / ROUND * ROUND;
  for (uint32_t r = 0; r < comm->n_ranks; r++) {
    sizes[r] = comm_piece(n, share ? share : 1, r).length;
    if (r + 1 == comm->n_ranks) sizes[r] = n - comm_before(sizes, r);
    bytes[r] = sizes[r] * element;
  }
  char *own = (char *)out + comm_before(bytes, comm->rank);
  const td_reduce_scatter_args sum = {.part = part, .out = own, .n = sizes, .out_f32 = out_f32};
  const td_all_gather_args all = {.mine = own, .all = out, .n_bytes = bytes};
  if (st == TD_OK) st = comm->backend->reduce_scatter(comm, stream, &sum, err);
  return st == TD_OK ? comm->backend->all_gather(comm, stream, &all, err) : st;
}

td_status td_comm_broadcast(td_comm *comm, td_stream *stream, void *data, size_t n_bytes,
                            uint32_t root, td_err *err) {
  TD_CHECK(root < comm->n_ranks);
  const size_t key[] = {n_bytes, root};
  td_status st = note_call(comm, CALL_BROADCAST, key, TD_COUNT(key), err);
  return st == TD_OK ? comm->backend->broadcast(comm, stream, data, n_bytes, root, err) : st;
}
