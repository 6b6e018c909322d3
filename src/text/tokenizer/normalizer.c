// src/text/tokenizer/normalizer.c - applies normalization steps to code points.
#include "text/tokenizer/normalizer.h"

#include <stdlib.h>
#include <string.h>

#include "base/json_parse.h"
#include "text/tokenizer/json.h"

typedef enum { NORMAL_FORM, PREPEND, REPLACE, STRIP } step_kind;

typedef struct {
  step_kind kind;
  td_normal_form form; // NORMAL_FORM
  td_regex *regex;     // REPLACE of a regular expression
  td_runes literal;    // REPLACE of a string
  td_runes text;       // PREPEND and REPLACE: text to insert
  bool left, right;    // STRIP
} norm_step;

// Limits on the code points per input byte (the longest decomposition has 4), and for short texts
// in total. Replacements in a hostile file could double a text in every step.
#define MAX_GROWTH 32
#define MIN_LIMIT  4096

struct td_norm {
  norm_step steps[TD_TOK_MAX_STEPS];
  size_t n_steps;
};

static td_status read_text(td_runes *runes, const cJSON *json, const char *key, td_err *err) {
  const char *text;
  td_status st = td_tok_need_str(json, key, &text, err);
  return st == TD_OK ? td_runes_decode(runes, text, strlen(text), NULL, err) : st;
}

static td_status read_replace(norm_step *step, const cJSON *json, td_err *err) {
  const cJSON *pattern = td_json_get(json, "pattern");
  td_status st = td_json_get(pattern, "String") ? read_text(&step->literal, pattern, "String", err)
                                                : td_tok_read_pattern(json, &step->regex, err);
  if (st != TD_OK) return st;
  if (!step->regex && !step->literal.n) return td_fail(err, TD_EUNSUPPORTED, "pattern is empty");
  return read_text(&step->text, json, "content", err);
}

static td_status read_step(void *owner, const cJSON *json, const char *type, td_err *err) {
  td_norm *norm = owner;
  if (norm->n_steps == TD_TOK_MAX_STEPS) return td_fail(err, TD_ELIMIT, "too many steps");
  norm_step *step = &norm->steps[norm->n_steps++];
  td_status st = TD_OK;
  if (strcmp(type, "NFC") == 0 || strcmp(type, "NFD") == 0) {
    step->kind = NORMAL_FORM;
    step->form = type[2] == 'C' ? TD_NFC : TD_NFD;
  } else if (strcmp(type, "Prepend") == 0) {
    step->kind = PREPEND;
    st = read_text(&step->text, json, "prepend", err);
  } else if (strcmp(type, "Replace") == 0) {
    step->kind = REPLACE;
    st = read_replace(step, json, err);
  } else if (strcmp(type, "Strip") == 0) {
    step->kind = STRIP;
    st = td_json_get_bool(json, "strip_left", &step->left, err);
    if (st == TD_OK) st = td_json_get_bool(json, "strip_right", &step->right, err);
  } else {
    st = td_fail(err, TD_EUNSUPPORTED, "this normalizer is not supported");
  }
  return st;
}

td_status td_norm_open(td_norm **out, const cJSON *json, td_err *err) {
  *out = NULL;
  td_norm *norm = calloc(1, sizeof *norm);
  if (!norm) return td_fail(err, TD_ENOMEM, "out of memory for the normalizer");
  td_status st = TD_OK;
  if (json) st = td_tok_each_step(json, "normalizers", read_step, norm, err);
  if (st != TD_OK) {
    td_norm_close(norm);
    return td_err_prefix(err, "normalizer");
  }
  *out = norm;
  return TD_OK;
}

void td_norm_close(td_norm *norm) {
  if (!norm) return;
  for (size_t i = 0; i < norm->n_steps; i++) {
    td_regex_close(norm->steps[i].regex);
    td_runes_free(&norm->steps[i].literal);
    td_runes_free(&norm->steps[i].text);
  }
  free(norm);
}

void td_norm_scratch_free(td_norm_scratch *s) {
  td_runes_free(&s->runes);
  td_runes_free(&s->spare);
  td_buf_free(&s->utf8);
  td_spans_free(&s->found);
}

bool td_norm_keeps(const td_norm *norm, const char *text, size_t len) {
  for (size_t i = 0; i < norm->n_steps; i++) {
    const norm_step *step = &norm->steps[i];
    if (step->kind != NORMAL_FORM || step->form != TD_NFC) return false;
  }
  return norm->n_steps == 0 || td_unicode_surely_composed(text, len);
}

// Checks that a text of n code points may grow by n_extra.
static td_status check_growth(const td_norm_scratch *s, size_t n, size_t n_extra, td_err *err) {
  if (n <= s->max_runes && n_extra <= s->max_runes - n) return TD_OK;
  return td_fail(err, TD_ELIMIT, "normalizer: its steps make a text more than %d times longer",
                 MAX_GROWTH);
}

static td_status prepend(td_norm_scratch *s, const td_runes *text, td_err *err) {
  size_t n = s->runes.n;
  if (!n || !text->n) return TD_OK;
  td_status st = check_growth(s, n, text->n, err);
  if (st == TD_OK) st = td_runes_reserve(&s->runes, text->n, err);
  if (st != TD_OK) return st;
  memmove(s->runes.r + text->n, s->runes.r, n * sizeof *s->runes.r);
  memcpy(s->runes.r, text->r, text->n * sizeof *text->r);
  s->runes.n += text->n;
  return TD_OK;
}

// Moves the code points of the next n_bytes of UTF-8 from in[*i..] to out, or drops them unless
// keep. Returns their combined flags.
static td_status take(const td_runes *in, size_t *i, size_t n_bytes, td_runes *out, bool keep,
                      uint32_t *flags, td_err *err) {
  size_t begin = *i;
  *flags = 0;
  while (n_bytes) {
    uint32_t c = TD_RUNE_CODE(in->r[*i]);
    *flags |= in->r[(*i)++] & TD_RUNE_LITERAL;
    n_bytes -= c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
  }
  return keep ? td_runes_add(out, in->r + begin, *i - begin, err) : TD_OK;
}

// Whether text[0..n) starts with pattern; *flags combines the flags of the code points it covers.
static bool stands_at(const uint32_t *text, size_t n, const td_runes *pattern, uint32_t *flags) {
  *flags = 0;
  if (n < pattern->n) return false;
  for (size_t i = 0; i < pattern->n; i++) {
    if (TD_RUNE_CODE(text[i]) != pattern->r[i]) return false;
    *flags |= text[i] & TD_RUNE_LITERAL;
  }
  return true;
}

static void swap_texts(td_norm_scratch *s) {
  td_runes swap = s->runes;
  s->runes = s->spare;
  s->spare = swap;
}

static td_status replace_literal(const norm_step *step, td_norm_scratch *s, td_err *err) {
  s->spare.n = 0;
  td_status st = TD_OK;
  for (size_t i = 0; i < s->runes.n && st == TD_OK;) {
    uint32_t flags;
    const uint32_t *text = s->runes.r + i;
    if (!stands_at(text, s->runes.n - i, &step->literal, &flags)) {
      st = td_runes_add(&s->spare, text, 1, err);
      i++;
      continue;
    }
    size_t put = s->spare.n;
    st = check_growth(s, put, step->text.n, err);
    if (st == TD_OK) st = td_runes_add(&s->spare, step->text.r, step->text.n, err);
    for (; put < s->spare.n; put++)
      s->spare.r[put] |= flags;
    i += step->literal.n;
  }
  swap_texts(s);
  return st;
}

// The replacement of a match is literal if any part of the match was.
static td_status replace(const norm_step *step, td_norm_scratch *s, td_regex_scratch *regex,
                         td_err *err) {
  td_buf_clear(&s->utf8);
  td_status st = td_runes_encode(&s->runes, &s->utf8, NULL, err);
  const char *text = td_buf_text(&s->utf8);
  if (st == TD_OK) st = td_regex_find_all(step->regex, regex, text, s->utf8.len, &s->found, err);
  s->spare.n = 0;
  size_t i = 0, pos = 0;
  uint32_t flags;
  for (size_t k = 0; k < s->found.n && st == TD_OK; k++) {
    td_span match = s->found.spans[k];
    st = take(&s->runes, &i, match.begin - pos, &s->spare, true, &flags, err);
    if (st == TD_OK)
      st = take(&s->runes, &i, match.end - match.begin, &s->spare, false, &flags, err);
    size_t put = s->spare.n;
    if (st == TD_OK) st = check_growth(s, put, step->text.n, err);
    if (st == TD_OK) st = td_runes_add(&s->spare, step->text.r, step->text.n, err);
    for (; put < s->spare.n; put++)
      s->spare.r[put] |= flags;
    pos = match.end;
  }
  if (st == TD_OK) st = take(&s->runes, &i, s->utf8.len - pos, &s->spare, true, &flags, err);
  swap_texts(s);
  return st;
}

static void strip(const norm_step *step, td_runes *text) {
  size_t begin = 0;
  while (step->left && begin < text->n && td_unicode_is_space(TD_RUNE_CODE(text->r[begin])))
    begin++;
  while (step->right && text->n > begin && td_unicode_is_space(TD_RUNE_CODE(text->r[text->n - 1])))
    text->n--;
  text->n -= begin;
  if (begin) memmove(text->r, text->r + begin, text->n * sizeof *text->r);
}

td_status td_norm_apply(const td_norm *norm, td_norm_scratch *s, td_regex_scratch *regex,
                        const char *text, size_t len, const td_spans *literal, td_buf *out,
                        td_spans *out_literal, td_err *err) {
  s->runes.n = 0;
  s->max_runes = len * MAX_GROWTH + MIN_LIMIT;
  td_status st = td_runes_decode(&s->runes, text, len, literal, err);
  for (size_t i = 0; i < norm->n_steps && st == TD_OK; i++) {
    const norm_step *step = &norm->steps[i];
    switch (step->kind) {
    case NORMAL_FORM: st = td_unicode_normalize(&s->runes, step->form, &s->spare, err); break;
    case PREPEND: st = prepend(s, &step->text, err); break;
    case REPLACE:
      st = step->regex ? replace(step, s, regex, err) : replace_literal(step, s, err);
      break;
    case STRIP: strip(step, &s->runes); break;
    }
  }
  return st == TD_OK ? td_runes_encode(&s->runes, out, out_literal, err) : st;
}
