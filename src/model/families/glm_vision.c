// src/model/families/glm_vision.c - the towers of GLM-4.5V, GLM-4.6V and GLM-5.3-Flash.
#include "model/families/family.h"

#define VISION_KEY(key, field, max, fallback) TD_KEY(key, NULL, vision.field, 1, max, fallback)
#define GLM_KEYS(hidden, heads)                                                                    \
  VISION_KEY("depth", n_layers, TD_MAX_VISION_LAYERS, 24),                                         \
      VISION_KEY("hidden_size", dim, 1u << 16, hidden),                                            \
      VISION_KEY("num_heads", n_heads, TD_MAX_HEADS, heads),                                       \
      VISION_KEY("patch_size", patch, 256, 14),                                                    \
      VISION_KEY("temporal_patch_size", temporal, 16, 2),                                          \
      VISION_KEY("spatial_merge_size", merge, 16, 2)

// The blocks' MLPs are as wide as the result.
static const td_config_key glm4v_keys[] = {
    GLM_KEYS(1536, 12),
    VISION_KEY("out_hidden_size", out_dim, TD_MAX_DIM, 4096),
    VISION_KEY("out_hidden_size", mlp_dim, 1u << 18, 4096),
    VISION_KEY("intermediate_size", context_dim, 1u << 18, 13696),
    VISION_KEY("image_size", image_size, 1u << 16, 336),
};
static const td_config_key glm5_keys[] = {
    GLM_KEYS(1024, 16),
    VISION_KEY("out_hidden_size", out_dim, TD_MAX_DIM, 1536),
    VISION_KEY("intermediate_size", mlp_dim, 1u << 18, 4096),
    VISION_KEY("projection_intermediate_size", context_dim, 1u << 18, 10240),
};

#define WHOLE(kind, name, field, rows, cols)                                                       \
  TD_PLACE(td_vision_weights, kind, name, field, rows, cols, 0, NULL)
#define OF_LAYER(kind, name, field, rows, cols, conditions)                                        \
  TD_PLACE(td_vision_layer, kind, name, field, rows, cols, conditions, NULL)

#define WHOLE_PLACES                                                                               \
  WHOLE(PATCH, "patch_embed.proj.weight", patch, VISION, VISION_PATCH),                            \
      WHOLE(VEC, "patch_embed.proj.bias", patch_bias, VISION, ONE),                                \
      WHOLE(VEC, "post_layernorm.weight", merger.norm, VISION, ONE),                               \
      WHOLE(PATCH, "downsample.weight", merger.conv, VISION_OUT, VISION_MERGED),                   \
      WHOLE(VEC, "downsample.bias", merger.conv_bias, VISION_OUT, ONE),                            \
      WHOLE(PLAIN, "merger.proj.weight", merger.fc1, VISION_OUT, VISION_OUT),                      \
      WHOLE(VEC, "merger.post_projection_norm.weight", merger.mid_norm, VISION_OUT, ONE),          \
      WHOLE(VEC, "merger.post_projection_norm.bias", merger.mid_norm_bias, VISION_OUT, ONE),       \
      WHOLE(PLAIN, "merger.gate_proj.weight", merger.gate, VISION_CONTEXT, VISION_OUT),            \
      WHOLE(PLAIN, "merger.up_proj.weight", merger.up, VISION_CONTEXT, VISION_OUT),                \
      WHOLE(PLAIN, "merger.down_proj.weight", merger.down, VISION_OUT, VISION_CONTEXT)

#define LAYER_PLACES                                                                               \
  OF_LAYER(VEC, "norm1.weight", norm1, VISION, ONE, 0),                                            \
      OF_LAYER(VEC, "norm2.weight", norm2, VISION, ONE, 0),                                        \
      OF_LAYER(PLAIN, "attn.qkv.weight", qkv, VISION_QKV, VISION, 0),                              \
      OF_LAYER(VEC, "attn.qkv.bias", qkv_bias, VISION_QKV, ONE, TD_IF(BIAS)),                      \
      OF_LAYER(PLAIN, "attn.proj.weight", proj, VISION, VISION, 0),                                \
      OF_LAYER(PLAIN, "mlp.gate_proj.weight", fc1, VISION_MLP, VISION, 0),                         \
      OF_LAYER(PLAIN, "mlp.up_proj.weight", up, VISION_MLP, VISION, 0),                            \
      OF_LAYER(PLAIN, "mlp.down_proj.weight", fc2, VISION, VISION_MLP, 0)

static const td_tensor_spec glm4v_whole[] = {
    WHOLE_PLACES,
    WHOLE(VEC, "post_conv_layernorm.weight", patch_norm, VISION, ONE),
    WHOLE(PLAIN, "embeddings.position_embedding.weight", positions, VISION_POSITIONS, VISION),
};
static const td_tensor_spec glm4v_layer[] = {LAYER_PLACES};
static const td_tensor_spec glm5_whole[] = {WHOLE_PLACES};
static const td_tensor_spec glm5_layer[] = {
    LAYER_PLACES,
    OF_LAYER(VEC, "attn.q_norm.weight", q_norm, VISION_HEAD, ONE, 0),
    OF_LAYER(VEC, "attn.k_norm.weight", k_norm, VISION_HEAD, ONE, 0),
    OF_LAYER(VEC, "attn.proj.bias", proj_bias, VISION, ONE, TD_IF(BIAS)),
    OF_LAYER(VEC, "mlp.gate_proj.bias", fc1_bias, VISION_MLP, ONE, TD_IF(BIAS)),
    OF_LAYER(VEC, "mlp.up_proj.bias", up_bias, VISION_MLP, ONE, TD_IF(BIAS)),
    OF_LAYER(VEC, "mlp.down_proj.bias", fc2_bias, VISION, ONE, TD_IF(BIAS)),
};

#define GLM_TOWER(name)                                                                            \
  .keys = name##_keys, .n_keys = TD_COUNT(name##_keys), .hidden_act = "silu", .eps = 1e-5f,        \
  .layers = "blocks.%u.", .whole = name##_whole, .n_whole = TD_COUNT(name##_whole),                \
  .layer = name##_layer, .n_layer = TD_COUNT(name##_layer)

const td_tower td_tower_glm4v = {GLM_TOWER(glm4v), .is_bicubic = true};
const td_tower td_tower_glm5 = {GLM_TOWER(glm5), .has_bias = true, .limit = 10};
