// src/text/roles.h - which orders of roles a chat template takes, found by rendering probes, and
// how conversations in other orders are folded into one of these. Protocols accept any order;
// templates raise, or leave a message out without a word.
#pragma once

#include "text/template.h"

// What a template takes: it neither fails nor leaves out or moves a message.
typedef struct {
  bool system;          // at the beginning
  bool systems;         // several there
  bool late_system;     // anywhere else
  bool no_user;         // nobody but the system or the assistant speaks
  bool users;           // several in a row
  bool assistants;      // several in a row
  bool first_assistant; // before any user
  bool last_assistant;  // at the end, with another answer to come
  bool empty_assistant; // neither content nor calls
  bool tools;           // results of calls
  bool user_after_tool; // behind a result
  bool long_ids;        // of calls, of more than 9 characters
} td_roles;

// vars: the variables beside messages, which the probes render with. A template that does not show
// a plain conversation is taken to take everything. Error: TD_ENOMEM.
td_status td_roles_probe(td_roles *out, const td_template *tmpl, const cJSON *vars, td_err *err);

// Folds the messages of vars into an order that the template takes. System messages at the
// beginning become one; later ones join the user's turn at their place, so that what came before
// renders as it did. known, if not NULL, points to a message and becomes NULL if that is joined
// with another. Returns false if memory ran out.
bool td_roles_fold(const td_roles *roles, cJSON *vars, const cJSON **known);
