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
    {80, "**never\nclosed\n\nnext", BO "never\nclosed\n" PLAIN "\nnext"},
    {80, "`never\n\nnext *x", CO "never\n" PLAIN "\nnext " IT "x" PLAIN},
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

int before_all(void **state) {
  (void)state;
  setlocale(LC_CTYPE, "C.UTF-8");
  return 0;
}
