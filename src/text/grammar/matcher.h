// src/text/grammar/matcher.h - a generation under a grammar: which tokens may come next. Thread:
// one at a time for all matchers of one td_grammars, beside which a thread of theirs may run.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "text/grammar/token_index.h"

typedef struct td_matcher td_matcher;
// Grammars with their masks. Those no longer used are kept for a while.
typedef struct td_grammars td_grammars;

// index is borrowed. On error *out is NULL.
td_status td_grammars_open(td_grammars **out, const td_token_index *index, td_err *err);
void td_grammars_close(td_grammars *grammars); // all matchers must be closed

// bytes: a grammar (grammar.h), which is copied. With a thread it is opened there, and whether it
// is one is known when the matcher is ready. On error *out is NULL.
td_status td_matcher_open(td_matcher **out, td_grammars *grammars, const void *bytes, size_t len,
                          td_err *err);
void td_matcher_close(td_matcher *matcher);

// Whether the token may come next. End tokens are the caller's: see td_matcher_may_end.
bool td_matcher_accepts(td_matcher *matcher, int32_t id);
// All tokens that may come next: bit id of [ceil(n_vocab / 64)] words. Valid until the matcher
// advances. NULL: failed.
const uint64_t *td_matcher_mask(td_matcher *matcher);
// Takes the next token. False: it does not match, or has no text; nothing changed.
bool td_matcher_advance(td_matcher *matcher, int32_t id);
// Whether the text so far is complete.
bool td_matcher_may_end(const td_matcher *matcher);
// Whether nothing can follow. With a thread it can be known only when the matcher is ready.
bool td_matcher_must_end(const td_matcher *matcher);
// TD_OK, or why the matcher has failed for good: the grammar is too ambiguous, or memory.
td_status td_matcher_status(const td_matcher *matcher, td_err *err);

// ---- masks beside the caller's work ------------------------------------------------------------

// Starts a thread that makes masks. wake_fd, an eventfd, is written when one is made; -1: none.
// From then on a matcher can be asked for tokens only while it is ready; it can always advance.
td_status td_grammars_start(td_grammars *grammars, int wake_fd, td_err *err);
// Has the next mask made, if it is not there. One matcher's cost does not delay others for longer
// than its current mask takes: who costs least is served first.
void td_matcher_prepare(td_matcher *matcher);
bool td_matcher_is_ready(td_matcher *matcher);
// Bytes of configurations and masks that are kept.
size_t td_grammars_n_bytes(td_grammars *grammars);
// For tests: while held, the thread makes no masks.
void td_grammars_hold(td_grammars *grammars, bool is_held);
