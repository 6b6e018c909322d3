// src/base/printable.h - makes untrusted text safe for a terminal or a log.
#pragma once

#include <stddef.h>

#include "base/buf.h"

// Appends text with control characters (C0, DEL, C1) and invalid UTF-8 bytes escaped as \xNN.
// Characters in kept, e.g. "\n\t", are not escaped.
void td_printable_add(td_buf *out, const char *text, size_t len, const char *kept);
