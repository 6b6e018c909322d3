// src/text/tokenizer/bpe.c - byte-pair encoding of one word: loading, symbols, merging, cache.
#include "text/tokenizer/bpe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json_parse.h"
#include "base/utf8.h"
#include "text/tokenizer/bytelevel.h"
#include "text/tokenizer/hash.h"
#include "text/tokenizer/merge.h"

// SentencePiece's replacement for a space. If no token contains it after another character, no
// merge crosses a word boundary, and a text may be cut before each run of it.
#define METASPACE   "\xE2\x96\x81"
#define N_METASPACE 3

#define PART_BYTES (256u << 10) // of a word that is only counted

struct td_bpe {
  const td_vocab *vocab;
  td_merges merges;
  bool byte_level, byte_fallback, fuse_unk;
  bool ignore_merges; // a word that is a token itself is not merged
  bool cuts_at_metaspace;
  bool has_byte_table; // every byte has a symbol in byte_symbols
  int32_t unk;         // -1: drop characters without a token
  const char *prefix, *suffix;
  size_t longest;            // td_bpe_longest
  td_buf affixes;            // storage for prefix and suffix
  int32_t byte_symbols[256]; // byte_level: symbol of each byte
  int32_t fallbacks[256];    // tokens <0x00> to <0xFF>; -1 if absent
};

// A word encoded earlier, with its ids. n_key 0: empty.
typedef struct {
  uint8_t n_key, n_ids;
  char key[30];
  int32_t ids[8];
} cached_word;

#define N_CACHED (1 << 15)

struct td_bpe_scratch {
  cached_word *cache;   // [N_CACHED], indexed by hash
  td_token_ids symbols; // ids of the current word, merged in place
  td_token_ids part;    // of a word that is counted
  td_merge_scratch merging;
  td_buf spelled, symbol;
};

td_bpe_scratch *td_bpe_scratch_new(void) {
  td_bpe_scratch *s = calloc(1, sizeof *s);
  if (!s) return NULL;
  s->cache = calloc(N_CACHED, sizeof *s->cache);
  if (s->cache) return s;
  free(s);
  return NULL;
}

void td_bpe_scratch_free(td_bpe_scratch *s) {
  if (!s) return;
  free(s->cache);
  td_token_ids_free(&s->symbols);
  td_token_ids_free(&s->part);
  td_merge_scratch_free(&s->merging);
  td_buf_free(&s->spelled);
  td_buf_free(&s->symbol);
  free(s);
}

// ---- loading

// Splits "a b" at its only space, or takes ["a", "b"].
static td_status read_pair(const cJSON *item, const char **left, size_t *n_left, const char **right,
                           td_err *err) {
  if (cJSON_IsString(item)) {
    const char *space = strchr(item->valuestring, ' ');
    if (space && !strchr(space + 1, ' ')) {
      *left = item->valuestring;
      *n_left = (size_t)(space - item->valuestring);
      *right = space + 1;
      return TD_OK;
    }
  } else if (cJSON_IsArray(item) && cJSON_GetArraySize(item) == 2 && cJSON_IsString(item->child) &&
             cJSON_IsString(item->child->next)) {
    *left = item->child->valuestring;
    *n_left = strlen(*left);
    *right = item->child->next->valuestring;
    return TD_OK;
  }
  return td_fail(err, TD_EFORMAT, "must be \"a b\" or [\"a\", \"b\"]");
}

static td_status find_part(const td_bpe *bpe, const char *text, size_t len, int32_t *id,
                           td_err *err) {
  *id = td_vocab_find(bpe->vocab, text, len);
  if (td_vocab_flags(bpe->vocab, *id) & TD_VOCAB_MODEL) return TD_OK;
  return td_fail(err, TD_EFORMAT, "\"%.*s\" is not in model.vocab", len < 80 ? (int)len : 80, text);
}

// Whether text has a metaspace after another character.
static bool crosses_metaspace(const char *text, size_t len) {
  bool word = false;
  for (size_t i = 0; i < len;) {
    bool space = len - i >= N_METASPACE && memcmp(text + i, METASPACE, N_METASPACE) == 0;
    if (space && word) return true;
    word = !space;
    i += space ? N_METASPACE : 1;
  }
  return false;
}

static td_status add_merge(td_bpe *bpe, td_buf *whole, const cJSON *item, uint32_t rank,
                           td_err *err) {
  const char *left = "", *right = "";
  size_t n_left = 0;
  int32_t left_id = -1, right_id = -1, whole_id = -1;
  td_status st = read_pair(item, &left, &n_left, &right, err);
  if (st == TD_OK) st = find_part(bpe, left, n_left, &left_id, err);
  if (st == TD_OK) st = find_part(bpe, right, strlen(right), &right_id, err);
  if (st != TD_OK) return st;
  size_t n_prefix = strlen(bpe->prefix);
  if (strlen(right) < n_prefix)
    return td_fail(err, TD_EFORMAT, "\"%.80s\" is shorter than continuing_subword_prefix", right);
  td_buf_clear(whole);
  td_buf_add(whole, left, n_left);
  td_buf_str(whole, right + n_prefix);
  st = td_buf_status(whole, err);
  if (st == TD_OK) st = find_part(bpe, td_buf_text(whole), whole->len, &whole_id, err);
  if (st != TD_OK) return st;
  if (crosses_metaspace(td_buf_text(whole), whole->len)) bpe->cuts_at_metaspace = false;
  // Plain text never becomes a control token, even if merges would produce one.
  if (td_vocab_flags(bpe->vocab, whole_id) & TD_VOCAB_SPECIAL) return TD_OK;
  td_merges_put(&bpe->merges, (td_merge){left_id, right_id, rank, whole_id});
  return TD_OK;
}

static td_status read_merges(td_bpe *bpe, const cJSON *merges, td_err *err) {
  if (!cJSON_IsArray(merges)) return td_fail(err, TD_EFORMAT, "model.merges must be an array");
  td_status st = td_merges_init(&bpe->merges, (size_t)cJSON_GetArraySize(merges), err);
  if (st != TD_OK) return st;
  td_buf whole = TD_BUF_INIT;
  uint32_t rank = 0;
  for (const cJSON *item = merges->child; item && st == TD_OK; item = item->next, rank++) {
    st = add_merge(bpe, &whole, item, rank, err);
    if (st != TD_OK) td_err_prefix(err, "model.merges[%u]", rank);
  }
  td_buf_free(&whole);
  return st;
}

// Visits every split of every token into two tokens. puts: add them as merges, of rank ranks[id],
// or id without ranks. Returns their number.
static size_t each_split(td_bpe *bpe, const uint32_t *ranks, bool puts) {
  size_t n = 0;
  for (int32_t id = 0; id < bpe->vocab->n_ids; id++) {
    uint32_t kind = td_vocab_flags(bpe->vocab, id) & (TD_VOCAB_MODEL | TD_VOCAB_SPECIAL);
    if (kind != TD_VOCAB_MODEL) continue;
    size_t len;
    const char *text = td_vocab_text(bpe->vocab, id, &len);
    bool is_merge = false;
    for (size_t i = 1; i < len; i++) {
      if (((uint8_t)text[i] & 0xC0) == 0x80) continue; // inside a character
      n++;
      if (!puts) continue;
      int32_t left = td_vocab_find_plain(bpe->vocab, text, i);
      int32_t right = td_vocab_find_plain(bpe->vocab, text + i, len - i);
      if (left < 0 || right < 0) continue;
      td_merges_put(&bpe->merges, (td_merge){left, right, ranks ? ranks[id] : (uint32_t)id, id});
      is_merge = true;
    }
    if (is_merge && crosses_metaspace(text, len)) bpe->cuts_at_metaspace = false;
  }
  return n;
}

// Merges of any two tokens that concatenate to a third.
static td_status rank_merges(td_bpe *bpe, const uint32_t *ranks, td_err *err) {
  td_status st = td_merges_init(&bpe->merges, each_split(bpe, ranks, false), err);
  if (st == TD_OK) each_split(bpe, ranks, true);
  return st;
}

typedef struct {
  double score;
  int32_t id;
} scored;

static int best_first(const void *a, const void *b) {
  const double left = ((const scored *)a)->score, right = ((const scored *)b)->score;
  return (left < right) - (left > right);
}

// The same, the token of the best score first. Tokens of one score have one rank, so that the
// leftmost pair is first among them.
static td_status score_merges(td_bpe *bpe, const cJSON *json, td_err *err) {
  const size_t n = (size_t)bpe->vocab->n_ids;
  scored *scores = calloc(n + 1, sizeof *scores);
  uint32_t *ranks = calloc(n + 1, sizeof *ranks);
  td_status st = scores && ranks ? TD_OK
                                 : td_fail(err, TD_ENOMEM, "out of memory for %zu scores", n);
  const cJSON *item = cJSON_IsArray(json) ? json->child : NULL;
  for (size_t i = 0; i < n && st == TD_OK; i++, item = item->next) {
    if (!cJSON_IsNumber(item)) {
      st = td_fail(err, TD_EFORMAT, "model.scores must be an array of numbers, one a token");
      break;
    }
    scores[i] = (scored){.score = item->valuedouble, .id = (int32_t)i};
  }
  if (st == TD_OK) {
    qsort(scores, n, sizeof *scores, best_first);
    for (size_t i = 1; i < n; i++)
      ranks[scores[i].id] = ranks[scores[i - 1].id] + (scores[i].score < scores[i - 1].score);
    st = rank_merges(bpe, ranks, err);
  }
  free(scores);
  free(ranks);
  return st;
}

static td_status read_options(td_bpe *bpe, const cJSON *model, td_err *err) {
  const char *unk = NULL, *prefix = "", *suffix = "";
  double dropout = 0;
  td_status st = td_json_get_str(model, "unk_token", &unk, err);
  if (st == TD_OK) st = td_json_get_str(model, "continuing_subword_prefix", &prefix, err);
  if (st == TD_OK) st = td_json_get_str(model, "end_of_word_suffix", &suffix, err);
  if (st == TD_OK) st = td_json_get_bool(model, "fuse_unk", &bpe->fuse_unk, err);
  if (st == TD_OK) st = td_json_get_bool(model, "byte_fallback", &bpe->byte_fallback, err);
  if (st == TD_OK) st = td_json_get_bool(model, "ignore_merges", &bpe->ignore_merges, err);
  if (st == TD_OK) st = td_json_get_double(model, "dropout", &dropout, err);
  if (st != TD_OK) return td_err_prefix(err, "model");
  if (dropout != 0)
    return td_fail(err, TD_EUNSUPPORTED, "model.dropout: random merging is not supported");
  bpe->unk = -1;
  if (unk) st = find_part(bpe, unk, strlen(unk), &bpe->unk, err);
  if (st != TD_OK) return td_err_prefix(err, "model.unk_token");
  td_buf_add(&bpe->affixes, prefix, strlen(prefix) + 1);
  td_buf_str(&bpe->affixes, suffix);
  st = td_buf_status(&bpe->affixes, err);
  if (st != TD_OK) return st;
  bpe->prefix = bpe->affixes.data;
  bpe->suffix = bpe->prefix + strlen(prefix) + 1;
  return TD_OK;
}

static void find_byte_tokens(td_bpe *bpe) {
  bpe->has_byte_table = bpe->byte_level && !*bpe->prefix && !*bpe->suffix;
  for (unsigned b = 0; b < 256; b++) {
    char text[16];
    int len = snprintf(text, sizeof text, "<0x%02X>", b);
    bpe->fallbacks[b] = td_vocab_find_plain(bpe->vocab, text, (size_t)len);
    len = td_utf8_encode(td_bytelevel_char((uint8_t)b), text);
    bpe->byte_symbols[b] = td_vocab_find_plain(bpe->vocab, text, (size_t)len);
    if (bpe->byte_symbols[b] < 0) bpe->has_byte_table = false;
  }
}

// Bytes of the text that a token covers, of a vocabulary with a table of bytes.
static size_t bytes_of(const td_bpe *bpe, int32_t id) {
  size_t len, n = 0;
  const char *text = td_vocab_text(bpe->vocab, id, &len);
  for (size_t i = 0; i < len; i++)
    n += ((uint8_t)text[i] & 0xC0) != 0x80; // a character stands for a byte
  return n;
}

size_t td_bpe_longest(const td_bpe *bpe) {
  return bpe->longest;
}

td_status td_bpe_open(td_bpe **out, const cJSON *model, const td_vocab *vocab,
                      const td_bpe_opts *opts, td_err *err) {
  *out = NULL;
  td_bpe *bpe = calloc(1, sizeof *bpe);
  if (!bpe) return td_fail(err, TD_ENOMEM, "out of memory for the BPE model");
  bpe->vocab = vocab;
  bpe->byte_level = opts->byte_level;
  td_status st = read_options(bpe, model, err);
  // Cutting also requires that words do not depend on their neighbours.
  if (st == TD_OK) {
    bpe->cuts_at_metaspace = !opts->byte_level && !bpe->ignore_merges && !*bpe->prefix &&
                             !*bpe->suffix &&
                             td_vocab_find_plain(vocab, METASPACE, N_METASPACE) >= 0;
    const cJSON *scores = td_json_get(model, "scores");
    st = opts->by_rank ? rank_merges(bpe, NULL, err)
         : scores      ? score_merges(bpe, scores, err)
                       : read_merges(bpe, td_json_get(model, "merges"), err);
  }
  if (st != TD_OK) {
    td_bpe_close(bpe);
    return st;
  }
  find_byte_tokens(bpe);
  for (int32_t id = 0; bpe->has_byte_table && id < bpe->vocab->n_ids; id++) {
    if (!(td_vocab_flags(bpe->vocab, id) & TD_VOCAB_MODEL)) continue;
    const size_t n = bytes_of(bpe, id);
    if (n > bpe->longest) bpe->longest = n;
  }
  *out = bpe;
  return TD_OK;
}

void td_bpe_close(td_bpe *bpe) {
  if (!bpe) return;
  td_merges_free(&bpe->merges);
  td_buf_free(&bpe->affixes);
  free(bpe);
}

// ---- word to symbols

static td_status symbols_of_bytes(const td_bpe *bpe, const char *word, size_t len,
                                  td_token_ids *out, td_err *err) {
  td_status st = td_token_ids_reserve(out, len, err);
  if (st != TD_OK) return st;
  for (size_t i = 0; i < len; i++)
    out->ids[out->n++] = bpe->byte_symbols[(uint8_t)word[i]];
  return TD_OK;
}

// Appends the <0x..> tokens of a character's bytes, or nothing if one of them is missing.
static bool fall_back(const td_bpe *bpe, const char *text, size_t len, td_token_ids *out) {
  for (size_t i = 0; i < len; i++)
    if (bpe->fallbacks[(uint8_t)text[i]] < 0) return false;
  for (size_t i = 0; i < len; i++)
    out->ids[out->n++] = bpe->fallbacks[(uint8_t)text[i]];
  return true;
}

// Spells a character with the prefix or suffix for its position in the word.
static td_status spell_symbol(const td_bpe *bpe, td_buf *out, const char *text, size_t len,
                              bool first, bool last, td_err *err) {
  td_buf_clear(out);
  if (!first) td_buf_str(out, bpe->prefix);
  td_buf_add(out, text, len);
  if (last) td_buf_str(out, bpe->suffix);
  return td_buf_status(out, err);
}

// An unknown token is emitted only when the next known character comes, i.e. after byte tokens in
// between. The reference implementation does the same.
static td_status symbols_of_chars(const td_bpe *bpe, td_buf *symbol, const char *word, size_t len,
                                  td_token_ids *out, td_err *err) {
  bool pending = false;
  for (size_t i = 0, n; i < len; i += n) {
    uint32_t c;
    n = (size_t)td_utf8_decode(word + i, len - i, &c);
    td_status st = spell_symbol(bpe, symbol, word + i, n, i == 0, i + n == len, err);
    if (st == TD_OK) st = td_token_ids_reserve(out, symbol->len + 2, err);
    if (st != TD_OK) return st;
    int32_t id = td_vocab_find_plain(bpe->vocab, symbol->data, symbol->len);
    if (id >= 0) {
      if (pending) out->ids[out->n++] = bpe->unk;
      pending = false;
      out->ids[out->n++] = id;
    } else if (bpe->byte_fallback && fall_back(bpe, symbol->data, symbol->len, out)) {
      continue;
    } else if (bpe->unk >= 0) {
      if (pending && !bpe->fuse_unk) out->ids[out->n++] = bpe->unk;
      pending = true;
    }
  }
  if (pending) out->ids[out->n++] = bpe->unk;
  return TD_OK;
}

// ---- words

// Spells the word as the vocabulary does.
static td_status spell_word(const td_bpe *bpe, td_buf *spelled, const char **word, size_t *len,
                            td_err *err) {
  if (!bpe->byte_level) return TD_OK;
  td_buf_clear(spelled);
  td_bytelevel_spell(spelled, *word, *len);
  *word = td_buf_text(spelled);
  *len = spelled->len;
  return td_buf_status(spelled, err);
}

static td_status encode_uncached(const td_bpe *bpe, td_bpe_scratch *s, const char *word, size_t len,
                                 td_token_ids *out, td_err *err) {
  const char *spelled = word;
  size_t n_spelled = len;
  td_status st = TD_OK;
  if (bpe->ignore_merges || !bpe->has_byte_table) {
    st = spell_word(bpe, &s->spelled, &spelled, &n_spelled, err);
    if (st != TD_OK) return st;
  }
  if (bpe->ignore_merges) {
    int32_t id = td_vocab_find_plain(bpe->vocab, spelled, n_spelled);
    if (id >= 0) return td_token_ids_push(out, id, err);
  }
  s->symbols.n = 0;
  st = bpe->has_byte_table
           ? symbols_of_bytes(bpe, word, len, &s->symbols, err)
           : symbols_of_chars(bpe, &s->symbol, spelled, n_spelled, &s->symbols, err);
  if (st == TD_OK) st = td_merges_apply(&bpe->merges, &s->merging, &s->symbols, err);
  return st == TD_OK ? td_token_ids_add(out, s->symbols.ids, s->symbols.n, err) : st;
}

static td_status encode_word(const td_bpe *bpe, td_bpe_scratch *s, const char *word, size_t len,
                             td_token_ids *out, td_err *err) {
  cached_word *slot = &s->cache[td_hash_bytes(word, len) & (N_CACHED - 1)];
  if (len > sizeof slot->key) return encode_uncached(bpe, s, word, len, out, err);
  if (slot->n_key == len && memcmp(slot->key, word, len) == 0)
    return td_token_ids_add(out, slot->ids, slot->n_ids, err);
  size_t start = out->n;
  td_status st = encode_uncached(bpe, s, word, len, out, err);
  if (st != TD_OK || out->n - start > TD_COUNT(slot->ids)) return st;
  slot->n_key = (uint8_t)len;
  slot->n_ids = (uint8_t)(out->n - start);
  memcpy(slot->key, word, len);
  if (slot->n_ids) memcpy(slot->ids, out->ids + start, slot->n_ids * sizeof *slot->ids);
  return TD_OK;
}

td_status td_bpe_encode(const td_bpe *bpe, td_bpe_scratch *s, const char *word, size_t len,
                        td_token_ids *out, td_err *err) {
  if (!bpe->cuts_at_metaspace) return len ? encode_word(bpe, s, word, len, out, err) : TD_OK;
  while (len) {
    bool word_seen = false;
    size_t n = 0;
    while (n < len) {
      bool space = word[n] == METASPACE[0] && len - n >= N_METASPACE &&
                   memcmp(word + n, METASPACE, N_METASPACE) == 0;
      if (space && word_seen) break;
      word_seen = !space;
      n += space ? N_METASPACE : 1;
    }
    td_status st = encode_word(bpe, s, word, n, out, err);
    if (st != TD_OK) return st;
    word += n;
    len -= n;
  }
  return TD_OK;
}

td_status td_bpe_count(const td_bpe *bpe, td_bpe_scratch *s, const char *word, size_t len,
                       size_t *n_ids, td_err *err) {
  *n_ids = 0;
  for (size_t done = 0; done < len;) {
    const bool is_last = len - done <= PART_BYTES;
    s->part.n = 0;
    td_status st = td_bpe_encode(bpe, s, word + done, is_last ? len - done : PART_BYTES, &s->part,
                                 err);
    if (st != TD_OK) return st;
    size_t n = 0, n_bytes = 0;
    while (n < s->part.n && (is_last || n_bytes < PART_BYTES / 4 * 3))
      n_bytes += bytes_of(bpe, s->part.ids[n++]);
    done += is_last ? len - done : n_bytes;
    *n_ids += n;
  }
  return TD_OK;
}
