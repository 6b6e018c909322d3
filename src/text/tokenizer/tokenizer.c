// src/text/tokenizer/tokenizer.c - opens a tokenizer, encodes and decodes text.
#include "text/tokenizer/tokenizer.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/json_parse.h"
#include "base/utf8.h"
#include "gguf/files.h"
#include "text/tokenizer/added.h"
#include "text/tokenizer/bpe.h"
#include "text/tokenizer/decode.h"
#include "text/tokenizer/post_processor.h"
#include "text/tokenizer/pre_tokenizer.h"
#include "text/tokenizer/tiktoken.h"

#define MAX_FILE_BYTES ((size_t)1 << 28)
// Keeps positions in a text well below 32 bits.
#define MAX_TEXT_BYTES ((size_t)1 << 30)
// Working memory larger than this is freed after use.
#define MAX_KEPT_BYTES ((size_t)4 << 20)

// Working memory of one encoding; kept between encodings for its word cache.
typedef struct scratch {
  struct scratch *next;
  td_regex_scratch *regex;
  td_split_scratch *split;
  td_bpe_scratch *bpe;
  td_norm_scratch norm;
  td_buf valid, normal;
  td_spans valid_literal, part_literal, normal_literal;
} scratch;

typedef struct {
  pthread_mutex_t lock;
  scratch *free; // free list, guarded by lock
} scratch_pool;

struct td_tokenizer {
  td_vocab vocab;
  td_norm *norm;
  td_added *added;
  td_split *split;
  td_bpe *bpe;
  td_decoder *decoder;
  td_post post;
  int32_t bos, eos;
  int32_t ends[TD_TOKENIZER_MAX_ENDS];
  uint32_t n_ends;
  bool wants_bos;
  scratch_pool *pool;
};

// ---- working memory

static void free_scratch(scratch *s) {
  td_regex_scratch_free(s->regex);
  td_split_scratch_free(s->split);
  td_bpe_scratch_free(s->bpe);
  td_norm_scratch_free(&s->norm);
  td_buf_free(&s->valid);
  td_buf_free(&s->normal);
  td_spans_free(&s->valid_literal);
  td_spans_free(&s->part_literal);
  td_spans_free(&s->normal_literal);
  free(s);
}

static scratch *take_scratch(scratch_pool *pool) {
  pthread_mutex_lock(&pool->lock);
  scratch *s = pool->free;
  if (s) pool->free = s->next;
  pthread_mutex_unlock(&pool->lock);
  if (s) return s;
  s = calloc(1, sizeof *s);
  if (!s) return NULL;
  s->regex = td_regex_scratch_new();
  s->split = td_split_scratch_new();
  s->bpe = td_bpe_scratch_new();
  if (s->regex && s->split && s->bpe) return s;
  free_scratch(s);
  return NULL;
}

static void put_back(scratch_pool *pool, scratch *s, size_t n_bytes_seen) {
  if (n_bytes_seen > MAX_KEPT_BYTES) {
    free_scratch(s);
    return;
  }
  pthread_mutex_lock(&pool->lock);
  s->next = pool->free;
  pool->free = s;
  pthread_mutex_unlock(&pool->lock);
}

static void close_pool(scratch_pool *pool) {
  if (!pool) return;
  for (scratch *s = pool->free, *next; s; s = next) {
    next = s->next;
    free_scratch(s);
  }
  pthread_mutex_destroy(&pool->lock);
  free(pool);
}

// ---- opening

// by_rank: see td_bpe_opts.
static td_status read_model(td_tokenizer *tok, const cJSON *root, bool by_rank, td_err *err) {
  const cJSON *model = td_json_get(root, "model");
  const char *type = "BPE"; // default in files older than the key
  if (!cJSON_IsObject(model)) return td_fail(err, TD_EFORMAT, "model must be an object");
  td_status st = td_json_get_str(model, "type", &type, err);
  if (st != TD_OK) return td_err_prefix(err, "model");
  if (strcmp(type, "BPE") != 0)
    return td_fail(err, TD_EUNSUPPORTED, "model.type \"%.40s\" is not supported, BPE is", type);
  st = td_vocab_read(&tok->vocab, td_json_get(model, "vocab"), err);
  if (st == TD_OK) st = td_norm_open(&tok->norm, td_json_get(root, "normalizer"), err);
  if (st == TD_OK)
    st = td_added_open(&tok->added, td_json_get(root, "added_tokens"), &tok->vocab, tok->norm, err);
  if (st == TD_OK) st = td_split_open(&tok->split, td_json_get(root, "pre_tokenizer"), err);
  if (st == TD_OK) {
    td_bpe_opts opts = {.byte_level = td_split_is_byte_level(tok->split), .by_rank = by_rank};
    st = td_bpe_open(&tok->bpe, model, &tok->vocab, &opts, err);
  }
  if (st == TD_OK) st = td_post_read(&tok->post, td_json_get(root, "post_processor"), err);
  if (st == TD_OK)
    st = td_decoder_open(&tok->decoder, td_json_get(root, "decoder"), &tok->vocab, tok->added, err);
  return st;
}

static td_status check_post(const td_tokenizer *tok, const td_token_ids *ids, td_err *err) {
  for (size_t i = 0; i < ids->n; i++) {
    if (td_vocab_flags(&tok->vocab, ids->ids[i])) continue;
    return td_fail(err, TD_EFORMAT, "post_processor: no token %d", ids->ids[i]);
  }
  return TD_OK;
}

// The id of a token named in tokenizer_config.json, by a string or an object with "content".
static int32_t named_token(const td_tokenizer *tok, const cJSON *config, const char *key) {
  const cJSON *token = td_json_get(config, key);
  if (cJSON_IsObject(token)) token = td_json_get(token, "content");
  if (!cJSON_IsString(token)) return -1;
  return td_vocab_find(&tok->vocab, token->valuestring, strlen(token->valuestring));
}

static void find_ends(td_tokenizer *tok) {
  static const char *const texts[] = {
      "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>",
      "<|return|>", "<|call|>",   "<EOT>",      "<end_of_turn>", "<｜end▁of▁sentence｜>",
  };
  static_assert(TD_COUNT(texts) < TD_TOKENIZER_MAX_ENDS, "ends");
  if (tok->eos >= 0) tok->ends[tok->n_ends++] = tok->eos;
  for (size_t i = 0; i < TD_COUNT(texts); i++) {
    const int32_t id = td_vocab_find(&tok->vocab, texts[i], strlen(texts[i]));
    if (id >= 0 && id != tok->eos && td_tokenizer_is_special(tok, id))
      tok->ends[tok->n_ends++] = id;
  }
}

static td_status open_roots(td_tokenizer **out, const cJSON *root, bool by_rank,
                            const cJSON *config, td_err *err) {
  td_tokenizer *tok = calloc(1, sizeof *tok);
  if (tok) tok->pool = calloc(1, sizeof *tok->pool);
  if (!tok || !tok->pool || pthread_mutex_init(&tok->pool->lock, NULL) != 0) {
    if (tok) free(tok->pool);
    free(tok);
    return td_fail(err, TD_ENOMEM, "out of memory for the tokenizer");
  }
  td_status st = read_model(tok, root, by_rank, err);
  if (st == TD_OK) st = check_post(tok, &tok->post.before, err);
  if (st == TD_OK) st = check_post(tok, &tok->post.after, err);
  if (st != TD_OK) {
    td_tokenizer_close(tok);
    return st;
  }
  tok->bos = named_token(tok, config, "bos_token");
  tok->eos = named_token(tok, config, "eos_token");
  find_ends(tok);
  tok->wants_bos = cJSON_IsTrue(td_json_get(config, "add_bos_token"));
  *out = tok;
  return TD_OK;
}

static td_status open_text(td_tokenizer **out, const char *text, size_t len, bool by_rank,
                           const cJSON *config, td_err *err) {
  cJSON *root = NULL;
  td_status st = by_rank ? td_tiktoken_read(&root, text, len, config, err)
                         : td_json_parse(&root, text, len, TD_JSON_MAX_DEPTH, err);
  if (st == TD_OK) st = open_roots(out, root, by_rank, config, err);
  cJSON_Delete(root);
  return st;
}

static td_status open_texts(td_tokenizer **out, const char *name, const char *text, size_t len,
                            bool by_rank, const char *config, size_t config_len, td_err *err) {
  *out = NULL;
  cJSON *root = NULL;
  td_status st = config ? td_json_parse(&root, config, config_len, TD_JSON_MAX_DEPTH, err) : TD_OK;
  if (st == TD_OK) st = open_text(out, text, len, by_rank, root, err);
  cJSON_Delete(root);
  return st == TD_OK ? st : td_err_prefix(err, "%s", name);
}

td_status td_tokenizer_open_json(td_tokenizer **out, const char *name, const char *json, size_t len,
                                 const char *config, size_t config_len, td_err *err) {
  return open_texts(out, name, json, len, false, config, config_len, err);
}

td_status td_tokenizer_open_ranks(td_tokenizer **out, const char *name, const char *text,
                                  size_t len, const char *config, size_t config_len, td_err *err) {
  return open_texts(out, name, text, len, true, config, config_len, err);
}

static td_status open_file(td_tokenizer **out, const char *model_dir, const char *file,
                           bool by_rank, const cJSON *config, td_err *err) {
  td_buf text = TD_BUF_INIT;
  td_status st = td_checkpoint_read(&text, model_dir, file, MAX_FILE_BYTES, err);
  if (st == TD_OK) {
    st = open_text(out, td_buf_text(&text), text.len, by_rank, config, err);
    if (st != TD_OK) td_err_prefix(err, "%s/%s", model_dir, file);
  }
  td_buf_free(&text);
  return st;
}

td_status td_tokenizer_open(td_tokenizer **out, const char *model_dir, td_err *err) {
  static const char whole[] = "tokenizer.json", ranks[] = "tiktoken.model",
                    settings[] = "tokenizer_config.json";
  cJSON *config = NULL;
  td_status st = TD_OK;
  *out = NULL;
  if (td_checkpoint_has(model_dir, settings))
    st = td_checkpoint_json(&config, model_dir, settings, MAX_FILE_BYTES, err);
  if (st == TD_OK && td_checkpoint_has(model_dir, whole)) {
    st = open_file(out, model_dir, whole, false, config, err);
  } else if (st == TD_OK && td_checkpoint_has(model_dir, ranks)) {
    st = open_file(out, model_dir, ranks, true, config, err);
  } else if (st == TD_OK) {
    st = td_fail(err, TD_ENOENT,
                 "%s/%s: no such file, nor a tiktoken.model beside it: download the model's "
                 "tokenizer",
                 model_dir, whole);
  }
  if (st != TD_OK) td_checkpoint_name_error(model_dir, err);
  cJSON_Delete(config);
  return st;
}

void td_tokenizer_close(td_tokenizer *tok) {
  if (!tok) return;
  close_pool(tok->pool);
  td_decoder_close(tok->decoder);
  td_post_free(&tok->post);
  td_bpe_close(tok->bpe);
  td_split_close(tok->split);
  td_added_close(tok->added);
  td_norm_close(tok->norm);
  td_vocab_free(&tok->vocab);
  free(tok);
}

// ---- encoding

// State of one encoding.
typedef struct {
  const td_tokenizer *tok;
  scratch *s;
  td_token_ids *out;
  bool parse_special;
} encoding;

// Counts what was added behind the first n ids, of which there are too many, instead of keeping it.
static void count_rest(td_token_ids *out, size_t n) {
  if (!out->most || n <= out->most) return;
  out->n_cut += out->n - n;
  out->n = n;
}

// A word so long that it cannot fit is counted in parts.
static td_status encode_word(void *owner, const char *word, size_t len, td_err *err) {
  encoding *e = owner;
  const td_bpe *bpe = e->tok->bpe;
  td_token_ids *out = e->out;
  const size_t n = out->n, longest = td_bpe_longest(bpe);
  if (td_token_ids_is_canceled(out)) return td_fail(err, TD_ECANCELED, "canceled");
  if (out->most && longest && n + len / longest > out->most) {
    size_t n_ids;
    td_status st = td_bpe_count(bpe, e->s->bpe, word, len, &n_ids, err);
    out->n_cut += n_ids;
    return st;
  }
  td_status st = td_bpe_encode(bpe, e->s->bpe, word, len, out, err);
  count_rest(out, n);
  return st;
}

static td_status push_added(encoding *e, int32_t id, td_err *err) {
  const size_t n = e->out->n;
  td_status st = td_token_ids_push(e->out, id, err);
  count_rest(e->out, n);
  return st;
}

static td_status encode_plain(encoding *e, const char *text, size_t len, bool at_start,
                              td_err *err) {
  td_split_text split = {.text = text,
                         .len = len,
                         .at_start = at_start,
                         .word = encode_word,
                         .owner = e,
                         .regex = e->s->regex};
  return td_split_run(e->tok->split, e->s->split, &split, err);
}

// A text that is cut at its added tokens.
typedef struct {
  encoding *e;
  const char *text;
  const td_spans *literal;
  size_t next_literal;
  bool at_start;
} cut_text;

static td_status encode_normal_piece(void *owner, const td_piece *piece, td_err *err) {
  const cut_text *c = owner;
  if (piece->id >= 0) return push_added(c->e, piece->id, err);
  return encode_plain(c->e, c->text + piece->begin, piece->end - piece->begin,
                      c->at_start && piece->begin == 0, err);
}

// Encodes normalized text: the added tokens found in it, and the plain text between them.
static td_status encode_normal(encoding *e, const char *text, size_t len, const td_spans *literal,
                               bool at_start, td_err *err) {
  if (!e->parse_special) return encode_plain(e, text, len, at_start, err);
  cut_text c = {.e = e, .text = text, .at_start = at_start};
  const td_added_text added = {.text = text,
                               .len = len,
                               .literal = literal,
                               .normalized = true,
                               .piece = encode_normal_piece,
                               .owner = &c,
                               .regex = e->s->regex};
  return td_added_split(e->tok->added, &added, err);
}

static td_status encode_part(encoding *e, const char *text, size_t len, const td_spans *literal,
                             bool at_start, td_err *err) {
  scratch *s = e->s;
  if (td_norm_keeps(e->tok->norm, text, len))
    return encode_normal(e, text, len, literal, at_start, err);
  td_buf_clear(&s->normal);
  s->normal_literal.n = 0;
  td_status st = td_norm_apply(e->tok->norm, &s->norm, s->regex, text, len, literal, &s->normal,
                               &s->normal_literal, err);
  if (st != TD_OK) return st;
  return encode_normal(e, td_buf_text(&s->normal), s->normal.len, &s->normal_literal, at_start,
                       err);
}

// The literal spans within [begin, end), relative to begin.
static td_status cut_spans(const td_spans *literal, size_t *next, size_t begin, size_t end,
                           td_spans *out, td_err *err) {
  out->n = 0;
  while (*next < literal->n && literal->spans[*next].end <= begin)
    ++*next;
  for (size_t i = *next; i < literal->n && literal->spans[i].begin < end; i++) {
    td_span span = literal->spans[i];
    size_t from = span.begin > begin ? span.begin : begin, to = span.end < end ? span.end : end;
    td_status st = td_spans_add(out, from - begin, to - begin, err);
    if (st != TD_OK) return st;
  }
  return TD_OK;
}

static td_status encode_piece(void *owner, const td_piece *piece, td_err *err) {
  cut_text *c = owner;
  td_spans *literal = &c->e->s->part_literal;
  if (piece->id >= 0) return push_added(c->e, piece->id, err);
  td_status st = cut_spans(c->literal, &c->next_literal, piece->begin, piece->end, literal, err);
  if (st != TD_OK) return st;
  return encode_part(c->e, c->text + piece->begin, piece->end - piece->begin, literal,
                     piece->begin == 0, err);
}

static td_status encode_text(encoding *e, const char *text, size_t len, const td_spans *literal,
                             td_err *err) {
  if (!e->parse_special) return encode_part(e, text, len, NULL, true, err);
  static const td_spans none = {0};
  cut_text c = {.e = e, .text = text, .literal = literal ? literal : &none};
  const td_added_text added = {.text = text,
                               .len = len,
                               .literal = c.literal,
                               .piece = encode_piece,
                               .owner = &c,
                               .regex = e->s->regex};
  return td_added_split(e->tok->added, &added, err);
}

// Makes text valid UTF-8 and shifts the literal spans accordingly.
static td_status repair(scratch *s, const char *text, size_t len, const td_spans *literal,
                        td_err *err) {
  td_buf_clear(&s->valid);
  s->valid_literal.n = 0;
  size_t done = 0;
  for (size_t i = 0; literal && i < literal->n; i++) {
    td_span span = literal->spans[i];
    td_utf8_add_replaced(&s->valid, text + done, span.begin - done);
    size_t begin = s->valid.len;
    td_utf8_add_replaced(&s->valid, text + span.begin, span.end - span.begin);
    td_status st = td_spans_add(&s->valid_literal, begin, s->valid.len, err);
    if (st != TD_OK) return st;
    done = span.end;
  }
  td_utf8_add_replaced(&s->valid, text + done, len - done);
  return td_buf_status(&s->valid, err);
}

static td_status check_spans(const td_spans *literal, size_t len, td_err *err) {
  size_t done = 0;
  for (size_t i = 0; literal && i < literal->n; i++) {
    td_span span = literal->spans[i];
    if (span.begin < done || span.end <= span.begin || span.end > len)
      return td_fail(err, TD_EINVAL, "literal span %zu is out of order or out of the text", i);
    done = span.end;
  }
  return TD_OK;
}

td_status td_tokenizer_encode_spans(const td_tokenizer *tok, const char *text, size_t len,
                                    const td_spans *literal, unsigned flags, td_token_ids *out,
                                    td_err *err) {
  if (len > MAX_TEXT_BYTES) return td_fail(err, TD_ELIMIT, "a text of %zu bytes is too long", len);
  td_status st = check_spans(literal, len, err);
  if (st != TD_OK) return st;
  scratch *s = take_scratch(tok->pool);
  if (!s) return td_fail(err, TD_ENOMEM, "out of memory for tokenizing");
  size_t start = out->n, n_bytes = len;
  if (len && !td_utf8_valid(text, len)) {
    st = repair(s, text, len, literal, err);
    text = td_buf_text(&s->valid);
    len = s->valid.len;
    literal = &s->valid_literal;
  }
  encoding e = {
      .tok = tok, .s = s, .out = out, .parse_special = (flags & TD_TOK_PARSE_SPECIAL) != 0};
  bool around = (flags & TD_TOK_ADD_SPECIAL) != 0;
  const td_post *post = &tok->post;
  if (st == TD_OK && around) st = td_token_ids_add(out, post->before.ids, post->before.n, err);
  if (st == TD_OK && len) st = encode_text(&e, text, len, literal, err);
  if (st == TD_OK && around) st = td_token_ids_add(out, post->after.ids, post->after.n, err);
  if (st != TD_OK) out->n = start;
  put_back(tok->pool, s, n_bytes);
  return st;
}

td_status td_tokenizer_encode(const td_tokenizer *tok, const char *text, size_t len, unsigned flags,
                              td_token_ids *out, td_err *err) {
  return td_tokenizer_encode_spans(tok, text, len, NULL, flags, out, err);
}

// ---- tokens

int32_t td_tokenizer_size(const td_tokenizer *tok) {
  return tok->vocab.n_ids;
}

const char *td_tokenizer_bytes(const td_tokenizer *tok, int32_t id, size_t *len) {
  *len = 0;
  return td_vocab_flags(&tok->vocab, id) ? td_decoder_bytes(tok->decoder, id, len) : "";
}

bool td_tokenizer_is_special(const td_tokenizer *tok, int32_t id) {
  return (td_vocab_flags(&tok->vocab, id) & TD_VOCAB_SPECIAL) != 0;
}

bool td_tokenizer_is_added(const td_tokenizer *tok, int32_t id) {
  return (td_vocab_flags(&tok->vocab, id) & TD_VOCAB_ADDED) != 0;
}

int32_t td_tokenizer_find(const td_tokenizer *tok, const char *token, size_t len) {
  return td_vocab_find(&tok->vocab, token, len);
}

int32_t td_tokenizer_bos(const td_tokenizer *tok) {
  return tok->bos;
}

int32_t td_tokenizer_eos(const td_tokenizer *tok) {
  return tok->eos;
}

const int32_t *td_tokenizer_ends(const td_tokenizer *tok, uint32_t *n) {
  *n = tok->n_ends;
  return tok->ends;
}

bool td_tokenizer_strips_space(const td_tokenizer *tok) {
  return td_decoder_strips_space(tok->decoder);
}

bool td_tokenizer_wants_bos(const td_tokenizer *tok) {
  return tok->wants_bos;
}

// ---- decoding

void td_detok_init(td_detok *detok, const td_tokenizer *tok, bool skip_special) {
  *detok = (td_detok){.tok = tok,
                      .skip_special = skip_special,
                      .n_strip_left = td_decoder_strip_left(tok->decoder)};
}

static td_decoding decoding_of(td_detok *detok) {
  return (td_decoding){
      .held = &detok->held, .started = &detok->started, .n_strip_left = &detok->n_strip_left};
}

td_status td_detok_feed(td_detok *detok, int32_t id, td_buf *out, td_err *err) {
  if (detok->skip_special && td_tokenizer_is_special(detok->tok, id)) return TD_OK;
  td_decoding text = decoding_of(detok);
  return td_decoder_feed(detok->tok->decoder, &text, id, out, err);
}

td_status td_detok_flush(td_detok *detok, td_buf *out, td_err *err) {
  td_decoding text = decoding_of(detok);
  return td_decoder_flush(detok->tok->decoder, &text, out, err);
}

void td_detok_free(td_detok *detok) {
  td_buf_free(&detok->held);
}

td_status td_tokenizer_decode(const td_tokenizer *tok, const int32_t *ids, size_t n,
                              bool skip_special, td_buf *out, td_err *err) {
  td_detok detok;
  td_detok_init(&detok, tok, skip_special);
  td_status st = TD_OK;
  for (size_t i = 0; i < n && st == TD_OK; i++)
    st = td_detok_feed(&detok, ids[i], out, err);
  if (st == TD_OK) st = td_detok_flush(&detok, out, err);
  td_detok_free(&detok);
  return st;
}
