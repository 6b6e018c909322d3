#include "api/parts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/parts_call.h"
#include "base/buf.h"

#define THINK     "<think>"
#define THINK_END "</think>"

void td_parts_free(td_parts *parts) {
  for (uint32_t i = 0; i < parts->n_calls; i++) {
    free(parts->calls[i].name);
    free(parts->calls[i].arguments);
  }
  free(parts->calls);
  parts->calls = NULL;
  parts->n_calls = parts->cap = 0;
}

bool td_parts_prompt_thinks(const char *prompt, size_t len) {
  size_t end = td_trim_end(prompt, 0, len), n = strlen(THINK);
  return end >= n && memcmp(prompt + end - n, THINK, n) == 0;
}

// ---- markers ----------------------------------------------------------------------------------

// Where one of markers[n] stands first in text[at..len), *whole; else where one may have begun
// that the text's end cuts off, or len.
static size_t find_marker(const char *const *markers, size_t n, const char *text, size_t at,
                          size_t len, bool *whole) {
  *whole = false;
  for (; at < len; at++) {
    if (text[at] != '<') continue;
    for (size_t i = 0; i < n; i++) {
      td_marker_match match = td_marker_at(markers[i], text, at, len);
      if (match == TD_MARKER_NONE) continue;
      *whole = match == TD_MARKER_WHOLE;
      return at;
    }
  }
  return len;
}

// ---- states -----------------------------------------------------------------------------------

static void enter(td_parts *p, td_parts_state state, size_t at) {
  p->state = state;
  p->at = at;
  p->has_begun = false;
}

static bool give(td_parts *p, td_part *part, td_part_kind kind, size_t end) {
  *part = (td_part){.kind = kind, .begin = p->at, .end = end};
  p->at = end;
  p->has_begun = true;
  return part->end > part->begin;
}

// A stretch of text up to a marker. White space in front of it and before the marker is not given
// out, so what ends in some waits for what follows. *at_marker: a marker stands at *stop.
static bool take_text(td_parts *p, td_part_kind kind, const char *const *markers, size_t n_markers,
                      const char *text, size_t len, bool is_final, td_part *part, size_t *stop,
                      bool *at_marker) {
  if (!p->has_begun) p->at = td_skip_space(text, p->at, len);
  *stop = find_marker(markers, n_markers, text, p->at, len, at_marker);
  if (is_final && !*at_marker) *stop = len;
  bool keeps_space = n_markers == 0 || (is_final && !*at_marker);
  size_t end = keeps_space ? *stop : td_trim_end(text, p->at, *stop);
  return end > p->at && give(p, part, kind, end);
}

// Returns whether a part was found. *more: the state has changed, look again.
static bool take_reasoning(td_parts *p, const char *text, size_t len, bool is_final, td_part *part,
                           bool *more) {
  static const char *const markers[] = {THINK_END};
  size_t stop;
  bool at_end;
  bool found = take_text(p, TD_PART_REASONING, markers, 1, text, len, is_final, part, &stop,
                         &at_end);
  if (at_end) enter(p, TD_PARTS_CONTENT, stop + strlen(THINK_END));
  *more = at_end;
  return found;
}

static bool take_content(td_parts *p, const char *text, size_t len, bool is_final, td_part *part,
                         bool *more) {
  size_t n_markers;
  const char *const *markers = td_call_openers(&n_markers);
  size_t stop;
  bool at_call;
  bool found = take_text(p, TD_PART_CONTENT, markers, p->with_calls ? n_markers : 0, text, len,
                         is_final, part, &stop, &at_call);
  if (at_call) {
    enter(p, TD_PARTS_CALLS, stop);
    p->call_at = stop;
  }
  *more = at_call;
  return found;
}

static bool take_start(td_parts *p, const char *text, size_t len, bool is_final) {
  size_t at = td_skip_space(text, p->at, len);
  if (at == len && !is_final) return false;
  td_marker_match match = p->begins_in_reasoning ? TD_MARKER_NONE
                                                 : td_marker_at(THINK, text, at, len);
  if (match == TD_MARKER_CUT && !is_final) return false;
  if (p->begins_in_reasoning) {
    enter(p, TD_PARTS_REASONING, p->at);
  } else if (match == TD_MARKER_WHOLE) {
    enter(p, TD_PARTS_REASONING, at + strlen(THINK));
  } else {
    p->state = TD_PARTS_CONTENT;
    p->has_begun = true; // white space in front of a plain answer is the model's own
  }
  return true;
}

static td_status keep_call(td_parts *p, td_tool_call *call, td_err *err) {
  if (p->n_calls == p->cap) {
    uint32_t cap = p->cap ? 2 * p->cap : 4;
    td_tool_call *grown = realloc(p->calls, cap * sizeof *grown);
    if (!grown) {
      free(call->name);
      free(call->arguments);
      return td_fail(err, TD_ENOMEM, "out of memory for a tool call");
    }
    p->calls = grown;
    p->cap = cap;
  }
  if (!call->id[0]) {
    snprintf(call->id, sizeof call->id, "call_%016llx%02x", (unsigned long long)p->id, p->n_calls);
  }
  p->calls[p->n_calls++] = *call;
  return TD_OK;
}

// What began like a call and is none is text, from its first marker on.
static bool give_back(td_parts *p, const char *text, size_t end, td_part *part) {
  enter(p, TD_PARTS_CONTENT, td_skip_space(text, p->call_at, end));
  return give(p, part, TD_PART_CONTENT, end);
}

// At p->at stands a call, or a marker around calls, or neither.
static td_status take_call(td_parts *p, const char *text, size_t len, bool is_final, td_part *part,
                           bool *found, bool *more, td_err *err) {
  td_tool_call call;
  size_t end = p->at;
  td_call_result result;
  td_status st = td_call_take(&result, &call, text, &end, len, is_final, err);
  if (st != TD_OK) return st;
  switch (result) {
  case TD_CALL_OPENED: p->at = end; break;
  case TD_CALL_CLOSED: p->at = p->call_at = end; break;
  case TD_CALL_NONE: enter(p, TD_PARTS_CONTENT, end); break;
  case TD_CALL_MALFORMED: *found = give_back(p, text, end, part); break;
  case TD_CALL_CUT:
    if (is_final) *found = give_back(p, text, len, part);
    *more = false;
    return TD_OK;
  case TD_CALL_WHOLE:
    p->at = p->call_at = end;
    *part = (td_part){.kind = TD_PART_CALL, .call = p->n_calls};
    *found = true;
    return keep_call(p, &call, err);
  }
  *more = true;
  return TD_OK;
}

td_status td_parts_next(td_parts *parts, const char *text, size_t len, bool is_final, td_part *part,
                        bool *found, td_err *err) {
  *found = false;
  bool more = true;
  while (!*found && more) {
    more = false;
    switch (parts->state) {
    case TD_PARTS_START: more = take_start(parts, text, len, is_final); break;
    case TD_PARTS_REASONING:
      *found = take_reasoning(parts, text, len, is_final, part, &more);
      break;
    case TD_PARTS_CONTENT: *found = take_content(parts, text, len, is_final, part, &more); break;
    case TD_PARTS_CALLS: {
      td_status st = take_call(parts, text, len, is_final, part, found, &more, err);
      if (st != TD_OK) return st;
      break;
    }
    }
  }
  return TD_OK;
}
