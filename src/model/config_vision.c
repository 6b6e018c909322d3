// src/model/config_vision.c - reads the configuration of a tower. A tower that is not as its
// reference has it is left out, and the model does not see: its language model is served all the
// same.
#include <string.h>

#include "base/log.h"
#include "model/families/family.h"

static td_status read_deep(const td_config_reader *r, td_vision_config *v) {
  const td_tower *tower = v->tower;
  const cJSON *list = td_json_get(r->root, "deepstack_visual_indexes");
  if (!tower->deep) return TD_OK;
  for (uint32_t i = 0; !list && i < tower->n_deep; i++)
    v->deep[v->n_deep++] = tower->deep[i];
  if (list && !cJSON_IsArray(list))
    return td_config_bad(r, "deepstack_visual_indexes must be an array");
  for (const cJSON *item = list ? list->child : NULL; item; item = item->next) {
    int64_t value = 0;
    if (v->n_deep == TD_MAX_DEEP || !td_json_whole(item, 0, v->n_layers - 1, &value) ||
        (v->n_deep && value <= v->deep[v->n_deep - 1]))
      return td_config_bad(r, "deepstack_visual_indexes must hold a few layers in rising order");
    v->deep[v->n_deep++] = (uint32_t)value;
  }
  return TD_OK;
}

// What towers with gated MLPs state, and others do not.
static td_status read_eps(const td_config_reader *r, td_vision_config *v) {
  const td_tower *tower = v->tower;
  double eps = tower->eps, limit = tower->limit;
  v->has_bias = tower->has_bias;
  v->is_bicubic = tower->is_bicubic;
  v->eps = 1e-6f;
  if (!tower->eps) return TD_OK;
  td_status st = td_config_double(r, r->root, "rms_norm_eps", 1e-30, 1, &eps);
  if (st == TD_OK) st = td_config_bool(r, r->root, "attention_bias", &v->has_bias);
  if (st == TD_OK && tower->limit)
    st = td_config_double(r, r->root, "swiglu_limit", 1e-3, 1e6, &limit);
  v->eps = (float)eps;
  v->limit = (float)limit;
  return st;
}

static td_status read_tower(const td_config_reader *r, td_vision_config *v) {
  const cJSON *rope = td_json_get(r->root, "rope_parameters");
  v->rope_theta = 10000;
  td_status st = td_config_read_uints(r, v->tower->keys, v->tower->n_keys);
  if (st == TD_OK) st = td_config_expect_str(r, "hidden_act", v->tower->hidden_act);
  if (st == TD_OK) st = read_eps(r, v);
  if (v->image_size) v->n_positions = v->image_size / v->patch * (v->image_size / v->patch);
  if (st == TD_OK && rope)
    st = td_config_double(r, rope, "rope_theta", 1.0001, 1e15, &v->rope_theta);
  if (st == TD_OK) st = read_deep(r, v);
  if (st != TD_OK) return st;
  uint32_t side = 0;
  while ((uint64_t)side * side < v->n_positions)
    side++;
  if (side * side != v->n_positions)
    return td_config_bad(r, "num_position_embeddings must be a square");
  if (v->dim % v->n_heads || v->dim / v->n_heads % 4)
    return td_config_bad(r, "hidden_size / num_heads must be a multiple of 4");
  if (v->out_dim != r->out->dim)
    return td_config_bad(r, "out_hidden_size must be hidden_size of the language model");
  if (v->n_deep > r->out->n_layers)
    return td_config_bad(r, "deepstack_visual_indexes has more entries than there are layers");
  return TD_OK;
}

void td_config_read_vision(const td_config_reader *whole, const td_tower *tower) {
  td_err why;
  td_vision_config *v = &whole->out->vision;
  const cJSON *thinker = td_json_get(whole->root, "thinker_config");
  const cJSON *root = thinker ? thinker : whole->root;
  td_config_reader r = {.root = td_json_get(root, "vision_config"),
                        .file = whole->file,
                        .out = whole->out,
                        .err = &why};
  if (!tower || !cJSON_IsObject(r.root)) return;
  *v = (td_vision_config){.tower = tower, .image_token = -1};
  const cJSON *token = td_json_get(root, "image_token_id");
  int64_t id = -1;
  if (token && td_json_whole(token, 0, whole->out->n_vocab - 1, &id)) v->image_token = (int32_t)id;
  if (read_tower(&r, v) == TD_OK) return;
  td_debug("images are not supported: %s", why.msg);
  *v = (td_vision_config){.n_layers = 0};
}
