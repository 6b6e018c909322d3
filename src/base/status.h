// src/base/status.h - status codes, error messages, violated invariants.
// User input, files, allocation and full pools return td_status and fill a td_err whose message
// names the thing and the cure. Violated invariants abort through TD_CHECK, also in release builds.
#pragma once

#include <stddef.h>

// The list of codes and their texts.
#define TD_STATUS_MAP(X)                                                                           \
  X(OK, 0, "ok")                                                                                   \
  X(EINVAL, -1, "invalid argument")                                                                \
  X(ENOMEM, -2, "out of memory")                                                                   \
  X(EIO, -3, "input/output error")                                                                 \
  X(ENOENT, -4, "not found")                                                                       \
  X(EFORMAT, -5, "malformed data")                                                                 \
  X(EUNSUPPORTED, -6, "not supported")                                                             \
  X(EAGAIN, -7, "try again")                                                                       \
  X(ELIMIT, -8, "limit exceeded")                                                                  \
  X(ECANCELED, -9, "canceled")                                                                     \
  X(EINTERNAL, -10, "internal error")

typedef enum {
#define X(name, code, text) TD_##name = (code),
  TD_STATUS_MAP(X)
#undef X
} td_status;

#define TD_ERR_BYTES 512

// An error code and its message for the user. Valid after a call returned anything but TD_OK.
typedef struct {
  td_status code;
  char msg[TD_ERR_BYTES];
} td_err;

// A static text such as "invalid argument"; never NULL.
const char *td_status_text(td_status status);

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
