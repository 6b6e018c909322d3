// src/engine/sampler.c - bias, penalties, temperature, truncation, draw. f32, except for sums.
#include "engine/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/trace.h"

struct td_sampler {
  td_sampling params;
  td_token_value *bias;
  uint32_t n_bias, n_vocab;
  uint32_t index;      // index of the next generated token
  const int32_t *ends; // [n_ends] ids not drawn while index < min_tokens
  uint32_t n_ends, min_tokens;
  td_matcher *matcher; // NULL: not constrained
  td_dry *dry;         // NULL: off
  bool has_strayed;    // a token did not match
  bool has_no_logits;  // a row held NaN or infinity
  uint32_t *counts; // [n_vocab] occurrences among generated tokens; NULL when no penalty needs it
  uint8_t *seen;    // [n_vocab] occurs in prompt or generated tokens; NULL when not needed
  td_token_value *candidates; // [n_vocab]
  float *given;               // [n_vocab] the model's logits, unmodified
  float *weights;             // [n_vocab] exp(logit - max)
  float *nearness;            // [n_vocab] for typical_p; NULL when not needed
};

// Every draw passes over a vocabulary of some 100,000 values. Those loops are written in lanes that
// compilers vectorize, cloned for the machine's vector width. No contraction, so all clones give
// the same bits. Not under ThreadSanitizer: clones are resolved before it is set up.
#if defined(__x86_64__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
enum { LANES = 16, BLOCK = 256, FEW = 64 };

static bool has_repetition(const td_sampling *p) {
  return p->repetition_penalty != 0 && p->repetition_penalty != 1;
}

static bool has_penalties(const td_sampling *p) {
  return has_repetition(p) || p->presence_penalty != 0 || p->frequency_penalty != 0;
}

static bool is_typical(const td_sampling *p) {
  return p->typical_p > 0 && p->typical_p < 1;
}

static td_status check_params(const td_sampling *p, td_err *err) {
  if (!(p->top_n_sigma >= 0) || !(p->typical_p >= 0 && p->typical_p <= 1) ||
      !(p->xtc_probability >= 0 && p->xtc_probability <= 1) || !(p->xtc_threshold >= 0) ||
      !(p->temperature >= 0) || !(p->top_p >= 0 && p->top_p <= 1) ||
      !(p->min_p >= 0 && p->min_p <= 1) || !(p->repetition_penalty >= 0) ||
      !isfinite(p->presence_penalty) || !isfinite(p->frequency_penalty) ||
      p->n_top_logprobs > TD_WIRE_MAX_TOP)
    return td_fail(err, TD_EINVAL, "sampling parameter out of range");
  return TD_OK;
}

td_status td_sampler_open(td_sampler **out, const td_sampling *params, const td_token_value *bias,
                          uint32_t n_bias, uint32_t n_vocab, td_err *err) {
  *out = NULL;
  td_status st = check_params(params, err);
  if (st != TD_OK) return st;
  td_sampler *s = calloc(1, sizeof *s);
  if (!s) return td_fail(err, TD_ENOMEM, "out of memory");
  s->params = *params;
  s->n_vocab = n_vocab;
  s->n_bias = n_bias;
  s->candidates = malloc(n_vocab * sizeof *s->candidates);
  s->given = malloc(n_vocab * sizeof *s->given);
  s->weights = malloc(n_vocab * sizeof *s->weights);
  s->bias = malloc((n_bias + 1) * sizeof *s->bias);
  bool failed = !s->candidates || !s->given || !s->weights || !s->bias;
  if (has_penalties(params)) {
    s->counts = calloc(n_vocab, sizeof *s->counts);
    s->seen = calloc(n_vocab, sizeof *s->seen);
    failed |= !s->counts || !s->seen;
  }
  if (is_typical(params)) {
    s->nearness = malloc(n_vocab * sizeof *s->nearness);
    failed |= !s->nearness;
  }
  if (failed) {
    td_sampler_close(s);
    return td_fail(err, TD_ENOMEM, "out of memory: sampler of %u tokens", n_vocab);
  }
  if (n_bias) memcpy(s->bias, bias, n_bias * sizeof *bias);
  *out = s;
  return TD_OK;
}

void td_sampler_close(td_sampler *s) {
  if (!s) return;
  free(s->candidates);
  free(s->given);
  free(s->weights);
  free(s->nearness);
  free(s->bias);
  free(s->counts);
  free(s->seen);
  free(s);
}

void td_sampler_ends(td_sampler *s, const int32_t *ids, uint32_t n, uint32_t min_tokens) {
  s->ends = ids;
  s->n_ends = n;
  s->min_tokens = min_tokens;
}

void td_sampler_constrain(td_sampler *s, td_matcher *matcher) {
  s->matcher = matcher;
}

void td_sampler_dry(td_sampler *s, td_dry *dry) {
  s->dry = dry;
}

td_status td_sampler_status(const td_sampler *s, td_err *err) {
  if (s->has_no_logits) return td_fail(err, TD_EFORMAT, TD_NO_LOGITS);
  td_status st = s->matcher ? td_matcher_status(s->matcher, err) : TD_OK;
  if (st != TD_OK || !s->has_strayed) return st;
  return td_fail(err, TD_EINVAL, "no token of the vocabulary can continue what the grammar allows");
}

// Whether end-of-sequence tokens are still forbidden (min_tokens).
static bool must_go_on(const td_sampler *s) {
  return s->n_ends && s->index < s->min_tokens;
}

void td_sampler_prompt(td_sampler *s, const int32_t *ids, uint32_t n) {
  if (s->dry) td_dry_take(s->dry, ids, n);
  if (!s->seen) return;
  for (uint32_t i = 0; i < n; i++)
    if (ids[i] >= 0 && (uint32_t)ids[i] < s->n_vocab) s->seen[ids[i]] = 1;
}

static bool is_end(const td_sampler *s, int32_t id) {
  for (uint32_t i = 0; i < s->n_ends; i++)
    if (s->ends[i] == id) return true;
  return false;
}

static void remember(td_sampler *s, int32_t id) {
  s->index++;
  if (s->dry) td_dry_take(s->dry, &id, 1);
  if (s->matcher && !td_matcher_advance(s->matcher, id))
    s->has_strayed |= !td_matcher_may_end(s->matcher) || !is_end(s, id);
  if (!s->seen) return;
  s->seen[id] = 1;
  s->counts[id]++;
}

void td_sampler_answer(td_sampler *s, const int32_t *ids, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    TD_CHECK(ids[i] >= 0 && (uint32_t)ids[i] < s->n_vocab);
    remember(s, ids[i]);
  }
}

// ---- the draw -------------------------------------------------------------------------------

// Uniform in [0, 1), from (seed, index) alone: two rounds of the splitmix64 finalizer (Steele et
// al., OOPSLA 2014).
static double uniform(uint64_t seed, uint32_t index) {
  uint64_t z = seed;
  for (int round = 0; round < 2; round++) {
    z += 0x9e3779b97f4a7c15u * ((uint64_t)index + 1);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
  }
  return (double)(z >> 11) * 0x1p-53;
}

CLONES static void keep_masked(float *logits, const uint64_t *mask, uint32_t n) {
  for (uint32_t at = 0; at < n; at += 64) {
    const uint64_t word = mask[at / 64];
    const uint32_t end = n - at < 64 ? n : at + 64;
    if (word == UINT64_MAX) continue;
    for (uint32_t i = at; i < end; i++)
      logits[i] = word >> (i - at) & 1 ? logits[i] : -INFINITY;
  }
}

// Clears the logits of tokens that the grammar does not allow. Nothing is cleared when the matcher
// has failed.
static void constrain(td_sampler *s, float *logits) {
  const uint64_t *mask = td_matcher_mask(s->matcher);
  if (!mask) return;
  float ends[TD_WIRE_MAX_ENDS * 2];
  bool may_end = td_matcher_may_end(s->matcher);
  uint32_t n_ends = s->n_ends < TD_COUNT(ends) ? s->n_ends : TD_COUNT(ends);
  for (uint32_t i = 0; i < n_ends; i++) {
    bool is_known = s->ends[i] >= 0 && (uint32_t)s->ends[i] < s->n_vocab;
    ends[i] = is_known ? logits[s->ends[i]] : -INFINITY;
  }
  keep_masked(logits, mask, s->n_vocab);
  for (uint32_t i = 0; i < n_ends && may_end; i++)
    if (s->ends[i] >= 0 && (uint32_t)s->ends[i] < s->n_vocab) logits[s->ends[i]] = ends[i];
}

// Whether a row can be drawn from: no NaN, nor +infinity, nor -infinity alone.
CLONES static bool has_logits(const float *x, uint32_t n) {
  int is_bad = 0, is_some = 0;
  for (uint32_t i = 0; i < n; i++) {
    is_bad |= !(x[i] < INFINITY);
    is_some |= x[i] > -INFINITY;
  }
  return is_some && !is_bad;
}

static void add_bias_and_penalties(const td_sampler *s, float *logits) {
  const td_sampling *p = &s->params;
  for (uint32_t i = 0; i < s->n_bias; i++)
    if (s->bias[i].id >= 0 && (uint32_t)s->bias[i].id < s->n_vocab)
      logits[s->bias[i].id] += s->bias[i].value;
  if (!s->seen) return;
  for (uint32_t i = 0; i < s->n_vocab; i++) {
    if (s->seen[i] && has_repetition(p)) {
      logits[i] = logits[i] > 0 ? logits[i] / p->repetition_penalty
                                : logits[i] * p->repetition_penalty;
    }
    if (s->counts[i]) logits[i] -= p->presence_penalty + p->frequency_penalty * (float)s->counts[i];
  }
}

CLONES static float largest(const float *x, uint32_t n) {
  float most[LANES], all = x[0];
  for (int j = 0; j < LANES; j++)
    most[j] = x[0];
  uint32_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int j = 0; j < LANES; j++)
      most[j] = x[i + j] > most[j] ? x[i + j] : most[j];
  for (; i < n; i++)
    all = x[i] > all ? x[i] : all;
  for (int j = 0; j < LANES; j++)
    all = most[j] > all ? most[j] : all;
  return all;
}

// Index of the first maximum; index 0 if x[0] is NaN.
static uint32_t argmax(const float *x, uint32_t n) {
  float most = largest(x, n);
  for (uint32_t i = 0; i < n; i++)
    if (x[i] == most) return i;
  return 0;
}

// e^x for x <= 0, within 2 ulp; 0 where the result would be subnormal, and for NaN. x = n ln 2 + r
// with |r| <= ln(2)/2; the polynomial for e^r is that of Cephes' expf. Additions and
// multiplications only, so that all machines draw the same.
static float exp_of(float x) {
  const float round = 0x1.8p23f, clamped = x > -87.0f ? x : -87.0f;
  const float shifted = clamped * 1.44269504088896341f + round, n = shifted - round;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  int32_t bits, of_n;
  memcpy(&bits, &p, sizeof bits);
  memcpy(&of_n, &shifted, sizeof of_n);
  bits += (int32_t)((uint32_t)of_n << 23); // add n to the exponent; the low bits of of_n hold n
  memcpy(&p, &bits, sizeof p);
  return x > -87.0f ? p : 0.0f;
}

CLONES static double sum_of(const float *x, uint32_t n) {
  double sums[LANES] = {0}, all = 0;
  uint32_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int j = 0; j < LANES; j++)
      sums[j] += (double)x[i + j];
  for (; i < n; i++)
    all += (double)x[i];
  for (int j = 0; j < LANES; j++)
    all += sums[j];
  return all;
}

// weights[i] = exp(x[i] - most); returns the sum.
CLONES static double weigh_all(float *restrict weights, const float *restrict x, uint32_t n,
                               float most) {
  for (uint32_t i = 0; i < n; i++)
    weights[i] = exp_of(x[i] - most);
  return sum_of(weights, n);
}

// Descending by value, ties ascending by id, so that the order is the same everywhere.
static int by_value(const void *a, const void *b) {
  const td_token_value *x = a, *y = b;
  if (x->value != y->value) return x->value > y->value ? -1 : 1;
  return (x->id > y->id) - (x->id < y->id);
}

// A heap of the k best values seen so far, the worst at the root; used to find the k best of n.
static void sift_down(td_token_value *heap, uint32_t n, uint32_t i) {
  for (;;) {
    uint32_t worst = i, left = 2 * i + 1, right = left + 1;
    if (left < n && by_value(&heap[left], &heap[worst]) > 0) worst = left;
    if (right < n && by_value(&heap[right], &heap[worst]) > 0) worst = right;
    if (worst == i) return;
    td_token_value tmp = heap[i];
    heap[i] = heap[worst];
    heap[worst] = tmp;
    i = worst;
  }
}

CLONES static bool has_above(const float *x, uint32_t n, float bar) {
  int found = 0;
  for (uint32_t i = 0; i < n; i++)
    found |= x[i] > bar;
  return found;
}

static void best_first(td_token_value *c, const float *values, uint32_t n, uint32_t k) {
  for (uint32_t i = 0; i < k; i++)
    c[i] = (td_token_value){.id = (int32_t)i, .value = values[i]};
  for (uint32_t i = k / 2; i-- > 0;)
    sift_down(c, k, i);
  for (uint32_t at = k, end; at < n; at = end) {
    end = n - at < BLOCK ? n : at + BLOCK;
    if (!has_above(values + at, end - at, c[0].value)) continue;
    for (uint32_t i = at; i < end; i++) {
      if (values[i] > c[0].value) { // equal values: the lower id stays
        c[0] = (td_token_value){.id = (int32_t)i, .value = values[i]};
        sift_down(c, k, 0);
      }
    }
  }
  qsort(c, k, sizeof *c, by_value);
}

// Replaces the values of n candidates (logits divided by temperature) with exp(value - max);
// returns the sum.
static double weigh(td_token_value *c, uint32_t n, float max) {
  double sum = 0;
  for (uint32_t i = 0; i < n; i++) {
    c[i].value = exp_of(c[i].value - max);
    sum += c[i].value;
  }
  return sum;
}

static bool has_tail_cut(const td_sampling *p) {
  return (p->top_p > 0 && p->top_p < 1) || p->min_p > 0;
}

// How many of k weighted candidates, best first, top_p and min_p keep; *have becomes their weight.
// The result k may mean that more candidates after the k-th would be kept. sum: weight of all
// tokens.
static uint32_t count_kept(const td_sampling *p, const td_token_value *c, uint32_t k, double sum,
                           double *have) {
  double need = p->top_p > 0 && p->top_p < 1 ? p->top_p * sum : INFINITY;
  uint32_t keep = 0;
  *have = 0;
  for (; keep < k; keep++) {
    if (keep > 0 && (*have >= need || c[keep].value < p->min_p * c[0].value)) break;
    *have += c[keep].value;
  }
  return keep;
}

// Draws one of n weighted candidates with total weight sum. Returns best if rounding leaves a
// remainder.
static int32_t pick(const td_sampler *s, const td_token_value *c, uint32_t n, double sum,
                    int32_t best) {
  double left = uniform(s->params.seed, s->index) * sum;
  for (uint32_t i = 0; i < n; i++) {
    left -= c[i].value;
    if (left < 0) return c[i].id;
  }
  return best;
}

// The same over all tokens; skips whole blocks by their weight.
static int32_t pick_of_all(const td_sampler *s, double sum, int32_t best) {
  double left = uniform(s->params.seed, s->index) * sum;
  for (uint32_t at = 0, n; at < s->n_vocab; at += n) {
    n = s->n_vocab - at < BLOCK ? s->n_vocab - at : BLOCK;
    double of_block = sum_of(s->weights + at, n);
    if (left >= of_block) {
      left -= of_block;
      continue;
    }
    for (uint32_t i = at; i < at + n; i++) {
      left -= s->weights[i];
      if (left < 0) return (int32_t)i;
    }
  }
  return best;
}

// ---- many tokens above the cut ----------------------------------------------------------------

// Buckets of weights in [0, 1] by their upper bits: a higher bucket holds larger weights.
enum { BUCKET_SHIFT = 18, N_BUCKETS = (0x3f800000 >> BUCKET_SHIFT) + 1 };

static uint32_t bucket_of(float weight) {
  uint32_t bits;
  memcpy(&bits, &weight, sizeof bits);
  return bits >> BUCKET_SHIFT;
}

// Copies a bucket's tokens to candidates, best first; returns how many.
static uint32_t open_bucket(td_sampler *s, uint32_t b) {
  uint32_t n = 0;
  bool in_order = true; // ties often are: a padded vocabulary has many
  for (uint32_t i = 0; i < s->n_vocab; i++) {
    const float weight = s->weights[i];
    if (bucket_of(weight) != b) continue;
    in_order &= n == 0 || s->candidates[n - 1].value >= weight;
    s->candidates[n++] = (td_token_value){.id = (int32_t)i, .value = weight};
  }
  if (!in_order) qsort(s->candidates, n, sizeof *s->candidates, by_value);
  return n;
}

// What pick would return for all tokens kept by count_kept, best first. Only two buckets are
// sorted: the one where the kept tokens end, and the one where the draw ends.
static int32_t pick_of_many(td_sampler *s, double sum, int32_t best) {
  const td_sampling *p = &s->params;
  const double need = p->top_p > 0 && p->top_p < 1 ? p->top_p * sum : INFINITY;
  double sums[N_BUCKETS] = {0};
  for (uint32_t i = 0; i < s->n_vocab; i++)
    sums[bucket_of(s->weights[i])] += (double)s->weights[i];
  const uint32_t least = bucket_of(p->min_p); // the largest weight is 1
  uint32_t last = N_BUCKETS - 1;
  double have = 0;
  for (; last > least && have + sums[last] < need; last--)
    have += sums[last];
  uint32_t n = open_bucket(s, last), kept = 0;
  for (; kept < n && have < need && s->candidates[kept].value >= p->min_p; kept++)
    have += (double)s->candidates[kept].value;
  double left = uniform(s->params.seed, s->index) * have;
  uint32_t b = N_BUCKETS - 1;
  for (; b > last && left >= sums[b]; b--)
    left -= sums[b];
  n = b == last ? kept : open_bucket(s, b);
  for (uint32_t i = 0; i < n; i++) {
    left -= (double)s->candidates[i].value;
    if (left < 0) return s->candidates[i].id;
  }
  return best;
}

// ---- rarer cuts ---------------------------------------------------------------------------------

static void cut_far(const td_sampler *s, float *x) {
  double sum = 0, squares = 0;
  uint32_t n = 0;
  for (uint32_t i = 0; i < s->n_vocab; i++) {
    if (x[i] == -INFINITY) continue;
    sum += (double)x[i];
    n++;
  }
  const double mean = sum / n;
  for (uint32_t i = 0; i < s->n_vocab; i++)
    if (x[i] != -INFINITY) squares += ((double)x[i] - mean) * ((double)x[i] - mean);
  const double bar = (double)largest(x, s->n_vocab) -
                     (double)s->params.top_n_sigma * sqrt(squares / n);
  for (uint32_t i = 0; i < s->n_vocab; i++)
    if ((double)x[i] < bar) x[i] = -INFINITY;
}

// A token's surprise is log(sum) - (x - max), and the entropy their mean: log(sum) cancels.
static void cut_untypical(td_sampler *s, float *x) {
  const float max = largest(x, s->n_vocab);
  const double sum = weigh_all(s->weights, x, s->n_vocab, max);
  double mean = 0;
  for (uint32_t i = 0; i < s->n_vocab; i++)
    if (s->weights[i] > 0) mean += (double)s->weights[i] * (double)(x[i] - max) / sum;
  for (uint32_t i = 0; i < s->n_vocab; i++)
    s->nearness[i] = -fabsf(x[i] - max - (float)mean);
  td_token_value *c = s->candidates;
  uint32_t n = 0;
  double have = 0;
  for (uint32_t few = FEW; n < s->n_vocab && have < s->params.typical_p * sum; few *= 16) {
    if (few > s->n_vocab) few = s->n_vocab;
    best_first(c, s->nearness, s->n_vocab, few);
    for (n = 0, have = 0; n < few && have < s->params.typical_p * sum; n++)
      have += (double)s->weights[c[n].id];
  }
  for (uint32_t i = 0; i < n; i++)
    c[i].value = x[c[i].id];
  for (uint32_t i = 0; i < s->n_vocab; i++)
    x[i] = -INFINITY;
  for (uint32_t i = 0; i < n; i++)
    x[c[i].id] = c[i].value;
}

// Whether XTC leaves out the likeliest tokens of this draw: a draw of its own.
static bool cuts_tops(const td_sampler *s) {
  const float chance = s->params.xtc_probability;
  return chance > 0 && uniform(~s->params.seed, s->index) < (double)chance;
}

// Draws without the likeliest tokens. logits are divided by the temperature.
static int32_t draw_below(td_sampler *s, const float *logits) {
  const td_sampling *p = &s->params;
  td_token_value *c = s->candidates;
  uint32_t n = p->top_k && p->top_k < s->n_vocab ? p->top_k : s->n_vocab, n_out = 0;
  best_first(c, logits, s->n_vocab, n);
  double sum = weigh(c, n, c[0].value);
  if (has_tail_cut(p)) n = count_kept(p, c, n, sum, &sum);
  const double bar = (double)p->xtc_threshold * sum;
  // What a grammar forbids has no weight, whatever the threshold.
  while (n_out + 1 < n && c[n_out + 1].value > 0 && (double)c[n_out + 1].value >= bar)
    sum -= (double)c[n_out++].value;
  return pick(s, c + n_out, n - n_out, sum, c[n_out].id);
}

static bool has_rare_cut(const td_sampling *p) {
  return p->top_n_sigma > 0 || is_typical(p) || p->xtc_probability > 0;
}

static int32_t draw(td_sampler *s, float *logits) {
  const td_sampling *p = &s->params;
  if (p->temperature > 0 && p->top_n_sigma > 0) cut_far(s, logits);
  if (p->temperature > 0 && is_typical(p)) cut_untypical(s, logits);
  const uint32_t best = argmax(logits, s->n_vocab);
  if (p->temperature == 0) return (int32_t)best;
  const float inverse = 1.0f / p->temperature;
  for (uint32_t i = 0; i < s->n_vocab; i++)
    logits[i] *= inverse;
  if (cuts_tops(s)) return draw_below(s, logits);
  td_token_value *c = s->candidates;
  uint32_t n = p->top_k;
  double sum;
  if (n && n < s->n_vocab) {
    best_first(c, logits, s->n_vocab, n);
    sum = weigh(c, n, logits[best]);
    if (has_tail_cut(p)) {
      qsort(c, n, sizeof *c, by_value); // different logits may have equal weights
      n = count_kept(p, c, n, sum, &sum);
    }
  } else {
    sum = weigh_all(s->weights, logits, s->n_vocab, logits[best]);
    if (!has_tail_cut(p)) return pick_of_all(s, sum, (int32_t)best);
    const uint32_t few = s->n_vocab < FEW ? s->n_vocab : FEW; // usually hold most of the weight
    double have;
    best_first(c, s->weights, s->n_vocab, few);
    n = count_kept(p, c, few, sum, &have);
    if (n == few && n < s->n_vocab) return pick_of_many(s, sum, (int32_t)best);
    sum = have;
  }
  return pick(s, c, n, sum, (int32_t)best);
}

// The same from the top logits. False: they do not suffice.
static bool draw_of_top(const td_sampler *s, const td_top_logits *top, int32_t *out) {
  const td_sampling *p = &s->params;
  *out = top->id[0];
  if (p->temperature == 0) return true;
  bool has_top_k = p->top_k && p->top_k < s->n_vocab;
  if (has_top_k ? p->top_k > top->n : !has_tail_cut(p)) return false;
  td_token_value c[TD_TOP_LOGITS];
  float inverse = 1.0f / p->temperature;
  for (uint32_t i = 0; i < top->n; i++)
    c[i] = (td_token_value){.id = top->id[i], .value = top->value[i] * inverse};
  qsort(c, top->n, sizeof *c, by_value); // dividing by the temperature can make ties
  uint32_t n = has_top_k ? p->top_k : top->n;
  double sum = weigh(c, n, c[0].value);
  if (!has_top_k) sum = top->sum_warm;
  if (has_tail_cut(p)) {
    double have;
    uint32_t keep = count_kept(p, c, n, sum, &have);
    if (keep == n && !has_top_k && n < s->n_vocab) return false;
    n = keep;
    sum = have;
  }
  *out = pick(s, c, n, sum, top->id[0]);
  return true;
}

// ---- log-probabilities ----------------------------------------------------------------------

static double log_sum_exp(const td_sampler *s, const float *logits) {
  const float most = largest(logits, s->n_vocab);
  return log(weigh_all(s->weights, logits, s->n_vocab, most)) + (double)most;
}

static void fill_top(td_sampler *s, const float *logits, double norm, td_wire_token *token) {
  uint32_t k = s->params.n_top_logprobs;
  if (k > s->n_vocab) k = s->n_vocab;
  if (!k) return;
  best_first(s->candidates, logits, s->n_vocab, k);
  for (uint32_t i = 0; i < k; i++) {
    token->top[i] = (td_token_value){.id = s->candidates[i].id,
                                     .value = (float)(s->candidates[i].value - norm)};
  }
  token->n_top = k;
}

void td_sampler_score(td_sampler *s, const float *logits, int32_t id, td_wire_token *out) {
  s->has_no_logits |= !has_logits(logits, s->n_vocab);
  double norm = log_sum_exp(s, logits);
  out->id = id;
  out->logprob = (float)((double)logits[id] - norm);
  fill_top(s, logits, norm, out);
}

td_wire_token td_sampler_next(td_sampler *s, float *logits, int want_logprobs) {
  uint64_t begin_ns = td_trace_begin();
  td_wire_token token = {.index = s->index};
  double norm = 0;
  s->has_no_logits |= !has_logits(logits, s->n_vocab);
  if (want_logprobs) {
    norm = log_sum_exp(s, logits);
    fill_top(s, logits, norm, &token);
    memcpy(s->given, logits, s->n_vocab * sizeof *logits);
  }
  add_bias_and_penalties(s, logits);
  if (s->dry) td_dry_apply(s->dry, logits);
  if (s->matcher) constrain(s, logits);
  for (uint32_t i = 0; must_go_on(s) && i < s->n_ends; i++)
    if (s->ends[i] >= 0 && (uint32_t)s->ends[i] < s->n_vocab) logits[s->ends[i]] = -INFINITY;
  token.id = draw(s, logits);
  if (want_logprobs) token.logprob = (float)(s->given[token.id] - norm);
  remember(s, token.id);
  td_trace_span(begin_ns, TD_TRACE_SAMPLE, 0, 0);
  return token;
}

// The log-probabilities of the drawn token and of the best tokens.
static void describe(const td_sampler *s, const td_top_logits *top, td_wire_token *token) {
  double norm = log((double)top->sum) + (double)top->value[0];
  uint32_t k = s->params.n_top_logprobs < top->n ? s->params.n_top_logprobs : top->n;
  for (uint32_t i = 0; i < top->n; i++) {
    float logprob = (float)((double)top->value[i] - norm);
    if (i < k) token->top[i] = (td_token_value){.id = top->id[i], .value = logprob};
    if (top->id[i] == token->id) token->logprob = logprob;
  }
  token->n_top = k;
}

// The top logits that the grammar allows. False: a draw may need more than these.
static bool filter_top(const td_sampler *s, const td_top_logits *top, td_top_logits *out) {
  const td_sampling *p = &s->params;
  const uint32_t need = p->temperature == 0 ? 1 : p->top_k;
  if (need == 0 || need > top->n) return false;
  bool may_end = td_matcher_may_end(s->matcher);
  *out = (td_top_logits){.sum = top->sum, .sum_warm = top->sum_warm};
  for (uint32_t i = 0; i < top->n && out->n < need; i++) {
    bool is_allowed = (may_end && is_end(s, top->id[i])) ||
                      td_matcher_accepts(s->matcher, top->id[i]);
    if (!is_allowed) continue;
    out->id[out->n] = top->id[i];
    out->value[out->n++] = top->value[i];
  }
  return out->n == need;
}

bool td_sampler_next_of_top(td_sampler *s, const td_top_logits *top, int want_logprobs,
                            td_wire_token *out) {
  td_top_logits allowed;
  const td_top_logits *ranked = top;
  if (s->n_bias || s->seen || s->dry || must_go_on(s) || !isfinite(top->value[0])) return false;
  if (has_rare_cut(&s->params)) return false;
  if (!isfinite(top->sum) || !isfinite(top->sum_warm)) return false;
  uint64_t begin_ns = td_trace_begin();
  *out = (td_wire_token){.index = s->index};
  if (s->matcher) {
    if (!filter_top(s, top, &allowed)) return false;
    ranked = &allowed;
  }
  if (!draw_of_top(s, ranked, &out->id)) return false;
  if (want_logprobs) describe(s, top, out);
  remember(s, out->id);
  td_trace_span(begin_ns, TD_TRACE_SAMPLE, 0, 0);
  return true;
}
