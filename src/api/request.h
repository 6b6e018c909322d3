// src/api/request.h - parses and checks requests of the OpenAI protocol. Pure functions, callable
// from any thread. null counts as absent, and unknown members are accepted everywhere.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "api/calls/tool_params.h"
#include "api/error.h"
#include "api/output_form.h"
#include "api/stop.h"
#include "base/buf.h"
#include "base/sha256.h"
#include "tandem/wire.h"
#include "text/grammar/build.h"
#include "text/tokenizer/tokenizer.h"

#define TD_API_MAX_N        128  // choices per prompt
#define TD_API_MAX_CHOICES  128  // choices per request
#define TD_API_MAX_BIAS     1024 // entries of logit_bias
#define TD_API_MAX_STOP_IDS 32   // entries of stop_token_ids
#define TD_API_MAX_TOOLS    512  // tools a request may be made to call
#define TD_API_MAX_IMAGES   64   // images of a conversation

#define TD_API_MAX_IMAGE_BYTES (20u << 20) // of one, as it was sent

// What work on the schemas, grammars and patterns of one request may cost.
#define TD_API_BUDGET ((td_budget){.steps = 1u << 24, .bytes = 16u << 20})

// Defaults and limits of the model and the server.
typedef struct {
  float temperature, top_p; // defaults of the model
  uint32_t top_k;           // default of the model; 0: off
  uint32_t n_vocab;
  bool sees;                      // images are shown to the model
  const atomic_bool *is_canceled; // borrowed: the client has left; NULL: it cannot be told
} td_api_defaults;

// A prompt of /v1/completions: text, or tokens.
typedef struct {
  char *text; // owned, NUL-terminated; NULL for tokens
  size_t len;
  int32_t *ids; // owned
  uint32_t n_ids;
} td_api_prompt;

// How generated tool calls are constrained.
typedef enum {
  TD_CALLS_FREE,     // not at all
  TD_CALLS_CHECKED,  // the model chooses whether to call; a call is one of the tools in `callable`
  TD_CALLS_REQUIRED, // the answer is one or more calls of the kind
} td_calls_mode;

#define TD_API_MAX_MIN_LENGTH 4

// A parameter of a tool, for the forms of calls that write each by itself.
typedef struct {
  char *key; // owned
  bool is_required, is_text;
  td_node value;       // of request->build: its value without quotes, unless is_text: any text
  unsigned types;      // TD_PARAM_* (tool_params.h) that the schema allows; 0: any
  uint32_t min_length; // of any text, in characters; at most TD_API_MAX_MIN_LENGTH
} td_api_tool_param;

// A tool that may be called.
typedef struct {
  char *name;                // owned
  td_node arguments;         // of request->build: as one object
  td_api_tool_param *params; // owned, [n_params]
  uint32_t n_params;
  bool takes_any; // its parameters are not listed
} td_api_tool;

// A text of logit_bias: each of its tokens gets value.
typedef struct {
  char *text; // owned
  float value;
} td_api_text_bias;

// A message of a chat.
typedef struct {
  size_t end;       // of its JSON in vars
  bool is_answer;   // the assistant's
  bool is_question; // the user's
  td_digest said;   // the assistant's: turn.h
} td_api_mark;

// An image of a chat.
typedef struct {
  td_buf bytes;   // PNG, JPEG or WebP, owned
  td_digest file; // of these bytes, and of the limits
  // Of pixels after resizing; 0: the model's.
  int64_t min_pixels, max_pixels;
  char *where; // owned: the member that it is from
} td_api_image;

typedef struct {
  bool is_chat;
  char *model; // owned; NULL if the request names none, or ""
  bool stream, include_usage;
  bool include_usage_so_far; // report usage with every token
  bool return_progress;      // streaming: report how much of the prompt is prefilled
  uint32_t n;                // choices computed per prompt, 1 to TD_API_MAX_N
  uint32_t n_best;           // how many of them are returned: the likeliest per token
  int64_t max_tokens;        // -1: as many as fit; 0: none (completions)
  int64_t min_tokens;        // 0: none
  bool ignore_eos, logprobs;
  bool receipt;              // of each answer (receipt.h)
  bool echo;                 // completions: the text begins with the prompt
  int64_t n_prompt_logprobs; // candidates reported for each token of the prompt; -1: none reported
  bool shows_special;        // skip_special_tokens is false: control tokens appear in the text
  bool has_tools;            // tools are offered and tool_choice is not "none"
  td_tool_params params;     // their parameters' types
  bool one_call;             // parallel_tool_calls is false
  bool has_seed;
  char *cache_salt; // owned: keeps the prefix cache apart; NULL: none
  td_sampling sampling;
  td_wire_dry dry;      // last_n 0: off
  td_token_value *bias; // owned
  uint32_t n_bias;
  td_api_text_bias *text_bias; // owned, [n_text_bias]: to be tokenized
  uint32_t n_text_bias;
  td_stops stops;
  int32_t stop_ids[TD_API_MAX_STOP_IDS];
  uint32_t n_stop_ids;
  // chat: the variables of the model's template, as a JSON object. The arguments of earlier tool
  // calls are objects in vars, which most templates expect, and strings in plain_vars, as sent.
  // plain_vars is empty if there is no difference.
  td_buf vars, plain_vars;
  td_api_mark *marks; // owned, [n_marks]: the messages of vars
  uint32_t n_marks;
  size_t cap_marks;
  // Those that vars shows, in their order: as parts {"type": "image", "image": the file's digest}.
  bool sees;
  td_api_image *images; // owned, [n_images]
  uint32_t n_images, n_shown;
  size_t cap_images;
  uint64_t owner;     // for whom its turns are remembered (turn.h), set by the caller; 0: everyone
  size_t vars_rest;   // where vars continues behind its messages
  bool is_continued;  // the last message is continued
  bool is_cut_to_fit; // `truncation: auto`: the first turns may be left out of a prompt too long
  // What the generated text must match. While parsing, build holds its parts: `format`, if
  // has_format, and those of callable. td_api_compose_grammar makes one grammar of them: the bytes
  // of text/grammar/grammar.h; empty: any text.
  td_buf grammar;
  td_budget budget;        // what work on these may still cost
  td_grammar_build *build; // owned; NULL: no parts
  td_node format;
  bool has_format;
  bool allows_any_json;   // td_json_schema_opts
  const char *constraint; // the member that grammar is from: static; NULL: none
  td_calls_mode calls_mode;
  td_api_tool *callable; // owned, [n_callable]
  uint32_t n_callable;
  // completions
  char *suffix;           // owned: the text that follows what is generated; NULL: none
  bool is_bare;           // add_special_tokens is false: no BOS or other tokens are added
  td_api_prompt *prompts; // owned
  uint32_t n_prompts;
} td_api_request;

// Parse the body of /v1/chat/completions or /v1/completions. Call td_api_request_free in every
// case, also on error.
td_status td_api_parse_chat(td_api_request *out, const char *body, size_t len,
                            const td_api_defaults *defaults, td_api_error *error);
td_status td_api_parse_completion(td_api_request *out, const char *body, size_t len,
                                  const td_api_defaults *defaults, td_api_error *error);
void td_api_request_free(td_api_request *request);
// Adds the tokens of text_bias to bias.
td_status td_api_tokenize_bias(td_api_request *request, const td_tokenizer *tok,
                               td_api_error *error);
// How many of the user's turns in vars have an earlier turn before them.
uint32_t td_api_n_turns(const td_buf *vars);
// Appends vars, which holds a conversation, without what stands before the n-th of these turns, n
// from 1, except instructions at the beginning.
void td_api_leave_out(td_buf *out, const td_buf *vars, uint32_t n);
// The model that a body of any endpoint names, as model or name; the caller frees it. NULL: none.
td_status td_api_parse_model(char **out, const char *body, size_t len, td_api_error *error);

// The form in which a model writes tool calls (output_parser.h).
typedef enum {
  TD_CALL_HERMES,
  TD_CALL_DEEPSEEK,
  TD_CALL_DEEPSEEK_V3,
  TD_CALL_KIMI,
  TD_CALL_FUNCTION,       // Qwen3-Coder
  TD_CALL_ARG_KEYS,       // GLM-4.5 and 4.6
  TD_CALL_ARG_KEYS_TIGHT, // GLM-4.7, without line feeds
  TD_CALL_INVOKE,         // MiniMax
  TD_CALL_DSML,           // DeepSeek-V3.2
  TD_CALL_DSML_V4,        // DeepSeek-V4
  TD_CALL_ELEMENTS,       // MiniMax-M3
  TD_CALL_HY,             // Hy3's preview
  TD_CALL_HY_SUFFIXED,    // Hy3
  TD_CALL_MISTRAL,
  TD_CALL_MISTRAL_OBJECTS, // its older models
  TD_CALL_GEMMA,           // Gemma 4
  TD_CALL_HARMONY,         // gpt-oss, in messages with channels; reasoning is one of them
} td_call_form;

// The member that constrains the output, if there is a grammar; otherwise NULL. Static.
const char *td_api_constrained_by(const td_api_request *request);
// Compiles the request's constraints to one grammar, request->grammar; request->build is gone then.
// What follows the reasoning is constrained, not the reasoning.
struct td_call_syntax;
td_status td_api_compose_grammar(td_api_request *request, const struct td_call_syntax *syntax,
                                 td_reasoning reasoning, td_api_error *error);

// Parse bodies of the debugging endpoints. /tokenize: "content" or "prompt", or "messages" as in
// chat; /apply-template: "messages"; /detokenize: "tokens". The request is a chat when it has
// messages.
td_status td_api_parse_tokenize(td_api_request *out, const char *body, size_t len,
                                const td_api_defaults *defaults, td_api_error *error);
td_status td_api_parse_detokenize(td_api_request *out, const char *body, size_t len,
                                  const td_api_defaults *defaults, td_api_error *error);
