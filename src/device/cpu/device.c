// src/device/cpu/device.c - opening the CPU device, its memory, and the choice of kernels.
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/env.h"
#include "device/cpu/cpu.h"

enum { HUGE_PAGE_BYTES = 2 << 20 };

static pthread_mutex_t kernels_lock = PTHREAD_MUTEX_INITIALIZER;

void td_dev_ask_for_tiles(void) {
#ifdef SYS_arch_prctl
  enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; // asm/prctl.h; a state component of XSAVE
  if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0) td_kernels_grant_tiles();
#endif
}

static td_status choose_kernels(td_activations activations, td_err *err) {
  const char *force = td_test_var_get(TD_ENV_FORCE_ISA);
  pthread_mutex_lock(&kernels_lock);
  td_dev_ask_for_tiles();
  td_kernels_result result = td_kernels()->isa ? TD_KERNELS_OK : td_kernels_init(force);
  if (result == TD_KERNELS_OK) td_kernels_use_activations(activations);
  pthread_mutex_unlock(&kernels_lock);
  switch (result) {
  case TD_KERNELS_OK: return TD_OK;
  case TD_KERNELS_ISA_ABSENT:
    return td_fail(err, TD_EUNSUPPORTED, "TANDEM_FORCE_ISA=%s: this machine does not have it",
                   force);
  case TD_KERNELS_FOREIGN:
    return td_fail(err, TD_EUNSUPPORTED,
                   "this program was built for a CPU with %s, which this machine does not have: "
                   "build it here, or with -DTD_ISAS=all",
                   td_kernels_isas()[0]);
  case TD_KERNELS_UNKNOWN_ISA: break;
  }
  char names[128] = "";
  size_t len = 0;
  for (const char *const *isa = td_kernels_isas(); *isa && len < sizeof names; isa++)
    len += (size_t)snprintf(names + len, sizeof names - len, "%s%s", len ? ", " : "", *isa);
  return td_fail(err, TD_EINVAL, "TANDEM_FORCE_ISA=%s: use one of %s", force, names);
}

static td_status cpu_alloc(td_dev *dev, void **out, size_t n_bytes, td_err *err) {
  (void)dev;
  size_t alignment = n_bytes >= HUGE_PAGE_BYTES ? HUGE_PAGE_BYTES : 64;
  if (posix_memalign(out, alignment, n_bytes ? n_bytes : 1) != 0) {
    *out = NULL;
    return td_fail(err, TD_ENOMEM, "out of memory: %zu bytes for the CPU device", n_bytes);
  }
  if (n_bytes >= HUGE_PAGE_BYTES) madvise(*out, n_bytes, MADV_HUGEPAGE);
  return TD_OK;
}

static void cpu_free(td_dev *dev, void *ptr) {
  (void)dev;
  free(ptr);
}

static void cpu_close(td_dev *base) {
  td_cpu_dev *dev = (td_cpu_dev *)base;
  while (dev->streams) {
    td_cpu_stream *stream = dev->streams;
    TD_CHECK(!stream->open);
    dev->streams = stream->next;
    td_cpu_stream_free(stream);
  }
  td_thread_pool_close(dev->pool);
  td_cpu_tuner_close(dev->tuner);
  pthread_mutex_destroy(&dev->lock);
  free(dev);
}

static void cpu_follow_threads(td_dev *dev, const _Atomic uint32_t *n_threads) {
  td_thread_pool_set_limit(((td_cpu_dev *)dev)->pool, n_threads);
}

static void cpu_use_stripes(td_dev *dev, const td_stripes *stripes) {
  ((td_cpu_dev *)dev)->stripes = *stripes;
}

static void cpu_count_reads(td_dev *dev, td_dev_reads *reads) {
  ((td_cpu_dev *)dev)->reads = reads;
}

static const td_dev_vtable vtable = {
    .close = cpu_close,
    .follow_threads = cpu_follow_threads,
    .use_stripes = cpu_use_stripes,
    .count_reads = cpu_count_reads,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .alloc_host = cpu_alloc,
    .free_host = cpu_free,
    .stream_open = td_cpu_stream_open,
    .stream_close = td_cpu_stream_close,
    .stream_sync = td_cpu_stream_sync,
    .event_open = td_cpu_event_open,
    .event_close = td_cpu_event_close,
    .event_record = td_cpu_event_record,
    .stream_wait = td_cpu_stream_wait,
    .event_sync = td_cpu_event_sync,
    .event_is_done = td_cpu_event_is_done,
    .enqueue = td_cpu_enqueue,
};

td_status td_cpu_dev_open(td_dev **out, const td_dev_opts *opts, td_err *err) {
  td_status status = choose_kernels(opts->activations, err);
  if (status != TD_OK) return status;
  td_cpu_dev *dev = calloc(1, sizeof *dev);
  if (!dev) return td_fail(err, TD_ENOMEM, "out of memory for a CPU device");
  dev->base.vtable = &vtable;
  dev->base.act_dtype = TD_F32;
  pthread_mutex_init(&dev->lock, NULL);
  dev->nodes = opts->nodes ? *opts->nodes : td_nodes_get();
  dev->base.pulse = &dev->base.unseen_pulse;
  const td_thread_pool_opts pool = {.n_threads = opts->n_threads,
                                    .pin = true,
                                    .from_end = opts->cpus_from_end,
                                    .nodes = &dev->nodes};
  status = td_thread_pool_open(&dev->pool, &pool, err);
  if (status == TD_OK) dev->tuner = td_cpu_tuner_open();
  if (status == TD_OK && !dev->tuner)
    status = td_fail(err, TD_ENOMEM, "out of memory for a CPU device");
  if (status != TD_OK) {
    cpu_close(&dev->base);
    return status;
  }
  static const char *const suffix[TD_N_ACTIVATIONS] = {", FP32", "", "+int8", ""};
  snprintf(dev->base.name, sizeof dev->base.name, "cpu, %u threads, %s%s",
           td_thread_pool_size(dev->pool), td_kernels()->isa, suffix[opts->activations]);
  *out = &dev->base;
  return TD_OK;
}
