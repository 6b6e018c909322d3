// src/text/jinja/expr.c - parses expressions by recursive descent, with jinja2's precedences: all
// binary operators are left-associative, including `**`; `~` binds between `+` and `*`; unary minus
// binds tighter than `**`.

#include "text/jinja/parse.h"

static jj_node *parse_conditional(jj_parser *p, bool with_condition);
static jj_node *parse_unary(jj_parser *p, bool with_filters);

jj_node *jj_parse_expr(jj_parser *p) {
  return parse_conditional(p, true);
}

static jj_node *two(jj_parser *p, jj_node_kind kind, jj_op op, jj_node *a, jj_node *b) {
  jj_node *node = jj_node_new(p, kind, a->line);
  node->op = op;
  node->a = a;
  node->b = b;
  return node;
}

// ---- primaries ----

static jj_node *constant(jj_parser *p, uint32_t line, jj_value v) {
  jj_node *node = jj_node_new(p, NODE_CONST, line);
  node->value = v;
  return node;
}

static jj_node *parse_name(jj_parser *p, bool namespaces) {
  const jj_token *t = jj_advance(p);
  if (jj_str_is(t->text, "true") || jj_str_is(t->text, "True"))
    return constant(p, t->line, JJ_OF_BOOL(true));
  if (jj_str_is(t->text, "false") || jj_str_is(t->text, "False"))
    return constant(p, t->line, JJ_OF_BOOL(false));
  if (jj_str_is(t->text, "none") || jj_str_is(t->text, "None"))
    return constant(p, t->line, JJ_NONE_VALUE);
  bool dotted = namespaces && jj_skip_op(p, ".");
  jj_node *node = jj_node_new(p, dotted ? NODE_NSREF : NODE_NAME, t->line);
  node->name = t->text;
  if (dotted) node->attr = jj_expect_name(p);
  return node;
}

// Adjacent string literals are concatenated.
static jj_node *parse_string(jj_parser *p) {
  const jj_token *first = jj_advance(p);
  const jj_str *text = first->text;
  if (p->t->kind == TOK_STRING) {
    jj_builder b;
    jj_build(&b, p->j);
    jj_add_str(&b, text);
    while (p->t->kind == TOK_STRING)
      jj_add_str(&b, jj_advance(p)->text);
    const jj_str *all = jj_built(&b);
    text = jj_str_borrow(p->j, all->p, all->len, false);
  }
  return constant(p, first->line, JJ_OF_STR(text));
}

static jj_node *parse_list(jj_parser *p) {
  jj_node *node = jj_node_new(p, NODE_LIST, jj_advance(p)->line);
  while (!jj_at_op(p, "]")) {
    if (node->list.n) jj_expect_op(p, ",");
    if (jj_at_op(p, "]")) break;
    jj_nodes_push(p, &node->list, jj_parse_expr(p));
  }
  jj_expect_op(p, "]");
  return node;
}

static jj_node *parse_dict(jj_parser *p) {
  jj_node *node = jj_node_new(p, NODE_DICT, jj_advance(p)->line);
  while (!jj_at_op(p, "}")) {
    if (node->list.n) jj_expect_op(p, ",");
    if (jj_at_op(p, "}")) break;
    jj_nodes_push(p, &node->list, jj_parse_expr(p));
    jj_expect_op(p, ":");
    jj_nodes_push(p, &node->list, jj_parse_expr(p));
  }
  jj_expect_op(p, "}");
  return node;
}

static jj_node *parse_primary(jj_parser *p, bool namespaces) {
  switch (p->t->kind) {
  case TOK_NAME: return parse_name(p, namespaces);
  case TOK_STRING: return parse_string(p);
  case TOK_INTEGER:
  case TOK_FLOAT: {
    const jj_token *t = jj_advance(p);
    return constant(p, t->line, t->value);
  }
  default: break;
  }
  if (jj_at_op(p, "[")) return parse_list(p);
  if (jj_at_op(p, "{")) return parse_dict(p);
  if (jj_skip_op(p, "(")) {
    jj_node *node = jj_parse_tuple(p, &(jj_tuple_opts){.parenthesized = true});
    jj_expect_op(p, ")");
    return node;
  }
  jj_unexpected(p, NULL);
}

static bool at_tuple_end(const jj_parser *p, const jj_tuple_opts *opts) {
  return p->t->kind == TOK_VARIABLE_END || p->t->kind == TOK_BLOCK_END || jj_at_op(p, ")") ||
         (opts->end_word && jj_at_word(p, opts->end_word));
}

jj_node *jj_parse_tuple(jj_parser *p, const jj_tuple_opts *opts) {
  jj_node *tuple = jj_node_new(p, NODE_TUPLE, p->t->line);
  bool is_tuple = false;
  for (;;) {
    if (tuple->list.n) jj_expect_op(p, ",");
    if (at_tuple_end(p, opts)) break;
    jj_nodes_push(p, &tuple->list,
                  opts->targets_only ? parse_primary(p, opts->namespaces)
                                     : parse_conditional(p, !opts->no_conditional));
    if (!jj_at_op(p, ",")) break;
    is_tuple = true;
  }
  if (is_tuple) return tuple;
  if (tuple->list.n) return tuple->list.items[0];
  if (!opts->parenthesized) jj_unexpected(p, "an expression");
  return tuple;
}

// ---- subscripts and calls ----

static bool at_slice_end(const jj_parser *p) {
  return jj_at_op(p, "]") || jj_at_op(p, ",");
}

static jj_node *parse_subscribed(jj_parser *p) {
  uint32_t line = p->t->line;
  jj_node *start = jj_at_op(p, ":") ? NULL : jj_parse_expr(p);
  if (!jj_skip_op(p, ":")) return start;
  jj_node *slice = jj_node_new(p, NODE_SLICE, line);
  slice->a = start;
  if (!jj_at_op(p, ":") && !at_slice_end(p)) slice->b = jj_parse_expr(p);
  if (jj_skip_op(p, ":") && !at_slice_end(p)) slice->c = jj_parse_expr(p);
  return slice;
}

static jj_node *parse_item(jj_parser *p, jj_node *object) {
  uint32_t line = jj_advance(p)->line;
  jj_node *keys = jj_node_new(p, NODE_TUPLE, line);
  while (!jj_at_op(p, "]")) {
    if (keys->list.n) jj_expect_op(p, ",");
    jj_nodes_push(p, &keys->list, parse_subscribed(p));
  }
  jj_expect_op(p, "]");
  jj_node *key = keys->list.n == 1 ? keys->list.items[0] : keys;
  for (size_t i = 0; keys->list.n > 1 && i < keys->list.n; i++)
    if (keys->list.items[i]->kind == NODE_SLICE)
      jj_raise(p->j, TD_EFORMAT, "a slice cannot stand among several subscripts");
  jj_node *node = two(p, NODE_GETITEM, 0, object, key);
  node->line = line;
  return node;
}

static jj_node *parse_attribute(jj_parser *p, jj_node *object) {
  uint32_t line = jj_advance(p)->line;
  const jj_token *t = p->t;
  if (t->kind != TOK_NAME && t->kind != TOK_INTEGER)
    jj_raise(p->j, TD_EFORMAT, "expected name or number");
  jj_advance(p);
  if (t->kind == TOK_INTEGER)
    return two(p, NODE_GETITEM, 0, object, constant(p, t->line, t->value));
  jj_node *node = jj_node_new(p, NODE_GETATTR, line);
  node->a = object;
  node->name = t->text;
  return node;
}

static void parse_keyword(jj_parser *p, jj_node *call) {
  jj_node *keyword = jj_node_new(p, NODE_KEYWORD, p->t->line);
  keyword->name = jj_advance(p)->text;
  jj_advance(p);
  keyword->a = jj_parse_expr(p);
  for (size_t i = 0; i < call->kwargs.n; i++)
    if (jj_str_eq(call->kwargs.items[i]->name, keyword->name))
      jj_raise(p->j, TD_EFORMAT, "keyword argument repeated");
  jj_nodes_push(p, &call->kwargs, keyword);
}

static void check_argument(jj_parser *p, bool legal) {
  if (!legal) jj_raise(p->j, TD_EFORMAT, "invalid syntax for function call expression");
}

// Parses "(a, b=c, *d, **e)" into call.
static void parse_arguments(jj_parser *p, jj_node *call) {
  jj_expect_op(p, "(");
  for (bool more = false; !jj_at_op(p, ")"); more = true) {
    if (more) {
      jj_expect_op(p, ",");
      if (jj_at_op(p, ")")) break;
    }
    bool is_keyword = p->t->kind == TOK_NAME && p->t[1].kind == TOK_OPERATOR &&
                      jj_str_is(p->t[1].text, "=");
    if (jj_skip_op(p, "*")) {
      check_argument(p, !call->dyn_args && !call->dyn_kwargs);
      call->dyn_args = jj_parse_expr(p);
    } else if (jj_skip_op(p, "**")) {
      check_argument(p, !call->dyn_kwargs);
      call->dyn_kwargs = jj_parse_expr(p);
    } else if (is_keyword) {
      check_argument(p, !call->dyn_kwargs);
      parse_keyword(p, call);
    } else {
      check_argument(p, !call->dyn_args && !call->dyn_kwargs && !call->kwargs.n);
      jj_nodes_push(p, &call->list, jj_parse_expr(p));
    }
  }
  jj_expect_op(p, ")");
}

static jj_node *parse_call(jj_parser *p, jj_node *callee) {
  jj_node *node = jj_node_new(p, NODE_CALL, p->t->line);
  node->a = callee;
  parse_arguments(p, node);
  return node;
}

static jj_node *parse_postfix(jj_parser *p, jj_node *node) {
  for (;;)
    if (jj_at_op(p, "."))
      node = parse_attribute(p, node);
    else if (jj_at_op(p, "["))
      node = parse_item(p, node);
    else if (jj_at_op(p, "("))
      node = parse_call(p, node);
    else
      return node;
}

// ---- filters and tests ----

// Names may contain dots, although none of the filters and tests here does.
static const jj_str *parse_dotted(jj_parser *p) {
  const jj_str *name = jj_expect_name(p);
  while (jj_skip_op(p, ".")) {
    name = jj_concat(p->j, jj_concat(p->j, name, jj_lit(p->j, ".")), jj_expect_name(p));
    name = jj_str_borrow(p->j, name->p, name->len, false);
  }
  return name;
}

jj_node *jj_parse_filters(jj_parser *p, jj_node *node, bool bare) {
  while (bare || jj_at_op(p, "|")) {
    if (!bare) jj_advance(p);
    bare = false;
    jj_node *filter = jj_node_new(p, NODE_FILTER, p->t->line);
    filter->name = parse_dotted(p);
    filter->native = jj_filter_find(filter->name);
    filter->a = node;
    if (jj_at_op(p, "(")) parse_arguments(p, filter);
    node = filter;
  }
  return node;
}

// Whether a test's only argument follows without parentheses: "x is divisibleby 3".
static bool at_bare_argument(const jj_parser *p) {
  switch (p->t->kind) {
  case TOK_NAME: return !jj_at_word(p, "else") && !jj_at_word(p, "or") && !jj_at_word(p, "and");
  case TOK_STRING:
  case TOK_INTEGER:
  case TOK_FLOAT: return true;
  default: return jj_at_op(p, "[") || jj_at_op(p, "{");
  }
}

static jj_node *parse_test(jj_parser *p, jj_node *subject) {
  jj_node *test = jj_node_new(p, NODE_TEST, jj_advance(p)->line);
  bool negated = jj_skip_word(p, "not");
  test->name = parse_dotted(p);
  test->native = jj_test_find(test->name);
  test->a = subject;
  if (jj_at_op(p, "(")) {
    parse_arguments(p, test);
  } else if (at_bare_argument(p)) {
    if (jj_at_word(p, "is")) jj_raise(p->j, TD_EFORMAT, "You cannot chain multiple tests with is");
    jj_nodes_push(p, &test->list, parse_postfix(p, parse_primary(p, false)));
  }
  if (!negated) return test;
  jj_node *node = jj_node_new(p, NODE_NOT, test->line);
  node->a = test;
  return node;
}

static jj_node *parse_filters_and_tests(jj_parser *p, jj_node *node) {
  for (;;)
    if (jj_at_op(p, "|"))
      node = jj_parse_filters(p, node, false);
    else if (jj_at_word(p, "is"))
      node = parse_test(p, node);
    else if (jj_at_op(p, "("))
      node = parse_call(p, node);
    else
      return node;
}

// ---- operators, tightest first ----

static jj_node *parse_unary(jj_parser *p, bool with_filters) {
  jj_parser_enter(p);
  jj_node *node;
  bool minus = jj_at_op(p, "-");
  if (minus || jj_at_op(p, "+")) {
    node = jj_node_new(p, NODE_UNARY, jj_advance(p)->line);
    node->op = minus ? OP_SUB : OP_ADD;
    node->a = parse_unary(p, false);
  } else {
    node = parse_primary(p, false);
  }
  node = parse_postfix(p, node);
  if (with_filters) node = parse_filters_and_tests(p, node);
  p->depth--;
  return node;
}

static jj_node *parse_power(jj_parser *p) {
  jj_node *left = parse_unary(p, true);
  while (jj_skip_op(p, "**"))
    left = two(p, NODE_BINARY, OP_POW, left, parse_unary(p, true));
  return left;
}

// Consumes one of the operators in `ops` and sets its code.
static bool skip_one_of(jj_parser *p, const char *const *ops, const jj_op *codes, size_t n,
                        jj_op *out) {
  for (size_t i = 0; i < n; i++) {
    if (!jj_skip_op(p, ops[i])) continue;
    *out = codes[i];
    return true;
  }
  return false;
}

static jj_node *parse_product(jj_parser *p) {
  static const char *const ops[] = {"*", "/", "//", "%"};
  static const jj_op codes[] = {OP_MUL, OP_DIV, OP_FLOORDIV, OP_MOD};
  jj_node *left = parse_power(p);
  jj_op op;
  while (skip_one_of(p, ops, codes, 4, &op))
    left = two(p, NODE_BINARY, op, left, parse_power(p));
  return left;
}

static jj_node *parse_concat(jj_parser *p) {
  jj_node *first = parse_product(p);
  if (!jj_at_op(p, "~")) return first;
  jj_node *node = jj_node_new(p, NODE_CONCAT, first->line);
  jj_nodes_push(p, &node->list, first);
  while (jj_skip_op(p, "~"))
    jj_nodes_push(p, &node->list, parse_product(p));
  return node;
}

static jj_node *parse_sum(jj_parser *p) {
  static const char *const ops[] = {"+", "-"};
  static const jj_op codes[] = {OP_ADD, OP_SUB};
  jj_node *left = parse_concat(p);
  jj_op op;
  while (skip_one_of(p, ops, codes, 2, &op))
    left = two(p, NODE_BINARY, op, left, parse_concat(p));
  return left;
}

static bool skip_comparison(jj_parser *p, jj_op *op) {
  static const char *const ops[] = {"==", "!=", "<", "<=", ">", ">="};
  static const jj_op codes[] = {OP_EQ, OP_NE, OP_LT, OP_LE, OP_GT, OP_GE};
  if (skip_one_of(p, ops, codes, 6, op)) return true;
  if (jj_skip_word(p, "in")) {
    *op = OP_IN;
    return true;
  }
  bool not_in = jj_at_word(p, "not") && p->t[1].kind == TOK_NAME && jj_str_is(p->t[1].text, "in");
  if (!not_in) return false;
  jj_advance(p);
  jj_advance(p);
  *op = OP_NOT_IN;
  return true;
}

static jj_node *parse_comparison(jj_parser *p) {
  jj_node *first = parse_sum(p), *node = NULL;
  jj_op op;
  while (skip_comparison(p, &op)) {
    if (!node) {
      node = jj_node_new(p, NODE_COMPARE, first->line);
      node->a = first;
    }
    jj_node *operand = jj_node_new(p, NODE_OPERAND, p->t->line);
    operand->op = op;
    operand->a = parse_sum(p);
    jj_nodes_push(p, &node->list, operand);
  }
  return node ? node : first;
}

static jj_node *parse_not(jj_parser *p) {
  if (!jj_at_word(p, "not")) return parse_comparison(p);
  jj_parser_enter(p);
  jj_node *node = jj_node_new(p, NODE_NOT, jj_advance(p)->line);
  node->a = parse_not(p);
  p->depth--;
  return node;
}

static jj_node *parse_and(jj_parser *p) {
  jj_node *left = parse_not(p);
  while (jj_skip_word(p, "and"))
    left = two(p, NODE_AND, 0, left, parse_not(p));
  return left;
}

static jj_node *parse_or(jj_parser *p) {
  jj_node *left = parse_and(p);
  while (jj_skip_word(p, "or"))
    left = two(p, NODE_OR, 0, left, parse_and(p));
  return left;
}

static jj_node *parse_conditional(jj_parser *p, bool with_condition) {
  jj_parser_enter(p);
  jj_node *node = parse_or(p);
  while (with_condition && jj_skip_word(p, "if")) {
    jj_node *choice = jj_node_new(p, NODE_COND, node->line);
    choice->a = node;
    choice->b = parse_or(p);
    if (jj_skip_word(p, "else")) choice->c = parse_conditional(p, true);
    node = choice;
  }
  p->depth--;
  return node;
}
