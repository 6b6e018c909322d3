// src/api/answer.c - turns one choice's tokens into text and decides how much of it may be sent.
#include "api/answer.h"

#include <stdlib.h>
#include <string.h>

#include "base/grow.h"
#include "base/utf8.h"

void td_answer_init(td_answer *answer, const td_tokenizer *tok, const td_answer_opts *opts) {
  memset(answer, 0, sizeof *answer);
  answer->stops = opts->stops;
  answer->keep_tokens = opts->keep_tokens;
  answer->min_tokens = opts->min_tokens;
  td_detok_init(&answer->detok, tok, !opts->shows_special);
}

void td_answer_free(td_answer *answer) {
  td_detok_free(&answer->detok);
  td_buf_free(&answer->text);
  free(answer->tokens);
  answer->tokens = NULL;
}

static td_status keep(td_answer *a, const td_wire_token *token, size_t begin, td_err *err) {
  if (!TD_GROW(a->tokens, a->n_kept, a->cap, 64)) return td_fail(err, TD_ENOMEM, "out of memory");
  a->tokens[a->n_kept++] = (td_answer_token){
      .token = *token, .begin = begin, .end = a->text.len, .n_chars_before = a->n_chars};
  return TD_OK;
}

static void scan(td_answer *a) {
  if (a->n_tokens < a->min_tokens) {
    a->n_sure = a->text.len;
    return;
  }
  a->n_sure = td_stops_scan(a->stops, td_buf_text(&a->text), a->text.len, a->n_sure, a->finished,
                            &a->stopped);
}

td_status td_answer_add(td_answer *answer, const td_wire_token *token, td_err *err) {
  td_answer *a = answer;
  if (a->stopped || a->finished) return TD_OK;
  a->n_tokens++;
  if (token->is_eos) return TD_OK;
  size_t begin = a->text.len;
  td_status st = td_detok_feed(&a->detok, token->id, &a->text, err);
  if (st == TD_OK) st = td_buf_status(&a->text, err);
  if (st == TD_OK && a->keep_tokens) st = keep(a, token, begin, err);
  if (st != TD_OK) return st;
  a->n_chars += td_utf8_count(td_buf_text(&a->text) + begin, a->text.len - begin);
  scan(a);
  return TD_OK;
}

td_status td_answer_echo(td_answer *answer, const td_wire_token *token, td_err *err) {
  td_answer *a = answer;
  size_t begin = a->text.len;
  td_status st = td_detok_feed(&a->detok, token->id, &a->text, err);
  if (st == TD_OK) st = td_buf_status(&a->text, err);
  if (st == TD_OK && a->keep_tokens) st = keep(a, token, begin, err);
  a->n_chars += td_utf8_count(td_buf_text(&a->text) + begin, a->text.len - begin);
  a->n_sure = a->text.len;
  return st;
}

td_status td_answer_finish(td_answer *answer, bool is_cut, td_err *err) {
  td_answer *a = answer;
  if (a->finished) return TD_OK;
  a->finished = true;
  a->is_cut = is_cut;
  if (a->stopped) return TD_OK;
  td_status st = td_detok_flush(&a->detok, &a->text, err);
  if (st == TD_OK) st = td_buf_status(&a->text, err);
  if (st != TD_OK) return st;
  // An incomplete character at the end counts as part of the last token.
  if (a->n_kept > 0) a->tokens[a->n_kept - 1].end = a->text.len;
  scan(a);
  return TD_OK;
}

// Number of leading tokens whose text is final. A token without text waits for the next one that
// has some, because it may hold the first bytes of a character.
static size_t sure_tokens(td_answer *a) {
  size_t n = a->n_tokens_taken;
  if (a->stopped || a->finished) {
    while (n < a->n_kept && (a->tokens[n].begin < a->n_sure || !a->stopped))
      n++;
    return n;
  }
  for (; a->n_seen < a->n_kept && a->tokens[a->n_seen].end <= a->n_sure; a->n_seen++)
    if (a->tokens[a->n_seen].end > a->tokens[a->n_seen].begin) n = a->n_seen + 1;
  return n;
}

// Bytes of text that may be sent. When tokens are kept, text is released in whole tokens only, so
// that each piece is exactly the text of its tokens.
static size_t sure_text(const td_answer *a, size_t last) {
  if (!a->keep_tokens || a->stopped || a->finished) return a->n_sure;
  return last > a->n_tokens_taken ? a->tokens[last - 1].end : a->n_taken;
}

bool td_answer_take(td_answer *answer, td_answer_piece *piece) {
  td_answer *a = answer;
  size_t last = sure_tokens(a);
  *piece = (td_answer_piece){
      .begin = a->n_taken, .end = sure_text(a, last), .first = a->n_tokens_taken, .last = last};
  a->n_taken = piece->end;
  a->n_tokens_taken = last;
  return piece->end > piece->begin || piece->last > piece->first;
}
