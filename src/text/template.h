// src/text/template.h - chat templates: render a conversation as the text of a prompt.
// Templates are Jinja2 as run by transformers: jinja2's immutable sandbox with trim_blocks,
// lstrip_blocks, loop controls, {% generation %}, raise_exception, strftime_now, and tojson
// implemented by json.dumps. A template is parsed once; several threads may render it at the same
// time.
#pragma once

#include <cjson/cJSON.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"
#include "text/span.h"

typedef struct td_template td_template;

// Parses source[0..len), UTF-8. On error *out is NULL. TD_EFORMAT: syntax error, with line and
// reason. TD_ELIMIT: nested too deeply, or too large.
td_status td_template_open(td_template **out, const char *source, size_t len, td_err *err);

// Opens the template of a model directory: chat_template.jinja, else chat_template in
// tokenizer_config.json, which is a string or a list of named templates. A template named tool_use,
// in that list or as additional_chat_templates/tool_use.jinja, is used for renders with tools.
// Without any, the one of builtin.h for the model's model_type. TD_ENOENT if there is no template.
td_status td_template_open_model(td_template **out, const char *model_dir, td_err *err);

void td_template_close(td_template *tmpl);
// Appends the source.
void td_template_source(const td_template *tmpl, td_buf *out);
// Whether the source, or that of its tool_use, contains the text.
bool td_template_mentions(const td_template *tmpl, const char *text);

// Limits of one render, against hostile templates; exceeding one returns TD_ELIMIT. 0 selects the
// default.
typedef struct {
  size_t max_output_bytes;        // 64 MiB
  size_t max_memory_bytes;        // 256 MiB, beyond 16 MiB a sixth of what memory has left
  uint64_t left_bytes;            // that, for tests; what the machine and control groups say
  uint64_t max_steps;             // 20 million
  uint64_t max_cpu_ms;            // 2000, CPU time of the calling thread; the cost of a step varies
  const atomic_bool *is_canceled; // may be NULL; once it is true, TD_ECANCELED is returned soon
  int64_t now_us;                 // time for strftime_now, us since 1970; 0: the clock
} td_template_opts;

// Renders with exactly the members of the object `vars` as variables and appends to out.
// transformers passes messages, tools (or null), documents (or null), add_generation_prompt and the
// special tokens (bos_token, eos_token, ...). Numbers keep their spelling if td_json_parse recorded
// it.
//
// typed, if not NULL, receives the ranges of out that come from strings of vars, including object
// keys: text in which no control tokens may be parsed. Exempt are variables whose name ends in
// "_token", and the usual role names.
//
// TD_EINVAL: the template rejected the conversation (raise_exception). TD_EFORMAT: a runtime error,
// as in Python. TD_EUNSUPPORTED. TD_ELIMIT. The message names the line. On error out and typed are
// unchanged. Needs 4 MiB of stack.
td_status td_template_render(const td_template *tmpl, const cJSON *vars,
                             const td_template_opts *opts, td_buf *out, td_spans *typed,
                             td_err *err);

// A template by the model_type that it is for.
typedef struct {
  const char *model_type;
  const char *text; // [len]
  size_t len;
} td_builtin_template;

extern const td_builtin_template td_builtin_templates[]; // the last has no model_type

// Appends the source of the template for the model_type in the config.json of a model; nothing if
// there is none. Only TD_ENOMEM is an error.
td_status td_builtin_template_find(td_buf *out, const char *model, td_err *err);
