// src/api/output_parser.h - an answer's text told apart: what the model thinks, what it says, the
// tools it calls. The text grows; each part is given out as soon as it is sure, so the outcome does
// not depend on the pieces in which the text came. Every byte is looked at a fixed number of times.
//
// Thoughts stand in <think> and </think>, or begin with the answer where the prompt ended in
// <think>. Calls are looked for in three forms:
//   <tool_call>{"name": N, "arguments": {...}}</tool_call>                        Qwen, Hermes
//   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>N<｜tool▁sep｜>{...}<｜tool▁call▁end｜>   DeepSeek
//   <|tool_calls_section_begin|><|tool_call_begin|>functions.N:0
//     <|tool_call_argument_begin|>{...}<|tool_call_end|>                         Kimi
// Arguments may be an object, a string that holds one, empty, null or absent ({}), and markers that
// models forget may be missing. What is no call, whatever it began like, is text.
//
// Of a response in one piece, a call that is cut off or whose arguments are no JSON is text, too.
// Of one in pieces, a call is given out when it has a name and its arguments have begun; it stays
// as it is when the text breaks off.
#ifndef TD_API_OUTPUT_PARSER_H
#define TD_API_OUTPUT_PARSER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "api/tool_calls.h"

typedef enum { TD_OUTPUT_REASONING, TD_OUTPUT_CONTENT, TD_OUTPUT_CALL } td_output_part_kind;

typedef struct {
  td_output_part_kind kind;
  size_t begin, end; // bytes of the text: reasoning, content
  uint32_t call;     // index into td_output_parser.calls: it is new, or its arguments have grown
} td_output_part;

typedef enum {
  TD_PARTS_START,     // nothing but white space so far
  TD_PARTS_REASONING, //
  TD_PARTS_CONTENT,
  TD_PARTS_CALLS, // between calls
  TD_PARTS_CALL,  // within one
  TD_PARTS_DONE,  // behind the only call
} td_output_parser_state;

// Zeroed but for the first five is the beginning. Members are for reading.
typedef struct {
  bool begins_in_reasoning; // the prompt ended in <think>
  bool parse_tool_calls;    // look for calls: the request has tools
  bool in_pieces;           // calls are given out while they are written
  bool one_call;            // nothing behind the first call is looked at
  uint64_t id;              // what the ids of calls are made from
  td_output_parser_state state;
  bool has_begun;  // the state's part: white space in front of it was passed over; state CALLS:
                   // text stands in front of the next one
  bool is_opened;  // state CALLS: a run of calls was opened and none has come
  bool may_repeat; // state CALLS: another call may begin without a marker
  size_t at;       // told apart up to here
  size_t scan;     // no marker begins in front of here
  size_t solid;    // end of the last byte in front of scan that is no white space
  size_t back_at;  // where text begins if what follows turns out to be no call
  td_call_reader reader;
  bool is_given;       // the call that is being read is the last of calls
  size_t n_given;      // bytes of its arguments that were given out
  td_tool_call *calls; // owned; behind the last there is room for one more while one is read
  uint32_t n_calls, cap;
} td_output_parser;

// The next part of text[len], which begins with what earlier calls were given. is_final: no text
// will come any more. False in *found: the rest is not sure yet, or there is none. TD_ENOMEM.
td_status td_output_parser_next(td_output_parser *parts, const char *text, size_t len,
                                bool is_final, td_output_part *part, bool *found, td_err *err);
void td_output_parser_free(td_output_parser *parts);

// Whether a prompt leaves the model in the middle of a thought.
bool td_output_parser_prompt_thinks(const char *prompt, size_t len);

#endif
