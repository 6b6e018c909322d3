// src/device/cuda/weights.c - which host memory has a copy on the GPU, found by its address.
#include <stdlib.h>

#include "device/cuda/cuda.h"

static size_t slot_of(const td_cuda_dev *dev, const void *host, size_t n_bytes) {
  uint64_t key = (uint64_t)(uintptr_t)host * 0x9e3779b97f4a7c15u ^ n_bytes;
  size_t slot = (size_t)(key >> 20) & (dev->n_slots - 1);
  while (dev->copies[slot].host &&
         (dev->copies[slot].host != host || dev->copies[slot].n_bytes != n_bytes))
    slot = (slot + 1) & (dev->n_slots - 1);
  return slot;
}

// Keeps at least half of the slots free.
static td_status grow(td_cuda_dev *dev, td_err *err) {
  if (2 * (dev->n_copies + 1) <= dev->n_slots) return TD_OK;
  td_cuda_copy *old = dev->copies;
  size_t n_old = dev->n_slots, n_slots = n_old ? 2 * n_old : 1024;
  td_cuda_copy *copies = calloc(n_slots, sizeof *copies);
  if (!copies) return td_fail(err, TD_ENOMEM, "no memory for the table of weights on the GPU");
  dev->copies = copies;
  dev->n_slots = n_slots;
  for (size_t i = 0; i < n_old; i++) {
    if (old[i].host) dev->copies[slot_of(dev, old[i].host, old[i].n_bytes)] = old[i];
  }
  free(old);
  return TD_OK;
}

// A copy that would leave much of its last page empty shares a larger piece with others.
enum { SHARED_PIECE_BYTES = 64 << 20, COPY_ALIGN = 256 };

static td_status add_piece(td_cuda_dev *dev, size_t n_bytes, void **out) {
  void **grown = realloc(dev->pieces, (dev->n_pieces + 1) * sizeof *grown);
  if (!grown) return TD_ENOMEM;
  dev->pieces = grown;
  if (dev->abi->alloc(out, n_bytes) != 0) return TD_ENOMEM;
  dev->pieces[dev->n_pieces++] = *out;
  return TD_OK;
}

static td_status reserve(td_cuda_dev *dev, size_t n_bytes, void **out) {
  size_t n = (n_bytes + COPY_ALIGN - 1) / COPY_ALIGN * COPY_ALIGN;
  size_t empty = dev->page_bytes - 1 - (n - 1) % dev->page_bytes;
  if (n >= SHARED_PIECE_BYTES || empty < n / 16) return add_piece(dev, n, out);
  if (n > dev->shared_bytes) {
    void *piece;
    if (add_piece(dev, SHARED_PIECE_BYTES, &piece) != TD_OK) return add_piece(dev, n, out);
    dev->shared_piece = piece;
    dev->shared_bytes = SHARED_PIECE_BYTES;
  }
  *out = dev->shared_piece;
  dev->shared_piece += n;
  dev->shared_bytes -= n;
  return TD_OK;
}

// With the lock held. The memory stays reserved until the device is closed.
static td_status upload(td_cuda_dev *dev, const void *host, size_t n_bytes, void **out,
                        td_err *err) {
  if (reserve(dev, n_bytes, out) != TD_OK) {
    *out = NULL;
    return td_fail(err, TD_ENOMEM,
                   "the model's weights do not fit the GPU: %.1f GiB of %.1f GiB hold weights, and "
                   "%zu bytes more do not go in; use --device cpu",
                   (double)dev->copied_bytes / (1 << 30),
                   (double)dev->props.total_bytes / (1 << 30), n_bytes);
  }
  int code = dev->abi->copy(*out, host, n_bytes, dev->upload);
  int sync_code = dev->abi->stream_sync(dev->upload);
  return td_cuda_result(dev, code ? code : sync_code, "copying weights to the GPU", err);
}

// With the lock held.
static td_status find_or_copy(td_cuda_dev *dev, const void *host, size_t n_bytes, const void **out,
                              td_err *err) {
  td_status status = grow(dev, err);
  if (status != TD_OK) return status;
  td_cuda_copy *copy = &dev->copies[slot_of(dev, host, n_bytes)];
  if (!copy->host) {
    void *device;
    status = upload(dev, host, n_bytes, &device, err);
    if (status != TD_OK) return status;
    *copy = (td_cuda_copy){.host = host, .device = device, .n_bytes = n_bytes};
    dev->n_copies++;
    dev->copied_bytes += n_bytes;
  }
  *out = copy->device;
  return TD_OK;
}

td_status td_cuda_on_device(td_cuda_dev *dev, const void *host, size_t n_bytes, const void **out,
                            td_err *err) {
  *out = NULL;
  if (!host || n_bytes == 0) return TD_OK;
  pthread_mutex_lock(&dev->lock);
  td_status status = find_or_copy(dev, host, n_bytes, out, err);
  pthread_mutex_unlock(&dev->lock);
  return status;
}

td_status td_cuda_weight(td_cuda_dev *dev, const td_weight *host, const char *what, td_weight *out,
                         td_err *err) {
  td_status status = td_dev_check_weight(host, what, err);
  if (status != TD_OK) return status;
  *out = *host;
  status = td_cuda_on_device(dev, host->data, td_weight_data_bytes(host), &out->data, err);
  if (status == TD_OK) {
    status = td_cuda_on_device(dev, host->scale, td_weight_scale_bytes(host), &out->scale, err);
  }
  const void *zero = NULL;
  if (status == TD_OK) {
    status = td_cuda_on_device(dev, host->zero, td_weight_zero_bytes(host), &zero, err);
  }
  out->zero = zero;
  return status;
}

td_status td_cuda_vec(td_cuda_dev *dev, const td_vec *host, td_vec *out, td_err *err) {
  *out = *host;
  size_t n_bytes = host->n * td_dtype_bytes(host->dtype);
  return td_cuda_on_device(dev, host->data, n_bytes, &out->data, err);
}

// What reading allows for both.
static td_cu_read both(td_cu_read a, td_cu_read b) {
  return a == b ? a : TD_CU_READ_ANY;
}

static bool same_shape(const td_weight *a, const td_weight *b) {
  return a->rows == b->rows && a->cols == b->cols && (a->scale != NULL) == (b->scale != NULL);
}

// Copies one expert and checks that it is shaped like the first.
static td_status take_expert(td_cuda_dev *dev, const td_moe_args *a, uint32_t e, td_weight *table,
                             td_cuda_experts *out, td_err *err) {
  td_weight *gate = &table[e], *up = &table[a->n_experts + e], *down = &table[2 * a->n_experts + e];
  td_status status = td_cuda_weight(dev, &a->gate[e], "expert gate", gate, err);
  if (status == TD_OK) status = td_cuda_weight(dev, &a->up[e], "expert up", up, err);
  if (status == TD_OK) status = td_cuda_weight(dev, &a->down[e], "expert down", down, err);
  if (status != TD_OK) return td_err_prefix(err, "expert %u", e);
  TD_DEV_REQUIRE(up->rows == gate->rows && up->cols == gate->cols && down->rows == gate->cols &&
                     down->cols == gate->rows && same_shape(gate, &table[0]),
                 "expert %u: its shapes are not those of the first one", e);
  td_cu_read gate_read = both(td_cuda_read_of(gate, true), td_cuda_read_of(up, true));
  td_cu_read down_read = td_cuda_read_of(down, true);
  out->read_gate = e == 0 ? gate_read : both(out->read_gate, gate_read);
  out->read_down = e == 0 ? down_read : both(out->read_down, down_read);
  return TD_OK;
}

static td_status make_experts(td_cuda_dev *dev, const td_moe_args *a, td_cuda_experts *out,
                              td_err *err) {
  size_t n_bytes = (size_t)3 * a->n_experts * sizeof(td_weight);
  td_weight *table = malloc(n_bytes);
  if (!table) return td_fail(err, TD_ENOMEM, "no memory for the table of experts");
  *out = (td_cuda_experts){.key = a->gate[0].data, .n_experts = a->n_experts};
  td_status status = TD_OK;
  for (uint32_t e = 0; e < a->n_experts && status == TD_OK; e++)
    status = take_expert(dev, a, e, table, out, err);
  void *device = NULL;
  pthread_mutex_lock(&dev->lock);
  if (status == TD_OK) status = upload(dev, table, n_bytes, &device, err);
  pthread_mutex_unlock(&dev->lock);
  if (status == TD_OK) {
    out->device = device;
    out->gate = table[0];
    out->up = table[a->n_experts];
    out->down = table[2 * a->n_experts];
  }
  free(table);
  return status;
}

static const td_cuda_experts *find_experts(const td_cuda_dev *dev, const td_moe_args *a) {
  for (size_t i = 0; i < dev->n_experts; i++) {
    const td_cuda_experts *x = &dev->experts[i];
    if (x->key == a->gate[0].data && x->n_experts == a->n_experts) return x;
  }
  return NULL;
}

td_status td_cuda_experts_of(td_cuda_dev *dev, const td_moe_args *a, td_cuda_experts *out,
                             td_err *err) {
  pthread_mutex_lock(&dev->lock);
  const td_cuda_experts *found = find_experts(dev, a);
  if (found) *out = *found;
  pthread_mutex_unlock(&dev->lock);
  if (found) return TD_OK;
  td_status status = make_experts(dev, a, out, err);
  if (status != TD_OK) return status;
  pthread_mutex_lock(&dev->lock);
  td_cuda_experts *grown = realloc(dev->experts, (dev->n_experts + 1) * sizeof *grown);
  if (grown) {
    dev->experts = grown;
    dev->experts[dev->n_experts++] = *out;
  }
  pthread_mutex_unlock(&dev->lock);
  return grown ? TD_OK : td_fail(err, TD_ENOMEM, "no memory for the table of experts");
}

void td_cuda_weights_close(td_cuda_dev *dev) {
  for (size_t i = 0; i < dev->n_pieces; i++)
    dev->abi->free(dev->pieces[i]);
  free(dev->pieces);
  free(dev->copies);
  free(dev->experts);
}
