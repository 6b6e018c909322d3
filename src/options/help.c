// src/options/help.c - generates --help, wrapped at 80 columns, and the Markdown reference page.
#include <stdio.h>
#include <string.h>

#include "base/str.h"
#include "options/options_impl.h"

enum { WIDTH = 80, HELP_COLUMN = 26 };

// Appends text, starting at column `at`, wrapped between words. Continuation lines are indented to
// HELP_COLUMN.
static void wrap(td_buf *out, size_t at, const char *text) {
  while (*text) {
    size_t len = strcspn(text, " ");
    const bool is_first = at == HELP_COLUMN;
    if (!is_first && at + 1 + len > WIDTH) {
      td_buf_printf(out, "\n%*s", HELP_COLUMN, "");
      at = HELP_COLUMN;
    } else if (!is_first) {
      td_buf_char(out, ' ');
      at++;
    }
    td_buf_add(out, text, len);
    at += len;
    text += len;
    text += *text == ' ';
  }
}

static void help_line(td_buf *out, const td_option *o) {
  const size_t start = out->len;
  if (o->letter)
    td_buf_printf(out, "  -%c, ", o->letter);
  else
    td_buf_str(out, "      ");
  td_buf_printf(out, "--%s%s%s", o->name, o->metavar ? " " : "", o->metavar ? o->metavar : "");
  const size_t width = out->len - start;
  if (width + 2 > HELP_COLUMN)
    td_buf_printf(out, "\n%*s", HELP_COLUMN, "");
  else
    td_buf_printf(out, "%*s", (int)(HELP_COLUMN - width), "");
  td_buf text = TD_BUF_INIT;
  td_buf_str(&text, o->help);
  for (size_t i = 0; o->names && o->names[i]; i++)
    td_buf_printf(&text, "%s%s", i ? ", " : " [", o->names[i]);
  if (o->names) td_buf_char(&text, ']');
  if (o->fallback) td_buf_printf(&text, " (default: %s)", o->fallback);
  wrap(out, HELP_COLUMN, td_buf_text(&text));
  td_buf_free(&text);
  td_buf_char(out, '\n');
}

static const struct {
  const char *usage, *example;
} lines[TD_N_COMMANDS] = {
    [TD_CMD_RUN] = {"--model DIR [-p PROMPT]", "tandem run -m DIR -p 'Why is the sky blue?'"},
    [TD_CMD_SERVE] = {"--model DIR", "tandem serve -m DIR --port 8080"},
    [TD_CMD_BENCH] = {"--model DIR | --server URL", "tandem bench -m DIR -p 512,4096 -n 64 -b 1,8"},
    [TD_CMD_BENCH_KERNELS] = {"", "tandem bench kernels --format fp8-b128 --batch 1"},
    [TD_CMD_BENCH_LAYER] = {"", "tandem bench layer --format fp8-b128 --threads 0"},
    [TD_CMD_BENCH_COMM] = {"", "tandem bench comm --ranks 2,4 --bytes 16777216"},
    [TD_CMD_BENCH_GPU] = {"", "tandem bench gpu --path stream"},
    [TD_CMD_EVAL_LOGITS] = {"--model DIR --token-ids IDS --out FILE",
                            "tandem eval logits -m DIR --token-ids 1,2,3 -o logits.npy"},
    [TD_CMD_EVAL_PERPLEXITY] = {"--model DIR --file FILE",
                                "tandem eval perplexity -m DIR -f text.txt"},
    [TD_CMD_EVAL_CHAT] = {"--model DIR --suite FILE",
                          "tandem eval chat -m DIR --suite suite.jsonl"},
    [TD_CMD_VERIFY] = {"FILE.json --model DIR", "tandem verify answer.json -m DIR"},
    [TD_CMD_QUANTIZE] = {"--model DIR --to FORMAT --out DIR",
                         "tandem quantize -m DIR --to int4-g128 -o SMALLER"},
    [TD_CMD_PULL] = {"[ORG/]NAME", "tandem pull qwen3-30b-a3b"},
    [TD_CMD_PLAN] = {"", "tandem plan -m Qwen/Qwen3-30B-A3B-FP8 --machine desktop-64gb"},
    [TD_CMD_RECOMMEND] = {"", "tandem recommend --machine desktop-64gb+rtx-4090"},
    [TD_CMD_DOCTOR] = {"", "tandem doctor"},
    [TD_CMD_LIST] = {"", "tandem list"},
    [TD_CMD_RM] = {"ORG/NAME[:QUANTIZATION]", "tandem rm Qwen/Qwen3-30B-A3B-FP8"},
    [TD_CMD_PS] = {"", "tandem ps"},
    [TD_CMD_TOP] = {"", "tandem top"},
    [TD_CMD_STOP] = {"[NAME]", "tandem stop Qwen3-30B-A3B-FP8"},
    [TD_CMD_INSPECT] = {"--model DIR", "tandem inspect -m DIR"},
    [TD_CMD_INSPECT_TOKENS] = {"--model DIR", "echo hello | tandem inspect tokens -m DIR"},
    [TD_CMD_INSPECT_TEMPLATE] = {"--model DIR --input FILE",
                                 "tandem inspect template -m DIR --input chat.json"},
    [TD_CMD_INSPECT_ROUTING] = {"--model DIR --file FILE",
                                "tandem inspect routing -m DIR -f text.txt"},
};

// Every command stands in one group; what comes first is used first.
static const struct {
  const char *title, *commands; // by their first words
} command_groups[] = {{"To begin with", "run serve pull list rm recommend plan doctor"},
                      {"A running server", "ps top stop"},
                      {"Checkpoints", "inspect quantize"},
                      {"Speed and quality", "bench eval verify"}};

static void program_help(td_buf *out) {
  td_buf_str(out, "tandem: large Mixture-of-Experts language models on a machine you own\n\n"
                  "usage: tandem COMMAND --model DIR [options]\n");
  for (size_t g = 0; g < TD_COUNT(command_groups); g++) {
    td_buf_printf(out, "\n%s:\n", command_groups[g].title);
    for (int c = 0; c < TD_N_COMMANDS; c++) {
      const char *name = td_command_name((td_command)c);
      char word[32];
      snprintf(word, sizeof word, "%.*s", (int)strcspn(name, " "), name);
      if (td_is_word(command_groups[g].commands, word))
        td_buf_printf(out, "  %-18s %s\n", name, td_command_summary((td_command)c));
    }
  }
  td_buf_str(out, "\n`tandem COMMAND --help` lists a command's options.\n");
}

static bool is_first(const td_option *o) {
  for (const char *const *name = td_options_first; *name; name++)
    if (!strcmp(o->name, *name)) return true;
  return false;
}

// The options that people change first. False: there are few options, and none was listed.
static bool add_first(td_buf *out, td_command command) {
  enum { MANY = 20 };
  size_t n = 0;
  for (size_t i = 0; i < td_n_options; i++)
    n += td_option_table[i].commands >> command & 1;
  if (n < MANY) return false;
  td_buf_str(out, "\nMost used:\n");
  for (const char *const *name = td_options_first; *name; name++)
    for (size_t i = 0; i < td_n_options; i++) {
      const td_option *o = &td_option_table[i];
      if ((o->commands >> command & 1) && !strcmp(o->name, *name)) help_line(out, o);
    }
  return true;
}

void td_options_help(td_buf *out, td_command command) {
  if (command >= TD_N_COMMANDS) {
    program_help(out);
    return;
  }
  const char *usage = lines[command].usage;
  td_buf_printf(out, "tandem %s: %s\n\nusage: tandem %s%s%s [options]\nexample: %s\n",
                td_command_name(command), td_command_summary(command), td_command_name(command),
                *usage ? " " : "", usage, lines[command].example);
  const bool has_first = add_first(out, command);
  for (int k = 1; k <= N_GROUPS; k++) { // general ones last
    const int g = k % N_GROUPS;
    bool has_title = false;
    for (size_t i = 0; i < td_n_options; i++) {
      const td_option *o = &td_option_table[i];
      if (o->group != (td_option_group)g || !(o->commands >> command & 1)) continue;
      if (has_first && is_first(o)) continue;
      if (!has_title) td_buf_printf(out, "\n%s:\n", td_option_group_titles[g]);
      has_title = true;
      help_line(out, o);
    }
  }
}

// ---- the reference page -------------------------------------------------------------------------

static uint32_t group_commands(int group) {
  uint32_t commands = 0;
  for (size_t i = 0; i < td_n_options; i++)
    if (td_option_table[i].group == (td_option_group)group) commands |= td_option_table[i].commands;
  return commands;
}

// The commands that share the first word with command c, such as the three "eval" commands; 0 if
// that word is a command itself.
static uint32_t same_word(int c) {
  const char *name = td_command_name((td_command)c);
  const size_t len = strcspn(name, " ");
  uint32_t same = 0;
  for (int other = 0; other < TD_N_COMMANDS; other++) {
    const char *its = td_command_name((td_command)other);
    if (strcspn(its, " ") != len || strncmp(its, name, len) != 0) continue;
    if (!its[len]) return 0;
    same |= 1u << other;
  }
  return same;
}

static void add_commands(td_buf *out, uint32_t commands) {
  if (commands == (1u << TD_N_COMMANDS) - 1) {
    td_buf_str(out, "every command");
    return;
  }
  const char *comma = "";
  for (int c = 0; c < TD_N_COMMANDS; c++) {
    if (!(commands >> c & 1)) continue;
    const char *name = td_command_name((td_command)c);
    const uint32_t same = same_word(c);
    const bool is_family = same && (commands & same) == same;
    td_buf_printf(out, "%s%.*s", comma, (int)(is_family ? strcspn(name, " ") : strlen(name)), name);
    if (is_family) commands &= ~same;
    comma = ", ";
  }
}

static void reference_row(td_buf *out, const td_option *o, uint32_t group) {
  td_buf_char(out, '|');
  if (o->letter) td_buf_printf(out, " `-%c`", o->letter);
  td_buf_printf(out, " `--%s%s%s` | %s | %s", o->name, o->metavar ? " " : "",
                o->metavar ? o->metavar : "", o->fallback ? o->fallback : "", o->help);
  const char *first = o->kind == OPT_SUBSET ? "; any of " : "; one of ";
  for (size_t i = 0; o->names && o->names[i]; i++)
    td_buf_printf(out, "%s`%s`", i ? ", " : first, o->names[i]);
  if (o->commands != group) {
    td_buf_str(out, " (");
    add_commands(out, o->commands);
    td_buf_char(out, ')');
  }
  td_buf_str(out, " |\n");
}

void td_options_reference(td_buf *out) {
  td_buf_str(out, "# Options\n\nGenerated from the option table by `tandem help --markdown`. Every "
                  "option is also a key of the JSON\nfile that `--config` names, without the "
                  "leading dashes; the command line wins.\n\n| command | |\n| --- | --- |\n");
  for (int c = 0; c < TD_N_COMMANDS; c++)
    td_buf_printf(out, "| `tandem %s` | %s |\n", td_command_name((td_command)c),
                  td_command_summary((td_command)c));
  for (int g = 0; g < N_GROUPS; g++) {
    const uint32_t commands = group_commands(g);
    td_buf_printf(out, "\n## %s\n\nFor ", td_option_group_titles[g]);
    add_commands(out, commands);
    td_buf_str(out, ".\n\n| option | default | |\n| --- | --- | --- |\n");
    for (size_t i = 0; i < td_n_options; i++)
      if (td_option_table[i].group == (td_option_group)g)
        reference_row(out, &td_option_table[i], commands);
  }
}
