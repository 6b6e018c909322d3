// src/cli/markdown.c - a state machine over characters; the marks that begin a line are held until
// they are whole, and runs of `, * and _ until the character behind them.
#include "cli/markdown.h"

#include <ctype.h>
#include <string.h>

enum { ITALIC = 1, BOLD = 2, CODE = 4, HEADING = 8, MARK = 16 }; // styles
typedef enum { GROWS, IS_MARK, IS_TEXT } verdict;                // on the beginning of a line

// Always a character at a time, so that lines break alike whatever the pieces.
static void put(td_markdown *m, const char *s, size_t len, td_buf *out) {
  if (m->style != m->shown) {
    char code[32] = "\033[0";
    if (m->style & (BOLD | HEADING)) strcat(code, ";1");
    if (m->style & ITALIC) strcat(code, ";3");
    if (m->style & MARK) strcat(code, ";2");
    if (m->style & HEADING) strcat(code, ";35");
    if (m->style & CODE) strcat(code, ";36");
    strcat(code, "m");
    td_word_wrap_add(&m->wrap, code, strlen(code), out);
    m->shown = m->style;
  }
  m->wrap.is_code = (m->style & CODE) != 0;
  td_word_wrap_add(&m->wrap, s, len, out);
  m->before = s[len - 1];
  if (m->before != ' ' && m->before != '\n') m->is_blank = false;
}

static void put_each(td_markdown *m, const char *s, size_t len, td_buf *out) {
  for (size_t i = 0; i < len; i++)
    put(m, s + i, 1, out);
}

static void put_mark(td_markdown *m, const char *s, size_t len, td_buf *out) {
  m->style = MARK;
  put(m, s, len, out);
  m->style = m->n_ticks = 0;
}

// ---- within a line ------------------------------------------------------------------------------

static bool is_blank(char c) {
  return c == ' ' || c == '\t' || c == '\n' || !c;
}

static bool is_word(char c) {
  return isalnum((unsigned char)c);
}

// The run is over: next follows it. What neither begins nor ends anything is text.
static void end_run(td_markdown *m, char next, td_buf *out) {
  const uint32_t n = m->n_run, emphasis = n <= 3 ? n : 0; // 1: italic, 2: bold, 3: both
  const char c = m->run, text[] = {c};
  m->n_run = 0;
  if (c == '`' && (!(m->style & CODE) || n == m->n_ticks)) {
    m->style ^= CODE;
    m->n_ticks = n;
    return;
  }
  const bool is_open = emphasis && (m->style & emphasis) == emphasis && m->opened_by[emphasis] == c;
  if (c != '`' && is_open && !is_blank(m->before) && (c == '*' || !is_word(next))) {
    m->style &= ~emphasis;
  } else if (c != '`' && emphasis && !(m->style & emphasis) && !is_blank(next) &&
             !is_word(m->before)) {
    m->style |= emphasis;
    for (uint32_t i = 1; i <= 3; i++)
      if (i & emphasis) m->opened_by[i] = c;
  } else {
    for (uint32_t i = 0; i < n; i++)
      put(m, text, 1, out);
  }
}

static void end_line(td_markdown *m, td_buf *out) {
  m->style = m->is_blank ? 0 : m->style & ~(uint32_t)HEADING;
  put(m, "\n", 1, out);
  m->is_start = m->is_blank = true;
}

static void take_in_line(td_markdown *m, const char *s, size_t len, td_buf *out) {
  const char c = *s;
  if (m->fence) {
    m->style = CODE;
    put(m, s, len, out);
    m->is_start = c == '\n';
    return;
  }
  if (m->n_run && c == m->run) {
    m->n_run++;
    return;
  }
  if (m->n_run) end_run(m, c, out);
  const bool is_code = m->style & CODE, was_escaped = m->is_escaped;
  m->is_escaped = false;
  if (was_escaped && !strchr("*_`", c)) put(m, "\\", 1, out);
  if (was_escaped && strchr("*_`", c)) {
    put(m, s, len, out);
  } else if (c == '`' || (!is_code && (c == '*' || c == '_'))) {
    m->run = c;
    m->n_run = 1;
  } else if (c == '\\' && !is_code) {
    m->is_escaped = true;
  } else if (c == '\n') {
    end_line(m, out);
  } else {
    put(m, s, len, out);
  }
}

// ---- the beginning of a line --------------------------------------------------------------------

static verdict judge_fenced(td_markdown *m, const char *at, td_buf *out) {
  const size_t n = strspn(at, (char[]){m->fence, 0}), n_blank = strspn(at + n, " ");
  if (!at[n + n_blank]) return at[n] && n < m->n_fence ? IS_TEXT : GROWS;
  if (n < m->n_fence || at[n + n_blank] != '\n') return IS_TEXT;
  m->fence = 0;
  m->style = MARK;
  put_each(m, m->mark, m->n_mark - 1, out);
  m->style = 0;
  end_line(m, out);
  return IS_MARK;
}

static verdict judge_fence(td_markdown *m, const char *at, td_buf *out) {
  const size_t n = strspn(at, (char[]){*at, 0});
  if (!at[n]) return GROWS;
  if (n < 3 || (*at == '`' && strchr(at + n, '`'))) return IS_TEXT;
  if (m->mark[m->n_mark - 1] != '\n') return GROWS;
  m->style = MARK;
  m->n_ticks = 0;
  put_each(m, m->mark, m->n_mark - 1, out);
  m->style = 0;
  end_line(m, out);
  m->fence = *at;
  m->n_fence = (uint32_t)n;
  return IS_MARK;
}

static verdict judge(td_markdown *m, td_buf *out) {
  const size_t indent = strspn(m->mark, " ");
  const char *at = m->mark + indent;
  if (m->fence) return judge_fenced(m, at, out);
  if (*at == '`' || *at == '~') return judge_fence(m, at, out);
  if (*at == '#') {
    const size_t n = strspn(at, "#");
    if (n > 6 || (at[n] && at[n] != ' ')) return IS_TEXT;
    if (!at[n]) return GROWS;
    m->style = HEADING;
    m->n_ticks = 0;
    m->is_start = false;
    return IS_MARK;
  }
  if (*at == '>') {
    put_each(m, m->mark, indent, out);
    put_mark(m, "\u2502", 3, out);
    return IS_MARK;
  }
  if (!*at) return GROWS;
  if (!strchr("-+*", *at) || (at[1] && at[1] != ' ')) return IS_TEXT;
  if (!at[1]) return GROWS;
  m->style = 0;
  put_each(m, m->mark, indent, out);
  put_mark(m, "\u2022", 3, out);
  put(m, " ", 1, out);
  m->is_start = false;
  return IS_MARK;
}

static void release_mark(td_markdown *m, td_buf *out) {
  char text[sizeof m->mark];
  const size_t n = m->n_mark;
  memcpy(text, m->mark, n);
  m->n_mark = 0;
  m->is_start = false;
  for (size_t i = 0; i < n; i++)
    take_in_line(m, text + i, 1, out);
}

static void take(td_markdown *m, const char *s, size_t len, td_buf *out) {
  if (m->is_start && m->n_run) end_run(m, '\n', out);
  if (!m->is_start || len > 1 || m->n_mark + 2 > sizeof m->mark) {
    if (m->is_start) release_mark(m, out);
    take_in_line(m, s, len, out);
    return;
  }
  m->mark[m->n_mark++] = *s;
  m->mark[m->n_mark] = 0;
  const verdict v = judge(m, out);
  if (v == IS_TEXT) release_mark(m, out);
  if (v == IS_MARK) m->n_mark = 0;
}

// ---- the stream ---------------------------------------------------------------------------------

// The bytes of a character that begins so.
static size_t char_len(unsigned char c) {
  return c < 0xC0 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
}

void td_markdown_add(td_markdown *m, const char *text, size_t len, td_buf *out) {
  for (size_t i = 0; i < len; i++) {
    m->part[m->n_part++] = text[i];
    if (m->n_part < char_len((unsigned char)m->part[0])) continue;
    const size_t n = m->n_part;
    m->n_part = 0;
    take(m, m->part, n, out);
  }
}

void td_markdown_end(td_markdown *m, td_buf *out) {
  release_mark(m, out);
  if (m->n_run) end_run(m, '\n', out);
  if (m->is_escaped) put(m, "\\", 1, out);
  if (m->n_part) put(m, m->part, m->n_part, out);
  if (m->shown) td_word_wrap_add(&m->wrap, "\033[0m", 4, out);
  td_word_wrap_end(&m->wrap, out);
  *m = (td_markdown){.wrap = m->wrap, .is_start = true};
}

void td_markdown_free(td_markdown *m) {
  td_word_wrap_free(&m->wrap);
}
