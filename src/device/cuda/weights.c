// src/device/cuda/weights.c - copies of weights on the GPU, found by host address.
#include <math.h>
#include <stdlib.h>

#include "base/units.h"
#include "device/cuda/cuda.h"
#include "model/a8.h"

static size_t slot_of(const td_cuda_dev *dev, const void *host, size_t n_bytes) {
  uint64_t key = (uint64_t)(uintptr_t)host * 0x9e3779b97f4a7c15u ^ n_bytes;
  size_t slot = (size_t)(key >> 20) & (dev->n_slots - 1);
  while (dev->copies[slot].host &&
         (dev->copies[slot].host != host || dev->copies[slot].n_bytes != n_bytes))
    slot = (slot + 1) & (dev->n_slots - 1);
  return slot;
}

// Grows the hash table to keep at least half of the slots empty.
static td_status grow(td_cuda_dev *dev, td_err *err) {
  if (2 * (dev->n_copies + 1) <= dev->n_slots) return TD_OK;
  td_cuda_copy *old = dev->copies;
  size_t n_old = dev->n_slots, n_slots = n_old ? 2 * n_old : 1024;
  td_cuda_copy *copies = calloc(n_slots, sizeof *copies);
  if (!copies) return td_fail(err, TD_ENOMEM, "no memory for the table of weights on the GPU");
  dev->copies = copies;
  dev->n_slots = n_slots;
  for (size_t i = 0; i < n_old; i++)
    if (old[i].host) dev->copies[slot_of(dev, old[i].host, old[i].n_bytes)] = old[i];
  free(old);
  return TD_OK;
}

// A copy that would leave much of its last page unused shares a larger allocation with others.
enum { SHARED_PIECE_BYTES = 64 << 20, COPY_ALIGN = 256 };

static td_status add_piece(td_cuda_dev *dev, size_t n_bytes, void **out) {
  void **grown = realloc(dev->pieces, (dev->n_pieces + 1) * sizeof *grown);
  if (!grown) return TD_ENOMEM;
  dev->pieces = grown;
  td_cuda_settle(dev);
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

static td_status does_not_fit(const td_cuda_dev *dev, size_t n_bytes, td_err *err) {
  return td_fail(
      err, TD_ENOMEM,
      "the model's weights do not fit the GPU: %.1f GiB of %.1f GiB hold weights, and %zu "
      "bytes more do not go in; use --device cpu",
      td_gib(dev->copied_bytes), td_gib(dev->props.total_bytes), n_bytes);
}

// Lock held, here and in all functions below. The memory stays allocated until the device closes.
static td_status upload(td_cuda_dev *dev, const void *host, size_t n_bytes, void **out,
                        td_err *err) {
  if (reserve(dev, n_bytes, out) != TD_OK) {
    *out = NULL;
    return does_not_fit(dev, n_bytes, err);
  }
  int code = td_cuda_copy_from(dev, *out, host, n_bytes, dev->upload);
  int sync_code = dev->abi->stream_sync(dev->upload);
  return td_cuda_result(dev, code ? code : sync_code, "copying weights to the GPU", err);
}

// The table slot of host memory that has a copy or will get one.
static td_status slot_for(td_cuda_dev *dev, const void *host, size_t n_bytes, td_cuda_copy **out,
                          td_err *err) {
  td_status status = grow(dev, err);
  if (status == TD_OK) *out = &dev->copies[slot_of(dev, host, n_bytes)];
  return status;
}

static void fill_slot(td_cuda_dev *dev, td_cuda_copy *slot, const void *host, void *device,
                      size_t n_bytes) {
  *slot = (td_cuda_copy){.host = host, .device = device, .n_bytes = n_bytes};
  dev->n_copies++;
  dev->copied_bytes += n_bytes;
}

static td_status find_or_copy(td_cuda_dev *dev, const void *host, size_t n_bytes, const void **out,
                              td_err *err) {
  td_cuda_copy *copy;
  void *device;
  td_status status = slot_for(dev, host, n_bytes, &copy, err);
  if (status == TD_OK && !copy->host) {
    status = upload(dev, host, n_bytes, &device, err);
    if (status == TD_OK) fill_slot(dev, copy, host, device, n_bytes);
  }
  if (status == TD_OK) *out = copy->device;
  return status;
}

const void *td_cuda_on_device(td_cuda_dev *dev, const void *host, size_t n_bytes, td_status *status,
                              td_err *err) {
  const void *out = NULL;
  if (*status != TD_OK || !host || n_bytes == 0) return NULL;
  pthread_mutex_lock(&dev->lock);
  *status = find_or_copy(dev, host, n_bytes, &out, err);
  pthread_mutex_unlock(&dev->lock);
  return out;
}

static bool has_copy(const td_cuda_dev *dev, const void *host, size_t n_bytes) {
  return dev->n_slots > 0 && dev->copies[slot_of(dev, host, n_bytes)].host;
}

static bool has_extreme_scales(const td_weight *w) {
  const uint8_t *codes = w->scale;
  for (size_t i = 0; i < td_weight_scale_bytes(w); i++)
    if (codes[i] < 127 + TD_CU_E8M0_LEAST || codes[i] > 127 + TD_CU_E8M0_MOST) return true;
  return false;
}

// MXFP4 scales outside the range of the MXFP4 kernels are widened to F32, for the kernels of any
// format.
static td_status put_wide_scales(td_cuda_dev *dev, const td_weight *host, td_weight *out,
                                 td_err *err) {
  const size_t n = td_weight_scale_bytes(host), n_bytes = n * sizeof(float);
  td_cuda_copy *copy;
  td_status status = slot_for(dev, host->scale, n_bytes, &copy, err);
  if (status == TD_OK && !copy->host) {
    void *device = NULL;
    float *wide = malloc(n_bytes);
    if (!wide) return td_fail(err, TD_ENOMEM, "no memory for scales");
    const uint8_t *codes = host->scale;
    for (size_t i = 0; i < n; i++)
      wide[i] = codes[i] == UINT8_MAX ? NAN : ldexpf(1, codes[i] - 127);
    status = upload(dev, wide, n_bytes, &device, err);
    free(wide);
    if (status == TD_OK) fill_slot(dev, copy, host->scale, device, n_bytes);
  }
  if (status != TD_OK) return status;
  out->scale = copy->device;
  out->scale_dtype = TD_F32;
  return TD_OK;
}

static td_status put_scales(td_cuda_dev *dev, const td_weight *host, td_weight *out, td_err *err) {
  const size_t n_bytes = td_weight_scale_bytes(host);
  if (host->dtype != TD_F4E2M1 || host->scale_dtype != TD_F8E8M0) {
    td_status status = TD_OK;
    out->scale = td_cuda_on_device(dev, host->scale, n_bytes, &status, err);
    return status;
  }
  pthread_mutex_lock(&dev->lock);
  const bool is_wide = !has_copy(dev, host->scale, n_bytes) &&
                       (has_copy(dev, host->scale, n_bytes * sizeof(float)) ||
                        has_extreme_scales(host));
  td_status status = is_wide ? put_wide_scales(dev, host, out, err)
                             : find_or_copy(dev, host->scale, n_bytes, &out->scale, err);
  pthread_mutex_unlock(&dev->lock);
  return status;
}

// True unless the copy must have its scales widened.
bool td_cuda_takes_on_device(const td_dev *dev, const td_weight *w) {
  (void)dev;
  return w->dtype != TD_F4E2M1 || w->scale_dtype != TD_F8E8M0 || !has_extreme_scales(w);
}

td_status td_cuda_weight(td_cuda_dev *dev, const td_weight *host, const char *what, td_weight *out,
                         td_err *err) {
  td_status status = td_dev_check_weight(host, what, err);
  if (status != TD_OK) return status;
  *out = *host;
  out->data = td_cuda_on_device(dev, host->data, td_weight_data_bytes(host), &status, err);
  if (status == TD_OK) status = put_scales(dev, host, out, err);
  out->zero = td_cuda_on_device(dev, host->zero, td_weight_zero_bytes(host), &status, err);
  return status;
}

td_status td_cuda_weight_at(td_cuda_dev *dev, const td_weight *w, bool weights_on_device,
                            const char *what, td_weight *out, td_err *err) {
  if (!weights_on_device) return td_cuda_weight(dev, w, what, out, err);
  *out = *w;
  return td_dev_check_weight(w, what, err);
}

void td_cuda_vec(td_cuda_dev *dev, td_vec *v, td_status *status, td_err *err) {
  v->data = td_cuda_on_device(dev, v->data, v->n * td_dtype_bytes(v->dtype), status, err);
}

// The load method that suits w and the experts before it; first is one of those.
static td_cu_read read_with(td_cu_read so_far, const td_weight *w, const td_weight *first) {
  td_cu_read read = td_cuda_read_of(w, true);
  bool is_alike = w->dtype == first->dtype && w->scale_dtype == first->scale_dtype &&
                  w->scale_cols == first->scale_cols && (w->zero != NULL) == (first->zero != NULL);
  return is_alike && read == so_far ? read : TD_CU_READ_ANY;
}

// Puts one expert into the table and checks that its shape is that of the first.
static td_status take_expert(td_cuda_dev *dev, const td_moe_args *a, uint32_t e, td_weight *table,
                             td_cuda_experts *out, td_err *err) {
  const uint32_t n = td_cuda_n_matrices(a);
  td_weight *gate = &table[e], *up = &table[n + e], *down = &table[2 * n + e];
  const bool is_here = a->weights_on_device;
  td_status status = td_cuda_weight_at(dev, &a->gate[e], is_here, "expert gate", gate, err);
  *up = (td_weight){.data = NULL};
  if (status == TD_OK && !a->pairs)
    status = td_cuda_weight_at(dev, &a->up[e], is_here, "expert up", up, err);
  if (status == TD_OK)
    status = td_cuda_weight_at(dev, &a->down[e], is_here, "expert down", down, err);
  if (status != TD_OK) return td_err_prefix(err, "expert %u", e);
  const uint32_t hidden = a->pairs ? gate->rows / 2 : gate->rows;
  TD_DEV_REQUIRE((a->pairs || (up->rows == gate->rows && up->cols == gate->cols)) &&
                     down->rows == gate->cols && down->cols == hidden &&
                     (gate->rows == table[0].rows && gate->cols == table[0].cols &&
                      (gate->scale != NULL) == (table[0].scale != NULL)),
                 "expert %u: its shapes are not those of the first one", e);
  const td_activations a8 = td_weight_a8(gate);
  const bool is_alike = td_weight_a8(down) == a8 && (a->pairs || td_weight_a8(up) == a8) &&
                        (e == 0 || out->a8 == a8);
  out->a8 = is_alike ? a8 : TD_ACTIVATIONS_AUTO;
  if (e == 0) {
    out->read_gate = td_cuda_read_of(gate, true);
    out->read_down = td_cuda_read_of(down, true);
  }
  out->read_gate = read_with(out->read_gate, gate, &table[0]);
  if (!a->pairs) out->read_gate = read_with(out->read_gate, up, &table[0]);
  out->read_down = read_with(out->read_down, down, &table[2 * n]);
  return TD_OK;
}

static const void *key_of(const td_moe_args *a) {
  return a->weights_on_device ? (const void *)a->gate : a->gate[0].data;
}

static td_status make_experts(td_cuda_dev *dev, const td_moe_args *a, td_cuda_experts *out,
                              td_err *err) {
  const uint32_t n = td_cuda_n_matrices(a);
  size_t n_bytes = (size_t)3 * n * sizeof(td_weight);
  td_weight *table = malloc(n_bytes);
  if (!table) return td_fail(err, TD_ENOMEM, "no memory for the table of experts");
  *out = (td_cuda_experts){.key = key_of(a), .n_experts = n};
  td_status status = TD_OK;
  for (uint32_t e = 0; e < n && status == TD_OK; e++)
    status = take_expert(dev, a, e, table, out, err);
  void *device = NULL;
  pthread_mutex_lock(&dev->lock);
  if (status == TD_OK) status = upload(dev, table, n_bytes, &device, err);
  pthread_mutex_unlock(&dev->lock);
  if (status == TD_OK) {
    out->device = device;
    out->gate = table[0];
    out->up = table[n];
    out->down = table[2 * n];
  }
  free(table);
  return status;
}

// Whether x describes a's experts. An array of on-device matrices may since hold other experts at
// the same address, so it is compared too.
static bool is_of(const td_cuda_experts *x, const td_moe_args *a) {
  if (x->key != key_of(a) || x->n_experts != td_cuda_n_matrices(a)) return false;
  const td_weight *here = &x->gate, *asked = &a->gate[0];
  return !a->weights_on_device || (here->data == asked->data && here->dtype == asked->dtype &&
                                   here->rows == asked->rows && here->cols == asked->cols);
}

static const td_cuda_experts *find_experts(const td_cuda_dev *dev, const td_moe_args *a) {
  for (size_t i = 0; i < dev->n_experts; i++)
    if (is_of(&dev->experts[i], a)) return &dev->experts[i];
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
  dev->pieces = NULL;
  dev->copies = NULL;
  dev->experts = NULL;
  dev->shared_piece = NULL;
  dev->n_pieces = dev->n_copies = dev->n_slots = dev->n_experts = 0;
  dev->copied_bytes = dev->shared_bytes = 0;
}

void td_cuda_weights_drop(td_dev *base) {
  td_cuda_dev *dev = (td_cuda_dev *)base;
  td_cuda_use(dev);
  pthread_mutex_lock(&dev->lock);
  td_cuda_weights_close(dev);
  dev->n_drops++;
  pthread_mutex_unlock(&dev->lock);
}
