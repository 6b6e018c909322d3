// src/text/grammar/automaton.h - the configurations that a generation under a grammar can be in:
// sets of automaton states with their stacks of return addresses. Each is found when it is needed
// first, and kept with its successors. Private to text/grammar. Thread: one at a time.
#ifndef TD_TEXT_GRAMMAR_AUTOMATON_H
#define TD_TEXT_GRAMMAR_AUTOMATON_H

#include <stdbool.h>
#include <stdint.h>

#include "text/grammar/grammar_impl.h"

#define TD_AUTOMATON_DEAD 0u // the configuration in which nothing matches

typedef struct {
  uint64_t *items; // [n_items], owned, ascending: NFA state << 32 | frame; BYTES states only
  uint32_t n_items;
  bool may_end;    // the text so far is complete
  uint32_t *steps; // [256], owned: the following configuration + 1; 0: not known. NULL: none known
  uint64_t *mask;  // owned: matcher.c's; NULL: not made
} td_automaton_config;

// A return address and the frame below it. Frame 0 is the empty stack.
typedef struct {
  uint32_t state, below;
} td_automaton_frame;

typedef struct {
  const td_grammar *grammar; // borrowed
  td_automaton_config *configs;
  td_automaton_frame *frames;
  uint32_t *config_slots, *frame_slots; // hash tables of index + 1
  uint32_t n_configs, cap_configs, n_frames, cap_frames, n_config_slots, n_frame_slots;
  uint64_t *todo, *seen;        // for the closure
  uint32_t *seen_at, seen_mark; // seen[i] is valid when seen_at[i] == seen_mark
  uint64_t *found;
  uint32_t n_found;
  bool found_end;
  size_t n_bytes;   // held by configurations and masks
  td_status status; // why a configuration could not be made; TD_OK: all could
} td_automaton;

// grammar is borrowed. On error out is closed. TD_ENOMEM.
td_status td_automaton_open(td_automaton *out, const td_grammar *grammar, td_err *err);
void td_automaton_close(td_automaton *a);
uint32_t td_automaton_start(td_automaton *a);
// The configuration after a byte. DEAD also when it could not be made: status tells.
uint32_t td_automaton_step(td_automaton *a, uint32_t config, uint8_t byte);
// Forgets all configurations but those in keep[0..n), which receive their new numbers.
void td_automaton_forget(td_automaton *a, uint32_t **keep, uint32_t n);

#endif
