// src/runtime/session.h - a model, its devices and an engine in this process, used by run, eval,
// bench and the embedding API. One caller at a time.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "engine/engine.h"
#include "kv/kv.h"
#include "model/drive/arena.h"
#include "runtime/devices.h"
#include "runtime/weights.h"
#include "tandem/wire.h"
#include "text/tokenizer/tokenizer.h"

typedef struct {
  td_runtime_opts runtime; // device NULL: "cpu"
  double arena_gib;        // see td_weights_opts
  uint32_t max_seqs;       // sequences open at the same time; 0: one
  bool record_routing;     // see td_engine_opts
} td_session_opts;

// Members are read-only; td_session_close frees them.
typedef struct {
  td_model *model;
  const td_model_config *config;
  td_devices devices;
  td_expert_arena *arena; // NULL: experts do not come from the drive
  td_engine *engine;
  td_engine *long_engine; // of devices.long_steps, until td_session_generate has drawn a token
  td_kv *kv;
  td_session_opts opts;
  bool has_chunk;   // --prefill-chunk was given
  bool is_resident; // weights are in shared memory, not mapped from files
  uint32_t n_ctx;   // context size in tokens
  td_kv_layout layout;
  double load_s;
  // the sequence that td_session_generate extends
  uint32_t seq;
  int32_t *cached; // [n_ctx], the tokens in its pages
  uint32_t n_cached;
  td_image_input *cached_images; // [n_cached_images], owned, without pixels: those of the sequence
  uint32_t n_cached_images;
  td_engine_opts engine_opts;
} td_session;

// On success the caller owns *out; on error *out is NULL.
td_status td_session_open(td_session **out, const td_session_opts *opts, td_err *err);
void td_session_close(td_session *session);

typedef struct {
  const int32_t *prompt;
  uint32_t n_prompt;
  const td_image_input *images; // [n_images], of the prompt, by rising `at`
  uint32_t n_images;
  uint32_t max_tokens;
  bool ignore_eos;
  const td_tokenizer *tok; // its end token stops generation too; may be NULL
  td_sampling sampling;
  bool want_logprobs; // on_token gets each token's log-probability, in nats, else 0
  // Called before the first prefill step, with the tokens found in the KV cache as n_done, and
  // after each; returning false cancels. May be NULL.
  bool (*on_prefill)(void *ctx, uint32_t n_done, uint32_t n_prompt);
  // Called for each token that is not an end of sequence; returning false cancels. May be NULL.
  bool (*on_token)(void *ctx, int32_t id, float logprob);
  void *ctx;
} td_generate_args;

typedef struct {
  td_done_reason reason;
  uint32_t n_prompt, n_reused, n_output; // reused: prompt tokens found in the KV cache
  double prefill_s, decode_s;            // seconds; decode: from the first token on
} td_generate_stats;

// Generates for one prompt. A prefix that is still in the KV cache (earlier turns of a chat) is not
// recomputed. TD_EINVAL: empty, or longer than the context.
td_status td_session_generate(td_session *session, const td_generate_args *args,
                              td_generate_stats *stats, td_err *err);
