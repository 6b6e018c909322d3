// src/gguf/arch_impl.h - the table of architectures, shared by what reads their names (names.c) and
// their metadata (config.c).
#pragma once

#include "base/json_write.h"
#include "gguf/arch.h"

// What GGUF and the publisher call the same thing. Lists end with NULL.
typedef struct {
  const char *gguf, *published;
} td_gguf_name;

typedef struct {
  const td_gguf *parts; // [n_parts], the files of the model; the first has the metadata
  size_t n_parts;
  const td_gguf_arch *arch;
  td_json_writer *to; // inside of config.json's object
  td_err *err;
} td_gguf_config_writer;

struct td_gguf_arch {
  const char *name;          // general.architecture
  const char *model_type;    // of config.json
  bool is_mla;               // latent attention; GLM's of that kind are glm4_moe_lite
  bool untruncated;          // the ends of YaRN's ramp are not rounded
  const td_gguf_name *names; // tensors of a layer that others name differently; may be NULL
  const td_gguf_name *keys;  // metadata, after the architecture's name, and keys of config.json
  td_status (*write)(const td_gguf_config_writer *w); // writes everything else; may be NULL
};
