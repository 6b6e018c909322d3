// src/text/builtin.h - chat templates for models that are published without one, because their
// prompts are described by a program instead: files of src/text/templates, in the executable.
#pragma once

#include "base/buf.h"
#include "base/status.h"

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
