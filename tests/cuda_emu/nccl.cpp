// tests/cuda_emu/nccl.cpp - what src/comm/nccl.c uses of NCCL, between streams of the emulator. It is
// as strict as NCCL may be: calls take a while, a call during another is refused, each rank receives
// in an order of its own, and a transfer without its counterpart waits until its own communicator is
// aborted.
#include "cuda_runtime.h"
#include "hooks.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include "base/jitter.h"

enum {
  SUCCESS = 0,
  SYSTEM_ERROR = 2,
  INVALID_ARGUMENT = 4,
  INVALID_USAGE = 5,
  IN_PROGRESS = 7,
  TYPE_UINT8 = 1,
  ID_BYTES = 128,
  POLLS = 2, // in which a call is still in progress
  MAX_RANKS = 8,
  BOX_BYTES = 4096,
  PAUSE_US = 50,
};

namespace {

// On the way from a rank to another: one piece of a message.
struct box {
  bool is_full;
  size_t total_bytes; // of the message
  size_t n_bytes;
  unsigned char data[BOX_BYTES];
};

// Of a communicator.
struct clique {
  std::mutex lock; // guards the boxes
  std::atomic<int> n_joined;
  box boxes[MAX_RANKS][MAX_RANKS]; // by source and target
};

struct transfer {
  void *to; // NULL: a send
  const void *from;
  size_t n_bytes;
  int peer;
};

// Of one rank. Kept for good, since queued work may outlive its communicator.
struct end {
  clique *all = nullptr;
  int n_ranks = 0, rank = 0;
  std::mutex lock{}; // guards the next three
  int error = SUCCESS, n_polls = POLLS, n_groups = 0;
  std::atomic<bool> is_aborted{false};
  td_jitter jitter = td_jitter_open(TD_JITTER_EMULATOR);
};

std::mutex cliques_lock; // guards what follows
// By id, kept for good.
std::map<std::string, clique *> &cliques = *new std::map<std::string, clique *>;
std::vector<std::unique_ptr<end>> &ends = *new std::vector<std::unique_ptr<end>>;
// Of emu_nccl_fail, for opening a communicator.
enum { OPENING = -2 };
// TANDEM_EMU_NCCL_FAILS: the rank whose exchanges fail.
int rank_that_fails() {
  const char *text = std::getenv("TANDEM_EMU_NCCL_FAILS");
  return text ? std::atoi(text) : -1;
}

int failing_rank = rank_that_fails(), failing_group = -1;

} // namespace

struct ncclComm {
  end *e;
};

struct nccl_id {
  char bytes[ID_BYTES];
};

namespace {

// The calling thread's group.
struct group {
  bool is_open = false;
  ncclComm *comm = nullptr;
  void *stream = nullptr;
  std::vector<transfer> transfers;
};
thread_local group mine;

// Lock held.
bool is_busy(const end &e) {
  return e.all->n_joined < e.n_ranks || e.n_polls > 0;
}

// Lock of the clique held. Whether a piece could be sent; moves `at` on.
bool send_piece(clique &all, const end &e, const transfer &t, size_t &at) {
  box &b = all.boxes[e.rank][t.peer];
  if (b.is_full || at == t.n_bytes) return false;
  b.n_bytes = std::min<size_t>(t.n_bytes - at, BOX_BYTES);
  b.total_bytes = t.n_bytes;
  std::memcpy(b.data, static_cast<const char *>(t.from) + at, b.n_bytes);
  b.is_full = true;
  at += b.n_bytes;
  return true;
}

// Likewise; a message of another length is taken, too, and is an error.
bool receive_piece(clique &all, end &e, const transfer &t, size_t &at) {
  box &b = all.boxes[t.peer][e.rank];
  if (!b.is_full || at == t.n_bytes) return false;
  b.is_full = false;
  if (b.total_bytes == t.n_bytes) {
    std::memcpy(static_cast<char *>(t.to) + at, b.data, b.n_bytes);
    at += b.n_bytes;
    return true;
  }
  std::lock_guard<std::mutex> hold(e.lock);
  e.error = INVALID_USAGE;
  at = t.n_bytes;
  return true;
}

// Until all is received, and what was sent is taken.
void run_transfers(end &e, const std::vector<transfer> &transfers) {
  td_jitter_wait(&e.jitter);
  clique &all = *e.all;
  std::vector<size_t> at(transfers.size());
  for (bool is_done = false; !is_done && !e.is_aborted;) {
    bool is_moved = false;
    is_done = true;
    all.lock.lock();
    for (size_t i = 0; i < transfers.size(); i++) {
      // The first to be received is another one on each rank.
      const size_t k = (i + static_cast<size_t>(e.rank) * 3) % transfers.size();
      const transfer &t = transfers[k];
      is_moved |= t.to ? receive_piece(all, e, t, at[k]) : send_piece(all, e, t, at[k]);
      is_done &= at[k] == t.n_bytes && (t.to || !all.boxes[e.rank][t.peer].is_full);
    }
    all.lock.unlock();
    if (!is_moved && !is_done) usleep(PAUSE_US);
  }
}

int add(void *to, const void *from, size_t n, int type, int peer, ncclComm *comm, void *stream) {
  if (!mine.is_open || (mine.comm && (mine.comm != comm || mine.stream != stream)))
    return INVALID_USAGE;
  if (type != TYPE_UINT8 || peer < 0 || peer >= comm->e->n_ranks || !n || !stream)
    return INVALID_ARGUMENT;
  mine.comm = comm;
  mine.stream = stream;
  mine.transfers.push_back({to, from, n, peer});
  return SUCCESS;
}

// Lock of the end held.
bool is_failing(const end &e) {
  std::lock_guard<std::mutex> hold(cliques_lock);
  return e.rank == failing_rank && (failing_group == -1 || e.n_groups == failing_group);
}

} // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

void emu_nccl_fail(int rank, int number) {
  std::lock_guard<std::mutex> hold(cliques_lock);
  failing_rank = rank;
  failing_group = number;
}

// TANDEM_EMU_NCCL: the version it claims to be.
EXPORTED int ncclGetVersion(int *version) {
  const char *text = std::getenv("TANDEM_EMU_NCCL");
  *version = text ? std::atoi(text) : 22800;
  return SUCCESS;
}

EXPORTED const char *ncclGetErrorString(int code) {
  return code == SYSTEM_ERROR ? "unhandled system error" : "invalid usage";
}

EXPORTED const char *ncclGetLastError(ncclComm *) {
  return "the fake says so";
}

EXPORTED int ncclGetUniqueId(nccl_id *id) {
  std::lock_guard<std::mutex> hold(cliques_lock);
  *id = {};
  std::snprintf(id->bytes, sizeof id->bytes, "clique %zu", cliques.size());
  cliques[id->bytes] = new clique{};
  return SUCCESS;
}

// config: that of 2.18, and not blocking.
EXPORTED int ncclCommInitRankConfig(ncclComm **out, int n_ranks, nccl_id id, int rank,
                                    const int *config) {
  const size_t size = *reinterpret_cast<const size_t *>(config);
  if (size < 48 || static_cast<unsigned>(config[2]) != 0xcafebeefu || config[3] != 21800 ||
      config[4] != 0)
    return INVALID_ARGUMENT;
  std::lock_guard<std::mutex> hold(cliques_lock);
  if (failing_group == OPENING && rank == failing_rank) return SYSTEM_ERROR;
  const auto found = cliques.find(id.bytes);
  if (found == cliques.end()) return SYSTEM_ERROR;
  clique *all = found->second;
  all->n_joined++;
  ends.push_back(std::make_unique<end>());
  end *joined = ends.back().get();
  joined->all = all;
  joined->n_ranks = n_ranks;
  joined->rank = rank;
  *out = new ncclComm{joined};
  return IN_PROGRESS;
}

EXPORTED int ncclCommGetAsyncError(ncclComm *comm, int *state) {
  end &e = *comm->e;
  std::lock_guard<std::mutex> hold(e.lock);
  *state = e.error != SUCCESS ? e.error : is_busy(e) ? IN_PROGRESS : SUCCESS;
  if (e.all->n_joined >= e.n_ranks && e.n_polls > 0) e.n_polls--;
  return SUCCESS;
}

EXPORTED int ncclCommFinalize(ncclComm *comm) {
  std::lock_guard<std::mutex> hold(comm->e->lock);
  if (is_busy(*comm->e)) return INVALID_USAGE;
  comm->e->n_polls = POLLS;
  return IN_PROGRESS;
}

EXPORTED int ncclCommAbort(ncclComm *comm) {
  comm->e->is_aborted = true;
  delete comm;
  return SUCCESS;
}

EXPORTED int ncclCommDestroy(ncclComm *comm) {
  return ncclCommAbort(comm);
}

EXPORTED int ncclGroupStart() {
  if (mine.is_open) return INVALID_USAGE;
  mine = {};
  mine.is_open = true;
  return SUCCESS;
}

EXPORTED int ncclSend(const void *data, size_t n, int type, int peer, ncclComm *comm,
                      void *stream) {
  return add(nullptr, data, n, type, peer, comm, stream);
}

EXPORTED int ncclRecv(void *data, size_t n, int type, int peer, ncclComm *comm, void *stream) {
  return add(data, nullptr, n, type, peer, comm, stream);
}

EXPORTED int ncclGroupEnd() {
  group g = std::move(mine);
  mine = {};
  if (!g.is_open) return INVALID_USAGE;
  if (!g.comm) return SUCCESS;
  end *e = g.comm->e;
  for (const transfer &t : g.transfers) {
    if (!emu_check_pointers(g.stream, &t, 2 * sizeof(void *))) return INVALID_ARGUMENT;
  }
  std::unique_lock<std::mutex> hold(e->lock);
  const bool fails = is_failing(*e);
  if (is_busy(*e)) return INVALID_USAGE;
  e->n_groups++;
  e->n_polls = POLLS;
  if (fails) {
    e->error = SYSTEM_ERROR;
    return IN_PROGRESS;
  }
  hold.unlock();
  emu_enqueue(g.stream, [e, transfers = std::move(g.transfers)] { run_transfers(*e, transfers); });
  return IN_PROGRESS;
}
