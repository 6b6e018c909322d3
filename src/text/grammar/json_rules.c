// src/text/grammar/json_rules.c - the grammar of JSON.
#include "text/grammar/json_rules.h"

#include <stdlib.h>
#include <string.h>

#include "text/grammar/build_impl.h"

static td_json_spacing spacing_of(td_grammar_build *b, unsigned indent) {
  char text[4 + 2 * TD_JSON_MAX_INDENT + 2] = ",\n";
  if (!indent) {
    return (td_json_spacing){.first = TD_NODE_EMPTY,
                             .comma = td_g_str(b, ", "),
                             .last = TD_NODE_EMPTY,
                             .colon = td_g_str(b, ": ")};
  }
  memset(text + 2, ' ', 2 * indent);
  const td_node item = td_g_text(b, text + 1, 1 + 2 * (size_t)indent);
  return (td_json_spacing){.first = item,
                           .comma = td_g_text(b, text, 2 + 2 * (size_t)indent),
                           .last = td_g_text(b, text + 1, 1 + 2 * (size_t)(indent - 1)),
                           .colon = td_g_str(b, ": ")};
}

static td_json_spacing free_spacing(td_grammar_build *b) {
  const td_node ws = td_g_new_rule(b, td_g_gbnf(b, "(\" \" | \"\\n\" [ \\t]{0,32})?", NULL));
  return (td_json_spacing){.first = ws,
                           .comma = td_g_gbnf(b, "$0 \",\" $0", &ws),
                           .last = ws,
                           .colon = td_g_gbnf(b, "$0 \":\" $0", &ws)};
}

static void make_scalars(td_grammar_build *b, td_json_rules *r) {
  r->plain = td_g_gbnf(b, "[^\"\\\\\\x00-\\x1F]", NULL);
  r->character = td_g_new_rule(
      b, td_g_gbnf(b,
                   "$0 | \"\\\\\" ([\"\\\\/bfnrt] | \"u\" ([0-9a-cA-CefEF] [0-9a-fA-F]{3} | "
                   "[dD] [0-7] [0-9a-fA-F]{2} | [dD] [89abAB] [0-9a-fA-F]{2} \"\\\\u\" [dD] "
                   "[c-fC-F] [0-9a-fA-F]{2}))",
                   &r->plain));
  r->string = td_g_new_rule(b, td_g_gbnf(b, "\"\\\"\" $0* \"\\\"\"", &r->character));
  r->integer = td_g_new_rule(b, td_g_gbnf(b, "\"-\"? (\"0\" | [1-9] [0-9]{0,15})", NULL));
  r->number = td_g_new_rule(
      b, td_g_gbnf(b, "$0 (\".\" [0-9]{1,16})? ([eE] [+-]? [0-9]{1,2})?", &r->integer));
}

// Objects and arrays whose items are indented by `indent` steps, where they have any.
static void make_nested(td_grammar_build *b, td_json_rules *r, bool is_free, unsigned indent) {
  const td_json_spacing *s = &r->spacing[indent];
  const bool has_more = indent && indent < TD_JSON_MAX_INDENT;
  const td_rule object = td_g_rule(b), value = td_g_rule(b);
  r->object[indent] = td_g_call(b, object);
  r->value[indent] = td_g_call(b, value);
  const td_node item = has_more ? TD_G_ANY(b, r->value[0], r->value[indent + 1]) : r->value[0];
  const td_node member = td_g_new_rule(b, TD_G_SEQ(b, r->string, s->colon, item));
  const td_node empty = indent ? TD_NODE_NEVER : is_free ? s->first : TD_NODE_EMPTY;
  td_g_define(b, object,
              td_g_gbnf(b, "\"{\" ($1 $0 ($2 $0)* $3 | $4) \"}\"",
                        (td_node[]){member, s->first, s->comma, s->last, empty}));
  const td_node array = td_g_gbnf(b, "\"[\" ($1 $0 ($2 $0)* $3 | $4) \"]\"",
                                  (td_node[]){item, s->first, s->comma, s->last, empty});
  td_g_define(b, value,
              indent ? TD_G_ANY(b, r->object[indent], array)
                     : td_g_gbnf(b, "$0 | $1 | $2 | $3 | \"true\" | \"false\" | \"null\"",
                                 (td_node[]){r->object[0], array, r->string, r->number}));
}

const td_json_rules *td_g_json(td_grammar_build *b, bool is_free) {
  static const td_json_rules nothing;
  if (b->json[is_free]) return b->json[is_free];
  td_json_rules *r = calloc(1, sizeof *r);
  if (!r) {
    td_g_fail(b, TD_ENOMEM);
    return &nothing;
  }
  b->json[is_free] = r;
  make_scalars(b, r);
  for (unsigned indent = 0; indent <= (is_free ? 0 : TD_JSON_MAX_INDENT); indent++)
    r->spacing[indent] = is_free ? free_spacing(b) : spacing_of(b, indent);
  make_nested(b, r, is_free, 0);
  for (unsigned indent = is_free ? 0 : TD_JSON_MAX_INDENT; indent > 0; indent--)
    make_nested(b, r, is_free, indent); // the deepest first: it is part of those above
  return r;
}

td_node td_g_json_object(td_grammar_build *b, bool is_free) {
  const td_json_rules *r = td_g_json(b, is_free);
  return TD_G_ANY(b, r->object[0], r->object[is_free ? 0 : 1]);
}
