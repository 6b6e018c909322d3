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

static const char *const gpt2[] = {
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+", NULL};
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
    {"deepseek-r1-qwen", qwen, false, false},
    {"megrez", qwen, false, false},
    {"solar-open", qwen, false, false},
    {"deepseek-v3", deepseek, false, false},
    {"joyai-llm", deepseek, false, false},
    {"qwen35", qwen35, true, false},
    {"hunyuan", qwen, false, false},
    {"hunyuan-dense", deepseek, false, false},
    {"hy_v4", deepseek, false, false},
    {"glm5", glm, false, true},
    {"llama-bpe", glm, false, true},
    {"glm4", glm, false, true},
    {"chatglm-bpe", glm, false, false},
    {"gpt-4o", o200k, false, true},
    {"kanana2", o200k, false, false},
    {"minimax-m2", o200k, false, false},
    {"kimi-k2", kimi, false, true},
    {"tekken", tekken, false, true},
    {"gigachat", gpt2, false, false},
};

static bool is_kind(const td_gguf *g, const char *kind) {
  td_gguf_str model;
  return td_gguf_text(td_gguf_find(g, "tokenizer.ggml.model"), &model) &&
         td_gguf_str_is(model, kind);
}

// Whether the vocabulary is SentencePiece's, with scores instead of merges.
static bool has_scores(const td_gguf *g) {
  return is_kind(g, "llama");
}

// Whether it is SentencePiece's with merges.
static bool has_spaces(const td_gguf *g) {
  return is_kind(g, "gemma4");
}

static td_status check_kind(const td_gguf *g, td_err *err) {
  td_gguf_str model = {.data = "none", .len = 4};
  td_gguf_text(td_gguf_find(g, "tokenizer.ggml.model"), &model);
  if (has_scores(g) || has_spaces(g) || td_gguf_str_is(model, "gpt2")) return TD_OK;
  return td_fail(err, TD_EUNSUPPORTED,
                 "%s: a tokenizer of kind %.*s is not supported; supported are gpt2, llama "
                 "and gemma4",
                 g->file, model.len < 40 ? (int)model.len : 40, model.data);
}

static td_status find_pre(const td_gguf *g, size_t *out, td_err *err) {
  td_gguf_str pre = {.data = "none", .len = 4};
  td_gguf_text(td_gguf_find(g, "tokenizer.ggml.pre"), &pre);
  char list[512] = "";
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
  td_jw_add(w, "'type': 'ByteLevel', 'add_prefix_space': false, 'trim_offsets': true, "
               "'use_regex': false}");
}

static void write_pre(td_json_writer *w, const char *const *patterns) {
  td_jw_add(w, "'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': [");
  for (; *patterns; patterns++) {
    td_jw_add(w,
              "{'type': 'Split', 'pattern': {'Regex': %s}, 'behavior': 'Isolated', "
              "'invert': false}",
              *patterns);
  }
  write_byte_level(w, NULL);
  td_jw_add(w, "]}");
}

// ---- tokens -------------------------------------------------------------------------------------

enum { NORMAL = 1, UNKNOWN = 2, CONTROL = 3, USER_DEFINED = 4, UNUSED = 5, BYTE = 6 };

// The array of strings or numbers called key; NULL: there is no such array.
static const td_gguf_value *list(const td_gguf *g, const char *key, bool of_text) {
  const td_gguf_value *v = td_gguf_find(g, key);
  return v && v->is_array && (v->type == TD_GGUF_STR) == of_text ? v : NULL;
}

static bool begins_with(td_gguf_str token, const char *text) {
  const size_t n = strlen(text);
  return token.len >= n && memcmp(token.data, text, n) == 0;
}

// NORMAL where the file states none, or no type. Some files type control tokens so.
static int type_of(const td_gguf_value *types, uint64_t id, td_gguf_str token) {
  double type = NORMAL;
  td_gguf_number(types, id, &type);
  const bool is_known = type > NORMAL && type <= BYTE;
  const bool is_marked = begins_with(token, "<|") && token.len > 4 &&
                         memcmp(token.data + token.len - 2, "|>", 2) == 0;
  return is_known ? (int)type : is_marked ? CONTROL : NORMAL;
}

// Writers make control tokens of all that look so. Those of thoughts and tool calls are text in the
// published tokenizers, which the parser of output has to see.
static bool is_text(td_gguf_str token) {
  static const char *const begins[] = {"<think",
                                       "</think",
                                       "<mm:think",
                                       "</mm:think",
                                       "<tool_",
                                       "</tool_",
                                       "<｜tool▁",
                                       "<|tool_call",
                                       "<arg_",
                                       "</arg_",
                                       "]<]minimax[>[",
                                       "｜DSML｜",
                                       "<minimax:tool_call",
                                       "</minimax:tool_call",
                                       "<｜DSML｜"};
  for (size_t i = 0; i < TD_COUNT(begins); i++)
    if (begins_with(token, begins[i])) return true;
  return false;
}

static void write_added(td_json_writer *w, const td_gguf_value *tokens,
                        const td_gguf_value *types) {
  const uint8_t *at = tokens->data;
  td_jw_begin_array(w, "added_tokens");
  for (uint64_t id = 0; id < tokens->n; id++) {
    const td_gguf_str token = td_gguf_next_str(&at);
    const int type = type_of(types, id, token);
    const bool is_added = type == UNKNOWN || type == CONTROL || type == USER_DEFINED;
    if (!is_added || !token.len) continue;
    td_jw_add(w, "{'id': %lu", id);
    td_jw_str_len(w, "content", token.data, token.len);
    td_jw_add(w,
              "'single_word': false, 'lstrip': false, 'rstrip': false, 'normalized': false, "
              "'special': %i}",
              type != USER_DEFINED && !is_text(token));
  }
  td_jw_end_array(w);
}

static void write_vocab(td_json_writer *w, const td_gguf_value *tokens,
                        const td_gguf_value *types) {
  td_buf key = TD_BUF_INIT;
  const uint8_t *at = tokens->data;
  td_jw_begin_object(w, "vocab");
  for (uint64_t id = 0; id < tokens->n; id++) {
    const td_gguf_str token = td_gguf_next_str(&at);
    const int type = type_of(types, id, token);
    // A member whose key has any bytes; no token of bytes in letters has a zero.
    if (type == CONTROL || type == UNUSED || memchr(token.data, '\0', token.len)) continue;
    td_buf_clear(&key);
    td_buf_add(&key, token.data, token.len);
    td_jw_int(w, td_buf_text(&key), (int64_t)id);
  }
  td_jw_end_object(w);
  td_buf_free(&key);
}

static void write_merges(td_json_writer *w, const td_gguf_value *merges) {
  const uint8_t *at = merges->data;
  td_jw_begin_array(w, "merges");
  for (uint64_t i = 0; i < merges->n; i++) {
    const td_gguf_str merge = td_gguf_next_str(&at);
    td_jw_str_len(w, NULL, merge.data, merge.len);
  }
  td_jw_end_array(w);
}

// Everything of a byte-level vocabulary but its tokens.
static void write_byte_level_model(td_json_writer *w, const td_gguf_value *merges, size_t pre) {
  if (pres[pre].composes) td_jw_add(w, "'normalizer': {'type': 'NFC'}");
  write_pre(w, pres[pre].patterns);
  write_byte_level(w, "decoder");
  td_jw_add(w, "'model': {'type': 'BPE', 'ignore_merges': %i", pres[pre].ignores_merges);
  write_merges(w, merges);
}

// ---- SentencePiece ------------------------------------------------------------------------------

#define METASPACE "\xE2\x96\x81" // stands for a space

// A number or truth of the metadata.
static double number_or(const td_gguf *g, const char *key, double otherwise) {
  double value = otherwise;
  td_gguf_number(td_gguf_find(g, key), 0, &value);
  return value;
}

static bool adds_bos(const td_gguf *g) {
  return number_or(g, "tokenizer.ggml.add_bos_token", has_scores(g)) != 0;
}

static void write_replace(td_json_writer *w, const char *kind, const char *pattern,
                          const char *content) {
  td_jw_add(w, "{'type': 'Replace', 'pattern': {");
  td_jw_str(w, kind, pattern);
  td_jw_add(w, "}, 'content': %s}", content);
}

static void write_step(td_json_writer *w, const char *type, const char *key, const char *value) {
  td_jw_add(w, "{'type': %s", type);
  if (key) td_jw_str(w, key, value);
  td_jw_end_object(w);
}

static void begin_steps(td_json_writer *w, const char *key, const char *list) {
  td_jw_begin_object(w, key);
  td_jw_str(w, "type", "Sequence");
  td_jw_begin_array(w, list);
}

static void end_steps(td_json_writer *w) {
  td_jw_add(w, "]}");
}

// Each part of a text between two control tokens gets a space in front.
static void write_spaces(td_json_writer *w, const td_gguf *g) {
  const bool has_prefix = number_or(g, "tokenizer.ggml.add_space_prefix", true) != 0;
  begin_steps(w, "normalizer", "normalizers");
  if (number_or(g, "tokenizer.ggml.remove_extra_whitespaces", false) != 0) {
    write_replace(w, "Regex", "\\A +| +\\z", "");
    write_replace(w, "Regex", " {2,}", " ");
  }
  if (has_prefix) write_step(w, "Prepend", "prepend", METASPACE);
  write_replace(w, "String", " ", METASPACE);
  end_steps(w);
  begin_steps(w, "decoder", "decoders");
  write_replace(w, "String", METASPACE, " ");
  write_step(w, "ByteFallback", NULL, NULL);
  write_step(w, "Fuse", NULL, NULL);
  if (has_prefix) td_jw_add(w, "{'type': 'Strip', 'content': ' ', 'start': 1, 'stop': 0}");
  end_steps(w);
}

static void begin_fallback_model(td_json_writer *w, const td_gguf *g, const td_gguf_value *tokens,
                                 const td_gguf_value *types) {
  write_spaces(w, g);
  td_jw_add(w, "'model': {'type': 'BPE', 'byte_fallback': true, 'fuse_unk': true");
  const uint8_t *at = tokens->data;
  bool has_unknown = false;
  for (uint64_t id = 0; id < tokens->n && !has_unknown; id++) {
    const td_gguf_str token = td_gguf_next_str(&at);
    has_unknown = type_of(types, id, token) == UNKNOWN;
    if (has_unknown) td_jw_str_len(w, "unk_token", token.data, token.len);
  }
}

// Everything of a vocabulary with scores but its tokens.
static td_status write_scored_model(td_json_writer *w, const td_gguf *g,
                                    const td_gguf_value *tokens, const td_gguf_value *types,
                                    td_err *err) {
  const td_gguf_value *scores = list(g, "tokenizer.ggml.scores", false);
  if (!scores || scores->n != tokens->n) {
    return td_fail(err, TD_EFORMAT,
                   "%s: metadata tokenizer.ggml.scores: not a number for each token", g->file);
  }
  begin_fallback_model(w, g, tokens, types);
  td_jw_begin_array(w, "scores");
  for (uint64_t id = 0; id < scores->n; id++) {
    double score = 0;
    td_gguf_number(scores, id, &score);
    td_jw_double(w, NULL, score);
  }
  td_jw_end_array(w);
  return TD_OK;
}

// ---- tokenizer.json -----------------------------------------------------------------------------

static double usual_eos(const td_gguf *g) {
  return has_scores(g) ? 2 : -1;
}

// The end of a text. Its beginning is in tokenizer_config.json.
static void write_post(td_json_writer *w, const td_gguf *g, const td_gguf_value *tokens) {
  const double eos = number_or(g, "tokenizer.ggml.eos_token_id", usual_eos(g));
  if (number_or(g, "tokenizer.ggml.add_eos_token", false) == 0) return;
  if (!(eos >= 0 && eos < (double)tokens->n)) return;
  char text[256];
  snprintf(text, sizeof text,
           "{\"type\":\"TemplateProcessing\",\"single\":[{\"Sequence\":{\"id\":\"A\"}},"
           "{\"SpecialToken\":{\"id\":\"eos\"}}],\"special_tokens\":{\"eos\":{\"ids\":[%u]}}}",
           (unsigned)eos);
  td_jw_raw(w, "post_processor", text);
}

td_status td_gguf_tokenizer(td_buf *out, const td_gguf *g, td_err *err) {
  size_t pre = 0;
  const td_gguf_value *tokens = list(g, "tokenizer.ggml.tokens", true);
  const td_gguf_value *merges = list(g, "tokenizer.ggml.merges", true);
  const td_gguf_value *types = list(g, "tokenizer.ggml.token_type", false);
  const bool scored = has_scores(g);
  td_status st = check_kind(g, err);
  if (st == TD_OK && !scored && !has_spaces(g)) st = find_pre(g, &pre, err);
  if (st != TD_OK) return st;
  if (!tokens || !(merges || scored) || !types || types->n != tokens->n) {
    return td_fail(err, TD_EFORMAT,
                   "%s: metadata tokenizer.ggml: tokens, token_type and merges do not make a "
                   "vocabulary",
                   g->file);
  }
  td_json_writer w = TD_JSON_WRITER(out);
  td_jw_begin_object(&w, NULL);
  write_added(&w, tokens, types);
  write_post(&w, g, tokens);
  if (scored) {
    st = write_scored_model(&w, g, tokens, types, err);
    if (st != TD_OK) return st;
  } else if (has_spaces(g)) {
    begin_fallback_model(&w, g, tokens, types);
    write_merges(&w, merges);
  } else {
    write_byte_level_model(&w, merges, pre);
  }
  write_vocab(&w, tokens, types);
  td_jw_end_object(&w); // model
  td_jw_end_object(&w);
  return td_buf_status(out, err);
}

// ---- tokenizer_config.json ----------------------------------------------------------------------

// The token whose id is the number called id_key, or else `otherwise`; empty: there is none.
static td_gguf_str named(const td_gguf *g, const char *id_key, double otherwise) {
  const td_gguf_value *tokens = list(g, "tokenizer.ggml.tokens", true);
  const double id = number_or(g, id_key, otherwise);
  if (!tokens || !(id >= 0 && id < (double)tokens->n)) return (td_gguf_str){0};
  const uint8_t *at = tokens->data;
  for (uint64_t i = 0; i < (uint64_t)id; i++)
    td_gguf_next_str(&at);
  return td_gguf_next_str(&at);
}

static void write_named(td_json_writer *w, const char *key, td_gguf_str token) {
  if (token.data) td_jw_str_len(w, key, token.data, token.len);
}

static td_gguf_str bos_of(const td_gguf *g) {
  // Ids of a vocabulary with scores that its metadata need not say; -1: there is none.
  return named(g, "tokenizer.ggml.bos_token_id", has_scores(g) ? 1 : -1);
}

// The template, behind BOS where the file asks for that and the template leaves it out.
static void write_source(td_json_writer *w, const td_gguf *g, const char *key, td_gguf_str text) {
  const td_gguf_str bos = bos_of(g);
  const bool lacks_bos = adds_bos(g) && bos.len && !memmem(text.data, text.len, "bos_token", 9) &&
                         !memmem(text.data, text.len, bos.data, bos.len);
  td_buf source = TD_BUF_INIT;
  if (lacks_bos) td_buf_str(&source, "{{ bos_token }}");
  td_buf_add(&source, text.data, text.len);
  td_jw_buf(w, key, &source);
  w->out->failed |= source.failed;
  td_buf_free(&source);
}

static void write_template(td_json_writer *w, const td_gguf *g, td_gguf_str name,
                           td_gguf_str text) {
  td_jw_begin_object(w, NULL);
  td_jw_str_len(w, "name", name.data, name.len);
  write_source(w, g, "template", text);
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
    if (has_own) write_source(w, g, "chat_template", text);
    return;
  }
  td_jw_begin_array(w, "chat_template");
  if (has_own) write_template(w, g, (td_gguf_str){.data = "default", .len = 7}, text);
  for (size_t i = 0; i < g->n_values; i++) {
    const td_gguf_str key = g->values[i].key;
    if (key.len <= n || memcmp(key.data, prefix, n) != 0) continue;
    if (!td_gguf_text(&g->values[i], &text)) continue;
    write_template(w, g, (td_gguf_str){.data = key.data + n, .len = key.len - n}, text);
  }
  td_jw_end_array(w);
}

td_status td_gguf_tokenizer_config(td_buf *out, const td_gguf *g, td_err *err) {
  td_json_writer w = TD_JSON_WRITER(out);
  td_jw_add(&w, "{'add_bos_token': %i", adds_bos(g));
  write_named(&w, "bos_token", bos_of(g));
  write_named(&w, "eos_token", named(g, "tokenizer.ggml.eos_token_id", usual_eos(g)));
  write_named(&w, "pad_token", named(g, "tokenizer.ggml.padding_token_id", -1));
  write_templates(&w, g);
  td_jw_end_object(&w);
  return td_buf_status(out, err);
}
