// src/base/notify.h - tells the service manager how the program is (systemd's sd_notify protocol).
#pragma once

// Sends state, such as "READY=1", to the socket that NOTIFY_SOCKET names. Does nothing without one.
void td_notify(const char *state);
