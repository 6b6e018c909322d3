// src/cli/plan.h - predicts a model's speed on a machine, with what binds and what would lift it.
#pragma once

#include "base/json_write.h"
#include "options/options.h"
#include "runtime/predict.h"

typedef struct {
  td_int_list prompts, batches;
  uint32_t depth;             // tokens before the first decoded one
  double hit_rate;            // below 0: the share of experts that are cached
  double acceptance;          // share of drafts that are right
  td_expert_cache_size cache; // of experts, on a card
  td_activations activations; // in 8 bits they have a rate of their own
  td_dtype kv_dtype;          // of --kv-dtype
  uint32_t ctx_size;          // of each request; 0: the model's, within memory
  bool what_if;               // also with each change of the machine, ranked
  bool is_short;              // text without what limits a speed and what drafts do
} td_plan_opts;
extern const td_plan_opts td_plan_usual;

// The first batch, and the last prompt.
typedef struct {
  bool from_drive; // the machine's memory does not hold the model
  double share;    // then, of the experts, what it holds; 0: there is no drive
  double tokens_per_s, prompt_s;
} td_plan_summary;
td_plan_summary td_plan_summary_of(const td_model *model, const td_rig *rig,
                                   const td_plan_opts *opts);

void td_plan_add(td_buf *out, const td_model *model, const td_rig *rig, const td_plan_opts *opts);
// With each of the cards that the program knows, a line.
void td_plan_add_cards(td_buf *out, const td_model *model, const td_rig *rig,
                       const td_plan_opts *opts);
void td_plan_add_json(td_json_writer *w, const td_model *model, const td_rig *rig,
                      const td_plan_opts *opts);
