// src/api/calls/harmony.c - headers of Harmony's messages.
#include "api/calls/harmony.h"

#include <string.h>

#include "api/calls/tool_calls_impl.h"
#include "base/str.h"

enum { MAX_BEGINNING = 2 * TD_CALL_MAX_NAME }; // bytes

td_marker_match td_harmony_mark_at(const char *text, size_t at, size_t len, td_harmony_mark *mark,
                                   size_t *n) {
  static const char *const marks[] = {"<|start|>", "<|channel|>", "<|constrain|>", "<|message|>",
                                      "<|end|>",   "<|call|>",    "<|return|>"};
  td_marker_match found = TD_MARKER_NONE;
  for (size_t i = 0; i < TD_COUNT(marks); i++) {
    const td_marker_match match = td_marker_at(marks[i], text, at, len);
    if (match == TD_MARKER_CUT) found = match;
    if (match != TD_MARKER_WHOLE) continue;
    *mark = i < TD_HARMONY_END ? (td_harmony_mark)i : TD_HARMONY_END;
    *n = strlen(marks[i]);
    return match;
  }
  return found;
}

static size_t word_end(const char *text, size_t at, size_t end) {
  const size_t begin = at;
  while (at < end && !td_is_space(text[at]) && text[at] != '<' && text[at] != '{')
    at++;
  return at > begin || at == end ? at : at + 1;
}

static bool is_word(const char *text, size_t len, const char *word) {
  return len == strlen(word) && memcmp(text, word, len) == 0;
}

#define TO        "to="
#define FUNCTIONS "functions."

static bool begins_with(const char *text, size_t at, size_t end, const char *what) {
  return td_marker_at(what, text, at, end) == TD_MARKER_WHOLE;
}

// Whether text[at..len) is a word that headers hold; CUT: it may become one.
static td_marker_match is_field(const char *text, size_t at, size_t end, size_t len) {
  static const char *const words[] = {"assistant", "analysis", "commentary", "final", "json"};
  static const char *const begins[] = {TO, FUNCTIONS};
  for (size_t i = 0; i < TD_COUNT(begins); i++)
    if (begins_with(text, at, end, begins[i])) return TD_MARKER_WHOLE;
  for (size_t i = 0; i < TD_COUNT(words); i++)
    if (is_word(text + at, end - at, words[i])) return TD_MARKER_WHOLE;
  if (end < len) return TD_MARKER_NONE;
  td_marker_match found = TD_MARKER_NONE;
  for (size_t i = 0; i < TD_COUNT(begins); i++)
    if (td_marker_at(begins[i], text, at, end) == TD_MARKER_CUT) found = TD_MARKER_CUT;
  for (size_t i = 0; i < TD_COUNT(words); i++)
    if (td_marker_at(words[i], text, at, end) == TD_MARKER_CUT) found = TD_MARKER_CUT;
  return found;
}

td_marker_match td_harmony_begins_at(const char *text, size_t at, size_t len) {
  const td_marker_match call = td_marker_at(TO FUNCTIONS, text, at, len);
  if (call == TD_MARKER_WHOLE) return call;
  for (const size_t begin = at; at - begin <= MAX_BEGINNING;) {
    td_harmony_mark mark;
    size_t n;
    if (at == len) return TD_MARKER_CUT;
    if (td_is_space(text[at])) {
      at++;
      continue;
    }
    if (text[at] == '<') {
      const td_marker_match match = td_harmony_mark_at(text, at, len, &mark, &n);
      return match == TD_MARKER_WHOLE && mark == TD_HARMONY_END ? TD_MARKER_NONE : match;
    }
    const size_t most = len - at > MAX_BEGINNING ? at + MAX_BEGINNING : len;
    const size_t end = word_end(text, at, most);
    const td_marker_match field = is_field(text, at, end, len);
    if (field != TD_MARKER_WHOLE) return field;
    at = end;
  }
  return TD_MARKER_NONE;
}

// A recipient as it is written. Answers of tools, which models also make up, are for "assistant".
static void take_recipient(td_harmony_header *h, const char *text, size_t len,
                           const td_tool_params *params) {
  char name[TD_CALL_MAX_NAME + 1];
  const size_t n = strlen(FUNCTIONS);
  td_call_strip(&text, &len);
  if (len == 0 || len > TD_CALL_MAX_NAME || memchr(text, '\0', len)) return;
  memcpy(name, text, len);
  name[len] = '\0';
  while (!td_tool_params_has_tool(params, name) && strncmp(name, FUNCTIONS, n) == 0)
    memmove(name, name + n, strlen(name + n) + 1);
  const bool is_offered = td_call_match_name(params, false, name);
  if (!name[0] || (!is_offered && (!strcmp(name, "assistant") || !strcmp(name, "user")))) return;
  if (!h->name[0] || (is_offered && !td_tool_params_has_tool(params, h->name)))
    memcpy(h->name, name, strlen(name) + 1);
}

typedef enum { ANY, ROLE, CHANNEL, TYPE, RECIPIENT } field;

// The field that a word is, behind a marker of that field or ANY.
static field field_of(field expected, const char *text, size_t at, size_t end, bool is_first) {
  const size_t n = end - at;
  if (text[at] == '{' || text[at] == '<') return ANY;
  if (expected != ANY) return expected;
  if (is_word(text + at, n, "json") || is_word(text + at, n, "code")) return TYPE;
  if (is_word(text + at, n, "analysis") || is_word(text + at, n, "commentary") ||
      is_word(text + at, n, "final"))
    return CHANNEL;
  if (is_first && is_word(text + at, n, "assistant")) return ROLE;
  return begins_with(text, at, end, FUNCTIONS) ? RECIPIENT : ANY;
}

td_harmony_header td_harmony_header_read(const char *text, size_t at, size_t end,
                                         const td_tool_params *params) {
  static const field behind[] = {[TD_HARMONY_START] = ROLE,
                                 [TD_HARMONY_CHANNEL] = CHANNEL,
                                 [TD_HARMONY_CONSTRAIN] = TYPE,
                                 [TD_HARMONY_MESSAGE] = ANY,
                                 [TD_HARMONY_END] = ANY};
  td_harmony_header h = {.text = end, .next = end};
  const size_t begin = at;
  field expected = ANY;
  bool is_empty = false; // the marker before was that of a message with a recipient
  while (at < end) {
    td_harmony_mark mark;
    size_t n;
    if (td_is_space(text[at])) {
      at++;
      continue;
    }
    if (td_harmony_mark_at(text, at, end, &mark, &n) == TD_MARKER_WHOLE) {
      if (is_empty && mark == TD_HARMONY_CHANNEL) h.next = at;
      is_empty = mark == TD_HARMONY_MESSAGE && h.name[0];
      expected = behind[mark];
      at += n;
      continue;
    }
    size_t word = word_end(text, at, end);
    if (begins_with(text, at, word, TO)) {
      at += strlen(TO);
      expected = RECIPIENT;
      if (at == word) continue;
    } else {
      const char *to = memmem(text + at, word - at, TO FUNCTIONS, strlen(TO FUNCTIONS));
      if (to) word = (size_t)(to - text);
    }
    const field is = field_of(expected, text, at, word, at == begin);
    if (is == RECIPIENT) {
      take_recipient(&h, text + at, word - at, params);
      h.next = end;
    } else if (is == CHANNEL) {
      h.is_thought = is_word(text + at, word - at, "analysis");
    } else if (is == ANY && h.text == end) {
      h.text = at;
    }
    expected = ANY;
    at = word;
  }
  return h;
}
