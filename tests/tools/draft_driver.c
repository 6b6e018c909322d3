// tests/tools/draft_driver.c - what a model's layer of multi-token prediction says behind a text.
// usage: draft_driver MODEL_DIR ID,ID,... N_DRAFTS OUT
// The last id is the token that was drawn; the layer guesses those after it. Writes the logits of
// each guess to OUT, f32 [N_DRAFTS][n_vocab], and prints the guesses.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"

enum { MOST_TOKENS = 256, MAX_DRAFTS = 8, N_PAGES = 16 };

typedef struct {
  td_model *model;
  td_dev *dev;
  td_engine *engine;
  int32_t tokens[MOST_TOKENS], pages[N_PAGES], guesses[MAX_DRAFTS];
  uint32_t n_tokens;
} driver;

static td_status open_all(driver *d, const char *dir, td_err *err) {
  td_status st = td_model_open(&d->model, dir, err);
  if (st == TD_OK && !td_model_use_mtp(d->model))
    st = td_fail(err, TD_EUNSUPPORTED, "%s: no layer of multi-token prediction", dir);
  const td_dev_opts cpu = {.kind = "cpu", .n_threads = 2, .activations = TD_ACTIVATIONS_F32};
  if (st == TD_OK) st = td_dev_open(&d->dev, &cpu, err);
  if (st != TD_OK) return st;
  const td_kv_layout layout = td_kv_layout_of(td_model_config_of(d->model), TD_F32, 0);
  const td_engine_opts opts = {.n_pages = N_PAGES,
                               .page_tokens = layout.page_tokens,
                               .max_step_tokens = MOST_TOKENS,
                               .max_step_seqs = 1,
                               .has_draft_layer = true,
                               .max_seq_tokens = N_PAGES * layout.page_tokens,
                               .kv_dtype = TD_F32};
  return td_engine_open(&d->engine, d->model, d->dev, &opts, err);
}

// The text once more, and n_drafts guesses: logits are those of the last.
static td_status guess(driver *d, uint32_t n_drafts, td_err *err) {
  const td_step_seq seq = {.tokens = d->tokens,
                           .n_tokens = d->n_tokens - 1,
                           .pages = d->pages,
                           .n_pages = N_PAGES,
                           .want = TD_WANT_LAST};
  const td_draft_seq draft = {.next = d->tokens + 1, .n_next = d->n_tokens - 1, .out = d->guesses};
  const td_draft_step step = {
      .of = d->engine, .seqs = &seq, .drafts = &draft, .n_seqs = 1, .n_drafts = n_drafts};
  td_status st = td_engine_step(d->engine, &seq, 1, err);
  return st == TD_OK ? td_engine_draft(d->engine, &step, err) : st;
}

static td_status run(driver *d, uint32_t n_drafts, FILE *out, td_err *err) {
  const uint32_t n_vocab = td_model_config_of(d->model)->n_vocab;
  for (uint32_t n = 1; n <= n_drafts; n++) {
    td_status st = guess(d, n, err);
    if (st != TD_OK) return st;
    if (fwrite(td_engine_logits(d->engine), sizeof(float), n_vocab, out) != n_vocab)
      return td_fail(err, TD_EIO, "cannot write");
  }
  for (uint32_t i = 0; i < n_drafts; i++)
    printf("%d\n", d->guesses[i]);
  return TD_OK;
}

int main(int argc, char **argv) {
  if (argc != 5) return 2;
  driver d = {.n_tokens = 0};
  td_err err;
  for (char *at = strtok(argv[2], ","); at && d.n_tokens < MOST_TOKENS; at = strtok(NULL, ","))
    d.tokens[d.n_tokens++] = atoi(at);
  for (int i = 0; i < N_PAGES; i++)
    d.pages[i] = i;
  const uint32_t n_drafts = (uint32_t)atoi(argv[3]);
  FILE *out = fopen(argv[4], "wb");
  if (!out || d.n_tokens < 2 || n_drafts > MAX_DRAFTS) return 2;
  td_status st = open_all(&d, argv[1], &err);
  if (st == TD_OK) st = run(&d, n_drafts, out, &err);
  if (fclose(out) != 0 && st == TD_OK) st = td_fail(&err, TD_EIO, "cannot write");
  if (st != TD_OK) fprintf(stderr, "%s\n", err.msg);
  td_engine_close(d.engine);
  td_dev_close(d.dev);
  td_model_close(d.model);
  return st == TD_OK ? 0 : 1;
}
