// src/base/log.h - one line a message on stderr. Not for hot paths.
#ifndef TD_BASE_LOG_H
#define TD_BASE_LOG_H

typedef enum { TD_LOG_ERROR, TD_LOG_WARN, TD_LOG_INFO, TD_LOG_DEBUG } td_log_level;

// Messages above this level are dropped. Set once by main before threads start; INFO until then.
void td_log_set_level(td_log_level max_level);

// Writes "tandem: <level>: <message>\n" in one write, so lines of several processes never mix.
void td_log(td_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#define td_error(...) td_log(TD_LOG_ERROR, __VA_ARGS__)
#define td_warn(...)  td_log(TD_LOG_WARN, __VA_ARGS__)
#define td_info(...)  td_log(TD_LOG_INFO, __VA_ARGS__)
#define td_debug(...) td_log(TD_LOG_DEBUG, __VA_ARGS__)

#endif
