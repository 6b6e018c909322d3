// src/cli/word_wrap.c - word wrap of a stream of text.
#include "cli/word_wrap.h"

#include <wchar.h>

#include "base/utf8.h"

enum { TAB = 8, FENCE = 3 };

// Emits the word, or another part of one that no line holds.
static void emit_word(td_word_wrap *w, td_buf *out) {
  const bool is_long = w->column + w->n_spaces + w->word_width > w->width;
  if (w->word_width && is_long && w->column && !w->is_split) {
    td_buf_char(out, '\n');
    w->column = 0;
  } else {
    for (uint32_t i = 0; i < w->n_spaces; i++)
      td_buf_char(out, ' ');
    w->column += w->n_spaces;
  }
  td_buf_add(out, td_buf_text(&w->word), w->word.len);
  w->column += w->word_width;
  if (w->column > w->width) w->column %= w->width; // the terminal itself breaks a longer word
  w->n_spaces = w->word_width = 0;
  w->is_split = false;
  td_buf_clear(&w->word);
}

static void end_line(td_word_wrap *w, td_buf *out) {
  emit_word(w, out);
  td_buf_char(out, '\n');
  if (w->n_ticks >= FENCE) w->is_fenced = !w->is_fenced;
  w->column = w->n_ticks = 0;
  w->is_in_line = false;
}

// Whether a line may be broken before and after the character: ideographs and kana, but not wide
// punctuation, which does not begin a line.
static bool is_ideograph(uint32_t c, int width) {
  return width == 2 && !(c >= 0x3000 && c <= 0x3020) && !(c >= 0xFF00 && c <= 0xFF20);
}

static void take_character(td_word_wrap *w, uint32_t c, const char *bytes, size_t len,
                           td_buf *out) {
  if (c == '`' && !w->is_in_line) w->n_ticks++;
  if (c != '`' && c != ' ') w->is_in_line = true;
  if (w->is_fenced || w->n_ticks >= FENCE) { // as it is
    emit_word(w, out);
    td_buf_add(out, bytes, len);
    return;
  }
  if (c == '\033' || w->is_escape) {
    td_buf_add(&w->word, bytes, len);
    w->is_escape = c != 'm';
    return;
  }
  if (c == ' ' && !w->is_code) {
    if (w->word.len) emit_word(w, out);
    w->is_split = false;
    w->n_spaces++;
    return;
  }
  if (c == '\t') {
    emit_word(w, out);
    td_buf_char(out, '\t');
    w->column = (w->column / TAB + 1) * TAB;
    return;
  }
  const int width = wcwidth((wchar_t)c);
  if (is_ideograph(c, width) && w->word.len && !w->is_code) emit_word(w, out);
  td_buf_add(&w->word, bytes, len);
  w->word_width += width > 0 ? (uint32_t)width : 0;
}

void td_word_wrap_add(td_word_wrap *w, const char *text, size_t len, td_buf *out) {
  for (size_t at = 0; at < len && w->width;) {
    uint32_t c;
    const int n = td_utf8_decode(text + at, len - at, &c);
    const size_t n_bytes = n > 0 ? (size_t)n : 1;
    if (n <= 0) c = 0xFFFD;
    if (c == '\n')
      end_line(w, out);
    else
      take_character(w, c, text + at, n_bytes, out);
    at += n_bytes;
  }
  if (!w->width) td_buf_add(out, text, len);
  if (w->width && w->word_width > w->width) { // no line holds it
    emit_word(w, out);
    w->is_split = true;
  }
}

void td_word_wrap_end(td_word_wrap *w, td_buf *out) {
  if (w->word.len) emit_word(w, out);
  td_buf word = w->word;
  *w = (td_word_wrap){.width = w->width, .word = word};
}

void td_word_wrap_free(td_word_wrap *w) {
  td_buf_free(&w->word);
}
