// src/api/dialects/responses_impl.h - the two halves of OpenAI's Responses.
#pragma once

#include "api/dialects/dialect_impl.h"

td_status td_responses_translate(td_buf *out, const cJSON *root, td_dialect_state *state,
                                 td_api_error *error);

// responses_tools.c: writes the tools of a request in the form of chat, the ones found in its input
// items last, and returns their number. own_tools of s receives each one's type, name and namespace
// by its name in chat.
unsigned td_responses_write_tools(td_json_writer *w, const cJSON *root, td_dialect_state *s);
// Appends what tools (NULL: none) a search has found; space NULL: they are in no namespace.
void td_responses_add_found(td_buf *out, const cJSON *tools, const char *space);
void td_responses_write_choice(td_json_writer *w, const cJSON *choice, unsigned n_tools,
                               td_dialect_state *s);
// Appends the name in chat of a function of a namespace (NULL: none).
void td_responses_add_name(td_buf *out, const char *space, const char *name);
// What a call (NULL: none) refers to: a function, a tool that takes text, or the client's search
// for tools.
typedef enum { TD_RESPONSES_FUNCTION, TD_RESPONSES_CUSTOM, TD_RESPONSES_SEARCH } td_responses_call;
td_responses_call td_responses_call_of(const td_dialect_state *s, const td_tool_call *call);
// Appends the text of a tool that takes text: the string `input` of arguments, which may have
// broken off.
void td_responses_add_input(td_buf *out, const char *arguments, size_t len);
// Writes a call's name and namespace.
void td_responses_write_name(td_json_writer *w, const td_dialect_state *s,
                             const td_tool_call *call);
