// src/engine/dry.c - runs that a token would repeat, found by the Z-algorithm from the text's end.
#include "engine/dry.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct td_dry {
  td_wire_dry params;
  const td_token_index *tokens;
  uint32_t n_vocab, n, max_tokens;
  int32_t *ids;   // [max_tokens] the text; a token that breaks is -1 - its place: equal to no other
  uint32_t *runs; // [min(max_tokens, last_n)] by distance from the last token: equal tokens
  uint32_t *longest;   // [n_vocab] the longest run before a token; all 0 between calls
  uint32_t n_unbroken; // tokens since the last that breaks
  // An Aho-Corasick automaton: the state after the bytes so far, and where breakers end.
  uint8_t state, next[TD_WIRE_MAX_BREAKERS][256];
  bool is_end[TD_WIRE_MAX_BREAKERS];
};

// Finite, so that the only token that a grammar allows is still drawn.
#define MOST_PENALTY 1e6

bool td_dry_is_valid(const td_wire_dry *p) {
  const bool are_numbers = p->multiplier > 0 && isfinite(p->multiplier) && p->base >= 1 &&
                           isfinite(p->base) && p->allowed_length > 0 && p->last_n > 0;
  bool are_texts = p->n_bytes <= TD_WIRE_MAX_BREAKERS &&
                   (!p->n_bytes || (p->breakers[0] && !p->breakers[p->n_bytes - 1]));
  for (uint32_t i = 1; are_texts && i < p->n_bytes; i++)
    are_texts = p->breakers[i] || p->breakers[i - 1];
  return are_numbers && are_texts;
}

// A state is a beginning of breakers, 0 the empty one; with the NULs there is room for all.
static void build_automaton(td_dry *d) {
  uint8_t queue[TD_WIRE_MAX_BREAKERS], shorter[TD_WIRE_MAX_BREAKERS] = {0};
  uint32_t n_states = 1, n_queued = 0;
  uint8_t at = 0;
  for (uint32_t i = 0; i < d->params.n_bytes; i++) {
    const uint8_t byte = (uint8_t)d->params.breakers[i];
    d->is_end[at] |= !byte;
    if (byte && !d->next[at][byte]) d->next[at][byte] = (uint8_t)n_states++;
    at = d->next[at][byte]; // by NUL to 0
  }
  for (uint32_t byte = 0; byte < 256; byte++)
    if (d->next[0][byte]) queue[n_queued++] = d->next[0][byte];
  for (uint32_t i = 0; i < n_queued; i++) { // by length; shorter: the longest that it ends with
    const uint8_t from = queue[i], less = shorter[from];
    d->is_end[from] |= d->is_end[less];
    for (uint32_t byte = 0; byte < 256; byte++) {
      const uint8_t to = d->next[from][byte];
      if (!to) d->next[from][byte] = d->next[less][byte];
      if (to) {
        shorter[to] = d->next[less][byte];
        queue[n_queued++] = to;
      }
    }
  }
}

td_status td_dry_open(td_dry **out, const td_wire_dry *params, const td_token_index *tokens,
                      uint32_t n_vocab, uint32_t max_tokens, td_err *err) {
  td_dry *d = *out = calloc(1, sizeof *d);
  const uint32_t window = max_tokens < params->last_n ? max_tokens : params->last_n;
  if (d) {
    *d = (td_dry){.params = *params,
                  .tokens = tokens,
                  .n_vocab = n_vocab,
                  .max_tokens = max_tokens,
                  .ids = malloc((max_tokens + (size_t)1) * sizeof *d->ids),
                  .runs = malloc((window + (size_t)1) * sizeof *d->runs),
                  .longest = calloc(n_vocab, sizeof *d->longest)};
    build_automaton(d);
    if (d->ids && d->runs && d->longest) return TD_OK;
  }
  td_dry_close(d);
  *out = NULL;
  return td_fail(err, TD_ENOMEM, "out of memory: DRY over %u tokens", max_tokens);
}

void td_dry_close(td_dry *d) {
  if (!d) return;
  free(d->ids);
  free(d->runs);
  free(d->longest);
  free(d);
}

// Takes a token's bytes; whether it breaks.
static bool takes_breaker(td_dry *d, int32_t id) {
  const td_token_index *index = d->tokens;
  bool is_break = false;
  if (!index) return false;
  const uint32_t place = (uint32_t)id < index->n_vocab ? index->place_of[id] : UINT32_MAX;
  if (place == UINT32_MAX) {
    d->state = 0; // no breaker reaches over a control token
    return true;
  }
  for (uint32_t i = index->begin[place]; i < index->begin[place + 1]; i++) {
    d->state = d->next[d->state][index->bytes[i]];
    is_break |= d->is_end[d->state];
  }
  return is_break;
}

void td_dry_take(td_dry *d, const int32_t *ids, uint32_t n) {
  TD_CHECK(n <= d->max_tokens - d->n);
  for (uint32_t i = 0; i < n; i++, d->n++) {
    const bool is_break = takes_breaker(d, ids[i]) || (uint32_t)ids[i] >= d->n_vocab;
    d->ids[d->n] = is_break ? -1 - (int32_t)d->n : ids[i];
    d->n_unbroken = is_break ? 0 : d->n_unbroken + 1;
  }
}

// runs[k]: how many tokens up to the one k before the last are equal to as many last ones.
static void find_runs(const int32_t *last, uint32_t n, uint32_t *runs) {
  uint32_t from = 0, to = 0; // the run that reaches farthest, [from, to)
  for (uint32_t k = 1; k < n; k++) {
    uint32_t run = k < to ? (runs[k - from] < to - k ? runs[k - from] : to - k) : 0;
    while (k + run < n && *(last - run) == *(last - k - run))
      run++;
    if (k + run > to) {
      from = k;
      to = k + run;
    }
    runs[k] = run;
  }
}

// Multiplications only, so that all machines draw the same.
static float penalty_of(const td_wire_dry *p, uint32_t run) {
  double penalty = (double)p->multiplier, power = (double)p->base;
  for (uint32_t n = run - p->allowed_length; n && penalty < MOST_PENALTY; n /= 2, power *= power)
    if (n % 2) penalty *= power;
  return (float)(penalty < MOST_PENALTY ? penalty : MOST_PENALTY);
}

void td_dry_apply(td_dry *d, float *logits) {
  const td_wire_dry *p = &d->params;
  const uint32_t n = d->n < p->last_n ? d->n : p->last_n;
  if (d->n_unbroken < p->allowed_length || n <= p->allowed_length) return;
  const int32_t *last = d->ids + d->n - 1;
  find_runs(last, n, d->runs);
  for (uint32_t k = 1; k < n; k++) {
    const int32_t id = *(last - k + 1);
    if (d->runs[k] >= p->allowed_length && id >= 0 && d->runs[k] > d->longest[id])
      d->longest[id] = d->runs[k];
  }
  for (uint32_t k = 1; k < n; k++) {
    const int32_t id = *(last - k + 1);
    if (d->runs[k] < p->allowed_length || id < 0 || !d->longest[id]) continue;
    logits[id] -= penalty_of(p, d->longest[id]);
    d->longest[id] = 0;
  }
}
