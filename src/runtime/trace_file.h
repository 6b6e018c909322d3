// src/runtime/trace_file.h - --trace: writes the records of all processes (base/trace.h) to a file
// in the Trace Event format, a JSON array that chrome://tracing and Perfetto read. Times are
// microseconds of CLOCK_MONOTONIC, which all processes share. The closing bracket is rewritten
// after every write, so the file is valid whenever a process dies. Events lost because a ring was
// full are reported by events named "dropped"; the last event, "end of trace", has their total.
#pragma once

#include "base/status.h"

typedef struct td_trace_file td_trace_file;

// Creates the file and starts recording in this process, named process. Call before other threads
// start. TD_EIO: the file cannot be written. On success the caller owns *out; on error *out is
// NULL.
td_status td_trace_file_open(td_trace_file **out, const char *path, const char *process,
                             td_err *err);
// Descriptor of the shared memory that other processes record to; valid until close. 0 for NULL.
int td_trace_file_fd(const td_trace_file *file);
// Writes the remaining records and stops. Call when no other thread of this process records any
// more and the other processes have ended.
void td_trace_file_close(td_trace_file *file);
