// src/text/grammar/automaton.c - configurations, interned.
#include "text/grammar/automaton.h"

#include <stdlib.h>
#include <string.h>

#include "base/grow.h"

// Most items visited for one configuration, most frames and most configurations: a grammar in which
// one text can be derived in very many ways reaches them, and its request fails.
#define MAX_ITEMS   (1u << 14)
#define MAX_FRAMES  (1u << 20)
#define MAX_CONFIGS (1u << 18)

enum { N_SEEN = 4 * MAX_ITEMS };

static uint64_t mix(uint64_t x) {
  x ^= x >> 32;
  x *= 0x9e3779b97f4a7c15u;
  return x ^ x >> 29;
}

td_status td_automaton_open(td_automaton *out, const td_grammar *grammar, td_err *err) {
  *out = (td_automaton){.grammar = grammar,
                        .todo = malloc(MAX_ITEMS * sizeof *out->todo),
                        .seen = malloc(N_SEEN * sizeof *out->seen),
                        .seen_at = calloc(N_SEEN, sizeof *out->seen_at),
                        .found = malloc(MAX_ITEMS * sizeof *out->found),
                        .n_frames = 1,
                        .cap_frames = 64,
                        .frames = calloc(64, sizeof *out->frames)};
  if (out->todo && out->seen && out->seen_at && out->found && out->frames) return TD_OK;
  td_automaton_close(out);
  return td_fail(err, TD_ENOMEM, "out of memory for a grammar's masks");
}

static void free_configs(td_automaton_config *configs, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    free(configs[i].items);
    free(configs[i].steps);
    free(configs[i].mask);
  }
  free(configs);
}

void td_automaton_close(td_automaton *a) {
  free_configs(a->configs, a->n_configs);
  free(a->config_slots);
  free(a->frame_slots);
  free(a->frames);
  free(a->todo);
  free(a->seen);
  free(a->seen_at);
  free(a->found);
  *a = (td_automaton){0};
}

static void fail(td_automaton *a, td_status why) {
  if (a->status == TD_OK) a->status = why;
}

// ---- frames ------------------------------------------------------------------------------------

static uint32_t hash_frame(td_automaton_frame frame) {
  return (uint32_t)mix((uint64_t)frame.state << 32 | frame.below);
}

static bool grow_frames(td_automaton *a) {
  if (a->n_frames == a->cap_frames && 2 * a->cap_frames > MAX_FRAMES) return false;
  if (!TD_GROW(a->frames, a->n_frames, a->cap_frames, 64)) return false;
  if (2 * (a->n_frames + 1) <= a->n_frame_slots) return true;
  uint32_t n = a->n_frame_slots ? 2 * a->n_frame_slots : 256;
  uint32_t *slots = calloc(n, sizeof *slots);
  if (!slots) return false;
  for (uint32_t i = 1; i < a->n_frames; i++) {
    uint32_t at = hash_frame(a->frames[i]) & (n - 1);
    while (slots[at])
      at = (at + 1) & (n - 1);
    slots[at] = i + 1;
  }
  free(a->frame_slots);
  a->frame_slots = slots;
  a->n_frame_slots = n;
  return true;
}

// UINT32_MAX: no room.
static uint32_t intern_frame(td_automaton *a, uint32_t state, uint32_t below) {
  const td_automaton_frame frame = {state, below};
  if (!grow_frames(a)) {
    fail(a, TD_ELIMIT);
    return UINT32_MAX;
  }
  uint32_t at = hash_frame(frame) & (a->n_frame_slots - 1);
  for (; a->frame_slots[at]; at = (at + 1) & (a->n_frame_slots - 1)) {
    const td_automaton_frame *there = &a->frames[a->frame_slots[at] - 1];
    if (there->state == state && there->below == below) return a->frame_slots[at] - 1;
  }
  a->frames[a->n_frames] = frame;
  a->frame_slots[at] = ++a->n_frames;
  return a->n_frames - 1;
}

// ---- the closure -------------------------------------------------------------------------------

// Whether the item is new in this closure.
static bool is_new(td_automaton *a, uint64_t item) {
  uint32_t at = (uint32_t)mix(item) & (N_SEEN - 1);
  for (; a->seen_at[at] == a->seen_mark; at = (at + 1) & (N_SEEN - 1))
    if (a->seen[at] == item) return false;
  a->seen[at] = item;
  a->seen_at[at] = a->seen_mark;
  return true;
}

typedef struct {
  uint32_t n_todo, n_seen;
} closure;

static void begin_closure(td_automaton *a) {
  if (++a->seen_mark == 0) {
    memset(a->seen_at, 0, N_SEEN * sizeof *a->seen_at);
    a->seen_mark = 1;
  }
  a->n_found = 0;
  a->found_end = false;
}

static void push(td_automaton *a, closure *c, uint32_t state, uint32_t frame) {
  uint64_t item = (uint64_t)state << 32 | frame;
  if (frame == UINT32_MAX || !a->grammar->states[state].is_live || !is_new(a, item)) return;
  if (++c->n_seen >= MAX_ITEMS) {
    fail(a, TD_ELIMIT);
    return;
  }
  a->todo[c->n_todo++] = item;
}

// Adds what can be reached from the pushed items without a byte to found.
static void close_over(td_automaton *a, closure *c) {
  const td_grammar *g = a->grammar;
  while (c->n_todo && a->status == TD_OK) {
    uint64_t item = a->todo[--c->n_todo];
    const uint32_t frame = (uint32_t)item;
    const td_nfa_state *s = &g->states[item >> 32];
    switch (s->kind) {
    case TD_NFA_BYTES: a->found[a->n_found++] = item; break;
    case TD_NFA_SPLIT:
      push(a, c, s->next, frame);
      push(a, c, s->other, frame);
      break;
    case TD_NFA_CALL: {
      // A call at the end of a rule returns to where the rule returns.
      bool is_last = g->states[s->next].kind == TD_NFA_MATCH;
      push(a, c, g->starts[s->other], is_last ? frame : intern_frame(a, s->next, frame));
      break;
    }
    case TD_NFA_MATCH:
      if (frame == 0)
        a->found_end = true;
      else
        push(a, c, a->frames[frame].state, a->frames[frame].below);
      break;
    default: break;
    }
  }
}

// ---- configurations ----------------------------------------------------------------------------

static int by_value(const void *a, const void *b) {
  const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
  return (x > y) - (x < y);
}

static uint32_t hash_config(const uint64_t *items, uint32_t n, bool may_end) {
  uint64_t hash = may_end;
  for (uint32_t i = 0; i < n; i++)
    hash = mix(hash + items[i] + 0x632be59bd9b4e019u);
  return (uint32_t)hash;
}

static bool grow_configs(td_automaton *a) {
  if (!TD_GROW(a->configs, a->n_configs, a->cap_configs, 64)) return false;
  if (2 * (a->n_configs + 1) <= a->n_config_slots) return true;
  uint32_t n = a->n_config_slots ? 2 * a->n_config_slots : 256;
  uint32_t *slots = calloc(n, sizeof *slots);
  if (!slots) return false;
  for (uint32_t i = 0; i < a->n_configs; i++) {
    const td_automaton_config *c = &a->configs[i];
    uint32_t at = hash_config(c->items, c->n_items, c->may_end) & (n - 1);
    while (slots[at])
      at = (at + 1) & (n - 1);
    slots[at] = i + 1;
  }
  free(a->config_slots);
  a->config_slots = slots;
  a->n_config_slots = n;
  return true;
}

// The configuration of these items, which are sorted. DEAD: it could not be made.
static uint32_t intern(td_automaton *a, const uint64_t *items, uint32_t n, bool may_end) {
  if (!grow_configs(a)) {
    fail(a, TD_ENOMEM);
    return TD_AUTOMATON_DEAD;
  }
  uint32_t at = hash_config(items, n, may_end) & (a->n_config_slots - 1);
  for (; a->config_slots[at]; at = (at + 1) & (a->n_config_slots - 1)) {
    const td_automaton_config *c = &a->configs[a->config_slots[at] - 1];
    if (c->n_items == n && c->may_end == may_end &&
        (n == 0 || memcmp(c->items, items, n * sizeof *items) == 0))
      return a->config_slots[at] - 1;
  }
  uint64_t *copy = malloc((n + 1) * sizeof *copy);
  if (!copy || a->n_configs == MAX_CONFIGS) {
    free(copy);
    fail(a, copy ? TD_ELIMIT : TD_ENOMEM);
    return TD_AUTOMATON_DEAD;
  }
  if (n) memcpy(copy, items, n * sizeof *copy);
  a->configs[a->n_configs] = (td_automaton_config){
      .items = copy, .n_items = n, .may_end = may_end, .run.len = TD_RUN_UNKNOWN};
  a->config_slots[at] = ++a->n_configs;
  a->n_bytes += sizeof *a->configs + n * sizeof *copy;
  return a->n_configs - 1;
}

static uint32_t intern_found(td_automaton *a) {
  if (a->status != TD_OK) return TD_AUTOMATON_DEAD;
  qsort(a->found, a->n_found, sizeof *a->found, by_value);
  return intern(a, a->found, a->n_found, a->found_end);
}

uint32_t td_automaton_start(td_automaton *a) {
  closure c = {0};
  if (a->n_configs == 0) intern(a, NULL, 0, false); // TD_AUTOMATON_DEAD
  begin_closure(a);
  push(a, &c, a->grammar->starts[a->grammar->root], 0);
  close_over(a, &c);
  return intern_found(a);
}

// The bytes around `byte` after which the same follows.
static void find_span(const td_automaton *a, const td_automaton_config *config, uint8_t byte,
                      unsigned *first, unsigned *last) {
  *first = 0;
  *last = 255;
  for (uint32_t i = 0; i < config->n_items; i++) {
    const td_nfa_state *s = &a->grammar->states[config->items[i] >> 32];
    unsigned low = s->low, high = s->high;
    if (byte < low) {
      high = low - 1u;
      low = 0;
    } else if (byte > high) {
      low = high + 1u;
      high = 255;
    }
    if (low > *first) *first = low;
    if (high < *last) *last = high;
  }
}

static uint32_t find_step(td_automaton *a, uint32_t config, uint8_t byte) {
  const td_automaton_config *from = &a->configs[config];
  closure c = {0};
  unsigned first, last;
  begin_closure(a);
  for (uint32_t i = 0; i < from->n_items; i++) {
    const td_nfa_state *s = &a->grammar->states[from->items[i] >> 32];
    if (byte >= s->low && byte <= s->high) push(a, &c, s->next, (uint32_t)from->items[i]);
  }
  close_over(a, &c);
  find_span(a, from, byte, &first, &last);
  uint32_t to = intern_found(a);
  td_automaton_config *grown = &a->configs[config]; // intern may have moved it
  if (a->status != TD_OK) return TD_AUTOMATON_DEAD;
  if (!grown->steps) {
    grown->steps = calloc(256, sizeof *grown->steps);
    a->n_bytes += 256 * sizeof *grown->steps;
  }
  if (!grown->steps) {
    fail(a, TD_ENOMEM);
    return TD_AUTOMATON_DEAD;
  }
  for (unsigned i = first; i <= last; i++)
    grown->steps[i] = to + 1;
  return to;
}

uint32_t td_automaton_step(td_automaton *a, uint32_t config, uint8_t byte) {
  const uint32_t *steps = a->configs[config].steps;
  if (steps && steps[byte]) return steps[byte] - 1;
  if (config == TD_AUTOMATON_DEAD) return TD_AUTOMATON_DEAD;
  return find_step(a, config, byte);
}

// ---- runs --------------------------------------------------------------------------------------

enum { MAX_RUN = 24, MAX_WAYS = 16 }; // most characters looked ahead, and ways compared

typedef struct {
  uint32_t next, frame; // after one of the characters
  td_char_set chars;
} way;

// Whether the bytes of each of the ranges, one after the other, lead from state to `next`.
static bool leads_to(const td_grammar *g, uint32_t state, const uint8_t (*ranges)[2], uint32_t n,
                     uint32_t next) {
  for (uint32_t i = 0; i < n; i++) {
    const td_nfa_state *s = &g->states[state];
    if (s->kind != TD_NFA_BYTES || s->low > ranges[i][0] || s->high < ranges[i][1]) return false;
    state = s->next;
  }
  return state == next;
}

// Whether every character that is not ASCII goes this way.
static bool takes_others(const td_automaton *a, const td_automaton_config *config, const way *w) {
  static const struct {
    uint8_t ranges[4][2];
    uint32_t n;
  } forms[] = {
      {{{0xC2, 0xDF}, {0x80, 0xBF}}, 2},
      {{{0xE0, 0xE0}, {0xA0, 0xBF}, {0x80, 0xBF}}, 3},
      {{{0xE1, 0xEC}, {0x80, 0xBF}, {0x80, 0xBF}}, 3},
      {{{0xED, 0xED}, {0x80, 0x9F}, {0x80, 0xBF}}, 3},
      {{{0xEE, 0xEF}, {0x80, 0xBF}, {0x80, 0xBF}}, 3},
      {{{0xF0, 0xF0}, {0x90, 0xBF}, {0x80, 0xBF}, {0x80, 0xBF}}, 4},
      {{{0xF1, 0xF3}, {0x80, 0xBF}, {0x80, 0xBF}, {0x80, 0xBF}}, 4},
      {{{0xF4, 0xF4}, {0x80, 0x8F}, {0x80, 0xBF}, {0x80, 0xBF}}, 4},
  };
  for (size_t f = 0; f < TD_COUNT(forms); f++) {
    bool is_found = false;
    for (uint32_t i = 0; i < config->n_items && !is_found; i++) {
      is_found = (uint32_t)config->items[i] == w->frame &&
                 leads_to(a->grammar, (uint32_t)(config->items[i] >> 32), forms[f].ranges,
                          forms[f].n, w->next);
    }
    if (!is_found) return false;
  }
  return true;
}

static int n_of(td_char_set chars) {
  return __builtin_popcountll(chars.bits[0]) + __builtin_popcountll(chars.bits[1]);
}

// The way that most ASCII characters go. Loops come before what follows them: states that are
// nearer to the end of their rule have lower numbers.
static way widest(const td_automaton *a, const td_automaton_config *config) {
  way ways[MAX_WAYS], best = {0};
  uint32_t n = 0;
  for (uint32_t i = config->n_items; i-- > 0;) {
    const td_nfa_state *s = &a->grammar->states[config->items[i] >> 32];
    const uint32_t frame = (uint32_t)config->items[i];
    uint32_t k = 0;
    if (s->low >= TD_CHARS_OTHER) continue;
    while (k < n && (ways[k].next != s->next || ways[k].frame != frame))
      k++;
    if (k == MAX_WAYS) continue;
    if (k == n) ways[n++] = (way){.next = s->next, .frame = frame};
    for (uint32_t c = s->low; c <= s->high && c < TD_CHARS_OTHER; c++)
      ways[k].chars.bits[c / 64] |= (uint64_t)1 << (c % 64);
  }
  for (uint32_t k = 0; k < n; k++)
    if (n_of(ways[k].chars) > n_of(best.chars)) best = ways[k];
  if (n && takes_others(a, config, &best))
    best.chars.bits[1] |= (uint64_t)1 << (TD_CHARS_OTHER % 64);
  return best;
}

bool td_char_set_holds(td_char_set all, td_char_set some) {
  return !(some.bits[0] & ~all.bits[0]) && !(some.bits[1] & ~all.bits[1]);
}

static uint32_t after(td_automaton *a, const way *w) {
  closure c = {0};
  begin_closure(a);
  push(a, &c, w->next, w->frame);
  close_over(a, &c);
  return intern_found(a);
}

td_automaton_run td_automaton_run_of(td_automaton *a, uint32_t config) {
  uint32_t path[MAX_RUN + 1], n = 0;
  td_char_set chars[MAX_RUN];
  td_automaton_run run = {.len = 0};
  path[0] = config;
  while (n < MAX_RUN && a->configs[path[n]].run.len == TD_RUN_UNKNOWN) {
    const way w = widest(a, &a->configs[path[n]]);
    chars[n] = w.chars;
    path[n + 1] = n_of(w.chars) ? after(a, &w) : path[n];
    if (a->status != TD_OK) return run;
    if (path[n + 1] == path[n]) { // a loop, or none
      run = (td_automaton_run){.chars = w.chars, .len = n_of(w.chars) ? TD_RUN_ENDLESS : 0};
      a->configs[path[n]].run = run;
      break;
    }
    n++;
  }
  const bool is_cut = n == MAX_RUN;
  if (!is_cut && a->configs[path[n]].run.len != TD_RUN_UNKNOWN) run = a->configs[path[n]].run;
  while (n-- > 0) {
    const bool should_continue = run.len && td_char_set_holds(run.chars, chars[n]);
    const uint32_t len = !should_continue ? 1 : run.len >= MAX_RUN ? run.len : run.len + 1;
    run = (td_automaton_run){.chars = chars[n], .len = len};
    if (!is_cut || n == 0) a->configs[path[n]].run = run;
  }
  return run;
}

void td_automaton_forget(td_automaton *a, uint32_t **keep, uint32_t n) {
  td_automaton_config *before = a->configs;
  uint32_t n_before = a->n_configs;
  free(a->config_slots);
  a->configs = NULL;
  a->config_slots = NULL;
  a->n_configs = a->cap_configs = a->n_config_slots = 0;
  a->n_bytes = 0;
  intern(a, NULL, 0, false); // TD_AUTOMATON_DEAD
  for (uint32_t i = 0; i < n; i++) {
    td_automaton_config *c = &before[*keep[i]];
    const uint32_t to = intern(a, c->items, c->n_items, c->may_end);
    if (c->mask) {
      a->configs[to].mask = c->mask;
      c->mask = NULL;
    }
    *keep[i] = to;
  }
  free_configs(before, n_before);
}

int td_grammar_matches(const td_grammar *grammar, const char *text, size_t len) {
  td_automaton a;
  td_err err;
  if (td_automaton_open(&a, grammar, &err) != TD_OK) return 0;
  uint32_t config = td_automaton_start(&a);
  for (size_t i = 0; i < len; i++)
    config = td_automaton_step(&a, config, (uint8_t)text[i]);
  int matches = a.status == TD_OK && a.configs[config].may_end;
  td_automaton_close(&a);
  return matches;
}
