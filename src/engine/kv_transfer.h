// src/engine/kv_transfer.h - keeps a device's KV pages equal to pages in host memory that other
// processes share, so that one device prefills what another decodes, and pages outlive both.
//
// Page i of the device is page i of host memory; both are pools as td_kv_layout has them. A page's
// version, in shared memory, is incremented whenever some of its content is new, in host memory or
// on the device that computed it. A device remembers the version of its copy, so a page is copied
// to it at most once per version.
//
// In a step, keys and values of prompts leave layer by layer, on a stream of their own, while the
// device computes what follows. Those of generated tokens are written to host memory by the
// operator that stores them: too little for a copy. When td_engine_end returns, all of them have
// arrived.
//
// A recurrent state is large, and each token replaces it. So it leaves, by a copy, and with it the
// keys and values that it is beside, when it is the last of its page: at the end of the step that
// fills the page. The state of a page that is being filled is on the device alone, until
// td_engine_save_state copies it out for another engine to continue from there. If its process dies
// before, the page's state in host memory is an older one, or another sequence's, and no engine may
// continue from it (TD_READY_STATES in wire.h).
//
// Thread: that of the engines that use it. A page has one writer at a time, and nobody reads what
// is being written (wire.h).
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "device/device.h"
#include "engine/attn/kv_layout.h"

typedef struct td_kv_transfer td_kv_transfer;

// All memory is borrowed.
typedef struct {
  td_dev *dev;
  char *dev_pages;            // in the device's memory
  char *host_pages;           // registered with the device (td_dev_register)
  _Atomic uint32_t *versions; // [n_pages], at first 0; shared with the other processes
  uint32_t n_pages;
  td_kv_layout layout;
} td_kv_transfer_opts;

// On success the caller owns *out; on error *out is NULL.
td_status td_kv_transfer_open(td_kv_transfer **out, const td_kv_transfer_opts *opts, td_err *err);
void td_kv_transfer_close(td_kv_transfer *transfer); // after its engines; NULL is legal

// While paused, steps neither read nor write host memory. For steps whose result nobody uses.
void td_kv_transfer_pause(td_kv_transfer *transfer, bool is_paused);

// Begins to copy pages to the device, unless its copy is current. Steps do so by themselves; a
// caller that calls this earlier can compute other steps meanwhile.
void td_kv_transfer_enter(td_kv_transfer *transfer, const int32_t *pages, uint32_t n_pages);
bool td_kv_transfer_has_entered(td_kv_transfer *transfer); // whether all copies have ended
void td_kv_transfer_wait(td_kv_transfer *transfer);        // until they have

typedef struct {
  uint64_t in_bytes, out_bytes; // copied to the device, and from it by copies
} td_kv_transfer_stats;
td_kv_transfer_stats td_kv_transfer_stats_of(const td_kv_transfer *transfer);
