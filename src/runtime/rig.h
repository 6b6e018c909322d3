// src/runtime/rig.h - a machine as predictions see it: memories, rates, cards. Described by a JSON
// file (configs/machines) or measured.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "tandem/types.h"

// What prefill reaches where that is more than in BF16.
typedef struct {
  double tflops; // 10^12 operations/s; 0: unknown, or the card has none
  bool is_assumed;
} td_fast_rate;

typedef struct {
  char name[64];
  bool is_assumed; // no rate was measured on this kind of card
  uint64_t memory_bytes;
  double link_gbps; // from pinned host memory, 10^9 bytes/s
  double tflops;    // that prefill reaches, 10^12 operations/s
  // In matrices with weights and activations of 8 bits: of TD_ACTIVATIONS_FP8, TD_ACTIVATIONS_INT8.
  td_fast_rate a8[TD_N_ACTIVATIONS];
  td_fast_rate f16; // in attention and E4M3 matrices by sums in F16
  double read_gbps; // that decode reads matrices with
  double layer_us;  // that a layer of decode takes beside its bytes: launches, messages
} td_gpu_card;

typedef struct {
  char name[128];
  bool is_assumed; // no rate was measured on this kind of CPU
  uint64_t memory_bytes;
  uint32_t n_cores;
  double read_gbps; // that decode reads weights with, all cores together, of their nodes' memory
  uint32_t n_nodes; // NUMA nodes, all alike
  // What all cores together read of other nodes' memory, if they read nothing else; 0: one node.
  double remote_gbps;
  double gflops;     // that prefill reaches, 10^9 operations/s
  double layer_us;   // that a layer of decode takes beside its bytes
  double drive_gbps; // large reads around the page cache, 10^9 bytes/s; 0: unknown
  uint32_t n_gpus;   // all alike
  td_gpu_card gpu;
} td_rig;

// The machines and cards that the program knows: configs/machines, configs/cards.
typedef struct {
  const char *name; // of the file, without .json
  const char *json;
  size_t len;
} td_rig_file;
extern const td_rig_file td_rig_files[], td_card_files[]; // the last has no name

// A file, or the name of a known machine, and behind each + a card of that machine instead of its
// own: "epyc-9355x2+rtx-5090+rtx-5090". TD_EINVAL: names the value that is wrong.
td_status td_rig_read(td_rig *out, const char *name, td_err *err);
td_status td_rig_parse(td_rig *out, const char *json, size_t len, const char *name, td_err *err);
// One node of the machine, with all of its cards.
td_rig td_rig_node(const td_rig *rig);
// The cards of a machine's name, which begin with its first +; NULL: it has none.
td_status td_rig_use_cards(td_rig *rig, const char *cards, td_err *err);
