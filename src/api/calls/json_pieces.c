// src/api/calls/json_pieces.c - incremental readers for a JSON string and a JSON object.
#include "api/calls/json_pieces.h"

#include <string.h>

#include "base/str.h"
#include "base/utf8.h"

#define REPLACEMENT 0xFFFDu
#define ESCAPE      6 // length of \uXXXX
#define MAX_DEPTH   64

// ---- strings ----------------------------------------------------------------------------------

// Decoded text of one input byte.
typedef struct {
  char *out;
  size_t n;
} piece;

static void put(piece *p, char c) {
  p->out[p->n++] = c;
}

static void put_char(piece *p, uint32_t code_point) {
  p->n += (size_t)td_utf8_encode(code_point, p->out + p->n);
}

// The code unit of a complete \uXXXX.
static uint32_t unit_of(const char *escape) {
  uint32_t unit = 0;
  for (int i = 2; i < ESCAPE; i++)
    unit = unit << 4 | (uint32_t)td_hex_digit(escape[i]);
  return unit;
}

static bool is_low(uint32_t unit) {
  return unit >= 0xDC00 && unit <= 0xDFFF;
}

static bool feed(td_string_reader *r, char c, piece *p);

// The byte after a backslash, when no other byte is held.
static bool feed_short(td_string_reader *r, char c, piece *p) {
  static const char letters[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
  const char *letter = c ? strchr(letters, c) : NULL;
  r->n_held = 0;
  if (letter) {
    put(p, meanings[letter - letters]);
    return false;
  }
  if (c == '\'') {
    put(p, c);
    return false;
  }
  put(p, '\\'); // "\d" is not JSON; it means a backslash and a letter
  return feed(r, c, p);
}

// One or two complete \uXXXX escapes are held.
static void feed_unit(td_string_reader *r, piece *p) {
  uint32_t unit = unit_of(r->held + r->n_held - ESCAPE);
  if (r->n_held > ESCAPE) {
    uint32_t high = unit_of(r->held);
    if (is_low(unit)) {
      put_char(p, 0x10000 + ((high - 0xD800) << 10) + (unit - 0xDC00));
      r->n_held = 0;
      return;
    }
    put_char(p, REPLACEMENT);
    memmove(r->held, r->held + ESCAPE, ESCAPE);
    r->n_held = ESCAPE;
  }
  if (unit >= 0xD800 && unit <= 0xDBFF) return; // the low surrogate may follow
  put_char(p, unit == 0 || is_low(unit) ? REPLACEMENT : unit);
  r->n_held = 0;
}

// A byte inside an escape; held is not empty.
static bool feed_escape(td_string_reader *r, char c, piece *p) {
  unsigned begin = r->n_held >= ESCAPE ? ESCAPE : 0, n = r->n_held - begin;
  bool should_continue = n == 0 ? c == '\\' : n == 1 ? c == 'u' : td_hex_digit(c) >= 0;
  if (should_continue) {
    r->held[r->n_held++] = c;
    if (n + 1 == ESCAPE) feed_unit(r, p);
    return false;
  }
  if (begin) put_char(p, REPLACEMENT); // a lone high surrogate
  if (n == 1) return feed_short(r, c, p);
  for (unsigned i = 0; i < n; i++) // an invalid escape such as "\u12": a literal backslash and
                                   // letters
    put(p, r->held[begin + i]);
  r->n_held = 0;
  return feed(r, c, p);
}

// Feeds one byte. Returns whether c is the closing quote.
static bool feed(td_string_reader *r, char c, piece *p) {
  if (r->n_held) return feed_escape(r, c, p);
  if (c == (r->quote ? r->quote : '"')) return true;
  if (c == '\\')
    r->held[r->n_held++] = c;
  else if (c == '\0')
    put_char(p, REPLACEMENT);
  else
    put(p, c);
  return false;
}

size_t td_string_feed(td_string_reader *reader, char c, char out[TD_STRING_PIECE], bool *ended) {
  piece p = {.out = out};
  *ended = feed(reader, c, &p);
  return p.n;
}

// ---- objects ----------------------------------------------------------------------------------

void td_json_quote_byte(td_buf *out, char c) {
  static const char letters[] = "\"\\\b\f\n\r\t", names[] = "\"\\bfnrt";
  const char *letter = c ? strchr(letters, c) : NULL;
  if (letter) {
    td_buf_char(out, '\\');
    td_buf_char(out, names[letter - letters]);
  } else if (!c) {
    td_buf_str(out, "\xEF\xBF\xBD");
  } else if ((uint8_t)c < 0x20) {
    td_buf_printf(out, "\\u%04x", (unsigned)c);
  } else {
    td_buf_char(out, c);
  }
}

// What comes next. AT_COMMA: a comma precedes. AT_WORD, AT_NUMBER: the rest of one.
enum {
  AT_START,
  AT_FIRST = TD_OBJECT_FIRST,
  AT_COLON,
  AT_VALUE,
  AT_NEXT,
  AT_COMMA,
  AT_WORD,
  AT_NUMBER
};

static const struct {
  const char *written, *json;
} words[] = {{"true", "true"}, {"false", "false"}, {"null", "null"},
             {"True", "true"}, {"False", "false"}, {"None", "null"}};

// Parts of a number: what precedes the next byte.
enum { NO_NUMBER, SIGN, ZERO, WHOLE, POINT, FRACTION, LETTER, POWER_SIGN, POWER };

// The part of a number that c continues or begins; NO_NUMBER: none.
static uint8_t number_after(uint8_t part, char c) {
  const bool is_digit = c >= '0' && c <= '9', has_whole = part == ZERO || part == WHOLE;
  switch (part) {
  case NO_NUMBER:
    if (c == '-') return SIGN; // fall through
  case SIGN: return !is_digit ? NO_NUMBER : c == '0' ? ZERO : WHOLE;
  case WHOLE:
    if (is_digit) return WHOLE; // fall through
  case ZERO:
  case FRACTION:
    if (c == '.' && has_whole) return POINT;
    if (c == 'e' || c == 'E') return LETTER;
    return is_digit && part == FRACTION ? FRACTION : NO_NUMBER;
  case POINT: return is_digit ? FRACTION : NO_NUMBER;
  case LETTER:
    if (c == '+' || c == '-') return POWER_SIGN; // fall through
  default: return is_digit ? POWER : NO_NUMBER;
  }
}

static bool is_number(uint8_t part) {
  return part == ZERO || part == WHOLE || part == FRACTION || part == POWER;
}

static void put_byte(td_buf *out, char c) {
  if (out) td_buf_char(out, c);
}

static td_object_state feed_string(td_object_reader *r, char c, td_buf *out) {
  char text[TD_STRING_PIECE];
  bool ended;
  size_t n = td_string_feed(&r->string, c, text, &ended);
  for (size_t i = 0; out && i < n; i++)
    td_json_quote_byte(out, text[i]);
  if (ended) put_byte(out, '"');
  r->in_string = !ended;
  return TD_OBJECT_OPEN;
}

// A byte behind the first of a literal or a number. *ended: the value ended before it.
static td_object_state feed_word(td_object_reader *r, char c, td_buf *out, bool *ended) {
  if (r->at == AT_NUMBER) {
    const uint8_t part = number_after(r->word, c);
    *ended = part == NO_NUMBER;
    if (*ended) {
      r->at = AT_NEXT;
      return is_number(r->word) ? TD_OBJECT_OPEN : TD_OBJECT_BAD;
    }
    r->word = part;
    put_byte(out, c);
    return TD_OBJECT_OPEN;
  }
  if (!c || words[r->word].written[r->n_word++] != c) return TD_OBJECT_BAD;
  if (words[r->word].written[r->n_word]) return TD_OBJECT_OPEN;
  if (out) td_buf_str(out, words[r->word].json);
  r->at = AT_NEXT;
  return TD_OBJECT_OPEN;
}

static td_object_state begin_word(td_object_reader *r, char c, td_buf *out) {
  r->word = number_after(NO_NUMBER, c);
  r->at = AT_NUMBER;
  if (r->word != NO_NUMBER) {
    put_byte(out, c);
    return TD_OBJECT_OPEN;
  }
  r->at = AT_WORD;
  r->n_word = 1;
  for (uint8_t i = 0; i < TD_COUNT(words); i++) {
    if (words[i].written[0] != c) continue;
    r->word = i;
    return TD_OBJECT_OPEN;
  }
  return TD_OBJECT_BAD;
}

static td_object_state open_bracket(td_object_reader *r, char c, td_buf *out) {
  const uint64_t bit = (uint64_t)1 << r->depth;
  if (r->depth == MAX_DEPTH) return TD_OBJECT_BAD;
  r->arrays = c == '[' ? r->arrays | bit : r->arrays & ~bit;
  r->depth++;
  r->at = AT_FIRST;
  put_byte(out, c);
  return TD_OBJECT_OPEN;
}

static td_object_state close_bracket(td_object_reader *r, char c, bool in_array, td_buf *out) {
  if (in_array != (c == ']')) return TD_OBJECT_BAD;
  if (r->at != AT_FIRST && r->at != AT_NEXT && !(r->at == AT_COMMA && r->n_gap))
    return TD_OBJECT_BAD;
  r->n_gap = 0;
  put_byte(out, c);
  r->at = AT_NEXT;
  return --r->depth ? TD_OBJECT_OPEN : TD_OBJECT_WHOLE;
}

static void hold(td_object_reader *r, char c) {
  r->gap[r->n_gap++] = c;
}

static void put_held(td_object_reader *r, td_buf *out) {
  if (out) td_buf_add(out, r->gap, r->n_gap);
  r->n_gap = 0;
}

td_object_state td_object_feed(td_object_reader *r, char c, td_buf *out) {
  if (r->in_string) return feed_string(r, c, out);
  if (r->at == AT_WORD || r->at == AT_NUMBER) {
    bool ended = false;
    const td_object_state state = feed_word(r, c, out, &ended);
    if (state == TD_OBJECT_BAD || !ended) return state;
  }
  const bool in_array = r->depth && (r->arrays >> (r->depth - 1) & 1);
  const bool begins = r->at == AT_FIRST || r->at == AT_COMMA, takes_key = begins && !in_array;
  const bool takes_value = r->at == AT_VALUE || (begins && in_array);
  const bool is_quote = c == '"' || c == '\'';
  if (r->at == AT_START)
    return c == '{' || (c == '[' && r->may_be_array) ? open_bracket(r, c, out) : TD_OBJECT_BAD;
  if (r->depth == 1 && !td_is_space(c)) r->has_member |= is_quote || c == '}';
  if (r->n_gap && (td_is_space(c) ? r->n_gap == sizeof r->gap : c != '}' && c != ']'))
    put_held(r, out);
  if (td_is_space(c) && r->n_gap) {
    hold(r, c);
  } else if (td_is_space(c)) {
    put_byte(out, c);
  } else if (is_quote && (takes_key || takes_value)) {
    r->string = (td_string_reader){.quote = c};
    r->in_string = true;
    r->at = takes_key ? AT_COLON : AT_NEXT;
    put_byte(out, '"');
  } else if (c == '}' || c == ']') {
    return close_bracket(r, c, in_array, out);
  } else if (c == ':' && r->at == AT_COLON) {
    r->at = AT_VALUE;
    put_byte(out, c);
  } else if (c == ',' && r->at == AT_NEXT) {
    r->at = AT_COMMA;
    hold(r, c);
  } else if (takes_value) {
    return c == '{' || c == '[' ? open_bracket(r, c, out) : begin_word(r, c, out);
  } else {
    return TD_OBJECT_BAD;
  }
  return TD_OBJECT_OPEN;
}
