// src/api/dialects/go_template.h - the part of Go's templates that Ollama's `template` consists of
// for a single prompt: {{ .System }}, {{ .Prompt }}, {{ .Response }}, {{ .Suffix }} and {{ if }},
// {{ else
// }}, {{ end }} around them, with - to trim white space.
#pragma once

#include "base/buf.h"
#include "base/status.h"

typedef struct {
  const char *system, *prompt, *suffix; // borrowed
} td_go_vars;

// Appends what the template makes up to .Response, which the model writes. TD_EUNSUPPORTED: err
// names the action.
td_status td_go_render(td_buf *out, const char *text, const td_go_vars *vars, td_err *err);
