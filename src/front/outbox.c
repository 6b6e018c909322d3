// src/front/outbox.c - cutting a request into ring records, and the queue of requests to send.
#include "front/outbox.h"

#include <string.h>

void td_outbox_enter(td_outbox *box, td_outgoing *out) {
  if (out->box) return;
  out->box = box;
  out->next = NULL;
  *(box->tail ? &box->tail->next : &box->head) = out;
  box->tail = out;
}

void td_outbox_leave(td_outgoing *out) {
  td_outbox *box = out->box;
  if (!box) return;
  td_outgoing **link = &box->head, *prev = NULL;
  while (*link != out) {
    prev = *link;
    link = &prev->next;
  }
  *link = out->next;
  if (box->tail == out) box->tail = prev;
  out->box = NULL;
}

void td_outgoing_rewind(td_outgoing *out) {
  out->cancel_sent = out->copies_sent = out->dry_sent = false;
  out->n_pages_sent = out->n_tokens_sent = out->n_bias_sent = out->n_grammar_sent = 0;
  out->n_images_sent = 0;
}

static uint32_t smaller(uint32_t a, uint32_t b) {
  return a < b ? a : b;
}

// The next record to send; false when everything has been sent.
static bool peek_record(const td_outgoing *out, td_wire_msg *msg) {
  const td_wire_submit *submit = &out->submit;
  *msg = (td_wire_msg){.request = out->id};
  uint32_t pages_left = submit->n_pages - out->n_pages_sent;
  uint32_t tokens_left = submit->n_prompt + submit->n_answer - out->n_tokens_sent;
  uint32_t bias_left = submit->n_bias - out->n_bias_sent;
  uint32_t grammar_left = submit->n_grammar - out->n_grammar_sent;
  uint32_t images_left = submit->n_images - out->n_images_sent;
  if (out->state == TD_REQUEST_CANCELED || out->state == TD_REQUEST_RECALLED) {
    msg->kind = TD_MSG_CANCEL;
    return !out->cancel_sent;
  }
  if (out->state == TD_REQUEST_SENDING) {
    msg->kind = TD_MSG_SUBMIT;
    msg->u.submit = *submit;
  } else if ((submit->flags & TD_SUBMIT_COPIES) && !out->copies_sent) {
    msg->kind = TD_MSG_COPIES;
    msg->u.copies = out->copies;
  } else if ((submit->flags & TD_SUBMIT_DRY) && !out->dry_sent) {
    msg->kind = TD_MSG_DRY;
    msg->u.dry = out->dry;
  } else if (pages_left) {
    msg->kind = TD_MSG_PAGES;
    msg->u.pages.n = smaller(pages_left, TD_WIRE_MAX_PAGES);
    memcpy(msg->u.pages.ids, out->pages + out->n_pages_sent,
           msg->u.pages.n * sizeof msg->u.pages.ids[0]);
  } else if (tokens_left) {
    msg->kind = TD_MSG_TOKENS;
    msg->u.tokens.n = smaller(tokens_left, TD_WIRE_MAX_TOKENS);
    memcpy(msg->u.tokens.ids, out->tokens + out->n_tokens_sent,
           msg->u.tokens.n * sizeof msg->u.tokens.ids[0]);
  } else if (bias_left) {
    msg->kind = TD_MSG_BIAS;
    msg->u.bias.n = smaller(bias_left, TD_WIRE_MAX_BIAS);
    memcpy(msg->u.bias.entries, out->bias + out->n_bias_sent,
           msg->u.bias.n * sizeof msg->u.bias.entries[0]);
  } else if (grammar_left) {
    msg->kind = TD_MSG_GRAMMAR;
    msg->u.grammar.n = smaller(grammar_left, TD_WIRE_MAX_GRAMMAR);
    memcpy(msg->u.grammar.text, out->grammar + out->n_grammar_sent, msg->u.grammar.n);
  } else if (images_left) {
    msg->kind = TD_MSG_IMAGES;
    msg->u.images.n = smaller(images_left, TD_WIRE_MAX_IMAGES);
    memcpy(msg->u.images.images, out->images + out->n_images_sent,
           msg->u.images.n * sizeof *out->images);
  }
  return msg->kind != 0;
}

static void note_sent(td_outgoing *out, const td_wire_msg *msg) {
  switch (msg->kind) {
  case TD_MSG_CANCEL: out->cancel_sent = true; break;
  case TD_MSG_SUBMIT: td_request_become(&out->state, TD_REQUEST_RUNNING, out->id); break;
  case TD_MSG_COPIES: out->copies_sent = true; break;
  case TD_MSG_DRY: out->dry_sent = true; break;
  case TD_MSG_PAGES: out->n_pages_sent += msg->u.pages.n; break;
  case TD_MSG_TOKENS: out->n_tokens_sent += msg->u.tokens.n; break;
  case TD_MSG_GRAMMAR: out->n_grammar_sent += msg->u.grammar.n; break;
  case TD_MSG_BIAS: out->n_bias_sent += msg->u.bias.n; break;
  case TD_MSG_IMAGES: out->n_images_sent += msg->u.images.n; break;
  }
}

void td_outbox_flush(td_outbox *box, td_supervisor *to) {
  while (box->head) {
    td_outgoing *out = box->head;
    td_wire_msg msg;
    if (!peek_record(out, &msg)) {
      td_outbox_leave(out);
      continue;
    }
    if (td_supervisor_send(to, &msg) != TD_OK) return;
    note_sent(out, &msg);
  }
}
