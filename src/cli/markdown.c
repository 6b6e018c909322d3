// src/cli/markdown.c - a state machine over characters; the marks that begin a line are held until
// they are whole, runs of `, * and _ until the character behind them, and what they would style
// until its end is known.
#include "cli/markdown.h"

#include <ctype.h>
#include <string.h>

// Styles. Emphasis by * and by _, which is shifted, are apart.
enum { ITALIC = 1, BOLD = 2, CODE = 4, HEADING = 8, MARK = 16, SHIFT = 5 };
typedef enum { GROWS, IS_MARK, IS_TEXT } verdict; // on the beginning of a line

// Always a character at a time, so that lines break alike whatever the pieces.
static void put(td_markdown *m, const char *s, size_t len, td_buf *out) {
  if (m->style != m->shown) {
    char code[32] = "\033[0";
    const uint32_t emphasis = m->style | m->style >> SHIFT;
    if ((emphasis & BOLD) || (m->style & HEADING)) strcat(code, ";1");
    if (emphasis & ITALIC) strcat(code, ";3");
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

static uint32_t emphasis_of(const td_markdown *m, char c) {
  return (c == '_' ? m->style >> SHIFT : m->style) & (ITALIC | BOLD);
}

// Whether n times c, * or _, end emphasis of those that are open; begin such. 1: italic, 2: bold,
// 3: both.
static bool closes(char c, size_t n, uint32_t open, char before, char next) {
  return n <= 3 && (open & n) == n && !is_blank(before) && (c == '*' || !is_word(next));
}

static bool opens(size_t n, uint32_t open, char before, char next) {
  return n <= 3 && !(open & n) && !is_blank(next) && !is_word(before);
}

// Whether another block begins with a line. GROWS: not known yet.
static verdict judge_next_line(const char *s, size_t len) {
  size_t at = 0, n = 0;
  while (at < len && s[at] == ' ')
    at++;
  while (at + n < len && s[at + n] == s[at])
    n++;
  if (at + n == len) return GROWS;
  const bool is_item = strchr("-+*", s[at]) && n == 1 && s[at + 1] == ' ';
  return strchr("\n#>~", s[at]) || is_item || (s[at] == '`' && n > 2) ? IS_MARK : IS_TEXT;
}

// Whether what the opener begins ends in what is held: IS_MARK; never: IS_TEXT. is_all: nothing
// follows.
static verdict judge_held(const td_markdown *m, bool is_all) {
  const char c = m->opener, *s = m->ahead;
  uint32_t open = m->n_opener, n_ticks = c == '`' ? open : 0;
  uint32_t others = emphasis_of(m, c); // open, too
  char before = m->before;
  for (size_t i = 0, n; i < m->n_held; i += n) {
    n = 1;
    if (s[i] == '\n') {
      const verdict v = judge_next_line(s + i + 1, m->n_held - i - 1);
      if (v == GROWS) return GROWS;
      if (v == IS_MARK || (m->style & HEADING)) return IS_TEXT;
    }
    if (s[i] == '\\' && !n_ticks && i + 1 < m->n_held && strchr("*_`", s[i + 1])) n = 2;
    if (n == 2 || (s[i] != '`' && (n_ticks || s[i] != c))) {
      if (n == 2 || n_ticks || !strchr("*_", s[i])) before = s[i + n - 1];
      continue;
    }
    while (i + n < m->n_held && s[i + n] == s[i])
      n++;
    if (i + n == m->n_held && !is_all) return GROWS;
    const char next = i + n < m->n_held ? s[i + n] : '\n';
    if (s[i] == '`') {
      if (c == '`' && n == open) return IS_MARK;
      if (c != '`') n_ticks = !n_ticks ? (uint32_t)n : n == n_ticks ? 0 : n_ticks;
    } else if (closes(c, n, open | others, before, next)) {
      open &= ~(uint32_t)n;
      others &= ~(uint32_t)n;
      if (!open) return IS_MARK;
    } else if (opens(n, open | others, before, next)) {
      others |= (uint32_t)n;
    }
  }
  return GROWS;
}

// As text, beside which others are judged as if it were not there.
static void put_run(td_markdown *m, char c, uint32_t n, td_buf *out) {
  const char before = m->before;
  while (n--)
    put(m, &c, 1, out);
  m->before = before;
}

// Shows the opener, as a style or as text. What was held comes next.
static void release_held(td_markdown *m, bool is_mark, td_buf *out) {
  const char c = m->opener;
  const uint32_t n = m->n_opener;
  m->n_opener = m->n_held = 0;
  if (!is_mark) {
    put_run(m, c, n, out);
    return;
  }
  m->style |= c == '`' ? CODE : c == '_' ? n << SHIFT : n;
  if (c == '`') m->n_ticks = n;
}

// Puts a character back, behind those that were.
static void put_back(td_markdown *m, const char *s, size_t len) {
  memmove(m->ahead + m->n_held + len, m->ahead + m->n_held, m->n_ahead - m->n_held);
  memcpy(m->ahead + m->n_held, s, len);
  m->n_held += (uint32_t)len;
  m->n_ahead += (uint32_t)len;
}

// The run is over: next follows it. What neither begins nor ends anything is text.
static void end_run(td_markdown *m, char next, td_buf *out) {
  const uint32_t n = m->n_run, open = emphasis_of(m, m->run);
  const char c = m->run;
  const bool is_code = m->style & CODE;
  m->n_run = 0;
  if (c == '`' ? is_code && n == m->n_ticks : closes(c, n, open, m->before, next)) {
    m->style &= ~(c == '`' ? CODE : c == '_' ? n << SHIFT : n);
  } else if (c == '`' ? !is_code : opens(n, open, m->before, next)) {
    m->opener = c;
    m->n_opener = n;
    m->n_held = 0;
    m->n_in_line = sizeof m->mark;
  } else {
    put_run(m, c, n, out);
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
  if (m->n_opener) {
    put_back(m, s, len);
    return;
  }
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

// Takes what is ahead, as far as it is not held.
static void drain(td_markdown *m, td_buf *out) {
  while (m->n_held < m->n_ahead) {
    char c[4];
    const size_t n = char_len((unsigned char)m->ahead[m->n_held]);
    if (!m->n_opener) {
      memcpy(c, m->ahead, n);
      m->n_ahead -= (uint32_t)n;
      memmove(m->ahead, m->ahead + n, m->n_ahead);
      take(m, c, n, out);
      m->n_held = 0;
      continue;
    }
    const char before = m->n_held ? m->ahead[m->n_held - 1] : 0;
    m->n_held += (uint32_t)n;
    m->n_in_line = m->ahead[m->n_held - n] == '\n' ? 0 : m->n_in_line + 1;
    // What may decide: a run that is over, and the beginning of a line.
    const bool is_news = before == m->opener || m->n_in_line < sizeof m->mark;
    verdict v = is_news ? judge_held(m, false) : GROWS;
    if (v == GROWS && m->n_held >= TD_MARKDOWN_HELD) v = IS_TEXT;
    if (v != GROWS) release_held(m, v == IS_MARK, out);
  }
}

void td_markdown_add(td_markdown *m, const char *text, size_t len, td_buf *out) {
  for (size_t i = 0; i < len; i++) {
    m->part[m->n_part++] = text[i];
    if (m->n_part < char_len((unsigned char)m->part[0])) continue;
    memcpy(m->ahead + m->n_ahead, m->part, m->n_part);
    m->n_ahead += (uint32_t)m->n_part;
    m->n_part = 0;
    drain(m, out);
  }
}

void td_markdown_end(td_markdown *m, td_buf *out) {
  do {
    if (m->n_opener)
      release_held(m, judge_held(m, true) == IS_MARK, out);
    else if (m->n_mark)
      release_mark(m, out);
    else if (m->n_run)
      end_run(m, '\n', out);
    m->n_held = 0;
    drain(m, out);
  } while (m->n_opener || m->n_mark || m->n_run);
  if (m->is_escaped) put(m, "\\", 1, out);
  if (m->n_part) put(m, m->part, m->n_part, out);
  if (m->shown) td_word_wrap_add(&m->wrap, "\033[0m", 4, out);
  td_word_wrap_end(&m->wrap, out);
  *m = (td_markdown){.wrap = m->wrap, .is_start = true};
}

void td_markdown_free(td_markdown *m) {
  td_word_wrap_free(&m->wrap);
}
