// src/text/jinja/parse.c - parses statements; also the token handling shared with expr.c.
#include "text/jinja/parse.h"

#include <stdio.h>
#include <string.h>

#define MAX_NESTING 200

// ---- tokens ----

bool jj_at_op(const jj_parser *p, const char *op) {
  return p->t->kind == TOK_OPERATOR && jj_str_is(p->t->text, op);
}

bool jj_at_word(const jj_parser *p, const char *word) {
  return p->t->kind == TOK_NAME && jj_str_is(p->t->text, word);
}

const jj_token *jj_advance(jj_parser *p) {
  const jj_token *left = p->t;
  if (left->kind != TOK_EOF) p->t++;
  p->j->line = p->t->line;
  return left;
}

bool jj_skip_op(jj_parser *p, const char *op) {
  bool here = jj_at_op(p, op);
  if (here) jj_advance(p);
  return here;
}

bool jj_skip_word(jj_parser *p, const char *word) {
  bool here = jj_at_word(p, word);
  if (here) jj_advance(p);
  return here;
}

static const char *const kind_names[] = {
    [TOK_EOF] = "end of template",
    [TOK_DATA] = "template data / text",
    [TOK_VARIABLE_BEGIN] = "begin of print statement",
    [TOK_VARIABLE_END] = "end of print statement",
    [TOK_BLOCK_BEGIN] = "begin of statement block",
    [TOK_BLOCK_END] = "end of statement block",
    [TOK_NAME] = "name",
    [TOK_STRING] = "string",
    [TOK_INTEGER] = "integer",
    [TOK_FLOAT] = "float",
    [TOK_OPERATOR] = "operator",
};

void jj_unexpected(jj_parser *p, const char *expected) {
  char got[64];
  bool literal = p->t->kind == TOK_NAME || p->t->kind == TOK_OPERATOR;
  if (literal)
    snprintf(got, sizeof got, "%.*s", jj_clip(p->t->text), p->t->text->p);
  else
    snprintf(got, sizeof got, "%s", kind_names[p->t->kind]);
  if (p->t->kind == TOK_EOF && expected)
    jj_raise(p->j, TD_EFORMAT, "unexpected end of template, expected '%s'.", expected);
  if (expected) jj_raise(p->j, TD_EFORMAT, "expected token '%s', got '%s'", expected, got);
  jj_raise(p->j, TD_EFORMAT, "unexpected '%s'", got);
}

void jj_expect_op(jj_parser *p, const char *op) {
  if (!jj_skip_op(p, op)) jj_unexpected(p, op);
}

void jj_expect_word(jj_parser *p, const char *word) {
  if (!jj_skip_word(p, word)) jj_unexpected(p, word);
}

void jj_expect(jj_parser *p, jj_token_kind kind) {
  if (p->t->kind != kind) jj_unexpected(p, kind_names[kind]);
  jj_advance(p);
}

const jj_str *jj_expect_name(jj_parser *p) {
  if (p->t->kind != TOK_NAME) jj_unexpected(p, "name");
  return jj_advance(p)->text;
}

void jj_parser_enter(jj_parser *p) {
  if (++p->depth > MAX_NESTING)
    jj_raise(p->j, TD_ELIMIT, "nested more than %d levels deep", MAX_NESTING);
}

jj_node *jj_node_new(jj_parser *p, jj_node_kind kind, uint32_t line) {
  jj_node *node = jj_alloc(p->j, sizeof *node);
  node->kind = kind;
  node->line = line;
  node->loop_slot = -1;
  return node;
}

void jj_nodes_push(jj_parser *p, jj_nodes *nodes, jj_node *node) {
  nodes->items = jj_grow(p->j, nodes->items, nodes->n, &nodes->cap, sizeof(jj_node *));
  nodes->items[nodes->n++] = node;
}

// ---- bodies ----

static jj_node *parse_statement(jj_parser *p);

static bool at_any(const jj_parser *p, const char *const *words) {
  for (; words && *words; words++)
    if (jj_at_word(p, *words)) return true;
  return false;
}

static void flush_output(jj_parser *p, jj_nodes *body, jj_node **output) {
  if (*output) jj_nodes_push(p, body, *output);
  *output = NULL;
}

static void add_output(jj_parser *p, jj_node **output, jj_node *item) {
  if (!*output) *output = jj_node_new(p, NODE_OUTPUT, item->line);
  jj_nodes_push(p, &(*output)->list, item);
}

static _Noreturn void missing_end(jj_parser *p, const char *const *ends) {
  char text[128] = "";
  for (size_t n = 0; *ends; ends++)
    n += (size_t)snprintf(text + n, sizeof text - n, "%s'%s'", n ? " or " : "", *ends);
  jj_raise(p->j, TD_EFORMAT,
           "Unexpected end of template. Jinja was looking for the following tags: %s.", text);
}

// Parses up to a tag that starts with one of `ends` (NULL: up to the end of the template) and
// leaves it as the current token.
static jj_nodes parse_body(jj_parser *p, const char *const *ends) {
  jj_nodes body = {0};
  jj_node *output = NULL;
  jj_parser_enter(p);
  for (;;) {
    if (p->t->kind == TOK_EOF) {
      if (ends) missing_end(p, ends);
      break;
    }
    if (p->t->kind == TOK_DATA) {
      jj_node *data = jj_node_new(p, NODE_DATA, p->t->line);
      data->value = JJ_OF_STR(jj_advance(p)->text);
      add_output(p, &output, data);
    } else if (p->t->kind == TOK_VARIABLE_BEGIN) {
      jj_advance(p);
      add_output(p, &output, jj_parse_tuple(p, &(jj_tuple_opts){0}));
      jj_expect(p, TOK_VARIABLE_END);
    } else {
      flush_output(p, &body, &output);
      jj_expect(p, TOK_BLOCK_BEGIN);
      if (at_any(p, ends)) break;
      jj_nodes_push(p, &body, parse_statement(p));
      jj_expect(p, TOK_BLOCK_END);
    }
  }
  flush_output(p, &body, &output);
  p->depth--;
  return body;
}

// Parses the rest of an opening tag and its body; the end word is the current token afterwards.
static jj_nodes parse_block_body(jj_parser *p, const char *const *ends) {
  jj_skip_op(p, ":");
  jj_expect(p, TOK_BLOCK_END);
  return parse_body(p, ends);
}

static jj_nodes parse_whole_body(jj_parser *p, const char *end) {
  jj_nodes body = parse_block_body(p, (const char *const[]){end, NULL});
  jj_advance(p);
  return body;
}

// Parses a body that is a function of its own in Python: break and continue cannot leave it.
static jj_nodes parse_function_body(jj_parser *p, const char *end) {
  int n_loops = p->n_loops;
  p->n_loops = 0;
  jj_nodes body = parse_whole_body(p, end);
  p->n_loops = n_loops;
  return body;
}

// ---- assignment targets ----

static void check_target(jj_parser *p, jj_node *target) {
  if (target->kind == NODE_TUPLE) {
    for (size_t i = 0; i < target->list.n; i++)
      check_target(p, target->list.items[i]);
  } else if (target->kind == NODE_NAME) {
    target->flag = true;
  } else if (target->kind != NODE_NSREF) {
    p->j->line = target->line;
    jj_raise(p->j, TD_EFORMAT, "can't assign to %s",
             target->kind == NODE_CONST ? "a constant" : "an expression");
  }
}

static jj_node *parse_target(jj_parser *p, const char *end_word, bool namespaces) {
  jj_node *target = jj_parse_tuple(
      p, &(jj_tuple_opts){.end_word = end_word, .targets_only = true, .namespaces = namespaces});
  check_target(p, target);
  return target;
}

static jj_node *parse_target_name(jj_parser *p) {
  jj_node *node = jj_node_new(p, NODE_NAME, p->t->line);
  node->name = jj_expect_name(p);
  node->flag = true;
  static const char *const reserved[] = {"true", "false", "none", "True", "False", "None"};
  for (size_t i = 0; i < TD_COUNT(reserved); i++)
    if (jj_str_is(node->name, reserved[i])) jj_raise(p->j, TD_EFORMAT, "can't assign to 'name'");
  return node;
}

// ---- statements ----

static jj_node *parse_for(jj_parser *p, uint32_t line) {
  jj_node *node = jj_node_new(p, NODE_FOR, line);
  node->a = parse_target(p, "in", false);
  jj_expect_word(p, "in");
  node->b = jj_parse_tuple(p, &(jj_tuple_opts){.no_conditional = true});
  if (jj_skip_word(p, "if")) node->c = jj_parse_expr(p);
  p->n_loops++;
  node->body = parse_block_body(p, (const char *const[]){"endfor", "else", NULL});
  p->n_loops--;
  if (jj_skip_word(p, "else"))
    node->orelse = parse_whole_body(p, "endfor");
  else
    jj_advance(p);
  return node;
}

static jj_node *parse_if(jj_parser *p, uint32_t line) {
  static const char *const ends[] = {"elif", "else", "endif", NULL};
  jj_node *first = jj_node_new(p, NODE_IF, line), *node = first;
  for (;;) {
    node->a = jj_parse_tuple(p, &(jj_tuple_opts){.no_conditional = true});
    node->body = parse_block_body(p, ends);
    if (!jj_at_word(p, "elif")) break;
    node = jj_node_new(p, NODE_IF, jj_advance(p)->line);
    jj_nodes_push(p, &first->list, node);
  }
  if (jj_skip_word(p, "else"))
    first->orelse = parse_whole_body(p, "endif");
  else
    jj_advance(p);
  return first;
}

static jj_node *parse_set(jj_parser *p, uint32_t line) {
  jj_node *target = parse_target(p, NULL, true);
  bool block = !jj_skip_op(p, "=");
  jj_node *node = jj_node_new(p, block ? NODE_SET_BLOCK : NODE_SET, line);
  node->a = target;
  if (block) {
    node->b = jj_parse_filters(p, NULL, false);
    node->body = parse_whole_body(p, "endset");
  } else {
    node->b = jj_parse_tuple(p, &(jj_tuple_opts){0});
  }
  return node;
}

static void parse_parameters(jj_parser *p, jj_node *node) {
  jj_expect_op(p, "(");
  while (!jj_at_op(p, ")")) {
    if (node->list.n) jj_expect_op(p, ",");
    jj_node *param = parse_target_name(p);
    for (size_t i = 0; i < node->list.n; i++)
      if (jj_str_eq(node->list.items[i]->name, param->name))
        jj_raise(p->j, TD_EFORMAT, "duplicate argument in a macro definition");
    if (jj_skip_op(p, "="))
      jj_nodes_push(p, &node->kwargs, jj_parse_expr(p));
    else if (node->kwargs.n)
      jj_raise(p->j, TD_EFORMAT, "non-default argument follows default argument");
    jj_nodes_push(p, &node->list, param);
  }
  jj_expect_op(p, ")");
}

static jj_node *parse_macro(jj_parser *p, uint32_t line) {
  jj_node *node = jj_node_new(p, NODE_MACRO, line);
  node->a = parse_target_name(p);
  node->name = node->a->name;
  parse_parameters(p, node);
  node->body = parse_function_body(p, "endmacro");
  return node;
}

static jj_node *parse_call_block(jj_parser *p, uint32_t line) {
  jj_node *node = jj_node_new(p, NODE_CALL_BLOCK, line);
  if (jj_at_op(p, "(")) parse_parameters(p, node);
  node->a = jj_parse_expr(p);
  if (node->a->kind != NODE_CALL) jj_raise(p->j, TD_EFORMAT, "expected call");
  node->body = parse_function_body(p, "endcall");
  return node;
}

// transformers' {% generation %} marks the assistant's text; here its body is simply rendered.
static jj_node *parse_generation(jj_parser *p, uint32_t line) {
  jj_node *node = jj_node_new(p, NODE_CALL_BLOCK, line);
  node->body = parse_function_body(p, "endgeneration");
  return node;
}

static jj_node *parse_filter_block(jj_parser *p, uint32_t line) {
  jj_node *node = jj_node_new(p, NODE_FILTER_BLOCK, line);
  node->a = jj_parse_filters(p, NULL, true);
  node->body = parse_whole_body(p, "endfilter");
  return node;
}

static jj_node *parse_with(jj_parser *p, uint32_t line) {
  jj_node *node = jj_node_new(p, NODE_WITH, line);
  while (p->t->kind != TOK_BLOCK_END) {
    if (node->list.n) jj_expect_op(p, ",");
    jj_nodes_push(p, &node->list, parse_target(p, NULL, false));
    jj_expect_op(p, "=");
    jj_nodes_push(p, &node->kwargs, jj_parse_expr(p));
  }
  node->body = parse_whole_body(p, "endwith");
  return node;
}

static jj_node *parse_print(jj_parser *p, uint32_t line) {
  jj_node *node = jj_node_new(p, NODE_OUTPUT, line);
  while (p->t->kind != TOK_BLOCK_END) {
    if (node->list.n) jj_expect_op(p, ",");
    jj_nodes_push(p, &node->list, jj_parse_expr(p));
  }
  return node;
}

static jj_node *parse_break(jj_parser *p, uint32_t line) {
  if (!p->n_loops) jj_raise(p->j, TD_EFORMAT, "'break' outside loop");
  return jj_node_new(p, NODE_BREAK, line);
}

static jj_node *parse_continue(jj_parser *p, uint32_t line) {
  if (!p->n_loops) jj_raise(p->j, TD_EFORMAT, "'continue' not properly in loop");
  return jj_node_new(p, NODE_CONTINUE, line);
}

static void skip_import_context(jj_parser *p) {
  bool context = (jj_at_word(p, "with") || jj_at_word(p, "without")) && p->t[1].kind == TOK_NAME &&
                 jj_str_is(p->t[1].text, "context");
  if (!context) return;
  jj_advance(p);
  jj_advance(p);
}

// Accepted by the parser, since it may be in a branch that is never taken. Running it fails, as it
// does in jinja2 without a loader.
static jj_node *parse_needs_loader(jj_parser *p, uint32_t line, const char *tag) {
  jj_node *node = jj_node_new(p, NODE_NEEDS_LOADER, line);
  node->name = jj_lit(p->j, tag);
  node->a = jj_parse_expr(p);
  if (strcmp(tag, "import") == 0) {
    jj_expect_word(p, "as");
    jj_expect_name(p);
  } else if (strcmp(tag, "from") == 0) {
    jj_expect_word(p, "import");
    do {
      jj_expect_name(p);
      if (jj_skip_word(p, "as")) jj_expect_name(p);
    } while (jj_skip_op(p, ","));
  } else if (jj_skip_word(p, "ignore")) {
    jj_expect_word(p, "missing");
  }
  skip_import_context(p);
  return node;
}

static jj_node *parse_statement(jj_parser *p) {
  static const struct {
    const char *word;
    jj_node *(*parse)(jj_parser *p, uint32_t line);
  } statements[] = {
      {"if", parse_if},           {"for", parse_for},
      {"set", parse_set},         {"macro", parse_macro},
      {"break", parse_break},     {"continue", parse_continue},
      {"call", parse_call_block}, {"generation", parse_generation},
      {"with", parse_with},       {"filter", parse_filter_block},
      {"print", parse_print},
  };
  static const char *const loaders[] = {"include", "import", "from", "extends"};
  if (p->t->kind != TOK_NAME) jj_raise(p->j, TD_EFORMAT, "tag name expected");
  const jj_token *t = p->t;
  for (size_t i = 0; i < TD_COUNT(statements); i++)
    if (jj_skip_word(p, statements[i].word)) return statements[i].parse(p, t->line);
  for (size_t i = 0; i < TD_COUNT(loaders); i++)
    if (jj_skip_word(p, loaders[i])) return parse_needs_loader(p, t->line, loaders[i]);
  jj_raise(p->j, TD_EFORMAT, "Encountered unknown tag '%.*s'.", jj_clip(t->text), t->text->p);
}

jj_nodes jj_parse(jj *j, jj_tokens tokens) {
  jj_parser p = {.j = j, .t = tokens.items};
  j->line = p.t->line;
  return parse_body(&p, NULL);
}
