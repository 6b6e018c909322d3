// src/api/calls/tagged_calls.c - incremental reader of a tool call whose arguments are elements:
//   <function=NAME> <parameter=KEY> VALUE </parameter> ... </function>
// and the like. The arguments become the JSON text of an object: a value whose schema allows only
// strings as it comes, another when it is complete.
#include <limits.h>
#include <string.h>

#include "api/calls/tool_calls_impl.h"
#include "base/json_write.h"
#include "base/str.h"

#define CALL        "<tool_call>" // several forms' beginning of a call
#define MAX_GAP     256           // white space between two tags that is looked through
#define MAX_NESTING 32            // of elements within an argument
#define MAX_ELIDED  4096          // a value whose element has no beginning

// Passes the marker. WAIT: it may be here; NONE: it is not. A form without the marker passes.
static td_call_outcome pass(td_call_reading *x, const char *marker) {
  const td_call_outcome o = marker ? td_call_at(x, marker, x->r->at) : GO;
  if (marker && o == GO) x->r->at += strlen(marker);
  return o;
}

static td_call_outcome read_open(td_call_reading *x) {
  const char *marker = x->form->tags->name_open;
  if (!td_call_skip_space(x)) return WAIT;
  const td_call_outcome o = pass(x, marker);
  if (o != GO) return o;
  x->r->begin = x->r->at;
  return td_call_go(x, STEP_TAG_NAME);
}

static bool is_word_char(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
         (c && strchr("_-.:/", c));
}

static td_call_outcome read_name(td_call_reading *x) {
  td_call_reader *r = x->r;
  const char *close = x->form->tags->name_close;
  for (; r->at < x->len; r->at++) {
    const char c = x->text[r->at];
    if (r->at - r->begin > TD_CALL_MAX_NAME) return NONE;
    td_call_outcome o = NONE;
    if (close) {
      o = td_call_at(x, close, r->at);
      if (o == NONE && (c == '<' || c == '\n')) return NONE;
      // The byte ends a name that no marker closes.
    } else if (td_is_space(c) || c == '<') {
      o = GO;
    } else if (!is_word_char(c)) {
      return NONE;
    }
    if (o == WAIT) return WAIT;
    if (o == NONE) continue;
    if (td_call_set_name(x, x->text + r->begin, r->at - r->begin) == NONE) return NONE;
    r->at += close ? strlen(close) : 0;
    return td_call_go(x, STEP_TAG_NEXT);
  }
  return WAIT;
}

// What was read is all of the arguments.
static void end_arguments(td_call_reading *x) {
  td_buf_str(&x->call->arguments, x->call->arguments.len ? "}" : "{}");
  x->r->has_arguments = true;
  x->r->begin = x->r->at;
  td_call_go(x, STEP_CLOSE);
}

// A word alone between the markers is a call only if a tool has that name.
static bool is_named(const td_call_reading *x) {
  return x->form->tags->end || x->r->object.has_member ||
         td_tool_params_has_tool(x->r->params, x->call->name);
}

// Before an argument, or the end. A model may end its answer here.
static td_call_outcome read_next(td_call_reading *x) {
  td_call_reader *r = x->r;
  const td_call_tags *t = x->form->tags;
  if (!td_call_skip_space(x)) {
    if (!x->is_ended || !r->object.has_member) return WAIT;
    end_arguments(x);
    return GO;
  }
  const bool may_sep = t->after_name && !r->object.has_member;
  const td_call_outcome sep = may_sep ? pass(x, t->after_name) : NONE;
  // An end tag may stand behind the name, or twice.
  const td_call_outcome stray = t->keys_are_tags || sep == GO ? NONE : pass(x, t->value_close);
  if (sep == GO || stray != NONE) return sep == GO ? GO : stray;
  const char *const marks[] = {x->form->call_close, x->form->close, x->form->call_open,
                               t->name_open, CALL};
  const td_call_outcome last = td_call_any_at(x, marks, TD_COUNT(marks), r->at);
  const td_call_outcome end = t->end ? pass(x, t->end) : NONE;
  if (end != GO && last != GO) {
    // An end may begin like a key.
    const td_call_outcome key = end == NONE && last == NONE ? pass(x, t->key_open) : WAIT;
    if (key == NONE && sep == WAIT) return WAIT;
    if (key != GO) return key;
    r->begin = r->at;
    return td_call_go(x, STEP_TAG_KEY);
  }
  if (!is_named(x)) return NONE;
  end_arguments(x);
  return GO;
}

// The key of a tag without what is around it. *is_text: what the tag says of the value; -1:
// nothing.
static void strip_key(const td_call_tags *t, const char **key, size_t *n, int *is_text) {
  const size_t n_mark = t->text_mark ? strlen(t->text_mark) : 0;
  const char *mark = n_mark ? memmem(*key, *n, t->text_mark, n_mark) : NULL;
  *is_text = -1;
  if (mark) {
    const char *said = mark + n_mark;
    const size_t n_said = (size_t)(*key + *n - said);
    if (memmem(said, n_said, "true", 4)) *is_text = 1;
    if (memmem(said, n_said, "false", 5)) *is_text = 0;
    *n = (size_t)(mark - *key);
  }
  td_call_strip(key, n);
}

// Where the text continues behind white space; SIZE_MAX: it ends there so far.
static size_t behind_space(const td_call_reading *x, size_t at) {
  const size_t most = at + MAX_GAP;
  while (at < x->len && at < most && td_is_space(x->text[at]))
    at++;
  return at == x->len ? SIZE_MAX : at;
}

// *n: the length of the tag that ends a key, 0 for the value's, which ends one whose own is left
// out.
static td_call_outcome at_key_end(const td_call_reading *x, size_t at, size_t *n) {
  const td_call_tags *t = x->form->tags;
  *n = strlen(t->key_close);
  const td_call_outcome own = td_call_at(x, t->key_close, at);
  if (own != NONE || !t->value_open) return own;
  *n = 0;
  const size_t next = behind_space(x, at);
  return next == SIZE_MAX ? WAIT : td_call_at(x, t->value_open, next);
}

static td_call_outcome read_key(td_call_reading *x) {
  td_call_reader *r = x->r;
  size_t n_close;
  for (; r->at < x->len; r->at++) {
    if (r->at - r->begin > TD_CALL_MAX_NAME) return NONE;
    const td_call_outcome o = at_key_end(x, r->at, &n_close);
    if (o == WAIT) return WAIT;
    if (o == NONE && (x->text[r->at] == '\n' || x->text[r->at] == '\0')) return NONE;
    if (o == NONE) continue;
    const char *key = x->text + r->begin;
    size_t n = r->at - r->begin;
    strip_key(x->form->tags, &key, &n, &r->is_text);
    td_buf_clear(&r->word);
    td_buf_add(&r->word, key, n);
    r->at += n_close;
    return r->word.len ? td_call_go(x, STEP_TAG_VALUE_OPEN) : NONE;
  }
  return WAIT;
}

// Writes the key in word, whose value follows.
static void begin_value(td_call_reading *x) {
  td_call_reader *r = x->r;
  td_buf *out = &x->call->arguments;
  unsigned at;
  r->types = td_tool_params_find(r->params, x->call->name, td_buf_text(&r->word), &at);
  if (at < 64) r->given |= (uint64_t)1 << at;
  // Where the schema leaves it open, the tag decides.
  const bool may_be_text = !r->types || r->types & TD_PARAM_STRING;
  if (r->is_text == 1 && may_be_text) r->types = TD_PARAM_STRING;
  if (r->is_text == 0 && r->types != TD_PARAM_STRING) r->types &= ~(unsigned)TD_PARAM_STRING;
  td_buf_str(out, out->len ? ", " : "{");
  td_json_quote(out, td_buf_text(&r->word), r->word.len);
  td_buf_str(out, r->types == TD_PARAM_STRING ? ": \"" : ": ");
  r->object.has_member = true;
  td_buf_clear(&r->key);
  td_buf_add(&r->key, td_buf_text(&r->word), r->word.len);
  td_buf_clear(&r->word);
  r->depth = 0;
}

static td_call_outcome read_value_open(td_call_reading *x) {
  td_call_reader *r = x->r;
  const td_call_tags *t = x->form->tags;
  if (t->value_open && !td_call_skip_space(x)) return WAIT;
  const td_call_outcome o = pass(x, t->value_open);
  unsigned at;
  if (o == NONE) td_tool_params_find(r->params, x->call->name, td_buf_text(&r->word), &at);
  // The tag may be left out behind a key that the tool has.
  if (o == WAIT || (o == NONE && at == UINT_MAX)) return o;
  if (t->trims_line_feeds && r->at == x->len) return WAIT;
  if (t->trims_line_feeds && x->text[r->at] == '\n') r->at++;
  begin_value(x);
  return td_call_go(x, STEP_TAG_VALUE);
}

static void take_byte(td_call_reading *x, char c) {
  if (x->r->types == TD_PARAM_STRING)
    td_json_quote_byte(&x->call->arguments, c);
  else
    td_buf_char(&x->r->word, c);
}

// ---- values of elements -------------------------------------------------------------------------
// The members of an object are elements of their names, those of an array elements called item.

typedef struct {
  const td_call_tags *tags;
  const char *at, *end;
  const td_call_reading *x;
  td_buf path; // owned: of the value being written (tool_params.h)
} elements;

static unsigned types_here(const elements *e) {
  unsigned ignored;
  return td_tool_params_find(e->x->r->params, e->x->call->name, td_buf_text(&e->path), &ignored);
}

static bool is_next(const elements *e, const char *marker) {
  const size_t n = strlen(marker);
  return (size_t)(e->end - e->at) >= n && memcmp(e->at, marker, n) == 0;
}

static bool take_next(elements *e, const char *marker) {
  const bool is_there = is_next(e, marker);
  if (is_there) e->at += strlen(marker);
  return is_there;
}

// Whether an element begins here, behind white space, which is passed if so.
static bool begins_element(elements *e) {
  elements next = *e;
  while (next.at < next.end && td_is_space(*next.at))
    next.at++;
  if (!is_next(&next, e->tags->key_open) || is_next(&next, e->tags->value_close)) return false;
  *e = next;
  return true;
}

static bool write_leaf(td_buf *out, elements *e) {
  const char *open = e->tags->key_open;
  const size_t left = (size_t)(e->end - e->at);
  const char *next = left ? memmem(e->at, left, open, strlen(open)) : NULL;
  if (!next) return false;
  td_tool_param_write(out, types_here(e), e->at, (size_t)(next - e->at));
  e->at = next;
  return true;
}

// Writes elements, or the text of one, up to the tag that ends what they are in. False: the tags do
// not match.
static bool write_elements(td_buf *out, elements *e, unsigned depth) {
  static const char item[] = "item";
  if (!begins_element(e)) return depth > 0 && write_leaf(out, e);
  const char *first = e->at + strlen(e->tags->key_open);
  const unsigned nesting = types_here(e) & (TD_PARAM_ARRAY | TD_PARAM_OBJECT);
  const bool is_item = (size_t)(e->end - first) > strlen(item) && !memcmp(first, "item>", 5);
  const bool is_array = is_item && nesting != TD_PARAM_OBJECT;
  const size_t n_path = e->path.len;
  bool is_whole = depth < MAX_NESTING;
  td_buf_char(out, is_array ? '[' : '{');
  for (unsigned n = 0; is_whole && begins_element(e); n++) {
    e->at += strlen(e->tags->key_open);
    const char *key = e->at, *close = memchr(key, '>', (size_t)(e->end - key));
    const size_t n_key = close ? (size_t)(close - key) : 0;
    if (!n_key || (is_array && (n_key != strlen(item) || memcmp(key, item, n_key)))) return false;
    if (n) td_buf_str(out, ", ");
    if (!is_array) td_json_quote(out, key, n_key);
    if (!is_array) td_buf_str(out, ": ");
    e->at = close + 1;
    td_buf_char(&e->path, is_array ? TD_PARAM_ITEMS : TD_PARAM_MEMBER);
    if (!is_array) td_buf_add(&e->path, key, n_key);
    is_whole = write_elements(out, e, depth + 1);
    e->path.len = n_path;
    if (e->path.data) e->path.data[n_path] = '\0';
    is_whole = is_whole && take_next(e, e->tags->value_close) && (size_t)(e->end - e->at) > n_key &&
               !memcmp(e->at, key, n_key + 1);
    if (is_whole) e->at += n_key + 1;
  }
  td_buf_char(out, is_array ? ']' : '}');
  while (e->at < e->end && td_is_space(*e->at))
    e->at++;
  return is_whole && (depth > 0 || e->at == e->end);
}

static void end_value(td_call_reading *x) {
  td_buf *out = &x->call->arguments;
  const td_buf *word = &x->r->word;
  const char *text = td_buf_text(word);
  if (x->r->types == TD_PARAM_STRING) {
    td_buf_char(out, '"');
    return;
  }
  td_buf value = TD_BUF_INIT;
  elements all = {.tags = x->form->tags, .at = text, .end = text + word->len, .x = x};
  td_buf_add(&all.path, td_buf_text(&x->r->key), x->r->key.len);
  if (all.tags->keys_are_tags && write_elements(&value, &all, 0))
    td_buf_add(out, td_buf_text(&value), value.len);
  else
    td_tool_param_write(out, x->r->types, text, word->len);
  out->failed |= value.failed | all.path.failed;
  td_buf_free(&value);
  td_buf_free(&all.path);
}

// Where keys are tags, models leave out an element's beginning, or what precedes its tag: the value
// ends at the end tag of a parameter that the tool has.
static td_call_outcome read_elided(td_call_reading *x) {
  td_call_reader *r = x->r;
  const td_call_tags *t = x->form->tags;
  const char *from = x->text + r->at, *end = x->text + x->len;
  const size_t n_open = strlen(t->key_open), n_close = strlen(t->value_close);
  const size_t left = (size_t)(end - from);
  const char *tag = memmem(from, left < MAX_ELIDED ? left : MAX_ELIDED, t->key_open, n_open);
  if (!tag) return left < MAX_ELIDED && !x->is_ended ? WAIT : NONE;
  if ((size_t)(end - tag) <= n_close) return x->is_ended ? NONE : WAIT;
  const char *key = tag + n_close;
  const size_t n_left = (size_t)(end - key);
  const char *close = memchr(key, '>', n_left < TD_CALL_MAX_NAME ? n_left : TD_CALL_MAX_NAME);
  if (!close) return n_left < TD_CALL_MAX_NAME && !x->is_ended ? WAIT : NONE;
  unsigned at;
  const size_t n_key = (size_t)(close - key);
  td_buf_clear(&r->word);
  td_buf_add(&r->word, key, n_key);
  td_tool_params_find(r->params, x->call->name, td_buf_text(&r->word), &at);
  if (memcmp(tag, t->value_close, n_close) != 0 || at == UINT_MAX) return NONE;
  const bool has_name = (size_t)(tag - from) >= n_key + 2 && from[0] == '<' &&
                        memcmp(from + 1, key, n_key + 1) == 0;
  r->is_text = -1;
  begin_value(x);
  for (from += has_name ? n_key + 2 : 0; from < tag; from++)
    take_byte(x, *from);
  r->at = (size_t)(close + 1 - x->text);
  end_value(x);
  return td_call_go(x, STEP_TAG_NEXT);
}

// ---- where a value ends -------------------------------------------------------------------------
// A value may hold tags as its text, and models forget or garble the tag that ends one. So an end
// counts by what follows it.

static td_call_outcome at_text_end(const td_call_reading *x) {
  return x->is_ended ? GO : WAIT;
}

// Whether behind a call's last tag no text of the value continues: another call, or the text's end.
static td_call_outcome at_next_call(const td_call_reading *x, size_t at) {
  const td_call_form_marks *f = x->form;
  const char *const marks[] = {f->call_open, f->call_close,      f->open,
                               f->close,     f->tags->name_open, CALL};
  at = behind_space(x, at);
  return at == SIZE_MAX ? at_text_end(x) : td_call_any_at(x, marks, TD_COUNT(marks), at);
}

// The key tag at `at` of a parameter that the tool has and that was not given yet. Where the tool's
// are not known, any that begins a line.
static td_call_outcome at_known_key(const td_call_reading *x, size_t at, bool begins_line) {
  const td_call_tags *t = x->form->tags;
  const td_call_outcome o = td_call_at(x, t->key_open, at);
  if (o != GO) return o;
  const char *key = x->text + at + strlen(t->key_open);
  for (size_t n = 0; n <= TD_CALL_MAX_NAME; n++) {
    if (key + n == x->text + x->len) return WAIT;
    const td_call_outcome end = td_call_at(x, t->key_close, (size_t)(key + n - x->text));
    if (end == WAIT) return WAIT;
    if (end == NONE && strchr("\n<", key[n])) return NONE;
    if (end == NONE) continue;
    char name[TD_CALL_MAX_NAME + 1];
    unsigned i;
    int is_text;
    strip_key(t, &key, &n, &is_text);
    memcpy(name, key, n);
    name[n] = '\0';
    td_tool_params_find(x->r->params, x->call->name, name, &i);
    const bool is_new = i < 64 && !(x->r->given >> i & 1);
    const bool is_free = begins_line && !td_tool_params_lists(x->r->params, x->call->name);
    return is_new || is_free ? GO : NONE;
  }
  return NONE;
}

// The beginning of a call of a tool that is offered.
static td_call_outcome at_known_call(const td_call_reading *x, size_t at) {
  const char *const opens[] = {CALL, x->form->call_open},
                    *names[] = {x->form->tags->name_open, "<function="};
  td_call_outcome found = NONE;
  for (size_t i = 0; i < TD_COUNT(opens) && found == NONE; i++) {
    found = td_call_at(x, opens[i], at);
    if (found == GO) at += strlen(opens[i]);
  }
  if (found != GO) return found;
  at = behind_space(x, at);
  for (size_t i = 0; i < TD_COUNT(names) && at != SIZE_MAX; i++) {
    const td_call_outcome o = td_call_at(x, names[i], at);
    if (o == WAIT) return WAIT;
    if (o == GO) at += strlen(names[i]);
  }
  char name[TD_CALL_MAX_NAME + 1];
  for (size_t n = 0; at != SIZE_MAX && n < sizeof name && at + n < x->len; n++) {
    const char c = x->text[at + n];
    name[n] = c;
    if (is_word_char(c) || (n == 0 && c == '"')) continue;
    name[n] = '\0';
    return td_tool_params_has_tool(x->r->params, name + (name[0] == '"')) ? GO : NONE;
  }
  return at == SIZE_MAX || x->len - at < sizeof name ? WAIT : NONE;
}

// The tag that ends values, which may have more letters than it should, </parameter_function>, or
// end with the line. *n: its length.
static td_call_outcome at_value_close(const td_call_reading *x, size_t at, size_t *n) {
  const char *close = x->form->tags->value_close;
  const size_t n_close = strlen(close);
  *n = n_close;
  const td_call_outcome whole = td_call_at(x, close, at);
  if (whole != NONE) return whole;
  if (x->len - at < n_close || memcmp(x->text + at, close, n_close - 1) != 0) return NONE;
  for (*n = n_close - 1; *n < n_close + TD_CALL_MAX_KEY; ++*n) {
    if (at + *n == x->len) return WAIT;
    const char c = x->text[at + *n];
    if (c == '>') {
      ++*n;
      return GO;
    }
    if (c == '\n') return GO;
    if (!(c == '_' || c == '/' || (c >= 'a' && c <= 'z'))) return NONE;
  }
  return NONE;
}

// Whether a tag within the value at `at` has the name of those that end values.
static td_call_outcome opens_alike(const td_call_reading *x, size_t at) {
  const char *name = x->form->tags->value_close + 2;
  const size_t n = strlen(name) - 1, left = x->len - at - 1;
  if (x->text[at] != '<' || memcmp(x->text + at + 1, name, left < n ? left : n) != 0) return NONE;
  return left > n ? GO : x->is_ended ? NONE : WAIT;
}

// Whether the value ends at the tag at `at`, and where the call continues.
static td_call_outcome ends_value(const td_call_reading *x, size_t at, bool begins_line,
                                  size_t *next) {
  const td_call_form_marks *f = x->form;
  const td_call_tags *t = f->tags;
  size_t n;
  const td_call_outcome closed = at_value_close(x, at, &n);
  *next = at;
  if (closed == WAIT) return WAIT;
  if (closed == GO) {
    // Twice: an element within the value ends, or the tag is doubled.
    const char *const marks[] = {
        t->key_open, t->end,       f->call_close, f->call_open,
        f->close,    t->name_open, CALL,          x->r->depth ? NULL : t->value_close};
    *next = at + n;
    const size_t then = behind_space(x, *next);
    const td_call_outcome o = then == SIZE_MAX ? at_text_end(x)
                                               : td_call_any_at(x, marks, TD_COUNT(marks), then);
    if (o == NONE && x->r->depth && at == x->r->at) x->r->depth--;
    return o;
  }
  const td_call_outcome key = at_known_key(x, at, begins_line);
  if (key != NONE) return key;
  const char *const ends[] = {t->end, f->call_close, f->close};
  for (size_t i = 0; i < TD_COUNT(ends); i++) {
    const td_call_outcome o = td_call_at(x, ends[i], at);
    if (o == WAIT) return WAIT;
    if (o == GO && i > 0 && begins_line) return GO;
    if (o == GO) return at_next_call(x, at + strlen(ends[i]));
  }
  const td_call_outcome opens = at == x->r->at ? opens_alike(x, at) : NONE;
  x->r->depth += opens == GO;
  return opens == WAIT ? WAIT : NONE;
}

// The same where keys are tags: at the end of the argument's own element, or of the call.
static td_call_outcome ends_element(const td_call_reading *x, size_t at, size_t *next) {
  const td_call_tags *t = x->form->tags;
  const char *const ends[] = {t->end, x->form->close};
  *next = at;
  const td_call_outcome end = td_call_any_at(x, ends, TD_COUNT(ends), at);
  if (end != NONE) return end;
  const td_call_outcome closes = td_call_at(x, t->value_close, at);
  if (closes == WAIT) return WAIT;
  if (closes == NONE) {
    const td_call_outcome opens = td_call_at(x, t->key_open, at);
    if (opens == GO) x->r->depth++;
    return opens == WAIT ? WAIT : NONE;
  }
  if (x->r->depth > 0) {
    x->r->depth--;
    return NONE;
  }
  for (size_t n = strlen(t->value_close); n <= TD_CALL_MAX_NAME; n++) {
    if (at + n == x->len) return WAIT;
    if (x->text[at + n] != '>') continue;
    *next = at + n + 1;
    return GO;
  }
  return NONE;
}

static td_call_outcome read_value(td_call_reading *x) {
  td_call_reader *r = x->r;
  const td_call_tags *t = x->form->tags;
  const bool trims = t->trims_line_feeds;
  const char first = t->key_open[0];
  for (; r->at < x->len; r->at++) {
    const char c = x->text[r->at];
    const bool is_feed = c == '\n';
    if (is_feed || c == first) {
      const size_t at = r->at + is_feed;
      const bool begins_line = is_feed || (r->at > 0 && x->text[r->at - 1] == '\n');
      size_t next = at;
      td_call_outcome o = NONE;
      if (at == x->len)
        o = trims || !x->is_ended ? WAIT : NONE;
      else if (x->text[at] == first && is_feed && !t->keys_are_tags)
        o = at_known_call(x, at);
      if (o == NONE && at < x->len && x->text[at] == first) {
        if (!t->keys_are_tags)
          o = ends_value(x, at, begins_line, &next);
        else if (!is_feed)
          o = ends_element(x, at, &next);
      }
      // A line feed before the value's own tag is of the value.
      if (o == GO && is_feed && !trims && next > at) o = NONE;
      if (o == WAIT && x->is_ended) {
        o = GO;
        next = x->len;
      }
      if (o == WAIT) return WAIT;
      if (o == GO) {
        r->at = next;
        end_value(x);
        return td_call_go(x, STEP_TAG_NEXT);
      }
    }
    take_byte(x, c);
  }
  if (!x->is_ended) return WAIT;
  end_value(x);
  return td_call_go(x, STEP_TAG_NEXT);
}

td_call_outcome td_tagged_call_step(td_call_reading *x) {
  switch (x->r->step) {
  case STEP_TAG_OPEN: return read_open(x);
  case STEP_TAG_NAME: return read_name(x);
  case STEP_TAG_NEXT: {
    const td_call_outcome o = read_next(x);
    return o == NONE && x->form->tags->keys_are_tags ? read_elided(x) : o;
  }
  case STEP_TAG_KEY: return read_key(x);
  case STEP_TAG_VALUE_OPEN: return read_value_open(x);
  default: return read_value(x);
  }
}
