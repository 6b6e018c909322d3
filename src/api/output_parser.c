// src/api/output_parser.c - the state machine that splits generated text into reasoning, content
// and tool calls.
#include "api/output_parser.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/calls/harmony.h"
#include "base/grow.h"
#include "base/json_parse.h"
#include "base/str.h"

#define MAX_OWN_IDS 256 // calls whose ids are the text's own

void td_output_parser_free(td_output_parser *parts) {
  uint32_t n = parts->n_calls;
  if (parts->state == TD_PARTS_CALL && !parts->is_given && n < parts->cap) n++;
  for (uint32_t i = 0; i < n; i++)
    td_tool_call_free(&parts->calls[i]);
  free(parts->calls);
  parts->calls = NULL;
  parts->n_calls = parts->cap = 0;
  td_call_reader_free(&parts->reader);
}

td_reasoning td_output_parser_after(const char *prompt, size_t len) {
  while (len && td_is_space(prompt[len - 1]))
    len--;
  for (unsigned i = 0; i < TD_OUTPUT_FORMS; i++) {
    const td_output_form *f = &td_output_forms[i];
    const size_t n = strlen(f->think_begin), n_end = strlen(f->think_end);
    if (!f->ends_prompts) continue;
    if (len >= n && memcmp(prompt + len - n, f->think_begin, n) == 0) return TD_REASONING_BEGUN;
    if (len >= n_end && memcmp(prompt + len - n_end, f->think_end, n_end) == 0)
      return TD_REASONING_NONE;
  }
  return TD_REASONING_MAYBE;
}

// The generated text to parse.
typedef struct {
  const char *text;
  size_t len;
  td_text_end end;
  bool is_final;
} source;

// Result of one state.
typedef enum {
  MORE,  // continue with another state
  FOUND, // *part is filled
  WAIT,  // more text is needed to decide
} outcome;

static void enter(td_output_parser *p, td_output_parser_state state, size_t at) {
  p->state = state;
  p->at = p->scan = p->solid = at;
  p->has_begun = false;
  if (state != TD_PARTS_CALLS) p->in_run = false;
}

static void skip_space(td_output_parser *p, const source *s) {
  while (p->at < s->len && td_is_space(s->text[p->at]))
    p->at++;
}

// ---- text up to a marker ------------------------------------------------------------------------

// Emits the text from p->at to end as a part.
static outcome give(td_output_parser *p, td_output_part *part, td_output_part_kind kind,
                    size_t end) {
  if (end <= p->at) return MORE;
  *part = (td_output_part){.kind = kind, .begin = p->at, .end = end};
  p->at = end;
  p->has_begun = true;
  return FOUND;
}

// Matches the marker, of *n bytes, that ends the reasoning. Which that is the text says that began
// it; if it began in the prompt, any may.
static td_marker_match ends_reasoning_at(const td_output_parser *p, const source *s, size_t *n) {
  td_marker_match found = TD_MARKER_NONE;
  for (unsigned i = 0; i < TD_OUTPUT_FORMS; i++) {
    const td_output_form *form = &td_output_forms[i];
    if (p->begins_in_reasoning ? !form->ends_prompts : form != p->form) continue;
    const td_marker_match match = td_marker_at(form->think_end, s->text, p->scan, s->len);
    *n = strlen(form->think_end);
    if (match == TD_MARKER_WHOLE) return match;
    if (match == TD_MARKER_CUT) found = match;
  }
  return found;
}

// Within a thought, a marker that may open a call counts unless the thought is known to end later,
// or calls are constrained, which thoughts are not.
static td_marker_match ends_thought_at(const td_output_parser *p, const source *s) {
  td_mark mark;
  size_t n;
  unsigned form;
  const td_marker_match end = ends_reasoning_at(p, s, &n);
  const bool is_closed = p->params && p->params->is_closed;
  if (end == TD_MARKER_WHOLE || !p->parse_tool_calls || is_closed ||
      (p->will_end && p->scan < p->far))
    return end;
  const td_marker_match call = td_call_marker_at(TD_MARK_THOUGHT, s->text, p->scan, s->len, &mark,
                                                 &n, &form);
  return call == TD_MARKER_NONE ? end : call;
}

// Matches the marker that ends this state's text. After a call, the marker that closes a run of
// calls is skipped rather than treated as text.
static td_marker_match ends_at(const td_output_parser *p, const source *s) {
  td_mark last = p->n_calls ? TD_MARK_CLOSE : TD_MARK_CALL;
  td_mark mark;
  size_t n;
  unsigned form;
  if (p->state == TD_PARTS_REASONING) return ends_thought_at(p, s);
  if (!p->parse_tool_calls) return TD_MARKER_NONE;
  return td_call_marker_at(last, s->text, p->scan, s->len, &mark, &n, &form);
}

// Searches for the marker. p->scan stops at it, at a possible prefix of it, or at the end.
static td_marker_match find_end(td_output_parser *p, const source *s) {
  for (; p->scan < s->len; p->scan++) {
    char c = s->text[p->scan];
    const bool may_be = c == '<' || c == '[' || c == ']';
    td_marker_match match = may_be ? ends_at(p, s) : TD_MARKER_NONE;
    if (match == TD_MARKER_WHOLE || (match == TD_MARKER_CUT && !s->is_final)) return match;
    // The beginning of a marker, no mere bracket, is not shown where the text is cut off.
    if (match == TD_MARKER_CUT && s->end == TD_TEXT_CUT && s->len - p->scan > 1) return match;
    if (!td_is_space(c)) p->solid = p->scan + 1;
  }
  return TD_MARKER_NONE;
}

// Leading white space and white space before the marker are dropped, so trailing white space waits
// for what follows. *at_end: the marker is at p->scan.
static outcome take_text(td_output_parser *p, const source *s, td_output_part_kind kind,
                         bool has_end, td_output_part *part, bool *at_end) {
  if (!p->has_begun) {
    skip_space(p, s);
    if (p->scan < p->at) p->scan = p->solid = p->at;
  }
  td_marker_match match = find_end(p, s);
  *at_end = match == TD_MARKER_WHOLE;
  bool keeps_space = !has_end || (s->is_final && match == TD_MARKER_NONE);
  return give(p, part, kind, keeps_space ? p->scan : p->solid);
}

// Searches for the thought's end behind a marker at p->scan that opens a call. p->far stops at it,
// at a possible prefix of it, or at the end.
static td_marker_match find_thought_end(td_output_parser *p, const source *s) {
  const size_t at = p->scan;
  td_marker_match match = TD_MARKER_NONE;
  size_t n;
  for (p->scan = p->far > at ? p->far : at; p->scan < s->len && match == TD_MARKER_NONE; p->scan++)
    match = ends_reasoning_at(p, s, &n);
  p->far = p->scan - (match != TD_MARKER_NONE);
  p->will_end = match == TD_MARKER_WHOLE;
  p->scan = at;
  return match;
}

// White space after text is part of the text if no call follows.
static void enter_calls(td_output_parser *p, size_t at) {
  bool has_text = p->has_begun;
  p->back_at = p->at;
  enter(p, TD_PARTS_CALLS, at);
  p->has_begun = has_text;
  p->is_opened = p->may_repeat = false;
}

static outcome take_reasoning(td_output_parser *p, const source *s, td_output_part *part) {
  bool at_end;
  outcome o = take_text(p, s, TD_OUTPUT_REASONING, true, part, &at_end);
  size_t n;
  if (o == FOUND || !at_end) return o == FOUND ? FOUND : WAIT;
  if (ends_reasoning_at(p, s, &n) == TD_MARKER_WHOLE) {
    enter(p, TD_PARTS_CONTENT, p->scan + n);
  } else if (find_thought_end(p, s) != TD_MARKER_WHOLE) {
    if (!s->is_final) return WAIT;
    enter_calls(p, p->scan);
    p->in_thought = true;
  }
  return MORE;
}

static outcome take_content(td_output_parser *p, const source *s, td_output_part *part) {
  bool at_call;
  outcome o = take_text(p, s, TD_OUTPUT_CONTENT, p->parse_tool_calls, part, &at_call);
  if (at_call) enter_calls(p, p->scan);
  return o == FOUND ? FOUND : at_call ? MORE : WAIT;
}

static outcome take_start(td_output_parser *p, const source *s) {
  size_t begin = 0; // keep leading white space of plain content as generated
  skip_space(p, s);
  if (p->begins_in_reasoning) {
    enter(p, TD_PARTS_REASONING, begin);
    return MORE;
  }
  if (p->at == s->len && !s->is_final) return WAIT;
  for (unsigned i = 0; i < TD_OUTPUT_FORMS; i++) {
    const td_output_form *form = &td_output_forms[i];
    if (form->final_begin) continue;
    td_marker_match match = td_marker_at(form->think_begin, s->text, p->at, s->len);
    if (match == TD_MARKER_CUT && !s->is_final) return WAIT;
    if (match != TD_MARKER_WHOLE) continue;
    p->form = form;
    enter(p, TD_PARTS_REASONING, p->at + strlen(form->think_begin));
    return MORE;
  }
  enter(p, TD_PARTS_CONTENT, begin);
  p->has_begun = true;
  return MORE;
}

// ---- calls --------------------------------------------------------------------------------------

// Text that began like a call but is none: emits it as text, including its markers, up to end.
static outcome give_back(td_output_parser *p, td_output_part *part, size_t end) {
  const bool is_thought = p->in_thought && !p->n_calls;
  enter(p, is_thought ? TD_PARTS_REASONING : TD_PARTS_CONTENT, p->back_at);
  p->scan = p->solid = end;
  p->in_thought = false;
  return give(p, part, is_thought ? TD_OUTPUT_REASONING : TD_OUTPUT_CONTENT, end);
}

// The beginning of a call that the text's end cuts off.
static outcome give_cut(td_output_parser *p, const source *s, td_output_part *part) {
  if (s->end != TD_TEXT_CUT) return give_back(p, part, s->len);
  enter(p, TD_PARTS_DONE, s->len);
  return WAIT;
}

static td_status begin_call(td_output_parser *p, unsigned form, size_t at, td_err *err) {
  if (!TD_GROW(p->calls, p->n_calls, p->cap, 4))
    return td_fail(err, TD_ENOMEM, "out of memory for a tool call");
  p->calls[p->n_calls] = (td_tool_call){0};
  p->state = TD_PARTS_CALL;
  p->is_given = false;
  p->n_given = 0;
  td_call_begin(&p->reader, form, at, p->params);
  p->reader.in_run = p->in_run;
  return TD_OK;
}

// Between calls there are only markers and white space. A model may open a run and omit the marker
// of its first call.
static td_status take_calls(td_output_parser *p, const source *s, td_output_part *part, outcome *o,
                            td_err *err) {
  td_mark mark = TD_MARK_CLOSE;
  size_t n = 0;
  unsigned form = 0;
  *o = MORE;
  skip_space(p, s);
  if (!p->has_begun && !p->is_opened) p->back_at = p->at;
  bool is_cut = p->at == s->len;
  td_marker_match match = td_call_marker_at(TD_MARK_CLOSE, s->text, p->at, s->len, &mark, &n,
                                            &form);
  if (match == TD_MARKER_WHOLE) {
    p->at += n;
    if (mark == TD_MARK_CALL) return begin_call(p, form, p->at, err);
    if (mark == TD_MARK_CLOSE) p->has_begun = false;
    p->is_opened = mark == TD_MARK_OPEN;
    p->in_run |= p->is_opened;
    p->may_repeat = false;
    p->reader.form = form;
    return TD_OK;
  }
  td_marker_match again = p->may_repeat ? td_call_repeats_at(p->reader.form, s->text, p->at, s->len)
                                        : TD_MARKER_NONE;
  if ((is_cut || match == TD_MARKER_CUT || again == TD_MARKER_CUT) && !s->is_final) {
    *o = WAIT;
  } else if (is_cut || match == TD_MARKER_CUT) {
    *o = p->is_opened || !is_cut ? give_cut(p, s, part) : WAIT;
  } else if (p->is_opened || again == TD_MARKER_WHOLE) {
    p->is_opened = false;
    return begin_call(p, p->reader.form, p->at, err);
  } else {
    enter(p, TD_PARTS_CONTENT, p->at);
  }
  return TD_OK;
}

// Assigns a fresh id if the text gave none or repeated an earlier one, and behind many calls.
static void set_id(td_output_parser *p, td_tool_call *call) {
  bool is_used = !call->id[0] || p->n_calls >= MAX_OWN_IDS;
  for (uint32_t i = 0; i < p->n_calls && !is_used; i++)
    is_used = strcmp(p->calls[i].id, call->id) == 0;
  if (!is_used) return;
  snprintf(call->id, sizeof call->id, "call_%016llx%02x", (unsigned long long)p->id, p->n_calls);
}

// Emits the call being read, as far as it is known: new, or grown.
static outcome give_call(td_output_parser *p, td_output_part *part) {
  td_tool_call *call = &p->calls[p->n_calls - p->is_given];
  if (p->is_given && p->n_given == call->arguments.len) return MORE;
  if (!p->is_given) {
    set_id(p, call);
    p->n_calls++;
  }
  p->is_given = true;
  p->n_given = call->arguments.len;
  *part = (td_output_part){.kind = TD_OUTPUT_CALL, .call = p->n_calls - 1};
  return FOUND;
}

static bool is_json(const td_tool_call *call) {
  td_err ignored;
  return td_json_check(td_buf_text(&call->arguments), call->arguments.len, TD_JSON_MAX_DEPTH,
                       &ignored) == TD_OK;
}

static outcome end_call(td_output_parser *p, td_output_part *part, bool is_whole) {
  td_tool_call *call = &p->calls[p->n_calls - p->is_given];
  call->is_whole = is_whole && is_json(call);
  outcome o = give_call(p, part);
  enter(p, p->one_call ? TD_PARTS_DONE : TD_PARTS_CALLS, p->reader.at);
  p->is_opened = false;
  p->may_repeat = p->reader.is_open;
  return o;
}

static td_status take_call(td_output_parser *p, const source *s, td_output_part *part, outcome *o,
                           td_err *err) {
  td_tool_call *call = &p->calls[p->n_calls - p->is_given];
  td_call_state state;
  td_status st = td_call_read(&p->reader, call, s->text, s->len, s->end, &state, err);
  if (st != TD_OK) return st;
  if (state == TD_CALL_WHOLE || state == TD_CALL_BROKEN) {
    *o = end_call(p, part, state == TD_CALL_WHOLE);
  } else if (state == TD_CALL_NONE) {
    td_tool_call_free(&p->calls[p->n_calls]);
    *o = give_back(p, part, p->reader.at);
  } else if (td_call_is_sure(&p->reader, call)) {
    *o = give_call(p, part) == FOUND ? FOUND : WAIT;
  } else if (s->is_final) {
    td_tool_call_free(&p->calls[p->n_calls]);
    *o = give_cut(p, s, part);
  } else {
    *o = WAIT;
  }
  return TD_OK;
}

// ---- Harmony ------------------------------------------------------------------------------------

enum { MAX_HEADER = 1024 }; // bytes; what is longer is text

// The marker that ends a message. p->scan stops at it (*n: what it takes of the text; 0: it is the
// next message's), at a possible prefix of it, or at the end.
static td_marker_match find_message_end(td_output_parser *p, const source *s, size_t *n) {
  for (; p->scan < s->len; p->scan++) {
    td_harmony_mark mark = TD_HARMONY_END;
    if (s->text[p->scan] != '<') continue;
    const td_marker_match match = td_harmony_mark_at(s->text, p->scan, s->len, &mark, n);
    if (match == TD_MARKER_NONE || (match == TD_MARKER_CUT && s->is_final)) continue;
    if (mark == TD_HARMONY_CONSTRAIN || mark == TD_HARMONY_MESSAGE) continue;
    if (mark != TD_HARMONY_END) *n = 0;
    return match;
  }
  *n = 0;
  return TD_MARKER_NONE;
}

static td_harmony_header header_to(const td_output_parser *p, const source *s, size_t end) {
  return td_harmony_header_read(s->text, p->at, end, p->params);
}

// What a marker within a header is: the end of the header, another part of it (MARKER_NONE), or
// not known yet. A marker of a message is doubled, or its header is, if another of them follows.
static td_marker_match ends_header(const td_output_parser *p, const source *s, size_t *n) {
  td_harmony_mark mark, next;
  size_t n_next;
  const size_t at = p->scan;
  td_marker_match match = td_harmony_mark_at(s->text, at, s->len, &mark, n);
  if (match != TD_MARKER_WHOLE) return s->is_final ? TD_MARKER_NONE : match;
  if (mark == TD_HARMONY_MESSAGE) {
    match = td_harmony_mark_at(s->text, at + *n, s->len, &next, &n_next);
    if (!s->is_final && (match == TD_MARKER_CUT || at + *n == s->len)) return TD_MARKER_CUT;
    const bool is_more = match == TD_MARKER_WHOLE &&
                         (next == TD_HARMONY_MESSAGE || next == TD_HARMONY_CHANNEL);
    return is_more ? TD_MARKER_NONE : TD_MARKER_WHOLE;
  }
  *n = 0;
  if (mark == TD_HARMONY_END) return TD_MARKER_WHOLE;
  return mark != TD_HARMONY_CONSTRAIN && at > p->at && header_to(p, s, at).text < at
             ? TD_MARKER_WHOLE
             : TD_MARKER_NONE;
}

// Finds the end of the header at p->at, which is p->scan then: a marker of *n bytes, or of none
// where the message's own is missing.
static td_marker_match find_header_end(td_output_parser *p, const source *s, size_t *n) {
  bool has_brace = memchr(s->text + p->at, '{', p->scan - p->at) != NULL;
  for (; p->scan < s->len; p->scan++) {
    const char c = s->text[p->scan];
    *n = 0;
    if (p->scan - p->at > MAX_HEADER) return TD_MARKER_WHOLE;
    if (c == '{' && !has_brace) {
      const td_harmony_header h = header_to(p, s, p->scan);
      if (h.name[0] && h.text == p->scan) return TD_MARKER_WHOLE;
      has_brace = true;
    }
    const td_marker_match match = c == '<' ? ends_header(p, s, n) : TD_MARKER_NONE;
    if (match != TD_MARKER_NONE) return match;
  }
  *n = 0;
  return s->is_final ? TD_MARKER_WHOLE : TD_MARKER_CUT;
}

// Reads a message's header, from p->at to <|message|>. Text without any is content, and so is what
// stands in place of a message.
static td_status take_message_header(td_output_parser *p, const source *s, outcome *o,
                                     td_err *err) {
  size_t n;
  *o = WAIT;
  skip_space(p, s);
  if (p->scan < p->at) p->scan = p->at;
  if (p->at == s->len) return TD_OK;
  const td_marker_match begins = td_harmony_begins_at(s->text, p->at, s->len);
  const bool is_marker = s->text[p->at] == '<' && s->len - p->at > 1 && s->end == TD_TEXT_CUT;
  if (begins == TD_MARKER_CUT && (!s->is_final || is_marker)) return TD_OK;
  if (begins != TD_MARKER_WHOLE) {
    enter(p, TD_PARTS_CONTENT, p->at);
    *o = MORE;
    return TD_OK;
  }
  if (find_header_end(p, s, &n) == TD_MARKER_CUT) return TD_OK;
  const td_harmony_header h = header_to(p, s, p->scan);
  const bool is_cut = p->scan == s->len && s->end == TD_TEXT_CUT;
  // Without the marker, text that the header does not account for is the message.
  const size_t body = n ? p->scan + n : h.text;
  const bool is_call = p->parse_tool_calls && h.name[0] && (n || h.text == p->scan);
  *o = MORE;
  if (!is_call || !td_tool_params_may_call(p->params, h.name)) {
    enter(p, h.is_thought ? TD_PARTS_REASONING : TD_PARTS_CONTENT, body);
    return TD_OK;
  }
  if (is_cut) { // the beginning of a call
    enter(p, TD_PARTS_DONE, s->len);
    return TD_OK;
  }
  const size_t at = h.next < p->scan ? h.next : body;
  p->back_at = at;
  td_status st = begin_call(p, 0, at, err);
  if (st != TD_OK) return st;
  enter(p, TD_PARTS_CALL, at);
  p->calls[p->n_calls].name = strdup(h.name);
  return p->calls[p->n_calls].name ? TD_OK : td_fail(err, TD_ENOMEM, "out of memory for a call");
}

static outcome take_message(td_output_parser *p, const source *s, td_output_part *part) {
  size_t n = 0;
  const bool reasons = p->state == TD_PARTS_REASONING;
  const td_marker_match match = find_message_end(p, s, &n);
  if (give(p, part, reasons ? TD_OUTPUT_REASONING : TD_OUTPUT_CONTENT, p->scan) == FOUND)
    return FOUND;
  if (match != TD_MARKER_WHOLE) return WAIT;
  enter(p, TD_PARTS_START, p->scan + n);
  return MORE;
}

// The message is a call's arguments.
static td_status take_arguments(td_output_parser *p, const source *s, td_output_part *part,
                                outcome *o, td_err *err) {
  size_t n = 0;
  td_tool_call *call = &p->calls[p->n_calls - p->is_given];
  if (!call->arguments.len) skip_space(p, s);
  if (p->scan < p->at) p->scan = p->at;
  const td_marker_match match = find_message_end(p, s, &n);
  td_buf_add(&call->arguments, s->text + p->at, p->scan - p->at);
  p->at = p->scan;
  const bool is_whole = match == TD_MARKER_WHOLE || s->end == TD_TEXT_ENDED;
  if (is_whole && call->arguments.len == 0) td_buf_str(&call->arguments, "{}");
  if (call->arguments.failed) return td_fail(err, TD_ENOMEM, "out of memory for a tool call");
  *o = WAIT;
  if (!is_whole) {
    if (call->arguments.len) *o = give_call(p, part) == FOUND ? FOUND : WAIT;
  } else {
    call->is_whole = is_json(call);
    *o = give_call(p, part);
    enter(p, p->one_call ? TD_PARTS_DONE : TD_PARTS_START, p->scan + n);
  }
  return TD_OK;
}

static td_status take_harmony(td_output_parser *p, const source *s, td_output_part *part,
                              outcome *o, td_err *err) {
  switch (p->state) {
  case TD_PARTS_START:
  case TD_PARTS_CALLS: return take_message_header(p, s, o, err);
  case TD_PARTS_REASONING:
  case TD_PARTS_CONTENT: *o = take_message(p, s, part); break;
  case TD_PARTS_CALL: return take_arguments(p, s, part, o, err);
  case TD_PARTS_DONE: *o = WAIT; break;
  }
  return TD_OK;
}

td_status td_output_parser_next(td_output_parser *parts, const char *text, size_t len,
                                td_text_end end, td_output_part *part, bool *found, td_err *err) {
  const source s = {.text = text, .len = len, .end = end, .is_final = end != TD_TEXT_GROWS};
  outcome o = MORE;
  td_status st = TD_OK;
  while (o == MORE && st == TD_OK) {
    if (parts->is_harmony) {
      st = take_harmony(parts, &s, part, &o, err);
      continue;
    }
    switch (parts->state) {
    case TD_PARTS_START: o = take_start(parts, &s); break;
    case TD_PARTS_REASONING: o = take_reasoning(parts, &s, part); break;
    case TD_PARTS_CONTENT: o = take_content(parts, &s, part); break;
    case TD_PARTS_CALLS: st = take_calls(parts, &s, part, &o, err); break;
    case TD_PARTS_CALL: st = take_call(parts, &s, part, &o, err); break;
    case TD_PARTS_DONE: o = WAIT; break;
    }
  }
  *found = o == FOUND;
  return st;
}

bool td_output_parser_is_cut(const td_output_parser *parts) {
  return parts->n_calls && !parts->calls[parts->n_calls - 1].is_whole;
}

bool td_output_parser_drop_cut(td_output_parser *parts, size_t *begin) {
  if (parts->state != TD_PARTS_CALL || !parts->is_given) return false;
  td_tool_call_free(&parts->calls[--parts->n_calls]);
  *begin = parts->back_at;
  parts->state = TD_PARTS_DONE;
  return true;
}
