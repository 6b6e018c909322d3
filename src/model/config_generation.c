// src/model/config_generation.c - reads special token ids and sampling defaults.
#include "model/config.h"

static td_status token_id(const td_config_reader *r, const char *key, const cJSON *item,
                          int32_t *out) {
  int64_t value;
  if (!td_json_whole(item, 0, (int64_t)r->out->n_vocab - 1, &value)) {
    return td_config_fail(r, TD_EFORMAT, "%s must hold token ids, integers below vocab_size %u",
                          key, r->out->n_vocab);
  }
  *out = (int32_t)value;
  return TD_OK;
}

static bool has_eos(const td_model_config *c, int32_t id) {
  for (uint32_t i = 0; i < c->n_eos; i++)
    if (c->eos_ids[i] == id) return true;
  return false;
}

// eos_token_id: one id or an array. Ids of both files are combined, because many checkpoints list
// the end of turn in one and the end of text in the other.
static td_status read_eos(const td_config_reader *r) {
  static const char key[] = "eos_token_id";
  const cJSON *eos = td_json_get(r->root, key);
  td_model_config *c = r->out;
  bool is_list = cJSON_IsArray(eos);
  for (const cJSON *item = is_list ? eos->child : eos; item; item = is_list ? item->next : NULL) {
    int32_t id = -1;
    td_status st = token_id(r, key, item, &id);
    if (st != TD_OK) return st;
    if (has_eos(c, id)) continue;
    if (c->n_eos == TD_MAX_EOS)
      return td_config_fail(r, TD_EUNSUPPORTED, "more than %d end tokens (%s)", TD_MAX_EOS, key);
    c->eos_ids[c->n_eos++] = id;
  }
  return TD_OK;
}

td_status td_config_read_token_ids(const td_config_reader *r) {
  td_status st = read_eos(r);
  const cJSON *bos = td_json_get(r->root, "bos_token_id");
  if (st == TD_OK && bos) st = token_id(r, "bos_token_id", bos, &r->out->bos_id);
  // The family's, of a larger vocabulary than this model's.
  if (r->out->bos_id >= (int32_t)r->out->n_vocab) r->out->bos_id = -1;
  return st;
}

td_status td_config_read_sampling(const td_config_reader *r) {
  double temperature = 1, top_p = 1;
  td_status st = TD_OK;
  // null selects the default.
  if (td_json_get(r->root, "temperature"))
    st = td_config_double(r, r->root, "temperature", 0, 100, &temperature);
  if (st == TD_OK && td_json_get(r->root, "top_p"))
    st = td_config_double(r, r->root, "top_p", 0, 1, &top_p);
  const cJSON *top_k = td_json_get(r->root, "top_k");
  const bool is_off = cJSON_IsNumber(top_k) && top_k->valuedouble == -1; // vLLM's spelling
  if (st == TD_OK && top_k && !is_off)
    st = td_config_uint(r, r->root, "top_k", 0, INT32_MAX, &r->out->top_k_sampling);
  r->out->temperature = (float)temperature;
  r->out->top_p = (float)top_p;
  return st;
}
