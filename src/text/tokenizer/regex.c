// src/text/tokenizer/regex.c - compiles and matches patterns with PCRE2.
#include "text/tokenizer/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>

#include "base/utf8.h"
#include "text/tokenizer/oniguruma.h"
#include "text/unicode/unicode.h"

// Reasonable patterns stay far below these limits even on megabytes of the same letter.
#define MATCH_LIMIT     10000000u
#define HEAP_LIMIT_KIB  (64u << 10)
#define JIT_STACK_BYTES (16u << 20)
#define MAX_PATTERN     (64u << 10)

struct td_regex {
  pcre2_code *code;
  bool jit; // compiled to machine code
};

struct td_regex_scratch {
  pcre2_match_data *match;
  pcre2_match_context *context;
  pcre2_jit_stack *stack;
  td_buf stand_in; // copy of the text with stand-ins for newer code points
};

static td_status compile(td_regex *regex, const char *pattern, size_t len, td_err *err) {
  pcre2_compile_context *context = pcre2_compile_context_create(NULL);
  if (!context) return td_fail(err, TD_ENOMEM, "out of memory for a pattern");
  pcre2_set_newline(context, PCRE2_NEWLINE_LF);
  int code;
  PCRE2_SIZE at;
  regex->code = pcre2_compile((PCRE2_SPTR)pattern, len, PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE,
                              &code, &at, context);
  pcre2_compile_context_free(context);
  if (!regex->code) {
    PCRE2_UCHAR text[128] = "";
    pcre2_get_error_message(code, text, sizeof text);
    return td_fail(err, TD_EUNSUPPORTED, "%s", (char *)text);
  }
  regex->jit = pcre2_jit_compile(regex->code, PCRE2_JIT_COMPLETE) == 0;
  return TD_OK;
}

td_status td_regex_open(td_regex **out, const char *pattern, size_t len, bool literal,
                        td_err *err) {
  *out = NULL;
  if (len > MAX_PATTERN) return td_fail(err, TD_ELIMIT, "a pattern of %zu bytes", len);
  td_regex *regex = calloc(1, sizeof *regex);
  if (!regex) return td_fail(err, TD_ENOMEM, "out of memory for a pattern");
  td_buf text = TD_BUF_INIT;
  td_status st = TD_OK;
  if (literal) {
    td_pattern_quote(&text, pattern, len);
    st = td_buf_status(&text, err);
  } else {
    st = td_pattern_translate(&text, pattern, len, err);
  }
  if (st == TD_OK) st = compile(regex, td_buf_text(&text), text.len, err);
  td_buf_free(&text);
  if (st != TD_OK) {
    td_regex_close(regex);
    return st;
  }
  *out = regex;
  return TD_OK;
}

void td_regex_close(td_regex *regex) {
  if (!regex) return;
  pcre2_code_free(regex->code);
  free(regex);
}

td_regex_scratch *td_regex_scratch_new(void) {
  td_regex_scratch *s = calloc(1, sizeof *s);
  if (!s) return NULL;
  s->match = pcre2_match_data_create(1, NULL);
  s->context = pcre2_match_context_create(NULL);
  s->stack = pcre2_jit_stack_create(64u << 10, JIT_STACK_BYTES, NULL);
  if (!s->match || !s->context || !s->stack) {
    td_regex_scratch_free(s);
    return NULL;
  }
  pcre2_set_match_limit(s->context, MATCH_LIMIT);
  pcre2_set_heap_limit(s->context, HEAP_LIMIT_KIB);
  pcre2_jit_stack_assign(s->context, NULL, s->stack);
  return s;
}

void td_regex_scratch_free(td_regex_scratch *s) {
  if (!s) return;
  pcre2_match_data_free(s->match);
  pcre2_match_context_free(s->context);
  pcre2_jit_stack_free(s->stack);
  td_buf_free(&s->stand_in);
  free(s);
}

// PCRE2's return code for the first match at or after start. The text must be valid UTF-8.
static int match_at(const td_regex *regex, td_regex_scratch *s, const char *text, size_t len,
                    size_t start) {
  PCRE2_SPTR subject = (PCRE2_SPTR)text;
  if (regex->jit) {
    int rc = pcre2_jit_match(regex->code, subject, len, start, 0, s->match, s->context);
    if (rc != PCRE2_ERROR_JIT_STACKLIMIT) return rc;
  }
  return pcre2_match(regex->code, subject, len, start, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, s->match,
                     s->context);
}

static td_status fail_match(int rc, td_err *err) {
  PCRE2_UCHAR text[128] = "";
  pcre2_get_error_message(rc, text, sizeof text);
  td_status st = rc == PCRE2_ERROR_NOMEMORY ? TD_ENOMEM : TD_ELIMIT;
  return td_fail(err, st, "a pattern of tokenizer.json failed on this text: %s", (char *)text);
}

td_status td_regex_search_begin(td_regex_search *search, const td_regex *regex,
                                td_regex_scratch *scratch, td_buf *stand_in, const char *text,
                                size_t len, td_err *err) {
  if (!len) text = "";
  if (td_unicode_has_newer(text, len)) {
    td_buf_clear(stand_in);
    td_buf_add(stand_in, text, len);
    td_status st = td_buf_status(stand_in, err);
    if (st != TD_OK) return st;
    td_unicode_stand_in(stand_in->data, len);
    text = stand_in->data;
  }
  *search = (td_regex_search){
      .regex = regex, .scratch = scratch, .text = text, .len = len, .last_end = SIZE_MAX};
  return TD_OK;
}

td_status td_regex_search_next(td_regex_search *s, td_span *match, bool *is_found, td_err *err) {
  const PCRE2_SIZE *found = pcre2_get_ovector_pointer(s->scratch->match);
  *is_found = false;
  while (s->start <= s->len) {
    int rc = match_at(s->regex, s->scratch, s->text, s->len, s->start);
    if (rc == PCRE2_ERROR_NOMATCH) break;
    if (rc < 0) return fail_match(rc, err);
    size_t begin = found[0], end = found[1];
    if (begin == end && end == s->last_end) { // an empty match that touches the previous match
      uint32_t c;
      const char *rest = s->text + s->start;
      s->start += s->start < s->len ? (size_t)td_utf8_decode(rest, s->len - s->start, &c) : 1;
      continue;
    }
    *match = (td_span){begin, end};
    *is_found = true;
    s->start = s->last_end = end;
    return TD_OK;
  }
  s->start = s->len + 1;
  return TD_OK;
}

td_status td_regex_find_all(const td_regex *regex, td_regex_scratch *s, const char *text,
                            size_t len, td_spans *out, td_err *err) {
  td_regex_search search;
  td_span match;
  bool is_found = true;
  out->n = 0;
  td_status st = td_regex_search_begin(&search, regex, s, &s->stand_in, text, len, err);
  while (st == TD_OK) {
    st = td_regex_search_next(&search, &match, &is_found, err);
    if (st != TD_OK || !is_found) break;
    st = td_spans_add(out, match.begin, match.end, err);
  }
  return st;
}
