// src/api/stop.h - stop strings in text that grows.
#pragma once

#include <stdbool.h>
#include <stddef.h>

#define TD_API_MAX_STOPS      32
#define TD_API_MAX_STOP_BYTES 1024

typedef struct {
  char *text; // owned, NUL-terminated, valid UTF-8
  size_t len; // at least 1
} td_stop_string;

typedef struct {
  td_stop_string strings[TD_API_MAX_STOPS];
  unsigned n;
} td_stops;

void td_stops_free(td_stops *stops);

// Scans text[from..len). Returns the length of text that may be sent: up to the earliest match
// (*matched is set), otherwise up to the first byte that may begin a stop string. The caller sends
// that much and passes it as `from` next time. Never splits a character. final: the text is
// complete, so a partial match at the end does not count.
size_t td_stops_scan(const td_stops *stops, const char *text, size_t len, size_t from, bool final,
                     bool *matched);
