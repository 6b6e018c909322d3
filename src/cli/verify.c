// src/cli/verify.c - `tandem verify`: computes an answer again that there is a receipt of.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/receipt.h"
#include "base/json_parse.h"
#include "base/log.h"
#include "base/token_ids.h"
#include "cli/cli.h"
#include "model/fingerprint.h"
#include "runtime/command.h"
#include "tandem/kernels.h"
#include "text/chat.h"

#define MAX_RECEIPT_BYTES (1u << 28)

typedef struct {
  td_sampling sampling;
  bool ignore_eos, has_tokenizer, is_ended;
  td_token_ids prompt, answer;
  td_buf logprobs; // f32 of each token of the answer
} receipt;

static void free_receipt(receipt *r) {
  td_token_ids_free(&r->prompt);
  td_token_ids_free(&r->answer);
  td_buf_free(&r->logprobs);
}

static float logprob_of(const receipt *r, size_t i) {
  float f;
  memcpy(&f, td_buf_text(&r->logprobs) + i * sizeof f, sizeof f);
  return f;
}

// ---- reading ------------------------------------------------------------------------------------

static td_status read_ids(td_token_ids *out, const cJSON *list, td_err *err) {
  int64_t id;
  const cJSON *item;
  td_status st = TD_OK;
  cJSON_ArrayForEach(item, list) {
    if (!td_json_whole(item, 0, INT32_MAX, &id))
      return td_fail(err, TD_EFORMAT, "a token id is no whole number");
    st = td_token_ids_push(out, (int32_t)id, err);
    if (st != TD_OK) return st;
  }
  return st;
}

static td_status read_sampling(td_sampling *out, const cJSON *from, td_err *err) {
  int64_t top_k;
  double value = 0;
  const char *seed = td_json_text(from, "seed");
  td_status st = td_json_get_int(from, "top_k", 0, UINT32_MAX, &top_k, err);
#define X(name)                                                                                    \
  if (st == TD_OK) st = td_json_get_double(from, #name, &value, err);                              \
  if (st == TD_OK) out->name = (float)value;
  TD_RECEIPT_SAMPLING(X)
#undef X
  if (st != TD_OK) return st;
  if (!seed || !*seed || seed[strspn(seed, "0123456789")])
    return td_fail(err, TD_EFORMAT, "its seed is no number");
  out->seed = strtoull(seed, NULL, 10);
  out->top_k = (uint32_t)top_k;
  return TD_OK;
}

static td_status read_receipt(receipt *out, const cJSON *root, td_err *err) {
  const cJSON *logprobs = td_json_get(root, "logprobs"), *item;
  if (!cJSON_IsNumber(td_json_get(root, "receipt")))
    return td_fail(err, TD_EFORMAT, "it is no receipt, as `tandem run --receipt FILE` writes one");
  td_status st = td_json_get_bool(root, "ignore_eos", &out->ignore_eos, err);
  if (st == TD_OK) st = td_json_get_bool(root, "tokenizer", &out->has_tokenizer, err);
  if (st == TD_OK) st = td_json_get_bool(root, "ended", &out->is_ended, err);
  if (st == TD_OK) st = read_sampling(&out->sampling, td_json_get(root, "sampling"), err);
  if (st == TD_OK) st = read_ids(&out->prompt, td_json_get(root, "prompt"), err);
  if (st == TD_OK) st = read_ids(&out->answer, td_json_get(root, "answer"), err);
  if (st != TD_OK) return st;
  cJSON_ArrayForEach(item, logprobs) {
    const float f = (float)item->valuedouble;
    td_buf_add(&out->logprobs, &f, sizeof f);
  }
  if (out->logprobs.len != out->answer.n * sizeof(float))
    return td_fail(err, TD_EFORMAT, "it has %zu log-probabilities for %zu tokens",
                   out->logprobs.len / sizeof(float), out->answer.n);
  return td_buf_status(&out->logprobs, err);
}

// The options of the receipt, and of the command line where the model is and with how many threads.
static td_status read_options(td_options *out, const td_options *o, const cJSON *root,
                              td_err *err) {
  static const char *const here[] = {"model", "threads", "weights"};
  char program[] = "tandem", command[] = "verify";
  char *argv[] = {program, command};
  td_buf value = TD_BUF_INIT;
  td_status st = td_options_parse(out, 2, argv, err);
  for (const char *const *name = td_receipt_options; *name && st == TD_OK; name++) {
    const char *text = td_json_text(td_json_get(root, "options"), *name);
    if (text) st = td_options_set(out, *name, text, err);
  }
  for (size_t i = 0; i < TD_COUNT(here) && st == TD_OK; i++) {
    td_buf_clear(&value);
    td_options_show(&value, o, here[i]);
    st = td_options_set(out, here[i], td_buf_text(&value), err);
  }
  td_buf_free(&value);
  return st;
}

// ---- verifying ----------------------------------------------------------------------------------

typedef struct {
  const receipt *given;
  size_t n; // tokens that were the same
  bool differs;
} comparison;

static bool compare(void *ctx, int32_t id, float logprob) {
  comparison *c = ctx;
  const receipt *r = c->given;
  if (c->n == r->answer.n) {
    printf("differs: token %zu is %d here, and the receipt ends before it\n", c->n, id);
    c->differs = true;
  } else if (id != r->answer.ids[c->n] || memcmp(&logprob, &(float){logprob_of(r, c->n)}, 4) != 0) {
    printf("differs: token %zu is %d here, with log-probability %.9g; in the receipt %d, %.9g\n",
           c->n, id, (double)logprob, r->answer.ids[c->n], (double)logprob_of(r, c->n));
    c->differs = true;
  }
  c->n += !c->differs;
  return !c->differs;
}

// Prints what it finds; *is_equal.
static td_status compute(const receipt *r, const td_options *o, const cJSON *root, bool *is_equal,
                         td_err *err) {
  td_session_opts opts;
  td_session *session = NULL;
  td_buf place = TD_BUF_INIT;
  comparison c = {.given = r};
  td_chat *chat = NULL;
  td_generate_args args = {.prompt = r->prompt.ids,
                           .n_prompt = (uint32_t)r->prompt.n,
                           .max_tokens = (uint32_t)r->answer.n + r->is_ended,
                           .ignore_eos = r->ignore_eos,
                           .sampling = r->sampling,
                           .want_logprobs = true,
                           .on_token = compare,
                           .ctx = &c};
  td_generate_stats stats;
  td_status st = td_cmd_session_opts(o, &opts, err);
  if (st == TD_OK && r->has_tokenizer) st = td_chat_open(&chat, o->model, err);
  if (st == TD_OK) st = td_session_open(&session, &opts, err);
  if (st != TD_OK) {
    td_chat_close(chat);
    return st;
  }
  if (chat) args.tok = td_chat_tokenizer(chat);
  const td_dev *dev = session->devices.dev;
  td_receipt_add_place(&place, td_dev_gpu_index(dev) < 0 ? NULL : td_dev_name(dev),
                       td_kernels()->isa);
  const char *before = td_json_text(root, "computed_by");
  if (before && strcmp(before, td_buf_text(&place)))
    td_warn("the receipt is of %s, this is %s: results may be rounded otherwise", before,
            td_buf_text(&place));
  st = td_session_generate(session, &args, &stats, err);
  *is_equal = st == TD_OK && !c.differs && c.n == r->answer.n;
  if (*is_equal)
    printf("equal: %zu tokens and their log-probabilities, to the bit\n", c.n);
  else if (st == TD_OK && !c.differs)
    printf("differs: the answer ends here after %zu tokens, in the receipt after %zu\n", c.n,
           r->answer.n);
  td_buf_free(&place);
  td_session_close(session);
  td_chat_close(chat);
  return st;
}

static td_status check_weights(const td_options *o, const cJSON *root, td_err *err) {
  td_digest digest;
  char hex[TD_DIGEST_HEX];
  const char *expected = td_json_text(root, "weights_sha256");
  td_status st = td_model_digest(&digest, o->model, err);
  if (st != TD_OK) return st;
  td_digest_hex(hex, &digest);
  if (expected && !strcmp(expected, hex)) return TD_OK;
  return td_fail(err, TD_EINVAL,
                 "%s: not the weights of the receipt, which are %s's with SHA-256 %s", o->model,
                 td_json_text(root, "model") ? td_json_text(root, "model") : "another",
                 expected ? expected : "unknown");
}

int td_cmd_verify(const td_options *o) {
  receipt given = {0};
  td_options chosen = {0};
  cJSON *root = NULL;
  td_err err;
  bool is_equal = false;
  td_status st = td_cmd_need_model(o, &err);
  if (st == TD_OK && !o->receipt)
    st = td_fail(&err, TD_EINVAL,
                 "tandem verify needs a receipt: tandem verify FILE.json --model DIR");
  if (st == TD_OK) st = td_json_parse_file(&root, o->receipt, MAX_RECEIPT_BYTES, &err);
  if (st == TD_OK) {
    td_err why;
    st = read_receipt(&given, root, &why);
    if (st != TD_OK) td_fail(&err, st, "%s: %s", o->receipt, why.msg);
  }
  if (st == TD_OK) st = read_options(&chosen, o, root, &err);
  if (st == TD_OK) st = check_weights(o, root, &err);
  if (st == TD_OK) st = compute(&given, &chosen, root, &is_equal, &err);
  free_receipt(&given);
  td_options_free(&chosen);
  cJSON_Delete(root);
  if (st != TD_OK) return td_cmd_fail(&err);
  return is_equal ? 0 : 1;
}
