// src/shm/ring.h - a queue of wire records in shared memory, one writer, one reader.
//
// Each slot carries a sequence number that says whose it is: position p of the queue lies in slot
// p % capacity, which is free for the writer while its number is p, holds the record while it is
// p + 1, and becomes p + capacity (free for the next lap) when the reader has copied it out. The
// record is written before the number and read after it, so what is torn or stale is never read;
// any other number means that the memory was overwritten (TD_EFORMAT).
//
// Each end keeps its own position, so a peer that scribbles over the shared memory can spoil the
// contents, never make this end read or write outside a slot.
//
// Waking: whoever is about to sleep arms its flag, looks once more, and only then polls its
// descriptor; the peer makes a system call only when it finds the flag armed. See ring.c for why
// no wake is lost.
#ifndef TD_SHM_RING_H
#define TD_SHM_RING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "tandem/wire.h"

typedef struct td_ring_shared td_ring_shared;

// The two eventfds of a ring (non-blocking, borrowed).
typedef struct {
  int data_fd;  // readable: the reader, asleep, has records
  int space_fd; // readable: the writer, asleep, has room
} td_ring_wake;

typedef struct {
  td_ring_shared *shared;
  uint64_t pos; // of the next record
  uint32_t capacity;
  td_ring_wake wake;
} td_ring_end;

// Distinct types, so that an end cannot be used as the other.
typedef struct {
  td_ring_end end;
} td_ring_writer;
typedef struct {
  td_ring_end end;
} td_ring_reader;

// Bytes of a ring of capacity records; capacity is a power of two from 2 to 2^20.
size_t td_ring_bytes(uint32_t capacity);
// Makes mem (64-byte aligned, td_ring_bytes long) an empty ring, before either end attaches.
void td_ring_format(void *mem, uint32_t capacity);

// mem may hold anything; TD_EFORMAT: it is no ring of this version, or larger than n_bytes.
td_status td_ring_writer_attach(td_ring_writer *out, void *mem, size_t n_bytes, td_ring_wake wake,
                                td_err *err);
td_status td_ring_reader_attach(td_ring_reader *out, void *mem, size_t n_bytes, td_ring_wake wake,
                                td_err *err);

// TD_EAGAIN: full. TD_EFORMAT: the shared memory is corrupt.
td_status td_ring_push(td_ring_writer *writer, const td_wire_msg *msg);
// TD_EAGAIN: empty. TD_EFORMAT: the shared memory is corrupt. What *out holds is the peer's word:
// check it before use.
td_status td_ring_pop(td_ring_reader *reader, td_wire_msg *out);

// True: sleeping is safe, the peer will signal data_fd (space_fd). False: there is work already.
bool td_ring_reader_arm(td_ring_reader *reader);
bool td_ring_writer_arm(td_ring_writer *writer);
// After sleeping: takes the flag back and empties the descriptor.
void td_ring_reader_disarm(td_ring_reader *reader);
void td_ring_writer_disarm(td_ring_writer *writer);

// Records in the ring as far as both ends have said; for reports only.
uint32_t td_ring_n_used(const td_ring_end *end);

#endif
