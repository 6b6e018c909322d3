// src/cli/conversation.c - the messages of a chat.
#include "cli/conversation.h"

#include <stdlib.h>
#include <string.h>

#include <nettle/base64.h>

#include "base/fs.h"
#include "base/grow.h"
#include "base/json_parse.h"
#include "image/image.h"

#define MAX_FILE_BYTES  (1u << 28)
#define MAX_IMAGE_BYTES (1u << 25)

// ---- images ---------------------------------------------------------------------------------

static void free_images(td_attached_list *list) {
  for (size_t i = 0; i < list->n; i++) {
    free(list->items[i].name);
    free(list->items[i].url);
    free(list->items[i].rgb);
  }
  free(list->items);
  *list = (td_attached_list){0};
}

// Takes url.
static td_status add_image(td_attached_list *list, const char *name, char *url, td_err *err) {
  const td_attached image = {.name = strdup(name), .url = url};
  if (!url || !image.name || !TD_GROW(list->items, list->n, list->cap, 4)) {
    free(image.name);
    free(url);
    return td_fail(err, TD_ENOMEM, "out of memory");
  }
  list->items[list->n++] = image;
  return TD_OK;
}

td_status td_conversation_attach(td_conversation *c, const char *path, td_err *err) {
  td_buf file = TD_BUF_INIT, url = TD_BUF_INIT;
  td_status st = td_file_read(&file, path, MAX_IMAGE_BYTES, err);
  const uint8_t *bytes = (const uint8_t *)td_buf_text(&file);
  const char *type = td_image_type(bytes, file.len);
  if (st == TD_OK && !type)
    st = td_fail(err, TD_EUNSUPPORTED, "%s: no PNG, JPEG or WebP file: convert it", path);
  if (st == TD_OK) {
    const size_t n = BASE64_ENCODE_RAW_LENGTH(file.len);
    td_buf_printf(&url, "data:image/%s;base64,", type);
    td_buf_reserve_exact(&url, n);
    if (!url.failed) {
      base64_encode_raw(url.data + url.len, file.len, bytes);
      url.data[url.len + n] = '\0';
    }
    const char *slash = strrchr(path, '/');
    st = td_buf_status(&url, err);
    if (st == TD_OK) st = add_image(&c->images, slash ? slash + 1 : path, url.data, err);
    if (st == TD_OK) url = TD_BUF_INIT;
  }
  td_buf_free(&file);
  td_buf_free(&url);
  return st;
}

// ---- messages -------------------------------------------------------------------------------

void td_conversation_free(td_conversation *c) {
  td_conversation_cut(c, 0);
  td_buf_free(&c->system);
  free(c->messages);
  *c = (td_conversation){0};
}

td_message *td_conversation_add(td_conversation *c, td_role role) {
  if (!TD_GROW(c->messages, c->n, c->cap, 16)) return NULL;
  td_message *m = &c->messages[c->n++];
  *m = (td_message){.role = role};
  if (role == TD_ROLE_USER) {
    m->images = c->images;
    c->images = (td_attached_list){0};
  }
  return m;
}

void td_conversation_cut(td_conversation *c, size_t n) {
  while (c->n > n) {
    td_message *last = &c->messages[--c->n];
    td_buf_free(&last->content);
    td_buf_free(&last->reasoning);
    free_images(&last->images);
  }
  free_images(&c->images);
  if (c->first > c->n) c->first = c->n;
}

bool td_conversation_slide(td_conversation *c) {
  for (size_t i = c->first + 1; i < c->n; i++) {
    if (c->messages[i].role != TD_ROLE_USER) continue;
    c->first = i;
    return true;
  }
  return false;
}

// As parts, which a model sees.
static void write_seen(td_json_writer *w, const td_message *m, td_conversation_form form) {
  td_jw_begin_array(w, "content");
  for (size_t i = 0; i < m->images.n; i++) {
    td_jw_add(w, "{'type': %s", form == TD_FOR_SERVER ? "image_url" : "image");
    if (form == TD_FOR_SERVER) td_jw_add(w, "'image_url': {'url': %s}", m->images.items[i].url);
    td_jw_end_object(w);
  }
  td_jw_add(w, "{'type': 'text'");
  td_jw_str_len(w, "text", td_buf_text(&m->content), m->content.len);
  td_jw_add(w, "}]");
}

// As the chat page keeps them.
static void write_files(td_json_writer *w, const td_attached_list *images) {
  td_jw_begin_array(w, "files");
  for (size_t i = 0; i < images->n; i++)
    td_jw_add(w, "{'name': %s, 'image': %s}", images->items[i].name, images->items[i].url);
  td_jw_end_array(w);
}

static void write_message(td_json_writer *w, const td_message *m, td_conversation_form form) {
  td_jw_add(w, "{'role': %s", m->role == TD_ROLE_USER ? "user" : "assistant");
  if (m->images.n && form != TD_FOR_FILE)
    write_seen(w, m, form);
  else
    td_jw_str_len(w, "content", td_buf_text(&m->content), m->content.len);
  if (m->images.n && form == TD_FOR_FILE) write_files(w, &m->images);
  if (m->reasoning.len)
    td_jw_str_len(w, "reasoning_content", td_buf_text(&m->reasoning), m->reasoning.len);
  td_jw_end_object(w);
}

void td_conversation_write(const td_conversation *c, td_json_writer *w, td_conversation_form form) {
  td_jw_begin_array(w, "messages");
  if (c->system.len) {
    td_jw_add(w, "{'role': 'system'");
    td_jw_str_len(w, "content", td_buf_text(&c->system), c->system.len);
    td_jw_end_object(w);
  }
  for (size_t i = form == TD_FOR_FILE ? 0 : c->first; i < c->n; i++)
    write_message(w, &c->messages[i], form);
  td_jw_end_array(w);
}

// ---- files ----------------------------------------------------------------------------------

static td_status read_text(td_buf *out, const cJSON *message, const char *key, td_err *err) {
  const char *text = "";
  td_status st = td_json_get_str(message, key, &text, err);
  if (st == TD_OK) td_buf_str(out, text);
  return st == TD_OK ? td_buf_status(out, err) : st;
}

static td_status read_images(td_attached_list *out, const cJSON *message, td_err *err) {
  const cJSON *files = td_json_get(message, "files");
  td_status st = TD_OK;
  for (const cJSON *f = files ? files->child : NULL; st == TD_OK && f; f = f->next) {
    const char *name = td_json_text(f, "name"), *url = td_json_text(f, "image");
    if (!url) continue; // its text is in the message's
    if (strncmp(url, "data:image/", strlen("data:image/")) != 0)
      return td_fail(err, TD_EFORMAT, "its image is no data URL");
    st = add_image(out, name ? name : "image", strdup(url), err);
  }
  return st;
}

static td_status read_message(td_conversation *c, const cJSON *message, td_err *err) {
  const char *role = "";
  td_status st = td_json_get_str(message, "role", &role, err);
  if (st != TD_OK) return st;
  if (!strcmp(role, "system")) return read_text(&c->system, message, "content", err);
  if (strcmp(role, "user") != 0 && strcmp(role, "assistant") != 0)
    return td_fail(err, TD_EFORMAT, "its role is not system, user or assistant");
  td_message *m = td_conversation_add(c, role[0] == 'u' ? TD_ROLE_USER : TD_ROLE_ASSISTANT);
  if (!m) return td_fail(err, TD_ENOMEM, "out of memory");
  st = read_text(&m->content, message, "content", err);
  if (st == TD_OK) st = read_text(&m->reasoning, message, "reasoning_content", err);
  if (st == TD_OK && !m->reasoning.len) st = read_text(&m->reasoning, message, "reasoning", err);
  if (st == TD_OK) st = read_images(&m->images, message, err);
  return st;
}

td_status td_conversation_read(td_conversation *c, const char *path, td_err *err) {
  cJSON *root = NULL;
  td_status st = td_json_parse_file(&root, path, MAX_FILE_BYTES, err);
  if (st != TD_OK) return st;
  const cJSON *messages = td_json_get(cJSON_IsArray(root) ? root->child : root, "messages");
  td_conversation read = {0};
  int n = 0;
  if (!cJSON_IsArray(messages))
    st = td_fail(err, TD_EFORMAT, "%s: holds no list of messages", path);
  for (const cJSON *m = messages ? messages->child : NULL; st == TD_OK && m; m = m->next, n++) {
    st = read_message(&read, m, err);
    if (st != TD_OK) td_err_prefix(err, "%s: message %d", path, n);
  }
  cJSON_Delete(root);
  td_conversation *gone = st == TD_OK ? c : &read;
  td_conversation_free(gone);
  if (st == TD_OK) *c = read;
  return st;
}
