// src/options/options_impl.h - the option table (table.c), shared by options.c (command line),
// file.c (configuration file) and help.c (--help, reference page).
#pragma once

#include <stddef.h>

#include "options/options.h"

typedef enum {
  OPT_STR,
  OPT_INT,
  OPT_REAL,
  OPT_FLAG,
  OPT_INTS,
  OPT_ENUM,   // one of `names`
  OPT_SIZED,  // one of `names`, of which the last may be followed by =GIB; a td_sized_enum
  OPT_CHOICE, // one of `names`, kept as text; may be left out
  OPT_SUBSET, // some of `names`, separated by commas; kept as text
  OPT_NAMES
} td_option_kind;

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
  const char *name; // long name without dashes; also the key in the file
  char letter;      // short name, or 0
  td_option_kind kind;
  uint32_t commands;        // bit mask of td_command
  size_t offset;            // of the field in td_options
  double min, max;          // OPT_INT, OPT_REAL and each of OPT_INTS
  const char *const *names; // NULL-terminated; OPT_ENUM: the field holds the index
  const char *fallback;
  const char *metavar, *help;
} td_option;

extern const td_option td_option_table[];
extern const size_t td_n_options;
extern const char *const td_option_group_titles[N_GROUPS];
// What people change first: the help of a command with many options begins with them. The last is
// NULL.
extern const char *const td_options_first[];

// A former name of an option. It is still accepted, but not shown in the help.
typedef struct {
  const char *name, *option;
  const char *values[4]; // pairs: former value, current value
} td_option_alias;

// NULL if name is not an alias.
const td_option_alias *td_option_alias_find(const char *name, size_t len);
// The current spelling of a value given to the option `name`: text itself, unless name is an alias
// whose values were renamed.
const char *td_option_alias_value(const char *name, size_t len, const char *text);

// Index of the option with this long name (or letter, if name is NULL) that the command accepts, or
// any command for TD_N_COMMANDS. -1: none.
int td_option_find(td_command command, const char *name, size_t len, char letter);
// Parses text into the option's field. TD_EINVAL names the option and its valid values.
td_status td_option_set(const td_option *option, td_options *options, const char *text,
                        td_err *err);
bool td_option_is_given(const td_options *options, size_t idx);
void td_option_mark_given(td_options *options, size_t idx);

// Sets options from the file of --config that the command line did not set.
td_status td_options_read_file(td_options *options, td_err *err);
