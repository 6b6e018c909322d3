// src/base/notify.c - one datagram to the service manager's socket.
#include "base/notify.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/env.h"
#include "base/log.h"

void td_notify(const char *state) {
  const char *path = td_env("NOTIFY_SOCKET");
  struct sockaddr_un to = {.sun_family = AF_UNIX};
  const size_t len = path ? strlen(path) : 0;
  if (len < 2 || len >= sizeof to.sun_path) return;
  memcpy(to.sun_path, path, len);
  if (path[0] == '@') to.sun_path[0] = '\0'; // an abstract address
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const socklen_t n_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + len);
  if (fd < 0 || sendto(fd, state, strlen(state), MSG_NOSIGNAL, (struct sockaddr *)&to, n_bytes) < 0)
    td_warn("%s: the service manager cannot be told %s: %s", path, state, strerror(errno));
  if (fd >= 0) close(fd);
}
