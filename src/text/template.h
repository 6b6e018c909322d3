// src/text/template.h - chat templates: a conversation to the text of a prompt.
// Templates are Jinja2 as transformers runs them: jinja2's immutable sandbox with trim_blocks,
// lstrip_blocks, loop controls, {% generation %}, raise_exception, strftime_now and a tojson that
// is json.dumps. A template is parsed once and may be rendered by several threads at a time.
#ifndef TD_TEXT_TEMPLATE_H
#define TD_TEXT_TEMPLATE_H

#include <cjson/cJSON.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"
#include "text/span.h"

typedef struct td_template td_template;

// Parses source[len], UTF-8. On error *out is NULL: TD_EFORMAT with line and reason, TD_ELIMIT when
// it is nested too deeply or too large.
td_status td_template_open(td_template **out, const char *source, size_t len, td_err *err);

// The template of a model directory: chat_template.jinja, else chat_template in
// tokenizer_config.json, a string or a list of named ones. The one named tool_use, also as
// additional_chat_templates/tool_use.jinja, serves renders with tools. TD_ENOENT when there is
// none.
td_status td_template_open_model(td_template **out, const char *model_dir, td_err *err);

void td_template_close(td_template *tmpl);

// What a render may cost; 0 takes the default. A hostile template gets TD_ELIMIT.
typedef struct {
  size_t max_output_bytes; // 64 MiB
  size_t max_memory_bytes; // 256 MiB
  uint64_t max_steps;      // 20 million
  uint64_t max_cpu_ms;     // 2000, of the calling thread's time: steps differ in what they cost
  int64_t now_us;          // for strftime_now, since 1970; 0: the clock
} td_template_opts;

// Renders with the members of the object `vars` as variables, exactly those: transformers itself
// passes messages, tools (null without), documents (null without), add_generation_prompt and the
// special tokens (bos_token, eos_token, ...). Appends to out. Numbers keep their spelling where
// td_json_parse noted it.
//
// typed, when not NULL, receives the ranges of out that come from strings of vars, object keys
// included: text that must not be read as control tokens. Trusted are the variables whose names end
// in "_token" and the usual role names.
//
// TD_EINVAL: the template refused the conversation (raise_exception); TD_EFORMAT: it failed, as
// Python's would; TD_EUNSUPPORTED; TD_ELIMIT. The message names the line. On error out and typed
// are as they were. Needs 4 MiB of stack.
td_status td_template_render(const td_template *tmpl, const cJSON *vars,
                             const td_template_opts *opts, td_buf *out, td_spans *typed,
                             td_err *err);

#endif
