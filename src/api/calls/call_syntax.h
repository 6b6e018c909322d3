// src/api/calls/call_syntax.h - how a model writes tool calls, white space included: as its
// template renders earlier calls or, if it renders none, as other models of the same form do.
#pragma once

#include "api/output_form.h"
#include "api/request.h"
#include "text/chat.h"

// Calls are open CALL (between CALL)* close, a call is NAME index after_name ARGUMENTS. Arguments
// are one object, or elements: key_open KEY key_close VALUE value_close. Some say by key_close
// whether the value is a string.
typedef struct td_call_syntax {
  td_call_form form;
  const char *open, *between, *close; // between NULL: one call
  const char *after_name;
  const char *index;                              // GBNF; NULL: nothing
  const char *key_open, *key_close, *value_close; // key_open NULL: one object
  const char *json_key_close;     // key_close before a value that is not a string; NULL: the same
  bool ends_by_key;               // /KEY> follows value_close
  const td_output_form *thoughts; // how reasoning stands before calls
  td_buf own;                     // memory of a template's strings
} td_call_syntax;

// Of a form's models.
const td_call_syntax *td_call_syntax_of_form(td_call_form form);
// Finds how the chat's template writes calls. Renders it a few times.
void td_call_syntax_open(td_call_syntax *out, const td_chat *chat);
void td_call_syntax_close(td_call_syntax *syntax);
