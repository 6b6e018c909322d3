// src/device/cuda/find_blas.c - finds an installed cuBLAS: a system package, NVIDIA's toolkit, or a
// Python package that another program brought (PyTorch does). Searched in this order:
//   1. the loader's search path: LD_LIBRARY_PATH, system folders
//   2. /usr/local/cuda/lib64, then other releases beside it
//   3. for each folder of PATH the Python packages in its ../lib/python3*/*-packages, so that an
//      active virtual environment or conda comes before the system
// first for the CUDA release that the kernels were built with, then for other compatible ones.
#include <dlfcn.h>
#include <glob.h>
#include <limits.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/env.h"
#include "base/log.h"
#include "device/cuda/cuda.h"

enum { OLDEST_CUBLAS = 12, NEWEST_CUBLAS = 13 };

// Opens the library in that folder; "": by the loader's search. It stays loaded. It needs cublasLt
// from the same folder, which the loader does not search by itself.
static void *open_in(const char *folder, int major) {
  char path[PATH_MAX];
  const char *slash = folder[0] ? "/" : "";
  snprintf(path, sizeof path, "%s%slibcublasLt.so.%d", folder, slash, major);
  if (folder[0]) dlopen(path, RTLD_NOW | RTLD_LOCAL);
  snprintf(path, sizeof path, "%s%slibcublas.so.%d", folder, slash, major);
  return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

// Tries the folders that match the pattern, in alphabetical order.
static void *open_in_any(const char *pattern, int major) {
  glob_t found;
  void *library = NULL;
  if (glob(pattern, 0, NULL, &found) == 0)
    for (size_t i = 0; i < found.gl_pathc && !library; i++)
      library = open_in(found.gl_pathv[i], major);
  globfree(&found);
  return library;
}

static void *open_beside(const char *bin, size_t len, int major) {
  char release[16], pattern[PATH_MAX];
  snprintf(release, sizeof release, "cu%d", major);
  const char *const packages[] = {release, "cublas"}; // since CUDA 13, and before
  void *library = NULL;
  for (size_t i = 0; i < TD_COUNT(packages) && !library; i++) {
    snprintf(pattern, sizeof pattern, "%.*s/../lib/python3*/*-packages/nvidia/%s/lib", (int)len,
             bin, packages[i]);
    library = open_in_any(pattern, major);
  }
  return library;
}

static void *open_release(const char *path, int major) {
  static const char *const toolkits[] = {"", "/usr/local/cuda/lib64"};
  void *library = NULL;
  for (size_t i = 0; i < TD_COUNT(toolkits) && !library; i++)
    library = open_in(toolkits[i], major);
  if (!library) library = open_in_any("/usr/local/cuda-*/lib64", major);
  for (const char *at = path; at && !library;) {
    const size_t n = strcspn(at, ":");
    if (n > 0) library = open_beside(at, n, major);
    at = at[n] ? at + n + 1 : NULL;
  }
  return library;
}

void *td_cuda_find_blas(const char *path, int cuda_major) {
  void *library = open_release(path, cuda_major);
  for (int major = NEWEST_CUBLAS; major >= OLDEST_CUBLAS && !library; major--)
    if (major != cuda_major) library = open_release(path, major);
  return library;
}

static void find(td_cuda_dev *dev) {
  dev->is_blas_sought = true;
  dev->blas_library = td_cuda_find_blas(td_env("PATH"), dev->abi->cuda_major);
  struct link_map *map;
  if (!dev->blas_library) {
    td_warn("%s: cuBLAS is not found, and prompts are several times slower: install it (package "
            "libcublas, or nvidia-cublas of Python), or name its folder in LD_LIBRARY_PATH",
            dev->base.name);
  } else if (dlinfo(dev->blas_library, RTLD_DI_LINKMAP, &map) == 0) {
    td_info("%s: cuBLAS is %s", dev->base.name, map->l_name);
  }
}

void *td_cuda_blas_symbol(void *ctx, const char *name) {
  td_cuda_dev *dev = ctx;
  void *symbol = dlsym(dev->library, name);
  if (symbol) return symbol;
  pthread_mutex_lock(&dev->lock);
  if (!dev->is_blas_sought) find(dev);
  void *library = dev->blas_library;
  pthread_mutex_unlock(&dev->lock);
  return library ? dlsym(library, name) : NULL;
}
