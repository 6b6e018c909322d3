// src/options/options.c - parses the command line: commands, options and their values.
#include "options/options_impl.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/str.h"
#include "options/closest.h"

static const char *const command_names[] = {
#define X(id, name, summary) name,
    TD_COMMANDS(X)
#undef X
};
static const char *const command_summaries[] = {
#define X(id, name, summary) summary,
    TD_COMMANDS(X)
#undef X
};

const char *td_command_name(td_command command) {
  return command < TD_N_COMMANDS ? command_names[command] : "";
}

const char *td_command_summary(td_command command) {
  return command < TD_N_COMMANDS ? command_summaries[command] : "";
}

// ---- values ---------------------------------------------------------------------------------

static td_status out_of_range(const td_option *o, const char *text, td_err *err) {
  if (o->kind == OPT_REAL) {
    return td_fail(err, TD_EINVAL, "--%s %s: give a number from %g to %g", o->name, text, o->min,
                   o->max);
  }
  return td_fail(err, TD_EINVAL, "--%s %s: give a whole number from %.0f to %.0f", o->name, text,
                 o->min, o->max);
}

static td_status set_str(char **field, const char *text, td_err *err) {
  char *copy = strdup(text);
  if (!copy) return td_fail(err, TD_ENOMEM, "out of memory");
  free(*field);
  *field = copy;
  return TD_OK;
}

static td_status set_int(const td_option *o, int64_t *field, const char *text, td_err *err) {
  char *end;
  errno = 0;
  long long value = strtoll(text, &end, 10);
  if (end == text || *end || errno || (double)value < o->min || (double)value > o->max)
    return out_of_range(o, text, err);
  *field = value;
  return TD_OK;
}

static td_status set_real(const td_option *o, double *field, const char *text, td_err *err) {
  char *end;
  double value = strtod(text, &end);
  if (end == text || *end || !(value >= o->min && value <= o->max))
    return out_of_range(o, text, err);
  *field = value;
  return TD_OK;
}

static td_status parse_ints(const td_option *o, td_int_list *list, const char *text, td_err *err) {
  size_t n = 1;
  for (const char *p = text; *p; p++)
    n += *p == ',';
  int32_t *values = malloc(n * sizeof *values);
  if (!values) return td_fail(err, TD_ENOMEM, "out of memory");
  const char *p = text;
  for (size_t i = 0; i < n; i++) {
    char *end;
    errno = 0;
    long long value = strtoll(p, &end, 10);
    char stop = *end == '\n' && !end[1] ? '\0' : *end;
    if (end == p || errno || (double)value < o->min || (double)value > o->max ||
        stop != (i + 1 < n ? ',' : '\0')) {
      free(values);
      return td_fail(err, TD_EINVAL,
                     "--%s: entry %zu of \"%.40s\" is not a whole number from %.0f to %.0f",
                     o->name, i + 1, text, o->min, o->max);
    }
    values[i] = (int32_t)value;
    p = end + 1;
  }
  free(list->values);
  *list = (td_int_list){.values = values, .n = (uint32_t)n};
  return TD_OK;
}

// Parses "1,2,3", or "@FILE" for a file with the same content.
static td_status set_ints(const td_option *o, td_int_list *field, const char *text, td_err *err) {
  if (text[0] != '@') return parse_ints(o, field, text, err);
  td_buf file = TD_BUF_INIT;
  td_status st = td_file_read(&file, text + 1, 1 << 28, err);
  if (st == TD_OK) st = parse_ints(o, field, td_buf_text(&file), err);
  td_buf_free(&file);
  return st;
}

// Appends the names in "a,b" to the list.
static td_status add_names(const td_option *o, td_str_list *list, const char *text, td_err *err) {
  while (*text) {
    size_t len = strcspn(text, ",");
    char **grown = realloc(list->values, (list->n + (size_t)1) * sizeof *grown);
    if (!grown) return td_fail(err, TD_ENOMEM, "out of memory");
    list->values = grown;
    if (len && !(list->values[list->n++] = strndup(text, len))) {
      list->n--;
      return td_fail(err, TD_ENOMEM, "out of memory");
    }
    text += len + (text[len] == ',');
  }
  return list->n ? TD_OK : td_fail(err, TD_EINVAL, "--%s: give a name", o->name);
}

// Index of the name in the option's list; -1: it is not there.
static int name_index(const td_option *o, const char *name, size_t len) {
  for (int i = 0; o->names[i]; i++)
    if (strlen(o->names[i]) == len && !strncmp(o->names[i], name, len)) return i;
  return -1;
}

static td_status not_in_list(const td_option *o, const char *name, size_t len, td_err *err) {
  char list[192] = "";
  size_t at = 0;
  for (int i = 0; o->names[i] && at < sizeof list; i++) {
    const char *comma = i == 0 ? "" : o->names[i + 1] ? ", " : " or ";
    at += (size_t)snprintf(list + at, sizeof list - at, "%s%s", comma, o->names[i]);
  }
  return td_fail(err, TD_EINVAL, "--%s %.*s: give %s", o->name, (int)len, name, list);
}

static td_status set_enum(const td_option *o, int *field, const char *text, td_err *err) {
  int i = name_index(o, text, strlen(text));
  if (i < 0) return not_in_list(o, text, strlen(text), err);
  *field = i;
  return TD_OK;
}

static td_status set_sized(const td_option *o, td_sized_enum *field, const char *text,
                           td_err *err) {
  const size_t len = strcspn(text, "=");
  const int i = name_index(o, text, len);
  char *end = NULL;
  if (i < 0 || (text[len] && o->names[i + 1])) return not_in_list(o, text, strlen(text), err);
  *field = (td_sized_enum){.value = i};
  if (!text[len]) return TD_OK;
  field->gib = strtod(text + len + 1, &end);
  if (*end || !(field->gib > 0 && field->gib <= 1 << 20))
    return td_fail(err, TD_EINVAL, "--%s %s: give GiB behind =, as 8 or 0.5", o->name, text);
  return TD_OK;
}

static td_status set_choice(const td_option *o, char **field, const char *text, td_err *err) {
  if (name_index(o, text, strlen(text)) < 0) return not_in_list(o, text, strlen(text), err);
  return set_str(field, text, err);
}

static td_status set_subset(const td_option *o, char **field, const char *text, td_err *err) {
  for (const char *at = text; *at;) {
    size_t len = strcspn(at, ",");
    if (name_index(o, at, len) < 0) return not_in_list(o, at, len, err);
    at += len + (at[len] == ',');
  }
  return set_str(field, text, err);
}

// Text may be empty; a name, a path or a key is not, but an unset variable of a shell.
static td_status set_text(const td_option *o, char **field, const char *text, td_err *err) {
  if (!text[0] && strcmp(o->metavar, "TEXT") != 0) {
    return td_fail(err, TD_EINVAL, "--%s: the value is empty: give %s, or leave the option out",
                   o->name, o->metavar);
  }
  return set_str(field, text, err);
}

static td_status set_flag(const td_option *o, bool *field, const char *text, td_err *err) {
  if (strcmp(text, "true") && strcmp(text, "false"))
    return td_fail(err, TD_EINVAL, "--%s %s: give true or false", o->name, text);
  *field = text[0] == 't';
  return TD_OK;
}

td_status td_option_set(const td_option *o, td_options *options, const char *text, td_err *err) {
  void *field = (char *)options + o->offset;
  switch (o->kind) {
  case OPT_STR: return set_text(o, field, text, err);
  case OPT_INT: return set_int(o, field, text, err);
  case OPT_REAL: return set_real(o, field, text, err);
  case OPT_FLAG: return set_flag(o, field, text, err);
  case OPT_INTS: return set_ints(o, field, text, err);
  case OPT_ENUM: return set_enum(o, field, text, err);
  case OPT_SIZED: return set_sized(o, field, text, err);
  case OPT_CHOICE: return set_choice(o, field, text, err);
  case OPT_SUBSET: return set_subset(o, field, text, err);
  case OPT_NAMES: return add_names(o, field, text, err);
  }
  return TD_EINTERNAL;
}

td_status td_options_set(td_options *options, const char *name, const char *value, td_err *err) {
  const int idx = td_option_find(options->command, name, strlen(name), 0);
  if (idx < 0) return td_fail(err, TD_EINVAL, "%s: not an option", name);
  const td_option *o = &td_option_table[idx];
  if (value) {
    td_option_mark_given(options, (size_t)idx);
    return td_option_set(o, options, value, err);
  }
  options->given[idx / 64] &= ~((uint64_t)1 << (idx % 64));
  if (o->fallback) return td_option_set(o, options, o->fallback, err);
  if (o->kind != OPT_STR && o->kind != OPT_CHOICE) return TD_OK;
  char **field = (char **)((char *)options + o->offset);
  free(*field);
  *field = NULL;
  return TD_OK;
}

void td_options_show(td_buf *out, const td_options *options, const char *name) {
  const int idx = td_option_find(options->command, name, strlen(name), 0);
  TD_CHECK(idx >= 0);
  const td_option *o = &td_option_table[idx];
  const void *field = (const char *)options + o->offset;
  const bool is_text = o->kind == OPT_STR || o->kind == OPT_CHOICE;
  const char *text = is_text ? *(char *const *)field : NULL;
  if (o->kind == OPT_INT) td_buf_printf(out, "%lld", (long long)*(const int64_t *)field);
  if (o->kind == OPT_REAL) td_buf_printf(out, "%.9g", *(const double *)field);
  if (o->kind == OPT_ENUM || o->kind == OPT_SIZED) td_buf_str(out, o->names[*(const int *)field]);
  const double gib = o->kind == OPT_SIZED ? ((const td_sized_enum *)field)->gib : 0;
  if (gib > 0) td_buf_printf(out, "=%.9g", gib);
  if (text) td_buf_str(out, text);
}

bool td_option_is_given(const td_options *options, size_t idx) {
  return options->given[idx / 64] >> (idx % 64) & 1;
}

void td_option_mark_given(td_options *options, size_t idx) {
  options->given[idx / 64] |= (uint64_t)1 << (idx % 64);
}

bool td_options_given(const td_options *options, const char *name) {
  for (size_t i = 0; i < td_n_options; i++)
    if (!strcmp(td_option_table[i].name, name) && td_option_is_given(options, i)) return true;
  return false;
}

bool td_options_place_model(const td_options *options) {
  for (size_t i = 0; i < td_n_options; i++) {
    const td_option *o = &td_option_table[i];
    const bool is_name = !strcmp(o->name, "model") || !strcmp(o->name, "revision");
    const bool is_place = o->group == GROUP_MODEL || o->group == GROUP_KV;
    if (is_place && !is_name && td_option_is_given(options, i)) return true;
  }
  return false;
}

int64_t td_options_number(const td_options *options, const char *name) {
  for (size_t i = 0; i < td_n_options; i++) {
    const td_option *o = &td_option_table[i];
    const void *field = (const char *)options + o->offset;
    if (strcmp(o->name, name) != 0) continue;
    if (o->kind == OPT_INT) return *(const int64_t *)field;
    if (o->kind == OPT_ENUM || o->kind == OPT_SIZED) return *(const int *)field;
  }
  TD_CHECK(!"a number option");
  return 0;
}

const char *td_options_text(const td_options *options, const char *name) {
  for (size_t i = 0; i < td_n_options; i++) {
    const td_option *o = &td_option_table[i];
    if (strcmp(o->name, name) == 0 && o->kind == OPT_STR)
      return *(char *const *)((const char *)options + o->offset);
  }
  TD_CHECK(!"a text option");
  return NULL;
}

// ---- command line ---------------------------------------------------------------------------

int td_option_find(td_command command, const char *name, size_t len, char letter) {
  const td_option_alias *alias = name ? td_option_alias_find(name, len) : NULL;
  if (alias) return td_option_find(command, alias->option, strlen(alias->option), 0);
  for (size_t i = 0; i < td_n_options; i++) {
    const td_option *o = &td_option_table[i];
    if (command < TD_N_COMMANDS && !(o->commands >> command & 1)) continue;
    bool same = name ? strlen(o->name) == len && !strncmp(o->name, name, len)
                     : o->letter && o->letter == letter;
    if (same) return (int)i;
  }
  return -1;
}

// Finds the longest command whose words start argv; returns its number of words.
static int match_command(int argc, char **argv, td_command *command) {
  int best = 0;
  for (int c = 0; c < TD_N_COMMANDS; c++) {
    const char *space = strchr(command_names[c], ' ');
    size_t first = space ? (size_t)(space - command_names[c]) : strlen(command_names[c]);
    int words = space ? 2 : 1;
    if (argc - 1 < words || strlen(argv[1]) != first || strncmp(argv[1], command_names[c], first) ||
        (space && strcmp(argv[2], space + 1)))
      continue;
    if (words > best) {
      best = words;
      *command = (td_command)c;
    }
  }
  return best;
}

// The command that other programs call by this word; NULL: none.
static const char *command_known_as(const char *word) {
  static const char *const known[][2] = {
      {"chat", "run"},
      {"cli", "run"},
      {"generate", "run"},
      {"start", "serve"},
      {"download", "pull"},
      {"ls", "list"},
      {"models", "list"},
      {"show", "inspect"},
      {"perplexity", "eval perplexity"},
      {"tokenize", "inspect tokens"},
      {"version", "--version"},
  };
  for (size_t i = 0; i < TD_COUNT(known); i++)
    if (!strcmp(word, known[i][0])) return known[i][1];
  return NULL;
}

// Reports an unknown command. If word starts some commands, as "eval" does, the message lists them.
static td_status unknown_command(const char *word, td_err *err) {
  char list[256] = "";
  size_t len = strlen(word), at = 0;
  for (int c = 0; c < TD_N_COMMANDS; c++) {
    const char *name = command_names[c];
    if (strncmp(name, word, len) || name[len] != ' ' || at >= sizeof list) continue;
    at += (size_t)snprintf(list + at, sizeof list - at, "%s`tandem %s`", at ? ", " : "", name);
  }
  if (at) return td_fail(err, TD_EINVAL, "%s: needs a second word: %s", word, list);
  const char *meant = command_known_as(word);
  if (!meant) {
    td_closest closest = {.word = word, .len = len};
    for (int c = 0; c < TD_N_COMMANDS; c++)
      td_closest_try(&closest, command_names[c]);
    meant = closest.best;
  }
  if (meant)
    return td_fail(err, TD_EINVAL, "%s: not a command; did you mean `tandem %s`?", word, meant);
  return td_fail(err, TD_EINVAL, "%s: not a command; `tandem --help` lists them", word);
}

// arg: the option as it was written; name[0..len): without dashes and value, NULL for a letter.
static td_status unknown_option(const td_options *options, const char *arg, const char *name,
                                size_t len, td_err *err) {
  // What others call it.
  static const char *const others[][2] = {
      {"url", "server"},           {"port", "server"},         {"host", "server"},
      {"base-url", "server"},      {"ctx", "ctx-size"},        {"context-length", "ctx-size"},
      {"max-tokens", "n-predict"}, {"system-prompt", "system"}};
  const char *command = td_command_name(options->command);
  td_closest closest = {.word = name, .len = len};
  for (size_t i = 0; name && i < td_n_options; i++)
    if (td_option_table[i].commands >> options->command & 1)
      td_closest_try(&closest, td_option_table[i].name);
  for (size_t i = 0; name && i < TD_COUNT(others); i++) {
    const char *ours = others[i][1];
    const bool is_it = len == strlen(others[i][0]) && strncmp(name, others[i][0], len) == 0;
    if (is_it && td_option_find(options->command, ours, strlen(ours), 0) >= 0) closest.best = ours;
  }
  if (closest.best) {
    return td_fail(err, TD_EINVAL, "%s: not an option of %s; did you mean --%s?", arg, command,
                   closest.best);
  }
  return td_fail(err, TD_EINVAL, "%s: not an option of %s; `tandem %s --help` lists them", arg,
                 command, command);
}

// A word where an option should be; perhaps the mistyped second word of a command.
static td_status unexpected_word(const td_options *options, const char *arg, td_err *err) {
  const char *command = td_command_name(options->command);
  const bool takes_model = td_option_find(options->command, "model", 5, 0) >= 0;
  const size_t n_first = strlen(command);
  td_closest closest = {.word = arg, .len = strlen(arg)};
  for (int c = 0; c < TD_N_COMMANDS; c++)
    if (!strncmp(command_names[c], command, n_first) && command_names[c][n_first] == ' ')
      td_closest_try(&closest, command_names[c] + n_first + 1);
  if (closest.best) {
    return td_fail(err, TD_EINVAL,
                   "%s: unexpected word after `tandem %s`; did you mean `tandem %s %s`?", arg,
                   command, command, closest.best);
  }
  if (options->command == TD_CMD_RUN && options->model) {
    return td_fail(err, TD_EINVAL, "%s: unexpected word after `tandem run`; a prompt is -p TEXT",
                   arg);
  }
  return td_fail(err, TD_EINVAL, "%s: unexpected word after `tandem %s`; options begin with --%s",
                 arg, command,
                 takes_model && !options->model ? ", and a model is --model DIR" : "");
}

// Whether a word without an option in front is the model: `tandem pull` and `stop` take nothing
// else; elsewhere it is a path or a name (all of which have a hyphen), unlike a mistyped command.
static bool is_model(const td_options *options, const char *word) {
  const bool is_only = options->command == TD_CMD_PULL || options->command == TD_CMD_STOP ||
                       options->command == TD_CMD_RM;
  return is_only || strpbrk(word, "/-") || td_ends_with(word, ".gguf");
}

// Parses argv[*i] and its value; *i moves to the last argument used.
static td_status parse_arg(td_options *options, int argc, char **argv, int *i, td_err *err) {
  const char *arg = argv[*i];
  const int model = td_option_find(options->command, "model", 5, 0);
  if (options->command == TD_CMD_VERIFY && !options->receipt && td_ends_with(arg, ".json"))
    return td_options_set(options, "receipt", arg, err);
  if (arg[0] != '-' && model >= 0 && !options->model && is_model(options, arg)) {
    td_option_mark_given(options, (size_t)model);
    return td_option_set(&td_option_table[model], options, arg, err);
  }
  if (arg[0] != '-' || !arg[1]) return unexpected_word(options, arg, err);
  bool is_long = arg[1] == '-';
  const char *name = is_long ? arg + 2 : NULL, *equals = is_long ? strchr(name, '=') : NULL;
  size_t len = !is_long ? 0 : equals ? (size_t)(equals - name) : strlen(name);
  int idx = !is_long && arg[2] ? -1 : td_option_find(options->command, name, len, arg[1]);
  if (idx < 0 && is_long && !equals && !strncmp(name, "no-", 3)) {
    idx = td_option_find(options->command, name + 3, len - 3, 0);
    if (idx >= 0 && td_option_table[idx].kind == OPT_FLAG) {
      td_option_mark_given(options, (size_t)idx);
      return td_option_set(&td_option_table[idx], options, "false", err);
    }
    idx = -1;
  }
  if (idx < 0) return unknown_option(options, arg, name, len, err);
  const char *value = equals ? equals + 1 : "true";
  if (!equals && td_option_table[idx].kind != OPT_FLAG) {
    if (*i + 1 >= argc)
      return td_fail(err, TD_EINVAL, "%s: needs a value (%s)", arg, td_option_table[idx].metavar);
    value = argv[++*i];
  }
  if (is_long) value = td_option_alias_value(name, len, value);
  td_option_mark_given(options, (size_t)idx);
  td_status st = td_option_set(&td_option_table[idx], options, value, err);
  const bool is_list = td_option_table[idx].kind == OPT_NAMES;
  while (st == TD_OK && is_list && *i + 1 < argc && argv[*i + 1][0] != '-')
    st = td_option_set(&td_option_table[idx], options, argv[++*i], err);
  return st;
}

td_status td_options_parse(td_options *out, int argc, char **argv, td_err *err) {
  *out = (td_options){.command = TD_N_COMMANDS};
  td_status st = TD_OK;
  for (size_t i = 0; i < td_n_options && st == TD_OK; i++)
    if (td_option_table[i].fallback)
      st = td_option_set(&td_option_table[i], out, td_option_table[i].fallback, err);
  if (st != TD_OK) return st;
  if (argc > 2 && !strcmp(argv[1], "help")) { // tandem help COMMAND
    out->help = true;
    return match_command(argc - 1, argv + 1, &out->command) ? TD_OK : unknown_command(argv[2], err);
  }
  int words = match_command(argc, argv, &out->command);
  if (!words) {
    if (argc < 2 || !strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") ||
        !strcmp(argv[1], "help")) {
      out->help = true;
      return TD_OK;
    }
    return unknown_command(argv[1], err);
  }
  for (int i = 1 + words; i < argc && !out->help; i++) {
    td_err others; // only the first error is reported, but later options may still set the log
                   // format
    td_status one = parse_arg(out, argc, argv, &i, st == TD_OK ? err : &others);
    if (st == TD_OK) st = one;
  }
  if (st == TD_OK && out->config && !out->help) st = td_options_read_file(out, err);
  return st;
}

void td_options_free(td_options *options) {
  for (size_t i = 0; i < td_n_options; i++) {
    void *field = (char *)options + td_option_table[i].offset;
    const td_option_kind kind =
        td_option_table[i].kind; // options of two commands may share a field
    if (kind == OPT_STR || kind == OPT_CHOICE || kind == OPT_SUBSET) {
      free(*(char **)field);
      *(char **)field = NULL;
    }
    if (kind == OPT_INTS) {
      free(((td_int_list *)field)->values);
      *(td_int_list *)field = (td_int_list){0};
    }
    if (kind == OPT_NAMES) {
      td_str_list *list = field;
      while (list->n)
        free(list->values[--list->n]);
      free(list->values);
      *list = (td_str_list){0};
    }
  }
  *options = (td_options){.command = TD_N_COMMANDS};
}
