// tests/fuzz/call_maker.h - tool calls of any bytes, as objects and in the form in which a model of
// some kind writes them.
#pragma once

#include <stdint.h>
#include <string.h>

#include "api/calls/call_syntax.h"
#include "base/json_write.h"

enum { MAKER_CALLS = 3 };

typedef struct {
  const uint8_t *data;
  size_t n;
  td_buf text;              // what the model writes
  td_buf made[MAKER_CALLS]; // the calls' arguments, as JSON
  unsigned n_calls;
} call_maker;

// 0 to n - 1; 0 once the bytes are used up.
static unsigned draw(call_maker *m, unsigned n) {
  if (!m->n) return 0;
  m->n--;
  return *m->data++ % n;
}

// Any text that no marker is a part of.
static void make_text(call_maker *m, td_buf *out) {
  static const char *const chars[] = {"x", "\"",       "\\", "\n", "<", ">", "{", "}",
                                      "[", "\xC3\xA9", " ",  "/",  "|", ",", ":", "1"};
  for (unsigned i = draw(m, 8); i > 0; i--)
    td_buf_str(out, chars[draw(m, TD_COUNT(chars))]);
}

// Parameter s takes text, n a number, o an object. A form without quotes writes text as it is.
static void make_argument(call_maker *m, const td_call_syntax *s, td_buf *args, char key,
                          bool is_first) {
  static const char *const values[2][3] = {
      {"0", "-12.5", "1e3"}, {"{}", "{\"a\": [1, \"<b\"]}", "{\"a\": {\"b\": null}}"}};
  td_buf text = TD_BUF_INIT;
  td_buf_printf(args, "%s\"%c\": ", is_first ? "" : ", ", key);
  if (key == 's') {
    make_text(m, &text);
    td_json_quote(args, td_buf_text(&text), text.len);
  } else {
    td_buf_str(&text, values[key == 'o'][draw(m, 3)]);
    td_buf_str(args, td_buf_text(&text));
  }
  if (s->key_open) {
    const char *close = key != 's' && s->json_key_close ? s->json_key_close : s->key_close;
    td_buf_printf(&m->text, "%s%c%s%s%s", s->key_open, key, close, td_buf_text(&text),
                  s->value_close);
    if (s->ends_by_key) td_buf_printf(&m->text, "/%c>", key);
  }
  td_buf_free(&text);
}

static void make_call(call_maker *m, const td_call_syntax *s) {
  static const char keys[] = "son";
  td_buf *args = &m->made[m->n_calls];
  bool is_first = true;
  td_buf_printf(&m->text, "%st", m->n_calls ? s->between : s->open);
  if (s->index) td_buf_printf(&m->text, ":%u", m->n_calls);
  td_buf_str(&m->text, s->after_name);
  td_buf_char(args, '{');
  for (unsigned i = 0; i < 3; i++) {
    if (!draw(m, 3)) continue;
    make_argument(m, s, args, keys[i], is_first);
    is_first = false;
  }
  td_buf_char(args, '}');
  if (!s->key_open) td_buf_str(&m->text, td_buf_text(args));
  m->n_calls++;
}

// Makes calls in one of the forms, which it returns.
static td_call_form make_calls(call_maker *m) {
  const td_call_form form = (td_call_form)draw(m, TD_CALL_HARMONY + 1);
  const td_call_syntax *s = td_call_syntax_of_form(form);
  const unsigned n = s->between ? 1 + draw(m, MAKER_CALLS) : 1;
  for (unsigned i = 0; i < n; i++)
    make_call(m, s);
  td_buf_str(&m->text, s->close);
  return form;
}
