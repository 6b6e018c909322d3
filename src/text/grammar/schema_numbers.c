// src/text/grammar/schema_numbers.c - numbers of JSON Schema: between bounds, which are decimals of
// up to 19 digits before the point and MAX_FRACTION behind it, and multiples of powers of ten.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/grammar/schema_impl.h"

enum {
  MAX_WHOLE = 19,       // digits
  MAX_OPEN = 16,        // of a number without a bound
  MAX_FRACTION = 15,    // of a bound
  FRACTION_DIGITS = 16, // that are generated
  MULTIPLE_DIGITS = 9,  // of a multiple without bounds
  MAX_MULTIPLE = 1000,  // multiples are listed, or remainders told apart, up to so many
};

#define FAR 1e16 // 10^MAX_OPEN

// frac: digits without zeros at the end.
typedef struct {
  bool is_negative; // zero is not
  uint64_t whole;
  char frac[MAX_FRACTION + 1];
} decimal;

typedef struct {
  bool is_set, is_open; // open: the number itself is outside
  decimal at;
} bound;

typedef struct {
  bound low, high;
  uint32_t n_frac; // digits behind the point that may be generated; 0: an integer
} interval;

static bool is_whole(const decimal *d) {
  return !d->frac[0];
}

static int compare_sizes(const decimal *a, const decimal *b) {
  return a->whole != b->whole ? (a->whole > b->whole ? 1 : -1) : strcmp(a->frac, b->frac);
}

static int compare(const decimal *a, const decimal *b) {
  if (a->is_negative != b->is_negative) return a->is_negative ? -1 : 1;
  return a->is_negative ? compare_sizes(b, a) : compare_sizes(a, b);
}

// ---- digits
// --------------------------------------------------------------------------------------

static td_node digits(td_grammar_build *b, size_t min, size_t max) {
  return td_g_repeat(b, td_g_range(b, '0', '9'), (uint32_t)min, (uint32_t)max);
}

static td_node digit(td_grammar_build *b, int low, int high) {
  return low > high ? TD_NODE_NEVER : td_g_range(b, (uint32_t)low, (uint32_t)high);
}

// Digit strings of one length, n <= MAX_WHOLE, between low and high.
static td_node digits_between(td_grammar_build *b, const char *low, const char *high, size_t n) {
  if (n == 0) return TD_NODE_EMPTY;
  char zeros[MAX_WHOLE + 1], nines[MAX_WHOLE + 1], from = low[0], to = high[0];
  memset(zeros, '0', sizeof zeros);
  memset(nines, '9', sizeof nines);
  const bool is_low = memcmp(low + 1, zeros, n - 1) == 0;
  const bool is_high = memcmp(high + 1, nines, n - 1) == 0;
  td_node below = TD_NODE_NEVER, above = TD_NODE_NEVER, within = TD_NODE_NEVER;
  if (from == to && !(is_low && is_high))
    return TD_G_SEQ(b, td_g_text(b, low, 1), digits_between(b, low + 1, high + 1, n - 1));
  if (!is_low) {
    below = TD_G_SEQ(b, td_g_text(b, low, 1), digits_between(b, low + 1, nines, n - 1));
    from++;
  }
  if (!is_high) {
    above = TD_G_SEQ(b, td_g_text(b, high, 1), digits_between(b, zeros, high + 1, n - 1));
    to--;
  }
  if (from <= to) within = TD_G_SEQ(b, digit(b, from, to), digits(b, n - 1, n - 1));
  return TD_G_ANY(b, below, within, above);
}

// Integers from low on, up to *high unless that is NULL.
static td_node naturals(td_grammar_build *b, uint64_t low, const uint64_t *high) {
  char first[32], last[32];
  if (high && low > *high) return TD_NODE_NEVER;
  const int n = snprintf(first, sizeof first, "%" PRIu64, low);
  const int n_high = high ? snprintf(last, sizeof last, "%" PRIu64, *high) : n;
  const size_t list = td_g_begin(b);
  for (int len = n; len <= n_high; len++) {
    char from[32], to[32];
    memset(from, '0', sizeof from);
    memset(to, '9', sizeof to);
    from[0] = '1';
    if (len == n) memcpy(from, first, (size_t)n);
    if (len == n_high && high) memcpy(to, last, (size_t)n_high);
    td_g_add(b, digits_between(b, from, to, (size_t)len));
  }
  if (!high && n < MAX_OPEN)
    td_g_add(b, TD_G_SEQ(b, digit(b, '1', '9'), digits(b, (size_t)n, MAX_OPEN - 1)));
  return td_g_end_any(b, list);
}

// ---- what stands behind a whole number
// ------------------------------------------------------------ Below, i digits of the fraction
// stand there already, as many as those of a bound; what is left of the bound is frac + i.

static td_node any_fraction(td_grammar_build *b, uint32_t n_frac) {
  if (!n_frac) return TD_NODE_EMPTY;
  return td_g_maybe(b, TD_G_SEQ(b, td_g_str(b, "."), digits(b, 1, n_frac)));
}

// Up to n digits, not all of them zero.
static td_node above_zero(td_grammar_build *b, uint32_t n) {
  td_node out = TD_NODE_NEVER;
  for (uint32_t i = 0; i < n; i++) {
    out = TD_G_ANY(b, TD_G_SEQ(b, digit(b, '1', '9'), digits(b, 0, i)),
                   TD_G_SEQ(b, td_g_str(b, "0"), out));
  }
  return out;
}

// At least, or more than.
static td_node at_least(td_grammar_build *b, const char *frac, uint32_t i, bool is_open,
                        uint32_t n_frac) {
  const uint32_t left = n_frac - i;
  if (!frac[i] && !is_open) return digits(b, i ? 0 : 1, left);
  if (!left) return TD_NODE_NEVER;
  if (!frac[i]) return above_zero(b, left);
  return TD_G_ANY(
      b, TD_G_SEQ(b, digit(b, frac[i] + 1, '9'), digits(b, 0, left - 1)),
      TD_G_SEQ(b, td_g_text(b, frac + i, 1), at_least(b, frac, i + 1, is_open, n_frac)));
}

// At most, or less than.
static td_node at_most(td_grammar_build *b, const char *frac, uint32_t i, bool is_open,
                       uint32_t n_frac) {
  const uint32_t left = n_frac - i;
  if (!frac[i]) return is_open ? TD_NODE_NEVER : td_g_repeat(b, td_g_str(b, "0"), i ? 0 : 1, left);
  const td_node end = i ? TD_NODE_EMPTY : TD_NODE_NEVER;
  if (!left) return end;
  return TD_G_ANY(b, end, TD_G_SEQ(b, digit(b, '0', frac[i] - 1), digits(b, 0, left - 1)),
                  TD_G_SEQ(b, td_g_text(b, frac + i, 1), at_most(b, frac, i + 1, is_open, n_frac)));
}

// Between both, of which neither is tighter so far.
static td_node between(td_grammar_build *b, const interval *of, uint32_t i) {
  const char *low = of->low.at.frac, *high = of->high.at.frac;
  const bool has_low = strlen(low) > i, has_high = strlen(high) > i;
  const int from = has_low ? low[i] : '0', to = has_high ? high[i] : '0';
  const uint32_t left = of->n_frac - i;
  if (!has_low && !has_high) {
    const bool is_open = of->low.is_open || of->high.is_open;
    return is_open ? TD_NODE_NEVER : td_g_repeat(b, td_g_str(b, "0"), i ? 0 : 1, left);
  }
  const td_node end = i && !has_low && !of->low.is_open ? TD_NODE_EMPTY : TD_NODE_NEVER;
  if (!left) return end;
  const char first = (char)from, last = (char)to;
  if (from == to)
    return TD_G_ANY(b, end, TD_G_SEQ(b, td_g_text(b, &first, 1), between(b, of, i + 1)));
  const td_node above = has_low           ? at_least(b, low, i + 1, of->low.is_open, of->n_frac)
                        : of->low.is_open ? above_zero(b, left - 1)
                                          : digits(b, 0, left - 1);
  return TD_G_ANY(
      b, end, TD_G_SEQ(b, td_g_text(b, &first, 1), above),
      TD_G_SEQ(b, digit(b, from + 1, to - 1), digits(b, 0, left - 1)),
      TD_G_SEQ(b, td_g_text(b, &last, 1), at_most(b, high, i + 1, of->high.is_open, of->n_frac)));
}

static td_node behind(td_grammar_build *b, uint64_t whole, bool may_end, td_node fraction) {
  char text[32];
  snprintf(text, sizeof text, "%" PRIu64, whole);
  const td_node end = may_end ? TD_NODE_EMPTY : TD_NODE_NEVER;
  return TD_G_SEQ(b, td_g_str(b, text), TD_G_ANY(b, end, TD_G_SEQ(b, td_g_str(b, "."), fraction)));
}

// Numbers with a fraction; low is set and not negative.
static td_node reals(td_grammar_build *b, const interval *of) {
  const bound *low = &of->low, *high = &of->high;
  const bool may_be_low = is_whole(&low->at) && !low->is_open;
  const bool may_be_high = !is_whole(&high->at) || !high->is_open;
  if (high->is_set && low->at.whole == high->at.whole)
    return behind(b, low->at.whole, may_be_low && may_be_high, between(b, of, 0));
  const uint64_t last = high->at.whole - 1;
  const size_t list = td_g_begin(b);
  td_g_add(b, behind(b, low->at.whole, may_be_low,
                     at_least(b, low->at.frac, 0, low->is_open, of->n_frac)));
  td_g_add(b, TD_G_SEQ(b, naturals(b, low->at.whole + 1, high->is_set ? &last : NULL),
                       any_fraction(b, of->n_frac)));
  if (high->is_set) {
    td_g_add(b, behind(b, high->at.whole, may_be_high,
                       at_most(b, high->at.frac, 0, high->is_open, of->n_frac)));
  }
  return td_g_end_any(b, list);
}

// ---- intervals
// ------------------------------------------------------------------------------------

// low is set and not negative; bounds of integers are whole and closed.
static td_node not_negative(td_grammar_build *b, const interval *of) {
  if (of->high.is_set) {
    const int order = compare(&of->low.at, &of->high.at);
    if (order > 0 || (order == 0 && (of->low.is_open || of->high.is_open))) return TD_NODE_NEVER;
  }
  if (of->n_frac) return reals(b, of);
  return naturals(b, of->low.at.whole, of->high.is_set ? &of->high.at.whole : NULL);
}

static td_node numbers_between(td_grammar_build *b, const interval *of) {
  interval above = *of, below = {.low = of->high, .high = of->low, .n_frac = of->n_frac};
  below.low.at.is_negative = below.high.at.is_negative = false;
  const bool has_negative = !of->low.is_set || of->low.at.is_negative;
  const bool has_positive = !of->high.is_set || !of->high.at.is_negative;
  const bound zero = {.is_set = true};
  if (has_positive) { // without a negative zero
    below.low = zero;
    below.low.is_open = of->n_frac > 0;
    below.low.at.whole = !of->n_frac;
  }
  if (has_negative) above.low = zero;
  const td_node negative = has_negative ? TD_G_SEQ(b, td_g_str(b, "-"), not_negative(b, &below))
                                        : TD_NODE_NEVER;
  return TD_G_ANY(b, negative, has_positive ? not_negative(b, &above) : TD_NODE_NEVER);
}

// ---- bounds
// ---------------------------------------------------------------------------------------

// False: it has too many digits.
static bool read_decimal(decimal *out, const cJSON *item) {
  char text[400];
  const char *spelled = item->valuestring;
  *out = (decimal){0};
  if (!spelled || strspn(spelled, "-0123456789.") != strlen(spelled)) {
    int n = 0;
    do {
      snprintf(text, sizeof text, "%.*f", n, item->valuedouble);
    } while (strtod(text, NULL) != item->valuedouble && ++n <= MAX_FRACTION);
    if (n > MAX_FRACTION) return false;
    spelled = text;
  }
  const bool is_negative = *spelled == '-';
  spelled += is_negative;
  const size_t n_whole = strspn(spelled, "0123456789");
  const char *frac = spelled[n_whole] == '.' ? spelled + n_whole + 1 : "";
  size_t n_frac = strlen(frac);
  while (n_frac && frac[n_frac - 1] == '0')
    n_frac--;
  if (n_whole > MAX_WHOLE || n_frac > MAX_FRACTION) return false;
  out->whole = strtoull(spelled, NULL, 10);
  memcpy(out->frac, frac, n_frac);
  out->is_negative = is_negative && (out->whole || n_frac);
  return true;
}

// The integers within a bound: as a closed bound.
static void make_whole(bound *b, bool is_low) {
  decimal *d = &b->at;
  const bool is_between = !is_whole(d);
  d->frac[0] = '\0';
  // Away from zero a low negative bound is cut, a low positive one goes up.
  const bool grows = is_between ? is_low != d->is_negative : b->is_open && is_low != d->is_negative;
  const bool shrinks = !is_between && b->is_open && is_low == d->is_negative;
  b->is_open = false;
  if (grows) d->whole++;
  if (shrinks && d->whole) {
    d->whole--;
  } else if (shrinks) { // below zero
    d->whole = 1;
    d->is_negative = true;
  }
  d->is_negative &= d->whole > 0;
}

// One side's bound. In the standard's fourth draft exclusiveMinimum is a boolean beside minimum.
static td_status read_bound(td_schema_ctx *ctx, const cJSON *schema, bool is_low, bound *out) {
  const char *keys[] = {is_low ? "minimum" : "maximum",
                        is_low ? "exclusiveMinimum" : "exclusiveMaximum"};
  for (int i = 0; i < 2; i++) {
    const cJSON *item = td_schema_get(ctx, schema, keys[i]);
    if (!item) continue;
    if (i == 1 && cJSON_IsBool(item)) {
      out->is_open = cJSON_IsTrue(item);
      continue;
    }
    if (!cJSON_IsNumber(item)) return td_schema_bad(ctx, keys[i], "must be a number");
    bound b = {.is_set = true, .is_open = i == 1};
    const bool is_read = read_decimal(&b.at, item);
    const double size = is_low ? -item->valuedouble : item->valuedouble;
    if (!is_read && size > FAR) { // as of a float; no longer numbers are generated
      b = (bound){.is_set = true, .at = {.is_negative = is_low, .whole = (uint64_t)FAR - 1}};
    } else if (!is_read) {
      td_status st = td_schema_leave_out(ctx, keys[i],
                                         "of more than 19 digits, or 15 behind the point,");
      if (st != TD_OK) return st;
      continue;
    }
    const int order = out->is_set ? compare(&b.at, &out->at) : 0;
    const bool is_tighter = !out->is_set || (is_low ? order > 0 : order < 0);
    if (is_tighter || (order == 0 && b.is_open)) *out = b;
  }
  return TD_OK;
}

// ---- multiples ----------------------------------------------------------------------------------

// Multiples of a whole number from low to high; either may be negative.
static td_node listed(td_grammar_build *b, int64_t of, int64_t low, int64_t high) {
  const size_t list = td_g_begin(b);
  for (int64_t at = low / of * of - of; at <= high; at += of) {
    char text[32];
    snprintf(text, sizeof text, "%" PRId64, at);
    if (at >= low) td_g_add(b, td_g_str(b, text));
  }
  return td_g_end_any(b, list);
}

// Positive multiples, of up to MULTIPLE_DIGITS digits: a rule for each remainder of the digits so
// far, at each length.
static td_node positive_multiples(td_grammar_build *b, uint32_t of) {
  td_node after[2][MAX_MULTIPLE]; // what may follow, by remainder; of the next length and of this
  td_node out = TD_NODE_NEVER;
  for (uint32_t r = 0; r < of; r++)
    after[0][r] = r ? TD_NODE_NEVER : TD_NODE_EMPTY;
  for (int length = MULTIPLE_DIGITS - 1; length >= 0; length--) {
    const td_node *next = after[(MULTIPLE_DIGITS - 1 - length) % 2];
    for (uint32_t r = 0; r < (length ? of : 1); r++) {
      const size_t list = td_g_begin(b);
      if (length && r == 0) td_g_add(b, TD_NODE_EMPTY);
      for (uint32_t d = !length; d < 10; d++)
        td_g_add(b, TD_G_SEQ(b, td_g_range(b, '0' + d, '0' + d), next[(10 * r + d) % of]));
      out = td_g_new_rule(b, td_g_end_any(b, list));
      after[(MULTIPLE_DIGITS - length) % 2][r] = out;
    }
  }
  return out;
}

// Any number whose digits behind the point are a multiple of one that divides a power of ten.
static td_node fine_multiples(td_grammar_build *b, const decimal *of) {
  const size_t n = strlen(of->frac);
  const uint32_t step = (uint32_t)strtoul(of->frac, NULL, 10);
  uint32_t whole = 1;
  for (size_t i = 0; i < n; i++)
    whole *= 10;
  const size_t list = td_g_begin(b);
  td_g_add(b, TD_NODE_EMPTY);
  for (uint32_t at = 0; at < whole; at += step) {
    char text[32];
    snprintf(text, sizeof text, ".%0*u", (int)n, at);
    td_g_add(b, td_g_str(b, text));
  }
  return TD_G_SEQ(b, td_g_maybe(b, td_g_str(b, "-")), naturals(b, 0, NULL), td_g_end_any(b, list));
}

static int64_t signed_of(const decimal *d) {
  return d->is_negative ? -(int64_t)d->whole : (int64_t)d->whole;
}

// In thousandths, rounded up or down. False: beyond what multiples are listed of.
static bool thousandths(int64_t *out, const bound *from, bool is_up) {
  char frac[4] = "000";
  const size_t n = strlen(from->at.frac);
  memcpy(frac, from->at.frac, n < 3 ? n : 3);
  const int64_t size = (int64_t)(from->at.whole % ((uint64_t)1 << 40)) * 1000 + strtol(frac, 0, 10);
  const bool is_exact = n <= 3;
  *out = from->at.is_negative ? -size : size;
  if (!is_exact && is_up != from->at.is_negative) *out += is_up ? 1 : -1;
  if (is_exact && from->is_open) *out += is_up ? 1 : -1;
  return from->is_set && from->at.whole < (uint64_t)1 << 40;
}

// Those of up to three digits behind the point between bounds; without exponents.
static bool list_fine(td_grammar_build *b, const decimal *d, const interval *of, td_node *out) {
  const bound step_at = {.is_set = true, .at = *d};
  int64_t step, low, high;
  if (strlen(d->frac) > 3 || !thousandths(&step, &step_at, true) ||
      !thousandths(&low, &of->low, true) || !thousandths(&high, &of->high, false) ||
      (high - low) / step >= MAX_MULTIPLE)
    return false;
  const size_t list = td_g_begin(b);
  for (int64_t at = low / step * step - step; at <= high; at += step) {
    char text[40];
    const uint64_t size = (uint64_t)(at < 0 ? -at : at);
    size_t n = (size_t)snprintf(text, sizeof text, "%s%" PRIu64 ".%03" PRIu64, at < 0 ? "-" : "",
                                size / 1000, size % 1000);
    while (text[n - 1] == '0')
      n--;
    if (at >= low) td_g_add(b, td_g_text(b, text, text[n - 1] == '.' ? n - 1 : n));
  }
  *out = td_g_end_any(b, list);
  return true;
}

// A multipleOf that is no power of ten. *out stays as it is where it is left out.
static td_status write_multiples(td_schema_ctx *ctx, const decimal *d, const interval *of,
                                 td_node *out) {
  td_grammar_build *b = ctx->b;
  const bool is_free = !of->low.is_set && !of->high.is_set;
  const uint64_t most = (uint64_t)1 << 52;
  if (!is_whole(d)) {
    if (of->n_frac && list_fine(b, d, of, out)) return TD_OK;
    const size_t n = strlen(d->frac);
    const uint32_t step = n <= 3 ? (uint32_t)strtoul(d->frac, NULL, 10) : 0;
    const uint32_t whole = n == 1 ? 10 : n == 2 ? 100 : 1000;
    if (d->whole || !step || whole % step || !is_free || !of->n_frac)
      return td_schema_leave_out(ctx, "multipleOf", NULL);
    *out = fine_multiples(b, d);
    return TD_OK;
  }
  bound low = of->low, high = of->high;
  if (low.is_set) make_whole(&low, true);
  if (high.is_set) make_whole(&high, false);
  const bool is_short = d->whole && low.is_set && high.is_set && low.at.whole < most &&
                        high.at.whole < most && d->whole < most;
  if (is_short && (signed_of(&high.at) - signed_of(&low.at)) / (int64_t)d->whole < MAX_MULTIPLE) {
    *out = listed(b, (int64_t)d->whole, signed_of(&low.at), signed_of(&high.at));
    return TD_OK;
  }
  const bool has_low = low.is_set && (low.at.is_negative || low.at.whole > 1);
  if (!d->whole || d->whole > MAX_MULTIPLE || high.is_set || has_low)
    return td_schema_leave_out(ctx, "multipleOf", "beside these bounds, or of more than 1,000,");
  const td_node zero = low.is_set && low.at.whole ? TD_NODE_NEVER : td_g_str(b, "0");
  const td_node sign = low.is_set ? TD_NODE_EMPTY : td_g_maybe(b, td_g_str(b, "-"));
  *out = TD_G_ANY(b, zero, TD_G_SEQ(b, sign, positive_multiples(b, (uint32_t)d->whole)));
  return TD_OK;
}

// A power of ten up to 1 limits *n_frac, the digits behind the point; another one makes *out.
static td_status read_multiple(td_schema_ctx *ctx, const cJSON *schema, interval *of,
                               td_node *out) {
  const cJSON *item = td_schema_get(ctx, schema, "multipleOf");
  decimal d;
  if (!item) return TD_OK;
  if (!cJSON_IsNumber(item)) return td_schema_bad(ctx, "multipleOf", "must be a number");
  if (!read_decimal(&d, item) || d.is_negative) return td_schema_leave_out(ctx, "multipleOf", NULL);
  const size_t n = strlen(d.frac), n_zeros = strspn(d.frac, "0");
  const bool is_power = is_whole(&d) ? d.whole == 1
                                     : !d.whole && n == n_zeros + 1 && d.frac[n - 1] == '1';
  if (!is_power) return write_multiples(ctx, &d, of, out);
  if (n < of->n_frac) of->n_frac = (uint32_t)n;
  return TD_OK;
}

td_status td_schema_number(td_schema_ctx *ctx, const cJSON *schema, bool is_integer, td_node *out) {
  interval of = {.n_frac = is_integer ? 0 : FRACTION_DIGITS};
  td_status st = read_bound(ctx, schema, true, &of.low);
  if (st == TD_OK) st = read_bound(ctx, schema, false, &of.high);
  td_node multiples = TD_NODE_NEVER;
  if (st == TD_OK) st = read_multiple(ctx, schema, &of, &multiples);
  if (st != TD_OK) return st;
  if (multiples != TD_NODE_NEVER) {
    *out = multiples;
    return TD_OK;
  }
  if (!of.low.is_set && !of.high.is_set && (is_integer || of.n_frac == FRACTION_DIGITS)) {
    *out = is_integer ? ctx->json->integer : ctx->json->number;
    return TD_OK;
  }
  if (!of.n_frac && of.low.is_set) make_whole(&of.low, true);
  if (!of.n_frac && of.high.is_set) make_whole(&of.high, false);
  *out = numbers_between(ctx->b, &of);
  return TD_OK;
}
