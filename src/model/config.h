// src/model/config.h - reads config.json and generation_config.json, both as published by the
// models' makers and as written by transformers 4 and 5.
#pragma once

#include "base/json_parse.h"
#include "model/model.h"

#define TD_CONFIG_MAX_BYTES ((size_t)16 << 20)

// State of reading one file. Messages begin with the file's name.
typedef struct {
  const cJSON *root;
  const char *file;
  td_model_config *out;
  td_err *err; // never NULL
} td_config_reader;

// Reads parsed documents; generation may be NULL. dir is named in messages. TD_EFORMAT: a value has
// the wrong type or is out of range. TD_EUNSUPPORTED.
td_status td_config_parse(td_model_config *out, const cJSON *config, const cJSON *generation,
                          const char *dir, td_err *err);

// Parts of td_config_parse, one source file each.
td_status td_config_read_rope(const td_config_reader *r);      // needs max_position
td_status td_config_read_quant(const td_config_reader *r);     // validates quantization_config
td_status td_config_read_token_ids(const td_config_reader *r); // from either file
td_status td_config_read_sampling(const td_config_reader *r);  // generation_config.json
// The tower's part of the whole, after the language model's: td_model_config.vision. tower NULL:
// none is supported.
void td_config_read_vision(const td_config_reader *whole, const td_tower *tower);
// Records the keys that another family would obey, and whose values differ from what this family
// computes: td_model_config.ignored. After everything else is read.
void td_config_find_ignored(const td_config_reader *r);
void td_config_add_ignored(const td_config_reader *r, const char *key); // a literal

// For the families (families/family.h). Checks a named option of which only the default is
// supported.
td_status td_config_expect_str(const td_config_reader *r, const char *key, const char *supported);
// An error of the file, whose name is put in front.
td_status td_config_fail(const td_config_reader *r, td_status code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
td_status td_config_bad(const td_config_reader *r, const char *what); // TD_EFORMAT
// The object called key; NULL: there is none.
td_status td_config_part(const td_config_reader *r, const char *key, const cJSON **out);
bool td_config_takes(const td_config_reader *r, const char *key); // not in family->ignores
// The layers that have an indexer, as GLM's configurations say: indexer_types, index_topk_pattern,
// or index_topk_freq.
td_status td_config_read_index_layers(const td_config_reader *r);
// What an entry of a list with one for each layer may be, and whether the layer is then in a set.
typedef struct {
  const char *name;
  bool is_in;
} td_layer_name;
// Adds layers by the list called key. An error names the first two of the names.
td_status td_config_read_layer_names(const td_config_reader *r, const char *key,
                                     const td_layer_name *names, size_t n_names, uint64_t *layers);
// layer_types and sliding_window. Without the former window_layers stay as they are; null for the
// latter is no window, which only full attention can do without.
td_status td_config_read_windows(const td_config_reader *r, uint32_t fallback);
// Whether sliding_window is null.
bool td_config_has_no_window(const td_config_reader *r);
// Makes the layers of a set of this kind.
void td_config_set_kind(const td_config_reader *r, const uint64_t *layers, td_attn_kind kind);

// Read values of object, which is the root or nested in it. If the key is absent, *out is
// unchanged; null is an error.
td_status td_config_uint(const td_config_reader *r, const cJSON *object, const char *key,
                         uint32_t min, uint32_t max, uint32_t *out);
// Finite and within [min, max].
td_status td_config_double(const td_config_reader *r, const cJSON *object, const char *key,
                           double min, double max, double *out);
td_status td_config_bool(const td_config_reader *r, const cJSON *object, const char *key,
                         bool *out);
td_status td_config_str(const td_config_reader *r, const cJSON *object, const char *key,
                        const char **out);
