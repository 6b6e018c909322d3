// src/text/jinja/scope.c - resolves names to slots by the rules of jinja2's compiler (its
// idtracking module).
//
// The template and every for, macro, call, filter, set and with block have a scope. All names that
// a scope mentions are collected before its inner scopes are processed. A name that is read first
// is bound to the nearest scope that knows it, or else to the render's variables. A name that is
// assigned first becomes local and starts with the value of the outer variable of that name. So an
// assignment in a loop never leaves it, and a macro sees the template's variables as they are when
// it is called.
#include <string.h>

#include "text/jinja/jinja.h"

typedef struct {
  jj *j;
  jj_scope *scope;
  // Inside an if or a conditional expression, unknown filters and tests are errors only when
  // executed.
  bool soft;
} resolver;

// ---- slots ----

static int find_local(jj *j, const jj_scope *scope, const jj_str *name) {
  jj_steps(j, scope->n >> 3);
  for (size_t i = 0; i < scope->n; i++)
    if (jj_str_eq(scope->slots[i].name, name)) return (int)i;
  return -1;
}

static bool find_ref(jj *j, const jj_scope *scope, const jj_str *name, jj_ref *ref) {
  for (uint16_t hops = 0; scope; scope = scope->up, hops++) {
    int slot = find_local(j, scope, name);
    if (slot < 0) continue;
    *ref = (jj_ref){.hops = hops, .slot = (uint16_t)slot};
    return true;
  }
  return false;
}

static jj_slot *define(jj *j, jj_scope *scope, const jj_str *name, jj_load load) {
  if (scope->n == UINT16_MAX) jj_raise(j, TD_ELIMIT, "too many variables");
  scope->slots = jj_grow(j, scope->slots, scope->n, &scope->cap, sizeof *scope->slots);
  jj_slot *slot = &scope->slots[scope->n++];
  *slot = (jj_slot){.name = name, .load = load};
  return slot;
}

static void note_load(jj *j, jj_scope *scope, const jj_str *name) {
  jj_ref ref;
  if (!find_ref(j, scope, name, &ref)) define(j, scope, name, LOAD_CONTEXT);
}

static void note_store(jj *j, jj_scope *scope, const jj_str *name) {
  int known = find_local(j, scope, name);
  jj_slot *slot;
  jj_ref outer;
  if (known >= 0) {
    slot = &scope->slots[known];
  } else if (find_ref(j, scope->up, name, &outer)) {
    slot = define(j, scope, name, LOAD_OUTER);
    slot->outer = outer;
  } else {
    slot = define(j, scope, name, LOAD_UNSET);
  }
  slot->stored = true;
}

static int note_param(jj *j, jj_scope *scope, const jj_str *name) {
  int known = find_local(j, scope, name);
  if (known < 0) {
    define(j, scope, name, LOAD_PARAM);
    known = (int)scope->n - 1;
  }
  scope->slots[known].load = LOAD_PARAM;
  scope->slots[known].stored = true;
  return known;
}

// ---- walking ----

typedef void (*visitor)(void *context, jj_node *node);

static void each(const jj_nodes *nodes, visitor visit, void *context) {
  for (size_t i = 0; i < nodes->n; i++)
    visit(context, nodes->items[i]);
}

static void each_child(jj_node *node, visitor visit, void *context) {
  jj_node *const single[] = {node->a, node->b, node->c, node->dyn_args, node->dyn_kwargs};
  for (size_t i = 0; i < TD_COUNT(single); i++)
    if (single[i]) visit(context, single[i]);
  each(&node->list, visit, context);
  each(&node->kwargs, visit, context);
  each(&node->body, visit, context);
  each(&node->orelse, visit, context);
}

// Whether a body reads a name before assigning it, including inner scopes. jinja2 uses this to
// decide which of caller, kwargs, varargs and loop exist.
typedef struct {
  jj *j;
  const char *name;
  bool read, settled;
} mention;

static void look_for(void *context, jj_node *node) {
  mention *m = context;
  if (m->settled) return;
  jj_enter(m->j);
  jj_steps(m->j, 1);
  if (node->kind == NODE_NAME && jj_str_is(node->name, m->name)) {
    m->settled = true;
    m->read = !node->flag;
  } else {
    each_child(node, look_for, m);
  }
  jj_leave(m->j);
}

static bool reads(jj *j, const jj_nodes *body, const char *name) {
  mention m = {.j = j, .name = name};
  each(body, look_for, &m);
  return m.read;
}

// ---- first pass: the names of one scope ----

static void declare(void *context, jj_node *node);

static jj_scope copy_scope(jj *j, const jj_scope *scope) {
  jj_scope copy = *scope;
  copy.cap = scope->n;
  copy.slots = jj_alloc_n(j, scope->n, sizeof *copy.slots);
  if (scope->n) memcpy(copy.slots, scope->slots, scope->n * sizeof *copy.slots);
  jj_steps(j, scope->n >> 2);
  return copy;
}

static void merge_branch(jj *j, jj_scope *scope, const jj_scope *branch) {
  for (size_t i = 0; i < branch->n; i++) {
    const jj_slot *from = &branch->slots[i];
    int known = find_local(j, scope, from->name);
    jj_slot *slot = known >= 0 ? &scope->slots[known] : define(j, scope, from->name, from->load);
    bool stored = slot->stored || from->stored;
    *slot = *from;
    slot->stored = stored;
  }
}

// Each branch starts from what was known before it. A name that only some branches assign falls
// back to the outer variable or the render's variable.
static void declare_if(resolver *r, jj_node *node) {
  jj_scope *scope = r->scope;
  declare(r, node->a);
  jj_scope before = copy_scope(r->j, scope), branches[3];
  const jj_nodes *bodies[] = {&node->body, &node->list, &node->orelse};
  for (int i = 0; i < 3; i++) {
    branches[i] = copy_scope(r->j, &before);
    r->scope = &branches[i];
    each(bodies[i], declare, r);
  }
  r->scope = scope;
  for (int i = 0; i < 3; i++)
    merge_branch(r->j, scope, &branches[i]);
  for (size_t i = 0; i < scope->n; i++) {
    jj_slot *slot = &scope->slots[i];
    bool stored_before = i < before.n && before.slots[i].stored;
    if (!slot->stored || stored_before) continue;
    slot->load = find_ref(r->j, scope->up, slot->name, &slot->outer) ? LOAD_OUTER : LOAD_CONTEXT;
  }
}

static void declare(void *context, jj_node *node) {
  resolver *r = context;
  jj_enter(r->j);
  jj_steps(r->j, 1);
  switch (node->kind) {
  case NODE_NAME: (node->flag ? note_store : note_load)(r->j, r->scope, node->name); break;
  case NODE_NSREF: note_load(r->j, r->scope, node->name); break;
  case NODE_IF: declare_if(r, node); break;
  case NODE_FOR: declare(r, node->b); break;
  case NODE_MACRO: note_store(r->j, r->scope, node->name); break;
  case NODE_CALL_BLOCK:
  case NODE_FILTER_BLOCK:
    if (node->a) declare(r, node->a);
    break;
  case NODE_WITH: each(&node->kwargs, declare, r); break;
  case NODE_SET:
    declare(r, node->b);
    declare(r, node->a);
    break;
  case NODE_SET_BLOCK:
    if (node->b) declare(r, node->b);
    declare(r, node->a);
    break;
  default: each_child(node, declare, r);
  }
  jj_leave(r->j);
}

static void declare_targets(void *context, jj_node *node) {
  resolver *r = context;
  if (node->kind == NODE_NAME)
    note_param(r->j, r->scope, node->name);
  else
    each(&node->list, declare_targets, r);
}

// ---- second pass: references, and the scopes within ----

static void bind(void *context, jj_node *node);

static jj_scope *new_scope(resolver *r, const jj_scope *up) {
  jj_scope *scope = jj_alloc(r->j, sizeof *scope);
  scope->up = up;
  return scope;
}

static resolver within(const resolver *r, jj_scope *scope) {
  return (resolver){.j = r->j, .scope = scope};
}

static void declare_and_bind(resolver *r, const jj_nodes *body) {
  each(body, declare, r);
  each(body, bind, r);
}

static void forbid_loop_target(void *context, jj_node *node) {
  jj *j = context;
  jj_enter(j);
  if (node->kind == NODE_NAME && node->flag && jj_str_is(node->name, "loop")) {
    j->line = node->line;
    jj_raise(j, TD_EFORMAT, "Can't assign to special loop variable in for-loop target");
  }
  bool names_params = node->kind == NODE_MACRO || node->kind == NODE_CALL_BLOCK ||
                      node->kind == NODE_WITH;
  if (names_params)
    each(&node->body, forbid_loop_target, j);
  else
    each_child(node, forbid_loop_target, j);
  jj_leave(j);
}

// The targets come first in both scopes, so that one reference works in the filter and the body.
static void bind_for(resolver *r, jj_node *node) {
  bind(r, node->b);
  forbid_loop_target(r->j, node);
  node->scope = new_scope(r, r->scope);
  resolver body = within(r, node->scope);
  declare_targets(&body, node->a);
  if (reads(r->j, &node->body, "loop"))
    node->loop_slot = note_param(r->j, node->scope, jj_lit(r->j, "loop"));
  bind(&body, node->a);
  declare_and_bind(&body, &node->body);
  if (node->c) {
    node->test_scope = new_scope(r, r->scope);
    resolver test = within(r, node->test_scope);
    declare_targets(&test, node->a);
    declare(&test, node->c);
    bind(&test, node->c);
  }
  node->else_scope = new_scope(r, r->scope);
  resolver orelse = within(r, node->else_scope);
  declare_and_bind(&orelse, &node->orelse);
}

static int special_param(resolver *r, jj_node *node, const char *name) {
  if (!reads(r->j, &node->body, name)) return -1;
  for (size_t i = 0; i < node->list.n; i++)
    if (jj_str_is(node->list.items[i]->name, name)) return -1;
  return note_param(r->j, node->scope, jj_lit(r->j, name));
}

static void check_caller_param(resolver *r, const jj_node *node) {
  size_t n_plain = node->list.n - node->kwargs.n;
  for (size_t i = 0; i < n_plain; i++) {
    if (jj_str_is(node->list.items[i]->name, "caller") && reads(r->j, &node->body, "caller")) {
      jj_raise(r->j, TD_EFORMAT,
               "When defining macros or call blocks the special \"caller\" "
               "argument must be omitted or be given a default.");
    }
  }
}

static void bind_macro(resolver *r, jj_node *node) {
  node->scope = new_scope(r, r->scope);
  resolver inner = within(r, node->scope);
  r->j->line = node->line;
  check_caller_param(r, node);
  each(&node->list, declare_targets, &inner);
  each(&node->kwargs, declare, &inner);
  each(&node->body, declare, &inner);
  node->macro.caller_slot = special_param(&inner, node, "caller");
  node->macro.kwargs_slot = special_param(&inner, node, "kwargs");
  node->macro.varargs_slot = special_param(&inner, node, "varargs");
  each(&node->list, bind, &inner);
  each(&node->kwargs, bind, &inner);
  each(&node->body, bind, &inner);
}

static void bind_with(resolver *r, jj_node *node) {
  each(&node->kwargs, bind, r);
  node->scope = new_scope(r, r->scope);
  resolver inner = within(r, node->scope);
  each(&node->list, declare_targets, &inner);
  each(&node->list, bind, &inner);
  declare_and_bind(&inner, &node->body);
}

// Binds a body that has only a scope of its own.
static void bind_body(resolver *r, jj_node *node) {
  node->scope = new_scope(r, r->scope);
  resolver inner = within(r, node->scope);
  if (node->kind == NODE_FILTER_BLOCK) {
    declare(&inner, node->a);
    bind(&inner, node->a);
  }
  declare_and_bind(&inner, &node->body);
}

static void bind_native(resolver *r, const jj_node *node) {
  if (node->native || r->soft) return;
  r->j->line = node->line;
  jj_raise(r->j, TD_EFORMAT, "No %s named '%.*s'.", node->kind == NODE_FILTER ? "filter" : "test",
           jj_clip(node->name), node->name->p);
}

static void bind_name(resolver *r, jj_node *node) {
  TD_CHECK(find_ref(r->j, r->scope, node->name, &node->ref));
}

static void bind_softly(resolver *r, jj_node *node) {
  bool soft = r->soft;
  r->soft = true;
  each_child(node, bind, r);
  r->soft = soft;
}

static void bind(void *context, jj_node *node) {
  resolver *r = context;
  jj_enter(r->j);
  switch (node->kind) {
  case NODE_NAME:
  case NODE_NSREF: bind_name(r, node); break;
  case NODE_FILTER:
  case NODE_TEST:
    bind_native(r, node);
    each_child(node, bind, r);
    break;
  case NODE_IF:
  case NODE_COND: bind_softly(r, node); break;
  case NODE_FOR: bind_for(r, node); break;
  case NODE_MACRO:
    bind_name(r, node->a);
    bind_macro(r, node);
    break;
  case NODE_CALL_BLOCK:
    if (node->a) bind(r, node->a);
    bind_macro(r, node);
    break;
  case NODE_WITH: bind_with(r, node); break;
  case NODE_SET_BLOCK:
    bind(r, node->a);
    if (node->b) bind(r, node->b);
    bind_body(r, node);
    break;
  case NODE_FILTER_BLOCK: bind_body(r, node); break;
  default: each_child(node, bind, r);
  }
  jj_leave(r->j);
}

void jj_resolve(jj *j, jj_tree *tree) {
  resolver r = {.j = j, .scope = &tree->scope};
  declare_and_bind(&r, &tree->body);
}
