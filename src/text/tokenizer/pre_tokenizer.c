// src/text/tokenizer/pre_tokenizer.c - splits text into words, step by step.
#include "text/tokenizer/pre_tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "base/json_parse.h"
#include "base/utf8.h"
#include "text/tokenizer/json.h"

// GPT-2's word pattern.
#define GPT2_PATTERN                                                                               \
  "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

// What happens to matches (the delimiters).
typedef enum { ISOLATED, REMOVED, MERGED_WITH_PREVIOUS, MERGED_WITH_NEXT, CONTIGUOUS } behavior;

typedef enum { PREPEND_NEVER, PREPEND_FIRST, PREPEND_ALWAYS } prepend_scheme;

typedef struct {
  td_regex *regex; // NULL: this step does not split
  behavior behavior;
  bool invert; // the text between matches is the delimiter
  // Applied before splitting: replaces " " and prepends mark to texts that lack it.
  const char *replacement;
  char mark[8];
  prepend_scheme prepend;
} split_step;

struct td_split {
  split_step steps[TD_TOK_MAX_STEPS];
  size_t n_steps;
  bool byte_level;
};

// Per step, because the pieces of a step are split by the next one before it continues. No step
// keeps the pieces of a text: each is passed on as soon as nothing more can join it.
struct td_split_scratch {
  struct {
    td_buf edited, stand_in;
  } steps[TD_TOK_MAX_STEPS];
};

// ---- loading

static td_status read_behavior(const cJSON *json, behavior *out, td_err *err) {
  static const char *const names[] = {"Isolated", "Removed", "MergedWithPrevious", "MergedWithNext",
                                      "Contiguous"};
  const char *name = NULL;
  td_status st = td_json_get_str(json, "behavior", &name, err);
  if (st != TD_OK || !name) return st;
  for (size_t i = 0; i < TD_COUNT(names); i++) {
    if (strcmp(name, names[i]) != 0) continue;
    *out = (behavior)i;
    return TD_OK;
  }
  return td_fail(err, TD_EUNSUPPORTED, "behavior \"%.40s\" is not supported", name);
}

static td_status set_pattern(split_step *step, const char *pattern, behavior what, td_err *err) {
  step->behavior = what;
  return td_regex_open(&step->regex, pattern, strlen(pattern), false, err);
}

static td_status read_split(split_step *step, const cJSON *json, td_err *err) {
  td_status st = td_json_get_bool(json, "invert", &step->invert, err);
  if (st == TD_OK && !td_json_get(json, "behavior"))
    st = td_fail(err, TD_EFORMAT, "behavior is missing");
  if (st == TD_OK) st = read_behavior(json, &step->behavior, err);
  if (st == TD_OK) st = td_tok_read_pattern(json, &step->regex, err);
  return st;
}

static td_status read_byte_level(td_split *split, split_step *step, const cJSON *json,
                                 td_err *err) {
  bool prefix_space = true, use_regex = true;
  td_status st = td_json_get_bool(json, "add_prefix_space", &prefix_space, err);
  if (st == TD_OK) st = td_json_get_bool(json, "use_regex", &use_regex, err);
  if (st != TD_OK) return st;
  split->byte_level = true;
  strcpy(step->mark, " ");
  step->prepend = prefix_space ? PREPEND_ALWAYS : PREPEND_NEVER;
  return use_regex ? set_pattern(step, GPT2_PATTERN, ISOLATED, err) : TD_OK;
}

static td_status read_digits(split_step *step, const cJSON *json, td_err *err) {
  bool individual = false;
  td_status st = td_json_get_bool(json, "individual_digits", &individual, err);
  if (st != TD_OK) return st;
  return set_pattern(step, "\\p{N}", individual ? ISOLATED : CONTIGUOUS, err);
}

static td_status read_punctuation(split_step *step, const cJSON *json, td_err *err) {
  behavior what = ISOLATED;
  td_status st = read_behavior(json, &what, err);
  return st == TD_OK ? set_pattern(step, "[\\p{P}$+<=>^`|~]", what, err) : st;
}

static td_status read_metaspace(split_step *step, const cJSON *json, td_err *err) {
  const char *replacement = NULL, *scheme = "always";
  bool add_prefix_space = true, split = true;
  td_status st = td_tok_need_str(json, "replacement", &replacement, err);
  if (st == TD_OK) st = td_json_get_str(json, "prepend_scheme", &scheme, err);
  if (st == TD_OK) st = td_json_get_bool(json, "add_prefix_space", &add_prefix_space, err);
  if (st == TD_OK) st = td_json_get_bool(json, "split", &split, err);
  if (st != TD_OK) return st;
  uint32_t c;
  size_t len = strlen(replacement);
  if (!len || (size_t)td_utf8_decode(replacement, len, &c) != len)
    return td_fail(err, TD_EFORMAT, "replacement must be one character");
  memcpy(step->mark, replacement, len + 1);
  step->replacement = step->mark;
  bool never = strcmp(scheme, "never") == 0 || !add_prefix_space;
  bool first = strcmp(scheme, "first") == 0;
  if (!never && !first && strcmp(scheme, "always") != 0)
    return td_fail(err, TD_EUNSUPPORTED, "prepend_scheme \"%.40s\" is not supported", scheme);
  step->prepend = never ? PREPEND_NEVER : first ? PREPEND_FIRST : PREPEND_ALWAYS;
  step->behavior = MERGED_WITH_NEXT;
  return split ? td_regex_open(&step->regex, step->mark, len, true, err) : TD_OK;
}

static td_status read_step(void *owner, const cJSON *json, const char *type, td_err *err) {
  td_split *split = owner;
  if (split->n_steps == TD_TOK_MAX_STEPS) return td_fail(err, TD_ELIMIT, "too many steps");
  // After ByteLevel the text is no longer in its original characters.
  if (split->byte_level) return td_fail(err, TD_EUNSUPPORTED, "a step after ByteLevel");
  split_step *step = &split->steps[split->n_steps++];
  if (strcmp(type, "Split") == 0) return read_split(step, json, err);
  if (strcmp(type, "ByteLevel") == 0) return read_byte_level(split, step, json, err);
  if (strcmp(type, "Digits") == 0) return read_digits(step, json, err);
  if (strcmp(type, "Punctuation") == 0) return read_punctuation(step, json, err);
  if (strcmp(type, "Metaspace") == 0) return read_metaspace(step, json, err);
  if (strcmp(type, "WhitespaceSplit") == 0) return set_pattern(step, "\\s", REMOVED, err);
  if (strcmp(type, "Whitespace") == 0) {
    step->invert = true;
    return set_pattern(step, "[\\w\\x{200c}\\x{200d}]+|[^\\w\\s\\x{200c}\\x{200d}]+", REMOVED, err);
  }
  return td_fail(err, TD_EUNSUPPORTED, "this pre-tokenizer is not supported");
}

td_status td_split_open(td_split **out, const cJSON *json, td_err *err) {
  *out = NULL;
  td_split *split = calloc(1, sizeof *split);
  if (!split) return td_fail(err, TD_ENOMEM, "out of memory for the pre-tokenizer");
  td_status st = TD_OK;
  if (json) st = td_tok_each_step(json, "pretokenizers", read_step, split, err);
  if (st != TD_OK) {
    td_split_close(split);
    return td_err_prefix(err, "pre_tokenizer");
  }
  *out = split;
  return TD_OK;
}

void td_split_close(td_split *split) {
  if (!split) return;
  for (size_t i = 0; i < split->n_steps; i++)
    td_regex_close(split->steps[i].regex);
  free(split);
}

bool td_split_is_byte_level(const td_split *split) {
  return split->byte_level;
}

td_split_scratch *td_split_scratch_new(void) {
  return calloc(1, sizeof(td_split_scratch));
}

void td_split_scratch_free(td_split_scratch *s) {
  if (!s) return;
  for (size_t i = 0; i < TD_TOK_MAX_STEPS; i++) {
    td_buf_free(&s->steps[i].edited);
    td_buf_free(&s->steps[i].stand_in);
  }
  free(s);
}

// ---- splitting

static td_status run_steps(const td_split *split, td_split_scratch *s, size_t i,
                           const td_split_text *t, td_err *err);

// Builds the pieces of one step from matches and the text between them, in order, and gives each to
// the next step once the one after it has begun.
typedef struct {
  const td_split *split;
  td_split_scratch *scratch;
  size_t step_idx;
  const td_split_text *text;
  td_span held; // the last piece; empty: none
  bool last_was_match;
} cutter;

static td_status pass_on(cutter *c, td_err *err) {
  if (c->held.begin == c->held.end) return TD_OK;
  td_split_text piece = *c->text;
  piece.text += c->held.begin;
  piece.len = c->held.end - c->held.begin;
  piece.at_start = c->text->at_start && c->held.begin == 0;
  return run_steps(c->split, c->scratch, c->step_idx + 1, &piece, err);
}

static td_status cut(cutter *c, size_t begin, size_t end, bool is_match, td_err *err) {
  const split_step *step = &c->split->steps[c->step_idx];
  if (step->invert) is_match = !is_match;
  bool extend = false, drop = false;
  switch (step->behavior) {
  case ISOLATED: break;
  case REMOVED: drop = is_match; break;
  case MERGED_WITH_PREVIOUS: extend = is_match && !c->last_was_match; break;
  // Of consecutive matches only the last one joins the text after it.
  case MERGED_WITH_NEXT: extend = !is_match && c->last_was_match; break;
  case CONTIGUOUS: extend = is_match == c->last_was_match; break;
  }
  c->last_was_match = is_match;
  if (drop) return TD_OK;
  if (extend && c->held.begin != c->held.end) {
    c->held.end = end;
    return TD_OK;
  }
  td_status st = pass_on(c, err);
  c->held = (td_span){begin, end};
  return st;
}

static td_status cut_text(cutter *c, td_err *err) {
  const td_split_text *t = c->text;
  td_regex_search search;
  td_span match;
  bool is_found;
  size_t done = 0;
  td_status st = td_regex_search_begin(&search, c->split->steps[c->step_idx].regex, t->regex,
                                       &c->scratch->steps[c->step_idx].stand_in, t->text, t->len,
                                       err);
  while (st == TD_OK) {
    st = td_regex_search_next(&search, &match, &is_found, err);
    if (st != TD_OK || !is_found) break;
    if (done < match.begin) st = cut(c, done, match.begin, false, err);
    if (st == TD_OK) st = cut(c, match.begin, match.end, true, err);
    done = match.end;
  }
  if (done < t->len && st == TD_OK) st = cut(c, done, t->len, false, err);
  return st == TD_OK ? pass_on(c, err) : st;
}

// Prepends the step's mark and replaces spaces, as the step requires.
static td_status edit(const split_step *step, td_buf *edited, td_split_text *t, td_err *err) {
  size_t n_mark = strlen(step->mark);
  bool marked = t->len >= n_mark && memcmp(t->text, step->mark, n_mark) == 0;
  if (step->replacement && t->len && t->text[0] == ' ') marked = true;
  bool prepend = !marked && (step->prepend == PREPEND_ALWAYS ||
                             (step->prepend == PREPEND_FIRST && t->at_start));
  if (!prepend && !step->replacement) return TD_OK;
  td_buf_clear(edited);
  if (prepend) td_buf_str(edited, step->mark);
  for (size_t i = 0; i < t->len;) {
    const char *space = step->replacement ? memchr(t->text + i, ' ', t->len - i) : NULL;
    size_t end = space ? (size_t)(space - t->text) : t->len;
    td_buf_add(edited, t->text + i, end - i);
    if (space) td_buf_str(edited, step->replacement);
    i = space ? end + 1 : end;
  }
  t->text = td_buf_text(edited);
  t->len = edited->len;
  return td_buf_status(edited, err);
}

// Applies the steps from the i-th on.
static td_status run_steps(const td_split *split, td_split_scratch *s, size_t i,
                           const td_split_text *text, td_err *err) {
  td_split_text t = *text;
  if (!t.len) return TD_OK;
  if (i == split->n_steps) return t.word(t.owner, t.text, t.len, err);
  const split_step *step = &split->steps[i];
  td_status st = edit(step, &s->steps[i].edited, &t, err);
  if (st != TD_OK) return st;
  if (!step->regex) return run_steps(split, s, i + 1, &t, err);
  cutter c = {.split = split, .scratch = s, .step_idx = i, .text = &t};
  return cut_text(&c, err);
}

td_status td_split_run(const td_split *split, td_split_scratch *scratch, const td_split_text *text,
                       td_err *err) {
  return run_steps(split, scratch, 0, text, err);
}
