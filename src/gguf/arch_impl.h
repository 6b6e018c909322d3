// src/gguf/arch_impl.h - the table of architectures, shared by what reads their names (names.c) and
// their metadata (config_json.c).
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

// metadata that most architectures have, and keys of config.json (config_json.c).
extern const td_gguf_name td_gguf_common_keys[];
// Whether one of the files has a tensor of this name.
bool td_gguf_has_tensor(const td_gguf *parts, size_t n_parts, const char *name);
// GGUF's name of a tensor of which the publisher's is the first n bytes of name; of several the one
// that the files have. False: no tensor's, or too long for out.
bool td_gguf_own_name(const td_gguf_arch *arch, const td_gguf *parts, size_t n_parts,
                      const char *name, size_t n, char *out, size_t n_out);

struct td_gguf_arch {
  const char *name;          // general.architecture
  const char *model_type;    // of config.json
  bool is_mla;               // latent attention; GLM's of that kind are glm4_moe_lite
  bool untruncated;          // the ends of YaRN's ramp are not rounded
  bool writes_rope;          // write does
  const td_gguf_name *names; // tensors of a layer that others name differently; may be NULL
  const td_gguf_name *keys;  // metadata, after the architecture's name, and keys of config.json
  td_status (*write)(const td_gguf_config_writer *w); // writes everything else; may be NULL
};
