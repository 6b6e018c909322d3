// src/device/cuda/stream.c - streams, events and the dispatch of operators.
#include <stdlib.h>

#include "base/log.h"
#include "device/cuda/cuda.h"

// Call only when nothing runs. Drops the graphs too, since they use that memory.
static void free_retired(td_cuda_stream *stream) {
  if (stream->n_retired == 0) return;
  td_cuda_graphs_drop(stream);
  td_cuda_settle(td_cuda_dev_of(stream));
  while (stream->n_retired > 0)
    td_cuda_dev_of(stream)->abi->free(stream->retired[--stream->n_retired]);
}

static void free_stream(td_cuda_stream *stream) {
  td_cuda_graphs_drop(stream);
  free_retired(stream);
  const td_cu_abi *abi = td_cuda_dev_of(stream)->abi;
  for (int i = 0; i < N_CUDA_SCRATCH; i++)
    if (stream->scratch[i]) abi->free(stream->scratch[i]);
  if (stream->fault) abi->free_host(stream->fault);
  if (stream->first_tile) abi->free_host(stream->first_tile);
  if (stream->counted) abi->event_close(stream->counted);
  if (stream->blas) abi->blas_close(stream->blas);
  if (stream->turn) abi->event_close(stream->turn);
  if (stream->inside) abi->stream_close(stream->inside);
  if (stream->whole) abi->stream_close(stream->whole);
  free(stream);
}

// The device's share, opened by the first stream that asks; NULL: none.
static td_cu_share share_of(td_cuda_dev *dev) {
  pthread_mutex_lock(&dev->lock);
  if (!dev->is_share_sought) {
    dev->is_share_sought = true;
    int n_sms = (int)td_cuda_share_sms((uint32_t)dev->props.n_sms, dev->props.capability), code = 0;
    if (n_sms) code = dev->abi->share_open(&dev->share, dev->index, &n_sms);
    if (dev->share) {
      td_info("%s: prefill beside decode runs on %d of %d SMs (a green context)", dev->base.name,
              n_sms, dev->props.n_sms);
    } else {
      td_info("%s: prefill beside decode yields by stream priority alone, without a green context: "
              "%s",
              dev->base.name,
              !n_sms                       ? "the GPU has too few SMs"
              : code == CUDA_NOT_SUPPORTED ? "the driver has none before CUDA 12.5"
                                           : dev->abi->error_text(code));
    }
  }
  pthread_mutex_unlock(&dev->lock);
  return dev->share;
}

static int open_inside(td_cuda_stream *stream) {
  td_cuda_dev *dev = td_cuda_dev_of(stream);
  td_cu_share share = share_of(dev);
  if (!share) return 0;
  int code = dev->abi->share_stream_open(&stream->inside, share);
  return code == 0 ? dev->abi->event_open(&stream->turn) : code;
}

td_status td_cuda_stream_open(td_stream **out, td_dev *base, td_stream_kind kind, td_err *err) {
  td_cuda_dev *dev = (td_cuda_dev *)base;
  td_cuda_stream *stream = calloc(1, sizeof *stream);
  if (!stream) return td_fail(err, TD_ENOMEM, "no memory for a stream");
  stream->base.dev = base;
  void *fault = NULL;
  td_cuda_use(dev);
  int code = dev->abi->stream_open(&stream->whole, kind == TD_STREAM_URGENT);
  stream->cu = stream->whole;
  if (code == 0 && kind == TD_STREAM_CONFINABLE) code = open_inside(stream);
  if (code == 0) code = dev->abi->alloc_host(&fault, sizeof *stream->fault);
  stream->fault = fault;
  if (fault) *stream->fault = TD_CU_FAULT_NONE;
  if (code != 0) {
    free_stream(stream);
    return td_cuda_result(dev, code, "a stream", err);
  }
  *out = &stream->base;
  return TD_OK;
}

void td_cuda_stream_close(td_stream *base) {
  td_cuda_stream *stream = (td_cuda_stream *)base;
  td_cuda_use(td_cuda_dev_of(stream));
  td_cuda_dev_of(stream)->abi->stream_sync(stream->cu); // nobody is left to report a failure to
  free_stream(stream);
}

static td_status timeout_status(const td_cuda_dev *dev, td_err *err) {
  return td_fail(
      err, TD_EINTERNAL,
      "CUDA: the GPU waited %.3g s for the CPU's experts, and their sum did not come: is "
      "the machine swapping, or are experts read from a slow disk? --weights resident "
      "keeps them in memory",
      (double)dev->await_ns * 1e-9);
}

static td_status fault_status(const td_cuda_dev *dev, td_cu_fault fault, td_err *err) {
  switch (fault) {
  case TD_CU_FAULT_NONE: return TD_OK;
  case TD_CU_FAULT_TOKEN:
    return td_fail(err, TD_EINVAL, "embedding: a token id is not in the vocabulary");
  case TD_CU_FAULT_ROW: return td_fail(err, TD_EINVAL, "gather: a row is negative");
  case TD_CU_FAULT_POSITION:
    return td_fail(err, TD_EINVAL, "batch: a position is negative or beyond its pages");
  case TD_CU_FAULT_PAGE: return td_fail(err, TD_EINVAL, "batch: a page is absent");
  case TD_CU_FAULT_EXPERT: return td_fail(err, TD_EINVAL, "experts: an id is not one of them");
  case TD_CU_FAULT_TIMEOUT: return timeout_status(dev, err);
  case TD_CU_FAULT_CANCELED:
    return td_fail(err, TD_ECANCELED, "canceled while waiting for a signal");
  }
  return td_fail(err, TD_EINTERNAL, "CUDA: fault %d", (int)fault);
}

td_status td_cuda_stream_sync(td_stream *base, td_err *err) {
  td_cuda_stream *stream = (td_cuda_stream *)base;
  td_cuda_dev *dev = td_cuda_dev_of(stream);
  int code = dev->abi->stream_sync(stream->cu);
  if (!stream->is_capturing) free_retired(stream);
  if (stream->err.code == TD_OK) {
    td_err failure = {.code = TD_OK};
    td_status status = td_cuda_result(dev, code, "the stream failed", &failure);
    if (status == TD_OK) status = fault_status(dev, (td_cu_fault)*stream->fault, &failure);
    if (status != TD_OK) stream->err = failure;
  }
  if (stream->err.code != TD_OK && err) *err = stream->err;
  return stream->err.code;
}

td_status td_cuda_event_open(td_event **out, td_dev *base, td_err *err) {
  td_cuda_dev *dev = (td_cuda_dev *)base;
  td_cuda_event *event = calloc(1, sizeof *event);
  if (!event) return td_fail(err, TD_ENOMEM, "no memory for an event");
  event->base.dev = base;
  td_cuda_use(dev);
  td_status status = td_cuda_result(dev, dev->abi->event_open(&event->cu), "an event", err);
  if (status != TD_OK) {
    free(event);
    return status;
  }
  *out = &event->base;
  return TD_OK;
}

void td_cuda_event_close(td_event *base) {
  td_cuda_event *event = (td_cuda_event *)base;
  ((td_cuda_dev *)base->dev)->abi->event_close(event->cu);
  free(event);
}

// Keeps the stream's first failure for its next sync.
static void note(td_cuda_stream *stream, int code, const char *what) {
  if (stream->err.code == TD_OK) td_cuda_result(td_cuda_dev_of(stream), code, what, &stream->err);
}

void td_cuda_event_record(td_event *base, td_stream *base_stream) {
  td_cuda_stream *stream = (td_cuda_stream *)base_stream;
  td_cu_event event = ((td_cuda_event *)base)->cu;
  note(stream, td_cuda_dev_of(stream)->abi->event_record(event, stream->cu), "recording an event");
}

void td_cuda_stream_wait(td_stream *base_stream, td_event *base) {
  td_cuda_stream *stream = (td_cuda_stream *)base_stream;
  td_cu_event event = ((td_cuda_event *)base)->cu;
  note(stream, td_cuda_dev_of(stream)->abi->stream_wait(stream->cu, event), "waiting for an event");
}

bool td_cuda_stream_confine(td_stream *base, bool is_confined) {
  td_cuda_stream *stream = (td_cuda_stream *)base;
  const td_cuda_dev *dev = td_cuda_dev_of(stream);
  td_cu_stream to = is_confined && stream->inside ? stream->inside : stream->whole;
  if (to == stream->cu) return to == stream->inside;
  TD_CHECK(!stream->is_capturing);
  td_cuda_use(dev);
  int code = dev->abi->event_record(stream->turn, stream->cu);
  if (code == 0) code = dev->abi->stream_wait(to, stream->turn);
  if (code == 0 && stream->blas) code = dev->abi->blas_use(stream->blas, to);
  note(stream, code, "moving a stream to other SMs");
  stream->cu = to;
  return to == stream->inside;
}

void td_cuda_event_sync(td_event *base) {
  // On a failed device this returns at once; td_stream_sync reports the failure.
  ((td_cuda_dev *)base->dev)->abi->event_sync(((td_cuda_event *)base)->cu);
}

bool td_cuda_event_is_done(td_event *base) {
  td_cuda_dev *dev = (td_cuda_dev *)base->dev;
  td_cuda_use(dev);
  bool is_done = true;
  dev->abi->event_is_done(((td_cuda_event *)base)->cu, &is_done); // td_stream_sync reports failures
  return is_done;
}

static td_status execute(td_cuda_stream *stream, td_op *op, td_err *err) {
  switch (op->kind) {
#define X(NAME, name, args_type, ...)                                                              \
  case TD_OP_##NAME: return td_cuda_op_##name(stream, &op->name, err);
    TD_OPS(X)
#undef X
  case TD_N_OPS: break;
  }
  return td_fail(err, TD_EINTERNAL, "operator %d does not exist", (int)op->kind);
}

void td_cuda_enqueue(td_stream *base, const td_op *op) {
  td_cuda_stream *stream = (td_cuda_stream *)base;
  if (stream->err.code != TD_OK && !td_op_signals(op)) return;
  td_cuda_use(td_cuda_dev_of(stream));
  td_dev_show_progress(base->dev);
  td_err err = {.code = TD_OK};
  td_op own = *op;
  if (execute(stream, &own, &err) != TD_OK && stream->err.code == TD_OK) stream->err = err;
}

static void wait_and_free_retired(td_cuda_stream *stream) {
  td_cuda_dev_of(stream)->abi->stream_sync(stream->cu); // the next sync reports a failure
  free_retired(stream);
}

void *td_cuda_scratch(td_cuda_stream *stream, td_cuda_scratch_slot slot, size_t n_bytes,
                      td_status *status, td_err *err) {
  void **memory = &stream->scratch[slot];
  if (*status != TD_OK) return NULL;
  if (n_bytes <= stream->scratch_bytes[slot]) return *memory;
  if (stream->is_capturing) {
    *status = td_fail(err, TD_EUNSUPPORTED, "memory grows while work is captured");
    return NULL;
  }
  const td_cu_abi *abi = td_cuda_dev_of(stream)->abi;
  // Operators that use the memory may still run, and freeing it synchronizes the GPU, so it is
  // freed at the end of the step.
  if (*memory) {
    if (stream->n_retired == N_CUDA_RETIRED) wait_and_free_retired(stream);
    stream->retired[stream->n_retired++] = *memory;
  }
  stream->scratch_bytes[slot] = 0;
  size_t grown = n_bytes + n_bytes / 4;
  td_cuda_settle(td_cuda_dev_of(stream)); // memory that other devices reach is mapped there, too
  int code = abi->alloc(memory, grown);
  if (code == CUDA_OUT_OF_MEMORY && stream->n_retired > 0) {
    wait_and_free_retired(stream);
    code = abi->alloc(memory, grown);
  }
  if (code == 0) {
    stream->scratch_bytes[slot] = grown;
    return *memory;
  }
  *memory = NULL;
  *status = td_cuda_result(td_cuda_dev_of(stream), code, "memory of an operator", err);
  if (*status == TD_ENOMEM) { // else the failure of an earlier operator
    *status = td_fail(
        err, TD_ENOMEM,
        "no memory on the GPU for an operator: %zu bytes; make --prefill-chunk smaller", grown);
  }
  return NULL;
}
