// src/device/cuda/device.c - opening the CUDA device, and its memory.
#include <stdio.h>
#include <stdlib.h>

#include "base/log.h"
#include "base/numa.h"
#include <string.h>

#include "base/env.h"
#include "device/cuda/cuda.h"

enum { PASS_BYTES = 512 << 20, KEYS_BYTES = 256 << 20, PAGE_BYTES = 2 << 20 };
#define AWAIT_NS 20000000000u

td_status td_cuda_result(const td_cuda_dev *dev, int code, const char *what, td_err *err) {
  if (code == 0) return TD_OK;
  return td_fail(err, code == CUDA_OUT_OF_MEMORY ? TD_ENOMEM : TD_EINTERNAL, "CUDA: %s: %s", what,
                 dev->abi->error_text(code));
}

static td_status cuda_alloc(td_dev *base, void **out, size_t n_bytes, td_err *err) {
  td_cuda_dev *dev = (td_cuda_dev *)base;
  td_cuda_use(dev);
  int code = dev->abi->alloc(out, n_bytes ? n_bytes : 1);
  if (code == 0) return TD_OK;
  *out = NULL;
  td_status status = td_cuda_result(dev, code, "memory", err);
  if (status != TD_ENOMEM) return status; // the failure of an earlier operator
  size_t n_free = 0, total = 0;
  dev->abi->memory(&n_free, &total);
  return td_fail(err, TD_ENOMEM, "no memory: %zu bytes on the GPU, which has %zu of %zu left",
                 n_bytes, n_free, total);
}

static void cuda_free(td_dev *base, void *ptr) {
  td_cuda_dev *dev = (td_cuda_dev *)base;
  dev->abi->free(ptr); // synchronizes; a failure is that of an earlier operator
}

static td_status cuda_alloc_host(td_dev *base, void **out, size_t n_bytes, td_err *err) {
  td_cuda_dev *dev = (td_cuda_dev *)base;
  td_cuda_use(dev);
  if (dev->node >= 0) td_nodes_prefer(dev->node);
  int code = dev->abi->alloc_host(out, n_bytes ? n_bytes : 1);
  if (dev->node >= 0) td_nodes_prefer(-1);
  if (code != 0) *out = NULL;
  return td_cuda_result(dev, code, "memory of the host's that it can reach", err);
}

static void cuda_free_host(td_dev *base, void *ptr) {
  ((td_cuda_dev *)base)->abi->free_host(ptr);
}

static bool cuda_is_reached_by(td_dev *base, td_dev *base_from) {
  const td_cuda_dev *dev = (td_cuda_dev *)base, *from = (td_cuda_dev *)base_from;
  if (dev->index == from->index) return true;
  bool is_reached = false;
  td_cuda_use(from);
  return from->abi->reach(dev->index, &is_reached) == 0 && is_reached;
}

static void cuda_own_memory(td_dev *base, size_t *n_free, size_t *total) {
  td_cuda_dev *dev = (td_cuda_dev *)base;
  td_cuda_use(dev);
  dev->abi->memory(n_free, total);
}

static void cuda_close(td_dev *base) {
  td_cuda_dev *dev = (td_cuda_dev *)base;
  td_cuda_pins_close(dev);
  if (dev->abi) {
    td_cuda_weights_close(dev);
    if (dev->share) dev->abi->share_close(dev->share);
    if (dev->upload) dev->abi->stream_close(dev->upload);
  }
  td_cuda_library_close(dev);
  pthread_mutex_destroy(&dev->lock);
  free(dev);
}

static int cuda_node(const td_dev *dev) {
  return ((const td_cuda_dev *)dev)->node;
}

static int cuda_gpu_index(const td_dev *dev) {
  return ((const td_cuda_dev *)dev)->index;
}

static void *cuda_stream_native(td_stream *base) {
  td_cuda_stream *stream = (td_cuda_stream *)base;
  td_cuda_use(td_cuda_dev_of(stream));
  return stream->cu;
}

static const td_dev_vtable vtable = {
    .close = cuda_close,
    .node = cuda_node,
    .gpu_index = cuda_gpu_index,
    .stream_native = cuda_stream_native,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .alloc_host = cuda_alloc_host,
    .free_host = cuda_free_host,
    .is_reached_by = cuda_is_reached_by,
    .own_memory = cuda_own_memory,
    .drop_weights = td_cuda_weights_drop,
    .pin = td_cuda_pin,
    .is_pinning = td_cuda_is_pinning,
    .wait_pinned = td_cuda_wait_pinned,
    .stop_pinning = td_cuda_stop_pinning,
    .follow_pins = td_cuda_follow_pins,
    .register_host = td_cuda_register,
    .unregister_host = td_cuda_unregister,
    .takes_on_device = td_cuda_takes_on_device,
    .stream_open = td_cuda_stream_open,
    .stream_confine = td_cuda_stream_confine,
    .stream_close = td_cuda_stream_close,
    .stream_sync = td_cuda_stream_sync,
    .stream_run = td_cuda_stream_run,
    .event_open = td_cuda_event_open,
    .event_close = td_cuda_event_close,
    .event_record = td_cuda_event_record,
    .stream_wait = td_cuda_stream_wait,
    .event_sync = td_cuda_event_sync,
    .event_is_done = td_cuda_event_is_done,
    .enqueue = td_cuda_enqueue,
};

static void find_place(td_cuda_dev *dev) {
  static const char devices[] = "/sys/bus/pci/devices";
  const td_cu_props *props = &dev->props;
  char id[32];
  snprintf(id, sizeof id, "%04x:%02x:%02x.0", (unsigned)props->pci_domain, (unsigned)props->pci_bus,
           (unsigned)props->pci_device);
  dev->node = td_nodes_of_pci(devices, id);
  dev->base.link_gbps = td_pci_link_gbps(devices, id);
}

static td_status choose_kernels(td_cuda_dev *dev, td_err *err) {
  const bool has = dev->props.has_wgmma;
  td_cuda_kernels *u = &dev->uses;
  *u = (td_cuda_kernels){has, has, has, has, true, true, td_cuda_adds_f16(&dev->props)};
  const struct {
    const char *name;
    bool *is_used;
  } all[] = {{"wgmma", &u->wgmma},     {"a8", &u->a8},     {"prefill", &u->prefill},
             {"latents", &u->latents}, {"wide", &u->wide}, {"chunks", &u->chunks},
             {"f16", &u->f16}};
  for (const char *at = td_test_var_get(TD_ENV_CUDA_WITHOUT); at && *at;) {
    const size_t n = strcspn(at, ",");
    size_t i = 0;
    while (i < TD_COUNT(all) && (strlen(all[i].name) != n || strncmp(all[i].name, at, n) != 0))
      i++;
    if (i == TD_COUNT(all)) {
      return td_fail(err, TD_EINVAL,
                     "TANDEM_CUDA_WITHOUT: no kernels are called \"%.*s\": name some of wgmma, a8, "
                     "prefill, latents, wide, chunks, f16",
                     (int)n, at);
    }
    *all[i].is_used = false;
    at += n + (at[n] == ',');
  }
  dev->base.adds_f16 = u->f16;
  return TD_OK;
}

// Opening the GPU then takes about a minute, at the first start or at all.
static void tell_translation(const td_cuda_dev *dev) {
  const td_cu_props *p = &dev->props;
  if (!p->is_translated) return;
  td_info("%s: the kernels have no code for compute capability %d.%d, so the driver translates "
          "their PTX, which takes about a minute. It keeps the result where it can write to ~/.nv, "
          "or CUDA_CACHE_PATH. Building with -DTD_CUDA_ARCHS=%d avoids it",
          p->name, p->capability / 10, p->capability % 10, p->capability);
}

static td_status open_gpu(td_cuda_dev *dev, td_err *err) {
  td_status status = td_cuda_library_open(dev, err);
  if (status != TD_OK) return status;
  char what[32];
  snprintf(what, sizeof what, "GPU %d", dev->index);
  status = td_cuda_result(dev, dev->abi->describe(dev->index, &dev->props), what, err);
  if (status != TD_OK) return status;
  tell_translation(dev);
  status = td_cuda_result(dev, dev->abi->open(dev->index, &dev->props), what, err);
  if (status == TD_OK) status = choose_kernels(dev, err);
  if (status != TD_OK) return status;
  find_place(dev);
  if (dev->props.capability < 80) {
    return td_fail(err, TD_EUNSUPPORTED,
                   "CUDA: %s has compute capability %d.%d; BF16 on tensor cores begins with 8.0",
                   dev->props.name, dev->props.capability / 10, dev->props.capability % 10);
  }
  const bool is_f8 = dev->activations == TD_ACTIVATIONS_FP8;
  int code = dev->abi->probe();
  if (code == 0 && is_f8 && !dev->props.has_f8) {
    return td_fail(err, TD_EUNSUPPORTED,
                   "--activations fp8: %s has compute capability %d.%d, and FP8 on tensor cores "
                   "begins with 8.9%s: give --activations auto",
                   dev->props.name, dev->props.capability / 10, dev->props.capability % 10,
                   dev->props.capability < 89 ? "" : " (the kernels are built for an earlier one)");
  }
  if (code != 0) {
    return td_fail(err, TD_EUNSUPPORTED,
                   "CUDA: %s and its driver do not take the kernels as they are built: %s; build "
                   "with -DTD_CUDA_ARCHS=%d, or install a newer driver",
                   dev->props.name, dev->abi->error_text(code), dev->props.capability);
  }
  if (is_f8 && dev->props.capability == 90 && !dev->props.has_wgmma) {
    td_warn("--activations fp8: %s multiplies E4M3 as F16 with these kernels, which is no faster "
            "than BF16: build with -DTD_CUDA_ARCHS=90a",
            dev->props.name);
  }
  return td_cuda_result(dev, dev->abi->stream_open(&dev->upload, false), "a stream", err);
}

td_status td_cuda_dev_open(td_dev **out, const td_dev_opts *opts, td_err *err) {
  td_cuda_dev *dev = calloc(1, sizeof *dev);
  if (!dev) return td_fail(err, TD_ENOMEM, "no memory for a CUDA device");
  dev->base.vtable = &vtable;
  dev->base.act_dtype = TD_BF16;
  dev->base.pulse = &dev->base.unseen_pulse;
  dev->activations = opts->activations;
  dev->index = (int)opts->index;
  dev->pass_bytes = PASS_BYTES;
  dev->keys_bytes = KEYS_BYTES;
  dev->page_bytes = PAGE_BYTES;
  dev->await_ns = AWAIT_NS;
  dev->pins.piece_bytes = CUDA_PIN_BYTES;
  dev->pins.is_left_registered = opts->ends_with_process;
  pthread_mutex_init(&dev->pins.lock, NULL);
  pthread_cond_init(&dev->pins.moved, NULL);
  pthread_mutex_init(&dev->lock, NULL);
  td_status status = open_gpu(dev, err);
  if (status != TD_OK) {
    cuda_close(&dev->base);
    return status;
  }
  char kind[16] = "cuda";
  if (dev->index > 0) snprintf(kind, sizeof kind, "cuda %d", dev->index);
  snprintf(dev->base.name, sizeof dev->base.name, "%s, %.32s, sm_%d", kind, dev->props.name,
           dev->props.capability);
  *out = &dev->base;
  return TD_OK;
}
