// src/options/shell.c - writes the man page and the completion of shells from the option table.
#include <string.h>

#include "options/options_impl.h"

// What completions say of an option or command: up to where its help goes into details.
static size_t short_len(const char *help) {
  const size_t len = strcspn(help, ";:([");
  return len && help[len - 1] == ' ' ? len - 1 : len;
}

// Between the single quotes of a shell.
static void quoted(td_buf *out, const char *text, size_t len) {
  for (size_t i = 0; i < len; i++)
    if (text[i] == '\'')
      td_buf_str(out, "'\\''");
    else
      td_buf_char(out, text[i]);
}

static bool takes(int command, const td_option *o) {
  return o->commands >> command & 1;
}

static bool is_path(const td_option *o) {
  return o->kind == OPT_STR && o->metavar &&
         (strcmp(o->metavar, "FILE") == 0 || strcmp(o->metavar, "DIR") == 0);
}

// Commands that take a model's short name, and the option that does.
static const char *const model_commands[] = {"run", "serve", "pull", "inspect", "rm"};

static bool is_model(const td_option *o) {
  return strcmp(o->name, "model") == 0;
}

static void add_model_commands(td_buf *out, const char *between) {
  for (size_t i = 0; i < TD_COUNT(model_commands); i++)
    td_buf_printf(out, "%s%s", i ? between : "", model_commands[i]);
}

static void add_names(td_buf *out, const td_option *o, const char *between) {
  for (size_t i = 0; o->names && o->names[i]; i++)
    td_buf_printf(out, "%s%s", i ? between : "", o->names[i]);
}

// Calls of each command, those of two words first: "bench" is also how "bench gpu" begins.
#define EACH_COMMAND(c, name)                                                                      \
  for (int of_two = 1; of_two >= 0; of_two--)                                                      \
    for (int c = 0; c < TD_N_COMMANDS; c++)                                                        \
      for (const char *name = td_command_name((td_command)c);                                      \
           name && !strchr(name, ' ') == !of_two; name = NULL)

// ---- bash ---------------------------------------------------------------------------------------

static void bash_values(td_buf *out) {
  td_buf_str(out, "  case $before in\n");
  for (size_t i = 0; i < td_n_options; i++) {
    const td_option *o = &td_option_table[i];
    if (!o->metavar) continue;
    td_buf_printf(out, "  --%s", o->name);
    if (o->letter) td_buf_printf(out, "|-%c", o->letter);
    if (is_model(o)) {
      td_buf_str(out, ") words=$models is_value=1 ;;\n");
    } else if (is_path(o)) {
      td_buf_str(out, ") return ;;\n"); // files, by default
    } else {
      td_buf_str(out, ") words=\"");
      add_names(out, o, " ");
      td_buf_str(out, "\" is_value=1 ;;\n");
    }
  }
  td_buf_str(out, "  esac\n");
}

static void bash(td_buf *out, const char *models) {
  td_buf_str(out, "# Completion of tandem for bash, written by `tandem help --bash`.\n"
                  "_tandem() {\n"
                  "  local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}\n"
                  "  local words= is_value=\n"
                  "  COMPREPLY=()\n");
  td_buf_printf(out, "  local models='%s'\n", models);
  bash_values(out);
  td_buf_str(out, "  if [ -z \"$is_value\" ]; then\n"
                  "    case \"${COMP_WORDS[1]} ${COMP_WORDS[2]-}\" in\n");
  EACH_COMMAND(c, name) {
    td_buf_printf(out, "    \"%s%s\"*) words=\"", name, of_two ? "" : " ");
    for (size_t i = 0; i < td_n_options; i++)
      if (takes(c, &td_option_table[i])) td_buf_printf(out, "--%s ", td_option_table[i].name);
    td_buf_str(out, "\" ;;\n");
  }
  td_buf_str(out, "    esac\n    case ${COMP_WORDS[1]} in ");
  add_model_commands(out, "|");
  td_buf_str(out, ") words+=$models ;; esac\n  fi\n"
                  "  if [ \"$COMP_CWORD\" = 1 ]; then words=\"help");
  EACH_COMMAND(c, name)
  if (!of_two) td_buf_printf(out, " %s", name);
  td_buf_str(out, " eval\"; fi\n"
                  "  if [ \"$COMP_CWORD\" = 2 ]; then\n"
                  "    case ${COMP_WORDS[1]} in\n");
  EACH_COMMAND(c, name) {
    const char *second = strchr(name, ' ');
    if (second)
      td_buf_printf(out, "    %.*s) words+=\" %s\" ;;&\n", (int)(second - name), name, second + 1);
  }
  td_buf_str(out, "    esac\n  fi\n"
                  "  mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"$current\")\n"
                  "  if [ \"$words\" = \"$models\" ]; then\n"
                  "    mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -f -- \"$current\")\n"
                  "    compopt -o filenames 2>/dev/null\n"
                  "  fi\n"
                  "}\n"
                  "complete -o default -F _tandem tandem\n");
}

// ---- zsh ----------------------------------------------------------------------------------------

static void zsh_option(td_buf *out, const td_option *o) {
  td_buf_str(out, "    ");
  if (o->letter)
    td_buf_printf(out, "'(-%c --%s)'{-%c,--%s}'", o->letter, o->name, o->letter, o->name);
  else
    td_buf_printf(out, "'--%s", o->name);
  td_buf_char(out, '[');
  quoted(out, o->help, short_len(o->help));
  td_buf_char(out, ']');
  if (o->metavar) td_buf_printf(out, ":%s:", o->metavar);
  if (o->metavar && o->names) {
    td_buf_char(out, '(');
    add_names(out, o, " ");
    td_buf_char(out, ')');
  } else if (is_path(o)) {
    td_buf_str(out, is_model(o) ? "_tandem_models" : "_files");
  }
  td_buf_str(out, "'\n");
}

static void zsh(td_buf *out, const char *models) {
  td_buf_str(out, "#compdef tandem\n"
                  "# Completion of tandem for zsh, written by `tandem help --zsh`.\n"
                  "local -a commands options\n");
  td_buf_printf(out,
                "_tandem_models() {\n"
                "  _alternative 'models:model:(%s)' 'files:file:_files'\n"
                "}\ncommands=(\n",
                models);
  EACH_COMMAND(c, name) {
    const char *summary = td_command_summary((td_command)c);
    if (of_two) continue;
    td_buf_printf(out, "  '%s:", name);
    quoted(out, summary, strlen(summary));
    td_buf_str(out, "'\n");
  }
  td_buf_str(out, "  'eval:logits, perplexity or answers of a model'\n)\n"
                  "case \"$words[2] $words[3]\" in\n");
  EACH_COMMAND(c, name) {
    td_buf_printf(out, "\"%s%s\"*) options=(\n", name, of_two ? "" : " ");
    for (size_t i = 0; i < td_n_options; i++)
      if (takes(c, &td_option_table[i])) zsh_option(out, &td_option_table[i]);
    td_buf_str(out, "  ) ;;\n");
  }
  td_buf_str(out, "esac\n"
                  "if (( CURRENT == 2 )); then\n"
                  "  _describe command commands\n"
                  "elif [[ $words[2] = (");
  add_model_commands(out, "|");
  td_buf_str(out, ") ]]; then\n"
                  "  _arguments -s $options '*:model:_tandem_models'\n"
                  "else\n"
                  "  _arguments -s $options '*:file:_files'\n"
                  "fi\n");
}

// ---- fish ---------------------------------------------------------------------------------------

static void fish_option(td_buf *out, const td_option *o, const char *models) {
  td_buf_str(out, "complete -c tandem -n '__fish_seen_subcommand_from");
  for (int c = 0; c < TD_N_COMMANDS; c++) {
    const char *name = td_command_name((td_command)c), *second = strchr(name, ' ');
    if (takes(c, o)) td_buf_printf(out, " %s", second ? second + 1 : name);
  }
  td_buf_printf(out, "' -l %s", o->name);
  if (o->letter) td_buf_printf(out, " -s %c", o->letter);
  if (o->metavar) td_buf_str(out, is_path(o) ? " -r -F" : " -x");
  if (o->metavar && o->names) {
    td_buf_str(out, " -a '");
    add_names(out, o, " ");
    td_buf_char(out, '\'');
  }
  if (is_model(o)) td_buf_printf(out, " -a '%s'", models);
  td_buf_str(out, " -d '");
  quoted(out, o->help, short_len(o->help));
  td_buf_str(out, "'\n");
}

static void fish(td_buf *out, const char *models) {
  td_buf_str(out, "# Completion of tandem for fish, written by `tandem help --fish`.\n");
  EACH_COMMAND(c, name) {
    const char *second = strchr(name, ' '), *summary = td_command_summary((td_command)c);
    td_buf_str(out, "complete -c tandem -f -n ");
    if (second) {
      td_buf_printf(out, "'__fish_seen_subcommand_from %.*s' -a %s -d '", (int)(second - name),
                    name, second + 1);
    } else {
      td_buf_printf(out, "__fish_use_subcommand -a %s -d '", name);
    }
    quoted(out, summary, strlen(summary));
    td_buf_str(out, "'\n");
  }
  td_buf_str(out, "complete -c tandem -f -n __fish_use_subcommand -a eval\n");
  for (size_t i = 0; i < td_n_options; i++)
    fish_option(out, &td_option_table[i], models);
  td_buf_str(out, "complete -c tandem -n '__fish_seen_subcommand_from ");
  add_model_commands(out, " ");
  td_buf_printf(out, "' -a '%s' -d model\n", models);
}

bool td_options_completion(td_buf *out, const char *shell, const char *models) {
  static const struct {
    const char *name;
    void (*write)(td_buf *out, const char *models);
  } shells[] = {{"bash", bash}, {"zsh", zsh}, {"fish", fish}};
  for (size_t i = 0; i < TD_COUNT(shells); i++) {
    if (strcmp(shells[i].name, shell) != 0) continue;
    shells[i].write(out, models);
    return true;
  }
  return false;
}

// ---- man page -----------------------------------------------------------------------------------

// Text of roff: no line begins with a control character, and hyphens are those of options.
static void roff(td_buf *out, const char *text) {
  for (; *text; text++)
    if (*text == '\\')
      td_buf_str(out, "\\e");
    else if (*text == '-')
      td_buf_str(out, "\\-");
    else
      td_buf_char(out, *text);
}

static void man_option(td_buf *out, const td_option *o) {
  td_buf_str(out, ".TP\n");
  if (o->letter) td_buf_printf(out, "\\fB\\-%c\\fR, ", o->letter);
  td_buf_str(out, "\\fB\\-\\-");
  roff(out, o->name);
  td_buf_str(out, "\\fR");
  if (o->metavar) td_buf_printf(out, " \\fI%s\\fR", o->metavar);
  td_buf_str(out, "\n\\&");
  roff(out, o->help);
  if (o->names) {
    td_buf_str(out, " [");
    add_names(out, o, ", ");
    td_buf_char(out, ']');
  }
  if (o->fallback) {
    td_buf_str(out, " (default: ");
    roff(out, o->fallback);
    td_buf_char(out, ')');
  }
  td_buf_str(out, "\n.br\nFor:");
  for (int c = 0; c < TD_N_COMMANDS; c++)
    if (takes(c, o)) td_buf_printf(out, " %s;", td_command_name((td_command)c));
  out->len--; // the last semicolon
  td_buf_str(out, ".\n");
}

void td_options_man(td_buf *out) {
  td_buf_str(out, ".TH TANDEM 1 \"\" \"tandem " TD_VERSION "\"\n"
                  ".SH NAME\ntandem \\- large Mixture\\-of\\-Experts language models on a machine "
                  "you own\n"
                  ".SH SYNOPSIS\n.B tandem\n.I COMMAND\n[\\fIoptions\\fR]\n"
                  ".SH DESCRIPTION\nRuns models whose experts lie in CPU memory, with one or two "
                  "GPUs for the rest, or none. Options may stand in a JSON file that "
                  "\\fB\\-\\-config\\fR names, under their long names; the command line wins.\n"
                  ".SH COMMANDS\n");
  for (int c = 0; c < TD_N_COMMANDS; c++) {
    td_buf_printf(out, ".TP\n\\fB%s\\fR\n\\&", td_command_name((td_command)c));
    roff(out, td_command_summary((td_command)c));
    td_buf_char(out, '\n');
  }
  for (int g = 0; g < N_GROUPS; g++) {
    td_buf_printf(out, ".SH \"OPTIONS: %s\"\n", td_option_group_titles[g]);
    for (size_t i = 0; i < td_n_options; i++)
      if (td_option_table[i].group == (td_option_group)g) man_option(out, &td_option_table[i]);
  }
  td_buf_str(out, ".SH FILES\n.TP\n\\fI/etc/tandem/serve.json\\fR\nThe options of tandem.service.\n"
                  ".SH \"EXIT STATUS\"\n0 on success, 1 on failure, 2 for wrong options.\n");
}
