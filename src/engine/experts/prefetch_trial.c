// src/engine/experts/prefetch_trial.c - pairs of steps, and what they took.
#include "engine/experts/prefetch_trial.h"

#define MOST_TIMES 1.5  // what counts of a step, times the other one: something else held it up
#define MOST_SHARE 0.98 // of the time without, that steps with it may take

static bool is_trial(const td_prefetch_trial *t) {
  return t->n_steps % TD_PREFETCH_ROUND < 2 * TD_PREFETCH_PAIRS;
}

bool td_prefetch_trial_next(td_prefetch_trial *t) {
  if (!is_trial(t)) return t->pays;
  return t->n_steps % 4 == 0 || t->n_steps % 4 == 3; // no trend of time counts, as memory fills
}

static double at_most(double ns, double most) {
  return ns < most ? ns : most;
}

bool td_prefetch_trial_note(td_prefetch_trial *t, uint32_t n_tokens, uint64_t ns) {
  const bool prefetched = td_prefetch_trial_next(t);
  if (t->n_steps % TD_PREFETCH_ROUND == 0)
    *t = (td_prefetch_trial){.n_steps = t->n_steps, .pays = t->pays};
  if (t->n_steps % 2 == 0) {
    t->first_tokens = n_tokens;
    t->first_ns = ns;
  } else if (is_trial(t) && n_tokens == t->first_tokens) {
    const double first = (double)t->first_ns, second = (double)ns;
    t->ns[!prefetched] += at_most(first, MOST_TIMES * second);
    t->ns[prefetched] += at_most(second, MOST_TIMES * first);
    t->n_pairs++;
  }
  const bool was_trial = is_trial(t);
  t->n_steps++;
  if (!was_trial || is_trial(t)) return false;
  t->pays = t->n_pairs && t->ns[1] < MOST_SHARE * t->ns[0];
  return true;
}
