// src/text/tokenizer/added.c - finds added tokens in a text with tries.
#include "text/tokenizer/added.h"

#include <stdlib.h>
#include <string.h>

#include "base/grow.h"
#include "base/json_parse.h"
#include "base/utf8.h"

// A node of a trie over the bytes of tokens. Its children form a list.
typedef struct {
  int32_t child, sibling; // -1: none
  int32_t token;          // index of the token that ends here, or -1
  uint8_t byte;
} trie_node;

typedef struct {
  trie_node *nodes;
  int32_t n;
  size_t cap;
  int32_t roots[256]; // root node of each first byte, or -1
} trie;

typedef struct {
  int32_t id;
  bool single_word, lstrip, rstrip;
  size_t normal_begin, normal_len; // in normal_texts; length 0 if equal to the token's own spelling
} added_token;

struct td_added {
  added_token *tokens;
  size_t n_tokens;
  trie tries[2]; // tokens found in the original text; tokens found in normalized text
  td_buf normal_texts;
  td_regex *word_char; // characters that continue a word, for single_word
};

// ---- tries

static int32_t *find_child(trie *t, int32_t *list, uint8_t byte) {
  while (*list >= 0 && t->nodes[*list].byte != byte)
    list = &t->nodes[*list].sibling;
  return list;
}

static td_status new_node(trie *t, uint8_t byte, int32_t *out, td_err *err) {
  enum { MAX_NODES = 1 << 22 };
  if (t->n >= MAX_NODES || !TD_GROW(t->nodes, (size_t)t->n, t->cap, 256))
    return td_fail(err, TD_ENOMEM, "out of memory for added tokens");
  *out = t->n++;
  t->nodes[*out] = (trie_node){.child = -1, .sibling = -1, .token = -1, .byte = byte};
  return TD_OK;
}

// If two tokens have the same spelling, the first one is kept.
static td_status trie_add(trie *t, const char *text, size_t len, int32_t token, td_err *err) {
  int32_t node = -1;
  for (size_t i = 0; i < len; i++) {
    uint8_t byte = (uint8_t)text[i];
    int32_t *link = i ? find_child(t, &t->nodes[node].child, byte) : &t->roots[byte];
    if (*link < 0) {
      int32_t parent = node, fresh = -1;
      td_status st = new_node(t, byte, &fresh, err);
      if (st != TD_OK) return st;
      link = i ? find_child(t, &t->nodes[parent].child, byte) : &t->roots[byte];
      *link = fresh;
    }
    node = *link;
  }
  if (node >= 0 && t->nodes[node].token < 0) t->nodes[node].token = token;
  return TD_OK;
}

// The longest token that text[0..len) starts with, or -1.
static int32_t trie_match(const trie *t, const char *text, size_t len, size_t *n_matched) {
  int32_t token = -1, node = t->roots[(uint8_t)text[0]];
  for (size_t i = 1; node >= 0; i++) {
    if (t->nodes[node].token >= 0) {
      token = t->nodes[node].token;
      *n_matched = i;
    }
    if (i == len) break;
    node = t->nodes[node].child;
    while (node >= 0 && t->nodes[node].byte != (uint8_t)text[i])
      node = t->nodes[node].sibling;
  }
  return token;
}

// ---- loading

typedef struct {
  td_added *added;
  td_vocab *vocab;
  const td_norm *norm;
  td_norm_scratch norm_scratch;
  td_regex_scratch *regex_scratch;
} loader;

// Inserts a token into the trie in which it is searched, with the spelling to search for.
static td_status index_token(loader *l, size_t which, const char *text, size_t len, bool normalized,
                             td_err *err) {
  td_added *added = l->added;
  size_t begin = added->normal_texts.len;
  if (normalized && !td_norm_keeps(l->norm, text, len)) {
    td_status st = td_norm_apply(l->norm, &l->norm_scratch, l->regex_scratch, text, len, NULL,
                                 &added->normal_texts, NULL, err);
    if (st != TD_OK) return st;
    const char *normal = td_buf_text(&added->normal_texts) + begin;
    size_t n = added->normal_texts.len - begin;
    if (n != len || memcmp(normal, text, len) != 0) {
      added->tokens[which].normal_begin = begin;
      added->tokens[which].normal_len = n;
      return trie_add(&added->tries[1], normal, n, (int32_t)which, err);
    }
  }
  return trie_add(&added->tries[normalized], text, len, (int32_t)which, err);
}

static td_status read_token(loader *l, const cJSON *json, td_err *err) {
  double id = -1;
  const char *content = NULL;
  bool special = false, normalized = true;
  added_token token = {0};
  if (!cJSON_IsObject(json)) return td_fail(err, TD_EFORMAT, "must be an object");
  td_status st = td_json_get_double(json, "id", &id, err);
  if (st == TD_OK) st = td_json_get_str(json, "content", &content, err);
  if (st == TD_OK && !content) st = td_fail(err, TD_EFORMAT, "content is missing");
  if (st == TD_OK) st = td_json_get_bool(json, "special", &special, err);
  if (st == TD_OK) st = td_json_get_bool(json, "normalized", &normalized, err);
  if (st == TD_OK) st = td_json_get_bool(json, "single_word", &token.single_word, err);
  if (st == TD_OK) st = td_json_get_bool(json, "lstrip", &token.lstrip, err);
  if (st == TD_OK) st = td_json_get_bool(json, "rstrip", &token.rstrip, err);
  if (st != TD_OK || !*content) return st; // an empty token never matches
  size_t len = strlen(content);
  uint32_t flags = TD_VOCAB_ADDED | (special ? TD_VOCAB_SPECIAL : 0);
  st = td_vocab_add(l->vocab, id, content, len, flags, err);
  if (st != TD_OK) return st;
  token.id = (int32_t)id;
  size_t which = l->added->n_tokens++;
  l->added->tokens[which] = token;
  return index_token(l, which, content, len, normalized, err);
}

static td_status read_tokens(td_added *added, const cJSON *json, td_vocab *vocab,
                             const td_norm *norm, td_err *err) {
  if (json && !cJSON_IsArray(json))
    return td_fail(err, TD_EFORMAT, "added_tokens must be an array");
  size_t n = json ? (size_t)cJSON_GetArraySize(json) : 0;
  added->tokens = calloc(n ? n : 1, sizeof *added->tokens);
  loader l = {
      .added = added, .vocab = vocab, .norm = norm, .regex_scratch = td_regex_scratch_new()};
  td_status st = TD_OK;
  if (!added->tokens || !l.regex_scratch)
    st = td_fail(err, TD_ENOMEM, "out of memory for added tokens");
  int i = 0;
  for (const cJSON *item = json ? json->child : NULL; item && st == TD_OK; item = item->next) {
    st = read_token(&l, item, err);
    if (st != TD_OK) td_err_prefix(err, "added_tokens[%d]", i);
    i++;
  }
  td_norm_scratch_free(&l.norm_scratch);
  td_regex_scratch_free(l.regex_scratch);
  return st;
}

td_status td_added_open(td_added **out, const cJSON *json, td_vocab *vocab, const td_norm *norm,
                        td_err *err) {
  static const char word_char[] = "\\A[\\w\\x{200c}\\x{200d}]";
  *out = NULL;
  td_added *added = calloc(1, sizeof *added);
  if (!added) return td_fail(err, TD_ENOMEM, "out of memory for added tokens");
  for (int i = 0; i < 2; i++)
    memset(added->tries[i].roots, 0xFF, sizeof added->tries[i].roots);
  td_status st = td_regex_open(&added->word_char, word_char, sizeof word_char - 1, false, err);
  if (st == TD_OK) st = read_tokens(added, json, vocab, norm, err);
  if (st != TD_OK) {
    td_added_close(added);
    return st;
  }
  *out = added;
  return TD_OK;
}

void td_added_close(td_added *added) {
  if (!added) return;
  free(added->tokens);
  free(added->tries[0].nodes);
  free(added->tries[1].nodes);
  td_buf_free(&added->normal_texts);
  td_regex_close(added->word_char);
  free(added);
}

size_t td_added_count(const td_added *added) {
  return added->n_tokens;
}

const char *td_added_normal_text(const td_added *added, size_t i, int32_t *id, size_t *len) {
  const added_token *token = &added->tokens[i];
  *id = token->id;
  *len = token->normal_len;
  return token->normal_len ? added->normal_texts.data + token->normal_begin : NULL;
}

// ---- splitting

static td_status pass_on(const td_added_text *t, size_t begin, size_t end, int32_t id,
                         td_err *err) {
  const td_piece piece = {.begin = begin, .end = end, .id = id};
  return begin == end ? TD_OK : t->piece(t->owner, &piece, err);
}

static size_t char_before(const char *text, size_t pos) {
  do
    pos--;
  while (((uint8_t)text[pos] & 0xC0) == 0x80);
  return pos;
}

static size_t skip_spaces_left(const char *text, size_t pos, size_t floor) {
  while (pos > floor) {
    uint32_t c;
    size_t before = char_before(text, pos);
    td_utf8_decode(text + before, pos - before, &c);
    if (!td_unicode_is_space(c)) break;
    pos = before;
  }
  return pos;
}

static size_t skip_spaces_right(const char *text, size_t pos, size_t len) {
  while (pos < len) {
    uint32_t c;
    int n = td_utf8_decode(text + pos, len - pos, &c);
    if (!td_unicode_is_space(c)) break;
    pos += (size_t)n;
  }
  return pos;
}

static td_status is_word_char(const td_added *added, const td_added_text *t, size_t begin,
                              size_t end, bool *out, td_err *err) {
  td_spans found = {0};
  td_status st = td_regex_find_all(added->word_char, t->regex, t->text + begin, end - begin, &found,
                                   err);
  *out = found.n > 0;
  td_spans_free(&found);
  return st;
}

// Whether no word continues across either end of text[begin..end).
static td_status stands_alone(const td_added *added, const td_added_text *t, size_t begin,
                              size_t end, bool *alone, td_err *err) {
  bool word = false;
  td_status st = TD_OK;
  if (begin > 0) st = is_word_char(added, t, char_before(t->text, begin), begin, &word, err);
  if (st == TD_OK && !word && end < t->len) {
    uint32_t c;
    int n = td_utf8_decode(t->text + end, t->len - end, &c);
    st = is_word_char(added, t, end, end + (size_t)n, &word, err);
  }
  *alone = !word;
  return st;
}

// Position of the search for tokens.
typedef struct {
  size_t pos;
  size_t next_literal; // index of the next literal span that may be ahead
} cursor;

// The next token at or after the cursor, which moves to its end. NULL: no more.
static const added_token *find_token(const td_added *added, const td_added_text *t, cursor *at,
                                     size_t *begin) {
  const trie *tokens = &added->tries[t->normalized];
  size_t n_literal = t->literal ? t->literal->n : 0;
  while (at->pos < t->len) {
    size_t limit = t->len, n;
    if (at->next_literal < n_literal) {
      td_span span = t->literal->spans[at->next_literal];
      if (at->pos >= span.begin) {
        if (at->pos < span.end) at->pos = span.end;
        at->next_literal++;
        continue;
      }
      if (span.begin < limit) limit = span.begin;
    }
    for (; at->pos < limit; at->pos++) {
      if (tokens->roots[(uint8_t)t->text[at->pos]] < 0) continue;
      int32_t token = trie_match(tokens, t->text + at->pos, limit - at->pos, &n);
      if (token < 0) continue;
      *begin = at->pos;
      at->pos += n;
      return &added->tokens[token];
    }
  }
  return NULL;
}

td_status td_added_split(const td_added *added, const td_added_text *t, td_err *err) {
  size_t done = 0, begin = 0;
  cursor at = {0};
  const added_token *token;
  td_status st = TD_OK;
  while (st == TD_OK && (token = find_token(added, t, &at, &begin)) != NULL) {
    size_t end = at.pos;
    bool alone = true;
    if (token->single_word) st = stands_alone(added, t, begin, end, &alone, err);
    if (st != TD_OK || !alone) continue;
    if (token->lstrip) begin = skip_spaces_left(t->text, begin, done);
    if (token->lstrip && begin < done) begin = done; // the previous token already took these spaces
    if (token->rstrip) end = skip_spaces_right(t->text, end, t->len);
    if (begin >= end) continue; // nothing is left of it
    if (done < begin) st = pass_on(t, done, begin, -1, err);
    if (st == TD_OK) st = pass_on(t, begin, end, token->id, err);
    done = end;
  }
  if (st != TD_OK || done >= t->len) return st;
  return pass_on(t, done, t->len, -1, err);
}
