// src/api/parts.h - an answer's text told apart: what the model thinks, what it says, the tools it
// calls. The text grows; each part is given out as soon as it is sure, so the outcome does not
// depend on the pieces in which the text came.
//
// Thoughts stand in <think> and </think>, or begin with the answer where the prompt ended in
// <think>. Calls are looked for in three forms:
//   <tool_call>{"name": N, "arguments": {...}}</tool_call>                        Qwen, Hermes
//   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>N<｜tool▁sep｜>{...}<｜tool▁call▁end｜>   DeepSeek
//   <|tool_calls_section_begin|><|tool_call_begin|>functions.N:0
//     <|tool_call_argument_begin|>{...}<|tool_call_end|>                         Kimi
// A call that is malformed, or cut off, is text.
#ifndef TD_API_PARTS_H
#define TD_API_PARTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

#define TD_CALL_ID_BYTES 96

typedef struct {
  char id[TD_CALL_ID_BYTES];
  char *name;      // owned
  char *arguments; // owned; a JSON object as the model wrote it
} td_tool_call;

typedef enum { TD_PART_REASONING, TD_PART_CONTENT, TD_PART_CALL } td_part_kind;

typedef struct {
  td_part_kind kind;
  size_t begin, end; // bytes of the text: reasoning, content
  uint32_t call;     // index into td_parts.calls
} td_part;

typedef enum {
  TD_PARTS_START,     // nothing but white space so far
  TD_PARTS_REASONING, //
  TD_PARTS_CONTENT,
  TD_PARTS_CALLS,
} td_parts_state;

// Zeroed but for the first three is the beginning. Members are for reading.
typedef struct {
  bool begins_in_reasoning; // the prompt ended in <think>
  bool with_calls;          // look for calls: the request has tools
  uint64_t id;              // what the ids of calls are made from
  td_parts_state state;
  bool has_begun;      // the state's part: white space in front of it was passed over
  size_t at;           // told apart up to here
  size_t call_at;      // state CALLS: where the call's first marker stands
  td_tool_call *calls; // owned
  uint32_t n_calls, cap;
} td_parts;

// The next part of text[len], which begins with what earlier calls were given. is_final: no text
// will come any more. False in *found: the rest is not sure yet, or there is none. TD_ENOMEM.
td_status td_parts_next(td_parts *parts, const char *text, size_t len, bool is_final, td_part *part,
                        bool *found, td_err *err);
void td_parts_free(td_parts *parts);

// Whether a prompt leaves the model in the middle of a thought.
bool td_parts_prompt_thinks(const char *prompt, size_t len);

#endif
