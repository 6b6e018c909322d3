// include/tandem.h - tandem as a library: open a model, generate, close. One caller at a time for
// each handle. Link with `pkg-config --cflags --libs tandem`.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tandem tandem;

typedef struct {
  const char *model_dir;  // checkpoint directory in the Hugging Face layout
  uint32_t n_threads;     // 0: one per CPU
  uint32_t ctx_size;      // tokens; 0: the model's maximum, limited by memory
  uint32_t prefill_chunk; // prompt tokens per prefill step; 0: 512, or more with many experts
  const char *device;     // "cpu", "cuda" or "auto"; NULL: "cpu"
} tandem_opts;

typedef struct {
  // The conversation as JSON text: {"messages": [...], "tools": [...], ...}, rendered by the
  // model's chat template with add_generation_prompt on. If messages is NULL, prompt is used as
  // plain text.
  const char *messages;
  const char *prompt;
  uint32_t max_tokens; // 0: until the model stops or the context is full
  float temperature;   // 0: greedy
  float top_p;         // 0 and 1: off
  uint32_t top_k;      // 0: off
  uint64_t seed;
  // Called with each piece of generated text: whole UTF-8 characters, len bytes, NUL-terminated. A
  // result other than 0 stops generation. May be NULL.
  int (*on_text)(void *ctx, const char *text, size_t len);
  void *ctx;
} tandem_request;

typedef struct {
  uint32_t n_prompt, n_reused, n_output; // tokens; n_reused: prompt tokens found in the KV cache
  double prefill_s, decode_s;
  int stopped; // 1: an end token ended generation; 0: max_tokens, the context or on_text did
} tandem_result;

// Both return 0, or a negative code with a message in error (error_len bytes, NUL-terminated; may
// be NULL if error_len is 0). On success of open the caller owns *out; on error *out is NULL. If
// memory runs out while a model computes, all later calls of generate fail too: close it.
int tandem_open(tandem **out, const tandem_opts *opts, char *error, size_t error_len);
int tandem_generate(tandem *model, const tandem_request *request, tandem_result *result,
                    char *error, size_t error_len);
void tandem_close(tandem *model); // NULL is legal

#ifdef __cplusplus
}
#endif
