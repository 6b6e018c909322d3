// src/api/parts.c - the text of a message's content, whatever its parts are and whichever protocol
// they are of. A model reads text alone, but what a client has sent stays in its history.
#include <string.h>

#include "api/api_impl.h"
#include "base/str.h"

#define MAX_NESTING 3 // parts in parts

const cJSON *td_api_asked(const cJSON *messages) {
  const cJSON *m = messages && messages->child ? messages->child->prev : NULL; // the last
  for (; m; m = m == messages->child ? NULL : m->prev) {
    const char *role = td_json_text(m, "role");
    if (!role) return NULL;
    if (strcmp(role, "user") == 0) return m;
    if (strcmp(role, "system") != 0 && strcmp(role, "developer") != 0) return NULL;
  }
  return NULL;
}

// The text of a part, if it is all of it. NULL: there is none.
static const char *text_of(const cJSON *part) {
  static const char *const keys[] = {"text", "refusal"};
  for (size_t i = 0; i < TD_COUNT(keys); i++)
    if (td_json_text(part, keys[i])) return td_json_text(part, keys[i]);
  const cJSON *source = td_json_get(part, "source"); // of a document
  const char *type = td_json_text(source, "type");
  if (type && strcmp(type, "text") == 0) return td_json_text(source, "data");
  return td_json_text(td_json_get(part, "resource"), "text"); // of MCP's tools
}

// The parts of which a part consists.
static const cJSON *parts_of(const cJSON *part) {
  const cJSON *content = td_json_get(part, "content");
  if (!content) content = td_json_get(td_json_get(part, "source"), "content");
  return cJSON_IsString(content) || cJSON_IsArray(content) ? content : NULL;
}

// Says what stood here.
static void add_note(td_buf *out, const cJSON *part, const char *type) {
  static const char *const kinds[][2] = {{"image", "image"},
                                         {"audio", "audio"},
                                         {"video", "video"},
                                         {"document", "document"},
                                         {"file", "document"}};
  static const char *const names[] = {"title", "filename", "name"};
  const char *kind = type, *name = td_json_text(td_json_get(part, "file"), "filename");
  if (strcmp(type, "tool_reference") == 0 && td_json_text(part, "tool_name")) {
    td_buf_printf(out, "[the tool %s can be called now]", td_json_text(part, "tool_name"));
    return;
  }
  for (size_t i = TD_COUNT(kinds); i-- > 0;)
    if (strstr(type, kinds[i][0])) kind = kinds[i][1];
  for (size_t i = 0; i < TD_COUNT(names) && !name; i++)
    name = td_json_text(part, names[i]);
  td_buf_printf(out, "[%.64s %.*s%somitted: it cannot be shown as text]", kind,
                name ? (int)strlen(name) : 0, name ? name : "", name ? " " : "");
}

static bool add_nested(td_buf *out, const cJSON *content, unsigned depth);

static void add_part(td_buf *out, const cJSON *part, unsigned depth) {
  const char *text = text_of(part), *type = td_json_text(part, "type");
  const cJSON *parts = parts_of(part);
  if (text)
    td_buf_str(out, text);
  else if (!parts || depth == MAX_NESTING || !add_nested(out, parts, depth + 1))
    add_note(out, part, type ? type : "a part");
}

// Returns false if there is nothing.
static bool add_nested(td_buf *out, const cJSON *content, unsigned depth) {
  if (cJSON_IsString(content)) {
    td_buf_str(out, content->valuestring);
    return true;
  }
  for (const cJSON *part = content->child; part; part = part->next) {
    if (part != content->child) td_buf_char(out, '\n');
    add_part(out, part, depth);
  }
  return content->child != NULL;
}

// Whether a part, or what it consists of, has text and nothing else.
static bool is_readable(const cJSON *part, unsigned depth) {
  const cJSON *parts = parts_of(part);
  if (text_of(part) || cJSON_IsString(parts)) return true;
  if (!parts || !parts->child || depth == MAX_NESTING) return false;
  for (const cJSON *p = parts->child; p; p = p->next)
    if (!is_readable(p, depth + 1)) return false;
  return true;
}

static td_status check_part(const cJSON *part, const char *where, td_api_error *error) {
  const char *type = td_json_text(part, "type");
  if (is_readable(part, 0)) return TD_OK;
  if (!cJSON_IsObject(part))
    return td_api_bad(error, where, "%s must be an object with a type", where);
  td_api_path at = td_api_member(where, "type");
  if (!type) return td_api_bad(error, at.text, "%s is missing or not a string", at.text);
  const bool is_text = td_ends_with(type, "text"), is_refusal = strcmp(type, "refusal") == 0;
  if (is_text || is_refusal) { // Responses: input_text and the like
    at = td_api_member(where, is_text ? "text" : type);
    return td_api_bad(error, at.text, "%s is missing or not a string", at.text);
  }
  // The first two are words by which Claude Code takes what it sent out of its history.
  const char *why = strstr(type, "image")      ? "Could not process image"
                    : strstr(type, "document") ? "the model does not support PDF input"
                                               : "not supported";
  return td_api_bad(error, at.text, "%s: %s: %.64s is not text, and the model reads only text",
                    at.text, why, type);
}

td_status td_api_add_part(td_buf *out, const cJSON *part, bool is_asked, const char *where,
                          td_api_error *error) {
  td_status st = is_asked ? check_part(part, where, error) : TD_OK;
  if (st == TD_OK) add_part(out, part, 0);
  return st;
}

td_status td_api_add_parts(td_buf *out, const cJSON *content, bool is_asked, const char *where,
                           td_api_error *error) {
  if (cJSON_IsString(content)) {
    td_buf_str(out, content->valuestring);
    return TD_OK;
  }
  if (!cJSON_IsArray(content))
    return td_api_bad(error, where, "%s must be a string or an array of parts", where);
  unsigned i = 0;
  for (const cJSON *part = content->child; part; part = part->next) {
    const td_api_path item = td_api_item(where, i++);
    if (part != content->child) td_buf_char(out, '\n');
    td_status st = td_api_add_part(out, part, is_asked, item.text, error);
    if (st != TD_OK) return st;
  }
  return TD_OK;
}

void td_api_add_omitted(td_buf *out, const char *type) {
  if (out->len) td_buf_char(out, '\n');
  add_note(out, NULL, type);
}
