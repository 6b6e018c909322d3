// src/text/grammar/schema_values.c - literals, strings and numbers of JSON Schema.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json_parse.h"
#include "base/json_write.h"
#include "base/str.h"
#include "text/grammar/regex.h"
#include "text/grammar/schema_impl.h"

#define MAX_DIGITS 16
#define MAX_BOUND  1e15

// ---- literals ----------------------------------------------------------------------------------

void td_schema_write_literal(td_buf *out, const char *text, size_t len) {
  td_buf_char(out, '"');
  for (size_t i = 0; i < len; i++) {
    unsigned char c = (unsigned char)text[i];
    if (c == '"' || c == '\\') {
      td_buf_printf(out, "\\%c", c);
    } else if (c < 0x20 || c == 0x7F) {
      td_buf_printf(out, "\\x%02X", c);
    } else {
      td_buf_char(out, (char)c);
    }
  }
  td_buf_char(out, '"');
}

static void write_scalar(td_buf *out, const cJSON *value) {
  td_buf text = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&text);
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
  td_schema_write_literal(out, td_buf_text(&text), text.len);
  out->failed |= text.failed;
  td_buf_free(&text);
}

// On one line.
void td_schema_write_value(td_buf *out, const cJSON *value) {
  bool is_object = cJSON_IsObject(value);
  if (!is_object && !cJSON_IsArray(value)) {
    write_scalar(out, value);
    return;
  }
  td_buf_str(out, is_object ? "\"{\" " : "\"[\" ");
  for (const cJSON *item = value->child; item; item = item->next) {
    if (item != value->child) td_buf_str(out, "\", \" ");
    if (is_object) {
      cJSON key = {.type = cJSON_String, .valuestring = item->string};
      write_scalar(out, &key);
      td_buf_str(out, " \": \" ");
    }
    td_schema_write_value(out, item);
    td_buf_char(out, ' ');
  }
  td_buf_str(out, is_object ? "\"}\"" : "\"]\"");
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

static const char *find_format(const char *name) {
  for (size_t i = 0; i < TD_COUNT(formats); i++) {
    if (strcmp(formats[i].name, name) == 0) return formats[i].expression;
  }
  return NULL;
}

bool td_json_schema_write_bare(td_buf *out, const cJSON *schema) {
  // These contain the character < or anything.
  static const char wide[] = "regex json-pointer relative-json-pointer";
  const cJSON *pattern = td_json_get(schema, "pattern"), *format = td_json_get(schema, "format");
  td_err ignored;
  if (cJSON_IsString(pattern)) {
    td_buf text = TD_BUF_INIT;
    const td_status st = td_regex_to_gbnf(&text, pattern->valuestring, strlen(pattern->valuestring),
                                          TD_REGEX_IN_ELEMENT, &ignored);
    if (st == TD_OK) td_buf_add(out, text.data, text.len);
    td_buf_free(&text);
    return st == TD_OK;
  }
  const char *expression = cJSON_IsString(format) ? find_format(format->valuestring) : NULL;
  if (expression && td_is_word(wide, format->valuestring)) return false;
  if (expression) td_buf_printf(out, "(%s)", expression);
  return expression != NULL;
}

td_status td_schema_write_string(const td_schema_ctx *ctx, const cJSON *schema, td_buf *out) {
  uint32_t min = 0, max = UINT32_MAX;
  td_status st = td_schema_count(ctx, schema, "minLength", &min);
  if (st == TD_OK) st = td_schema_count(ctx, schema, "maxLength", &max);
  if (st != TD_OK) return st;
  const cJSON *pattern = td_json_get(schema, "pattern"), *format = td_json_get(schema, "format");
  if (pattern && !cJSON_IsString(pattern)) return td_schema_bad(ctx, "pattern", "must be a string");
  const char *expression = cJSON_IsString(format) ? find_format(format->valuestring) : NULL;
  if (pattern && expression) return td_schema_refuse(ctx, "pattern", "beside format");
  if ((pattern || expression) && max != UINT32_MAX) {
    return td_schema_refuse(ctx, "maxLength", "beside pattern or format");
  }
  if ((pattern && min > 0) || (expression && min > 1)) {
    return td_schema_refuse(ctx, "minLength", "beside pattern or format");
  }
  td_buf_str(out, "\"\\\"\" (");
  if (pattern) {
    td_err why;
    st = td_regex_to_gbnf(out, pattern->valuestring, strlen(pattern->valuestring), TD_REGEX_IN_JSON,
                          &why);
    if (st == TD_ENOMEM) return td_fail(ctx->err, st, "%s", why.msg);
    if (st != TD_OK) return td_schema_refuse(ctx, "pattern", why.msg);
  } else if (expression) {
    td_buf_str(out, expression);
  } else if (max == UINT32_MAX) {
    td_buf_printf(out, min ? "json-char{%u,}" : "json-char*", min);
  } else if (max < min) {
    td_buf_str(out, "[]");
  } else {
    td_buf_printf(out, "json-char{%u,%u}", min, max);
  }
  td_buf_str(out, ") \"\\\"\"");
  return TD_OK;
}

// ---- numbers -----------------------------------------------------------------------------------

// Digit strings of one length between low and high.
static void write_digits(td_buf *out, const char *low, const char *high, size_t n) {
  if (n == 0) {
    td_buf_str(out, "\"\"");
    return;
  }
  char zeros[MAX_DIGITS + 1], nines[MAX_DIGITS + 1];
  memset(zeros, '0', sizeof zeros);
  memset(nines, '9', sizeof nines);
  bool is_low = memcmp(low + 1, zeros, n - 1) == 0, is_high = memcmp(high + 1, nines, n - 1) == 0;
  if (is_low && is_high) {
    td_buf_printf(out, "[%c-%c] [0-9]{%zu}", low[0], high[0], n - 1);
    return;
  }
  if (low[0] == high[0]) {
    td_buf_printf(out, "\"%c\" (", low[0]);
    write_digits(out, low + 1, high + 1, n - 1);
    td_buf_char(out, ')');
    return;
  }
  char from = low[0], to = high[0];
  if (!is_low) {
    td_buf_printf(out, "\"%c\" (", from++);
    write_digits(out, low + 1, nines, n - 1);
    td_buf_str(out, ") | ");
  }
  if (!is_high) to--;
  if (from <= to) td_buf_printf(out, "[%c-%c] [0-9]{%zu}", from, to, n - 1);
  if (is_high) return;
  if (from <= to) td_buf_str(out, " | ");
  td_buf_printf(out, "\"%c\" (", high[0]);
  write_digits(out, zeros, high + 1, n - 1);
  td_buf_char(out, ')');
}

// Integers of [low, high], 0 <= low; high may be infinite. In parentheses.
static void write_naturals(td_buf *out, double low, double high) {
  char a[32], b[32];
  bool is_open = isinf(high);
  td_buf_char(out, '(');
  if (low > high) {
    td_buf_str(out, "[])");
    return;
  }
  int n = snprintf(a, sizeof a, "%.0f", low);
  int n_high = is_open ? n : snprintf(b, sizeof b, "%.0f", high);
  for (int len = n; len <= n_high; len++) {
    char from[32], to[32];
    memset(from, '0', sizeof from);
    memset(to, '9', sizeof to);
    from[0] = '1';
    if (len == n) memcpy(from, a, (size_t)n);
    if (len == n_high && !is_open) memcpy(to, b, (size_t)n_high);
    if (len > n) td_buf_str(out, " | ");
    write_digits(out, from, to, (size_t)len);
  }
  if (is_open && n < MAX_DIGITS) {
    td_buf_printf(out, " | [1-9] [0-9]{%d,%d}", n, MAX_DIGITS - 1);
  }
  td_buf_char(out, ')');
}

typedef struct {
  double low, high; // may be infinite
  bool is_low_open, is_high_open;
} bounds;

#define FRACTION "(\".\" [0-9]{1,16})?"

// Numbers with a fraction, 0 <= low. In parentheses.
static void write_reals(td_buf *out, bounds b) {
  td_buf_str(out, "([]");
  double first = b.is_low_open ? b.low + 1 : b.low, last = b.high - 1;
  if (first <= last || isinf(b.high)) {
    td_buf_str(out, " | ");
    write_naturals(out, first, last);
    td_buf_str(out, " " FRACTION);
  }
  if (b.is_low_open && b.low < b.high) {
    td_buf_printf(out, " | \"%.0f.\" [0-9]{0,15} [1-9]", b.low);
  }
  if (!isinf(b.high) && !b.is_high_open && (b.low < b.high || !b.is_low_open)) {
    td_buf_printf(out, " | \"%.0f\" (\".\" \"0\"{1,2})?", b.high);
  }
  td_buf_char(out, ')');
}

static void write_range(td_buf *out, bounds b, bool is_integer) {
  bounds below = {.low = b.high < 0 ? -b.high : 0,
                  .high = -b.low,
                  .is_low_open = b.high < 0 ? b.is_high_open : true,
                  .is_high_open = b.is_low_open};
  if (b.low < 0) {
    td_buf_str(out, "\"-\" ");
    if (is_integer) {
      write_naturals(out, below.low + below.is_low_open, below.high - below.is_high_open);
    } else {
      write_reals(out, below);
    }
  }
  if (b.high < 0) return;
  if (b.low < 0) {
    td_buf_str(out, " | ");
    b.low = 0;
    b.is_low_open = false;
  }
  if (is_integer) {
    write_naturals(out, b.low + b.is_low_open, b.high - b.is_high_open);
  } else {
    write_reals(out, b);
  }
}

// One side's bound. In the standard's fourth draft exclusiveMinimum is a boolean beside minimum.
static td_status read_bound(const td_schema_ctx *ctx, const cJSON *schema, bool is_low,
                            bool is_integer, double *bound, bool *is_open) {
  const char *keys[] = {is_low ? "minimum" : "maximum",
                        is_low ? "exclusiveMinimum" : "exclusiveMaximum"};
  for (int i = 0; i < 2; i++) {
    const cJSON *item = td_json_get(schema, keys[i]);
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

td_status td_schema_write_number(const td_schema_ctx *ctx, const cJSON *schema, bool is_integer,
                                 td_buf *out) {
  bounds b = {.low = -INFINITY, .high = INFINITY};
  td_status st = read_bound(ctx, schema, true, is_integer, &b.low, &b.is_low_open);
  if (st == TD_OK) st = read_bound(ctx, schema, false, is_integer, &b.high, &b.is_high_open);
  const cJSON *multiple = td_json_get(schema, "multipleOf");
  bool is_plain = cJSON_IsNumber(multiple) && multiple->valuedouble == 1 && is_integer;
  if (st == TD_OK && multiple && !is_plain) st = td_schema_refuse(ctx, "multipleOf", NULL);
  if (st != TD_OK) return st;
  if (isinf(b.low) && isinf(b.high)) {
    td_buf_str(out, is_integer ? "json-integer" : "json-number");
  } else if (b.low > b.high || (b.low == b.high && (b.is_low_open || b.is_high_open))) {
    td_buf_str(out, "[]");
  } else {
    td_buf_char(out, '(');
    write_range(out, b, is_integer);
    td_buf_char(out, ')');
  }
  return TD_OK;
}
