// src/text/grammar/cover.h - the tokens that consist of given characters: where a grammar takes any
// text of these (automaton.h's runs), only the rest of the vocabulary is walked. Private to
// text/grammar. Thread: one at a time.
#pragma once

#include <stdint.h>

#include "text/grammar/automaton.h"
#include "text/grammar/token_index.h"

enum { TD_MAX_COVERS = 32 };

typedef struct {
  td_automaton_run run;
  uint64_t *mask;   // the tokens that the run takes; NULL: too few to be worth a mask
  uint32_t *places; // [n] the others, in the order of the index
  uint16_t *shared; // [n] bytes shared with the one before
  uint32_t n;
  uint64_t used; // when it was wanted last
} td_cover;

typedef struct {
  const td_token_index *index; // borrowed
  td_cover covers[TD_MAX_COVERS];
  uint32_t n;
  uint64_t clock;
} td_covers;

// NULL: walk the whole vocabulary. Valid until the next call.
const td_cover *td_covers_get(td_covers *covers, const td_automaton_run *run);
void td_covers_close(td_covers *covers);
