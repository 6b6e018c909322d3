// src/text/grammar/schema_values.c - literals and strings of JSON Schema.
#include <string.h>

#include "base/json_write.h"
#include "base/str.h"
#include "text/grammar/regex.h"
#include "text/grammar/schema_impl.h"

// ---- literals ----------------------------------------------------------------------------------

static void write_scalar(td_buf *out, const cJSON *value) {
  td_json_writer w = TD_JSON_WRITER(out);
  if (cJSON_IsNumber(value) && value->valuestring)
    td_jw_raw(&w, NULL, value->valuestring);
  else if (cJSON_IsNumber(value))
    td_jw_double(&w, NULL, value->valuedouble);
  else if (cJSON_IsString(value))
    td_jw_str(&w, NULL, value->valuestring);
  else if (cJSON_IsBool(value))
    td_jw_bool(&w, NULL, cJSON_IsTrue(value));
  else
    td_jw_null(&w, NULL);
}

// Depth: that of a JSON document, TD_JSON_MAX_DEPTH.
void td_schema_write_value(td_buf *out, const cJSON *value) {
  const bool is_object = cJSON_IsObject(value);
  if (!is_object && !cJSON_IsArray(value)) {
    write_scalar(out, value);
    return;
  }
  td_buf_char(out, is_object ? '{' : '[');
  for (const cJSON *item = value->child; item; item = item->next) {
    if (item != value->child) td_buf_str(out, ", ");
    if (is_object) {
      td_json_quote(out, item->string, strlen(item->string));
      td_buf_str(out, ": ");
    }
    td_schema_write_value(out, item);
  }
  td_buf_char(out, is_object ? '}' : ']');
}

td_node td_schema_value(td_grammar_build *b, const cJSON *value) {
  td_buf text = TD_BUF_INIT;
  td_schema_write_value(&text, value);
  if (text.failed) td_grammar_build_budget(b)->status = TD_ENOMEM;
  const td_node out = td_g_text(b, td_buf_text(&text), text.len);
  td_buf_free(&text);
  return out;
}

// ---- strings -----------------------------------------------------------------------------------

// Without "--", which has a meaning in the third place of a label.
#define LABEL "[A-Za-z0-9]{1,20} (\"-\" [A-Za-z0-9]{1,20}){0,2}"
#define HOST  LABEL " (\".\" " LABEL ")"
#define EMAIL                                                                                      \
  "[A-Za-z0-9_+-]{1,32} (\".\" [A-Za-z0-9_+-]{1,32})? \"@\" (" LABEL " \".\"){1,4} [A-Za-z]{2,20}"
#define URI                                                                                        \
  "[a-z] [a-z0-9+.-]{0,15} \"://\" " HOST "{0,3} (\":\" [0-9]{1,4})? "                             \
  "(\"/\" [A-Za-z0-9._~-]*)* (\"?\" [A-Za-z0-9._~=&-]*)? (\"#\" [A-Za-z0-9._~-]*)?"
#define POINTER "(\"/\" ([^~/\"\\\\\\x00-\\x1F] | \"~\" [01])*)*"
#define DATE                                                                                       \
  "[0-9]{4} \"-\" ((\"0\" [13578] | \"1\" [02]) \"-\" (\"0\" [1-9] | [12] [0-9] | \"3\" [01]) | "  \
  "(\"0\" [469] | \"11\") \"-\" (\"0\" [1-9] | [12] [0-9] | \"30\") | "                            \
  "\"02-\" (\"0\" [1-9] | \"1\" [0-9] | \"2\" [0-8]))"
#define HOUR "([01] [0-9] | \"2\" [0-3])"
#define TIME                                                                                       \
  HOUR " \":\" [0-5] [0-9] \":\" [0-5] [0-9] (\".\" [0-9]{1,9})? (\"Z\" | [+-] " HOUR              \
       " \":\" [0-5] [0-9])"
#define OCTET "(\"25\" [0-5] | \"2\" [0-4] [0-9] | \"1\" [0-9] [0-9] | [1-9]? [0-9])"
#define COUNT "[0-9]{1,6}"
#define DAYS                                                                                       \
  "(" COUNT " \"Y\" (" COUNT " \"M\" (" COUNT " \"D\")?)? | " COUNT " \"M\" (" COUNT               \
  " \"D\")? | " COUNT " \"D\")"
#define HOURS                                                                                      \
  "(" COUNT " \"H\" (" COUNT " \"M\" (" COUNT " \"S\")?)? | " COUNT " \"M\" (" COUNT               \
  " \"S\")? | " COUNT " \"S\")"
#define DURATION "\"P\" (" DAYS " (\"T\" " HOURS ")? | \"T\" " HOURS " | " COUNT " \"W\")"

// Regular expressions of plain characters, \\d and the like, sets, and groups that are not nested.
#define ATOM                                                                                       \
  "([a-zA-Z0-9 _@%&~:;,<>=!#-] | \"\\\\\\\\\" [dDwWsS.] | \".\" | "                                \
  "\"[\" \"^\"? [a-zA-Z0-9_]{1,16} \"]\") [*+?]?"
#define ATOMS "(" ATOM ")+"
#define REGEX "\"^\"? (" ATOM " | \"(\" " ATOMS " (\"|\" " ATOMS ")* \")\" [*+?]?)+ \"$\"?"

// What each format generates. All of it is valid; not all that is valid is generated.
static const struct {
  const char *name, *expression;
} formats[] = {
    {"date", DATE},
    {"time", TIME},
    {"date-time", DATE " \"T\" " TIME},
    {"duration", DURATION},
    {"uuid", "[0-9a-fA-F]{8} \"-\" ([0-9a-fA-F]{4} \"-\"){3} [0-9a-fA-F]{12}"},
    {"email", EMAIL},
    {"idn-email", EMAIL},
    {"hostname", HOST "{0,3}"},
    {"idn-hostname", HOST "{0,3}"},
    {"ipv4", OCTET " (\".\" " OCTET "){3}"},
    {"ipv6", "[0-9a-f]{1,4} (\":\" [0-9a-f]{1,4}){7}"},
    {"uri", URI},
    {"uri-reference", URI},
    {"uri-template", URI},
    {"iri", URI},
    {"iri-reference", URI},
    {"regex", REGEX},
    {"json-pointer", POINTER},
    {"relative-json-pointer", "(\"0\" | [1-9] [0-9]{0,3}) (\"#\" | " POINTER ")"},
};

// Patterns of libraries whose look-arounds and properties no grammar says: zod's of an email, a
// duration and emoji, pydantic's of a Decimal. All that the expression generates satisfies them.
static const struct {
  const char *pattern, *expression;
} patterns[] = {
    {"^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-"
     "Z"
     "a-z]{2,}$",
     EMAIL},
    {"^P(?:(\\d+W)|(?!.*W)(?=\\d|T\\d)(\\d+Y)?(\\d+M)?(\\d+D)?(T(?=\\d)(\\d+H)?(\\d+M)?(\\d+([.,]"
     "\\d+)?S)?)?)$",
     DURATION},
    {"^(\\p{Extended_Pictographic}|\\p{Emoji_Component})+$", "[\\U0001F600-\\U0001F64F]{1,8}"},
    {"^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$", "\"-\"? [0-9]{1,16} (\".\" [0-9]{1,9})?"},
};

// The expression of a known pattern, or without a pattern of a format; NULL: there is none.
static const char *find_expression(const cJSON *pattern, const cJSON *format) {
  for (size_t i = 0; cJSON_IsString(pattern) && i < TD_COUNT(patterns); i++)
    if (strcmp(patterns[i].pattern, pattern->valuestring) == 0) return patterns[i].expression;
  for (size_t i = 0; !pattern && cJSON_IsString(format) && i < TD_COUNT(formats); i++)
    if (strcmp(formats[i].name, format->valuestring) == 0) return formats[i].expression;
  return NULL;
}

bool td_json_schema_bare(td_node *out, td_grammar_build *b, const cJSON *schema) {
  // These contain the character < or anything.
  static const char wide[] = "regex json-pointer relative-json-pointer";
  const cJSON *pattern = cJSON_GetObjectItemCaseSensitive(schema, "pattern");
  const cJSON *format = cJSON_GetObjectItemCaseSensitive(schema, "format");
  const char *expression = find_expression(pattern, format);
  td_err ignored;
  if (cJSON_IsString(pattern) && !expression) {
    return td_g_regex(out, b, pattern->valuestring, strlen(pattern->valuestring),
                      TD_REGEX_IN_ELEMENT, &ignored) == TD_OK;
  }
  if (!expression || (!pattern && td_is_word(wide, format->valuestring))) return false;
  *out = td_g_gbnf(b, expression, NULL);
  return true;
}

bool td_schema_is_plain_string(const cJSON *schema) {
  static const char known[] = "type pattern format minLength maxLength title description $comment";
  const cJSON *type = cJSON_GetObjectItemCaseSensitive(schema, "type");
  if (type && !(cJSON_IsString(type) && strcmp(type->valuestring, "string") == 0)) return false;
  for (const cJSON *m = schema->child; m; m = m->next)
    if (!td_is_word(known, m->string)) return false;
  return true;
}

td_status td_schema_string(td_schema_ctx *ctx, const cJSON *schema, td_node *out) {
  uint32_t min = 0, max = UINT32_MAX;
  td_node text;
  td_status st = td_schema_count(ctx, schema, "minLength", &min);
  if (st == TD_OK) st = td_schema_count(ctx, schema, "maxLength", &max);
  if (st != TD_OK) return st;
  const cJSON *pattern = td_schema_get(ctx, schema, "pattern");
  const cJSON *format = td_schema_get(ctx, schema, "format");
  if (pattern && !cJSON_IsString(pattern)) return td_schema_bad(ctx, "pattern", "must be a string");
  const char *expression = find_expression(pattern, format);
  td_err why;
  if (expression) pattern = NULL;
  if (pattern) {
    st = td_g_regex(&text, ctx->b, pattern->valuestring, strlen(pattern->valuestring),
                    TD_REGEX_IN_JSON, &why);
    if (td_grammar_build_status(ctx->b, ctx->err) != TD_OK) return ctx->err->code;
    if (st != TD_OK) {
      st = td_schema_leave_out(ctx, "pattern", why.msg);
      pattern = NULL;
      expression = find_expression(NULL, format); // which libraries mean by their pattern
    }
  }
  if (st == TD_OK && (pattern || expression) && max != UINT32_MAX)
    st = td_schema_leave_out(ctx, "maxLength", "beside pattern or format");
  if (st == TD_OK && ((pattern && min > 0) || (expression && min > 1)))
    st = td_schema_leave_out(ctx, "minLength", "beside pattern or format");
  if (st != TD_OK) return st;
  if (pattern) {
    // text is the expression's
  } else if (expression) {
    text = td_g_gbnf(ctx->b, expression, NULL);
  } else if (max == UINT32_MAX && min == 0) {
    *out = ctx->json->string;
    return TD_OK;
  } else {
    text = td_g_repeat(ctx->b, ctx->json->character, min, max);
  }
  *out = td_g_gbnf(ctx->b, "\"\\\"\" $0 \"\\\"\"", &text);
  return TD_OK;
}
