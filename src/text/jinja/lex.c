// src/text/jinja/lex.c - splits source text into tokens, with jinja2's white space control and
// transformers' settings: trim_blocks, lstrip_blocks, no line statements, the final newline
// dropped.
#include <ctype.h>
#include <string.h>

#include "base/utf8.h"
#include "text/jinja/jinja.h"
#include "text/unicode/python_chars.h"

typedef struct {
  jj *j;
  const jj_str *src; // with normalized newlines
  size_t at;
  uint32_t line; // line number of position `counted`
  size_t counted;
  bool line_starting; // the last consumed text ended a line
  char *open;         // closing brackets expected within the tag
  size_t n_open, cap_open;
  jj_tokens tokens;
} lexer;

// Converts \r\n and \r to \n and drops one newline at the end.
static const jj_str *normalize(jj *j, const char *source, size_t len) {
  char *text = jj_alloc(j, len);
  size_t n = 0;
  for (size_t i = 0; i < len; i++) {
    if (source[i] == '\r') {
      text[n++] = '\n';
      if (i + 1 < len && source[i + 1] == '\n') i++;
    } else {
      text[n++] = source[i];
    }
  }
  if (n && text[n - 1] == '\n') n--;
  return jj_str_borrow(j, text, n, false);
}

// Sets the line for messages to that of byte `at`, which never decreases.
static uint32_t line_of(lexer *x, size_t at) {
  for (; x->counted < at; x->counted++)
    x->line += x->src->p[x->counted] == '\n';
  x->j->line = x->line;
  return x->line;
}

static bool looking_at(const lexer *x, size_t at, const char *text) {
  size_t n = strlen(text);
  return x->src->len >= at + n && memcmp(x->src->p + at, text, n) == 0;
}

static int char_at(const lexer *x, size_t at) {
  return at < x->src->len ? (unsigned char)x->src->p[at] : -1;
}

static size_t skip_space(const lexer *x, size_t at) {
  size_t next;
  while (at < x->src->len && td_pychar_is_space(jj_decode(x->src, at, &next)))
    at = next;
  return at;
}

static jj_token *push(lexer *x, jj_token_kind kind, size_t at) {
  x->tokens.items = jj_grow(x->j, x->tokens.items, x->tokens.n, &x->tokens.cap, sizeof(jj_token));
  jj_token *token = &x->tokens.items[x->tokens.n++];
  *token = (jj_token){.kind = kind, .line = line_of(x, at)};
  return token;
}

// ---- template text ----

static void add_data(lexer *x, size_t begin, size_t end) {
  if (begin < end) push(x, TOK_DATA, begin)->text = jj_sub(x->j, x->src, begin, end);
}

static size_t rstrip(const lexer *x, size_t begin, size_t end) {
  const jj_str text = {.p = x->src->p + begin, .len = end - begin};
  size_t keep = 0, next;
  for (size_t i = 0; i < text.len; i = next)
    if (!td_pychar_is_space(jj_decode(&text, i, &next))) keep = next;
  return begin + keep;
}

// End of the text [begin, end) before a tag, after applying `sign` and lstrip_blocks.
static size_t text_end(const lexer *x, size_t begin, size_t end, char sign, bool is_variable) {
  if (sign == '-') return rstrip(x, begin, end);
  if (sign == '+' || is_variable) return end;
  size_t line = end;
  while (line > begin && x->src->p[line - 1] != '\n')
    line--;
  bool starts_line = line > begin || x->line_starting;
  return starts_line && rstrip(x, line, end) == line ? line : end;
}

// Position after the end of a tag and the white space that '-' strips or the newline that
// trim_blocks drops.
static size_t behind_tag(const lexer *x, size_t at, char sign, bool trims) {
  if (sign == '-') return skip_space(x, at);
  return trims && sign != '+' && char_at(x, at) == '\n' ? at + 1 : at;
}

static void finish_tag(lexer *x, size_t end) {
  x->at = end;
  x->line_starting = end > 0 && x->src->p[end - 1] == '\n';
}

static char sign_at(const lexer *x, size_t at) {
  int c = char_at(x, at);
  return c == '-' || c == '+' ? (char)c : 0;
}

static void skip_comment(lexer *x, size_t at) {
  const jj_str end = {.p = "#}", .len = 2};
  size_t hit = jj_find(x->j, x->src, &end, at, x->src->len);
  line_of(x, at);
  if (hit == SIZE_MAX) jj_raise(x->j, TD_EFORMAT, "Missing end of comment tag");
  char sign = hit > at ? sign_at(x, hit - 1) : 0;
  finish_tag(x, behind_tag(x, hit + 2, sign, true));
}

// Matches "raw" or "endraw" (`word`) and the end of its tag; returns the position after it, or 0
// for any other tag.
static size_t raw_tag_end(const lexer *x, size_t at, const char *word, bool is_end) {
  at = skip_space(x, at);
  if (!looking_at(x, at, word)) return 0;
  at = skip_space(x, at + strlen(word));
  char sign = sign_at(x, at);
  if (sign == '+' && !is_end) return 0;
  if (!looking_at(x, at + (sign != 0), "%}")) return 0;
  return behind_tag(x, at + (sign != 0) + 2, sign, is_end);
}

// at: after {% raw %}. Everything up to {% endraw %} is text.
static void lex_raw(lexer *x, size_t at) {
  const jj_str open = {.p = "{%", .len = 2};
  finish_tag(x, at);
  for (size_t hit = at;; hit++) {
    hit = jj_find(x->j, x->src, &open, hit, x->src->len);
    if (hit == SIZE_MAX) {
      line_of(x, at);
      jj_raise(x->j, TD_EFORMAT, "Missing end of raw directive");
    }
    char sign = sign_at(x, hit + 2);
    size_t end = raw_tag_end(x, hit + 2 + (sign != 0), "endraw", true);
    if (!end) continue;
    add_data(x, at, text_end(x, at, hit, sign, false));
    finish_tag(x, end);
    return;
  }
}

// ---- numbers, strings, names ----

static bool digit_of(int c, int base) {
  if (base == 16) return c >= 0 && isxdigit(c);
  return c >= '0' && c < '0' + base;
}

// Length of digits with single underscores between them; 0 if there are none.
static size_t digits(const lexer *x, size_t at, int base) {
  size_t begin = at;
  while (digit_of(char_at(x, at), base) ||
         (at > begin && char_at(x, at) == '_' && digit_of(char_at(x, at + 1), base)))
    at++;
  return at - begin;
}

// Length of the float literal at `at`; 0 if there is none.
static size_t float_len(const lexer *x, size_t at) {
  if (at > 0 && char_at(x, at - 1) == '.') return 0;
  size_t n = digits(x, at, 10), exponent = 0;
  if (!n) return 0;
  size_t fraction = char_at(x, at + n) == '.' ? digits(x, at + n + 1, 10) : 0;
  size_t mantissa = n + (fraction ? fraction + 1 : 0);
  if ((char_at(x, at + mantissa) | 0x20) == 'e') {
    bool sign = sign_at(x, at + mantissa + 1) != 0;
    exponent = digits(x, at + mantissa + 1 + sign, 10);
    if (exponent) exponent += 1u + sign;
  }
  return fraction || exponent ? mantissa + exponent : 0;
}

// Length of the integer literal at `at`. A leading zero is a literal by itself.
static size_t integer_len(const lexer *x, size_t at) {
  int c = char_at(x, at), prefix = char_at(x, at + 1) | 0x20;
  if (c != '0') return digits(x, at, 10);
  int base = prefix == 'b' ? 2 : prefix == 'o' ? 8 : prefix == 'x' ? 16 : 0;
  size_t skip = char_at(x, at + 2) == '_' ? 3 : 2, n = base ? digits(x, at + skip, base) : 0;
  return n ? n + skip : digits(x, at, 1);
}

static bool lex_number(lexer *x) {
  size_t n = float_len(x, x->at);
  bool is_float = n > 0;
  if (!n && isdigit(char_at(x, x->at) & 0xFF)) n = integer_len(x, x->at);
  if (!n) return false;
  jj_token *token = push(x, is_float ? TOK_FLOAT : TOK_INTEGER, x->at);
  token->text = jj_sub(x->j, x->src, x->at, x->at + n);
  token->value.type = JJ_FLOAT;
  bool ok = is_float ? jj_parse_float(token->text, &token->value.f)
                     : jj_parse_int(x->j, token->text, 0, &token->value);
  if (!ok) jj_raise(x->j, TD_EFORMAT, "malformed number");
  x->at += n;
  return true;
}

static bool lex_name(lexer *x) {
  size_t end = x->at, next;
  while (end < x->src->len) {
    uint32_t c = jj_decode(x->src, end, &next);
    const bool is_ascii_name = c == '_' || (c < 0x80 && isalnum((int)c));
    if (!is_ascii_name && (c < 0x80 || td_pychar_is_space(c))) break;
    end = next;
  }
  if (end == x->at) return false;
  push(x, TOK_NAME, x->at)->text = jj_sub(x->j, x->src, x->at, end);
  x->at = end;
  return true;
}

static uint32_t escape_number(lexer *x, const jj_str *s, size_t *at, size_t max, int base) {
  uint32_t c = 0;
  size_t n = 0;
  for (; n < max && *at < s->len && digit_of((unsigned char)s->p[*at], base); n++, ++*at) {
    int d = s->p[*at];
    c = c * (uint32_t)base + (uint32_t)(d <= '9' ? d - '0' : (d | 0x20) - 'a' + 10);
  }
  bool truncated = base == 16 && n < max;
  if (truncated || c > 0x10FFFF || (c >= 0xD800 && c <= 0xDFFF))
    jj_raise(x->j, TD_EFORMAT, "malformed escape sequence in a string");
  return c;
}

// Appends the character of the escape whose backslash precedes *at.
static void unescape(lexer *x, const jj_str *s, size_t *at, jj_builder *b) {
  static const char names[] = "\\'\"abfnrtv", values[] = "\\'\"\a\b\f\n\r\t\v";
  size_t next;
  uint32_t c = jj_decode(s, *at, &next);
  const char *hit = c < 0x80 && c ? strchr(names, (int)c) : NULL;
  if (c >= '0' && c <= '7') {
    jj_add_char(b, escape_number(x, s, at, 3, 8), false);
    return;
  }
  *at = next;
  if (c == '\n') return; // line continuation
  if (hit) {
    jj_add(b, &values[hit - names], 1);
  } else if (c == 'x' || c == 'u' || c == 'U') {
    jj_add_char(b, escape_number(x, s, at, c == 'x' ? 2 : c == 'u' ? 4 : 8, 16), false);
  } else if (c == 'N') {
    jj_raise(x->j, TD_EUNSUPPORTED, "\\N{...} escapes are not supported");
  } else if (c >= 0x80) {
    // jinja2 itself converts such characters to escapes, which the preceding backslash then
    // disables.
    jj_addf(b, c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x", c);
  } else {
    jj_addf(b, "\\%c", (char)c);
  }
}

static bool lex_string(lexer *x) {
  int quote = char_at(x, x->at);
  if (quote != '\'' && quote != '"') return false;
  size_t end = x->at + 1;
  while (end < x->src->len && x->src->p[end] != quote)
    end += x->src->p[end] == '\\' ? 2 : 1;
  if (end >= x->src->len) return false;
  jj_token *token = push(x, TOK_STRING, x->at);
  const jj_str *body = jj_sub(x->j, x->src, x->at + 1, end);
  jj_builder b;
  jj_build(&b, x->j);
  for (size_t i = 0; i < body->len;) {
    const char *slash = memchr(body->p + i, '\\', body->len - i);
    size_t plain = slash ? (size_t)(slash - body->p) : body->len;
    jj_add_range(&b, body, i, plain);
    i = plain + 1;
    if (slash) unescape(x, body, &i, &b);
  }
  // No store: constants are shared between renders and must never be appended to.
  const jj_str *text = jj_built(&b);
  token->text = jj_str_borrow(x->j, text->p, text->len, false);
  x->at = end + 1;
  return true;
}

// ---- operators and tags ----

static void balance(lexer *x, char op) {
  if (op == '(' || op == '[' || op == '{') {
    x->open = jj_grow(x->j, x->open, x->n_open, &x->cap_open, 1);
    x->open[x->n_open++] = (char)(op == '(' ? ')' : op + 2);
  } else if (op == ')' || op == ']' || op == '}') {
    if (!x->n_open) jj_raise(x->j, TD_EFORMAT, "unexpected '%c'", op);
    char expected = x->open[--x->n_open];
    if (expected != op) jj_raise(x->j, TD_EFORMAT, "unexpected '%c', expected '%c'", op, expected);
  }
}

static bool lex_operator(lexer *x) {
  static const char *const ops[] = {"//", "**", "==", "!=", ">=", "<=", "+", "-", "/",
                                    "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                    ">",  "<",  "=",  ".",  ":",  "|",  ",", ";"};
  for (size_t i = 0; i < TD_COUNT(ops); i++) {
    if (!looking_at(x, x->at, ops[i])) continue;
    push(x, TOK_OPERATOR, x->at)->text = jj_sub(x->j, x->src, x->at, x->at + strlen(ops[i]));
    if (!ops[i][1]) balance(x, ops[i][0]);
    x->at += strlen(ops[i]);
    return true;
  }
  return false;
}

// Consumes the end of the tag if it is here and no bracket is open.
static bool lex_tag_end(lexer *x, const char *close, bool is_block) {
  if (x->n_open) return false;
  char sign = sign_at(x, x->at);
  if (sign == '+' && !is_block) return false;
  size_t at = x->at + (sign != 0);
  if (!looking_at(x, at, close)) return false;
  push(x, is_block ? TOK_BLOCK_END : TOK_VARIABLE_END, x->at);
  finish_tag(x, behind_tag(x, at + 2, sign, is_block));
  return true;
}

static void lex_tag(lexer *x, bool is_block) {
  for (;;) {
    x->at = skip_space(x, x->at);
    if (lex_tag_end(x, is_block ? "%}" : "}}", is_block)) return;
    if (x->at == x->src->len) return; // the parser reports the missing end
    if (lex_number(x) || lex_name(x) || lex_string(x) || lex_operator(x)) continue;
    line_of(x, x->at);
    jj_raise(x->j, TD_EFORMAT, "unexpected char '%c' at %zu",
             isprint((unsigned char)x->src->p[x->at]) ? x->src->p[x->at] : '?', x->at);
  }
}

// Position of the next "{%", "{{" or "{#", or the end.
static size_t find_tag(const lexer *x) {
  size_t at = x->at;
  for (;; at++) {
    const char *hit = at < x->src->len ? memchr(x->src->p + at, '{', x->src->len - at) : NULL;
    if (!hit) return x->src->len;
    at = (size_t)(hit - x->src->p);
    int c = char_at(x, at + 1);
    if (c == '%' || c == '{' || c == '#') return at;
  }
}

static void lex_root(lexer *x) {
  while (x->at < x->src->len) {
    size_t tag = find_tag(x);
    if (tag == x->src->len) {
      add_data(x, x->at, tag);
      return;
    }
    char kind = x->src->p[tag + 1], sign = sign_at(x, tag + 2);
    size_t inside = tag + 2 + (sign != 0);
    size_t raw = kind == '%' ? raw_tag_end(x, inside, "raw", false) : 0;
    add_data(x, x->at, text_end(x, x->at, tag, sign, kind == '{'));
    if (raw) {
      lex_raw(x, raw);
    } else if (kind == '#') {
      skip_comment(x, inside);
    } else {
      push(x, kind == '%' ? TOK_BLOCK_BEGIN : TOK_VARIABLE_BEGIN, tag);
      x->at = inside;
      x->n_open = 0;
      lex_tag(x, kind == '%');
    }
  }
}

jj_tokens jj_lex(jj *j, const char *source, size_t len) {
  if (!td_utf8_valid(source, len)) jj_raise(j, TD_EFORMAT, "the template is not UTF-8");
  lexer x = {.j = j, .src = normalize(j, source, len), .line = 1, .line_starting = true};
  j->line = 1;
  lex_root(&x);
  push(&x, TOK_EOF, x.src->len);
  return x.tokens;
}
