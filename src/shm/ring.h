// src/shm/ring.h - a single-producer single-consumer queue of wire records in shared memory.
//
// Each slot has a sequence number that tells who owns it. Position p of the queue is in slot p %
// capacity. The slot is free for the writer while its number is p, holds the record while it is p +
// 1, and becomes p + capacity (free for the next lap) when the reader has copied the record out.
// The record is written before the number and read after it, so a torn or stale record is never
// read. Any other number means that the memory was overwritten (TD_EFORMAT).
//
// Each end keeps its own position, so a peer that corrupts the shared memory can change contents
// but cannot make this end access memory outside the slots.
//
// Waking: before sleeping, an end sets its flag, checks the ring once more, and only then polls its
// descriptor. The peer makes a system call only if the flag is set. ring.c shows why no wake is
// lost.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "tandem/wire.h"

typedef struct td_ring_shared td_ring_shared;

// The two eventfds of a ring (non-blocking, borrowed).
typedef struct {
  int data_fd;  // signals a sleeping reader that there are records
  int space_fd; // signals a sleeping writer that there is room
} td_ring_wake;

typedef struct {
  td_ring_shared *shared;
  uint64_t pos; // of the next record
  uint32_t capacity;
  td_ring_wake wake;
} td_ring_end;

// Distinct types, so that the ends cannot be confused.
typedef struct {
  td_ring_end end;
} td_ring_writer;
typedef struct {
  td_ring_end end;
} td_ring_reader;

// Size in bytes of a ring; capacity is in records, a power of two from 2 to 2^20.
size_t td_ring_bytes(uint32_t capacity);
// Initializes mem (64-byte aligned, td_ring_bytes long) as an empty ring, before either end
// attaches.
void td_ring_format(void *mem, uint32_t capacity);

// mem is untrusted. TD_EFORMAT: not a ring of this version, or larger than n_bytes.
td_status td_ring_writer_attach(td_ring_writer *out, void *mem, size_t n_bytes, td_ring_wake wake,
                                td_err *err);
td_status td_ring_reader_attach(td_ring_reader *out, void *mem, size_t n_bytes, td_ring_wake wake,
                                td_err *err);

// TD_EAGAIN: full. TD_EFORMAT: the shared memory is corrupt.
td_status td_ring_push(td_ring_writer *writer, const td_wire_msg *msg);
// TD_EAGAIN: empty. TD_EFORMAT: the shared memory is corrupt. *out is untrusted: check it before
// use.
td_status td_ring_pop(td_ring_reader *reader, td_wire_msg *out);

// True: the peer will signal data_fd (space_fd), so the caller may sleep. False: there is work
// already.
bool td_ring_reader_arm(td_ring_reader *reader);
bool td_ring_writer_arm(td_ring_writer *writer);
// After sleeping: clears the flag and drains the descriptor.
void td_ring_reader_disarm(td_ring_reader *reader);
void td_ring_writer_disarm(td_ring_writer *writer);

// Records in the ring, approximately; for reports only.
uint32_t td_ring_n_used(const td_ring_end *end);
