// tests/unit/test_expert_slots.c - experts in the slots of a ring: where they lie, and with how few
// copies they get there.
// CTest: no-tsan
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/units.h"
#include "engine/experts/expert_slots.h"
#include "unit/testing.h"

enum { MATRICES = 3, EXPERTS = 4, MOST_PARTS = 2 * MATRICES * EXPERTS };
enum { DATA = 16384, SCALE = 512 }; // bytes, multiples of TD_SLOT_ALIGN as published shapes' are

typedef struct {
  char *memory;
  size_t n_bytes;
  td_slot_part parts[MOST_PARTS];
  td_slot_part *order[MOST_PARTS];
  td_slot_copy copies[MOST_PARTS];
  td_slot slot;
} packing;

static void begin(packing *p, size_t n_bytes) {
  p->memory = malloc(n_bytes);
  p->n_bytes = n_bytes;
  for (size_t i = 0; i < n_bytes; i++)
    p->memory[i] = (char)(i * 31 + i / 251);
  p->slot = (td_slot){.parts = p->parts,
                      .order = p->order,
                      .copies = p->copies,
                      .memory = p->memory,
                      .memory_bytes = n_bytes};
}

static void add(packing *p, size_t at, size_t n_bytes) {
  p->parts[p->slot.n_parts++] = (td_slot_part){.from = p->memory + at, .n_bytes = n_bytes};
}

// Every part arrives whole and aligned, and none in another's place. Returns the copies.
static uint32_t check(packing *p) {
  const size_t n_bytes = td_slot_pack(&p->slot);
  char *slot = calloc(1, n_bytes + 1);
  size_t content = 0, copied = 0, end = 0;
  for (uint32_t i = 0; i < p->slot.n_copies; i++) {
    const td_slot_copy *c = &p->slot.copies[i];
    const char *from = c->from;
    assert_true(from >= p->memory && from + c->n_bytes <= p->memory + p->n_bytes);
    assert_true(c->to >= end && c->to + c->n_bytes <= n_bytes);
    end = c->to + c->n_bytes;
    memcpy(slot + c->to, from, c->n_bytes);
    copied += c->n_bytes;
  }
  for (uint32_t i = 0; i < p->slot.n_parts; i++) {
    const td_slot_part *part = &p->parts[i];
    if (!part->n_bytes) continue;
    assert_int_equal(part->to % TD_SLOT_ALIGN, 0);
    assert_memory_equal(slot + part->to, part->from, part->n_bytes);
    content += part->n_bytes;
  }
  assert_true(copied <= content + content / TD_SLOT_GAPS);
  free(slot);
  free(p->memory);
  return p->slot.n_copies;
}

// down.weight, down.scale, gate.weight ... of one expert, then of the next.
TEST(data_and_scales_are_neighbours) {
  packing p = {.n_bytes = 0};
  begin(&p, MOST_PARTS / 2 * (DATA + SCALE));
  static const int turns[MATRICES] = {1, 2, 0}; // gate, up and down in the order of their names
  for (size_t e = 0; e < EXPERTS; e++) {
    for (size_t i = 0; i < MATRICES; i++) {
      size_t at = (e * MATRICES + (size_t)turns[i]) * (DATA + SCALE);
      add(&p, at, DATA);
      add(&p, at + DATA, SCALE);
    }
  }
  assert_int_equal(check(&p), 1);
}

// safetensors sorts a file by dtype, then by name: all scales, then all data.
TEST(sorted_by_dtype) {
  packing p = {.n_bytes = 0};
  const size_t data_begin = (size_t)1 << 20; // after the scales of many other experts
  begin(&p, data_begin + MOST_PARTS / 2 * DATA);
  for (size_t i = 0; i < MATRICES * EXPERTS; i++) {
    add(&p, data_begin + i * DATA, DATA);
    add(&p, i * SCALE, SCALE);
  }
  assert_int_equal(check(&p), 2);
}

// One expert in the file of another layer, or names between them: as many copies as places.
TEST(experts_apart) {
  packing p = {.n_bytes = 0};
  enum { EXPERT = MATRICES * (DATA + SCALE), FAR = TD_SLOT_MAX_GAP + EXPERT + TD_SLOT_ALIGN };
  begin(&p, EXPERTS * FAR);
  for (size_t e = 0; e < EXPERTS; e++) {
    for (size_t i = 0; i < MATRICES; i++) {
      add(&p, e * FAR + i * (DATA + SCALE), DATA);
      add(&p, e * FAR + i * (DATA + SCALE) + DATA, SCALE);
    }
  }
  assert_int_equal(check(&p), EXPERTS);
}

// Small gaps are copied along, where they can be read; larger ones in all than pay are not.
TEST(gaps) {
  enum { GAP = 256, WIDE = DATA / 4 };
  for (int can_read = 0; can_read < 2; can_read++) {
    packing p = {.n_bytes = 0};
    begin(&p, EXPERTS * (DATA + GAP));
    if (!can_read) p.slot.memory_bytes = 0;
    for (size_t e = 0; e < EXPERTS; e++)
      add(&p, e * (DATA + GAP), DATA);
    assert_int_equal(check(&p), can_read ? 1 : EXPERTS);
  }
  packing p = {.n_bytes = 0};
  begin(&p, EXPERTS * (DATA + WIDE));
  for (size_t e = 0; e < EXPERTS; e++)
    add(&p, e * (DATA + WIDE), DATA);
  assert_int_equal(check(&p), EXPERTS - 1); // one gap is a sixteenth of it all
}

// Sizes that do not suit the device's alignment; a part twice; none.
TEST(odd_parts) {
  packing p = {.n_bytes = 0};
  begin(&p, 4096);
  add(&p, 0, 100);
  add(&p, 100, 100); // its neighbour, but not aligned there
  add(&p, 256, 1000);
  add(&p, 256, 1000);
  add(&p, 512, 10);
  add(&p, 0, 0);
  assert_int_equal(check(&p), 3);
  packing none = {.n_bytes = 0};
  begin(&none, 1);
  assert_int_equal(check(&none), 0);
}

// Slots of some 10 ms at most, several of them, down to one expert each.
TEST(experts_of_a_slot) {
  const uint64_t v3 = 3 * (7168 * 2048 + 3584), qwen3 = 3 * (4096 * 1536 + 1536);
  static const struct {
    uint64_t ring_mib;
    uint32_t of_v3, of_qwen3; // of 256, of 128
  } cases[] = {{11 << 10, 12, 28}, {2304, 12, 28}, {1024, 6, 14}, {200, 1, 2},
               {90, 1, 1},         {80, 0, 1},     {30, 0, 0}};
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    const uint64_t ring = cases[i].ring_mib << 20;
    if (td_slot_experts(ring, v3, 256) != cases[i].of_v3) fail_msg("V3, case %zu", i);
    if (td_slot_experts(ring, qwen3, 128) != cases[i].of_qwen3) fail_msg("Qwen3, case %zu", i);
  }
  assert_int_equal(td_slot_experts(16 * TD_GIB, 1000, 8), 8);
  assert_int_equal(td_slot_experts(16 * TD_GIB, 0, 8), 0);
}
