// tests/unit/test_cost_text.c - the same as test_cost.c of conversations through templates and
// tokenizers, of what models write, and of HTTP.
// CTest: no-asan no-tsan
#include <stdlib.h>
#include <unistd.h>

#include "unit/cost_steps.h"

#include "api/calls/call_syntax.h"
#include "api/dialects/dialect.h"
#include "api/output_parser.h"
#include "base/json_parse.h"
#include "base/json_write.h"
#include "http/parser.h"
#include "support/folder.h"
#include "text/chat.h"
#include "text/roles.h"
#include "text/template.h"
#include "text/tokenizer/bytelevel.h"
#include "text/tokenizer/tokenizer.h"

// ---- conversations ------------------------------------------------------------------------------

// Folds for a template that takes nothing but a user and an assistant in turn.
static td_status run_fold(void *arg) {
  input *in = arg;
  static const td_roles none = {0};
  cJSON *vars;
  td_err err;
  td_status st = td_json_parse(&vars, td_buf_text(&in->text), in->text.len, TD_JSON_MAX_DEPTH,
                               &err);
  if (st == TD_OK && !td_roles_fold(&none, vars, NULL)) st = TD_ENOMEM;
  cJSON_Delete(vars);
  return st;
}

#define MESSAGES(list) "{~messages~:[" list "]}"

TEST(folds) {
  static const shape shapes[] = {
      {"users", run_fold, 0, MESSAGES("<*,{~role~:~user~,~content~:~a^~}*>"), 2000, TD_OK},
      {"systems", run_fold, 0, MESSAGES("<*,{~role~:~system~,~content~:~a^~}*>"), 2000, TD_OK},
      {"tools", run_fold, 0, MESSAGES("<*,{~role~:~tool~,~content~:~a^~}*>"), 2000, TD_OK},
      {"assistants", run_fold, 0,
       MESSAGES("<*,{~role~:~assistant~,~content~:~a^~,~reasoning_content~:~b^~,~tool_calls~:[{~id~"
                ":~^~}]}*>"),
       2000, TD_OK},
      {"empty assistants", run_fold, 0, MESSAGES("<*,{~role~:~assistant~,~content~:~~}*>"), 2000,
       TD_OK},
      {"turns", run_fold, 0,
       MESSAGES("<*,{~role~:~user~,~content~:~a^~},{~role~:~assistant~,~content~:~a^~}*>"), 1000,
       TD_OK},
      {"tools and users in turn", run_fold, 0,
       MESSAGES("<*,{~role~:~tool~,~content~:~a^~},{~role~:~user~,~content~:~a^~}*>"), 1000, TD_OK},
      {"parts in turn", run_fold, 0,
       MESSAGES("<*,{~role~:~user~,~content~:[]},{~role~:~tool~,~content~:~a^~}*>"), 1000, TD_OK},
  };
  judge_shapes(shapes, TD_COUNT(shapes));
}

// What templates do with a conversation.
static const char *const templates[] = {
    "{% for m in messages %}{{ '<' ~ m.role ~ '>' ~ m['content']|trim ~ '</>\\n' }}{% endfor %}",
    "{% set ns = namespace(s='', n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% if loop.first or messages[loop.index0 - 1].role != m.role %}{{ m.role }}{% endif %}"
    "{% if not loop.last and messages[loop.index0 + 1].role == 'tool' %}{% endif %}{% endfor %}",
    "{% for m in messages[::-1] %}{% for m in messages[-2:] %}{{ m.content }}{% endfor %}{% endfor "
    "%}",
    "{% for m in messages %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}"
    "{{ m.content|replace('a', 'bb') }}{% if '</think>' in m.content %}{% endif %}{% endfor %}",
    "{{ messages|tojson }}{{ messages|tojson(indent=2) }}",
    "{{ messages|map(attribute='content')|join('\\n') }}{{ "
    "messages|map(attribute='content')|sort|join }}"
    "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}"
    "{{ messages|map(attribute='content')|unique|list|length }}"
    "{{ messages|map(attribute='content')|max }}{{ messages|rejectattr('role')|list|length }}",
    "{% for m in messages %}{% for k, v in m.items() %}{{ k }}{{ v }}{% endfor %}{% endfor %}"
    "{% for k in messages[0]|dictsort %}{{ k }}{% endfor %}",
    "{{ messages[0].content|upper|lower|title|capitalize }}{{ messages[0].content|reverse }}"
    "{{ messages[0].content.strip() }}{{ messages[0].content|length }}{{ messages[0].content[1:-1] "
    "}}"
    "{{ messages[0].content|escape }}{{ messages[0].content|indent }}"
    "{{ messages[0].content.splitlines()|length }}{{ messages[0].content.count('a') }}",
    "{% set ns = namespace(s='') %}{% for m in messages %}{% set ns.s = ns.s + m.content %}{% "
    "endfor %}"
    "{{ ns.s }}",
};

enum { PLAIN, NEIGHBOURS, SLICES, SPLITS, TO_JSON, LISTS, ITEMS, STRINGS, GATHERED };

static td_status run_render(void *arg) {
  input *in = arg;
  const char *source = templates[in->with];
  cJSON *vars;
  td_template *tmpl = NULL;
  td_buf out = TD_BUF_INIT;
  td_spans typed = {0};
  td_err err;
  td_status st = td_json_parse(&vars, td_buf_text(&in->text), in->text.len, TD_JSON_MAX_DEPTH,
                               &err);
  if (st == TD_OK) st = td_template_open(&tmpl, source, strlen(source), &err);
  if (st == TD_OK) st = td_template_render(tmpl, vars, NULL, &out, &typed, &err);
  if (st != TD_OK) snprintf(in->why, sizeof in->why, "%s", err.msg);
  td_template_close(tmpl);
  td_buf_free(&out);
  td_spans_free(&typed);
  cJSON_Delete(vars);
  return st;
}

#define USERS   MESSAGES("<*,{~role~:~user~,~content~:~a^~}*>")
#define ONE(of) MESSAGES("{~role~:~user~,~content~:" of "}")

TEST(renders) {
  static const shape shapes[] = {
      {"plain", run_render, PLAIN, USERS, 1000, TD_OK},
      {"plain, a long text", run_render, PLAIN, ONE("~<* a\\n*>~"), 50000, TD_OK},
      {"blanks", run_render, PLAIN, ONE("~<* *>a<* *>~"), 50000, TD_OK},
      {"neighbours", run_render, NEIGHBOURS, USERS, 1000, TD_OK},
      {"slices", run_render, SLICES, USERS, 1000, TD_OK},
      {"splits", run_render, SPLITS, ONE("~<*</think>\\n\\na*>~"), 5000, TD_OK},
      {"almost splits", run_render, SPLITS, ONE("~<*</think*>~"), 5000, TD_OK},
      {"splits of messages", run_render, SPLITS, USERS, 1000, TD_OK},
      {"as JSON", run_render, TO_JSON, USERS, 1000, TD_OK},
      {"members as JSON", run_render, TO_JSON, ONE("{<*,~k^~:[^,1.5,null]*>}"), 1000, TD_OK},
      {"nested members as JSON", run_render, TO_JSON,
       ONE("[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[<*,1*>]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]"), 2000, TD_OK},
      {"characters as JSON", run_render, TO_JSON, ONE("~<*\\u0001\xC3\xA9<\\n*>~"), 3000, TD_OK},
      {"lists", run_render, LISTS, USERS, 1000, TD_OK},
      {"lists of one text", run_render, LISTS, MESSAGES("<*,{~role~:~user~,~content~:~a~}*>"), 1000,
       TD_OK},
      {"lists of texts alike", run_render, LISTS,
       MESSAGES("<*,{~role~:~user~,~content~:~aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa^~}*>"),
       1000, TD_OK},
      {"items", run_render, ITEMS, MESSAGES("{<*,~k^~:^*>}"), 2000, TD_OK},
      {"strings", run_render, STRINGS, ONE("~<*ab \\n<*>~"), 10000, TD_OK},
      {"strings of one letter", run_render, STRINGS, ONE("~<*a*>~"), 30000, TD_OK},
      {"strings of wide letters", run_render, STRINGS, ONE("~<*\xC3\x9F \xCE\xA3*>~"), 10000,
       TD_OK},
      {"gathered", run_render, GATHERED, USERS, 1000, TD_OK},
  };
  judge_shapes(shapes, TD_COUNT(shapes));
}

// ---- tokenizers ---------------------------------------------------------------------------------

#define TAIL      "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define SHORTENED "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define UPPER     "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER     "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define FRONT     "[^\\r\\n\\p{L}\\p{N}]?"

// Of GPT-2, Qwen, DeepSeek and gpt-oss, and without one: SentencePiece's.
static const char *const patterns[] = {
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
    SHORTENED "|" FRONT "\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" TAIL,
    "[!\"#$^&'()*+,\\-./"
    ":;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\\r\\n]*|" TAIL,
    FRONT UPPER "*" LOWER "+" SHORTENED "?|" FRONT UPPER "+" LOWER "*" SHORTENED
                "?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|" TAIL,
    NULL,
};

static td_tokenizer *tokenizers[TD_COUNT(patterns)];
static td_chat *chat;

// A vocabulary of bytes and of doubled "a", "ab" and blanks, as long as may be.
static void write_model(td_buf *out, const char *blank, bool is_bytes) {
  static const char *const units[] = {"a", "ab", "b"};
  int id = 256;
  td_buf merges = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(out), m = TD_JSON_WRITER(&merges);
  td_jw_begin_object(&w, NULL);
  td_jw_str(&w, "type", "BPE");
  td_jw_bool(&w, "byte_fallback", !is_bytes);
  td_jw_begin_object(&w, "vocab");
  for (int b = 0; b < 256; b++) {
    td_buf spelled = TD_BUF_INIT;
    const char byte = (char)b;
    if (is_bytes) td_bytelevel_spell(&spelled, &byte, 1);
    if (!is_bytes) td_buf_printf(&spelled, "<0x%02X>", b);
    td_jw_int(&w, td_buf_text(&spelled), b);
    td_buf_free(&spelled);
  }
  if (!is_bytes) {
    td_jw_int(&w, "a", id++);
    td_jw_int(&w, "b", id++);
    td_jw_int(&w, blank, id++);
  }
  td_jw_int(&w, "ab", id++);
  td_jw_begin_array(&m, NULL);
  td_jw_str(&m, NULL, "a b");
  for (size_t u = 0; u < 4; u++) {
    const char *unit = u < 3 ? units[u] : blank;
    td_buf text = TD_BUF_INIT, pair = TD_BUF_INIT;
    td_buf_str(&text, unit);
    for (int i = 0; i < 6; i++) {
      td_buf_clear(&pair);
      td_buf_printf(&pair, "%s %s", td_buf_text(&text), td_buf_text(&text));
      td_jw_str(&m, NULL, td_buf_text(&pair));
      td_buf twice = TD_BUF_INIT;
      td_buf_printf(&twice, "%s%s", td_buf_text(&text), td_buf_text(&text));
      td_buf_free(&text);
      text = twice;
      td_jw_int(&w, td_buf_text(&text), id++);
    }
    td_buf_free(&text);
    td_buf_free(&pair);
  }
  td_jw_end_array(&m);
  td_jw_end_object(&w);
  td_jw_raw(&w, "merges", td_buf_text(&merges));
  td_jw_end_object(&w);
  td_buf_free(&merges);
}

static void write_tokenizer(td_buf *out, const char *pattern) {
  td_json_writer w = TD_JSON_WRITER(out);
  td_buf model = TD_BUF_INIT;
  write_model(&model, pattern ? "\xC4\xA0" : "\xE2\x96\x81", pattern);
  td_jw_begin_object(&w, NULL);
  td_jw_raw(&w, "added_tokens",
            "[{\"id\":300,\"content\":\"<|im_end|>\",\"special\":true,\"normalized\":false},"
            "{\"id\":301,\"content\":\"<think>\",\"special\":false,\"normalized\":true,\"rstrip\":"
            "true}]");
  if (pattern) {
    td_jw_raw(&w, "normalizer", "{\"type\":\"NFC\"}");
    td_jw_begin_object(&w, "pre_tokenizer");
    td_jw_str(&w, "type", "Sequence");
    td_jw_begin_array(&w, "pretokenizers");
    td_jw_begin_object(&w, NULL);
    td_jw_str(&w, "type", "Split");
    td_jw_begin_object(&w, "pattern");
    td_jw_str(&w, "Regex", pattern);
    td_jw_end_object(&w);
    td_jw_str(&w, "behavior", "Isolated");
    td_jw_bool(&w, "invert", false);
    td_jw_end_object(&w);
    td_jw_raw(&w, NULL,
              "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":false,\"use_"
              "regex\":false}");
    td_jw_end_array(&w);
    td_jw_end_object(&w);
    td_jw_raw(&w, "decoder", "{\"type\":\"ByteLevel\"}");
  } else {
    td_jw_raw(
        &w, "normalizer",
        "{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Prepend\",\"prepend\":"
        "\"\xE2\x96\x81\"},"
        "{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"\xE2\x96\x81\"}]}");
    td_jw_raw(
        &w, "decoder",
        "{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Replace\",\"pattern\":{\"String\":"
        "\"\xE2\x96\x81\"},\"content\":\" \"},{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"},"
        "{\"type\":\"Strip\",\"content\":\" \",\"start\":1,\"stop\":0}]}");
  }
  td_jw_raw(&w, "model", td_buf_text(&model));
  td_jw_end_object(&w);
  td_buf_free(&model);
}

// With a template of which no thought is left.
static void open_chat(const td_buf *tokenizer) {
  static const char template[] = "{% for m in messages %}<|im_end|>{{ m.role }}"
                                 "{{ m.content.split('</think>')[-1] }}{% endfor %}";
  char folder[] = "/tmp/tandem_cost_XXXXXX", path[64];
  assert_non_null(mkdtemp(folder));
  const struct {
    const char *name, *text;
  } files[] = {{"tokenizer.json", td_buf_text(tokenizer)}, {"chat_template.jinja", template}};
  for (size_t i = 0; i < TD_COUNT(files); i++) {
    snprintf(path, sizeof path, "%s/%s", folder, files[i].name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(files[i].text, file);
    assert_int_equal(fclose(file), 0);
  }
  td_err err = {.msg = ""};
  if (td_chat_open(&chat, folder, &err) != TD_OK) fail_msg("%s", err.msg);
  td_test_remove_folder(folder);
}

int before_all(void **state) {
  (void)state;
  for (size_t i = 0; i < TD_COUNT(patterns); i++) {
    td_buf json = TD_BUF_INIT;
    td_err err;
    write_tokenizer(&json, patterns[i]);
    td_status st = td_tokenizer_open_json(&tokenizers[i], "cost", json.data, json.len, NULL, 0,
                                          &err);
    if (st != TD_OK) fail_msg("%s", err.msg);
    if (!i) open_chat(&json);
    td_buf_free(&json);
  }
  return 0;
}

int after_all(void **state) {
  (void)state;
  for (size_t i = 0; i < TD_COUNT(patterns); i++)
    td_tokenizer_close(tokenizers[i]);
  td_chat_close(chat);
  return 0;
}

// There, and back token by token.
static td_status run_encode(void *arg) {
  input *in = arg;
  const td_tokenizer *tok = tokenizers[in->with];
  td_token_ids ids = {.most = SIZE_MAX};
  td_buf text = TD_BUF_INIT;
  td_detok detok;
  td_err err;
  td_span span = {0, 1};
  td_spans literal = {.spans = &span, .n = 1, .cap = 1};
  td_detok_init(&detok, tok, true);
  td_status st = td_tokenizer_encode_spans(tok, in->text.data, in->text.len, &literal,
                                           TD_TOK_PARSE_SPECIAL, &ids, &err);
  for (size_t i = 0; i < ids.n && st == TD_OK; i++)
    st = td_detok_feed(&detok, ids.ids[i], &text, &err);
  if (st != TD_OK) snprintf(in->why, sizeof in->why, "%s", err.msg);
  td_detok_free(&detok);
  td_token_ids_free(&ids);
  td_buf_free(&text);
  return st;
}

TEST(encodings) {
  static const struct {
    const char *name, *pattern;
    size_t n;
  } texts[] = {
      {"words", "<*ab aab *>", 1500},
      {"one letter", "<*a*>", 10000},
      {"letters in turn", "<*ab*>", 5000},
      {"letters without merges", "<*xyz*>", 3000},
      {"capitals", "<*A*>", 10000},
      {"blanks", "<* *>", 10000},
      {"blanks before a word", "<* *>a", 10000},
      {"line feeds", "<*\n*>", 10000},
      {"blanks and line feeds", "<* \n*>a", 5000},
      {"tabs and blanks", "<*\t *>", 5000},
      {"digits", "<*1*>", 10000},
      {"signs", "<*!/*>", 5000},
      {"marks", "a<*\xCC\x81\xCC\xA3*>", 2000},
      {"marks alone", "<*\xCC\x81*>", 3000},
      {"Han", "<*\xE6\xBC\xA2*>", 3000},
      {"no UTF-8", "<*\xFF\xC3*>", 3000},
      {"apostrophes", "<*'*>", 5000},
      {"control tokens", "<*<|im_end|>*>", 1000},
      {"almost control tokens", "<*<|im_end|*>", 1000},
      {"angles", "<*<*>", 5000},
      {"tokens and blanks", "<*<think>  *>", 1000},
  };
  n_bad = 0;
  for (unsigned k = 0; k < TD_COUNT(patterns); k++) {
    for (size_t i = 0; i < TD_COUNT(texts); i++) {
      char name[64];
      snprintf(name, sizeof name, "tokenizer %u: %s", k, texts[i].name);
      judge_shape(&(shape){name, run_encode, k, texts[i].pattern, texts[i].n, TD_OK});
    }
  }
  assert_int_equal(n_bad, 0);
}

// A conversation to tokens, and again with its first messages' known.
static td_status run_prompt(void *arg) {
  input *in = arg;
  static const int32_t known_ids[] = {300, 97};
  const td_chat_known known = {.n_messages = 1, .ids = known_ids, .n_ids = 2, .end = -1};
  td_token_ids ids = {.most = SIZE_MAX};
  td_buf text = TD_BUF_INIT;
  td_err err;
  bool used;
  td_status st = td_chat_encode(chat, in->text.data, in->text.len, &ids, &text, &err);
  if (st == TD_OK) {
    st = td_chat_encode_known(chat, in->text.data, in->text.len, &known, &ids, &text, &used, &err);
  }
  if (st != TD_OK) snprintf(in->why, sizeof in->why, "%s", err.msg);
  td_token_ids_free(&ids);
  td_buf_free(&text);
  return st;
}

TEST(prompts) {
  static const shape shapes[] = {
      {"messages", run_prompt, 0, USERS, 1000, TD_OK},
      {"control tokens in a message", run_prompt, 0, ONE("~<*<|im_end|>*>~"), 1000, TD_OK},
      {"one that is not shown", run_prompt, 0,
       "{~continue_final_message~:true,~messages~:[{~role~:~user~,~content~:~<*aa*>~},"
       "{~role~:~assistant~,~content~:~<*a*></think>b~}]}",
       5000, TD_EINVAL},
      {"one that is continued", run_prompt, 0,
       "{~continue_final_message~:true,~messages~:[{~role~:~user~,~content~:~<*aa*>~},"
       "{~role~:~assistant~,~content~:~<*a*>b~}]}",
       5000, TD_OK},
  };
  judge_shapes(shapes, TD_COUNT(shapes));
}

// ---- output -------------------------------------------------------------------------------------

enum { IS_HARMONY = 1, THINKS = 2 };

// Byte by byte. Behind a line feed that the first line, of tools, ends with.
static td_status run_output(void *arg) {
  input *in = arg;
  const char *text = td_buf_text(&in->text), *begin = strchr(text, '\f');
  td_tool_params params = {0};
  td_err err;
  cJSON *tool = cJSON_ParseWithLength(text, begin ? (size_t)(begin - text) : 0);
  td_budget budget = {.steps = 1u << 24, .bytes = 16u << 20};
  td_status st = tool ? td_tool_params_add(&params, tool, &budget, &err) : TD_OK;
  td_tool_params_sort(&params);
  text = begin ? begin + 1 : text;
  const size_t len = in->text.len - (size_t)(text - in->text.data);
  td_output_parser parts = {.begins_in_reasoning = in->with & THINKS,
                            .parse_tool_calls = true,
                            .is_harmony = in->with & IS_HARMONY,
                            .id = 7,
                            .params = &params};
  for (size_t n = 1; n <= len && st == TD_OK; n++) {
    td_output_part part;
    bool found = true;
    while (found && st == TD_OK)
      st = td_output_parser_next(&parts, text, n, n < len ? TD_TEXT_GROWS : TD_TEXT_ENDED, &part,
                                 &found, &err);
  }
  td_output_parser_free(&parts);
  td_tool_params_free(&params);
  cJSON_Delete(tool);
  return st;
}

// Appends open ... close of calls or of keys, as the form has them; value is a pattern.
static void write_form(td_buf *out, const td_call_syntax *s, size_t n_calls, size_t n_keys,
                       const char *value, size_t n) {
  td_buf_str(
      out, "{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"properties\":{");
  for (size_t i = 0; i < n_keys; i++)
    td_buf_printf(out, "%s\"k%zu\":{\"type\":\"string\"}", i ? "," : "", i);
  td_buf_str(out, "}}}}\f");
  for (size_t c = 0; c < n_calls; c++) {
    td_buf_printf(out, "%sf", c && s->between ? s->between : s->open);
    if (s->index) td_buf_printf(out, ":%zu", c % 1000);
    td_buf_str(out, s->after_name);
    if (!s->key_open) td_buf_char(out, '{');
    for (size_t i = 0; i < n_keys; i++) {
      if (s->key_open) {
        td_buf_printf(out, "%sk%zu%s", s->key_open, i, s->key_close);
      } else {
        td_buf_printf(out, "%s\"k%zu\": \"", i ? ", " : "", i);
      }
      write_pattern(out, value, n);
      td_buf_str(out, s->key_open ? s->value_close : "\"");
      if (s->ends_by_key) td_buf_printf(out, "/k%zu>", i);
    }
    if (!s->key_open) td_buf_char(out, '}');
    if (!s->between || c + 1 == n_calls) td_buf_str(out, s->close);
  }
}

TEST(calls) {
  static const struct {
    const char *name;
    size_t n_calls, n_keys;
    const char *value;
    bool is_long; // the value grows
  } kinds[] = {
      {"calls", 100, 1, "a", false},       {"keys", 1, 200, "a", false},
      {"a value", 1, 1, "<*a*>", true},    {"line feeds", 1, 1, "<*\n*>", true},
      {"angles", 1, 1, "<*<*>", true},     {"ends of tags", 1, 1, "<*</*>", true},
      {"brackets", 1, 1, "<*]<]*>", true}, {"escapes", 1, 1, "<*\\n\\u00e9*>", true},
  };
  n_bad = 0;
  for (unsigned form = 0; form <= TD_CALL_HARMONY; form++) {
    const td_call_syntax *s = td_call_syntax_of_form((td_call_form)form);
    for (size_t k = 0; k < TD_COUNT(kinds); k++) {
      cost costs[2];
      char name[64];
      for (size_t i = 0; i < 2; i++) {
        const size_t grow = kinds[k].is_long ? 1 : 1 + i;
        input in = {.with = form == TD_CALL_HARMONY ? IS_HARMONY : 0};
        write_form(&in.text, s, kinds[k].n_calls > 1 ? kinds[k].n_calls * grow : 1,
                   kinds[k].n_keys > 1 ? kinds[k].n_keys * grow : 1, kinds[k].value, 2000u << i);
        costs[i] = cost_of(run_output, &in);
        n_bad += costs[i].st != TD_OK;
        td_buf_free(&in.text);
      }
      snprintf(name, sizeof name, "form %u: %s", form, kinds[k].name);
      judge(name, &costs[0], &costs[1]);
    }
  }
  assert_int_equal(n_bad, 0);
}

#define DSML                                                                                       \
  "<\xEF\xBD\x9C"                                                                                  \
  "DSML\xEF\xBD\x9C"

TEST(texts) {
  static const shape shapes[] = {
      {"text", run_output, 0, "<*a b\n*>", 5000, TD_OK},
      {"white space", run_output, 0, "<* *>", 5000, TD_OK},
      {"white space in text", run_output, 0, "a<* *>a", 5000, TD_OK},
      {"angles in text", run_output, 0, "<*<a*>", 5000, TD_OK},
      {"brackets in text", run_output, 0, "<*[]*>", 5000, TD_OK},
      {"thoughts", run_output, THINKS, "<*a b\n*></think>a", 5000, TD_OK},
      {"calls in thoughts", run_output, THINKS, "<*<tool_call>*></think>a", 500, TD_OK},
      {"calls in thoughts without an end", run_output, 0, "<think><*<tool_call>*>", 500, TD_OK},
      {"broken calls", run_output, 0, "<*<tool_call>x *>", 500, TD_OK},
      {"broken calls of two tags", run_output, 0, "<*<tool_call>\n{~name~: ~f~ <tool_call>*>", 300,
       TD_OK},
      {"opened calls", run_output, 0, "<*<tool_call>*>", 500, TD_OK},
      {"closed calls", run_output, 0, "<tool_call>{~name~:~f~}</tool_call><*</tool_call>*>", 500,
       TD_OK},
      {"sections", run_output, 0, "<*<|tool_calls_section_begin|>*>", 300, TD_OK},
      {"sections in turn", run_output, 0,
       "<*<|tool_calls_section_begin|><|tool_calls_section_end|>*>", 200, TD_OK},
      {"sections of nothing", run_output, 0, "<*<|tool_calls_section_begin|>x*>", 300, TD_OK},
      {"white space in a call", run_output, 0, "<tool_call><* *>", 5000, TD_OK},
      {"nested arguments", run_output, 0, "<tool_call>{~name~:~f~,~arguments~:{~a~:<*[*>", 3000,
       TD_OK},
      {"a quoted object", run_output, 0, "<tool_call>{~name~:~f~,~arguments~:~<*{\\~a\\~:1*>", 3000,
       TD_OK},
      {"elements in elements", run_output, 0,
       "]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=~f~>]<]minimax[>[<k><*]<]minimax[>[<a>*>",
       300, TD_OK},
      {"items in elements", run_output, 0,
       "]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=~f~>]<]minimax[>[<k>"
       "<*]<]minimax[>[<item>a]<]minimax[>[</item>*>]<]minimax[>[</k>]<]minimax[>[</invoke>"
       "]<]minimax[>[</tool_call>",
       200, TD_OK},
      {"unknown keys", run_output, 0,
       "{~function~:{~name~:~f~,~parameters~:{~properties~:{<*,~k^~:{}*>}}}}\f<tool_call>\n<"
       "function=f>"
       "\n<*<parameter=x^>\n1\n</parameter>\n*></function></tool_call>",
       200, TD_OK},
      {"keys in a value", run_output, 0,
       "{~function~:{~name~:~f~,~parameters~:{~properties~:{<*,~k^~:{}*>}}}}\f<tool_call>\n<"
       "function=f>"
       "\n<parameter=k0>\n<*<parameter=x^>\n*></parameter>\n</function></tool_call>",
       200, TD_OK},
      {"blanks behind a tag", run_output, 0,
       "<tool_call>\n<function=f>\n<parameter=k0>\n<*</parameter>    *></function></tool_call>",
       300, TD_OK},
      {"letters behind a tag", run_output, 0,
       "<tool_call>\n<function=f>\n<parameter=k0>\n<*</parameteraaaaaaaaaaaaaaaaaaaa*></function>",
       300, TD_OK},
      {"ids", run_output, 0,
       "<|tool_calls_section_begin|><*<|tool_call_begin|>functions.f:^<|tool_call_argument_begin|>{"
       "}"
       "<|tool_call_end|>*>",
       100, TD_OK},
      {"many ids", run_output, 0, "<*[TOOL_CALLS]f[CALL_ID]abcdefgh^[ARGS]{}*>", 2000, TD_OK},
      {"DSML", run_output, 0, "<*" DSML "function_calls>*>", 300, TD_OK},
      {"Harmony", run_output, IS_HARMONY,
       "<*<|channel|>analysis<|message|>a<|end|><|start|>assistant*>", 200, TD_OK},
      {"a header", run_output, IS_HARMONY, "<|channel|><*a*>", 5000, TD_OK},
      {"a recipient", run_output, IS_HARMONY, "<|channel|>commentary to=<*a*><|message|>{}", 5000,
       TD_OK},
      {"starts", run_output, IS_HARMONY, "<*<|start|>*>", 500, TD_OK},
  };
  judge_shapes(shapes, TD_COUNT(shapes));
}

// ---- streams ------------------------------------------------------------------------------------

enum { RESPONSES, CHUNKS, ANTHROPIC, OLLAMA, LLAMA };

// An answer of a token a byte, `$` being a control token, as a stream and then whole.
static td_status run_stream(void *arg) {
  input *in = arg;
  static const td_dialect *const dialects[] = {&td_dialect_responses, NULL, &td_dialect_messages,
                                               &td_dialect_ollama_chat, &td_dialect_completion};
  static const td_stops stops = {0};
  const td_dialect *dialect = dialects[in->with];
  td_answer answer;
  td_answer_piece piece;
  td_output_parser parts = {.parse_tool_calls = true, .id = 7};
  td_delta delta = {0};
  td_api_head head = {.is_chat = true, .id = "a", .model = "m", .tok = tokenizers[0]};
  td_api_usage usage = {0};
  td_api_timings timings = {0};
  td_dialect_state state = {.head = &head, .parts = &parts, .answer = &answer};
  td_dialect_end end = {"stop", &answer, &usage, &timings};
  td_buf out = TD_BUF_INIT;
  td_err err;
  td_status st = TD_OK;
  td_answer_init(&answer, tokenizers[0], &(td_answer_opts){.stops = &stops, .keep_tokens = true});
  if (dialect) dialect->begin(&out, &state, &usage);
  for (size_t i = 0; i <= in->text.len && st == TD_OK; i++) {
    const uint8_t byte = (uint8_t)in->text.data[i];
    const td_wire_token token = {.id = byte == '$' ? 300 : byte};
    st = i < in->text.len ? td_answer_add(&answer, &token, &err)
                          : td_answer_finish(&answer, false, &err);
    if (st != TD_OK || !td_answer_take(&answer, &piece)) continue;
    st = td_delta_gather(&delta, &parts, &answer, &err);
    state.piece = piece;
    if (dialect) {
      dialect->delta(&out, &state, &delta);
    } else {
      td_api_write_delta(&out, &head, 0, &answer, &piece, &parts, &delta, NULL);
    }
    td_delta_clear(&delta, &parts);
  }
  if (dialect) dialect->end(&out, &state, &end);
  td_dialect_state_free(&state);
  td_delta_free(&delta);
  td_output_parser_free(&parts);
  td_answer_free(&answer);
  td_buf_free(&out);
  return st;
}

TEST(streams) {
  static const struct {
    const char *name, *pattern;
    size_t n;
  } answers[] = {
      {"text", "<*a\n*>", 1000},
      {"thoughts", "<think><*a\n*></think>a", 1000},
      {"calls", "<*<tool_call>{~name~: ~f~, ~arguments~: {}}</tool_call>*>", 50},
      {"a call", "<tool_call>{~name~: ~f~, ~arguments~: {~a~: ~<*a*>~}}</tool_call>", 2000},
      {"control tokens", "a<*$*>", 3000},
      {"half a character", "<*\xC3*>", 2000},
  };
  n_bad = 0;
  for (unsigned k = RESPONSES; k <= LLAMA; k++) {
    for (size_t i = 0; i < TD_COUNT(answers); i++) {
      char name[64];
      snprintf(name, sizeof name, "stream %u: %s", k, answers[i].name);
      judge_shape(&(shape){name, run_stream, k, answers[i].pattern, answers[i].n, TD_OK});
    }
  }
  assert_int_equal(n_bad, 0);
}

// ---- HTTP ---------------------------------------------------------------------------------------

static td_status run_http(void *arg) {
  input *in = arg;
  const td_http_limits limits = {
      .max_line_bytes = 1 << 16, .max_head_bytes = 1 << 17, .max_body_bytes = 1 << 20};
  const char *bytes = td_buf_text(&in->text);
  td_http_parser parser;
  td_http_event event = TD_HTTP_MORE;
  td_http_parser_init(&parser, &limits);
  for (size_t at = 0, n, used; event != TD_HTTP_BAD && at < in->text.len; at += used) {
    n = in->with && in->with < in->text.len - at ? in->with : in->text.len - at;
    event = td_http_parser_feed(&parser, bytes + at, n, &used);
    if (event == TD_HTTP_DONE) td_http_parser_reset(&parser);
  }
  if (event == TD_HTTP_BAD) snprintf(in->why, sizeof in->why, "%s", parser.reason);
  td_http_parser_free(&parser);
  return event == TD_HTTP_BAD ? TD_EFORMAT : TD_OK;
}

TEST(http) {
  enum { WHOLE, BYTES };
#define GET  "GET / HTTP/1.1\r\nHost: a\r\n"
#define POST "POST / HTTP/1.1\r\nHost: a\r\n"
  static const shape shapes[] = {
      {"requests", run_http, WHOLE, "<*" GET "\r\n*>", 300, TD_OK},
      {"requests by bytes", run_http, BYTES, "<*" GET "\r\n*>", 300, TD_OK},
      {"a target", run_http, BYTES, "GET /<*%41*> HTTP/1.1\r\nHost: a\r\n\r\n", 5000, TD_OK},
      {"a long target", run_http, BYTES, "GET /<*a*> HTTP/1.1\r\nHost: a\r\n\r\n", 20000, TD_OK},
      {"headers", run_http, BYTES, GET "<*a: b\r\n*>\r\n", 40, TD_OK},
      {"too many headers", run_http, BYTES, GET "<*a: b\r\n*>\r\n", 2000, TD_EFORMAT},
      {"a long header", run_http, BYTES, GET "a: <*b*>\r\n\r\n", 20000, TD_OK},
      {"blanks in a header", run_http, BYTES, GET "a: b<* *>\r\n\r\n", 20000, TD_OK},
      {"blank lines", run_http, BYTES, "<*\r\n*>", 2000, TD_EFORMAT},
      {"a body", run_http, WHOLE, POST "Content-Length: 100000\r\n\r\n<*a*>", 20000, TD_OK},
      {"a body by bytes", run_http, BYTES, POST "Content-Length: 100000\r\n\r\n<*a*>", 20000,
       TD_OK},
      {"chunks of one byte", run_http, WHOLE,
       POST "Transfer-Encoding: chunked\r\n\r\n<*1\r\na\r\n*>0\r\n\r\n", 5000, TD_OK},
      {"the same by bytes", run_http, BYTES,
       POST "Transfer-Encoding: chunked\r\n\r\n<*1\r\na\r\n*>0\r\n\r\n", 5000, TD_OK},
      {"trailers", run_http, BYTES, POST "Transfer-Encoding: chunked\r\n\r\n0\r\n<*a: b\r\n*>\r\n",
       2000, TD_OK},
  };
  judge_shapes(shapes, TD_COUNT(shapes));
}
