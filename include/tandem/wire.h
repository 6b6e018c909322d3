// include/tandem/wire.h - what crosses between the front process and a worker.
// Fixed-width fields, no pointers. One record is 256 bytes; a ring carries them one way. A ring
// keeps order, so the records that make up one request (SUBMIT, then its PAGES, TOKENS and BIAS)
// arrive in that order; the request is complete when SUBMIT's counts are reached. The worker
// answers every SUBMIT with exactly one DONE; until then the pages are its own to write, but for
// those that n_past tokens fill, which others may read. More PAGES may follow at any time until
// then; a request whose next token has no page yet waits for one.
#ifndef TANDEM_WIRE_H
#define TANDEM_WIRE_H

#include <assert.h>
#include <stdint.h>

#define TD_WIRE_MAGIC   0x57444e54u // "TNDW"
#define TD_WIRE_VERSION 7u

// How a request's tokens are drawn. Zeroed is greedy with nothing else on.
// Order: logit bias, penalties, temperature, top_k, top_p, min_p, draw.
typedef struct {
  uint64_t seed;
  float temperature;        // >= 0; 0: greedy
  float top_p;              // (0, 1]; 0 and 1: off
  float min_p;              // [0, 1); 0: off
  float repetition_penalty; // > 0; 0 and 1: off; over prompt and answer (CTRL, arXiv 1909.05858)
  float presence_penalty;   // [-2, 2], over the answer
  float frequency_penalty;  // [-2, 2], over the answer
  uint32_t top_k;           // 0: off
  uint32_t n_top_logprobs;  // candidates reported beside each token, at most TD_WIRE_MAX_TOP
} td_sampling;
static_assert(sizeof(td_sampling) == 40, "wire layout");

#define TD_WIRE_MAX_TOP    20
#define TD_WIRE_MAX_TOKENS 58
#define TD_WIRE_MAX_BIAS   29
#define TD_WIRE_MAX_PAGES  58
#define TD_WIRE_MAX_TEXT   232
#define TD_WIRE_MAX_ENDS   40

typedef struct {
  int32_t id;
  float value; // a log-probability or a bias, in nats
} td_token_value;

typedef enum {
  // front to worker
  TD_MSG_SUBMIT = 1,
  TD_MSG_PAGES,
  TD_MSG_TOKENS,
  TD_MSG_BIAS,
  TD_MSG_CANCEL, // the worker answers with DONE (CANCELED) if the request still runs
  TD_MSG_SHUTDOWN,
  // worker to front
  TD_MSG_READY = 64,
  TD_MSG_FATAL,    // text: why the worker cannot serve, request: its td_status; it exits after this
  TD_MSG_PROGRESS, // tokens read so far, of the prompt and of an answer that was given
  TD_MSG_TOKEN,    // one token of the answer
  TD_MSG_DONE,     // last record of a request
  TD_MSG_HEARTBEAT, // at least once a second, also while idle
} td_msg_kind;

typedef enum {
  TD_DONE_STOP = 1, // an end-of-sequence token
  TD_DONE_LENGTH,   // max_tokens or the context is used up
  TD_DONE_CANCELED,
  TD_DONE_ERROR,     // text says why
  TD_DONE_PREFILLED, // TD_SUBMIT_PREFILL_ONLY: the prompt is read, its pages are whole
  TD_DONE_LOST,      // said by the front: no worker is there to go on; text says why
} td_done_reason;

#define TD_SUBMIT_IGNORE_EOS 1u
#define TD_SUBMIT_LOGPROBS   2u // report log-probabilities
// End with READ behind the first token, unless that is the last, or where a part of the answer is
// given when the pages hold all but the last token of it: another worker goes on, over the same
// pages.
#define TD_SUBMIT_PREFILL_ONLY 4u
#define TD_SUBMIT_URGENT       8u // it is read before the prompts that are being read

#define TD_READY_DEVICE_KV 1u // the KV pages are in memory of the worker's own, and die with it

typedef struct {
  td_sampling sampling;
  uint32_t n_prompt; // tokens, at least 1
  uint32_t max_tokens;
  uint32_t n_bias;
  uint32_t flags;   // TD_SUBMIT_*
  uint32_t n_pages; // of the KV pool, to begin with: enough for n_prompt + n_answer
  // Tokens of the answer that were drawn already; they follow the prompt in TOKENS. Draws go on
  // where those ended, so the text is that of one worker.
  uint32_t n_answer;
  // Tokens whose keys and values the pages hold already: less than n_prompt + n_answer. Those of an
  // answer are computed as they were at first, so that not a bit of the text depends on where it
  // was interrupted.
  uint32_t n_past;
  // Tokens that end the answer besides the checkpoint's own, which TD_SUBMIT_IGNORE_EOS is about.
  // None of either is drawn while the answer has less than min_tokens.
  uint32_t min_tokens, n_ends;
  int32_t ends[TD_WIRE_MAX_ENDS];
} td_wire_submit;

// The next pages of a request, in order of position.
typedef struct {
  uint32_t n;
  int32_t ids[TD_WIRE_MAX_PAGES];
} td_wire_pages;

typedef struct {
  uint32_t n;
  int32_t ids[TD_WIRE_MAX_TOKENS];
} td_wire_tokens;

typedef struct {
  uint32_t n;
  td_token_value entries[TD_WIRE_MAX_BIAS];
} td_wire_bias;

typedef struct {
  uint64_t load_ns;
  uint32_t n_vocab, n_ctx, max_seqs, page_tokens, n_pages, prefill_chunk;
  uint32_t flags; // TD_READY_*
  char isa[20];   // of the CPU's kernels, which round each in their way; NUL-terminated
} td_wire_ready;

typedef struct {
  uint32_t n_done, n_prompt; // tokens; those of a given answer count as done
  uint32_t n_cached;         // of those done, found in the cache of prefixes
  uint32_t reserved;
  uint64_t elapsed_ns; // since the prompt's first step began
} td_wire_progress;

// The end-of-sequence token is reported like any other (is_eos set), then DONE follows.
typedef struct {
  int32_t id;
  float logprob;  // nats, of the model's own distribution; 0 unless asked for
  uint32_t index; // 0 for the first token of the answer
  uint32_t is_eos;
  uint32_t n_top;
  uint32_t reserved;
  td_token_value top[TD_WIRE_MAX_TOP];
} td_wire_token;

typedef struct {
  uint32_t reason; // td_done_reason
  uint32_t n_prompt, n_output, n_cached;
  uint64_t prefill_ns, decode_ns;
  char text[192]; // NUL-terminated
} td_wire_done;

typedef struct {
  uint64_t n_steps;
  uint32_t n_running;
  uint32_t n_threads; // that compute now
} td_wire_heartbeat;

typedef struct {
  uint32_t kind; // td_msg_kind
  uint32_t reserved;
  uint64_t request; // 0 where no request is meant
  union {
    td_wire_submit submit;
    td_wire_pages pages;
    td_wire_tokens tokens;
    td_wire_bias bias;
    td_wire_ready ready;
    td_wire_progress progress;
    td_wire_token token;
    td_wire_done done;
    td_wire_heartbeat heartbeat;
    char text[TD_WIRE_MAX_TEXT];
    uint8_t bytes[240];
  } u;
} td_wire_msg;
static_assert(sizeof(td_wire_msg) == 256, "wire layout");

#endif
