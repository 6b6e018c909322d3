#include "worker/prefill_budget.h"

#include <stdbool.h>

static uint32_t least(const td_pace *pace) {
  return pace->most < TD_PACE_LEAST ? pace->most : TD_PACE_LEAST;
}

void td_pace_init(td_pace *out, uint32_t most) {
  *out = (td_pace){.most = most};
  out->n_fit = least(out);
}

static bool is_measured(const td_pace *pace, uint32_t n_answers) {
  return pace->answers_ns && pace->n_steps < TD_PACE_STEPS && n_answers < 2 * pace->n_answers &&
         pace->n_answers < 2 * n_answers;
}

uint32_t td_pace_budget(const td_pace *pace, uint32_t n_answers, uint32_t n_unread) {
  if (!n_answers) return pace->most;
  if (pace->n_flat && n_unread >= pace->n_flat) return pace->rest_ns ? 0 : pace->most;
  return is_measured(pace, n_answers) ? pace->n_fit : 0;
}

// What delayed one step is not expected of the next: less counts at once, more by and by.
static void note_answers(td_pace *pace, uint32_t n_answers, uint64_t ns) {
  bool is_like_last = pace->answers_ns && n_answers == pace->n_answers;
  bool is_more = is_like_last && ns > pace->answers_ns;
  pace->answers_ns = is_more ? pace->answers_ns + (ns - pace->answers_ns) / 4 : ns + !ns;
  pace->n_answers = n_answers;
  pace->n_steps = 0;
}

void td_pace_note(td_pace *pace, uint32_t n_answers, uint32_t n_read, uint64_t ns) {
  const bool is_flat = pace->n_flat && n_read >= pace->n_flat;
  const uint64_t rest_ns = n_answers && pace->rest_ns > ns ? pace->rest_ns - ns : 0;
  pace->rest_ns = n_answers && is_flat ? ns : rest_ns;
  if (is_flat) return;
  if (n_answers && !n_read) note_answers(pace, n_answers, ns);
  if (!n_answers || !n_read || !pace->answers_ns) return;
  pace->n_steps++;
  double room_ns = (TD_PACE_STRETCH - 1) * (double)pace->answers_ns;
  double took_ns = ns > pace->answers_ns ? (double)(ns - pace->answers_ns) : 1;
  double n_fit = n_read * room_ns / took_ns;
  if (n_read < pace->n_fit && n_fit > n_read) return; // there were no more to try with
  if (n_fit > 2.0 * pace->n_fit) n_fit = 2.0 * pace->n_fit;
  if (n_fit > pace->most) n_fit = pace->most;
  pace->n_fit = n_fit > least(pace) ? (uint32_t)n_fit : least(pace);
}
