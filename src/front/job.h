// src/front/job.h - a job: one request for output, from its body to its last event (completions.c
// begins it, job.c runs and ends it). Thread: the loop's, except while it is being prepared.
#pragma once

#include "api/dialects/dialect.h"
#include "api/response.h"
#include "front/serve_impl.h"

typedef struct td_job td_job;

typedef struct {
  td_job *job;
  uint32_t index;
  uint64_t id; // of the backend request
  bool running, started;
  uint64_t prefill_ns;                    // duration of the prefill
  uint64_t first_token_ns, last_token_ns; // arrival times
  uint32_t n_cached;                      // prompt tokens found in the prefix cache
  td_answer answer;
  td_output_parser parts;          // chat
  td_delta delta;                  // chat: output not sent yet; without streaming, all of it
  uint32_t n_sent;                 // tokens that a chunk's usage has counted
  uint64_t n_parsed;               // tokens known to be reasoning or not
  uint64_t n_reasoning;            // of them, the former
  uint64_t n_accepted, n_rejected; // drafted tokens
  double sum_logprob;              // of its tokens, if there are choices to choose from (best_of)
  const char *finish_reason;
  td_token_ids ids;      // chat: generated
  bool has_end;          // the last of them is an end token
  td_buf drawn;          // td_token_value of all tokens but an end token, for a receipt
  bool is_ended;         // by one
  td_sampling sampling;  // as it was submitted
  td_wire_token *prompt; // owned, [n_prompt]: its log-probabilities; NULL: not asked for
} td_choice;

struct td_job {
  td_serve *serve;
  td_host *host;       // the model; NULL until it is known
  td_host_use use;     // while it has or waits for the host
  td_job *prev, *next; // in serve->jobs
  td_http_exchange *x; // NULL once the client is gone
  bool is_chat;
  const td_dialect *dialect; // NULL: OpenAI's chat or completions
  td_dialect_state state;
  td_dialect_load load; // what the request says of the model's place in memory
  td_lane_work work;
  bool preparing;
  td_buf body;
  td_http_held held; // its share of the HTTP server's body budget
  uint32_t n_ctx;    // context size when the request arrived
  td_api_request request;
  td_status status; // result of prepare
  td_api_error error;
  td_token_ids *prompts; // [n_prompts]
  uint32_t n_prompts;
  td_picture_list *pictures; // of its prompt, held; NULL: none
  bool prompt_thinks;        // the chat's prompt ends inside a reasoning block
  td_digest place;           // of the chat's answer (api/turn.h)
  uint64_t call_id;          // random; ids of tool calls are derived from it
  td_choice *choices;        // [n_choices]
  uint32_t n_choices, n_running;
  td_api_head head;
  td_api_usage usage;
  uint64_t begin_ns, first_token_ns;
  td_api_caller caller;
};

// Leaves the job list and frees the job.
void td_job_free(td_job *j);
// Its body is no longer in memory.
void td_job_release_body(td_job *j);
// Makes an error about the body that a dialect's stands for one about the client's.
void td_job_name(const td_job *j, td_api_error *error);
// Responds with error and frees the job. Its response must not have begun.
void td_job_refuse(td_job *j, const td_api_error *error);
// The client is gone (td_http_on_gone). arg: the job.
void td_job_on_gone(void *arg);
// What the backend calls for a choice.
td_request_callbacks td_choice_callbacks(td_choice *c);
