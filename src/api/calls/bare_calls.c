// src/api/calls/bare_calls.c - incremental reader of a call's arguments where keys have no quotes
// and strings have the model's own, with nothing escaped between them:
//   {city:<|"|>Berlin<|"|>,days:[1,2],units:{metric:true}}
// The arguments become JSON. JSON is read, too.
#include <string.h>

#include "api/calls/tool_calls_impl.h"
#include "base/str.h"

static const char quote[] = "<|\"|>";

static td_object_state feed(td_call_reading *x, char c) {
  return td_object_feed(&x->r->object, c, &x->call->arguments);
}

// Whether a key may begin here.
static bool is_before_key(const td_call_reader *r) {
  const uint32_t depth = r->object.depth;
  const bool in_array = depth && depth <= 64 && r->object.arrays >> (depth - 1) & 1;
  return r->last == '{' || (r->last == ',' && !in_array);
}

// Begins or ends a string of the model's own quotes.
static td_object_state turn_text(td_call_reading *x) {
  x->r->in_bare_text = !x->r->in_bare_text;
  x->r->last = '"';
  return feed(x, '"');
}

static td_object_state take_in_text(td_call_reading *x, char c) {
  if ((c == '"' || c == '\\') && feed(x, '\\') == TD_OBJECT_BAD) return TD_OBJECT_BAD;
  return feed(x, c);
}

static td_object_state take_in_key(td_call_reading *x, char c) {
  if (c == '"' || c == '\\' || c == '\n' || c == '}') return TD_OBJECT_BAD;
  if (c != ':') return feed(x, c);
  x->r->in_bare_key = false;
  x->r->last = c;
  return feed(x, '"') == TD_OBJECT_BAD ? TD_OBJECT_BAD : feed(x, c);
}

static td_object_state take_outside(td_call_reading *x, char c) {
  td_call_reader *r = x->r;
  if (is_before_key(r) && !td_is_space(c) && !strchr("}\"',", c)) {
    r->in_bare_key = true;
    return feed(x, '"') == TD_OBJECT_BAD ? TD_OBJECT_BAD : feed(x, c);
  }
  if (!td_is_space(c)) r->last = c;
  return feed(x, c);
}

td_call_outcome td_bare_call_step(td_call_reading *x) {
  td_call_reader *r = x->r;
  while (r->at < x->len) {
    const char c = x->text[r->at];
    const bool in_json_text = r->object.in_string && !r->in_bare_text;
    const td_call_outcome quotes = c == '<' && !in_json_text ? td_call_at(x, quote, r->at) : NONE;
    if (quotes == WAIT) return WAIT;
    const td_object_state state = quotes == GO      ? turn_text(x)
                                  : r->in_bare_text ? take_in_text(x, c)
                                  : r->in_bare_key  ? take_in_key(x, c)
                                  : in_json_text    ? feed(x, c)
                                                    : take_outside(x, c);
    if (state == TD_OBJECT_BAD) return NONE;
    r->at += quotes == GO ? strlen(quote) : 1;
    if (state == TD_OBJECT_WHOLE) return GO;
  }
  return WAIT;
}
