// src/cli/run_chat.c - a chat on a terminal: messages, and commands that begin with a slash.
#include <ctype.h>
#include <glob.h>
#include <stdio.h>
#include <string.h>

#include "base/fs.h"
#include "base/log.h"
#include "base/utf8.h"
#include "cli/line_editor.h"
#include "cli/run_impl.h"
#include "cli/terminal.h"
#include "options/closest.h"

// What a command says; goes to stderr, as stdout has only responses.
#define SAY(...) fprintf(stderr, __VA_ARGS__)

typedef struct {
  const char *name, *args, *help;
  // args: the rest of the line, without white space around it. False: end the chat.
  bool (*run)(td_runner *r, const char *args);
} command;

void td_run_print_name(const td_runner *r) {
  td_buf name = TD_BUF_INIT;
  const char *given = r->served ? r->served : td_model_name(r->session->model);
  td_printable_add(&name, given, strlen(given), "");
  SAY("%s, %u tokens of context. Ctrl-C stops a response, Ctrl-D ends, /help lists commands.\n",
      td_buf_text(&name), r->n_ctx);
  td_buf_free(&name);
}

static void report(const td_runner *r) {
  const td_generate_stats *s = &r->stats;
  uint32_t n_steps = s->n_output ? s->n_output - 1 : 0;
  if (s->reason == TD_DONE_LENGTH && r->n_cached == r->n_ctx)
    td_info("the context of %u tokens is full: the response ends here", r->n_ctx);
  else if (s->reason == TD_DONE_LENGTH && !r->options->ignore_eos)
    td_info("the response reached its limit of %u tokens (--n-predict)", s->n_output);
  td_info("prefill %u tokens, %.2f s | decode %u tokens, %.2f tokens/s | context %u of %u",
          s->n_prompt - s->n_reused, s->prefill_s, s->n_output,
          s->decode_s > 0 ? n_steps / s->decode_s : 0, r->n_cached, r->n_ctx);
}

// Generates a response. On an error the conversation returns to its first n messages.
static void respond(td_runner *r, size_t n) {
  td_err err;
  size_t first = r->conversation.first;
  if (td_run_answer_chat(r, &err) == TD_OK) {
    report(r);
  } else {
    td_error("%s", err.msg);
    td_conversation_cut(&r->conversation, n);
    r->conversation.first = first < n ? first : n;
  }
  r->sampling.seed++; // another attempt at the same prompt differs
}

// ---- commands -------------------------------------------------------------------------------

static bool clear(td_runner *r, const char *args) {
  (void)args;
  td_conversation_cut(&r->conversation, 0);
  SAY("The conversation is empty%s.\n",
      r->conversation.system.len ? " except for its system message" : "");
  return true;
}

static bool retry(td_runner *r, const char *args) {
  (void)args;
  td_conversation *c = &r->conversation;
  const bool has_message = c->n > 1 || (c->n && c->messages[0].role == TD_ROLE_USER);
  if (!has_message) {
    SAY("No response yet.\n");
    return true;
  }
  if (c->messages[c->n - 1].role == TD_ROLE_ASSISTANT) td_conversation_cut(c, c->n - 1);
  respond(r, c->n);
  return true;
}

static bool set_system(td_runner *r, const char *args) {
  td_buf *system = &r->conversation.system;
  td_buf_clear(system);
  td_buf_str(system, args);
  SAY(*args ? "System message set.\n" : "System message cleared.\n");
  return true;
}

static bool save(td_runner *r, const char *args) {
  if (!*args) {
    SAY("Name a file: /save chat.json\n");
    return true;
  }
  td_buf text = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&text);
  td_err err;
  td_jw_begin_object(&w, NULL);
  td_conversation_write(&r->conversation, &w, TD_FOR_FILE);
  td_jw_end_object(&w);
  td_buf_char(&text, '\n');
  td_status st = td_buf_status(&text, &err);
  if (st == TD_OK) st = td_file_write(args, td_buf_text(&text), text.len, &err);
  if (st != TD_OK)
    td_error("%s", err.msg);
  else
    SAY("%zu messages saved.\n", r->conversation.n);
  td_buf_free(&text);
  return true;
}

static bool load(td_runner *r, const char *args) {
  td_err err;
  if (!*args)
    SAY("Name a file: /load chat.json\n");
  else if (td_conversation_read(&r->conversation, args, &err) != TD_OK)
    td_error("%s", err.msg);
  else
    SAY("%zu messages loaded.\n", r->conversation.n);
  return true;
}

static bool attach(td_runner *r, const char *args) {
  td_err err;
  if (!*args)
    SAY("Name a file: /image photo.jpg\n");
  else if (td_conversation_attach(&r->conversation, args, &err) != TD_OK)
    td_error("%s", err.msg);
  else
    SAY("The next message has %zu image%s.\n", r->conversation.images.n,
        r->conversation.images.n == 1 ? "" : "s");
  return true;
}

static bool set(td_runner *r, const char *args) {
  const size_t len = strcspn(args, " \t\n");
  if (len == strlen("system") && !memcmp(args, "system", len))
    return set_system(r, args + len + strspn(args + len, " \t\n"));
  td_run_set(r, args);
  return true;
}

static bool leave(td_runner *r, const char *args) {
  (void)r;
  (void)args;
  return false;
}

static bool help(td_runner *r, const char *args);

static const command commands[] = {
    {"clear", "", "begin a new conversation", clear},
    {"retry", "", "generate the last response again", retry},
    {"image", " FILE", "attach an image to the next message", attach},
    {"system", " TEXT", "set the system message; without TEXT remove it", set_system},
    {"set", " NAME VALUE", "change sampling, thinking, effort and others; /set lists them", set},
    {"model", " NAME", "switch to another model of --models; without NAME list them",
     td_run_change_model},
    {"save", " FILE", "write the conversation as JSON", save},
    {"load", " FILE", "load a conversation that /save or the chat page wrote", load},
    {"help", "", "print this", help},
    {"exit", "", "end; so does Ctrl-D", leave},
};

static bool help(td_runner *r, const char *args) {
  (void)r;
  (void)args;
  for (size_t i = 0; i < TD_COUNT(commands); i++) {
    char usage[32];
    snprintf(usage, sizeof usage, "/%s%s", commands[i].name, commands[i].args);
    SAY("  %-16s %s\n", usage, commands[i].help);
  }
  SAY("A message continues on the next line after \\ at the end of a line, or from \"\"\" to "
      "\"\"\";\n"
      "Alt-Enter inserts a line break, Tab completes commands. A space in front of / sends the "
      "line as a message.\n");
  return true;
}

// /word, alone or before a space: "/etc/hosts" is a message.
static bool is_command(const char *line) {
  size_t len = line[0] == '/' ? strspn(line + 1, "abcdefghijklmnopqrstuvwxyz") : 0;
  return len && (line[1 + len] == '\0' || isspace((unsigned char)line[1 + len]));
}

static const command *find_command(const char *name, size_t len) {
  // What other programs call it.
  static const char *const others[][2] = {
      {"quit", "exit"}, {"bye", "exit"}, {"q", "exit"}, {"new", "clear"}, {"reset", "clear"}};
  for (size_t i = 0; i < TD_COUNT(others); i++) {
    if (strlen(others[i][0]) != len || memcmp(others[i][0], name, len) != 0) continue;
    name = others[i][1];
    len = strlen(name);
    break;
  }
  for (size_t i = 0; i < TD_COUNT(commands); i++)
    if (strlen(commands[i].name) == len && !memcmp(commands[i].name, name, len))
      return &commands[i];
  return NULL;
}

static void say_unknown(const char *name, size_t len) {
  td_closest closest = {.word = name, .len = len};
  const char *setting = td_run_setting(name, len);
  for (size_t i = 0; i < TD_COUNT(commands); i++)
    td_closest_try(&closest, commands[i].name);
  if (setting) {
    SAY("Unknown command /%s; did you mean /set %s? /help lists them.\n", setting, setting);
  } else if (closest.best) {
    SAY("Unknown command /%.*s; did you mean /%s? /help lists them.\n", (int)len, name,
        closest.best);
  } else {
    SAY("Unknown command /%.*s; /help lists them.\n", (int)len, name);
  }
}

static bool run_command(td_runner *r, const char *line) {
  const char *name = line + 1;
  const size_t len = strcspn(name, " \t\n");
  const char *args = name + len + strspn(name + len, " \t\n");
  const command *found = find_command(name, len);
  if (found) return found->run(r, args);
  say_unknown(name, len);
  return true;
}

// ---- completion -----------------------------------------------------------------------------

// Whether line is "/NAME BEGUN"; *begun points into it.
static bool is_argument(const char *line, const char *name, const char **begun) {
  const size_t len = strlen(name);
  if (strncmp(line + 1, name, len) != 0 || line[1 + len] != ' ') return false;
  *begun = line + 2 + len;
  return true;
}

static void complete_path(const char *line, const char *begun, td_buf *out) {
  td_buf pattern = TD_BUF_INIT;
  for (const char *c = begun; *c; c++)
    td_buf_printf(&pattern, strchr("*?[\\", *c) ? "\\%c" : "%c", *c);
  td_buf_char(&pattern, '*');
  glob_t found;
  if (glob(td_buf_text(&pattern), GLOB_MARK, NULL, &found) == 0) {
    for (size_t i = 0; i < found.gl_pathc; i++)
      if (!strpbrk(found.gl_pathv[i], "\n\r\033"))
        td_buf_printf(out, "%.*s%s\n", (int)(begun - line), line, found.gl_pathv[i]);
    globfree(&found);
  }
  td_buf_free(&pattern);
}

static void complete_model(const td_runner *r, const char *begun, td_buf *out) {
  td_buf list = TD_BUF_INIT;
  td_err err;
  if (r->options->models && td_run_list_models(r, &list, &err) == TD_OK) {
    for (const char *at = td_buf_text(&list); *at; at += strcspn(at, "\n") + 1)
      if (!strncmp(at, begun, strlen(begun)))
        td_buf_printf(out, "/model %.*s\n", (int)strcspn(at, "\n"), at);
  }
  td_buf_free(&list);
}

// What Tab does: commands, and what follows them.
static void complete(void *ctx, const char *line, td_buf *out) {
  const char *begun;
  if (line[0] != '/') return;
  for (size_t i = 0; i < TD_COUNT(commands); i++)
    if (!strncmp(commands[i].name, line + 1, strlen(line + 1)))
      td_buf_printf(out, "/%s%s\n", commands[i].name, commands[i].args[0] ? " " : "");
  if (is_argument(line, "set", &begun)) td_run_complete_set(begun, out);
  if (is_argument(line, "model", &begun)) complete_model(ctx, begun, out);
  if (is_argument(line, "save", &begun) || is_argument(line, "load", &begun) ||
      is_argument(line, "image", &begun))
    complete_path(line, begun, out);
}

// ---- the chat -------------------------------------------------------------------------------

static void answer_raw(td_runner *r, const td_buf *text) {
  td_token_ids ids = {0};
  td_err err;
  r->is_parsed = false;
  td_status st = td_chat_encode_plain(r->chat, td_buf_text(text), text->len, true, &ids, &err);
  if (st == TD_OK) st = td_run_answer(r, ids.ids, ids.n, &err);
  td_token_ids_free(&ids);
  if (st == TD_OK)
    report(r);
  else
    td_error("%s", err.msg);
}

// False: end the chat.
static bool take_message(td_runner *r, td_buf *text) {
  while (text->len && isspace((unsigned char)text->data[text->len - 1]))
    text->data[--text->len] = '\0';
  const char *line = td_buf_text(text);
  if (!text->len) return true;
  if (is_command(line)) return run_command(r, line);
  if (r->options->raw) {
    answer_raw(r, text);
    return true;
  }
  size_t n = r->conversation.n, skip = line[0] == ' ' && is_command(line + 1);
  td_err err;
  if (td_run_ask(r, line + skip, text->len - skip, &err) == TD_OK) {
    respond(r, n);
  } else {
    td_error("%s", err.msg);
    td_conversation_cut(&r->conversation, n);
  }
  return true;
}

td_status td_run_chat(td_runner *r, td_err *err) {
  td_line_editor *editor;
  td_status st = td_line_editor_open(&editor, complete, r, err);
  if (st != TD_OK) return st;
  td_run_print_name(r);
  td_buf text = TD_BUF_INIT;
  for (bool should_continue = true; should_continue;) {
    td_interrupt_clear();
    fputc('\n', stderr);
    td_line_result result = td_line_editor_read(editor, &text);
    if (result == TD_LINE_END) break;
    if (result == TD_LINE_INTERRUPTED) continue;
    if (text.failed)
      td_error("out of memory");
    else
      should_continue = take_message(r, &text);
  }
  td_buf_free(&text);
  td_line_editor_close(editor);
  return TD_OK;
}
