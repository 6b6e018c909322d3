// src/engine/draft.c - guesses from the text, and how many of them a step computes.
#include "engine/draft.h"

#include <stddef.h>

enum {
  MIN_MATCH = 3,      // tokens
  LONGEST_MATCH = 16, // a longer one is no better
};

uint32_t td_draft_lookup(int32_t *tokens, uint32_t n, uint32_t most) {
  uint32_t longest = MIN_MATCH - 1, next = 0;
  if (n <= MIN_MATCH || !most) return 0;
  const int32_t last = tokens[n - 1];
  for (uint32_t at = n - 1; at-- >= MIN_MATCH && longest < LONGEST_MATCH;) {
    if (tokens[at] != last) continue;
    uint32_t len = 1;
    while (len < LONGEST_MATCH && len <= at && tokens[at - len] == tokens[n - 1 - len])
      len++;
    if (len <= longest) continue;
    longest = len;
    next = at + 1;
  }
  if (!next) return 0;
  for (uint32_t i = 0; i < most; i++)
    tokens[n + i] = tokens[next + i]; // may continue in the guesses themselves, as a text repeats
  return most;
}

uint32_t td_draft_max_each(uint32_t n_seqs, bool has_states, bool is_gpu) {
  uint32_t n = td_draft_max(has_states) / n_seqs;
  if (is_gpu && (n + 1) * n_seqs > TD_DRAFT_GPU_TOKENS)
    n = n_seqs < TD_DRAFT_GPU_TOKENS ? TD_DRAFT_GPU_TOKENS / n_seqs - 1 : 0;
  return n < TD_DRAFT_MAX ? n : TD_DRAFT_MAX;
}

// ---- how often they are right -------------------------------------------------------------------

// Before any trial it is as if this many guesses of this share of hits had been made; of a request,
// with the share of all of them.
#define PRIOR_TRIALS 2.0f
#define PRIOR_ODDS   0.6f
#define KEEP_OWN     0.9f  // of a request's past at each trial
#define KEEP_ALL     0.98f // and of that of all

static float odds_of(const td_draft_odds *odds, float prior) {
  return (PRIOR_TRIALS * prior + odds->hits) / (PRIOR_TRIALS + odds->trials);
}

float td_draft_odds_of(const td_draft *d, td_draft_source source, const td_draft_pace *p) {
  return odds_of(&d->odds[source], odds_of(&p->odds[source], PRIOR_ODDS));
}

static void note(td_draft_odds *odds, bool is_hit, float keep) {
  odds->hits = keep * odds->hits + (is_hit ? 1.0f : 0.0f);
  odds->trials = keep * odds->trials + 1;
}

bool td_draft_take(td_draft *d, td_draft_pace *p, const int32_t *guess, int32_t id) {
  if (d->n_taken >= d->n_proposed) return false;
  const bool is_hit = *guess == id;
  note(&d->odds[d->source], is_hit, KEEP_OWN);
  note(&p->odds[d->source], is_hit, KEEP_ALL);
  if (!is_hit || d->n_taken == d->n_drafted) return false;
  d->n_taken++;
  return true;
}

uint32_t td_draft_drop(td_draft *d) {
  const uint32_t n = d->n_drafted - d->n_taken;
  d->n_proposed = d->n_drafted = d->n_taken = 0;
  return n;
}

// ---- what they cost -----------------------------------------------------------------------------

#define KEEP_STEPS  0.99 // of the past at each step
#define PRIOR_COST  0.3  // of a token more, as long as steps do not show it
#define PRIOR_SHIFT 0.5  // and what steps have to differ by, as a sum of squares, to weigh as much
#define MAX_TIMES   3    // what is expected counts of a step: something else held it up

enum {
  FIRST_TRIES = 16,  // passes of the layer before it is judged, one a step
  MORE_TRIES = 8,    // and from time to time, if it does not pay
  REST_STEPS = 1000, // steps until then
  COLD_PASSES = 2,   // read their weights for the first time
};
#define MIN_GAIN 1.03 // of tokens per second, that the layer is used for

void td_draft_pace_init(td_draft_pace *p) {
  *p = (td_draft_pace){.n_tries_left = FIRST_TRIES};
}

// Least squares, drawn toward the prior: while all steps have the same number of tokens, what is
// known of others fades, and in the end they are tried again. Returns the time of a step of
// n_tokens and sets *slope, what one more adds.
static double step_ns(const td_draft_pace *p, double n_tokens, double *slope) {
  const double x = p->x / p->n, y = p->y / p->n; // means
  const double xx = p->xx - p->n * x * x, xy = p->xy - p->n * x * y;
  *slope = (xy + PRIOR_SHIFT * PRIOR_COST * y) / (xx + PRIOR_SHIFT);
  if (*slope < 0) *slope = 0;
  const double time = y + *slope * (n_tokens - x);
  return time > *slope ? time : *slope; // the first token costs no less than another
}

static bool is_measured(const td_draft_pace *p) {
  return p->n > 0 && p->y > 0;
}

void td_draft_pace_note(td_draft_pace *p, uint32_t n_tokens, uint64_t ns) {
  enum { FEW = 4 };
  const double x = n_tokens;
  double y = (double)ns, slope;
  if (p->n > FEW && is_measured(p)) {
    const double most = MAX_TIMES * step_ns(p, x, &slope);
    if (y > most) y = most;
  }
  p->n = KEEP_STEPS * p->n + 1;
  p->x = KEEP_STEPS * p->x + x;
  p->xx = KEEP_STEPS * p->xx + x * x;
  p->y = KEEP_STEPS * p->y + y;
  p->xy = KEEP_STEPS * p->xy + x * y;
  if (++p->n_rest < REST_STEPS) return;
  p->n_rest = 0;
  p->n_tries_left = MORE_TRIES;
}

double td_draft_pace_cost(const td_draft_pace *p, uint32_t n_tokens) {
  if (!is_measured(p)) return PRIOR_COST;
  double slope;
  const double time = step_ns(p, n_tokens, &slope);
  return time > 0 ? slope / time : 0;
}

void td_draft_pace_note_passes(td_draft_pace *p, uint32_t n_passes, uint64_t ns) {
  double each_ns = (double)ns / n_passes;
  if (p->n_passes >= COLD_PASSES && each_ns > MAX_TIMES * p->pass_ns)
    each_ns = MAX_TIMES * p->pass_ns;
  p->pass_ns += p->n_passes < COLD_PASSES ? each_ns - p->pass_ns : (each_ns - p->pass_ns) / 8;
  p->n_passes += n_passes;
  p->n_tries_left -= n_passes < p->n_tries_left ? n_passes : p->n_tries_left;
  p->n_rest = 0;
}

// ---- how many pay -------------------------------------------------------------------------------

// Guesses for each of n_seqs, and the tokens per second with them over those without.
typedef struct {
  uint32_t n;
  double gain;
} choice;

// The number of guesses with these odds that yields most. Each costs pass, as a share of a step,
// and a token of the step for every sequence.
static choice best_of(const td_draft_pace *p, uint32_t n_seqs, double odds, double pass) {
  const double each = n_seqs * td_draft_pace_cost(p, n_seqs) + pass;
  choice best = {.n = 0, .gain = 1};
  double drawn = 1, reach = 1;
  for (uint32_t n = 1; n <= TD_DRAFT_MAX; n++) {
    drawn += reach *= odds;
    const double gain = drawn / (1 + n * each);
    if (gain <= best.gain) break;
    best = (choice){.n = n, .gain = gain};
  }
  return best;
}

static choice best_of_layer(const td_draft_pace *p, uint32_t n_seqs, double odds) {
  double slope;
  const double pass = is_measured(p) ? p->pass_ns / step_ns(p, n_seqs, &slope) : 0;
  choice best = best_of(p, n_seqs, odds, pass);
  if (best.gain < MIN_GAIN) best = (choice){.n = 0, .gain = 1};
  if (best.n > 1 && p->n_passes < FIRST_TRIES) best.n = 1;
  return best;
}

uint32_t td_draft_depth(const td_draft *d, uint32_t mode, const td_draft_pace *p, uint32_t n_seqs,
                        bool has_text) {
  const double odds = (double)td_draft_odds_of(d, TD_DRAFT_LAYER, p);
  const double text = has_text ? (double)td_draft_odds_of(d, TD_DRAFT_TEXT, p) : 0;
  if (mode != TD_DRAFT_AUTO) return text > odds ? 0 : mode - TD_DRAFT_OFF;
  const choice layer = best_of_layer(p, n_seqs, odds);
  if (has_text && best_of(p, n_seqs, text, 0).gain >= layer.gain) return 0;
  return layer.n ? layer.n : p->n_tries_left > 0;
}

bool td_draft_layer_pays(const td_draft_pace *p, uint32_t n_seqs) {
  const double odds = (double)odds_of(&p->odds[TD_DRAFT_LAYER], PRIOR_ODDS);
  return p->n_tries_left > 0 || best_of_layer(p, n_seqs, odds).n > 0;
}

void td_draft_choose(td_draft *const *drafts, uint32_t n, uint32_t mode, const td_draft_pace *pace,
                     uint32_t n_tokens, uint32_t max_tokens) {
  const uint32_t depth = mode == TD_DRAFT_AUTO ? TD_DRAFT_MAX : mode - TD_DRAFT_OFF;
  double expected = n_tokens; // tokens drawn from the step
  // Of the first steps with guesses some go without, so that what a token more costs shows.
  const bool is_bare = mode == TD_DRAFT_AUTO && pace->n_passes && pace->n_passes < FIRST_TRIES &&
                       pace->n_passes % 4 == 0;
  for (uint32_t i = 0; i < n; i++) {
    drafts[i]->reach = td_draft_odds_of(drafts[i], drafts[i]->source, pace);
    drafts[i]->n_drafted = 0;
  }
  for (; n_tokens < max_tokens && !is_bare; n_tokens++) {
    td_draft *best = NULL;
    for (uint32_t i = 0; i < n; i++) {
      td_draft *d = drafts[i];
      const uint32_t most = d->n_proposed < depth ? d->n_proposed : depth;
      if (d->n_drafted < most && (!best || d->reach > best->reach)) best = d;
    }
    if (!best) return;
    const double least = expected * td_draft_pace_cost(pace, n_tokens);
    if (mode == TD_DRAFT_AUTO && (double)best->reach <= least) return;
    expected += (double)best->reach;
    best->reach *= td_draft_odds_of(best, best->source, pace);
    best->n_drafted++;
  }
}
