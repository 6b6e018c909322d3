// src/api/output_parser.h - splits generated text into reasoning, content and tool calls. The text
// grows; a part is emitted as soon as it cannot change any more, so the result does not depend on
// how the text was split into pieces. Each byte is examined a bounded number of times.
//
// Reasoning is enclosed in markers (<think> and </think>, or others of output_form.h), or starts
// with the generated text if the prompt ended in the first of them.
// The forms of tool calls that are recognized:
//   <tool_call>{"name": N, "arguments": {...}}</tool_call>                        Qwen, Hermes
//   <tool_call><function=N><parameter=K>V</parameter></function></tool_call>      Qwen3-Coder
//   <tool_call>N<arg_key>K</arg_key><arg_value>V</arg_value></tool_call>          GLM
//   <tool_calls><tool_call>N<tool_sep><arg_key>K</arg_key><arg_value>V</arg_value></tool_call>
//     </tool_calls>                                                               Hy3
//   <minimax:tool_call><invoke name="N"><parameter name="K">V</parameter></invoke>
//     </minimax:tool_call>                                                        MiniMax
//   <tool_call><invoke name="N"><K>V</K></invoke></tool_call>, with ]<]minimax[>[ before each
//     tag; a V may be of such elements                                            MiniMax-M3
//   <｜DSML｜function_calls><｜DSML｜invoke name="N"><｜DSML｜parameter name="K" string="true">V
//     </｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>                 DeepSeek-V3.2
//   the same between <｜DSML｜tool_calls> and </｜DSML｜tool_calls>                 DeepSeek-V4
//   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>N<｜tool▁sep｜>{...}<｜tool▁call▁end｜>   DeepSeek
//   <|tool_calls_section_begin|><|tool_call_begin|>functions.N:0
//     <|tool_call_argument_begin|>{...}<|tool_call_end|>                         Kimi
//   [TOOL_CALLS]N[CALL_ID]ID[ARGS]{...}   or   [TOOL_CALLS][{"name": N, ...}]     Mistral
//   <|tool_call>call:N{K:<|"|>TEXT<|"|>,K:1}<tool_call|>                          Gemma 4
// All of Hy3's markers, those of reasoning included, may end in ":opensource>" (the release; not
// the preview). A value V without quotes is JSON or a string, as the tool's schema says.
//
// gpt-oss writes messages of the Harmony format instead, once is_harmony is set:
//   <|start|>assistant<|channel|>CHANNEL to=functions.N <|constrain|>json<|message|>TEXT<|end|>
// A message with a recipient is a call, of the channel analysis reasoning, of any other content.
// A message also ends with <|call|> or <|return|>, or where the next one begins. Parts of a header
// may be missing, doubled, or in another order; where <|message|> is missing, a call's arguments
// begin at their brace, and other text at the first word that is no part of a header.
//
// Arguments may be an object, a string that holds one, empty, null or absent ({}). Markers that
// models tend to omit may be missing. Anything that turns out not to be a call is emitted as text.
// Behind an opening marker within a thought, text waits for the end of the thought; in some forms,
// a thought without an end ends at the marker.
//
// A call is emitted as soon as it has a name and its arguments have begun, and stays a call
// whatever follows. Where the text ends within it, or its arguments are no JSON, it is not whole,
// and its arguments stay unfinished. The beginning of a call that the text's end cuts off is not
// emitted.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "api/calls/tool_calls.h"
#include "api/output_form.h"

typedef enum { TD_OUTPUT_REASONING, TD_OUTPUT_CONTENT, TD_OUTPUT_CALL } td_output_part_kind;

typedef struct {
  td_output_part_kind kind;
  size_t begin, end; // byte range of the text, for reasoning and content
  uint32_t call;     // index into td_output_parser.calls of a call that is new or has grown
} td_output_part;

typedef enum {
  TD_PARTS_START, // only white space so far
  TD_PARTS_REASONING,
  TD_PARTS_CONTENT,
  TD_PARTS_CALLS, // between two calls
  TD_PARTS_CALL,  // inside a call
  TD_PARTS_DONE,  // after the only call
} td_output_parser_state;

// To start, set the first six members and zero the rest. Callers may read the members but not
// write them.
typedef struct {
  bool begins_in_reasoning;     // the prompt ended in <think>
  bool parse_tool_calls;        // recognize calls: the request has tools
  bool one_call;                // ignore everything after the first call
  bool is_harmony;              // the text is in the Harmony format, markers included
  uint64_t id;                  // seed for generated call ids
  const td_tool_params *params; // borrowed: of the request's tools; NULL: not known
  td_output_parser_state state;
  const td_output_form *form; // whose markers the reasoning block has
  bool in_thought;            // the calls being read began in a thought without an end
  size_t far;                 // state REASONING: the thought does not end before this
  bool will_end;              // state REASONING: the thought ends at `far`
  bool has_begun;  // leading white space of the current part was skipped; in state CALLS: there is
                   // text before the next call
  bool is_opened;  // state CALLS: a run was opened and has no call yet
  bool in_run;     // states CALLS, CALL: a run was opened
  bool may_repeat; // state CALLS: another call may follow without a marker
  size_t at;       // everything before this is parsed
  size_t scan;     // no marker begins before this
  size_t solid;    // end of the last non-white-space byte before scan
  size_t back_at;  // where text resumes if the following bytes turn out not to be a call
  td_call_reader reader;
  bool is_given;       // the call being read is already the last of calls
  size_t n_given;      // bytes of its arguments already emitted
  td_tool_call *calls; // owned; while a call is read there is room for one more after the last
  uint32_t n_calls;
  size_t cap;
} td_output_parser;

// Returns the next part of text[0..len), which must begin with the text of earlier calls. *found is
// false if there is nothing more, or the rest may still change. Error: TD_ENOMEM.
td_status td_output_parser_next(td_output_parser *parts, const char *text, size_t len,
                                td_text_end end, td_output_part *part, bool *found, td_err *err);
// Whether the last call is not whole.
bool td_output_parser_is_cut(const td_output_parser *parts);
// Where the text ends within a call that was emitted: drops it. *begin: where its text begins.
bool td_output_parser_drop_cut(td_output_parser *parts, size_t *begin);
void td_output_parser_free(td_output_parser *parts);

// What the end of a prompt leaves open.
td_reasoning td_output_parser_after(const char *prompt, size_t len);
