// src/text/grammar/token_index.c - sorting a vocabulary.
#include "text/grammar/token_index.h"

#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"

typedef struct {
  const char *bytes;
  uint32_t len;
  int32_t id;
  bool is_added;
} token;

static int by_bytes(const void *a, const void *b) {
  const token *x = a, *y = b;
  int order = memcmp(x->bytes, y->bytes, x->len < y->len ? x->len : y->len);
  if (order) return order;
  if (x->len != y->len) return x->len < y->len ? -1 : 1;
  return (x->id > y->id) - (x->id < y->id);
}

// Control tokens with which models write calls and thoughts: what a grammar describes holds them.
// The first are Harmony's, of which some have another meaning where there are no channels.
static bool is_markup(const char *bytes, size_t len, bool has_channels) {
  enum { N_HARMONY = 5 };
  static const char *const marks[] = {"<|channel|>",   "<|message|>",  "<|start|>", "<|end|>",
                                      "<|constrain|>", "[TOOL_CALLS]", "[ARGS]",    "[CALL_ID]",
                                      "[THINK]",       "[/THINK]"};
  for (size_t i = has_channels ? 0 : N_HARMONY; i < TD_COUNT(marks); i++)
    if (len == strlen(marks[i]) && memcmp(bytes, marks[i], len) == 0) return true;
  return false;
}

// Returns how many tokens stand for text.
static uint32_t collect(const td_tokenizer *tok, uint32_t n_vocab, token *out) {
  uint32_t n = 0;
  int32_t n_ids = td_tokenizer_size(tok);
  static const char channel[] = "<|channel|>";
  const bool has_channels = td_tokenizer_find(tok, channel, strlen(channel)) >= 0;
  for (int32_t id = 0; id < n_ids && (uint32_t)id < n_vocab; id++) {
    size_t len;
    const char *bytes = td_tokenizer_bytes(tok, id, &len);
    if (len == 0 || len > UINT16_MAX) continue;
    if (td_tokenizer_is_special(tok, id) && !is_markup(bytes, len, has_channels)) continue;
    out[n++] = (token){
        .bytes = bytes, .len = (uint32_t)len, .id = id, .is_added = td_tokenizer_is_added(tok, id)};
  }
  qsort(out, n, sizeof *out, by_bytes);
  return n;
}

// Sets the token's characters, and returns how many they are.
static uint8_t collect_chars(const token *t, td_char_set *out) {
  uint32_t n = 0;
  *out = (td_char_set){{0, 0}};
  for (uint32_t at = 0; at < t->len; n++) {
    uint32_t c;
    int len = td_utf8_decode(t->bytes + at, t->len - at, &c);
    if (len <= 0 || c == TD_CHARS_OTHER || n + 1 == TD_CHARS_NONE) return TD_CHARS_NONE;
    const uint32_t bit = c < TD_CHARS_OTHER ? c : TD_CHARS_OTHER;
    out->bits[bit / 64] |= (uint64_t)1 << (bit % 64);
    at += (uint32_t)len;
  }
  return (uint8_t)n;
}

static void fill(td_token_index *index, const token *tokens) {
  uint32_t at = 0;
  for (uint32_t i = 0; i < index->n; i++) {
    const token *t = &tokens[i];
    index->ids[i] = t->id;
    index->begin[i] = at;
    memcpy(index->bytes + at, t->bytes, t->len);
    at += t->len;
    if (t->len > index->max_bytes) index->max_bytes = t->len;
    index->place_of[t->id] = i;
    if (t->is_added) index->added[index->n_added++] = i;
    index->n_chars[i] = collect_chars(t, &index->chars[i]);
    index->bucket_end[(uint8_t)t->bytes[0]] = i + 1;
    uint32_t n = 0, most = i && tokens[i - 1].len < t->len ? tokens[i - 1].len : t->len;
    while (i && n < most && tokens[i - 1].bytes[n] == t->bytes[n])
      n++;
    index->shared[i] = (uint16_t)n;
  }
  index->begin[index->n] = at;
}

td_status td_token_index_open(td_token_index **out, const td_tokenizer *tok, uint32_t n_vocab,
                              td_err *err) {
  *out = NULL;
  token *tokens = malloc((n_vocab + (size_t)1) * sizeof *tokens);
  td_token_index *index = calloc(1, sizeof *index);
  bool ok = tokens && index;
  if (ok) {
    size_t n_bytes = 0, n_added = 0;
    index->n = collect(tok, n_vocab, tokens);
    index->n_vocab = n_vocab;
    index->strips_space = td_tokenizer_strips_space(tok);
    for (uint32_t i = 0; i < index->n; i++) {
      n_bytes += tokens[i].len;
      n_added += tokens[i].is_added;
    }
    index->added = malloc((n_added + 1) * sizeof *index->added);
    index->ids = malloc((index->n + (size_t)1) * sizeof *index->ids);
    index->begin = malloc((index->n + (size_t)1) * sizeof *index->begin);
    index->shared = malloc((index->n + (size_t)1) * sizeof *index->shared);
    index->bytes = malloc(n_bytes + 1);
    index->chars = malloc((index->n + (size_t)1) * sizeof *index->chars);
    index->n_chars = malloc(index->n + (size_t)1);
    index->place_of = malloc((n_vocab + (size_t)1) * sizeof *index->place_of);
    ok = index->ids && index->begin && index->shared && index->bytes && index->place_of &&
         index->added && index->chars && index->n_chars;
  }
  if (ok) {
    memset(index->place_of, 0xFF, n_vocab * sizeof *index->place_of);
    fill(index, tokens);
    *out = index;
  } else {
    td_token_index_close(index);
  }
  free(tokens);
  return ok ? TD_OK : td_fail(err, TD_ENOMEM, "out of memory for %u tokens", n_vocab);
}

void td_token_index_close(td_token_index *index) {
  if (!index) return;
  free(index->ids);
  free(index->begin);
  free(index->shared);
  free(index->bytes);
  free(index->chars);
  free(index->n_chars);
  free(index->added);
  free(index->place_of);
  free(index);
}
