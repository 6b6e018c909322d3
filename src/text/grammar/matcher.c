// src/text/grammar/matcher.c - matchers, and the grammars they share.
#include "text/grammar/matcher.h"

#include <stdlib.h>
#include <string.h>

#include "text/grammar/automaton.h"
#include "text/grammar/grammar.h"

#define MAX_IDLE   16          // unused grammars that are kept
#define MAX_MEMORY (96u << 20) // bytes of configurations and masks of one grammar

// A grammar in use, or idle.
typedef struct shared_grammar {
  struct shared_grammar *next;
  td_grammars *owner;
  char *text; // owned
  size_t len;
  td_grammar *grammar;
  td_automaton automaton;
  td_matcher *matchers;
  uint32_t start;
  uint64_t *first_mask; // of the start, where a first token loses its space
  uint64_t used;        // when it was released last
} shared_grammar;

struct td_grammars {
  const td_token_index *index;
  shared_grammar *first;
  uint32_t *path; // [max_bytes + 1] configurations along a token
  uint64_t clock;
};

struct td_matcher {
  shared_grammar *of;
  td_matcher *next;
  uint32_t config;
  bool has_begun;
};

// ---- grammars ----------------------------------------------------------------------------------

td_status td_grammars_open(td_grammars **out, const td_token_index *index, td_err *err) {
  *out = calloc(1, sizeof **out);
  uint32_t *path = malloc((index->max_bytes + (size_t)1) * sizeof *path);
  if (!*out || !path) {
    free(*out);
    free(path);
    *out = NULL;
    return td_fail(err, TD_ENOMEM, "out of memory for grammars");
  }
  **out = (td_grammars){.index = index, .path = path};
  return TD_OK;
}

static void free_shared(shared_grammar *s) {
  td_automaton_close(&s->automaton);
  td_grammar_close(s->grammar);
  free(s->first_mask);
  free(s->text);
  free(s);
}

void td_grammars_close(td_grammars *grammars) {
  if (!grammars) return;
  for (shared_grammar *s = grammars->first, *next; s; s = next) {
    next = s->next;
    free_shared(s);
  }
  free(grammars->path);
  free(grammars);
}

// Removes the grammar released longest ago when more than MAX_IDLE are idle.
static void drop_idle(td_grammars *grammars) {
  shared_grammar **oldest = NULL;
  uint32_t n = 0;
  for (shared_grammar **link = &grammars->first; *link; link = &(*link)->next) {
    if ((*link)->matchers) continue;
    n++;
    if (!oldest || (*link)->used < (*oldest)->used) oldest = link;
  }
  if (n <= MAX_IDLE) return;
  shared_grammar *gone = *oldest;
  *oldest = gone->next;
  free_shared(gone);
}

static td_status compile(shared_grammar **out, td_grammars *grammars, const char *text, size_t len,
                         td_err *err) {
  shared_grammar *s = calloc(1, sizeof *s);
  if (!s) return td_fail(err, TD_ENOMEM, "out of memory for a grammar");
  s->owner = grammars;
  s->len = len;
  s->text = malloc(len + 1);
  td_status st = s->text ? td_grammar_open(&s->grammar, text, len, err)
                         : td_fail(err, TD_ENOMEM, "out of memory for a grammar");
  if (st == TD_OK) st = td_automaton_open(&s->automaton, s->grammar, err);
  if (st == TD_OK) {
    memcpy(s->text, text, len);
    s->start = td_automaton_start(&s->automaton);
    st = s->automaton.status;
    if (st != TD_OK) td_fail(err, st, "the grammar is too ambiguous");
  }
  if (st != TD_OK) {
    free_shared(s);
    return st;
  }
  s->next = grammars->first;
  grammars->first = s;
  *out = s;
  return TD_OK;
}

td_status td_matcher_open(td_matcher **out, td_grammars *grammars, const char *text, size_t len,
                          td_err *err) {
  *out = NULL;
  shared_grammar *s = grammars->first;
  while (s && (s->len != len || memcmp(s->text, text, len) != 0 || s->automaton.status != TD_OK))
    s = s->next;
  td_status st = s ? TD_OK : compile(&s, grammars, text, len, err);
  if (st != TD_OK) return st;
  td_matcher *m = malloc(sizeof *m);
  if (!m) return td_fail(err, TD_ENOMEM, "out of memory for a grammar");
  *m = (td_matcher){.of = s, .next = s->matchers, .config = s->start};
  s->matchers = m;
  *out = m;
  return TD_OK;
}

void td_matcher_close(td_matcher *m) {
  if (!m) return;
  shared_grammar *s = m->of;
  td_matcher **link = &s->matchers;
  while (*link != m)
    link = &(*link)->next;
  *link = m->next;
  s->used = ++s->owner->clock;
  free(m);
  drop_idle(s->owner);
}

// Keeps the memory of one grammar bounded: all but the matchers' configurations are found again.
static void bound_memory(shared_grammar *s) {
  if (s->automaton.n_bytes <= MAX_MEMORY) return;
  uint32_t n = 1;
  for (const td_matcher *m = s->matchers; m; m = m->next)
    n++;
  uint32_t **keep = malloc(n * sizeof *keep);
  if (!keep) return;
  keep[0] = &s->start;
  n = 1;
  for (td_matcher *m = s->matchers; m; m = m->next)
    keep[n++] = &m->config;
  td_automaton_forget(&s->automaton, keep, n);
  free(keep);
}

// ---- tokens ------------------------------------------------------------------------------------

// Whether the first token's space is dropped.
static bool is_at_strip(const td_matcher *m) {
  return !m->has_begun && m->of->owner->index->strips_space;
}

// The configuration after a token; DEAD: it does not match.
static uint32_t follow(td_matcher *m, int32_t id) {
  const td_token_index *index = m->of->owner->index;
  if (id < 0 || (uint32_t)id >= index->n_vocab || index->place_of[id] == UINT32_MAX) {
    return TD_AUTOMATON_DEAD;
  }
  uint32_t place = index->place_of[id], at = index->begin[place], config = m->config;
  at += is_at_strip(m) && index->bytes[at] == ' ';
  for (; at < index->begin[place + 1] && config != TD_AUTOMATON_DEAD; at++)
    config = td_automaton_step(&m->of->automaton, config, index->bytes[at]);
  return config;
}

bool td_matcher_accepts(td_matcher *m, int32_t id) {
  const uint64_t *mask = m->of->automaton.configs[m->config].mask;
  if (mask && !is_at_strip(m) && id >= 0 && (uint32_t)id < m->of->owner->index->n_vocab) {
    return mask[id / 64] >> (id % 64) & 1;
  }
  return follow(m, id) != TD_AUTOMATON_DEAD;
}

bool td_matcher_advance(td_matcher *m, int32_t id) {
  uint32_t config = follow(m, id);
  if (config == TD_AUTOMATON_DEAD) return false;
  m->config = config;
  m->has_begun = true;
  bound_memory(m->of);
  return true;
}

// Walks the vocabulary in its order. path[d] is the configuration after d bytes, valid for the
// bytes that a token shares with the one before, up to the byte that did not match.
static void walk(td_automaton *a, const td_token_index *index, uint32_t *path, bool strips,
                 uint64_t *mask) {
  uint32_t n_valid = 0;
  for (uint32_t i = 0; i < index->n && a->status == TD_OK; i++) {
    uint32_t d = index->shared[i], len = index->begin[i + 1] - index->begin[i];
    if (d > n_valid) continue; // shares the byte that did not match
    const uint8_t *bytes = index->bytes + index->begin[i];
    uint32_t config = path[d];
    for (; d < len; d++) {
      if (d > 0 || !strips || bytes[0] != ' ') config = td_automaton_step(a, config, bytes[d]);
      if (config == TD_AUTOMATON_DEAD) break;
      path[d + 1] = config;
    }
    n_valid = d;
    if (d == len) {
      mask[index->ids[i] / 64] |= (uint64_t)1 << (index->ids[i] % 64);
    } else if (d == 0) {
      i = index->bucket_end[bytes[0]] - 1;
    }
  }
}

const uint64_t *td_matcher_mask(td_matcher *m) {
  shared_grammar *s = m->of;
  const td_token_index *index = s->owner->index;
  bool strips = is_at_strip(m);
  bound_memory(s);
  uint64_t *mask = strips ? s->first_mask : s->automaton.configs[m->config].mask;
  if (mask) return mask;
  size_t n_words = (index->n_vocab + (size_t)63) / 64;
  mask = calloc(n_words + 1, sizeof *mask);
  if (!mask) {
    if (s->automaton.status == TD_OK) s->automaton.status = TD_ENOMEM;
    return NULL;
  }
  s->owner->path[0] = m->config;
  walk(&s->automaton, index, s->owner->path, strips, mask);
  if (s->automaton.status != TD_OK) {
    free(mask);
    return NULL;
  }
  *(strips ? &s->first_mask : &s->automaton.configs[m->config].mask) = mask;
  s->automaton.n_bytes += n_words * sizeof *mask;
  return mask;
}

bool td_matcher_may_end(const td_matcher *m) {
  return m->of->automaton.configs[m->config].may_end;
}

bool td_matcher_must_end(const td_matcher *m) {
  return m->of->automaton.configs[m->config].n_items == 0;
}

td_status td_matcher_status(const td_matcher *m, td_err *err) {
  td_status st = m->of->automaton.status;
  if (st == TD_OK) return TD_OK;
  if (st == TD_ENOMEM) return td_fail(err, st, "out of memory for a grammar's masks");
  return td_fail(err, st, "the grammar is too ambiguous: one text has too many derivations");
}
