// src/runtime/weights.h - where the weights live: mapped from the checkpoint's files through the
// page cache, or read once into shared memory (model/checkpoint/resident.h). Chosen, loaded and
// told on stderr.
#ifndef TD_RUNTIME_WEIGHTS_H
#define TD_RUNTIME_WEIGHTS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/mem_info.h"
#include "base/status.h"
#include "runtime/placement.h"
#include "tandem/types.h"

typedef enum { TD_WEIGHTS_MMAP, TD_WEIGHTS_RESIDENT, TD_WEIGHTS_AUTO } td_weights_mode;

// What the choice rests on.
typedef struct {
  td_weights_mode mode;
  td_placement placement;
  uint64_t file_bytes;      // of the checkpoint
  uint64_t resident_bytes;  // memory that it takes when resident
  uint64_t converted_bytes; // of that, what no file holds: each worker would make its own
  uint64_t kv_bytes;        // of one context there; auto leaves room for two beside the weights
  uint64_t available_bytes;
  uint64_t limit_bytes; // that may become available: of all the machine, or of a control group
  td_page_kind pages;   // that the memory would have
} td_weights_need;

typedef struct {
  bool is_resident, is_warning; // warning: the text is one
  char text[384];               // why, a sentence
} td_weights_choice;

// Auto is resident when that fits and brings huge pages, spares workers a conversion, or a GPU
// copies experts from there; a GPU that has all weights needs no other copy. TD_ENOMEM: resident
// was asked for and can never fit.
td_status td_weights_choose(td_weights_choice *out, const td_weights_need *need, td_err *err);

typedef struct {
  td_weights_mode mode;
  const char *model_dir;
  uint32_t ctx_size; // tokens; 0: what the model allows, within memory
  td_dtype kv_dtype;
  const atomic_bool *canceled; // may be NULL
  td_placement placement;
} td_weights_opts;

// Chooses, and loads if that is the choice; shows how far it is on stderr. *fd is the descriptor of
// the weights, the caller's to close; -1 when the files are to be mapped. Any thread.
td_status td_weights_open(int *fd, const td_weights_opts *opts, td_err *err);

#endif
