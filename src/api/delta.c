// src/api/delta.c - collects what a choice gained since the last chunk.
#include "api/delta.h"
#include "base/str.h"

static void add_text(td_delta *delta, const td_output_part *part, const char *text) {
  td_buf *out = part->kind == TD_OUTPUT_CONTENT ? &delta->content : &delta->reasoning;
  char *end = &delta->ends[part->kind];
  const bool resumes = *end && delta->last != part->kind;
  if (resumes && !td_is_space(*end) && !td_is_space(text[part->begin])) td_buf_char(out, '\n');
  td_buf_add(out, text + part->begin, part->end - part->begin);
  *end = text[part->end - 1];
}

static bool precedes(const td_delta *delta, td_output_part_kind kind) {
  const bool has_call = delta->first_call < delta->last_call;
  return kind != TD_OUTPUT_CALL &&
         (has_call || (kind == TD_OUTPUT_REASONING && delta->content.len));
}

td_status td_delta_parse(td_delta *delta, td_output_parser *parts, const char *text, size_t len,
                         td_text_end end, td_err *err) {
  bool found = true;
  td_status st = TD_OK;
  for (;;) {
    td_output_part part = delta->held;
    if (!delta->has_held) st = td_output_parser_next(parts, text, len, end, &part, &found, err);
    if (st != TD_OK || !found) break;
    delta->held = part;
    delta->has_held = delta->in_order && precedes(delta, part.kind);
    if (delta->has_held) break;
    if (part.kind == TD_OUTPUT_CALL) {
      if (delta->first_call == delta->last_call) delta->first_call = part.call;
      delta->last_call = part.call + 1;
    } else {
      add_text(delta, &part, text);
    }
    delta->last = part.kind;
  }
  td_output_part rest = {.kind = TD_OUTPUT_CONTENT, .end = len};
  if (st == TD_OK && end == TD_TEXT_ENDED && !delta->in_order &&
      td_output_parser_drop_cut(parts, &rest.begin)) {
    delta->last_call--;
    add_text(delta, &rest, text);
  }
  if (st == TD_OK) st = td_buf_status(&delta->content, err);
  return st == TD_OK ? td_buf_status(&delta->reasoning, err) : st;
}

td_status td_delta_gather(td_delta *delta, td_output_parser *parts, const td_answer *answer,
                          td_err *err) {
  const bool is_cut = answer->stopped || answer->is_cut;
  const td_text_end end = is_cut ? TD_TEXT_CUT : answer->finished ? TD_TEXT_ENDED : TD_TEXT_GROWS;
  return td_delta_parse(delta, parts, td_buf_text(&answer->text), answer->n_taken, end, err);
}

void td_delta_clear(td_delta *delta, td_output_parser *parts) {
  for (uint32_t i = delta->first_call; i < delta->last_call; i++) {
    parts->calls[i].is_sent = true;
    parts->calls[i].n_sent = parts->calls[i].arguments.len;
  }
  td_buf_clear(&delta->reasoning);
  td_buf_clear(&delta->content);
  delta->first_call = delta->last_call = 0;
}

void td_delta_free(td_delta *delta) {
  td_buf_free(&delta->reasoning);
  td_buf_free(&delta->content);
}
