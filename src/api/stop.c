// src/api/stop.c - searches growing text for stop strings.
#include "api/stop.h"

#include <stdlib.h>
#include <string.h>

void td_stops_free(td_stops *stops) {
  for (unsigned i = 0; i < stops->n; i++)
    free(stops->strings[i].text);
  memset(stops, 0, sizeof *stops);
}

// Whether a stop string begins at text[0..len). Unless final, a prefix cut off by the end counts as
// well. *whole: the match is complete.
static bool begins(const td_stops *stops, const char *text, size_t len, bool final, bool *whole) {
  bool cut = false;
  for (unsigned i = 0; i < stops->n; i++) {
    const td_stop_string *stop = &stops->strings[i];
    size_t n = len < stop->len ? len : stop->len;
    if (memcmp(text, stop->text, n) != 0) continue;
    *whole = *whole || n == stop->len;
    cut = true;
  }
  return *whole || (cut && !final);
}

// The earliest start is decided first, even if another stop string is already complete further on.
// So the result does not depend on how the text was split into pieces.
size_t td_stops_scan(const td_stops *stops, const char *text, size_t len, size_t from, bool final,
                     bool *matched) {
  *matched = false;
  for (size_t at = from; at < len; at++)
    if (begins(stops, text + at, len - at, final, matched)) return at;
  return len;
}
