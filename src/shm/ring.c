// src/shm/ring.c - the ring's memory orders and wake-ups.
// There are four ordering pairs, two per direction:
//
//  publish  writer: record, then seq = p + 1 (release)     reader: seq (acquire), then record
//  free     reader: copy, then seq = p + cap (release)     writer: seq (acquire), then overwrite
//  wake     writer: seq = p + 1, then load reader_asleep   reader: reader_asleep = 1, load seq
//  space    reader: seq = p + cap, then load writer_asleep writer: writer_asleep = 1, load seq
//
// wake and space are Dekker's pattern: each side stores its own word and then loads the other's. A
// wake is lost if both loads miss both stores, and only sequential consistency excludes that, so
// these stores and loads are seq_cst (tests/unit/test_ring_model.c shows the lost wake that
// release/acquire would allow). The waking side clears the armed flag by exchange, so that one
// sleep costs one signal. A signal may arrive after its sleeper woke up by itself; then the next
// sleep returns early.
#include "shm/ring.h"

#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "base/trace.h"

#define CACHE_LINE   64
#define MAX_CAPACITY (1u << 20)

typedef struct {
  _Alignas(CACHE_LINE) _Atomic uint64_t seq;
  _Alignas(CACHE_LINE) td_wire_msg msg;
} slot;

struct td_ring_shared {
  _Alignas(CACHE_LINE) uint32_t magic;
  uint32_t version, capacity, slot_bytes;
  // Positions are used for attaching and reports only; the slots' numbers decide. Relaxed.
  _Alignas(CACHE_LINE) _Atomic uint64_t head; // reader's position, written by the reader
  _Atomic uint32_t reader_asleep;             // set by the reader, cleared by the writer
  _Alignas(CACHE_LINE) _Atomic uint64_t tail; // writer's position, written by the writer
  _Atomic uint32_t writer_asleep;             // set by the writer, cleared by the reader
  _Alignas(CACHE_LINE) slot slots[];
};
_Static_assert(sizeof(slot) == CACHE_LINE + sizeof(td_wire_msg), "ring layout");
_Static_assert(sizeof(td_ring_shared) == 3 * CACHE_LINE, "ring layout");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2,
               "atomics shared between processes must be lock-free");

size_t td_ring_bytes(uint32_t capacity) {
  return sizeof(td_ring_shared) + (size_t)capacity * sizeof(slot);
}

static bool capacity_ok(uint32_t capacity) {
  return capacity >= 2 && capacity <= MAX_CAPACITY && (capacity & (capacity - 1)) == 0;
}

void td_ring_format(void *mem, uint32_t capacity) {
  TD_CHECK(capacity_ok(capacity));
  TD_CHECK((uintptr_t)mem % CACHE_LINE == 0);
  td_ring_shared *ring = mem;
  memset(ring, 0, td_ring_bytes(capacity));
  for (uint32_t i = 0; i < capacity; i++)
    atomic_init(&ring->slots[i].seq, i);
  ring->magic = TD_WIRE_MAGIC;
  ring->version = TD_WIRE_VERSION;
  ring->capacity = capacity;
  ring->slot_bytes = sizeof(slot);
}

static td_status attach(td_ring_end *out, void *mem, size_t n_bytes, td_ring_wake wake,
                        bool as_reader, td_err *err) {
  *out = (td_ring_end){0};
  td_ring_shared *ring = mem;
  if (n_bytes < sizeof *ring || ring->magic != TD_WIRE_MAGIC)
    return td_fail(err, TD_EFORMAT, "shared memory holds no ring");
  if (ring->version != TD_WIRE_VERSION || ring->slot_bytes != sizeof(slot)) {
    return td_fail(err, TD_EFORMAT,
                   "ring of version %u with slots of %u bytes; this program has version %u, %zu",
                   ring->version, ring->slot_bytes, TD_WIRE_VERSION, sizeof(slot));
  }
  uint32_t capacity = ring->capacity;
  if (!capacity_ok(capacity) || td_ring_bytes(capacity) > n_bytes) {
    return td_fail(err, TD_EFORMAT, "a ring of %u records does not fit its %zu bytes", capacity,
                   n_bytes);
  }
  // This end's own position, which only this end advances. A wrong one is detected at the first
  // push or pop.
  uint64_t pos = atomic_load_explicit(as_reader ? &ring->head : &ring->tail, memory_order_relaxed);
  *out = (td_ring_end){.shared = ring, .pos = pos, .capacity = capacity, .wake = wake};
  return TD_OK;
}

td_status td_ring_writer_attach(td_ring_writer *out, void *mem, size_t n_bytes, td_ring_wake wake,
                                td_err *err) {
  return attach(&out->end, mem, n_bytes, wake, false, err);
}

td_status td_ring_reader_attach(td_ring_reader *out, void *mem, size_t n_bytes, td_ring_wake wake,
                                td_err *err) {
  return attach(&out->end, mem, n_bytes, wake, true, err);
}

static slot *slot_at(const td_ring_end *end) {
  return &end->shared->slots[end->pos & (end->capacity - 1)];
}

// The descriptor is non-blocking and its count far from overflow. A write fails only if the
// descriptor is closed, and then nobody waits for it.
static void wake_sleeper(_Atomic uint32_t *asleep, int fd) {
  if (!atomic_load_explicit(asleep, memory_order_seq_cst)) return;
  if (!atomic_exchange_explicit(asleep, 0, memory_order_seq_cst)) return;
  uint64_t one = 1;
  if (write(fd, &one, sizeof one) < 0) return;
}

static void disarm(_Atomic uint32_t *asleep, int fd) {
  atomic_store_explicit(asleep, 0, memory_order_seq_cst);
  uint64_t count;
  if (read(fd, &count, sizeof count) < 0) return; // no signal was pending
}

td_status td_ring_push(td_ring_writer *writer, const td_wire_msg *msg) {
  td_ring_end *end = &writer->end;
  slot *s = slot_at(end);
  uint64_t seq = atomic_load_explicit(&s->seq, memory_order_acquire); // partner: free, in pop
  if (seq != end->pos) return seq == end->pos + 1 - end->capacity ? TD_EAGAIN : TD_EFORMAT;
  s->msg = *msg;
  end->pos++;
  atomic_store_explicit(&s->seq, end->pos, memory_order_seq_cst); // partners: pop, reader_arm
  atomic_store_explicit(&end->shared->tail, end->pos, memory_order_relaxed);
  wake_sleeper(&end->shared->reader_asleep, end->wake.data_fd);
  td_trace_mark(TD_TRACE_SEND, msg->kind, msg->request);
  return TD_OK;
}

td_status td_ring_pop(td_ring_reader *reader, td_wire_msg *out) {
  td_ring_end *end = &reader->end;
  slot *s = slot_at(end);
  uint64_t seq = atomic_load_explicit(&s->seq, memory_order_acquire); // partner: publish, in push
  if (seq != end->pos + 1) return seq == end->pos ? TD_EAGAIN : TD_EFORMAT;
  *out = s->msg;
  // partners: push, writer_arm
  atomic_store_explicit(&s->seq, end->pos + end->capacity, memory_order_seq_cst);
  end->pos++;
  atomic_store_explicit(&end->shared->head, end->pos, memory_order_relaxed);
  wake_sleeper(&end->shared->writer_asleep, end->wake.space_fd);
  td_trace_mark(TD_TRACE_RECEIVE, out->kind, out->request);
  return TD_OK;
}

// Sets the flag, then checks the slot again; idle_seq is the slot's number while there is nothing
// to do.
static bool arm(const td_ring_end *end, _Atomic uint32_t *asleep, uint64_t idle_seq) {
  atomic_store_explicit(asleep, 1, memory_order_seq_cst);
  if (atomic_load_explicit(&slot_at(end)->seq, memory_order_seq_cst) == idle_seq) return true;
  atomic_store_explicit(asleep, 0, memory_order_relaxed);
  return false;
}

bool td_ring_reader_arm(td_ring_reader *reader) {
  td_ring_end *end = &reader->end;
  return arm(end, &end->shared->reader_asleep, end->pos);
}

bool td_ring_writer_arm(td_ring_writer *writer) {
  td_ring_end *end = &writer->end;
  return arm(end, &end->shared->writer_asleep, end->pos + 1 - end->capacity);
}

void td_ring_reader_disarm(td_ring_reader *reader) {
  disarm(&reader->end.shared->reader_asleep, reader->end.wake.data_fd);
}

void td_ring_writer_disarm(td_ring_writer *writer) {
  disarm(&writer->end.shared->writer_asleep, writer->end.wake.space_fd);
}

uint32_t td_ring_n_used(const td_ring_end *end) {
  uint64_t tail = atomic_load_explicit(&end->shared->tail, memory_order_relaxed);
  uint64_t head = atomic_load_explicit(&end->shared->head, memory_order_relaxed);
  uint64_t used = tail - head;
  return used > end->capacity ? 0 : (uint32_t)used;
}
