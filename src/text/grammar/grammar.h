// src/text/grammar/grammar.h - a compiled grammar: the texts that a generation may consist of.
// Immutable once open; any thread.
#pragma once

#include <stddef.h>

#include "base/status.h"

// Most bytes of a grammar.
#define TD_GRAMMAR_MAX_BYTES (16u + (1u << 18) * 16u)

typedef struct td_grammar td_grammar;

// Opens what td_grammar_finish (build.h) has written: bytes, aligned to 4 and borrowed. TD_EFORMAT:
// not a grammar. On error *out is NULL.
td_status td_grammar_open(td_grammar **out, const void *bytes, size_t len, td_err *err);
void td_grammar_close(td_grammar *grammar);
// Whether the grammar generates exactly text[0..len). False also when that cannot be decided
// (memory).
int td_grammar_matches(const td_grammar *grammar, const char *text, size_t len);
