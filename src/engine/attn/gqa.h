// src/engine/attn/gqa.h - operators that the kinds of grouped-query attention share. Internal to
// engine/attn/.
#ifndef TD_ENGINE_GQA_H
#define TD_ENGINE_GQA_H

#include "engine/attn/ops.h"

void td_gqa_project(td_engine *engine, const td_microbatch *part, const td_layer *layer);
void td_gqa_store(td_engine *engine, const td_attn_store *entries);
// blocks: selections of the microbatch's tokens (td_op_select_blocks); NULL: they see all keys.
void td_gqa_attend(td_engine *engine, const td_microbatch *part, const td_layer *layer,
                   uint32_t layer_idx, const int32_t *blocks);

#endif
