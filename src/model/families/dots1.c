// src/model/families/dots1.c - dots.llm1.
#include "model/families/family.h"

static const td_config_key keys[] = {
    TD_BODY_KEYS(152064, 4608, 62, 32, 2048),
    TD_GQA_KEY(32),
    TD_DENSE_KEY(10944),
    TD_ROUTED_KEYS(128, 6, 1408, 1, 1),
};

static td_status read_rest(const td_config_reader *r) {
  td_model_config *c = r->out;
  uint32_t first = 62;
  td_status st = td_config_uint(r, r->root, "max_window_layers", 0, INT32_MAX, &first);
  for (uint32_t i = first; i < c->n_layers && !td_config_has_no_window(r); i++)
    td_layers_add(c->window_layers, i);
  return st == TD_OK ? td_config_read_windows(r, 4096) : st;
}

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES, TD_GQA_PLACES, TD_OUT_BIAS_PLACE, TD_QK_NORM_PLACES, TD_ROUTED_PLACES,
};

const td_family td_family_dots1 = {
    .model_types = {"dots1"},
    .ignores = {"mlp_layer_types"},
    .scaling = "routed_scaling_factor",
    .defaults = {.attn = TD_ATTN_GQA,
                 .qk_norm = TD_QK_NORM_HEAD,
                 .router_sigmoid = true,
                 .bos_id = -1},
    .read = read_rest,
    TD_FAMILY_PARTS,
};
