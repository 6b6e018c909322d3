// src/text/grammar/grammar_impl.h - the automata of a grammar's rules. Private to text/grammar.
#pragma once

#include <stdint.h>

#include "text/grammar/grammar.h"

typedef enum {
  TD_NFA_DEAD,  // matches nothing
  TD_NFA_BYTES, // a byte of [low, high], then next
  TD_NFA_SPLIT, // next or other
  TD_NFA_CALL,  // the rule `other`, then next
  TD_NFA_MATCH, // the rule ends
} td_nfa_kind;

typedef struct {
  uint8_t kind;      // a td_nfa_kind
  uint8_t low, high; // BYTES
  uint8_t is_live;   // the rule's end can be reached from here: 0 or 1
  uint32_t next, other;
} td_nfa_state;

struct td_grammar {
  const td_nfa_state *states; // [n_states]; state 0 is DEAD
  uint32_t n_states;
  const uint32_t *starts; // [n_rules] each rule's first state
  uint32_t n_rules;
  uint32_t root; // a rule
};
