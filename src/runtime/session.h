// src/runtime/session.h - a model, a device and an engine in this process: what run, eval, bench
// and the embedding API share. One caller at a time.
#ifndef TD_RUNTIME_SESSION_H
#define TD_RUNTIME_SESSION_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "engine/engine.h"
#include "kv/kv.h"
#include "runtime/devices.h"
#include "runtime/weights.h"
#include "tandem/wire.h"
#include "text/tokenizer/tokenizer.h"

typedef struct {
  const char *model_dir;
  const char *device;     // a kind of td_dev_opts; NULL: "cpu"
  uint32_t n_threads;     // 0: one for each CPU
  uint32_t ctx_size;      // tokens; 0: chosen by kv/plan.h
  uint32_t prefill_chunk; // tokens a step; 0: chosen by runtime/devices.h
  uint32_t max_seqs;      // sequences that may be open together; 0: one
  td_dtype kv_dtype;      // TD_F32 or TD_F16
  td_weights_mode weights;
  td_activations activations;
  td_expert_place experts;
  bool record_routing; // see td_engine_opts
} td_session_opts;

// Members are for reading; td_session_close frees them.
typedef struct {
  td_model *model;
  const td_model_config *config;
  td_devices devices;
  td_engine *engine;
  td_kv *kv;
  td_session_opts opts;
  bool is_resident; // weights are in memory rather than mapped from files
  uint32_t n_ctx;   // longest context, tokens
  double load_s;
  // the sequence that td_session_generate goes on with
  uint32_t seq;
  int32_t *cached; // [n_ctx] the tokens whose keys and values its pages hold
  uint32_t n_cached;
} td_session;

// What the options ask of where the model is computed.
td_placement_opts td_session_placement(const td_session_opts *opts);

// On success the caller owns *out; on error *out is NULL.
td_status td_session_open(td_session **out, const td_session_opts *opts, td_err *err);
void td_session_close(td_session *session);

typedef struct {
  const int32_t *prompt;
  uint32_t n_prompt;
  uint32_t max_tokens;
  bool ignore_eos;
  const td_tokenizer *tok; // whose end token ends the answer, too; may be NULL
  td_sampling sampling;
  // Called after each step of the prompt; returning false cancels. May be NULL.
  bool (*on_prefill)(void *ctx, uint32_t n_done, uint32_t n_prompt);
  // Called for each token that is not an end of sequence; returning false cancels. May be NULL.
  bool (*on_token)(void *ctx, int32_t id);
  void *ctx;
} td_generate_args;

typedef struct {
  td_done_reason reason;
  uint32_t n_prompt, n_reused, n_output; // reused: prompt tokens found in the cache
  double prefill_s, decode_s;            // decode: from the first token on
} td_generate_stats;

// Answers one prompt. What the cache holds of it already (a chat's earlier turns) is not computed
// again. TD_EINVAL: empty, or longer than the context.
td_status td_session_generate(td_session *session, const td_generate_args *args,
                              td_generate_stats *stats, td_err *err);

#endif
