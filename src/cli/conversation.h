// src/cli/conversation.h - the messages of a chat, kept apart from how a template renders them.
#pragma once

#include "base/buf.h"
#include "base/json_write.h"
#include "base/status.h"
#include "tandem/image.h"

// An image of a user's message.
typedef struct {
  char *name;
  char *url; // data:image/png;base64,...
  // For a model opened here (run_images.c), once it is prepared.
  td_image_input input;
  uint8_t *rgb; // owned; NULL: it is not
} td_attached;

typedef struct {
  td_attached *items;
  size_t n, cap;
} td_attached_list;

typedef enum { TD_ROLE_USER, TD_ROLE_ASSISTANT } td_role;

typedef struct {
  td_role role;
  td_buf content;
  td_buf reasoning; // of the assistant; templates decide which of it they render again
  td_attached_list images;
} td_message;

// Zero-initialize. Callers may read the members.
typedef struct {
  td_buf system; // empty: no system message
  td_message *messages;
  size_t n, cap;
  size_t first;            // messages before this one are kept, but no longer sent to the model
  td_attached_list images; // of the user's next message
} td_conversation;

void td_conversation_free(td_conversation *c);
// Attaches an image file to the user's next message.
td_status td_conversation_attach(td_conversation *c, const char *path, td_err *err);
// Appends a message whose buffers are empty; the user's takes what is attached. It is valid until
// the next call. NULL: out of memory.
td_message *td_conversation_add(td_conversation *c, td_role role);
// Keeps the system message and the first n messages; nothing is attached any more.
void td_conversation_cut(td_conversation *c, size_t n);
// Stops sending the oldest turn, from a user's message to the one before the next. False: only one
// turn is left.
bool td_conversation_slide(td_conversation *c);
typedef enum {
  TD_FOR_TEMPLATE, // what is sent to the model; of images that they are there
  TD_FOR_SERVER,
  TD_FOR_FILE, // all there is
} td_conversation_form;
// Writes the member "messages".
void td_conversation_write(const td_conversation *c, td_json_writer *w, td_conversation_form form);
// Replaces c by the conversation in a file: an object with messages, as td_conversation_write makes
// it, or the first of a list of conversations, as the chat page exports. On an error c is as
// before.
td_status td_conversation_read(td_conversation *c, const char *path, td_err *err);
