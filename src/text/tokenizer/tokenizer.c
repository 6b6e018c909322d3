// src/text/tokenizer/tokenizer.c - opens a tokenizer, encodes and decodes text.
#include "text/tokenizer/tokenizer.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/json_parse.h"
#include "base/utf8.h"
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
  td_pieces pieces, normal_pieces;
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
  bool wants_bos;
  scratch_pool *pool;
};

// ---- working memory

static void free_scratch(scratch *s) {
  td_regex_scratch_free(s->regex);
  td_split_scratch_free(s->split);
  td_bpe_scratch_free(s->bpe);
  td_norm_scratch_free(&s->norm);
  td_pieces_free(&s->pieces);
  td_pieces_free(&s->normal_pieces);
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
  if (strcmp(type, "BPE") != 0) {
    return td_fail(err, TD_EUNSUPPORTED, "model.type \"%.40s\" is not supported, BPE is", type);
  }
  st = td_vocab_read(&tok->vocab, td_json_get(model, "vocab"), err);
  if (st == TD_OK) st = td_norm_open(&tok->norm, td_json_get(root, "normalizer"), err);
  if (st == TD_OK) {
    st = td_added_open(&tok->added, td_json_get(root, "added_tokens"), &tok->vocab, tok->norm, err);
  }
  if (st == TD_OK) st = td_split_open(&tok->split, td_json_get(root, "pre_tokenizer"), err);
  if (st == TD_OK) {
    td_bpe_opts opts = {.byte_level = td_split_is_byte_level(tok->split), .by_rank = by_rank};
    st = td_bpe_open(&tok->bpe, model, &tok->vocab, &opts, err);
  }
  if (st == TD_OK) st = td_post_read(&tok->post, td_json_get(root, "post_processor"), err);
  if (st == TD_OK) {
    st = td_decoder_open(&tok->decoder, td_json_get(root, "decoder"), &tok->vocab, tok->added, err);
  }
  return st;
}

static td_status check_post(const td_tokenizer *tok, const td_token_ids *ids, td_err *err) {
  for (size_t i = 0; i < ids->n; i++) {
    if (td_vocab_flags(&tok->vocab, ids->ids[i])) continue;
    return td_fail(err, TD_EFORMAT, "post_processor: there is no token %d", ids->ids[i]);
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

// model_dir/file; NULL: out of memory.
static char *join(const char *model_dir, const char *file) {
  char *path;
  return asprintf(&path, "%s/%s", model_dir, file) < 0 ? NULL : path;
}

static td_status open_file(td_tokenizer **out, const char *path, bool by_rank, const cJSON *config,
                           td_err *err) {
  td_buf text = TD_BUF_INIT;
  td_status st = td_file_read_regular(&text, path, MAX_FILE_BYTES, err);
  if (st == TD_OK) {
    st = open_text(out, td_buf_text(&text), text.len, by_rank, config, err);
    if (st != TD_OK) td_err_prefix(err, "%s", path);
  }
  td_buf_free(&text);
  return st;
}

static td_status open_files(td_tokenizer **out, const char *paths[3], td_err *err) {
  cJSON *config = NULL;
  td_status st = TD_OK;
  if (td_file_exists(paths[2])) {
    st = td_json_parse_regular(&config, paths[2], MAX_FILE_BYTES, err);
  }
  if (st == TD_OK && td_file_exists(paths[0])) {
    st = open_file(out, paths[0], false, config, err);
  } else if (st == TD_OK && td_file_exists(paths[1])) {
    st = open_file(out, paths[1], true, config, err);
  } else if (st == TD_OK) {
    st = td_fail(err, TD_ENOENT,
                 "%s: no such file, nor a tiktoken.model beside it: download the model's tokenizer",
                 paths[0]);
  }
  cJSON_Delete(config);
  return st;
}

td_status td_tokenizer_open(td_tokenizer **out, const char *model_dir, td_err *err) {
  static const char *const files[] = {"tokenizer.json", "tiktoken.model", "tokenizer_config.json"};
  char *paths[TD_COUNT(files)];
  bool has_all = true;
  *out = NULL;
  for (size_t i = 0; i < TD_COUNT(files); i++)
    has_all &= (paths[i] = join(model_dir, files[i])) != NULL;
  td_status st = has_all ? open_files(out, (const char **)paths, err)
                         : td_fail(err, TD_ENOMEM, "out of memory for the tokenizer");
  for (size_t i = 0; i < TD_COUNT(files); i++)
    free(paths[i]);
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

static td_status encode_word(void *owner, const char *word, size_t len, td_err *err) {
  encoding *e = owner;
  if (e->out->most && e->out->n > e->out->most) {
    e->out->is_cut = true;
    return td_fail(err, TD_ELIMIT, "the text has more than %zu tokens", e->out->most);
  }
  return td_bpe_encode(e->tok->bpe, e->s->bpe, word, len, e->out, err);
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

// Encodes normalized text: the added tokens found in it, and the plain text between them.
static td_status encode_normal(encoding *e, const char *text, size_t len, const td_spans *literal,
                               bool at_start, td_err *err) {
  if (!e->parse_special) return encode_plain(e, text, len, at_start, err);
  td_pieces *pieces = &e->s->normal_pieces;
  td_added_text added = {
      .text = text, .len = len, .literal = literal, .normalized = true, .regex = e->s->regex};
  pieces->n = 0;
  td_status st = td_added_split(e->tok->added, &added, pieces, err);
  for (size_t i = 0; i < pieces->n && st == TD_OK; i++) {
    td_piece piece = pieces->pieces[i];
    if (piece.id >= 0) {
      st = td_token_ids_push(e->out, piece.id, err);
    } else {
      st = encode_plain(e, text + piece.begin, piece.end - piece.begin,
                        at_start && piece.begin == 0, err);
    }
  }
  return st;
}

static td_status encode_part(encoding *e, const char *text, size_t len, const td_spans *literal,
                             bool at_start, td_err *err) {
  scratch *s = e->s;
  if (td_norm_keeps(e->tok->norm, text, len)) {
    return encode_normal(e, text, len, literal, at_start, err);
  }
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

static td_status encode_text(encoding *e, const char *text, size_t len, const td_spans *literal,
                             td_err *err) {
  if (!e->parse_special) return encode_part(e, text, len, NULL, true, err);
  static const td_spans none = {0};
  scratch *s = e->s;
  if (!literal) literal = &none;
  td_added_text added = {.text = text, .len = len, .literal = literal, .regex = s->regex};
  s->pieces.n = 0;
  td_status st = td_added_split(e->tok->added, &added, &s->pieces, err);
  size_t next = 0;
  for (size_t i = 0; i < s->pieces.n && st == TD_OK; i++) {
    td_piece piece = s->pieces.pieces[i];
    if (piece.id >= 0) {
      st = td_token_ids_push(e->out, piece.id, err);
      continue;
    }
    st = cut_spans(literal, &next, piece.begin, piece.end, &s->part_literal, err);
    if (st != TD_OK) break;
    st = encode_part(e, text + piece.begin, piece.end - piece.begin, &s->part_literal,
                     piece.begin == 0, err);
  }
  return st;
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
    if (span.begin < done || span.end <= span.begin || span.end > len) {
      return td_fail(err, TD_EINVAL, "literal span %zu is out of order or out of the text", i);
    }
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

int32_t td_tokenizer_find(const td_tokenizer *tok, const char *token, size_t len) {
  return td_vocab_find(&tok->vocab, token, len);
}

int32_t td_tokenizer_bos(const td_tokenizer *tok) {
  return tok->bos;
}

int32_t td_tokenizer_eos(const td_tokenizer *tok) {
  return tok->eos;
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
