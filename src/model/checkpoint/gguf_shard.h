// src/model/checkpoint/gguf_shard.h - a GGUF file as a shard: its tensors by their publisher's
// names, and experts, which it has in one tensor for a layer, one by one.
#pragma once

#include "gguf/arch.h"
#include "model/checkpoint/safetensors.h"

// out's tensors borrow gguf's data and file; td_safetensors_free frees out. TD_EFORMAT, TD_ELIMIT.
td_status td_gguf_shard(td_safetensors *out, const td_gguf *gguf, const td_gguf_arch *arch,
                        td_err *err);
