// src/gguf/names.c - names of tensors.
#include <stdio.h>
#include <string.h>

#include "gguf/arch_impl.h"

static const td_gguf_name ends[] = {
    {"token_embd.weight", "model.embed_tokens.weight"},
    {"output_norm.weight", "model.norm.weight"},
    {"output.weight", "lm_head.weight"},
    {NULL, NULL},
};

// Parts of a layer that most architectures have, after "blk.N.".
static const td_gguf_name common[] = {
    {"attn_norm.weight", "input_layernorm.weight"},
    {"ffn_norm.weight", "post_attention_layernorm.weight"},
    {"post_attention_norm.weight", "post_attention_layernorm.weight"},
    {"attn_q.weight", "self_attn.q_proj.weight"},
    {"attn_k.weight", "self_attn.k_proj.weight"},
    {"attn_v.weight", "self_attn.v_proj.weight"},
    {"attn_output.weight", "self_attn.o_proj.weight"},
    {"attn_q.bias", "self_attn.q_proj.bias"},
    {"attn_k.bias", "self_attn.k_proj.bias"},
    {"attn_v.bias", "self_attn.v_proj.bias"},
    {"attn_output.bias", "self_attn.o_proj.bias"},
    {"attn_q_norm.weight", "self_attn.q_norm.weight"},
    {"attn_k_norm.weight", "self_attn.k_norm.weight"},
    {"attn_q_a.weight", "self_attn.q_a_proj.weight"},
    {"attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight"},
    {"attn_q_b.weight", "self_attn.q_b_proj.weight"},
    {"attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight"},
    {"attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight"},
    {"attn_kv_b.weight", "self_attn.kv_b_proj.weight"},
    {"attn_k_b.weight", "self_attn.k_b_proj.weight"},
    {"attn_v_b.weight", "self_attn.v_b_proj.weight"},
    {"ffn_gate.weight", "mlp.gate_proj.weight"},
    {"ffn_up.weight", "mlp.up_proj.weight"},
    {"ffn_down.weight", "mlp.down_proj.weight"},
    {"ffn_gate_inp.weight", "mlp.gate.weight"},
    {"exp_probs_b.bias", "mlp.gate.e_score_correction_bias"},
    {"ffn_gate_exps.weight", "mlp.experts.*.gate_proj.weight"},
    {"ffn_up_exps.weight", "mlp.experts.*.up_proj.weight"},
    {"ffn_down_exps.weight", "mlp.experts.*.down_proj.weight"},
    {"ffn_gate_shexp.weight", "mlp.shared_experts.gate_proj.weight"},
    {"ffn_up_shexp.weight", "mlp.shared_experts.up_proj.weight"},
    {"ffn_down_shexp.weight", "mlp.shared_experts.down_proj.weight"},
    {"ffn_gate_up_exps.weight", "mlp.experts.gate_up_proj"},
    {"indexer.attn_q_b.weight", "self_attn.indexer.wq_b.weight"},
    {"indexer.attn_k.weight", "self_attn.indexer.wk.weight"},
    {"indexer.k_norm.weight", "self_attn.indexer.k_norm.weight"},
    {"indexer.k_norm.bias", "self_attn.indexer.k_norm.bias"},
    {"indexer.proj.weight", "self_attn.indexer.weights_proj.weight"},
    {"nextn.eh_proj.weight", "eh_proj.weight"},
    {"nextn.embed_tokens.weight", "embed_tokens.weight"},
    {"nextn.enorm.weight", "enorm.weight"},
    {"nextn.hnorm.weight", "hnorm.weight"},
    {"nextn.shared_head_head.weight", "shared_head.head.weight"},
    {"nextn.shared_head_norm.weight", "shared_head.norm.weight"},
    // What is asked for where experts are not there one by one.
    {"ffn_gate_exps.weight", "mlp.experts.gate_up_proj_blocks"},
    {"ffn_down_exps.weight", "mlp.experts.down_proj_blocks"},
    {NULL, NULL},
};

static const char *find(const td_gguf_name *names, td_gguf_str name) {
  for (; names && names->gguf; names++)
    if (td_gguf_str_is(name, names->gguf)) return names->published;
  return NULL;
}

// Whether name is "blk.N." and more; if so *rest is what follows.
static bool in_layer(td_gguf_str name, unsigned *layer_idx, td_gguf_str *rest) {
  static const char prefix[] = "blk.";
  const size_t n = strlen(prefix);
  if (name.len < n || memcmp(name.data, prefix, n) != 0) return false;
  unsigned idx = 0;
  size_t i = n;
  for (; i < name.len && i < n + 6 && name.data[i] >= '0' && name.data[i] <= '9'; i++)
    idx = idx * 10 + (unsigned)(name.data[i] - '0');
  if (i == n || i >= name.len || name.data[i] != '.') return false;
  *layer_idx = idx;
  *rest = (td_gguf_str){.data = name.data + i + 1, .len = name.len - i - 1};
  return true;
}

bool td_gguf_tensor_name(const td_gguf_arch *arch, td_gguf_str name, char *out, size_t n_out) {
  unsigned layer_idx;
  td_gguf_str rest;
  if (name.len >= n_out) return false;
  if (!in_layer(name, &layer_idx, &rest)) {
    const char *published = find(ends, name);
    const int n = published ? snprintf(out, n_out, "%s", published)
                            : snprintf(out, n_out, "%.*s", (int)name.len, name.data);
    return n >= 0 && (size_t)n < n_out;
  }
  const char *published = find(arch->names, rest);
  if (!published) published = find(common, rest);
  const int n = published ? snprintf(out, n_out, "model.layers.%u.%s", layer_idx, published)
                          : snprintf(out, n_out, "model.layers.%u.%.*s", layer_idx, (int)rest.len,
                                     rest.data);
  return n >= 0 && (size_t)n < n_out;
}

bool td_gguf_has_tensor(const td_gguf *parts, size_t n_parts, const char *name) {
  for (size_t p = 0; p < n_parts; p++) {
    for (size_t i = 0; i < parts[p].n_tensors; i++)
      if (td_gguf_str_is(parts[p].tensors[i].name, name)) return true;
  }
  return false;
}

// ---- back ---------------------------------------------------------------------------------------

// Whether the published name, in which '*' stands for a number, is text[0..n).
static bool is_of(const char *published, const char *text, size_t n) {
  const char *star = strchr(published, '*');
  const size_t n_head = star ? (size_t)(star - published) : strlen(published);
  if (n < n_head || memcmp(text, published, n_head) != 0) return false;
  if (!star) return n == n_head;
  size_t at = n_head;
  while (at < n && text[at] >= '0' && text[at] <= '9')
    at++;
  return at > n_head && strlen(star + 1) == n - at && memcmp(star + 1, text + at, n - at) == 0;
}

bool td_gguf_own_name(const td_gguf_arch *arch, const td_gguf *parts, size_t n_parts,
                      const char *name, size_t n, char *out, size_t n_out) {
  static const char prefix[] = "model.layers.";
  const size_t n_prefix = strlen(prefix);
  const td_gguf_name *const lists[] = {arch->names, common};
  bool found = false;
  for (const td_gguf_name *end = ends; end->gguf; end++)
    if (is_of(end->published, name, n))
      return (size_t)snprintf(out, n_out, "%s", end->gguf) < n_out;
  if (n < n_prefix || strncmp(name, prefix, n_prefix) != 0) return false;
  const size_t n_idx = strspn(name + n_prefix, "0123456789"), at = n_prefix + n_idx + 1;
  if (!n_idx || n_idx > 5 || at >= n || name[at - 1] != '.') return false;
  for (size_t i = 0; i < TD_COUNT(lists); i++) {
    for (const td_gguf_name *entry = lists[i]; entry && entry->gguf; entry++) {
      char own[TD_GGUF_MAX_NAME];
      if (!is_of(entry->published, name + at, n - at)) continue;
      snprintf(own, sizeof own, "blk.%.*s.%s", (int)n_idx, name + n_prefix, entry->gguf);
      if (found && !td_gguf_has_tensor(parts, n_parts, own)) continue;
      snprintf(out, n_out, "%s", own);
      found = true;
    }
  }
  return found;
}
