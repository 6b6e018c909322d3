// src/device/device.c - the public functions, dispatched to the device's vtable.
#include "device/device.h"

#include <stdatomic.h>
#include <string.h>

#include "base/log.h"
#include "base/units.h"
#include "device/device_impl.h"

static td_status open_gpu(td_dev **out, const td_dev_opts *opts, td_err *err) {
  td_status status = td_cuda_dev_open(out, opts, err);
  if (status != TD_OK) return status;
  size_t n_free = td_dev_free_vram_bytes(*out);
  if (opts->need_bytes <= n_free) return TD_OK;
  status = td_fail(err, TD_ENOMEM,
                   "%s: the weights take %s there, and %s of its memory are free; give "
                   "--device cpu, or a smaller copy of the model (tandem quantize)",
                   td_dev_name(*out), td_size(opts->need_bytes).text, td_size(n_free).text);
  td_dev_close(*out);
  *out = NULL;
  return status;
}

static td_status open_best(td_dev **out, const td_dev_opts *opts, td_err *err) {
  td_err why;
  if (open_gpu(out, opts, &why) == TD_OK) return TD_OK;
  td_info("no usable GPU (%s); running on the CPU", why.msg);
  return td_cpu_dev_open(out, opts, err);
}

static const struct {
  const char *kind;
  td_status (*open)(td_dev **out, const td_dev_opts *opts, td_err *err);
} kinds[] = {
    {"cpu", td_cpu_dev_open},
    {"cuda", open_gpu},
    {"auto", open_best},
};

td_status td_dev_open(td_dev **out, const td_dev_opts *opts, td_err *err) {
  *out = NULL;
  for (size_t i = 0; i < TD_COUNT(kinds); i++)
    if (strcmp(kinds[i].kind, opts->kind) == 0) return kinds[i].open(out, opts, err);
  return td_fail(err, TD_EUNSUPPORTED, "no device of kind '%s'; use cpu, cuda or auto", opts->kind);
}

void td_dev_close(td_dev *dev) {
  if (dev) dev->vtable->close(dev);
}

const char *td_dev_name(const td_dev *dev) {
  return dev->name;
}

double td_dev_link_gbps(const td_dev *dev) {
  return dev->link_gbps;
}

bool td_dev_adds_f16(const td_dev *dev) {
  return dev->adds_f16;
}

int td_dev_node(const td_dev *dev) {
  return dev->vtable->node ? dev->vtable->node(dev) : -1;
}

int td_dev_gpu_index(const td_dev *dev) {
  return dev->vtable->gpu_index ? dev->vtable->gpu_index(dev) : -1;
}

void *td_stream_native(td_stream *stream) {
  const td_dev_vtable *vtable = stream->dev->vtable;
  return vtable->stream_native ? vtable->stream_native(stream) : NULL;
}

td_dtype td_dev_act_dtype(const td_dev *dev) {
  return dev->act_dtype;
}

td_dtype td_dev_kv_dtype(const td_dev *dev, td_dtype asked) {
  return asked == TD_F32 ? dev->act_dtype : asked;
}

void td_dev_set_thread_limit(td_dev *dev, const _Atomic uint32_t *n_threads) {
  if (dev->vtable->follow_threads) dev->vtable->follow_threads(dev, n_threads);
}

void td_dev_use_stripes(td_dev *dev, const td_stripes *stripes) {
  if (dev->vtable->use_stripes) dev->vtable->use_stripes(dev, stripes);
}

void td_dev_count_reads(td_dev *dev, td_dev_reads *reads) {
  if (dev->vtable->count_reads) dev->vtable->count_reads(dev, reads);
}

void td_dev_set_progress_counter(td_dev *dev, _Atomic uint32_t *pulse) {
  dev->pulse = pulse;
}

void td_dev_set_in_group(td_dev *dev, bool is_in_group) {
  dev->is_in_group = is_in_group;
}

void td_dev_show_progress(td_dev *dev) {
  atomic_fetch_add_explicit(dev->pulse, 1, memory_order_relaxed);
}

td_status td_dev_alloc(td_dev *dev, void **out, size_t n_bytes, td_err *err) {
  *out = NULL;
  return dev->vtable->alloc(dev, out, n_bytes, err);
}

void td_dev_free(td_dev *dev, void *ptr) {
  if (ptr) dev->vtable->free(dev, ptr);
}

td_status td_dev_alloc_host(td_dev *dev, void **out, size_t n_bytes, td_err *err) {
  *out = NULL;
  return dev->vtable->alloc_host(dev, out, n_bytes, err);
}

void td_dev_free_host(td_dev *dev, void *ptr) {
  if (ptr) dev->vtable->free_host(dev, ptr);
}

static td_status zero_inbox(const td_inbox *inbox, td_dev *dev, size_t n_bytes, td_err *err) {
  td_stream *stream;
  td_status st = td_stream_open(&stream, dev, err);
  if (st != TD_OK) return st;
  td_op_fill_zero(stream, inbox->memory, n_bytes);
  st = td_stream_sync(stream, err);
  td_stream_close(stream);
  return st;
}

td_status td_inbox_open(td_inbox *out, td_dev *dev, td_dev *from, size_t n_bytes, td_err *err) {
  TD_CHECK(dev->vtable == from->vtable);
  const bool is_reached = dev == from || !dev->vtable->is_reached_by ||
                          dev->vtable->is_reached_by(dev, from);
  *out = (td_inbox){.is_host = !is_reached};
  td_status st = is_reached ? td_dev_alloc(dev, &out->memory, n_bytes, err)
                            : td_dev_alloc_host(dev, &out->memory, n_bytes, err);
  if (st == TD_OK) st = zero_inbox(out, dev, n_bytes, err);
  if (st != TD_OK) td_inbox_close(out, dev);
  return st;
}

void td_inbox_close(td_inbox *inbox, td_dev *dev) {
  if (inbox->is_host)
    td_dev_free_host(dev, inbox->memory);
  else
    td_dev_free(dev, inbox->memory);
  *inbox = (td_inbox){.memory = NULL};
}

size_t td_dev_free_vram_bytes(td_dev *dev) {
  size_t n_free = 0, total = 0;
  if (dev->vtable->own_memory) dev->vtable->own_memory(dev, &n_free, &total);
  return n_free;
}

size_t td_dev_vram_bytes(td_dev *dev) {
  size_t n_free = 0, total = 0;
  if (dev->vtable->own_memory) dev->vtable->own_memory(dev, &n_free, &total);
  return total;
}

void td_dev_drop_weights(td_dev *dev) {
  if (dev->vtable->drop_weights) dev->vtable->drop_weights(dev);
}

bool td_dev_supports_device_weights(const td_dev *dev, const td_weight *w) {
  return !dev->vtable->takes_on_device || dev->vtable->takes_on_device(dev, w);
}

void td_dev_pin(td_dev *dev, const void *host, size_t n_bytes, bool is_writable) {
  if (dev->vtable->pin && host) dev->vtable->pin(dev, host, n_bytes, is_writable);
}

bool td_dev_is_pinning(td_dev *dev, const void *host, size_t n_bytes) {
  return dev->vtable->is_pinning && dev->vtable->is_pinning(dev, host, n_bytes);
}

void td_dev_wait_pinned(td_dev *dev, const void *host, size_t n_bytes) {
  if (dev->vtable->wait_pinned) dev->vtable->wait_pinned(dev, host, n_bytes);
}

td_status td_dev_register(td_dev *dev, void *host, size_t n_bytes, td_err *err) {
  return dev->vtable->register_host ? dev->vtable->register_host(dev, host, n_bytes, err) : TD_OK;
}

void td_dev_unregister(td_dev *dev, void *host) {
  if (dev->vtable->unregister_host) dev->vtable->unregister_host(dev, host);
}

void td_dev_follow_pins(td_dev *dev, td_dev *of) {
  TD_CHECK(dev->vtable == of->vtable);
  if (dev->vtable->follow_pins) dev->vtable->follow_pins(dev, of);
}

void td_dev_stop_pinning(td_dev *dev) {
  if (dev->vtable->stop_pinning) dev->vtable->stop_pinning(dev);
}

td_status td_stream_open(td_stream **out, td_dev *dev, td_err *err) {
  *out = NULL;
  return dev->vtable->stream_open(out, dev, TD_STREAM_USUAL, err);
}

td_status td_stream_open_urgent(td_stream **out, td_dev *dev, td_err *err) {
  *out = NULL;
  return dev->vtable->stream_open(out, dev, TD_STREAM_URGENT, err);
}

td_status td_stream_open_confinable(td_stream **out, td_dev *dev, td_err *err) {
  *out = NULL;
  return dev->vtable->stream_open(out, dev, TD_STREAM_CONFINABLE, err);
}

bool td_stream_confine(td_stream *stream, bool is_confined) {
  const td_dev_vtable *vtable = stream->dev->vtable;
  return vtable->stream_confine && vtable->stream_confine(stream, is_confined);
}

void td_stream_close(td_stream *stream) {
  if (stream) stream->dev->vtable->stream_close(stream);
}

td_status td_stream_sync(td_stream *stream, td_err *err) {
  return stream->dev->vtable->stream_sync(stream, err);
}

void td_stream_run(td_stream *stream, const td_work_key *key, void (*enqueue)(void *ctx),
                   void *ctx) {
  if (stream->dev->vtable->stream_run)
    stream->dev->vtable->stream_run(stream, key, enqueue, ctx);
  else
    enqueue(ctx);
}

td_status td_event_open(td_event **out, td_dev *dev, td_err *err) {
  *out = NULL;
  return dev->vtable->event_open(out, dev, err);
}

void td_event_close(td_event *event) {
  if (event) event->dev->vtable->event_close(event);
}

void td_event_record(td_event *event, td_stream *stream) {
  TD_CHECK(event->dev == stream->dev);
  stream->dev->vtable->event_record(event, stream);
}

void td_stream_wait(td_stream *stream, td_event *event) {
  TD_CHECK(event->dev->vtable == stream->dev->vtable);
  stream->dev->vtable->stream_wait(stream, event);
}

void td_event_sync(td_event *event) {
  event->dev->vtable->event_sync(event);
}

bool td_event_is_done(td_event *event) {
  return event->dev->vtable->event_is_done(event);
}

td_linear_op_args td_linear_matrix(const td_linear_op_args *args, uint32_t i) {
  td_linear_op_args out = *args;
  memset(out.also, 0, sizeof out.also);
  if (i == 0) return out;
  out.w = NULL;
  if (i > TD_LINEAR_ALSO) return out;
  const td_linear_also *also = &args->also[i - 1];
  out.w = also->w;
  out.bias = also->bias;
  out.y = also->y;
  out.y_stride = also->y_stride;
  return out;
}

uint64_t td_linear_bytes(const td_linear_op_args *args) {
  uint64_t n = td_weight_data_bytes(args->w);
  for (uint32_t i = 0; i < TD_LINEAR_ALSO && args->also[i].w; i++)
    n += td_weight_data_bytes(args->also[i].w);
  return n;
}

static void enqueue(td_stream *stream, const td_op *op) {
  stream->dev->vtable->enqueue(stream, op);
}

void td_op_copy(td_stream *stream, void *dst, const void *src, size_t n_bytes) {
  enqueue(stream,
          &(td_op){.kind = TD_OP_COPY, .copy = {.dst = dst, .src = src, .n_bytes = n_bytes}});
}

void td_op_copy_direct(td_stream *stream, void *dst, const void *src, size_t n_bytes) {
  enqueue(stream,
          &(td_op){.kind = TD_OP_COPY,
                   .copy = {.dst = dst, .src = src, .n_bytes = n_bytes, .is_direct = true}});
}

void td_op_fill_zero(td_stream *stream, void *dst, size_t n_bytes) {
  enqueue(stream, &(td_op){.kind = TD_OP_FILL_ZERO, .fill_zero = {dst, n_bytes}});
}

void td_op_add(td_stream *stream, void *x, const void *y, size_t n) {
  enqueue(stream, &(td_op){.kind = TD_OP_ADD, .add = {.x = x, .y = y, .n = n}});
}

void td_op_add_scaled(td_stream *stream, void *x, const void *y, size_t n, float factor) {
  enqueue(stream, &(td_op){.kind = TD_OP_ADD, .add = {.x = x, .y = y, .n = n, .factor = factor}});
}

void td_op_add_f32(td_stream *stream, void *x, const float *y, size_t n) {
  enqueue(stream, &(td_op){.kind = TD_OP_ADD, .add = {.x = x, .y = y, .n = n, .y_f32 = true}});
}

void td_op_gather_rows(td_stream *stream, void *out, const void *x, const int32_t *rows,
                       uint32_t n_rows, uint32_t dim) {
  enqueue(stream, &(td_op){.kind = TD_OP_GATHER_ROWS,
                           .gather_rows = {
                               .out = out, .x = x, .rows = rows, .n_rows = n_rows, .dim = dim}});
}

void td_op_signal(td_stream *stream, _Atomic uint32_t *signal, const uint32_t *value) {
  enqueue(stream, &(td_op){.kind = TD_OP_SIGNAL, .signal = {signal, value}});
}

void td_op_await(td_stream *stream, _Atomic uint32_t *signal, const uint32_t *value) {
  enqueue(stream, &(td_op){.kind = TD_OP_AWAIT, .await = {.signal = signal, .value = value}});
}

void td_op_await_or_cancel(td_stream *stream, _Atomic uint32_t *signal, const uint32_t *value,
                           const _Atomic uint32_t *canceled) {
  enqueue(stream, &(td_op){.kind = TD_OP_AWAIT,
                           .await = {.signal = signal, .value = value, .canceled = canceled}});
}

#define X(NAME, name, args_type, ...)                                                              \
  void td_op_##name(td_stream *stream, const args_type *args) {                                    \
    enqueue(stream, &(td_op){.kind = TD_OP_##NAME, .name = *args});                                \
  }
TD_OPS_OF_ARGS(X)
#undef X
