// src/cli/terminal.c - the two environment variables that describe a terminal.
#include "cli/terminal.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool td_terminal_moves_cursor(int fd) {
  const char *name = getenv("TERM");
  return isatty(fd) == 1 && name && *name && strcmp(name, "dumb") != 0;
}

bool td_terminal_has_colors(int fd) {
  const char *wish = getenv("NO_COLOR");
  return td_terminal_moves_cursor(fd) && !(wish && *wish);
}
