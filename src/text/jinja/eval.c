// src/text/jinja/eval.c - evaluates expressions.
#include <string.h>

#include "text/jinja/native.h"

jj_value *jj_slot_of(jj_env *env, jj_ref ref) {
  for (uint16_t i = 0; i < ref.hops; i++)
    env = env->up;
  return &env->slots[ref.slot];
}

static jj_value eval_name(jj *j, jj_env *env, const jj_node *node) {
  jj_value v = *jj_slot_of(env, node->ref);
  return v.type == JJ_MISSING ? jj_undefined_name(j, node->name) : v;
}

static jj_list *eval_list(jj *j, jj_env *env, const jj_nodes *nodes) {
  jj_list *list = jj_list_new(j, nodes->n);
  for (size_t i = 0; i < nodes->n; i++)
    jj_push(j, list, jj_eval(j, env, nodes->items[i]));
  return list;
}

static jj_value eval_dict(jj *j, jj_env *env, const jj_node *node) {
  jj_dict *dict = jj_dict_new(j);
  for (size_t i = 0; i < node->list.n; i += 2) {
    jj_value key = jj_eval(j, env, node->list.items[i]);
    jj_dict_set(j, dict, key, jj_eval(j, env, node->list.items[i + 1]));
  }
  return JJ_OF_DICT(dict);
}

static jj_value eval_binary(jj *j, jj_env *env, const jj_node *node) {
  jj_value a = jj_eval(j, env, node->a), b = jj_eval(j, env, node->b);
  j->line = node->line;
  return jj_binary(j, (jj_op)node->op, a, b);
}

static bool compare(jj *j, jj_op op, jj_value a, jj_value b) {
  switch (op) {
  case OP_EQ: return jj_equal(j, a, b);
  case OP_NE: return !jj_equal(j, a, b);
  case OP_IN: return jj_contains(j, b, a);
  case OP_NOT_IN: return !jj_contains(j, b, a);
  default: return jj_order(j, op, a, b);
  }
}

static jj_value eval_compare(jj *j, jj_env *env, const jj_node *node) {
  jj_value left = jj_eval(j, env, node->a);
  for (size_t i = 0; i < node->list.n; i++) {
    const jj_node *operand = node->list.items[i];
    jj_value right = jj_eval(j, env, operand->a);
    j->line = node->line;
    if (!compare(j, (jj_op)operand->op, left, right)) return JJ_OF_BOOL(false);
    left = right;
  }
  return JJ_OF_BOOL(true);
}

static jj_value eval_concat(jj *j, jj_env *env, const jj_node *node) {
  jj_builder b;
  jj_build(&b, j);
  for (size_t i = 0; i < node->list.n; i++)
    jj_add_value(&b, jj_eval(j, env, node->list.items[i]));
  return JJ_OF_STR(jj_built(&b));
}

static jj_value eval_condition(jj *j, jj_env *env, const jj_node *node) {
  if (jj_truth(jj_eval(j, env, node->b))) return jj_eval(j, env, node->a);
  if (node->c) return jj_eval(j, env, node->c);
  return jj_undefined(j, "the inline if-expression evaluated to false and no else section was "
                         "defined.");
}

static jj_value eval_slice(jj *j, jj_env *env, const jj_node *node) {
  const jj_node *slice = node->b;
  jj_value object = jj_eval(j, env, node->a);
  jj_value start = slice->a ? jj_eval(j, env, slice->a) : JJ_NONE_VALUE;
  jj_value stop = slice->b ? jj_eval(j, env, slice->b) : JJ_NONE_VALUE;
  jj_value step = slice->c ? jj_eval(j, env, slice->c) : JJ_NONE_VALUE;
  j->line = node->line;
  return jj_slice(j, object, start, stop, step);
}

static jj_value eval_item(jj *j, jj_env *env, const jj_node *node) {
  if (node->b->kind == NODE_SLICE) return eval_slice(j, env, node);
  jj_value object = jj_eval(j, env, node->a), key = jj_eval(j, env, node->b);
  j->line = node->line;
  return jj_getitem(j, object, key);
}

// ---- calls ----

static jj_value *eval_positional(jj *j, jj_env *env, const jj_node *node, size_t *n) {
  jj_list *list = eval_list(j, env, &node->list);
  if (node->dyn_args) {
    jj_iter *it = jj_iterate(j, jj_eval(j, env, node->dyn_args));
    jj_value v;
    while (jj_next(j, it, &v))
      jj_push(j, list, v);
  }
  *n = list->n;
  return list->items;
}

// Appends the entries of **mapping after the n explicit keyword arguments.
static void add_mapping(jj *j, jj_value mapping, jj_kwarg *kw, size_t *n) {
  for (size_t i = 0; i < mapping.dict->n; i++) {
    const jj_entry *e = &mapping.dict->entries[i];
    if (e->key.type != JJ_STR) jj_raise(j, TD_EFORMAT, "keywords must be strings");
    for (size_t k = 0; k < *n; k++) {
      if (jj_str_eq(kw[k].name, e->key.s)) {
        jj_raise(j, TD_EFORMAT, "got multiple values for keyword argument '%.*s'",
                 jj_clip(e->key.s), e->key.s->p);
      }
    }
    kw[(*n)++] = (jj_kwarg){.name = e->key.s, .value = e->value};
  }
  jj_steps(j, mapping.dict->n);
}

jj_args jj_eval_args(jj *j, jj_env *env, const jj_node *node, const jj_value *caller) {
  jj_args args = {0};
  args.pos = eval_positional(j, env, node, &args.n_pos);
  if (!node->kwargs.n && !node->dyn_kwargs && !caller) return args;
  jj_kwarg *kw = jj_alloc_n(j, node->kwargs.n + 1, sizeof *kw);
  for (size_t i = 0; i < node->kwargs.n; i++) {
    const jj_node *keyword = node->kwargs.items[i];
    kw[args.n_kw++] = (jj_kwarg){.name = keyword->name, .value = jj_eval(j, env, keyword->a)};
  }
  if (caller) kw[args.n_kw++] = (jj_kwarg){.name = jj_lit(j, "caller"), .value = *caller};
  if (node->dyn_kwargs) {
    jj_value mapping = jj_eval(j, env, node->dyn_kwargs);
    if (mapping.type != JJ_DICT)
      jj_raise(j, TD_EFORMAT, "argument after ** must be a mapping, not %s", jj_type_name(mapping));
    jj_kwarg *all = jj_alloc_n(j, args.n_kw + mapping.dict->n, sizeof *all);
    if (args.n_kw) memcpy(all, kw, args.n_kw * sizeof *all);
    kw = all;
    add_mapping(j, mapping, kw, &args.n_kw);
  }
  args.kw = kw;
  return args;
}

static jj_value eval_call(jj *j, jj_env *env, const jj_node *node) {
  jj_value callee = jj_eval(j, env, node->a);
  jj_args args = jj_eval_args(j, env, node, NULL);
  j->line = node->line;
  return jj_call(j, callee, &args);
}

static _Noreturn void raise_unknown(jj *j, const jj_node *node) {
  jj_raise(j, TD_EFORMAT, "No %s named '%.*s' found.",
           node->kind == NODE_FILTER ? "filter" : "test", jj_clip(node->name), node->name->p);
}

static jj_value eval_native(jj *j, jj_env *env, const jj_node *node) {
  j->line = node->line;
  if (!node->native) raise_unknown(j, node);
  jj_value subject = jj_eval(j, env, node->a);
  jj_args args = jj_eval_args(j, env, node, NULL);
  j->line = node->line;
  return jj_native_call(j, node->native, subject, &args);
}

jj_value jj_eval_filters(jj *j, jj_env *env, const jj_node *filter, jj_value input) {
  jj_enter(j);
  j->line = filter->line;
  if (!filter->native) raise_unknown(j, filter);
  if (filter->a) input = jj_eval_filters(j, env, filter->a, input);
  jj_args args = jj_eval_args(j, env, filter, NULL);
  j->line = filter->line;
  jj_value result = jj_native_call(j, filter->native, input, &args);
  jj_leave(j);
  return result;
}

// ---- dispatch ----

static jj_value eval_logic(jj *j, jj_env *env, const jj_node *node) {
  jj_value a = jj_eval(j, env, node->a);
  if (node->kind == NODE_NOT) return JJ_OF_BOOL(!jj_truth(a));
  return jj_truth(a) == (node->kind == NODE_AND) ? jj_eval(j, env, node->b) : a;
}

static jj_value eval_unary(jj *j, jj_env *env, const jj_node *node) {
  jj_value v = jj_eval(j, env, node->a);
  j->line = node->line;
  return jj_negate(j, v, (jj_op)node->op);
}

static jj_value eval_attribute(jj *j, jj_env *env, const jj_node *node) {
  jj_value object = jj_eval(j, env, node->a);
  j->line = node->line;
  return jj_getattr(j, object, node->name);
}

static jj_value eval_any(jj *j, jj_env *env, const jj_node *node) {
  switch (node->kind) {
  case NODE_DATA:
  case NODE_CONST: return node->value;
  case NODE_NAME: return eval_name(j, env, node);
  case NODE_GETATTR: return eval_attribute(j, env, node);
  case NODE_GETITEM: return eval_item(j, env, node);
  case NODE_BINARY: return eval_binary(j, env, node);
  case NODE_COMPARE: return eval_compare(j, env, node);
  case NODE_AND:
  case NODE_OR:
  case NODE_NOT: return eval_logic(j, env, node);
  case NODE_COND: return eval_condition(j, env, node);
  case NODE_FILTER:
  case NODE_TEST: return eval_native(j, env, node);
  case NODE_CALL: return eval_call(j, env, node);
  case NODE_CONCAT: return eval_concat(j, env, node);
  case NODE_UNARY: return eval_unary(j, env, node);
  case NODE_LIST: return JJ_OF_LIST(eval_list(j, env, &node->list));
  case NODE_TUPLE: return JJ_OF_TUPLE(eval_list(j, env, &node->list));
  case NODE_DICT: return eval_dict(j, env, node);
  default: jj_raise(j, TD_EINTERNAL, "not an expression");
  }
}

jj_value jj_eval(jj *j, jj_env *env, const jj_node *node) {
  jj_steps(j, 1);
  jj_enter(j);
  jj_value v = eval_any(j, env, node);
  jj_leave(j);
  return v;
}
