// src/base/query.h - percent-encoding and the parameters of a URL.
#pragma once

#include "base/buf.h"

// Appends text[0..len) decoded. false: an escape is malformed or a NUL; it is appended as it is.
bool td_percent_decode(td_buf *out, const char *text, size_t len);
// Appends the decoded value of the first parameter of that name in a query, NAME=VALUE&..., in
// which a plus is a space. false: there is none.
bool td_query_get(td_buf *out, const char *query, const char *name);
