// src/device/device_impl.h - what a device implements. Each kind fills a td_dev_vtable and embeds
// td_dev, td_stream and td_event as first members of its own structs; device.c dispatches through
// the table.
#pragma once

#include "base/ops.h"
#include "device/device.h"

typedef enum {
#define X(NAME, ...) TD_OP_##NAME,
  TD_OPS(X)
#undef X
      TD_N_OPS
} td_op_kind;

// A queued operator; its argument struct is copied here.
typedef struct {
  td_op_kind kind;
  union {
#define X(NAME, name, args_type, ...) args_type name;
    TD_OPS(X)
#undef X
  };
} td_op;

// Whether a failed stream runs it all the same, since others wait for it.
static inline bool td_op_signals(const td_op *op) {
  return op->kind == TD_OP_SIGNAL || op->kind == TD_OP_POST;
}

typedef enum { TD_STREAM_USUAL, TD_STREAM_URGENT, TD_STREAM_CONFINABLE } td_stream_kind;

typedef struct {
  void (*close)(td_dev *dev);
  int (*node)(const td_dev *dev);      // NULL: none
  int (*gpu_index)(const td_dev *dev); // NULL, as the next: not a GPU
  void *(*stream_native)(td_stream *stream);
  // NULL, as the next two: the device has no host threads.
  void (*follow_threads)(td_dev *dev, const _Atomic uint32_t *n_threads);
  void (*use_stripes)(td_dev *dev, const td_stripes *stripes);
  void (*count_reads)(td_dev *dev, td_dev_reads *reads);
  td_status (*alloc)(td_dev *dev, void **out, size_t n_bytes, td_err *err);
  void (*free)(td_dev *dev, void *ptr);
  td_status (*alloc_host)(td_dev *dev, void **out, size_t n_bytes, td_err *err);
  void (*free_host)(td_dev *dev, void *ptr);
  // NULL: processors of other devices of this kind reach all its memory
  bool (*is_reached_by)(td_dev *dev, td_dev *from);
  // NULL: it has no memory of its own
  void (*own_memory)(td_dev *dev, size_t *n_free, size_t *total);
  void (*drop_weights)(td_dev *dev); // NULL: it has no copies
  // NULL, as the next four: nothing to register
  void (*pin)(td_dev *dev, const void *host, size_t n_bytes, bool is_writable);
  bool (*is_pinning)(td_dev *dev, const void *host, size_t n_bytes);
  void (*wait_pinned)(td_dev *dev, const void *host, size_t n_bytes);
  void (*stop_pinning)(td_dev *dev);
  void (*follow_pins)(td_dev *dev, td_dev *of);
  // NULL, as the next: all host memory will do
  td_status (*register_host)(td_dev *dev, void *host, size_t n_bytes, td_err *err);
  void (*unregister_host)(td_dev *dev, void *host);
  bool (*takes_on_device)(const td_dev *dev, const td_weight *w); // NULL: accepts any
  td_status (*stream_open)(td_stream **out, td_dev *dev, td_stream_kind kind, td_err *err);
  bool (*stream_confine)(td_stream *stream, bool is_confined); // NULL: the device has no shares
  void (*stream_close)(td_stream *stream);
  td_status (*stream_sync)(td_stream *stream, td_err *err);
  // NULL: always calls enqueue.
  void (*stream_run)(td_stream *stream, const td_work_key *key, void (*enqueue)(void *ctx),
                     void *ctx);
  td_status (*event_open)(td_event **out, td_dev *dev, td_err *err);
  void (*event_close)(td_event *event);
  void (*event_record)(td_event *event, td_stream *stream);
  // The event may belong to another device of the same kind.
  void (*stream_wait)(td_stream *stream, td_event *event);
  void (*event_sync)(td_event *event);
  bool (*event_is_done)(td_event *event);
  void (*enqueue)(td_stream *stream, const td_op *op);
} td_dev_vtable;

struct td_dev {
  const td_dev_vtable *vtable;
  td_dtype act_dtype;
  double link_gbps;              // 0: none, or unknown
  bool adds_f16;                 // see td_dev_adds_f16
  bool is_in_group;              // see td_dev_set_in_group
  _Atomic uint32_t *pulse;       // see td_dev_set_progress_counter
  _Atomic uint32_t unseen_pulse; // used until a counter is set
  char name[64];
};

struct td_stream {
  td_dev *dev;
};

struct td_event {
  td_dev *dev;
};

td_status td_cpu_dev_open(td_dev **out, const td_dev_opts *opts, td_err *err);
td_status td_cuda_dev_open(td_dev **out, const td_dev_opts *opts, td_err *err);
