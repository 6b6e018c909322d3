// src/cli/terminal.c - the environment variables that describe a terminal, and its width.
#include "cli/terminal.h"

#include <string.h>
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
