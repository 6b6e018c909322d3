// src/text/grammar/automaton.h - the configurations that a generation under a grammar can be in:
// sets of automaton states with their stacks of return addresses. Each is found when it is needed
// first, and kept with its successors. Private to text/grammar. Thread: one at a time.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "text/grammar/grammar_impl.h"
#include "text/grammar/token_index.h"

#define TD_AUTOMATON_DEAD 0u // the configuration in which nothing matches

#define TD_RUN_ENDLESS 255u
#define TD_RUN_UNKNOWN 254u // also the longest that is not endless

// Any text of up to `len` characters of the set matches from the configuration on; maybe others do.
typedef struct {
  td_char_set chars;
  uint32_t len;
} td_automaton_run;

typedef struct {
  uint64_t *items; // [n_items], owned, ascending: NFA state << 32 | frame; BYTES states only
  uint32_t n_items;
  bool may_end;    // the text so far is complete
  uint32_t *steps; // [256], owned: the following configuration + 1; 0: not known. NULL: none known
  td_automaton_run run;
  uint64_t *mask; // owned: matcher.c's; NULL: not made
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
  uint32_t n_configs, n_frames, n_config_slots, n_frame_slots;
  size_t cap_configs, cap_frames;
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
// Of the runs that begin in the configuration, one with most characters.
td_automaton_run td_automaton_run_of(td_automaton *a, uint32_t config);
bool td_char_set_holds(td_char_set all, td_char_set some); // whether some is a part of all
// Forgets all configurations but those in keep[0..n), which receive their new numbers and keep
// their masks.
void td_automaton_forget(td_automaton *a, uint32_t **keep, uint32_t n);
