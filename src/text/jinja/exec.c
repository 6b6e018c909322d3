// src/text/jinja/exec.c - executes statements: output, assignments, loops, macros, and blocks that
// capture text.

#include "text/jinja/native.h"

typedef enum { FLOW_NEXT, FLOW_BREAK, FLOW_CONTINUE } flow;

static flow exec_body(jj *j, jj_env *env, const jj_nodes *body);

// ---- environments ----

jj_env *jj_env_new(jj *j, const jj_scope *scope, jj_env *up) {
  jj_env *env = jj_alloc(j, sizeof *env);
  env->up = up;
  env->slots = jj_alloc_n(j, scope->n, sizeof *env->slots);
  return env;
}

// Looks up a render variable or a global.
static jj_value lookup(jj *j, const jj_str *name) {
  const jj_value *v = jj_dict_get_str(j, j->vars, name);
  if (v) return *v;
  const jj_native *global = jj_native_find(jj_globals, name);
  if (!global) return JJ_NO_VALUE;
  jj_bound *bound = jj_alloc(j, sizeof *bound);
  bound->native = global;
  return (jj_value){.type = JJ_NATIVE, .native = bound};
}

void jj_env_enter(jj *j, const jj_scope *scope, jj_env *env) {
  jj_steps(j, 1 + (scope->n >> 2));
  for (size_t i = 0; i < scope->n; i++) {
    const jj_slot *slot = &scope->slots[i];
    switch (slot->load) {
    case LOAD_PARAM: break;
    case LOAD_UNSET: env->slots[i] = JJ_NO_VALUE; break;
    case LOAD_CONTEXT: env->slots[i] = lookup(j, slot->name); break;
    case LOAD_OUTER: env->slots[i] = *jj_slot_of(env->up, slot->outer); break;
    }
  }
}

// ---- assignment ----

static void set_attribute(jj *j, jj_env *env, const jj_node *target, jj_value v) {
  jj_value object = *jj_slot_of(env, target->ref);
  if (object.type != JJ_NAMESPACE)
    jj_raise(j, TD_EFORMAT, "cannot assign attribute on non-namespace object");
  if (target->attr->p[0] == '_')
    jj_raise(j, TD_EFORMAT, "namespace attributes cannot begin with an underscore");
  jj_dict_set(j, object.dict, JJ_OF_STR(target->attr), v);
}

static void unpack(jj *j, jj_env *env, const jj_nodes *targets, jj_value v) {
  if (!jj_iterable(v))
    jj_raise(j, TD_EFORMAT, "cannot unpack non-iterable %s object", jj_type_name(v));
  jj_list *items = jj_to_list(j, v);
  if (items->n > targets->n)
    jj_raise(j, TD_EFORMAT, "too many values to unpack (expected %zu)", targets->n);
  if (items->n < targets->n) {
    jj_raise(j, TD_EFORMAT, "not enough values to unpack (expected %zu, got %zu)", targets->n,
             items->n);
  }
  for (size_t i = 0; i < items->n; i++)
    jj_assign(j, env, targets->items[i], items->items[i]);
}

void jj_assign(jj *j, jj_env *env, const jj_node *target, jj_value v) {
  if (target->kind == NODE_NAME)
    *jj_slot_of(env, target->ref) = v;
  else if (target->kind == NODE_NSREF)
    set_attribute(j, env, target, v);
  else
    unpack(j, env, &target->list, v);
}

// ---- output ----

static void exec_output(jj *j, jj_env *env, const jj_node *node) {
  for (size_t i = 0; i < node->list.n; i++) {
    jj_value v = jj_eval(j, env, node->list.items[i]);
    jj_add_value(j->out, v);
    if (j->out->store->used > j->max_output)
      jj_raise(j, TD_ELIMIT, "the output has more than %zu bytes", j->max_output);
  }
}

// Runs a body with its output redirected to *text. Loop control is passed on to the caller.
static flow capture(jj *j, jj_env *env, const jj_nodes *body, const jj_str **text) {
  jj_builder b, *outer = j->out;
  jj_build(&b, j);
  j->out = &b;
  flow f = exec_body(j, env, body);
  j->out = outer;
  *text = jj_built(&b);
  return f;
}

// ---- loops ----

struct jj_loop {
  const jj_node *node;
  jj_env *test_env;
  jj_iter *it;
  bool sized;     // the iterable has a length and there is no filter
  bool filtered;  // the filter was applied in advance; iterate over what it left
  int64_t length; // -1: not computed yet
  int64_t index0;
  jj_value current, before, after; // JJ_MISSING if there is none
};

// The value of the targets. With a filter, an item is what was unpacked from it.
static jj_value target_value(jj *j, jj_env *env, const jj_node *target) {
  if (target->kind == NODE_NAME) return *jj_slot_of(env, target->ref);
  jj_list *items = jj_list_new(j, target->list.n);
  for (size_t i = 0; i < target->list.n; i++)
    jj_push(j, items, target_value(j, env, target->list.items[i]));
  return JJ_OF_TUPLE(items);
}

static bool fetch(jj *j, jj_loop *loop, jj_value *out) {
  const jj_node *node = loop->node;
  while (jj_next(j, loop->it, out)) {
    if (!loop->test_env || loop->filtered) return true;
    jj_assign(j, loop->test_env, node->a, *out);
    if (!jj_truth(jj_eval(j, loop->test_env, node->c))) continue;
    *out = target_value(j, loop->test_env, node->a);
    return true;
  }
  return false;
}

static jj_value peek(jj *j, jj_loop *loop) {
  jj_value v;
  if (loop->after.type == JJ_MISSING && fetch(j, loop, &v)) loop->after = v;
  return loop->after;
}

static bool advance(jj *j, jj_loop *loop) {
  jj_value v = loop->after;
  loop->after = JJ_NO_VALUE;
  if (v.type == JJ_MISSING && !fetch(j, loop, &v)) return false;
  loop->index0++;
  loop->before = loop->current;
  loop->current = v;
  return true;
}

// An iterable without a length is read to the end to determine it.
static int64_t loop_length(jj *j, jj_loop *loop) {
  if (loop->length >= 0) return loop->length;
  if (loop->sized) return loop->length = jj_len(j, loop->it->items);
  jj_list *rest = jj_list_new(j, 8);
  jj_value v;
  while (fetch(j, loop, &v))
    jj_push(j, rest, v);
  loop->it = jj_iterate(j, JJ_OF_LIST(rest));
  loop->filtered = true;
  loop->length = (int64_t)rest->n + loop->index0 + 1 + (loop->after.type != JJ_MISSING);
  return loop->length;
}

static jj_value loop_neighbour(jj *j, jj_loop *loop, bool next) {
  if (next) {
    jj_value v = peek(j, loop);
    return v.type == JJ_MISSING ? jj_undefined(j, "there is no next item") : v;
  }
  return loop->index0 == 0 ? jj_undefined(j, "there is no previous item") : loop->before;
}

jj_value jj_loop_attr(jj *j, jj_loop *loop, const jj_str *name) {
  if (jj_str_is(name, "index")) return JJ_OF_INT(loop->index0 + 1);
  if (jj_str_is(name, "index0")) return JJ_OF_INT(loop->index0);
  if (jj_str_is(name, "first")) return JJ_OF_BOOL(loop->index0 == 0);
  if (jj_str_is(name, "last")) return JJ_OF_BOOL(peek(j, loop).type == JJ_MISSING);
  if (jj_str_is(name, "length")) return JJ_OF_INT(loop_length(j, loop));
  if (jj_str_is(name, "revindex")) return JJ_OF_INT(loop_length(j, loop) - loop->index0);
  if (jj_str_is(name, "revindex0")) return JJ_OF_INT(loop_length(j, loop) - loop->index0 - 1);
  if (jj_str_is(name, "previtem")) return loop_neighbour(j, loop, false);
  if (jj_str_is(name, "nextitem")) return loop_neighbour(j, loop, true);
  return JJ_NO_VALUE;
}

// Runs the loop once over `items`. All iterations share one environment: a macro defined in the
// body sees the variables of later iterations, like a Python closure.
static flow run_loop(jj *j, const jj_node *node, jj_env *outer, jj_value items) {
  jj_loop *loop = jj_alloc(j, sizeof *loop);
  *loop = (jj_loop){.node = node, .length = -1, .index0 = -1};
  loop->sized = !node->c && items.type != JJ_ITER;
  loop->it = jj_iterate(j, items);
  if (node->c) {
    loop->test_env = jj_env_new(j, node->test_scope, outer);
    jj_env_enter(j, node->test_scope, loop->test_env);
  }
  jj_env *env = jj_env_new(j, node->scope, outer);
  bool run_else = true; // as in jinja2, an iteration left by break or continue does not count
  while (advance(j, loop)) {
    jj_env_enter(j, node->scope, env);
    jj_assign(j, env, node->a, loop->current);
    if (node->loop_slot >= 0)
      env->slots[node->loop_slot] = (jj_value){.type = JJ_LOOP, .loop = loop};
    flow f = exec_body(j, env, &node->body);
    if (f == FLOW_BREAK) break;
    if (f == FLOW_NEXT) run_else = false;
  }
  if (!run_else || !node->orelse.n) return FLOW_NEXT;
  env = jj_env_new(j, node->else_scope, outer);
  jj_env_enter(j, node->else_scope, env);
  return exec_body(j, env, &node->orelse);
}

static flow exec_for(jj *j, jj_env *env, const jj_node *node) {
  jj_value items = jj_eval(j, env, node->b);
  j->line = node->line;
  return run_loop(j, node, env, items);
}

// ---- macros ----

// The keyword argument called name, or JJ_MISSING. taken[] records that it was used.
static jj_value take_keyword(const jj_args *args, const jj_str *name, bool *taken) {
  for (size_t i = 0; i < args->n_kw; i++) {
    if (taken[i] || !jj_str_eq(args->kw[i].name, name)) continue;
    taken[i] = true;
    return args->kw[i].value;
  }
  return JJ_NO_VALUE;
}

static _Noreturn void raise_macro(jj *j, const jj_node *node, const char *what) {
  const jj_str *name = node->name ? node->name : jj_lit(j, "caller");
  jj_raise(j, TD_EFORMAT, "macro '%.*s' %s", jj_clip(name), name->p, what);
}

// Assigns surplus arguments to kwargs and varargs; if the macro does not use these, a surplus is an
// error.
static void bind_rest(jj *j, const jj_node *node, jj_env *env, const jj_args *args,
                      const bool *taken) {
  jj_dict *kwargs = jj_dict_new(j);
  for (size_t i = 0; i < args->n_kw; i++)
    if (!taken[i]) jj_dict_set(j, kwargs, JJ_OF_STR(args->kw[i].name), args->kw[i].value);
  if (node->macro.kwargs_slot >= 0)
    env->slots[node->macro.kwargs_slot] = JJ_OF_DICT(kwargs);
  else if (kwargs->n)
    raise_macro(j, node, "takes no keyword argument of that name");
  jj_list *varargs = jj_list_new(j, 0);
  for (size_t i = node->list.n; i < args->n_pos; i++)
    jj_push(j, varargs, args->pos[i]);
  if (node->macro.varargs_slot >= 0)
    env->slots[node->macro.varargs_slot] = JJ_OF_TUPLE(varargs);
  else if (varargs->n)
    raise_macro(j, node, "takes fewer arguments");
}

static void bind_params(jj *j, const jj_node *node, jj_env *env, const jj_args *args) {
  bool *taken = jj_alloc_n(j, args->n_kw, sizeof *taken);
  for (size_t i = 0; i < node->list.n; i++) {
    const jj_node *param = node->list.items[i];
    env->slots[param->ref.slot] = i < args->n_pos ? args->pos[i]
                                                  : take_keyword(args, param->name, taken);
  }
  if (node->macro.caller_slot >= 0) {
    jj_value caller = take_keyword(args, jj_lit(j, "caller"), taken);
    bool none = caller.type == JJ_MISSING || caller.type == JJ_NONE;
    env->slots[node->macro.caller_slot] = none ? jj_undefined(j, "No caller defined") : caller;
  }
  bind_rest(j, node, env, args, taken);
}

static jj_value not_provided(jj *j, const jj_str *name) {
  jj_builder b;
  jj_build(&b, j);
  jj_add_text(&b, "parameter '");
  jj_add_str(&b, name);
  jj_add_text(&b, "' was not provided");
  jj_add_char(&b, 0, false);
  return jj_undefined(j, jj_built(&b)->p);
}

// Evaluates defaults in order, in the macro's own environment.
static void fill_defaults(jj *j, const jj_node *node, jj_env *env) {
  size_t n_plain = node->list.n - node->kwargs.n;
  for (size_t i = 0; i < node->list.n; i++) {
    const jj_node *param = node->list.items[i];
    jj_value *slot = &env->slots[param->ref.slot];
    if (slot->type != JJ_MISSING) continue;
    *slot = i < n_plain ? not_provided(j, param->name)
                        : jj_eval(j, env, node->kwargs.items[i - n_plain]);
  }
}

jj_value jj_macro_call(jj *j, const jj_macro *macro, const jj_args *args) {
  const jj_node *node = macro->node;
  jj_enter(j);
  jj_env *env = jj_env_new(j, node->scope, macro->env);
  bind_params(j, node, env, args);
  jj_env_enter(j, node->scope, env);
  fill_defaults(j, node, env);
  const jj_str *text;
  capture(j, env, &node->body, &text);
  jj_leave(j);
  return JJ_OF_STR(text);
}

static jj_value make_macro(jj *j, const jj_node *node, jj_env *env) {
  jj_macro *macro = jj_alloc(j, sizeof *macro);
  *macro = (jj_macro){.node = node, .env = env};
  return (jj_value){.type = JJ_MACRO, .macro = macro};
}

// The result of a call or filter block is appended unconverted, so it must be text.
static void add_joined(jj *j, jj_value v) {
  if (v.type != JJ_STR)
    jj_raise(j, TD_EFORMAT, "sequence item 0: expected str instance, %s found", jj_type_name(v));
  jj_add_str(j->out, v.s);
}

static void exec_call_block(jj *j, jj_env *env, const jj_node *node) {
  jj_value caller = make_macro(j, node, env);
  const jj_node *call = node->a;
  if (!call) { // a {% generation %} block
    jj_add_value(j->out, jj_macro_call(j, caller.macro, &(jj_args){0}));
    return;
  }
  jj_value callee = jj_eval(j, env, call->a);
  jj_args args = jj_eval_args(j, env, call, &caller);
  j->line = node->line;
  add_joined(j, jj_call(j, callee, &args));
}

// ---- other blocks ----

static flow exec_if(jj *j, jj_env *env, const jj_node *node) {
  if (jj_truth(jj_eval(j, env, node->a))) return exec_body(j, env, &node->body);
  for (size_t i = 0; i < node->list.n; i++) {
    const jj_node *branch = node->list.items[i];
    if (jj_truth(jj_eval(j, env, branch->a))) return exec_body(j, env, &branch->body);
  }
  return exec_body(j, env, &node->orelse);
}

static jj_env *enter_scope(jj *j, const jj_scope *scope, jj_env *up) {
  jj_env *env = jj_env_new(j, scope, up);
  jj_env_enter(j, scope, env);
  return env;
}

static flow exec_set_block(jj *j, jj_env *env, const jj_node *node) {
  const jj_str *text;
  flow f = capture(j, enter_scope(j, node->scope, env), &node->body, &text);
  if (f != FLOW_NEXT) return f;
  jj_value v = JJ_OF_STR(text);
  jj_assign(j, env, node->a, node->b ? jj_eval_filters(j, env, node->b, v) : v);
  return FLOW_NEXT;
}

static flow exec_filter_block(jj *j, jj_env *env, const jj_node *node) {
  const jj_str *text;
  jj_env *inner = enter_scope(j, node->scope, env);
  flow f = capture(j, inner, &node->body, &text);
  if (f == FLOW_NEXT) add_joined(j, jj_eval_filters(j, inner, node->a, JJ_OF_STR(text)));
  return f;
}

static flow exec_with(jj *j, jj_env *env, const jj_node *node) {
  jj_env *inner = enter_scope(j, node->scope, env);
  for (size_t i = 0; i < node->list.n; i++)
    jj_assign(j, inner, node->list.items[i], jj_eval(j, env, node->kwargs.items[i]));
  return exec_body(j, inner, &node->body);
}

static _Noreturn void raise_no_loader(jj *j, const jj_node *node) {
  jj_raise(j, TD_EUNSUPPORTED, "'%s' is not supported: a chat template is one file", node->name->p);
}

static flow exec(jj *j, jj_env *env, const jj_node *node) {
  j->line = node->line;
  switch (node->kind) {
  case NODE_OUTPUT: exec_output(j, env, node); return FLOW_NEXT;
  case NODE_SET: jj_assign(j, env, node->a, jj_eval(j, env, node->b)); return FLOW_NEXT;
  case NODE_IF: return exec_if(j, env, node);
  case NODE_FOR: return exec_for(j, env, node);
  case NODE_SET_BLOCK: return exec_set_block(j, env, node);
  case NODE_MACRO: *jj_slot_of(env, node->a->ref) = make_macro(j, node, env); return FLOW_NEXT;
  case NODE_CALL_BLOCK: exec_call_block(j, env, node); return FLOW_NEXT;
  case NODE_FILTER_BLOCK: return exec_filter_block(j, env, node);
  case NODE_WITH: return exec_with(j, env, node);
  case NODE_BREAK: return FLOW_BREAK;
  case NODE_CONTINUE: return FLOW_CONTINUE;
  case NODE_NEEDS_LOADER: raise_no_loader(j, node);
  default: jj_raise(j, TD_EINTERNAL, "not a statement");
  }
}

static flow exec_body(jj *j, jj_env *env, const jj_nodes *body) {
  flow f = FLOW_NEXT;
  jj_enter(j);
  for (size_t i = 0; i < body->n && f == FLOW_NEXT; i++) {
    jj_steps(j, 1);
    f = exec(j, env, body->items[i]);
  }
  jj_leave(j);
  return f;
}

void jj_run(jj *j, const jj_tree *tree) {
  jj_env *root = jj_env_new(j, &tree->scope, NULL);
  jj_env_enter(j, &tree->scope, root);
  exec_body(j, root, &tree->body);
}
