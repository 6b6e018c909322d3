// src/api/tagged_calls.c - incremental reader of a tool call whose arguments are elements:
//   <function=NAME> <parameter=KEY> VALUE </parameter> ... </function>
// and the like. The arguments become the JSON text of an object: a value whose schema allows only
// strings as it comes, another when it is complete.
#include <string.h>

#include "api/tool_calls_impl.h"
#include "base/json_write.h"

#define MAX_GAP 256 // white space between two tags that is looked through

// Passes the marker. WAIT: it may be here; NONE: it is not. A form without the marker passes.
static td_call_outcome pass(td_call_reading *x, const char *marker) {
  const td_call_outcome o = marker ? td_call_at(x, marker, x->r->at) : GO;
  if (marker && o == GO) x->r->at += strlen(marker);
  return o;
}

static td_call_outcome read_open(td_call_reading *x) {
  const char *marker = x->form->tags->name_open;
  if (!td_call_skip_space(x)) return WAIT;
  const td_call_outcome o = pass(x, marker);
  if (o != GO) return o;
  x->r->begin = x->r->at;
  return td_call_go(x, STEP_TAG_NAME);
}

static bool is_word_char(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
         (c && strchr("_-.:/", c));
}

// The byte ends a name that no marker closes.
static bool is_name_end(char c) {
  return td_is_space(c) || c == '<';
}

static td_call_outcome read_name(td_call_reading *x) {
  td_call_reader *r = x->r;
  const char *close = x->form->tags->name_close;
  for (; r->at < x->len; r->at++) {
    const char c = x->text[r->at];
    if (r->at - r->begin > TD_CALL_MAX_NAME) return NONE;
    td_call_outcome o = NONE;
    if (close) {
      o = td_call_at(x, close, r->at);
      if (o == NONE && (c == '<' || c == '\n')) return NONE;
    } else if (is_name_end(c)) {
      o = GO;
    } else if (!is_word_char(c)) {
      return NONE;
    }
    if (o == WAIT) return WAIT;
    if (o == NONE) continue;
    if (td_call_set_name(x, x->text + r->begin, r->at - r->begin) == NONE) return NONE;
    r->at += close ? strlen(close) : 0;
    return td_call_go(x, STEP_TAG_NEXT);
  }
  return WAIT;
}

void td_tagged_call_end(td_call_reading *x) {
  td_buf_str(&x->call->arguments, x->call->arguments.len ? "}" : "{}");
  x->r->has_arguments = true;
  x->r->begin = x->r->at;
  td_call_go(x, STEP_CLOSE);
}

// A word alone between the markers is a call only if a tool has that name.
static bool is_named(const td_call_reading *x) {
  return x->form->tags->end || x->r->object.has_member ||
         td_tool_params_has_tool(x->r->params, x->call->name);
}

// Before an argument, or the end. A model may end its answer here.
static td_call_outcome read_next(td_call_reading *x) {
  td_call_reader *r = x->r;
  const td_call_tags *t = x->form->tags;
  if (!td_call_skip_space(x)) {
    if (!x->is_ended || !r->object.has_member) return WAIT;
    td_tagged_call_end(x);
    return GO;
  }
  const bool may_sep = t->after_name && !r->object.has_member;
  const td_call_outcome sep = may_sep ? pass(x, t->after_name) : NONE;
  if (sep == GO) return GO;
  const td_call_outcome key = pass(x, t->key_open);
  if (key == GO) {
    r->begin = r->at;
    return td_call_go(x, STEP_TAG_KEY);
  }
  const td_call_outcome end = t->end ? pass(x, t->end) : NONE;
  const td_call_outcome last = td_call_at(x, x->form->call_close, r->at);
  const td_call_outcome all = td_call_at(x, x->form->close, r->at);
  if (end != GO && last != GO && all != GO)
    return key == WAIT || end == WAIT || last == WAIT || all == WAIT || sep == WAIT ? WAIT : NONE;
  if (!is_named(x)) return NONE;
  td_tagged_call_end(x);
  return GO;
}

// The key of a tag without what is around it. *is_text: what the tag says of the value; -1:
// nothing.
static void strip_key(const td_call_tags *t, const char **key, size_t *n, int *is_text) {
  const size_t n_mark = t->text_mark ? strlen(t->text_mark) : 0;
  const char *mark = n_mark ? memmem(*key, *n, t->text_mark, n_mark) : NULL;
  *is_text = -1;
  if (mark) {
    const char *said = mark + n_mark;
    const size_t n_said = (size_t)(*key + *n - said);
    if (memmem(said, n_said, "true", 4)) *is_text = 1;
    if (memmem(said, n_said, "false", 5)) *is_text = 0;
    *n = (size_t)(mark - *key);
  }
  td_call_strip(key, n);
}

static td_call_outcome read_key(td_call_reading *x) {
  td_call_reader *r = x->r;
  const char *close = x->form->tags->key_close;
  for (; r->at < x->len; r->at++) {
    if (r->at - r->begin > TD_CALL_MAX_NAME) return NONE;
    const td_call_outcome o = td_call_at(x, close, r->at);
    if (o == WAIT) return WAIT;
    if (o == NONE && (x->text[r->at] == '\n' || x->text[r->at] == '\0')) return NONE;
    if (o == NONE) continue;
    const char *key = x->text + r->begin;
    size_t n = r->at - r->begin;
    strip_key(x->form->tags, &key, &n, &r->is_text);
    td_buf_clear(&r->word);
    td_buf_add(&r->word, key, n);
    r->at += strlen(close);
    return r->word.len ? td_call_go(x, STEP_TAG_VALUE_OPEN) : NONE;
  }
  return WAIT;
}

static td_call_outcome read_value_open(td_call_reading *x) {
  td_call_reader *r = x->r;
  td_buf *out = &x->call->arguments;
  const td_call_tags *t = x->form->tags;
  if (t->value_open && !td_call_skip_space(x)) return WAIT;
  const td_call_outcome o = pass(x, t->value_open);
  if (o != GO) return o;
  if (t->trims_line_feeds && r->at == x->len) return WAIT;
  if (t->trims_line_feeds && x->text[r->at] == '\n') r->at++;
  unsigned at;
  r->types = td_tool_params_find(r->params, x->call->name, td_buf_text(&r->word), &at);
  if (at < 64) r->given |= (uint64_t)1 << at;
  // Where the schema leaves it open, the tag decides.
  const bool may_be_text = !r->types || r->types & TD_PARAM_STRING;
  if (r->is_text == 1 && may_be_text) r->types = TD_PARAM_STRING;
  if (r->is_text == 0 && r->types != TD_PARAM_STRING) r->types &= ~(unsigned)TD_PARAM_STRING;
  td_buf_str(out, out->len ? ", " : "{");
  td_json_quote(out, td_buf_text(&r->word), r->word.len);
  td_buf_str(out, r->types == TD_PARAM_STRING ? ": \"" : ": ");
  r->object.has_member = true;
  td_buf_clear(&r->word);
  return td_call_go(x, STEP_TAG_VALUE);
}

static void take_byte(td_call_reading *x, char c) {
  if (x->r->types == TD_PARAM_STRING) {
    td_json_quote_byte(&x->call->arguments, c);
  } else {
    td_buf_char(&x->r->word, c);
  }
}

static void end_value(td_call_reading *x) {
  td_buf *out = &x->call->arguments;
  const td_buf *word = &x->r->word;
  if (x->r->types == TD_PARAM_STRING) {
    td_buf_char(out, '"');
  } else {
    td_tool_param_write(out, x->r->types, td_buf_text(word), word->len);
  }
}

// ---- where a value ends -------------------------------------------------------------------------
// A value may hold tags as its text, and models forget or garble the tag that ends one. So an end
// counts by what follows it.

static td_call_outcome any_at(const td_call_reading *x, const char *const *marks, size_t n,
                              size_t at) {
  td_call_outcome found = NONE;
  for (size_t i = 0; i < n && found != GO; i++) {
    const td_call_outcome o = td_call_at(x, marks[i], at);
    if (o != NONE) found = o;
  }
  return found;
}

// Where the text goes on behind white space; SIZE_MAX: it ends there so far.
static size_t behind_space(const td_call_reading *x, size_t at) {
  const size_t most = at + MAX_GAP;
  while (at < x->len && at < most && td_is_space(x->text[at]))
    at++;
  return at == x->len ? SIZE_MAX : at;
}

static td_call_outcome at_text_end(const td_call_reading *x) {
  return x->is_ended ? GO : WAIT;
}

// Whether behind a call's last tag no text of the value goes on: another call, or the text's end.
static td_call_outcome at_next_call(const td_call_reading *x, size_t at) {
  const td_call_form_marks *f = x->form;
  const char *const marks[] = {f->call_open, f->call_close,      f->open,
                               f->close,     f->tags->name_open, "<tool_call>"};
  at = behind_space(x, at);
  return at == SIZE_MAX ? at_text_end(x) : any_at(x, marks, TD_COUNT(marks), at);
}

// The key tag at `at` of a parameter that the tool has and that was not given yet. Where the tool's
// are not known, any that begins a line.
static td_call_outcome at_known_key(const td_call_reading *x, size_t at, bool begins_line) {
  const td_call_tags *t = x->form->tags;
  const td_call_outcome o = td_call_at(x, t->key_open, at);
  if (o != GO) return o;
  const char *key = x->text + at + strlen(t->key_open);
  for (size_t n = 0; n <= TD_CALL_MAX_NAME; n++) {
    if (key + n == x->text + x->len) return WAIT;
    const td_call_outcome end = td_call_at(x, t->key_close, (size_t)(key + n - x->text));
    if (end == WAIT) return WAIT;
    if (end == NONE && strchr("\n<", key[n])) return NONE;
    if (end == NONE) continue;
    char name[TD_CALL_MAX_NAME + 1];
    unsigned i;
    int is_text;
    strip_key(t, &key, &n, &is_text);
    memcpy(name, key, n);
    name[n] = '\0';
    td_tool_params_find(x->r->params, x->call->name, name, &i);
    const bool is_new = i < 64 && !(x->r->given >> i & 1);
    const bool is_free = begins_line && !td_tool_params_lists(x->r->params, x->call->name);
    return is_new || is_free ? GO : NONE;
  }
  return NONE;
}

// The tag that ends values, which may have more letters than it should: </parameter_function>.
// *n: its length.
static td_call_outcome at_value_close(const td_call_reading *x, size_t at, size_t *n) {
  const char *close = x->form->tags->value_close;
  const size_t n_close = strlen(close);
  *n = n_close;
  const td_call_outcome whole = td_call_at(x, close, at);
  if (whole != NONE) return whole;
  if (x->len - at < n_close || memcmp(x->text + at, close, n_close - 1) != 0) return NONE;
  for (*n = n_close - 1; *n < n_close + TD_CALL_MAX_KEY; ++*n) {
    if (at + *n == x->len) return WAIT;
    const char c = x->text[at + *n];
    if (c == '>') {
      ++*n;
      return GO;
    }
    if (!(c == '_' || c == '/' || (c >= 'a' && c <= 'z'))) return NONE;
  }
  return NONE;
}

// Whether the value ends at the tag at `at`, and where the call goes on.
static td_call_outcome ends_value(const td_call_reading *x, size_t at, bool begins_line,
                                  size_t *next) {
  const td_call_form_marks *f = x->form;
  const td_call_tags *t = f->tags;
  size_t n;
  const td_call_outcome closed = at_value_close(x, at, &n);
  *next = at;
  if (closed == WAIT) return WAIT;
  if (closed == GO) {
    const char *const marks[] = {t->key_open, t->end, f->call_close, f->call_open, f->close};
    *next = at + n;
    const size_t then = behind_space(x, *next);
    return then == SIZE_MAX ? at_text_end(x) : any_at(x, marks, TD_COUNT(marks), then);
  }
  const td_call_outcome key = at_known_key(x, at, begins_line);
  if (key != NONE) return key;
  const char *const ends[] = {t->end, f->call_close, f->close};
  for (size_t i = 0; i < TD_COUNT(ends); i++) {
    const td_call_outcome o = td_call_at(x, ends[i], at);
    if (o == WAIT) return WAIT;
    if (o == GO && i > 0 && begins_line) return GO;
    if (o == GO) return at_next_call(x, at + strlen(ends[i]));
  }
  return NONE;
}

static td_call_outcome read_value(td_call_reading *x) {
  td_call_reader *r = x->r;
  const bool trims = x->form->tags->trims_line_feeds;
  for (; r->at < x->len; r->at++) {
    const char c = x->text[r->at];
    const bool is_feed = c == '\n' && trims;
    if (is_feed || c == '<') {
      const size_t at = r->at + is_feed;
      const bool begins_line = is_feed || (r->at > 0 && x->text[r->at - 1] == '\n');
      size_t next = at;
      td_call_outcome o = at == x->len         ? WAIT
                          : x->text[at] == '<' ? ends_value(x, at, begins_line, &next)
                                               : NONE;
      if (o == WAIT && x->is_ended) {
        o = GO;
        next = x->len;
      }
      if (o == WAIT) return WAIT;
      if (o == GO) {
        r->at = next;
        end_value(x);
        return td_call_go(x, STEP_TAG_NEXT);
      }
    }
    take_byte(x, c);
  }
  if (!x->is_ended) return WAIT;
  end_value(x);
  return td_call_go(x, STEP_TAG_NEXT);
}

td_call_outcome td_tagged_call_step(td_call_reading *x) {
  switch (x->r->step) {
  case STEP_TAG_OPEN: return read_open(x);
  case STEP_TAG_NAME: return read_name(x);
  case STEP_TAG_NEXT: return read_next(x);
  case STEP_TAG_KEY: return read_key(x);
  case STEP_TAG_VALUE_OPEN: return read_value_open(x);
  default: return read_value(x);
  }
}
