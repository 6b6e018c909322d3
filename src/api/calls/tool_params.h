// src/api/calls/tool_params.h - the parameters of a request's tools, with the types their schemas
// allow. Forms of calls that write arguments without quotes need them. Inside src/api only.
#pragma once

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/budget.h"
#include "base/buf.h"
#include "base/status.h"

enum {
  TD_PARAM_NULL = 1,
  TD_PARAM_BOOL = 2,
  TD_PARAM_NUMBER = 4,
  TD_PARAM_STRING = 8,
  TD_PARAM_ARRAY = 16,
  TD_PARAM_OBJECT = 32,
};

// The path of a parameter is its name; that of a member within it has a TD_PARAM_MEMBER and the
// member's name behind it, that of an array's items a TD_PARAM_ITEMS.
#define TD_PARAM_MEMBER '\x1f'
#define TD_PARAM_ITEMS  '\x1e'

typedef struct {
  char *tool;     // owned
  char *key;      // owned, a path; NULL: the entry only says that the tool exists
  unsigned types; // TD_PARAM_*; 0: any
  unsigned at;    // its place among the tool's
} td_tool_param;

// Zeroed is empty.
typedef struct {
  td_tool_param *items; // owned, [n], sorted by tools and keys
  size_t n, cap;
  bool is_closed; // only these may be called
} td_tool_params;

// Adds the parameters of a checked function. They are found once all are sorted. Error: TD_ENOMEM,
// or the budget's.
td_status td_tool_params_add(td_tool_params *params, const cJSON *tool, td_budget *budget,
                             td_err *err);
void td_tool_params_sort(td_tool_params *params);
void td_tool_params_free(td_tool_params *params);

// The types of a property's schema, by td_json_schema_types.
struct td_schema_ctx;
unsigned td_tool_param_types(struct td_schema_ctx *ctx, const cJSON *schema);
// params may be NULL: nothing is known.
bool td_tool_params_has_tool(const td_tool_params *params, const char *tool);
bool td_tool_params_may_call(const td_tool_params *params, const char *tool);
// Whether the tool's parameters are known.
bool td_tool_params_lists(const td_tool_params *params, const char *tool);
// The types of a tool's parameter, and its place among the tool's; UINT_MAX: there is none.
unsigned td_tool_params_find(const td_tool_params *params, const char *tool, const char *key,
                             unsigned *at);

// Appends an argument that was written as text, as JSON: as the JSON it is if the types allow that,
// else as a string. Also takes Python's spelling of true, false and null, and of arrays and
// objects; of nothing, an empty array or object where it has to be one.
void td_tool_param_write(td_buf *out, unsigned types, const char *text, size_t len);
