// src/cli/line_editor.c - libedit, with input that Ctrl-C interrupts, bracketed paste, completion
// and a history on disk.
#include "cli/line_editor.h"

#include <errno.h>
#include <fcntl.h>
#include <histedit.h>
#include <locale.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/env.h"
#include "base/log.h"
#include "base/utf8.h"
#include "cli/terminal.h"

#define MAX_HISTORY       1000
#define MAX_HISTORY_BYTES (1 << 20)
#define QUOTES            "\"\"\""
#define PASTE_BEGIN       "\\e[200~" // as el_set spells it
#define PASTE_END         "\033[201~"

struct td_line_editor {
  EditLine *el;
  History *history;
  locale_t locale, before; // UTF-8 for libedit, whatever the environment says
  int wake_fd;             // readable when a signal came; not owned
  bool has_paste;          // the terminal marks pasted text
  const char *prompt;
  td_line_complete *complete;
  void *complete_ctx;
  td_buf history_path; // empty: there is none
};

static td_line_editor *editor_of(EditLine *el) {
  td_line_editor *editor = NULL;
  el_get(el, EL_CLIENTDATA, &editor);
  return editor;
}

static char *prompt_of(EditLine *el) {
  return (char *)editor_of(el)->prompt; // libedit does not write to it
}

// ---- characters -----------------------------------------------------------------------------

// Waits for input. False: interrupted.
static bool wait_for_input(EditLine *el) {
  struct pollfd fds[] = {{.fd = STDIN_FILENO, .events = POLLIN},
                         {.fd = editor_of(el)->wake_fd, .events = POLLIN}};
  while (!td_interrupted()) {
    if (poll(fds, TD_COUNT(fds), -1) < 0 && errno != EINTR)
      return true; // reading says what is wrong
    uint64_t count;
    if (fds[1].revents && read(fds[1].fd, &count, sizeof count) < 0) fds[1].fd = -1;
    if (td_interrupt_take_redraw()) {
      el_resize(el);
      el_set(el, EL_PREP_TERM, 1);
      el_set(el, EL_REFRESH);
    }
    if (fds[0].revents && !td_interrupted()) return true;
  }
  return false;
}

// libedit's input: 1 and a character, 0 at the end, -1 when interrupted. Reads no byte ahead.
static int read_character(EditLine *el, wchar_t *out) {
  char bytes[4];
  for (size_t n = 0;;) {
    if (!wait_for_input(el)) return -1;
    ssize_t got = read(STDIN_FILENO, bytes + n, 1);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return 0;
    uint32_t code_point;
    int len = td_utf8_decode(bytes, ++n, &code_point);
    if (len < 0) continue;
    *out = len ? (wchar_t)code_point : 0xFFFD;
    return 1;
  }
}

static bool ends_with(const td_buf *text, const char *end) {
  size_t n = strlen(end);
  return text->len >= n && memcmp(text->data + text->len - n, end, n) == 0;
}

// Inserts pasted text as it is, so that its line breaks do not send it.
static unsigned char insert_pasted(EditLine *el, wint_t ch) {
  (void)ch;
  td_buf text = TD_BUF_INIT;
  wchar_t c;
  while (!ends_with(&text, PASTE_END)) {
    if (el_wgetc(el, &c) != 1) {
      td_buf_free(&text);
      return CC_EOF;
    }
    char bytes[4];
    td_buf_add(&text, bytes, (size_t)td_utf8_encode(c == '\r' ? '\n' : (uint32_t)c, bytes));
  }
  text.data[text.len - strlen(PASTE_END)] = '\0';
  bool is_in = !text.failed && (!text.data[0] || el_insertstr(el, text.data) == 0);
  td_buf_free(&text);
  return is_in ? CC_REFRESH : CC_REFRESH_BEEP;
}

static unsigned char insert_newline(EditLine *el, wint_t ch) {
  (void)ch;
  return el_insertstr(el, "\n") == 0 ? CC_REFRESH : CC_ERROR;
}

// ---- completion -----------------------------------------------------------------------------

// The length of what all ways begin with.
static size_t common_len(const td_buf *ways) {
  const char *first = td_buf_text(ways);
  size_t len = strcspn(first, "\n");
  for (const char *way = first; *way; way += strcspn(way, "\n") + 1) {
    size_t same = 0;
    while (same < len && way[same] == first[same])
      same++;
    len = same;
  }
  return td_utf8_whole(first, len);
}

// Inserts what all ways to complete the line have in common; if that is nothing, lists them.
static unsigned char complete_line(EditLine *el, wint_t ch) {
  (void)ch;
  const td_line_editor *e = editor_of(el);
  const LineInfo *info = el_line(el);
  td_buf line = TD_BUF_INIT, ways = TD_BUF_INIT;
  td_buf_add(&line, info->buffer, (size_t)(info->cursor - info->buffer));
  e->complete(e->complete_ctx, td_buf_text(&line), &ways);
  unsigned char result = CC_REFRESH_BEEP;
  if (ways.len && !ways.failed && !line.failed) {
    const size_t len = common_len(&ways);
    ways.failed = len < line.len; // not this line's
    if (len > line.len) {
      char end = ways.data[len];
      ways.data[len] = '\0';
      result = el_insertstr(el, ways.data + line.len) == 0 ? CC_REFRESH : CC_REFRESH_BEEP;
      ways.data[len] = end;
    } else if (!ways.failed) {
      fputs("\n", stderr);
      for (const char *way = td_buf_text(&ways); *way; way += strcspn(way, "\n") + 1)
        fprintf(stderr, "  %.*s\n", (int)strcspn(way, "\n"), way);
      result = CC_REDISPLAY;
    }
  }
  td_buf_free(&line);
  td_buf_free(&ways);
  return result;
}

// ---- the history on disk --------------------------------------------------------------------

// Makes the folders of a path that are not there, for its owner only.
static void make_folders(char *path) {
  for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
    *slash = '\0';
    mkdir(path, 0700); // a failure shows when the file is opened
    *slash = '/';
  }
}

static void open_history(td_line_editor *e) {
  const char *state = td_env("XDG_STATE_HOME"), *home = td_env("HOME");
  if (state && state[0] == '/')
    td_buf_printf(&e->history_path, "%s/tandem/history", state);
  else if (home && home[0] == '/')
    td_buf_printf(&e->history_path, "%s/.local/state/tandem/history", home);
  if (!e->history_path.len || e->history_path.failed) return;
  make_folders(e->history_path.data);
  HistEvent event;
  struct stat file;
  history(e->history, &event, H_LOAD, e->history_path.data);
  const bool is_large = stat(e->history_path.data, &file) == 0 && file.st_size > MAX_HISTORY_BYTES;
  if (is_large) history(e->history, &event, H_SAVE, e->history_path.data); // what was loaded
}

// Appends the last message, so that several programs can share the file.
static void save_message(td_line_editor *e) {
  HistEvent event;
  if (!e->history_path.len || e->history_path.failed) return;
  const int fd = open(e->history_path.data, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  FILE *file = fd < 0 ? NULL : fdopen(fd, "a");
  if (!file && fd >= 0) close(fd);
  bool is_saved = file && fseek(file, 0, SEEK_END) == 0 &&
                  history(e->history, &event, H_NSAVE_FP, (size_t)1, file) >= 0;
  if (file && fclose(file) != 0) is_saved = false;
  if (is_saved) return;
  td_warn("%s: %s: the history is not kept", e->history_path.data, strerror(errno));
  td_buf_free(&e->history_path);
}

// ---- opening --------------------------------------------------------------------------------

static td_status open_libedit(td_line_editor *e, td_err *err) {
  e->el = el_init("tandem", stdin, stderr, stderr);
  e->history = history_init();
  if (!e->el || !e->history) return td_fail(err, TD_ENOMEM, "the line editor cannot be opened");
  HistEvent event;
  history(e->history, &event, H_SETSIZE, MAX_HISTORY);
  history(e->history, &event, H_SETUNIQUE, 1);
  el_set(e->el, EL_CLIENTDATA, e);
  el_set(e->el, EL_PROMPT, prompt_of);
  el_set(e->el, EL_GETCFN, read_character);
  el_set(e->el, EL_EDITOR, "emacs");
  el_set(e->el, EL_HIST, history, e->history);
  // el_set would leak its copies of these
  el_wset(e->el, EL_ADDFN, L"tandem-paste", L"insert pasted text", insert_pasted);
  el_wset(e->el, EL_ADDFN, L"tandem-newline", L"insert a line break", insert_newline);
  el_set(e->el, EL_BIND, PASTE_BEGIN, "tandem-paste", NULL);
  el_wset(e->el, EL_ADDFN, L"tandem-complete", L"complete the line", complete_line);
  // Alt-Enter sends \e\r, of which libedit's mode of the terminal makes \e\n
  el_set(e->el, EL_BIND, "\\e\\r", "tandem-newline", NULL);
  el_set(e->el, EL_BIND, "\\e\\n", "tandem-newline", NULL);
  el_set(e->el, EL_BIND, "\t", "tandem-complete", NULL);
  // Between two messages, too: in lines, Ctrl-D and backspace would be taken from what is typed
  // ahead.
  el_set(e->el, EL_SETTY, "-x", "-echo", "-icanon", NULL);
  el_source(e->el, NULL); // ~/.editrc
  return TD_OK;
}

td_status td_line_editor_open(td_line_editor **out, td_line_complete *complete, void *ctx,
                              td_err *err) {
  *out = NULL;
  td_line_editor *e = calloc(1, sizeof *e);
  if (!e) return td_fail(err, TD_ENOMEM, "out of memory");
  e->prompt = "";
  e->complete = complete;
  e->complete_ctx = ctx;
  e->wake_fd = td_interrupt_open_fd();
  e->has_paste = td_terminal_moves_cursor(STDERR_FILENO);
  e->locale = newlocale(LC_CTYPE_MASK, "C.UTF-8", (locale_t)0);
  if (e->locale) e->before = uselocale(e->locale);
  td_status st = open_libedit(e, err);
  if (st != TD_OK) {
    td_line_editor_close(e);
    return st;
  }
  open_history(e);
  *out = e;
  return TD_OK;
}

void td_line_editor_close(td_line_editor *e) {
  if (!e) return;
  if (e->history) history_end(e->history);
  if (e->el) el_end(e->el);
  if (e->locale) {
    uselocale(e->before);
    freelocale(e->locale);
  }
  td_buf_free(&e->history_path);
  free(e);
}

// ---- messages -------------------------------------------------------------------------------

// Appends a line without its line break.
static td_line_result read_line(td_line_editor *e, const char *prompt, td_buf *out) {
  int n = 0;
  e->prompt = prompt;
  el_set(e->el, EL_PREP_TERM,
         1); // libedit would do it after the prompt: too late for who waits for it
  if (e->has_paste) fputs("\033[?2004h", stderr);
  const char *line = el_gets(e->el, &n);
  if (e->has_paste) fputs("\033[?2004l", stderr);
  if (!line || n <= 0) {
    fputc('\n', stderr);
    el_reset(e->el);
    return td_interrupted() ? TD_LINE_INTERRUPTED : TD_LINE_END;
  }
  size_t len = strlen(line);
  td_buf_add(out, line, len && line[len - 1] == '\n' ? len - 1 : len);
  return TD_LINE_READ;
}

// Whether the message continues in the next line. Removes what only says so.
static bool is_unfinished(td_buf *text, bool *in_quotes) {
  const size_t n = strlen(QUOTES);
  if (!*in_quotes &&
      (text->len >= strlen(QUOTES) && memcmp(text->data, QUOTES, strlen(QUOTES)) == 0)) {
    *in_quotes = true;
    td_buf_drop(text, n);
  }
  if (*in_quotes) {
    *in_quotes = !ends_with(text, QUOTES);
    if (*in_quotes) {
      if (text->len) td_buf_char(text, '\n');
      return true;
    }
    text->len -= n;
    if (text->len && text->data[text->len - 1] == '\n') text->len--;
    return false;
  }
  if (!text->len || text->data[text->len - 1] != '\\') return false;
  text->data[text->len - 1] = '\n';
  return true;
}

td_line_result td_line_editor_read(td_line_editor *e, td_buf *out) {
  td_buf_clear(out);
  bool in_quotes = false, has_more;
  const char *prompt = "> ";
  do {
    td_line_result result = read_line(e, prompt, out);
    if (result != TD_LINE_READ) return result;
    has_more = is_unfinished(out, &in_quotes);
    prompt = ". ";
  } while (has_more && !out->failed);
  if (out->data) out->data[out->len] = '\0';
  HistEvent event;
  if (out->len && history(e->history, &event, H_ENTER, td_buf_text(out)) >= 0) save_message(e);
  return TD_LINE_READ;
}
