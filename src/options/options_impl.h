// src/options/options_impl.h - the option table (table.c), which options.c (command line), file.c
// (configuration file) and help.c (--help, the reference page) read.
#ifndef TD_OPTIONS_OPTIONS_IMPL_H
#define TD_OPTIONS_OPTIONS_IMPL_H

#include <stddef.h>

#include "options/options.h"

typedef enum { OPT_STR, OPT_INT, OPT_REAL, OPT_FLAG, OPT_INTS, OPT_ENUM, OPT_NAMES } td_option_kind;

typedef enum {
  GROUP_GENERAL,
  GROUP_MODEL,
  GROUP_PROMPT,
  GROUP_SAMPLING,
  GROUP_NETWORK,
  GROUP_SERVING,
  GROUP_KV,
  GROUP_BENCH,
  GROUP_LOAD,
  GROUP_FILES,
  N_GROUPS
} td_option_group;

typedef struct {
  td_option_group group;
  const char *name; // long name, without dashes; also the key in the configuration file
  char letter;      // short name or 0
  td_option_kind kind;
  uint32_t commands;        // bits of td_command
  size_t offset;            // of the field in td_options
  double min, max;          // OPT_INT, OPT_REAL and each of OPT_INTS
  const char *const *names; // OPT_ENUM: the values, ended by NULL; the field is an index
  const char *fallback;
  const char *metavar, *help;
} td_option;

extern const td_option td_option_table[];
extern const size_t td_n_options;
extern const char *const td_option_group_titles[N_GROUPS];

// A former spelling of an option. It works as before and is in no help.
typedef struct {
  const char *name, *option;
  const char *values[4]; // pairs: a former value, what it is now
} td_option_alias;

// NULL: name is no alias.
const td_option_alias *td_option_alias_find(const char *name, size_t len);
// What a value of the option that was spelled name is now: text itself unless name is an alias
// whose values were renamed.
const char *td_option_alias_value(const char *name, size_t len, const char *text);

// The option with this long name (or letter, when name is NULL) that the command takes; with
// TD_N_COMMANDS, that any takes. -1: none.
int td_option_find(td_command command, const char *name, size_t len, char letter);
// Parses text into the option's field. TD_EINVAL names the option and what it takes.
td_status td_option_set(const td_option *option, td_options *options, const char *text,
                        td_err *err);
bool td_option_is_given(const td_options *options, size_t idx);
void td_option_mark_given(td_options *options, size_t idx);

// Sets what --config's file says and the command line does not.
td_status td_options_read_file(td_options *options, td_err *err);

#endif
