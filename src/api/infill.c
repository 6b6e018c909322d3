// src/api/infill.c - the spellings of FIM tokens, and prompts made of them.
#include "api/infill.h"

#include <string.h>

static bool has(const td_tokenizer *tok, const char *token) {
  return token && td_tokenizer_find(tok, token, strlen(token)) >= 0;
}

const td_infill_tokens *td_infill_find(const td_chat *chat) {
  static const td_infill_tokens all[] = {
      // Qwen, newer Granite
      {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"},
      {"<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", NULL, NULL},    // DeepSeek
      {"<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", NULL, NULL}, // GLM
      // StarCoder 2; StarCoder, older Granite
      {"<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>"},
      {"<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<reponame>", "<filename>"},
      {"<fim-prefix>", "<fim-suffix>", "<fim-middle>", NULL, NULL}, // SantaCoder
      {"▁<PRE>", "▁<SUF>", "▁<MID>", NULL, NULL},                   // Code Llama
      {"<PRE>", "<SUF>", "<MID>", NULL, NULL},
  };
  const td_infill_tokens *found = NULL;
  const td_tokenizer *tok = chat ? td_chat_tokenizer(chat) : NULL;
  for (size_t i = 0; tok && i < TD_COUNT(all); i++) {
    const td_infill_tokens *t = &all[i];
    if (!has(tok, t->before) || !has(tok, t->after) || !has(tok, t->fill)) continue;
    if (!found || has(tok, t->file)) found = t;
  }
  return found;
}

// Appends the control token, if the tokenizer has it, and the plain text behind it.
static td_status add(const td_chat *chat, const char *token, const char *text, size_t len,
                     td_token_ids *out, td_err *err) {
  const td_tokenizer *tok = td_chat_tokenizer(chat);
  const int32_t id = token ? td_tokenizer_find(tok, token, strlen(token)) : -1;
  td_status st = id >= 0 ? td_token_ids_push(out, id, err) : TD_OK;
  return st == TD_OK && len ? td_tokenizer_encode(tok, text, len, 0, out, err) : st;
}

static td_status add_file(const td_chat *chat, const td_infill_tokens *t,
                          const td_infill_file *file, td_token_ids *out, td_err *err) {
  static const char snippet[] = "\n\n--- snippet ---\n\n";
  const bool is_named = has(td_chat_tokenizer(chat), t->file);
  td_status st = is_named ? add(chat, t->file, file->name, strlen(file->name), out, err)
                          : add(chat, NULL, snippet, sizeof snippet - 1, out, err);
  if (st == TD_OK && is_named) st = add(chat, NULL, "\n", 1, out, err);
  return st == TD_OK ? add(chat, NULL, file->text, strlen(file->text), out, err) : st;
}

// The files in front, behind a repository's name where the model has a token for it. From the last
// to the first they are taken while they fit.
static td_status add_files(const td_chat *chat, const td_infill_tokens *t, const td_infill *f,
                           size_t max_tokens, td_token_ids *out, td_err *err) {
  static const char repo[] = "project\n", here[] = "filename\n";
  size_t n_tokens = 0;
  uint32_t first = f->n_files;
  td_status st = TD_OK;
  while (first > 0 && st == TD_OK) {
    td_token_ids ids = {0};
    st = add_file(chat, t, &f->files[first - 1], &ids, err);
    n_tokens += ids.n;
    td_token_ids_free(&ids);
    if (n_tokens > max_tokens) break;
    first--;
  }
  const td_tokenizer *tok = td_chat_tokenizer(chat);
  if (st == TD_OK && first < f->n_files && has(tok, t->repo))
    st = add(chat, t->repo, repo, sizeof repo - 1, out, err);
  for (uint32_t i = first; i < f->n_files && st == TD_OK; i++)
    st = add_file(chat, t, &f->files[i], out, err);
  if (st == TD_OK && first < f->n_files && has(tok, t->file))
    st = add(chat, t->file, here, sizeof here - 1, out, err);
  return st;
}

td_status td_infill_encode(const td_chat *chat, const td_infill_tokens *t, const td_infill *f,
                           size_t max_tokens, td_token_ids *out, td_err *err) {
  td_token_ids around = {.most = out->most};
  td_status st = add(chat, t->before, f->before, f->n_before, &around, err);
  if (st == TD_OK) st = add(chat, t->after, f->after, f->n_after, &around, err);
  if (st == TD_OK) st = add(chat, t->fill, "", 0, &around, err);
  if (st == TD_OK) st = td_chat_encode_plain(chat, "", 0, !f->is_bare, out, err);
  const size_t n_around = around.n + around.n_cut;
  if (st == TD_OK && n_around < max_tokens)
    st = add_files(chat, t, f, max_tokens - n_around, out, err);
  if (st == TD_OK) st = td_token_ids_add(out, around.ids, around.n, err);
  out->n_cut += around.n_cut;
  td_token_ids_free(&around);
  return st;
}
