// src/model/families/qwen3_vision.c - the towers of Qwen3-VL, Qwen3.5 and Qwen3-Omni.
#include "model/families/family.h"

#define VISION_KEY(key, field, max, fallback) TD_KEY(key, NULL, vision.field, 1, max, fallback)

static const td_config_key keys[] = {
    VISION_KEY("depth", n_layers, TD_MAX_VISION_LAYERS, 27),
    VISION_KEY("hidden_size", dim, 1u << 16, 1152),
    VISION_KEY("intermediate_size", mlp_dim, 1u << 18, 4304),
    VISION_KEY("num_heads", n_heads, TD_MAX_HEADS, 16),
    VISION_KEY("out_hidden_size", out_dim, TD_MAX_DIM, 3584),
    VISION_KEY("patch_size", patch, 256, 16),
    VISION_KEY("temporal_patch_size", temporal, 16, 2),
    VISION_KEY("spatial_merge_size", merge, 16, 2),
    VISION_KEY("num_position_embeddings", n_positions, 1u << 24, 2304),
};

#define WHOLE(kind, name, field, rows, cols)                                                       \
  TD_PLACE(td_vision_weights, kind, name, field, rows, cols, 0, NULL)
#define OF_LAYER(kind, name, field, rows, cols)                                                    \
  TD_PLACE(td_vision_layer, kind, name, field, rows, cols, 0, NULL)
#define OF_MERGER(kind, name, field, rows, cols)                                                   \
  TD_PLACE(td_vision_merger, kind, name, field, rows, cols, 0, NULL)

#define WHOLE_PLACES(norm_, fc1_, fc2_)                                                            \
  {                                                                                                \
    WHOLE(PATCH, "patch_embed.proj.weight", patch, VISION, VISION_PATCH),                          \
        WHOLE(VEC, "patch_embed.proj.bias", patch_bias, VISION, ONE),                              \
        WHOLE(PLAIN, "pos_embed.weight", positions, VISION_POSITIONS, VISION),                     \
        WHOLE(VEC, "merger." norm_ ".weight", merger.norm, VISION, ONE),                           \
        WHOLE(VEC, "merger." norm_ ".bias", merger.norm_bias, VISION, ONE),                        \
        WHOLE(PLAIN, "merger." fc1_ ".weight", merger.fc1, VISION_MERGED, VISION_MERGED),          \
        WHOLE(VEC, "merger." fc1_ ".bias", merger.fc1_bias, VISION_MERGED, ONE),                   \
        WHOLE(PLAIN, "merger." fc2_ ".weight", merger.fc2, VISION_OUT, VISION_MERGED),             \
        WHOLE(VEC, "merger." fc2_ ".bias", merger.fc2_bias, VISION_OUT, ONE),                      \
  }

#define MERGER_PLACES(norm_, fc1_, fc2_)                                                           \
  {                                                                                                \
    OF_MERGER(VEC, norm_ ".weight", norm, VISION_MERGED, ONE),                                     \
        OF_MERGER(VEC, norm_ ".bias", norm_bias, VISION_MERGED, ONE),                              \
        OF_MERGER(PLAIN, fc1_ ".weight", fc1, VISION_MERGED, VISION_MERGED),                       \
        OF_MERGER(VEC, fc1_ ".bias", fc1_bias, VISION_MERGED, ONE),                                \
        OF_MERGER(PLAIN, fc2_ ".weight", fc2, VISION_OUT, VISION_MERGED),                          \
        OF_MERGER(VEC, fc2_ ".bias", fc2_bias, VISION_OUT, ONE),                                   \
  }

static const td_tensor_spec whole[] = WHOLE_PLACES("norm", "linear_fc1", "linear_fc2");
static const td_tensor_spec merger[] = MERGER_PLACES("norm", "linear_fc1", "linear_fc2");
static const td_tensor_spec omni_whole[] = WHOLE_PLACES("ln_q", "mlp.0", "mlp.2");
static const td_tensor_spec omni_merger[] = MERGER_PLACES("ln_q", "mlp.0", "mlp.2");

static const td_tensor_spec layer[] = {
    OF_LAYER(VEC, "norm1.weight", norm1, VISION, ONE),
    OF_LAYER(VEC, "norm1.bias", norm1_bias, VISION, ONE),
    OF_LAYER(VEC, "norm2.weight", norm2, VISION, ONE),
    OF_LAYER(VEC, "norm2.bias", norm2_bias, VISION, ONE),
    OF_LAYER(PLAIN, "attn.qkv.weight", qkv, VISION_QKV, VISION),
    OF_LAYER(VEC, "attn.qkv.bias", qkv_bias, VISION_QKV, ONE),
    OF_LAYER(PLAIN, "attn.proj.weight", proj, VISION, VISION),
    OF_LAYER(VEC, "attn.proj.bias", proj_bias, VISION, ONE),
    OF_LAYER(PLAIN, "mlp.linear_fc1.weight", fc1, VISION_MLP, VISION),
    OF_LAYER(VEC, "mlp.linear_fc1.bias", fc1_bias, VISION_MLP, ONE),
    OF_LAYER(PLAIN, "mlp.linear_fc2.weight", fc2, VISION, VISION_MLP),
    OF_LAYER(VEC, "mlp.linear_fc2.bias", fc2_bias, VISION, ONE),
};

#define QWEN3_TOWER(whole_, merger_)                                                               \
  .keys = keys, .n_keys = TD_COUNT(keys), .hidden_act = "gelu_pytorch_tanh",                       \
  .layers = "blocks.%u.", .whole = whole_, .n_whole = TD_COUNT(whole_), .layer = layer,            \
  .n_layer = TD_COUNT(layer), .merger = merger_, .n_merger = TD_COUNT(merger_)

static const uint32_t deep[] = {8, 16, 24};

const td_tower td_tower_qwen3_vl = {QWEN3_TOWER(whole, merger),
                                    .deep_mergers = "deepstack_merger_list.%u.", .deep = deep,
                                    .n_deep = TD_COUNT(deep)};
const td_tower td_tower_qwen3_omni = {QWEN3_TOWER(omni_whole, omni_merger),
                                      .deep_mergers = "merger_list.%u.", .deep = deep,
                                      .n_deep = TD_COUNT(deep)};
const td_tower td_tower_qwen3_5 = {QWEN3_TOWER(whole, merger)};
