// src/api/dialects/go_template.c - renders them in one pass.
#include "api/dialects/go_template.h"

#include <string.h>

#include "base/str.h"

#define MAX_DEPTH 16

typedef struct {
  const td_go_vars *vars;
  td_buf *out;
  bool shows[MAX_DEPTH + 1]; // whether what stands in each open if is shown
  bool taken[MAX_DEPTH + 1]; // whether a branch of it was
  unsigned depth;
  bool is_over; // .Response was met
} go_run;

// The value of .Name; NULL: there is no such variable.
static const char *value_of(const td_go_vars *v, const char *name, size_t len) {
  const struct {
    const char *name, *value;
  } all[] = {{".System", v->system}, {".Prompt", v->prompt}, {".Suffix", v->suffix},
             {".Response", ""},      {".Thinking", ""},      {".Tools", ""},
             {".Messages", ""}};
  for (size_t i = 0; i < TD_COUNT(all); i++)
    if (strlen(all[i].name) == len && memcmp(all[i].name, name, len) == 0) return all[i].value;
  return NULL;
}

static bool is_word(const char *a, size_t len, const char *word) {
  return strlen(word) == len && memcmp(a, word, len) == 0;
}

static td_status begin_if(go_run *g, const char *name, size_t len, td_err *err) {
  const char *value = value_of(g->vars, name, len);
  if (!value) {
    return td_fail(err, TD_EUNSUPPORTED, "{{ if %.*s }} is not supported", len < 64 ? (int)len : 64,
                   name);
  }
  if (g->depth == MAX_DEPTH)
    return td_fail(err, TD_EUNSUPPORTED, "more than %d nested ifs", MAX_DEPTH);
  const bool is_shown = g->shows[g->depth];
  g->depth++;
  g->shows[g->depth] = is_shown && value[0];
  g->taken[g->depth] = !is_shown || value[0];
  return TD_OK;
}

// An action without its braces and the white space around it.
static td_status act(go_run *g, const char *a, size_t len, td_err *err) {
  if (len >= 3 && memcmp(a, "if ", 3) == 0) {
    size_t skip = 3;
    while (skip < len && td_is_space(a[skip]))
      skip++;
    return begin_if(g, a + skip, len - skip, err);
  }
  if (is_word(a, len, "else") && g->depth) {
    g->shows[g->depth] = !g->taken[g->depth];
    g->taken[g->depth] = true;
    return TD_OK;
  }
  if (is_word(a, len, "end") && g->depth) {
    g->depth--;
    return TD_OK;
  }
  if (len >= 2 && memcmp(a, "/*", 2) == 0) return TD_OK;
  const char *value = value_of(g->vars, a, len);
  if (!value) {
    return td_fail(err, TD_EUNSUPPORTED, "{{ %.*s }} is not supported", len < 64 ? (int)len : 64,
                   a);
  }
  if (!g->shows[g->depth]) return TD_OK;
  g->is_over = is_word(a, len, ".Response");
  td_buf_str(g->out, value);
  return TD_OK;
}

static void add_text(go_run *g, const char *text, size_t len, bool trims_end) {
  while (trims_end && len && td_is_space(text[len - 1]))
    len--;
  if (g->shows[g->depth]) td_buf_add(g->out, text, len);
}

td_status td_go_render(td_buf *out, const char *text, const td_go_vars *vars, td_err *err) {
  go_run g = {.vars = vars, .out = out, .shows = {true}};
  td_status st = TD_OK;
  while (st == TD_OK && !g.is_over) {
    const char *open = strstr(text, "{{");
    if (!open) break;
    const char *close = strstr(open, "}}"), *a = open + 2;
    if (!close) return td_fail(err, TD_EINVAL, "{{ without }}");
    const bool trims_before = a[0] == '-' && td_is_space(a[1]);
    const bool trims_after = close - a >= 2 && close[-1] == '-' && td_is_space(close[-2]);
    add_text(&g, text, (size_t)(open - text), trims_before);
    const char *end = close - trims_after;
    a += trims_before;
    while (a < end && td_is_space(*a))
      a++;
    while (end > a && td_is_space(end[-1]))
      end--;
    st = act(&g, a, (size_t)(end - a), err);
    text = close + 2;
    while (trims_after && td_is_space(*text))
      text++;
  }
  if (st == TD_OK && !g.is_over) add_text(&g, text, strlen(text), false);
  if (st == TD_OK && !g.is_over && g.depth)
    st = td_fail(err, TD_EINVAL, "{{ if }} without {{ end }}");
  return st;
}
