// src/runtime/trace_file.h - --trace: writes what all processes record (base/trace.h) to a file in
// the Trace Event format, a JSON array that chrome://tracing and Perfetto read. Times are
// microseconds of CLOCK_MONOTONIC, the one clock of all processes. The file ends with its bracket
// after every write, so it is whole whenever a process dies. What was dropped because a ring was
// full is told by events named "dropped"; the last event, "end of trace", tells their sum.
#ifndef TD_RUNTIME_TRACE_FILE_H
#define TD_RUNTIME_TRACE_FILE_H

#include "base/status.h"

typedef struct td_trace_file td_trace_file;

// Creates the file and begins to record in this process, called process. Call before other threads
// start. TD_EIO: the file cannot be written. On success the caller owns *out; on error *out is
// NULL.
td_status td_trace_file_open(td_trace_file **out, const char *path, const char *process,
                             td_err *err);
// The descriptor of the memory that other processes record to; lives as long as the file. 0 for
// NULL.
int td_trace_file_fd(const td_trace_file *file);
// Writes what is left and stops. Call when no other thread of this process records any more, and
// when the other processes have ended.
void td_trace_file_close(td_trace_file *file);

#endif
