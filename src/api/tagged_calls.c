// src/api/tagged_calls.c - incremental reader of a tool call whose arguments are elements:
//   <function=NAME> <parameter=KEY> VALUE </parameter> ... </function>
// and the like. The arguments become the JSON text of an object: a value whose schema allows only
// strings as it comes, another when it is complete.
#include <string.h>

#include "api/tool_calls_impl.h"
#include "base/json_write.h"

static td_call_outcome of_match(td_marker_match match) {
  return match == TD_MARKER_WHOLE ? GO : match == TD_MARKER_CUT ? WAIT : NONE;
}

// Passes the marker. WAIT: it may be here; NONE: it is not. A form without the marker passes.
static td_call_outcome pass(td_call_reading *x, const char *marker) {
  if (!marker) return GO;
  const td_call_outcome o = of_match(td_marker_at(marker, x->text, x->r->at, x->len));
  if (o == GO) x->r->at += strlen(marker);
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
      o = of_match(td_marker_at(close, x->text, r->at, x->len));
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

// Before an argument, or the end.
static td_call_outcome read_next(td_call_reading *x) {
  td_call_reader *r = x->r;
  const td_call_tags *t = x->form->tags;
  if (!td_call_skip_space(x)) return WAIT;
  const bool may_sep = t->after_name && !r->object.has_member;
  const td_call_outcome sep = may_sep ? pass(x, t->after_name) : NONE;
  if (sep == GO) return GO;
  const td_call_outcome key = pass(x, t->key_open);
  if (key == GO) {
    r->begin = r->at;
    return td_call_go(x, STEP_TAG_KEY);
  }
  const td_call_outcome end = t->end ? pass(x, t->end) : NONE;
  const char *close = x->form->call_close;
  const td_call_outcome last = close ? of_match(td_marker_at(close, x->text, r->at, x->len)) : NONE;
  if (end != GO && last != GO)
    return key == WAIT || end == WAIT || last == WAIT || sep == WAIT ? WAIT : NONE;
  if (!is_named(x)) return NONE;
  td_tagged_call_end(x);
  return GO;
}

static td_call_outcome read_key(td_call_reading *x) {
  td_call_reader *r = x->r;
  const char *close = x->form->tags->key_close;
  for (; r->at < x->len; r->at++) {
    if (r->at - r->begin > TD_CALL_MAX_NAME) return NONE;
    const td_call_outcome o = of_match(td_marker_at(close, x->text, r->at, x->len));
    if (o == WAIT) return WAIT;
    if (o == NONE && (x->text[r->at] == '\n' || x->text[r->at] == '\0')) return NONE;
    if (o == NONE) continue;
    td_buf_clear(&r->word);
    td_buf_add(&r->word, x->text + r->begin, r->at - r->begin);
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
  r->types = td_tool_params_types(r->params, x->call->name, td_buf_text(&r->word));
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

static td_call_outcome read_value(td_call_reading *x) {
  td_call_reader *r = x->r;
  const td_call_tags *t = x->form->tags;
  for (; r->at < x->len; r->at++) {
    const char c = x->text[r->at];
    const bool is_feed = c == '\n' && t->trims_line_feeds;
    if (is_feed || c == '<') {
      const size_t at = r->at + is_feed;
      if (at == x->len) return WAIT;
      const td_call_outcome o = of_match(td_marker_at(t->value_close, x->text, at, x->len));
      if (o == WAIT) return WAIT;
      if (o == GO) {
        r->at = at + strlen(t->value_close);
        end_value(x);
        return td_call_go(x, STEP_TAG_NEXT);
      }
    }
    take_byte(x, c);
  }
  return WAIT;
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
