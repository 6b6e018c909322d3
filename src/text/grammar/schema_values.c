// src/text/grammar/schema_values.c - literals, strings and numbers of JSON Schema.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/json_write.h"
#include "base/str.h"
#include "text/grammar/regex.h"
#include "text/grammar/schema_impl.h"

#define MAX_DIGITS 16
#define MAX_BOUND  1e15

// ---- literals ----------------------------------------------------------------------------------

static void write_scalar(td_buf *out, const cJSON *value) {
  td_json_writer w = TD_JSON_WRITER(out);
  if (cJSON_IsNumber(value) && value->valuestring) {
    td_jw_raw(&w, NULL, value->valuestring);
  } else if (cJSON_IsNumber(value)) {
    td_jw_double(&w, NULL, value->valuedouble);
  } else if (cJSON_IsString(value)) {
    td_jw_str(&w, NULL, value->valuestring);
  } else if (cJSON_IsBool(value)) {
    td_jw_bool(&w, NULL, cJSON_IsTrue(value));
  } else {
    td_jw_null(&w, NULL);
  }
}

// Depth: that of a JSON document, TD_JSON_MAX_DEPTH.
static void write_value(td_buf *out, const cJSON *value) {
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
    write_value(out, item);
  }
  td_buf_char(out, is_object ? '}' : ']');
}

td_node td_schema_value(td_grammar_build *b, const cJSON *value) {
  td_buf text = TD_BUF_INIT;
  write_value(&text, value);
  if (text.failed) td_grammar_build_budget(b)->status = TD_ENOMEM;
  const td_node out = td_g_text(b, td_buf_text(&text), text.len);
  td_buf_free(&text);
  return out;
}

// ---- strings -----------------------------------------------------------------------------------

// Without "--", which has a meaning in the third place of a label.
#define LABEL "[A-Za-z0-9]{1,20} (\"-\" [A-Za-z0-9]{1,20}){0,2}"
#define HOST  LABEL " (\".\" " LABEL ")"
#define EMAIL "[A-Za-z0-9_+-]{1,32} (\".\" [A-Za-z0-9_+-]{1,32})? \"@\" " HOST "{1,4}"
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
    {"duration", "\"P\" (" DAYS " (\"T\" " HOURS ")? | \"T\" " HOURS " | " COUNT " \"W\")"},
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

static const char *find_format(const cJSON *format) {
  for (size_t i = 0; cJSON_IsString(format) && i < TD_COUNT(formats); i++) {
    if (strcmp(formats[i].name, format->valuestring) == 0) return formats[i].expression;
  }
  return NULL;
}

bool td_json_schema_bare(td_node *out, td_grammar_build *b, const cJSON *schema) {
  // These contain the character < or anything.
  static const char wide[] = "regex json-pointer relative-json-pointer";
  const cJSON *pattern = cJSON_GetObjectItemCaseSensitive(schema, "pattern");
  const cJSON *format = cJSON_GetObjectItemCaseSensitive(schema, "format");
  td_err ignored;
  if (cJSON_IsString(pattern)) {
    return td_g_regex(out, b, pattern->valuestring, strlen(pattern->valuestring),
                      TD_REGEX_IN_ELEMENT, &ignored) == TD_OK;
  }
  const char *expression = find_format(format);
  if (!expression || td_is_word(wide, format->valuestring)) return false;
  *out = td_g_gbnf(b, expression, NULL);
  return true;
}

td_status td_schema_string(td_schema_ctx *ctx, const cJSON *schema, td_node *out) {
  uint32_t min = 0, max = UINT32_MAX;
  td_node text;
  td_status st = td_schema_count(ctx, schema, "minLength", &min);
  if (st == TD_OK) st = td_schema_count(ctx, schema, "maxLength", &max);
  if (st != TD_OK) return st;
  const cJSON *pattern = td_schema_get(ctx, schema, "pattern");
  if (pattern && !cJSON_IsString(pattern)) return td_schema_bad(ctx, "pattern", "must be a string");
  const char *expression = find_format(td_schema_get(ctx, schema, "format"));
  if (pattern && expression) return td_schema_refuse(ctx, "pattern", "beside format");
  if ((pattern || expression) && max != UINT32_MAX) {
    return td_schema_refuse(ctx, "maxLength", "beside pattern or format");
  }
  if ((pattern && min > 0) || (expression && min > 1)) {
    return td_schema_refuse(ctx, "minLength", "beside pattern or format");
  }
  if (pattern) {
    td_err why;
    st = td_g_regex(&text, ctx->b, pattern->valuestring, strlen(pattern->valuestring),
                    TD_REGEX_IN_JSON, &why);
    if (td_grammar_build_status(ctx->b, ctx->err) != TD_OK) return ctx->err->code;
    if (st != TD_OK) return td_schema_refuse(ctx, "pattern", why.msg);
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

// ---- numbers -----------------------------------------------------------------------------------

static td_node digits(td_grammar_build *b, size_t min, size_t max) {
  return td_g_repeat(b, td_g_range(b, '0', '9'), (uint32_t)min, (uint32_t)max);
}

// Digit strings of one length, n <= MAX_DIGITS, between low and high.
static td_node digits_between(td_grammar_build *b, const char *low, const char *high, size_t n) {
  if (n == 0) return TD_NODE_EMPTY;
  char zeros[MAX_DIGITS + 1], nines[MAX_DIGITS + 1], from = low[0], to = high[0];
  memset(zeros, '0', sizeof zeros);
  memset(nines, '9', sizeof nines);
  const bool is_low = memcmp(low + 1, zeros, n - 1) == 0;
  const bool is_high = memcmp(high + 1, nines, n - 1) == 0;
  td_node below = TD_NODE_NEVER, above = TD_NODE_NEVER, within = TD_NODE_NEVER;
  if (from == to && !(is_low && is_high)) {
    return TD_G_SEQ(b, td_g_text(b, low, 1), digits_between(b, low + 1, high + 1, n - 1));
  }
  if (!is_low) {
    below = TD_G_SEQ(b, td_g_text(b, low, 1), digits_between(b, low + 1, nines, n - 1));
    from++;
  }
  if (!is_high) {
    above = TD_G_SEQ(b, td_g_text(b, high, 1), digits_between(b, zeros, high + 1, n - 1));
    to--;
  }
  if (from <= to) {
    within = TD_G_SEQ(b, td_g_range(b, (uint32_t)from, (uint32_t)to), digits(b, n - 1, n - 1));
  }
  return TD_G_ANY(b, below, within, above);
}

// Integers of [low, high], 0 <= low; high may be infinite.
static td_node naturals(td_grammar_build *b, double low, double high) {
  char first[32], last[32];
  const bool is_open = isinf(high);
  if (low > high) return TD_NODE_NEVER;
  const int n = snprintf(first, sizeof first, "%.0f", low);
  const int n_high = is_open ? n : snprintf(last, sizeof last, "%.0f", high);
  const size_t list = td_g_begin(b);
  for (int len = n; len <= n_high; len++) {
    char from[32], to[32];
    memset(from, '0', sizeof from);
    memset(to, '9', sizeof to);
    from[0] = '1';
    if (len == n) memcpy(from, first, (size_t)n);
    if (len == n_high && !is_open) memcpy(to, last, (size_t)n_high);
    td_g_add(b, digits_between(b, from, to, (size_t)len));
  }
  if (is_open && n < MAX_DIGITS) {
    td_g_add(b, TD_G_SEQ(b, td_g_range(b, '1', '9'), digits(b, (size_t)n, MAX_DIGITS - 1)));
  }
  return td_g_end_any(b, list);
}

typedef struct {
  double low, high; // may be infinite
  bool is_low_open, is_high_open;
} bounds;

// A number's text and what may follow it.
static td_node number_then(td_grammar_build *b, double value, const char *expression) {
  char text[32];
  snprintf(text, sizeof text, "%.0f", value);
  return TD_G_SEQ(b, td_g_str(b, text), td_g_gbnf(b, expression, NULL));
}

// Numbers with a fraction, 0 <= low.
static td_node reals(td_grammar_build *b, bounds of) {
  const size_t list = td_g_begin(b);
  const double first = of.is_low_open ? of.low + 1 : of.low, last = of.high - 1;
  if (first <= last || isinf(of.high)) {
    td_g_add(b, TD_G_SEQ(b, naturals(b, first, last), td_g_gbnf(b, "(\".\" [0-9]{1,16})?", NULL)));
  }
  if (of.is_low_open && of.low < of.high) {
    td_g_add(b, number_then(b, of.low, "\".\" [0-9]{0,15} [1-9]"));
  }
  if (!isinf(of.high) && !of.is_high_open && (of.low < of.high || !of.is_low_open)) {
    td_g_add(b, number_then(b, of.high, "(\".\" \"0\"{1,2})?"));
  }
  return td_g_end_any(b, list);
}

static td_node not_negative(td_grammar_build *b, bounds of, bool is_integer) {
  return is_integer ? naturals(b, of.low + of.is_low_open, of.high - of.is_high_open)
                    : reals(b, of);
}

static td_node numbers_between(td_grammar_build *b, bounds of, bool is_integer) {
  const bounds below = {.low = of.high < 0 ? -of.high : 0,
                        .high = -of.low,
                        .is_low_open = of.high < 0 ? of.is_high_open : true,
                        .is_high_open = of.is_low_open};
  td_node negative = TD_NODE_NEVER;
  if (of.low < 0) {
    negative = TD_G_SEQ(b, td_g_str(b, "-"), not_negative(b, below, is_integer));
    of.low = 0;
    of.is_low_open = false;
  }
  return of.high < 0 ? negative : TD_G_ANY(b, negative, not_negative(b, of, is_integer));
}

// One side's bound. In the standard's fourth draft exclusiveMinimum is a boolean beside minimum.
static td_status read_bound(td_schema_ctx *ctx, const cJSON *schema, bool is_low, bool is_integer,
                            double *bound, bool *is_open) {
  const char *keys[] = {is_low ? "minimum" : "maximum",
                        is_low ? "exclusiveMinimum" : "exclusiveMaximum"};
  for (int i = 0; i < 2; i++) {
    const cJSON *item = td_schema_get(ctx, schema, keys[i]);
    if (!item) continue;
    if (i == 1 && cJSON_IsBool(item)) {
      *is_open = cJSON_IsTrue(item);
      continue;
    }
    if (!cJSON_IsNumber(item)) return td_schema_bad(ctx, keys[i], "must be a number");
    double value = item->valuedouble + 0.0; // no negative zero
    if (fabs(value) > MAX_BOUND) return td_schema_refuse(ctx, keys[i], "beyond 1e15");
    bool is_whole = value == floor(value), open = i == 1;
    if (!is_whole && !is_integer) return td_schema_refuse(ctx, keys[i], "with a fraction");
    if (!is_whole) {
      value = is_low ? ceil(value) : floor(value);
      open = false;
    }
    bool is_tighter = is_low ? value > *bound : value < *bound;
    if (is_tighter || (value == *bound && open)) {
      *bound = value;
      *is_open = open;
    }
  }
  return TD_OK;
}

td_status td_schema_number(td_schema_ctx *ctx, const cJSON *schema, bool is_integer, td_node *out) {
  bounds b = {.low = -INFINITY, .high = INFINITY};
  td_status st = read_bound(ctx, schema, true, is_integer, &b.low, &b.is_low_open);
  if (st == TD_OK) st = read_bound(ctx, schema, false, is_integer, &b.high, &b.is_high_open);
  const cJSON *multiple = td_schema_get(ctx, schema, "multipleOf");
  const bool is_plain = cJSON_IsNumber(multiple) && multiple->valuedouble == 1 && is_integer;
  if (st == TD_OK && multiple && !is_plain) st = td_schema_refuse(ctx, "multipleOf", NULL);
  if (st != TD_OK) return st;
  if (isinf(b.low) && isinf(b.high)) {
    *out = is_integer ? ctx->json->integer : ctx->json->number;
  } else if (b.low > b.high || (b.low == b.high && (b.is_low_open || b.is_high_open))) {
    *out = TD_NODE_NEVER;
  } else {
    *out = numbers_between(ctx->b, b, is_integer);
  }
  return TD_OK;
}
