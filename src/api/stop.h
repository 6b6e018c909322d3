// src/api/stop.h - stop strings over text that grows.
#ifndef TD_API_STOP_H
#define TD_API_STOP_H

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

// Looks at text[from..len). Returns the length of text that may be shown: up to the earliest match
// (*matched is set), else up to the first byte that may yet turn out to begin one. The caller shows
// that much and passes it as from next time. Whole characters stay whole. final: no text will come
// any more, so that what only begins a stop string is none.
size_t td_stops_scan(const td_stops *stops, const char *text, size_t len, size_t from, bool final,
                     bool *matched);

#endif
