// Markdown on a terminal, of text that arrives in pieces.
// CTest: no-tsan
#include <locale.h>
#include <stdlib.h>
#include <string.h>

#include "cli/markdown.h"
#include "unit/testing.h"

#define PLAIN "\033[0m"
#define IT    "\033[0;3m"
#define BO    "\033[0;1m"
#define MA    "\033[0;2m"
#define HE    "\033[0;1;35m"
#define CO    "\033[0;36m"

static const struct {
  uint32_t width;
  const char *text, *shown;
} cases[] = {
    {80, "plain 2 * 3 and 2*3*4, snake_case_name", "plain 2 * 3 and 2*3*4, snake_case_name"},
    {80, "a **b** *c* _d_ __e__",
     "a " BO "b" PLAIN " " IT "c" PLAIN " " IT "d" PLAIN " " BO "e" PLAIN},
    {80, "***b*** x", "\033[0;1;3mb" PLAIN " x"},
    {80, "**a *b* c**.", BO "a \033[0;1;3mb" BO " c" PLAIN "."},
    {80, "## A *head*\ntext", HE "A \033[0;1;3;35mhead" PLAIN "\ntext"},
    {80, "#tag\n####### x\n#", "#tag\n####### x\n#"},
    {80, "- a\n  * b\n+ c\n1. d\n-e",
     MA "\u2022" PLAIN " a\n  " MA "\u2022" PLAIN " b\n" MA "\u2022" PLAIN " c\n1. d\n-e"},
    {80, "> a\n>> b", MA "\u2502" PLAIN " a\n" MA "\u2502\u2502" PLAIN " b"},
    {80, "use `a*b*` or ``c`d``.", "use " CO "a*b*" PLAIN " or " CO "c`d" PLAIN "."},
    {80, "```c\nint *a; // **no**\n``\n```\n**b**",
     MA "```c" PLAIN "\n" CO "int *a; // **no**\n``\n" MA "```" PLAIN "\n" BO "b" PLAIN},
    {80, "````\n```\n- a\n````\n", MA "````" PLAIN "\n" CO "```\n- a\n" MA "````" PLAIN "\n"},
    {80, "```one``` line", CO "one" PLAIN " line"},
    {80, "~~~\n*a*\n~~~ \nb", MA "~~~" PLAIN "\n" CO "*a*\n" MA "~~~ " PLAIN "\nb"},
    {80, "**later\nclosed** x\n\nnext", BO "later\nclosed" PLAIN " x\n\nnext"},
    {80, "**never\nclosed\n\nnext** x", "**never\nclosed\n\nnext** x"},
    {80, "`never\n\nnext *x", "`never\n\nnext *x"},
    {80, "# 2 *3\na* b", HE "2 *3" PLAIN "\na* b"},
    {80, "**a *b** c", BO "a *b" PLAIN " c"},
    {80, "*a **b* c `d", IT "a **b" PLAIN " c `d"},
    {80, "***a* b** c ***d*", "\033[0;1;3ma" BO " b" PLAIN " c ***d*"},
    {80, "_a_b `c_ d` _e\\_", "_a_b " CO "c_ d" PLAIN " _e_"},
    {80, "*a\n- b*\n*c\n> d*\n`e\n```\nf`",
     "*a\n" MA "\u2022" PLAIN " b*\n*c\n" MA "\u2502" PLAIN " d*\n`e\n" MA "```" PLAIN "\n" CO
     "f`" PLAIN},
    {80, "`", "`"},
    {80, "*", "*"},
    {80, "---\n***\n\\*a\\* \\(x\\)", "---\n***\n*a* \\(x\\)"},
    {10, "one **two three** fours", "one " BO "two\nthree" PLAIN "\nfours"},
    {10, "one `two three` four", "one\n" CO "two three" PLAIN "\nfour"},
    {10, "```\na line of code \u8a9e\u8a9e\n```\nand other text",
     MA "```" PLAIN "\n" CO "a line of code \u8a9e\u8a9e\n" MA "```" PLAIN "\nand other\ntext"},
    {10, "**\u8a9e\u8a9e\u8a9e\u8a9e\u8a9e\u8a9e**",
     BO "\u8a9e\u8a9e\u8a9e\u8a9e\u8a9e\n\u8a9e" PLAIN},
    {0, "**b** c", BO "b" PLAIN " c"},
    {80, "ends in \\", "ends in \\"},
    {80, "", ""},
};

// In pieces of random length, up to max bytes, also within characters.
static char *show(const char *text, size_t len, uint32_t width, size_t max) {
  td_markdown m = {.wrap.width = width, .is_start = true};
  td_buf out = TD_BUF_INIT;
  for (size_t at = 0; at < len;) {
    size_t n = 1 + (size_t)rand() % max;
    if (n > len - at) n = len - at;
    td_markdown_add(&m, text + at, n, &out);
    at += n;
  }
  td_markdown_end(&m, &out);
  char *shown = strdup(td_buf_text(&out));
  td_buf_free(&out);
  td_markdown_free(&m);
  return shown;
}

TEST(marks_become_styles) {
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    for (size_t max = 1; max < 64; max = 2 * max + 1) {
      char *shown = show(cases[i].text, strlen(cases[i].text), cases[i].width, max);
      assert_string_equal(shown, cases[i].shown);
      free(shown);
    }
  }
}

TEST(cuts_change_nothing) {
  static const char *const parts[] = {"*",    "**",     "_",      "`",  "```", "\n",  "\n\n",
                                      " ",    "    ",   "#",      "-",  "> ",  "~~~", "\\",
                                      "word", "\u8a9e", "\u00e9", "\t", "1."};
  for (int round = 0; round < 2000; round++) {
    td_buf text = TD_BUF_INIT;
    for (int k = rand() % 60; k >= 0; k--)
      td_buf_str(&text, parts[(size_t)rand() % (sizeof parts / sizeof parts[0])]);
    const uint32_t width = (uint32_t)rand() % 30;
    char *whole = show(td_buf_text(&text), text.len, width, 1u << 20);
    char *pieces = show(td_buf_text(&text), text.len, width, 1 + (size_t)rand() % 8);
    assert_string_equal(whole, pieces);
    free(whole);
    free(pieces);
    td_buf_free(&text);
  }
}

static size_t count(const char *text, char c) {
  size_t n = 0;
  for (; *text; text++)
    n += *text == c;
  return n;
}

// Marks that are gone were pairs, and the last of a paragraph leaves no style.
TEST(marks_go_in_pairs) {
  static const char *const parts[] = {"*", "**", "***", "_", "__", "`", "``", " ", "a", "b ", "\n"};
  size_t n_gone = 0;
  for (int round = 0; round < 5000; round++) {
    td_buf text = TD_BUF_INIT;
    td_buf_char(&text, 'x');
    for (int k = rand() % 40; k >= 0; k--)
      td_buf_printf(&text, "%s%s", parts[(size_t)rand() % TD_COUNT(parts)],
                    text.data[text.len - 1] == '\n' ? "x" : "");
    char *shown = show(td_buf_text(&text), text.len, 0, 8);
    for (const char *c = "*_`"; *c; c++) {
      const size_t gone = count(td_buf_text(&text), *c) - count(shown, *c);
      n_gone += gone;
      if (gone % 2) fail_msg("%s\n%s", td_buf_text(&text), shown);
    }
    free(shown);
    td_buf_free(&text);
  }
  assert_true(n_gone > 1000);
}

// What is held has an end, and so has what is held within it.
TEST(long_paragraphs) {
  td_buf text = TD_BUF_INIT;
  for (int i = 0; i < 800; i++)
    td_buf_str(&text, i % 2 ? "*a " : "__\u8a9e ");
  char *shown = show(td_buf_text(&text), text.len, 0, 100);
  assert_int_equal(count(shown, '*'), 400);
  free(shown);
  td_buf_free(&text);
}

int before_all(void **state) {
  (void)state;
  setlocale(LC_CTYPE, "C.UTF-8");
  return 0;
}
