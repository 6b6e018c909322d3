// src/bench/this_rig.h - measures this machine for predictions (runtime/rig.h).
#pragma once

#include <stdbool.h>

#include "model/model.h"
#include "runtime/rig.h"

// The CPU alone: what it reads, of its own and of other NUMA nodes' memory, and what it computes
// with experts like the model's, each with as many tokens as in a usual step of a prompt; and what
// the drive with the model's files reads, if they are larger than memory.
// n_threads: 0 is one a CPU. Takes seconds. TD_ENOMEM.
td_status td_rig_measure(td_rig *out, const td_model *model, unsigned n_threads, td_err *err);
// --machine: "this" is measured, anything else read (td_rig_read); each may have cards.
td_status td_rig_open(td_rig *out, const char *machine, const td_model *model, unsigned n_threads,
                      td_err *err);
bool td_rig_is_this(const char *machine);
