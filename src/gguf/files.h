// src/gguf/files.h - a model in GGUF: one file, or parts of it called NAME-00001-of-0000N.gguf,
// seen as the folder of files that its publisher would have made.
#pragma once

#include "base/fs.h"
#include "base/json_parse.h"
#include "gguf/arch.h"

// Whether a model's path is that of a GGUF file, rather than of a folder: by its ending, or what
// the file begins with.
bool td_gguf_is(const char *model);
// The model's name: the file's without folder, part and ending. The caller frees it; NULL: out of
// memory.
char *td_gguf_model_name(const char *path);

// Path of part idx of a model with n parts, of which path is any; a single file is its only part.
// The caller frees it; NULL: out of memory.
char *td_gguf_part_path(const char *path, uint32_t idx, uint32_t n);
// How many parts the model has whose file or part path is, as its name says.
uint32_t td_gguf_n_parts(const char *path);
// Whether the file is the first part, or the only one.
bool td_gguf_is_first(const char *path);
// TD_EFORMAT: the metadata of a part state another number, or other parts, than its name.
td_status td_gguf_check_part(const td_gguf *gguf, td_err *err);

// All files of a model, mapped and parsed.
typedef struct {
  uint32_t n;
  td_gguf *parts;    // owned [n]
  td_file_map *maps; // owned [n]
  char **paths;      // owned [n]
} td_gguf_files;
// path: the file, or any of its parts. TD_EFORMAT: a part is of another model, or another part than
// its name says. On error *out is zeroed.
td_status td_gguf_files_open(td_gguf_files *out, const char *path, td_err *err);
void td_gguf_files_close(td_gguf_files *files);

// A file of a checkpoint, which is a folder or a GGUF model: read, or made from the metadata
// (config.json, tokenizer.json, tokenizer_config.json). Like td_file_read_regular otherwise.
td_status td_checkpoint_read(td_buf *out, const char *model, const char *name, size_t max_bytes,
                             td_err *err);
// The same, parsed. The caller owns *out.
td_status td_checkpoint_json(cJSON **out, const char *model, const char *name, size_t max_bytes,
                             td_err *err);
// If model is a GGUF file, an error about a file of the checkpoint, or its tensors, becomes one
// about what the GGUF file has in their place. err may be NULL.
void td_checkpoint_name_error(const char *model, td_err *err);
bool td_checkpoint_has(const char *model, const char *name);
// The GGUF model in a folder without a config.json: its file, or first part. The caller owns *out;
// NULL: there is none. TD_EINVAL: there are several.
td_status td_gguf_in(char **out, const char *folder, td_err *err);
// Whether an entry of a folder is a model: a folder with a config.json or a GGUF model, or a GGUF
// file, of whose parts the first.
bool td_checkpoint_is(const char *folder, const char *name);
