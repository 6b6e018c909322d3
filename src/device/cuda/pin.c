// src/device/cuda/pin.c - registers the weights' host memory with the driver, so that the GPU
// copies from it at full bus speed. Registering pins every page, at a few GiB per second, so a
// thread does it piece by piece while the device is in use. A single call for all would also exceed
// the driver's limit of 512 GiB.
//
// Thread: pieces are registered by the device's own thread; all other functions may be called by
// any thread.
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/units.h"
#include "device/cuda/cuda.h"

#define PROGRESS_NS 10000000000u

enum { PIECE_ALIGN = 2 << 20, RESERVE_BYTES = 64 << 20 };

// Drivers on x86 do not support read-only registration (cudaDevAttrHostRegisterReadOnlySupported is
// 0) and reject mappings that are not writable. So the mapping becomes writable during
// registration, which works for shared memory that is not sealed against it. Nothing is written.
static int register_piece(td_cuda_dev *dev, const td_cuda_pin_piece *piece) {
  void *memory = (void *)(uintptr_t)piece->host;
  if (dev->pins.is_writable) return dev->abi->pin(piece->host, piece->n_bytes, false);
  int code = dev->pins.needs_writing ? 1 : dev->abi->pin(piece->host, piece->n_bytes, true);
  if (code == 0 || mprotect(memory, piece->n_bytes, PROT_READ | PROT_WRITE) != 0) return code;
  dev->pins.needs_writing = true;
  code = dev->abi->pin(piece->host, piece->n_bytes, false);
  mprotect(memory, piece->n_bytes, PROT_READ);
  return code;
}

// The first pending piece that is wanted, else the first pending one, else NULL.
static td_cuda_pin_piece *next_piece(td_cuda_pins *p) {
  td_cuda_pin_piece *next = NULL;
  for (size_t i = 0; i < p->n; i++) {
    td_cuda_pin_piece *piece = &p->pieces[i];
    if (piece->state != CUDA_PIN_PENDING) continue;
    if (piece->is_wanted) return piece;
    if (!next) next = piece;
  }
  return next;
}

// Lock held, here and in the next function.
static void refuse_others(td_cuda_pins *p) {
  for (size_t i = 0; i < p->n; i++)
    if (p->pieces[i].state == CUDA_PIN_PENDING) p->pieces[i].state = CUDA_PIN_REFUSED;
  atomic_store(&p->n_pending, 0);
}

// If one piece is rejected, the others would be too: all become CUDA_PIN_REFUSED.
static void end_piece(td_cuda_pins *p, td_cuda_pin_piece *piece, int code) {
  if (piece->state == CUDA_PIN_PENDING) atomic_fetch_sub(&p->n_pending, 1);
  piece->state = code == 0 ? CUDA_PIN_DONE : CUDA_PIN_REFUSED;
  if (code != 0) refuse_others(p);
  pthread_cond_broadcast(&p->moved);
}

// By the thread, or when it has ended.
static void free_reserve(td_cuda_dev *dev) {
  if (dev->pins.reserve) dev->abi->free_host(dev->pins.reserve);
  dev->pins.reserve = NULL;
}

static void *pin_pieces(void *ctx) {
  td_cuda_dev *dev = ctx;
  td_cuda_pins *p = &dev->pins;
  const uint64_t begin_ns = td_clock_ns();
  uint64_t told_ns = begin_ns, done = 0;
  int code = dev->abi->use(dev->index);
  if (code == 0 && dev->abi->alloc_host(&p->reserve, RESERVE_BYTES) != 0) p->reserve = NULL;
  prctl(PR_SET_NAME, "tandem-register");
  pthread_mutex_lock(&p->lock);
  for (td_cuda_pin_piece *piece; !p->is_stopping && (piece = next_piece(p)) != NULL;) {
    pthread_mutex_unlock(&p->lock);
    if (code == 0) code = register_piece(dev, piece);
    if (code == 0) done += piece->n_bytes;
    if (code != 0) free_reserve(dev);
    if (code == 0 && td_clock_ns() - told_ns > PROGRESS_NS) {
      told_ns = td_clock_ns();
      td_info("%s: %.0f of %.0f GiB of weights are registered", dev->base.name, td_gib(done),
              td_gib(p->n_bytes));
    }
    pthread_mutex_lock(&p->lock);
    end_piece(p, piece, code);
  }
  const bool is_stopped = p->is_stopping;
  pthread_mutex_unlock(&p->lock);
  if (code != 0) {
    td_info("%s: %s of %s of weights are registered; copies of the others are slower: %s",
            dev->base.name, td_size(done).text, td_size(p->n_bytes).text,
            dev->abi->error_text(code));
  } else if (!is_stopped) {
    td_info("%s: %s of weights were registered in %.1f s", dev->base.name, td_size(done).text,
            (double)(td_clock_ns() - begin_ns) * 1e-9);
  }
  return NULL;
}

// Pieces end at multiples of their size after a 2 MB boundary, so that no page is in two pieces.
static bool cut_pieces(td_cuda_pins *p, const char *host, size_t n_bytes) {
  const char *grid = host - (uintptr_t)host % PIECE_ALIGN, *end = host + n_bytes;
  const size_t n = (size_t)(end - grid - 1) / p->piece_bytes + 1;
  p->pieces = calloc(n, sizeof *p->pieces);
  if (!p->pieces) return false;
  for (size_t i = 0; i < n; i++) {
    const char *from = grid + i * p->piece_bytes, *to = from + p->piece_bytes;
    if (from < host) from = host;
    if (to > end) to = end;
    p->pieces[i] = (td_cuda_pin_piece){.host = from,
                                       .n_bytes = to > from ? (size_t)(to - from) : 0};
    if (to <= from) p->pieces[i].state = CUDA_PIN_REFUSED; // before the first byte
    p->n_pending += to > from;
  }
  p->base = host;
  p->grid = grid;
  p->n_bytes = n_bytes;
  p->n = n;
  return true;
}

void td_cuda_pin(td_dev *base, const void *host, size_t n_bytes, bool is_writable) {
  td_cuda_dev *dev = (td_cuda_dev *)base;
  td_cuda_pins *p = &dev->pins;
  TD_CHECK(!p->pieces);
  if (n_bytes == 0) return;
  p->is_writable = is_writable;
  if (!cut_pieces(p, host, n_bytes) || pthread_create(&p->thread, NULL, pin_pieces, dev) != 0) {
    td_info("%s: no thread to register weights; copies of them are slower", base->name);
    p->n_pending = 0;
    return;
  }
  p->has_thread = true;
}

// Whether a piece of the range is pending; such pieces are registered next.
static bool want(td_cuda_pins *p, const char *from, size_t n_bytes) {
  const char *to = from + n_bytes, *end = p->base + p->n_bytes;
  if (from < p->base) from = p->base;
  if (to > end) to = end;
  bool is_pending = false;
  for (size_t i = from < to ? (size_t)(from - p->grid) / p->piece_bytes : p->n;
       i < p->n && p->pieces[i].host < to; i++) {
    td_cuda_pin_piece *piece = &p->pieces[i];
    if (piece->state != CUDA_PIN_PENDING) continue;
    is_pending = piece->is_wanted = true;
  }
  return is_pending;
}

// Memory is registered for all devices, by one of them.
static td_cuda_pins *pins_for(td_cuda_dev *dev) {
  return dev->followed ? dev->followed : &dev->pins;
}

void td_cuda_follow_pins(td_dev *base, td_dev *base_of) {
  td_cuda_dev *dev = (td_cuda_dev *)base, *of = (td_cuda_dev *)base_of;
  TD_CHECK(!dev->pins.pieces && dev != of);
  dev->followed = pins_for(of);
}

bool td_cuda_is_pinning(td_dev *base, const void *host, size_t n_bytes) {
  td_cuda_pins *p = pins_for((td_cuda_dev *)base);
  if (atomic_load(&p->n_pending) == 0) return false;
  pthread_mutex_lock(&p->lock);
  const bool is_pending = want(p, host, n_bytes);
  pthread_mutex_unlock(&p->lock);
  return is_pending;
}

void td_cuda_wait_pinned(td_dev *base, const void *host, size_t n_bytes) {
  td_cuda_pins *p = pins_for((td_cuda_dev *)base);
  pthread_mutex_lock(&p->lock);
  while (p->n_pending > 0 && want(p, host, n_bytes))
    pthread_cond_wait(&p->moved, &p->lock);
  pthread_mutex_unlock(&p->lock);
}

int td_cuda_copy_from(const td_cuda_dev *dev, void *dst, const void *src, size_t n_bytes,
                      td_cu_stream stream) {
  const td_cuda_pins *p = dev->followed ? dev->followed : &dev->pins;
  const char *from = src;
  char *to = dst;
  int code = 0;
  do {
    size_t n = n_bytes;
    if (p->pieces && from >= p->base && from < p->base + p->n_bytes) {
      const size_t left = p->piece_bytes - (size_t)(from - p->grid) % p->piece_bytes;
      if (n > left) n = left;
    }
    code = dev->abi->copy(to, from, n, stream);
    from += n;
    to += n;
    n_bytes -= n;
  } while (n_bytes > 0 && code == 0);
  return code;
}

size_t td_cuda_pinned_bytes(td_cuda_dev *dev) {
  td_cuda_pins *p = &dev->pins;
  size_t n = 0;
  pthread_mutex_lock(&p->lock);
  for (size_t i = 0; i < p->n; i++)
    n += p->pieces[i].state == CUDA_PIN_DONE ? p->pieces[i].n_bytes : 0;
  pthread_mutex_unlock(&p->lock);
  return n;
}

void td_cuda_stop_pinning(td_dev *base) {
  td_cuda_pins *p = &((td_cuda_dev *)base)->pins;
  pthread_mutex_lock(&p->lock);
  p->is_stopping = true;
  refuse_others(p);
  pthread_cond_broadcast(&p->moved);
  pthread_mutex_unlock(&p->lock);
}

// In one piece: copies that reached across two would fail.
td_status td_cuda_register(td_dev *base, void *host, size_t n_bytes, td_err *err) {
  td_cuda_dev *dev = (td_cuda_dev *)base;
  td_cuda_use(dev);
  const uint64_t begin_ns = td_clock_ns();
  td_status st = td_cuda_result(dev, dev->abi->pin(host, n_bytes, false),
                                "registering host memory for KV pages", err);
  if (st != TD_OK) return st;
  td_debug("%s: %s of host memory were registered in %.1f s", base->name, td_size(n_bytes).text,
           (double)(td_clock_ns() - begin_ns) * 1e-9);
  return TD_OK;
}

void td_cuda_unregister(td_dev *base, void *host) {
  td_cuda_dev *dev = (td_cuda_dev *)base;
  td_cuda_use(dev);
  if (!dev->pins.is_left_registered) dev->abi->unpin(host);
}

void td_cuda_pins_close(td_cuda_dev *dev) {
  td_cuda_pins *p = &dev->pins;
  td_cuda_stop_pinning(&dev->base);
  if (p->has_thread) pthread_join(p->thread, NULL);
  free_reserve(dev);
  for (size_t i = 0; i < p->n && !p->is_left_registered; i++)
    if (p->pieces[i].state == CUDA_PIN_DONE) dev->abi->unpin(p->pieces[i].host);
  free(p->pieces);
  pthread_mutex_destroy(&p->lock);
  pthread_cond_destroy(&p->moved);
}
