// src/text/grammar/schema_lookup.c - members of schemas by name, and what a $ref points at.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/str.h"
#include "text/grammar/schema_impl.h"

#define FEW 32 // members that are looked through

// ---- an index of large objects -----------------------------------------------------------------

static uint32_t hash_of(const cJSON *object, const char *name) {
  uint32_t hash = 2166136261u ^ (uint32_t)((uintptr_t)object >> 4); // FNV-1a
  for (const char *c = name; *c; c++)
    hash = (hash ^ (unsigned char)*c) * 16777619u;
  return hash ^ hash >> 15;
}

static const char *name_of(const td_schema_member *m) {
  return m->member ? m->member->string : "";
}

static td_schema_member *slot_of(td_schema_ctx *ctx, const cJSON *object, const char *name,
                                 bool is_whole) {
  uint32_t at = hash_of(object, name) & (ctx->n_member_slots - 1);
  for (; ctx->members[at].object; at = (at + 1) & (ctx->n_member_slots - 1)) {
    const td_schema_member *m = &ctx->members[at];
    if (!td_budget_step(ctx->budget, 1)) break;
    if (m->object == object && !m->member == is_whole && strcmp(name_of(m), name) == 0) break;
  }
  return &ctx->members[at];
}

static bool make_room(td_schema_ctx *ctx, uint32_t n) {
  uint32_t n_slots = ctx->n_member_slots ? ctx->n_member_slots : 256;
  while (n_slots < 2 * (ctx->n_members + n))
    n_slots *= 2;
  if (n_slots == ctx->n_member_slots) return true;
  if (!td_budget_take(ctx->budget, n_slots * sizeof *ctx->members)) return false;
  td_schema_member *before = ctx->members;
  const uint32_t n_before = ctx->n_member_slots;
  ctx->members = calloc(n_slots, sizeof *ctx->members);
  if (!ctx->members) {
    ctx->members = before;
    ctx->budget->status = TD_ENOMEM;
    return false;
  }
  ctx->n_member_slots = n_slots;
  for (uint32_t i = 0; i < n_before; i++) {
    const td_schema_member *m = &before[i];
    if (m->object) *slot_of(ctx, m->object, name_of(m), !m->member) = *m;
  }
  free(before);
  return true;
}

static void add_members(td_schema_ctx *ctx, const cJSON *object) {
  const uint32_t n = (uint32_t)cJSON_GetArraySize(object) + 1;
  if (!td_budget_step(ctx->budget, n) || !make_room(ctx, n)) return;
  *slot_of(ctx, object, "", true) = (td_schema_member){.object = object};
  ctx->n_members++;
  for (const cJSON *m = object->child; m; m = m->next) {
    td_schema_member *slot = slot_of(ctx, object, m->string, false);
    if (slot->object) continue; // the first of several counts
    *slot = (td_schema_member){object, m};
    ctx->n_members++;
  }
}

const cJSON *td_schema_member_of(td_schema_ctx *ctx, const cJSON *object, const char *key) {
  const cJSON *m = cJSON_IsObject(object) ? object->child : NULL;
  for (unsigned i = 0; m && i < FEW; i++, m = m->next)
    if (strcmp(m->string, key) == 0) return m;
  if (!m) return NULL;
  if (!ctx->members || !slot_of(ctx, object, "", true)->object) add_members(ctx, object);
  return ctx->budget->status == TD_OK ? slot_of(ctx, object, key, false)->member : NULL;
}

const cJSON *td_schema_get(td_schema_ctx *ctx, const cJSON *object, const char *key) {
  const cJSON *member = td_schema_member_of(ctx, object, key);
  return cJSON_IsNull(member) ? NULL : member;
}

// ---- $ref --------------------------------------------------------------------------------------

// One step of a JSON pointer, up to the next slash, unescaped in place. Returns what follows it;
// NULL at the end.
static char *cut_step(char *step) {
  char *out = step, *at = step;
  for (; *at && *at != '/'; at++) {
    char c = *at;
    if (c == '~' && (at[1] == '0' || at[1] == '1')) {
      c = *++at == '0' ? '~' : '/';
    } else if (c == '%' && td_hex_digit(at[1]) >= 0 && td_hex_digit(at[2]) >= 0) {
      c = (char)(td_hex_digit(at[1]) << 4 | td_hex_digit(at[2]));
      at += 2;
    }
    *out++ = c;
  }
  char *rest = *at ? at + 1 : NULL;
  *out = '\0';
  return rest;
}

static const cJSON *item_at(td_schema_ctx *ctx, const cJSON *list, const char *step) {
  char *end;
  const unsigned long at = strtoul(step, &end, 10);
  if (*step < '0' || *step > '9' || *end) return NULL;
  const cJSON *item = list->child;
  for (unsigned long i = 0; i < at && item && td_budget_step(ctx->budget, 1); i++)
    item = item->next;
  return item;
}

// The definition whose $anchor is the name; NULL: there is none.
static const cJSON *anchored(td_schema_ctx *ctx, const char *name) {
  static const char *const lists[] = {"$defs", "definitions"};
  for (size_t i = 0; i < TD_COUNT(lists); i++) {
    const cJSON *defs = td_schema_get(ctx, ctx->root, lists[i]);
    for (const cJSON *def = defs ? defs->child : NULL; def && td_budget_step(ctx->budget, 1);
         def = def->next) {
      const char *anchor = cJSON_GetStringValue(td_schema_get(ctx, def, "$anchor"));
      if (anchor && strcmp(anchor, name) == 0) return def;
    }
  }
  return NULL;
}

td_status td_schema_resolve(td_schema_ctx *ctx, const char *ref, const cJSON **out) {
  const size_t len = strlen(ref);
  if (!td_budget_step(ctx->budget, len)) return td_schema_exhausted(ctx);
  const bool is_pointer = ref[0] == '#' && (!ref[1] || ref[1] == '/');
  const cJSON *at = is_pointer ? ctx->root : ref[0] == '#' ? anchored(ctx, ref + 1) : NULL;
  if (!at && ctx->budget->status == TD_OK) {
    return td_schema_refuse(ctx, "$ref",
                            "other than a pointer into the schema, #/..., or an $anchor of $defs");
  }
  char *steps = strdup(ref);
  if (!steps) {
    ctx->budget->status = TD_ENOMEM;
    return td_schema_exhausted(ctx);
  }
  for (char *step = is_pointer && len > 1 ? steps + 2 : NULL; step && at;) {
    char *rest = cut_step(step);
    at = cJSON_IsArray(at) ? item_at(ctx, at, step) : td_schema_member_of(ctx, at, step);
    step = rest;
  }
  free(steps);
  if (ctx->budget->status != TD_OK) return td_schema_exhausted(ctx);
  if (!at) return td_schema_bad(ctx, "$ref", "points at nothing");
  *out = at;
  return TD_OK;
}
