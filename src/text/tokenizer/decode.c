// src/text/tokenizer/decode.c - decodes tokens to text; precomputes the text of every token.
#include "text/tokenizer/decode.h"

#include <stdlib.h>
#include <string.h>

#include "base/json_parse.h"
#include "base/str.h"
#include "base/utf8.h"
#include "text/tokenizer/bytelevel.h"
#include "text/tokenizer/json.h"

#define REPLACEMENT "\xEF\xBF\xBD"
// Limits for the output of the steps for one token, and in total while a decoder is opened. Real
// vocabularies stay far below; they stop a file whose replacements grow without bound.
#define MAX_TOKEN_BYTES ((size_t)64 << 10)
#define MAX_WORK_BYTES  ((size_t)1 << 30)

typedef enum { REPLACE, STRIP, METASPACE } step_kind;

// A step that processes every token independently.
typedef struct {
  step_kind kind;
  char *pattern, *content; // owned; METASPACE has pattern only
  unsigned start, stop;    // STRIP: how many times to remove content
} token_step;

typedef struct {
  uint32_t begin, len; // in text
  bool is_byte;        // one byte of a character (byte fallback)
} decoded_token;

struct td_decoder {
  const td_vocab *vocab;
  token_step steps[TD_TOK_MAX_STEPS];
  size_t n_steps;
  bool byte_level, byte_fallback, fused;
  bool joins_with_space;
  bool first_differs; // the first token of a text decodes differently
  char *left;         // removed from the beginning of a text up to n_left times
  unsigned n_left;
  decoded_token *tokens; // [vocab->n_ids]
  td_buf text;
};

// ---- loading

static td_status copy_str(const cJSON *json, const char *key, char **out, td_err *err) {
  const char *text;
  td_status st = td_tok_need_str(json, key, &text, err);
  if (st != TD_OK) return st;
  *out = strdup(text);
  return *out ? TD_OK : td_fail(err, TD_ENOMEM, "out of memory for the decoder");
}

static td_status read_replace(token_step *step, const cJSON *json, td_err *err) {
  td_status st = copy_str(td_json_get(json, "pattern"), "String", &step->pattern, err);
  if (st != TD_OK)
    return td_fail(err, TD_EUNSUPPORTED, "pattern must be {\"String\": ...} in a decoder");
  if (!*step->pattern) return td_fail(err, TD_EFORMAT, "pattern is empty");
  return copy_str(json, "content", &step->content, err);
}

static td_status read_strip(token_step *step, const cJSON *json, td_err *err) {
  int64_t start = 0, stop = 0;
  td_status st = copy_str(json, "content", &step->content, err);
  if (st == TD_OK) st = td_json_get_int(json, "start", 0, 1 << 20, &start, err);
  if (st == TD_OK) st = td_json_get_int(json, "stop", 0, 1 << 20, &stop, err);
  if (st == TD_OK && !*step->content) st = td_fail(err, TD_EFORMAT, "content is empty");
  step->start = (unsigned)start;
  step->stop = (unsigned)stop;
  return st;
}

static td_status read_metaspace(td_decoder *decoder, token_step *step, const cJSON *json,
                                td_err *err) {
  const char *scheme = "always";
  bool add_prefix_space = true;
  td_status st = copy_str(json, "replacement", &step->pattern, err);
  if (st == TD_OK) st = td_json_get_str(json, "prepend_scheme", &scheme, err);
  if (st == TD_OK) st = td_json_get_bool(json, "add_prefix_space", &add_prefix_space, err);
  if (st == TD_OK && !*step->pattern) st = td_fail(err, TD_EFORMAT, "replacement is empty");
  if (st != TD_OK) return st;
  if (strcmp(scheme, "never") != 0 && add_prefix_space) decoder->first_differs = true;
  return TD_OK;
}

// After ByteLevel or Fuse there is a single text, of which only the beginning may be stripped.
static td_status read_fused_step(td_decoder *decoder, const cJSON *json, const char *type,
                                 td_err *err) {
  if (strcmp(type, "Fuse") == 0) return TD_OK;
  token_step step = {0};
  td_status st = TD_OK;
  if (strcmp(type, "Strip") != 0 || decoder->left) {
    st = td_fail(err, TD_EUNSUPPORTED, "not supported after ByteLevel or Fuse");
  } else {
    st = read_strip(&step, json, err);
    if (st == TD_OK && step.stop) st = td_fail(err, TD_EUNSUPPORTED, "stop is not supported");
  }
  decoder->n_left = step.start;
  if (!decoder->left)
    decoder->left = step.content;
  else
    free(step.content);
  return st;
}

static td_status read_step(void *owner, const cJSON *json, const char *type, td_err *err) {
  td_decoder *decoder = owner;
  if (decoder->fused) return read_fused_step(decoder, json, type, err);
  if (strcmp(type, "ByteLevel") == 0 && !decoder->byte_fallback) {
    decoder->byte_level = decoder->fused = true;
    return TD_OK;
  }
  if (strcmp(type, "Fuse") == 0) {
    decoder->fused = true;
    return TD_OK;
  }
  if (decoder->byte_fallback)
    return td_fail(err, TD_EUNSUPPORTED, "not supported after ByteFallback");
  if (strcmp(type, "ByteFallback") == 0) {
    decoder->byte_fallback = true;
    return TD_OK;
  }
  if (decoder->n_steps == TD_TOK_MAX_STEPS) return td_fail(err, TD_ELIMIT, "too many steps");
  token_step *step = &decoder->steps[decoder->n_steps++];
  step->kind = REPLACE;
  if (strcmp(type, "Replace") == 0) return read_replace(step, json, err);
  step->kind = STRIP;
  if (strcmp(type, "Strip") == 0) return read_strip(step, json, err);
  step->kind = METASPACE;
  if (strcmp(type, "Metaspace") == 0) return read_metaspace(decoder, step, json, err);
  decoder->n_steps--;
  return td_fail(err, TD_EUNSUPPORTED, "this decoder is not supported");
}

// ---- single tokens

// Stops once MAX_TOKEN_BYTES is exceeded.
static void replace_all(td_buf *out, const char *text, size_t len, const char *pattern,
                        const char *content) {
  size_t n = strlen(pattern);
  while (len && out->len <= MAX_TOKEN_BYTES) {
    const char *found = memmem(text, len, pattern, n);
    size_t before = found ? (size_t)(found - text) : len;
    td_buf_add(out, text, before);
    if (found) {
      td_buf_str(out, content);
      before += n;
    }
    text += before;
    len -= before;
  }
}

static void strip(td_buf *out, const char *text, size_t len, const token_step *step) {
  size_t n = strlen(step->content);
  for (unsigned i = 0; i < step->start && len >= n && memcmp(text, step->content, n) == 0; i++) {
    text += n;
    len -= n;
  }
  for (unsigned i = 0; i < step->stop && len >= n && memcmp(text + len - n, step->content, n) == 0;
       i++)
    len -= n;
  td_buf_add(out, text, len);
}

// Applies the steps to a token's spelling in text, which receives the result. Adds the bytes
// written to *work_bytes.
static td_status apply_steps(const td_decoder *decoder, td_buf *text, bool first,
                             size_t *work_bytes, td_err *err) {
  td_buf from = TD_BUF_INIT;
  td_status st = td_buf_status(text, err);
  for (size_t i = 0; i < decoder->n_steps && st == TD_OK; i++) {
    const token_step *step = &decoder->steps[i];
    td_buf swap = from;
    from = *text;
    *text = swap;
    td_buf_clear(text);
    switch (step->kind) {
    case REPLACE:
      replace_all(text, td_buf_text(&from), from.len, step->pattern, step->content);
      break;
    case STRIP: strip(text, td_buf_text(&from), from.len, step); break;
    case METASPACE:
      replace_all(text, td_buf_text(&from), from.len, step->pattern,
                  first && decoder->first_differs ? "" : " ");
      break;
    }
    st = td_buf_status(text, err);
    if (st == TD_OK && text->len > MAX_TOKEN_BYTES) {
      st = td_fail(err, TD_ELIMIT, "decoder: its steps make more than %zu bytes of one token",
                   MAX_TOKEN_BYTES);
    }
    *work_bytes += text->len;
  }
  td_buf_free(&from);
  return st;
}

// The byte that "<0x0A>" stands for, or -1.
static int fallback_byte(const td_buf *text) {
  if (text->len != 6 || memcmp(text->data, "<0x", 3) != 0 || text->data[5] != '>') return -1;
  int high = td_hex_digit(text->data[3]), low = td_hex_digit(text->data[4]);
  return high < 0 || low < 0 ? -1 : high << 4 | low;
}

static td_status store_token(td_decoder *decoder, int32_t id, const td_buf *spelling, td_err *err) {
  td_buf *text = &decoder->text;
  decoded_token *token = &decoder->tokens[id];
  size_t begin = text->len;
  int byte = decoder->byte_fallback ? fallback_byte(spelling) : -1;
  if (byte >= 0) {
    td_buf_char(text, (char)byte);
    token->is_byte = true;
  } else if (!decoder->byte_level ||
             !td_bytelevel_bytes(text, td_buf_text(spelling), spelling->len)) {
    td_buf_add(text, td_buf_text(spelling), spelling->len);
  }
  token->begin = (uint32_t)begin;
  token->len = (uint32_t)(text->len - begin);
  td_buf_char(text, '\0');
  if (text->len > UINT32_MAX) return td_fail(err, TD_ELIMIT, "the tokens decode to too much text");
  return td_buf_status(text, err);
}

static td_status decode_tokens(td_decoder *decoder, const td_added *added, td_err *err) {
  const td_vocab *vocab = decoder->vocab;
  decoder->tokens = calloc((size_t)vocab->n_ids + 1, sizeof *decoder->tokens);
  if (!decoder->tokens) return td_fail(err, TD_ENOMEM, "out of memory for %d tokens", vocab->n_ids);
  td_buf_char(&decoder->text, '\0'); // text of unused ids
  td_buf spelling = TD_BUF_INIT;
  td_status st = TD_OK;
  size_t n_added = td_added_count(added), work_bytes = 0;
  for (size_t i = 0; i < (size_t)vocab->n_ids + n_added && st == TD_OK; i++) {
    size_t len = 0;
    int32_t id = (int32_t)i;
    bool in_vocab = i < (size_t)vocab->n_ids;
    const char *text = in_vocab ? td_vocab_text(vocab, id, &len)
                                : td_added_normal_text(added, i - (size_t)vocab->n_ids, &id, &len);
    if (!text || !td_vocab_flags(vocab, id)) continue;
    td_buf_clear(&spelling);
    td_buf_add(&spelling, text, len);
    if (decoder->first_differs) { // only checks the limits; emit_first repeats it
      st = apply_steps(decoder, &spelling, true, &work_bytes, err);
      td_buf_clear(&spelling);
      td_buf_add(&spelling, text, len);
    }
    if (st == TD_OK) st = apply_steps(decoder, &spelling, false, &work_bytes, err);
    if (st == TD_OK && work_bytes > MAX_WORK_BYTES)
      st = td_fail(err, TD_ELIMIT, "decoder: its steps make too much of %d tokens", vocab->n_ids);
    if (st == TD_OK) st = store_token(decoder, id, &spelling, err);
  }
  td_buf_free(&spelling);
  return st;
}

td_status td_decoder_open(td_decoder **out, const cJSON *json, const td_vocab *vocab,
                          const td_added *added, td_err *err) {
  *out = NULL;
  td_decoder *decoder = calloc(1, sizeof *decoder);
  if (!decoder) return td_fail(err, TD_ENOMEM, "out of memory for the decoder");
  decoder->vocab = vocab;
  decoder->joins_with_space = !json;
  td_status st = TD_OK;
  if (json) st = td_tok_each_step(json, "decoders", read_step, decoder, err);
  if (st != TD_OK) td_err_prefix(err, "decoder");
  if (st == TD_OK) st = decode_tokens(decoder, added, err);
  if (st != TD_OK) {
    td_decoder_close(decoder);
    return st;
  }
  *out = decoder;
  return TD_OK;
}

void td_decoder_close(td_decoder *decoder) {
  if (!decoder) return;
  for (size_t i = 0; i < decoder->n_steps; i++) {
    free(decoder->steps[i].pattern);
    free(decoder->steps[i].content);
  }
  free(decoder->left);
  free(decoder->tokens);
  td_buf_free(&decoder->text);
  free(decoder);
}

const char *td_decoder_bytes(const td_decoder *decoder, int32_t id, size_t *len) {
  *len = decoder->tokens[id].len;
  return decoder->text.data + decoder->tokens[id].begin;
}

unsigned td_decoder_strip_left(const td_decoder *decoder) {
  return decoder->n_left;
}

bool td_decoder_strips_space(const td_decoder *decoder) {
  bool strips = decoder->n_left && decoder->left && strcmp(decoder->left, " ") == 0;
  return strips || decoder->first_differs;
}

// ---- texts

// Appends whole characters, without what is stripped from the beginning of the text.
static void emit(const td_decoder *decoder, const td_decoding *t, const char *text, size_t len,
                 td_buf *out) {
  size_t n = decoder->left ? strlen(decoder->left) : 0;
  while (*t->n_strip_left && len) {
    bool cut = len >= n && memcmp(text, decoder->left, n) == 0;
    *t->n_strip_left = cut ? *t->n_strip_left - 1 : 0;
    if (cut) {
      text += n;
      len -= n;
    }
  }
  td_buf_add(out, text, len);
}

// Emits the first len held bytes, with U+FFFD for invalid UTF-8.
static void emit_held(const td_decoder *decoder, const td_decoding *t, size_t len, td_buf *out) {
  if (*t->n_strip_left) {
    td_buf whole = TD_BUF_INIT;
    td_utf8_add_replaced(&whole, td_buf_text(t->held), len);
    emit(decoder, t, td_buf_text(&whole), whole.len, out);
    out->failed = out->failed || whole.failed;
    td_buf_free(&whole);
  } else {
    td_utf8_add_replaced(out, td_buf_text(t->held), len);
  }
  td_buf_drop(t->held, len);
}

// Consecutive byte tokens are text if together they are valid UTF-8; otherwise each becomes U+FFFD.
static void emit_byte_tokens(const td_decoder *decoder, const td_decoding *t, td_buf *out) {
  if (td_utf8_valid(td_buf_text(t->held), t->held->len))
    emit(decoder, t, td_buf_text(t->held), t->held->len, out);
  else
    for (size_t i = 0; i < t->held->len; i++)
      emit(decoder, t, REPLACEMENT, strlen(REPLACEMENT), out);
  td_buf_clear(t->held);
}

// Decodes the first token of a text, if it decodes differently from others.
static td_status emit_first(const td_decoder *decoder, const td_decoding *t, int32_t id,
                            td_buf *out, td_err *err) {
  size_t len;
  const char *spelling = td_vocab_text(decoder->vocab, id, &len);
  td_buf text = TD_BUF_INIT;
  size_t work_bytes = 0;
  td_buf_add(&text, spelling, len);
  td_status st = apply_steps(decoder, &text, true, &work_bytes, err);
  if (st == TD_OK) emit(decoder, t, td_buf_text(&text), text.len, out);
  td_buf_free(&text);
  return st;
}

td_status td_decoder_feed(const td_decoder *decoder, const td_decoding *t, int32_t id, td_buf *out,
                          td_err *err) {
  if (!td_vocab_flags(decoder->vocab, id)) return TD_OK;
  bool first = !*t->started;
  *t->started = true;
  size_t len;
  const char *bytes = td_decoder_bytes(decoder, id, &len);
  if (decoder->byte_level) {
    td_buf_add(t->held, bytes, len);
    emit_held(decoder, t, td_utf8_whole(td_buf_text(t->held), t->held->len), out);
  } else if (decoder->tokens[id].is_byte) {
    td_buf_add(t->held, bytes, len);
  } else {
    emit_byte_tokens(decoder, t, out);
    if (decoder->joins_with_space && !first) td_buf_char(out, ' ');
    if (first && decoder->first_differs) {
      td_status st = emit_first(decoder, t, id, out, err);
      if (st != TD_OK) return st;
    } else {
      emit(decoder, t, bytes, len, out);
    }
  }
  if (t->held->failed) return td_buf_status(t->held, err);
  return td_buf_status(out, err);
}

td_status td_decoder_flush(const td_decoder *decoder, const td_decoding *t, td_buf *out,
                           td_err *err) {
  if (decoder->byte_level)
    emit_held(decoder, t, t->held->len, out);
  else
    emit_byte_tokens(decoder, t, out);
  *t->started = false;
  *t->n_strip_left = decoder->n_left;
  return td_buf_status(out, err);
}
