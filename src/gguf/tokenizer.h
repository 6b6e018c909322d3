// src/gguf/tokenizer.h - a publisher's tokenizer files, from the metadata of a GGUF file.
#pragma once

#include "base/buf.h"
#include "gguf/gguf.h"

// Appends tokenizer.json. tokenizer.ggml.model is gpt2 or llama, whose scores stand in for merges
// (text/tokenizer/bpe.h). The patterns that cut words of the former are not in the file, only their
// name (tokenizer.ggml.pre): TD_EUNSUPPORTED lists the known ones. TD_EFORMAT.
td_status td_gguf_tokenizer(td_buf *out, const td_gguf *gguf, td_err *err);
// Appends tokenizer_config.json: BOS, EOS and the chat templates.
td_status td_gguf_tokenizer_config(td_buf *out, const td_gguf *gguf, td_err *err);
