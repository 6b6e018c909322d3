// src/gguf/tokenizer.c - writes tokenizer.json and tokenizer_config.json.
#include "gguf/tokenizer.h"

#include <stdio.h>
#include <string.h>

#include "base/json_write.h"

// ---- patterns -----------------------------------------------------------------------------------

// As the publishers have them in tokenizer.json.
#define CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define TAIL         "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define WORDS(digits)                                                                              \
  CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" digits "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" TAIL
#define UPPER "\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}"
#define LOWER "\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}"
// Words with a change of case as a border.
#define CASED(upper, lower, ending)                                                                \
  "[^\\r\\n\\p{L}\\p{N}]?[" upper "]*[" lower "]+" ending "|[^\\r\\n\\p{L}\\p{N}]?[" upper         \
  "]+[" lower "]*" ending
#define NO_HAN "&&[^\\p{Han}]"

static const char *const qwen[] = {WORDS("\\p{N}"), NULL};
// Marks belong to words.
static const char *const qwen35[] = {CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}"
                                                  "| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|" TAIL,
                                     NULL};
static const char *const glm[] = {WORDS("\\p{N}{1,3}"), NULL};
static const char *const o200k[] = {
    CASED(UPPER, LOWER, CONTRACTIONS "?") "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|" TAIL,
    NULL};
static const char *const tekken[] = {
    CASED(UPPER, LOWER, "") "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|" TAIL, NULL};
static const char *const kimi[] = {
    "[\\p{Han}]+|" CASED(UPPER NO_HAN, LOWER NO_HAN, CONTRACTIONS "?") //
    "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" TAIL,
    NULL};
static const char *const deepseek[] = {
    "\\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./"
    ":;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]"
    "+| ?[\\p{P}\\p{S}]+[\\r\\n]*|" TAIL,
    NULL};

static const struct {
  const char *name;            // tokenizer.ggml.pre
  const char *const *patterns; // applied one after the other
  bool composes;               // text is normalized (NFC)
  bool ignores_merges;         // a word that is a token is not merged
} pres[] = {
    {"qwen2", qwen, true, false},
    {"deepseek-v3", deepseek, false, false},
    {"qwen35", qwen35, true, false},
    {"hunyuan", qwen, false, false},
    {"hunyuan-dense", deepseek, false, false},
    {"hy_v4", deepseek, false, false},
    {"glm5", glm, false, true},
    {"llama-bpe", glm, false, true},
    {"glm4", glm, false, true},
    {"chatglm-bpe", glm, false, false},
    {"gpt-4o", o200k, false, true},
    {"minimax-m2", o200k, false, false},
    {"kimi-k2", kimi, false, true},
    {"tekken", tekken, false, true},
};

static td_status find_pre(const td_gguf *g, size_t *out, td_err *err) {
  td_gguf_str model = {.data = "none", .len = 4}, pre = {.data = "none", .len = 4};
  td_gguf_text(td_gguf_find(g, "tokenizer.ggml.model"), &model);
  td_gguf_text(td_gguf_find(g, "tokenizer.ggml.pre"), &pre);
  if (!td_gguf_str_is(model, "gpt2")) {
    return td_fail(err, TD_EUNSUPPORTED,
                   "%s: a tokenizer of kind %.*s is not supported; supported is "
                   "gpt2",
                   g->file, model.len < 40 ? (int)model.len : 40, model.data);
  }
  char list[256] = "";
  for (size_t i = 0, len = 0; i < TD_COUNT(pres) && len < sizeof list; i++) {
    *out = i;
    if (td_gguf_str_is(pre, pres[i].name)) return TD_OK;
    len += (size_t)snprintf(list + len, sizeof list - len, "%s%s", len ? ", " : "", pres[i].name);
  }
  return td_fail(err, TD_EUNSUPPORTED, "%s: pre-tokenizer %.*s is not supported; supported are %s",
                 g->file, pre.len < 40 ? (int)pre.len : 40, pre.data, list);
}

static void write_byte_level(td_json_writer *w, const char *key) {
  td_jw_begin_object(w, key);
  td_jw_str(w, "type", "ByteLevel");
  td_jw_bool(w, "add_prefix_space", false);
  td_jw_bool(w, "trim_offsets", true);
  td_jw_bool(w, "use_regex", false);
  td_jw_end_object(w);
}

static void write_pre(td_json_writer *w, const char *const *patterns) {
  td_jw_begin_object(w, "pre_tokenizer");
  td_jw_str(w, "type", "Sequence");
  td_jw_begin_array(w, "pretokenizers");
  for (; *patterns; patterns++) {
    td_jw_begin_object(w, NULL);
    td_jw_str(w, "type", "Split");
    td_jw_begin_object(w, "pattern");
    td_jw_str(w, "Regex", *patterns);
    td_jw_end_object(w);
    td_jw_str(w, "behavior", "Isolated");
    td_jw_bool(w, "invert", false);
    td_jw_end_object(w);
  }
  write_byte_level(w, NULL);
  td_jw_end_array(w);
  td_jw_end_object(w);
}

// ---- tokens -------------------------------------------------------------------------------------

enum { CONTROL = 3, USER_DEFINED = 4, UNUSED = 5 };

// The array of strings or numbers called key; NULL: it is none.
static const td_gguf_value *list(const td_gguf *g, const char *key, bool of_text) {
  const td_gguf_value *v = td_gguf_find(g, key);
  return v && v->is_array && (v->type == TD_GGUF_STR) == of_text ? v : NULL;
}

static int type_of(const td_gguf_value *types, uint64_t id) {
  double type = 1;
  td_gguf_number(types, id, &type);
  return (int)type;
}

// Writers make control tokens of all that look so. DeepSeek's of tool calls are text, which the
// parser of tool calls has to see.
static bool is_text(td_gguf_str token) {
  static const char tool[] = "<｜tool▁";
  return token.len > sizeof tool - 1 && memcmp(token.data, tool, sizeof tool - 1) == 0;
}

static void write_added(td_json_writer *w, const td_gguf_value *tokens,
                        const td_gguf_value *types) {
  const uint8_t *at = tokens->data;
  td_jw_begin_array(w, "added_tokens");
  for (uint64_t id = 0; id < tokens->n; id++) {
    const td_gguf_str token = td_gguf_next_str(&at);
    const int type = type_of(types, id);
    if ((type != CONTROL && type != USER_DEFINED) || !token.len) continue;
    td_jw_begin_object(w, NULL);
    td_jw_int(w, "id", (int64_t)id);
    td_jw_str_len(w, "content", token.data, token.len);
    td_jw_bool(w, "single_word", false);
    td_jw_bool(w, "lstrip", false);
    td_jw_bool(w, "rstrip", false);
    td_jw_bool(w, "normalized", false);
    td_jw_bool(w, "special", type == CONTROL && !is_text(token));
    td_jw_end_object(w);
  }
  td_jw_end_array(w);
}

// A member whose key has any bytes.
static void write_id(td_json_writer *w, td_gguf_str token, uint64_t id, td_buf *key) {
  td_buf_clear(key);
  td_buf_add(key, token.data, token.len);
  if (memchr(token.data, '\0', token.len)) return; // no token of bytes in letters has one
  td_jw_int(w, td_buf_text(key), (int64_t)id);
}

static void write_model(td_json_writer *w, const td_gguf_value *tokens, const td_gguf_value *types,
                        const td_gguf_value *merges, bool ignores_merges) {
  td_buf key = TD_BUF_INIT;
  td_jw_begin_object(w, "model");
  td_jw_str(w, "type", "BPE");
  td_jw_bool(w, "ignore_merges", ignores_merges);
  td_jw_begin_object(w, "vocab");
  const uint8_t *at = tokens->data;
  for (uint64_t id = 0; id < tokens->n; id++) {
    const td_gguf_str token = td_gguf_next_str(&at);
    const int type = type_of(types, id);
    if (type != CONTROL && type != UNUSED) write_id(w, token, id, &key);
  }
  td_jw_end_object(w);
  td_jw_begin_array(w, "merges");
  at = merges->data;
  for (uint64_t i = 0; i < merges->n; i++) {
    const td_gguf_str merge = td_gguf_next_str(&at);
    td_jw_str_len(w, NULL, merge.data, merge.len);
  }
  td_jw_end_array(w);
  td_jw_end_object(w);
  td_buf_free(&key);
}

td_status td_gguf_tokenizer(td_buf *out, const td_gguf *g, td_err *err) {
  size_t pre = 0;
  const td_gguf_value *tokens = list(g, "tokenizer.ggml.tokens", true);
  const td_gguf_value *merges = list(g, "tokenizer.ggml.merges", true);
  const td_gguf_value *types = list(g, "tokenizer.ggml.token_type", false);
  td_status st = find_pre(g, &pre, err);
  if (st != TD_OK) return st;
  if (!tokens || !merges || !types || types->n != tokens->n) {
    return td_fail(err, TD_EFORMAT,
                   "%s: metadata tokenizer.ggml: tokens, token_type and merges do not make a "
                   "vocabulary",
                   g->file);
  }
  td_json_writer w = TD_JSON_WRITER(out);
  td_jw_begin_object(&w, NULL);
  write_added(&w, tokens, types);
  if (pres[pre].composes) {
    td_jw_begin_object(&w, "normalizer");
    td_jw_str(&w, "type", "NFC");
    td_jw_end_object(&w);
  }
  write_pre(&w, pres[pre].patterns);
  write_byte_level(&w, "decoder");
  write_model(&w, tokens, types, merges, pres[pre].ignores_merges);
  td_jw_end_object(&w);
  return td_buf_status(out, err);
}

// ---- tokenizer_config.json ----------------------------------------------------------------------

// The token whose id is the number called id_key.
static void write_named(td_json_writer *w, const td_gguf *g, const char *key, const char *id_key) {
  const td_gguf_value *tokens = list(g, "tokenizer.ggml.tokens", true);
  double id = 0;
  if (!tokens || !td_gguf_number(td_gguf_find(g, id_key), 0, &id)) return;
  if (!(id >= 0 && id < (double)tokens->n)) return;
  const uint8_t *at = tokens->data;
  for (uint64_t i = 0; i < (uint64_t)id; i++)
    td_gguf_next_str(&at);
  const td_gguf_str token = td_gguf_next_str(&at);
  td_jw_str_len(w, key, token.data, token.len);
}

static void write_template(td_json_writer *w, td_gguf_str name, td_gguf_str text) {
  td_jw_begin_object(w, NULL);
  td_jw_str_len(w, "name", name.data, name.len);
  td_jw_str_len(w, "template", text.data, text.len);
  td_jw_end_object(w);
}

// One template, or a list with the names of several.
static void write_templates(td_json_writer *w, const td_gguf *g) {
  static const char prefix[] = "tokenizer.chat_template.";
  const size_t n = sizeof prefix - 1;
  td_gguf_str text;
  bool has_names = false;
  for (size_t i = 0; i < g->n_values; i++) {
    const td_gguf_str key = g->values[i].key;
    has_names |= key.len > n && memcmp(key.data, prefix, n) == 0;
  }
  const bool has_own = td_gguf_text(td_gguf_find(g, "tokenizer.chat_template"), &text);
  if (!has_names) {
    if (has_own) td_jw_str_len(w, "chat_template", text.data, text.len);
    return;
  }
  td_jw_begin_array(w, "chat_template");
  if (has_own) write_template(w, (td_gguf_str){.data = "default", .len = 7}, text);
  for (size_t i = 0; i < g->n_values; i++) {
    const td_gguf_str key = g->values[i].key;
    if (key.len <= n || memcmp(key.data, prefix, n) != 0) continue;
    if (!td_gguf_text(&g->values[i], &text)) continue;
    write_template(w, (td_gguf_str){.data = key.data + n, .len = key.len - n}, text);
  }
  td_jw_end_array(w);
}

td_status td_gguf_tokenizer_config(td_buf *out, const td_gguf *g, td_err *err) {
  td_json_writer w = TD_JSON_WRITER(out);
  double adds = 0;
  td_jw_begin_object(&w, NULL);
  if (td_gguf_number(td_gguf_find(g, "tokenizer.ggml.add_bos_token"), 0, &adds))
    td_jw_bool(&w, "add_bos_token", adds != 0);
  write_named(&w, g, "bos_token", "tokenizer.ggml.bos_token_id");
  write_named(&w, g, "eos_token", "tokenizer.ggml.eos_token_id");
  write_named(&w, g, "pad_token", "tokenizer.ggml.padding_token_id");
  write_templates(&w, g);
  td_jw_end_object(&w);
  return td_buf_status(out, err);
}
