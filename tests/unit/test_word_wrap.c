// Word wrap of text that arrives in pieces.
// CTest: no-tsan
#include <locale.h>
#include <string.h>

#include "base/utf8.h"
#include "cli/word_wrap.h"
#include "unit/testing.h"

static const struct {
  uint32_t width;
  const char *text, *shown;
} cases[] = {
    {10, "one two three", "one two\nthree"},
    {10, "exactly te n", "exactly te\nn"},
    {10, "a\n\nb", "a\n\nb"},
    {10, "  two spaces kept", "  two\nspaces\nkept"},
    {10, "ends in a space ", "ends in a\nspace"},
    {4, "unbreakable it", "unbreakable\nit"},
    {10, "```\na line of code longer\n```\nand other text",
     "```\na line of code longer\n```\nand "
     "other\ntext"},
    {10, "`a` `b` `c` `d`", "`a` `b`\n`c` `d`"}, // no fence
    {10, "\u8a9e\u8a9e\u8a9e\u8a9e\u8a9e\u8a9e", "\u8a9e\u8a9e\u8a9e\u8a9e\u8a9e\n\u8a9e"},
    {10, "\u8a9e\u8a9e\u8a9e\u8a9e\u8a9e\u3002", "\u8a9e\u8a9e\u8a9e\u8a9e\n\u8a9e\u3002"},
    {10, "e\u0301e\u0301e\u0301 e\u0301e\u0301e\u0301e\u0301e\u0301 x",
     "e\u0301e\u0301e\u0301 e\u0301e\u0301e\u0301e\u0301e\u0301\nx"},
    {0, "no width: nothing is wrapped", "no width: nothing is wrapped"},
};

// In pieces of n characters.
static void check(size_t i, size_t n) {
  td_word_wrap w = {.width = cases[i].width};
  td_buf out = TD_BUF_INIT;
  const char *text = cases[i].text;
  while (*text) {
    size_t len = 0;
    uint32_t c;
    for (size_t k = 0; k < n && text[len]; k++)
      len += (size_t)td_utf8_decode(text + len, strlen(text + len), &c);
    td_word_wrap_add(&w, text, len, &out);
    text += len;
  }
  td_word_wrap_end(&w, &out);
  assert_string_equal(td_buf_text(&out), cases[i].shown);
  td_buf_free(&out);
  td_word_wrap_free(&w);
}

TEST(lines_break_between_words) {
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
    for (size_t n = 1; n < 40; n += n < 4 ? 1 : 35)
      check(i, n);
}

TEST(a_finished_word_is_shown_at_once) {
  td_word_wrap w = {.width = 20};
  td_buf out = TD_BUF_INIT;
  td_word_wrap_add(&w, "one two", 7, &out);
  assert_string_equal(td_buf_text(&out), "one");
  td_word_wrap_add(&w, " ", 1, &out);
  assert_string_equal(td_buf_text(&out), "one two");
  td_buf_free(&out);
  td_word_wrap_free(&w);
}

int before_all(void **state) {
  (void)state;
  setlocale(LC_CTYPE, "C.UTF-8");
  return 0;
}
