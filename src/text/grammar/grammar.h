// src/text/grammar/grammar.h - a compiled grammar: the texts that a generation may consist of.
// Immutable once open; any thread.
#pragma once

#include <stddef.h>

#include "base/status.h"

// Most bytes of a grammar's text.
#define TD_GRAMMAR_MAX_BYTES (1u << 20)

typedef struct td_grammar td_grammar;

// Compiles GBNF (gbnf.h). The text is that of the rule `.root` if there is one, else of `root`.
// TD_EFORMAT: the text is not a grammar, or no text matches it; TD_EUNSUPPORTED: a rule begins with
// itself; TD_ELIMIT: it is too large. On error *out is NULL.
td_status td_grammar_open(td_grammar **out, const char *text, size_t len, td_err *err);
void td_grammar_close(td_grammar *grammar);
// Whether the grammar generates exactly text[0..len). False also when that cannot be decided
// (memory).
int td_grammar_matches(const td_grammar *grammar, const char *text, size_t len);
