// src/gguf/arch.h - what llama.cpp's writers call the parts of a model: architectures, keys of
// their metadata and names of their tensors, in the terms of the models' publishers.
#pragma once

#include "base/buf.h"
#include "gguf/gguf.h"

typedef struct td_gguf_arch td_gguf_arch;

// The architecture that the metadata name. TD_EUNSUPPORTED lists the known ones.
td_status td_gguf_arch_of(const td_gguf *gguf, const td_gguf_arch **out, td_err *err);

// The publisher's name of a tensor; a '*' in it stands for the number of an expert, over which the
// tensor's first dimension counts. A name that is not known comes out as it is, or in a layer as
// "model.layers.N." and the rest. False: it is too long for out.
bool td_gguf_tensor_name(const td_gguf_arch *arch, td_gguf_str name, char *out, size_t n_out);

// Makes an error about the files that a model's metadata and tensors stand for (files.h) one about
// these: keys of config.json become keys of metadata, published names of tensors GGUF's.
void td_gguf_name_error(const td_gguf_arch *arch, const td_gguf *parts, size_t n_parts,
                        td_err *err);

// Appends the config.json that the metadata of a model's files describe; the first file has them.
// TD_EFORMAT, TD_EUNSUPPORTED.
td_status td_gguf_config(td_buf *out, const td_gguf *parts, size_t n_parts, td_err *err);
