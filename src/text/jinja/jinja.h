// src/text/jinja/jinja.h - the Jinja2 interpreter behind template.h: values, syntax tree, and the
// state of one run.
//
// Pipeline: lex (lex.c) -> parse (parse.c, expr.c) -> resolve names to slots as Jinja2's compiler
// does (scope.c) -> walk the tree (exec.c, eval.c). Values live in the run's arena, are immutable
// except for namespaces and iterators, and follow Python's semantics. A string records
// which of its bytes are user input ("typed").
//
// Errors: jj_raise fills the caller's td_err and longjmps to the entry point that set jj.on_error.
// All memory of the run belongs to the arena, so nothing leaks. Names shared between these files
// start with jj_; the rest of the program uses only template.h.
#pragma once

#include <setjmp.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"
#include "text/span.h"

typedef struct jj jj;
typedef struct jj_node jj_node;
typedef struct jj_env jj_env;
typedef struct jj_loop jj_loop;

// ---- values ----

typedef enum {
  JJ_MISSING, // no value: an unset slot, an omitted argument
  JJ_UNDEF,
  JJ_NONE,
  JJ_BOOL,
  JJ_INT,
  JJ_BIG, // an integer beyond int64, as digits; can only be printed and compared for equality
  JJ_FLOAT,
  JJ_STR,
  JJ_LIST,
  JJ_TUPLE,
  JJ_DICT,
  JJ_VIEW, // dict.keys(), .values(), .items()
  JJ_RANGE,
  JJ_ITER, // stands for a Python generator: always true, no length, consumed by reading
  JJ_NAMESPACE,
  JJ_NATIVE, // a global function, or a bound method
  JJ_MACRO,
  JJ_LOOP,
} jj_type;

// Growable storage shared by strings. The string that ends at `used` can be appended to in place,
// which keeps `x = x + y` in a loop linear. The same applies to the list of typed runs.
typedef struct {
  char *data;
  size_t used, cap;
} jj_store;

typedef struct {
  td_span *runs;
  size_t used, cap;
} jj_run_store;

typedef struct {
  const char *p; // valid UTF-8, not NUL-terminated
  size_t len;    // bytes
  size_t n_chars;
  const td_span *runs; // ranges of user input: sorted, non-empty, without overlap
  size_t n_runs;
  jj_store *store; // NULL: the bytes are borrowed or a slice
  jj_run_store *run_store;
  bool markup; // made by |safe or |escape: text joined to it gets escaped
} jj_str;

typedef struct jj_list jj_list;
typedef struct jj_dict jj_dict;
typedef struct jj_undef jj_undef;
typedef struct jj_view jj_view;
typedef struct jj_range jj_range;
typedef struct jj_iter jj_iter;
typedef struct jj_bound jj_bound;
typedef struct jj_macro jj_macro;

typedef struct {
  jj_type type;
  union {
    bool b;
    int64_t i;
    double f;
    const jj_str *s; // also JJ_BIG
    jj_list *list;   // also JJ_TUPLE
    jj_dict *dict;   // also JJ_NAMESPACE
    const jj_undef *undef;
    const jj_view *view;
    const jj_range *range;
    jj_iter *iter;
    const jj_bound *native;
    const jj_macro *macro;
    jj_loop *loop;
  };
} jj_value;

struct jj_list {
  jj_value *items;
  size_t n, cap;
};

typedef struct {
  jj_value key, value;
  uint64_t hash;
} jj_entry;

// Insertion-ordered. The index is built once linear search becomes expensive.
struct jj_dict {
  jj_entry *entries;
  size_t n, cap;
  uint32_t *index; // open addressing: entry number + 1; 0: empty
  size_t index_cap;
};

// Why a value is undefined; the message is composed when the value is used.
struct jj_undef {
  const char *hint; // the complete message, or NULL
  bool has_obj;
  jj_value obj, name;
};

typedef enum { JJ_KEYS, JJ_VALUES, JJ_ITEMS } jj_view_kind;
struct jj_view {
  jj_view_kind kind;
  const jj_dict *dict;
};

struct jj_range {
  int64_t start, step;
  int64_t n, stop;
};

struct jj_iter {
  jj_value items; // list, tuple, range, dict, view or string
  size_t pos;     // number of items already returned
  size_t byte;    // strings: offset of the next character
};

struct jj_macro {
  const jj_node *node; // NODE_MACRO or NODE_CALL_BLOCK
  jj_env *env;         // where it was defined
};

#define JJ_NO_VALUE    ((jj_value){.type = JJ_MISSING})
#define JJ_NONE_VALUE  ((jj_value){.type = JJ_NONE})
#define JJ_OF_BOOL(x)  ((jj_value){.type = JJ_BOOL, .b = (x)})
#define JJ_OF_INT(x)   ((jj_value){.type = JJ_INT, .i = (x)})
#define JJ_OF_FLOAT(x) ((jj_value){.type = JJ_FLOAT, .f = (x)})
#define JJ_OF_STR(x)   ((jj_value){.type = JJ_STR, .s = (x)})
#define JJ_OF_LIST(x)  ((jj_value){.type = JJ_LIST, .list = (x)})
#define JJ_OF_TUPLE(x) ((jj_value){.type = JJ_TUPLE, .list = (x)})
#define JJ_OF_DICT(x)  ((jj_value){.type = JJ_DICT, .dict = (x)})

// ---- callables ----

typedef struct {
  const jj_str *name;
  jj_value value;
} jj_kwarg;

typedef struct {
  const jj_value *pos;
  size_t n_pos;
  const jj_kwarg *kw;
  size_t n_kw;
} jj_args;

// a: arguments in the order of the signature, JJ_MISSING if omitted. raw: as written.
typedef jj_value (*jj_native_fn)(jj *j, jj_value self, const jj_value *a, const jj_args *raw);

// A filter, test, method or global. sig lists its parameters: "a,b|c,d" requires a and b; "/a|b"
// accepts no keywords; NULL accepts anything and uses raw.
typedef struct {
  const char *name, *sig;
  jj_native_fn fn;
} jj_native;

#define JJ_MAX_PARAMS 8

struct jj_bound {
  const jj_native *native;
  jj_value self;
};

// Tables end with a NULL name. Lookups return NULL if the name is absent.
extern const jj_native jj_str_filters[], jj_seq_filters[], jj_num_filters[], jj_tests[];
extern const jj_native jj_str_methods[], jj_dict_methods[], jj_list_methods[], jj_tuple_methods[];
extern const jj_native jj_globals[];
const jj_native *jj_native_find(const jj_native *table, const jj_str *name);
const jj_native *jj_filter_find(const jj_str *name);
const jj_native *jj_test_find(const jj_str *name);

jj_value jj_native_call(jj *j, const jj_native *native, jj_value self, const jj_args *args);
// Calls any callable value, as Python would.
jj_value jj_call(jj *j, jj_value callee, const jj_args *args);

// ---- syntax tree ----

typedef enum {
  // expressions
  NODE_CONST,   // value
  NODE_NAME,    // name, ref
  NODE_NSREF,   // name, ref (the namespace), attr
  NODE_TUPLE,   // list
  NODE_LIST,    // list
  NODE_DICT,    // list: key, value, key, value...
  NODE_UNARY,   // op, a
  NODE_BINARY,  // op, a, b
  NODE_AND,     // a, b
  NODE_OR,      // a, b
  NODE_NOT,     // a
  NODE_COMPARE, // a, list of NODE_OPERAND
  NODE_OPERAND, // op, a
  NODE_CONCAT,  // list
  NODE_COND,    // a if b else c; c may be NULL
  NODE_GETATTR, // a, name
  NODE_GETITEM, // a, b
  NODE_SLICE,   // a:b:c, each may be NULL
  NODE_CALL,    // a, args
  NODE_FILTER,  // a (NULL: the captured body), name, args, native
  NODE_TEST,    // a, name, args, native
  NODE_KEYWORD, // name, a
  // statements
  NODE_DATA,         // value (string)
  NODE_OUTPUT,       // list
  NODE_IF,           // a, body, list of elif NODE_IF, orelse
  NODE_FOR,          // a target, b iterable, c filter or NULL, body, orelse
  NODE_SET,          // a target, b expression
  NODE_SET_BLOCK,    // a target, b filter chain or NULL, body
  NODE_MACRO,        // name, ref, list parameters, kwargs defaults, body
  NODE_CALL_BLOCK,   // a call (NULL: generation), list parameters, kwargs defaults, body
  NODE_FILTER_BLOCK, // a filter chain, body
  NODE_WITH,         // list targets, kwargs values, body
  NODE_BREAK,
  NODE_CONTINUE,
  NODE_NEEDS_LOADER, // include, import, extends: name is the tag
} jj_node_kind;

typedef enum {
  OP_ADD,
  OP_SUB,
  OP_MUL,
  OP_DIV,
  OP_FLOORDIV,
  OP_MOD,
  OP_POW, // binary; ADD and SUB also unary
  OP_EQ,
  OP_NE,
  OP_LT,
  OP_LE,
  OP_GT,
  OP_GE,
  OP_IN,
  OP_NOT_IN, // operands
} jj_op;

typedef struct {
  jj_node **items;
  size_t n, cap;
} jj_nodes;

// A variable: slot number `slot` of the environment `hops` levels up.
typedef struct {
  uint16_t hops, slot;
} jj_ref;

typedef enum { LOAD_PARAM, LOAD_UNSET, LOAD_CONTEXT, LOAD_OUTER } jj_load;

// A local variable of a scope and its value when the scope is entered.
typedef struct {
  const jj_str *name;
  jj_load load;
  jj_ref outer; // LOAD_OUTER: relative to the parent of the scope's environment
  bool stored;
} jj_slot;

typedef struct jj_scope jj_scope;
struct jj_scope {
  const jj_scope *up; // NULL: the template itself
  jj_slot *slots;
  size_t n, cap;
};

// Where a macro puts surplus arguments. A slot is -1 if the body does not use it.
typedef struct {
  int caller_slot, kwargs_slot, varargs_slot;
} jj_macro_info;

struct jj_node {
  jj_node_kind kind;
  uint8_t op;
  bool flag; // NAME: assigned to; TEST: negated
  uint32_t line;
  jj_ref ref;
  const jj_str *name, *attr;
  jj_value value;
  const jj_native *native;
  jj_node *a, *b, *c;
  jj_node *dyn_args, *dyn_kwargs; // f(*a, **b)
  jj_nodes list, kwargs, body, orelse;
  jj_scope *scope, *else_scope, *test_scope; // scopes the statement opens
  int loop_slot;                             // FOR: slot of `loop`; -1 if the body does not use it
  jj_macro_info macro;
};

typedef struct {
  jj_nodes body;
  jj_scope scope;
} jj_tree;

struct jj_env {
  jj_env *up;
  jj_value *slots;
};

// ---- state of one parse or render ----

typedef struct jj_chunk jj_chunk;

typedef struct {
  jj *j;
  jj_store *store;
  td_span *runs;
  size_t n_runs, cap_runs;
} jj_builder;

struct jj {
  jmp_buf on_error;
  td_err *err; // may be NULL
  td_status status;
  jj_chunk *chunks;
  size_t n_bytes, max_bytes;
  // Becoming large, it lowers max_bytes to a share of what memory has left (left_bytes; 0: that of
  // the machine).
  bool takes_share;
  uint64_t left_bytes, steps_left, max_steps;
  uint64_t cpu_end_ns;            // limit for td_clock_cpu_ns; 0: none
  const atomic_bool *is_canceled; // may be NULL
  uint32_t depth, max_depth;
  size_t max_output;
  uint32_t line; // line being parsed or run; 0: none
  int64_t now_us;
  // rendering
  const jj_dict *vars;
  jj_builder *out;
};

// Puts "line N: message" into err, then longjmps.
_Noreturn void jj_raise(jj *j, td_status code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

// Length of a name as shown in messages, for "%.*s".
static inline int jj_clip(const jj_str *s) {
  return s->len < 80 ? (int)s->len : 80;
}

// Zeroed memory from the run's arena.
void *jj_alloc(jj *j, size_t n_bytes);
void *jj_alloc_n(jj *j, size_t n, size_t each_bytes);
// Makes room for one more item after n; returns the array, which may have moved.
void *jj_grow(jj *j, void *items, size_t n, size_t *cap, size_t each_bytes);
void jj_free_all(jj *j);
// Counts steps; raises TD_ELIMIT when the budget is used up.
void jj_steps(jj *j, uint64_t n);
// Bracket everything that recurses; raise if nested too deeply.
void jj_enter(jj *j);
static inline void jj_leave(jj *j) {
  j->depth--;
}

// ---- strings (strings.c) ----

void jj_build(jj_builder *b, jj *j);
void jj_add(jj_builder *b, const char *bytes, size_t len); // adds template text
void jj_add_text(jj_builder *b, const char *text);
void jj_add_char(jj_builder *b, uint32_t code_point, bool typed);
void jj_add_typed(jj_builder *b, const char *bytes, size_t len, bool typed);
void jj_add_str(jj_builder *b, const jj_str *s); // including its typed runs
void jj_add_range(jj_builder *b, const jj_str *s, size_t begin, size_t end);
void jj_add_repeat(jj_builder *b, const jj_str *s, size_t n);
const jj_str *jj_built(jj_builder *b);
void jj_addf(jj_builder *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

const jj_str *jj_str_new(jj *j, const char *bytes, size_t len); // copies
const jj_str *jj_str_borrow(jj *j, const char *bytes, size_t len, bool typed);
const jj_str *jj_lit(jj *j, const char *literal);                       // borrows
jj_value jj_text(jj *j, const char *literal);                           // jj_lit as a value
const jj_str *jj_sub(jj *j, const jj_str *s, size_t begin, size_t end); // bytes
const jj_str *jj_concat(jj *j, const jj_str *a, const jj_str *b);
const jj_str *jj_marked(jj *j, const jj_str *s, bool markup);
const jj_str *jj_escape_html(jj *j, const jj_str *s);
bool jj_typed_at(const jj_str *s, size_t byte);
bool jj_str_eq(const jj_str *a, const jj_str *b);
bool jj_str_is(const jj_str *s, const char *text);
int jj_str_cmp(const jj_str *a, const jj_str *b);
size_t jj_char_to_byte(jj *j, const jj_str *s, size_t char_idx); // char_idx <= n_chars
size_t jj_byte_to_char(const jj_str *s, size_t byte);
uint32_t jj_decode(const jj_str *s, size_t byte, size_t *next);
// First or last occurrence within bytes [begin, end); SIZE_MAX if there is none.
size_t jj_find(jj *j, const jj_str *s, const jj_str *sub, size_t begin, size_t end);
size_t jj_rfind(jj *j, const jj_str *s, const jj_str *sub, size_t begin, size_t end);

typedef enum { JJ_LOWER, JJ_UPPER, JJ_TITLE, JJ_CAPITALIZE } jj_case;
const jj_str *jj_recase(jj *j, const jj_str *s, jj_case how);
// chars NULL: strips white space.
const jj_str *jj_strip(jj *j, const jj_str *s, const jj_str *chars, bool left, bool right);
const jj_str *jj_replace(jj *j, const jj_str *s, const jj_str *from, const jj_str *to, int64_t max);
jj_list *jj_splitlines(jj *j, const jj_str *s, bool keep_ends);
jj_list *jj_split(jj *j, const jj_str *s, const jj_str *sep, int64_t max, bool from_right);
const jj_str *jj_pad(jj *j, const jj_str *s, int64_t width, const jj_str *fill, char align);

// ---- values (value.c, dict.c) ----

const char *jj_type_name(jj_value v);
bool jj_truth(jj_value v);
bool jj_is_number(jj_value v);            // bool, int, big or float
bool jj_as_int(jj_value v, int64_t *out); // bool or int
double jj_as_double(jj *j, jj_value v);   // of a number
bool jj_equal(jj *j, jj_value a, jj_value b);
bool jj_same(jj_value a, jj_value b); // Python's `is`
// op is OP_LT .. OP_GE.
bool jj_order(jj *j, jj_op op, jj_value a, jj_value b);
bool jj_contains(jj *j, jj_value container, jj_value item);
bool jj_has_len(jj_value v);
int64_t jj_len(jj *j, jj_value v);
jj_value jj_undefined(jj *j, const char *hint);
jj_value jj_undefined_name(jj *j, const jj_str *name);
jj_value jj_undefined_attr(jj *j, jj_value obj, jj_value name);
_Noreturn void jj_raise_undefined(jj *j, jj_value undef);
jj_value jj_big(jj *j, const char *digits, size_t len);

jj_list *jj_list_new(jj *j, size_t cap);
void jj_push(jj *j, jj_list *list, jj_value v);
jj_value jj_pair(jj *j, jj_value a, jj_value b); // a tuple

jj_dict *jj_dict_new(jj *j);
bool jj_hashable(jj *j, jj_value v);
void jj_dict_set(jj *j, jj_dict *dict, jj_value key, jj_value value);
const jj_value *jj_dict_get(jj *j, const jj_dict *dict, jj_value key);
const jj_value *jj_dict_get_str(jj *j, const jj_dict *dict, const jj_str *key);

int64_t jj_range_at(const jj_range *range, size_t idx);

// Iteration. Raises for types that Python cannot iterate.
bool jj_iterable(jj_value v);
jj_iter *jj_iterate(jj *j, jj_value v);
bool jj_next(jj *j, jj_iter *it, jj_value *out);
jj_list *jj_to_list(jj *j, jj_value v);
jj_value jj_generator(jj *j, jj_list *items);
// Sorts stably by keys[i]; permutes both arrays.
void jj_sort(jj *j, jj_value *items, jj_value *keys, size_t n, bool reverse);

// ---- text of values (print.c) ----

void jj_add_value(jj_builder *b, jj_value v); // str(v)
void jj_add_repr(jj_builder *b, jj_value v);
const jj_str *jj_to_str(jj *j, jj_value v); // soft_str: strings are unchanged
#define JJ_FLOAT_CHARS 40
size_t jj_float_repr(double f, char out[JJ_FLOAT_CHARS]);

typedef struct {
  bool ascii, sort_keys;
  const jj_str *indent; // NULL: one line
  const jj_str *item_sep, *key_sep;
} jj_json_opts;
const jj_str *jj_to_json(jj *j, jj_value v, const jj_json_opts *opts);

// ---- operators (operators.c) ----

jj_value jj_binary(jj *j, jj_op op, jj_value a, jj_value b);
jj_value jj_negate(jj *j, jj_value v, jj_op op);
jj_value jj_getattr(jj *j, jj_value obj, const jj_str *name);
jj_value jj_getattr_only(jj *j, jj_value obj, const jj_str *name); // JJ_MISSING if absent
jj_value jj_getitem(jj *j, jj_value obj, jj_value key);
jj_value jj_slice(jj *j, jj_value obj, jj_value start, jj_value stop, jj_value step);
// Resolves an attribute path such as "a.b.0", as filters accept it; path is a string, an int or
// none.
jj_value jj_get_path(jj *j, jj_value obj, jj_value path, jj_value fallback);
jj_value jj_loop_attr(jj *j, jj_loop *loop, const jj_str *name);

// ---- formatting and numbers (format.c, number.c) ----

const jj_str *jj_percent(jj *j, const jj_str *fmt, jj_value args);
const jj_str *jj_format(jj *j, const jj_str *fmt, const jj_args *args);
// Python's int(text, base) and float(text); false if the text is not a number.
bool jj_parse_int(jj *j, const jj_str *s, int base, jj_value *out);
bool jj_parse_float(const jj_str *s, double *out);
// int(float). Raises for infinities, false for NaN.
bool jj_float_to_int(jj *j, double f, jj_value *out);

// ---- front end ----

typedef enum {
  TOK_EOF,
  TOK_DATA,
  TOK_VARIABLE_BEGIN,
  TOK_VARIABLE_END,
  TOK_BLOCK_BEGIN,
  TOK_BLOCK_END,
  TOK_NAME,
  TOK_STRING,
  TOK_INTEGER,
  TOK_FLOAT,
  TOK_OPERATOR,
} jj_token_kind;

typedef struct {
  jj_token_kind kind;
  uint32_t line;
  const jj_str *text; // data, name, decoded string, or operator
  jj_value value;     // numbers
} jj_token;

typedef struct {
  jj_token *items; // ends with TOK_EOF
  size_t n, cap;
} jj_tokens;

jj_tokens jj_lex(jj *j, const char *source, size_t len);
jj_nodes jj_parse(jj *j, jj_tokens tokens);
// Assigns a slot to every name. Reports unknown filters, unknown tests and invalid assignments.
void jj_resolve(jj *j, jj_tree *tree);

// Runs the tree, appending to j->out.
void jj_run(jj *j, const jj_tree *tree);
jj_value jj_eval(jj *j, jj_env *env, const jj_node *node);
// Evaluates the arguments of a call, filter or test. caller is the argument added by {% call %}, or
// NULL.
jj_args jj_eval_args(jj *j, jj_env *env, const jj_node *node, const jj_value *caller);
// Applies a chain of NODE_FILTER to input, which takes the place of the innermost node's missing a.
jj_value jj_eval_filters(jj *j, jj_env *env, const jj_node *filter, jj_value input);
// Calls a macro with bound arguments (exec.c).
jj_value jj_macro_call(jj *j, const jj_macro *macro, const jj_args *args);
void jj_assign(jj *j, jj_env *env, const jj_node *target, jj_value v);
jj_env *jj_env_new(jj *j, const jj_scope *scope, jj_env *up);
void jj_env_enter(jj *j, const jj_scope *scope, jj_env *env);
jj_value *jj_slot_of(jj_env *env, jj_ref ref);

// a op b for two numbers; raises on overflow and on division by zero (number.c).
jj_value jj_arith(jj *j, jj_op op, jj_value a, jj_value b);
