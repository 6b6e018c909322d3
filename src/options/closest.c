// src/options/closest.c - edit distance with swapped neighbours (optimal string alignment).
#include "options/closest.h"

#include <ctype.h>
#include <stdbool.h>
#include <string.h>

enum { MAX_WORD = 32 };

static size_t least(size_t a, size_t b) {
  return a < b ? a : b;
}

// Letters in either case are the same.
static bool is_same(char a, char b) {
  return tolower((unsigned char)a) == tolower((unsigned char)b);
}

static size_t count_edits(const char *a, size_t n_a, const char *b, size_t n_b) {
  size_t rows[3][MAX_WORD + 1]; // of the row i, i - 1 and i - 2
  for (size_t i = 0; i <= n_a; i++) {
    size_t *row = rows[i % 3];
    const size_t *above = rows[(i + 2) % 3], *above2 = rows[(i + 1) % 3];
    row[0] = i;
    for (size_t j = 1; j <= n_b; j++) {
      if (i == 0) {
        row[j] = j;
        continue;
      }
      row[j] = least(above[j - 1] + !is_same(a[i - 1], b[j - 1]), 1 + least(above[j], row[j - 1]));
      if (i > 1 && j > 1 && is_same(a[i - 1], b[j - 2]) && is_same(a[i - 2], b[j - 1]))
        row[j] = least(row[j], above2[j - 2] + 1);
    }
  }
  return rows[n_a % 3][n_b];
}

void td_closest_try(td_closest *c, const char *candidate) {
  const size_t n = strlen(candidate), longer = n > c->len ? n : c->len;
  if (longer > MAX_WORD) return;
  const size_t n_edits = count_edits(c->word, c->len, candidate, n);
  if (3 * n_edits > longer || (c->best && n_edits >= c->n_edits)) return;
  c->best = candidate;
  c->n_edits = n_edits;
}
