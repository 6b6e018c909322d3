// tests/cuda_emu/nccl.cpp - what src/comm/nccl.c uses of NCCL, between streams of the emulator in
// one process. It is as strict as NCCL may be: calls take a while, a call during another is refused,
// each rank receives in an order of its own, and a transfer without its counterpart waits until its
// own communicator is aborted.
#include "cuda_runtime.h"
#include "hooks.h"

#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
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
};

namespace {

struct message {
  const void *data;
  size_t n_bytes;
  bool taken = false;
};

// The ranks of a communicator.
struct clique {
  std::mutex lock; // guards what follows, and its ends
  std::condition_variable moved;
  int n_joined = 0;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<message>>> sent; // by source and target
};

struct transfer {
  void *to; // NULL: a send
  const void *from;
  size_t n_bytes;
  int peer;
};

// Of one rank. Queued work keeps it beyond its communicator.
struct end {
  std::shared_ptr<clique> all;
  int n_ranks, rank;
  int error = SUCCESS, n_polls = POLLS, n_groups = 0;
  bool is_aborted = false;
  td_jitter jitter = td_jitter_open(TD_JITTER_EMULATOR);
};

std::mutex cliques_lock; // guards what follows
// Kept for good: ThreadSanitizer does not see who was the last to leave one.
std::map<uint64_t, std::shared_ptr<clique>> &cliques =
    *new std::map<uint64_t, std::shared_ptr<clique>>;
uint64_t n_ids;
int failing_rank = -1, failing_group;

} // namespace

struct ncclComm {
  std::shared_ptr<end> e;
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

// Lock held. Waits for the counterpart's data.
void receive(end &e, std::unique_lock<std::mutex> &hold, const transfer &t) {
  auto &from = e.all->sent[{t.peer, e.rank}];
  e.all->moved.wait(hold, [&] { return e.is_aborted || !from.empty(); });
  if (from.empty()) return;
  std::shared_ptr<message> m = from.front();
  from.pop_front();
  if (m->n_bytes == t.n_bytes) {
    std::memcpy(t.to, m->data, t.n_bytes);
  } else {
    e.error = INVALID_USAGE;
  }
  m->taken = true;
  e.all->moved.notify_all();
}

void run_transfers(end &e, const std::vector<transfer> &transfers) {
  td_jitter_wait(&e.jitter);
  std::unique_lock<std::mutex> hold(e.all->lock);
  std::vector<std::shared_ptr<message>> out;
  for (const transfer &t : transfers) {
    if (t.to) continue;
    out.push_back(std::make_shared<message>(message{t.from, t.n_bytes}));
    e.all->sent[{e.rank, t.peer}].push_back(out.back());
  }
  e.all->moved.notify_all();
  // The first to be received is another one on each rank.
  for (size_t i = 0; i < transfers.size(); i++) {
    const transfer &t = transfers[(i + static_cast<size_t>(e.rank) * 3) % transfers.size()];
    if (t.to) receive(e, hold, t);
  }
  for (const auto &m : out)
    e.all->moved.wait(hold, [&] { return e.is_aborted || m->taken; });
  // What an aborted rank has not sent is not there any more.
  for (auto &queue : e.all->sent) {
    if (queue.first.first == e.rank && e.is_aborted) queue.second.clear();
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

bool is_failing(const end &e) {
  std::lock_guard<std::mutex> hold(cliques_lock);
  return e.rank == failing_rank && e.n_groups == failing_group;
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
  n_ids++;
  std::memcpy(id->bytes, &n_ids, sizeof n_ids);
  return SUCCESS;
}

// config: that of 2.18, and not blocking.
EXPORTED int ncclCommInitRankConfig(ncclComm **out, int n_ranks, nccl_id id, int rank,
                                    const int *config) {
  const size_t size = *reinterpret_cast<const size_t *>(config);
  if (size < 48 || static_cast<unsigned>(config[2]) != 0xcafebeefu || config[3] != 21800 ||
      config[4] != 0)
    return INVALID_ARGUMENT;
  uint64_t key;
  std::memcpy(&key, id.bytes, sizeof key);
  std::lock_guard<std::mutex> hold(cliques_lock);
  std::shared_ptr<clique> &all = cliques[key];
  if (!all) all = std::make_shared<clique>();
  std::lock_guard<std::mutex> hold_all(all->lock);
  all->n_joined++;
  *out = new ncclComm{std::make_shared<end>(end{all, n_ranks, rank})};
  return IN_PROGRESS;
}

EXPORTED int ncclCommGetAsyncError(ncclComm *comm, int *state) {
  end &e = *comm->e;
  std::lock_guard<std::mutex> hold(e.all->lock);
  *state = e.error != SUCCESS ? e.error : is_busy(e) ? IN_PROGRESS : SUCCESS;
  if (e.all->n_joined >= e.n_ranks && e.n_polls > 0) e.n_polls--;
  return SUCCESS;
}

EXPORTED int ncclCommFinalize(ncclComm *comm) {
  std::lock_guard<std::mutex> hold(comm->e->all->lock);
  if (is_busy(*comm->e)) return INVALID_USAGE;
  comm->e->n_polls = POLLS;
  return IN_PROGRESS;
}

EXPORTED int ncclCommAbort(ncclComm *comm) {
  {
    std::lock_guard<std::mutex> hold(comm->e->all->lock);
    comm->e->is_aborted = true;
    comm->e->all->moved.notify_all();
  }
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
  std::shared_ptr<end> e = g.comm->e;
  for (const transfer &t : g.transfers) {
    if (!emu_check_pointers(g.stream, &t, 2 * sizeof(void *))) return INVALID_ARGUMENT;
  }
  const bool fails = is_failing(*e);
  std::unique_lock<std::mutex> hold(e->all->lock);
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
