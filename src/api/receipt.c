// src/api/receipt.c - writes receipts.
#include "api/receipt.h"

const char *const td_receipt_options[] = {
    "activations",  "kv-dtype",        "device",      "devices",       "expert-device",
    "expert-cache", "expert-parallel", "stream-from", "prefill-chunk", NULL};

void td_receipt_add_place(td_buf *out, const char *gpu, const char *isa) {
  td_buf_printf(out, "tandem %s, %s, kernels %s", TD_VERSION, gpu && *gpu ? gpu : "CPU", isa);
}

static void add_options(td_json_writer *w, const td_options *o) {
  td_buf value = TD_BUF_INIT;
  td_jw_begin_object(w, "options");
  for (const char *const *name = td_receipt_options; *name; name++) {
    td_buf_clear(&value);
    td_options_show(&value, o, *name);
    if (value.len) td_jw_buf(w, *name, &value);
  }
  td_jw_end_object(w);
  td_buf_free(&value);
}

static void add_sampling(td_json_writer *w, const td_sampling *s) {
  char seed[24]; // a number would lose digits
  snprintf(seed, sizeof seed, "%llu", (unsigned long long)s->seed);
  td_jw_add(w, "'sampling': {'seed': %s", seed);
#define X(name) td_jw_double(w, #name, (double)s->name);
  TD_RECEIPT_SAMPLING(X)
#undef X
  td_jw_int(w, "top_k", s->top_k);
  td_jw_end_object(w);
}

void td_receipt_add(td_json_writer *w, const char *key, const td_receipt *r) {
  char weights[TD_DIGEST_HEX];
  td_digest_hex(weights, &r->weights);
  td_jw_begin_object(w, key);
  td_jw_add(w, "'receipt': 1, 'model': %s, 'weights_sha256': %s, 'computed_by': %s", r->model,
            weights, r->computed_by);
  add_options(w, r->options);
  add_sampling(w, &r->sampling);
  td_jw_add(w, "'ignore_eos': %i, 'tokenizer': %i, 'ended': %i, 'prompt': [", r->ignore_eos,
            r->has_tokenizer, r->is_ended);
  for (size_t i = 0; i < r->n_prompt; i++)
    td_jw_int(w, NULL, r->prompt[i]);
  td_jw_add(w, "], 'answer': [");
  for (size_t i = 0; i < r->n_answer; i++)
    td_jw_int(w, NULL, r->answer[i].id);
  td_jw_add(w, "], 'logprobs': [");
  for (size_t i = 0; i < r->n_answer; i++)
    td_jw_double(w, NULL, (double)r->answer[i].value);
  td_jw_add(w, "]}");
}
