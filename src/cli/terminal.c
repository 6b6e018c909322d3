// src/cli/terminal.c - the environment variables that describe a terminal, and its width.
#include "cli/terminal.h"

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "base/env.h"

bool td_terminal_moves_cursor(int fd) {
  const char *name = td_env("TERM");
  return isatty(fd) == 1 && name && strcmp(name, "dumb") != 0;
}

bool td_terminal_has_colors(int fd) {
  return td_terminal_moves_cursor(fd) && !td_env("NO_COLOR");
}

uint32_t td_terminal_width(int fd) {
  struct winsize size;
  return ioctl(fd, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

// ---- signals ------------------------------------------------------------------------------------

static volatile sig_atomic_t interrupted, must_redraw;
static int wake_fd = -1; // set before the handlers that use it

static void on_signal(int number) {
  int before = errno;
  if (number == SIGINT)
    interrupted = 1;
  else
    must_redraw = 1;
  const uint64_t one = 1;
  ssize_t n = wake_fd < 0 ? 0 : write(wake_fd, &one, sizeof one); // fails only if already readable
  (void)n;
  errno = before;
}

static void catch_signal(int number) {
  const struct sigaction action = {.sa_handler = on_signal};
  sigaction(number, &action, NULL);
}

void td_interrupt_catch(void) {
  catch_signal(SIGINT);
}

int td_interrupt_open_fd(void) {
  if (wake_fd < 0) wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  catch_signal(SIGWINCH);
  catch_signal(SIGCONT);
  return wake_fd;
}

bool td_interrupted(void) {
  return interrupted;
}

void td_interrupt_clear(void) {
  interrupted = 0;
}

bool td_interrupt_take_redraw(void) {
  bool taken = must_redraw;
  must_redraw = 0;
  return taken;
}
