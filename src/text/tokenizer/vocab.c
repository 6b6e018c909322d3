// src/text/tokenizer/vocab.c - a hash table of tokens.
#include "text/tokenizer/vocab.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "text/tokenizer/hash.h"

void td_vocab_free(td_vocab *vocab) {
  td_buf_free(&vocab->text);
  free(vocab->entries);
  free(vocab->slots);
  *vocab = (td_vocab){0};
}

const char *td_vocab_text(const td_vocab *vocab, int32_t id, size_t *len) {
  *len = vocab->entries[id].len;
  return td_buf_text(&vocab->text) + vocab->entries[id].begin;
}

uint32_t td_vocab_flags(const td_vocab *vocab, int32_t id) {
  return id >= 0 && id < vocab->n_ids ? vocab->entries[id].flags : 0;
}

// The slot that holds text, or the free slot for it.
static uint32_t find_slot(const td_vocab *vocab, const char *text, size_t len) {
  uint32_t mask = vocab->n_slots - 1, slot = (uint32_t)td_hash_bytes(text, len) & mask;
  for (;; slot = (slot + 1) & mask) {
    int32_t id = vocab->slots[slot];
    if (id < 0) return slot;
    size_t n;
    const char *other = td_vocab_text(vocab, id, &n);
    if (n == len && memcmp(other, text, len) == 0) return slot;
  }
}

int32_t td_vocab_find(const td_vocab *vocab, const char *text, size_t len) {
  return vocab->n_slots ? vocab->slots[find_slot(vocab, text, len)] : -1;
}

int32_t td_vocab_find_plain(const td_vocab *vocab, const char *text, size_t len) {
  int32_t id = td_vocab_find(vocab, text, len);
  uint32_t kind = td_vocab_flags(vocab, id) & (TD_VOCAB_MODEL | TD_VOCAB_SPECIAL);
  return kind == TD_VOCAB_MODEL ? id : -1;
}

static td_status grow_slots(td_vocab *vocab, td_err *err) {
  uint32_t n_slots = vocab->n_slots ? vocab->n_slots * 2 : 1024;
  int32_t *slots = malloc(n_slots * sizeof *slots);
  if (!slots) return td_fail(err, TD_ENOMEM, "out of memory for %u tokens", vocab->n_tokens);
  memset(slots, 0xFF, n_slots * sizeof *slots);
  free(vocab->slots);
  vocab->slots = slots;
  vocab->n_slots = n_slots;
  for (int32_t id = 0; id < vocab->n_ids; id++) {
    if (!vocab->entries[id].flags) continue;
    size_t len;
    const char *text = td_vocab_text(vocab, id, &len);
    slots[find_slot(vocab, text, len)] = id;
  }
  return TD_OK;
}

static td_status grow_entries(td_vocab *vocab, int32_t id, td_err *err) {
  if (id >= vocab->cap) {
    int32_t cap = vocab->cap ? vocab->cap : 1024;
    while (cap <= id)
      cap *= 2;
    td_vocab_entry *grown = realloc(vocab->entries, (size_t)cap * sizeof *grown);
    if (!grown) return td_fail(err, TD_ENOMEM, "out of memory for %d tokens", cap);
    memset(grown + vocab->cap, 0, (size_t)(cap - vocab->cap) * sizeof *grown);
    vocab->entries = grown;
    vocab->cap = cap;
  }
  if (id >= vocab->n_ids) vocab->n_ids = id + 1;
  return TD_OK;
}

static td_status insert(td_vocab *vocab, int32_t id, const char *text, size_t len, uint32_t flags,
                        td_err *err) {
  td_status st = grow_entries(vocab, id, err);
  if (st == TD_OK && (vocab->n_tokens + 1) * 2 > vocab->n_slots) st = grow_slots(vocab, err);
  if (st != TD_OK) return st;
  uint32_t slot = find_slot(vocab, text, len);
  size_t begin = vocab->text.len;
  td_buf_add(&vocab->text, text, len);
  st = td_buf_status(&vocab->text, err);
  if (st != TD_OK) return st;
  vocab->entries[id] = (td_vocab_entry){
      .begin = (uint32_t)begin, .len = (uint32_t)len, .flags = flags};
  vocab->slots[slot] = id;
  vocab->n_tokens++;
  return TD_OK;
}

td_status td_vocab_add(td_vocab *vocab, double id_value, const char *text, size_t len,
                       uint32_t flags, td_err *err) {
  int shown = len < 80 ? (int)len : 80;
  if (!(id_value >= 0 && id_value < TD_VOCAB_MAX_ID && id_value == floor(id_value))) {
    return td_fail(err, TD_EFORMAT, "\"%.*s\": the id must be a whole number from 0 to %d", shown,
                   text, TD_VOCAB_MAX_ID - 1);
  }
  int32_t id = (int32_t)id_value, same = td_vocab_find(vocab, text, len);
  if (same >= 0 && same != id)
    return td_fail(err, TD_EFORMAT, "\"%.*s\" has two ids, %d and %d", shown, text, same, id);
  if (same == id) {
    vocab->entries[id].flags |= flags;
    return TD_OK;
  }
  if (td_vocab_flags(vocab, id)) {
    size_t n;
    const char *other = td_vocab_text(vocab, id, &n);
    return td_fail(err, TD_EFORMAT, "id %d stands for both \"%.*s\" and \"%.*s\"", id,
                   n < 80 ? (int)n : 80, other, shown, text);
  }
  return insert(vocab, id, text, len, flags, err);
}

td_status td_vocab_read(td_vocab *vocab, const cJSON *model_vocab, td_err *err) {
  if (!cJSON_IsObject(model_vocab))
    return td_fail(err, TD_EFORMAT, "model.vocab must be an object");
  for (const cJSON *item = model_vocab->child; item; item = item->next) {
    double id = cJSON_IsNumber(item) ? item->valuedouble : -1;
    size_t len = strlen(item->string);
    td_status st = TD_OK;
    if (td_vocab_find(vocab, item->string, len) >= 0)
      st = td_fail(err, TD_EFORMAT, "\"%.80s\" is listed twice", item->string);
    else
      st = td_vocab_add(vocab, id, item->string, len, TD_VOCAB_MODEL, err);
    if (st == TD_ENOMEM) return st;
    if (st != TD_OK) return td_err_prefix(err, "model.vocab");
  }
  return TD_OK;
}
