// src/api/json_pieces.c - incremental readers for a JSON string and a JSON object.
#include "api/json_pieces.h"

#include <string.h>

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

static bool is_hex(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

// The code unit of a complete \uXXXX.
static uint32_t unit_of(const char *escape) {
  uint32_t unit = 0;
  for (int i = 2; i < ESCAPE; i++) {
    char c = escape[i];
    unit = unit << 4 | (uint32_t)(c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10);
  }
  return unit;
}

static bool is_high(uint32_t unit) {
  return unit >= 0xD800 && unit <= 0xDBFF;
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
  if (c != '\'') put(p, '\\'); // "\d" is not JSON; it means a backslash and a letter
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
  if (is_high(unit)) return; // the low surrogate may follow
  put_char(p, unit == 0 || is_low(unit) ? REPLACEMENT : unit);
  r->n_held = 0;
}

// A byte inside an escape; held is not empty.
static bool feed_escape(td_string_reader *r, char c, piece *p) {
  unsigned begin = r->n_held >= ESCAPE ? ESCAPE : 0, n = r->n_held - begin;
  bool should_continue = n == 0 ? c == '\\' : n == 1 ? c == 'u' : is_hex(c);
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
  if (c == '"') return true;
  if (c == '\\') {
    r->held[r->n_held++] = c;
  } else if (c == '\0') {
    put_char(p, REPLACEMENT);
  } else {
    put(p, c);
  }
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

static td_object_state feed_string(td_object_reader *r, char c, td_buf *out) {
  char text[TD_STRING_PIECE];
  bool ended;
  size_t n = td_string_feed(&r->string, c, text, &ended);
  for (size_t i = 0; out && i < n; i++)
    td_json_quote_byte(out, text[i]);
  if (ended && out) td_buf_char(out, '"');
  r->in_string = !ended;
  return TD_OBJECT_OPEN;
}

static bool is_space(char c) {
  return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

td_object_state td_object_feed(td_object_reader *r, char c, td_buf *out) {
  if (r->in_string) return feed_string(r, c, out);
  bool opens = c == '{' || c == '[', closes = c == '}' || c == ']';
  if (r->depth == 0 && c != '{') return TD_OBJECT_BAD;
  if (r->depth == 1 && !r->has_member && !is_space(c)) {
    if (c != '"' && c != '}') return TD_OBJECT_BAD;
    r->has_member = true;
  }
  bool is_known = c && strchr(" \n\t\r,:+-.0123456789Eaeflnrstu", c);
  if (!opens && !closes && c != '"' && !is_known) return TD_OBJECT_BAD;
  if (opens && r->depth == MAX_DEPTH) return TD_OBJECT_BAD;
  if (closes && (r->arrays >> (r->depth - 1) & 1) != (c == ']')) return TD_OBJECT_BAD;
  if (opens) {
    uint64_t bit = (uint64_t)1 << r->depth++;
    r->arrays = c == '[' ? r->arrays | bit : r->arrays & ~bit;
  }
  r->depth -= closes;
  r->in_string = c == '"';
  if (out) td_buf_char(out, c);
  return r->depth ? TD_OBJECT_OPEN : TD_OBJECT_WHOLE;
}
