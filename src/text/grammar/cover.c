// src/text/grammar/cover.c - dividing a vocabulary by the characters of its tokens.
#include "text/grammar/cover.h"

#include <stdlib.h>
#include <string.h>

static bool takes(const td_automaton_run *run, const td_token_index *index, uint32_t place) {
  return index->n_chars[place] != TD_CHARS_NONE && index->n_chars[place] <= run->len &&
         td_char_set_holds(run->chars, index->chars[place]);
}

static uint32_t count(const td_automaton_run *run, const td_token_index *index) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < index->n; i++)
    n += takes(run, index, i);
  return n;
}

static void divide(td_cover *c, const td_token_index *index) {
  uint32_t shared = 0;
  c->n = 0;
  for (uint32_t i = 0; i < index->n; i++) {
    if (index->shared[i] < shared) shared = index->shared[i];
    if (takes(&c->run, index, i)) {
      c->mask[index->ids[i] / 64] |= (uint64_t)1 << (index->ids[i] % 64);
      continue;
    }
    c->places[c->n] = i;
    c->shared[c->n++] = (uint16_t)shared;
    shared = UINT16_MAX;
  }
}

static void free_cover(td_cover *c) {
  free(c->mask);
  free(c->places);
  free(c->shared);
  *c = (td_cover){.n = 0};
}

// Not worth it unless half of the vocabulary is taken.
static void fill(td_cover *c, const td_token_index *index) {
  const uint32_t n = count(&c->run, index), n_rest = index->n - n;
  if (n < n_rest) return;
  c->mask = calloc((index->n_vocab + (size_t)63) / 64 + 1, sizeof *c->mask);
  c->places = malloc((n_rest + (size_t)1) * sizeof *c->places);
  c->shared = malloc((n_rest + (size_t)1) * sizeof *c->shared);
  if (c->mask && c->places && c->shared) {
    divide(c, index);
  } else {
    const td_automaton_run run = c->run;
    free_cover(c);
    c->run = run;
  }
}

const td_cover *td_covers_get(td_covers *covers, const td_automaton_run *run) {
  td_cover *oldest = &covers->covers[0];
  if (run->len == 0) return NULL;
  for (uint32_t i = 0; i < covers->n; i++) {
    td_cover *c = &covers->covers[i];
    if (c->run.len == run->len && !memcmp(&c->run.chars, &run->chars, sizeof run->chars)) {
      c->used = ++covers->clock;
      return c->mask ? c : NULL;
    }
    if (c->used < oldest->used) oldest = c;
  }
  td_cover *c = covers->n < TD_MAX_COVERS ? &covers->covers[covers->n++] : oldest;
  free_cover(c);
  c->run = *run;
  c->used = ++covers->clock;
  fill(c, covers->index);
  return c->mask ? c : NULL;
}

void td_covers_close(td_covers *covers) {
  for (uint32_t i = 0; i < covers->n; i++)
    free_cover(&covers->covers[i]);
  covers->n = 0;
}
