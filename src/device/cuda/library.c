// src/device/cuda/library.c - finds, loads and checks the library with the CUDA kernels.
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/env.h"
#include "device/cuda/cuda.h"

#define LIBRARY_NAME "libtandem_cuda.so"
enum { CUDA_INSUFFICIENT_DRIVER = 35 }; // cudaErrorInsufficientDriver

static td_status find(char *path, size_t n_bytes, td_err *err) {
  const char *named = td_test_var_get(TD_ENV_CUDA_LIB);
  if (named) {
    snprintf(path, n_bytes, "%s", named);
    return TD_OK;
  }
  char self[PATH_MAX];
  ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
  if (n < 0) return td_fail(err, TD_EUNSUPPORTED, "CUDA: cannot tell where the program is");
  self[n] = '\0';
  char *slash = strrchr(self, '/');
  const int dir = slash ? (int)(slash - self) : 0;
  snprintf(path, n_bytes, "%.*s/../lib/tandem/" LIBRARY_NAME, dir, self); // as installed
  if (access(path, R_OK) == 0) return TD_OK;
  snprintf(path, n_bytes, "%.*s/" LIBRARY_NAME, dir, self);
  if (access(path, R_OK) == 0) return TD_OK;
  return td_fail(err, TD_EUNSUPPORTED,
                 "CUDA: %s is not there: build with nvcc installed (see the README)", path);
}

static td_status count_devices(const td_cuda_dev *dev, td_err *err) {
  const td_cu_abi *abi = dev->abi;
  int n_devices = 0, code = abi->count(&n_devices);
  if (code == 0 && n_devices > dev->index) return TD_OK;
  if (code == 0 && n_devices > 0) {
    return td_fail(err, TD_EUNSUPPORTED,
                   "CUDA: there is no GPU %d: %d can be used, counted from 0 (see "
                   "CUDA_VISIBLE_DEVICES)",
                   dev->index, n_devices);
  }
  bool is_old = code == CUDA_INSUFFICIENT_DRIVER;
  return td_fail(err, TD_EUNSUPPORTED, "CUDA: no GPU can be used: %s%s",
                 code ? abi->error_text(code) : "none is there",
                 is_old ? "; install NVIDIA's driver, or a newer one" : "");
}

td_status td_cuda_abi_check(const td_cu_abi *abi, const char *path, td_err *err) {
  static const td_cu_function ours[] = TD_CU_FUNCTION_LIST;
  static const char cure[] = "build both together";
  if (abi->version != TD_CUDA_ABI_VERSION) {
    return td_fail(err, TD_EUNSUPPORTED, "CUDA: %s has interface %u, this program has %u: %s", path,
                   abi->version, TD_CUDA_ABI_VERSION, cure);
  }
  for (uint32_t i = 0; i < TD_COUNT(ours); i++) {
    const td_cu_function *theirs = i < abi->n_functions ? &abi->functions[i] : NULL;
    if (!theirs || strcmp(theirs->name, ours[i].name) != 0) {
      return td_fail(err, TD_EUNSUPPORTED,
                     "CUDA: %s has no function %s where this program has it: %s", path,
                     ours[i].name, cure);
    }
    if (theirs->args_bytes != ours[i].args_bytes) {
      return td_fail(err, TD_EUNSUPPORTED,
                     "CUDA: %s takes other arguments for its function %s than this program: %s",
                     path, ours[i].name, cure);
    }
  }
  if (abi->n_functions == TD_COUNT(ours) && abi->n_bytes == sizeof *abi) return TD_OK;
  return td_fail(err, TD_EUNSUPPORTED, "CUDA: %s has functions that this program does not have: %s",
                 path, cure);
}

static td_status open_table(td_cuda_dev *dev, const char *path, td_err *err) {
  union {
    void *symbol;
    td_cuda_abi_fn fn;
  } entry = {.symbol = dlsym(dev->library, TD_CUDA_ABI_SYMBOL)};
  if (!entry.symbol)
    return td_fail(err, TD_EUNSUPPORTED, "CUDA: %s is not a library of tandem", path);
  dev->abi = entry.fn();
  td_status st = td_cuda_abi_check(dev->abi, path, err);
  return st == TD_OK ? count_devices(dev, err) : st;
}

td_status td_cuda_library_open(td_cuda_dev *dev, td_err *err) {
  char path[PATH_MAX + sizeof LIBRARY_NAME];
  td_status status = find(path, sizeof path, err);
  if (status != TD_OK) return status;
  // A kernel's first launch would load it, which waits until the device is idle, and it never is
  // while another kernel spins until this thread has queued more. And 8 hardware queues are too
  // few: work behind a wait of another stream would wait, too. The runtime reads both once, when it
  // starts.
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  dev->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!dev->library) return td_fail(err, TD_EUNSUPPORTED, "CUDA: %s", dlerror());
  status = open_table(dev, path, err);
  if (status != TD_OK) td_cuda_library_close(dev);
  return status;
}

// The library stays loaded: the CUDA runtime in it has its own threads and exit handlers.
void td_cuda_library_close(td_cuda_dev *dev) {
  dev->library = NULL;
  dev->abi = NULL;
}
