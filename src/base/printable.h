// src/base/printable.h - text of others, as a terminal or a log may show it.
#ifndef TD_BASE_PRINTABLE_H
#define TD_BASE_PRINTABLE_H

#include <stddef.h>

#include "base/buf.h"

// Appends text with its control characters (C0, DEL, C1) written out, as \x1b, but those in kept,
// "\n\t" for instance; bytes that are not UTF-8 are written out, too.
void td_printable_add(td_buf *out, const char *text, size_t len, const char *kept);

#endif
