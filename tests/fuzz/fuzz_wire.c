// tests/fuzz/fuzz_wire.c - a peer that writes anything it likes into the shared memory.
// Input: one mode byte, then the bytes of the segment. Mode bit 0 keeps the header whole, so that
// the slots are reached; bit 1 keeps the slots' numbers too, so that the records are.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#include "shm/ring.h"

enum { CAPACITY = 8, SLOT_BYTES = 320, MEM_BYTES = 4096 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static _Alignas(64) uint8_t mem[MEM_BYTES];

static void lay_out(uint8_t mode, const uint8_t *data, size_t size) {
  memset(mem, 0, sizeof mem);
  memcpy(mem, data, size < sizeof mem ? size : sizeof mem);
  if (!(mode & 1)) return;
  _Alignas(64) static uint8_t fresh[MEM_BYTES];
  td_ring_format(fresh, CAPACITY);
  size_t header_bytes = td_ring_bytes(CAPACITY) - CAPACITY * SLOT_BYTES;
  memcpy(mem, fresh, header_bytes);
  for (uint64_t i = 0; (mode & 2) && i < CAPACITY; i++) {
    uint64_t seq = i + 1; // published
    memcpy(mem + header_bytes + i * SLOT_BYTES, &seq, sizeof seq);
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static td_ring_wake wake;
  if (!wake.data_fd) wake = (td_ring_wake){eventfd(0, EFD_NONBLOCK), eventfd(0, EFD_NONBLOCK)};
  if (!size) return 0;
  lay_out(data[0], data + 1, size - 1);
  td_err err;
  td_wire_msg msg;
  td_ring_reader reader;
  if (td_ring_reader_attach(&reader, mem, sizeof mem, wake, &err) == TD_OK) {
    // Every pop frees a slot for a later lap, so what the memory holds ends the loop.
    uint32_t n = 0;
    while (td_ring_pop(&reader, &msg) == TD_OK)
      if (++n > reader.end.capacity) abort();
    td_ring_reader_arm(&reader);
    td_ring_reader_disarm(&reader);
    if (td_ring_n_used(&reader.end) > reader.end.capacity) abort();
  }
  lay_out(data[0], data + 1, size - 1);
  td_ring_writer writer;
  if (td_ring_writer_attach(&writer, mem, sizeof mem, wake, &err) == TD_OK) {
    memset(&msg, 0x5a, sizeof msg);
    uint32_t n = 0;
    while (td_ring_push(&writer, &msg) == TD_OK)
      if (++n > writer.end.capacity) abort();
    td_ring_writer_arm(&writer);
    td_ring_writer_disarm(&writer);
  }
  return 0;
}
