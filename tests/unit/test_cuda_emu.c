// tests/unit/test_cuda_emu.c - the emulator finds what only a GPU, on a bad day, would show.
#include <dlfcn.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cuda_emu/mistakes.h"
#include "unit/testing.h"

static bool (*make_mistake)(int which); // NULL: a GPU's library, or none

static void open_emulator(void) {
  const char *path = getenv("TANDEM_CUDA_LIB");
  void *library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
  if (library) *(void **)&make_mistake = dlsym(library, "emu_make_mistake");
}

// How a child ends that makes it.
static int status_of(int which) {
  pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    if (!freopen("/dev/null", "w", stderr)) _exit(1);
    make_mistake(which);
    _exit(0);
  }
  int status;
  assert_int_equal(waitpid(child, &status, 0), child);
  return status;
}

TEST(races_are_found) {
  if (!make_mistake || !make_mistake(EMU_FINE)) skip();
  for (int which = EMU_FINE + 1; which < EMU_LEFT_LANE; which++) {
    int status = status_of(which);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGABRT)
      fail_msg("mistake %d is missed", which);
  }
}

TEST(what_threads_leave_is_found) {
  if (!make_mistake) skip();
  make_mistake(EMU_FINE);
  for (int which = EMU_LEFT_LANE; which < EMU_N_MISTAKES; which++) {
    int status = status_of(which);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGABRT)
      fail_msg("mistake %d is missed", which);
  }
}

int before_all(void **state) {
  (void)state;
  open_emulator();
  return 0;
}
