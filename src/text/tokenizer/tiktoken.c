// src/text/tokenizer/tiktoken.c - converts a tiktoken.model to the form of a tokenizer.json.
#include "text/tokenizer/tiktoken.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/base64.h"
#include "base/buf.h"
#include "base/json_parse.h"
#include "text/tokenizer/bytelevel.h"

// Maximum token length; deriving a token's merges takes time quadratic in its length.
#define MAX_TOKEN_BYTES 1024
// Control tokens after the ranks, including reserved ones.
#define N_CONTROL 258

// Parts of the word pattern: runs of Han; words split at a change of case, with their contractions;
// up to three digits; punctuation; white space.
#define CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
#define HEAD         "[^\\r\\n\\p{L}\\p{N}]?"
#define UPPER        "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]"
#define LOWER        "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]"
#define PATTERN                                                                                    \
  "[\\p{Han}]+|" HEAD UPPER "*" LOWER "+" CONTRACTIONS "|" HEAD UPPER "+" LOWER "*" CONTRACTIONS   \
  "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

// Everything except vocabulary and added tokens, as JSON.
static const char frame[] =
    "{\"model\":{\"type\":\"BPE\",\"ignore_merges\":true},"
    "\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":["
    "{\"type\":\"Split\",\"pattern\":{},\"behavior\":\"Isolated\"},"
    "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}"
    "]},\"decoder\":{\"type\":\"ByteLevel\"}}";

typedef struct {
  cJSON *vocab, *added; // parts of the root object
  bool has_byte[256];
  uint32_t n_ranks;
  td_buf bytes, spelled;
} reader;

static td_status add_rank(reader *r, double rank, td_err *err) {
  if (r->bytes.len > MAX_TOKEN_BYTES) {
    return td_fail(err, TD_ELIMIT, "a token of %zu bytes; the limit is %d", r->bytes.len,
                   MAX_TOKEN_BYTES);
  }
  if (r->bytes.len == 1) r->has_byte[(uint8_t)r->bytes.data[0]] = true;
  td_buf_clear(&r->spelled);
  td_bytelevel_spell(&r->spelled, td_buf_text(&r->bytes), r->bytes.len);
  td_status st = td_buf_status(&r->spelled, err);
  if (st != TD_OK) return st;
  if (!cJSON_AddNumberToObject(r->vocab, td_buf_text(&r->spelled), rank))
    return td_fail(err, TD_ENOMEM, "out of memory");
  r->n_ranks++;
  return TD_OK;
}

// Parses a line: base64, a space, the rank.
static td_status read_line(reader *r, const char *line, size_t len, td_err *err) {
  const char *space = memchr(line, ' ', len);
  size_t n_text = space ? (size_t)(space - line) : 0, n_rank = space ? len - n_text - 1 : 0;
  uint32_t rank = 0;
  bool is_rank = n_rank > 0 && n_rank <= 8;
  for (size_t i = 0; is_rank && i < n_rank; i++) {
    char c = space[1 + i];
    is_rank = c >= '0' && c <= '9';
    rank = rank * 10 + (uint32_t)(c - '0');
  }
  td_buf_clear(&r->bytes);
  if (!is_rank || !td_base64_decode(&r->bytes, line, n_text))
    return td_fail(err, TD_EFORMAT, "must be a token in base64, a space and its rank");
  td_status st = td_buf_status(&r->bytes, err);
  return st == TD_OK ? add_rank(r, rank, err) : st;
}

static td_status read_ranks(reader *r, const char *text, size_t len, td_err *err) {
  unsigned line_no = 0;
  while (len) {
    const char *end = memchr(text, '\n', len);
    size_t n = end ? (size_t)(end - text) : len, n_line = n;
    line_no++;
    if (n_line && text[n_line - 1] == '\r') n_line--;
    td_status st = n_line ? read_line(r, text, n_line, err) : TD_OK;
    if (st != TD_OK) return td_err_prefix(err, "line %u", line_no);
    n += end != NULL;
    text += n;
    len -= n;
  }
  for (int b = 0; b < 256; b++)
    if (!r->has_byte[b]) return td_fail(err, TD_EFORMAT, "byte 0x%02x has no token", b);
  return TD_OK;
}

static bool add_token(reader *r, uint32_t id, const char *content, bool special) {
  cJSON *token = cJSON_CreateObject();
  if (!token || !cJSON_AddItemToArray(r->added, token)) {
    cJSON_Delete(token);
    return false;
  }
  return cJSON_AddNumberToObject(token, "id", id) &&
         cJSON_AddStringToObject(token, "content", content) &&
         cJSON_AddBoolToObject(token, "special", special) &&
         cJSON_AddBoolToObject(token, "normalized", false);
}

static td_status add_control_tokens(reader *r, const cJSON *config, td_err *err) {
  const cJSON *decoder = td_json_get(config, "added_tokens_decoder");
  for (uint32_t id = r->n_ranks; id < r->n_ranks + N_CONTROL; id++) {
    char key[16], reserved[40];
    snprintf(key, sizeof key, "%u", id);
    snprintf(reserved, sizeof reserved, "<|reserved_token_%u|>", id);
    const cJSON *token = td_json_get(decoder, key);
    const char *content = token ? NULL : reserved;
    bool special = !token;
    td_status st = td_json_get_str(token, "content", &content, err);
    if (st == TD_OK && !content) st = td_fail(err, TD_EFORMAT, "content is missing");
    if (st == TD_OK) st = td_json_get_bool(token, "special", &special, err);
    if (st != TD_OK) return td_err_prefix(err, "added_tokens_decoder: %s", key);
    if (!add_token(r, id, content, special)) return td_fail(err, TD_ENOMEM, "out of memory");
  }
  return TD_OK;
}

// Fills pattern, vocabulary and added tokens into the frame.
static td_status fill(reader *r, cJSON *root, const char *text, size_t len, const cJSON *config,
                      td_err *err) {
  cJSON *steps = cJSON_GetObjectItem(cJSON_GetObjectItem(root, "pre_tokenizer"), "pretokenizers");
  cJSON *pattern = cJSON_GetObjectItem(cJSON_GetArrayItem(steps, 0), "pattern");
  r->vocab = cJSON_AddObjectToObject(cJSON_GetObjectItem(root, "model"), "vocab");
  r->added = cJSON_AddArrayToObject(root, "added_tokens");
  if (!r->vocab || !r->added || !cJSON_AddStringToObject(pattern, "Regex", PATTERN))
    return td_fail(err, TD_ENOMEM, "out of memory");
  td_status st = read_ranks(r, text, len, err);
  return st == TD_OK ? add_control_tokens(r, config, err) : st;
}

td_status td_tiktoken_read(cJSON **root, const char *text, size_t len, const cJSON *config,
                           td_err *err) {
  reader r = {0};
  td_status st = td_json_parse(root, frame, sizeof frame - 1, TD_JSON_MAX_DEPTH, err);
  if (st == TD_OK) st = fill(&r, *root, text, len, config, err);
  td_buf_free(&r.bytes);
  td_buf_free(&r.spelled);
  if (st == TD_OK) return st;
  cJSON_Delete(*root);
  *root = NULL;
  return st;
}
