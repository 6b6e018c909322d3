// src/base/status.h - status codes, error messages, violated invariants.
// User input, files, allocation and full pools return td_status and fill a td_err whose message
// names the thing and the cure. Violated invariants abort through TD_CHECK, also in release builds.
#pragma once

#include <stddef.h>

typedef enum {
  TD_OK = 0,
  TD_EINVAL = -1, // an argument
  TD_ENOMEM = -2,
  TD_EIO = -3,
  TD_ENOENT = -4,
  TD_EFORMAT = -5, // malformed data
  TD_EUNSUPPORTED = -6,
  TD_EAGAIN = -7,
  TD_ELIMIT = -8, // exceeded
  TD_ECANCELED = -9,
  TD_EINTERNAL = -10
} td_status;

#define TD_ERR_BYTES 512

// An error code and its message for the user. Valid after a call returned anything but TD_OK.
typedef struct {
  td_status code;
  char msg[TD_ERR_BYTES];
} td_err;

// Fills err (may be NULL) and returns code, so that a failing function can `return td_fail(err,
// TD_EFORMAT, "%s: ...", path);`. Long messages are truncated.
td_status td_fail(td_err *err, td_status code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

// Prepends "<prefix>: " to the message in err and returns err's code. NULL: nothing to prepend to,
// and TD_EINTERNAL, as the code is not known.
td_status td_err_prefix(td_err *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

// Puts `to` in place of name wherever msg, from byte `begin` on, names that: as a whole word, in no
// quotes, which hold what is the user's own, and behind no point, where it is part of another name.
// What may follow is a point or a bracket: the name of what holds something.
void td_msg_rename(char msg[TD_ERR_BYTES], size_t begin, const char *name, const char *to);

_Noreturn void td_check_failed(const char *file, int line, const char *what);

// Aborts with file and line if cond, an internal invariant, is false. Evaluated in every build.
#define TD_CHECK(cond)                                                                             \
  do {                                                                                             \
    if (__builtin_expect(!(cond), 0)) td_check_failed(__FILE__, __LINE__, #cond);                  \
  } while (0)

#define TD_COUNT(array) (sizeof(array) / sizeof((array)[0]))
