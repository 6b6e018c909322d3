// src/cli/cache.c - `tandem list` and `tandem rm`: the models in the hub's cache.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json_write.h"
#include "base/log.h"
#include "base/units.h"
#include "cli/cli.h"
#include "cli/remote.h"
#include "hub/hub.h"
#include "runtime/command.h"

typedef struct {
  bool is_json;
  td_json_writer json;
  td_buf *table;
  int width;
} listing;

static td_status add_row(void *ctx, const td_hub_model *m) {
  listing *l = ctx;
  if (l->is_json) {
    td_jw_add(&l->json,
              "{'name': %s, 'size': %lu, 'safetensors': %i, 'quantizations': %s, 'incomplete': %i}",
              m->repo, m->n_bytes, m->has_safetensors, m->quants, m->is_partial);
    return TD_OK;
  }
  td_buf_printf(l->table, "%-*s  %10s  %s%s%s%s\n", l->width, m->repo, td_size(m->n_bytes).text,
                m->has_safetensors ? "safetensors" : "",
                m->has_safetensors && m->quants[0] ? ", " : "", m->quants,
                m->is_partial ? " (incomplete: tandem pull continues it)" : "");
  return TD_OK;
}

static td_status widen(void *ctx, const td_hub_model *m) {
  listing *l = ctx;
  const int len = (int)strlen(m->repo);
  if (len > l->width) l->width = len;
  return TD_OK;
}

int td_cli_list_cache(const td_options *o) {
  td_err err;
  td_buf text = TD_BUF_INIT;
  listing l = {.is_json = o->json, .json = TD_JSON_WRITER(&text), .table = &text, .width = 4};
  td_status st = td_hub_list(widen, &l, &err);
  if (l.is_json)
    td_jw_add(&l.json, "{'models': [");
  else
    td_buf_printf(&text, "%-*s  %10s  HOLDS\n", l.width, "NAME", "SIZE");
  if (st == TD_OK) st = td_hub_list(add_row, &l, &err);
  if (l.is_json) {
    td_jw_add(&l.json, "]}");
    td_buf_char(&text, '\n');
  }
  if (st == TD_OK) st = td_buf_status(&text, &err);
  if (st == TD_OK) fputs(td_buf_text(&text), stdout);
  td_buf_free(&text);
  return st == TD_OK ? 0 : td_cmd_fail(&err);
}

int td_cmd_rm(const td_options *o) {
  td_err err;
  char *repo = NULL, *quant = NULL;
  uint64_t n_bytes = 0;
  td_status st = TD_OK;
  if (!o->model) {
    st = td_fail(&err, TD_EINVAL,
                 "tandem rm needs the model: tandem rm ORG/NAME, or "
                 "ORG/NAME:Q4_K_M for one quantization; `tandem list` shows them");
  } else if (!td_hub_is_name(o->model)) {
    st = td_fail(&err, TD_EINVAL,
                 "%s is not ORG/NAME: tandem rm removes what tandem pull brought, and no other "
                 "folder",
                 o->model);
  }
  if (st == TD_OK) st = td_hub_split(o->model, &repo, &quant, &err);
  if (st == TD_OK) st = td_hub_remove(&n_bytes, repo, quant, &err);
  if (st == TD_OK) td_info("%s: %s freed", o->model, td_size(n_bytes).text);
  free(repo);
  free(quant);
  return st == TD_OK ? 0 : td_cmd_fail(&err);
}
