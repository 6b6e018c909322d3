// src/bench/this_rig.h - measures this machine for predictions (runtime/rig.h).
#pragma once

#include <stdbool.h>

#include "model/model.h"
#include "runtime/rig.h"

// --machine: "this" is measured, anything else read (td_rig_read); each may have cards.
td_status td_rig_open(td_rig *out, const char *machine, const td_model *model, unsigned n_threads,
                      td_err *err);
// What the drive with the model's files reads at random places, in 10^9 bytes/s, bypassing the page
// cache where its file system permits. Takes a second. 0: unknown.
double td_rig_drive_gbps(const td_model *model);
bool td_rig_is_this(const char *machine);
