// src/api/delta.c - collects what a choice gained since the last chunk.
#include "api/delta.h"

static void note_call(td_delta *delta, uint32_t call) {
  if (delta->first_call == delta->last_call) delta->first_call = call;
  delta->last_call = call + 1;
}

td_status td_delta_gather(td_delta *delta, td_output_parser *parts, const td_answer *answer,
                          td_err *err) {
  const char *text = td_buf_text(&answer->text);
  const bool is_cut = answer->stopped || answer->is_cut;
  const td_text_end end = is_cut ? TD_TEXT_CUT : answer->finished ? TD_TEXT_ENDED : TD_TEXT_GROWS;
  bool found;
  td_output_part part;
  td_status st;
  while ((st = td_output_parser_next(parts, text, answer->n_taken, end, &part, &found, err)) ==
             TD_OK &&
         found) {
    if (part.kind == TD_OUTPUT_CALL) {
      note_call(delta, part.call);
      continue;
    }
    td_buf *out = part.kind == TD_OUTPUT_CONTENT ? &delta->content : &delta->reasoning;
    td_buf_add(out, text + part.begin, part.end - part.begin);
  }
  if (st == TD_OK) st = td_buf_status(&delta->content, err);
  return st == TD_OK ? td_buf_status(&delta->reasoning, err) : st;
}

void td_delta_clear(td_delta *delta, td_output_parser *parts) {
  for (uint32_t i = delta->first_call; i < delta->last_call; i++) {
    parts->calls[i].is_told = true;
    parts->calls[i].n_told = parts->calls[i].arguments.len;
  }
  td_buf_clear(&delta->reasoning);
  td_buf_clear(&delta->content);
  delta->first_call = delta->last_call = 0;
}

void td_delta_free(td_delta *delta) {
  td_buf_free(&delta->reasoning);
  td_buf_free(&delta->content);
}
