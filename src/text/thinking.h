// src/text/thinking.h - how a chat template is told whether, and how hard, the model shall think.
// What it reads, and the levels that it knows, are found by rendering probes.
#pragma once

#include "text/template.h"

#define TD_THINKING_N_VARS 5

// Levels of effort, of which minimal is the lowest.
typedef enum {
  TD_EFFORT_MINIMAL,
  TD_EFFORT_LOW,
  TD_EFFORT_MEDIUM,
  TD_EFFORT_HIGH,
  TD_EFFORT_XHIGH,
  TD_EFFORT_MAX,
  TD_N_EFFORTS
} td_effort;

// A variable for the effort.
typedef struct {
  bool is_read;
  bool knows[TD_N_EFFORTS];
  const char *off;     // static: its word for no thinking; NULL: there is none
  bool is_off_without; // unset, it means off
} td_effort_var;

typedef struct {
  td_effort_var vars[TD_THINKING_N_VARS]; // in the order of the names in thinking.c
  bool has_switch;                        // it reads enable_thinking or thinking
  bool has_budget;                        // it reads thinking_budget
} td_thinking;

// vars: the variables beside messages, which the probes render with. Error: TD_ENOMEM.
td_status td_thinking_probe(td_thinking *out, const td_template *tmpl, const cJSON *vars,
                            td_err *err);

// Whether an effort means not to think.
bool td_thinking_is_off(const char *effort);

// Gives the template's variables what reasoning_effort, enable_thinking, thinking and
// thinking_budget of vars say: the nearest level that each knows, the higher of two as near.
// Returns false if memory ran out.
bool td_thinking_fit(const td_thinking *thinking, cJSON *vars);
