// src/api/parts.c - the text of a message's content, and for models that see its images, whatever
// its parts are and whichever protocol they are of. What a model cannot read stays in the client's
// history.
#include <stdlib.h>
#include <string.h>

#include "api/api_impl.h"
#include "base/base64.h"
#include "base/grow.h"
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

// ---- images -------------------------------------------------------------------------------------

// What a part says of its image, in whichever protocol's form: data or an address. NULL: it is
// none.
static const char *image_of(const cJSON *part) {
  const char *type = td_json_text(part, "type");
  const cJSON *url = td_json_get(part, "image_url"), *source = td_json_get(part, "source");
  if (!type || !strstr(type, "image")) return NULL;
  if (cJSON_IsString(url)) return url->valuestring;
  const char *text = td_json_text(url, "url");
  if (!text) text = td_json_text(source, "data");
  if (!text) text = td_json_text(source, "url");
  return text ? text : td_json_text(part, "data"); // of MCP's tools and Ollama's messages
}

// The base64 in it; NULL: it is an address.
static const char *base64_of(const char *image) {
  static const char mark[] = ";base64,";
  if (!image || strstr(image, "://")) return NULL;
  if (strncmp(image, "data:", 5) != 0) return image;
  const char *data = strstr(image, mark);
  return data ? data + sizeof mark - 1 : NULL;
}

static bool is_image(const td_api_content *c, const cJSON *part) {
  return c->sees && base64_of(image_of(part));
}

enum { LOW_DETAIL = 512 * 512, MOST_PIXELS = 1 << 30 };

// Limits of a part, or of its image_url, as Qwen's clients send them; detail: low, as OpenAI's do.
static td_status read_limits(td_api_image *image, const cJSON *part, td_err *err) {
  const cJSON *from[] = {part, td_json_get(part, "image_url")};
  for (size_t i = 0; i < TD_COUNT(from); i++) {
    const char *detail = td_json_text(from[i], "detail");
    if (!cJSON_IsObject(from[i])) continue;
    if (detail && !strcmp(detail, "low")) image->max_pixels = LOW_DETAIL;
    td_status st = td_json_get_int(from[i], "min_pixels", 1, MOST_PIXELS, &image->min_pixels, err);
    if (st == TD_OK)
      st = td_json_get_int(from[i], "max_pixels", 1, MOST_PIXELS, &image->max_pixels, err);
    if (st != TD_OK) return st;
  }
  if (image->max_pixels && image->min_pixels > image->max_pixels)
    return td_fail(err, TD_EINVAL, "min_pixels is over max_pixels");
  return TD_OK;
}

static td_status keep_image(td_api_request *r, const cJSON *part, const char *where,
                            td_api_error *error) {
  const char *base64 = base64_of(image_of(part));
  td_api_image limits = {.min_pixels = 0};
  td_buf bytes = TD_BUF_INIT;
  td_sha256 sha;
  td_err err;
  const size_t n = strlen(base64);
  if (r->n_images == TD_API_MAX_IMAGES)
    return td_api_wrong(error, where, ": more than %d images", TD_API_MAX_IMAGES);
  if (n / 4 * 3 > TD_API_MAX_IMAGE_BYTES) {
    return td_api_wrong(error, where, ": an image of more than %u MB: send a smaller one",
                        TD_API_MAX_IMAGE_BYTES >> 20);
  }
  if (read_limits(&limits, part, &err) != TD_OK) return td_api_wrong(error, where, ": %s", err.msg);
  if (!td_base64_decode(&bytes, base64, n)) {
    td_buf_free(&bytes);
    return td_api_wrong(error, where, ": Could not process image: its data is not base64");
  }
  if (!TD_GROW(r->images, r->n_images, r->cap_images, 4)) bytes.failed = true;
  char *from = strdup(where);
  if (bytes.failed || !from) {
    td_buf_free(&bytes);
    free(from);
    td_fail(&err, TD_ENOMEM, "out of memory");
    return td_api_fail_err(error, NULL, &err);
  }
  td_api_image *image = &r->images[r->n_images++];
  *image = limits;
  image->bytes = bytes;
  image->where = from;
  td_sha256_begin(&sha);
  td_sha256_add(&sha, bytes.data, bytes.len);
  if (limits.min_pixels || limits.max_pixels) {
    td_sha256_add(&sha, &limits.min_pixels, sizeof limits.min_pixels);
    td_sha256_add(&sha, &limits.max_pixels, sizeof limits.max_pixels);
  }
  td_sha256_end(&sha, &image->file);
  return TD_OK;
}

// Makes the text so far a part.
static void end_text(td_api_content *c) {
  td_json_writer w = TD_JSON_WRITER(&c->parts);
  if (!c->text.len) return;
  if (c->parts.len) td_buf_char(&c->parts, ',');
  td_jw_add(&w, "{'type': 'text', 'text': %p}", &c->text);
  td_buf_clear(&c->text);
  c->n_parts++;
}

// The template sees where an image is. Its file's digest stands for it among turns (turn.h).
static td_status add_image(td_api_content *c, const cJSON *part, const char *where,
                           td_api_error *error) {
  td_json_writer w = TD_JSON_WRITER(&c->parts);
  td_api_request *r = c->request;
  char hex[TD_DIGEST_HEX];
  end_text(c);
  if (c->parts.len) td_buf_char(&c->parts, ',');
  if (c->origins) {
    const td_api_path at = td_api_member(c->message.text, "content");
    td_buf_printf(c->origins, "%s %s\n", td_api_item(at.text, c->n_parts).text, where);
  }
  c->n_parts++;
  if (!r) {
    td_api_write_json(&w, NULL, part);
    return TD_OK;
  }
  td_status st = r->n_shown < r->n_images ? TD_OK : keep_image(r, part, where, error);
  if (st != TD_OK) return st;
  td_digest_hex(hex, &r->images[r->n_shown++].file);
  td_jw_add(&w, "{'type': 'image', 'image': %s}", hex);
  return TD_OK;
}

void td_api_write_content(td_json_writer *w, td_api_content *c) {
  if (c->parts.len) {
    end_text(c);
    td_buf_char(&c->parts, ']');
    td_jw_begin_array(w, "content");
    td_buf_add(w->out, c->parts.data, c->parts.len - 1);
    td_jw_end_array(w);
  } else {
    td_jw_buf(w, "content", &c->text);
  }
  w->out->failed |= c->text.failed || c->parts.failed;
  td_api_content_free(c);
}

void td_api_content_free(td_api_content *c) {
  td_buf_free(&c->text);
  td_buf_free(&c->parts);
}

// ---- parts --------------------------------------------------------------------------------------

static td_status add_nested(td_api_content *c, const cJSON *content, unsigned depth,
                            const char *where, td_api_error *error);

static td_status add_part(td_api_content *c, const cJSON *part, unsigned depth, const char *where,
                          td_api_error *error) {
  const char *text = text_of(part), *type = td_json_text(part, "type");
  const cJSON *parts = parts_of(part);
  if (is_image(c, part)) return add_image(c, part, where, error);
  if (parts && depth < MAX_NESTING && (parts->child || cJSON_IsString(parts)) && !text)
    return add_nested(c, parts, depth + 1, where, error);
  if (text)
    td_buf_str(&c->text, text);
  else
    add_note(&c->text, part, type ? type : "a part");
  return TD_OK;
}

// Texts are joined with line feeds; images stand by themselves.
static td_status add_nested(td_api_content *c, const cJSON *content, unsigned depth,
                            const char *where, td_api_error *error) {
  if (cJSON_IsString(content)) {
    td_buf_str(&c->text, content->valuestring);
    return TD_OK;
  }
  td_status st = TD_OK;
  unsigned i = 0;
  for (const cJSON *part = content->child; part && st == TD_OK; part = part->next) {
    const bool is_behind_text = part->prev->next && !is_image(c, part->prev);
    if (is_behind_text && !is_image(c, part)) td_buf_char(&c->text, '\n');
    st = add_part(c, part, depth, depth ? where : td_api_item(where, i++).text, error);
  }
  return st;
}

// Whether a part, or what it consists of, has what the model reads and nothing else.
static bool is_readable(const td_api_content *c, const cJSON *part, unsigned depth) {
  const cJSON *parts = parts_of(part);
  if (text_of(part) || cJSON_IsString(parts) || is_image(c, part)) return true;
  if (!parts || !parts->child || depth == MAX_NESTING) return false;
  for (const cJSON *p = parts->child; p; p = p->next)
    if (!is_readable(c, p, depth + 1)) return false;
  return true;
}

static td_status check_part(const td_api_content *c, const cJSON *part, const char *where,
                            td_api_error *error) {
  const char *type = td_json_text(part, "type");
  if (is_readable(c, part, 0)) return TD_OK;
  if (!cJSON_IsObject(part)) return td_api_wrong(error, where, "must be an object with a type");
  td_api_path at = td_api_member(where, "type");
  if (!type) return td_api_wrong(error, at.text, "is missing or not a string");
  const bool is_text = td_ends_with(type, "text"), is_refusal = strcmp(type, "refusal") == 0;
  if (is_text || is_refusal) { // Responses: input_text and the like
    at = td_api_member(where, is_text ? "text" : type);
    return td_api_wrong(error, at.text, "is missing or not a string");
  }
  if (c->sees && strstr(type, "image")) {
    return td_api_wrong(error, where,
                        ": Could not process image: images are not fetched; send the image itself, "
                        "as data:image/png;base64,... or in the protocol's own form");
  }
  // The first two are words by which Claude Code takes what it sent out of its history.
  const char *why = strstr(type, "image")      ? "Could not process image"
                    : strstr(type, "document") ? "the model does not support PDF input"
                                               : "not supported";
  return td_api_wrong(error, at.text, ": %s: %.64s is not text, and the model reads only text%s",
                      why, type, c->sees ? " and images" : "");
}

td_status td_api_add_shown_part(td_api_content *out, const cJSON *part, bool is_asked,
                                const char *where, td_api_error *error) {
  td_status st = is_asked ? check_part(out, part, where, error) : TD_OK;
  if (st == TD_OK && out->text.len && !is_image(out, part)) td_buf_char(&out->text, '\n');
  return st == TD_OK ? add_part(out, part, 0, where, error) : st;
}

td_status td_api_add_content(td_api_content *out, const cJSON *content, bool is_asked,
                             const char *where, td_api_error *error) {
  td_status st = TD_OK;
  unsigned i = 0;
  if (!cJSON_IsString(content) && !cJSON_IsArray(content))
    return td_api_wrong(error, where, "must be a string or an array of parts");
  for (const cJSON *part = content->child; part && is_asked && st == TD_OK; part = part->next)
    st = check_part(out, part, td_api_item(where, i++).text, error);
  return st == TD_OK ? add_nested(out, content, 0, where, error) : st;
}

td_status td_api_add_part(td_buf *out, const cJSON *part, bool is_asked, const char *where,
                          td_api_error *error) {
  td_api_content c = {.text = *out};
  td_status st = td_api_add_shown_part(&c, part, is_asked, where, error);
  *out = c.text;
  return st;
}

td_status td_api_add_parts(td_buf *out, const cJSON *content, bool is_asked, const char *where,
                           td_api_error *error) {
  td_api_content c = {.text = *out};
  td_status st = td_api_add_content(&c, content, is_asked, where, error);
  *out = c.text;
  return st;
}

void td_api_add_omitted(td_buf *out, const char *type) {
  if (out->len) td_buf_char(out, '\n');
  add_note(out, NULL, type);
}
